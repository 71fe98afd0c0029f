"""Views whose numbers are not those that lie side by side at their address: sinks and lengths with gaps, negatives."""

from __future__ import annotations

import pytest
import torch

import flashattn_lite as fa


def apart(x: torch.Tensor, other: float) -> torch.Tensor:
    """x, every second element of a tensor that holds `other` between."""
    return torch.stack([x, torch.full_like(x, other)], -1).flatten()[::2]


def near(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["triton", "split", "tiled"])
def test_dense(device, interpreting, backend):
    if device.type == "cpu" and not interpreting and backend != "tiled":
        pytest.skip("no kernel runs on CPU tensors but in the interpreter")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, n, 16, generator=generator).to(device) for n in (1 if backend == "split" else 9, 600, 600)
    )
    sinks, lens = (
        torch.tensor([0.5, 9.0, -1.0, 3.0], device=device),
        torch.tensor([300, 41], dtype=torch.int32, device=device),
    )
    call = lambda sinks, lens: fa.attention(
        q, k, v, sinks=sinks, kv_lens=lens, causal=True, return_lse=True, backend=backend
    )
    near(call(apart(sinks, 20.0), apart(lens, 0)), call(sinks, lens))


@pytest.mark.parametrize("keys", [16, 600])
def test_decoding(device, keys):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 16, generator=generator).to(device) for n in (1, keys, keys))
    sinks, lens = (
        torch.tensor([0.5, 9.0, -1.0, 3.0], device=device),
        torch.tensor([keys, 11], dtype=torch.int32, device=device),
    )
    call = lambda sinks, lens: fa.attention_decode(q, k, v, lens, sinks=sinks, return_lse=True)
    near(call(apart(sinks, 20.0), apart(lens, 0)), call(sinks, lens))


@pytest.mark.parametrize("backend", ["triton", "split", "tiled"])
def test_packed(device, interpreting, backend):
    if device.type == "cpu" and not interpreting and backend != "tiled":
        pytest.skip("no kernel runs on CPU tensors but in the interpreter")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 4, 16, generator=generator).to(device) for n in (7, 90, 90))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3, 7], [0, 40, 90]))
    sinks, lens = (
        torch.tensor([0.5, 9.0, -1.0, 3.0], device=device),
        torch.tensor([33, 50], dtype=torch.int32, device=device),
    )
    options = {"causal": True, "max_seqlen_q": 4, "max_seqlen_k": 50, "return_lse": True, "backend": backend}
    call = lambda cu_q, cu_k, **rest: fa.attention_varlen(q, k, v, cu_q, cu_k, **rest, **options)
    near(
        call(apart(cu_q, 0), apart(cu_k, 0), sinks=apart(sinks, 20.0), kv_lens=apart(lens, 0)),
        call(cu_q, cu_k, sinks=sinks, kv_lens=lens),
    )


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "sinks"])
@pytest.mark.parametrize("rows", [1, 9])
def test_a_view_that_negates_is_no_known_call(device, name, rows):
    """Its memory holds other numbers than it: of the same shape, strides and address."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (1, 2, rows, 16), "k": (1, 2, 40, 16), "v": (1, 2, 40, 16), "mask": (rows, 40), "sinks": (2,)}
    given = {name: torch.randn(shape, generator=generator).to(device) for name, shape in shapes.items()}
    call = lambda given: fa.attention(*(given[x] for x in "qkv"), mask=given["mask"], sinks=given["sinks"])
    for _ in range(2):
        call(given)
    got = call(given | {name: torch._neg_view(given[name])})
    torch.testing.assert_close(got, call(given | {name: -given[name]}))
