"""Decoding: every law over random problems, and what random problems are too small for, on each device and backend."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite import decode
from flashattn_lite.reference import attention_reference
from flashattn_lite.testing import DECODE_LAWS, Case, assert_close_to_oracle, check_decode
from flashattn_lite.testing.results import assert_same_bits
from tests.exhaustive import once, problems

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
SIZES: dict[str, Any] = (
    {"max_batch": 2, "max_heads": 2, "max_len": 49, "max_dim": 33}
    if INTERPRETING
    else {"max_batch": 3, "max_heads": 2, "max_len": 70, "max_dim": 256}
)
PROBLEMS = problems(cpu=8, cuda=2)  # on GPUs four times that with several splits
# The interpreter computes in numpy, which warns of the NaN that some problems hold on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
NAMED = pytest.mark.parametrize("law", DECODE_LAWS, ids=lambda law: law.__name__)


def cache(device, *, batch=2, heads=4, heads_kv=2, rows=1, keys=300, dim=16, dim_v=None, dtype=torch.float32, seed=0):
    """(q, k, v), standard normal."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype).to(device)
    return draw(batch, heads, rows, dim), draw(batch, heads_kv, keys, dim), draw(batch, heads_kv, keys, dim_v or dim)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def pages_of(k, v, size=16):
    """(k_pages, v_pages, table): the caches in pages of a random order."""
    batch, _, keys, _ = k.shape
    order = torch.randperm(batch * keys // size, generator=torch.Generator().manual_seed(1)).to(k.device)
    pages = (x.unflatten(2, (-1, size)).movedim(2, 1).flatten(0, 1) for x in (k, v))
    k_pages, v_pages = (torch.empty_like(p).index_copy_(0, order, p) for p in pages)
    return k_pages, v_pages, order.view(batch, -1).to(torch.int32)


@NAMED
def test_law(law: Any, device: torch.device) -> None:
    check_decode(fa.attention_decode, laws=[law], n=PROBLEMS[device.type], device=device, **SIZES)


@pytest.mark.gpu
@pytest.mark.slow
@NAMED
def test_law_at_gpu_sizes(law: Any) -> None:
    """More problems, and lengths of several splits."""
    sizes = {"max_batch": 3, "max_heads": 2, "max_len": 1100, "max_dim": 256}
    check_decode(fa.attention_decode, laws=[law], n=4 * PROBLEMS["cuda"], seed=1, device="cuda", **sizes)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("backend", ["auto", "tiled"])
@pytest.mark.parametrize(
    "options", [{}, {"window": (40, 0), "sinks": torch.tensor([0.5, -1.0, 3.0, -math.inf])}], ids=["causal", "window"]
)
def test_many_splits(device, rows, backend, options):
    """More keys than a split holds."""
    q, k, v = cache(device, rows=rows)
    lens = int32([300, 131], device)
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    out, lse = fa.attention_decode(q, k, v, lens, **options, return_lse=True, backend=backend)
    assert_close_to_oracle(out, lse, Case(q, k, v, causal=True, kv_lens=lens, **options))


@pytest.mark.parametrize("rows", [1, 5, 9])
def test_a_sequence_among_many_has_the_same_bits(device, rows):
    """Where a sequence is split follows from its own keys."""
    keys = 300 if INTERPRETING else 20000
    q, k, v = cache(device, batch=1, heads=2, heads_kv=1, keys=keys, rows=rows)
    lens = int32([keys - 3], device)
    alone = fa.attention_decode(q, k, v, lens, window=(keys - 140, 0), return_lse=True)
    many = 3 if INTERPRETING else 100
    q, k, v, lens = (x.repeat(many, *[1] * (x.dim() - 1)) for x in (q, k, v, lens))
    lens[:-1] = torch.arange(many - 1) * 100
    among = fa.attention_decode(q, k, v, lens, window=(keys - 140, 0), return_lse=True)
    assert_same_bits((among[0][-1:], among[1][-1:]), alone, "the last of many", None)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("window", [None, (70, 0)])
def test_room_behind_the_keys_has_no_say(device, rows, window):
    """A cache of many splits with few keys, and NaN behind them, against one just as long as its keys."""
    borders = (31, 33, 95, 96, 97, 193) if INTERPRETING else (511, 513, 8191, 8192, 8193, 16385)
    q, k, v = cache(
        device, batch=1, heads=2, heads_kv=1, keys=300 if INTERPRETING else 20000, rows=rows, dtype=torch.float16
    )
    for keys in borders:
        lens = int32([keys], device)
        cut = fa.attention_decode(q, k[:, :, :keys], v[:, :, :keys], lens, window=window, return_lse=True)
        k_nan, v_nan = k.clone(), v.clone()
        k_nan[:, :, keys:] = v_nan[:, :, keys:] = math.nan
        whole = fa.attention_decode(q, k_nan, v_nan, lens, window=window, return_lse=True)
        if INTERPRETING or device.type == "cuda":  # torch's products on a CPU choose by the cache's length
            assert_same_bits(whole, cut, f"{keys} keys", None)
        assert_close_to_oracle(*whole, Case(q, k[:, :, :keys], v[:, :, :keys], causal=True, window=window))


def test_lengths_at_every_border(device):
    """0, below the number of tokens, one key more and less than a tile, a split and two, past the cache."""
    keys = 140 if INTERPRETING else 2100
    borders = [16, 32, 64] if INTERPRETING else [32, 256, 512]
    values = [0, 1, 2, *(n + d for n in borders for d in (-1, 0, 1)), keys]
    q, k, v = cache(device, batch=len(values), heads=1, heads_kv=1, rows=3, keys=keys, dim=8)
    lens = int32(values, device)
    out, lse = fa.attention_decode(q, k, v, lens, return_lse=True)
    assert_close_to_oracle(out, lse, Case(q, k, v, causal=True, kv_lens=lens))
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert bool((lse[0] == -torch.inf).all())
    assert bool((lse[2, 0, :1] == -torch.inf).all())  # of two keys and three tokens, the first stands before both
    beyond = int32([keys + 1000], device)
    assert torch.equal(fa.attention_decode(q[-1:], k[-1:], v[-1:], beyond), out[-1:])


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_what_one_row_sees_and_another_does_not(device, garbage):
    """A NaN or infinity in V behind the first rows' diagonal reaches the rows that see it, and no bit of the others."""
    q, k, v = cache(device, batch=1, rows=4)
    lens = int32([300], device)
    clean = fa.attention_decode(q, k, v, lens, return_lse=True)
    v = v.clone()
    v[:, :, 298, 3] = garbage  # rows 2 and 3 see it
    v[:, :, 299, 3] = -garbage  # row 3 sees it
    out, lse = fa.attention_decode(q, k, v, lens, return_lse=True)
    before = slice(0, 2)
    got, want = ((x[0][:, :, before], x[1][:, :, before]) for x in ((out, lse), clean))
    assert_same_bits(got, want, "rows before it", None)
    others = [i for i in range(16) if i != 3]
    torch.testing.assert_close(out[..., others], clean[0][..., others])
    torch.testing.assert_close(lse, clean[1])
    assert bool((out[:, :, 2, 3].isnan() if math.isnan(garbage) else out[:, :, 2, 3] == garbage).all())
    assert bool(out[:, :, 3, 3].isnan().all())  # inf - inf


@pytest.mark.parametrize(("heads", "heads_kv", "rows"), [(71, 1, 1), (10, 2, 16), (3, 3, 9)])
def test_rows_of_several_tiles(device, heads, heads_kv, rows):
    q, k, v = cache(device, batch=1, heads=heads, heads_kv=heads_kv, rows=rows, keys=70, dim=8, dim_v=5)
    lens = int32([70], device)
    out, lse = fa.attention_decode(q, k, v, lens, return_lse=True)
    assert_close_to_oracle(out, lse, Case(q, k, v, causal=True, kv_lens=lens))


def test_a_cache_of_a_model(device):
    """Laid out (batch, length, heads, dim), as models keep it: read by strides, and the output in the order of q."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in cache(device, rows=2))
    lens = int32([300, 17], device)
    out = fa.attention_decode(q, k, v, lens)
    assert torch.equal(out, fa.attention_decode(*(x.contiguous() for x in (q, k, v)), lens))
    assert out.transpose(1, 2).is_contiguous()


def test_pages_of_any_strides(device):
    """Pages as (pages, page_size, heads, dim) in memory, K and V of one page side by side, a table that is a slice."""
    q, k, v = cache(device, keys=64)
    lens = int32([64, 50], device)
    storage = torch.full((11, 2, 16, 2, 16), math.nan, device=device)  # page, K or V, row, head, dim
    table = int32([[3, 1, 7, 0, -9], [10, 2, 4, 5, -9]], device)
    for b in range(2):
        for page, rows in zip(table[b, :4].tolist(), range(0, 64, 16), strict=True):
            storage[page, 0], storage[page, 1] = (x[b, :, rows : rows + 16].transpose(0, 1) for x in (k, v))
    k_pages, v_pages = storage[:, 0].transpose(1, 2), storage[:, 1].transpose(1, 2)
    out = fa.attention_decode(q, k_pages, v_pages, lens, block_table=table[:, :4])
    assert torch.equal(out, fa.attention_decode(q, k, v, lens))
    assert torch.equal(out, fa.attention_decode(q, k_pages, v_pages, lens, block_table=table.mT.contiguous().mT[:, :4]))


def test_it_is_attention_with_kv_lens(device):
    q, k, v = cache(device, rows=4, dtype=torch.float16)
    lens = int32([300, 3], device)
    expected = attention_reference(q.double(), k.double(), v.double(), causal=True, kv_lens=lens)
    torch.testing.assert_close(fa.attention_decode(q, k, v, lens).double(), expected, atol=2e-3, rtol=0)  # 2 eps


def test_float64_runs_tiled(device):
    q, k, v = cache(device, dtype=torch.float64)
    lens = int32([300, 20], device)
    out, lse = fa.attention_decode(q, k, v, lens, return_lse=True)
    assert_close_to_oracle(out, lse, Case(q, k, v, causal=True, kv_lens=lens))
    assert fa.explain_decode(q, k, v, lens).backend == "tiled"


@once
def test_the_op_has_a_fake_and_is_one_node():
    q, k, v = cache("cpu", keys=32, rows=2)
    lens, table = int32([30, 2], "cpu"), int32([[1, 0], [0, 1]], "cpu")
    for arguments in ((q, k, v, lens, None, None, True, 3, None, 0.3, 2.0), (q, k, v, lens, None, q[0, :, 0, 0], False,
                      None, None, 0.3, None), (q, k[..., :16, :], v[..., :16, :], lens, table, None, True, None, None,
                      0.3, None)):  # fmt: skip
        torch.library.opcheck(decode.attention_decode_op, (*arguments, "auto"))
    compiled = torch.compile(fa.attention_decode, fullgraph=True, backend="aot_eager", dynamic=True)
    for keys in (32, 48):
        q, k, v = cache("cpu", keys=keys, rows=2)
        torch.testing.assert_close(
            compiled(q, k, v, lens, window=(9, None)), fa.attention_decode(q, k, v, lens, window=(9, None))
        )


def test_a_backward_pass_is_refused():
    q, k, v = cache("cpu", keys=32)
    out = fa.attention_decode(q.requires_grad_(), k, v, int32([30, 2], "cpu"))
    with pytest.raises(NotImplementedError, match=r"attention_decode: has no gradient; .* Call attention\(q, k, v, kv"):
        out.sum().backward()


# ---- what only a GPU can show ---------------------------------------------------------------------------------------


def paged(device="cuda", **sizes):
    """A problem with its pages in a random order: (q, k, v, lens, k_pages, v_pages, table)."""
    q, k, v = cache(device, keys=1024, dim=64, dtype=torch.bfloat16, **sizes)
    return q, k, v, int32([1024, 700], device), *pages_of(k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16])
def test_cuda_graph_with_lengths_and_tables_that_change(rows):
    q, k, v, lens, k_pages, v_pages, table = paged(rows=rows)
    fa.attention_decode(q, k_pages, v_pages, lens, block_table=table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa.attention_decode(q, k_pages, v_pages, lens, block_table=table)
    for values in ([1024, 700], [1, 1024], [0, 257]):
        order = torch.randperm(128, device="cuda")
        old = table.flatten().long()
        for pages in (k_pages, v_pages):
            pages[order] = pages[old]
        table.copy_(order.view(2, 64))
        lens.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, fa.attention_decode(q, k, v, lens))


@pytest.mark.gpu
def test_a_wrong_table_stays_inside_the_cache():
    q, _, _, lens, k_pages, v_pages, table = paged()
    expected = fa.attention_decode(q, k_pages, v_pages, lens, block_table=table)
    for value in (-1, 128, 2**31 - 1, -(2**31)):
        wrong = table.clone()
        wrong[1] = value
        assert torch.equal(fa.attention_decode(q, k_pages, v_pages, lens, block_table=wrong)[0], expected[0])
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16])
def test_a_thousand_repeats_and_two_streams(rows):
    q, k, v, lens, k_pages, v_pages, table = paged(rows=rows)
    first = fa.attention_decode(q, k, v, lens)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(500):
        with torch.cuda.stream(streams[0]):
            outs.append(fa.attention_decode(q, k, v, lens))
        with torch.cuda.stream(streams[1]):
            outs.append(fa.attention_decode(q, k_pages, v_pages, lens, block_table=table))
    torch.cuda.synchronize()
    assert all(torch.equal(out, first) for out in outs)


@pytest.mark.gpu
def test_no_call_waits_for_the_gpu():
    q, _, _, lens, k_pages, v_pages, table = paged()
    try:
        with warnings.catch_warnings(action="ignore"):  # it is a prototype, torch says
            torch.cuda.set_sync_debug_mode("error")
        fa.attention_decode(q, k_pages, v_pages, lens, block_table=table)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_pages_past_two_to_the_31():
    """Pages that lie 2^27 elements apart: the last begin past 2^31."""
    q, k, v = cache("cuda", batch=1, keys=320, dim=64, dtype=torch.float16)
    storage = torch.empty(20 * 2**27, device="cuda", dtype=torch.float16)
    shape, stride = (20, 2, 16, 64), (2**27, 1024, 64, 1)
    k_pages, v_pages = (storage.as_strided(shape, stride, offset) for offset in (0, 2048))
    for pages, x in ((k_pages, k), (v_pages, v)):
        pages.copy_(x[0].unflatten(1, (20, 16)).transpose(0, 1))
    lens, table = int32([320], "cuda"), torch.arange(20, dtype=torch.int32, device="cuda")[None]
    out = fa.attention_decode(q, k_pages, v_pages, lens, block_table=table)
    assert torch.equal(out, fa.attention_decode(q, k, v, lens))
