"""What a known call is known by, and what is looked at in every call all the same."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite import calls, decode, keys, ops, sdpa, sdpa_known, watchers
from flashattn_lite.problem import NUM_TENSORS, UNPROMISED
from tests.test_calls import forgotten, qkv  # noqa: F401

X, CU = torch.randn(7, 4, 8), torch.tensor([0, 3, 7], dtype=torch.int32)


@pytest.mark.parametrize("which", range(3))
def test_a_view_that_is_negated_later_is_negated(which):
    inputs = qkv()
    fa.attention(*inputs)
    views = [torch._neg_view(x) if i == which else x for i, x in enumerate(inputs)]
    assert views[which].is_neg()
    rest = (*(None,) * (NUM_TENSORS - 3), "auto")
    assert keys.of_call((*inputs, *rest)) != keys.of_call((*views, *rest))  # on a CPU torch resolves it anyway
    want = fa.attention(*(-x if i == which else x for i, x in enumerate(inputs)))
    for _ in range(2):
        torch.testing.assert_close(fa.attention(*views), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whether_float32_is_tf32_counts_for_float32(dtype, monkeypatch):
    """For calls and for gradients; by a setting that may change in between."""
    made, found = [], set()
    monkeypatch.setattr(calls, "_gradients", {})
    monkeypatch.setattr(calls.dispatch, "prepare_gradients", lambda *given: made.append(given) or (lambda *_: None))
    x, none = torch.zeros(1, 2, 4, 16, dtype=dtype), (None,) * (NUM_TENSORS - 3)
    options = (False, *(None,) * (len(calls.OPTION_NAMES) - 1))
    lse = x[..., 0].float()
    for takes in (False, True, False):
        monkeypatch.setattr(keys, "takes_tf32", lambda takes=takes: takes)
        found.add(keys.of_call((x, x, x, *none, "auto")))
        calls.gradients(x, lse, x, lse, x, x, x, *none, *options, (True,) * 5)
    assert len(found) == len(made) == (2 if dtype == torch.float32 else 1)


def test_whether_float32_is_tf32_counts_in_decoding_too(monkeypatch):
    q, lens, found = torch.zeros(1, 2, 4, 16), torch.ones(1, dtype=torch.int32), set()
    for takes in (False, True, False):
        monkeypatch.setattr(decode.targets, "takes_tf32", lambda takes=takes: takes)
        found.add(decode._key((q, q, q, lens, None, None), (True, None, None, None, "auto")))
    assert len(found) == 2


def test_where_other_tensors_lie_in_16_bytes_counts_too():
    """A mask 8 bytes off is another call; one at another whole address is the same."""
    room = torch.zeros(40)
    at = [keys.metadata(room[i : i + 7].view(1, 1, 1, 7)) for i in (0, 2, 4)]
    assert at[0] == at[2] != at[1]


def test_offsets_on_the_cpu_are_read_in_every_call():
    pack = lambda cu: fa.attention_varlen(X, X, X, cu, cu, max_seqlen_q=4, max_seqlen_k=4)
    pack(CU), pack(CU)
    with pytest.raises(ValueError, match="cu_seqlens_q: must not decrease"):
        pack(torch.tensor([0, 9, 7], dtype=torch.int32))


def test_packed_sequences_without_limits_are_measured():
    """A tile by the sum of all keys would be the neighbours' choice, and blocks for it be launched in vain."""
    fa.attention_varlen(X, X, X, CU, CU)
    (call,) = calls._ready.values()
    assert (call.problem.len_k, call.problem.promised_q) == (4, UNPROMISED)


def test_gradients_of_packed_sequences_without_limits_measure_once(monkeypatch):
    """What the call has measured its gradients know: on a GPU each look at it waits."""
    looked, longest = [], ops.longest
    monkeypatch.setattr(ops, "longest", lambda cu: looked.append(cu) or longest(cu))
    x = X.clone().requires_grad_()
    fa.attention_varlen(x, x, x, CU, CU).sum().backward()
    assert len(looked) == 2 and x.grad is not None


def test_numbers_of_other_types_are_not_plain():
    assert watchers.plain((X, None), (1, 2.0, None, True, "auto"))
    assert not watchers.plain((X,), (torch.tensor(1.0),))
    assert not watchers.plain((X.to_sparse(),), ())


def test_a_window_may_be_a_list(device):
    """In a call that is known too: a list is no part of what calls are known by."""
    q, k = (torch.randn(1, 2, rows, 16, device=device) for rows in (3, 20))
    lens = torch.tensor([17], dtype=torch.int32, device=device)
    for _ in range(2):
        for call in (fa.attention, lambda *args, **options: fa.attention_decode(*args, lens, **options)):
            assert torch.equal(call(q, k, k, window=[3, 0]), call(q, k, k, window=(3, 0)))


def test_what_a_transform_stands_for_is_explained():
    """Where it lies decides, and a stand-in lies nowhere."""
    lens, seen = torch.tensor([5], dtype=torch.int32), []

    def ask(x):
        seen.append((fa.explain(x, x, x), fa.explain_decode(x, x, x, lens)))
        return x.sum()

    inner = torch.randn(1, 2, 16, 32)
    ask(inner)
    torch.func.grad(ask)(inner), torch.vmap(ask, in_dims=3)(inner.unsqueeze(3).expand(-1, -1, -1, 4, -1))
    torch.vmap(torch.func.grad(ask))(inner.expand(3, 1, 2, 16, 32))
    assert len(seen) == 4 and all(told == seen[0] for told in seen)


@pytest.mark.parametrize("which", range(3))
def test_strides_of_each_tensor(which):
    room = lambda: torch.zeros(2, 7, 4, 16)
    inputs = [room().transpose(1, 2).contiguous() for _ in range(3)]
    others = [room().transpose(1, 2) if i == which else x for i, x in enumerate(inputs)]
    rest = (*(None,) * (NUM_TENSORS - 3), "auto")
    assert keys.of_call((*inputs, *rest)) != keys.of_call((*others, *rest))


@pytest.mark.parametrize("which", range(4))
def test_strides_of_results_and_their_gradients(which, monkeypatch):
    """Of d_out, d_lse, out and lse (which are made contiguous where that is all that the kernels take)."""
    made = []
    prepare_gradients = lambda *given: made.append(given) or (lambda *tensors: (None,) * 5)
    monkeypatch.setattr(calls, "_gradients", {})
    monkeypatch.setattr(calls.dispatch, "prepare_gradients", prepare_gradients)
    x = torch.zeros(2, 4, 7, 16)
    options = (False, *(None,) * (len(calls.OPTION_NAMES) - 1))
    results = [torch.zeros(2, 4, 7, 16), torch.zeros(2, 4, 7), torch.zeros(2, 4, 7, 16), torch.zeros(2, 4, 7)]
    run = lambda results: calls.gradients(*results, x, x, x, *(None,) * (NUM_TENSORS - 3), *options, (True,) * 5)
    run(results)
    run(results)
    assert len(made) == 1
    turned = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
    run([turned(x) if i == which else x for i, x in enumerate(results)])
    assert len(made) == (1 if results[which].dim() == 3 else 2)


MASKS = {
    "none": None,
    "padding": torch.rand(2, 1, 1, 7) > 0.3,
    "all dims": torch.randn(2, 4, 5, 7),
    "no batch": torch.rand(4, 5, 7) > 0.3,
    "lengths": torch.randn(5, 7),
}


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_torchs_function_knows_masks_and_heads_alone(mask, dims, monkeypatch, device):
    """Each was checked in every call once, which took 80 us for 18; what may not be is refused when it is known too."""
    torchs = torch.nn.functional.scaled_dot_product_attention
    lead = (2, 4)[4 - dims :]
    q, k = torch.randn(*lead, 5, 16, device=device), torch.randn(*lead, 7, 16, device=device)
    given = MASKS[mask]
    if given is not None:
        given = given[0] if given.dim() > dims else given
        given = given.to(device)
    call = lambda options: fa.scaled_dot_product_attention(q, k, k, given, **options)
    for options in ({}, {"scale": 1, "dropout_p": 0}, {"scale": 0.5, "enable_gqa": True}):
        want, first = torchs(q, k, k, given, **options), call(options)
        with monkeypatch.context() as patch:
            patch.setattr(sdpa, "_checked", lambda *_: pytest.fail("is checked again"))
            again = call(options)
        assert torch.equal(again, first) and again.shape == want.shape
        torch.testing.assert_close(first, want)
    if given is not None:
        with pytest.raises(ValueError, match="attn_mask: must be None when is_causal is True"):
            fa.scaled_dot_product_attention(q, k, k, given, is_causal=True)
        with pytest.raises(ValueError, match="attn_mask: "):
            fa.scaled_dot_product_attention(q, k, k, given[None, None, None, None])
    with pytest.raises(NotImplementedError, match="dropout_p: "):
        fa.scaled_dot_product_attention(q, k, k, given, 1)


def laid_out(shape, layout):
    """[*lead, heads, length, 8]: contiguous, heads side by side in rows, or one of three such tensors in one."""
    *lead, heads, length, dim = shape
    if layout == "contiguous":
        return torch.randn(shape)
    rows = torch.randn(*lead, length, heads, dim) if layout == "rows" else torch.randn(*lead, length, 3, heads, dim)
    return (rows if layout == "rows" else rows[..., 1, :, :]).transpose(-3, -2)


@pytest.mark.parametrize("layout", ["contiguous", "rows", "one of three"])
@pytest.mark.parametrize("lead", [(), (1,), (2,)])
def test_torchs_function_knows_calls_with_dims_of_one_entry(lead, layout):
    """torch makes up other strides of those where it expands what need not be: a batch of one was checked each time."""
    for heads, len_q, len_k in itertools.product((1, 2), (1, 5), (1, 7)):
        q, k, v = (laid_out((*lead, heads, length, 8), layout) for length in (len_q, len_k, len_k))
        masks = [None, torch.ones(len_k) > 0, torch.ones(len_q, 1) > 0, torch.randn(1, len_q, len_k)]
        for sizes in itertools.product(*({1, n} for n in lead), {1, heads}, {1, len_q}):
            masks.append(torch.randn(*sizes, len_k))
        for mask, causal in [*((mask, False) for mask in masks), (None, True)]:
            calls._ready.clear()
            first = fa.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
            again = sdpa_known.known(q, k, v, mask, is_causal=causal)
            assert again is not None and torch.equal(again[0], first), (heads, len_q, len_k, mask)


def test_what_torchs_door_refuses_it_refuses_of_calls_that_ours_knows():
    """attention takes masks of any float dtype, say."""
    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 7, 16)
    mask = torch.randn(1, 1, 5, 7).bfloat16()
    sdpa_of = lambda mask, **options: fa.scaled_dot_product_attention(q, k, k, mask, **options)
    for _ in range(2):
        fa.attention(q, k, k, mask=mask)
        with pytest.raises(TypeError, match="attn_mask: dtype must be bool, float32 or query's"):
            sdpa_of(mask)
        with pytest.raises(TypeError, match=r"attn_mask: .* Call \.to_dense\(\)"):
            sdpa_of(torch.ones(5, 7).to_sparse())
        with pytest.raises(ValueError, match="scale: "):
            sdpa_of(None, scale=10**400)
        sdpa_of(None)


@pytest.mark.parametrize("heads", [0, 4])
@pytest.mark.parametrize("lead", [(), (1,)])
def test_heads_of_another_number_are_not_taken_for_grouped_ones(lead, heads):
    """Whoever made the call known: attention takes them as they are."""
    q, k = torch.randn(*lead, heads, 5, 16), torch.randn(*lead, 2, 7, 16)
    for _ in range(2):
        fa.attention(*(x.view(1, *x.shape[-3:]) for x in (q, k, k)))
        fa.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        with pytest.raises(ValueError, match="key: batch dims and heads must broadcast"):
            fa.scaled_dot_product_attention(q, k, k)


STAND_INS = {
    "zeros": lambda x: torch._efficientzerotensor((3, *x.shape[1:]), dtype=x.dtype)[1:],
    "a function of views": lambda x: torch._to_functional_tensor(torch.cat([x, x[:1]])[1:]),
}


@pytest.mark.parametrize("kind", STAND_INS)
@pytest.mark.parametrize("call", [fa.attention, fa.scaled_dot_product_attention])
def test_a_slice_of_what_lies_nowhere_is_not_taken_for_numbers(call, kind):
    """Its address is its offset; a kernel would read there."""
    q, v = torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    for _ in range(2):
        call(q, q, v)
    stand_in = STAND_INS[kind](v)
    assert 0 < stand_in.data_ptr() < 4096 and keys.place(stand_in) == -1
    assert keys.place(torch.empty(3, 0)[1:]) == -1 and keys.place(v[1:]) in range(16)
    found = call(q, q, stand_in)
    want = torch.zeros_like(v)
    if kind == "a function of views":
        torch._sync(found)
        found, want = torch._from_functional_tensor(found), call(q, q, torch.cat([v, v[:1]])[1:])
    assert torch.equal(found, want)
