"""What the testing kit is told, it does: seeds, shrinking and sizes, and the problems that laws are there for."""

from __future__ import annotations

import functools

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.reference import attention_reference
from flashattn_lite.testing import Case, check, check_decode
from flashattn_lite.testing.decoding import DECODE_LAWS
from flashattn_lite.testing.laws import a_high_softcap_is_none, matches_oracle
from flashattn_lite.testing.strategies import OPTIONS
from flashattn_lite.testing.tensors import NUMBERS


def seen(**options):
    """The problems that a law is asked, by their arguments."""
    calls = []

    def watched(q, k, v, **given):
        calls.append((q.shape, k.shape, v.shape, q.flatten()[:3].tolist(), given.get("q_start")))
        return attention_reference(q, k, v, **given)

    check(watched, **{"laws": [matches_oracle], "n": 60} | options)
    return calls


def test_a_seed_draws_its_own_problems():
    assert seen(n=20, seed=1) == seen(n=20, seed=1) != seen(n=20, seed=2)


def test_queries_start_ahead_of_the_first_key_too():
    starts = [start for *_, start in seen(features={"lse", "q_start"}) if start is not None]
    assert min(starts) < 0 < max(starts)


def test_every_option_and_kind_of_numbers_is_drawn():
    """And NaN and inf where nobody looks, and keys and values that all sequences or all heads share."""
    drawn = set()

    def look(attention, case):
        drawn.update(case.options(), (part.strip() for part in case.note.split(",")))
        for name, size, step in zip(("batch", "heads"), case.k.shape, case.k.stride(), strict=False):
            if case.k.numel() and size > 1 and step == 0:
                drawn.add(f"shared by {name}")

    check(attention_reference, laws=[look], n=400, shrink=False, max_len=7, max_dim=8)
    numbers = {f"{kind} numbers" for kind in NUMBERS}
    poison = {"unseen keys hold nan", "unseen keys hold inf"}
    assert {*OPTIONS, *numbers, *poison, "shared by batch", "shared by heads"} - drawn == {"gqa"}  # which is a shape


def test_without_shrinking_the_first_failure_is_the_last_call():
    calls = []

    def wrong(q, k, v, **options):
        calls.append(q.shape)
        out, lse = attention_reference(q, k, v, **options)
        return out + (k.shape[2] > 3), lse

    counts = []
    for shrink in (True, False):
        calls.clear()
        with pytest.raises(AssertionError):
            check(wrong, n=20, laws=[matches_oracle], shrink=shrink)
        counts.append(len(calls))
    assert counts[0] > 2 * counts[1]


def test_decoding_is_asked_problems_of_the_sizes_given():
    def watched(q, k, v, kv_lens, **options):
        assert q.shape[0] <= 2 and k.shape[1] <= 3 and q.dtype == torch.float64
        return fa.attention_decode(q, k, v, kv_lens, **options)

    law = next(law for law in DECODE_LAWS if "oracle" in law.__name__)
    check_decode(watched, n=40, laws=[law], max_batch=2, max_heads=3, dtypes=[torch.float64])


def test_a_batch_may_be_as_large_as_was_said():
    largest = 0

    def watched(q, k, v, **options):
        nonlocal largest
        largest = max(largest, q.shape[0])
        return fa.attention(q, k, v, **options)

    check(watched, n=60, laws=[matches_oracle], max_batch=8, max_len=3, max_dim=4)
    assert 5 <= largest <= 8


def test_a_law_needs_no_name():
    assert len(seen(n=2, laws=[functools.partial(matches_oracle)])) == 2


def test_no_soft_cap_is_high_above_scores_that_float32_does_not_hold():
    """They are -inf without one, and minus the cap with one."""
    q, v = torch.full((1, 1, 1, 8), 1e20), torch.ones(1, 1, 1, 8)
    a_high_softcap_is_none(attention_reference, Case(q, -q, v))
