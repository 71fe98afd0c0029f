"""The portable kernel from the host: where Triton has a compiler, and which tile a launch takes for its tensors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from flashattn_lite.kernels import attention_launch
from flashattn_lite.kernels.tuning import attention_tile, unaligned_tile
from flashattn_lite.problem import Inputs, describe
from flashattn_lite.target import Target

HOPPER, AMPERE = Target("cuda", 90, "sm_90"), Target("cuda", 80, "sm_80")


def problem_of(dim: int, dim_v: int, mask: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16):
    q, k, v = (torch.empty(2, 4, 512, n, dtype=dtype, device="meta") for n in (dim, dim, dim_v))
    inputs = Inputs(q, k, v, mask)
    problem = describe(inputs, causal=False, q_start=None, window_left=None, window_right=None, scale=1.0,
                       softcap=None)  # fmt: skip
    return problem, inputs


def test_where_triton_has_a_compiler():
    problem, _ = problem_of(64, 64)
    for target in (HOPPER, Target("hip", "gfx942", "gfx942"), Target("cpu", 0, "cpu", interpreting=True)):
        assert attention_launch.why_not(problem, target) == []
    assert "no compiler for cpu" in attention_launch.why_not(problem, Target("cpu", 0, "cpu"))[0]
    assert "float64" in attention_launch.why_not(problem_of(64, 64, dtype=torch.float64)[0], HOPPER)[0]


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 36), (36, 64)])
def test_keys_and_values_are_aligned_both_or_not_at_all(dim, dim_v):
    problem, inputs = problem_of(dim, dim_v)
    assert attention_launch.config_of(problem, inputs, HOPPER) == unaligned_tile(problem, HOPPER)


def test_a_mask_of_one_row_takes_no_room_from_the_tiles():
    for rows, mask_bytes in ((1, 0), (512, 4)):
        problem, inputs = problem_of(128, 128, torch.empty(rows, 512, device="meta"))
        tile = attention_tile(problem, AMPERE, mask_bytes)
        assert attention_launch.config_of(problem, inputs, AMPERE) == tile
        assert (tile == attention_tile(problem, AMPERE, 0)) == (rows == 1)
