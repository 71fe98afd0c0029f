"""Tile shapes, splits and launches of the decoding kernels, and what `attention` gives to them, as measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from flashattn_lite.kernels.tuning import cdiv, padded, shared_bytes
from flashattn_lite.problem import FAR, AttentionProblem
from flashattn_lite.target import Target


class Splits(NamedTuple):
    """Into what a sequence's keys fall, see `splits_of`."""

    keys: int  # of one, at least
    few: int  # of so many, at most
    long: int  # keys of one, at least, where there are more


@dataclass(frozen=True)
class DecodeConfig:
    """The decoding kernels: rows and keys of a tile, splits, warps, pipeline stages."""

    block_m: int
    block_n: int
    splits: Splits
    num_warps: int
    num_stages: int
    lanes: int = 128  # splits of a sequence, at most
    chain: int = 4  # neighbouring splits that are folded one after the other
    paired: bool = False  # neighbouring chains are added up first, whoever does it
    owns_pairs: bool = False  # and a program may own two, if flat
    several: int = 1  # splits of a program, each with a state, where else there would be MANY; if flat, of one token
    programs: int = 2  # of partial_kernel on a multiprocessor at once
    flat: bool = True  # a chain is one loop over its keys, not one over its splits of one over their keys
    # Of the output, a merging program: where each split has a state, a chain, a pair of chains.
    columns: tuple[int, int, int] = (32, 64, 64)
    merge_registers: int = 96  # a thread of merge_kernel at most; by its own choice it waits twice for a chain's states
    registers: int = 0  # a thread of partial_kernel at most; 0: the compiler's choice


# All of decoding: H200, bf16, head dim 128, 32 query and 8 key heads, short runs, GB/s of K and V.
# Bytes of K and V a tile. 1 x 32k, 8 x 8k, 64 x 8k keys in splits of 1024: 32 keys a tile, four stages 3531, 3807 and
# 4267; 64 keys, two stages 3307, 3894 and 4346. A read: 4155, 4373, 4646.
DECODE_TILE_BYTES = 16 << 10
# 16, so that 8 key heads are a program a multiprocessor. Longer splits leave most of a GPU idle, shorter ones too many
# states. Microseconds on an H100, 32 query and 8 key heads of 128: 512 keys; of 256, and of 128, at most 16; of 128 at
# most 32; FlashAttention-3:
#    4 tokens  1 x 1k  12.8  9.2  7.9  8.1; 10.5   16 tokens  1 x 1k   16.3  11.7  10.2  11.3; 11.0
#              1 x 2k  13.3  9.8  9.2 10.1; 11.7              1 x 2k   16.9  12.2  11.5  13.2; 12.2
#              1 x 4k  14.0 12.1 12.1 14.6; 13.8              1 x 4k   17.6  14.2  14.2  18.0; 14.4
#              1 x 8k  18.6 17.7 17.7 20.3; 20.2              1 x 8k   21.5  19.9  19.9  24.1; 21.3
#              4 x 2k  19.6 19.3 21.6 22.1; 19.0              4 x 2k   22.8  22.0  29.1  30.2; 20.8
#              8 x 2k  31.4 32.1 29.5 29.7; 30.8              8 x 2k   40.1  43.1  35.4  36.1; 34.0
#              8 x 4k  54.5 50.7 51.2 53.0; 52.6              8 x 4k   69.2  56.1  56.4  65.3; 55.8
#             16 x 4k  96.0 96.6 96.9 99.5; 94.9             16 x 4k  103.3 109.1 108.9 125.4; 96.6
#             32 x 2k  98.8 99.7  100  102; 95.5             32 x 2k  110.2 115.0 128.5 130.1; 98.2
# Heads of 256 before and since, one token, 4 and 16: 1 x 2k 17.5 12.0, 17.6 12.8, 31.7 20.7; 8 x 4k 96.5 94.8, 101.7
# 98.4, but 113 126. Pages of 64, 1 x 2k, 4 tokens and 16: 18.6 12.7, 21.3 14.4. Merged by fewer columns: level to 10%
# slower.
# Long contexts, one sequence: at most 32 splits, 128; FlashAttention-3, cuDNN. One token of 32k and 128k keys:
#   8 / 1 heads 22.0 14.8; 20.0, 13.9    71.5  31.0;  39.2,  30.5     16 / 2 heads 23.2 18.9; 22.6, 18.4
#  32 / 8 heads 48.0 49.4; 55.4, 49.9   177.6 177.8; 189.6, 180.2                  76.8 48.6; 58.9, 49.5
# Four tokens, long splits of 512 keys and of 1024, 16k, 32k and 128k keys; FlashAttention-3: 8 / 1 heads 15.7 23.1;
# 15.5, 16.3 23.9; 18.6, 32.1 32.1; 39.1 (at most 32 splits 17.5, 25.9, 75.3), 32 / 8 30.7 28.2; 32.3, 50.8 52.0; 54.7.
SPLITS = Splits(256, 16, 512)
ONE_TOKEN_SPLITS = Splits(128, 32, 512)  # where `decode_tile` takes four programs a multiprocessor: see MANY
# Few keys: a tile of twice as many, and one program for all that a row sees: up to FEW_KEYS, which a window may begin
# anywhere in a tile. Microseconds on an H100 before and since; cuDNN, where there is a mask torch's choice. 8 key heads
# of 128, four query heads each, where nothing else is said:
#   1 token      1 x 128 6.3 4.3; 4.6    8 x 128  6.9  5.2;  5.2   64 x 128 16.2 16.4; 17.1
#                1 x 256 6.7 5.9; 6.6    8 x 256  9.5  7.1;  6.7   64 x 256 26.6 26.3; 26.6   256 x 256 95.7 93.2; 93.9
#    12 of 64    1 x 128 4.4 3.8; 4.0    8 x 256  7.0  5.9;  6.4   64 x 256 22.1 20.5; 20.2
#     8 of 256   1 x 128 6.6 6.0; 8.8    8 x 256 11.8 10.5; 16.7   64 x 256 49.5 50.0; 53.4
#     padding    1 x 128 8.3 5.7; 9.6    8 x 256 10.9 10.2; 12.2   64 x 256 26.2 29.4; 33.5
#     12, bias   1 x 128 5.5 4.2; 4.9    8 x 256  7.6  6.8;  7.6   64 x 256 24.6 22.3; 22.8
#   4 tokens     1 x 128 5.2 4.9         8 x 256  8.2  7.6         64 x 256 29.3 29.7          512 x 64 71.8 73.4
#     8 of 256   1 x 128 9.1 7.0         8 x 256 16.1 11.8         64 x 256 61.1 54.9
#   1 token, 128 keys of 8k, 64 / 8 heads of 64: 1 4.9 3.6, 8 6.1 3.8, 64 7.2 7.1; in pages of 16 1 5.8 4.0, 8 6.9 4.2,
#   64 11.8 10.4; pages, 32 / 8 heads of 128 1 7.1 5.3, 64 18.1 18.4; with one stage more level, with two or three
#   up to 16% slower
# 384 keys, one token: 1 6.8 7.7, 8 10.4 9.1, 64 37.3 36.8; 512: 1 6.9 9.2, 8 11.8 10.7. Tiles of 128 keys: 1 x 128 4.3
# to 4.5, 8 x 256 7.6 to 8.2; two warps, two stages, or 32 keys: 4.7 to 7.0. Such tiles for all keys: 1 x 1k 7.3 to 6.9,
# 8 x 1k 17.2 to 16.4, but 1 x 8k 15.9 to 17.0, 8 x 512 11.5 to 12.6, 16 tokens of 16 x 4k 109 to 116.
FEW_KEYS, FEW_KEYS_TILE, FEW_KEYS_SPLITS = 320, 64, Splits(384, 16, 512)
# Programs that own a chain of splits are faster than several times as many, if they are enough: fewer states, longer
# reads. Microseconds on an H100, 8 key heads of 128, by programs of chains over the places that a GPU has: each split
# a program (of one token two, see MANY), chains, of one token pairs of chains.
#   0.24   1 token 4 x 2k 16.9 17.3 25.3, 2 x 8k 27.9 29.3 44.2    4 tokens 4 x 2k 19.1 21.6, 16 tokens 22.1 28.4
#   0.36           6 x 2k 24.4 22.4 27.5, 3 x 8k 41.2 38.8 47.5             6 x 2k 27.1 24.5,           35.3 31.0
#   0.48           8 x 2k 29.8 27.4 30.3, 4 x 8k 51.9 48.6 53.7             8 x 2k 32.3 29.2,           42.9 34.7
#   0.73          12 x 2k 40.8 39.4 39.5, 6 x 8k 73.5 72.0 72.4            12 x 2k 45.2 41.2,           63.0 47.8
#   0.85          14 x 2k 46.3 45.9 44.7, 7 x 8k 84.5 84.8 82.0             7 x 8k 88.1 85.9,          111.2 89.1
#   1.09          18 x 2k 57.7 63.8 56.8, 9 x 8k  106  118  105             9 x 8k  112  136,           140  149
#   1.21          20 x 2k 63.2 66.5 62.3, 10 x 8k 116  123  117            10 x 8k  123  139,           152  153
#   1.45          24 x 2k 74.5 73.4 73.1, 12 x 8k 138  139  138            12 x 8k  148  143,           180  158
# Long splits: one token of 1 x 32k (0.24) 50.7 53.4 81.3, 2 x 32k 97.3 91.3 101, 1 x 128k (0.48) 183 177 196; 16 tokens
# of 1 x 32k (0.48) 64.5 55.3, 4 tokens 54.9 50.8. Where a chain or a pair is all that there is, nothing is merged, and
# where all caches are that short: 64 x 512, one token 54.0 to 47.8, 4 tokens 61.8 to 50.0, 16 tokens 83.0 to 60.1; 256
# x 256 113 to 95.7; 16 tokens of 8 x 256 16.1 to 11.1, of 64 x 1k 126 to 105. Short contexts in a large cache lose by
# chains what full ones gain; so not from 0.3 on.
# Pairs ask for more where there are more waves: 24 x 8k (1.45) 269.5 in chains and 293.6, 48 x 2k 140.5, 151.1; but 8 x
# 8k (0.48) 95.9 and 93.7, 16 x 2k 51.5, 50.2, 64 x 8k (3.9) 720, 706. And where their programs would not be alike: 12
# splits are a pair and a chain, 8 x 20 x 1500 27.1 for 25.7. With a mask, whose programs have more to do for a tile,
# there are none: 8 x 4k padded 45.7 for 40.7.
ONE_WAVE, FULL, FULL_OF_PAIRS = 0.4, 0.7, 0.85  # of the places, if one wave has all; of those that all waves have
ALIKE = 0.85  # of the splits that its programs could have, in such a wave
# Pairs are for batches that fill their room. One token, lengths drawn from an eighth of it to all, in pairs and in
# chains, two draws of four: 8 x 8k 73.4 71.4, 57.0 51.4, 16 x 2k 35.0 34.2, 32.2 30.1, 64 x 2k 112 106, 117 111, 32 x
# 8k 214 203, 224 214, 64 x 8k 400 390, 421 415; all of half of it, 64 x 2k 112 100, 8 x 8k 49.3 50.2. So full caches
# gain up to 1.6% by pairs, others lose up to 10%; only of packed sequences does the host know which they are. In pages
# of 16, in pairs and in chains (H200): drawn 8 x 8k 58.5 46.9, 64 x 2k 92.0 83.7, 16 x 4k 46.8 50.0, full 8 x 8k 71.1
# 68.1, 64 x 8k 495.5 501.3; in one piece 52.5 45.5, 88.8 81.1, 45.8 47.9, 66.9 67.0, 494.2 500.1.
FILLED = 0.9  # of the keys that packed sequences could have
# One token: splits of 128 keys, a program each. Where more than MANY programs a multiprocessor would run at once, one
# has two, one after the other, and each still has a state. Microseconds before, with splits of 256, and since; 8 key
# heads of 128: 1 x 1k 8.8 6.8, 1 x 2k 9.1 7.9, 1 x 4k 10.5 8.9, 2 x 2k 10.9 9.0, 4 x 1k 11.1 9.2, 8 x 4k 39.5 37.1,
# 16 x 2k 40.1 37.3, 32 x 1k 42.6 38.4, level from 8k keys on; but 2 x 4k 12.9 13.6, 4 x 2k 13.1 13.8, 8 x 1k 13.8 14.4
# (one split a program 14.3, 14.8, 15.0). Heads of 64: 8 x 20 x 1500 22.6 20.3, 8 x 12 x 1k 11.2 12.2. Pages of 16:
# 1 x 2k 11.2 8.7, 8 x 2k 25.4 24.2, 16 x 2k 45.9 40.8, 2 x 4k 15.1 15.3. 12 x 3000, whose splits one wave does not hold
# in twos: 45.2, 46.6 in twos, 43.3 in ones.
MANY = 2
# Programs of a launch that say, each of them, that the launch behind may come onto the card: that saves 2 us, and takes
# 0.56 ns a program, one after the other. Packed, the merge alone and all three launches, said and not (H100): one token
# of 64 x 2k, 4096 programs 6.3 4.6, 186.5 189.1 us; 16 of 8 x 8k, 4096 6.5 5.5, 102.7 104.3; 4 of 64 x 2k, 16384 21.3
# 11.9, 208.8 201.5; 4 of 64 x 4k 21.4 12.3, 390.4 382.4.
TELLING = 4096
# Columns of a merging program. Where each split has a state, 16 and 32: 1 x 8k 13.1 and 13.3 us, 1 x 32k 36.0, 36.2.
# Where a chain has one, 32, 64, 128: 8 x 8k 66.7 67.3 67.8, 64 x 8k 502 500 503, four tokens 68.7 68.3 68.5, sixteen
# 81.7 76.8 75.7, pages of 16, 8 x 8k 71.4 72.0 71.7. Registers, 64, 96, 128, 255: level.
# Pairs of chains where they fill the GPU too: 64 x 8k 498 and 488, 16 x 32k 490 and 486, 64 x 2k 131.4 and 128.9, 32 x
# 8k 249.0 and 248.2; merged by 32 columns 491, 485, 131.5, 249.5.
# A chain as one loop and as one of a loop a split: 8 x 8k 67.8 68.5, 64 x 8k 503 504, 1 x 32k 36.0 37.0, four tokens
# 68.5 69.3, pages 71.7 74.5; sixteen tokens, on wgmma, 87.0 75.7.
# What `attention` gives to these kernels: (rows a key/value head up to which, keys from which). Microseconds on an
# H100, those of the Hopper kernel in brackets, FlashAttention-3's behind; 32 query and 8 key heads of 128, bf16:
#   1 token   1 x 16    3.7  (7.3)  6.7,  1 x 128   6.3  (7.7)  6.7,  1 x 384  6.8 (10.0) 10.5,  1 x 1k  7.3 (15.7) 10.3
#             8 x 128   6.9  (8.7)  8.1,  8 x 384  10.4 (11.5) 11.8,  8 x 512 11.8 (13.1) 12.4,  8 x 1k 16.9 (17.8) 18.5
#            64 x 64   10.1 (15.3) 19.4, 64 x 256  26.7 (31.3) 32.8, 64 x 512 48.2 (52.0) 52.8, 64 x 1k 95.7 (95.3) 98.5
#   4 tokens  1 x 64    4.2  (7.2)  7.3,  1 x 256   7.3  (8.9)  8.8,  1 x 512  8.8 (11.3) 11.3,  1 x 1k  9.2 (16.0) 10.6
#             8 x 128   5.9  (8.8)  8.1,  8 x 256   8.1 (10.2) 10.3,  8 x 512 13.6 (12.8) 13.4,  8 x 1k 19.8 (18.9) 19.5
#            64 x 128  19.0 (20.4) 21.4, 64 x 256  29.3 (32.7) 31.9, 64 x 512 50.0 (53.5) 53.7, 64 x 1k 95.5 (97.8) 97.7
#   16 tokens 1 x 256  10.0  (9.2)  8.9,  1 x 1k   11.6 (16.0) 11.0,  1 x 2k  12.2 (18.5) 12.2,  8 x 2k 34.7 (37.7) 34.0
#             8 x 256  11.1 (10.9) 11.0,  8 x 1k   24.6 (19.4) 22.1,  8 x 4k  56.1 (62.6) 55.8, 32 x 2k  116  (127) 99.4
#            16 x 1k   35.6 (30.8) 31.2, 16 x 4k    109  (115) 96.6, 64 x 512 60.1 (58.1) 57.4, 64 x 1k  105  (103)  103
# 12 heads of 64 alone, 8 x 128 and 64 x 256: 1 token 5.0 (6.9) 8.9, 22.0 (23.2) 44.1, 8 tokens 4.7 (7.0) 8.0, 22.8
# (23.9) 32.5. 8 heads of 256, 1 token: 8.0 (11.0) 9.3, 49.7 (52.0) 57.1. float32, beside the portable kernel: 1 token
# 8 x 128 27.4 (37.6), 64 x 256 259 (472), 4 tokens 8 x 256 52.4 (64.5), 8 x 1k 96.3 (220). With a mask, beside SDPA:
# padding, one token of 8 x 128 9.1 (9.6) 10.8, 64 x 512 49.4 (66.4) 57.5; a row a query, 4 tokens of 8 x 256 11.9
# (13.1) 25.2, 16 tokens of 1 x 2k 19.9 (43.5) 53.4, 8 x 2k 64.9 (52.1) 102, 8 x 8k 148 (174) 362. Up to 320 keys these
# are from before FEW_KEYS; since then 16 rows, 8 x 64 4.6 (8.2) 8.2, 512 x 64 73.4 (87.1) 109; of 8 heads of 64 alone,
# 16 tokens of 1 x 16 3.5 (6.1) 7.1, 64 x 64 7.0 (10.3) 16.9, 512 x 128 53.7 (56.8) 93.2. Thousands of short sequences
# of those pay: 4, 8 and 16 tokens of 2048 x 64 122 (105), 125 (108), 133 (117), of 1024 x 16 58, 59, 60 (52).
# Of 17 to 64 rows in 16 bits the Hopper kernel takes most (`tuning_parts.ahead_of_decoding`); in brackets it still had
# two consumers for them.
FEW_ROWS = ((16, 16), (64, 2048))


def decode_tile(problem: AttentionProblem, target: Target, vectorised: bool) -> DecodeConfig:
    """The tile of the decoding kernels.

    A function of head dims, dtype, rows a key/value head, layout and GPU, and of whether these rows see few keys.
    `vectorised`: rows of the cache can be read 16 bytes at a time.
    """
    rows = padded(problem.group * problem.len_q)
    if target.interpreting:
        # So that small tests cross borders; of several tokens a tile has two pages of 16.
        small = DecodeConfig(min(rows, 32), 32, Splits(32, 2, 64), 4, 1, 4, chain=2, flat=False, columns=(16, 32, 16))
        if problem.len_q > 1:
            return small
        one = replace(small, block_n=16, splits=Splits(32, 4, 32), lanes=8)
        return replace(one, paired=True, owns_pairs=True, several=2, flat=True)
    dim, dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    key_bytes = (dim + dim_v) * problem.dtype.itemsize
    block_n = max(32, min(128, 1 << (DECODE_TILE_BYTES // key_bytes).bit_length() - 1))
    if problem.dtype == torch.float32:  # no matrix unit: rows that only fill a tile would cost as much as real ones
        return DecodeConfig(16, block_n, SPLITS, 8, _stages(target, 2, block_n * key_bytes))
    if not vectorised:  # as for `unaligned_tile`: below wgmma's 64 rows, unpipelined
        return DecodeConfig(min(rows, 32), 32, SPLITS, 2 if dim_v <= 128 else 4, 1)
    wide = max(dim, dim_v) > 128
    if rows == 16 and sees_few_keys(problem) and _stages(target, 3, FEW_KEYS_TILE * key_bytes) == 3:
        return DecodeConfig(rows, FEW_KEYS_TILE, FEW_KEYS_SPLITS, 8 if wide else 4, 3)
    # Of heads of 256 three programs fit with three stages (H100):
    # 64 x 512, 8 x 8k, 64 x 2k, 4 tokens 110 to 96 us, 185 to 183, 375 to 372, one 95 to 93, 183 to 180, 361 to 357.
    stages = _stages(target, 3 if wide and rows == 16 else 4, block_n * key_bytes)
    if rows > 32 or (rows == 32 and target.hopper):
        # wgmma's 64 rows for 32 too: 64 query and 8 key heads, four tokens, 8 x 8k 90 and 72 us. 64 x 256 floats of one
        # state are 128 registers in each of 4 warps.
        warps = 8 if dim_v > 128 else 4
        tile = DecodeConfig(64, block_n, SPLITS, warps, stages, programs=8 // warps)
        return replace(tile, flat=False, columns=(128, 128, 128), merge_registers=128)
    # Four programs a multiprocessor, where that spills nothing. 8 x 8k, four tokens: 3344 without, 3220 with.
    if not wide and problem.len_q == 1 and not problem.features.softcap:
        one = DecodeConfig(
            rows, block_n, ONE_TOKEN_SPLITS, 4, stages, paired=True, programs=4, columns=(16, 32, 64), several=2
        )
        if rows > 16:
            return one
        # Two warps: 8 x 8k and 64 x 8k 68.5 and 492 us; four 70.0 and 503; 1 x 8k 14.3 and 14.2.
        return replace(one, num_warps=2, num_stages=_stages(target, 3, block_n * key_bytes), owns_pairs=True)
    # Registers of which three programs fit. us on an H200, 70 ms warm and 40 timed, 32 / 8 heads of 128 x 4 tokens, by
    # the compiler's choice and by 168, in pages of 16: unequal lengths (benchmarks/decode_mixed.py) 16 x 4k 56.8 46.7,
    # 50.0 47.6, 64 x 2k 95.1 93.7, 99.0 95.0, 8 x 8k 50.0 50.0, 59.2 53.2; full 8 x 8k 67.8 67.7, 70.9 69.3, 1 x 4k
    # 10.6 10.4, 12.8 11.4, 64 x 4k 269 266, 288 282; heads of 64, unequal 16 x 4k 27.8 27.3, 38.6 31.2. If launches
    # count on three, 16 x 4k 52.8, 55.4; by 128, of which four fit, 56.8, 54.6; two warps 47.8, 51.9, but 64 x 2k 98.1,
    # 107; three stages 45.3, 48.5, but 64 x 4k 278, 286.
    # Not on older GPUs, for which 56 bytes go to the stack, nor with a mask, with which it was not measured.
    capped = rows == 16 and not wide and not problem.features.mask and target.is_cuda(90)
    return DecodeConfig(rows, block_n, SPLITS, 4, stages, registers=168 if capped else 0)


def sees_few_keys(problem: AttentionProblem) -> bool:
    """Whether no sequence's rows see more than FEW_KEYS between them, had a cache room for any: bits would tell."""
    if problem.features.kv_lens or problem.features.varlen:
        problem = replace(problem, len_k=FAR)
    return problem.keys_seen <= FEW_KEYS


def enough(rows: int, splits: int, own: int, each: int, target: Target, full: float = FULL) -> bool:
    """Whether programs that own so many of the splits of each of the rows are enough for a GPU, `each` on a
    multiprocessor at once: one wave of programs that are alike, or waves that leave few places empty.
    """
    of_a_row, places = cdiv(splits, own), target.multiprocessors * each
    waves = cdiv(rows * of_a_row, places)
    alike = of_a_row == 1 or splits >= ALIKE * of_a_row * own
    return rows * of_a_row >= (ONE_WAVE if waves == 1 and alike else full) * waves * places


def _stages(target: Target, most: int, tile_bytes: int) -> int:
    """Up to `most` stages of K/V tiles, as fit on chip beside 32 KiB for Q, weights and the exchange between warps."""
    limit = shared_bytes(target)
    return max(1, min(most, (limit - (32 << 10)) // tile_bytes))
