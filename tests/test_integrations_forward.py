"""What a layer of transformers hands over, and how attention is called for it; needs no transformers."""

from __future__ import annotations

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.integrations import packing
from flashattn_lite.integrations import transformers as ours
from flashattn_lite.problem import UNPROMISED


def module(causal=True):
    made = torch.nn.Module()
    made.is_causal = causal
    return made


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_have_the_window_that_a_mask_would_have(causal):
    """A sliding window of n are a query's own key, n - 1 before it and, for an encoder, as many behind it."""
    x, cu = torch.randn(1, 2, 9, 16), torch.tensor([0, 4, 9])
    lens = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    out, _ = ours.attention_forward(module(causal), x, x, x, None, sliding_window=2, **lens)
    for a, b in ((0, 4), (4, 9)):
        part = x[:, :, a:b]
        want = fa.attention(part, part, part, causal=causal, window=(1, 1))
        torch.testing.assert_close(out[:, a:b], want.transpose(1, 2))


def test_one_query_over_a_longer_cache_sees_all_of_it():
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 9, 16)
    out, _ = ours.attention_forward(module(), q, k, k, None)
    torch.testing.assert_close(out, fa.attention(q, k, k).transpose(1, 2))


@pytest.mark.parametrize("columns", [20, 8])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_has_a_column_for_each_key(dtype, columns):
    """Of one that counts a cache's keys, which a checkpointed layer has not got, the first are not the keys'."""
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 9, 16)
    mask = torch.ones(1, 1, 3, columns, dtype=dtype)
    with pytest.raises(ValueError, match=r"attention_mask: must have a column for each of 9 keys.*; got a tensor"):
        ours.attention_forward(module(), q, k, k, mask)
    for right in (mask[..., :1], mask[..., :1].expand(-1, -1, -1, 9)):
        out, _ = ours.attention_forward(module(), q, k, k, right)
        torch.testing.assert_close(out, fa.attention(q, k, k, mask=right).transpose(1, 2))


def test_packed_queries_over_more_keys_are_kept_apart():
    """As beside a cache: a start of the queries among the keys is not theirs to say."""
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 9, 16)
    cu_q, cu_k = torch.tensor([0, 1, 3]), torch.tensor([0, 4, 9])
    out, _ = ours.attention_forward(module(), q, k, k, None, cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k)
    of_q, of_k = torch.tensor([0, 1, 1]), torch.tensor([0] * 4 + [1] * 5)
    mask = of_q[:, None] == of_k
    want = fa.attention(q, k, k, mask=mask, causal=True, q_start=0)
    torch.testing.assert_close(out, want.transpose(1, 2))


@pytest.mark.parametrize("given", [{"max_length_q": 5, "max_length_k": 7}, {"max_length_k": 7}, {"max_length_q": 200}])
def test_what_is_measured_of_queries_and_of_keys_is_handed_on(given, monkeypatch):
    """Of queries no promise that there are few: neighbours would choose a sequence's kernel, and so its bits."""
    seen, wanted = {}, {"q": given.get("max_length_q"), "k": given.get("max_length_k")}
    if wanted["q"] is not None:
        wanted["q"] = max(wanted["q"], UNPROMISED)
    varlen = packing.attention_varlen
    watched = lambda *args, **options: seen.update(options) or varlen(*args, **options)
    monkeypatch.setattr(packing, "attention_varlen", watched)
    x, cu = torch.randn(1, 2, 9, 16), torch.tensor([0, 4, 9])
    ours.attention_forward(module(), x, x, x, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu, **given)
    for side in "qk":
        assert seen.get(f"max_seqlen_{side}") == wanted.get(side)
