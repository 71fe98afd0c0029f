"""What a report of replaced calls says, how it is copied, and that it does not grow for ever."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F

import flashattn_lite as fa
from flashattn_lite import replace
from tests.test_replace import TORCHS, nothing_stays, qkv  # noqa: F401


def test_what_never_looks_the_function_up_is_served_as_the_help_says():
    layer, x = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval(), torch.randn(2, 5, 16)
    with torch.no_grad(), fa.replace_sdpa() as report:
        layer(x), layer.self_attn(x, x, x)
    assert report.calls == 0 and "nothing called it" in str(report)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), fa.replace_sdpa() as report:
            layer(x), layer.self_attn(x, x, x, need_weights=False)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert report.calls == 2 and "nothing" not in str(report)


def test_the_report_says_what_ran_by_which_backend():
    q, k, v = qkv(2, 4, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool)
    with fa.replace_sdpa() as report:
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
        F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], attn_mask=mask, enable_gqa=True)
        F.scaled_dot_product_attention(q.expand(5, 2, 2, 4, 6, 8)[:, 0], k, v)  # no stride has these batch dims
    backend = fa.explain(q, k, v).backend
    assert list(report.kinds.values()) == [3, 1, 1] and report.calls == 5
    assert set(report.backends.values()) == {backend}
    text = str(report)
    assert "5 calls of scaled_dot_product_attention, 0 refused" in text
    shapes = "query (2, 4, 6, 8) key (2, 4, 6, 8) value (2, 4, 6, 8)"
    assert f"  3 x {backend}: {shapes} float32 on cpu, causal" in text.splitlines()
    grouped = "query (2, 4, 6, 8) key (2, 2, 6, 8) value (2, 2, 6, 8)"
    assert f"  1 x {backend}: {grouped} float32 on cpu, mask (6, 6)" in text.splitlines()
    assert repr(report) == "Report(calls=5, kinds=3, refused=0)"


def test_known_calls_are_told_apart():
    """By the shapes that callers gave, though the same call is behind them."""
    q, k, v = qkv(1, 4, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool)
    calls = [
        ((q, k, v), {}),
        ((q[0], k[0], v[0]), {}),
        ((q, k, v), {"is_causal": True}),
        ((q, k, v), {"attn_mask": mask}),
        ((q, k, v), {"attn_mask": mask[None]}),
        ((q[0], k[0], v[0]), {"attn_mask": mask}),
        ((q, k, v, mask.float()), {}),  # of the fourth's kind
    ]
    with fa.replace_sdpa() as report:
        for _ in range(4):
            for args, options in calls:
                F.scaled_dot_product_attention(*args, **options)
    assert list(report.kinds.values()) == [4, 4, 4, 8, 4, 4]
    assert len(report._known) == len(calls)  # all are quick to count
    with fa.replace_sdpa() as report, pytest.raises(TypeError, match=r"scaled_dot_product_attention\(\) missing 1"):
        F.scaled_dot_product_attention(q, k)


def test_a_cache_that_grows_does_not_fill_the_report(monkeypatch):
    monkeypatch.setattr(replace, "MOST", 3)
    monkeypatch.setattr(replace, "SHOWN", 2)
    q, k, _ = qkv(1, 2, 8, 8)
    with fa.replace_sdpa() as report:
        for length in (1, 2, 2, 3, 4, 5):
            F.scaled_dot_product_attention(q, k[:, :, :length], k[:, :, :length])
    assert (report.calls, len(report.kinds), report.others) == (6, 3, 2)
    lines = str(report).splitlines()
    assert lines[0].startswith("6 calls") and lines[1].startswith("  2 x ") and len(lines) == 4
    assert lines[3] == "  3 of other shapes"


def test_a_report_is_read_while_it_is_written():
    with fa.replace_sdpa() as report:
        q = [torch.empty(1, 1, 1, dim) for dim in range(1, 200)]
        writer = threading.Thread(target=lambda: [report._ran(None, x, x, x) for x in q])
        writer.start()
        while writer.is_alive():
            assert "calls of scaled_dot_product_attention" in str(report)
        writer.join()
    assert report.calls == len(q)


def test_a_report_is_copied_and_pickled():
    with fa.replace_sdpa() as report:
        F.scaled_dot_product_attention(*qkv(1, 2, 4, 8))
        report._known["a call"] = next(iter(report.kinds))  # with launches in it, of which nobody has a copy
        for other in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
            assert str(other) == str(report) and other.kinds is not report.kinds and not other._known
        F.scaled_dot_product_attention(*qkv(1, 2, 4, 8))
    assert (report.calls, other.calls) == (2, 1)


def test_symbols_are_counted_and_keep_their_freedom():
    from torch.fx.experimental.proxy_tensor import make_fx

    q = torch.randn(2, 2, 6, 8)
    with fa.replace_sdpa() as report:
        graph = make_fx(lambda q: F.scaled_dot_product_attention(q, q, q), tracing_mode="symbolic")(q)
    assert report.calls == 1 and "under a transform" in str(report)
    longer = torch.randn(3, 2, 9, 8)
    torch.testing.assert_close(graph(longer), TORCHS(longer, longer, longer))


def test_refusals_of_many_kinds_do_not_fill_the_report(monkeypatch):
    monkeypatch.setattr(replace, "MOST", 3)
    q, k, v = qkv(1, 2, 4, 8)
    with fa.replace_sdpa() as report:
        for i in range(1, 9):
            with pytest.raises(NotImplementedError):
                F.scaled_dot_product_attention(q, k, v, dropout_p=i / 10)
    assert len(report.refused) == 3


def test_a_full_report_asks_for_no_more_backends(monkeypatch):
    """Who calls with ever longer keys would pay for it in every call."""
    asked = []
    monkeypatch.setattr(replace, "MOST", 3)
    monkeypatch.setattr(replace.sdpa, "backend_of", lambda *args: asked.append(args) or "tiled")
    with fa.replace_sdpa() as report:
        for length in range(1, 9):
            F.scaled_dot_product_attention(*qkv(1, 2, length, 8))
    assert report.calls == 8 and len(asked) == len(report.kinds) == 3


def test_a_call_that_a_mask_of_some_class_takes_is_counted():
    class Taking(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function in (F.scaled_dot_product_attention, fa.scaled_dot_product_attention):
                return "taken"
            return super().__torch_function__(function, types, args, kwargs or {})

    x, mask = qkv(2, 3, 5, 8)[0], torch.zeros(9, 9).as_subclass(Taking)  # no mask of these scores
    with fa.replace_sdpa() as report:
        assert F.scaled_dot_product_attention(x, x, x, attn_mask=mask) == "taken"
    assert report.calls == 1 and "1 x under a transform" in str(report)


def test_contexts_that_always_overlap_leave_no_chain_behind():
    x, contexts = qkv(1, 2, 4, 8)[0], [fa.replace_sdpa() for _ in range(1200)]
    contexts[0].__enter__()
    for before, context in itertools.pairwise(contexts):
        context.__enter__()
        held = F.scaled_dot_product_attention  # as a module that was made inside may keep it
        before.__exit__(None, None, None)
    want = TORCHS(x, x, x)
    torch.testing.assert_close(held(x, x, x), want)
    contexts[-1].__exit__(None, None, None)
    assert F.scaled_dot_product_attention is TORCHS and torch.equal(held(x, x, x), want)
    assert replace._at(held).before is TORCHS


def test_a_kind_has_the_dtype_that_autocast_gives_it():
    q = torch.randn(1, 2, 5, 8)
    with fa.replace_sdpa() as report:
        F.scaled_dot_product_attention(q, q, q)
        with torch.autocast("cpu", torch.bfloat16):
            F.scaled_dot_product_attention(q, q, q)
            F.scaled_dot_product_attention(*[q.double()] * 3)
    assert {kind.dtype: count for kind, count in report.kinds.items()} == {
        torch.float32: 1,
        torch.bfloat16: 1,
        torch.float64: 1,
    }
