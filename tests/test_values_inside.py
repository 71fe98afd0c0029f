"""Values that the door can't read, as a compiler or a transform stands for them: the op refuses them in its words."""

from __future__ import annotations

import re

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.problem import at_most

X = torch.randn(10, 2, 8)
CU = torch.tensor([0, 4, 10], dtype=torch.int32)
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


@pytest.mark.parametrize("most", [10, 2**31 - 1, 2**40])
def test_a_promise_far_above_the_longest_sequence_changes_nothing(device, most):
    """Nor starts a block for rows that can't be."""
    x, cu = X.to(device), CU.to(device)
    want = fa.attention_varlen(x, x, x, cu, cu, causal=True)
    assert torch.equal(fa.attention_varlen(x, x, x, cu, cu, causal=True, max_seqlen_q=most, max_seqlen_k=most), want)
    assert at_most(most, 10) == 10 == at_most(None, 10) and at_most(6, 10) == 6
