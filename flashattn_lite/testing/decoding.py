"""What is true of every attention over a cache: laws `law(attention_decode, case)`, and the laws of attention on it.

`attention_decode` is any callable with flashattn_lite.attention_decode's signature. A case is an attention case whose
queries are the last tokens of their sequences.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashattn_lite.arguments_decode import MAX_ROWS
from flashattn_lite.merge import merge_attention
from flashattn_lite.testing import laws, locality
from flashattn_lite.testing.case import Attention, Case, Result
from flashattn_lite.testing.oracle import assert_close_to_oracle
from flashattn_lite.testing.results import assert_same_bits, pair, run

# What a decoding attention knows of `strategies.FEATURES`.
DECODE_FEATURES = frozenset(
    {"gqa", "causal", "window", "scale", "softcap", "sinks", "kv_lens", "lse", "strides", "hostile", "poison"}
)


def last_tokens(case: Case) -> Case:
    """The same problem for its last query rows, as many as decoding takes."""
    return case.replace(q=case.q[:, :, -MAX_ROWS:])


def as_attention(attention_decode: Callable[..., Any]) -> Attention:
    """A decoding attention with the signature of `attention`: without kv_lens the keys are a cache that is full."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return attention_decode(q, k, v, options.pop("kv_lens", full(k)), **{"causal": False, **options})

    return attention


def full(k: Tensor) -> Tensor:
    return torch.full(k.shape[:1], k.shape[2], dtype=torch.int32, device=k.device)


def paged_is_contiguous(attention_decode: Callable[..., Any], case: Case) -> None:
    """Pages in a random order, among unused ones full of NaN, give the bits of a contiguous cache of that capacity."""
    page = 16 << case.integer(0, 4)
    lens = full(case.k) if case.kv_lens is None else case.kv_lens
    capacity = -(-case.k.shape[2] // page) * page
    past = torch.arange(capacity, device=lens.device) >= lens.view(-1, 1, 1)  # [B, 1, S]
    grown = case.map_kv(lambda x: _grown(x, capacity).masked_fill(past.unsqueeze(-1), math.nan)).replace(kv_lens=lens)
    whole = run(as_attention(attention_decode), grown)

    batch, count = case.q.shape[0], capacity // page
    order = torch.randperm(batch * count + 3, generator=case.generator())[: batch * count].view(batch, count)
    table = order.to(lens)
    used = torch.arange(count, device=lens.device) * page < lens.view(-1, 1)
    pages = grown.map_kv(lambda x: _paged(x, table, page, batch * count + 3))
    table = torch.where(used, table, -1)
    result = run(as_attention(functools.partial(attention_decode, block_table=table)), pages)
    assert_same_bits(result, whole, f"a cache in pages of {page}", case)


def _grown(x: Tensor, capacity: int) -> Tensor:
    return F.pad(x, (0, 0, 0, capacity - x.shape[2])).contiguous()


def _paged(x: Tensor, table: Tensor, page: int, pages: int) -> Tensor:
    """[pages, H, page, D] with the rows of x [B, H, S, D] where the table says."""
    storage = x.new_full((pages, x.shape[1], page, x.shape[3]), math.nan)
    storage[table.flatten().long()] = x.unflatten(2, (-1, page)).movedim(2, 1).flatten(0, 1)
    return storage


def causal_is_the_default(attention_decode: Callable[..., Any], case: Case) -> None:
    """A call that says nothing of causality is causal."""
    case = case.replace(causal=True, kv_lens=full(case.k) if case.kv_lens is None else case.kv_lens)
    silent = {name: x for name, x in case.options().items() if name not in ("causal", "kv_lens")}
    result = attention_decode(case.q, case.k, case.v, case.kv_lens, **silent, return_lse=True)
    assert_close_to_oracle(*pair(result, case), case)


def merge_of_two_caches_is_the_whole(attention_decode: Callable[..., Any], case: Case) -> None:
    """Keys in two caches, cut anywhere: their merge is attention over one; a sink enters one part."""
    attention = as_attention(attention_decode)
    lens = full(case.k) if case.kv_lens is None else case.kv_lens
    case = case.replace(causal=False, window=None, kv_lens=lens)
    cut = case.integer(0, case.k.shape[2])
    first = run(attention, case.keys(slice(0, cut)).replace(kv_lens=lens.clamp(max=cut)))
    second = run(attention, case.keys(slice(cut, None)).replace(kv_lens=(lens - cut).clamp(min=0), sinks=None))
    laws.agree(merge_attention([first, second]), run(attention, case), case, merged=True)


def a_larger_batch_is_irrelevant(attention_decode: Callable[..., Any], case: Case) -> None:
    """The same sequence many times over has the bits that it has alone, however the work is split for either."""
    if not case.q.shape[0]:
        return
    # Contiguous, since a step of 0 from sequence to sequence may lie otherwise on 16-byte addresses than theirs did.
    attention, alone = as_attention(attention_decode), case.sequence(0).contiguous()
    many = 1 << case.integer(1, 6)
    repeat = lambda x: None if x is None else x.expand(many, *x.shape[1:])
    tensors = {name: repeat(getattr(alone, name)) for name in ("q", "k", "v", "kv_lens")}
    out, lse = run(attention, alone.replace(**tensors))
    want = run(attention, alone)
    for b in (0, many - 1):
        got: Result = (out[b : b + 1], lse[b : b + 1])
        assert_same_bits(got, want, f"slot {b} of {many}", case)


def the_right_side_of_a_window_is_counted(attention_decode: Callable[..., Any], case: Case) -> None:
    """Only among the last tokens does it hide anything, and only without causality."""
    for right in {0, case.integer(0, max(0, case.q.shape[2] - 1))}:
        bounded = case.replace(causal=False, window=(None, right))
        assert_close_to_oracle(*run(as_attention(attention_decode), bounded), bounded)


# Laws of attention that need neither a mask nor a start of the queries, asked through `as_attention`.
SHARED_LAWS = (
    laws.matches_oracle,
    laws.lse_is_only_told,
    laws.gqa_is_repeated_kv,
    laws.strides_are_irrelevant,
    laws.order_of_keys_is_irrelevant,
    laws.kv_lens_cut_the_keys,
    laws.lengths_outside_count_as_the_nearest,
    laws.a_sink_of_no_weight_is_none,
    laws.scale_is_a_factor_of_q,
    laws.a_high_softcap_is_none,
    laws.constant_values_come_out,
    laws.out_lies_between_the_values,
    *locality.LOCALITY_LAWS,
)


def through_attention(law: Callable[..., None]) -> Callable[..., None]:
    """A law of attention as a law of decoding."""

    @functools.wraps(law)
    def asked(attention_decode: Callable[..., Any], case: Case) -> None:
        law(as_attention(attention_decode), case)

    return asked


DECODE_LAWS: tuple[Callable[..., None], ...] = (
    *(through_attention(law) for law in SHARED_LAWS),
    causal_is_the_default,
    the_right_side_of_a_window_is_counted,
    paged_is_contiguous,
    merge_of_two_caches_is_the_whole,
    a_larger_batch_is_irrelevant,
)
