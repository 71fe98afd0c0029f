"""Starting the decoding kernels: when they fit, their arguments, the two launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from flashattn_lite.kernels import attention_launch
from flashattn_lite.kernels.decode import DecodeTile, merge_kernel, partial_kernel
from flashattn_lite.kernels.interpreter import numpy_errors_off
from flashattn_lite.kernels.operands import contiguous, vectorised
from flashattn_lite.kernels.tuning import DecodeConfig, decode_tile, padded
from flashattn_lite.problem import AttentionProblem, Inputs
from flashattn_lite.state import LOG2E
from flashattn_lite.target import Target

Plan = tuple[Any, tuple[int], tuple[Any, ...], dict[str, Any]]  # (kernel, grid, args, kwargs) of one launch


def why_not(problem: AttentionProblem, target: Target) -> list[str]:
    """Reasons why the decoding kernels can't take this problem here; empty if they can. As for attention's."""
    return attention_launch.why_not(problem, target)


def tile_of(problem: AttentionProblem, inputs: Inputs, target: Target, config: DecodeConfig, page: int) -> DecodeTile:
    precise = problem.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    aligned = vectorised(inputs.k) and vectorised(inputs.v)
    features = problem.features
    return DecodeTile(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SPLIT=config.split,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=padded(problem.head_dim),
        BLOCK_DV=padded(problem.head_dim_v),
        GROUP=problem.group,
        PAGE=page,
        ALIGN=16 // problem.dtype.itemsize if aligned else 1,
        PRECISION="ieee" if precise else "tf32",
        UNEQUAL=problem.len_q > 1 and (features.left or features.right),
        LANES=config.lanes,
        COLUMNS=min(config.columns, padded(problem.head_dim_v)),
        PDL=target.kind == "cuda" and isinstance(target.arch, int) and target.arch >= 90 and not target.interpreting,
    )


def config_of(problem: AttentionProblem, inputs: Inputs, target: Target, paged: bool) -> DecodeConfig:
    """The tile that a launch takes."""
    return decode_tile(problem, target, vectorised(inputs.k) and vectorised(inputs.v), paged)


def plan(
    problem: AttentionProblem,
    inputs: Inputs,
    table: Tensor | None,
    out: Tensor,
    lse: Tensor,
    target: Target,
    config: DecodeConfig | None = None,
) -> tuple[Plan, Plan]:
    """The launch that computes the states of all splits, and the one that merges them; the second writes out and lse.

    problem.len_k is the capacity of a sequence; inputs.k and inputs.v are pages where there is a table.
    """
    config = config or config_of(problem, inputs, target, table is not None)
    q, k, v = inputs.q, inputs.k, inputs.v
    tile = tile_of(problem, inputs, target, config, 0 if table is None else k.shape[2])
    num_m = triton.cdiv(problem.group * problem.len_q, tile.BLOCK_M)
    heads = problem.batch * problem.heads_kv
    splits = most_splits(problem, tile)
    rows = heads * splits * problem.group * problem.len_q
    states = (q.new_empty(rows, dtype=torch.float32), q.new_empty(rows, dtype=torch.float32),
              q.new_empty(rows, problem.head_dim_v, dtype=torch.float32))  # fmt: skip
    kv_lens = contiguous(inputs.kv_lens)
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()  # a number a page, as small as lengths and sinks
    lengths = (problem.heads_kv, problem.len_q, problem.len_k, problem.diag_lo, problem.diag_hi)
    partial_args = (
        *(q, k, v, table, kv_lens, *states),
        *(x.stride() for x in (q, k, v)),
        *(0 if table is None else table.stride(0), k.shape[0], num_m, splits, *lengths),
        *(problem.scale * LOG2E, problem.softcap, problem.features, tile),
    )
    merge_args = (
        *(out, lse, contiguous(inputs.sinks), kv_lens, *states),
        *(out.stride(), *lse.stride()[:2], splits, *lengths, problem.features, tile),
    )
    partial = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False}
    if config.registers and target.kind == "cuda":
        partial["maxnreg"] = config.registers
    merge = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
    if tile.PDL:
        merge["launch_pdl"] = True
    merges = heads * problem.group * problem.len_q * triton.cdiv(problem.head_dim_v, tile.COLUMNS)
    return (partial_kernel, (num_m * splits * heads,), partial_args, partial), (
        merge_kernel,
        (merges,),
        merge_args,
        merge,
    )


def most_splits(problem: AttentionProblem, tile: DecodeTile) -> int:
    """Splits of a sequence that fills its cache; none has more."""
    seen = problem.len_k
    if problem.features.left and problem.features.right:
        seen = min(seen, problem.len_q + problem.diag_hi - problem.diag_lo)
    # Keys count in tiles, and the first may begin before the first key that is seen.
    return min(tile.LANES, triton.cdiv(triton.cdiv(seen, tile.BLOCK_N) + 1, tile.SPLIT // tile.BLOCK_N))


def launch(
    problem: AttentionProblem, inputs: Inputs, table: Tensor | None, out: Tensor, lse: Tensor, target: Target
) -> None:
    """Fills out and lse. Device: that of the inputs."""
    if target.interpreting and problem.dtype == torch.bfloat16:
        # Triton's interpreter multiplies the bits of bfloat16 operands of tl.dot as integers (3.6 to 3.9).
        wide = inputs._replace(q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())
        out_wide = torch.empty_like(out, dtype=torch.float32)
        launch(replace(problem, dtype=torch.float32), wide, table, out_wide, lse, target)
        out.copy_(out_wide)
        return
    for kernel, grid, args, kwargs in plan(problem, inputs, table, out, lse, target):
        if grid[0] == 0:
            continue
        if target.interpreting:
            with numpy_errors_off():
                kernel[grid](*args, **kwargs)
        else:
            with torch.cuda.device(problem.device):
                kernel[grid](*args, **kwargs)
