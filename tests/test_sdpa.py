"""scaled_dot_product_attention is torch's: shapes, numbers and gradients, and what torch refuses is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import bias as biases

import flashattn_lite as fa

ours = fa.scaled_dot_product_attention


def theirs(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def tensors(device, *shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


# Leading dims of query, key, value: every way that torch lets them broadcast.
LEADS = {
    "none": ((), (), ()),
    "heads": ((3,), (3,), (3,)),
    "batch": ((2, 3), (2, 3), (2, 3)),
    "two batch dims": ((2, 2, 3), (2, 2, 3), (2, 2, 3)),
    "missing in keys": ((2, 2, 3), (3,), (2, 3)),
    "missing in queries": ((3,), (2, 2, 3), (2, 2, 3)),
    "ones": ((2, 1, 3), (1, 2, 3), (2, 2, 1)),
    "heads of keys": ((2, 3), (2, 1), (2, 1)),
    "heads of queries": ((2, 1), (2, 3), (2, 3)),
    "no batch": ((0, 3), (0, 3), (0, 3)),
}


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("causal", [False, True])
def test_leading_dims(device, lead, causal):
    q, k, v = (x + y for x, y in zip(LEADS[lead], ((5, 8), (7, 8), (7, 6)), strict=True))
    q, k, v = tensors(device, q, k, v)
    expected = theirs(q.double(), k.double(), v.double(), is_causal=causal)
    out = ours(q, k, v, is_causal=causal)
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)  # float32, sums of 7


# attn_mask shapes against (2, 2, 3, 5, 7), and against GQA heads
MASKS = [(5, 7), (1, 7), (5, 1), (1, 1), (3, 5, 7), (3, 1, 1), (2, 1, 5, 7), (2, 1, 1, 5, 7), (2, 2, 3, 5, 7)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "float with -inf"])
def test_masks(device, shape, kind):
    q, k, v, mask = tensors(device, (2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8), shape)
    if kind == "bool":
        mask = mask > -0.5
    elif kind == "float with -inf":
        mask = mask.masked_fill(mask < -0.5, -math.inf)
    wide = mask if kind == "bool" else mask.double()
    expected = theirs(q.double(), k.double(), v.double(), attn_mask=wide).nan_to_num(0.0)  # rows that see nothing
    torch.testing.assert_close(ours(q, k, v, attn_mask=mask).double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_mask_with_half_inputs(device, dtype):
    q, k, v, mask = tensors(device, (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (5, 7), dtype=dtype)
    expected = theirs(q.double(), k.double(), v.double(), attn_mask=mask.double())
    out = ours(q, k, v, attn_mask=mask.float())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=4 * torch.finfo(dtype).eps, rtol=0)


def test_lowest_finite_mask_is_not_minus_infinity(device):
    """Hugging Face masks with the lowest finite number: a row of nothing else averages V, as in torch."""
    q, k, v = tensors(device, (1, 1, 4, 8), (1, 1, 6, 8), (1, 1, 6, 8))
    mask = torch.full((4, 6), torch.finfo(torch.float32).min, device=device)
    torch.testing.assert_close(
        ours(q, k, v, attn_mask=mask), v.mean(2, keepdim=True).expand_as(q), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("scale", [0.3, -0.7, 0.0, 40.0])
def test_scale(device, scale):
    q, k, v = tensors(device, (1, 2, 5, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    scores = q.double() @ k.double().mT * scale
    torch.testing.assert_close(
        ours(q, k, v, scale=scale).double(), scores.softmax(-1) @ v.double(), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("causal", [False, True])
def test_gqa_and_gradients(device, causal):
    q, k, v, grad = tensors(device, (2, 6, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8), (2, 6, 5, 8))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    grads = torch.autograd.grad(ours(*leaves, is_causal=causal, enable_gqa=True), leaves, grad)
    expected = torch.autograd.grad(theirs(*wide, is_causal=causal, enable_gqa=True), wide, grad.double())
    for ours_, theirs_ in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours_.double(), theirs_, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 7), (3, 1, 7), (2, 1, 5, 1), (2, 3, 5, 7)], ids=str)
def test_gradient_reaches_a_float_mask(device, shape):
    q, k, v, mask = tensors(device, (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), shape)
    mask.requires_grad_()
    wide = mask.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad(ours(q, k, v, attn_mask=mask).square().sum(), mask)
    expected = theirs(q.double(), k.double(), v.double(), attn_mask=wide).square().sum()
    (expected,) = torch.autograd.grad(expected, wide)
    torch.testing.assert_close(grad.double(), expected, atol=1e-5, rtol=1e-5)


def test_gradcheck():
    q, k, v = (
        x.requires_grad_() for x in tensors("cpu", (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3), dtype=torch.float64)
    )
    mask = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, (q, k, v, mask))
    assert torch.autograd.gradcheck(lambda q, k, v: ours(q, k, v, is_causal=True), (q, k, v))


@pytest.mark.parametrize("function", [ours, fa.attention], ids=["sdpa", "attention"])
def test_a_backward_inside_autocast(device, function):
    """Its products are not autocast's to change: the same bits as outside."""
    q, k, v = (x.requires_grad_() for x in tensors(device, (1, 2, 50, 16), (1, 2, 50, 16), (1, 2, 50, 16)))
    loss = function(q, k, v).square().sum()
    outside = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = torch.autograd.grad(loss, (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_a_second_derivative_is_refused_not_wrong():
    (q,) = tensors("cpu", (1, 1, 3, 4))
    q.requires_grad_()
    (grad,) = torch.autograd.grad(ours(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no gradients of their own"):
        grad.sum().backward()


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_empty(device, lengths):
    q, k = tensors(device, (2, 3, lengths[0], 8), (2, 3, lengths[1], 8))
    out = ours(q, k, k)
    assert out.shape == q.shape
    assert not out.any()


def test_expanded_and_transposed_inputs_are_read_where_they_lie(device):
    (storage,) = tensors(device, (2, 9, 3, 4, 16))
    q, k, v = (storage[:, :, i].transpose(1, 2)[..., ::2] for i in range(3))  # (2, 4, 9, 8), last stride 2
    shared = k[:, :1].expand(-1, 4, -1, -1)
    expected = theirs(q.double(), shared.double(), v.double())
    torch.testing.assert_close(ours(q, shared, v).double(), expected, atol=2e-6, rtol=1e-5)


def test_autocast_casts_as_torch_does(device):
    q, k = tensors(device, (1, 2, 6, 16), (1, 2, 6, 16))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = ours(q, k.bfloat16(), k)
        assert out.dtype == F.scaled_dot_product_attention(q, k.bfloat16(), k).dtype == torch.bfloat16
        seen = torch.arange(36, device=device).view(6, 6) % 5 != 1  # stays what it is: as numbers it would be added
        out, want = (function(q, k, k, attn_mask=seen) for function in (ours, F.scaled_dot_product_attention))
        torch.testing.assert_close(out, want, atol=0.03, rtol=0.02)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", ["transposed", "keys broadcast", "mask broadcasts over a part"])
def test_leading_dims_that_no_view_joins(device, case, compiled):
    """In one graph too, where a view that fails is the end."""
    x = [torch.randn(2, 3, 2, n, 8, device=device) for n in (5, 7, 7)]
    mask = None
    if case == "transposed":
        x = [y.transpose(0, 1) for y in x]
    elif case == "keys broadcast":
        x = [x[0][:, :1], x[1][:1], x[2][0, 0]]
    else:
        mask = torch.randn(1, 3, 2, 5, 7, device=device)
    ours = fa.scaled_dot_product_attention
    if compiled:
        ours = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(ours(*x, attn_mask=mask), theirs(*x, attn_mask=mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shapes", [[(2, 0, 3, 4)] * 3, [(2, 0, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)]], ids=["none", "q"])
def test_no_heads(device, shapes):
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
    out = fa.attention(q, k, v)
    assert out.shape == (2, 0, 3, 4)
    assert fa.explain(q, k, v).backend
    out.sum().backward()
    assert not k.grad.any()


def test_numbers_of_numpy_are_numbers():
    x = torch.randn(1, 2, 5, 8)
    got = fa.scaled_dot_product_attention(x, x, x, scale=np.float32(0.3), dropout_p=np.float32(0))
    assert torch.equal(got, fa.scaled_dot_product_attention(x, x, x, scale=float(np.float32(0.3))))


def test_a_number_that_a_compiler_takes_from_numpy_is_one():
    def attend(x):
        return fa.scaled_dot_product_attention(x, x, x, scale=0.5 / np.sqrt(x.shape[-1]))

    x = torch.randn(1, 2, 5, 8)
    assert torch.equal(torch.compile(attend, backend="eager", fullgraph=True)(x), attend(x))


def test_meta_tensors_have_shapes():
    x = torch.empty(2, 3, 5, 8, device="meta")
    out = fa.scaled_dot_product_attention(x, x[:, :, :4], x[:, :, :4, :6], is_causal=True)
    assert (out.shape, out.device.type) == ((2, 3, 5, 6), "meta")


def test_output_keeps_the_layout_of_a_transposed_query(device):
    """(batch, length, heads, dim) storage in, the same out: a model's reshape after attention copies nothing."""
    (q,) = tensors(device, (2, 6, 3, 8))
    assert ours(*[q.transpose(1, 2)] * 3).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("lengths", [(5, 7), (6, 6), (4, 4)], ids=str)
@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_torchs_causal_biases_are_what_they_say(device, variant, lengths):
    """They are tensors of nothing: what lies in their memory must not be read."""
    bias = getattr(biases, variant)(*lengths)
    q, k, v = tensors(device, (2, 3, lengths[0], 8), (2, 3, lengths[1], 8), (2, 3, lengths[1], 8))
    diagonal = lengths[1] - lengths[0] if variant == "causal_lower_right" else 0
    seen = torch.ones(*lengths, dtype=torch.bool, device=device).tril(diagonal)
    exact = F.scaled_dot_product_attention(q, k, v, seen)
    torch.testing.assert_close(fa.scaled_dot_product_attention(q, k, v, bias), exact)
    with fa.replace_sdpa() as report:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(out, exact)
    assert type(out) is torch.Tensor and report.calls == 1
    compiled = torch.compile(fa.scaled_dot_product_attention, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, bias), exact)
    with pytest.raises(ValueError, match=r"^attn_mask: must be None when is_causal is True"):
        fa.scaled_dot_product_attention(q, k, v, bias, is_causal=True)
    with pytest.raises(ValueError, match=r"^attn_mask: must be made for \(len_q, len_k\) = \(\d, \d\); got \(9, 9\)"):
        fa.scaled_dot_product_attention(q, k, v, getattr(biases, variant)(9, 9))
    with pytest.raises(TypeError, match=r"^mask: must hold its values; got 'a CausalBias'. Pass causal=True"):
        fa.attention(q, k, v, mask=bias)


def test_a_mask_of_a_class_that_bears_the_name_of_torchs_bias_is_a_mask():
    class CausalBias(torch.Tensor):
        pass

    x, mask = torch.randn(2, 3, 5, 8), torch.randn(5, 5)
    out = fa.scaled_dot_product_attention(x, x, x, attn_mask=mask.as_subclass(CausalBias))
    torch.testing.assert_close(torch.Tensor(out), fa.attention(x, x, x, mask=mask))


def test_who_stands_for_a_tensor_takes_the_call():
    """As with torch's function: tracers, modes and classes of others."""
    q, k, v = tensors(torch.device("cpu"), (2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8))

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with fa.replace_sdpa() as report:
        traced = torch.fx.symbolic_trace(Model())
        assert report.calls == 1
    (node,) = (node for node in traced.graph.nodes if node.op == "call_function")
    assert node.target is fa.scaled_dot_product_attention
    torch.testing.assert_close(traced(q, k, v), Model()(q, k, v))

    class Other:
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function, len(args)

    assert fa.scaled_dot_product_attention(Other(), k, v, scale=0.5) == (fa.scaled_dot_product_attention, 8)
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    want = fa.scaled_dot_product_attention(q, k, v)
    with Mode():
        out = fa.scaled_dot_product_attention(q, k, v)
    assert seen == [fa.scaled_dot_product_attention] and torch.equal(out, want)
