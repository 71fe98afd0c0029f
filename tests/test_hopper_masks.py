"""Which words of a mask tensor the Hopper kernel reads: its own source, run on PyTorch's integers."""

from __future__ import annotations

import random
from types import SimpleNamespace as Record

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from flashattn_lite.kernels import hopper_scores, hopper_tasks
from flashattn_lite.kernels.attention_hopper_launch import tile_of
from flashattn_lite.kernels.operands import expanded_mask
from flashattn_lite.kernels.tuning import hopper_tile
from flashattn_lite.problem import AttentionProblem, Inputs, describe

ROWS = 64  # of a consumer
CASES = 150
DTYPES = (torch.bool, torch.bfloat16, torch.float32)


class Pointer:
    """Places in a tensor's storage, counted in elements."""

    def __init__(self, words: torch.Tensor, at: torch.Tensor) -> None:
        self.words, self.at = words, at
        self.dtype = Record(element_ty=Record(primitive_bitwidth=8 * words.element_size()))

    def __add__(self, more: torch.Tensor) -> Pointer:
        return Pointer(self.words, self.at + more)

    def __getitem__(self, where: tuple) -> Pointer:
        return Pointer(self.words, self.at[where])


def multiple_of(ptrs: Pointer, values: list[int]) -> Pointer:
    ptrs.bytes = values[1]  # believed where it is said how many are contiguous
    return ptrs


def max_contiguous(ptrs: Pointer, values: list[int]) -> Pointer:
    """Both hints are what a vector of so many is made of: it must begin at a multiple, and hold neighbours."""
    runs = ptrs.at.unflatten(-1, (-1, values[1]))
    assert (runs - runs[..., :1] == torch.arange(values[1])).all()
    assert (runs[..., 0] * ptrs.words.element_size() % ptrs.bytes == 0).all()
    ptrs.run = values[1]
    return ptrs


def load(ptrs: Pointer, mask: torch.Tensor, other: int) -> torch.Tensor:
    mask = mask.expand(ptrs.at.shape)
    runs = mask.unflatten(-1, (-1, ptrs.run))
    assert (runs == runs[..., :1]).all(), "a vector is read whole or not at all"
    assert ((ptrs.at[mask] >= 0) & (ptrs.at[mask] < ptrs.words.numel())).all(), "outside of the tensor's memory"
    return torch.where(mask, ptrs.words[ptrs.at.clamp(0, ptrs.words.numel() - 1)], other)


@pytest.fixture
def on_torch(monkeypatch):
    """The kernel's functions on PyTorch's integers."""
    integers = Record(
        arange=lambda start, end, layout=None: torch.arange(start, end), SliceLayout=lambda *_: None, int64=torch.int64,
        load=load, multiple_of=multiple_of, max_contiguous=max_contiguous,
    )  # fmt: skip
    monkeypatch.setattr(hopper_scores, "gl", integers)
    monkeypatch.setattr(hopper_tasks, "ROWS", ROWS)
    # In any order; which it is has tests of its own.
    monkeypatch.setattr(hopper_scores, "key_start", lambda i, task, F, T: torch.tensor(i * T.BLOCK_N))


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


def some_case(seed: int) -> tuple[random.Random, AttentionProblem, torch.Tensor, Record]:
    """(what draws the rest, a problem with a mask, the mask, the kernel's tile)."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads_kv, group = rng.randint(1, 2), rng.randint(1, 2), rng.choice([1, 1, 3, 4])
    len_q, len_k = rng.choice([1, 5, 64, 130]), rng.choice([1, 63, 64, 100, 129, 200])
    dim, heads = rng.choice([64, 128]), heads_kv * group
    mask = some_mask(rng, (batch, heads, len_q, len_k), rng.choice(DTYPES))
    q = torch.empty(batch, heads, len_q, dim, dtype=torch.bfloat16)
    k = torch.empty(batch, heads_kv, len_k, dim, dtype=torch.bfloat16)
    problem = describe(Inputs(q, k, k, mask), causal=False, q_start=None, window_left=None, window_right=None,
                       scale=1.0, softcap=None)  # fmt: skip
    tile = tile_of(problem, mask, hopper_tile(problem))
    return rng, problem, mask, Record(**{**vars(tile), "S_LAYOUT": None})


@pytest.mark.parametrize("seed", range(CASES))
def test_every_row_gets_its_own_words(seed, on_torch):
    """What a tile holds is what the mask has there; loads of two are aligned; nothing outside of the mask is read."""
    rng, problem, mask, T = some_case(seed)
    whole = expanded_mask(problem, mask)
    words = torch.empty(0, dtype=whole.dtype).set_(whole.untyped_storage())
    args = Record(mask_ptr=Pointer(words, torch.tensor(whole.storage_offset())), mask_strides=whole.stride())
    b, head = rng.randrange(problem.batch), rng.randrange(problem.heads_kv if T.PACK > 1 else problem.heads_q)
    len_k = rng.choice([problem.len_k, rng.randint(0, problem.len_k)])  # as kv_lens would have it
    for first in range(0, problem.len_q, ROWS * T.WARPGROUPS // T.PACK):
        task = Record(b=torch.tensor(b), head=torch.tensor(head), first=first, len_q=problem.len_q, len_k=len_k)
        for w in range(T.WARPGROUPS):
            pos, heads, exists = hopper_tasks.rows_of.fn(torch.arange(ROWS), task, w, T)
            rows = Record(pos=pos, head=heads, exists=exists)
            for i in range(max(1, -(-len_k // T.BLOCK_N))):
                tile = hopper_scores.mask_tile.fn(i, rows, task, args, problem.features, T).expand(ROWS, T.BLOCK_N)
                keys = torch.arange(i * T.BLOCK_N, min((i + 1) * T.BLOCK_N, len_k))
                wanted = whole[b, heads[exists]][torch.arange(int(exists.sum())), pos[exists]][:, keys]
                assert torch.equal(tile[exists, : len(keys)].to(wanted.dtype), wanted)


def test_masks_of_every_kind_are_among_them():
    """Loads of one and of two, a row for all queries and one for each, heads packed or not."""
    tiles = [some_case(seed)[-1] for seed in range(CASES)]
    assert len({(T.MASK_ROWS, T.MASK_ALIGN, T.PACK > 1) for T in tiles}) == 8
