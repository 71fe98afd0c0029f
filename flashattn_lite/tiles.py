"""How plain torch walks over a problem: sequences, slots of (batch, head), row tiles, the key tiles that they visit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashattn_lite.forks import computed_once
from flashattn_lite.problem import AttentionProblem, Inputs
from flashattn_lite.scores import add_mask, visible

MOST_BIASES = 16  # tiles kept, of some 256 KB each


@dataclass(frozen=True)
class Sequences:
    """Dense sequences of one length, as views: all of a dense problem, or neighbours in a packed one."""

    problem: AttentionProblem
    inputs: Inputs
    rows: slice | None = None  # of a packed problem
    keys: slice | None = None
    batch: range = range(1)  # their places there

    @property
    def heads(self) -> tuple[int, int]:
        return self.problem.heads_kv, self.problem.group

    def of_rows(self, x: Tensor) -> Tensor:
        """[B, Hkv, G, L, D] from a tensor of q's layout, [B, Hkv, G, L] from one of lse's."""
        if self.rows is not None:
            x = self.of_tokens(x if x.dim() == 3 else x.transpose(0, 1), self.rows)
        return x.unflatten(1, self.heads)

    def of_keys(self, x: Tensor) -> Tensor:
        """[B, Hkv, S, D] from a tensor of k's layout."""
        return x if self.keys is None else self.of_tokens(x, self.keys)

    def of_tokens(self, x: Tensor, tokens: slice) -> Tensor:
        """[B, H, length, ...] of those tokens of x [tokens, H, ...]."""
        count = len(self.batch)
        return x[tokens].unflatten(0, (count, (tokens.stop - tokens.start) // count)).transpose(1, 2)

    def of_mask(self, mask: Tensor) -> Tensor:
        """[B, Hkv, G, L, S], each 1 where the mask is broadcast."""
        mask = mask[(None,) * (4 - mask.dim())]
        return mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, self.heads)

    @computed_once
    def q(self) -> Tensor:
        return self.of_rows(self.inputs.q)

    @computed_once
    def k(self) -> Tensor:
        return self.of_keys(self.inputs.k)

    @computed_once
    def v(self) -> Tensor:
        return self.of_keys(self.inputs.v)

    @computed_once
    def mask(self) -> Tensor | None:
        return None if self.inputs.mask is None else self.of_mask(self.inputs.mask)

    @computed_once
    def sinks(self) -> Tensor | None:
        """[B, Hkv, G, L]."""
        if self.inputs.sinks is None:
            return None
        return self.inputs.sinks.unflatten(0, self.heads)[None, ..., None].expand(self.q.shape[:-1])

    @computed_once
    def lens(self) -> Tensor | None:
        """[B]: the keys of each sequence, where they are not S."""
        lens = self.inputs.kv_lens
        if lens is None:
            return None
        most = min(self.k.shape[2], torch.iinfo(lens.dtype).max)
        return (lens if self.rows is None else lens[self.batch.start : self.batch.stop]).clamp(0, most)

    @computed_once
    def biases(self) -> dict[tuple[int, int, int], Tensor]:
        """What `RowTile.bias` made by positions alone: tiles of all heads, and others as far apart, have the same."""
        return {}

    def room(self, shape: TileShape) -> Tensor:
        """For the scores of any one tile, flat: memory that each of them asked for anew would come page by page."""
        slots = max(2, min(shape.slots, self.q.shape[0] * self.problem.heads_kv))
        scores = slots * self.problem.group * shape.rows * min(shape.keys, self.k.shape[2])
        return self.inputs.q.new_empty(scores, dtype=torch.promote_types(self.problem.dtype, torch.float32))

    def row_tiles(self, shape: TileShape) -> Iterator[list[RowTile]]:
        """The row tiles of one chunk of slots after the other."""
        batch, heads, _, len_q, _ = self.q.shape
        ranges = [slice(lo, min(lo + shape.rows, len_q)) for lo in range(0, len_q, shape.rows)]
        for b, h in slots(batch, heads, shape.slots):
            yield [RowTile(self, b, h, m, shape.keys) for m in ranges]


def sequences(problem: AttentionProblem, inputs: Inputs) -> Iterator[Sequences]:
    """All of a dense problem at once; of a packed one, whose offsets are read on the host, neighbours of one length.

    On a GPU these would choose each other's bits (`tiled.py`), so there each sequence goes alone.
    """
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        yield Sequences(problem, inputs)
        return
    cu_q, cu_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    alone = problem.device.type != "cpu"
    lengths = lambda b: (cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b], alone and b)
    for _, group in itertools.groupby(range(problem.batch), lengths):
        first, *others = group
        batch = range(first, first + 1 + len(others))
        of = lambda cu, x, batch=batch: tokens_within(cu[batch.start], cu[batch.stop], x.shape[0])
        rows, keys = of(cu_q, inputs.q), of(cu_k, inputs.k)
        if rows.stop > rows.start:
            yield Sequences(problem, inputs, rows, keys, batch)


def tokens_within(start: int, end: int, total: int) -> slice:
    """A packed sequence's tokens, clamped into the tensor: on a GPU nobody has looked at the table."""
    start = min(max(start, 0), total)
    return slice(start, min(max(end, start), total))


@dataclass(frozen=True)
class TileShape:
    """A tile of scores: [slots, group * rows, keys]. `slots` never touches a result, only the time."""

    rows: int
    keys: int
    slots: int


def fit(problem: AttentionProblem, len_q: int, len_k: int, *, scores: int, rows: int, keys: int) -> TileShape:
    """About rows * keys scores a slot, rows counted over the heads that share keys; as many slots as fill `scores`.

    Short queries take wider key tiles. So rows and keys are functions of len_q too, but never of the batch or of len_k.
    Two slots at least: on the CPU products take one twice (`products.two_slots`).
    """
    group = max(1, problem.group)
    rows_per_head = max(1, min(len_q, rows // group))
    packed = rows_per_head * group
    whole = rows * keys
    while 2 * packed * keys <= whole and keys < 4096:
        keys *= 2
    return TileShape(rows_per_head, keys, max(2, scores // (packed * max(1, min(keys, len_k)))))


def slots(batch: int, heads: int, most: int) -> Iterator[tuple[slice, slice]]:
    """(batch, head) ranges of at most `most` slots: whole sequences where all heads fit, else heads of one sequence."""
    for b in pieces(batch, max(1, most // heads)):
        for h in pieces(heads, most):
            yield b, h


def pieces(length: int, most: int) -> Iterator[slice]:
    """0 to length in the fewest pieces of at most `most`, as equal as they can be."""
    step = -(-length // -(-length // most))
    for lo in range(0, length, step):
        yield slice(lo, min(lo + step, length))


@dataclass(frozen=True)
class RowTile:
    """Query rows `m` of all slots (b, h): G * rows packed rows a slot, since G query heads share its keys."""

    of: Sequences
    b: slice
    h: slice
    m: slice
    BLOCK_N: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads_kv, group, rows)."""
        return (self.b.stop - self.b.start, self.h.stop - self.h.start, self.of.q.shape[2], self.m.stop - self.m.start)

    def rows(self, x: Tensor) -> Tensor:
        """This tile's part of a tensor [B, Hkv, G, L, ...], a view."""
        return x[self.b, self.h, :, self.m]

    def packed(self, x: Tensor) -> Tensor:
        """[slots, G * rows, ...] from [B, Hkv, G, L, ...]."""
        return self.rows(x).reshape(-1, self.shape[2] * self.shape[3], *x.shape[4:])

    def keys(self, x: Tensor, n: slice) -> Tensor:
        """[slots, keys, D] from [B, Hkv, S, D]; a view where strides allow."""
        return x[self.b, self.h, n].flatten(0, 1)

    def grouped(self, s: Tensor) -> Tensor:
        """[batch, heads_kv, G, rows, keys]: scores by head and row."""
        return s.view(-1, *self.shape[1:], s.shape[-1])

    def mask(self, mask: Tensor, n: slice) -> Tensor:
        """This tile's part of a mask [B, Hkv, G, L, S], 1 where it is broadcast."""
        parts = (self.b, self.h, slice(None), self.m, n)
        return mask[tuple(part if size > 1 else slice(None) for part, size in zip(parts, mask.shape, strict=True))]

    @computed_once
    def bounds(self) -> tuple[int, int, int, int]:
        """(least len_k, most len_k, least end, most end) of these sequences, as far as the host may know them."""
        problem, len_q, len_k = self.of.problem, self.of.q.shape[3], self.of.k.shape[2]
        lens = (len_k, len_k)
        if self.of.lens is not None:
            on_host = self.of.lens.device.type == "cpu"
            known = self.of.lens[self.b].tolist() if on_host else [0, len_k]
            lens = (min(known), max(known))
        ends = (lens[0] - len_q, lens[1] - len_q) if problem.features.end_aligned else (0, 0)
        return lens + ends

    def visited(self) -> Iterator[tuple[slice, bool]]:
        """The key tiles that some row sees, and whether all rows see all of it. The twin of `device/bounds.py`."""
        problem, (least, most, end_least, end_most) = self.of.problem, self.bounds
        lo, full_lo, hi, full_hi = 0, 0, most, least
        if problem.features.left:
            lo = max(0, self.m.start + problem.diag_lo + end_least) // self.BLOCK_N * self.BLOCK_N
            full_lo = self.m.stop - 1 + problem.diag_lo + end_most
        if problem.features.right:
            hi = min(hi, self.m.stop + problem.diag_hi + end_most)
            full_hi = min(full_hi, self.m.start + problem.diag_hi + end_least + 1)
        for n in range(lo, hi, self.BLOCK_N):
            tile = slice(n, min(n + self.BLOCK_N, self.of.k.shape[2]))
            yield tile, problem.features.mask == "" and full_lo <= tile.start and tile.stop <= full_hi

    def seen(self, n: slice) -> Tensor | None:
        """Bool, broadcastable to `grouped` scores: which pairs are visible by position, length and bool mask."""
        problem, device = self.of.problem, self.of.q.device
        features, lens = problem.features, self.of.lens
        offs_n = torch.arange(n.start, n.stop, device=device)
        parts = []
        if features.left or features.right:
            end: Tensor | int = 0
            if features.end_aligned:
                end = self.of.k.shape[2] - self.of.q.shape[3]
                if lens is not None:
                    end = (lens[self.b] - self.of.q.shape[3]).view(-1, 1, 1, 1)
            offs_m = torch.arange(self.m.start, self.m.stop, device=device) + end
            lo = problem.diag_lo if features.left else None
            parts.append(visible(offs_m, offs_n, lo, problem.diag_hi if features.right else None))
        if lens is not None:
            parts.append(offs_n < lens[self.b].view(-1, 1, 1, 1, 1))
        if self.of.mask is not None and features.mask == "bool":
            parts.append(self.mask(self.of.mask, n))
        return functools.reduce(torch.Tensor.logical_and, parts) if parts else None

    def hide_(self, s: Tensor, n: slice, finite: bool = False) -> Tensor:
        """Scores [slots, G * rows, keys] plus the float mask, -inf where invisible; in place.

        `finite`: invisible scores are believed to be, and hide ten times faster (NaN stays NaN, which the caller sees).
        """
        grouped = self.grouped(s)
        if self.of.problem.features.mask == "float":
            assert self.of.mask is not None
            grouped.copy_(add_mask(grouped, self.mask(self.of.mask, n)))
        if finite and (bias := self.bias(n, s.dtype)) is not None:
            grouped += bias
        elif not finite and (seen := self.seen(n)) is not None:
            grouped.masked_fill_(~seen, -torch.inf)
        return s

    def bias(self, n: slice, dtype: torch.dtype) -> Tensor | None:
        """`seen` as what is added to scores: 0 where a pair is visible, else -inf."""
        by_position = self.of.lens is None and self.of.problem.features.mask != "bool"
        place = self.m.start - n.start, self.m.stop - self.m.start, n.stop - n.start
        if by_position and place in self.of.biases:
            return self.of.biases[place]
        if (seen := self.seen(n)) is None:
            return None
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        if by_position:
            if len(self.of.biases) == MOST_BIASES:  # of steps that share no factor hardly one comes again
                self.of.biases.clear()
            self.of.biases[place] = bias
        return bias
