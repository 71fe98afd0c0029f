"""What only a GPU can show: the same bits a thousand times, streams, graphs, no waiting, addresses past 2^31."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.reference import attention_reference
from flashattn_lite.testing import Case, assert_close_to_oracle

pytestmark = pytest.mark.gpu


def qkv(*, length=1000, dim=64, dtype=torch.bfloat16, heads=8, heads_kv=2, batch=2):
    torch.manual_seed(0)
    return [torch.randn(batch, h, length, dim, device="cuda", dtype=dtype) for h in (heads, heads_kv, heads_kv)]


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside other work"])
@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, "triton") for case in ("dense", "redone", "unaligned", "packed")]
    + [pytest.param(case, "hopper", marks=pytest.mark.hopper) for case in ("dense", "redone", "packed")],
)
def test_a_thousand_repeats_give_the_same_bits(case, backend, busy):
    q, k, v = qkv(dim=63 if case == "unaligned" else 64)
    if case == "redone":
        k[:, :, 500:] *= 50  # scores far above the reference of the first tiles
    if case == "packed":
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        cu = torch.tensor([0, 300, 301, 2000], dtype=torch.int32, device="cuda")
        options = {"max_seqlen_q": 1699, "max_seqlen_k": 1699, "backend": backend}
        call = lambda: fa.attention_varlen(q, k, v, cu, cu, causal=True, **options)
    else:
        call = lambda: fa.attention(q, k, v, causal=case != "redone", backend=backend)
    first = call()
    other, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for i in range(1000):
        if busy and i % 4 == 0:
            with torch.cuda.stream(other):
                noise = (noise @ noise).clamp_(-1, 1)
        different += (call() != first).sum()
    assert not first.isnan().any()
    assert different.item() == 0


def test_two_streams_at_once():
    inputs = [qkv(length=777), qkv(length=1300)]
    expected = [fa.attention(*x, causal=True) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs = []
    for _ in range(50):
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                outs.append(fa.attention(*x, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[i % 2]) for i, out in enumerate(outs))


def test_cuda_graph_with_lengths_that_change():
    q, k, v = qkv(length=256)
    lens = torch.tensor([256, 100], dtype=torch.int32, device="cuda")
    fa.attention(q, k, v, causal=True, kv_lens=lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa.attention(q, k, v, causal=True, kv_lens=lens)
    for values in ([256, 100], [1, 256], [0, 7]):
        lens.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, fa.attention(q, k, v, causal=True, kv_lens=lens))


@pytest.fixture
def gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs that one process sees: run it by itself, without -n")
    with torch.cuda.device(0):
        yield [torch.device("cuda", i) for i in (0, 1, 0, 1)]


def test_the_tensors_say_which_gpu(gpus):
    """Not the current device: counters, streams and kernels are those of the GPU that holds q."""
    for device in gpus:
        q, k, v = (x.to(device) for x in qkv(length=300))
        long = [torch.randn(1, 2, n, 64, device=device, dtype=q.dtype) for n in (1, 4096, 4096)]
        full = torch.tensor([4096], dtype=torch.int32, device=device)
        several = [torch.randn(2, cols, device=device) for cols in (1 << 18, (1 << 18) + 1, 5001)]
        for _ in range(2):
            exact = attention_reference(q.double(), k.double(), v.double(), causal=True)
            for backend in ("auto", "triton"):
                out = fa.attention(q, k, v, causal=True, backend=backend)
                torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=0)  # five bfloat16 eps
            exact = attention_reference(*(x.double() for x in long))
            # A mean of 4096 normal numbers is some hundredths, of which bfloat16 keeps eight bits.
            torch.testing.assert_close(fa.attention_decode(*long, full).double(), exact, atol=2e-3, rtol=0)
            for rows in several:  # both sum up to 2^18 float32, in other orders: some tens of eps
                torch.testing.assert_close(fa.online_softmax(rows), rows.softmax(-1), atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "mask", "packed", "few rows", "parts"])
def test_gradients_and_graphs_on_either_gpu(gpus, kind):
    """What one GPU gave, the other gives to the bit, also where a graph is captured or autograd's thread runs."""
    seen = []
    for device in gpus:
        rows = {"few rows": 4, "parts": 128}.get(kind, 300)
        q, k, v = (x.to(device).requires_grad_() for x in qkv(length=8192 if rows < 300 else rows, batch=1))
        q = q[:, :, :rows].detach().requires_grad_()
        options = {"causal": True}
        if kind == "mask":
            torch.manual_seed(1)
            options["mask"] = torch.randn(8, 300, 300, device="cuda:0").to(device)
        call = lambda q=q, k=k, v=v, options=options: fa.attention(q, k, v, **options)
        if kind == "packed":
            q, k, v = (x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v))
            cu = torch.tensor([0, 100, 300], dtype=torch.int32, device=device)
            call = lambda q=q, k=k, v=v, cu=cu: fa.attention_varlen(
                q, k, v, cu, cu, causal=True, max_seqlen_q=200, max_seqlen_k=200
            )
        out = call()
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        with torch.no_grad(), torch.cuda.device(device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):  # torch's own is the first GPU's
                again = call()
            graph.replay()
        seen.append([x.detach().cpu() for x in (out, again, *grads)])
    assert all(bool(x.isfinite().all()) for x in seen[0])
    assert torch.equal(seen[0][0], seen[0][1])
    assert all(torch.equal(*pair) for other in seen[1:] for pair in zip(seen[0], other, strict=True))


def test_no_call_waits_for_the_gpu():
    q, k, v = qkv(length=100)
    lens = torch.tensor([50, 100], dtype=torch.int32, device="cuda")
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, 60, 200], dtype=torch.int32, device="cuda")
    try:
        with warnings.catch_warnings(action="ignore"):  # it is a prototype, torch says
            torch.cuda.set_sync_debug_mode("error")
        fa.attention(q, k, v, causal=True, kv_lens=lens)
        fa.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        fa.attention_varlen(*packed, cu, cu, max_seqlen_q=140, max_seqlen_k=140)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_wrong_tables_stay_inside_the_tensors():
    """Whatever cu_seqlens and kv_lens hold on a GPU, nothing outside is read or written; other sequences are right."""
    q, k, v = (torch.randn(100, h, 32, device="cuda", dtype=torch.float16) for h in (4, 2, 2))
    right = torch.tensor([0, 40, 100], dtype=torch.int32, device="cuda")
    expected = fa.attention_varlen(q, k, v, right, right, max_seqlen_q=100, max_seqlen_k=100)
    for values in ([0, 40, 2**31 - 1], [-7, 40, 100], [0, 40, -(2**31)]):
        wrong = torch.tensor(values, dtype=torch.int32, device="cuda")
        out = fa.attention_varlen(q, k, v, wrong, wrong, max_seqlen_q=100, max_seqlen_k=100)
        assert torch.equal(out[:40], expected[:40])
    torch.cuda.synchronize()


@pytest.mark.parametrize("aligned", [True, False])
def test_offsets_past_two_to_the_31(aligned):
    """Keys whose rows lie 2^25 elements apart, by strides that take TMA and by others: the last are past 2^31."""
    rows, apart = 80, 2**25 if aligned else 2**25 + 1
    storage = torch.empty(rows * apart + 64, device="cuda", dtype=torch.float16)
    torch.manual_seed(0)
    small = torch.randn(2, 1, 1, rows, 64, device="cuda", dtype=torch.float16)
    k = storage.as_strided((1, 1, rows, 64), (rows * apart, rows * apart, apart, 1))
    k.copy_(small[0])
    q, v = small[1][:, :, :3], small[1]
    exact = attention_reference(q.double(), small[0].double(), v.double())
    torch.testing.assert_close(fa.attention(q, k, v).double(), exact, atol=2e-3, rtol=0)  # two float16 eps


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    ("dtype", "dim", "len_k"),
    [(torch.float32, 128, 70), (torch.bfloat16, 128, 4096), (torch.bfloat16, 64, 300), (torch.float16, 256, 300)],
)
def test_the_portable_kernels_leave_room_for_a_masks_tiles(dtype, dim, len_k, kind):
    """Where its tiles are the largest: they must still be started, forward and backward."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, dim, device="cuda", dtype=dtype, requires_grad=True) for n in (70, len_k, len_k))
    mask = torch.randn(1, 1, 70, len_k, device="cuda")
    mask = mask < 1 if kind == "bool" else mask
    out = fa.attention(q, k, v, mask=mask, backend="triton")
    exact = attention_reference(q.detach().double(), k.detach().double(), v.detach().double(), mask=mask)
    eps = 8 * torch.finfo(dtype).eps  # of the largest result: P and O are rounded, and float32's sums
    torch.testing.assert_close(out.double(), exact, atol=eps * float(exact.abs().max()), rtol=0)
    assert all(bool(torch.isfinite(x).all()) for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "dim", [(64, 8), (64, 16), (128, 16), (32, 4), (128, 32), (72, 24), (136, 32), (16, 64), (32, 128)], ids=str
)
def test_narrow_values_in_aligned_rows(dim, dtype):
    """Beside those between 16-byte addresses (test_attention.py), forward and backward."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, n, d, device="cuda", dtype=dtype) for n, d in ((70, dim[0]), (100, dim[0]), (100, dim[1]))
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out, exact = fa.attention(*leaves, causal=True, backend="triton"), attention_reference(*wide, causal=True)
    d_out = torch.randn_like(out)
    got = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    wanted = [exact.detach(), *torch.autograd.grad(exact, wide, d_out.double())]
    eps = 8 * torch.finfo(dtype).eps + 2e-6
    for ours, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), want, atol=eps * float(want.abs().max()), rtol=eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [(64, 8), (128, 16), (136, 32), (8, 24), (16, 64)], ids=str)
def test_narrow_values_of_rows_that_are_done_again(dim, dtype):
    """Scores that leave the first tile's maximum far behind, and an infinity of V: loops of their own."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, n, d, device="cuda", dtype=dtype) for n, d in ((70, dim[0]), (200, dim[0]), (200, dim[1]))
    )
    k[:, :, 150:] *= 300
    v[:, 0, 100, 1] = math.inf
    lens = torch.tensor([200, 170], device="cuda", dtype=torch.int32)
    case = Case(q, k, v, causal=True, kv_lens=lens)
    assert_close_to_oracle(*fa.attention(q, k, v, return_lse=True, backend="triton", **case.options()), case)
