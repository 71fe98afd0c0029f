"""Results are fresh tensors, to be written to in place, and calls compile whatever comes of them later."""

from __future__ import annotations

import pytest
import torch
from torch.func import hessian, vmap

import flashattn_lite as fa
from flashattn_lite.reference import attention_reference
from tests.exhaustive import also, once

LENS = torch.tensor([5, 3], dtype=torch.int32)


def heads_last(*shape: int) -> torch.Tensor:
    """(..., H, L, D) as models have it: a transposed (..., L, H, D)."""
    return torch.randn(*shape).transpose(-3, -2)


CALLS = {
    "attention": lambda: fa.attention(*[heads_last(2, 5, 4, 8)] * 3),
    "attention_decode": lambda: fa.attention_decode(*[heads_last(2, 5, 4, 8)] * 3, LENS),
    "4 dims": lambda: fa.scaled_dot_product_attention(*[heads_last(2, 5, 4, 8)] * 3),
    "5 dims": lambda: fa.scaled_dot_product_attention(*[heads_last(2, 3, 5, 4, 8)] * 3),
    "3 dims": lambda: fa.scaled_dot_product_attention(*[torch.randn(4, 5, 8)] * 3),
    "2 dims": lambda: fa.scaled_dot_product_attention(*[torch.randn(5, 8)] * 3),
    "softmax of one number": lambda: fa.online_softmax(torch.tensor(2.0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_no_grad_made_is_written_to_in_place_later(name):
    for _ in range(2):  # the second call is found by its metadata
        with torch.no_grad():
            out = CALLS[name]()
        out.mul_(torch.nn.Parameter(torch.ones(()))).sum().backward()
        assert CALLS[name]().detach_().is_leaf


@pytest.mark.parametrize("shape", [(2, 4, 5, 8), (4, 5, 8), (5, 8), (2, 3, 4, 5, 8)])
def test_whoever_writes_to_a_recorded_result_is_seen(shape):
    """The backward needs out as it was: an error, no wrong gradient."""
    q = torch.randn(shape, requires_grad=True)
    out = fa.scaled_dot_product_attention(q, q, q)
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", also("inductor")])
def test_decoding_compiles_where_a_gradient_might_be_wanted(backend):
    """Only a backward pass says that there is none."""
    linear, cache = torch.nn.Linear(8, 8), torch.randn(2, 2, 7, 8)
    step = lambda x: fa.attention_decode(linear(x), cache, cache, LENS)
    x = torch.randn(2, 4, 1, 8)
    out = torch.compile(step, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(out, step(x))
    with pytest.raises(NotImplementedError, match=r"attention_decode: has no gradient; .* Call attention\(q, k, v, kv"):
        out.sum().backward()


@once
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_the_data_decide_compile():
    attend = lambda x, keep: fa.scaled_dot_product_attention(*[x[keep]] * 3, is_causal=True)
    keep = torch.tensor([True, False, True, True])
    for shape in ((4, 2, 5, 8), (4, 3, 2, 5, 8), (4, 2, 3, 2, 5, 8)):
        x = torch.randn(shape)
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, keep), attend(x, keep))
    decode = lambda q, pages, keep: fa.attention_decode(
        q, pages[keep], pages[keep], LENS, block_table=torch.tensor([[0], [2]], dtype=torch.int32)
    )
    given = torch.randn(2, 2, 1, 8), torch.randn(4, 2, 16, 8), keep
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), decode(*given))


def test_the_definition_has_second_derivatives_of_each_entry():
    """What errors about gradients of gradients name, under vmap too."""
    q, k = torch.randn(3, 1, 1, 2, 2), torch.randn(1, 1, 3, 2)
    f = lambda q: attention_reference(q, k, k, causal=True).square().sum()
    each = torch.stack([torch.autograd.functional.hessian(f, x) for x in q])
    torch.testing.assert_close(vmap(hessian(f))(q), each)
