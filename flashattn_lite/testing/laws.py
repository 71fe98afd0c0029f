"""What is true of every attention: laws as plain functions `law(attention, case)` that raise AssertionError.

`attention` is any callable with flashattn_lite.attention's signature, or the part of it that is tested. A law that
needs an option turns it on by itself; `needs` names the features without which it can't be asked. Two results of one
problem may differ by twice the oracle's bound. The laws that speak of bits live in locality.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashattn_lite.errors import show
from flashattn_lite.merge import merge_attention
from flashattn_lite.reference import repeat_heads
from flashattn_lite.testing.case import Attention, Case, Result, needs
from flashattn_lite.testing.gradients import gradients_match_autograd
from flashattn_lite.testing.locality import LOCALITY_LAWS
from flashattn_lite.testing.oracle import assert_close_to_oracle, expect
from flashattn_lite.testing.results import arguments_stay, assert_within, run

# ---- the answer -----------------------------------------------------------------------------------------------------


@needs()
def matches_oracle(attention: Attention, case: Case) -> None:
    """The result is the definition's, within the rounding of the dtype."""
    assert_close_to_oracle(*run(attention, case), case)


@needs("lse")
def lse_is_only_told(attention: Attention, case: Case) -> None:
    """Without return_lse the result is out, alone."""
    with arguments_stay(case):
        out = attention(case.q, case.k, case.v, **case.options())
    assert isinstance(out, Tensor), f"without return_lse it must return out; got {show(out)} in {case}"
    agree((out, None), run(attention, case), case)


# ---- the state ------------------------------------------------------------------------------------------------------


@needs("lse", "mask")
def merge_of_any_split_is_the_whole(attention: Attention, case: Case) -> None:
    """Attention over parts of the keys, each key in one part, merges to attention over all; a sink enters one part."""
    parts, len_k = 1 + case.integer(0, 3), case.k.shape[2]
    owner = torch.randint(0, parts, (len_k,), generator=case.generator()).to(case.q.device)
    results = []
    for part in range(parts):
        sinks = case.sinks if part == 0 else None
        results.append(run(attention, case.hide(owner != part).replace(sinks=sinks)))
    agree(merge_attention(results), run(attention, case), case, merged=True)


@needs("lse", "q_start")
def merge_of_cut_keys_is_the_whole(attention: Attention, case: Case) -> None:
    """The same with the keys cut in two tensors: the second's queries start earlier by the length of the first.

    kv_lens stay: what lies behind them may give a row scores of -inf, and then a part of lse -inf counts as none.
    """
    len_q, len_k, lens = case.q.shape[2], case.k.shape[2], case.kv_lens
    q_start = len_k - len_q if case.q_start is None else case.q_start
    case = case.replace(q_start=q_start)
    cut = case.integer(0, len_k)
    first, second = case.keys(slice(0, cut)), case.keys(slice(cut, len_k)).replace(q_start=q_start - cut, sinks=None)
    if lens is not None:
        first, second = first.replace(kv_lens=lens.clamp(max=cut)), second.replace(kv_lens=lens.clamp(min=cut) - cut)
    merged = merge_attention([run(attention, first), run(attention, second)])
    agree(merged, run(attention, case), case, merged=True)


@needs("mask")
def shift_of_scores_moves_lse(attention: Attention, case: Case) -> None:
    """A constant added to all scores of all rows leaves out as it is and adds itself to lse."""
    shift = (-3.0, 0.5, 7.25)[case.integer(0, 2)]
    wide = torch.promote_types(case.q.dtype, torch.float32)  # else the sum is rounded to less than the rest
    mask, sinks = case.float_mask().to(wide), None if case.sinks is None else case.sinks.to(wide)
    case = case.replace(mask=mask, sinks=sinks)
    shifted = case.replace(mask=mask + shift, sinks=None if sinks is None else sinks + shift)
    out, lse = run(attention, case)
    # By the bound of the shifted problem: its lse may be the larger, and is rounded so.
    agree(run(attention, shifted), (out, None if lse is None else lse + shift), shifted)


# ---- other ways to say the same -------------------------------------------------------------------------------------


@needs("gqa")
def gqa_is_repeated_kv(attention: Attention, case: Case) -> None:
    """Grouped heads read what a repeated key head would hold."""
    repeated = case.map_kv(lambda x: repeat_heads(x, case.q.shape[1]))
    agree(run(attention, repeated), run(attention, case), case)


@needs("strides")
def strides_are_irrelevant(attention: Attention, case: Case) -> None:
    """The same numbers, contiguous."""
    agree(run(attention, case.contiguous()), run(attention, case), case)


@needs()
def order_of_keys_is_irrelevant(attention: Attention, case: Case) -> None:
    """Without positions, keys may come in any order."""
    case = case.replace(causal=False, window=None, q_start=None, kv_lens=None)
    order = torch.randperm(case.k.shape[2], generator=case.generator()).to(case.q.device)
    agree(run(attention, case.keys(order)), run(attention, case), case)


@needs("mask")
def visibility_is_a_mask(attention: Attention, case: Case) -> None:
    """causal, window and kv_lens say what a mask of (B, Hq, L, S) says."""
    agree(run(attention, case.as_mask()), run(attention, case), case)


@needs("kv_lens")
def kv_lens_cut_the_keys(attention: Attention, case: Case) -> None:
    """kv_lens[b] gives what slicing the keys of sequence b gives."""
    batch, len_k = case.q.shape[0], case.k.shape[2]
    lens = torch.randint(0, len_k + 1, (batch,), generator=case.generator(), dtype=torch.int32)
    case = case.replace(kv_lens=lens.to(case.q.device))
    out, lse = run(attention, case)
    for b, length in enumerate(lens.tolist()):
        alone = case.sequence(b).keys(slice(0, length)).replace(kv_lens=None)
        one = slice(b, b + 1)
        agree(run(attention, alone), (out[one], None if lse is None else lse[one]), alone)


@needs("kv_lens")
def lengths_outside_count_as_the_nearest(attention: Attention, case: Case) -> None:
    """A length below 0 is 0, one above S is S: also for where the last query stands."""
    batch, len_k = case.q.shape[0], case.k.shape[2]
    lens = torch.tensor([(-3, len_k + 5, -(2**31), 2**31 - 1)[(b + case.seed) % 4] for b in range(batch)])
    case = case.replace(kv_lens=lens.to(case.q.device, torch.int32))
    held = case.replace(kv_lens=lens.clamp(0, len_k).to(case.q.device, torch.int32))
    agree(run(attention, case), run(attention, held), held)


@needs("causal", "q_start")
def a_start_far_away_sees_all_or_nothing(attention: Attention, case: Case) -> None:
    """Behind all keys a causal row sees all of them, before them none."""
    case = case.replace(causal=True, window=None)
    for start in (2**31 + 1, -(2**31) - 1, 2**40, -(2**40)):
        far = case.replace(q_start=start)
        assert_close_to_oracle(*run(attention, far), far)


@needs("scale")
def scale_is_a_factor_of_q(attention: Attention, case: Case) -> None:
    """q doubled with half the scale is the same; doubling is exact."""
    case = case.replace(q=case.q.clamp(-3e4, 3e4), scale=case.factor)
    agree(run(attention, case.replace(q=case.q * 2, scale=case.factor / 2)), run(attention, case), case)


@needs("softcap")
def a_high_softcap_is_none(attention: Attention, case: Case) -> None:
    """c tanh(s / c) goes to s as c grows: from c = 10^5 |s| on they differ by less than |s| 10^-10 (10^9: 10^-18)."""
    case = case.replace(softcap=None)
    norms = [x.double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).flatten() for x in (case.q, case.k)]
    highest = math.prod(float(norm.max()) if norm.numel() else 0.0 for norm in norms) * abs(case.factor)
    softcap = (1e9 if case.q.dtype == torch.float64 else 1e5) * (1 + highest)
    if softcap > 1e38:
        return  # none of float32's is that far above these scores
    agree(run(attention, case.replace(softcap=softcap)), run(attention, case), case)


@needs("mask", "sinks")
def a_sink_is_a_key_of_value_zero(attention: Attention, case: Case) -> None:
    """One more key with k = 0 and v = 0, and the sink as its mask, does what the sink does."""
    sinks = torch.randn(case.q.shape[1], generator=case.generator()).mul(3).to(case.q.device)
    case = case.as_mask().replace(q=case.q.nan_to_num(), sinks=sinks)  # NaN . 0 is NaN, and a sink is a number
    rows = case.q.shape[:3]
    column = sinks.view(1, rows[1], 1, 1).expand(*rows, 1)
    mask = torch.cat([case.float_mask().expand(*rows, case.k.shape[2]), column], dim=-1)
    longer = case.map_kv(lambda x: torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], dim=2))
    agree(run(attention, longer.replace(mask=mask, sinks=None)), run(attention, case), case)


@needs("sinks")
def a_sink_of_no_weight_is_none(attention: Attention, case: Case) -> None:
    """exp(-inf) adds nothing to the denominator: a head with such a sink has none."""
    sinks = torch.full((case.q.shape[1],), -math.inf, dtype=case.q.dtype, device=case.q.device)
    case = case.replace(sinks=None)
    agree(run(attention, case.replace(sinks=sinks)), run(attention, case), case)


# ---- weights are weights --------------------------------------------------------------------------------------------


@needs("mask")
def a_blind_row_is_zero(attention: Attention, case: Case) -> None:
    """A row that sees no key: out exactly 0, lse exactly -inf, or the sink to the rounding of float32."""
    len_q, len_k = case.q.shape[2], case.k.shape[2]
    blind = torch.rand(len_q, generator=case.generator()).to(case.q.device) < 0.5
    case = case.hide(blind.view(-1, 1).expand(len_q, len_k))
    out, lse = run(attention, case)
    assert bool((out[:, :, blind] == 0).all()), f"a row that sees no key must be 0; it is not in {case}"
    if lse is not None:
        sinks = torch.full((case.q.shape[1],), -math.inf).to(lse) if case.sinks is None else case.sinks.to(lse.dtype)
        got = lse[:, :, blind]
        want = sinks.view(1, sinks.shape[0], 1).expand_as(got)
        assert_within("lse of rows that see no key", got, want, 1e-6 * (1 + want.abs()), case)


@needs()
def constant_values_come_out(attention: Attention, case: Case) -> None:
    """Where every key holds one value, a row that sees any key returns it: the weights sum to 1."""
    if not case.k.shape[2]:
        return
    value = torch.randn(*case.v.shape[:2], 1, case.v.shape[3], generator=case.generator()).to(case.v)
    case = case.replace(v=value.expand_as(case.v), sinks=None)
    out, _ = run(attention, case)
    answer = expect(case)
    want = repeat_heads(value, case.q.shape[1]).double().expand_as(out).masked_fill(answer.blind.unsqueeze(-1), 0.0)
    want = torch.where(torch.isfinite(answer.out), want, answer.out)  # a row with NaN in q is no weighted sum
    assert_within("out of constant values", out, want, answer.out_bound, case)


@needs()
def out_lies_between_the_values(attention: Attention, case: Case) -> None:
    """Each element lies between the least and the greatest value that its row sees (or 0, with a sink)."""
    if not case.q.shape[2] or not case.k.shape[2]:
        return
    out, _ = run(attention, case)
    answer, seen = expect(case), case.visible()
    v = repeat_heads(case.v.double(), case.q.shape[1])
    for salt in range(4):
        i = case.integer(0, case.q.shape[2] - 1, salt)
        sees = seen[:, :, i].unsqueeze(-1)
        low, high = torch.where(sees, v, math.inf).amin(2), torch.where(sees, v, -math.inf).amax(2)
        if case.sinks is not None:
            low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        held = torch.isfinite(answer.out[:, :, i]) & ~answer.blind[:, :, i].unsqueeze(-1)
        got = torch.where(held, out[:, :, i].double(), 0.0)
        nearest = torch.where(held, torch.minimum(torch.maximum(got.nan_to_num(), low), high), 0.0)
        assert_within(f"row {i} of out", got, nearest, answer.out_bound[:, :, i], case)


def agree(got: Result, want: Result, case: Case, merged: bool = False) -> None:
    """Two results of one problem: each may be one bound away from the answer. merged: weighed by lse, a float32."""
    answer = expect(case, inside=torch.float32 if merged and case.q.dtype == torch.float64 else None)
    assert_within("out", got[0], want[0], 2 * answer.out_bound, case)
    if got[1] is not None and want[1] is not None:
        assert_within("lse", got[1], want[1], 2 * answer.lse_bound, case)


ALL_LAWS = (
    matches_oracle,
    lse_is_only_told,
    merge_of_any_split_is_the_whole,
    merge_of_cut_keys_is_the_whole,
    shift_of_scores_moves_lse,
    gqa_is_repeated_kv,
    strides_are_irrelevant,
    order_of_keys_is_irrelevant,
    visibility_is_a_mask,
    kv_lens_cut_the_keys,
    lengths_outside_count_as_the_nearest,
    a_start_far_away_sees_all_or_nothing,
    scale_is_a_factor_of_q,
    a_high_softcap_is_none,
    a_sink_is_a_key_of_value_zero,
    a_sink_of_no_weight_is_none,
    a_blind_row_is_zero,
    constant_values_come_out,
    out_lies_between_the_values,
    gradients_match_autograd,
    *LOCALITY_LAWS,
)
