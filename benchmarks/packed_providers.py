"""The rivals and us on packed sequences, behind one call on (tokens, heads, dim).

Each maker of PACKED is asked once, and what it made is then given the packing that its calls are for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import flashattn_lite
from benchmarks.providers import OURS, Provider, carried_by_xformers, compiled_flex


class Packing(NamedTuple):
    """Sequences one behind another: how long each is, and on the device where each begins and the last one ends."""

    lengths: tuple[int, ...]
    cu_seqlens: Tensor

    @property
    def longest(self) -> int:
        return max(self.lengths)


Packed = Callable[[Packing], Provider]


def pack(lengths: Sequence[int], device: str) -> Packing:
    return Packing(tuple(lengths), torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device))


def packed_ours(backend: str) -> Packed:
    def of(packing: Packing) -> Provider:
        cu, longest = packing.cu_seqlens, packing.longest

        def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            return flashattn_lite.attention_varlen(
                q, k, v, cu, cu, causal=causal, max_seqlen_q=longest, max_seqlen_k=longest, backend=backend
            )

        return Provider(call)

    return of


def packed_sdpa() -> Packed:
    """torch.nn.attention.varlen, which takes FlashAttention-2 on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    def of(packing: Packing) -> Provider:
        cu, longest = packing.cu_seqlens, packing.longest

        def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            out = varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0) if causal else (-1, -1))
            return out[0] if isinstance(out, tuple) else out

        return Provider(call)

    return of


def padded_sdpa() -> Packed:
    """torch's, by its own choice, on sequences padded to the longest one, as views of (batch, length, heads, dim)."""

    def of(packing: Packing) -> Provider:
        lengths = packing.cu_seqlens.diff()
        is_token = torch.arange(packing.longest, device=lengths.device) < lengths[:, None]
        equal = min(packing.lengths) == packing.longest
        mask = None if equal else is_token[:, None, None]

        def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            # A causal row sees no padding: that lies behind the sequence.
            return F.scaled_dot_product_attention(q, k, v, None if causal else mask, is_causal=causal)

        def pad(x: Tensor) -> Tensor:
            padded = x.new_zeros(*is_token.shape, *x.shape[1:])
            padded[is_token] = x
            return padded.transpose(1, 2)

        return Provider(call, lay=pad, unlay=lambda out: out.transpose(1, 2)[is_token])

    return of


def packed_flex() -> Packed:
    """All tokens are one sequence, whose mask keeps the documents apart."""
    from torch.nn.attention.flex_attention import create_block_mask

    compiled = compiled_flex()

    def of(packing: Packing) -> Provider:
        lengths = packing.cu_seqlens.diff()
        document = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device).repeat_interleave(lengths)
        together = lambda b, h, i, j: document[i] == document[j]
        causally = lambda b, h, i, j: (document[i] == document[j]) & (i >= j)
        masks: dict[bool, Any] = {}

        def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            if causal not in masks:
                rule = causally if causal else together
                masks[causal] = create_block_mask(rule, None, None, len(q), len(q), device=q.device)
            out = compiled(*(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=masks[causal])
            return out[0].transpose(0, 1)

        return Provider(call)

    return of


def packed_flash_attention(module: str) -> Packed:
    """A package of Dao's."""
    function = importlib.import_module(module).flash_attn_varlen_func

    def of(packing: Packing) -> Provider:
        boundaries = flash_boundaries(packing)

        def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            out = function(q, k, v, **boundaries, causal=causal)
            return out[0] if isinstance(out, tuple) else out

        return Provider(call)

    return of


def packed_flash_attention_3() -> Packed:
    """As flash_attention_3: Dao's own build, else what xformers carries; flash_attn_varlen_func has one split too."""
    if importlib.util.find_spec("flash_attn_interface"):
        return packed_flash_attention("flash_attn_interface")
    forward = carried_by_xformers()

    def of(packing: Packing) -> Provider:
        boundaries = flash_boundaries(packing)

        def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            out, *_ = forward(q, k, v, **boundaries, is_causal=causal, num_splits=1)
            return out

        return Provider(call)

    return of


def flash_boundaries(packing: Packing) -> dict[str, Any]:
    """As all of Dao's name them."""
    cu, longest = packing.cu_seqlens, packing.longest
    return {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}


PACKED: dict[str, Callable[[], Packed]] = {
    **{name: partial(packed_ours, backend) for name, backend in OURS.items()},
    "sdpa-varlen": packed_sdpa,
    "sdpa-padded": padded_sdpa,
    "flex": packed_flex,
    "fa2": partial(packed_flash_attention, "flash_attn"),
    "fa3": packed_flash_attention_3,
    "fa4": partial(packed_flash_attention, "flash_attn.cute"),
}
