"""Tile shapes of the Hopper attention kernel, by head dims, features and lengths, as measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import triton

from flashattn_lite.kernels.tuning import SHARED_KIB, SHARED_RESERVED, padded, power_of_two
from flashattn_lite.problem import AttentionProblem
from flashattn_lite.target import Target


@dataclass(frozen=True)
class HopperConfig:
    """One row of the Hopper kernel's table."""

    warpgroups: int  # consumers, of 64 rows each
    block_n: int  # keys a tile
    stages: int  # of K, and of V
    pack: int = 1  # query heads in a row tile
    blocks: int = 1  # a multiprocessor
    q_slots: int = 0  # buffers of Q; 0: one a consumer
    apart: bool = False  # K is given back before V of the step before, for rings of few stages
    # What a consumer takes to its next step of its places in the rings: nothing, that in V's (v), both (kv).
    carried: str = ""
    turns: bool = False  # two consumers issue their products by turns
    q_held: bool = False  # a consumer keeps its Q in registers
    o_width: int = 128  # columns of O that leave at a time, at most
    o_slots: int = 1  # buffers for them, of a consumer, at most
    split: int = 0  # keys of a part that is a task of its own, at least; 0: a row tile takes all of its own
    folds: bool = False  # no task of its own: a block takes all parts of a row tile, and folds their states
    folds_in_room: bool = False  # the acc of those before waits in shared memory, not in registers
    mask_copied: bool = False  # tiles of a mask tensor come by TMA, each with the K of its keys


# sm_90a: (largest head dims, of Q and K and of V, as `pieces` fills them; keys from which it serves full and causal;
# tile), the first that fits. Measured on an H200 (driver 580.159.04, torch 2.11.0, triton 3.6.0, bf16, 16k tokens,
# hidden 2048): TFLOP/s causal, full at 512, 1k, 2k, 4k and 16k keys; means of three rounds in turn, each 100 ms warm
# and 50 ms timed, because a card at its power limit chooses otherwise than in a short run. * other runs: of four rounds
# (none at 512), or a single short one (**). With heads in sections that share 32 MiB of K and V.
#   64:  three, 64 keys, Q held        230 304 409 464 537, 346 408 470 498 549
#        the same, held and not *          297 398 456 535,     403 462 493 549; 297 402 450 521, 389 458 475 528
#        two by turns, 128 keys        225 314 387 446 508, 363 426 462 497 533   (Q held: 3% slower **)
#        one, 3 blocks an SM **        263 338 407 447 490, 356 391 424 467 486
#   128: two by turns, 64 keys, held   315 420 520 592 664, 428 520 581 621 676
#        the same, held and not *          417 525 596 677,     517 581 622 676; 431 519 579 645, 513 557 610 653
#        two by turns, 128 keys        283 403 503 585 677, 430 515 584 637 701   (Q held: level at 16k, else slower)
#        both again *               275 386 488 574 668, 420 508 575 624 688; 312 417 506 583 660, 436 509 564 609 657
#   256: two, 64 keys, three slots     301 420 514 578 641, 426 525 600 655 709   (a half or quarter of Q held: level)
# Again in the order below, row tiles drawn late; short runs in turn, of which 512 causal came out low for all:
#   64:  three, 64 keys, Q held        211 310 423 463 526, 371 422 485 502 543   (128 keys: registers spilled, slower)
#        two by turns, 128 keys        202 315 402 454 513, 391 451 482 502 519
#        one, 3 blocks an SM           285 355 416 446 480, 382 433 456 478 489
#        and on an H100, us, full: 384 heads x 128, 256, 512; 512 heads x 257, 577; 20 heads x 4096 of 77, 256 keys:
#          one, 3 blocks an SM         13.4 25.9 68.6; 39.8 130.3; 14.5 18.7
#          two by turns, 128 keys      13.9 27.2 67.4; 56.0 131.4; 17.2 21.6
#          cuDNN                       13.0 24.3 72.3; 59.8 166.6; 15.5 20.2
#   128: two by turns, 64 keys, held   299 454 546 612 694, 519 591 641 671 666
#        two by turns, 128 keys        316 436 545 628 715, 508 596 648 707 737
#        three, 64 keys                310 423 542 622 716, 477 552 644 668 708
#   256: O in 64 columns, two buffers  241 547 582 637 704, 540 632 692 698 739
#        in 128, one buffer            239 509 589 638 697, 551 618 680 697 736
# (192, 128), us in turn with FlashAttention-3, short runs (4 x 16 x 512 causal; 4k causal, full; 128 heads 4k causal):
#   128 keys, two stages   24.5; 143.2, 241.6; 1079     (without turns 23.7; 144.7, 246.0; 1098)
#   64 keys, three         20.9; 143.7, 246.8; 1067     (four 22.3; 145.5, 245.6; 1073)
#   two, in 256 columns    21.9; 148.5, 251.4; 1110     FlashAttention-3 23.3; 149.2, 268.7; 1137
# 192 and 160 with V in three pieces too, 4k full: 64 keys, three stages 296.3, 295.6; without turns 333.0, 318.8; two
# stages without 316.6, 307.1; V as 256 326.4, 320.4; FlashAttention-3 310.0, 298.8. Causal 1k, 192: 61.4, 62.5, 63.0,
# 65.2; 66.8.
# 96, 80 and 72 in three pieces of 32, us in turn: 96 causal 4k, 1k, 512; 80 full 4k, 257; 72 full 729:
#   two by turns, 128 keys, two stages 203.8, -, -; 176.9, -; -      (three 202.0, 41.7, 21.9; 179.4, 74.0; 145.1)
#   two by turns, 64 keys, held        211.2, 39.0, 18.2; 189.5, 62.8; 144.7
#   three, 64 keys                     208.3, 44.5, 20.9; 194.7, 60.7; 130.8
#   as 128                             217.6, 40.2, 17.8; 188.0, 63.5; 132.4      FlashAttention-3 217.9, 47.9, 22.8;
#                                                                                 196.0, 60.0; 137.5
# The order of row tiles, TFLOP/s in turn at 512, 1k, 2k, 4k and 16k keys. Full: head by head, and heads that share 4
# and 32 MiB of K and V (512 and 1k in another run than the rest):
#   64:  391 450 493 517 552, 388 446 469 513 549, 368 434 459 481 531
#   128: 519 606 626 666 724, 499 576 616 654 714, 472 540 574 651 693
#   256: 504 597 653 697 734, 499 598 654 698 734, 486 572 617 677 703
# Causal: heads that share 32 MiB; head by head, but for the last, together, of two, three, four row tiles a
# multiprocessor. Head by head to the end, or with short rows of all heads last: slower.
#   64:  270 352 413 469 535; 292 352 424 463 529, 281 354 427 477 533, 284 356 429 476 536
#   128: 344 461 552 618 705; 352 467 554 615 714, 359 456 568 622 721, 349 467 558 629 699
#   256: 337 462 557 624 702; 353 466 558 631 693, 346 464 565 618 686, 335 456 548 617 676
# And of two, rounded up to whole heads or down, two rounds, 16k keys: 128 714 737, 730 745; 256 703 742, 731 763. At 4k
# 631, 640 and 645, 630. Three heads of 256 have 48 MiB of K and V, of L2's 50: it had 89% of what was asked of it.
LAST_TILES = 2  # row tiles a multiprocessor, at most, of the causal heads that come last together (one head at least)
# What a consumer takes to its next step, to nothing, means of all lengths: 64 kv 1.015; 128 v 1.004, kv 0.983; 256 v
# 0.997 (causal 16k 0.97), kv 0.987.
NEVER = 1 << 31  # keys
SHORT = 512  # keys
HOPPER_TALK = 3 << 10  # bytes of shared memory for the list of row tiles, messages and barriers, at most
HopperTable = tuple[tuple[tuple[int, int], tuple[int, int], HopperConfig], ...]
LONG_64 = HopperConfig(3, 64, 4, carried="kv", q_held=True)
TURNS_64 = HopperConfig(2, 128, 4, q_slots=4, carried="kv", turns=True)
LONG_128 = HopperConfig(2, 128, 2, q_slots=4, apart=True, carried="v", turns=True)
SHORT_128 = HopperConfig(2, 64, 4, carried="v", turns=True, q_held=True)
HOPPER_TILES: HopperTable = (
    ((64, 64), (2048, 2048), LONG_64),
    ((64, 64), (SHORT, NEVER), TURNS_64),
    ((64, 64), (0, 0), HopperConfig(1, 64, 3, blocks=3, carried="kv")),
    ((128, 128), (2048, 4096), LONG_128),
    ((96, 96), (0, NEVER), HopperConfig(3, 64, 4, carried="kv")),
    ((128, 128), (0, 0), SHORT_128),
    ((192, 128), (2048, NEVER), HopperConfig(2, 128, 2, apart=True, carried="v", turns=True, o_width=64)),
    ((192, 192), (0, 0), HopperConfig(2, 64, 3, apart=True, carried="v", turns=True, o_width=64, o_slots=2)),
    ((256, 256), (0, 0), HopperConfig(2, 64, 2, apart=True, o_width=64, o_slots=2)),
)
# From Triton 3.8 on each product has registers of its own for P, and for a Q that is held. Older ptxas sees that they
# are the same, that of CUDA 13.4, which Triton 3.9 is the first to take for sm_90, does not. Bytes of stack a thread,
# causal, with V in three pieces and in one, 96 columns 656 and 160, 192 216 and 160; Triton 3.8, in three, 40 and 24.
OPERANDS_COPIED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
V_IN_PIECES = not OPERANDS_COPIED
# There these are tried first, without masks, at the head dims that were measured: Triton 3.9 on an H100, bf16, TFLOP/s,
# causal and full, medians of three short runs in turn, at 1k, 2k, 4k and 16k keys:
#   64:  three, 64 keys, Q held        291 413 466 525, 419 479 504 545
#        the same, not held            321 421 480 549, 437 496 526 557
#        two by turns, 128 keys        323 407 470 518, 455 484 498 512
#        one, 3 blocks an SM           311 399 436 474, 398 442 471 444
#   128: two by turns, 64 keys, held   452 544 595 678, 589 655 691 718
#        the same, not held            451 566 605 682, 591 612 669 687
#        two by turns, 128 keys        383 503 574 691, 578 627 651 712
# In another run the first was confirmed, and 128 causal; full 4k had 667 with 128 keys and 658 with 64.
HOPPER_COPIED: HopperTable = (
    ((64, 64), (2048, 2048), replace(LONG_64, q_held=False)),
    ((128, 128), (16384, 16384), LONG_128),
    ((128, 128), (NEVER, 2048), replace(SHORT_128, q_held=False)),
    ((128, 128), (2048, NEVER), SHORT_128),
)
# With a mask that has one row for all queries, or that TMA can copy, these are tried first: the first beside whose K
# its tiles fit. us on an H100 in turn, of bfloat16 [1, H, L, S] at d64 x 512, 1k, 2k, 4k, causal 1k; bool [L, S] at
# 512, 1k, 4k:
#   one, 3 blocks an SM, 64 keys  25.5 47.2 183.7 361.1, 32.1; 47.6 46.2 323.4
#   one, 2 blocks an SM, 64 keys  28.5 49.5 204.3 388.5, 31.2; 52.7 47.8 325.1    (128 keys, bool: 49.1 45.0 312.2)
#   two by turns, 128 keys        32.3 50.7 187.2 356.9, 37.3; 55.3 51.8 330.8    (without turns 31.6 48.7 183.7 355.3)
#   three, 64 keys, Q held        35.6 62.1 180.3 347.6, 36.9; 57.7 65.2 311.1
#   cuDNN                         35.5 61.4 234.8 444.8, 50.1; 72.0 65.5 443.3
# 128, bfloat16 at 512, 2k, causal 1k; bool at 512, 2k:
#   two by turns, 64 keys, held   49.8 348.2 57.5; 48.8 156.2
#   two by turns, 128 keys        61.8 386.6 76.7; 48.7 143.8    (bfloat16 by loads, for which there is no room)
#   three, 64 keys                56.3 355.5 70.2; 53.5 164.2
#   one, 2 blocks an SM, 64 keys  52.7 366.4 59.7; 50.5 159.2    cuDNN 70.5 513.0 94.3; 76.1 225.5
# 256, bool at 2k: 244.3, by loads 332.0; cuDNN 554.1. A row for all queries, 384 heads of 64 x 512: one, 3 blocks 90.9,
# two by turns 104.9, three 105.2, cuDNN 113.2.
HOPPER_MASKED: HopperTable = (
    ((64, 64), (2048, 2048), LONG_64),
    ((64, 64), (0, 0), HopperConfig(1, 64, 3, blocks=3, carried="kv")),
)
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
# Parts of wider heads are always tasks: 512 rows of 8k, two sequences of 16 / 4 heads of 256 238.7 226.0 177.0; 199.3,
# one 115.4 106.9 154.8; 103.7. So at 8192 keys there, where few heads gain most and many lose least.
HOPPER_SPLITS = ((128, 1024, 256), (256, 2048, 256), (512, 2048, 128), (512, 8192, 256), (1024, 4096, 128))
# Up to so many rows of a head parts have the tile of short causal sequences, of more that of the longest: 512 rows of
# 16k and 32k, 32 / 8 heads of 128 218 206, 423 393 us (H100). Heads of 64 have one of their own there: 32k, 8 / 1 heads
# 67.8, with the longest's 90.9, the short one 69.7.
SHORT_ROWS = 256
# Where one row tile has all query heads of a K/V head, two at least: parts of 1024 and 512 keys; FlashAttention-3. 16
# rows of 2k, 4k and 32k keys, 64 / 8 heads 20.0 15.8; 13.0, 20.3 17.6; 15.5, 57.9 60.4; 58.9, 8 / 1 heads 18.5 13.7;
# 11.5, 18.5 13.8; 11.9, 46.0 28.2; 20.8, of 4k d64 14.7 12.4; 13.9, d256 33.2 28.9; 27.7, but 8 x 64 / 8 heads 46.6
# 48.9; 38.4, 73.0 80.3; 60.4. With 16 parts, not 8, before they grow, 8k and 16k: 64 / 8 24.9 26.4; 22.6, 36.1 38.3;
# 36.2, 8 / 1 18.6 14.2; 13.4, 27.9 19.0; 16.9, 8 x 64 / 8 127.3 146.1; 104.3.
# More than 64 rows of heads of 64 have two consumers, one before: 32 x 64 / 8 heads x 16 rows of 2k 95 56; 59, but 1 x
# 4k 11.5 13.0; 13.3 (H100).
ONE_TILE_SPLIT = 512
# A sequence has FEW_PARTS until these have LONG_PARTS times as many keys as a part has at least, then more of those, up
# to PARTS; from SHORT_ROWS on never more. On an H100, 128 rows, at most 8 parts, at most 32 of 2048 keys;
# FlashAttention-3: 1 x 8 / 1 heads (8 x 16 rows) of 32k, 64k, 128k keys 45.6 28.3; 20.9, 83.6 29.3; 28.4, 155.4 47.4;
# 42.3, but 1 x 32 / 8 heads of 32k, 64k 108.2 126.5; 115.5, 210.7 249.1 (16 of 4096: 226.7); 224.1.
FEW_PARTS, LONG_PARTS, PARTS = 8, 4, 32
# Blocks take all parts of a row tile, and fold them, where so many of the places of all waves have a row tile. us on an
# H100, 70 ms warm and 40 timed: parts as tasks, by one block, by one that holds Q too, whole; FlashAttention-3.
#   128, 8k, 32 / 8 heads:  8 x 64 rows 159.4 126.4 129.9 115.4; 120.9    7 x 64 143.8 114.9 117.0 122.2; 118.2
#                          4 x 128 rows 152.8 117.0 117.3 105.9; 115.2   2 x 256 130.5 110.4 109.3 100.2; 111.7
#        64 / 8 heads x 16 rows, 32 x 2k 157.4 105.6 109.0 102.9; 101.4
#        32 / 8 heads x 32 rows, 16 x 4k 145.1 102.1 103.5 100.3;  98.7
#   64:  8 x 64 rows of 8k 106.6 93.1, whole 104.9; 107.1, 32 x 16 rows of 2k 94.0 57.3, 62.6; 66.8
# Short runs on an H200: 96, 128, 160, 192 row tiles as tasks 105.7 135.9 171.6 205.1, by one block 104.9 112.8 217 230.
FOLDED = 0.8
# The acc of the parts before waits in registers up to so many columns, else in shared memory. What the compiler puts
# on the stack comes back from L2, past the little that shared memory leaves of L1. Short runs on an H200, in registers
# or on the stack and in shared memory: 8 x 64 rows of 128 117.1 114.3, of 64 89.0 101.0; with 128 keys a tile 157 120,
# with Q held 138 114; heads of 256, on the stack alone, 258 (parts as tasks 183).
FOLDED_IN_REGISTERS = 64
PACKED_ROWS = 2  # a tile of query heads packed for a K/V head, where one head would leave at least half of it empty


def pieces(head_dim: int, in_three: bool = True) -> tuple[int, int]:
    """(pieces, columns of one) in which the Hopper kernel takes Q or K: of a power of two, or three of 32 or 64."""
    for columns in (32, 64):
        if in_three and 2 * columns < head_dim <= 3 * columns:
            return 3, columns
    return 1, max(64, padded(head_dim))


def pieces_of_v(head_dim_v: int) -> tuple[int, int]:
    """(pieces, columns of one) in which the Hopper kernel takes V and adds up O."""
    return pieces(head_dim_v, in_three=V_IN_PIECES)


def hopper_tile(problem: AttentionProblem, mask_bytes: int | None = None) -> HopperConfig:
    """The tile of the Hopper attention kernel.

    `mask_bytes`: of an element of a mask that TMA can copy; 0: the mask has one row for all queries. None: there is no
    mask, or one that must be loaded.
    A function of these, of head dims, the number of query heads a K/V head, and of lengths in three places: the number
    of keys in the tables (of packed sequences, whose neighbours would then decide, always SHORT), HOPPER_SPLITS with
    ONE_TILE_SPLIT, and PACKED_ROWS.
    """
    dim, dim_v = math.prod(pieces(problem.head_dim)), math.prod(pieces_of_v(problem.head_dim_v))
    keys, causal = SHORT if problem.features.varlen else problem.len_k, problem.features.right
    if problem.features.mask and mask_bytes is None:
        keys = max(keys, SHORT)  # loads take registers, of which three blocks have few: 336 bytes of stack a thread
    split = split_of(problem, max(dim, dim_v))
    if split:
        keys, causal = NEVER - 1 if problem.len_q > SHORT_ROWS else 0, True

    def serving(table: HopperTable) -> Iterator[HopperConfig]:
        for largest, least, config in table:
            if dim <= largest[0] and dim_v <= largest[1] and keys >= least[causal]:
                yield config

    table = HOPPER_TILES if mask_bytes is None else HOPPER_MASKED + HOPPER_TILES
    if OPERANDS_COPIED and not problem.features.mask and dim == dim_v and dim in (64, 128):
        table = HOPPER_COPIED + HOPPER_TILES
    config = next(serving(table))
    if split and dim == dim_v == 64:
        config = tile_of_parts_64(problem, split) or config
    config = replace(config, split=split)
    if split and config.blocks == 1:
        # acc leaves in twice as many pieces as O, and there is room, but for Q's of the next row tile beside long ones
        config = replace(config, o_slots=2, q_slots=0)
    if 1 < problem.group <= 64 and problem.len_q * PACKED_ROWS <= 64 * config.warpgroups:
        return replace(config, pack=power_of_two(problem.group))
    if mask_bytes:
        fitting = (beside_masks(config, dim, dim_v, mask_bytes) for config in serving(table))
        config = next(filter(None, fitting), config)
    return config


def split_of(problem: AttentionProblem, widest: int) -> int:
    """Keys of a part, at least, of heads that are so wide; 0: a row tile takes all of its own."""
    seen = 0 if problem.features.varlen or problem.features.mask else problem.keys_seen
    splits = (split for rows, split, dims in HOPPER_SPLITS if problem.len_q <= rows and widest <= dims)
    split = next((split for split in splits if seen >= 2 * split), 0)
    return ONE_TILE_SPLIT if split and problem.group > 1 and problem.group * problem.len_q <= 128 else split


def tile_of_parts_64(problem: AttentionProblem, split: int) -> HopperConfig | None:
    """The tile of parts of heads of 64, where none in the table is the fastest: of many rows, and of one row tile."""
    if problem.len_q > SHORT_ROWS:
        return TURNS_64
    one_tile = split == ONE_TILE_SPLIT and problem.group * problem.len_q > 64
    return replace(TURNS_64, block_n=64) if one_tile else None


def folds(problem: AttentionProblem, config: HopperConfig, target: Target) -> bool:
    """Whether a block takes all parts of a row tile, where each could be a task: to the same bits; the batch may say.

    If they are one chain of the merge, acc fits on chip a second time, and there are enough row tiles for the GPU.
    """
    rows = 64 * config.warpgroups
    dim, dim_v = math.prod(pieces(problem.head_dim)), math.prod(pieces_of_v(problem.head_dim_v))
    o_bytes = 4 if folding(problem, config).folds_in_room else 2
    needed = rows * (dim * 2 + dim_v * o_bytes) + config.stages * config.block_n * (dim + dim_v) * 2 + HOPPER_TALK
    tasks = -(-problem.len_q // (rows // config.pack)) * problem.batch
    tasks *= problem.heads_kv if config.pack > 1 else problem.heads_q
    waves = -(-tasks // target.multiprocessors)
    keys = (-(-problem.keys_seen // config.block_n) + problem.features.left) * config.block_n  # as they fall into tiles
    one_chain = keys <= FEW_PARTS * long_part(problem, config)
    return one_chain and needed <= room_of(config) and tasks >= FOLDED * waves * target.multiprocessors


def long_part(problem: AttentionProblem, config: HopperConfig) -> int:
    """Keys of a part, from which on there are more than FEW_PARTS."""
    return NEVER if config.split and problem.len_q > SHORT_ROWS else LONG_PARTS * config.split


def folding(problem: AttentionProblem, config: HopperConfig) -> HopperConfig:
    """The tile of blocks that take all parts: Q's registers and second room are for the states."""
    in_room = math.prod(pieces_of_v(problem.head_dim_v)) > FOLDED_IN_REGISTERS
    return replace(config, folds=True, folds_in_room=in_room, q_held=False, q_slots=0)


def room_of(config: HopperConfig) -> int:
    """Bytes of shared memory of a block."""
    room = SHARED_KIB[90] << 10
    return room if config.blocks == 1 else room // config.blocks - SHARED_RESERVED


def beside_masks(config: HopperConfig, dim: int, dim_v: int, mask_bytes: int) -> HopperConfig | None:
    """The tile with room for those of a mask beside K's; None where that leaves less than two stages."""
    rows = 64 * config.warpgroups
    stage = config.block_n * ((dim + dim_v) * 2 + rows * mask_bytes)
    room = room_of(config) - HOPPER_TALK - rows * dim * 2
    for o_slots in range(config.o_slots, 0, -1):
        stages = min(config.stages, (room - rows * o_slots * min(config.o_width, dim_v) * 2) // stage)
        if stages >= 2 and stages * config.block_n >= rows:  # rows done again leave through the room of V
            return replace(config, stages=stages, o_slots=o_slots, q_slots=0, apart=False, mask_copied=True)
    return None
