"""Starting the portable attention kernel: when it fits, its arguments, the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashattn_lite.kernels import uncovered
from flashattn_lite.kernels.attention import Tile, attention_kernel
from flashattn_lite.kernels.compiling import Launch
from flashattn_lite.kernels.descriptors import Descriptors
from flashattn_lite.kernels.interpreter import fill
from flashattn_lite.kernels.operands import (
    lse_strides,
    mask_align,
    score_args,
    sizes,
    strides,
    takes_tma,
    tma_strides,
    varies,
    vectorised,
)
from flashattn_lite.kernels.series import Series
from flashattn_lite.kernels.start import Plan, Starter, on, options_of
from flashattn_lite.kernels.tuning import TileConfig, attention_tile, cdiv, columns, products, unaligned_tile
from flashattn_lite.kernels.uncovered import Uncovered
from flashattn_lite.problem import AttentionProblem, Inputs, too_long
from flashattn_lite.target import Target


def shape_of(problem: AttentionProblem, mask: Tensor | None, target: Target, config: TileConfig) -> dict[str, Any]:
    """What the tiles of all portable attention kernels have, forward and backward."""
    block_d, block_dv = columns(problem, target, config.block_m)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "GROUP": problem.group,
        "PRODUCTS": products(problem, target),
        "MASK_ROWS": varies(problem, mask, 2),
        "MASK_ALIGN": mask_align(problem, mask),
    }


def tile_of(problem: AttentionProblem, inputs: Inputs, target: Target, config: TileConfig, tma: bool) -> Tile:
    return Tile(
        **shape_of(problem, inputs.mask, target, config),
        TMA=tma,
        RELOAD=isinstance(target.arch, int) and 100 <= target.arch < 120,
    )


def why_not(problem: AttentionProblem, target: Target) -> list[str]:
    """Reasons why the portable kernel can't take this problem here; empty if it can."""
    reasons = []
    if target.kind not in ("cuda", "hip") and not target.interpreting:
        reasons.append(
            f"Triton has no compiler for {target.kind} tensors here (TRITON_INTERPRET=1 runs its interpreter)"
        )
    if problem.dtype == torch.float64:
        reasons.append("float64 is computed by the tiled path only")
    return reasons + too_long(problem)


class Call:
    """A problem ready to run: `call(inputs, out, lse)` fills out and lse, for all tensors of the same metadata."""

    def __init__(
        self, problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, target: Target, config: TileConfig
    ) -> None:
        self.problem = problem
        q, k, v = inputs.q, inputs.k, inputs.v
        packed = problem.features.varlen
        # What is not pipelined gains nothing by it.
        tma = config.num_stages > 1 and has_tma(target) and takes_tma(k) and takes_tma(v)
        self.tile = tile = tile_of(problem, inputs, target, config, tma)
        num_m = cdiv(problem.len_q, tile.BLOCK_M)
        # Packed, [rows, H, D] is read as one batch of [H, rows, D].
        rows_q, rows_k = (q.shape[0], k.shape[0]) if packed else (problem.len_q, problem.len_k)
        descriptors = None
        if tma:
            of_k = descriptor(k, [tile.BLOCK_N, tile.BLOCK_D], packed)
            descriptors = Descriptors(of_k, descriptor(v, [tile.BLOCK_N, tile.BLOCK_DV], packed), first=1)
        self.numbers = (
            *(strides(x, packed) for x in (q, k, v, out)),
            *lse_strides(lse, packed),
            *(num_m, rows_q, rows_k, problem.diag_lo, problem.diag_hi, problem.heads_q),
        )
        blocks = num_m * problem.batch * problem.heads_q
        self.start = Starter(attention_kernel, blocks, options_of(config), descriptors)
        self.uncovered = Uncovered(problem, inputs, target, follows=blocks > 0) if packed else None
        self.series = Series(self.launches)

    def arguments(self, inputs: Inputs, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
        scores = score_args(self.problem, inputs)
        return (*inputs[:3], out, lse, *self.numbers, scores, self.problem.features, self.tile)

    def __call__(self, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
        on(out.device, self.series, *inputs, out, lse)

    def launches(self, *given: Any) -> list[Launch]:
        """Of inputs, out and lse."""
        *tensors, out, lse = given
        inputs = Inputs(*tensors)
        behind = [(self.uncovered.start, self.uncovered.arguments(inputs, out, lse))] if self.uncovered else []
        return [(self.start, self.arguments(inputs, out, lse)), *behind]


def plan(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    target: Target,
    config: TileConfig | None = None,
) -> Plan:
    """One launch, to look at or to compile."""
    call = Call(problem, inputs, out, lse, target, config or config_of(problem, inputs, target))
    return call.start.plan(call.arguments(inputs, out, lse))


def plans(problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, target: Target) -> Iterator[Plan]:
    """All launches, in their order."""
    yield plan(problem, inputs, out, lse, target)
    if problem.features.varlen:
        yield uncovered.plan(problem, inputs, out, lse, target)


def prepare(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, target: Target
) -> Callable[[Inputs, Tensor, Tensor], None]:
    """What fills out and lse for inputs of this metadata. On a GPU in few microseconds from its second run on."""
    if target.interpreting:
        return lambda inputs, out, lse: fill(functools.partial(plans, lse=lse, target=target), problem, inputs, out)
    return Call(problem, inputs, out, lse, target, config_of(problem, inputs, target))


def config_of(problem: AttentionProblem, inputs: Inputs, target: Target) -> TileConfig:
    """The tile that a launch takes.

    K and V whose rows can't be copied 16 bytes at a time are not pipelined. Their tiles then stay at one place in
    shared memory, the wgmma descriptors become loop-invariant, and ptxas 12.8 (Triton 3.6) was seen to lose such
    descriptors: an access outside of shared memory. They take a tile that is too small for wgmma.
    """
    whole = vectorised(inputs.k) and vectorised(inputs.v)
    piped = whole or (has_tma(target) and takes_tma(inputs.k) and takes_tma(inputs.v))
    mask_bytes = inputs.mask.element_size() if inputs.mask is not None and varies(problem, inputs.mask, 2) else 0
    return (attention_tile if piped else unaligned_tile)(problem, target, mask_bytes)


def has_tma(target: Target) -> bool:
    """Whether there is a tensor copy engine."""
    return target.is_cuda(90)


def descriptor(x: Tensor, block: list[int], packed: bool) -> TensorDescriptor:
    """[batch, head, row, dim] tiles of one head, whatever the order in memory; reads 0 outside."""
    shape = sizes(x, packed)
    steps = tma_strides(shape, strides(x, packed), x.element_size())
    return TensorDescriptor(x, shape, steps, [1, 1, *block])
