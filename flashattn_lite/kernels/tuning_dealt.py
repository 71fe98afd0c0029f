"""When the Hopper kernel deals out row tiles that are too few for the GPU, 64 rows a block, as measured.

A block then visits keys as one with all rows of the tile would, so that a row has the same bits either way (see
`hopper_tasks.task_of`), and the batch may decide.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flashattn_lite.kernels.hopper_config import HOPPER_TALK, HopperConfig, pieces_of_v, room_of, widest_of
from flashattn_lite.kernels.tuning import cdiv
from flashattn_lite.kernels.tuning_hopper import SHORT_128
from flashattn_lite.kernels.tuning_parts import folding, folds, parts_of
from flashattn_lite.problem import AttentionProblem
from flashattn_lite.target import Target

# us in turn, 70 ms warm and 40 timed, bf16, heads x length; whole row tiles, dealt out by one block a multiprocessor,
# by two with rings as long as fit (three, in brackets); cuDNN, FlashAttention-3.
# H100, as many tasks as multiprocessors, 132, or fewer:
#   64 full:   12 x  577 11.3  8.9  8.7; 11.3, 14.0
#   80 full:   16 x  257 11.9  7.9  7.8; 11.1, 10.5
#   96 causal: 32 x  128  7.9  6.9  6.8;  7.5,  9.3     32 x  256 10.3  9.0  8.9; 10.2, 13.0
#   128 full:   8 x 1024 17.0 13.8 15.0; 18.1, 17.8      4 x 2048 25.8 20.0    -; 29.4, 28.2
#   128 causal, 32 / 8 x 64, 128, 256:  7.1  6.2  5.9; 7.4, 7.5,  7.8  6.7  6.5; 7.3, 7.8, 10.2  9.0  8.7; 9.8, 10.6
#               8 x 1024 17.1 14.3 14.2; 19.5, 18.2      2 x 4096 44.2 33.7    -; 56.0, 47.0
#   192 full:   8 x 1024 22.2 18.4    -; 24.3, 24.9     (192, 128) causal 16 x 512 14.4 12.8    -; 15.3, 16.8
#   256 full:   8 x 1024 26.7 19.3    -; 29.2, 27.4     causal 4 x 2048 45.5 30.3    -; 50.7, 46.2
# More than that: H100
#   64 full:   16 x  577 11.7 12.8 10.5; 11.9, 14.3     20 x 1024 23.1 23.2 19.4; 24.1, 19.2
#              16 x 1024 15.1 17.6 14.3; 14.9, 18.9     20 x 1500 31.1 39.4 31.1; 36.6, 41.4
#               8 x 2048 28.7 29.9 22.3 (22.1); 23.2, 28.9    12 x 2048 29.2 42.2 34.4 (31.2); 40.9, 30.4
#   64 causal:  8 x 2048 27.9 19.5 20.2 (20.3); 23.7, 28.3    12 x 2048 28.8 26.2 22.1 (25.2); 32.2, 29.9
#   80 causal: 32 x  512 13.6 14.7 14.0; 14.3, 16.9     128 full 24 x  333 11.2 12.8 10.8; 12.0, 10.7
#   128 causal, 32 / 8 x 512: 13.4 13.6 12.5; 14.6, 14.3
# and H200, without rivals
#   64 full:   64 x 577 24.5 27.2 21.4    40 x 1024 32.2 36.0 28.1    16 x 2048 50.9 55.7 40.6    20 x 51.8 68.0 51.4
#              24 x 2048 54.2 81.3 59.0   1024 x 512 172 - 183       512 x 1024 299 - 315
#   64 causal: 16 x 2048 29.1 35.0 25.4   24 x 34.2 48.6 36.8         4 x 8192 89.5 100.9 77.2
#   96 causal: 32 x  384 11.6 11.4 10.7   80: 16 x 1024 17.9 16.9 18.0    12 x 1500 22.7 23.5 25.0
#   128 full:  12 x 1024 17.6 22.2 17.7   16 x 18.3 22.5 18.9    20 x 28.7 30.4 27.9    48 x 512 19.2 20.2 19.8
#   128 causal: 16 x 1024 19.0 16.9 17.8  24 x 19.6 21.7 20.1    48 x 512 17.6 17.5 15.9    12 x 2048 29.1 32.9 30.0
#               4 x 4096 46.9 38.2 -       3 x 8192 91.2 100.8 -
#   192 causal: 12 x 1024 24.2 19.0       (192, 128) 20 x 512 14.7 12.6
#   256 causal: 12 x 1024 29.0 21.2 -      8 x 2048 49.1 38.3 -    full 12 x 1024 27.5 31.6 -
# So: as many tasks as multiprocessors, causal two each, but not of heads of 96; of heads of 64 more, where the rows of
# whole row tiles that come upon a multiprocessor are so many more.
DEALT_64 = 0.85
# In parts, heads of 128 on an H100 (one block a multiprocessor or two: level); whole, dealt out, FlashAttention-3:
#   as many tasks as multiprocessors, or fewer
#     8 / 1 heads x 16 rows: 2k 12.6 10.1; 10.3, 4k 12.6 10.6; 11.1, 8k 17.2 14.1; 12.8, 16k 19.0 15.0; 16.2, 32k 19.5
#       15.4; 20.8, 64k 23.6 22.5; 27.4, two of 8k 17.9 14.5; 14.0; 8k of 64 15.0 11.9; 11.8, of 96 17.2 14.1; 14.3, of
#       256 28.2 18.7; 17.0     x 64 rows: 4k 17.7 14.3; 12.5, 8k 18.3 14.7; 14.6, 32k 29.3 24.3; 23.8
#       x 128 rows: 4k 18.5 15.4; 14.0     x 512 rows: 4k 30.9 24.8; 22.2
#     64 / 8 heads x 16 rows: 2k 14.5 12.6; 12.4, 4k 16.5 15.1; 15.9, 8k 22.8 21.6; 21.7
#     32 / 8 heads x 64 rows: 2k 20.2 16.3; 14.5, 4k 21.2 17.2; 18.2     x 128 rows: 2k 22.0 18.2; 17.7
#     16 / 8 heads of 256 x 128 rows: 4k 34.2 27.9; 29.2
#   twice as many: 32 / 8 heads x 64 rows of 8k 27.0 28.1; 25.9, x 128 rows 40.8 46.4; 37.8; 8 / 1 heads x 512 rows of
#     8k 34.1 40.0; 35.4, x 1024 rows of 16k 109.7 137.1; 116.2
# Chains of parts, where those of whole row tiles fill less than the GPU and those of dealt ones do; parts as tasks,
# chains of dealt row tiles, FlashAttention-3: 64 / 8 heads x 16 rows, 8 x 8k 125 120; 104, 8 x 4k 77.9 56.5; 59.7, of
# 64 8 x 8k 68.9 62.3; 65.9, of 96 99.5 90.7; 89.3; 32 / 8 heads x 64 rows of 4 x 8k 87.0 86.6; 71.1, x 128 of 2 x 8k
# 79.2 76.1; 65.1; but 8 / 1 heads x 1024 rows of 16k 107 124; 112: many rows are bound by products, not by memory.
CHAINED_ROWS = 512  # of a key/value head
# Three consumers or two, full, us on an H100: 80, 512 heads x 128, 197, 256, 257, 384, 577, 729, 1024 (as many rows in
# all): three 149.9 239.8 205.4 223.0 185.9 339.7 319.4 476.5, two 123.5 179.5 158.7 233.9 193.5 307.0 337.8 424.8; few
# heads: 16 x 1024 24.3, 17.4 (one consumer 23.9).
TWO_FOR_THREE = 1.1  # times the rows


def dealt(problem: AttentionProblem, config: HopperConfig, target: Target) -> HopperConfig:
    """The tile with fewer consumers where that leaves less of the GPU idle; the same bits."""
    widest, causal = widest_of(problem), problem.features.right
    if config.warpgroups == 1:
        return config
    parts = parts_of(problem, config) if config.split else 1

    def tasks(consumers: int) -> int:
        heads = problem.heads_kv if config.pack > 1 else problem.heads_q
        return problem.batch * heads * cdiv(problem.len_q * config.pack, 64 * consumers) * parts

    if config.split:
        one = one_consumer(problem, config)
        if tasks(1) <= target.multiprocessors:
            return one
        few = problem.group * problem.len_q <= CHAINED_ROWS
        return folding(problem, one) if few and folds(problem, one, target) else config

    def cost(consumers: int) -> float:
        """Rows of the longest way through the launch; a causal row sees half of the keys in the mean."""
        each = tasks(consumers) / target.multiprocessors
        return consumers * (max(1.0, each / 2) if causal else math.ceil(each))

    most = target.multiprocessors * (2 if causal and widest != 96 else 1)
    if tasks(1) <= most or (widest == 64 and cost(1) <= DEALT_64 * cost(config.warpgroups)):
        return one_consumer(problem, config)
    features = problem.features
    whole = not (causal or features.left or features.varlen or features.mask)
    if config.warpgroups == 3 and widest > 64 and whole and TWO_FOR_THREE * cost(2) < cost(3):
        return replace(SHORT_128, pack=config.pack)
    return config


def one_consumer(problem: AttentionProblem, config: HopperConfig) -> HopperConfig:
    """The tile of a row tile's 64 rows; by two blocks a multiprocessor where two are faster, and fit."""
    one = replace(config, warpgroups=1, dealt=config.warpgroups, turns=False, q_slots=0)
    widest, two = widest_of(problem), replace(one, blocks=2)
    o_columns = min(one.o_width, math.prod(pieces_of_v(problem.head_dim_v))) * one.o_slots
    stages = (room_of(two) - HOPPER_TALK - 64 * (widest + o_columns) * 2) // (one.block_n * widest * 4)
    if stages < 2 or config.mask_copied or (widest > 96 and not problem.features.right):
        return one
    return replace(two, stages=min(one.stages, stages))
