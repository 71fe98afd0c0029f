"""The softmax kernels compile without a GPU, read and write 16 bytes at a time, and spill nothing on Hopper."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from benchmarks.offline import GPUS, compiled, usage
from flashattn_lite import target as targets
from flashattn_lite.kernels import softmax_launch
from flashattn_lite.kernels.tuning_softmax import ring_tile
from tests.exhaustive import also, quick

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="TRITON_INTERPRET=1 leaves nothing to compile")

DTYPES = [torch.bfloat16, torch.float32]
# Where shared memory is filled by copies of 16 bytes.
COPIES = [(gpu, dtype) for gpu in GPUS if gpu != "gfx942" for dtype in (torch.float16, *DTYPES)]
OTHERS = [gpu for gpu in GPUS if gpu != "sm_90"]
# name: (shape, dim). Each way through the kernels.
CASES = {
    "short rows": ((64, 1000), 1),
    "whole rows": ((64, 16384), 1),
    "rows of 32768": ((64, 32768), 1),
    "rows of 50304": ((64, 50_304), 1),
    "split rows": ((16, 2**20), 1),
    "many split rows": ((1024, 2**17), 1),
    "split rows, not full": ((16, 2**17 + 8), 1),
    "rows between addresses": ((16, 50_257), 1),
    "short rows between addresses": ((16, 4097), 1),
    "long rows between addresses": ((16, 2**20 - 1), 1),
    "two launches": ((8, 2**22), 1),
    "across, whole": ((500, 256), 0),
    "across, two launches": ((5000, 256), 0),
}
SHORT_OR_ACROSS = [case for case in CASES if case.startswith(("short", "across", "two launches"))]


def copied(cases, chosen):
    return quick([(case, *copy) for case in cases for copy in COPIES], chosen)


def kernels(gpu, case, op, dtype):
    shape, dim = CASES[case]
    x = torch.empty(shape, dtype=dtype, device="meta")
    stats = torch.empty([1 if i == dim else size for i, size in enumerate(shape)], device="meta")
    results = (torch.empty_like(x),) if op == "softmax" else (stats, torch.empty_like(stats))
    launches = softmax_launch.plan(x, results, dim, GPUS[gpu][1])
    return [compiled(gpu, launch) for launch in launches]


@pytest.mark.parametrize(
    ("case", "op", "gpu"),
    quick(
        itertools.product(
            ("short rows", "rows of 32768", "split rows", "rows between addresses", "two launches"),
            ("softmax", "stats"),
            OTHERS,
        ),
        # Each kernel for each GPU family.
        [(case, "softmax", gpu) for case in ("short rows", "two launches") for gpu in OTHERS]
        + [("split rows", "softmax", "sm_100"), ("short rows", "stats", "gfx942"), ("two launches", "stats", "sm_80")]
        + [("rows between addresses", *rest) for rest in (("softmax", "sm_80"), ("stats", "sm_100"))]
        + [("rows between addresses", "softmax", "gfx942")],
    ),
)
def test_softmax_compiles(gpu, case, op):
    names = [kernel.metadata.name for kernel in kernels(gpu, case, op, torch.bfloat16)]
    cuda, two = gpu != "gfx942", ["stats_kernel", "normalise_kernel"]
    expected = {
        "short rows": ["softmax_kernel"],
        "rows of 32768": ["ring_kernel" if cuda else "softmax_kernel"],
        "split rows": ["ring_kernel"] if cuda else two,
        "rows between addresses": ["ring_kernel" if cuda else "sweep_kernel"],
        "two launches": two,
    }
    ring = cuda and case == "rows between addresses" and gpu != "sm_80"  # where one such row has a place
    assert names == (expected[case] if op == "softmax" else ["ring_kernel" if ring else "stats_kernel"])


@pytest.mark.parametrize(
    ("case", "gpu", "dtype"),
    copied(
        ("rows of 32768", "split rows", "split rows, not full"),
        [
            ("rows of 32768", "sm_80", torch.float32),
            ("rows of 32768", "sm_100", torch.bfloat16),
            ("split rows", "sm_80", torch.float32),
            ("split rows, not full", "sm_90", torch.bfloat16),
        ],
    ),
    ids=str,
)
def test_a_ring_is_filled_by_copies_of_16_bytes(gpu, case, dtype):
    (kernel,) = kernels(gpu, case, "softmax", dtype)
    if case == "rows of 32768" and dtype == torch.float32:
        assert kernel.metadata.name == "softmax_kernel"
        return
    assert kernel.metadata.name == "ring_kernel"
    copies = re.findall(r"cp\.async\.c[ag]\.\S+ .*", kernel.asm["ptx"])
    assert copies and all(", 0x10" in copy for copy in copies)
    assert set(re.findall(r"st\.global\S*", kernel.asm["ptx"])) == {"st.global.v4.b32"}
    # The programs that stay are all there at once: of whole rows more would do no harm.
    tile = ring_tile(CASES[case][0][1], dtype.itemsize, GPUS[gpu][1], wide=True)
    assert usage(kernel).blocks(gpu) >= tile.programs


@pytest.mark.parametrize(
    ("case", "gpu", "dtype"),
    copied(
        [case for case in CASES if "between" in case],
        [
            ("rows between addresses", "sm_90", torch.bfloat16),
            ("short rows between addresses", "sm_80", torch.float32),
            ("short rows between addresses", "sm_100", torch.bfloat16),
            ("long rows between addresses", "sm_80", torch.float32),
        ],
    ),
    ids=str,
)
def test_rows_between_addresses_move_16_bytes_at_a_time_too(gpu, case, dtype):
    (kernel,) = kernels(gpu, case, "softmax", dtype)
    assert kernel.metadata.name == "ring_kernel"
    copies = re.findall(r"cp\.async\.c[ag]\.\S+ .*", kernel.asm["ptx"])
    assert copies and all(", 0x10" in copy for copy in copies)
    single = "st.global.b16" if dtype.itemsize == 2 else "st.global.b32"  # at a row's ends
    assert set(re.findall(r"st\.global\S*", kernel.asm["ptx"])) == {"st.global.v4.b32", single}
    tile = ring_tile(CASES[case][0][1], dtype.itemsize, GPUS[gpu][1], wide=False)
    assert usage(kernel).blocks(gpu) >= (tile.programs or 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, also(torch.float32)])
@pytest.mark.parametrize(
    ("op", "case"),
    quick(
        [(op, case) for case in CASES for op in ("softmax", "stats")],
        # Each kernel in a tile or two; some that others here compile anyway.
        [(op, case) for case in SHORT_OR_ACROSS for op in ("softmax", "stats")]
        + [("softmax", case) for case in ("whole rows", "split rows, not full", "rows between addresses")]
        + [("stats", "split rows")],
    ),
)
def test_nothing_spills_on_hopper(case, op, dtype):
    # Triton 3.6 and 3.7 spill nothing. 3.8 and 3.9 put so many bytes of a thread of ring_kernel there, outside the loop
    # or ahead of its only step.
    compiled_kernels = kernels("sm_90", case, op, dtype)
    limit = 24 if compiled_kernels[0].metadata.name == "ring_kernel" and case != "rows of 32768" else 0
    if (case, op, dtype) == ("short rows between addresses", "softmax", torch.bfloat16):
        limit = 48
    assert max(usage(kernel).stack for kernel in compiled_kernels) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["short rows", "whole rows", "two launches"])
def test_rows_move_16_bytes_at_a_time(case, dtype):
    for kernel in kernels("sm_90", case, "softmax", dtype):
        ptx = kernel.asm["ptx"]
        # Without .cg, which marks the parts that other programs stored.
        assert set(re.findall(r"ld\.global(?!\.cg|\.gpu)\S*", ptx)) <= {"ld.global.v4.b32", "ld.global.b32"}
        assert "ld.global.v4.b32" in ptx
        if kernel.metadata.name != "stats_kernel":
            assert "st.global.v4.b32" in ptx
