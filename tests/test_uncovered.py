"""Rows of packed tensors that no sequence covers: 0 and -inf, whatever the table holds; others are left alone."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")
import flashattn_lite as fa
from flashattn_lite import target as targets
from flashattn_lite.kernels import uncovered
from flashattn_lite.kernels.interpreter import interpreted
from flashattn_lite.problem import Inputs, describe

TOTAL = 300
# name: (table, longest)
TABLES = {
    "all covered": ([0, 100, 100, 300], 200),
    "a longer sequence than was promised": ([0, 100, 300], 150),
    "before the first and behind the last": ([7, 40, 41, 290], 300),
    "going back": ([50, 20, 80, 60, 70], 300),
    "outside": ([-5, 3, 2**31 - 1, -(2**31), 4], 300),
    "more than are asked at a time": ([*range(100), 131], 300),
    "begins in the last row of a program": ([*[0] * 32, 127, 300], 300),
    "ends in the first row of a program": ([*[0] * 32, 129, 300], 300),
    "no sequence": ([0], 0),
}


def covered(table, longest):
    rows = torch.zeros(TOTAL, dtype=torch.bool)
    for start, end in itertools.pairwise(table):
        start = min(max(start, 0), TOTAL)
        rows[start : start + min(min(max(end, start), TOTAL) - start, longest)] = True
    return rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", TABLES)
def test_only_uncovered_rows_are_written(device, name, dtype):
    if device.type == "cpu" and not targets.interpreting():
        pytest.skip("kernels run on CPU tensors through Triton's interpreter only (TRITON_INTERPRET=1)")
    table, longest = TABLES[name]
    cu = torch.tensor(table, dtype=torch.int32, device=device)
    q = torch.ones(TOTAL, 3, 20, device=device, dtype=dtype)
    inputs = Inputs(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
    options = dict.fromkeys(("q_start", "window_left", "window_right", "softcap"))
    problem = describe(inputs, causal=False, scale=1.0, max_seqlen_q=longest, max_seqlen_k=longest, **options)
    out, lse = torch.ones_like(q), torch.ones(3, TOTAL, device=device)
    kernel, grid, args, kwargs = uncovered.plan(problem, inputs, out, lse, targets.of(device), follows=False)
    with interpreted():
        kernel[grid](*args, **kwargs)
    there = covered(table, longest).to(device)
    assert torch.equal(out, torch.where(there[:, None, None], 1.0, 0.0).to(dtype).expand_as(out))
    assert torch.equal(lse, torch.where(there, 1.0, -torch.inf).expand_as(lse))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=pytest.mark.hopper)])
def test_attention_leaves_no_row_unwritten(backend):
    """A table that covers a part, and rows past max_seqlen_q, of which a tile's worth may be computed."""
    q = torch.randn(TOTAL, 4, 64, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([7, 40, 41, 290], dtype=torch.int32, device="cuda")
    limits = {"max_seqlen_q": 249, "max_seqlen_k": 249}
    out, lse = fa.attention_varlen(q, q, q, cu, cu, **limits, return_lse=True, backend=backend)
    bare = ~covered(cu.tolist(), 249).cuda()
    assert not out[bare].any() and (lse[:, bare] == -torch.inf).all()
    assert out[~bare].any(-1).all() and lse[:, ~bare].isfinite().all()
