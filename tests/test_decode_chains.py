"""Decoding's chains of splits: who folds them touches no bits, and when a program owns one."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from flashattn_lite import decode
from flashattn_lite.kernels import decode_launch
from flashattn_lite.kernels.tuning_decode import ONE_TOKEN_SPLITS, DecodeConfig, enough
from flashattn_lite.problem import Inputs, describe
from flashattn_lite.testing import Case, assert_close_to_oracle
from flashattn_lite.testing.results import assert_same_bits
from tests.exhaustive import quick
from tests.targets import H200
from tests.test_decode import cache, int32, pages_of

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("rows", "seen"), quick(itertools.product((1, 5, 16), ("causal", "window")), [(1, "window"), (16, "causal")])
)
def test_who_folds_a_chain_touches_no_bits(device, monkeypatch, rows, seen, paged):
    """One program a split, two that stay apart, a chain, or a pair of chains, and the merge folds the rest.

    Lengths at the borders of all.

    Nor does in how many loops a chain is read, or how many columns a merging program has.
    """
    if device.type == "cpu" and not INTERPRETING:
        pytest.skip("nothing is split on the CPU")
    options = {"window": (90, 0), "softcap": 20.0} if seen == "window" else {}
    if INTERPRETING and paged != bool(options):
        pytest.skip("slow in the interpreter: pages with a window, a contiguous cache without")
    lens = [128, 70] if INTERPRETING else [40000, 17000, 8192, 7000, 4097, 2048, 1025, 257, 40]
    keys, nan_at = (128, 95) if INTERPRETING else (40000, 2047)
    sizes = {
        "batch": len(lens),
        "heads": 2,
        "heads_kv": 1,
        "rows": rows,
        "keys": keys,
        "dim": 32 if INTERPRETING else 128,
    }
    q, k, v = cache(device, **sizes, dtype=torch.float16)
    v[:, :, nan_at, 3] = math.nan  # behind some rows' diagonal: splits are done again
    v[:, :, 20, 4] = math.inf
    k, v, table = pages_of(k, v) if paged else (k, v, None)
    lens = int32(lens, device)
    config_of = decode_launch.config_of

    def owned(chains, config):
        if chains == "apart":
            return config.several, 1
        own = max(1, min(chains, 2 if config.owns_pairs else 1) * config.chain)
        return own, own

    def run(chains, flat, columns):
        monkeypatch.setattr(decode_launch, "splits_owned", lambda *x: owned(chains, x[2]))
        monkeypatch.setattr(decode_launch, "config_of", lambda *x: replace(config_of(*x), flat=flat, columns=columns))
        monkeypatch.setattr(decode, "_ready", {})
        return fa.attention_decode(q, k, v, lens, block_table=table, **options, return_lse=True, backend="triton")

    expected = run(0, True, (16, 32, 64))
    assert bool(expected[0][..., 5:].isfinite().all())
    others = [(1, True, (16, 32, 64)), (2, True, (16, 32, 16)), (2, True, (16, 32, 64))]
    others.append(("apart", True, (16, 32, 64)))
    for other in (*others, (1, False, (16, 64, 64)), (0, False, (128, 16, 16))):
        assert_same_bits(expected, run(*other), str(other), None)


@pytest.mark.parametrize(
    ("batch", "tokens", "keys", "splits", "own", "of_a_state"),
    [(1, 1, 8192, 32, 1, 1), (2, 1, 8192, 32, 2, 1), (4, 1, 8192, 32, 4, 4), (8, 1, 8192, 32, 8, 8),
     (16, 1, 8192, 32, 8, 8), (24, 1, 8192, 32, 4, 4), (64, 1, 8192, 32, 8, 8), (1, 16, 8192, 16, 1, 1),
     (2, 16, 8192, 16, 1, 1), (4, 16, 8192, 16, 4, 4), (8, 16, 8192, 16, 4, 4), (9, 16, 8192, 16, 1, 1),
     (1, 1, 32768, 64, 2, 1), (1, 1, 131072, 128, 4, 4), (1, 16, 131072, 128, 4, 4)],
)  # fmt: skip
def test_a_program_owns_a_chain_where_such_programs_are_enough(batch, tokens, keys, splits, own, of_a_state):
    """8 key heads on an H200: of 8k keys, 9 sequences of 16 tokens would leave half of the second wave empty.

    Pairs are asked to leave less.
    """
    q = torch.empty(batch, 32, tokens, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, 8, keys, 128, dtype=torch.bfloat16, device="meta")
    lens = torch.empty(batch, dtype=torch.int32, device="meta")
    inputs, problem = decode.problem_of(q, k, k, lens, None, None, True, None, None, 0.1, None)
    out, lse = torch.empty_like(q), torch.empty(batch, 32, tokens, device="meta")
    call = decode_launch.Call(problem, inputs, out, lse, H200)
    assert call.partial.grid[0] == batch * 8 * splits // own
    assert call.merge.parts == splits // of_a_state
    assert call.tile.OWNS_PAIR is (of_a_state == 8)
    assert call.tile.SEPARATE is (own > of_a_state)


@pytest.mark.parametrize(
    ("batch", "tokens", "keys", "owners"),
    [(1, 1, 4096, ((1, 1), (1, 1))), (1, 1, 32768, ((1, 1), (2, 1))), (1, 1, 131072, ((1, 1), (4, 4))),
     (2, 1, 131072, ((1, 1), (4, 4))), (8, 1, 16896, ((8, 8), (8, 8))), (8, 1, 32768, ((8, 8), (8, 8))),
     (64, 1, 131072, ((8, 8), (8, 8))),
     (1, 16, 131072, ((1, 1), (4, 4))), (8, 16, 131072, ((4, 4), (4, 4)))],
)  # fmt: skip
def test_a_large_cache_that_holds_little_is_split_as_a_small_one(batch, tokens, keys, owners):
    """Owners of up to FEW splits, and of more. Never apart beside chains, nor pairs beside one."""
    k = torch.empty(batch, 8, keys, 128, dtype=torch.bfloat16, device="meta")
    q = torch.empty(batch, 32, tokens, 128, dtype=torch.bfloat16, device="meta")
    lens = torch.empty(batch, dtype=torch.int32, device="meta")
    inputs, problem = decode.problem_of(q, k, k, lens, None, None, True, None, None, 0.1, None)
    config = decode_launch.config_of(problem, inputs, H200)
    tile = decode_launch.tile_of(problem, inputs, H200, config, 0)
    found = decode_launch.owners_of(decode_launch.most_splits(problem, tile), 8 * batch, config, H200)
    assert found == owners


@pytest.mark.parametrize("rows", [1, 5])
def test_sequences_go_one_of_two_ways_by_what_they_have(device, monkeypatch, rows):
    """Some of one batch have up to FEW splits, some more; whoever owns them, the bits are the same."""
    if device.type == "cpu" and not INTERPRETING:
        pytest.skip("nothing is split on the CPU")
    lens, keys = ([192, 60], 192) if INTERPRETING else ([40000, 17000, 9000, 4096, 300], 40000)
    dim, dtype = (32, torch.float32) if INTERPRETING else (128, torch.float16)  # which would hide some bits
    q, k, v = cache(device, batch=len(lens), heads=2, heads_kv=1, rows=rows, keys=keys, dim=dim, dtype=dtype)
    lens = int32(lens, device)

    def run(few, long):
        monkeypatch.setattr(decode_launch, "owners_of", lambda *_: ((few, few), (long, long)))
        monkeypatch.setattr(decode, "_ready", {})
        return fa.attention_decode(q, k, v, lens, return_lse=True, backend="triton")

    chain = 2 if INTERPRETING else 4
    expected = run(1, 1)
    ways = [(1, chain), (chain, chain)] + [(chain, 2 * chain)] * (rows == 1)
    for few, long in ways:
        assert_same_bits(expected, run(few, long), f"{few} and {long} splits a program", None)


@pytest.mark.parametrize("window", [None, (90 if INTERPRETING else 700, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_who_has_all_splits_writes_the_rows(device, monkeypatch, rows, chains, window):
    """Where no sequence can have more splits than a program owns, there is no merge; the bits are those of one.

    With sinks, for empty sequences too, and where rows see an infinity or must not see a NaN.
    """
    if device.type == "cpu" and not INTERPRETING:
        pytest.skip("nothing is split on the CPU")
    if INTERPRETING and (rows == 16 or chains != 1 + bool(window)):
        pytest.skip("slow in the interpreter: two chains with a window, one without, of up to 5 rows")
    keys = (64 if rows == 1 else 128) * chains if INTERPRETING else (512 if rows == 1 else 1024) * chains
    lens = int32([keys, 0, keys // 2 + 5, 1], device)
    dim = 32 if INTERPRETING else 128
    q, k, v = cache(device, batch=4, heads=2, heads_kv=1, rows=rows, keys=keys, dim=dim, dtype=torch.float16)
    v[0, :, keys - 1, 3] = math.nan  # for the last row alone
    v[:, :, keys // 2, 4] = math.inf
    options = {"window": window, "softcap": 20.0 if window else None, "return_lse": True}
    options["sinks"] = torch.tensor([0.5, -math.inf], device=device)
    merge, merges = decode_launch.Merge, []
    monkeypatch.setattr(decode_launch, "Merge", lambda *x: merges.append(merge(*x)) or merges[-1])

    def run(own):
        def owned(splits, rows, config, target):
            pairs = config.owns_pairs and splits > config.chain
            return (1, 1) if own == 1 else ((1 + pairs) * config.chain, (1 + pairs) * config.chain)

        monkeypatch.setattr(decode_launch, "splits_owned", owned)
        monkeypatch.setattr(decode, "_ready", {})
        return fa.attention_decode(q, k, v, lens, **options, backend="triton")

    merged, alone = run(1), run(0)
    assert len(merges) == (1 if rows == 1 or chains == 1 or window else 2)
    assert_same_bits(alone, merged, "without a merge", None)
    assert bool((alone[0][1] == 0).all()) and torch.equal(alone[1][1, 1], torch.full_like(alone[1][1, 1], -math.inf))
    assert bool(alone[0][0, :, -1, 3].isnan().all()) and not bool(alone[0][0, :, :-1, 3].isnan().any())


@pytest.mark.parametrize(("splits", "rows", "own"), [(24, 96, 1), (5, 176, 2), (8, 33, 1), (8, 34, 2)])
def test_a_program_has_several_splits_where_there_are_many_and_one_wave_holds_them(splits, rows, own):
    """Of the 528 places of an H200: 1152 in twos, 528; of which 264 splits would be as few as half, 272 not."""
    config = DecodeConfig(16, 32, ONE_TOKEN_SPLITS, 2, 3, paired=True, several=2, programs=4)
    assert decode_launch.splits_owned(splits, rows, config, H200) == (own, 1)


@pytest.mark.parametrize("masked", [False, True])
def test_with_a_mask_no_program_owns_a_pair(masked):
    q = torch.empty(8, 32, 1, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(8, 8, 8192, 128, dtype=torch.bfloat16, device="meta")
    inputs = Inputs(q, k, k, mask=torch.empty(8192, device="meta") if masked else None)
    problem = describe(inputs, causal=False, q_start=None, window_left=None, window_right=None, scale=0.1,
                       softcap=None)  # fmt: skip
    call = decode_launch.Call(problem, inputs, torch.empty_like(q), torch.empty(8, 32, 1, device="meta"), H200)
    assert call.tile.OWNS_PAIR is not masked


@pytest.mark.parametrize(("keys", "pairs"), [(1024, True), (1025, False), (8192, False)])
def test_programs_own_pairs_over_pages_where_nothing_is_left_to_merge(keys, pairs):
    """Else chains, as unequal lengths want them; a cache in one piece has pairs in either case."""
    q = torch.empty(64, 32, 1, 128, dtype=torch.bfloat16, device="meta")
    whole = torch.empty(64, 8, keys, 128, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(999, 8, 16, 128, dtype=torch.bfloat16, device="meta")
    table = torch.empty(64, -(-keys // 16), dtype=torch.int32, device="meta")
    lens, out, lse = table[:, 0], torch.empty_like(q), torch.empty(64, 32, 1, device="meta")
    for k, entries, owns in ((whole, None, True), (pages, table, pairs)):
        inputs, problem = decode.problem_of(q, k, k, lens, entries, None, True, None, None, 0.1, None)
        tile = decode_launch.Call(problem, inputs, out, lse, H200, table=entries).tile
        assert (owns, keys <= 1024) == (tile.OWNS_PAIR, tile.ALONE)


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 36), (36, 64)])
def test_keys_and_values_are_aligned_both_or_not_at_all(dim, dim_v):
    shapes = ((1, dim), (99, dim), (99, dim_v))
    q, k, v = (torch.empty(1, 8, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    lens = torch.empty(1, dtype=torch.int32, device="meta")
    inputs, problem = decode.problem_of(q, k, v, lens, None, None, True, None, None, 0.1, None)
    config = decode_launch.config_of(problem, inputs, H200)
    assert decode_launch.tile_of(problem, inputs, H200, config, 0).ALIGN == 1


def test_who_has_no_second_chain_owns_no_pair():
    config = DecodeConfig(16, 32, ONE_TOKEN_SPLITS, 2, 3, paired=True, owns_pairs=True, programs=4)
    owned = [decode_launch.splits_owned(splits, 512, config, H200) for splits in (1, 4, 5, 8)]
    assert owned == [(4, 4), (4, 4), (8, 8), (8, 8)]


def test_enough():
    """Of the 528 places of an H200 for four programs each."""
    assert enough(64, 16, 4, 4, H200)  # 256, one wave
    assert not enough(32, 16, 4, 4, H200)  # 128
    assert not enough(160, 12, 8, 4, H200, full=0.85)  # 320, of which each second has half as much to do
    assert enough(320, 6, 8, 4, H200, full=0.85)  # one for each row
    assert not enough(144, 16, 4, 4, H200)  # 576, 55% of two waves
    assert enough(192, 16, 4, 4, H200)  # 768, 73%
    assert not enough(192, 16, 4, 4, H200, full=0.85)
    assert enough(0, 16, 4, 4, H200)  # nothing to launch
    assert all(enough(rows, 1, 4, 4, H200) for rows in range(3 * 528, 12 * 528))


@pytest.mark.parametrize(("rows", "left"), [(1, 63), (1, 127), (4, 95)])
def test_a_window_that_begins_within_a_tile_has_a_program_for_its_last_split(device, rows, left):
    """It lies in one tile more than its length says."""
    q, k, v = cache(device, batch=3, heads=2, heads_kv=1, rows=rows, keys=400, dim=16)
    lens = int32([400, 391, 386], device)
    out, lse = fa.attention_decode(q, k, v, lens, window=(left, 0), return_lse=True)
    assert_close_to_oracle(out, lse, Case(q, k, v, causal=True, window=(left, 0), kv_lens=lens))


def test_states_that_stay_apart_are_one_where_rows_see_different_keys():
    """By a mask of each query head: a program that does rows again has no room for two."""
    k, mask = torch.empty(2, 8, 4096, 128).half(), torch.empty(2, 32, 1, 4096, dtype=torch.bool)
    inputs, options = Inputs(torch.empty(2, 32, 1, 128).half(), k, k, mask), dict(scale=1.0, softcap=None)
    problem = describe(inputs, causal=False, q_start=None, window_left=None, window_right=None, **options)
    call = decode_launch.Call(problem, inputs, inputs.q, inputs.q[..., 0].float(), H200)
    assert call.tile.UNEQUAL and not call.tile.SEPARATE
