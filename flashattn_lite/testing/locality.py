"""Laws of who matters to whom: a row's bits depend on its own query and the keys that it sees, on nothing else."""

from __future__ import annotations

import math

import torch

from flashattn_lite.testing.case import TENSORS, Attention, Case, PackedCase, Result, contiguous_copies, needs
from flashattn_lite.testing.results import assert_same_bits, run, run_packed


@needs("causal")
def future_keys_are_irrelevant(attention: Attention, case: Case) -> None:
    """With causal, other values in later keys leave a row's bits alone."""
    _ignores_unseen(attention, case.replace(causal=True), garbage=3.0)


@needs("window")
def keys_outside_the_window_are_irrelevant(attention: Attention, case: Case) -> None:
    """With a window, other values in keys outside leave a row's bits alone."""
    window = (case.integer(0, 9), case.integer(0, 9, salt=1))
    _ignores_unseen(attention, case.replace(window=window), garbage=-2.0)


@needs("poison")
def unseen_nan_never_shows(attention: Attention, case: Case) -> None:
    """NaN and inf in keys that a row does not see leave its bits alone."""
    for garbage in (math.nan, math.inf):
        _ignores_unseen(attention, case, garbage)


@needs()
def repeats_have_the_same_bits(attention: Attention, case: Case) -> None:
    """Twice the same call, twice the same bits."""
    assert_same_bits(run(attention, case), run(attention, case), "the second run", case)


@needs()
def other_rows_are_irrelevant(attention: Attention, case: Case) -> None:
    """NaN in all other query rows leaves a row's bits alone."""
    case = case.contiguous()
    if not case.q.shape[2]:
        return
    i = case.integer(0, case.q.shape[2] - 1)
    q = torch.full_like(case.q, math.nan)
    q[:, :, i] = case.q[:, :, i]
    among = _row(run(attention, case.replace(q=q)), i)
    assert_same_bits(among, _row(run(attention, case), i), f"row {i} among rows of NaN", case)


@needs()
def other_sequences_are_irrelevant(attention: Attention, case: Case) -> None:
    """NaN in the other sequences of a batch leaves a sequence's bits alone."""
    case = case.contiguous()
    whole = run(attention, case)
    for b in range(case.q.shape[0]):
        others = (torch.arange(case.q.shape[0], device=case.q.device) != b).view(-1, 1, 1, 1)
        q, k, v = (x.masked_fill(others, math.nan) for x in (case.q, case.k, case.v))
        among = run(attention, case.replace(q=q, k=k, v=v))
        assert_same_bits(_sequence(among, b), _sequence(whole, b), f"sequence {b} among sequences of NaN", case)


@needs()
def batch_slot_is_irrelevant(attention: Attention, case: Case) -> None:
    """A sequence alone has the bits that it has in the batch."""
    whole = run(attention, case)
    for b in range(case.q.shape[0]):
        alone = run(attention, case.sequence(b))
        assert_same_bits(alone, _sequence(whole, b), f"sequence {b} alone", case)


@needs()
def head_slot_is_irrelevant(attention: Attention, case: Case) -> None:
    """A key/value head with its query heads, alone, has the bits that it has among the others."""
    out, lse = run(attention, case)
    for h in range(case.k.shape[1]):
        heads = slice(h * case.group, (h + 1) * case.group)
        among = out[:, heads], None if lse is None else lse[:, heads]
        assert_same_bits(run(attention, case.head(h)), among, f"key head {h} alone", case)


@needs("poison")
def packed_neighbours_are_irrelevant(attention_varlen: Attention, case: PackedCase) -> None:
    """NaN in the other packed sequences leaves a sequence's bits alone."""
    # The NaN come in tensors of our own: with other strides, a CPU's product may have other bits.
    case = case.replace(**contiguous_copies(case, TENSORS))
    out, lse = run_packed(attention_varlen, case)
    for rows, keys in case.sequences():
        q, k, v = (torch.full_like(x, math.nan) for x in (case.q, case.k, case.v))
        q[rows], k[keys], v[keys] = case.q[rows], case.k[keys], case.v[keys]
        among, lse_among = run_packed(attention_varlen, case.replace(q=q, k=k, v=v))
        what = f"rows {rows.start} to {rows.stop} among sequences of NaN"
        assert_same_bits(_rows((among, lse_among), rows), _rows((out, lse), rows), what, case)


def packed_slot_is_irrelevant(attention_varlen: Attention, case: PackedCase) -> None:
    """A packed sequence alone has the bits that it has among the others."""
    out, lse = run_packed(attention_varlen, case)
    for b, (rows, _) in enumerate(case.sequences()):
        alone = run_packed(attention_varlen, case.sequence(b))
        assert_same_bits(alone, _rows((out, lse), rows), f"packed sequence {b} alone", case)


def _ignores_unseen(attention: Attention, case: Case, garbage: float) -> None:
    """One row's bits stay when all keys that it does not see, in any of the heads that share them, hold garbage."""
    case = case.contiguous()
    batch, heads_kv, len_k = case.k.shape[:3]
    if not case.q.shape[2]:
        return
    i = case.integer(0, case.q.shape[2] - 1)
    unseen = ~case.visible()[:, :, i].view(batch, heads_kv, case.group, len_k).any(2)
    spoiled = case.map_kv(lambda x: x.masked_fill(unseen.unsqueeze(-1), garbage))
    result = _row(run(attention, spoiled), i)
    assert_same_bits(
        result, _row(run(attention, case), i), f"row {i} with {garbage} in the keys that it can't see", case
    )


def _row(result: Result, i: int) -> Result:
    return result[0][:, :, i], None if result[1] is None else result[1][:, :, i]


def _rows(packed: Result, rows: slice) -> Result:
    return packed[0][rows], None if packed[1] is None else packed[1][:, rows]


def _sequence(result: Result, b: int) -> Result:
    return result[0][b : b + 1], None if result[1] is None else result[1][b : b + 1]


LOCALITY_LAWS = (
    future_keys_are_irrelevant,
    keys_outside_the_window_are_irrelevant,
    unseen_nan_never_shows,
    repeats_have_the_same_bits,
    other_rows_are_irrelevant,
    other_sequences_are_irrelevant,
    batch_slot_is_irrelevant,
    head_slot_is_irrelevant,
)
