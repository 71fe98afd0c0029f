"""Modes and classes that may take a call of torch's function may take it while ours stands there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashattn_lite as fa
from flashattn_lite import replace


class Watch(torch.overrides.TorchFunctionMode):
    """Remembers whether a call was known by where the function stands, and as what it was given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.seen.append((len(args), sorted(kwargs or {})))
        return function(*args, **(kwargs or {}))


class Skipping(torch.overrides.TorchFunctionMode):
    """As diffusers has it for guidance: attention is skipped, the values come out."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            return args[2] if len(args) > 2 else kwargs["value"]
        return function(*args, **(kwargs or {}))


class Known(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            return "taken"
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.fixture
def qkv():
    return torch.randn(3, 1, 2, 5, 8).unbind()


def test_a_mode_sees_the_call_as_it_was_made_and_ours_runs_behind_it(qkv):
    q, k, v = qkv
    want = fa.scaled_dot_product_attention(q, k, v, is_causal=True)
    with fa.replace_sdpa() as report, Watch() as watch:
        out = F.scaled_dot_product_attention(q, k, value=v, is_causal=True)
    assert torch.equal(out, want)
    assert watch.seen == [(2, ["is_causal", "value"])]
    assert report.calls == 1 and f"1 x {fa.explain(q, k, v).backend}" in str(report)


def test_a_mode_that_skips_attention_skips_ours(qkv):
    q, k, v = qkv
    with fa.replace_sdpa() as report, Skipping():
        assert F.scaled_dot_product_attention(q, k, v) is v
        assert F.scaled_dot_product_attention(query=q, key=k, value=v) is v
    assert report.calls == 2 and "2 x under a transform" in str(report)


def test_a_class_that_knows_the_function_by_where_it_stands_takes_the_call(qkv):
    q, k, v = qkv
    for call in (
        lambda: F.scaled_dot_product_attention(q.as_subclass(Known), k, v),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(9, 9).as_subclass(Known)),
    ):
        with fa.replace_sdpa() as report, fa.replace_sdpa() as inner:
            assert call() == "taken"
        assert (report.calls, inner.calls) == (0, 1)


def test_a_mask_that_is_no_tensor_may_take_the_call(qkv):
    class Other:
        __torch_function__ = Known.__torch_function__

    with fa.replace_sdpa() as report:
        assert F.scaled_dot_product_attention(*qkv, attn_mask=Other()) == "taken"
    assert report.calls == 1


def test_what_somebody_put_on_top_is_not_run_twice(qkv, monkeypatch):
    q, k, v = qkv
    with fa.replace_sdpa() as report:
        ours, runs = F.scaled_dot_product_attention, []

        def theirs(query, *args, **options):
            runs.append(1)
            return ours(2 * query, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", theirs)
            with Watch():
                out = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(out, fa.scaled_dot_product_attention(2 * q, k, v))
    assert len(runs) == report.calls == 1


def test_an_error_behind_a_mode_is_counted_once(qkv):
    q, k, v = qkv
    with fa.replace_sdpa() as report, Watch(), pytest.raises(NotImplementedError, match="dropout_p"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert report.calls == 0 and list(report.refused.values()) == [1]


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("watched", [False, True])
def test_a_causal_bias_is_no_mask_of_a_shape(qkv, bias, watched):
    q, k, v = qkv
    want = fa.scaled_dot_product_attention(q[:, :, :3], k, v, attn_mask=bias(3, 5))
    with fa.replace_sdpa() as report:
        if watched:
            with Watch() as watch:
                out = F.scaled_dot_product_attention(q[:, :, :3], k, v, attn_mask=bias(3, 5))
            assert watch.seen == [(3, ["attn_mask"])]
        else:
            out = F.scaled_dot_product_attention(q[:, :, :3], k, v, attn_mask=bias(3, 5))
    assert torch.equal(out, want)
    (kind,) = report.kinds
    assert kind.mask is None and kind.is_causal and report.backends[kind] == fa.explain(q, k, v).backend


def test_refusals_are_printed_up_to_a_number():
    with fa.replace_sdpa() as report:
        for length in range(1, 31):
            with pytest.raises(NotImplementedError):
                F.scaled_dot_product_attention(*[torch.zeros(1, 1, length, 300)] * 3)
    lines = str(report).splitlines()
    assert len(lines) == 22 and lines[0].endswith("30 refused") and lines[-1] == "  10 refused for other reasons"


def test_those_who_left_in_reverse_are_not_called_through():
    """Else each call of what stays on top goes through all that ever stood below."""
    contexts = [fa.replace_sdpa() for _ in range(4)]
    for context in contexts:
        context.__enter__()
    top = replace._at(F.scaled_dot_product_attention)
    for context in contexts[2::-1]:
        context.__exit__(None, None, None)
    below = replace._at(top.before)
    contexts[3].__exit__(None, None, None)
    assert below is None
