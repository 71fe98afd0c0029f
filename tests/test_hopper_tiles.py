"""Which tile numbers of packed sequences hold rows: the producer's own source, run on Python's integers."""

from __future__ import annotations

import random
from types import SimpleNamespace as Record

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

from flashattn_lite.kernels import hopper_tasks
from flashattn_lite.kernels.hopper_tasks import ROWS, past_empty, place


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_all_tiles_before_past_empty_are_empty(seed, right, monkeypatch):
    """And behind each empty one there is room to go on: no tile that holds rows is passed over."""
    monkeypatch.setattr(hopper_tasks.gl, "minimum", min)
    rng = random.Random(seed)
    warpgroups, pack, heads = rng.choice([1, 2, 3]), rng.choice([1, 4]), rng.randint(1, 5)
    positions = ROWS.value * warpgroups // pack
    lengths = [rng.choice([0, 1, positions - 1, positions, positions + 1, 5 * positions]) for _ in range(9)]
    num_m = -(-max(lengths) // positions)
    all_heads = heads * len(lengths)
    sizes = Record(num_m=num_m, heads=heads, all_heads=all_heads, section=heads)  # as `section` has it for packed
    F, T = Record(right=right), Record(WARPGROUPS=warpgroups, PACK=pack)

    def beyond(tile):
        """The sequence of a tile that lies past its end, else None."""
        b, _, block_m = place.fn(tile, sizes, F)
        return b if block_m * positions >= lengths[b] else None

    empty = {tile: b for tile in range(num_m * all_heads) if (b := beyond(tile)) is not None}
    assert num_m * all_heads - len(empty) == heads * sum(-(-length // positions) for length in lengths)
    for tile, b in empty.items():
        behind = past_empty.fn(Record(b=b, len_q=lengths[b]), sizes, F, T)
        behind = getattr(behind, "value", behind)
        assert behind > tile
        assert all(between in empty for between in range(tile, min(behind, num_m * all_heads)))
