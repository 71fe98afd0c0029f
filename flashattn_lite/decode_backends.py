"""What runs `attention_decode`: its backends, in order of preference."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor

from flashattn_lite import dispatch, tiled
from flashattn_lite.problem import AttentionProblem, Inputs
from flashattn_lite.target import Target


class Hopper(dispatch.Hopper):
    """Attention's kernel for sm_90a, of more rows than decoding's are for: it copies pages by TMA, too."""

    def why_not(self, problem: AttentionProblem, inputs: Inputs, target: Target) -> list[str]:
        reasons = super().why_not(problem, inputs, target)
        if not reasons:
            from flashattn_lite.kernels import tuning_parts

            fewest, rows = tuning_parts.fewest_rows(problem), problem.group * problem.len_q
            if rows < fewest:
                reasons.append(
                    f"of head dims {problem.head_dim} and {problem.head_dim_v} it is for {fewest} or more query rows "
                    f"per key/value head; this one has {rows}"
                )
        return reasons


class SplitTriton(dispatch.Split):
    """The split-KV kernels, of all that the portable kernel takes too."""

    name = "triton"

    def why_not(self, problem: AttentionProblem, inputs: Inputs, target: Target) -> list[str]:
        return dispatch.Triton().why_not(problem, inputs, target)


class Tiled(dispatch.Tiled):
    """Plain torch on any device. Pages are gathered for one sequence at a time, so that memory stays linear."""

    def prepare(self, problem: AttentionProblem, *given: Any) -> dispatch.Run:
        return functools.partial(self.forward, problem)

    def forward(
        self, problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, table: Tensor | None
    ) -> None:
        if table is None:
            tiled.forward(problem, inputs, out, lse)
            return
        assert inputs.kv_lens is not None
        pages, page_size, count = inputs.k.shape[0], inputs.k.shape[2], table.shape[1]
        keys = max(page_size, tiled.tile_of(problem).keys)  # whole tiles: then a page size has no say in the bits
        for b in range(problem.batch):
            if table.device.type == "cpu":  # only there may the host know the length
                count = min(table.shape[1], -(-max(0, int(inputs.kv_lens[b])) // keys) * (keys // page_size))
            entries = table[b, :count].long().clamp(0, max(0, pages - 1))
            # [1, Hkv, keys, D]. Along another dim than the first, torch would first copy all pages that there are.
            k, v = (x.index_select(0, entries).transpose(0, 1).flatten(1, 2)[None] for x in (inputs.k, inputs.v))
            one = slice(b, b + 1)
            alone = Inputs(inputs.q[one], k, v, sinks=inputs.sinks, kv_lens=inputs.kv_lens[one])
            tiled.forward(replace(problem, batch=1, len_k=k.shape[2]), alone, out[one], lse[one])


BACKENDS: tuple[dispatch.Backend, ...] = (Hopper(), SplitTriton(), Tiled())
