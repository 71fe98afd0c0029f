"""Starting the portable attention backward: when it fits, its arguments, the launches."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.kernels import attention_launch
from flashattn_lite.kernels.attention_launch import descriptor, has_tma, shape_of, tile_of
from flashattn_lite.kernels.backward import BackwardTile, backward_kernel
from flashattn_lite.kernels.backward_mask import MaskTile, mask_kernel
from flashattn_lite.kernels.backward_rows import rows_kernel
from flashattn_lite.kernels.compiling import Launch
from flashattn_lite.kernels.descriptors import Descriptors
from flashattn_lite.kernels.interpreter import interpret, widened
from flashattn_lite.kernels.operands import ScoreArgs, score_args, strides, takes_tma, vectorised
from flashattn_lite.kernels.parts import Parts
from flashattn_lite.kernels.series import Series
from flashattn_lite.kernels.start import Starter, counters, on, options_of
from flashattn_lite.kernels.tuning import (
    BACKWARD_ROWS,
    backward_tile,
    cdiv,
    key_launches,
    mask_gradient_tile,
    products,
)
from flashattn_lite.problem import AttentionProblem, Features, Gradients, Grads, Inputs
from flashattn_lite.target import Target

try:
    from flashattn_lite.kernels import backward_hopper_launch as hopper
except Exception:  # Gluon changes between versions of Triton: without it the kernel in Triton serves
    hopper = None  # type: ignore[assignment]

AGAIN = 4  # programs a multiprocessor that make again what failed: mostly nothing

Read = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, dO
Pair = tuple[Tensor, Tensor]
Launches = Iterator[Launch]


def why_not(problem: AttentionProblem, inputs: Inputs, needs: Sequence[bool], target: Target) -> list[str]:
    """Reasons why these kernels can't make the gradients that are needed; empty if they can."""
    reasons = attention_launch.why_not(problem, target)
    if not reasons and problem.dtype == torch.float32 and not target.interpreting:
        if not target.hopper:  # on sm_80 parts spill 16 KB a thread
            reasons.append("gradients of float32 are torch's own products on this GPU")
        elif products(problem, target) != "parts":
            reasons.append("gradients of float32 in TF32 are torch's own products")
        elif max(problem.head_dim, problem.head_dim_v) > 128:
            reasons.append("gradients of float32 take head dims up to 128")
    if needs[3] and inputs.mask is not None and (1, *inputs.mask.shape)[-1] != problem.len_k:
        reasons.append("the gradient of a mask that has one number for all keys is torch's sum")
    return reasons


def prepare(
    problem: AttentionProblem, inputs: Inputs, d_out: Tensor, needs: Sequence[bool], target: Target
) -> Gradients:
    """What makes the gradients of q, k, v, mask and sinks, for tensors of this metadata; None where none is needed.

    It takes lse and d_lse contiguous.
    """
    if target.interpreting:
        return lambda *tensors: gradients_interpreted(problem, needs, target, *tensors)
    return Call(problem, inputs, d_out, needs, target)


def gradients_interpreted(
    problem: AttentionProblem,
    needs: Sequence[bool],
    target: Target,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
) -> Grads:
    """The gradients through Triton's interpreter."""
    given = inputs
    if problem.dtype == torch.bfloat16:
        problem, inputs = widened(problem, inputs)
        out, d_out = out.float(), d_out.float()
    call = Call(problem, inputs, d_out, needs, target)
    grads, rooms = call.allocate(inputs, lse)
    interpret(start.plan(args) for start, args in call.launches(inputs, out, lse, d_out, d_lse, grads, rooms))
    done = call.wanted(inputs, grads, rooms)
    dq, dk, dv, d_mask, d_sinks = (g if g is None else g.to(x.dtype) for g, x in zip(done, given, strict=False))
    return dq, dk, dv, d_mask, d_sinks


class Rows:
    """What rows_kernel leaves of each query row, float32 in the shape of lse: the parts of one tensor."""

    def __init__(self, features: Features, room: Tensor) -> None:
        references = self.references(features)
        parts = room.unbind()
        self.m, self.exact = parts[0], parts[references - 1]
        self.log_l, self.delta = parts[references : references + 2]
        self.d_sink = parts[-1] if features.sinks else self.m  # not written where nobody asks for it

    @staticmethod
    def references(features: Features) -> int:
        """How many m: that of the launch with care is the same where log2 l is apart in both."""
        return 1 if features.mask == "float" else 2

    @classmethod
    def room(cls, features: Features, lse: Tensor) -> Tensor:
        references = cls.references(features)
        room = lse.new_empty((references + (3 if features.sinks else 2), *lse.shape))
        if features.varlen:  # rows that no program comes to, past the longest sequence that was promised, add nothing
            room[:references].fill_(torch.inf)
            room[references:].zero_()
        return room


class Side:
    """The launches for the rows that programs own, queries or keys: the usual one, and the one with care.

    makes: which of the gradients of the own pair. parts: of what is read, where that is multiplied in parts. of_rows:
    (batch, head) strides of what rows_kernel leaves.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        keys: bool,
        makes: tuple[bool, bool],
        read: Read,
        parts: Sequence[Parts],
        mask: Tensor | None,
        target: Target,
        of_rows: tuple[int, int],
        lengths: tuple[int, ...],
    ) -> None:
        self.keys, self.features = keys, problem.features
        packed = self.features.varlen
        own, streamed = self.pairs(read)
        tma = bool(parts) or (has_tma(target) and all(map(takes_tma, streamed)))
        piped = tma or all(map(vectorised, streamed))
        config = backward_tile(problem, target, keys, makes, piped, 0 if mask is None else mask.element_size())
        fast = hopper and hopper.config_of(problem, keys, read, mask is not None, target)
        if fast:
            config, tma = hopper.with_care(fast), True
        self.tile = BackwardTile(
            KEYS=keys,
            MAKES_A=makes[0],
            MAKES_B=makes[1],
            SEEN=replace(self.features, left=self.features.right, right=self.features.left) if keys else self.features,
            TMA=tma,
            **shape_of(problem, mask, target, config),
        )
        heads, length = (problem.heads_kv, problem.len_k) if keys else (problem.heads_q, problem.len_q)
        num_m = cdiv(length, config.block_m)
        tiles = num_m * heads * problem.batch
        self.owned = tiles * config.block_m  # rows of all of them
        grads = (torch.empty_like(x, device="meta") for x in own)
        self.numbers = (
            *(strides(x, packed) for x in (*own, *streamed, *grads)),
            *of_rows,
            num_m,
            tiles,
            *lengths,
            heads,
        )
        widths = (self.tile.BLOCK_D, self.tile.BLOCK_DV)
        descriptors = None
        if parts:
            blocks = [[rows, width] for rows in (config.block_m, config.block_n) for width in widths]
            mine, others = self.pairs(parts)
            descriptors = Descriptors(*map(Parts.descriptor, (*mine, *others), blocks))
        elif tma:
            blocks = [[config.block_n, width] for width in widths]
            make = functools.partial(descriptor, packed=packed)
            descriptors = Descriptors(*map(make, streamed, blocks), first=2)
        few = min(tiles, AGAIN * target.multiprocessors)
        make = lambda programs: Starter(backward_kernel, programs, options_of(config), descriptors)
        self.starts = [(make(tiles), self.tile), (make(few), replace(self.tile, CAREFUL=True))]
        self.fast: hopper.HopperSide | None = None  # its usual launch by the Hopper kernel, where that takes it
        if fast and makes[0]:
            self.fast = hopper.HopperSide(problem, keys, makes[1], fast, own, streamed, of_rows, lengths, target)
        self.zeros = 2 if self.fast else 1

    def pairs(self, read: Sequence[Any]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Of q, k, v, dO the own pair and the streamed one."""
        q, k, v, d_out = read
        return ((k, v), (q, d_out)) if self.keys else ((q, d_out), (k, v))

    def launches(
        self, read: Sequence[Tensor], grads: Pair, zeros: Sequence[Any], failed: Tensor, rows: Rows, scores: ScoreArgs
    ) -> Launches:
        """With their arguments. read: or the parts of it; grads: of own rows; any tensor where it makes none.

        zeros: whether any failed, and where there is a Hopper kernel the tiles that it draws; failed: room for a word
        of each row.
        """
        own, streamed = self.pairs(read)
        written = (*grads, zeros[0], failed)
        for start, tile in self.starts:
            if self.fast and not tile.CAREFUL:
                args = self.fast.arguments(own, streamed, written, rows.m, rows.delta, zeros[1], scores)
                yield self.fast.start, args
            else:
                of_rows = (rows.exact if tile.CAREFUL else rows.m, rows.log_l, rows.delta)
                yield start, (*own, *streamed, *written, *of_rows, *self.numbers, scores, self.features, tile)


class MaskSide:
    """The launch for the gradient of a mask. parts: as `Side` has them."""

    def __init__(
        self,
        problem: AttentionProblem,
        read: Read,
        parts: Sequence[Parts],
        mask: Tensor,
        target: Target,
        of_rows: tuple[int, int],
        lengths: tuple[int, ...],
    ) -> None:
        tma = bool(parts) or (has_tma(target) and all(map(takes_tma, read)))
        config = mask_gradient_tile(problem, target, tma or all(map(vectorised, read)), mask.element_size())
        entries, heads, rows, keys = shape = (*(1,) * (4 - mask.dim()), *mask.shape)
        self.tile = MaskTile(
            SEEN=problem.features,
            TMA=tma,
            ALL_ROWS=rows == 1,
            **shape_of(problem, mask, target, config),
        )
        row_tiles = cdiv(problem.len_q, config.block_m)
        tiles = 1 if rows == 1 else row_tiles, cdiv(keys, config.block_n)
        sums = (
            whole if part == 1 else 1
            for whole, part in ((problem.batch, entries), (problem.heads_q, heads), (row_tiles, rows))
        )
        of_mask = torch.empty_like(mask, device="meta").view(shape)
        steps = (x.stride() for x in (*read, of_mask))
        self.shape, self.numbers = shape, (*steps, *of_rows, *tiles, *lengths, heads, *sums)
        descriptors = None
        if tma:
            of_qk, of_v = self.tile.BLOCK_D, self.tile.BLOCK_DV
            blocks = ([config.block_m, of_qk], [config.block_n, of_qk], [config.block_n, of_v], [config.block_m, of_v])
            make = Parts.descriptor if parts else functools.partial(descriptor, packed=False)
            descriptors = Descriptors(*map(make, parts or read, blocks))
        programs = math.prod(tiles) * heads * entries
        self.start = Starter(mask_kernel, programs, options_of(config), descriptors)

    def launches(self, read: Sequence[Tensor], d_mask: Tensor, rows: Rows, scores: ScoreArgs) -> Launches:
        """With its arguments. read: or the parts of it."""
        of_rows = (rows.m, rows.log_l, rows.delta)
        yield self.start, (*read, d_mask.view(self.shape), *of_rows, *self.numbers, scores, self.tile.SEEN, self.tile)


class Call:
    """Gradients ready to be made: `call(inputs, out, lse, d_out, d_lse)`, for all tensors of the same metadata."""

    def __init__(
        self, problem: AttentionProblem, inputs: Inputs, d_out: Tensor, needs: Sequence[bool], target: Target
    ) -> None:
        self.problem, self.needs = problem, tuple(needs)
        q, k = inputs.q, inputs.k
        rows_q, rows_k = (q.shape[0], k.shape[0]) if problem.features.varlen else (problem.len_q, problem.len_k)
        packed = problem.features.varlen
        of_rows = (0, rows_q) if packed else (problem.heads_q * problem.len_q, problem.len_q)
        lengths = (rows_q, rows_k, problem.diag_lo, problem.diag_hi)
        self.tile = tile_of(problem, inputs, target, BACKWARD_ROWS, tma=False)
        num_m = cdiv(problem.len_q, BACKWARD_ROWS.block_m)
        blocks = num_m * problem.heads_q * problem.batch
        self.numbers = (*of_rows, num_m, *lengths, problem.heads_q)
        self.start = Starter(rows_kernel, blocks, options_of(BACKWARD_ROWS))
        read = (*inputs[:3], d_out)
        self.parts: list[Parts] = []
        if products(problem, target) == "parts":
            self.parts = [Parts(x, packed) for x in read]
        asked = [(False, (True, False))] if needs[0] else []
        asked += [(True, makes) for makes in key_launches(problem, needs[1], needs[2])]
        common = (read, self.parts, inputs.mask, target, of_rows, lengths)
        self.sides = [Side(problem, keys, makes, *common) for keys, makes in asked]
        self.mask_side = None
        if needs[3] and inputs.mask is not None:
            self.mask_side = MaskSide(problem, read, self.parts, inputs.mask, target, of_rows, lengths)
        self.series = Series(self._series)

    def allocate(self, inputs: Inputs, lse: Tensor) -> tuple[list[Tensor | None], list[Any]]:
        """Gradients of q, k, v and mask to be filled, and room for what the launches say to each other.

        lse's device is the current one.
        """
        make = torch.zeros_like if self.problem.features.varlen else torch.empty_like  # rows that no sequence covers
        grads = [make(x) if need and x is not None else None for x, need in zip(inputs[:4], self.needs, strict=False)]
        failed = lse.new_empty(sum(side.owned for side in self.sides), dtype=torch.int32)
        zero = lambda: counters.next(lse.device) if lse.is_cuda else failed.new_zeros(1)
        zeros = [zero() for side in self.sides for _ in range(side.zeros)]
        rows = Rows.room(self.problem.features, lse)
        return grads, [rows, failed, *(parts.empty() for parts in self.parts), *zeros]

    def launches(
        self,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
        grads: Sequence[Tensor | None],
        rooms: Sequence[Any],
    ) -> Launches:
        """In their order, with their arguments; grads and rooms as they were allocated."""
        problem, scores = self.problem, score_args(self.problem, inputs)
        of_rows, failed, *others = rooms
        of_parts, zeros = others[: len(self.parts)], iter(others[len(self.parts) :])
        rows = Rows(problem.features, of_rows)
        q, k, v = inputs[:3]
        steps = (strides(x, problem.features.varlen) for x in (q, k, out, d_out))
        written = (rows.m, rows.exact, rows.log_l, rows.delta, rows.d_sink)
        args = (q, k, out, d_out, lse, d_lse, *written, *steps, *self.numbers)
        yield self.start, (*args, scores, problem.features, self.tile)
        dq, dk, dv = (x if grad is None else grad for x, grad in zip((q, k, v), grads, strict=False))
        read = [q, k, v, d_out]
        for i, (parts, room) in enumerate(zip(self.parts, of_parts, strict=True)):
            whole, read[i] = read[i], room
            yield parts.start, parts.arguments(whole, room)
        of_sides = failed.split([side.owned for side in self.sides])
        for side, own in zip(self.sides, of_sides, strict=True):
            taken = list(itertools.islice(zeros, side.zeros))
            yield from side.launches(read, (dk, dv) if side.keys else (dq, dq), taken, own, rows, scores)
        if self.mask_side and (d_mask := grads[3]) is not None:
            yield from self.mask_side.launches(read, d_mask, rows, scores)

    def wanted(self, inputs: Inputs, grads: Sequence[Tensor | None], rooms: Sequence[Any]) -> Grads:
        """What was asked for, with filled gradients of q, k, v and mask."""
        dq, dk, dv, d_mask = grads
        d_sinks = None
        if inputs.sinks is not None and self.needs[4]:
            d_sink = Rows(self.problem.features, rooms[0]).d_sink
            d_sinks = d_sink.sum(1 if self.problem.features.varlen else (0, 2)).to(inputs.sinks.dtype)
        return dq, dk, dv, d_mask, d_sinks

    def __call__(self, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Grads:
        return on(lse.device, self._launch, inputs, out, lse, d_out, d_lse)

    def _launch(self, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Grads:
        grads, rooms = self.allocate(inputs, lse)
        self.series(*inputs, out, lse, d_out, d_lse, *grads, *rooms)
        return self.wanted(inputs, grads, rooms)

    def _series(self, *given: Any) -> list[Launch]:
        """The launches of what they take, in a row."""
        tensors = len(Inputs._fields)
        inputs, results, rest = Inputs(*given[:tensors]), given[tensors : tensors + 4], given[tensors + 4 :]
        return list(self.launches(inputs, *results, rest[:4], rest[4:]))
