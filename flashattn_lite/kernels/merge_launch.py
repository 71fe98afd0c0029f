"""Starting the merge of states that parts of the keys have left: room for them, arguments, the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.kernels.decode_merge import merge_kernel
from flashattn_lite.kernels.decode_splits import DecodeTile
from flashattn_lite.kernels.operands import contiguous, lse_strides, packing, strides
from flashattn_lite.kernels.start import Starter
from flashattn_lite.kernels.tuning import cdiv, padded, power_of_two
from flashattn_lite.kernels.tuning_decode import TELLING, DecodeConfig
from flashattn_lite.problem import AttentionProblem, Inputs
from flashattn_lite.target import Target

LEAST_LANES = 16  # a merge of fewer splits is no faster
MERGED = 2048  # numbers of acc that a program, which is one warp, has to load: 64 registers a thread
States = tuple[Tensor, Tensor, Tensor]  # m, l [B, Hkv, parts, G * L] and acc [B, Hkv, parts, G * L, Dv], flat, float32


class Merge:
    """The second launch of a problem whose keys fall into splits. `parts`: states that there is room for, of each.

    `owned`: splits of a state of sequences that have up to FEW, and of longer ones.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        tile: DecodeTile,
        parts: int,
        splits: int,
        owned: Sequence[int],
        config: DecodeConfig,
        out: Tensor,
        lse: Tensor,
        target: Target,
    ) -> None:
        self.parts = parts
        own, long_own = owned
        lanes = min(tile.FEW, max(LEAST_LANES, power_of_two(splits)))
        long_lanes = power_of_two(splits) if splits > tile.FEW else 0
        columns = min(padded(problem.head_dim_v), columns_of(own, lanes, tile, config))
        if long_lanes:
            columns = min(columns, columns_of(long_own, long_lanes, tile, config))
        heads, rows = problem.batch * problem.heads_kv, problem.group * problem.len_q
        # acc, m and l in one tensor, each at a 16-byte address, so that launches don't differ in that.
        count = heads * parts * rows
        self.state_sizes = [cdiv(n, 4) * 4 for n in (count * problem.head_dim_v, count, count)]
        packed = problem.features.varlen
        self.ahead = (strides(out, packed), *lse_strides(lse, packed), parts, problem.heads_kv, problem.len_q)
        programs = heads * rows * cdiv(problem.head_dim_v, columns)
        tells = tile.PDL and packed and programs <= TELLING  # those who look for uncovered rows
        self.behind = (problem.diag_lo, problem.diag_hi, own, lanes, long_own, long_lanes, columns, tells)
        self.behind += (problem.features, tile)
        options: dict[str, Any] = {"num_warps": 1, "num_stages": 1}
        if target.kind == "cuda":
            options["maxnreg"] = config.merge_registers
        if tile.PDL:
            options["launch_pdl"] = True
        self.start = Starter(merge_kernel, programs, options)

    def room(self, like: Tensor) -> Tensor:
        """For the states, on the device of `like`."""
        return like.new_empty(sum(self.state_sizes), dtype=torch.float32)

    def states(self, room: Tensor) -> States:
        """acc stands for all of the room, being the first there."""
        of_acc, of_m, of_l = self.state_sizes
        return room.narrow(0, of_acc, of_m), room.narrow(0, of_acc + of_m, of_l), room

    def arguments(self, inputs: Inputs, out: Tensor, lse: Tensor, states: States, len_k: int) -> tuple[Any, ...]:
        """len_k: keys of the longest sequence."""
        lengths = contiguous(inputs.kv_lens), *packing(inputs)
        return (out, lse, contiguous(inputs.sinks), *lengths, *states, *self.ahead, len_k, *self.behind)


def columns_of(own: int, lanes: int, tile: DecodeTile, config: DecodeConfig) -> int:
    """Of a program, if it has states of `own` of up to `lanes` splits."""
    columns = config.columns[0 if own == 1 else 1 if own <= tile.CHAIN else 2]
    return min(columns, max(16, MERGED * own // lanes))
