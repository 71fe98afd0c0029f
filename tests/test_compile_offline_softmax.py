"""The softmax kernels compile without a GPU, read and write 16 bytes at a time, and spill nothing on Hopper."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from benchmarks.offline import GPUS, compiled, usage
from flashattn_lite import target as targets
from flashattn_lite.kernels import softmax_launch

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="TRITON_INTERPRET=1 leaves nothing to compile")

DTYPES = [torch.bfloat16, torch.float32]
# name: (shape, dim). Each way through the kernels.
CASES = {
    "short rows": ((64, 1000), 1),
    "whole rows": ((64, 16384), 1),
    "split rows": ((16, 2**20), 1),
    "two launches": ((8, 2**22), 1),
    "across, whole": ((500, 256), 0),
    "across, two launches": ((5000, 256), 0),
}


def kernels(gpu, case, op, dtype):
    shape, dim = CASES[case]
    x = torch.empty(shape, dtype=dtype, device="meta")
    stats = torch.empty([1 if i == dim else size for i, size in enumerate(shape)], device="meta")
    results = (torch.empty_like(x),) if op == "softmax" else (stats, torch.empty_like(stats))
    launches = softmax_launch.plan(x, results, dim, GPUS[gpu][1])
    return [compiled(gpu, launch) for launch in launches]


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu != "sm_90"])
@pytest.mark.parametrize("case", ["short rows", "split rows", "two launches"])
@pytest.mark.parametrize("op", ["softmax", "stats"])
def test_softmax_compiles(gpu, case, op):
    names = [kernel.metadata.name for kernel in kernels(gpu, case, op, torch.bfloat16)]
    waits = case == "split rows" and gpu != "gfx942"  # programs wait for each other on CUDA alone
    two = ["stats_kernel", "normalise_kernel"]
    expected = ["softmax_kernel"] if case == "short rows" else ["together_kernel"] if waits else two
    assert names == (expected if op == "softmax" else ["stats_kernel"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", ["softmax", "stats"])
def test_nothing_spills_on_hopper(case, op, dtype):
    # Triton 3.9 puts that many bytes of a thread there, outside the loops over tiles; 3.6 nothing.
    limit = 16 if case in ("split rows", "two launches") else 0
    assert max(usage(kernel).stack for kernel in kernels("sm_90", case, op, dtype)) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["short rows", "whole rows", "split rows", "two launches"])
def test_rows_move_16_bytes_at_a_time(case, dtype):
    for kernel in kernels("sm_90", case, "softmax", dtype):
        ptx = kernel.asm["ptx"]
        # Without .cg, which marks the parts that other programs stored.
        assert set(re.findall(r"ld\.global(?!\.cg|\.gpu)\S*", ptx)) <= {"ld.global.v4.b32", "ld.global.b32"}
        assert "ld.global.v4.b32" in ptx
        if kernel.metadata.name != "stats_kernel":
            assert "st.global.v4.b32" in ptx
