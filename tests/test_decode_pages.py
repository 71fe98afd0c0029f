"""Pages and a contiguous cache: the same bits, at the sizes of models."""

from __future__ import annotations

import dataclasses
import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

import triton
import triton.language as tl

import flashattn_lite as fa
from benchmarks.offline import GPUS, compiled
from flashattn_lite import decode
from flashattn_lite.kernels.tuning_decode import decode_tile
from flashattn_lite.testing.results import assert_same_bits
from tests.test_decode import cache, int32, pages_of

# What touches no bits: who owns splits, who merges them, when copies are asked for.
FREE = {"num_stages", "owns_pairs", "several", "programs", "columns", "merge_registers", "registers"}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("window", [None, 127])
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 4, 20, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pages_take_a_tile_of_the_same_bits(gpu, window, tokens, group, dtype):
    """Only where `over_keys` adds up in an order of its own may other numbers of warps share the keys."""
    for dim in (16, 40, 64, 128, 256):
        q, k = (torch.empty(2, heads, n, dim, dtype=dtype, device="meta") for heads, n in ((group, tokens), (1, 4096)))
        lens = torch.empty(2, dtype=torch.int32, device="meta")
        _, problem = decode.problem_of(q, k, k, lens, None, None, True, window, None, 0.1, None)
        for vectorised in (True, False):
            whole, paged = (decode_tile(problem, GPUS[gpu][1], vectorised, pages) for pages in (False, True))
            different = {name for name, x in dataclasses.asdict(whole).items() if getattr(paged, name) != x} - FREE
            assert different <= ({"num_warps"} if paged.paired and paged.block_m == 16 else set())


@triton.jit
def sum_kernel(out_ptr, x_ptr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 128)), 0))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="there are no warps to meet")
@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100"])
def test_four_warps_meet_as_over_keys_has_it(gpu):
    """(0 + 2) + (1 + 3): with who is two away first, then with the neighbour."""
    x = torch.empty(128)
    code = compiled(gpu, (sum_kernel, (1,), (x, x), {"num_warps": 4})).asm["ptx"]
    met = code[code.index("bar.sync") :]
    assert re.findall(r"shfl\.sync\.bfly\.b32.*?, (\d+), \d+, -1;", met) == ["2", "1"]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": (127, 0)}, {"window": (700, 3), "softcap": 20.0}], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16), (72, torch.float16), (256, torch.bfloat16),
     (128, torch.float32)],
    ids=str,
)  # fmt: skip
def test_pages_have_the_bits_of_a_contiguous_cache(dim, dtype, rows, options):
    """Of one sequence, whose splits have a program each, and of many, whose programs own chains."""
    lens = [8192, 5001, 700, 131, 40]
    for batch in (1, len(lens), 8 * len(lens)):
        heads = {"batch": batch, "heads": 8, "heads_kv": 2}
        q, k, v = cache("cuda", **heads, keys=8192, rows=rows, dim=dim, dtype=dtype)
        held = int32((8 * lens)[:batch], "cuda")
        whole = fa.attention_decode(q, k, v, held, **options, return_lse=True)
        for size in (16, 256) if batch == 1 else (16,):
            *pages, table = pages_of(k, v, size)
            paged = fa.attention_decode(q, *pages, held, block_table=table, **options, return_lse=True)
            assert_same_bits(paged, whole, f"{batch} sequences in pages of {size}", None)
