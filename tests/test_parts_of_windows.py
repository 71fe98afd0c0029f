"""A window that begins within a tile of keys: the host counts as many parts as the kernel may find."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")
from flashattn_lite.kernels import decode_launch, tuning_parts
from flashattn_lite.kernels.tuning_decode import DecodeConfig, Splits
from flashattn_lite.kernels.tuning_hopper import hopper_tile
from flashattn_lite.problem import Inputs, describe
from tests.targets import H200


def test_as_many_as_the_merge_has_room_for():
    counted = 0
    for left in range(1023, 8000, 128):
        for rows in (1, 17, 64, 65):
            q, k = (
                torch.empty(2, heads, n, 128, dtype=torch.bfloat16, device="meta")
                for heads, n in ((8, rows), (2, 9000))
            )
            inputs = Inputs(q, k, k)
            problem = describe(inputs, causal=True, q_start=None, window_left=left - rows, window_right=None, scale=1.0,
                               softcap=None)  # fmt: skip
            config = hopper_tile(problem, None)
            if not config.split:
                continue
            splits = Splits(config.split, tuning_parts.FEW_PARTS, config.long)
            like = DecodeConfig(64 * config.warpgroups, config.block_n, splits, 4, 1, config.parts, chain=config.chain)
            tile = decode_launch.tile_of(problem, inputs, H200, like, 0)
            assert tuning_parts.parts_of(problem, config) == decode_launch.most_splits(problem, tile)
            counted += 1
    assert counted > 50
