"""Bad input to scaled_dot_product_attention is refused at the door, in torch's names and as the caller gave it."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.nn.attention.bias import causal_upper_left

import flashattn_lite as fa
from flashattn_lite import watchers
from tests.refusals import NESTED, refusal_tests

Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)


def sdpa(**changes):
    arguments = {"query": Q, "key": Q, "value": Q, **changes}
    return lambda: fa.scaled_dot_product_attention(**arguments)


REFUSED = {
    "nested": (sdpa(query=NESTED), TypeError,
               "query: must be a dense strided tensor; got a nested tensor, float32, on cpu."),
    "scale that learns": (sdpa(scale=torch.nn.Parameter(torch.tensor(0.5))), TypeError,
                          "scale: must be a float or None; got a tensor of shape (), float32, on cpu. It would get "
                          "no gradient: pass 1.0 and multiply the queries by it, or pass scale.item()."),
    "scale of one": (sdpa(scale=torch.tensor([0.5])), TypeError, "scale: must be a float or None; got a tensor of"),
    "gqa": (sdpa(enable_gqa=1), TypeError, "enable_gqa: must be True or False; got 1. Pass bool(enable_gqa)."),
    "mask and causal": (sdpa(attn_mask=torch.ones(5, 5).bool(), is_causal=True), ValueError,
                        "attn_mask: must be None when is_causal is True; got a tensor of shape (5, 5), bool"),
    "a bias and causal": (sdpa(attn_mask=causal_upper_left(5, 5), is_causal=True), ValueError,
                          "Leave is_causal out: it says as much."),
    "as given": (sdpa(value=torch.randn(5, 257)), NotImplementedError, "value: head dim must be at most 256; got a "
                 "tensor of shape (5, 257)"),
    "heads as given": (lambda: fa.scaled_dot_product_attention(torch.ones(6, 5, 8), torch.ones(1, 4, 5, 8),
                       torch.ones(4, 5, 8), enable_gqa=True), ValueError, "query: number of heads must be a multiple "
                       "of key's (4); got a tensor of shape (6, 5, 8)"),
    "mask of more dims than matrices": (sdpa(query=Q[0, 0], key=Q[0, 0], value=Q[0, 0], attn_mask=torch.ones(1, 5, 5)),
        ValueError, "attn_mask: must be broadcastable to (..., heads, len_q, len_k) = (5, 5); got a tensor of"),
    "mask of too many dims": (sdpa(attn_mask=torch.ones(1, 1, 1, 5, 7)), ValueError, "attn_mask: must be broad"),
    "mask shape": (sdpa(attn_mask=torch.ones(5, 4)), ValueError, "attn_mask: must be broadcastable to (..., heads, "
                   "len_q, len_k) = (2, 4, 5, 5); got a tensor of shape (5, 4)"),
    "mask of a row of keys": (sdpa(attn_mask=torch.ones(2, 5).bool()), ValueError, "got a tensor of shape (2, 5), bool,"
                              " on cpu. For one row of keys per sequence pass attn_mask[:, None, None, :]."),
    "mask of a sequence": (sdpa(attn_mask=torch.ones(2, 5, 5)), ValueError, "For one mask per sequence pass "
                           "attn_mask[:, None]."),
    "mask of integers": (sdpa(attn_mask=torch.ones(5, 5).int()), TypeError, "attn_mask: dtype must be bool, float32 or "
        "query's (float32); got a tensor of shape (5, 5), int32, on cpu. Pass .bool() if 1 means visible; as floats "
        "they would be added."),
    "mask dtype": (sdpa(attn_mask=torch.ones(5, 5).half()), TypeError, "attn_mask: dtype must be bool, float32 or "
                   "query's (float32); got a tensor of shape (5, 5), float16"),
    "dropout": (sdpa(dropout_p=1.5), ValueError, "dropout_p: must be between 0 and 1; got 1.5."),
    "dropout, a flag": (sdpa(dropout_p=True), NotImplementedError, "dropout_p: dropout of attention weights is not"),
    "dropout on": (sdpa(dropout_p=0.1), NotImplementedError, "dropout_p: dropout of attention weights is not "
                   "implemented; got 0.1. Pass 0.0"),
    "lengths": (sdpa(value=Q[:, :, :4]), ValueError, "value: length must equal key's (5); got a tensor of shape"),
    "heads": (sdpa(key=K, value=K), ValueError, "key: batch dims and heads must broadcast with query's (2, 4, 5, 8);"
              " got a tensor of shape (2, 2, 7, 8), float32, on cpu. For grouped heads pass enable_gqa=True."),
    "batches, of one head": (sdpa(key=torch.ones(3, 1, 7, 8), value=torch.ones(3, 1, 7, 8)), ValueError,
                             "got a tensor of shape (3, 1, 7, 8), float32, on cpu. Make each 1 or as large as"),
    "rank": (sdpa(query=Q[0, 0, 0]), ValueError, "query: must have at least 2 dimensions (..., length, head_dim);"),
    "kind": (sdpa(query=None), TypeError, "query: must be a torch.Tensor; got None."),
}  # fmt: skip


test_refused_with_these_words, test_nothing_is_launched_for_bad_input = refusal_tests(
    REFUSED, "flashattn_lite.dispatch.prepare"
)


def test_under_autocast_tensors_are_shown_as_they_came():
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(NotImplementedError, match=r"shape \(5, 257\), float32"):
            sdpa(value=torch.randn(5, 257))()
        with pytest.raises(ValueError, match=r"attn_mask: .* shape \(5, 4\), float32"):
            sdpa(attn_mask=torch.randn(5, 4))()


def test_a_mask_that_autocast_changed_is_told():
    x, mask = torch.randn(1, 2, 3, 8).double(), torch.zeros(3, 3)
    words = r"^attn_mask: dtype must be .* query's \(float64\); got .*, bfloat16, on cpu\. Autocast made it bfloat16"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=words):
        fa.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    assert fa.scaled_dot_product_attention(x, x, x, attn_mask=mask).isfinite().all()


def test_flex_attentions_mask_is_named_with_what_makes_a_tensor_of_it():
    flex, x = pytest.importorskip("torch.nn.attention.flex_attention"), torch.randn(1, 2, 3, 8)
    seen = lambda b, h, i, j: i >= j
    block = flex.create_block_mask(seen, 1, 2, 3, 3, device="cpu")
    words = r"mask: must be a torch.Tensor or None; got a BlockMask.*flex_attention\.create_mask\.$"
    for refused in (lambda: fa.scaled_dot_product_attention(x, x, x, block), lambda: fa.attention(x, x, x, mask=block)):
        with pytest.raises(TypeError, match=words):
            refused()
    mask = flex.create_mask(block.mask_mod, 1, 2, 3, 3, device="cpu")
    torch.testing.assert_close(fa.attention(x, x, x, mask=mask), fa.attention(x, x, x, causal=True))


@pytest.fixture
def distributed():
    """Some tensor, over a group of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    tensor = pytest.importorskip("torch.distributed.tensor")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tensor.distribute_tensor(torch.randn(2, 4, 5, 8), tensor.init_device_mesh("cpu", (1,)), [tensor.Shard(1)])
    dist.destroy_process_group()


def test_distributed_tensors_are_refused_by_name(distributed):
    local = distributed.to_local()
    words = r": distributed tensors \(DTensor\) are not implemented; .* Call with \.to_local\(\)"
    for name, refused in {
        "query": lambda: fa.scaled_dot_product_attention(distributed, distributed, distributed),
        "key": lambda: fa.scaled_dot_product_attention(local, distributed, local),
        "q": lambda: fa.attention(distributed, distributed, distributed),
        "v": lambda: fa.explain(local, local, distributed),
        "mask": lambda: fa.attention(local, local, local, mask=distributed),
        "k_cache": lambda: fa.attention_decode(local, distributed, local, torch.tensor([5, 3], dtype=torch.int32)),
        "x": lambda: fa.online_softmax(distributed),
    }.items():
        with pytest.raises(NotImplementedError, match=f"^{name}{words}"):
            refused()


def test_a_module_of_distributed_tensors_that_is_being_imported_has_no_class_yet(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", types.ModuleType("torch.distributed.tensor"))
    assert not watchers.distributed(Q)
