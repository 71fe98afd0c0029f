"""Softmax and its statistics drawn by chance, at sizes from a row of one program to one of the whole GPU; their laws.

A problem is a tensor and a dimension; the function under test gives (y, m, l).
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import flashattn_lite as fa
from benchmarks.bits import assert_same
from benchmarks.problems_drawn import DTYPES
from flashattn_lite.testing.softmax import assert_softmax, assert_stats
from flashattn_lite.testing.tensors import LAYOUTS, lay_out, move

COLUMNS = (1, 7, 64, 100, 512, 1000, 1537, 4096, 5120, 8193, 20_000, 32_768, 50_257, 131_072, 131_073, 2**18 + 1, 2**20)
ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 18}
NUMBERS = ("normal", "normal", "large", "one large", "ascending", "rows of -inf", "one NaN", "one inf", "equal")


@dataclass(frozen=True)
class SoftmaxCase:
    """A tensor, and the dimension that sums to 1."""

    x: Tensor
    dim: int
    seed: int
    note: str

    def replace(self, **changes: Any) -> SoftmaxCase:
        return replace(self, **changes)

    def __repr__(self) -> str:
        x = f"{tuple(self.x.shape)} {self.x.dtype} strides {self.x.stride()}"
        return f"SoftmaxCase({x}, dim={self.dim}, seed={self.seed}, {self.note} numbers)"


Softmax = functools.partial[Any]  # of `both`


def both(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return fa.online_softmax(x, dim), *fa.softmax_stats(x, dim)


def softmax(draw: random.Random, device: torch.device) -> tuple[Softmax, SoftmaxCase]:
    seed, dtype, kind = draw.randrange(1 << 30), draw.choice(DTYPES), draw.choice(NUMBERS)
    generator, most = torch.Generator().manual_seed(seed), ELEMENTS[device.type]
    cols = draw.choice([n for n in COLUMNS if n <= most])
    rows = draw.randint(1, max(1, min(4096, most // cols)))
    shape = draw.choice(((rows, cols), (rows, cols), (cols, rows), (1 + rows // 7, cols, draw.choice((1, 3, 8)))))
    dim = shape.index(cols)
    x = torch.randn(shape, generator=generator)
    at = torch.randint(0, cols, (), generator=generator)
    line = torch.linspace(-50, 50, cols).view(-1, *[1] * (len(shape) - 1 - dim))
    if kind == "large":
        x *= 300
    elif kind == "ascending":
        x += line
    elif kind == "equal":
        x = x.narrow(dim, 0, 1).expand(shape).clone()
    elif kind == "rows of -inf":
        x.narrow(0 if dim else 1, 0, 1).fill_(-math.inf)
    elif kind != "normal":
        of_one_row = x.movedim(dim, -1)[(0,) * (len(shape) - 1)]
        of_one_row[at] = {"one large": 1e4, "one NaN": math.nan, "one inf": math.inf}[kind]
    case = SoftmaxCase(lay_out(x.to(dtype), draw.choice(LAYOUTS)), dim, seed, kind)
    return functools.partial(both), move(case, device)


def is_softmax(attention: Any, case: SoftmaxCase) -> None:
    """The definition's, and so are the statistics."""
    y, m, l_i = attention(case.x, case.dim)
    assert_softmax(y, case.x, case.dim)
    assert_stats(m, l_i, case.x, case.dim)


def repeats_have_the_same_bits(attention: Any, case: SoftmaxCase) -> None:
    """Twice the same call, twice the same bits."""
    assert_same(attention(case.x, case.dim), attention(case.x, case.dim), "again")


def other_rows_are_irrelevant(attention: Any, case: SoftmaxCase) -> None:
    """NaN in all other rows, in memory that lies alike, leaves a row's bits alone."""
    x, dim = case.x, case.dim
    at = tuple(random.Random(case.seed).randrange(size) for size in x.movedim(dim, -1).shape[:-1])
    memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage().clone())
    alone = memory.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(math.nan)
    alone.movedim(dim, -1)[at] = x.movedim(dim, -1)[at]

    def row(y: Tensor, m: Tensor, l_i: Tensor) -> tuple[Tensor, ...]:
        return y.movedim(dim, -1)[at], m[at], l_i[at]

    assert_same(row(*attention(alone, dim)), row(*attention(x, dim)), f"row {at} among rows of NaN")
