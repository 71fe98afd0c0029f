"""Ours in the place of torch's function: what it serves, what it reports, and that torch's comes back."""

from __future__ import annotations

import functools
import gc
import threading

import pytest
import torch
import torch.nn.functional as F

import flashattn_lite as fa
from flashattn_lite.target import interpreting

TORCHS = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    stayed = F.scaled_dot_product_attention is not TORCHS
    F.scaled_dot_product_attention = TORCHS
    fa.uninstall()
    assert not stayed


def qkv(*shape):
    return [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def test_a_module_of_torchs_runs_ours_and_torchs_comes_back():
    layer, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    expected, _ = layer(x, x, x, need_weights=False)
    with fa.replace_sdpa() as report:
        assert F.scaled_dot_product_attention is not TORCHS
        out, _ = layer(x, x, x, need_weights=False)
    assert F.scaled_dot_product_attention is TORCHS
    torch.testing.assert_close(out, expected)
    assert report.calls == 1 and not report.refused
    ((kind, count),) = report.kinds.items()
    assert count == 1 and kind.query == (2, 2, 5, 8) and not kind.is_causal and kind.mask is None
    torch.autograd.grad(out.sum(), layer.in_proj_weight)  # by ours


def test_torchs_comes_back_where_the_code_inside_fails():
    with pytest.raises(ZeroDivisionError), fa.replace_sdpa():
        1 / 0  # noqa: B018
    assert F.scaled_dot_product_attention is TORCHS


def test_what_ours_refuses_is_refused_not_given_to_torch():
    q, k, v = qkv(1, 2, 4, 8)
    with fa.replace_sdpa() as report:
        with pytest.raises(NotImplementedError, match="dropout_p: dropout of attention weights is not implemented"):
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        with pytest.raises(TypeError, match="key"):
            F.scaled_dot_product_attention(q, k.double(), v)
    assert report.calls == 0
    assert [text.split(":")[0] for text in report.refused] == ["dropout_p", "key"]
    assert "0 calls of scaled_dot_product_attention, 2 refused" in str(report)
    assert "  1 x refused: dropout_p: " in str(report)


def test_contexts_nest_and_each_counts_its_own():
    q, k, v = qkv(1, 2, 4, 8)
    with fa.replace_sdpa() as outer:
        F.scaled_dot_product_attention(q, k, v)
        with fa.replace_sdpa() as inner:
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    assert (outer.calls, inner.calls) == (2, 1)


@pytest.mark.skipif(interpreting(), reason="Triton's interpreter runs one kernel at a time")
def test_calls_of_other_threads_are_counted():
    q, k, v = qkv(1, 2, 4, 8)
    with fa.replace_sdpa() as report:
        many = [threading.Thread(target=F.scaled_dot_product_attention, args=(q, k, v)) for _ in range(8)]
        for thread in many:
            thread.start()
        for thread in many:
            thread.join()
    assert report.calls == 8 and len(report.kinds) == 1


def test_a_call_under_a_transform_is_counted():
    q, k, v = qkv(3, 1, 2, 4, 8)
    with fa.replace_sdpa() as report:
        out = torch.vmap(F.scaled_dot_product_attention)(q, k, v)
        F.scaled_dot_product_attention(q[0], k[0], v[0])  # the same shapes, by a backend
    torch.testing.assert_close(out, TORCHS(q, k, v))
    assert report.calls == 2
    assert list(report.backends.values()) == ["under a transform", fa.explain(q[0], k[0], v[0]).backend]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(dynamic):
    q, k, v = qkv(1, 2, 4, 8)

    def model(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1

    expected = model(q, k, v)
    graphs = []

    def look(graph, _):
        graphs.append(graph)
        return graph.forward

    with fa.replace_sdpa() as report:
        out = torch.compile(model, fullgraph=True, backend=look, dynamic=dynamic)(q, k, v)
    torch.testing.assert_close(out, expected)
    assert len(graphs) == 1 and "flashattn_lite" in graphs[0].code and report.calls == 0


def test_installed_until_uninstalled():
    q, k, v = qkv(1, 2, 4, 8)
    fa.uninstall()  # not installed: nothing to do
    report = fa.install()
    ours = F.scaled_dot_product_attention
    assert ours is not TORCHS and fa.install() is report and F.scaled_dot_product_attention is ours
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), TORCHS(q, k, v))
    with fa.replace_sdpa() as inner:
        F.scaled_dot_product_attention(q, k, v)
    assert F.scaled_dot_product_attention is ours
    fa.uninstall()
    assert F.scaled_dot_product_attention is TORCHS
    assert (report.calls, inner.calls) == (1, 1)
    assert fa.install() is not report  # a new one counts from 0
    fa.uninstall()


def test_installed_inside_a_context_stays_when_it_ends():
    q, k, v = qkv(1, 2, 4, 8)
    with fa.replace_sdpa() as inside:
        report = fa.install()
        F.scaled_dot_product_attention(q, k, v)
    assert F.scaled_dot_product_attention is not TORCHS
    F.scaled_dot_product_attention(q, k, v)
    assert fa.install() is report and (inside.calls, report.calls) == (0, 2)
    fa.uninstall()
    assert F.scaled_dot_product_attention is TORCHS


def test_uninstalled_inside_a_context_that_stays():
    q, k, v = qkv(1, 2, 4, 8)
    report = fa.install()
    with fa.replace_sdpa() as inside:
        fa.uninstall()
        F.scaled_dot_product_attention(q, k, v)
    assert F.scaled_dot_product_attention is TORCHS and (report.calls, inside.calls) == (0, 1)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)])
def test_contexts_end_in_any_order(order):
    q, k, v = qkv(1, 2, 4, 8)
    contexts = [fa.replace_sdpa() for _ in range(3)]
    reports = [context.__enter__() for context in contexts]
    left = [0, 1, 2]
    counts = [0, 0, 0]
    for i in order:
        F.scaled_dot_product_attention(q, k, v)
        counts[left[-1]] += 1
        contexts[i].__exit__(None, None, None)
        left.remove(i)
    assert F.scaled_dot_product_attention is TORCHS
    assert [report.calls for report in reports] == counts


def test_contexts_of_many_threads_leave_torchs():
    def enter():
        for _ in range(100):
            with fa.replace_sdpa():
                assert F.scaled_dot_product_attention is not TORCHS

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert F.scaled_dot_product_attention is TORCHS


def test_somebody_elses_function_on_top_stays_and_reaches_torchs():
    q, k, v = qkv(1, 2, 4, 8)
    report = fa.install()
    found = F.scaled_dot_product_attention

    @functools.wraps(found)
    def theirs(*args, **options):
        return 2 * found(*args, **options)

    F.scaled_dot_product_attention = theirs
    F.scaled_dot_product_attention(q, k, v)
    fa.uninstall()
    assert F.scaled_dot_product_attention is theirs
    torch.testing.assert_close(theirs(q, k, v), 2 * TORCHS(q, k, v), rtol=0, atol=0)
    assert report.calls == 1
    F.scaled_dot_product_attention = found  # as they would leave
    torch.testing.assert_close(found(q, k, v), TORCHS(q, k, v), rtol=0, atol=0)
    fa.install()
    fa.uninstall()
    assert F.scaled_dot_product_attention is TORCHS


def test_install_once_more_puts_back_what_was_thrown_out():
    q, k, v = qkv(1, 2, 4, 8)
    report = fa.install()
    F.scaled_dot_product_attention = TORCHS
    assert fa.install() is report and F.scaled_dot_product_attention is not TORCHS
    F.scaled_dot_product_attention(q, k, v)
    fa.uninstall()
    assert F.scaled_dot_product_attention is TORCHS and report.calls == 1


def test_what_somebody_kept_of_an_install_before_counts_no_more():
    q, k, v = qkv(1, 2, 4, 8)
    report = fa.install()
    found = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = theirs = lambda *args, **options: found(*args, **options)
    assert fa.install() is report
    fa.uninstall()
    assert torch.equal(theirs(q, k, v), TORCHS(q, k, v)) and report.calls == 0
    F.scaled_dot_product_attention = TORCHS


def test_install_inside_a_context_puts_back_what_was_thrown_out():
    report = fa.install()
    F.scaled_dot_product_attention = TORCHS
    with fa.replace_sdpa():
        assert fa.install() is report
    assert F.scaled_dot_product_attention is not TORCHS
    fa.uninstall()
    assert F.scaled_dot_product_attention is TORCHS


def test_a_context_that_was_dropped_ends_wherever_it_is_collected():
    """Under the lock too, if the collector runs there."""
    for _ in range(2000):
        ring = []
        ring.append(ring)
        ring.append(fa.replace_sdpa())
        ring[1].__enter__()
        del ring
    gc.collect()
    assert F.scaled_dot_product_attention is TORCHS


def test_one_stand_in_among_tensors_is_counted():
    """Whose class answers for the call: only the report looks at the others."""

    class StandIn:
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return "taken"

    q, k, v = qkv(1, 2, 3, 8)
    with fa.replace_sdpa() as report:
        assert F.scaled_dot_product_attention(StandIn(), k, v) == "taken"
        assert F.scaled_dot_product_attention(q, StandIn(), v) == "taken"
    assert report.calls == 2
