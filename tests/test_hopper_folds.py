"""Parts of the keys that one block of the Hopper kernel takes and folds: the bits of parts that are merged."""

from __future__ import annotations

import math
import os

import hypothesis
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from flashattn_lite.kernels import tuning_hopper
from flashattn_lite.problem import Inputs, describe
from flashattn_lite.target import Target
from flashattn_lite.testing import Case
from flashattn_lite.testing.results import assert_same_bits
from flashattn_lite.testing.strategies import FEATURES, cases
from tests.test_hopper import HALVES, LENGTH, hopper, take_parts

H200 = Target("cuda", 90, "sm_90", multiprocessors=132)
PROBLEMS = {"cpu": 7, "cuda": int(os.environ.get("LAW_PROBLEMS", "60"))}


def in_both_ways(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Results of parts that are tasks, and of those that one block takes."""
    results = []
    for folded in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            take_parts(patch, folded)
            options = {name: x for name, x in case.options().items() if name != "mask"}
            results.append(hopper(fa.attention)(case.q, case.k, case.v, **options, return_lse=True))
    return results


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "keys", "dim", "folded"),
    [
        (8, (32, 8), 64, 8192, 128, True),  # 128 row tiles for 132 multiprocessors
        (6, (32, 8), 64, 8192, 128, False),
        (7, (32, 8), 64, 8192, 128, True),
        (12, (32, 8), 64, 8192, 128, False),  # two waves, of which the second is not half full
        (4, (32, 8), 128, 32768, 128, True),
        (4, (32, 8), 128, 32769, 128, False),  # more parts than a chain
        (1, (32, 8), 512, 1 << 20, 128, True),  # of so many rows there never are
        (8, (16, 8), 128, 8192, 256, False),  # acc does not fit twice
        (8, (32, 8), 64, 8192, 64, True),
    ],
)
def test_when_one_block_takes_all_parts(batch, heads, rows, keys, dim, folded):
    q, k = (torch.zeros(batch, n, size, dim, dtype=torch.bfloat16, device="meta")
            for n, size in zip(heads, (rows, keys), strict=True))  # fmt: skip
    options = {"causal": True, "q_start": None, "window_left": None, "window_right": None, "scale": 1.0}
    problem = describe(Inputs(q, k, k), **options, softcap=None)
    config = tuning_hopper.hopper_tile(problem)
    assert config.split
    assert tuning_hopper.folds(problem, config, H200) == folded


@pytest.mark.parametrize("dim", [64, 128])
def test_who_takes_the_parts_does_not_show(dim, hopper_device):
    """To the bit, with whatever numbers: rows that fail in some parts, infinities and NaN in V, sinks, short caches."""
    features = FEATURES - {"mask", "gradients", "poison"}
    drawn = cases(
        device=hopper_device,
        dtypes=HALVES,
        features=features,
        max_len=LENGTH[hopper_device.type],
        max_dim=dim,
        max_heads=3,
    )

    @hypothesis.settings(max_examples=PROBLEMS[hopper_device.type], deadline=None)
    @hypothesis.given(drawn)
    def same(case: Case) -> None:
        apart, folded = in_both_ways(case)
        assert_same_bits(folded, apart, "parts that one block takes", case)

    same()


def with_failures(dtype: torch.dtype, device: torch.device) -> Case:
    """Several row tiles, of which rows fail in the first, the last, in all or in no part, some by what V holds."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 128, device=device) for heads, n in ((4, 70), (2, 1100), (2, 1100)))
    k[:, :, 40] *= 60
    k[0, 0, 700:] *= torch.linspace(1, 90, 400, device=device)[:, None]
    k[1, 1] *= 1e3 if dtype == torch.float16 else 1e8
    v[0, 1, 500, 3], v[0, 1, 1000, 3], v[1, 0, 600, 9], v[1, 1, 5, 20] = math.inf, -math.inf, -math.inf, math.nan
    sinks = torch.tensor([0.5, -3.0, 20.0, -math.inf], device=device)
    return Case(*(x.to(dtype) for x in (q, k, v)), causal=True, sinks=sinks,
                kv_lens=torch.tensor([1100, 933], device=device, dtype=torch.int32))  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_that_fail_in_some_parts(dtype, hopper_device):
    apart, folded = in_both_ways(with_failures(dtype, hopper_device))
    assert_same_bits(folded, apart, "parts that one block takes", None)
    assert not folded[0].isfinite().all() and folded[0].isfinite().any()
