"""What benchmarks/host_time.py times: calls of one kind on fixed, tiny inputs, by provider.

A kind that ends in "+grad" has inputs that ask for gradients; one in "+compiled" is ROW calls in a row within one
function that torch.compile has compiled whole, as a model's layers are: each takes the result of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashattn_lite
from benchmarks.packed_providers import PACKED, pack
from benchmarks.providers import OURS, PROVIDERS, Provider, sdpa

BATCH, HEADS, LENGTH, HEAD_DIM = 4, 8, 128, 64
ROWS, COLUMNS = 512, 4096
ROW = 8  # calls in one of compiled code
Makers = dict[str, Callable[[], Provider]]


@dataclass(frozen=True)
class Calls:
    """call(*inputs, causal) of each provider must be exact(*inputs, causal) in float64."""

    op: str
    inputs: tuple[Tensor, ...]
    makers: Makers
    exact: Callable[..., Tensor]
    causal: bool = False
    row: int = 1


def packed(name: str, device: str) -> Provider:
    return PACKED[name]()(pack([LENGTH] * BATCH, device))


def in_compiled_code(make: Callable[[], Provider]) -> Provider:
    provider = make()
    torch._dynamo.reset()  # what was compiled of `row` for other kinds counts against torch's limit

    def row(x: Tensor, *rest: Any) -> Tensor:
        for _ in range(ROW):
            x = provider.call(x, *rest)
        return x

    return provider._replace(call=torch.compile(row, fullgraph=True, dynamic=False))


def compiled(calls: Calls, names: tuple[str, ...]) -> Calls:
    makers: Makers = {name: partial(in_compiled_code, calls.makers[name]) for name in names}
    return Calls(calls.op + "+compiled", calls.inputs, makers, calls.exact, calls.causal, ROW)


def only(call: Callable[..., Tensor]) -> Callable[[], Provider]:
    return lambda: Provider(call)


DENSE: Makers = {"sdpa": sdpa, **PROVIDERS}
MASKED: Makers = {
    "flashattn_lite": only(lambda q, k, v, mask, _: flashattn_lite.scaled_dot_product_attention(q, k, v, mask)),
    "sdpa": only(lambda q, k, v, mask, _: F.scaled_dot_product_attention(q, k, v, mask)),
}
DECODE: Makers = {
    "flashattn_lite": only(lambda q, k, v, lens, _: flashattn_lite.attention_decode(q, k, v, lens)),
    "sdpa": only(lambda q, k, v, lens, _: F.scaled_dot_product_attention(q, k, v)),
}
SOFTMAX: Makers = {
    "flashattn_lite": only(lambda x, _: flashattn_lite.online_softmax(x)),
    "torch": only(lambda x, _: torch.softmax(x, -1)),
}


def exact_dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def exact_packed(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (x.unflatten(0, (BATCH, LENGTH)).transpose(1, 2) for x in (q, k, v))
    return exact_dense(q, k, v, causal).transpose(1, 2).flatten(0, 1)


def every(device: str = "cuda") -> Iterator[Calls]:
    """All kinds."""

    def random(*shape: int, grad: bool = False) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=grad)

    varlen: Makers = {name: partial(packed, name, device) for name in (*OURS, "sdpa-varlen")}
    dense, tokens = (BATCH, HEADS, LENGTH, HEAD_DIM), (BATCH * LENGTH, HEADS, HEAD_DIM)
    kinds = [
        ("attention_forward", dense, DENSE, exact_dense),
        ("attention_varlen_forward", tokens, varlen, exact_packed),
    ]
    for op, shape, makers, exact in kinds:
        for causal in (False, True):
            for grad in (False, True):
                qkv = tuple(random(*shape, grad=grad) for _ in range(3))
                yield Calls(op + "+grad" * grad, qkv, makers, exact, causal)
    q, k, v = (random(*dense) for _ in range(3))
    for causal in (False, True):
        yield compiled(Calls("attention_forward", (q, k, v), DENSE, exact_dense, causal), ("flashattn_lite", "sdpa"))
    mask = torch.rand(BATCH, 1, 1, LENGTH, device=device) > 0.3
    masked = Calls(
        "attention_forward+mask",
        (q, k, v, mask),
        MASKED,
        lambda q, k, v, mask, _: F.scaled_dot_product_attention(q, k, v, mask > 0),
    )
    lens = torch.full((BATCH,), LENGTH, device=device, dtype=torch.int32)
    decode = Calls(
        "attention_decode",
        (q[:, :, :1].contiguous(), k, v, lens),
        DECODE,
        lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v),
    )
    softmax = Calls("online_softmax", (random(ROWS, COLUMNS),), SOFTMAX, lambda x, _: torch.softmax(x, -1))
    for calls in (masked, decode, softmax):
        yield calls
        yield compiled(calls, tuple(calls.makers))
