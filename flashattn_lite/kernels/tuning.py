"""Tile shapes of the attention kernels, by GPU, head dim, dtype and causal, each with the measurement that chose it.

The Hopper kernel's are in `tuning_hopper.py`, those of softmax in `tuning_softmax.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashattn_lite.problem import AttentionProblem
from flashattn_lite.target import Target, takes_tf32


@dataclass(frozen=True)
class TileConfig:
    """One row of a table: BLOCK_M query rows and BLOCK_N keys a tile, warps a program, stages of the K/V pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def power_of_two(count: int) -> int:
    """The least power of two that holds so many; 1 for none."""
    return 1 << max(count - 1, 0).bit_length()


def padded(head_dim: int) -> int:
    """The power of two that holds a head dim; 16 at least, the shortest reduction a matrix instruction takes."""
    return max(16, power_of_two(head_dim))


# 16-bit dtypes on sm_90: (largest padded head dim, tile below LONG keys, tile from LONG keys up).
# Measured on an H200 (driver 580.159.04, torch 2.11.0, triton 3.6.0, bf16, 16k tokens, hidden 2048, sustained), with a
# form of the kernel that took masked tiles last: ratio to cuDNN in that run, full at 512 / 1k / 2k / 4k / 16k.
#   64:  128x64 w4 s3  0.89 1.01 1.07 1.12 1.16   (64x64 w4 s3  0.86 0.95 0.99 1.01 1.06)
#   128: 64x64 w4 s3   0.78 0.83 0.84 0.84 0.85   (128x128 w8 s3  0.63 0.75 0.84 0.88 0.93)
#   256: 128x64 w8 s2  0.72 0.77 0.79 0.86 0.87   (64x32 w4 s2  0.68 0.70 0.71 0.73 0.73)
# and causal at 128: 64x64 w4 s3 0.71 0.85 0.91 0.93 0.93, 128x128 w8 s3 0.53 0.67 0.79 0.86 0.98.
HOPPER = (
    (64, TileConfig(128, 64, 4, 3), TileConfig(128, 64, 4, 3)),
    (128, TileConfig(64, 64, 4, 3), TileConfig(128, 128, 8, 3)),
    (256, TileConfig(128, 64, 8, 2), TileConfig(128, 64, 8, 2)),
)
# float32 in parts on sm_90, us, short runs on an H200: 64 x 32 of four warps, 128 x 32 of eight, 128 x 64 of eight,
# 64 x 64 of four (parts rounded by Triton, "bf16x6", 128 x 32); torch's SDPA, and 64 x 32 by FMA instructions.
#   64:  2 x 8 x 1k   85   79   67   69 (91);  148,  407     causal 4k  751  785  623  588 (904);  1322, 3762
#   128: 2 x 8 x 1k  134  131  112  168 (153); 197, 1004     1 x 8 x 4k 1021 1046 837 1240 (1216); 1544, 7048
#   256: 1 x 8 x 2k 1003, the others do not fit; 868, 10973. Tiles of 16 keys, or of eight warps, 1531 and 1651.
FLOAT32, FLOAT32_LARGE = TileConfig(64, 32, 4, 2), TileConfig(128, 64, 8, 2)
# The same below wgmma's 64 rows, where rows are not 16-byte aligned. By what it spills, offline: two warps spill two to
# five times as much, at head dim 255 10 KB a thread.
OFF_WGMMA_FLOAT32 = TileConfig(32, 32, 4, 1)
# Everywhere else: chosen to fit the shared memory (KiB a program, by compute capability), not measured.
SHARED_KIB: dict[int | str, int] = {
    80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99
}  # fmt: skip
SHARED_KIB_LEAST = 64  # AMD, and what is not in the table
SHARED_RESERVED = 1 << 10  # bytes that the system keeps of each program's
LONG = {False: 4096, True: 16384}  # keys from which the larger tile wins, by causal


def shared_bytes(target: Target) -> int:
    """Shared memory that one program may have."""
    return SHARED_KIB.get(target.arch, SHARED_KIB_LEAST) << 10


def products(problem: AttentionProblem, target: Target) -> str:
    """How the portable attention kernel multiplies; 16-bit operands know one way.

    float32 means float32, unless the user lets torch's own matrix products use TF32: in parts where that was measured,
    and on sm_80 to sm_89 up to head dim 128, as far as their shared memory holds the parts.
    """
    if problem.dtype != torch.float32:
        return "ieee"
    if takes_tf32():
        return "tf32"
    least = 80 if max(problem.head_dim, problem.head_dim_v) <= 128 else 90
    return "parts" if target.is_cuda(least) and not target.is_cuda(100) else "ieee"


def columns(problem: AttentionProblem, target: Target, own_rows: int = 64) -> tuple[int, int]:
    """Of tiles of q and k, and of v: powers of two that hold head dims, made alike in swizzle where wgmma reads them.

    A tile of fewer than 64 columns of 16 bits is swizzled by as many bytes as a row of it has, one of more by 128.
    Where tiles of two swizzles lie at one place in shared memory one after the other, as do parts of float32 and what
    the redo of rows multiplies, ptxas 12.8 (Triton 3.6) loses descriptors of one of them (docs/design.md).
    """
    dim, dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    has_wgmma = target.kind == "cuda" and target.arch == 90 and own_rows >= 64 and not target.interpreting
    least = min(64, max(dim, dim_v)) if has_wgmma else 0
    return max(dim, least), max(dim_v, least)


def attention_tile(problem: AttentionProblem, target: Target, mask_bytes: int = 0) -> TileConfig:
    """The tile of the portable attention kernel.

    A function of head dims, dtype, features and GPU, and of the number of keys in one place (LONG; never for packed
    sequences, whose neighbours would then decide): never of the batch or the other rows. `mask_bytes`: of an element of
    a mask with a row for each query, whose tiles need room too; 0: there is none.
    """
    dim = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if target.interpreting:
        return TileConfig(32, 32, 4, 1)  # small, so that small tests cross tile borders
    if problem.dtype == torch.float32:
        if products(problem, target) == "parts":
            if target.arch == 90 and dim <= 128 and mask_bytes < 4:
                return FLOAT32_LARGE
            # Compiled by Triton 3.6 to 3.9, head dim 128: up to 116 KiB in two stages, 68 in one.
            return replace(FLOAT32, num_stages=1) if dim > 64 and shared_bytes(target) < 120 << 10 else FLOAT32
        return _fitting(problem, target, FLOAT32, mask_bytes)
    config = TileConfig(128, 64, 4 if dim <= 64 else 8, 3)
    if target.kind == "cuda" and target.arch == 90:
        features = problem.features
        is_long = not features.varlen and problem.len_k >= LONG[features.right]
        config = next(large if is_long else small for limit, small, large in HOPPER if dim <= limit)
        if not mask_bytes:
            return config
    return _fitting(problem, target, config, mask_bytes)


def unaligned_tile(problem: AttentionProblem, target: Target, mask_bytes: int = 0) -> TileConfig:
    """The tile for K or V whose rows are not 16-byte aligned: on sm_90 one below wgmma's 64 rows, unpipelined."""
    if target.kind == "cuda" and target.arch == 90 and not target.interpreting:
        return TileConfig(32, 64, 2, 1) if problem.dtype != torch.float32 else OFF_WGMMA_FLOAT32
    return attention_tile(problem, target, mask_bytes)


# The backward on sm_90, 16-bit dtypes: (largest padded head dim, tile of programs that make dQ, dK or dK and dV, dV).
# Measured on an H200 (driver 580.159.04, torch 2.11.0, triton 3.6.0, bf16, 16k tokens, hidden 2048), short runs, ms at
# 4k keys (128: 2k), full and causal; own x streamed rows, warps, stages.
#   64, dQ: 64x64 w4 s2 1.42 0.80; 128x64 w8 s3 1.42 1.06; 128x32 w4 s3 1.72 0.94; 128x128 w8 s2 2.01 1.10
#   64, both: 64x64 w4 s2 2.55 1.37; 128x32 w4 s3 2.32 1.43; 128x64 w8 s2 3.15 1.74; 64x128 w8 s2 5.58 3.27
#   128, dQ: 128x64 w8 s3 0.72 0.52; 64x64 w4 s2 0.77 0.48; 128x128 w8 s2 0.85 0.50; 64x32 w4 s3 0.89 0.54
#   128, both: 64x64 w4 s2 1.08 0.62; 64x32 w4 s3 1.13 0.67; 128x64 w8 s3 1.14 0.81; 128x32 w8 s3 1.35 0.80
#   256, dQ: 128x32 w8 s2 1.96 1.04; 64x32 w4 s2 2.30 1.27; 64x64 w8 s2 2.84 1.55
#   256, both: 64x64 w8 s2 4.46 2.16; 64x32 w8 s3 4.60 2.55; 64x32 w4 s2 12.2 6.23; 64x16 w8 s2 7.94 4.04
# and on an H100:
#   256, dK: 128x32 w8 s2 2.01 1.06; 64x32 w4 s2 2.32 1.24; 64x64 w8 s2 3.06 1.68
#   256, dV: 128x64 w8 s2 1.03 0.60; 128x32 w8 s3 1.10 0.64; 64x32 w4 s2 1.22 0.69; 64x64 w8 s2 1.92 1.08
# Streamed rows by pointers, not by TMA: 128, dQ 0.82, both 1.18; 64, dQ 2.08, both 3.16; 256 3.36 and 4.61.
# Up to 128 dV alone has the tile of both, for the same bits.
BACKWARD = (
    (64, TileConfig(64, 64, 4, 2), TileConfig(128, 32, 4, 3), TileConfig(128, 32, 4, 3)),
    (128, TileConfig(128, 64, 8, 3), TileConfig(64, 64, 4, 2), TileConfig(64, 64, 4, 2)),
    (256, TileConfig(128, 32, 8, 2), TileConfig(128, 32, 8, 2), TileConfig(128, 64, 8, 2)),
)
# The same with a mask, as far as shared memory holds its tiles. H100, ms, 16 x 12 x 1024 of 64 and 8 x 16 x 2048 of
# 128, a bias in bf16 with a row a query, eight keys a load:
#   64, dQ: 64x32 w4 s3 0.27, s2 0.29; 128x32 w4 s3 0.33; 64x64 w4 s2 0.34; 128x64 w8 s3 0.36, s2 0.44
#   64, both: 64x64 w4 s3 0.55, s2 0.58; 64x32 w4 s3 0.58; 128x32 w4 s3 0.70; 128x64 w8 s2 0.74
#   128, dQ: 128x64 w8 s3 0.97, s2 1.28 (three have no room with a float32 mask); 64x64 w4 s2 1.02; 64x32 w4 s3 1.04
#   128, both: 64x32 w4 s3 1.96, s2 2.19; 64x64 w4 s2 2.30; 128x64 w8 s2 2.44; 128x32 w8 s2 2.52
#   gradient of the bias: 64x64 w4 s2 0.63 2.35; 128x64 w8 s2 0.69 2.27; 64x128 w8 s2 0.69 2.55; 64x32 w4 s3 0.61 4.19
BACKWARD_MASKED = (
    (64, TileConfig(64, 32, 4, 3), TileConfig(64, 64, 4, 3), TileConfig(64, 64, 4, 3)),
    (128, TileConfig(64, 64, 4, 2), TileConfig(64, 32, 4, 3), TileConfig(64, 32, 4, 3)),
    (256, *BACKWARD[2][1:]),
)
# float32 in parts, H100, ms, 4 x 32 x 4096 of 64 and 4 x 16 x 4096 of 128: dQ, dK and dV.
#   64x32 w4 s2 12.9 17.4, 17.6 26.7; 64x32 w4 s1 13.9 17.4, 19.8 29.3; 64x32 w8 s2 28.9 -, s1 34.2 42.6 (128)
#   128x32 w8 s1 14.4 18.0 (64); 64x16 w4 s1 - 27.1, 29.7 46.7; dK and dV apart 22.9, 29.4
BACKWARD_FLOAT32 = TileConfig(64, 32, 4, 2)
BACKWARD_ROWS = TileConfig(32, 32, 4, 1)  # of what it writes of each query row first; not tuned


def key_launches(problem: AttentionProblem, dk: bool, dv: bool) -> list[tuple[bool, bool]]:
    """The launches that own keys, and which of dK and dV each makes: both, where registers hold both.

    What is not needed does not decide on that, so that it does not change a bit of the other.
    """
    if max(padded(problem.head_dim), padded(problem.head_dim_v)) <= 128:
        return [(dk, dv)] if dk or dv else []
    return [makes for makes, needed in (((True, False), dk), ((False, True), dv)) if needed]


def backward_tile(
    problem: AttentionProblem,
    target: Target,
    keys: bool,
    makes: tuple[bool, bool],
    piped: bool,
    mask_bytes: int = 0,
) -> TileConfig:
    """The tile of the backward kernel that owns keys, or queries: BLOCK_M own rows, BLOCK_N streamed ones.

    A function of head dims, dtype and GPU alone, of what it makes where that is not decided by what is needed, and of
    `mask_bytes`, of an element of a mask. `piped`: what is streamed can be read 16 bytes at a time.
    """
    if target.interpreting:
        return TileConfig(32, 32, 4, 1)
    if not piped:  # as for `unaligned_tile`
        return TileConfig(32, 32, 2, 1) if problem.dtype != torch.float32 else OFF_WGMMA_FLOAT32
    if problem.dtype == torch.float32:
        config = BACKWARD_FLOAT32
    elif target.kind == "cuda" and target.arch == 90:
        dim = max(padded(problem.head_dim), padded(problem.head_dim_v))
        tiles = next(tiles for limit, *tiles in (BACKWARD_MASKED if mask_bytes else BACKWARD) if dim <= limit)
        config = tiles[0] if not keys else tiles[1] if makes[0] else tiles[2]
        if not mask_bytes:
            return config
    else:
        config = TileConfig(64, 64, 4, 2)
    row_bytes = _backward_row_bytes(problem, target)
    return _shrunk(config, _backward_limit(target), row_bytes, row_bytes, mask_bytes)


def _backward_row_bytes(problem: AttentionProblem, target: Target) -> int:
    """Of a row of both members of a pair, as products take them."""
    itemsize = 6 if products(problem, target) == "parts" else problem.dtype.itemsize
    return sum(columns(problem, target)) * itemsize


def _backward_limit(target: Target) -> int:
    """Bytes of shared memory for the tiles of a program."""
    limit = shared_bytes(target) - (4 << 10)  # exchanges between warps, barriers
    return limit * 2 // 3 if target.is_cuda(100) else limit  # whose compiler takes a third more than the tiles


def mask_gradient_tile(problem: AttentionProblem, target: Target, piped: bool, mask_bytes: int) -> TileConfig:
    """The tile of the kernel that owns elements of a mask's gradient; `piped` as `backward_tile` has it."""
    if target.interpreting:
        return TileConfig(32, 32, 4, 1)
    if not piped:
        return TileConfig(32, 32, 2, 1) if problem.dtype != torch.float32 else replace(OFF_WGMMA_FLOAT32, block_n=16)
    if problem.dtype == torch.float32:  # by what it spills, offline: head dim 128 in tiles of 32 keys 1.2 KB a thread
        wide = max(padded(problem.head_dim), padded(problem.head_dim_v)) > 64
        return replace(BACKWARD_FLOAT32, block_n=16 if wide else 32, num_stages=1)
    config = TileConfig(64, 64, 4, 2)
    row_bytes = _backward_row_bytes(problem, target)
    return _shrunk(config, _backward_limit(target), config.num_stages * row_bytes, row_bytes, mask_bytes)


def _fitting(problem: AttentionProblem, target: Target, config: TileConfig, mask_bytes: int) -> TileConfig:
    """The config made smaller until Q, the K/V stages and a mask's tiles fit on chip."""
    q_bytes, v_bytes = (count * problem.dtype.itemsize for count in columns(problem, target))
    kv_bytes = q_bytes + v_bytes
    limit = shared_bytes(target) - (2 << 10 if mask_bytes else 0)  # barriers; what fits without a mask was compiled
    return _shrunk(config, limit, q_bytes, kv_bytes, mask_bytes)


def _shrunk(config: TileConfig, limit: int, own_bytes: int, streamed_bytes: int, mask_bytes: int) -> TileConfig:
    """The config with fewer stages, but two, then fewer streamed rows, then fewer own rows, until `limit` holds them.

    Bytes of an own row, of a streamed row, of a mask's element; of its tiles a stage less is under way than of rows.
    One stage comes late: what is not pipelined lies at one place, where ptxas can lose wgmma's descriptors.
    """

    def taken(c: TileConfig) -> int:
        masks = max(c.num_stages - 1, 1) * c.block_m * c.block_n * mask_bytes
        return c.block_m * own_bytes + c.num_stages * c.block_n * streamed_bytes + masks

    while taken(config) > limit:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > 32:
            config = replace(config, block_n=config.block_n // 2)
        elif config.block_m > 64:
            config = replace(config, block_m=config.block_m // 2, num_warps=4)
        elif config.num_stages > 1:
            config = replace(config, num_stages=1)
        elif config.block_m > 32:
            config = replace(config, block_m=config.block_m // 2, num_warps=4)
        elif config.block_n > 16:
            config = replace(config, block_n=16)
        else:
            return replace(config, block_m=16)
    return config


FEW = 16  # splits of a sequence that a merge may look for: of more, it looks for as many as there can be


@dataclass(frozen=True)
class DecodeConfig:
    """The decoding kernels: rows and keys of a tile, keys of a split (see `splits_of`), warps, pipeline stages."""

    block_m: int
    block_n: int
    split: int  # keys, at least
    num_warps: int
    num_stages: int
    long: int = 0  # keys that a split has at least where there are more than FEW; 0: `split`
    few: int = FEW
    lanes: int = 32  # splits of a sequence, at most
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
# Keys of a split, at least, and where a sequence has more than FEW, for which 8 key heads are a program each. Longer
# splits leave most of a GPU idle, shorter ones leave too many states. Microseconds on an H100, 32 query and 8 key heads
# of 128: 512 keys whatever the length; of 256 and of 128 at most 16; of 128 at most 32; FlashAttention-3:
#    4 tokens  1 x 1k  12.8  9.2  7.9  8.1; 10.5   16 tokens  1 x 1k   16.3  11.7  10.2  11.3; 11.0
#              1 x 2k  13.3  9.8  9.2 10.1; 11.7              1 x 2k   16.9  12.2  11.5  13.2; 12.2
#              1 x 4k  14.0 12.1 12.1 14.6; 13.8              1 x 4k   17.6  14.2  14.2  18.0; 14.4
#              1 x 8k  18.6 17.7 17.7 20.3; 20.2              1 x 8k   21.5  19.9  19.9  24.1; 21.3
#             1 x 32k  52.1 49.8 49.9 52.2; 54.6             1 x 32k   57.5  53.4  53.8  57.9; 56.3
#              4 x 2k  19.6 19.3 21.6 22.1; 19.0              4 x 2k   22.8  22.0  29.1  30.2; 20.8
#              8 x 2k  31.4 32.1 29.5 29.7; 30.8              8 x 2k   40.1  43.1  35.4  36.1; 34.0
#              8 x 4k  54.5 50.7 51.2 53.0; 52.6              8 x 4k   69.2  56.1  56.4  65.3; 55.8
#             16 x 4k  96.0 96.6 96.9 99.5; 94.9             16 x 4k  103.3 109.1 108.9 125.4; 96.6
#             32 x 2k  98.8 99.7  100  102; 95.5             32 x 2k  110.2 115.0 128.5 130.1; 98.2
# Heads of 256 before and since, one token, 4 and 16: 1 x 2k 17.5 12.0, 17.6 12.8, 31.7 20.7; 8 x 4k 96.5 94.8, 101.7
# 98.4, but 113 126. Pages of 64, 1 x 2k, 4 tokens and 16: 18.6 12.7, 21.3 14.4. Merged by fewer columns: level to 10%
# slower.
SPLIT_KEYS = (256, 512)
ONE_TOKEN_KEYS = 128  # where `decode_tile` takes four programs a multiprocessor: see MANY
# Where programs that own a chain of splits fill the GPU, they are faster than several times as many: fewer states,
# longer reads. Microseconds, one split and one chain a program: 8 x 8k 70.9 and 68.5, four tokens 76.4 and 71.1,
# 64 x 8k 516 and 492 (chains of eight 491); 16 tokens 83.7 and 78.7; pages of 16, 8 x 8k 77.9 and 75.0, 64 x 8k 535
# and 514. Chains that fill an eighth of the places, 1 x 8k: 14 and 26.
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
        small = DecodeConfig(min(rows, 32), 16, 32, 4, 1, 64, 2, 4, chain=2, flat=False, columns=(16, 32, 16))
        one = replace(small, long=32, few=4, lanes=8, paired=True, owns_pairs=True, several=2, flat=True)
        return one if problem.len_q == 1 else small
    dim, dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    split, long = SPLIT_KEYS
    key_bytes = (dim + dim_v) * problem.dtype.itemsize
    block_n = max(32, min(128, 1 << (DECODE_TILE_BYTES // key_bytes).bit_length() - 1))
    if problem.dtype == torch.float32:  # no matrix unit: rows that only fill a tile would cost as much as real ones
        return DecodeConfig(16, block_n, split, 8, _stages(target, 2, block_n * key_bytes), long)
    if not vectorised:  # as for `unaligned_tile`: below wgmma's 64 rows, unpipelined
        return DecodeConfig(min(rows, 32), 32, split, 2 if dim_v <= 128 else 4, 1, long)
    # A table's entries take two stages before their keys.
    stages = _stages(target, 4 + (2 if paged else 0), block_n * key_bytes)
    if rows > 32 or (rows == 32 and target.kind == "cuda" and target.arch == 90):
        # wgmma's 64 rows for 32 too: 64 query and 8 key heads, four tokens, 8 x 8k 90 and 72 us. 64 x 256 floats of one
        # state are 128 registers in each of 4 warps.
        warps = 8 if dim_v > 128 else 4
        tile = DecodeConfig(64, block_n, split, warps, stages, long, programs=8 // warps)
        return replace(tile, flat=False, columns=(128, 128, 128), merge_registers=128)
    # Four programs a multiprocessor, where that spills nothing. 8 x 8k, four tokens: 3344 without, 3220 with. Pages of
    # 16: 75.0 us with, 95.3 without.
    if max(dim, dim_v) <= 128 and problem.len_q == 1 and not problem.features.softcap:
        one = DecodeConfig(
            rows, block_n, ONE_TOKEN_KEYS, 4, stages, paired=True, programs=4, columns=(16, 32, 64), several=2
        )
        if paged:
            return replace(one, registers=128)
        # Two warps: 8 x 8k and 64 x 8k 68.5 and 492 us; four 70.0 and 503; 1 x 8k 14.3 and 14.2.
        return replace(one, num_warps=2, num_stages=_stages(target, 3, block_n * key_bytes), owns_pairs=True)
    return DecodeConfig(rows, block_n, split, 4, stages, long)


def fills(programs: int, each: int, target: Target) -> bool:
    """Whether so many programs of a launch, `each` of them on a multiprocessor at once, leave few places empty."""
    places = target.multiprocessors * each
    return programs >= FULL * -(-programs // places) * places


def _stages(target: Target, most: int, tile_bytes: int) -> int:
    """Up to `most` stages of K/V tiles, as fit on chip beside 32 KiB for Q, weights and the exchange between warps."""
    limit = shared_bytes(target)
    return max(1, min(most, (limit - (32 << 10)) // tile_bytes))
