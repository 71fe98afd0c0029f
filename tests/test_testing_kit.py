"""The kit must catch bugs: each law is handed an attention with a bug that people make, and has to say so by itself."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_lite as fa
from flashattn_lite.reference import attention_reference
from flashattn_lite.testing import (
    ALL_LAWS,
    Case,
    assert_close_to_oracle,
    check,
    check_packed,
    expect,
    laws,
    locality,
)
from flashattn_lite.testing.results import assert_within
from flashattn_lite.testing.strategies import FEATURES
from tests.wrong_attentions import (
    a_start_of_few_bits,
    as_if_contiguous,
    changed,
    first_mask,
    heads_interleaved,
    last_length_ignored,
    lengths_as_they_come,
    longest_for_shortest,
    nan_where_nothing_is_seen,
    not_multiplied_back,
    on,
    one_head,
    one_sequence,
    other_bits,
    sinks_that_are_numbers,
    sketch,
    spoiled,
    start,
    values_leak,
    whole_tiles,
    window_right_off_by_one,
)

SMALL = {"max_batch": 2, "max_heads": 2, "max_len": 33, "max_dim": 33}

MUTANTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (laws.matches_oracle, "lse in log2 units", on(lambda out, lse: (out, lse / math.log(2)))),
    (laws.matches_oracle, "out in float32", on(lambda out, lse: (out.float(), lse))),
    (laws.matches_oracle, "scale from Dv", changed(lambda a: a.setdefault("scale", a["v"].shape[-1] ** -0.5))),
    (laws.matches_oracle, "top-left causal", changed(lambda a: a.setdefault("q_start", 0))),
    (laws.matches_oracle, "no maximum", sketch("no maximum")),
    (laws.matches_oracle, "rows that see nothing are NaN", on(nan_where_nothing_is_seen)),
    (laws.matches_oracle, "scores in bfloat16", changed(lambda a: a.update(q=a["q"].bfloat16().to(a["q"])))),
    (laws.matches_oracle, "lse of bfloat16", on(lambda out, lse: (out, lse.bfloat16().float()))),
    (laws.matches_oracle, "first mask for all", changed(first_mask)),
    (laws.lengths_outside_count_as_the_nearest, "below 0 they hide nothing", changed(lengths_as_they_come)),
    (laws.lengths_outside_count_as_the_nearest, "the least is S", changed(longest_for_shortest(-(2**31)))),
    (laws.lengths_outside_count_as_the_nearest, "the largest is 0", changed(longest_for_shortest(2**31 - 1))),
    (laws.a_start_far_away_sees_all_or_nothing, "a start of 20 bits", changed(a_start_of_few_bits)),
    (laws.a_sink_of_no_weight_is_none, "a sink of -inf is 0", changed(sinks_that_are_numbers)),
    (laws.merge_of_any_split_is_the_whole, "lse in log2 units", on(lambda out, lse: (out, lse / math.log(2)))),
    (laws.merge_of_cut_keys_is_the_whole, "q_start ignored", changed(lambda a: a.pop("q_start", None))),
    (laws.shift_of_scores_moves_lse, "mask before scale", sketch("mask before scale")),
    (laws.gqa_is_repeated_kv, "heads interleaved", changed(heads_interleaved)),
    (laws.strides_are_irrelevant, "strides ignored", changed(as_if_contiguous)),
    (laws.order_of_keys_is_irrelevant, "last partial tile dropped", changed(whole_tiles)),
    (laws.visibility_is_a_mask, "top-left causal", changed(lambda a: a.setdefault("q_start", 0))),
    (laws.kv_lens_cut_the_keys, "kv_lens ignored", changed(lambda a: a.pop("kv_lens", None))),
    (laws.kv_lens_cut_the_keys, "the last of kv_lens ignored", changed(last_length_ignored)),
    (laws.scale_is_a_factor_of_q, "scale ignored", changed(lambda a: a.pop("scale", None))),
    (laws.a_high_softcap_is_none, "softcap not multiplied back", changed(not_multiplied_back, fa.attention)),
    (laws.a_sink_is_a_key_of_value_zero, "sinks ignored", changed(lambda a: a.pop("sinks", None))),
    (laws.a_blind_row_is_zero, "masked is -1e9", sketch("masked is -1e9")),
    (laws.a_blind_row_is_zero, "its lse is 0", on(lambda out, lse: (out, lse.nan_to_num(neginf=0.0)))),
    (laws.constant_values_come_out, "not rescaled", sketch("not rescaled")),
    (laws.out_lies_between_the_values, "2 % too much", on(lambda out, lse: (out * 1.02, lse))),
    (laws.out_lies_between_the_values, "NaN", on(lambda out, lse: (out * math.nan, lse))),
    (laws.lse_is_only_told, "always a pair", changed(lambda a: a.update(return_lse=True))),
    (laws.lse_is_only_told, "another scale without lse", changed(lambda a: "return_lse" in a or a.update(scale=9.0))),
    (laws.gradients_match_autograd, "k detached", changed(lambda a: a.update(k=a["k"].detach()))),
    (laws.gradients_match_autograd, "lse detached", on(lambda out, lse: (out, lse.detach()))),
    (
        laws.gradients_match_autograd,
        "gradient of out 1 % off",
        on(lambda out, lse: (out * 1.01 - out.detach() * 0.01, lse)),
    ),
    (locality.future_keys_are_irrelevant, "causal off by one", changed(lambda a: start(a, 1))),
    (locality.keys_outside_the_window_are_irrelevant, "window off by one", changed(window_right_off_by_one)),
    (locality.unseen_nan_never_shows, "0 times all values", spoiled(values_leak)),
    (locality.repeats_have_the_same_bits, "noise", on(lambda out, lse: (out, lse + 1e-6 * torch.rand_like(lse)))),
    (locality.other_rows_are_irrelevant, "maximum of all rows", sketch("maximum of all rows")),
    (locality.other_sequences_are_irrelevant, "maximum of all rows", sketch("maximum of all rows")),
    (locality.other_sequences_are_irrelevant, "0 times all values", spoiled(values_leak)),
    (locality.batch_slot_is_irrelevant, "other bits for batch 1", spoiled(other_bits(one_sequence), fa.attention)),
    (locality.head_slot_is_irrelevant, "other bits for one head", spoiled(other_bits(one_head), fa.attention)),
]


@pytest.mark.parametrize(
    ("law", "attention"), [(law, bug) for law, _, bug in MUTANTS], ids=[name for _, name, _ in MUTANTS]
)
def test_each_law_catches_a_bug(law: Any, attention: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match="in Case"):
        check(attention, laws=[law], n=200, shrink=False, **SMALL)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_unseen_keys_are_asked_to_hold_nan_and_inf(garbage: float) -> None:
    """By a problem that holds neither: what is drawn may, and a law that overwrites it shows that."""
    holds = torch.isnan if math.isnan(garbage) else torch.isinf
    shows = spoiled(lambda out, lse, a: (out + holds(a["v"]).any(), lse))
    case = Case(torch.randn(1, 1, 3, 8), *torch.randn(2, 1, 1, 5, 8), causal=True, q_start=0)
    with pytest.raises(AssertionError, match=rf"with {garbage} in the keys that it can't see"):
        locality.unseen_nan_never_shows(shows, case)


def test_what_fails_only_once_has_failed() -> None:
    """A race shows now and then. What hypothesis calls flaky is told as the law's failure."""
    noise = [0.0, 1.0]  # of the first two runs with a row; of no other
    racy = on(lambda out, lse: (out, lse + (noise.pop() if noise and lse.isfinite().any() else 0.0)))
    with pytest.raises(AssertionError, match="in Case"):
        check(racy, laws=[locality.repeats_have_the_same_bits], n=20, shrink=False, **SMALL)
    assert not noise


def test_every_law_is_held_to_it() -> None:
    assert {law for law, _, _ in MUTANTS} == set(ALL_LAWS)


@pytest.mark.parametrize("law", ALL_LAWS, ids=lambda law: law.__name__)
def test_the_definition_passes(law: Any) -> None:
    check(attention_reference, laws=[law], n=3, **SMALL)


def test_a_part_of_the_signature_is_enough() -> None:
    """No lse, no masks: a five-line attention passes the laws that speak of what it knows; others are not asked."""

    def mine(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        bias = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).log() if causal else 0
        weights = torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5 + bias, -1)
        return (weights.nan_to_num() @ v.float()).to(q.dtype)

    check(mine, features={"causal"}, n=4, **SMALL)
    for checked in (check, check_packed):
        with pytest.raises(ValueError, match=r"features: must be among .*; got \['masks'\]"):
            checked(mine, features={"masks"})


def test_a_failure_tells_place_value_bound_and_problem() -> None:
    with pytest.raises(AssertionError) as failure:
        check(changed(lambda a: a.update(scale=2.0)), laws=[laws.matches_oracle], dtypes=[torch.float16], **SMALL)
    text = str(failure.value)
    assert "should be" in text
    assert " within " in text
    assert "elements are wrong" in text
    assert "q=(1, 1, 1, " in text, f"not shrunk: {text}"
    assert "float16 strides" in text
    assert "seed=" in text


def test_within() -> None:
    inf, nan = math.inf, math.nan
    case = lambda got, want: assert_within("x", torch.tensor([got]), torch.tensor([want]), 0.5, "a case")
    for got, want in ((1.0, 1.4), (nan, nan), (inf, nan), (nan, inf), (-inf, -inf), (0.0, 0.0)):
        case(got, want)
    for got, want in ((1.0, 1.6), (nan, 1.0), (inf, 1.0), (0.0, -inf), (nan, -inf), (1.0, nan), (-inf, 0.0)):
        with pytest.raises(AssertionError, match=r"x\[0\] is .* in a case|x\[0\]"):
            case(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_bounds_see_a_rounded_query(dtype: torch.dtype) -> None:
    """float32 at TF32's 11 bits shows in out; a half dtype shows in lse 3 bits short, in out 5 bits short."""
    q, k, v = torch.randn(3, 1, 2, 40, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    case = Case(q, k, v)
    out, lse = attention_reference(q, k, v, return_lse=True)
    assert_close_to_oracle(out, lse, case)
    bits_out, bits_lse = {torch.float32: (11, 11), torch.float16: (6, 8), torch.bfloat16: (3, 5)}[dtype]
    coarse_out = attention_reference(keep_bits(q, bits_out), k, v)
    _, coarse_lse = attention_reference(keep_bits(q, bits_lse), k, v, return_lse=True)
    with pytest.raises(AssertionError, match="out"):
        assert_close_to_oracle(coarse_out, lse, case)
    with pytest.raises(AssertionError, match="lse"):
        assert_close_to_oracle(out, coarse_lse, case)


def keep_bits(x: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).to(x.dtype)


def test_one_outlier_row_leaves_the_bounds_of_others_alone() -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 64, generator=torch.Generator().manual_seed(1))
    others = torch.arange(40) != 3
    spoiled = q.clone()
    spoiled[0, 0, 3] *= 1000
    before, after = (expect(Case(x, k, v)).out_bound[:, :, others] for x in (q, spoiled))
    assert torch.allclose(before, after, rtol=1e-6)


def test_a_row_of_nan_loosens_no_other() -> None:
    """A NaN query: its own bound is inf, where the answer is no number anyway; the rest is as without it."""
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    spoiled = q.clone()
    spoiled[0, 0, 1, 0] = math.nan
    bound, clean = expect(Case(spoiled, k, v)).out_bound, expect(Case(q, k, v)).out_bound
    assert bound[0, 0, 1].isinf().all()
    assert torch.allclose(bound[0, 0, [0, 2, 3]], clean[0, 0, [0, 2, 3]], rtol=1e-6)


def test_laws_need_no_hypothesis() -> None:
    """In a process where it can't be imported, a law runs on a case made by hand, and check says what is missing."""
    code = """
import sys
sys.modules["hypothesis"] = None
import torch
from flashattn_lite.reference import attention_reference
from flashattn_lite.testing import ALL_LAWS, Case, check
for law in ALL_LAWS:
    law(attention_reference, Case(*torch.randn(3, 2, 2, 5, 4), causal=True))
try:
    check(attention_reference)
except ImportError as error:
    print("missing:", error.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "missing: hypothesis" in done.stdout


def test_features_are_complete() -> None:
    assert {feature for law in ALL_LAWS for feature in law.needs} <= FEATURES
