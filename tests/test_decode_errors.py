"""Bad input to attention_decode is refused at the door, in the words of the other errors."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.errors import BackendError
from tests.refusals import refusal_tests

Q, K, V = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 32, 8), torch.randn(2, 2, 32, 6)
LENS = torch.tensor([5, 32], dtype=torch.int32)
PAGES_K, PAGES_V = torch.randn(5, 2, 16, 8), torch.randn(5, 2, 16, 6)
TABLE = torch.tensor([[4, -1], [2, 0]], dtype=torch.int32)


def call(**changes):
    arguments = {"q": Q, "k_cache": K, "v_cache": V, "kv_lens": LENS, **changes}
    return lambda: fa.attention_decode(**arguments)


def paged(**changes):
    return call(**{"k_cache": PAGES_K, "v_cache": PAGES_V, "block_table": TABLE, **changes})


REFUSED = {
    "no queries": (call(q=Q[:, :, :0]), ValueError, "q: length must be from 1 to 16; got a tensor of shape (2, 4, 0, 8), "
                   "float32, on cpu. For other lengths call attention(kv_lens=)."),
    "many queries": (call(q=torch.zeros(2, 4, 17, 8)), ValueError, "q: length must be from 1 to 16; got a tensor of "
                     "shape (2, 4, 17, 8)"),
    "rank": (call(k_cache=K[0]), ValueError, "k_cache: must have 4 dimensions (batch, heads, length, head_dim); got"),
    "dtypes": (call(v_cache=V.half()), TypeError, "v_cache: dtype must equal q's (float32); got a tensor of shape"),
    "head dims": (call(k_cache=K[..., :4]), ValueError, "k_cache: head dim must equal q's (8); got a tensor of shape"),
    "batch": (call(k_cache=K[:1]), ValueError, "k_cache: batch must equal q's (2); got a tensor of shape (1, 2, 32, 8)"),
    "lengths": (call(v_cache=V[:, :, :9]), ValueError, "v_cache: length must equal k_cache's (32); got a tensor of"),
    "groups": (call(q=Q[:, :3]), ValueError, "q: number of heads must be a multiple of k_cache's (2); got a tensor of"),
    "no lens": (call(kv_lens=None), TypeError, "kv_lens: must be an int32 torch.Tensor; got None. Pass "
                "torch.tensor(..., dtype=torch.int32)."),
    "lens dtype": (call(kv_lens=LENS.long()), TypeError, "kv_lens: dtype must be int32; got a tensor of shape (2,), "
                   "int64, on cpu. Cast it: .to(torch.int32)."),
    "lens shape": (call(kv_lens=LENS[:1]), ValueError, "kv_lens: must have shape (batch,) = (2,); got a tensor of shape"),
    "window": (call(window=(-1, 0)), ValueError, "window: left must be at least 0; got (-1, 0)."),
    "window of an array": (call(window=np.array([3, 0])), TypeError, "window: must be a pair (left, right) or None; got a "
                           "ndarray of shape (2,), int64. Pass (256, 0), say."),
    "return_lse": (call(return_lse=torch.ones(2)), TypeError, "return_lse: must be True or False; got a tensor of shape"),
    "softcap": (call(softcap=-1.0), ValueError, "softcap: must be greater than 0; got -1.0."),
    "causal": (call(causal=None), TypeError, "causal: must be True or False; got None. Pass one of them."),
    "sinks": (call(sinks=torch.zeros(2)), ValueError, "sinks: must have shape (heads_q,) = (4,); got a tensor of shape"),
    "backend": (call(backend="split"), ValueError, "backend: must be one of 'auto', 'hopper', 'triton', 'tiled'; got 'split'."),
    "pages": (paged(v_cache=PAGES_V[:4]), ValueError, "v_cache: must have as many pages as k_cache (5); got a tensor of "
              "shape (4, 2, 16, 6), float32, on cpu. Pass one page of values per page of keys."),
    "page sizes": (paged(v_cache=PAGES_V[:, :, :8]), ValueError, "v_cache: page size must equal k_cache's (16); got a "
                   "tensor of shape (5, 2, 8, 6)"),
    "small pages": (paged(k_cache=PAGES_K[:, :, :8], v_cache=PAGES_V[:, :, :8]), ValueError, "k_cache: page size (dim 2, "
                    "with a block_table) must be a power of two from 16 up; got a tensor of shape (5, 2, 8, 8)"),
    "odd pages": (paged(k_cache=K.flatten(1, 2)[:, None, :24], v_cache=V.flatten(1, 2)[:, None, :24]), ValueError,
                  "k_cache: page size (dim 2, with a block_table) must be a power of two from 16 up; got"),
    "no pages": (paged(k_cache=PAGES_K[:0], v_cache=PAGES_V[:0]), ValueError, "k_cache: must have at least one page for "
                 "a block_table to name; got a tensor of shape (0, 2, 16, 8), float32, on cpu. Add a page."),
    "table kind": (paged(block_table=[[0]]), TypeError, "block_table: must be an int32 torch.Tensor; got [[0]]."),
    "table dtype": (paged(block_table=TABLE.long()), TypeError, "block_table: dtype must be int32; got a tensor of shape "
                    "(2, 2), int64, on cpu. Cast it: .to(torch.int32)."),
    "table device": (paged(block_table=TABLE.to("meta")), ValueError, "block_table: must be on the device of the queries "
                     "(cpu); got a tensor of shape (2, 2), int32, on meta. Move it with .to(device)."),
    "table shape": (paged(block_table=TABLE[0]), ValueError, "block_table: must have shape (batch, max_pages) = (2, any);"
                    " got a tensor of shape (2,), int32, on cpu. Pass one row of page numbers for each sequence."),
    "table entry": (paged(block_table=TABLE + 1), ValueError, "block_table[0, 0]: entries that kv_lens reaches must be "
                    "from 0 to 4, the pages of k_cache; got 5. Pass a page; entries past the length may be any."),
    "negative entry": (paged(kv_lens=LENS + 15), ValueError, "block_table[0, 1]: entries that kv_lens reaches must be "
                       "from 0 to 4, the pages of k_cache; got -1."),
}  # fmt: skip


test_refused_with_these_words, test_nothing_is_launched_for_bad_input = refusal_tests(
    REFUSED, "flashattn_lite.dispatch.choose"
)


def test_explaining_refuses_in_the_same_words(monkeypatch):
    monkeypatch.setattr(fa, "attention_decode", fa.explain_decode)
    for run, error, text in REFUSED.values():
        with pytest.raises(error, match=re.escape(text)):
            run()


def test_a_named_backend_never_falls_back():
    doubles = [x.double() for x in (Q, K, V)]
    words = r"backend: 'triton' can't run this problem. By backend: hopper: .*; triton: .*(float64|triton).*; tiled: would run"
    with pytest.raises(BackendError, match=words):
        fa.attention_decode(*doubles, LENS, backend="triton")


def test_explain_says_what_runs_and_why_not():
    explanation = fa.explain_decode(Q, PAGES_K, PAGES_V, LENS, block_table=TABLE, backend="tiled")
    assert explanation.backend == "tiled"
    assert explanation.reasons["tiled"] == []
    assert "tiled on cpu" in str(explanation)
    with pytest.raises(ValueError, match="scale: must be finite"):
        fa.explain_decode(Q, K, V, LENS, scale=float("nan"))
    with pytest.raises(TypeError, match="return_lse: must be"):
        fa.explain_decode(Q, K, V, LENS, return_lse=1)


@pytest.mark.parametrize("far", [2**31, 2**63, 2**70])
def test_a_window_beyond_any_integer_type_is_unbounded(far):
    """Recorded too, where the op's schema has 64 bits."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 1, 8, requires_grad=True), torch.randn(1, 2, 20, 8)
    lens = torch.tensor([17], dtype=torch.int32)
    want = fa.attention_decode(q, k, k, lens)
    assert torch.equal(fa.attention_decode(q, k, k, lens, window=(far, 0)), want)
    assert torch.equal(fa.attention_decode(q.detach(), k, k, lens, window=(far, far)), want)


def test_diagonals_past_where_they_are_clamped_are_refused():
    """They would hide keys, or show them, and nothing would say so. Without diagonals any length is taken."""
    q, k = torch.empty(1).expand(1, 1, 1, 16), torch.empty(1).expand(1, 1, 2**30, 16)
    text = "tiled: it counts fewer than 1073741824 queries and keys of a sequence; these are 1 and 1073741824"
    with pytest.raises(NotImplementedError, match=text):
        fa.attention(q, k, k, causal=True)
    with pytest.raises(NotImplementedError, match=text):
        fa.attention_decode(q, k, k, torch.tensor([3], dtype=torch.int32))
    assert fa.explain(q, k, k, backend="tiled").backend == "tiled"


def test_an_empty_pool_of_pages():
    """It serves a table without columns; one with columns names pages that are not there."""
    none, lens = PAGES_K[:0], torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="at least one page"):
        fa.attention_decode(Q, none, PAGES_V[:0], lens, block_table=torch.zeros(2, 1, dtype=torch.int32))
    out = fa.attention_decode(Q, none, PAGES_V[:0], lens, block_table=torch.zeros(2, 0, dtype=torch.int32))
    assert torch.equal(out, torch.zeros(2, 4, 3, 6))
