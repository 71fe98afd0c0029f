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

from flashattn_lite.reference import attention_reference, repeat_heads, visibility
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

SMALL = {"max_batch": 2, "max_heads": 2, "max_len": 33, "max_dim": 33}
Change = Callable[[dict[str, Any]], None]


def changed(change: Change) -> Callable[..., Any]:
    """The definition, with its arguments tampered with."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        arguments = {"q": q, "k": k, "v": v, **options}
        change(arguments)
        return attention_reference(**arguments)

    return attention


def sketch(bug: str) -> Callable[..., Any]:
    """A naive attention as one writes it in ten lines, with one bug in it."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        names = ("causal", "q_start", "window", "mask", "kv_lens")
        seen = visibility(q, k, **{name: options[name] for name in names if name in options})
        scale, cap, mask = options.get("scale", q.shape[-1] ** -0.5), options.get("softcap"), options.get("mask")
        k, v = (repeat_heads(x, q.shape[1]).float() for x in (k, v))
        bias = 0.0 if mask is None or mask.dtype == torch.bool else mask.float()
        s = q.float() @ k.mT
        s = (s + bias) * scale if bug == "mask before scale" else s * scale
        if cap is not None:
            s = torch.tanh(s / cap) * (1 if bug == "softcap not multiplied back" else cap)
        if bug != "mask before scale":
            s = s + bias
        s = torch.where(seen, s, -1e9 if bug == "masked is -1e9" else -math.inf)
        m = s.new_zeros((*s.shape[:3], 1)) if not s.shape[-1] or bug == "no maximum" else s.amax(-1, keepdim=True)
        if bug == "maximum of all rows" and s.numel():
            m = s.amax().expand_as(m)
        m = m.masked_fill(m == -math.inf, 0.0)
        p = torch.exp(s - m)
        d = p.sum(-1, keepdim=True)
        if "sinks" in options:
            d = d + torch.exp(options["sinks"].float().view(1, -1, 1, 1) - m)
        if bug == "NaN where it sees nothing":
            d = d.masked_fill(d == 0, math.nan)
        out = p @ (v if bug == "0 times NaN" else torch.where(seen.any(-2).unsqueeze(-1), v, 0.0))
        if bug == "not rescaled" and s.shape[-1] > 16:  # the sum of the first tile stays at that tile's maximum
            first = s[..., :16].amax(-1, keepdim=True)
            d = d + torch.where(first > -math.inf, torch.exp(s[..., :16] - first) - p[..., :16], 0.0).sum(
                -1, keepdim=True
            )
        safe = d.masked_fill(d == 0, 1.0)
        return (out / safe).to(q.dtype), (m + torch.log(d)).squeeze(-1)

    return attention


def on(result: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """The definition, with its result tampered with."""
    return lambda *args, **options: result(*attention_reference(*args, **options))


def start(a: dict[str, Any], by: int) -> None:
    default = a["k"].shape[2] - a["q"].shape[2]
    a["q_start"] = (default if a.get("q_start") is None else a["q_start"]) + by


def as_if_contiguous(a: dict[str, Any]) -> None:
    dense = torch.empty(a["k"].shape).stride()
    if a["k"].untyped_storage().nbytes() >= a["k"].nbytes and a["k"].storage_offset() == 0:
        a["k"] = a["k"].as_strided(a["k"].shape, dense)


def window_right_off_by_one(a: dict[str, Any]) -> None:
    if a.get("window") and a["window"][1] is not None:
        a["window"] = (a["window"][0], a["window"][1] + 1)


def more_exact_for(axis: int) -> Callable[..., Any]:
    """Another arithmetic when q has one batch, or k one head: right, but not the same bits."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        dtype = torch.float64 if k.shape[axis] == 1 else None
        out, lse = attention_reference(q, k, v, **options, dtype=dtype)
        return out, lse.float()

    return attention


def whole_tiles(a: dict[str, Any]) -> None:
    keep = max(a["k"].shape[2] // 16 * 16, min(16, a["k"].shape[2]))
    hidden = torch.arange(a["k"].shape[2]) >= keep
    a["mask"] = Case(a["q"], a["k"], a["v"], mask=a.get("mask")).hide(hidden).mask


def first_mask(a: dict[str, Any]) -> None:
    if a.get("mask") is not None and a["mask"].dim() == 4:
        a["mask"] = a["mask"][:1]


def lengths_as_they_come(a: dict[str, Any]) -> None:
    """Below 0 they hide nothing."""
    if a.get("kv_lens") is not None:
        a["kv_lens"] = a["kv_lens"].long().abs().clamp(max=2**31 - 1).int()


def last_length_ignored(a: dict[str, Any]) -> None:
    if a.get("kv_lens") is not None and len(a["kv_lens"]) > 1:
        a["kv_lens"] = torch.cat([a["kv_lens"][:-1], a["kv_lens"].new_full((1,), a["k"].shape[2])])


def a_start_of_few_bits(a: dict[str, Any]) -> None:
    if abs(a.get("q_start") or 0) > 2**20:
        a["q_start"] = 0


def sinks_that_are_numbers(a: dict[str, Any]) -> None:
    if a.get("sinks") is not None:
        a["sinks"] = a["sinks"].nan_to_num(neginf=0.0)


def heads_interleaved(a: dict[str, Any]) -> None:
    heads = a["q"].shape[1]
    for name in ("k", "v"):
        a[name] = a[name].repeat(1, heads // a[name].shape[1], 1, 1)


MUTANTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (laws.matches_oracle, "lse in log2 units", on(lambda out, lse: (out, lse / math.log(2)))),
    (laws.matches_oracle, "out in float32", on(lambda out, lse: (out.float(), lse))),
    (laws.matches_oracle, "scale from Dv", changed(lambda a: a.setdefault("scale", a["v"].shape[-1] ** -0.5))),
    (laws.matches_oracle, "top-left causal", changed(lambda a: a.setdefault("q_start", 0))),
    (laws.matches_oracle, "no maximum", sketch("no maximum")),
    (laws.matches_oracle, "rows that see nothing are NaN", sketch("NaN where it sees nothing")),
    (laws.matches_oracle, "scores in bfloat16", changed(lambda a: a.update(q=a["q"].bfloat16().to(a["q"])))),
    (laws.matches_oracle, "lse of bfloat16", on(lambda out, lse: (out, lse.bfloat16().float()))),
    (
        laws.matches_oracle,
        "first mask for all",
        changed(first_mask),
    ),
    (laws.lengths_outside_count_as_the_nearest, "below 0 they hide nothing", changed(lengths_as_they_come)),
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
    (laws.a_high_softcap_is_none, "softcap not multiplied back", sketch("softcap not multiplied back")),
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
    (locality.unseen_nan_never_shows, "0 times NaN", sketch("0 times NaN")),
    (locality.repeats_have_the_same_bits, "noise", on(lambda out, lse: (out, lse + 1e-6 * torch.rand_like(lse)))),
    (locality.other_rows_are_irrelevant, "maximum of all rows", sketch("maximum of all rows")),
    (locality.other_sequences_are_irrelevant, "maximum of all rows", sketch("maximum of all rows")),
    (locality.batch_slot_is_irrelevant, "other arithmetic for batch 1", more_exact_for(0)),
    (locality.head_slot_is_irrelevant, "other arithmetic for one head", more_exact_for(1)),
]


@pytest.mark.parametrize(
    ("law", "attention"), [(law, bug) for law, _, bug in MUTANTS], ids=[name for _, name, _ in MUTANTS]
)
def test_each_law_catches_a_bug(law: Any, attention: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match="in Case"):
        check(attention, laws=[law], n=200, shrink=False, **SMALL)


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
