"""Few query rows over few keys: one program has all of them, in larger tiles, and nothing is merged."""

from __future__ import annotations

import os

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite import decode
from flashattn_lite.kernels import decode_launch
from flashattn_lite.kernels.tuning_decode import FEW_KEYS, FEW_KEYS_TILE
from flashattn_lite.problem import AttentionProblem, Inputs, describe
from flashattn_lite.target import Target
from flashattn_lite.testing import Case, assert_close_to_oracle
from flashattn_lite.testing.results import assert_same_bits
from tests.targets import H200
from tests.test_decode import cache

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def tile_of(inputs: Inputs, problem: AttentionProblem, target: Target = H200):
    return decode_launch.tile_of(problem, inputs, target, decode_launch.config_of(problem, inputs, target), 0)


def dense(tokens, keys, dim=128, dtype=torch.bfloat16, group=4, **options):
    """(inputs, problem) of `attention`."""
    q, k = torch.empty(1, 2 * group, tokens, dim, dtype=dtype), torch.empty(1, 2, keys, dim, dtype=dtype)
    options = {"causal": True, "q_start": None, "window_left": None, "window_right": None} | options
    return Inputs(q, k, k), describe(Inputs(q, k, k), scale=1.0, softcap=None, **options)


@pytest.mark.parametrize(
    ("tokens", "keys", "options", "few"),
    [
        (1, 1, {}, True),
        (1, FEW_KEYS, {}, True),
        (1, FEW_KEYS + 1, {}, False),
        (4, FEW_KEYS, {}, True),
        (5, FEW_KEYS, {}, False),  # more than 16 rows of a key/value head
        (5, FEW_KEYS, {"group": 3}, True),
        (4, FEW_KEYS, {"dim": 256}, True),
        (4, FEW_KEYS, {"dtype": torch.float32}, False),
        (4, FEW_KEYS, {"dim": 33}, False),  # no 16-byte loads
        (1, 8192, {"causal": False, "window_left": FEW_KEYS - 1, "window_right": 0}, True),
        (2, 8192, {"causal": False, "window_left": FEW_KEYS - 1, "window_right": 0}, False),
        (1, 8192, {"q_start": FEW_KEYS - 1}, True),
        (1, 8192, {"q_start": FEW_KEYS}, False),
    ],
    ids=str,
)
def test_what_is_few_keys(tokens, keys, options, few):
    tile = tile_of(*dense(tokens, keys, **options))
    assert (tile.SPLIT > FEW_KEYS) is few
    assert not few or tile.BLOCK_N == FEW_KEYS_TILE


@pytest.mark.parametrize("gpu", [Target("cuda", 89, "sm_89"), Target("hip", "gfx942", "gfx942")], ids=lambda x: x.name)
def test_where_three_stages_do_not_fit_tiles_stay_as_they_are(gpu):
    assert tile_of(*dense(1, 128), gpu) == tile_of(*dense(1, 8192), gpu)


@pytest.mark.parametrize(
    ("window", "few"),
    [
        (None, False),
        ((FEW_KEYS - 1, None), True),
        ((FEW_KEYS, None), False),
        ((FEW_KEYS - 9, 8), True),
        ((FEW_KEYS - 1, 8), True),
    ],
)
def test_the_room_in_a_cache_does_not_say_whether_keys_are_few(window, few):
    """A sequence has the same bits in a larger cache: of lengths that only the GPU knows, a window alone says it."""
    for room in (16, FEW_KEYS, FEW_KEYS + 1, 8192):
        q, k = torch.empty(1, 8, 1, 128).bfloat16(), torch.empty(1, 2, room, 128).bfloat16()
        lens, (left, right) = torch.tensor([1], dtype=torch.int32), window or (None, None)
        inputs, problem = decode.problem_of(q, k, k, lens, None, None, right is None, left, right, 1.0, None)
        assert (tile_of(inputs, problem).SPLIT > FEW_KEYS) is few


@pytest.mark.parametrize("tokens", [1, 4])
def test_few_keys_are_one_split_wherever_they_begin(tokens):
    window = {"causal": False, "window_left": FEW_KEYS - tokens, "window_right": 0}
    for keys, options in [(FEW_KEYS, {}), *((start, window | {"q_start": start}) for start in range(400, 464))]:
        inputs, problem = dense(tokens, keys + tokens if options else keys, **options)
        tile = tile_of(inputs, problem)
        assert tile.SPLIT > FEW_KEYS
        assert decode_launch.most_splits(problem, tile) == 1
        lo, hi = max(0, problem.diag_lo) if problem.features.left else 0, problem.len_k
        assert -(-hi // tile.BLOCK_N) - lo // tile.BLOCK_N <= tile.SPLIT // tile.BLOCK_N


@pytest.mark.parametrize("keys", [16, 63, 65, 129, 256, FEW_KEYS])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (100, 3), "q_start": 9},
        {"sinks": True, "softcap": 5.0},
        {"scale": -0.3, "mask": "padding"},
        {"mask": "bias", "window": (200, None)},
    ],
    ids=str,
)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 128), (4, 64), (2, 256), (1, 80)])
def test_attention_of_few_rows_over_few_keys(device, tokens, dim, keys, options):
    """Every score feature; what only later rows see reaches no other; a sequence alone has the same bits."""
    if INTERPRETING and (dim > 80 or keys != (65 if tokens > 1 else 129) or (tokens > 1 and "mask" in options)):
        pytest.skip("slow in the interpreter")
    options = dict(options)
    q, k, v = cache(device, batch=2, heads=8, heads_kv=2, rows=tokens, keys=keys, dim=dim, dtype=torch.float16)
    generator = torch.Generator().manual_seed(keys)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 3, 8, device=device)
    if kind := options.pop("mask", ""):
        shape = (2, 1, 1, keys) if kind == "padding" else (1, 8, tokens, keys)
        numbers = torch.randn(shape, generator=generator).to(device)
        options["mask"] = numbers < 1 if kind == "padding" else numbers.masked_fill(numbers > 1, -torch.inf)
    options["causal"] = "window" not in options and "mask" not in options
    out, lse = fa.attention(q, k, v, return_lse=True, **options)
    assert_close_to_oracle(out, lse, Case(q, k, v, **options))
    if device.type == "cuda" or INTERPRETING:
        assert fa.explain(q, k, v, **options).backend == "split"
    mask = {"mask": options.pop("mask")[:1]} if kind else {}
    alone = fa.attention(q[:1], k[:1], v[:1], return_lse=True, **options, **mask)
    assert_same_bits((out[:1], lse[:1]), alone, "the first of two sequences", None)
    if options["causal"] and tokens > 1:
        v[:, :, -1] = torch.nan
        again = fa.attention(q, k, v, **options)
        assert bool(again[:, :, -1].isnan().all())
        torch.testing.assert_close(again[:, :, :-1], out[:, :, :-1], atol=0, rtol=0)
