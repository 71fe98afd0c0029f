"""The kit must catch bugs of decoding too: each of its laws is handed an attention over a cache with a bug in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashattn_lite.decode import attention_decode
from flashattn_lite.testing import DECODE_LAWS, Case, check_decode, decoding, laws, locality
from tests.wrong_attentions import (
    Change,
    as_if_contiguous,
    changed,
    heads_interleaved,
    last_length_ignored,
    lengths_as_they_come,
    longest_for_shortest,
    not_multiplied_back,
    one_head,
    one_sequence,
    other_bits,
    queries_leak,
    sinks_that_are_numbers,
    spoiled,
    values_leak,
    window_right_off_by_one,
)

SMALL = {"max_batch": 2, "max_heads": 2, "max_len": 33, "max_dim": 33}
Decoding = Callable[..., Any]


def cached(attention: Callable[..., Any]) -> Decoding:
    """An attention over a cache, whose lengths come as an argument of their own."""
    return lambda q, k, v, kv_lens, **options: attention(q, k, v, kv_lens=kv_lens, **options)


def before(change: Change) -> Decoding:
    """Decoding, with its arguments tampered with."""
    return cached(changed(change, attention_decode))


def after(result: Callable[..., Any]) -> Decoding:
    """Decoding, with its result tampered with."""
    return cached(spoiled(result, attention_decode))


def whole_tiles(a: dict[str, Any]) -> None:
    lens = a["kv_lens"].clamp(0, a["k"].shape[2])
    a["kv_lens"] = torch.where(lens < 16, lens, lens // 16 * 16)


def a_sink_for_none(a: dict[str, Any]) -> None:
    a.setdefault("sinks", torch.zeros(a["q"].shape[1], dtype=a["q"].dtype))


def one_token_ahead(a: dict[str, Any]) -> None:
    if a.get("causal"):
        a.update(causal=False, window=((a.get("window") or (None, None))[0], 1))


def window_right_one_short(a: dict[str, Any]) -> None:
    if a.get("window") and a["window"][1]:
        a["window"] = (a["window"][0], a["window"][1] - 1)


def large_pages_negated(a: dict[str, Any]) -> None:
    if a.get("block_table") is not None and a["k"].shape[2] >= 128:
        a["v"] = -a["v"]


def batched(q: Tensor, k: Tensor) -> bool:
    return q.shape[0] > 1


def in_log2(out: Tensor, lse: Tensor, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return out, lse / math.log(2)


def followed_below_0(out: Tensor, lse: Tensor, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    table = a.get("block_table")
    return out + (table is not None and bool((table < 0).any())), lse


WRONG: list[tuple[Any, str, Decoding]] = [
    (laws.matches_oracle, "lse in log2 units", after(in_log2)),
    (laws.matches_oracle, "scale from Dv", before(lambda a: a.setdefault("scale", a["v"].shape[-1] ** -0.5))),
    (laws.matches_oracle, "its window one wider", before(window_right_off_by_one)),
    (laws.lse_is_only_told, "always a pair", before(lambda a: a.update(return_lse=True))),
    (laws.lse_is_only_told, "another scale without lse", before(lambda a: "return_lse" in a or a.update(scale=9.0))),
    (laws.gqa_is_repeated_kv, "heads interleaved", before(heads_interleaved)),
    (laws.strides_are_irrelevant, "strides ignored", before(as_if_contiguous)),
    (laws.order_of_keys_is_irrelevant, "last partial tile dropped", before(whole_tiles)),
    (laws.kv_lens_cut_the_keys, "a full cache", before(lambda a: a.update(kv_lens=decoding.full(a["k"])))),
    (laws.kv_lens_cut_the_keys, "the last of kv_lens ignored", before(last_length_ignored)),
    (laws.lengths_outside_count_as_the_nearest, "below 0 they hide nothing", before(lengths_as_they_come)),
    (laws.lengths_outside_count_as_the_nearest, "the least is S", before(longest_for_shortest(-(2**31)))),
    (laws.lengths_outside_count_as_the_nearest, "the largest is 0", before(longest_for_shortest(2**31 - 1))),
    (laws.a_sink_of_no_weight_is_none, "a sink of -inf is 0", before(sinks_that_are_numbers)),
    (laws.scale_is_a_factor_of_q, "scale ignored", before(lambda a: a.pop("scale", None))),
    (laws.a_high_softcap_is_none, "softcap not multiplied back", before(not_multiplied_back)),
    (laws.constant_values_come_out, "a sink of 0 for none", before(a_sink_for_none)),
    (laws.out_lies_between_the_values, "2 % too much", after(lambda out, lse, _: (out * 1.02, lse))),
    (locality.future_keys_are_irrelevant, "causal off by one", before(one_token_ahead)),
    (locality.keys_outside_the_window_are_irrelevant, "window off by one", before(window_right_off_by_one)),
    (locality.unseen_nan_never_shows, "0 times all values", after(values_leak)),
    (locality.repeats_have_the_same_bits, "noise", after(lambda out, lse, _: (out + torch.rand(()) / 1e6, lse))),
    (locality.other_rows_are_irrelevant, "0 times all queries", after(queries_leak)),
    (locality.other_sequences_are_irrelevant, "0 times all values", after(values_leak)),
    (locality.batch_slot_is_irrelevant, "other bits for batch 1", after(other_bits(one_sequence))),
    (locality.head_slot_is_irrelevant, "other bits for one head", after(other_bits(one_head))),
    (decoding.causal_is_the_default, "open to all", before(lambda a: a.setdefault("causal", False))),
    (decoding.the_right_side_of_a_window_is_counted, "one short", before(window_right_one_short)),
    (decoding.paged_is_contiguous, "large pages negated", before(large_pages_negated)),
    (decoding.paged_is_contiguous, "entries below 0 are followed", after(followed_below_0)),
    (decoding.merge_of_two_caches_is_the_whole, "lse in log2 units", after(in_log2)),
    (decoding.a_larger_batch_is_irrelevant, "all slots", after(other_bits(batched))),
    (decoding.a_larger_batch_is_irrelevant, "the first slot", after(other_bits(batched, 0))),
    (decoding.a_larger_batch_is_irrelevant, "the last slot", after(other_bits(batched, -1))),
]
ASKED = {law.__name__: law for law in DECODE_LAWS}  # through_attention keeps the names of the laws that it asks


@pytest.mark.parametrize(
    ("name", "wrong"),
    [(law.__name__, wrong) for law, _, wrong in WRONG],
    ids=[f"{law.__name__}, {bug}" for law, bug, _ in WRONG],
)
def test_each_law_catches_a_bug(name: str, wrong: Decoding) -> None:
    with pytest.raises(AssertionError, match="in Case"):
        check_decode(wrong, laws=[ASKED[name]], n=200, shrink=False, **SMALL)


def test_every_law_is_held_to_it() -> None:
    assert {law.__name__ for law, _, _ in WRONG} == set(ASKED)
    assert len(ASKED) == len(DECODE_LAWS)


@pytest.mark.parametrize(("paged", "length"), [(False, 5), (True, 256)])
def test_what_no_token_wrote_is_asked_to_be_nan(paged: bool, length: int) -> None:
    """A cache past its lengths, and pages that no table names, beside full ones.

    By a problem without NaN: what is drawn holds some where a row does not look, and that would show it too.
    """
    reads_on = after(lambda out, lse, a: values_leak(out, lse, a) if ("block_table" in a) == paged else (out, lse))
    case = Case(torch.randn(1, 1, 5, 8), *torch.randn(2, 1, 1, length, 8))
    with pytest.raises(AssertionError, match=r"a cache in pages of \d+: out\[0, 0, 0, 0\] is "):
        decoding.paged_is_contiguous(reads_on, case)


def test_decoding_in_float64_passes() -> None:
    """Whose parts merge by an lse of float32."""
    check_decode(attention_decode, n=10, laws=DECODE_LAWS, dtypes=[torch.float64], max_dim=16, max_len=20, shrink=False)


def test_decoding_has_no_features() -> None:
    with pytest.raises(ValueError, match="features: is no size"):
        check_decode(attention_decode, features={"causal"})


def test_decoding_without_a_token_is_no_problem() -> None:
    with pytest.raises(ValueError, match=r"^max_len: must be an int from 1 up; got 0"):
        check_decode(attention_decode, n=1, max_len=0)
