"""Launches that go past Triton's inspection of their arguments: what must still hold of them."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")
import flashattn_lite as fa  # noqa: E402
from flashattn_lite.kernels import softmax_launch, start  # noqa: E402


def test_on_makes_the_device_current_only_where_it_is_not(monkeypatch):
    current, seen = [1], []

    class Guard:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    for index in (1, 0):
        start.on(torch.device("cuda", index), lambda x: seen.append((x, current[-1], len(current))), "x")
    assert seen == [("x", 1, 1), ("x", 0, 2)]
    assert current == [1]


def test_no_two_launches_have_one_counter(monkeypatch):
    made = []
    monkeypatch.setattr(start, "POOL", 3)
    monkeypatch.setattr(
        start, "lasting_zeros", lambda *shape: made.append(torch.zeros(3, dtype=torch.int32)) or made[-1]
    )
    monkeypatch.setattr(start, "current_stream", lambda index: 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    counters = start.Counters()
    given = [counters.next(torch.device("cuda", 0)).data_ptr() for _ in range(7)]
    assert given == [x[i].data_ptr() for x in made for i in range(3)][:7] and len(made) == 3


def test_a_profilers_hook_is_noticed():
    hook = lambda *_: None
    assert not start.hooked()
    for chain in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        chain.add(hook)
        try:
            assert start.hooked()
        finally:
            chain.remove(hook)
    assert not start.hooked()


@pytest.mark.gpu
def test_a_profilers_hook_sees_every_launch():
    q = torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.float16)
    want, seen = fa.attention(q, q, q), []
    hook = lambda metadata: seen.append(metadata.get()["name"])
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        got = [fa.attention(q, q, q) for _ in range(3)]
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(seen) == 3 and all("attention" in name for name in seen)
    assert all(torch.equal(out, want) for out in [*got, fa.attention(q, q, q)])
    assert len(seen) == 3


def test_a_counter_keeps_its_pool():
    """Another thread's call may begin the next pool before this launch has begun."""
    pool = torch.zeros(4, dtype=torch.int32)
    there = weakref.ref(pool)
    counter = start.Address(pool, 8)
    assert counter.data_ptr() == pool.data_ptr() + 8 and counter.dtype == torch.int32
    del pool
    gc.collect()
    assert there() is not None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own: its first graph is empty, it would like TF32
@pytest.mark.parametrize("kind", ["attention", "few rows", "packed", "softmax", "stats", "gradients"])
def test_cuda_graphs_of_torch_compile(kind, monkeypatch):
    """mode="reduce-overhead" warms up in a pool of memory of its own, in which nothing of ours may stay."""
    monkeypatch.setattr(start.counters, "pools", {})
    monkeypatch.setattr(softmax_launch, "_counts", {})
    monkeypatch.setattr(softmax_launch, "_words", {})
    torch.manual_seed(0)
    rows = 2 if kind == "few rows" else 300
    q, k, v = (torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16) for n in (rows, 2100, 2100))
    given, call = (q, k, v), lambda q, k, v: fa.attention(q, k, v, causal=True)
    if kind == "packed":
        cu, cu_k = (torch.tensor([0, n // 3, n], dtype=torch.int32, device="cuda") for n in (300, 2100))
        given = *(x[0].transpose(0, 1) for x in given), cu, cu_k
        call = lambda *args: fa.attention_varlen(*args, causal=True, max_seqlen_q=300, max_seqlen_k=2100)
    if kind in ("softmax", "stats"):
        given = (torch.randn(8, 1 << 18, device="cuda", dtype=torch.bfloat16),)
        call = fa.online_softmax if kind == "softmax" else lambda x: fa.softmax_stats(x)[1]
    wants = kind == "gradients"
    given = tuple(x.requires_grad_() if wants else x for x in given)
    compiled = torch.compile(call, mode="reduce-overhead", fullgraph=True)
    expected = call(*given)
    for _ in range(4):  # twice to warm up, once to capture, once to replay
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*given)
        assert torch.equal(out, expected)
        if wants:
            ours, theirs = (torch.autograd.grad(x.float().sum(), given) for x in (out, call(*given)))
            assert all(map(torch.equal, ours, theirs))


BEHIND_THE_MAIN_THREAD = """
import contextlib, threading, torch
from flashattn_lite.kernels import start

torch.cuda.current_stream, torch.cuda.stream = lambda device: None, lambda stream: contextlib.nullcontext()

def work():
    threading.main_thread().join()
    print(start.lasting_zeros(3, torch.int32, torch.device("cpu")).tolist(), flush=True)

threading.Thread(target=work).start()
"""


def test_a_worker_may_call_when_the_main_thread_has_returned():
    done = subprocess.run([sys.executable, "-c", BEHIND_THE_MAIN_THREAD], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[0, 0, 0]", done.stderr


def test_an_exit_handler_may_call(monkeypatch):
    """Where no thread can be started any more. Where there are too many, what can't be kept apart is an error."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    says = "can't create new thread at interpreter shutdown"

    def refuse(self):
        raise RuntimeError(says)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert start.lasting_zeros(3, torch.int32, torch.device("cpu")).tolist() == [0, 0, 0]
    says = "can't start new thread"
    with pytest.raises(RuntimeError, match="can't start"):
        start.lasting_zeros(3, torch.int32, torch.device("cpu"))


def test_what_fails_in_the_other_thread_fails_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="negative"):
        start.lasting_zeros(-1, torch.int32, torch.device("cpu"))
