"""Calls found again by their metadata: what is skipped the second time, and what never is."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import flashattn_lite as fa
from flashattn_lite import arguments, calls, keys, watchers
from flashattn_lite.problem import NUM_TENSORS


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def qkv(length=7, dtype=torch.float32):
    return [torch.randn(2, 4, length, 16, dtype=dtype) for _ in range(3)]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(calls, "_ready", {})


@pytest.fixture
def door(monkeypatch):
    """How often a call went through the door."""
    passed = []
    checks = arguments.check_options
    monkeypatch.setattr(arguments, "check_options", lambda **options: passed.append(options) or checks(**options))
    return passed


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: fa.attention(q, k, v, causal=True, window=(3, None)),
        lambda q, k, v: fa.scaled_dot_product_attention(q, k, v, is_causal=True),
    ],
    ids=["attention", "sdpa"],
)
def test_the_second_call_skips_the_door_and_sees_its_own_numbers(function, door):
    first, second = qkv(), qkv()
    a, b = function(*first), function(*second)
    assert len(door) == 1
    calls._ready.clear()
    assert torch.equal(b, function(*second))
    assert torch.equal(a, function(*first))
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    "changed",
    [
        lambda q, k, v: fa.attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        lambda q, k, v: fa.attention(q, k, v, causal=True),
        lambda q, k, v: fa.attention(q, k[:, :2], v[:, :2]),
        lambda q, k, v: fa.attention(q, k, v, scale=0.3),
        lambda q, k, v: fa.attention(q, k, v, sinks=torch.zeros(4)),
        lambda q, k, v: fa.attention(q.double(), k.double(), v.double(), backend="tiled"),
    ],
    ids=["strides", "causal", "heads", "scale", "sinks", "dtype"],
)
def test_other_metadata_goes_through_the_door(changed, door):
    inputs = qkv()
    fa.attention(*inputs)
    changed(*inputs)
    assert len(door) == 2


def test_each_tensor_has_its_own_place_in_16_bytes():
    """q 8 bytes off is another call than k 8 bytes off: what was compiled for an aligned k is not for this one."""
    off = lambda x: torch.cat([x.flatten()[:2], x.flatten()])[2:].view(x.shape)
    found = set()
    for moved in range(3):
        inputs = [off(x) if i == moved else x for i, x in enumerate(qkv())]
        assert [x.data_ptr() % 16 for x in inputs] == [8 * (i == moved) for i in range(3)]
        found.add(keys.of_call((*inputs, *(None,) * (NUM_TENSORS - 3), "auto")))
    assert len(found) == 3


def test_a_default_device_does_not_look_on(door):
    """torch.set_default_device is a mode to torch, but one that no call of ours is for."""
    inputs = qkv()
    fa.attention(*inputs)
    with torch.device("meta"):
        assert not calls.watched()
        assert fa.attention(*inputs).device.type == "cpu"
        with Watch():
            assert calls.watched()
    assert len(door) == 1


def test_what_only_looks_equal_is_still_refused():
    """1 == True and 1.0 == True, and both hash alike."""
    inputs = qkv()
    fa.attention(*inputs, causal=True, q_start=1, scale=1.0)
    with pytest.raises(TypeError, match="causal"):
        fa.attention(*inputs, causal=1, q_start=1, scale=1.0)
    with pytest.raises(TypeError, match="q_start"):
        fa.attention(*inputs, causal=True, q_start=True, scale=1.0)
    with pytest.raises(TypeError, match="scale"):
        fa.attention(*inputs, causal=True, q_start=1, scale=True)
    fa.scaled_dot_product_attention(*inputs)
    with pytest.raises(TypeError, match="is_causal"):
        fa.scaled_dot_product_attention(*inputs, is_causal=0)
    q, k, v = inputs[0], inputs[1][:, :2], inputs[2][:, :2]
    fa.attention(q, k, v, causal=True, q_start=0)
    with pytest.raises(ValueError, match="key"):  # a grouped call that attention() knows is not one that sdpa takes
        fa.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_whole_numbers_are_floats_every_time():
    inputs = qkv()
    want = fa.attention(*inputs, scale=1.0, softcap=30.0)
    assert all(torch.equal(fa.attention(*inputs, scale=1, softcap=30), want) for _ in range(3))
    assert all(type(call.problem.softcap) is float for call in calls._ready.values())


def test_gradients_are_recorded_whatever_ran_before():
    q, k, v = qkv()
    fa.attention(q, k, v)
    q.requires_grad_()
    out = fa.attention(q, k, v)
    assert out.requires_grad
    out.sum().backward()
    assert q.grad is not None
    with torch.no_grad():
        assert not fa.attention(q, k, v).requires_grad


def test_only_lse_is_asked_for_its_gradient():
    q, k, v = (x.requires_grad_() for x in qkv())
    fa.attention(q, k, v, return_lse=True)[1].sum().backward()
    exact = [x.detach().requires_grad_() for x in (q, k)]
    torch.logsumexp(exact[0] @ exact[1].mT / 4, -1).sum().backward()
    for x, want in zip((q, k), exact, strict=True):
        torch.testing.assert_close(x.grad, want.grad)
    assert v.grad is None or not v.grad.any()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("q", lambda q: fa.attention(q, q.detach(), q.detach())),
        ("q", lambda q: fa.attention(q, *[torch.ones(1, 2, 40, 8)] * 2)),
        ("mask", lambda mask: fa.attention(*[torch.ones(1, 2, 5, 8)] * 3, mask=mask[..., :5])),
        ("key", lambda key: fa.scaled_dot_product_attention(key.detach(), key, key.detach())),
        ("value", lambda value: fa.scaled_dot_product_attention(value.detach(), value.detach(), value)),
        ("k_cache", lambda x: fa.attention_decode(x.detach(), x, x.detach(), torch.tensor([5], dtype=torch.int32))),
        ("v_cache", lambda x: fa.attention_decode(x.detach(), x.detach(), x, torch.tensor([5], dtype=torch.int32))),
        ("x", fa.online_softmax),
        ("x", lambda x: fa.softmax_stats(x)[1]),
    ],
    ids=["attention", "few rows", "mask", "sdpa", "sdpa's value", "decode's keys", "decode", "softmax", "stats"],
)
def test_forward_mode_derivatives_are_refused(name, function):
    """The kernels would drop them; torch.func.jvp would then say 0. Also where the call is known already."""
    x, tangent = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    function(x)
    function(x)
    with pytest.raises(NotImplementedError, match=f"{name}: forward-mode derivatives are not implemented"):
        torch.func.jvp(function, (x,), (tangent,))
    at_the_door = f"{name}: forward-mode.*Use reverse mode where there is one"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=at_the_door):
        function(forward_ad.make_dual(x, tangent))
    with forward_ad.dual_level():
        assert torch.equal(function(x), function(x))
    if "cache" in name:  # which vmap runs one by one
        return
    twice = lambda x: torch.vmap(function)(x[None])
    with pytest.raises(NotImplementedError, match=f"{name}: forward-mode derivatives are not implemented"):
        torch.func.jvp(twice, (x,), (tangent,))
    weighed, _ = torch.func.jvp(lambda weight: weight * twice(x), (torch.tensor(2.0),), (torch.tensor(1.0),))
    torch.testing.assert_close(weighed[0], 2 * function(x))


def test_a_dispatch_mode_sees_the_op():
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen: list[str] = []
    inputs = qkv()
    fa.attention(*inputs)
    with Log():
        fa.attention(*inputs)
    assert any("flashattn_lite.attention" in name for name in seen)


def test_a_subclass_is_handed_to_the_op():
    class Marked(torch.Tensor):
        pass

    q, k, v = qkv()
    expected = fa.attention(q, k, v)
    out = fa.attention(q.as_subclass(Marked), k, v)
    assert torch.equal(out.as_subclass(torch.Tensor), expected)


def test_no_tensor_is_kept_alive():
    inputs = qkv()
    fa.attention(*inputs)
    fa.attention(*inputs)
    watched = [weakref.ref(x) for x in inputs]
    del inputs
    gc.collect()
    assert all(ref() is None for ref in watched)


def test_the_memory_of_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(calls, "MOST", 3)
    for length in range(1, 9):
        fa.attention(*qkv(length))
    assert len(calls._ready) <= 3


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the shapes, which the checks compare
def test_a_trace_sees_the_op():
    """torch.jit.trace, of a call that was made before: one node, which serves other values."""
    x, y = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    fa.attention(x, x, x, causal=True)
    traced = torch.jit.trace(lambda q: fa.attention(q, q, q, causal=True), x)
    assert "flashattn_lite::attention" in str(traced.graph)
    assert torch.equal(traced(y), fa.attention(y, y, y, causal=True))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 2, 3)])
def test_a_trace_of_what_replaces_torchs_serves_other_lengths(lead):
    """As one of torch's own does, for any number of dims."""
    call = lambda x: fa.scaled_dot_product_attention(x, x, x, is_causal=True)
    traced = torch.jit.trace(call, torch.randn(*lead, 20, 16))
    longer = torch.randn(*(size + 1 for size in lead), 27, 16)
    assert torch.equal(traced(longer), call(longer))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_of_batches_that_no_view_has_serves_others():
    """Not a loop over as many entries as there were when it was traced."""
    turned = lambda x: x.permute(1, 0, 2, 3, 4)
    of_keys = lambda q, k: fa.scaled_dot_product_attention(q, k, k)
    of_masks = lambda q, mask: fa.scaled_dot_product_attention(turned(q), turned(q), turned(q), mask)
    x, y = torch.randn(2, 3, 4, 5, 8), torch.randn(5, 6, 4, 5, 8)
    cases = [
        (of_keys, (x, x[:1]), (y, y[:1])),
        (of_masks, (x, torch.randn(3, 1, 4, 5, 5)), (y, torch.randn(6, 1, 4, 5, 5))),
    ]
    for call, first, then in cases:
        assert torch.equal(torch.jit.trace(call, first)(*then), call(*then))


def test_a_models_parameters_are_ordinary():
    """Sinks and biases are: an op would cost each call of such a model 60 us of Python."""
    q, k, v = qkv()
    sinks, bias = torch.nn.Parameter(torch.randn(4)), torch.nn.Parameter(torch.randn(7, 7))
    seen = []

    class Listen(torch.nn.Parameter):  # what derives from one may compute otherwise
        pass

    def ordinary(*tensors):
        seen.append(watchers.plain((q, k, v, *tensors), (None, "auto")))

    ordinary(bias, sinks), ordinary(bias, Listen(torch.randn(4)))
    assert seen == [True, False]
    want = fa.attention(q, k, v, mask=bias.detach(), sinks=sinks.detach())
    with torch.no_grad():
        assert torch.equal(fa.attention(q, k, v, mask=bias, sinks=sinks), want)
    fa.attention(q, k, v, mask=bias, sinks=sinks).sum().backward()
    assert bias.grad is not None and sinks.grad is not None
