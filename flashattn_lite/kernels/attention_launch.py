"""Starting the portable attention kernel: when it fits, its arguments, the launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashattn_lite.kernels.attention import ScoreArgs, Tile, attention_kernel
from flashattn_lite.kernels.interpreter import numpy_errors_off
from flashattn_lite.kernels.tuning import TileConfig, attention_tile, padded, unaligned_tile
from flashattn_lite.problem import AttentionProblem, Inputs
from flashattn_lite.state import LOG2E
from flashattn_lite.target import Target


def tile_of(problem: AttentionProblem, target: Target, config: TileConfig, tma: bool) -> Tile:
    # float32 means float32 unless the user let torch's own matrix products use TF32.
    precise = problem.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return Tile(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=padded(problem.head_dim),
        BLOCK_DV=padded(problem.head_dim_v),
        GROUP=problem.group,
        PRECISION="ieee" if precise else "tf32",
        TMA=tma,
        RELOAD=isinstance(target.arch, int) and 100 <= target.arch < 120,
    )


def why_not(problem: AttentionProblem, target: Target) -> list[str]:
    """Reasons why the portable kernel can't take this problem here; empty if it can."""
    reasons = []
    if target.triton:
        reasons.append(target.triton)
    elif target.kind not in ("cuda", "hip") and not target.interpreting:
        reasons.append(
            f"Triton has no compiler for {target.kind} tensors here (TRITON_INTERPRET=1 runs its interpreter)"
        )
    if problem.dtype == torch.float64:
        reasons.append("float64 is computed by the tiled path only")
    return reasons


def plan(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    target: Target,
    config: TileConfig | None = None,
) -> tuple[Any, tuple[int], tuple[Any, ...], dict[str, Any]]:
    """(kernel, grid, args, kwargs) of one launch. out and lse are written, every element of them."""
    config = config or config_of(problem, inputs, target)
    q, k, v = inputs.q, inputs.k, inputs.v
    rows_q, rows_k = problem.len_q, problem.len_k
    packed = problem.features.varlen
    tma = has_tma(target) and takes_tma(k) and takes_tma(v)
    tile = tile_of(problem, target, config, tma)
    num_m = triton.cdiv(problem.len_q, tile.BLOCK_M)
    if packed:  # [rows, H, D] read as one batch of [H, rows, D]
        rows_q, rows_k = q.shape[0], k.shape[0]
    mask = inputs.mask
    if mask is not None:
        mask = mask.expand(problem.batch, problem.heads_q, problem.len_q, problem.len_k)
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    score_args = ScoreArgs(
        scale_log2=problem.scale * LOG2E,
        softcap=problem.softcap,
        mask_ptr=mask,
        mask_strides=None if mask is None else mask.stride(),
        # A few numbers each: the one kind of input that is copied when it is not contiguous.
        sinks_ptr=contiguous(inputs.sinks),
        kv_lens_ptr=contiguous(inputs.kv_lens),
        cu_seqlens_q_ptr=contiguous(inputs.cu_seqlens_q),
        cu_seqlens_k_ptr=contiguous(inputs.cu_seqlens_k),
    )
    args = (
        q,
        descriptor(k, [tile.BLOCK_N, tile.BLOCK_D], packed) if tma else k,
        descriptor(v, [tile.BLOCK_N, tile.BLOCK_DV], packed) if tma else v,
        *(out, lse),
        *(strides(x, packed) for x in (q, k, v, out)),
        *((0, lse.stride(0)) if packed else lse.stride()[:2]),  # its rows are contiguous
        *(num_m, rows_q, rows_k, problem.diag_lo, problem.diag_hi, problem.heads_q),
        *(score_args, problem.features, tile),
    )
    # Fusing s * scale - m behind our back would make p of the largest score differ from 1: see device/state.py.
    kwargs = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False}
    return attention_kernel, (num_m * problem.batch * problem.heads_q,), args, kwargs


def config_of(problem: AttentionProblem, inputs: Inputs, target: Target) -> TileConfig:
    """The tile that a launch takes.

    K and V whose rows can't be copied 16 bytes at a time are not pipelined. Their tiles then stay at one place in
    shared memory, the wgmma descriptors become loop-invariant, and ptxas 12.8 (Triton 3.6) was seen to lose such
    descriptors: an access outside of shared memory. They take a tile that is too small for wgmma.
    """
    whole = vectorised(inputs.k) and vectorised(inputs.v)
    piped = whole or (has_tma(target) and takes_tma(inputs.k) and takes_tma(inputs.v))
    return attention_tile(problem, target) if piped else unaligned_tile(problem, target)


def vectorised(x: Tensor) -> bool:
    """Every row starts at a multiple of 16 bytes and is a whole number of them."""
    steps = (stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1)
    whole = all(size * x.element_size() % 16 == 0 for size in (*steps, x.shape[-1]))
    return whole and x.stride(-1) == 1 and x.data_ptr() % 16 == 0


def has_tma(target: Target) -> bool:
    return target.kind == "cuda" and isinstance(target.arch, int) and target.arch >= 90 and not target.interpreting


def takes_tma(x: Tensor) -> bool:
    """The tensor copy engine takes rows of contiguous elements at 16-byte addresses, and no empty tensor."""
    outer = (stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1)
    aligned = all(0 < stride * x.element_size() < 2**40 and stride * x.element_size() % 16 == 0 for stride in outer)
    return aligned and x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and x.numel() > 0


def descriptor(x: Tensor, block: list[int], packed: bool) -> TensorDescriptor:
    """[batch, head, row, dim] tiles of one head, whatever the order in memory; reads 0 outside."""
    sizes = [1, x.shape[1], x.shape[0], x.shape[2]] if packed else list(x.shape)
    whole = 16 // x.element_size()  # any legal stride will do where there is one entry
    steps = [s if size > 1 else whole for size, s in zip(sizes[:-1], strides(x, packed)[:-1], strict=True)]
    return TensorDescriptor(x, sizes, [*steps, 1], [1, 1, *block])


def contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.contiguous()


def strides(x: Tensor, packed: bool) -> tuple[int, ...]:
    """(batch, head, row, dim) strides; packed tensors are [row, head, dim] and have one batch."""
    return (0, x.stride(1), x.stride(0), x.stride(2)) if packed else x.stride()


def launch(problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, target: Target) -> None:
    """Fills out and lse. Device: that of the inputs."""
    if target.interpreting and problem.dtype == torch.bfloat16:
        # Triton's interpreter multiplies the bits of bfloat16 operands of tl.dot as integers (3.6 to 3.9).
        wide = inputs._replace(q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())
        out_wide = torch.empty_like(out, dtype=torch.float32)
        launch(replace(problem, dtype=torch.float32), wide, out_wide, lse, target)
        out.copy_(out_wide)
        return
    kernel, grid, args, kwargs = plan(problem, inputs, out, lse, target)
    if grid[0] == 0:
        return
    if target.interpreting:
        with numpy_errors_off():
            kernel[grid](*args, **kwargs)
        return
    with torch.cuda.device(problem.device):
        kernel[grid](*args, **kwargs)
