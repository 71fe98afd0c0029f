"""What compiled code calls again is dispatched once, and neither checked nor planned anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import flashattn_lite as fa
from flashattn_lite import calls, decode, ops, softmax

LENS = torch.tensor([9, 4], dtype=torch.int32)
CU = torch.tensor([0, 3, 7], dtype=torch.int32)
OF_OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": lambda x: fa.attention(x, x, x, causal=True, window=(4, 0)),
    "attention_decode": lambda x: fa.attention_decode(x[:, :, :1], x, x, LENS.to(x.device)),
    "online_softmax": fa.online_softmax,
    "softmax_stats": lambda x: fa.softmax_stats(x, 1)[1],
}


def events(call: Callable[[], Any], name: str) -> int:
    """How often the dispatcher came to an op."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call()
    return sum(event.name == f"flashattn_lite::{name}" for event in profile.events())


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", OF_OPS)
def test_an_op_is_dispatched_once(name, inference, device):
    compiled = torch.compile(OF_OPS[name], fullgraph=True, backend="aot_eager")
    with torch.inference_mode() if inference else torch.no_grad():
        x = torch.randn(2, 4, 16, 32, device=device)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), OF_OPS[name](x))
        assert events(lambda: compiled(x), name) == 1


def test_gradients_are_dispatched_once():
    compiled = torch.compile(lambda x: fa.attention(x, x, x), fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    compiled(x).sum().backward()
    assert events(lambda: compiled(x).sum().backward(), "attention_backward") == 1


def test_attention_is_prepared_once(monkeypatch):
    made = []
    prepare = calls.dispatch.prepare
    monkeypatch.setattr(calls, "_ready", {})
    monkeypatch.setattr(calls.dispatch, "prepare", lambda *given: made.append(given) or prepare(*given))
    checked = []
    monkeypatch.setattr(ops, "check_window", lambda window: checked.append(window))
    compiled = torch.compile(OF_OPS["attention"], fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4, 16, 32)
    for _ in range(3):
        compiled(x)
    assert len(made) == len(checked) == 1
    torch.testing.assert_close(compiled(x), OF_OPS["attention"](x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention_decode", "online_softmax", "softmax_stats"])
def test_decoding_and_softmax_are_planned_once(name, monkeypatch):
    made = []
    monkeypatch.setattr(decode, "_ready", {})
    monkeypatch.setattr(softmax, "_ready", {})
    for module in (decode, softmax):
        prepared = module._prepared
        monkeypatch.setattr(
            module, "_prepared", lambda *given, prepared=prepared: made.append(given) or prepared(*given)
        )
    compiled = torch.compile(OF_OPS[name], fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4, 16, 32, device="cuda")
    for inference in (False, True):
        with torch.inference_mode() if inference else torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(compiled(x), OF_OPS[name](x))
    assert 1 <= len(made) <= 2, "once in compiled code, once at the door"


def test_lengths_are_looked_at_in_every_call():
    """On the CPU: the same tensors may have other numbers."""
    compiled = torch.compile(
        lambda x, cu: fa.attention_varlen(x, x, x, cu, cu, max_seqlen_q=4, max_seqlen_k=4), backend="aot_eager"
    )
    x, cu = torch.randn(7, 4, 8), CU.clone()
    for _ in range(3):
        compiled(x, cu)
    cu[1] = 9
    with pytest.raises(ValueError, match="cu_seqlens_q: must not decrease"):
        compiled(x, cu)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_dynamo_compiles_none_of_what_an_op_does():
    """In a frame that it runs between two graphs."""
    op = torch.ops.flashattn_lite.attention.default
    x = torch.randn(1, 2, 8, 16)
    call = lambda x: op(x, x, x, *(None,) * 5, True, *(None,) * 7, "auto")[0]
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        want = call(x)
        torch._dynamo.reset()
        torch._dynamo.disallow_in_graph(op)
        try:
            compiled = torch.compile(lambda x: call(x) * 2, backend="eager")
            for _ in range(3):
                torch.testing.assert_close(compiled(x), 2 * want)
        finally:
            torch._dynamo.allow_in_graph(op)
            torch._dynamo.reset()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_what_stands_for_zeros_is_made_first(device):
    """Its address is 0."""
    op, x = torch.ops.flashattn_lite.attention.default, torch.randn(1, 2, 8, 16, device=device)
    call = lambda v: op(x, x, v, *(None,) * 5, False, *(None,) * 7, "auto")[0]
    with torch.no_grad():
        call(torch.zeros_like(x)), call(torch.zeros_like(x)), fa.attention(x, x, x), fa.attention(x, x, x)
        nothing = torch._efficientzerotensor(x.shape, device=device)
        for out in (call(nothing), fa.attention(x, x, nothing), fa.scaled_dot_product_attention(x, x, nothing)):
            assert torch.equal(out, torch.zeros_like(x))


@pytest.mark.parametrize("name", OF_OPS)
def test_who_looks_on_sees_a_call_that_is_known(name, device):
    """A mode, vmap and a tracer: of an op that was called with the like before, gradients or none."""
    x = torch.randn(2, 4, 16, 32, device=device)
    op = getattr(torch.ops.flashattn_lite, name).default
    given = {
        "attention": (x, x, x, *(None,) * 5, True, None, 4, 0, None, None, None, None, "auto"),
        "attention_decode": (x[:, :, :1], x, x, LENS.to(device), None, None, True, None, None, None, None, "auto"),
        "online_softmax": (x, 3),
        "softmax_stats": (x, 1),
    }[name]
    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        want = [op(*given) for _ in range(3)][-1]
        with Look():
            got = op(*given)
        torch.testing.assert_close(got, want)
        assert op in seen
        mapped = torch.vmap(lambda first: op(first, *given[1:]))(torch.stack([given[0], 2 * given[0]]))
        first = mapped[0] if isinstance(mapped, tuple) else mapped
        torch.testing.assert_close(first[0], want[0] if isinstance(want, tuple) else want)
        traced = make_fx(lambda *tensors: op(*tensors, *given[1:]))(given[0])
        assert any(node.target is op for node in traced.graph.nodes)
