"""Chains of parts of the keys that a block of the Hopper kernel takes and folds: the bits of parts that are merged."""

from __future__ import annotations

import math
from collections.abc import Callable

import hypothesis
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from flashattn_lite.kernels import attention_hopper_launch, tuning_parts
from flashattn_lite.kernels.tuning_hopper import hopper_tile
from flashattn_lite.problem import AttentionProblem, Inputs, describe
from flashattn_lite.testing import Case, assert_close_to_oracle
from flashattn_lite.testing.results import assert_same_bits
from flashattn_lite.testing.strategies import FEATURES, cases
from tests.exhaustive import problems
from tests.targets import H200
from tests.test_hopper import HALVES, LENGTH, hopper, take_parts

PROBLEMS = problems(cpu=2, cuda=4)


def few_rows(batch: int, heads: tuple[int, int], rows: int, keys: int, dim: int) -> AttentionProblem:
    q, k = (torch.zeros(batch, n, size, dim, dtype=torch.bfloat16, device="meta")
            for n, size in zip(heads, (rows, keys), strict=True))  # fmt: skip
    options = {"causal": True, "q_start": None, "window_left": None, "window_right": None, "scale": 1.0}
    return describe(Inputs(q, k, k), **options, softcap=None)


def in_both_ways(case: Case, chains: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Results of parts that are tasks, and of those that one block takes, a chain of them where there are `chains`."""
    results = []
    for folded in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            take_parts(patch, folded, chains)
            options = {name: x for name, x in case.options().items() if name != "mask"}
            results.append(hopper(fa.attention)(case.q, case.k, case.v, **options, return_lse=True))
    return results


def ask_random_cases(same: Callable[[Case], None], features: frozenset[str], dim: int, problems: dict[str, int],
                     device: torch.device) -> None:  # fmt: skip
    """Calls `same` with so many problems on this device, of heads of up to `dim`."""
    sizes = {"max_len": LENGTH[device.type], "max_dim": dim, "max_heads": 3}
    drawn = cases(device=device, dtypes=HALVES, features=features, **sizes)
    few = [hypothesis.HealthCheck.filter_too_much, hypothesis.HealthCheck.too_slow]
    settings = hypothesis.settings(max_examples=problems[device.type], deadline=None, suppress_health_check=few)
    settings(hypothesis.given(drawn)(same))()


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "keys", "dim", "parts", "folded"),
    [
        (8, (32, 8), 64, 8192, 128, 8, True),  # 128 row tiles for 132 multiprocessors
        (6, (32, 8), 64, 8192, 128, 8, False),
        (7, (32, 8), 64, 8192, 128, 8, True),
        (12, (32, 8), 64, 8192, 128, 8, False),  # two waves, of which the second is not half full
        (4, (32, 8), 128, 16384, 128, 8, True),
        (4, (32, 8), 128, 16385, 128, 9, False),  # chains, of which the second is one part
        (4, (32, 8), 128, 32768, 128, 16, True),
        (1, (32, 8), 128, 65536, 128, 32, True),
        (1, (32, 8), 128, 65536, 64, 32, False),  # a third of what runs at once
        (8, (64, 8), 16, 16384, 128, 16, True),
        (8, (64, 8), 16, 8192, 128, 8, False),
        (1, (32, 8), 512, 1 << 20, 128, 8, True),  # of so many rows there never are more
        (8, (16, 8), 128, 8192, 256, 8, False),  # acc of two consumers does not fit twice
        (8, (32, 8), 64, 8192, 64, 8, True),
    ],
)
def test_when_a_block_takes_a_chain_of_parts(batch, heads, rows, keys, dim, parts, folded):
    problem = few_rows(batch, heads, rows, keys, dim)
    config = hopper_tile(problem)
    assert config.split
    assert tuning_parts.parts_of(problem, config) == parts
    assert tuning_parts.folds(problem, config, H200) == folded
    assert tuning_parts.folding(problem, config).alone == (parts <= 8)


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "dim", "parts"),
    [
        ((8, 1), 16, 16384, 128, 16), ((8, 1), 16, 65536, 128, 64), ((8, 1), 16, 1 << 20, 64, 64),
        ((8, 1), 16, 16384, 256, 8), ((8, 1), 16, 1 << 20, 256, 32), ((8, 1), 100, 16384, 128, 8),
        ((8, 1), 100, 1 << 20, 128, 32), ((8, 1), 200, 32768, 128, 8), ((8, 1), 200, 1 << 20, 128, 32),
    ],
)  # fmt: skip
def test_how_many_parts_there_are(heads, rows, keys, dim, parts):
    problem = few_rows(1, heads, rows, keys, dim)
    assert tuning_parts.parts_of(problem, hopper_tile(problem)) == parts


@pytest.mark.parametrize("chains", [False, True], ids=["one chain", "chains"])
@pytest.mark.parametrize("dim", [64, 128])
def test_who_takes_the_parts_does_not_show(dim, chains, hopper_device):
    """To the bit, with whatever numbers: rows that fail in some parts, infinities and NaN in V, sinks, short caches."""

    def same(case: Case) -> None:
        hypothesis.assume(case.q.numel() and case.k.shape[2] > 256)  # two parts
        apart, folded = in_both_ways(case, chains)
        assert_same_bits(folded, apart, "parts that one block takes", case)

    ask_random_cases(same, FEATURES - {"mask", "gradients", "poison"}, dim, PROBLEMS, hopper_device)


def with_failures(dtype: torch.dtype, device: torch.device, dim: int = 128) -> Case:
    """Several row tiles, of which rows fail in the first, the last, in all or in no part, some by what V holds."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, dim, device=device) for heads, n in ((4, 70), (2, 1100), (2, 1100)))
    k[:, :, 40] *= 60
    k[0, 0, 700:] *= torch.linspace(1, 90, 400, device=device)[:, None]
    k[1, 1] *= 1e3 if dtype == torch.float16 else 1e8
    v[0, 1, 500, 3], v[0, 1, 1000, 3], v[1, 0, 600, 9], v[1, 1, 5, 20] = math.inf, -math.inf, -math.inf, math.nan
    sinks = torch.tensor([0.5, -3.0, 20.0, -math.inf], device=device)
    return Case(*(x.to(dtype) for x in (q, k, v)), causal=True, sinks=sinks,
                kv_lens=torch.tensor([1100, 933], device=device, dtype=torch.int32))  # fmt: skip


def skip_half(dtype: torch.dtype, chains: bool, device: torch.device) -> None:
    if device.type == "cpu" and chains != (dtype == torch.float16):
        pytest.skip("slow without a GPU: a dtype has one kind of block there")


@pytest.mark.parametrize("chains", [False, True], ids=["one chain", "chains"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_that_fail_in_some_parts(dtype, chains, hopper_device):
    skip_half(dtype, chains, hopper_device)
    apart, folded = in_both_ways(with_failures(dtype, hopper_device), chains)
    assert_same_bits(folded, apart, "parts that one block takes", None)
    assert not folded[0].isfinite().all() and folded[0].isfinite().any()


def test_rows_that_fail_in_two_chains_of_one_block(hopper_device, monkeypatch):
    """Of two consumers, whose rings are shorter for the acc of the first chain."""
    case = with_failures(torch.bfloat16, hopper_device)
    case = case.replace(q=case.q[:, :, -40:], k=case.k[:, :, 620:], v=case.v[:, :, 620:],
                        kv_lens=torch.tensor([480, 300], device=hopper_device, dtype=torch.int32))  # fmt: skip
    monkeypatch.setattr(tuning_parts, "ONE_TILE_SPLIT", 128)  # so that 480 keys are four parts
    tiles, tile_of = [], attention_hopper_launch.tile_of

    def looked_at(problem, mask, config, page):
        tiles.append((config.warpgroups, config.folds, config.chains, config.apart))
        return tile_of(problem, mask, config, page)

    monkeypatch.setattr(attention_hopper_launch, "tile_of", looked_at)
    apart, folded = in_both_ways(case, chains=True)
    assert tiles == [(2, False, 1, False), (2, True, 2, True)]
    assert_same_bits(folded, apart, "parts that one block takes", None)
    assert not folded[0].isfinite().all() and folded[0].isfinite().any()


@pytest.mark.parametrize(
    ("chains", "hidden"), [(False, slice(192, 256)), (True, slice(256, 320))], ids=["one chain", "chains"]
)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_scores_of_which_a_part_sees_only_minus_infinity_at_first(dtype, hidden, chains, hopper_device):
    """The first tile of a part, which leaves the row with no reference, but keys behind it."""
    skip_half(dtype, chains, hopper_device)
    case = with_failures(dtype, hopper_device)
    q, k, v = case.q.abs(), torch.randn_like(case.k), torch.randn_like(case.v)
    k[:, :, hidden, 0] = -math.inf
    case = Case(q, k, v)
    apart, folded = in_both_ways(case, chains)
    assert_close_to_oracle(*folded, case)
    assert_same_bits(folded, apart, "parts that one block takes", case)


@pytest.mark.parametrize("chains", [False, True], ids=["one chain", "chains"])
def test_columns_that_overflow_only_as_a_sum(chains, hopper_device):
    """In the first part; a later one has larger scores, beside which they are small."""
    case = with_failures(torch.bfloat16, hopper_device)
    q, k, v = case.q, torch.randn_like(case.k), torch.randn_like(case.v)
    v[:, :, :128] = v[:, :, :128].abs() * 1e36
    q[..., 0], k[..., 0] = 8, 0
    k[:, :, 200, 0] = 30
    apart, folded = in_both_ways(Case(q, k, v), chains)
    assert_same_bits(folded, apart, "parts that one block takes", None)
    assert folded[0].isfinite().all()


@pytest.mark.parametrize("chains", [False, True], ids=["one chain", "chains"])
def test_sums_past_float32_stay_infinite_by_a_weight_of_0(chains, hopper_device, monkeypatch):
    """Of the first part and the third, at their maximum too: scores of the second, or a sink, leave them no weight."""
    case = with_failures(torch.bfloat16, hopper_device)
    q, k, v = case.q[:, :, -40:].clone(), *(torch.randn_like(x[:, :, :400]) for x in (case.k, case.v))
    v[:, :, :128, :64], v[:, :, 256:384, 64:96] = 3e38, 3e38
    q[..., 0], k[..., 0] = 8, 0
    k[:, :, 200, 0] = 300
    monkeypatch.setattr(tuning_parts, "ONE_TILE_SPLIT", 128)
    sinks = torch.tensor([0.0, 3000.0, -math.inf, 1.0], device=hopper_device)
    apart, folded = in_both_ways(Case(q, k, v, sinks=sinks), chains)
    assert_same_bits(folded, apart, "parts that one block takes", None)
    assert folded[0][..., :96].isposinf().all() and folded[0][..., 96:].isfinite().all()


def test_a_consumer_passes_over_the_end_of_the_first_part(hopper_device):
    """The first of two, whose rows see none of it: what lies behind is taken once."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 1, n, 128, generator=generator).to(hopper_device, torch.bfloat16) for n in (256, 300, 300)
    )
    case = Case(q, k, v, causal=True, q_start=0)
    apart, folded = in_both_ways(case, chains=False)
    assert_same_bits(folded, apart, "parts that one block takes", case)
    assert_close_to_oracle(*folded, case)


def test_chains_of_sequences_of_unequal_lengths(hopper_device):
    """Causal, where row tiles that have nothing to do are passed over at once."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(3, 2, n, 64, generator=generator).to(hopper_device, torch.bfloat16) for n in (16, 1100, 1100)
    )
    lens = torch.tensor([40, 1100, 300], dtype=torch.int32, device=hopper_device)
    case = Case(q, k, v, causal=True, kv_lens=lens)
    want, got = in_both_ways(case, chains=True)
    assert_same_bits(got, want, "chains", None)
    assert_close_to_oracle(*got, case)
