"""Attention problems drawn by chance at the sizes of models: dense, packed, and decoding over a cache.

Each comes with the attention that it is for, and its backend. The same draws make the same problem. Tensors lie in
any way, or are expanded; half of the problems hold numbers that break a careless softmax, some NaN or infinities in
keys that no row sees.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashattn_lite as fa
from flashattn_lite.testing import Case, PackedCase
from flashattn_lite.testing.tensors import (
    LAYOUTS,
    NUMBERS,
    lay_out,
    make_mask,
    make_numbers,
    make_packed_numbers,
    move,
    poison_unseen,
    scales_for,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 128, 128, 16, 40, 72, 80, 96, 160, 192, 256)
QUERIES = (1, 2, 4, 16, 33, 64, 128, 200, 257, 513, 1030, 2049)
KEYS = (64, 100, 257, 1024, 1500, 2048, 4097, 8192, 9001, 20011, 70001)
TOKENS = (1, 1, 2, 4, 16)  # of decoding
GROWING = "growing along the keys"  # past any reference that the first keys set, by little or by much
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


def options_of(draw: random.Random, of: Form, lens: Sequence[int], numbers: str) -> dict[str, Any]:
    """Those of attention over sequences of so many keys, but for a mask and q_start."""
    options: dict[str, Any] = {}
    if draw.random() < 0.5:
        options["causal"] = True
    if draw.random() < 0.2:
        options["window"] = (draw.choice((None, 100, 700)), draw.choice((None, 0, 50)))
    if draw.random() < 0.2:
        options["softcap"] = 20.0
    if draw.random() < 0.1:
        options["scale"] = draw.choice(scales_for(numbers, (0.3, -0.5, 0.0)))
    if draw.random() < 0.3:
        options["kv_lens"] = torch.tensor([draw.randrange(n + 1) for n in lens], dtype=torch.int32)
    if draw.random() < 0.2:
        options["sinks"] = draw.choice((1, 20)) * torch.randn(of.heads_kv * of.group, generator=of.generator)
    return options


def tensors(
    draw: random.Random, of: Form, shape_q: tuple[int, ...], shape_k: tuple[int, ...]
) -> tuple[str, Tensor, Tensor, Tensor]:
    """What numbers they are, and q, k, v on the CPU; shapes are those before the head dim, of three dense ones."""
    kind = draw.choice((*["normal"] * len(NUMBERS), *NUMBERS, GROWING, GROWING))
    sizes = ((shape_q, of.dim), (shape_k, of.dim), (shape_k, of.dim_v))
    q, k, v = (torch.randn(*shape, columns, generator=of.generator) for shape, columns in sizes)
    if kind == GROWING:
        keys = 2 if k.dim() == 4 else 0
        k *= torch.linspace(0, draw.choice((4, 40)), k.shape[keys]).view(-1, *[1] * (k.dim() - 1 - keys))
    else:
        make = make_numbers if k.dim() == 4 else make_packed_numbers
        q, k, v = make(kind, q, k, v, of.dtype, of.generator)
    return kind, q.to(of.dtype), k.to(of.dtype), v.to(of.dtype)


def placed(draw: random.Random, device: torch.device, case: Any) -> Any:
    """The case on a device, its tensors lying there in some way, those of stride 0 as they are."""
    lying = {}
    for name in ("q", "k", "v", "mask"):
        x = getattr(case, name, None)
        if x is not None and 0 not in x.stride():
            lying[name] = lay_out(x, draw.choice(LAYOUTS))
    return move(case.replace(**lying), device)


def asked(draw: random.Random, device: torch.device, attention: Callable[..., Any], **options: Any) -> Attention:
    """The public function with these options, on a GPU by a backend of chance."""
    backend = draw.choice(("auto", "auto", "triton")) if device.type == "cuda" else "auto"
    return functools.partial(attention, backend=backend, **options)


def dense(draw: random.Random, device: torch.device) -> Problem:
    of, batch = form(draw), draw.choice((1, 2, 3))
    heads = of.heads_kv * of.group
    [(len_q, len_k)] = lengths(draw, device, batch * heads, QUERIES, KEYS, 1)
    numbers, q, k, v = tensors(draw, of, (batch, heads, len_q), (batch, of.heads_kv, len_k))
    options = options_of(draw, of, batch * [len_k], numbers)
    if draw.random() < 0.2:
        options["q_start"] = draw.choice((0, len_k // 2, len_k, 7 - len_q))
    if draw.random() < 0.35:
        plan = {
            "kind": draw.choice(("bool", "float", "float32")),
            "full": [draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.7, draw.random() < 0.9],
            "drop": draw.random() < 0.5,
            "seen": draw.choice((0.1, 0.7, 0.98, 1.0)),
            "far": draw.random() < 0.3,
        }
        options["mask"] = make_mask(plan, (batch, heads, len_q, len_k), of.dtype, of.generator)
    case = Case(q, k, v, **options, seed=of.seed, note=f"{numbers} numbers")
    if draw.random() < 0.15:
        over = draw.choice((0, 1))
        case = case.map_kv(lambda x: x.narrow(over, 0, 1).expand_as(x))
    elif draw.random() < 0.3:
        case = poison_unseen(case, draw.choice((math.nan, math.inf)))
    return asked(draw, device, fa.attention), placed(draw, device, case)


def decoding(draw: random.Random, device: torch.device) -> Problem:
    """A cache, and how much of it each sequence has filled."""
    of, batch = form(draw), draw.choice((1, 2, 3, 9))
    heads = of.heads_kv * of.group
    [(len_q, room)] = lengths(draw, device, batch * heads, TOKENS, KEYS, 1)
    numbers, q, k, v = tensors(draw, of, (batch, heads, len_q), (batch, of.heads_kv, room))
    lens = [draw.choice((room, room // 3, draw.randrange(room + 1))) for _ in range(batch)]
    options = options_of(draw, of, lens, numbers) | {"kv_lens": torch.tensor(lens, dtype=torch.int32)}
    case = Case(q, k, v, **options, seed=of.seed, note=f"{numbers} numbers")
    if draw.random() < 0.3:
        case = poison_unseen(case, draw.choice((math.nan, math.inf)))
    return asked(draw, device, fa.attention_decode), placed(draw, device, case)


def packed(draw: random.Random, device: torch.device) -> Problem:
    """Some have rows that no sequence covers, which a CPU refuses; of most, the call promises the lengths."""
    of, batch = form(draw), draw.choice((1, 2, 3, 9))
    # Servers pack sequences of one token, of some, and of all.
    queries = draw.choice(((0, 1, 1), tuple(n for n in (0, *QUERIES) if n <= 16), (0, *QUERIES)))
    drawn = lengths(draw, device, of.heads_kv * of.group, queries, (0, *KEYS), batch)
    rows, keys = zip(*drawn, strict=True)
    covered_by_none = draw.choice((0, 0, 3)) if device.type == "cuda" else 0
    shape_q = (sum(rows) + covered_by_none, of.heads_kv * of.group)
    numbers, q, k, v = tensors(draw, of, shape_q, (sum(keys), of.heads_kv))
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (rows, keys))
    options = options_of(draw, of, keys, numbers)
    promised = {"max_seqlen_q": max(rows) + draw.choice((0, 3)), "max_seqlen_k": max(keys) + draw.choice((0, 77))}
    promised = {name: most for name, most in promised.items() if draw.random() < 0.7}
    case = PackedCase(q, k, v, cu_q, cu_k, **options, seed=of.seed, note=f"{numbers} numbers, {promised}")
    return asked(draw, device, fa.attention_varlen, **promised), placed(draw, device, case)
