"""Which rows a tile number means, which hold none, what fits on chip: by the source itself, on Python's integers."""

from __future__ import annotations

import random
from types import SimpleNamespace as Record

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from benchmarks.offline import attention_problem
from flashattn_lite import target as targets
from flashattn_lite.kernels import attention_hopper_launch, hopper_config, hopper_rows, hopper_tasks, tuning_hopper
from flashattn_lite.kernels.attention_hopper_launch import sections
from flashattn_lite.kernels.device import bounds
from flashattn_lite.kernels.hopper_tasks import ROWS, past_empty, place
from flashattn_lite.kernels.tuning_dealt import one_consumer
from flashattn_lite.kernels.tuning_hopper import LAST_TILES
from tests.targets import H200


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_all_tiles_before_past_empty_are_empty(seed, right, on_integers, monkeypatch):
    """And behind each empty one there is room to go on: no tile that holds rows is passed over."""
    rng = random.Random(seed)
    warpgroups, pack, heads = rng.choice([1, 2, 3]), rng.choice([1, 4]), rng.randint(1, 5)
    positions = ROWS.value * warpgroups // pack
    lengths = [rng.choice([0, 1, positions - 1, positions, positions + 1, 5 * positions]) for _ in range(9)]
    num_m = -(-max(lengths) // positions)
    all_heads = heads * len(lengths)
    packed = Record(features=Record(varlen=True), batch=len(lengths))
    section, early = sections(packed, heads, num_m, H200)
    sizes = Record(num_m=num_m, heads=heads, all_heads=all_heads, section=section, early=early)
    F, T = Record(right=right, varlen=True), Record(WARPGROUPS=warpgroups, PACK=pack)

    def span_of(tile, *_):
        b, _, block_m = place.fn(tile, sizes, F)
        return Record(first=block_m * positions, len_q=lengths[b]), 0

    monkeypatch.setattr(hopper_tasks, "span_of", span_of)
    spans = [span_of(tile)[0] for tile in range(num_m * all_heads)]
    empty = {tile for tile, span in enumerate(spans) if span.first >= span.len_q}
    assert num_m * all_heads - len(empty) == heads * sum(-(-length // positions) for length in lengths)
    assert_nothing_is_passed_over(empty, num_m * all_heads, sizes, F, T)


def assert_nothing_is_passed_over(empty, count, sizes, F, T):
    for tile in range(count):
        behind = past_empty.fn(tile, sizes, None, F, T)
        behind = getattr(behind, "value", behind)
        assert (behind > tile) == (tile in empty)
        assert all(between in empty for between in range(tile, min(behind, count)))


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_no_part_of_a_short_sequence_is_passed_over(seed, right, on_integers, monkeypatch):
    """Sections of several heads, of which the one ahead of the last may have fewer; parts or chains of them."""
    rng = random.Random(seed)
    group, heads_kv, row_tiles, chain = rng.randint(1, 8), rng.randint(1, 3), rng.randint(1, 3), rng.choice([1, 4])
    parts = [rng.randint(0, 9) for _ in range(20)]
    num_m, heads = -(-9 // chain) * row_tiles, group * heads_kv
    problem = Record(features=Record(varlen=False, right=right), batch=len(parts), heads_kv=heads_kv)
    section, early = sections(problem, heads, num_m, H200)
    sizes = Record(num_m=num_m, heads=heads, all_heads=len(parts) * heads, section=section, early=early,
                   row_tiles=row_tiles)  # fmt: skip
    F, T = Record(right=right, varlen=False), Record(OWNED=chain)

    def span_of(tile, *_):
        b, _, block_m = place.fn(tile, sizes, F)
        part = block_m // row_tiles * chain
        return Record(past=min(parts[b], part + chain)), part

    monkeypatch.setattr(hopper_tasks, "span_of", span_of)
    count = num_m * sizes.all_heads
    empty = {tile for tile, (span, part) in enumerate(map(span_of, range(count))) if part >= span.past}
    assert count - len(empty) == heads * row_tiles * sum(-(-n // chain) for n in parts)
    assert_nothing_is_passed_over(empty, count, sizes, F, T)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "num_m"), [(8, 16, 1, 16), (1, 6, 3, 200), (3, 5, 1, 7), (70, 8, 4, 4)]
)
def test_every_row_tile_once_head_by_head(batch, heads, group, num_m, right, monkeypatch):
    """Heads of one K/V head together; the last causal ones all together, so that short rows end the launch."""
    monkeypatch.setattr(hopper_tasks.gl, "minimum", min)
    problem = Record(features=Record(varlen=False, right=right), batch=batch, heads_kv=heads // group)
    section, early = sections(problem, heads, num_m, H200)
    sizes = Record(num_m=num_m, heads=heads, all_heads=batch * heads, section=section, early=early)
    places = [place.fn(tile, sizes, Record(right=right, varlen=False)) for tile in range(batch * heads * num_m)]
    assert len(set(places)) == len(places)
    assert all(0 <= b < batch and 0 <= head < heads and 0 <= block_m < num_m for b, head, block_m in places)
    if not right:
        groups = [(b * heads + head) // group for b, head, _ in places]
        assert groups == sorted(groups)
        return
    last = places[early * num_m :]
    assert len(last) == min(len(places), max(1, LAST_TILES * 132 // num_m) * num_m)
    rows = [block_m for _, _, block_m in last]
    assert rows == sorted(rows, reverse=True)


@pytest.fixture
def on_integers(monkeypatch):
    """The kernel's functions on scalars, as Python's."""
    integers = Record(minimum=min, maximum=max, where=lambda condition, a, b: a if condition else b)
    for module in (bounds, hopper_tasks, hopper_rows):
        monkeypatch.setattr(module, "tl" if module is bounds else "gl", integers)
        for name in ("tile_start", "key_start", "tiles_past", "past_last"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(getattr(module, name), "fn", getattr(module, name)))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_a_consumer_takes_with_care_what_it_must(seed, right, at_once, on_integers):
    """All tiles once; none of those passed over is seen; those behind the careful ones are seen whole.

    Among the careful ones is a tile that sets the reference; block 0 too, where the first tile alone may not.
    """
    rng = random.Random(seed)
    warpgroups, block_n, pack = rng.choice([1, 2, 3]), rng.choice([64, 128]), rng.choice([1, 4])
    positions = ROWS.value // pack
    len_q, len_k = rng.randint(1, 900), rng.choice([0, 1, 64, 65, 512, 900, rng.randint(1, 2000)])
    diag_hi = rng.choice([0, len_k - len_q, rng.randint(-500, 500)]) if right else 0
    F = Record(left=False, right=right, mask="")
    T = Record(BLOCK_N=block_n, SETTLES_AT_ONCE=at_once)
    for first in range(0, len_q, positions * warpgroups):
        last = min(first + positions * warpgroups, len_q)
        count, edges, *rest = bounds.visited_tiles.fn(first, last, len_k, 0, diag_hi, block_n, F)
        names = ("before", "lo", "full_lo", "full_hi")
        task = Record(count=max(count, 1), edges=max(edges, 1), first=first, len_q=len_q, len_k=len_k, diag_hi=diag_hi,
                      **dict(zip(names, rest, strict=True)))  # fmt: skip
        starts = [hopper_tasks.key_start(i, task, F, T) for i in range(task.count)]
        assert sorted(starts) == [i * block_n for i in range(task.count)]
        for own in range(first, last, positions):
            seen = [max(min(row + diag_hi + 1, len_k), 0) if right else len_k
                    for row in range(own, min(own + positions, len_q))]  # fmt: skip
            rows = Record(first=own, last=own + positions - 1)
            skip = hopper_rows.past_keys.fn(rows, task, F, T)
            settled = hopper_rows.settled_after.fn(own, task, F, T)
            masked = [start for start in starts if start + block_n > min(seen)]
            assert skip < task.count
            assert all(start >= max(seen) for start in starts[:skip])
            assert all(start + block_n <= min(seen) for start in starts[max(settled, skip + 1) :])
            if at_once:
                assert settled <= max(skip, len(masked) - 1) + 1
            else:
                assert min(seen) == 0 or 0 in starts[skip : max(settled, skip + 1)]
                assert settled <= max(len(masked), 1) + 1


@pytest.mark.skipif(targets.interpreting(), reason="the same without TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    "dims",
    [
        (16, 16),
        (64, 64),
        (72, 72),
        (96, 96),
        (256, 64),
        (128, 128),
        (64, 192),
        (192, 128),
        (192, 192),
        (192, 256),
        (256, 256),
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [1, 3, 8, 100])
@pytest.mark.parametrize("rows", [1, 40, 5000])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("copied", [False, True])
def test_every_problem_has_a_tile_that_fits(dims, group, rows, causal, copied, monkeypatch):
    """`copied`: by the Triton at hand or another."""
    monkeypatch.setattr(tuning_hopper, "OPERANDS_COPIED", copied)
    monkeypatch.setattr(hopper_config, "V_IN_PIECES", not copied)
    _, problem = attention_problem(
        *dims, torch.bfloat16, rows, group, False, False, False, "", (None, None), {"causal": causal}
    )
    configs = [tuning_hopper.hopper_tile(problem, mask_bytes) for mask_bytes in (None, 0, 1, 2, 4)]
    dealt = [one_consumer(problem, config) for config in configs if config.warpgroups > 1 and not config.split]
    for config, mask_bytes in zip(configs + dealt, [None, 0, 1, 2, 4] + [4] * len(dealt), strict=True):
        tile = attention_hopper_launch.tile_of(problem, None, config)
        columns = tile.PIECES * tile.BLOCK_D
        stage = 2 * (columns + tile.V_PIECES * tile.BLOCK_DV) + tile.BLOCK_M * (mask_bytes or 0) * tile.MASK_COPIED
        shared = 2 * (64 * tile.Q_SLOTS * columns + tile.BLOCK_M * tile.O_SLOTS * tile.O_WIDTH)
        shared += tile.STAGES * tile.BLOCK_N * stage
        others, system = 3072, 1024  # the list, messages and barriers
        assert shared + others + system <= (228 << 10) // config.blocks
        assert tile.PACK == 1 or (tile.GROUP <= tile.PACK <= 64 and not tile.MASK_COPIED)
        assert mask_bytes or not tile.MASK_COPIED
        # A copy of O may still be under way in all other buffers: the next must be the one that has waited longest.
        assert tile.LEAVES % tile.O_SLOTS == 0
        assert tile.STAGES * tile.BLOCK_N >= tile.BLOCK_M  # rows done again leave through the room of V
