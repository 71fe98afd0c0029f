"""Starting the Hopper attention kernel: when it fits, its arguments, the launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashattn_lite.kernels.attention_hopper import ROWS, HopperTile, attention_hopper_kernel
from flashattn_lite.kernels.operands import lse_strides, score_args, sizes, strides, takes_tma, tma_strides
from flashattn_lite.kernels.tuning import HopperConfig, hopper_tile, padded
from flashattn_lite.problem import AttentionProblem, Inputs
from flashattn_lite.target import Target

LIMITS = {torch.float16: 65504.0, torch.bfloat16: 2.0**64}  # of l_i; bfloat16's leaves acc room for a large V
DTYPES = {torch.float16: float16, torch.bfloat16: bfloat16}
REGISTERS = {2: 168, 3: 128}  # a thread at launch, by consumers: what the multiprocessor's 64 Ki registers allow
L2_BYTES = 32 << 20  # K and V of the heads that are worked on at a time; an H200 has 50 MiB of L2


def why_not(problem: AttentionProblem, inputs: Inputs) -> list[str]:
    """Reasons why this kernel can't take the problem on a Hopper GPU; empty if it can."""
    reasons = []
    if problem.dtype not in LIMITS:
        reasons.append(f"it computes float16 and bfloat16, not {str(problem.dtype).removeprefix('torch.')}")
    for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        if x.numel() == 0:
            reasons.append(f"{name} is empty: there is nothing to copy")
        elif x.shape[-1] % 8 or not takes_tma(x):
            reasons.append(
                f"the tensor copy engine needs rows of whole 16-byte pieces, at 16-byte addresses: {name} of head dim "
                f"{x.shape[-1]}, strides {tuple(x.stride())}, address % 16 = {x.data_ptr() % 16} is not"
            )
    return reasons


def tile_of(problem: AttentionProblem, config: HopperConfig) -> HopperTile:
    block_d, block_dv = max(64, padded(problem.head_dim)), max(64, padded(problem.head_dim_v))
    return HopperTile(
        WARPGROUPS=config.warpgroups,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        GROUP=problem.group,
        PACK=config.pack,
        O_OVER_Q=block_d == block_dv == 256,
        LIMIT=LIMITS[problem.dtype],
    )


def plan(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    target: Target,
    config: HopperConfig | None = None,
    counter: Tensor | None = None,
) -> tuple[Any, tuple[int], tuple[Any, ...], dict[str, Any]]:
    """(kernel, grid, args, kwargs) of one launch. out and lse are written, every element of them.

    `counter`: two int32 zeros that no other launch uses.
    """
    config = config or hopper_tile(problem)
    tile = tile_of(problem, config)
    packed = problem.features.varlen
    heads = problem.heads_kv if tile.PACK > 1 else problem.heads_q
    positions = ROWS.value * tile.WARPGROUPS // tile.PACK
    num_m = triton.cdiv(problem.len_q, positions)
    num_tiles = num_m * problem.batch * heads
    head_bytes = problem.len_k * (tile.HEAD_DIM + tile.HEAD_DIM_V) * 2 * heads // problem.heads_kv
    section = max(1, min(problem.batch * heads, L2_BYTES * (heads // problem.heads_kv) ** 2 // max(1, head_bytes)))
    rows_q, rows_k = (inputs.q.shape[0], inputs.k.shape[0]) if packed else (problem.len_q, problem.len_k)
    numbers = (num_m, heads, problem.batch * heads, section, rows_q, rows_k, problem.diag_lo, problem.diag_hi, num_tiles)
    rows = [ROWS.value // tile.PACK, tile.PACK]
    args = (
        by_group(inputs.q, tile.GROUP, [*rows, tile.BLOCK_D], packed),
        by_head(inputs.k, [tile.BLOCK_N, tile.BLOCK_D], packed),
        by_head(inputs.v, [tile.BLOCK_N, tile.BLOCK_DV], packed),
        by_group(out, tile.GROUP, [*rows, tile.BLOCK_DV], packed),
        *(out, strides(out, packed)[:3], lse, lse_strides(lse, packed)),
        *(counter, numbers, score_args(problem, inputs), problem.features, tile),
    )
    # Fusing s * scale - m behind our back would make p of the largest score differ from 1: see device/state.py.
    kwargs = {"num_warps": 4, "maxnreg": REGISTERS[tile.WARPGROUPS], "enable_fp_fusion": False}
    return attention_hopper_kernel, (min(target.multiprocessors, num_tiles),), args, kwargs


def by_head(x: Tensor, block: list[int], packed: bool) -> TensorDescriptor:
    """[batch, head, row, dim] tiles of one head; reads 0 outside."""
    shape = sizes(x, packed)
    return _descriptor(x, shape, strides(x, packed), [1, 1, *block])


def by_group(x: Tensor, group: int, block: list[int], packed: bool) -> TensorDescriptor:
    """[batch, key/value head, row, head of the group, dim] tiles; reads 0 outside, writes nothing there."""
    (batch, heads, rows, dim), (step_b, step_h, step_m, step_d) = sizes(x, packed), strides(x, packed)
    shape = [batch, heads // group, rows, group, dim]
    return _descriptor(x, shape, (step_b, step_h * group, step_m, step_h, step_d), [1, 1, *block])


def _descriptor(x: Tensor, shape: list[int], steps: tuple[int, ...], block: list[int]) -> TensorDescriptor:
    layout = NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
    return TensorDescriptor(x, shape, tma_strides(shape, steps, x.element_size()), block, layout)


def launch(problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, target: Target) -> None:
    """Fills out and lse. Device: that of the inputs."""
    with torch.cuda.device(problem.device):
        counter = torch.zeros(2, dtype=torch.int32, device=problem.device)
        kernel, grid, args, kwargs = plan(problem, inputs, out, lse, target, counter=counter)
        kernel[grid](*args, **kwargs)
