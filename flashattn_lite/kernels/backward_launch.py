"""Starting the portable attention backward: when it fits, its arguments, the launches."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.kernels import attention_launch
from flashattn_lite.kernels.attention_launch import descriptor, has_tma, shape_of, tile_of
from flashattn_lite.kernels.backward import BackwardTile, backward_kernel, rows_kernel
from flashattn_lite.kernels.backward_mask import MaskTile, mask_kernel
from flashattn_lite.kernels.compiling import Launch, compile_together
from flashattn_lite.kernels.descriptors import Descriptors
from flashattn_lite.kernels.interpreter import interpret, widened
from flashattn_lite.kernels.operands import ScoreArgs, score_args, strides, takes_tma, vectorised
from flashattn_lite.kernels.parts import Parts
from flashattn_lite.kernels.start import Starter, on, options_of
from flashattn_lite.kernels.tuning import (
    BACKWARD_ROWS,
    backward_tile,
    cdiv,
    key_launches,
    mask_gradient_tile,
    products,
)
from flashattn_lite.problem import AttentionProblem, Gradients, Grads, Inputs
from flashattn_lite.target import Target

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
    d_lse: Tensor,
) -> Grads:
    """The gradients through Triton's interpreter."""
    given = inputs
    if problem.dtype == torch.bfloat16:
        problem, inputs = widened(problem, inputs)
        out, d_out = out.float(), d_out.float()
    call = Call(problem, inputs, d_out, needs, target)
    grads, rows = call.allocate(inputs, lse)
    interpret(start.plan(args) for start, args in call.launches(inputs, out, lse, d_out, d_lse, grads, rows))
    done = call.wanted(inputs, grads, rows)
    dq, dk, dv, d_mask, d_sinks = (g if g is None else g.to(x.dtype) for g, x in zip(done, given, strict=False))
    return dq, dk, dv, d_mask, d_sinks


class Rows:
    """What rows_kernel leaves of each query row, float32 in the shape of lse."""

    def __init__(self, problem: AttentionProblem, lse: Tensor) -> None:
        features = problem.features
        make = lambda: torch.empty_like(lse, memory_format=torch.contiguous_format)
        self.m, self.log_l, self.delta = make(), make(), make()
        # What the launch with care takes for m: the same where log2 l is apart in both.
        self.exact = self.m if features.mask == "float" else make()
        if features.varlen:  # rows that no program comes to, past the longest sequence that was promised, add nothing
            self.m.fill_(torch.inf)
            self.exact.fill_(torch.inf)
            self.log_l.zero_()
            self.delta.zero_()
        # Where nobody asks for it, another's.
        self.d_sink = torch.zeros_like(self.m) if features.sinks else self.m  # rows that no sequence covers add nothing
        self.strides = (0, lse.shape[1]) if features.varlen else (lse.shape[1] * lse.shape[2], lse.shape[2])


class Side:
    """The launches for the rows that programs own, queries or keys: the usual one, and the one with care.

    makes: which of the gradients of the own pair. parts: of what is read, where that is multiplied in parts.
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
    ) -> None:
        self.keys, self.features = keys, problem.features
        packed = self.features.varlen
        own, streamed = self.pairs(read)
        self.steps = [strides(x, packed) for x in (*own, *streamed)]
        tma = bool(parts) or (has_tma(target) and all(map(takes_tma, streamed)))
        piped = tma or all(map(vectorised, streamed))
        config = backward_tile(problem, target, keys, makes, piped, 0 if mask is None else mask.element_size())
        self.tile = BackwardTile(
            KEYS=keys,
            MAKES_A=makes[0],
            MAKES_B=makes[1],
            SEEN=replace(self.features, left=self.features.right, right=self.features.left) if keys else self.features,
            TMA=tma,
            **shape_of(problem, mask, target, config),
        )
        heads, length = (problem.heads_kv, problem.len_k) if keys else (problem.heads_q, problem.len_q)
        self.num_m, self.heads = cdiv(length, config.block_m), heads
        self.blocks = self.num_m * heads * problem.batch
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
        start = functools.partial(Starter, backward_kernel, self.blocks, options_of(config), descriptors)
        self.starts = [(start(), replace(self.tile, CAREFUL=careful)) for careful in (False, True)]

    def pairs(self, read: Sequence[Any]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Of q, k, v, dO the own pair and the streamed one."""
        q, k, v, d_out = read
        return ((k, v), (q, d_out)) if self.keys else ((q, d_out), (k, v))

    def launches(
        self, read: Sequence[Tensor], grads: Pair, rows: Rows, lengths: tuple[int, ...], scores: ScoreArgs
    ) -> Launches:
        """With their arguments. read: or the parts of it; grads: of own rows; any tensor where it makes none."""
        own, streamed = self.pairs(read)
        failed = torch.empty(self.blocks * self.tile.BLOCK_M, dtype=torch.int32, device=own[0].device)
        steps = (*self.steps, *(strides(x, self.features.varlen) for x in grads))
        steps = (*steps, *rows.strides, self.num_m, *lengths, self.heads)
        for start, tile in self.starts:
            m = rows.exact if tile.CAREFUL else rows.m
            numbers = (failed, m, rows.log_l, rows.delta, *steps)
            yield start, (*own, *streamed, *grads, *numbers, scores, self.features, tile)


class MaskSide:
    """The launch for the gradient of a mask. parts: as `Side` has them."""

    def __init__(
        self,
        problem: AttentionProblem,
        read: Read,
        parts: Sequence[Parts],
        mask: Tensor,
        target: Target,
    ) -> None:
        self.steps = [x.stride() for x in read]
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
        self.num_m, self.num_n = 1 if rows == 1 else row_tiles, cdiv(keys, config.block_n)
        self.heads, self.shape = heads, shape
        self.sums = tuple(
            whole if part == 1 else 1
            for whole, part in ((problem.batch, entries), (problem.heads_q, heads), (row_tiles, rows))
        )
        descriptors = None
        if tma:
            of_qk, of_v = self.tile.BLOCK_D, self.tile.BLOCK_DV
            blocks = ([config.block_m, of_qk], [config.block_n, of_qk], [config.block_n, of_v], [config.block_m, of_v])
            make = Parts.descriptor if parts else functools.partial(descriptor, packed=False)
            descriptors = Descriptors(*map(make, parts or read, blocks))
        programs = self.num_m * self.num_n * heads * entries
        self.start = Starter(mask_kernel, programs, options_of(config), descriptors)

    def launches(
        self, read: Sequence[Tensor], d_mask: Tensor, rows: Rows, lengths: tuple[int, ...], scores: ScoreArgs
    ) -> Launches:
        """With its arguments. read: or the parts of it."""
        of_mask = d_mask.view(self.shape)
        steps = (*self.steps, of_mask.stride())
        args = (*read, of_mask, rows.m, rows.log_l, rows.delta, *steps, *rows.strides)
        args += (self.num_m, self.num_n, *lengths, self.heads, *self.sums, scores)
        yield self.start, (*args, self.tile.SEEN, self.tile)


class Call:
    """Gradients ready to be made: `call(inputs, out, lse, d_out, d_lse)`, for all tensors of the same metadata."""

    def __init__(
        self, problem: AttentionProblem, inputs: Inputs, d_out: Tensor, needs: Sequence[bool], target: Target
    ) -> None:
        self.problem, self.needs, self.compiled = problem, tuple(needs), False
        q, k = inputs.q, inputs.k
        rows_q, rows_k = (q.shape[0], k.shape[0]) if problem.features.varlen else (problem.len_q, problem.len_k)
        self.lengths = (rows_q, rows_k, problem.diag_lo, problem.diag_hi)
        self.tile = tile_of(problem, inputs, target, BACKWARD_ROWS, tma=False)
        self.num_m = cdiv(problem.len_q, BACKWARD_ROWS.block_m)
        blocks = self.num_m * problem.heads_q * problem.batch
        self.start = Starter(rows_kernel, blocks, options_of(BACKWARD_ROWS))
        read = (*inputs[:3], d_out)
        self.parts: list[Parts] = []
        if products(problem, target) == "parts":
            self.parts = [Parts(x, problem.features.varlen) for x in read]
        asked = [(False, (True, False))] if needs[0] else []
        asked += [(True, makes) for makes in key_launches(problem, needs[1], needs[2])]
        self.sides = [Side(problem, keys, makes, read, self.parts, inputs.mask, target) for keys, makes in asked]
        self.mask_side = None
        if needs[3] and inputs.mask is not None:
            self.mask_side = MaskSide(problem, read, self.parts, inputs.mask, target)

    def allocate(self, inputs: Inputs, lse: Tensor) -> tuple[list[Tensor | None], Rows]:
        """Gradients of q, k, v and mask to be filled, and what the launches say to each other."""
        make = torch.zeros_like if self.problem.features.varlen else torch.empty_like  # rows that no sequence covers
        grads = [make(x) if need and x is not None else None for x, need in zip(inputs[:4], self.needs, strict=False)]
        return grads, Rows(self.problem, lse)

    def launches(
        self,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
        grads: list[Tensor | None],
        rows: Rows,
    ) -> Launches:
        """In their order, with their arguments."""
        problem, scores = self.problem, score_args(self.problem, inputs)
        q, k, v = inputs[:3]
        steps = (strides(x, problem.features.varlen) for x in (q, k, out, d_out))
        of_rows = (rows.m, rows.exact, rows.log_l, rows.delta, rows.d_sink)
        args = (q, k, out, d_out, lse, d_lse, *of_rows, *steps, *rows.strides)
        yield self.start, (*args, self.num_m, *self.lengths, problem.heads_q, scores, problem.features, self.tile)
        dq, dk, dv = (x if grad is None else grad for x, grad in zip((q, k, v), grads, strict=False))
        read = [q, k, v, d_out]
        for i, parts in enumerate(self.parts):
            whole, read[i] = read[i], parts.empty()
            yield parts.start, parts.arguments(whole, read[i])
        for side in self.sides:
            yield from side.launches(read, (dk, dv) if side.keys else (dq, dq), rows, self.lengths, scores)
        if self.mask_side and (d_mask := grads[3]) is not None:
            yield from self.mask_side.launches(read, d_mask, rows, self.lengths, scores)

    def wanted(self, inputs: Inputs, grads: list[Tensor | None], rows: Rows) -> Grads:
        """What was asked for, with filled gradients of q, k, v and mask."""
        dq, dk, dv, d_mask = grads
        d_sinks = None
        if inputs.sinks is not None and self.needs[4]:
            d_sinks = rows.d_sink.sum(1 if self.problem.features.varlen else (0, 2)).to(inputs.sinks.dtype)
        return dq, dk, dv, d_mask, d_sinks

    def __call__(self, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> Grads:
        grads, rows = self.allocate(inputs, lse)
        on(lse.device, self._launch, inputs, out, lse, d_out, d_lse, grads, rows)
        return self.wanted(inputs, grads, rows)

    def _launch(self, *tensors: Any) -> None:
        if not self.compiled:
            compile_together(self.launches(*tensors))
            self.compiled = True
        for start, args in self.launches(*tensors):
            if start.grid[0]:
                start(args)
