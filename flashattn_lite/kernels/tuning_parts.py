"""Into which parts the Hopper kernel takes the keys of few rows, and who takes them, as measured."""

from __future__ import annotations

import math
from dataclasses import replace

from flashattn_lite.kernels.hopper_config import (
    HOPPER_TALK,
    NEVER,
    HopperConfig,
    pieces,
    pieces_of_v,
    room_of,
    widest_of,
)
from flashattn_lite.kernels.tuning import cdiv
from flashattn_lite.problem import AttentionProblem
from flashattn_lite.target import Target

# Few rows over many keys leave most of the card idle: rows of a head up to which, keys of a part at least, up to which
# head dim. 8k keys, causal, us on an H200 in turn: in parts of 1024, 2048 and 4096 keys, whole; FlashAttention-3.
#   128: 1 x 32 / 8 heads x 128 rows  41.0  36.1  51.3  82.7; 36.5   1 x 8 / 1 heads  20.4  28.9  47.5  80.7; 18.0
#                          x 64 rows  26.3  33.8  50.4  82.1; 23.8
#                         x 256 rows  74.8  66.8  62.6  81.9; 64.9   1 x 8 / 1 heads  23.8  31.0  48.4  80.6; 22.3
#   64:  1 x 32 / 8 heads x 128 rows  27.4  27.2     -  88.7; 28.2
#   256: 1 x 16 / 8 heads x 128 rows  42.6  54.9  90.1 156.3; 40.7
# 16 parts of 512: 53.5 in the first, 19.9 in the second. Merged four rows a program: level. A part is like a short
# causal sequence and has its tile. The first at 2048, d64 at 1024: 37.0, 28.5; with the tile of 8k keys 38.1, 37.3.
# On an H100, acc by TMA through one buffer and two, not from registers: 1 x 32 / 8 heads x 64 rows in parts of 1024
# 30.2 to 28.2 and 27.2, x 128 rows 41.3 to 39.9 and 40.4, 8 x 64 rows 170.4 to 163.0 and 162.1, 256: 48.0 to 44.6.
# More rows, where blocks that find enough row tiles take all parts (see FOLDED), on an H100, 70 ms warm and 40 timed:
# in parts of 2048 and of 4096 keys, whole; FlashAttention-3.
#   128: 512 rows   8k, 32 / 8 heads  107.6 105.3 102.7; 107.4       16 / 4   64.1  61.9  80.5;  60.5
#                       8 / 1          33.6  48.7  78.9;  33.4  4 x 32 / 8   404.5 398.3 387.6; 426.4
#                  32k, 32 / 8        381.4 401.2 377.6; 407.3    4k, 8 / 1   30.9  42.9  43.0;  22.1
#       1024 rows, 16k, 32 / 8        391.6 369.9 376.3; 398.6        8 / 1  116.8 108.0 151.0; 111.4
#   64:  512 rows   8k, 32 / 8         72.3  73.3  87.4;  81.9  4 x 32 / 8   275.9 275.7 290.7; 309.0
# Parts of more than 64 rows a key/value head of 256 columns are always tasks: 512 rows of 8k, two sequences of 16 / 4
# heads of 256 238.7 226.0 177.0; 199.3, one 115.4 106.9 154.8; 103.7. So at 8192 keys there, where few heads gain most
# and many lose least.
HOPPER_SPLITS = ((128, 1024, 256), (256, 2048, 256), (512, 2048, 128), (512, 8192, 256), (1024, 4096, 128))
# Up to so many rows of a head parts have the tile of short causal sequences, of more that of the longest: 512 rows of
# 16k and 32k, 32 / 8 heads of 128 218 206, 423 393 us (H100). Heads of 64 have one of their own there: 32k, 8 / 1 heads
# 67.8, with the longest's 90.9, the short one 69.7.
SHORT_ROWS = 256
# Where one row tile has all query heads of a K/V head, two at least: parts of 1024 and 512 keys; FlashAttention-3. 16
# rows of 2k, 4k and 32k keys, 64 / 8 heads 20.0 15.8; 13.0, 20.3 17.6; 15.5, 57.9 60.4; 58.9, 8 / 1 heads 18.5 13.7;
# 11.5, 18.5 13.8; 11.9, 46.0 28.2; 20.8, of 4k d64 14.7 12.4; 13.9, d256 33.2 28.9; 27.7, but 8 x 64 / 8 heads 46.6
# 48.9; 38.4, 73.0 80.3; 60.4.
# More than 64 rows of heads of 64 have two consumers, one before: 32 x 64 / 8 heads x 16 rows of 2k 95 56; 59, but 1 x
# 4k 11.5 13.0; 13.3 (H100).
ONE_TILE_SPLIT = 512
# Of a cache, up to the 64 rows of one consumer: parts of 512, 256 and 128 keys; FlashAttention-3. us on an H200, 70 ms
# warm and 40 timed, 32 / 8 heads of 128 x 16 rows: 1 x 512 11.6 10.1 9.3; 12.5, 1 x 1k 12.2 10.6 9.9; 13.1, 1 x 2k 13.1
# 12.0 12.0; 14.7, 4 x 2k 19.0 20.7 20.7; 19.8, 8 x 512 16.4 15.7 17.2; 14.7, 8 x 1k 19.9 21.6 19.7; 20.3, 8 x 2k 29.9
# 28.0 28.1; 29.3, 32 x 2k 69.9 70.3 70.5; 81.5, 64 x 1k 72.3 73.5 74.7; 90, 64 x 1000 keys in room for 16k 99.5 100
# 105.6; 91, unequal lengths (benchmarks/decode_mixed.py) 16 x 4k 49.0 49.5 49.4; 59.8, 64 x 2k 87.2 88.2 88.1; 100.
CACHE_SPLIT = 256
# Of these, what a consumer's 64 rows hold is one consumer's. Its chains are of half of FEW_PARTS, and its blocks take
# two, each with an acc of its own on chip, where these fill the GPU. us on an H100, 70 ms warm and 40 timed: decoding's
# kernels; two consumers; one, in chains of eight parts; in chains of four, or two of them; FlashAttention-3.
#   32 / 8 heads of 128 x 16 rows: 16 x 4k 109 100 95.7 95.6; 96.4 (one chain of four a block 107), 32 x 2k 114 102 98.5
#     98.5; 97.3, 8 x 8k 98.9 113 109 99.2; 99.0, 8 x 4k 55.3 66.2 63.0 54.8; 54.8, 8 x 2k 34.0 38.7 35.8 35.5; 32.9,
#     4 x 2k 21.5 23.0 20.4 20.8; 20.1, 1 x 2k 11.8 13.8 11.6 11.4; 11.4, 1 x 4k 14.0 15.3 13.2 13.1; 14.5, 1 x 8k 19.3
#     21.5 18.6 18.5; 20.3, 1 x 32k 55.0 63.2 59.9 59.0; 55.6
#   64 / 8 heads x 4 rows: 8 x 8k 98.0 107 104 96.9; 96.5     8 / 1 heads x 8 rows: 16k 15.3 18.8 14.7 14.6; 15.0
#   32 / 32 heads, in parts of 1024, without the third: 8 x 64 rows of 4k 211 191 186; 186, 2 x 64 of 2k 34.0 36.9 33.6;
#     33.1, 1 x 32 of 8k 53.8 57.9 55.0; 52.2
# Decoding's kernels; one consumer; FlashAttention-3:
#   32 / 8 heads of 128 x 16 rows: 4 x 4k 33.0 34.5; 32.2, 16 x 8k 195 183; 185, 4 x 8k 55.3 58.1; 53.9, 2 x 16k 63.3
#     59.1; 53.6, 8 x 16k 193 192; 187, 4 x 32k 193 191; 185     8 / 1 heads x 8 rows: 128k 32.5 30.3; 38.9
#   32 / 8 heads x 16 rows, of 96: 16 x 4k 96.2 74.4; 82.2, 1 x 8k 19.2 16.6; 19.3     of 192: 8 x 4k 132 93.4; 81.8
#     of 256: 4 x 2k 61.5 35.2; 36.4, 1 x 8k 38.6 31.4; 35.8, 8 x 4k 133 122; 104, 16 x 4k 254 234; 190
#     of 64 (three blocks a multiprocessor, chains of eight): 16 x 4k 60.3 57.5; 59.9, 1 x 32k 33.7 31.0; 35.6, but 1 x
#     2k 8.1 9.7; 10.9, 8 x 8k 53.7 60.7; 61.5: not from there
FEWEST = 16  # rows that are left to decoding's kernels, whose tiles they fill
# A sequence has FEW_PARTS until these have LONG_PARTS times as many keys as a part has at least, then more of those, up
# to PARTS, of one row tile ONE_TILE_PARTS; past SHORT_ROWS never more. Many parts fill the GPU with few heads; states
# cost others up to 15%, but where a block takes a chain of parts (see FOLDED). Heads wider than CHAINED, whose acc does
# not fit twice beside long rings, have fewer. us on an H100, 70 ms warm and 40 timed: LONG_PARTS 4 and at most 32
# parts; 2 and at most 64, at most 128 (c: in chains); FlashAttention-3.
#   one row tile, 8 / 1 heads x 16 rows: 16k 26.6 18.7; 16.4, 32k 28.1 19.5; 20.9, 64k 29.0 23.3; 27.6, 128k 47.1 34.6
#     42.3; 40.1. 16 of 16k 58.2 66.6; 56.9, of 64k 215 198c; 188
#   64 / 8 heads x 16 rows: 16k 33.8 37.9; 35.0, 32k 59.8 66.6; 58.3, 128k 201 216 200c; 192, 8 x 8k 124 124 112c; 104
#     (16 parts of 512), 8 x 16k 213 200c; 191, 4 x 32k 216 196c; 190
#   heads of 64, 8 / 1 x 16 rows: 32k 23.6 16.9; 18.1, 128k 40.7 25.7 28.7; 30.2, 64 / 8 128k 108 115; 127, 8 x 16k 114
#     107c; 121
#   more row tiles, LONG_PARTS 4 and at most 32, in chains where they fill the GPU; 2, the same; FlashAttention-3:
#   8 / 1 heads x 64 rows: 32k 45.6 28.8; 23.8, 64k 48.4 35.7; 37.6, x 128 rows: 32k 46.6 33.9; 35.3, 64k 57.0 62.8;
#     63.1
#   32 / 8 heads x 64 rows: 32k 67.0 73.9; 68.1, 4 x 64k 484c 491c; 486, x 128 rows: 32k 112 126; 113, 64k 219 218c;
#     222, 128k 402c; 446 (as tasks 424), x 256 rows: 64k 412 403c; 433, 128k 783c 826c; 846 (824, 788)
#   heads of 64, 32 / 8 x 128 rows: 64k 159 170; 159 (chains, of which the GPU runs three times as many, 199c, 174c)
#   heads of 256, 16 / 8 x 128 rows: 32k 121 133; 130, 64k 223 257; 236, 8 / 1 x 16 rows of 64k 49.2 39.8; 44.5, 4 x 16
#     / 8 x 64 rows of 64k 819 929; 716
FEW_PARTS, LONG_PARTS, PARTS, ONE_TILE_PARTS = 8, 2, 32, 64
CHAINED, WIDE_LONG_PARTS = 128, 4
# Blocks take a chain of parts of a row tile, and fold them, where chains have so many of the places of all waves. us on
# an H100, 70 ms warm and 40 timed: parts as tasks, by one block, by one that holds Q too, whole; FlashAttention-3.
#   128, 8k, 32 / 8 heads:  8 x 64 rows 159.4 126.4 129.9 115.4; 120.9    7 x 64 143.8 114.9 117.0 122.2; 118.2
#                          4 x 128 rows 152.8 117.0 117.3 105.9; 115.2   2 x 256 130.5 110.4 109.3 100.2; 111.7
#        64 / 8 heads x 16 rows, 32 x 2k 157.4 105.6 109.0 102.9; 101.4
#        32 / 8 heads x 32 rows, 16 x 4k 145.1 102.1 103.5 100.3;  98.7
#   64:  8 x 64 rows of 8k 106.6 93.1, whole 104.9; 107.1, 32 x 16 rows of 2k 94.0 57.3, 62.6; 66.8
# Short runs on an H200: 96, 128, 160, 192 row tiles as tasks 105.7 135.9 171.6 205.1, by one block 104.9 112.8 217 230.
FOLDED = 0.8
# Heads wider than CHAINED only where a row tile has all rows of a K/V head, and rings are as short as acc leave room
# for, two stages at least. us on an H200, 70 ms warm and 40 timed: tasks; folded; FlashAttention-3.
#   32 / 8 heads of 256 x 16 rows: 7 x 4k 83.4 69.3; 86.2, 8 x 4k 88.9 77.7; 78.8, 16 x 4k 168 148; 135, 32 x 2k 180
#     131; 142, 64 x 1k 135 135; 148, 8 x 8k 151 137; 141, 16 x 8k 290 267; 271, 8 / 4 heads, 4 x 64k 257 246; 276
#   but 16 / 8 heads x 64 rows, by two blocks which both read K and V: 8 x 8k 186 199; 150
#   of 192, with two chains a block from 16 sequences on: 8 x 4k 69.1 62.1; 63.6, 16 x 4k 131 102; 115, 32 x 2k 144 102;
#     112, 8 x 8k 117 106; 110, 16 x 8k 228 191; 219
#   two chains of more than 64 rows, 64 / 8 heads of 128 x 16 rows: 16 x 16k 328 300; 270, K and V given back apart, on
#     another card, 331 311; 294
ROWS_OF_TWO_CHAINS = 128  # of a key/value head; more, whose keys several blocks read, have not been measured
# acc of two chains of heads of 256 leave room for tiles of half as many keys alone. The same rows, by 64 keys a
# tile, by 32; FlashAttention-3. Short sequences lose by it, and the room in a cache may not decide.
#   16 x 4k 151 131; 138, 16 x 8k 270 251; 273, 8 x 4k 79.6 79.0; 79.8, 8 x 8k 139.6 139.9; 155, 4 x 4k 51.4 51.1; 46.5,
#   2 x 4k 28.3 28.7; 29.5, 1 x 4k 18.5 18.8; 19.6, 1 x 8k 26.7 27.0; 28.8, 1 x 2k 15.6 17.2; 15.0
HALF_TILES = 4096  # keys that are seen
# The acc of the parts before waits in registers up to so many columns, else in shared memory. What the compiler puts
# on the stack comes back from L2, past the little that shared memory leaves of L1. Short runs on an H200, in registers
# or on the stack and in shared memory: 8 x 64 rows of 128 117.1 114.3, of 64 89.0 101.0; with 128 keys a tile 157 120,
# with Q held 138 114; heads of 256, on the stack alone, 258 (parts as tasks 183).
FOLDED_IN_REGISTERS = 64


def split_of(problem: AttentionProblem) -> int:
    """Keys of a part, at least; 0: a row tile takes all of its own."""
    seen: float = 0 if problem.features.varlen or problem.features.mask else problem.keys_seen
    if problem.cache:
        seen = math.inf
    splits = (split for rows, split, dims in HOPPER_SPLITS if problem.len_q <= rows and widest_of(problem) <= dims)
    split, rows = next((split for split in splits if seen >= 2 * split), 0), problem.group * problem.len_q
    if problem.cache and rows <= 64:
        return CACHE_SPLIT
    return ONE_TILE_SPLIT if split and problem.group > 1 and rows <= 128 else split


def ahead_of_decoding(problem: AttentionProblem) -> bool:
    """Whether the Hopper kernel's parts are faster than decoding's splits where both kernels take the rows."""
    return split_of(problem) > 0 and problem.group * problem.len_q >= fewest_rows(problem)


def fewest_rows(problem: AttentionProblem) -> int:
    """Of a key/value head: fewer are left to decoding's kernels."""
    return 1 + (FEWEST if widest_of(problem) > 64 else 64)


def in_parts(problem: AttentionProblem, config: HopperConfig, split: int) -> HopperConfig:
    """The tile of parts of so many keys, at least."""
    chained = widest_of(problem) <= CHAINED
    long = (ONE_TILE_SPLIT if split == CACHE_SPLIT else split) * (LONG_PARTS if chained else WIDE_LONG_PARTS)
    long = NEVER if problem.len_q > SHORT_ROWS else long
    parts = ONE_TILE_PARTS if chained and split in (ONE_TILE_SPLIT, CACHE_SPLIT) else PARTS
    chain = FEW_PARTS // 2 if config.warpgroups == config.blocks == 1 else FEW_PARTS
    config = replace(config, split=split, long=long, parts=parts, chain=chain)
    two_chains = replace(config, chains=2, folds_in_room=True)
    long_keys = problem.keys_seen >= HALF_TILES and not problem.cache
    if long_keys and chain < FEW_PARTS and stages_beside(problem, two_chains) < 2:
        return replace(config, block_n=config.block_n // 2, stages=2 * config.stages)
    return config


def with_chains(problem: AttentionProblem, config: HopperConfig, target: Target) -> HopperConfig:
    """The tile of blocks that take as many chains of parts of a row tile as leave enough blocks, or parts as tasks.

    The batch may say, since bits do not tell.
    """
    rows = problem.group * problem.len_q
    if config.chain < parts_of(problem, config) <= 2 * config.chain and rows <= ROWS_OF_TWO_CHAINS:
        two = replace(config, chains=2)
        if folds(problem, two, target):
            return folding(problem, two)
    return folding(problem, config) if folds(problem, config, target) else config


def folds(problem: AttentionProblem, config: HopperConfig, target: Target) -> bool:
    """Whether a block takes chains of parts of a row tile, where each part could be a task.

    If their acc fit on chip beside that of a part and the rings, which two chains and wide heads may have shorter, and
    chains are enough for the GPU.
    """
    taken = folding(problem, config)
    tiles = cdiv(problem.len_q, 64 * config.warpgroups // config.pack) * problem.batch
    tiles *= problem.heads_kv if config.pack > 1 else problem.heads_q
    parts = parts_of(problem, config)
    # Of three blocks on a multiprocessor one is enough, as measured, where rows leave, but not where states do.
    at_once = target.multiprocessors * (1 if taken.alone else config.blocks)
    taken_parts = config.chain * config.chains
    waves = cdiv(tiles * cdiv(parts, taken_parts), at_once)
    places = waves * at_once * min(parts, taken_parts)
    wide = widest_of(problem) > CHAINED
    least = 2 if wide or config.chains > 1 else config.stages
    read_once = not wide or problem.group * problem.len_q <= 64
    return read_once and taken.stages >= least and tiles * parts >= FOLDED * places


def parts_of(problem: AttentionProblem, config: HopperConfig) -> int:
    """Of the keys that all rows of a sequence see between them, as `splits_of` has them."""
    # With a window the first tile may begin ahead of the keys that are seen.
    tiles = cdiv(problem.keys_seen, config.block_n) + problem.features.left
    each = min(cdiv(tiles, FEW_PARTS), config.long // config.block_n)
    return cdiv(tiles, max(each, config.split // config.block_n, cdiv(tiles, config.parts)))


def folding(problem: AttentionProblem, config: HopperConfig) -> HopperConfig:
    """The tile of blocks that take chains of parts: Q's registers and room, and stages, are given up for the states."""
    in_room = config.chains > 1 or math.prod(pieces_of_v(problem.head_dim_v)) > FOLDED_IN_REGISTERS
    alone = parts_of(problem, config) <= config.chain * config.chains
    taken = replace(config, folds=True, alone=alone, folds_in_room=in_room, q_held=False, q_slots=0)
    stages = min(config.stages, stages_beside(problem, taken))
    return replace(taken, stages=stages, apart=config.apart or stages < config.stages)


def stages_beside(problem: AttentionProblem, config: HopperConfig) -> int:
    """Of K and of V, as many as fit on chip beside Q and each chain's acc."""
    dim, dim_v = math.prod(pieces(problem.head_dim)), math.prod(pieces_of_v(problem.head_dim_v))
    o_bytes = 4 * config.chains if config.folds_in_room else 2 * config.o_slots
    room = room_of(config) - HOPPER_TALK - 64 * config.warpgroups * (dim * 2 + dim_v * o_bytes)
    return room // (config.block_n * (dim + dim_v) * 2)
