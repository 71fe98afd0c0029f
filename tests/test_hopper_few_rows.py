"""Rows that one consumer of the Hopper kernel holds: who takes the parts of their keys, and how many chains of them."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from flashattn_lite import decode
from flashattn_lite.dispatch import Split
from flashattn_lite.kernels import attention_hopper_launch, tuning_parts
from flashattn_lite.kernels.hopper_config import V_IN_PIECES
from flashattn_lite.kernels.tuning import power_of_two
from flashattn_lite.kernels.tuning_hopper import hopper_tile
from flashattn_lite.problem import Inputs, describe
from flashattn_lite.testing import Case, assert_close_to_oracle
from flashattn_lite.testing.results import assert_same_bits
from flashattn_lite.testing.strategies import FEATURES
from tests.exhaustive import also, problems
from tests.targets import H200
from tests.test_hopper import HALVES, hopper, take_parts
from tests.test_hopper_folds import ask_random_cases, few_rows, with_failures

PROBLEMS = problems(cpu=2, cuda=4)
WAYS = ("parts", "chains", "two chains")  # what a block takes
Rows = tuple[torch.Tensor, torch.Tensor]


def in_three_ways(case: Case, seen: Counter[tuple[int, int]] | None = None) -> list[Rows]:
    """Results of up to four parts, two of them a chain, taken as WAYS; counts (chain, chains) of tiles in `seen`."""
    results = []
    tile_of = attention_hopper_launch.tile_of
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            take_parts(patch, way != "parts", few_rows=True)
            if way == "chains":
                patch.setattr(attention_hopper_launch, "with_chains", lambda p, c, t: tuning_parts.folding(p, c))

            def looked_at(problem, mask, config, page):
                if seen is not None and config.folds:
                    seen[config.chain, config.chains] += 1
                return tile_of(problem, mask, config, page)

            patch.setattr(attention_hopper_launch, "tile_of", looked_at)
            options = {name: x for name, x in case.options().items() if name != "mask"}
            results.append(hopper(fa.attention)(case.q, case.k, case.v, **options, return_lse=True))
    return results


def few_of(case: Case) -> Case:
    """The last queries of each sequence: those that all fit in a consumer's 64 rows."""
    return case.replace(q=case.q[:, :, -(64 // power_of_two(case.group)) :])


def assert_ways_agree(case: Case) -> list[Rows]:
    parts, chains, both = results = in_three_ways(case)
    assert_same_bits(chains, parts, "chains that blocks take", case)
    assert_same_bits(both, parts, "two chains that one block takes", case)
    return results


@pytest.mark.parametrize("dim", [96, also(128), also(192), 256])
def test_who_takes_chains_does_not_show(dim, hopper_device):
    """To the bit, with whatever numbers: rows that fail in some parts, infinities and NaN in V, sinks, short caches."""

    def same(case: Case) -> None:
        hypothesis.assume(case.q.numel() and case.group > 1 and case.k.shape[2] > 256)
        assert_ways_agree(few_of(case))

    ask_random_cases(same, FEATURES - {"mask", "gradients", "poison"}, dim, PROBLEMS, hopper_device)


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_that_fail_in_either_chain(dtype, dim, hopper_device):
    """And a sequence with one chain alone."""
    if hopper_device.type == "cpu" and (dtype == torch.bfloat16) != (dim == 256):
        pytest.skip("slow without a GPU: a head dim has one dtype there")
    case = with_failures(dtype, hopper_device, dim)
    case = few_of(case.replace(kv_lens=torch.tensor([1100, 300], device=hopper_device, dtype=torch.int32)))
    seen: Counter[tuple[int, int]] = Counter()
    in_three_ways(case, seen)
    assert seen == {(2, 1): 1, (2, 2): 1}
    _, _, both = assert_ways_agree(case)
    assert not both[0].isfinite().all() and both[0].isfinite().any()


@pytest.mark.parametrize("tokens", [3, 32])
def test_two_chains_are_right(tokens, hopper_device):
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(2, heads, n, 128, device=hopper_device).bfloat16()
               for heads, n in ((4, tokens), (2, 600), (2, 600)))  # fmt: skip
    case = Case(q, k, v, causal=True, sinks=torch.randn(4, device=hopper_device), softcap=20.0)
    for result in assert_ways_agree(case):
        assert_close_to_oracle(*result, case)


def test_columns_that_overflow_only_as_a_sum_of_chains(hopper_device):
    """Each chain's columns are finite, at the larger reference of the second their sum is too."""
    case = few_of(with_failures(torch.bfloat16, hopper_device))
    q, k, v = case.q, torch.randn_like(case.k), torch.randn_like(case.v)
    v[:, :, :300] = v[:, :, :300].abs() * 1e36
    q[..., 0], k[..., 0] = 8, 0
    k[:, :, 900, 0] = 30
    for result in assert_ways_agree(Case(q, k, v)):
        assert result[0].isfinite().all()


def test_sums_past_float32_stay_infinite_in_the_first_of_two_chains(hopper_device):
    """By a weight of 0 beside the second, where one may become NaN."""
    case = few_of(with_failures(torch.bfloat16, hopper_device))
    q, k, v = case.q, torch.randn_like(case.k), torch.randn_like(case.v)
    v[:, :, :128, :64] = 3e38
    q[..., 0], k[..., 0] = 8, 0
    k[:, :, 900, 0] = 300
    for result in assert_ways_agree(Case(q, k, v)):
        assert result[0][..., :64].isposinf().all() and result[0][..., 64:].isfinite().all()


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "keys", "dim", "parts", "taken", "tiles"),
    [
        (16, (32, 8), 16, 4096, 128, 8, (4, 2, True), (64, 4)),  # 128 row tiles for 132 multiprocessors
        (8, (32, 8), 16, 4096, 128, 8, (4, 1, False), (64, 4)),
        (8, (32, 8), 16, 8192, 128, 8, (4, 1, False), (64, 4)),
        (32, (32, 8), 16, 2048, 128, 4, (4, 1, True), (64, 4)),
        (8, (64, 8), 4, 8192, 128, 8, (4, 1, False), (64, 4)),
        (1, (32, 8), 16, 8192, 128, 8, None, (64, 4)),
        (16, (32, 8), 16, 4096, 192, 8, (4, 2, True), (64, 2) if V_IN_PIECES else (32, 2)),
        (8, (32, 8), 16, 4096, 192, 8, (4, 1, False), (64, 3) if V_IN_PIECES else (32, 4)),
        (16, (32, 8), 16, 4096, 256, 8, (4, 2, True), (32, 2)),
        (8, (32, 8), 16, 4096, 256, 8, (4, 1, False), (32, 4)),
        (1, (32, 8), 16, 4096, 256, 8, None, (32, 4)),
        (32, (32, 8), 16, 2048, 256, 4, (4, 1, True), (64, 2)),
        (16, (64, 8), 16, 16384, 128, 16, (8, 2, True), (64, 2)),  # by two consumers
        (8, (64, 8), 16, 16384, 128, 16, (8, 1, False), (64, 4)),
        (4, (32, 8), 128, 32768, 128, 16, (8, 1, False), (64, 4)),  # four blocks read each key
        (8, (16, 8), 64, 8192, 256, 8, None, (64, 2)),  # two blocks would read each key
    ],
)
def test_how_many_chains_a_block_takes(batch, heads, rows, keys, dim, parts, taken, tiles):
    """And the keys of a tile, and the stages of the rings, which leave room for the acc of these."""
    problem = few_rows(batch, heads, rows, keys, dim)
    config = hopper_tile(problem)
    assert (config.warpgroups == 1, tuning_parts.parts_of(problem, config)) == (rows * heads[0] <= 64 * heads[1], parts)
    config = tuning_parts.with_chains(problem, config, H200)
    assert config.folds == (taken is not None)
    assert (config.block_n, config.stages) == tiles
    if taken:
        assert (config.chain, config.chains, config.alone) == taken


def test_the_room_in_a_cache_decides_on_no_tile():
    tiles = set()
    for keys in (64, 4096, 1 << 20):
        q, k = (torch.empty(1, n, size, 256, dtype=torch.bfloat16) for n, size in ((32, 16), (8, keys)))
        lens = torch.tensor([9], dtype=torch.int32)
        _, problem = decode.problem_of(q, k, k, lens, None, None, True, None, None, 1.0, None)
        tiles.add(hopper_tile(problem).block_n)
    assert tiles == {64}


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "dim", "dtype", "options", "by_hopper"),
    [
        ((32, 8), 16, 2048, 128, torch.bfloat16, {}, True),
        ((32, 8), 5, 8192, 256, torch.float16, {"softcap": 20.0}, True),
        ((32, 8), 4, 2048, 128, torch.bfloat16, {}, False),  # 16 rows
        ((32, 8), 16, 8192, 64, torch.bfloat16, {}, False),
        ((8, 8), 64, 8192, 128, torch.bfloat16, {}, True),
        ((32, 8), 16, 8192, 128, torch.bfloat16, {"window_left": 500}, False),  # so few keys are no parts
        ((32, 8), 16, 8192, 128, torch.float32, {}, False),
        ((32, 8), 16, 8192, 128, torch.bfloat16, {"kv_lens": True}, True),
        ((32, 8), 16, 8192, 128, torch.bfloat16, {"mask": True}, False),
    ],
)
def test_which_kernel_takes_few_rows_over_many_keys(heads, rows, keys, dim, dtype, options, by_hopper):
    """Not the batch: a row's bits would tell."""
    q, k = (torch.empty(1, n, size, dim, dtype=dtype) for n, size in zip(heads, (rows, keys), strict=True))
    lens = torch.tensor([keys], dtype=torch.int32) if options.get("kv_lens") else None
    mask = torch.ones(rows, keys, dtype=torch.bool) if options.get("mask") else None
    given = {"q_start": None, "window_left": None, "window_right": None, "scale": 1.0, "softcap": None}
    given |= {name: x for name, x in options.items() if name in given}
    inputs = Inputs(q, k, k, mask, None, lens)
    reasons = Split().why_not(describe(inputs, causal=True, **given), inputs, H200)
    assert reasons == ["of more than 16 rows over so many keys the Hopper kernel is faster, and takes them"] * by_hopper


def test_two_consumers_take_more_rows():
    assert hopper_tile(few_rows(1, (32, 8), 17, 8192, 128)).warpgroups == 2
    assert hopper_tile(few_rows(1, (24, 8), 16, 8192, 128)).warpgroups == 1  # three heads as four
    assert hopper_tile(few_rows(1, (8, 8), 64, 8192, 128)).warpgroups == 1
    assert hopper_tile(few_rows(1, (8, 8), 64, 1024, 128)).warpgroups == 2  # whose tiles may be dealt out
