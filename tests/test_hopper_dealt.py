"""Row tiles of the Hopper kernel that are dealt out, 64 rows a block, or to two consumers for three: the same bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import hypothesis
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from flashattn_lite import calls
from flashattn_lite.kernels import attention_hopper_launch, hopper_config, tuning_dealt, tuning_hopper
from flashattn_lite.kernels.hopper_config import HopperConfig
from flashattn_lite.kernels.tuning_hopper import LONG_64, SHORT_128, THREE_128, TURNS_64, hopper_tile
from flashattn_lite.kernels.tuning_parts import CHAINED, folding
from flashattn_lite.problem import AttentionProblem, Inputs, describe
from flashattn_lite.target import Target
from flashattn_lite.testing import Case, assert_close_to_oracle
from flashattn_lite.testing.results import assert_same_bits
from flashattn_lite.testing.strategies import FEATURES
from tests.exhaustive import also, problems
from tests.gluon_on_torch.hopper import on_torch
from tests.gluon_on_torch.sources import Sources
from tests.targets import H200
from tests.test_hopper import HALVES, hopper, take_parts
from tests.test_hopper_folds import ask_random_cases

PROBLEMS = problems(cpu=3, cuda=4)


def problem_of(batch, heads, length, dims, causal=False, window=(None, None), keys=None, varlen=False):
    """What `describe` gives; dims: of Q and K, and of V; heads: of queries, and of keys and values."""
    dims, heads = (x if isinstance(x, tuple) else (x, x) for x in (dims, heads))
    sizes = ((heads[0], length, dims[0]), (heads[1], keys or length, dims[0]), (heads[1], keys or length, dims[1]))
    q, k, v = (torch.zeros(batch, *size, dtype=torch.bfloat16, device="meta") for size in sizes)
    options = {"causal": causal, "q_start": None, "window_left": window[0], "window_right": window[1], "scale": 1.0}
    problem = describe(Inputs(q, k, v), **options, softcap=None)
    return replace(problem, features=replace(problem.features, varlen=varlen))


def tile(*args, **options) -> tuple[int, ...]:
    """(consumers, blocks that a row tile is dealt out to, blocks a multiprocessor, keys a tile, stages)"""
    problem = problem_of(*args, **options)
    config = tuning_dealt.dealt(problem, hopper_tile(problem), H200)
    return config.warpgroups, config.dealt, config.blocks, config.block_n, config.stages


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ((1, 12, 577, 64), (1, 2, 2, 128, 2)),  # an image
        ((64, 12, 577, 64), (2, 1, 1, 128, 4)),
        ((2, 10, 1024, 64), (1, 2, 2, 128, 2)),  # 160 row tiles for 132 multiprocessors: as good as two waves
        ((1, 16, 2048, 64), (1, 3, 2, 64, 4)),
        ((1, 24, 2048, 64), (3, 1, 1, 64, 4)),
        ((1, 12, 2048, 64, True), (1, 3, 2, 64, 4)),
        ((1, 24, 2048, 64, True), (3, 1, 1, 64, 4)),
        ((1, (32, 8), 128, 128, True), (1, 2, 2, 64, 2)),  # a short prompt
        ((1, (32, 8), 512, 128, True), (1, 2, 2, 64, 2)),
        ((1, (32, 8), 1024, 128, True), (2, 1, 1, 64, 4)),
        ((1, (32, 8), 30, 128, True), (1, 2, 2, 64, 2)),  # heads in one tile
        ((1, 8, 1024, 128), (1, 2, 1, 64, 4)),
        ((1, 12, 1024, 128), (2, 1, 1, 64, 4)),
        ((1, 4, 4096, 128, True), (1, 2, 1, 128, 2)),
        ((1, 3, 8192, 128, True), (2, 1, 1, 128, 2)),
        ((1, 12, 1024, 256, True), (1, 2, 1, 64, 2)),
        ((1, 12, 1024, 256), (2, 1, 1, 64, 2)),
        ((1, 16, 512, (192, 128), True), (1, 2, 1, 64, 3)),
        ((1, 16, 257, 80), (1, 3, 2, 64, 3)),
        ((1, 32, 512, 80, True), (2, 1, 1, 64, 4)),
        ((2, 8, 1024, 80), (2, 1, 1, 128, 2)),
        ((1, 16, 577, 80), (2, 1, 1, 64, 4)),
        ((32, 16, 256, 80), (2, 1, 1, 64, 4)),  # two consumers have 256 rows, three 384
        ((32, 16, 257, 80), (3, 1, 1, 64, 4)),  # 384 both
        ((32, 16, 256, 72), (2, 1, 1, 64, 4)),
        ((32, 16, 729, 72), (3, 1, 1, 64, 4)),
        ((32, 16, 4096, 72), (3, 1, 1, 64, 4)),
        # in parts
        ((1, (8, 1), 16, 128, True, (None, None), 16384), (1, 2, 1, 64, 4)),
        ((1, (8, 1), 16, 128, True, (None, None), 1 << 17), (1, 2, 1, 64, 4)),
        ((2, (8, 1), 16, 128, True, (None, None), 1 << 17), (2, 1, 1, 64, 4)),
        ((1, (32, 8), 64, 128, True, (None, None), 4096), (1, 2, 1, 64, 4)),
        ((1, (32, 8), 64, 128, True, (None, None), 8192), (2, 1, 1, 64, 4)),
        ((1, (8, 1), 512, 128, True, (None, None), 4096), (1, 2, 1, 128, 2)),
        ((1, (16, 8), 128, 256, True, (None, None), 4096), (1, 2, 1, 64, 2)),
        ((8, (64, 8), 16, 128, True, (None, None), 8192), (1, 2, 1, 64, 4)),  # whose chains fill half of the GPU
        ((1, (8, 1), 1024, 128, True, (None, None), 16384), (2, 1, 1, 128, 2)),
    ],
    ids=str,
)
def test_whom_a_row_tile_is_dealt_out_to(problem, expected, monkeypatch):
    monkeypatch.setattr(tuning_hopper, "OPERANDS_COPIED", False)  # by the tables that were measured
    monkeypatch.setattr(hopper_config, "V_IN_PIECES", True)
    assert tile(*problem) == expected


def test_what_is_never_dealt_out(monkeypatch):
    """To two for three consumers what is not the same for them: visits that rows decide."""
    monkeypatch.setattr(hopper_config, "V_IN_PIECES", True)
    assert tile(32, 16, 256, 80, window=(40, None))[0] == tile(32, 16, 256, 80, varlen=True)[0] == 3


def as_tasks(patch: pytest.MonkeyPatch, dealt: HopperConfig | str) -> None:
    """From here on every row tile is whole, dealt out, or that of two consumers where it was that of three.

    Heads of 64 have the tiles of long sequences, because those of short ones have one consumer.
    """

    def choose(problem: AttentionProblem, config: HopperConfig, target: Target) -> HopperConfig:
        if config.warpgroups == 1 and not (problem.features.mask or config.split):
            config = replace(LONG_64 if problem.features.right else TURNS_64, pack=config.pack)
        if dealt == "two for three" and config.warpgroups == 3:
            return replace(SHORT_128, pack=config.pack)
        if not dealt.startswith("dealt out") or config.warpgroups == 1:
            return config
        config = tuning_dealt.one_consumer(problem, config)
        return folding(problem, config) if config.split and dealt == "dealt out, chains" else config

    patch.setattr(attention_hopper_launch, "dealt", choose)
    patch.setattr(attention_hopper_launch, "with_chains", lambda problem, config, target: config)
    patch.setattr(calls, "_ready", {})


def in_both_ways(
    case: Case, ways: Sequence[str] = ("whole", "dealt out"), parts: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`parts`: of the keys; "dealt out, chains": a block takes a chain of them, else each is a task."""
    results = []
    for way in ways:
        with pytest.MonkeyPatch.context() as patch:
            as_tasks(patch, way)
            if parts:
                take_parts(patch, folded=False)
            results.append(hopper(fa.attention, copied=True)(case.q, case.k, case.v, **case.options(), return_lse=True))
    return results


@pytest.mark.parametrize("dim", [64, also(96), also(128), 256])
def test_who_takes_the_rows_does_not_show(dim, hopper_device):
    """To the bit, with whatever numbers and features: rows that fail, infinities and NaN in V, sinks, masks."""

    def same(case: Case) -> None:
        hypothesis.assume(case.q.shape[2] > 64 and case.k.numel() and case.v.numel())
        whole, dealt = in_both_ways(case)
        assert_same_bits(dealt, whole, "row tiles that are dealt out", case)

    ask_random_cases(same, FEATURES - {"gradients", "poison"}, dim, PROBLEMS, hopper_device)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_who_takes_the_rows_of_parts_does_not_show(dim, hopper_device):
    """Of 256 columns no block takes a chain whose keys another one reads."""
    ways = ("whole", "dealt out", "dealt out, chains" if dim <= CHAINED else "dealt out")

    def same(case: Case) -> None:
        hypothesis.assume(case.q.shape[2] * case.group > 64 and case.k.shape[2] > 256 and case.v.numel())
        whole, dealt, chains = in_both_ways(case, ways, parts=True)
        assert_same_bits(dealt, whole, "row tiles that are dealt out, in parts", case)
        assert_same_bits(chains, whole, "row tiles that are dealt out, in chains of parts", case)

    ask_random_cases(same, FEATURES - {"mask", "gradients", "poison"}, dim, PROBLEMS | {"cpu": 1}, hopper_device)


def with_failures(length: int, dim: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Rows that fail by their scores, by what V holds, or by both, in some of the 64 that a block takes."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, dim, device=device) for heads in (4, 2, 2))
    k[:, :, 40] *= 60
    k[0, 0, 100:] *= torch.linspace(1, 90, length - 100, device=device)[:, None]
    k[1, 1] *= 1e3 if dtype == torch.float16 else 1e8
    v[0, 1, 90, 3], v[0, 1, 150, 5], v[1, 0, 180, 9], v[1, 1, 5, 20] = math.inf, -math.inf, -math.inf, math.nan
    return Case(*(x.to(dtype) for x in (q, k, v)), sinks=torch.tensor([0.5, -3.0, 20.0, -math.inf], device=device))


@pytest.mark.parametrize(
    ("dtype", "dim", "options"),
    [
        (torch.bfloat16, 64, {"window": (70, 20)}),
        (torch.bfloat16, 128, {"causal": True}),
        also(torch.float16, 64, {}),
        (torch.float16, 80, {"causal": True}),
        also(torch.float16, 128, {"causal": True, "q_start": 50}),
    ],
    ids=str,
)
def test_rows_that_fail(dtype, dim, options, hopper_device):
    length = 270 if hopper_device.type == "cuda" else 200  # without a GPU longer ones take long
    case = replace(with_failures(length, dim, dtype, hopper_device), **options)
    whole, dealt = in_both_ways(case)
    assert_same_bits(dealt, whole, "row tiles that are dealt out", None)
    assert not whole[0].isfinite().all() and whole[0].isfinite().any()


def test_rows_that_fail_in_parts(hopper_device):
    case = with_failures(270, 128, torch.bfloat16, hopper_device)
    case = replace(case, q=case.q[:, :2], k=case.k[:, :1], v=case.v[:, :1], sinks=case.sinks[:2], causal=True)
    whole, *others = in_both_ways(case, ("whole", "dealt out", "dealt out, chains"), parts=True)
    for dealt in others:
        assert_same_bits(dealt, whole, "row tiles that are dealt out", None)
    assert not whole[0].isfinite().all() and whole[0].isfinite().any()


@pytest.mark.parametrize("dim", [also(72), 80])
def test_two_consumers_for_three(dim, hopper_device):
    case = with_failures(200, dim, torch.bfloat16, hopper_device)
    assert_same_bits(*in_both_ways(case, ("whole", "two for three")), "two consumers", None)


@pytest.mark.parametrize(("heads", "dim"), [((4, 4), 128), also((6, 2), 64)])
def test_packed_sequences(heads, dim, hopper_device):
    torch.manual_seed(0)
    lengths = [70, 0, 300 if hopper_device.type == "cuda" else 200, 1, 64, 129]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=hopper_device)
    q, k, v = (torch.randn(sum(lengths), n, dim, device=hopper_device).bfloat16() for n in (*heads, heads[1]))
    v[100, 0, 5] = math.inf
    for options in ({"causal": True}, {"window": (50, 20)}, {}):
        results = []
        for way in ("whole", "dealt out"):
            with pytest.MonkeyPatch.context() as patch:
                as_tasks(patch, way)
                limits = {"max_seqlen_q": 2048, "max_seqlen_k": 2048, "backend": "hopper", "return_lse": True}
                results.append(fa.attention_varlen(q, k, v, cu, cu, **options, **limits))
        assert_same_bits(results[1], results[0], "row tiles that are dealt out", None)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dim", [64, 80, 128, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_one_sequence_has_the_bits_that_it_has_in_a_batch(causal, dim):
    """As they are chosen: a batch of many is not dealt out, one alone is."""
    torch.manual_seed(0)
    for length, dtype in itertools.product((300, 577, 2100), HALVES):
        q, k, v = (torch.randn(40, 8, length, dim, device="cuda", dtype=dtype) for _ in range(3))
        configs = [attention_hopper_launch.config_of(
            describe(Inputs(*x), causal=causal, q_start=None, window_left=None, window_right=None, scale=1.0,
                     softcap=None), Inputs(*x), H200) for x in ((q, k, v), (q[:1], k[:1], v[:1]))]  # fmt: skip
        assert configs[0].dealt == 1
        if length < 2100:
            assert configs[1].warpgroups == 1
        alone = fa.attention(q[7:8], k[7:8], v[7:8], causal=causal, return_lse=True, backend="hopper")
        among = fa.attention(q, k, v, causal=causal, return_lse=True, backend="hopper")
        assert_same_bits(alone, tuple(x[7:8] for x in among), "one alone", None)
        assert_close_to_oracle(*alone, Case(q[7:8], k[7:8], v[7:8], causal=causal))


def test_blocks_that_visit_keys_as_if_alone_are_found(monkeypatch):
    """That these tests can fail: what they compare has other bits if a block's own rows decide about its visit."""
    alone = ("hopper_tasks", "first = first // POSITIONS * POSITIONS", "POSITIONS: gl.constexpr = ROWS // T.PACK")
    on_torch(monkeypatch, Sources(alone))
    case = replace(with_failures(270, 128, torch.bfloat16, torch.device("cpu")), causal=True)
    with pytest.raises(AssertionError):
        assert_same_bits(*in_both_ways(case), "row tiles that are dealt out", None)


def test_tiles_that_rows_of_no_whole_sectors_have(monkeypatch):
    monkeypatch.setattr(tuning_hopper, "OPERANDS_COPIED", False)
    assert hopper_tile(problem_of(4, 16, 729, 72)) == hopper_tile(problem_of(4, 16, 729, 104)) == THREE_128
    assert hopper_tile(problem_of(4, 16, 729, 112)) == SHORT_128
