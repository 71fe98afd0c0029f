"""Which words of a mask tensor the Hopper kernel loads: its own functions on PyTorch, apart from the whole."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace as Record

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from flashattn_lite import target as targets
from flashattn_lite.kernels.attention_hopper_launch import config_of, tile_of
from flashattn_lite.kernels.hopper_shape import HopperTile
from flashattn_lite.kernels.operands import expanded_mask, mask_align, mask_strides
from flashattn_lite.kernels.tuning_hopper import hopper_tile
from flashattn_lite.problem import AttentionProblem, Inputs, describe
from tests.gluon_on_torch.hopper import unchanged
from tests.gluon_on_torch.pointers import Pointer
from tests.gluon_on_torch.values import FUNCTIONS, value
from tests.targets import H200

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="the same without TRITON_INTERPRET=1")
CASES = 300
DTYPES = (torch.bool, torch.bfloat16, torch.float32)


def some_mask(rng: random.Random, full: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Broadcastable to `full`: random entries, some dimensions 1 or absent, in one of several layouts."""
    shape = [size if rng.random() < 0.6 else 1 for size in full]
    shape = shape[rng.choice([0, 0, 1, 2]) :]
    layout = rng.choice(["contiguous", "contiguous", "transposed", "sliced", "apart", "expanded"])
    if layout == "sliced":  # of a larger tensor, which begins and ends elsewhere
        wide = torch.rand(*shape[:-1], shape[-1] + 4)
        x = wide[..., 2:-2] if rng.random() < 0.5 else wide[..., 1:-3]
    elif layout == "apart":
        x = torch.rand(*shape[:-1], 2 * shape[-1])[..., ::2]
    elif layout == "transposed":
        x = torch.rand(*shape[:-2], shape[-1], shape[-2]).mT
    else:
        x = torch.rand(shape)
    x = (x > 0.5) if dtype == torch.bool else x.to(dtype)
    return x.expand(full) if layout == "expanded" else x


def some_case(seed: int) -> tuple[random.Random, AttentionProblem, torch.Tensor, HopperTile]:
    """(what draws the rest, a problem with a mask, the mask, the kernel's tile)."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads_kv, group = rng.randint(1, 2), rng.randint(1, 2), rng.choice([1, 1, 3, 4])
    len_q, len_k = rng.choice([1, 5, 64, 130]), rng.choice([1, 63, 64, 66, 100, 129, 200])
    dim, heads = rng.choice([64, 128]), heads_kv * group
    mask = some_mask(rng, (batch, heads, len_q, len_k), rng.choice(DTYPES))
    q = torch.empty(batch, heads, len_q, dim, dtype=torch.bfloat16)
    k = torch.empty(batch, heads_kv, len_k, dim, dtype=torch.bfloat16)
    problem = describe(Inputs(q, k, k, mask), causal=False, q_start=None, window_left=None, window_right=None,
                       scale=1.0, softcap=None)  # fmt: skip
    tile = tile_of(problem, mask, hopper_tile(problem))
    return rng, problem, mask, tile


@pytest.mark.parametrize("seed", range(CASES))
def test_every_row_gets_its_own_words(seed):
    """What a tile holds is what the mask has there; wide loads are aligned; nothing outside of the mask is read."""
    scores, tasks = (unchanged().load(f"flashattn_lite.kernels.{name}") for name in ("hopper_scores", "hopper_tasks"))
    rng, problem, mask, T = some_case(seed)
    whole = expanded_mask(problem, mask)
    args = Record(mask_ptr=Pointer.to_tensor(whole), mask_strides=tuple(map(value, mask_strides(whole))))
    b, head = rng.randrange(problem.batch), rng.randrange(problem.heads_kv if T.PACK > 1 else problem.heads_q)
    len_k = rng.choice([problem.len_k, rng.randint(0, problem.len_k)])  # as kv_lens would have it
    count = max(1, -(-len_k // T.BLOCK_N))  # of tiles, all of them edges
    numbers = dict(b=b, head=head, len_q=problem.len_q, len_k=len_k, count=count, edges=count, before=count, lo=0)
    for first in range(0, problem.len_q, T.BLOCK_M // T.PACK):
        numbers |= dict(first=first, start_q=0, start_k=0, full_lo=0, full_hi=0)
        task = Record(**{name: value(number) for name, number in numbers.items()})
        for w in range(T.WARPGROUPS):
            pos, heads, exists = tasks.rows_of(FUNCTIONS["arange"](0, 64), task, w, T)
            rows = Record(pos=pos, head=heads, exists=exists)
            for i in range(count):
                tile = scores.mask_tile(0, i, (), rows, task, args, w, problem.features, T).x.expand(64, T.BLOCK_N)
                start = tasks.key_start(i, task, problem.features, T).number
                keys = torch.arange(start, min(start + T.BLOCK_N, len_k))
                there = exists.x.expand(64)
                wanted = whole[b, heads.x.expand(64)[there]][torch.arange(int(there.sum())), pos.x[there]][:, keys]
                assert torch.equal(tile[there, : len(keys)].to(wanted.dtype), wanted)


def test_masks_of_every_kind_are_among_them():
    """Loads of one, two and four keys, a row for all queries and one for each, heads packed or not."""
    tiles = [some_case(seed)[-1] for seed in range(CASES)]
    assert len({(T.MASK_ROWS, T.MASK_ALIGN, T.PACK > 1) for T in tiles}) == 12


def rows_fit(mask: torch.Tensor, keys: int) -> bool:
    """Whether loads of so many keys cover each row of an expanded mask, at multiples of their size."""
    steps = zip(mask.shape[:-1], mask.stride(), strict=False)
    # One row more where there is but one, so that an entry alone is read as the whole is.
    starts = (sum(at) for at in itertools.product(*([i * step for i in range(max(size, 2))] for size, step in steps)))
    bytes_of = lambda count: count * mask.element_size()
    aligned = all((mask.data_ptr() + bytes_of(at)) % bytes_of(keys) == 0 for at in starts)
    return aligned and mask.shape[-1] % keys == 0 and (mask.stride(-1) == 1 or keys == 1)


@pytest.mark.parametrize("most", [4, 16])
def test_one_load_takes_as_many_keys_as_fit(most):
    """The portable kernels' up to 16 bytes, which hints to the compiler promise."""
    seen = set()
    for seed in range(CASES):
        _, problem, mask, _ = some_case(seed)
        keys, whole = mask_align(problem, mask, most), expanded_mask(problem, mask)
        limit = min(most, 16 // whole.element_size())
        assert rows_fit(whole, keys) and (keys == limit or not rows_fit(whole, 2 * keys))
        seen.add(keys)
    assert seen == {n for n in (1, 2, 4, 8, 16) if n <= most}


def test_masks_are_copied_where_the_copy_engine_takes_them():
    """Rows that differ, at 16-byte addresses, key by key; and where their tiles leave K and V two stages."""

    def copied(mask: torch.Tensor, dim: int = 64, group: int = 1, len_q: int = 128) -> bool:
        q, k = torch.empty(2, 4, len_q, dim, dtype=torch.bfloat16), torch.empty(2, 4 // group, 256, dim).bfloat16()
        inputs = Inputs(q, k, k, mask)
        problem = describe(inputs, causal=False, q_start=None, window_left=None, window_right=None, scale=1.0,
                           softcap=None)  # fmt: skip
        return config_of(problem, inputs, H200).mask_copied

    whole = torch.zeros(2, 4, 128, 264, dtype=torch.bfloat16)[..., :256]
    assert copied(whole) and copied(whole[:1, :1]) and copied(whole[0, 0]) and copied(whole, dim=128)
    assert copied(whole.expand(2, 4, 128, 256)) and copied(whole[:, :1].expand(2, 4, 128, 256))
    assert copied(torch.zeros(128, 256, dtype=torch.bool)) and copied(whole[0, 0].float(), dim=128)
    assert not copied(whole[:, :, :1])  # one row for all
    assert not copied(torch.zeros(128, 257, dtype=torch.bfloat16)[:, :256])  # rows of odd addresses
    assert not copied(torch.zeros(128, 264, dtype=torch.bfloat16)[:, 1:257])
    assert not copied(torch.zeros(128, 512, dtype=torch.bfloat16)[:, ::2])
    assert not copied(whole.double())
    assert not copied(whole, dim=256) and copied(torch.zeros(128, 256, dtype=torch.bool), dim=256)  # of which has room
    assert not copied(whole[:, :, :16], group=4, len_q=16)  # heads in one tile
