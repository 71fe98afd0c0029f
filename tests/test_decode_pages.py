"""Pages and a contiguous cache: the same bits, at the sizes of models, and of what is not finite."""

from __future__ import annotations

import math

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite import decode
from flashattn_lite import target as targets
from flashattn_lite.testing.results import assert_same_bits
from tests.exhaustive import one_in
from tests.test_decode import cache, int32, pages_of


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


@pytest.mark.parametrize(("value", "size", "rows"), one_in(2, [math.inf, math.nan, 3e38], [16, 32, 64, 128], [1, 2, 4]))
def test_what_is_not_finite_comes_out_of_pages_too(value, size, rows, device):
    """Rows whose sums are not finite are done again; 3e38: of three keys they overflow."""
    q, k, v = cache(device, batch=2, heads=2, heads_kv=1, keys=128, rows=rows, dim=16, dtype=torch.float32)
    v[:, :, 3:6, 0] = value
    held = int32([128, 70], device)
    whole = fa.attention_decode(q, k, v, held, return_lse=True)
    *pages, table = pages_of(k, v, size)
    paged = fa.attention_decode(q, *pages, held, block_table=table, return_lse=True)
    assert not whole[0][..., 0].isfinite().any() or value == 3e38
    assert whole[0][..., 1:].isfinite().all()
    assert_same_bits(paged, whole, f"pages of {size}", None)


@pytest.mark.usefixtures("where_kernels_run")
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_page_outside_of_the_cache_is_the_nearest_inside(device, rows, size):
    """A GPU's tables are read by no door."""
    decode_launch = pytest.importorskip("flashattn_lite.kernels.decode_launch", reason="the kernels need Triton")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2, rows, 16, generator=generator).to(device)
    room = torch.randn(7, 1, size, 16, generator=generator).to(device)
    pages = room[2:5]  # what lies around them belongs to others
    lens = int32([2 * size, size + 3], device)

    def run(table):
        inputs, problem = decode.problem_of(q, pages, pages, lens, table, None, True, None, None, 0.3, None)
        out, lse = torch.empty_like(q), torch.empty(2, 2, rows, device=device)
        decode_launch.prepare(problem, inputs, out, lse, targets.of(q.device), table)(inputs, out, lse, table)
        return out, lse

    got, want = run(int32([[-1, 3], [-2, 4]], device)), run(int32([[0, 2], [0, 2]], device))
    assert_same_bits(got, want, "pages outside", None)


@pytest.mark.parametrize("page", [16, 64])
def test_a_page_that_is_full_needs_no_other(device, page):
    """Entries past lengths of whole pages may hold anything."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16, generator=generator).to(device) for n in (1, 2 * page, 2 * page))
    lens = torch.tensor([page, 2 * page], dtype=torch.int32, device=device)
    pages = [x.unflatten(2, (2, page)).transpose(1, 2).flatten(0, 1) for x in (k, v)]  # sequence 0 has 0 and 1
    table = torch.tensor([[0, -1, -1], [2, 3, 10**6]], dtype=torch.int32, device=device)
    got = fa.attention_decode(q, *pages, lens, block_table=table)
    torch.testing.assert_close(got, fa.attention_decode(q, k, v, lens))


def test_a_page_may_be_longer_than_most_caches(device):
    q, k, v = (torch.randn(1, 2, n, 16, device=device) for n in (1, 8192, 8192))
    lens = torch.tensor([5], dtype=torch.int32, device=device)
    table = torch.tensor([[1]], dtype=torch.int32, device=device)
    pages = [x.flip(2).unflatten(2, (2, 4096))[0].transpose(0, 1) for x in (k, v)]
    alone = fa.attention_decode(q, *(x[1:] for x in pages), lens)
    torch.testing.assert_close(fa.attention_decode(q, *pages, lens, block_table=table), alone)
