"""Calls that autograd records: without the op where nothing else looks on, and known again with their gradients."""

from __future__ import annotations

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite import calls, ops
from tests.test_calls import Watch, qkv


def test_what_autograd_alone_sees_is_the_ops_derivative():
    """Recorded without the op, or with it where a mode looks on: the same bits, and no second derivatives."""

    def gradients(function):
        inputs = [x.clone().requires_grad_() for x in qkv_fixed]
        out, lse = function(*inputs, causal=True, return_lse=True)
        return out, torch.autograd.grad((out * out.detach()).sum() + lse.sum(), inputs)

    qkv_fixed = qkv()
    out, direct = gradients(fa.attention)
    assert type(out.grad_fn) is ops.Attention._backward_cls
    with Watch():
        out, through_the_op = gradients(fa.attention)
    assert type(out.grad_fn) is not ops.Attention._backward_cls
    assert type(out.grad_fn).__name__ == "AttentionBackward" == ops.Attention._backward_cls.__name__
    assert all(torch.equal(a, b) for a, b in zip(direct, through_the_op, strict=True))
    q, k, v = (x.clone().requires_grad_() for x in qkv_fixed)
    (once,) = torch.autograd.grad(fa.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no gradients of their own; .*attention_reference"):
        once.sum().backward()


def test_a_profile_has_each_call_as_its_op():
    """Once it is known too, and its gradients; a recorded one twice, above autograd and within, below it."""
    q, k, v = (x.requires_grad_() for x in qkv())
    lens = torch.tensor([5, 7], dtype=torch.int32)

    def everything():
        torch.autograd.grad(fa.attention(q, k, v).sum(), (q, k, v))
        with torch.no_grad():
            fa.scaled_dot_product_attention(q, k, v)
            fa.attention_decode(q[:, :, :2], k, v, lens)
            fa.online_softmax(q), fa.softmax_stats(q)

    everything()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        everything()
    seen = {event.key: event for event in profile.key_averages(group_by_input_shape=True)}
    counts = {"attention": 3, "attention_backward": 1, "attention_decode": 1, "online_softmax": 1, "softmax_stats": 1}
    assert {name: seen[f"flashattn_lite::{name}"].count for name in counts} == counts
    assert seen["flashattn_lite::attention"].input_shapes[:3] == [[2, 4, 7, 16]] * 3
    assert "AttentionBackward" in seen


def test_known_gradients_are_made_without_the_op_and_others_with_all_checks(monkeypatch):
    """The second time by metadata alone; a batch of gradients in the guise of one is none that is known."""
    monkeypatch.setattr(calls, "_gradients", {})
    asked, slow = [], calls.gradients
    monkeypatch.setattr(calls, "gradients", lambda *args: asked.append(args) or slow(*args))
    q, k, v = (x.requires_grad_() for x in qkv())
    run = lambda d_out, **how: torch.autograd.grad(fa.attention(q, k, v), (q, k, v), d_out, **how)
    d_out = torch.randn(3, 2, 4, 7, 16)
    first = run(d_out[0])
    assert all(torch.equal(a, b) for a, b in zip(run(d_out[0]), first, strict=True)) and len(asked) == 1
    for got, want in zip(run(d_out, is_grads_batched=True), zip(*map(run, d_out), strict=True), strict=True):
        assert torch.equal(got, torch.stack(want))
    asked.clear()
    run(d_out[0].mT.contiguous().mT), run(d_out[0][..., :1].expand(2, 4, 7, 16))
    assert len(asked) == 2


def test_what_known_gradients_are_known_by(monkeypatch):
    """Which are asked for, and whether lse's is there. A mode sees the op, and there are no second derivatives."""
    monkeypatch.setattr(calls, "_gradients", {})
    q, k, v = (x.requires_grad_() for x in qkv())
    out, lse = fa.attention(q, k, v, return_lse=True)
    of_out, of_both = out.square().sum(), out.square().sum() + lse.sum()
    run = lambda loss, *leaves: torch.autograd.grad(loss, leaves, retain_graph=True)
    (dq,), all_three = run(of_out, q), run(of_out, q, k, v)
    assert torch.equal(dq, all_three[0]) and all(x is not None for x in all_three)
    both = run(of_both, q, k, v)
    fresh = {}
    with monkeypatch.context() as patch:
        patch.setattr(calls, "_gradients", fresh)
        want = run(of_both, q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(both, want, strict=True)) and not torch.equal(both[0], dq)
    assert torch.equal(run(of_out, q)[0], dq)

    class Seen(Watch):
        ops = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.ops += (str(function),)
            return super().__torch_dispatch__(function, types, args, kwargs)

    with Seen() as seen:
        run(of_out, q)
    assert any("attention_backward" in op for op in seen.ops)
    (once,) = torch.autograd.grad(of_out, q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no gradients of their own"):
        once.sum().backward()


def test_what_comes_back_otherwise_is_made_contiguous_first(monkeypatch):
    """d_out, and an lse that somebody kept for autograd, though their gradients are known."""
    made = []
    prepare = calls.dispatch.prepare_gradients
    noted = lambda make: lambda *tensors: made.append(tensors) or make(*tensors)
    monkeypatch.setattr(calls.dispatch, "prepare_gradients", lambda *given: noted(prepare(*given)))
    monkeypatch.setattr(calls, "_gradients", {})
    turned = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 3 else x
    for unpack in (lambda x: x, turned):
        q, k, v = (x.requires_grad_() for x in qkv())
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = fa.attention(q, k, v)
        torch.autograd.grad(out, q, torch.ones(2, 4, 7, 1).expand_as(out))
    assert len(made) == 2
    assert all(lse.is_contiguous() and d_out.stride(-1) == 1 for _, _, lse, d_out, _ in made)
