"""Tile shapes of the attention kernels, by GPU, head dim, dtype and causal, each with the measurement that chose it.

The Hopper kernel's are in `tuning_hopper.py` and `tuning_parts.py`, those of decoding and of softmax in
`tuning_decode.py` and `tuning_softmax.py`.
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


@dataclass(frozen=True)
class HopperBackwardConfig:
    """BLOCK_N streamed rows a tile of backward_hopper.py, stages of them; see its HopperBackwardTile."""

    block_n: int
    num_stages: int
    held: bool = False


def cdiv(count: int, size: int) -> int:
    """How many of that size hold so many. Triton's own takes 2 us, in which it looks whether a kernel calls it."""
    return -(-count // size)


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
    has_wgmma = target.hopper and own_rows >= 64
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
            if target.hopper and dim <= 128 and mask_bytes < 4:
                return FLOAT32_LARGE
            # Compiled by Triton 3.6 to 3.9, head dim 128: up to 116 KiB in two stages, 68 in one.
            return replace(FLOAT32, num_stages=1) if dim > 64 and shared_bytes(target) < 120 << 10 else FLOAT32
        return _fitting(problem, target, FLOAT32, mask_bytes)
    config = TileConfig(128, 64, 4 if dim <= 64 else 8, 3)
    if target.hopper:
        features = problem.features
        is_long = not features.varlen and problem.len_k >= LONG[features.right]
        config = next(large if is_long else small for limit, small, large in HOPPER if dim <= limit)
        if not mask_bytes:
            return config
    return _fitting(problem, target, config, mask_bytes)


def unaligned_tile(problem: AttentionProblem, target: Target, mask_bytes: int = 0) -> TileConfig:
    """The tile for K or V whose rows are not 16-byte aligned: on sm_90 one below wgmma's 64 rows, unpipelined."""
    if target.hopper:
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
# float32, whose parts lie in memory, by padded head dim. H200, ms, 4 x 32 x 4096 of 64 and 4 x 16 x 4096 of 128, full:
# dQ, dK and dV, each with 0.45 for the parts and what comes first of each row.
#   64: 128x64 w8 s2 8.8 11.8; 64x32 w4 s2 10.2 13.2; 128x32 w8 s2 11.2 14.1; 64x64 w4 s2 11.5 14.9
#   128: 64x32 w4 s2 13.5 22.0; 64x64 w4 s1 17.9 25.3; 64x16 w4 s3 17.9 35.6
# Parts made by each program of what it streams: 64, 64x32 w4 s2 13.2 17.6; 128, 17.7 27.6.
BACKWARD_FLOAT32 = {64: TileConfig(128, 64, 8, 2), 128: TileConfig(64, 32, 4, 2)}
# The gradient of a mask, 2 x 32 x 2048 of 64 and 2 x 16 x 2048 of 128, beside other work on the same card:
#   64: 128x64 w8 s1 3.3; 64x32 w4 s2 and s1 4.1; 64x64 w4 s1 4.4. 128: 64x32 w4 s1 5.5; 64x16 w4 s1 7.9
MASK_FLOAT32 = {64: TileConfig(128, 64, 8, 1), 128: TileConfig(64, 32, 4, 1)}
# What backward_hopper.py takes of it, by (programs own keys, largest padded head dim). H200, Triton 3.6, bf16, 16k
# tokens, in turn with the tiles above, ms at 512, 2k and 16k keys, full and then causal:
#   64, both: held s4 0.35 1.07 7.8, 0.31 0.66 4.2; above 0.40 1.34 9.8, 0.35 0.89 5.7
#   128, dQ: s4 0.215 0.58 4.14, 0.189 0.40 2.32; held s3 0.228 0.62 4.10, 0.198 0.40 2.25; above 0.26 0.70 5.15,
#     0.198 0.46 2.49
#   128, both (dS c in its own step, which spills less): s3 0.324 0.99 7.5, 0.27 0.63 3.8; above 0.345 1.04 7.7,
#     0.249 0.62 3.6
#   64, dQ: held s6 0.247 0.77 5.5, 0.23 0.50 2.86; above 0.226 0.71 5.3, 0.162 0.40 2.7
BACKWARD_HOPPER = {(True, 64): HopperBackwardConfig(64, 4, held=True), (False, 128): HopperBackwardConfig(64, 4)}
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
        return TileConfig(32, 32, 2, 1)
    dim = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if problem.dtype == torch.float32:
        config = BACKWARD_FLOAT32[max(dim, 64)]
    elif target.hopper:
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
        return TileConfig(32, 32, 2, 1)
    if problem.dtype == torch.float32:
        return MASK_FLOAT32[max(padded(problem.head_dim), padded(problem.head_dim_v), 64)]
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
