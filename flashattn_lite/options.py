"""The options of the calls that return an lse if asked to, so that a type checker knows which of the two comes back."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from flashattn_lite.problem import Window


class Shared(TypedDict, total=False):
    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    backend: str


class Dense(Shared, total=False):
    """Of `attention`."""

    q_start: int | None
    mask: Tensor | None
    kv_lens: Tensor | None


class Packed(Shared, total=False):
    """Of `attention_varlen`."""

    q_start: int | None
    kv_lens: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class Cached(Shared, total=False):
    """Of `attention_decode`."""

    block_table: Tensor | None
