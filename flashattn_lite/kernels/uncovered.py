"""What rows of packed tensors hold that no sequence covers: 0, and -inf in lse. One launch, which mostly only looks.

It comes behind attention's launch and, on sm_90 and newer, may be put on the card while that one still runs.
One program owns ROWS rows and asks every sequence whether it has them, whatever the table holds: SEQUENCES at a time,
first whether any is near, then row by row. To fill all of out before attention is written over it is a second write of
it: of 32 x 512 rows of 16 heads of 128, 67 MB.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flashattn_lite.kernels.device.bounds import clamp_sequence
from flashattn_lite.kernels.operands import contiguous
from flashattn_lite.kernels.start import Plan, Starter
from flashattn_lite.kernels.tuning import cdiv
from flashattn_lite.problem import AttentionProblem, Inputs
from flashattn_lite.target import Target

ROWS, SEQUENCES, COLUMNS = 128, 32, 32  # of a program; that it asks at a time; that it writes at a time


@triton.jit(do_not_specialize=["batch", "longest", "total", "heads", "width"])
def uncovered_kernel(out_ptr, lse_ptr, cu_ptr, batch, longest, total, heads, width, ROWS: tl.constexpr,
                     SEQUENCES: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    first_row = tl.program_id(0) * ROWS
    offs_r = first_row + tl.arange(0, ROWS)
    covered = tl.zeros([ROWS], tl.int32)
    for first in range(0, batch, SEQUENCES):
        b = first + tl.arange(0, SEQUENCES)
        begin = tl.load(cu_ptr + b, mask=b < batch, other=0)
        start, length = clamp_sequence(begin, tl.load(cu_ptr + b + 1, mask=b < batch, other=0), total)
        length = tl.minimum(length, longest)
        near = (start < first_row + ROWS) & (start + length > first_row)
        if tl.max(near.to(tl.int32), 0) > 0:
            at = offs_r[:, None] - start[None, :]
            covered = tl.maximum(covered, tl.max(((at >= 0) & (at < length[None, :])).to(tl.int32), 1))
    bare = (offs_r < total) & (covered == 0)
    if PDL:  # attention may have computed rows past the longest: what is written here stays
        tl.extra.cuda.gdc_wait()
    if tl.max(bare.to(tl.int32), 0) > 0:
        zero = tl.zeros([ROWS, COLUMNS], out_ptr.dtype.element_ty)
        rows = offs_r.to(tl.int64) * width
        for first in range(0, width, COLUMNS):
            offs_c = first + tl.arange(0, COLUMNS)
            tl.store(out_ptr + rows[:, None] + offs_c[None, :], zero, mask=bare[:, None] & (offs_c < width)[None, :])
        for h in range(heads):
            nothing = tl.full([ROWS], float("-inf"), tl.float32)
            tl.store(lse_ptr + tl.cast(h, tl.int64) * total + offs_r, nothing, mask=bare)


class Uncovered:
    """The launch for a packed problem, `start(arguments(inputs, out, lse))`, directly behind that of attention.

    Its arguments are made ahead of both: a table that has to be copied is else still on its way when it is read.
    follows: there is one. Without it nothing may begin before what came earlier in the stream has written cu_seqlens.
    """

    def __init__(self, problem: AttentionProblem, inputs: Inputs, target: Target, follows: bool) -> None:
        total, width = inputs.q.shape[0], problem.heads_q * problem.head_dim_v
        pdl = follows and target.is_cuda(90)
        self.numbers = (problem.batch, problem.len_q, total, problem.heads_q, width, ROWS, SEQUENCES, COLUMNS, pdl)
        options: dict[str, Any] = {"num_warps": 4}
        if pdl:
            options["launch_pdl"] = True
        self.start = Starter(uncovered_kernel, cdiv(total, ROWS), options)

    def arguments(self, inputs: Inputs, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
        """out (total, Hq, Dv) and lse (Hq, total) are contiguous."""
        return out, lse, contiguous(inputs.cu_seqlens_q), *self.numbers


def plan(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, target: Target, follows: bool = True
) -> Plan:
    """The launch, to look at, to compile or to interpret."""
    call = Uncovered(problem, inputs, target, follows)
    return call.start.plan(call.arguments(inputs, out, lse))
