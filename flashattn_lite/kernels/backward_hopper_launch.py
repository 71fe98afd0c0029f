"""Starting the Hopper backward kernel: which sides of a backward it takes, and their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.kernels.attention_hopper_launch import by_head
from flashattn_lite.kernels.backward_hopper import CONSUMERS, HopperBackwardTile, backward_hopper_kernel
from flashattn_lite.kernels.descriptors import Descriptors
from flashattn_lite.kernels.hopper_tasks import ROWS
from flashattn_lite.kernels.operands import strides, takes_tma
from flashattn_lite.kernels.start import Starter
from flashattn_lite.kernels.tuning import BACKWARD_HOPPER, HopperBackwardConfig, TileConfig, cdiv, padded
from flashattn_lite.problem import AttentionProblem
from flashattn_lite.target import Target

OPTIONS = {"num_warps": 4, "maxnreg": 168}  # registers a thread at launch, of which the producer gives most away


def config_of(
    problem: AttentionProblem, keys: bool, read: Sequence[Tensor], masked: bool, target: Target
) -> HopperBackwardConfig | None:
    """The tile of the launch that owns keys, or queries; None if this kernel does not take it. read: q, k, v, dO."""
    if not target.hopper or target.interpreting or masked:
        return None
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return None
    if any(x.numel() == 0 or x.shape[-1] % 8 or not takes_tma(x) for x in read):
        return None
    return BACKWARD_HOPPER.get((keys, max(64, padded(problem.head_dim), padded(problem.head_dim_v))))


def with_care(config: HopperBackwardConfig) -> TileConfig:
    """The tile of the launch that makes again what failed, so that other rows get the same bits."""
    return TileConfig(CONSUMERS.value * ROWS.value, config.block_n, 8, 2)


class HopperSide:
    """The usual launch for the rows that programs own. own, streamed: a, b and c, d."""

    def __init__(
        self,
        problem: AttentionProblem,
        keys: bool,
        makes_b: bool,
        config: HopperBackwardConfig,
        own: Sequence[Tensor],
        streamed: Sequence[Tensor],
        of_rows: tuple[int, int],
        lengths: tuple[int, ...],
        target: Target,
    ) -> None:
        self.features, packed = problem.features, problem.features.varlen
        seen = replace(self.features, left=self.features.right, right=self.features.left) if keys else self.features
        widths = [max(64, padded(dim)) for dim in (problem.head_dim, problem.head_dim_v)]
        self.tile = HopperBackwardTile(
            KEYS=keys,
            MAKES_B=makes_b,
            SEEN=seen,
            BLOCK_N=config.block_n,
            STAGES=config.num_stages,
            HELD=config.held,
            HEAD_DIM=problem.head_dim,
            HEAD_DIM_V=problem.head_dim_v,
            BLOCK_D=widths[0],
            BLOCK_DV=widths[1],
            GROUP=problem.group,
        )
        heads, length = (problem.heads_kv, problem.len_k) if keys else (problem.heads_q, problem.len_q)
        num_m = cdiv(length, self.tile.BLOCK_M)
        tiles = num_m * heads * problem.batch
        self.owned = tiles * self.tile.BLOCK_M
        grads = (torch.empty_like(x, device="meta") for x in own)
        steps = (strides(x, packed) for x in grads)
        self.numbers = (*steps, *of_rows, num_m, tiles, *lengths, heads)
        descriptors = Descriptors(
            *(by_head(x, [ROWS.value, width], packed) for x, width in zip(own, widths, strict=True)),
            *(by_head(x, [config.block_n, width], packed) for x, width in zip(streamed, widths, strict=True)),
        )
        self.start = Starter(backward_hopper_kernel, min(tiles, target.multiprocessors), OPTIONS, descriptors)

    def arguments(
        self,
        own: Sequence[Tensor],
        streamed: Sequence[Tensor],
        written: Sequence[Any],
        m: Tensor,
        delta: Tensor,
        counter: Any,
        scores: Any,
    ) -> tuple[Any, ...]:
        """written: gradients, a zero, room for a word of each row; counter: a zero."""
        return (
            *(*own, *streamed, *written, m, delta, counter),
            *(*self.numbers, scores, self.features, self.tile),
        )
