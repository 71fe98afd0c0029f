"""Attention problems drawn by chance at the sizes of models: dense, packed, and decoding over a cache.

Each comes with the attention that it is for, and its backend. The same draws make the same problem. Tensors lie in
any way, or are expanded.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashattn_lite as fa
from flashattn_lite.testing import Case, PackedCase
from flashattn_lite.testing.tensors import LAYOUTS, lay_out

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 128, 128, 16, 40, 72, 80, 96, 160, 192, 256)
QUERIES = (1, 2, 4, 16, 33, 64, 128, 200, 257, 513, 1030, 2049)
KEYS = (64, 100, 257, 1024, 1500, 2048, 4097, 8192, 9001, 20011, 70001)
TOKENS = (1, 1, 2, 4, 16)  # of decoding
Attention = functools.partial[Any]
Problem = tuple[Attention, Any]  # with its Case or PackedCase
SCORES = {"cuda": 1 << 24, "cpu": 1 << 20}  # of a problem at most: the definition holds all of them, in float64


class Form(NamedTuple):
    """What all tensors of a problem share, and where their numbers come from."""

    dtype: torch.dtype
    heads_kv: int
    group: int
    dim: int
    dim_v: int
    seed: int
    generator: torch.Generator


def form(draw: random.Random) -> Form:
    seed, dtype, dim = draw.randrange(1 << 30), draw.choice(DTYPES), draw.choice(HEAD_DIMS)
    dim_v = draw.choice((dim, dim, 64, 128))
    heads_kv, group = draw.choice((1, 2)), draw.choice((1, 2, 4))
    return Form(dtype, heads_kv, group, dim, dim_v, seed, torch.Generator().manual_seed(seed))


def lengths(draw: random.Random, device: torch.device, heads: int, queries: Sequence[int], keys: Sequence[int],
            count: int) -> list[tuple[int, int]]:  # fmt: skip
    """(rows, keys) of so many sequences that hold no more scores than the definition may."""
    while True:
        drawn = [(draw.choice(queries), draw.choice(keys)) for _ in range(count)]
        if heads * sum(rows * columns for rows, columns in drawn) <= SCORES[device.type]:
            return drawn


def options_of(draw: random.Random, device: torch.device, of: Form, lens: Sequence[int]) -> dict[str, Any]:
    """Those of attention over sequences of so many keys, but for a mask."""
    options: dict[str, Any] = {}
    if draw.random() < 0.5:
        options["causal"] = True
    if draw.random() < 0.2:
        options["window"] = (draw.choice((None, 100, 700)), draw.choice((None, 0, 50)))
    if draw.random() < 0.2:
        options["softcap"] = 20.0
    if draw.random() < 0.3:
        options["kv_lens"] = torch.tensor([draw.randrange(n + 1) for n in lens], dtype=torch.int32, device=device)
    if draw.random() < 0.2:
        options["sinks"] = torch.randn(of.heads_kv * of.group, generator=of.generator).to(device)
    return options


def tensors(draw: random.Random, device: torch.device, of: Form, shape_q: tuple[int, ...],
            shape_k: tuple[int, ...]) -> tuple[int, Tensor, Tensor, Tensor]:  # fmt: skip
    """The factor of the scores beside those of normal numbers, and q, k, v; shapes are those before the head dim."""
    factor = draw.choice((1, 1, 8))

    def some(shape: tuple[int, ...], columns: int, scale: int = 1) -> Tensor:
        numbers = scale * torch.randn(*shape, columns, generator=of.generator)
        return lay_out(numbers.to(device, of.dtype), draw.choice(LAYOUTS))

    return factor, some(shape_q, of.dim, factor), some(shape_k, of.dim), some(shape_k, of.dim_v)


def asked(draw: random.Random, device: torch.device, attention: Callable[..., Any], **options: Any) -> Attention:
    """The public function with these options, on a GPU by a backend of chance."""
    backend = draw.choice(("auto", "auto", "triton")) if device.type == "cuda" else "auto"
    return functools.partial(attention, backend=backend, **options)


def dense(draw: random.Random, device: torch.device) -> Problem:
    of, batch = form(draw), draw.choice((1, 2, 3))
    heads = of.heads_kv * of.group
    [(len_q, len_k)] = lengths(draw, device, batch * heads, QUERIES, KEYS, 1)
    factor, q, k, v = tensors(draw, device, of, (batch, heads, len_q), (batch, of.heads_kv, len_k))
    if draw.random() < 0.15:
        over = draw.choice((0, 1))
        k, v = (x.narrow(over, 0, 1).expand_as(x) for x in (k, v))
    options = options_of(draw, device, of, batch * [len_k])
    if draw.random() < 0.35:
        shape = draw.choice((1, batch)), draw.choice((1, heads)), draw.choice((1, len_q)), len_k
        mask = torch.randn(shape, generator=of.generator)
        mask = mask > -1 if draw.random() < 0.5 else mask.to(draw.choice((of.dtype, torch.float32)))
        options["mask"] = lay_out(mask.to(device), draw.choice(LAYOUTS))
    case = Case(q, k, v, **options, seed=of.seed, note=f"scores times {factor}")
    return asked(draw, device, fa.attention), case


def decoding(draw: random.Random, device: torch.device) -> Problem:
    """A cache, and how much of it each sequence has filled."""
    of, batch = form(draw), draw.choice((1, 2, 3, 9))
    heads = of.heads_kv * of.group
    [(len_q, room)] = lengths(draw, device, batch * heads, TOKENS, KEYS, 1)
    factor, q, k, v = tensors(draw, device, of, (batch, heads, len_q), (batch, of.heads_kv, room))
    lens = [draw.choice((room, room // 3, draw.randrange(room + 1))) for _ in range(batch)]
    options = options_of(draw, device, of, lens) | {"kv_lens": torch.tensor(lens, dtype=torch.int32, device=device)}
    case = Case(q, k, v, **options, seed=of.seed, note=f"scores times {factor}")
    return asked(draw, device, fa.attention_decode), case


def packed(draw: random.Random, device: torch.device) -> Problem:
    """Some have rows that no sequence covers, which a CPU refuses; of most, the call promises the lengths."""
    of, batch = form(draw), draw.choice((1, 2, 3, 9))
    # Servers pack sequences of one token, of some, and of all.
    queries = draw.choice(((0, 1, 1), tuple(n for n in (0, *QUERIES) if n <= 16), (0, *QUERIES)))
    drawn = lengths(draw, device, of.heads_kv * of.group, queries, (0, *KEYS), batch)
    rows, keys = zip(*drawn, strict=True)
    covered_by_none = draw.choice((0, 0, 3)) if device.type == "cuda" else 0
    shape_q = (sum(rows) + covered_by_none, of.heads_kv * of.group)
    factor, q, k, v = tensors(draw, device, of, shape_q, (sum(keys), of.heads_kv))
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=device) for x in (rows, keys))
    options = options_of(draw, device, of, keys)
    promised = {"max_seqlen_q": max(rows) + draw.choice((0, 3)), "max_seqlen_k": max(keys) + draw.choice((0, 77))}
    promised = {name: most for name, most in promised.items() if draw.random() < 0.7}
    case = PackedCase(q, k, v, cu_q, cu_k, **options, seed=of.seed, note=f"scores times {factor}, {promised}")
    return asked(draw, device, fa.attention_varlen, **promised), case
