"""What calls are asked that came before, or of tensors that few tests pass."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import flashattn_lite as fa
from flashattn_lite import tiled
from flashattn_lite.problem import FAR, Inputs, describe, too_long


def test_a_known_call_inside_autocast_is_cast():
    q = torch.randn(1, 2, 5, 16)
    for _ in range(2):
        assert fa.scaled_dot_product_attention(q, q, q).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fa.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16


def test_values_that_broadcast_with_queries_but_not_with_keys():
    q, k, v = (torch.randn(batch, 2, 5, 16) for batch in (1, 2, 3))
    with pytest.raises(ValueError, match=r"^value: batch dims must broadcast with key's \(2, 2, 5, 16\)"):
        fa.scaled_dot_product_attention(q, k, v)


def test_a_tangent_of_packed_sinks_is_refused():
    x, sinks = torch.randn(7, 4, 8), torch.randn(4)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"^sinks: forward-mode.*Use reverse mode"):
        fa.attention_varlen(x, x, x, cu, cu, sinks=forward_ad.make_dual(sinks, torch.ones(4)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_a_part_holds_where_it_saw_nothing_is_dropped(value):
    """As some kernels leave it."""
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    blind = torch.full_like(out, value), torch.full_like(lse, -math.inf)
    merged, merged_lse = fa.merge_attention([blind, (out, lse)])
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)
    assert not fa.merge_attention([blind, blind])[0].any()


@pytest.mark.parametrize("side", ["q", "k"])
def test_queries_and_keys_are_both_counted(side):
    lengths = {"q": 5, "k": 5} | {side: FAR}
    q, k = (torch.empty(1, 1, n, 8, device="meta") for n in lengths.values())
    plain = dict.fromkeys(("q_start", "window_left", "window_right", "scale", "softcap"))
    assert too_long(describe(Inputs(q, k, k), causal=True, **plain))


@pytest.mark.parametrize("window", [(), (3,), (3, 0, 0)])
def test_a_window_that_is_no_pair_is_refused_where_the_call_is_known(window):
    q, k, v = (torch.randn(2, 4, 7, 16) for _ in range(3))
    for known in (None, (3, None), (3, 0)):
        fa.attention(q, k, v, window=known)
    with pytest.raises(TypeError, match=r"^window: must be a pair"):
        fa.attention(q, k, v, window=window)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, cu, sinks: fa.attention(x, x, x, sinks=sinks),
        lambda x, cu, sinks: fa.attention_varlen(x[0], x[0], x[0], cu, cu, sinks=sinks),
        lambda x, cu, sinks: fa.attention_decode(x, x, x, cu[1:], sinks=sinks),
    ],
    ids=["dense", "packed", "decode"],
)
def test_sinks_on_another_device_are_refused(call):
    with pytest.raises(ValueError, match=r"^sinks: must be on the device of the queries \(cpu\)"):
        call(torch.randn(1, 4, 4, 8), torch.tensor([0, 4], dtype=torch.int32), torch.zeros(4, device="meta"))


def test_a_tangent_of_decodings_sinks_is_refused():
    x, sinks, lens = torch.randn(1, 4, 7, 8), torch.randn(4), torch.tensor([7], dtype=torch.int32)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"^sinks: forward-mode.*Use reverse mode"):
        fa.attention_decode(x, x, x, lens, sinks=forward_ad.make_dual(sinks, torch.ones(4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_mapped_over_nothing_results_have_their_dtypes(dtype):
    x = torch.randn(0, 1, 2, 5, 8, dtype=dtype)
    lens = torch.ones(0, 1, dtype=torch.int32)
    out, lse = torch.vmap(lambda x: fa.attention(x, x, x, return_lse=True))(x)
    assert (out.dtype, out.shape, lse.dtype) == (dtype, x.shape, torch.float32)
    out, lse = torch.vmap(lambda x, lens: fa.attention_decode(x, x, x, lens, return_lse=True))(x, lens)
    assert (out.dtype, out.shape, lse.dtype) == (dtype, x.shape, torch.float32)


def test_a_window_to_the_left_alone_is_counted_too():
    """As tests/test_doors.py's test_queries_and_keys_are_both_counted, for plain torch."""
    q, k = (torch.empty(1, 1, n, 8, device="meta") for n in (5, FAR))
    plain = dict.fromkeys(("q_start", "scale", "softcap"))
    sides = lambda left, right: describe(Inputs(q, k, k), causal=False, window_left=left, window_right=right, **plain)
    assert tiled.why_not(sides(3, None))
    assert tiled.why_not(sides(None, 3))
    assert not tiled.why_not(sides(None, None))


@pytest.mark.parametrize("lead", [(3, 0), (0, 3), (2, 3, 0)])
def test_empty_leading_dims_that_no_view_joins(device, lead):
    q, k, v = (torch.randn(*lead, 2, n, 8, device=device).transpose(0, 1) for n in (5, 7, 7))
    out = fa.scaled_dot_product_attention(q, k, v)
    assert out.shape == q.shape


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_a_query_without_heads_over_keys_that_have_some(device, lead):
    q, k, v = torch.randn(5, 8, device=device), *torch.randn(2, *lead, 7, 8, device=device)
    torch.testing.assert_close(fa.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_a_complex_scale_is_refused():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(TypeError, match=r"^scale: must be a float or None"):
        fa.scaled_dot_product_attention(q, q, q, scale=torch.tensor(0.5 + 0j))


def test_a_tangent_of_the_scale_is_refused():
    q = torch.randn(1, 2, 5, 8)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"^scale: forward-mode"):
        fa.scaled_dot_product_attention(q, q, q, scale=forward_ad.make_dual(torch.tensor(0.5), torch.tensor(1.0)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nested_tensors_are_refused_wherever_they_come(name):
    x = torch.randn(2, 2, 5, 8)
    nested = torch.nested.nested_tensor([torch.randn(2, 5, 8), torch.randn(2, 3, 8)])
    given = dict.fromkeys(("query", "key", "value"), x) | {name: nested}
    with pytest.raises(TypeError, match=rf"^{name}: must be a dense strided tensor"):
        fa.scaled_dot_product_attention(**given)


@pytest.mark.parametrize("dim", [0, 2, 4])
def test_explaining_decoding_under_vmap_is_that_of_one_entry(dim):
    q, k, lens = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 40, 16), torch.tensor([40], dtype=torch.int32)
    want, told = str(fa.explain_decode(q, k, k, lens)), []
    call = lambda k: (told.append(str(fa.explain_decode(q, k, k, lens))), k)[1]
    torch.vmap(call, in_dims=dim)(torch.stack([k] * 3, dim))
    assert told == [want]


@pytest.mark.parametrize("dim", [0, 2, 4])
def test_explain_under_vmap_is_that_of_one_entry(dim):
    q, k = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 40, 16)
    want, told = str(fa.explain(q, k, k)), []
    many = torch.stack([q] * 3, dim)
    torch.vmap(lambda q: (told.append(str(fa.explain(q, k, k))), q)[1], in_dims=dim)(many)
    assert told == [want]


@pytest.mark.parametrize("shape", [(), (8, 1)])
def test_a_mask_of_few_numbers_has_its_gradient_from_torch_if_it_wants_one(interpreting, shape):
    q, mask = torch.randn(1, 2, 8, 16), torch.zeros(shape)
    if interpreting:
        assert fa.explain(q, q, q, mask=mask).gradients == []
    why = fa.explain(q, q, q, mask=mask.requires_grad_()).gradients
    assert why
    assert not interpreting or "one number for all keys" in why[0]


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize("scale", [-1.0, -0.1])
def test_a_scale_below_0_has_its_soft_cap(scale, backend):
    q, k, v = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n)) for n in (5, 7, 8))
    capped = 0.5 * torch.tanh(q.double() @ k.double().mT * scale / 0.5)
    out = fa.attention(q, k, v[:, :, :7], scale=scale, softcap=0.5, backend=backend)
    torch.testing.assert_close(out.double(), capped.softmax(-1) @ v[:, :, :7].double(), rtol=1e-5, atol=1e-6)


def test_autocast_leaves_float64_as_torch_does():
    q = torch.randn(1, 2, 5, 16, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fa.scaled_dot_product_attention(q, q, q).dtype == F.scaled_dot_product_attention(q, q, q).dtype
        torch.testing.assert_close(fa.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16"])
def test_narrow_integers_of_numpy_are_explained(kind, recwarn):
    """As Python's, wherever their own arithmetic would end; and NumPy's bool is one to decoding too."""
    np = pytest.importorskip("numpy")
    narrow = getattr(np, kind)
    for k in (torch.randn(1, 2, 4, 8), torch.randn(1, 2, 200, 8), torch.randn(1, 2, 40000, 8)):
        for window in ((5, None), (100, 100), (None, 3)):
            given = tuple(x if x is None else narrow(x) for x in window)
            for start, own in ((None, None), (100, narrow(100))):
                want = fa.explain(k[:, :, :4], k, k, window=window, q_start=start)
                assert fa.explain(k[:, :, :4], k, k, window=given, q_start=own) == want
    packed, cu = torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    longest = {"max_seqlen_q": 100, "max_seqlen_k": 100}
    given = {name: narrow(most) for name, most in longest.items()}
    want = fa.explain_varlen(packed, packed, packed, cu, cu, **longest)
    assert fa.explain_varlen(packed, packed, packed, cu, cu, **given) == want
    assert not recwarn
    lens = torch.tensor([4], dtype=torch.int32)
    got = fa.attention_decode(k[:, :, :2], k, k, lens, causal=np.True_)
    assert torch.equal(got, fa.attention_decode(k[:, :, :2], k, k, lens))
