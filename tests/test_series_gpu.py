"""Launches by the driver, on a GPU: the bits of Triton's, of other tensors each time."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("triton", reason="the launches are Triton's")
import flashattn_lite as fa
from flashattn_lite import calls, decode
from flashattn_lite.kernels import series


def packed(q, k, v):
    cu = torch.tensor([0, 50, 128], dtype=torch.int32, device="cuda")
    return fa.attention_varlen(q, k, v, cu, cu, causal=True, max_seqlen_q=78, max_seqlen_k=78)


def decoded(q, k, v):
    lens = torch.tensor([100, 4000], dtype=torch.int32, device="cuda")
    table = torch.arange(64, dtype=torch.int32, device="cuda").view(2, 32).flip(1)
    pages = [x.view(2, 2, 32, 128, 128).transpose(1, 2).reshape(64, 2, 128, 128) for x in (k, v)]
    return fa.attention_decode(q, k, v, lens), fa.attention_decode(q, *pages, lens, block_table=table)


SQUARE, DECODED = [(2, 4, 128, 64)] * 3, [(2, 8, 1, 128), (2, 2, 4096, 128), (2, 2, 4096, 128)]
ON_A_GPU = {
    "attention": (lambda q, k, v: fa.attention(q, k, v, causal=True), SQUARE),
    "one tensor": (lambda x: fa.attention(x, x, x), SQUARE[:1]),
    "portable": (lambda q, k, v: fa.attention(q, k, v, backend="triton"), SQUARE),
    "mask": (lambda q, k, v, mask: fa.attention(q, k, v, mask=mask), [*SQUARE, (2, 4, 128, 128)]),
    "parts": (lambda q, k, v: fa.attention(q, k, v), [(1, 8, 128, 128), (1, 8, 8192, 128), (1, 8, 8192, 128)]),
    "packed": (packed, [(128, 4, 64)] * 3),
    "float32": (lambda q, k, v: fa.attention(*(x.float() for x in (q, k, v))), SQUARE),
    "decoding": (decoded, DECODED),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_the_drivers_launches_have_the_bits_of_tritons(name, monkeypatch):
    """Of other tensors each time, with gradients where there are any."""
    if torch.version.hip:
        pytest.skip("launches stay Triton's for AMD")
    monkeypatch.setattr(series, "WORTH", 1)
    attend, shapes = ON_A_GPU[name]
    made = []
    for cache in (calls._ready, calls._gradients, decode._ready):
        cache.clear()

    def run(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        new = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
        inputs = [new(shape).requires_grad_(name != "decoding") for shape in shapes]
        outs = attend(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return [*outs, *(torch.autograd.grad(outs[0].sum(), inputs) if name != "decoding" else ())]

    with monkeypatch.context() as patch:
        patch.setattr(series, "again", lambda launches, given: made.append(None))
        tritons = [run(seed) for seed in range(3)]
        assert made
    again = series.again
    made.clear()
    monkeypatch.setattr(series, "again", lambda launches, given: made.append(again(launches, given)) or made[-1])
    for cache in (calls._ready, calls._gradients, decode._ready):
        cache.clear()
    drivers = [run(seed) for seed in (0, 0, 1, 2)][1:]
    assert made and all(made)
    assert all(torch.equal(a, b) for of in zip(drivers, tritons, strict=True) for a, b in zip(*of, strict=True))
    assert not torch.equal(drivers[0][0], drivers[1][0])
