"""Tile shapes, splits and launches of the decoding kernels, and what `attention` gives to them, as measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from flashattn_lite.kernels.tuning import padded, shared_bytes
from flashattn_lite.problem import AttentionProblem
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
# Where programs that own a chain of splits fill the GPU, they are faster than several times as many: fewer states,
# longer reads. Microseconds, one split and one chain a program: 8 x 8k 70.9 and 68.5, four tokens 76.4 and 71.1,
# 64 x 8k 516 and 492 (chains of eight 491); 16 tokens 83.7 and 78.7; pages of 16, 8 x 8k 77.9 and 75.0, 64 x 8k 535
# and 514. Chains that fill an eighth of the places, 1 x 8k: 14 and 26.
# More than `few` splits are long, and half as many programs fill a GPU. On an H100, 1 x 32k in
# chains and single splits, 16 tokens 55.3 64.5, 4 tokens 50.8 54.9; one token, 1 x 128k, 178 and 183, in pairs of
# chains 197.
FULL = 0.85  # of the places that a launch's waves have; where between an eighth and 0.97 was not measured
# One token: splits of 128 keys, a program each. Where more than MANY programs a multiprocessor would run at once, one
# has two, one after the other, and each still has a state. Microseconds before, with splits of 256, and since; 8 key
# heads of 128: 1 x 1k 8.8 6.8, 1 x 2k 9.1 7.9, 1 x 4k 10.5 8.9, 2 x 2k 10.9 9.0, 4 x 1k 11.1 9.2, 8 x 4k 39.5 37.1,
# 16 x 2k 40.1 37.3, 32 x 1k 42.6 38.4, level from 8k keys on; but 2 x 4k 12.9 13.6, 4 x 2k 13.1 13.8, 8 x 1k 13.8 14.4
# (one split a program 14.3, 14.8, 15.0). Heads of 64: 8 x 20 x 1500 22.6 20.3, 8 x 12 x 1k 11.2 12.2. Pages of 16:
# 1 x 2k 11.2 8.7, 8 x 2k 25.4 24.2, 16 x 2k 45.9 40.8, 2 x 4k 15.1 15.3. 12 x 3000, whose splits one wave does not hold
# in twos: 45.2, 46.6 in twos, 43.3 in ones.
MANY = 2
# Columns of a merging program. Where each split has a state, 16 and 32: 1 x 8k 13.1 and 13.3 us, 1 x 32k 36.0, 36.2.
# Where a chain has one, 32, 64, 128: 8 x 8k 66.7 67.3 67.8, 64 x 8k 502 500 503, four tokens 68.7 68.3 68.5, sixteen
# 81.7 76.8 75.7, pages of 16, 8 x 8k 71.4 72.0 71.7. Registers, 64, 96, 128, 255: level.
# Pairs of chains where they fill the GPU too: 64 x 8k 498 and 488, 16 x 32k 490 and 486, 64 x 2k 131.4 and 128.9, 32 x
# 8k 249.0 and 248.2; merged by 32 columns 491, 485, 131.5, 249.5. Pages, where they spill, had 520 for 515.
# A chain as one loop and as one of a loop a split: 8 x 8k 67.8 68.5, 64 x 8k 503 504, 1 x 32k 36.0 37.0, four tokens
# 68.5 69.3, pages 71.7 74.5; sixteen tokens, on wgmma, 87.0 75.7.
# What `attention` gives to these kernels: (rows a key/value head up to which, keys from which). Microseconds on an
# H100, those of the Hopper kernel in brackets, FlashAttention-3's behind; 32 query and 8 key heads of 128, bf16:
#   1 token   1 x 256   6.7 (8.9) 8.8,  1 x 512  6.9 (11.2) 10.6, 1 x 1k  7.3 (15.7) 10.3,  8 x 512 11.7 (12.8) 12.4,
#             8 x 1k   16.9 (17.8) 18.5, 64 x 512 52.8 (51.6) 52.3, 64 x 1k 96.4 (95.2) 97.8
#   4 tokens  1 x 256   8.6 (9.0) 8.8,  1 x 512  8.8 (11.3) 11.3, 1 x 1k  9.2 (16.0) 10.6,  8 x 512 13.7 (13.1) 13.5,
#             8 x 1k   19.6 (18.6) 19.1, 64 x 512 61.5 (53.7) 53.8, 64 x 1k  105 (97.7) 97.7
#   16 tokens 1 x 512  11.2 (11.4) 11.5, 1 x 1k  11.6 (16.0) 11.0, 1 x 2k 12.2 (18.5) 12.2, 8 x 1k  24.8 (19.0) 21.7,
#             8 x 2k   43.1 (37.7) 34.0, 8 x 4k  56.1 (62.6) 55.8, 16 x 4k 109 (115) 96.6, 32 x 2k  115 (121) 98.2,
#             64 x 1k   126 (103) 102
FEW_ROWS = ((8, 512), (16, 1024), (64, 2048))


def decode_tile(problem: AttentionProblem, target: Target, vectorised: bool, paged: bool) -> DecodeConfig:
    """The tile of the decoding kernels.

    A function of head dims, dtype, rows a key/value head, layout and GPU alone. `vectorised`: rows of the cache can be
    read 16 bytes at a time.
    """
    rows = padded(problem.group * problem.len_q)
    if target.interpreting:
        # So that small tests cross borders.
        small = DecodeConfig(min(rows, 32), 16, Splits(32, 2, 64), 4, 1, 4, chain=2, flat=False, columns=(16, 32, 16))
        one = replace(small, splits=Splits(32, 4, 32), lanes=8, paired=True, owns_pairs=True, several=2, flat=True)
        return one if problem.len_q == 1 else small
    dim, dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    key_bytes = (dim + dim_v) * problem.dtype.itemsize
    block_n = max(32, min(128, 1 << (DECODE_TILE_BYTES // key_bytes).bit_length() - 1))
    if problem.dtype == torch.float32:  # no matrix unit: rows that only fill a tile would cost as much as real ones
        return DecodeConfig(16, block_n, SPLITS, 8, _stages(target, 2, block_n * key_bytes))
    if not vectorised:  # as for `unaligned_tile`: below wgmma's 64 rows, unpipelined
        return DecodeConfig(min(rows, 32), 32, SPLITS, 2 if dim_v <= 128 else 4, 1)
    # A table's entries take two stages before their keys.
    stages = _stages(target, 4 + (2 if paged else 0), block_n * key_bytes)
    if rows > 32 or (rows == 32 and target.kind == "cuda" and target.arch == 90):
        # wgmma's 64 rows for 32 too: 64 query and 8 key heads, four tokens, 8 x 8k 90 and 72 us. 64 x 256 floats of one
        # state are 128 registers in each of 4 warps.
        warps = 8 if dim_v > 128 else 4
        tile = DecodeConfig(64, block_n, SPLITS, warps, stages, programs=8 // warps)
        return replace(tile, flat=False, columns=(128, 128, 128), merge_registers=128)
    # Four programs a multiprocessor, where that spills nothing. 8 x 8k, four tokens: 3344 without, 3220 with. Pages of
    # 16: 75.0 us with, 95.3 without.
    if max(dim, dim_v) <= 128 and problem.len_q == 1 and not problem.features.softcap:
        one = DecodeConfig(
            rows, block_n, ONE_TOKEN_SPLITS, 4, stages, paired=True, programs=4, columns=(16, 32, 64), several=2
        )
        if paged:
            return replace(one, registers=128)
        # Two warps: 8 x 8k and 64 x 8k 68.5 and 492 us; four 70.0 and 503; 1 x 8k 14.3 and 14.2.
        return replace(one, num_warps=2, num_stages=_stages(target, 3, block_n * key_bytes), owns_pairs=True)
    return DecodeConfig(rows, block_n, SPLITS, 4, stages)


def fills(programs: int, each: int, target: Target) -> bool:
    """Whether so many programs of a launch, `each` of them on a multiprocessor at once, leave few places empty."""
    places = target.multiprocessors * each
    return programs >= FULL * -(-programs // places) * places


def _stages(target: Target, most: int, tile_bytes: int) -> int:
    """Up to `most` stages of K/V tiles, as fit on chip beside 32 KiB for Q, weights and the exchange between warps."""
    limit = shared_bytes(target)
    return max(1, min(most, (limit - (32 << 10)) // tile_bytes))
