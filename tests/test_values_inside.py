"""Values that the door can't read, as a compiler or a transform stands for them: the op refuses them in its words."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._dynamo import config

import flashattn_lite as fa
from flashattn_lite import tiled
from flashattn_lite.problem import Inputs, at_most, describe
from tests.exhaustive import once

X = torch.randn(10, 2, 8)
CU, SEVEN = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 4, 10], [0, 3, 7]))
WRONG = {
    "order": (CU[[0, 2, 1]], {}, "cu_seqlens_q: must not decrease; got [0, 10, 4]. Pass where each sequence ends, not"),
    "start": (CU + 1, {}, "cu_seqlens_q: must start with 0; got [1, 5, 11]. Pass 0, then where each sequence ends."),
    "end": (CU - CU // 10, {}, "cu_seqlens_q: must end with q's total length (10); got [0, 4, 9]. Slice off any"),
    "limit": (CU, {"max_seqlen_k": 5}, "max_seqlen_k: must be at least the longest sequence (6); got 5. Pass None"),
}  # fmt: skip
Q, PAGES = torch.randn(2, 2, 1, 8), torch.randn(3, 2, 16, 8)
LENS, TABLE = torch.tensor([20, 4], dtype=torch.int32), torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
PAGE = "block_table[0, 1]: entries that kv_lens reaches must be from 0 to 2, the pages of k_cache; got 7."


def refuses(text, call, *args):
    with pytest.raises(ValueError, match=re.escape(text)):
        call(*args)


@pytest.mark.parametrize("name", WRONG)
def test_offsets_of_compiled_code(name):
    cu, options, text = WRONG[name]
    call = torch.compile(
        lambda x, cu: fa.attention_varlen(x, x, x, cu, cu, causal=True, **options), backend="aot_eager", fullgraph=True
    )
    refuses(text, call, X, cu)
    if not options:
        assert torch.equal(call(X, CU), fa.attention_varlen(X, X, X, CU, CU, causal=True))


@pytest.mark.parametrize("name", WRONG)
def test_offsets_under_transforms(name):
    cu, options, text = WRONG[name]

    def total(x, cu):
        return fa.attention_varlen(x, x, x, cu, cu, causal=True, **options).sum()

    refuses(text, torch.vmap(total, in_dims=(0, None)), X[None], cu)
    refuses(text, torch.vmap(total), X[None], cu[None])
    refuses(text, torch.func.grad(total), X, cu)
    refuses(text, torch.func.grad(lambda x, cu: torch.vmap(total)(x, cu).sum()), X[None], cu[None])


ONE = np.int64(1)
OF_NUMPY = {  # of x [2, 2, 1, 8]; a compiler makes arrays of such numbers
    "scale": lambda x: fa.attention(x, x, x, scale=1 / np.sqrt(x.shape[-1])),
    "softcap": lambda x: fa.attention(x, x, x, softcap=np.float32(2)),
    "q_start": lambda x: fa.attention(x, x, x, causal=True, q_start=ONE),
    "window": lambda x: fa.attention(x, x, x, window=(ONE, None)),
    "decode": lambda x: fa.attention_decode(x, PAGES[:2], PAGES[1:], LENS, scale=1 / np.sqrt(8), window=[ONE, 0]),
    "longest": lambda x: fa.attention_varlen(X, X, X, CU, CU, max_seqlen_q=10 * ONE, max_seqlen_k=None),
    "dim": lambda x: fa.online_softmax(x, ONE),
}


@pytest.mark.parametrize("name", OF_NUMPY)
def test_numbers_of_numpy_in_compiled_and_exported_code(name):
    call = OF_NUMPY[name]
    want = call(Q)
    for whole in (False, name in ("scale", "decode")):
        assert torch.equal(torch.compile(call, backend="eager", fullgraph=whole)(Q), want)
    module = torch.nn.Module()
    module.forward = call
    assert torch.equal(torch.export.export(module, (Q,), strict=False).module()(Q), want)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.int64])
def test_integers_of_numpy_that_compiled_code_is_given(kind):
    """Narrow ones are arrays to a compiler, and no integers to isinstance there."""
    calls = (
        lambda x, n: fa.attention(x, x, x, causal=True, q_start=n),
        lambda x, n: fa.attention(x, x, x, window=(n, None)),
        lambda x, n: fa.attention_varlen(X, X, X, CU, CU, max_seqlen_q=n, max_seqlen_k=n),
    )
    for call in calls:
        want = call(Q, 10)
        for whole in (False, True):
            torch._dynamo.reset()
            assert torch.equal(torch.compile(call, backend="eager", fullgraph=whole)(Q, kind(10)), want)


def test_an_array_of_one_number_is_that_number():
    for explained, given in ((fa.explain, (Q, Q, Q)), (fa.explain_varlen, (X, X, X, CU, CU))):
        assert explained(*given, scale=np.array(0.5), window=(np.array(1), None)).backend
    assert fa.explain_decode(Q, PAGES, PAGES, LENS, block_table=TABLE, softcap=np.array(0.5)).backend
    for wrong in (np.array([0.5]), np.array("0.5")):
        with pytest.raises(TypeError, match=r"^scale: must be a float or None; got"):
            fa.attention(Q, Q, Q, scale=wrong)


INSIDE = {  # of x [1, 2, 7, 8]
    "max_seqlen": (lambda x, n: packed(x[0].transpose(0, 1), n), 4, {-1: "max_seqlen_q: must be at least 0; got -1"}),
    "q_start": (lambda x, n: fa.attention(x, x, x, causal=True, q_start=n), 2, {}),
    "window": (
        lambda x, n: fa.attention(x, x, x, window=(n, n)), 2, {-3: "window: left must be at least 0; got (-3"}
    ),
    "decode": (
        lambda x, n: fa.attention_decode(x[:, :, :2], x, x, LENS[1:], window=(n, None)), 2,
        {-3: "window: left must be at least 0; got (-3"},
    ),
}  # fmt: skip


def packed(x, longest):
    return fa.attention_varlen(x, x, x, SEVEN, SEVEN, max_seqlen_q=longest, max_seqlen_k=longest)


@once
@pytest.mark.parametrize("name", INSIDE)
@config.patch(capture_scalar_outputs=True)
def test_integers_of_compiled_code(name):
    """Computed in the middle of it: no guard can be put on one, so that the op asks."""
    function, right, wrong = INSIDE[name]
    call = lambda x, n: function(x, (n * 1).item())
    x = torch.randn(1, 2, 7, 8)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for n in (right, right + 1):
        assert torch.equal(compiled(x, torch.tensor(n)), call(x, torch.tensor(n)))
    for n, text in wrong.items():
        refuses(text, call, x, torch.tensor(n))
        refuses(text, compiled, x, torch.tensor(n))


@once
@config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_keys_that_is_found_in_compiled_code():
    def call(x, chosen):
        k = x[:, :, chosen]
        mask = torch.ones(7, k.shape[2], dtype=torch.bool)
        return fa.scaled_dot_product_attention(x, k, k, attn_mask=mask), fa.attention(x, k, k, mask=mask)

    x = torch.randn(1, 2, 7, 8)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for count in (4, 2):
        assert all(map(torch.equal, compiled(x, torch.arange(7) < count), call(x, torch.arange(7) < count)))


def test_pages_of_compiled_code_and_under_vmap():
    wrong = TABLE.clone()
    wrong[0, 1] = 7

    def call(q, table):
        return fa.attention_decode(q, PAGES, PAGES, LENS, block_table=table)

    want = call(Q, TABLE)
    refuses(PAGE, call, Q, wrong)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(Q, TABLE), want)
    refuses(PAGE, compiled, Q, wrong)
    assert torch.equal(torch.vmap(call)(Q[None], TABLE[None])[0], want)
    refuses(PAGE, torch.vmap(call), Q[None], wrong[None])


@pytest.mark.parametrize("most", [40, 2**31 - 1, 2**40])
def test_a_promise_far_above_the_longest_sequence_changes_nothing(device, most):
    """Nor starts a block for rows that can't be. (One of few rows is another kernel's.)"""
    x, cu = X.to(device), CU.to(device)
    want = fa.attention_varlen(x, x, x, cu, cu, causal=True)
    assert torch.equal(fa.attention_varlen(x, x, x, cu, cu, causal=True, max_seqlen_q=most, max_seqlen_k=most), want)
    assert at_most(most, 10) == 10 == at_most(None, 10) and at_most(6, 10) == 6


FOUND = """
import torch, flashattn_lite as fa
torch._dynamo.config.capture_scalar_outputs = True
x = torch.randn(1, 2, 7, 8)
for name, function in {"scale": fa.scaled_dot_product_attention, "softcap": fa.attention}.items():
    call = lambda x, number: function(x, x, x, **{name: (number * 1).item()})
    compiled = torch.compile(call, backend="aot_eager")
    for number in (0.5, 2.0):
        assert torch.equal(compiled(x, torch.tensor(number)), call(x, torch.tensor(number)))
    for either in (call, compiled):
        try:
            either(x, torch.tensor(torch.inf))
        except ValueError as refusal:
            assert str(refusal).startswith(name + ": must be finite; got "), refusal
        else:
            raise AssertionError(name)
"""


@once
def test_numbers_that_are_found_in_compiled_code():
    """A compiler that does not know one leaves the call to Python, as it does torch's own.

    In a process of its own: what a compiler could not trace behind such a break it keeps in mind.
    """
    done = subprocess.run([sys.executable, "-c", FOUND], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@once
@config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_sequences_that_is_found_in_compiled_code():
    def call(x, ends):
        cu = ends[ends >= 0]
        return fa.attention_varlen(x, x, x, cu, cu, causal=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for ends in ([0, 4, -1, 10], [-1, 0, -1, 10]):
        ends = torch.tensor(ends, dtype=torch.int32)
        assert torch.equal(compiled(X, ends), call(X, ends))


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
def test_a_size_that_a_compiler_must_not_ask_for(dim, turned):
    x = torch.randn(2, 5, 3, 8).transpose(1, 2) if turned else torch.randn(2, 3, 5, 8)
    torch._dynamo.decorators.mark_unbacked(x, dim)
    call = lambda x: fa.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(x), call(x))


@pytest.mark.parametrize(
    ("ends", "kept"), [([0, 4, 19], [0, 4, 10]), ([0, 12, 6], [0, 10, 10]), ([-1, 3, 10], [0, 3, 10])]
)
def test_offsets_that_nobody_looked_at_stay_within_the_tensor(ends, kept):
    """As on a GPU, where a wrong table makes a wrong result and never more."""
    q = X[:, :1].double()

    def run(ends):
        cu, out, lse = torch.tensor(ends, dtype=torch.int32), torch.zeros_like(q), torch.zeros(1, 10)
        inputs = Inputs(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
        problem = describe(inputs, causal=False, q_start=None, window_left=None, window_right=None, scale=1.0,
                           softcap=None)  # fmt: skip
        tiled.forward(problem, inputs, out, lse)
        return out, lse

    assert all(map(torch.equal, run(ends), run(kept)))
