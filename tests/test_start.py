"""Launches that go past Triton's inspection of their arguments: what must still hold of them."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")
import flashattn_lite as fa  # noqa: E402
from flashattn_lite.kernels import start  # noqa: E402


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
