"""Tile shapes of the Hopper attention kernel, by head dims, features and lengths, as measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from flashattn_lite.kernels.hopper_config import (
    HOPPER_TALK,
    NEVER,
    OPERANDS_COPIED,
    HopperConfig,
    in_sectors,
    pieces,
    pieces_of_v,
    room_of,
)
from flashattn_lite.kernels.tuning import power_of_two
from flashattn_lite.kernels.tuning_parts import ONE_TILE_SPLIT, SHORT_ROWS, in_parts, split_of
from flashattn_lite.problem import AttentionProblem

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
# Again, full at 577, 729, 1k and 1.5k keys, us on an H100, 80; 96 (72 is not in pieces any more, see HOPPER_UNALIGNED):
#   three, 64 keys                     339.7 319.4 476.5 547.4; 350.3 331.6 460.1 576.3
#   two by turns, 64 keys, held        307.0 337.8 424.8 585.2; 314.5 337.7 433.4 574.8
#   two by turns, 128 keys, two stages 303.1 334.4 407.5 561.3; 311.5 328.9 399.6 544.3
#   FlashAttention-3                   354.5 337.1 475.1 554.4; 375.2 334.1 480.9 557.1
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
SHORT = 512  # keys
HopperTable = tuple[tuple[tuple[int, int], tuple[int, int], HopperConfig], ...]
LONG_64 = HopperConfig(3, 64, 4, carried="kv", q_held=True)
TURNS_64 = HopperConfig(2, 128, 4, q_slots=4, carried="kv", turns=True)
LONG_128 = HopperConfig(2, 128, 2, q_slots=4, apart=True, carried="v", turns=True)
SHORT_128 = HopperConfig(2, 64, 4, carried="v", turns=True, q_held=True)
THREE_128 = HopperConfig(3, 64, 4, carried="kv", o_width=64)
HOPPER_TILES: HopperTable = (
    ((64, 64), (2048, 2048), LONG_64),
    ((64, 64), (SHORT, NEVER), TURNS_64),
    ((64, 64), (0, 0), HopperConfig(1, 64, 3, blocks=3, carried="kv")),
    ((128, 128), (2048, 4096), LONG_128),
    ((96, 96), (1024, NEVER), LONG_128),
    ((96, 96), (0, NEVER), HopperConfig(3, 64, 4, carried="kv")),
    ((128, 128), (0, 0), SHORT_128),
    ((192, 128), (2048, NEVER), HopperConfig(2, 128, 2, apart=True, carried="v", turns=True, o_width=64)),
    ((192, 192), (0, 0), HopperConfig(2, 64, 3, apart=True, carried="v", turns=True, o_width=64, o_slots=2)),
    ((256, 256), (0, 0), HopperConfig(2, 64, 2, apart=True, o_width=64, o_slots=2)),
)
# Where rows of 65 to 128 columns are not whole sectors (`in_sectors`) these are tried first: K and V from L2 cost more.
# us in turn on an H200, 16 heads, 16k tokens, at 256, 577, 729, 1k, 2k and 4k keys, full; causal 1k, 4k:
#   72:  three, 64 keys         102.4 173.0 170.0 230.4 396.7 760.1; 155.5 412.2
#        two, 64 keys, held      78.5 154.7 175.0 217.6 401.2 768.3; 138.2 413.7    (see tuning_dealt.TWO_FOR_THREE)
#        two, 128 keys           80.8 158.8 176.3 219.6 400.3 761.7; 148.4 416.8
#        in pieces of 32 columns, the first below 2k, else the last: 105.3 172.5 174.5 234.7 446.0 859.2; 150.9 459.7
#        FlashAttention-3       117.1 183.1 177.4 244.1 400.7 741.6; 171.7 411.5
#        cuDNN                   82.4 183.1 206.6 244.7 460.9 884.4; 161.9 507.7
#   104: three, 64 keys         114.1 191.2 182.6 249.2 422.8 813.9; 170.5 458.7
#        two, 64 keys, held      90.3 172.8 195.0 249.3 449.7 868.2; 156.0 455.6
#        two, 128 keys           89.1 173.6 195.1 246.3 458.7 871.0; 163.7 468.1
#        FlashAttention-3       110.4 190.1 209.3 246.5 448.1 858.8; 164.9 474.9
HOPPER_UNALIGNED: HopperTable = (((128, 128), (0, NEVER), THREE_128),)
# With OPERANDS_COPIED these are tried first, without masks, at the head dims that were measured: Triton 3.9 on an H100,
# bf16, TFLOP/s, causal and full, medians of three short runs in turn, at 1k, 2k, 4k and 16k keys:
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
PACKED_ROWS = 2  # a tile of query heads packed for a K/V head, where one head would leave at least half of it empty


def hopper_tile(problem: AttentionProblem, mask_bytes: int | None = None) -> HopperConfig:
    """The tile of the Hopper attention kernel.

    `mask_bytes`: of an element of a mask that TMA can copy; 0: the mask has one row for all queries. None: there is no
    mask, or one that must be loaded.
    A function of these, of head dims, the number of query heads a K/V head, and of lengths in six places: the number
    of keys in the tables (of packed sequences, whose neighbours would then decide, always SHORT), HOPPER_SPLITS with
    ONE_TILE_SPLIT, HALF_TILES, whether one consumer holds all rows, SHORT_ROWS, and PACKED_ROWS. Who takes its rows may
    depend on the batch too: `tuning_dealt.py`.
    """
    dim, dim_v = math.prod(pieces(problem.head_dim)), math.prod(pieces_of_v(problem.head_dim_v))
    keys, causal = SHORT if problem.features.varlen else problem.len_k, problem.features.right
    if problem.features.mask and mask_bytes is None:
        keys = max(keys, SHORT)  # loads take registers, of which three blocks have few: 336 bytes of stack a thread
    split = split_of(problem)
    if split:
        keys, causal = NEVER - 1 if problem.len_q > SHORT_ROWS else 0, True

    def serving(table: HopperTable) -> Iterator[HopperConfig]:
        for largest, least, config in table:
            if dim <= largest[0] and dim_v <= largest[1] and keys >= least[causal]:
                yield config

    table = HOPPER_TILES if mask_bytes is None else HOPPER_MASKED + HOPPER_TILES
    if OPERANDS_COPIED and not problem.features.mask and dim == dim_v and dim in (64, 128):
        table = HOPPER_COPIED + HOPPER_TILES
    if max(dim, dim_v) == 128 and not (in_sectors(problem.head_dim) and in_sectors(problem.head_dim_v)):
        table = HOPPER_UNALIGNED + table
    config = next(serving(table))
    packed = 1 < problem.group <= 64
    few = (packed or split) and problem.len_q * power_of_two(problem.group) <= 64
    if few and max(dim, dim_v) > 64 and not (problem.features.varlen or problem.features.mask):
        config = replace(config, warpgroups=1, turns=False, q_slots=0)
    if split and dim == dim_v == 64:
        config = tile_of_parts_64(problem, split) or config
    if split:
        config = in_parts(problem, config, split)
    if split and config.blocks == 1:
        # acc leaves in twice as many pieces as O, and there is room, but for Q's of the next row tile beside long ones
        config = replace(config, o_slots=2, q_slots=0)
    if packed and problem.rows * PACKED_ROWS <= 64 * config.warpgroups:
        return replace(config, pack=power_of_two(problem.group))
    if mask_bytes:
        fitting = (beside_masks(config, dim, dim_v, mask_bytes) for config in serving(table))
        config = next(filter(None, fitting), config)
    return config


def tile_of_parts_64(problem: AttentionProblem, split: int) -> HopperConfig | None:
    """The tile of parts of heads of 64, where none in the table is the fastest: of many rows, and of one row tile."""
    if problem.len_q > SHORT_ROWS:
        return TURNS_64
    one_tile = split == ONE_TILE_SPLIT and problem.group * problem.len_q > 64
    return replace(TURNS_64, block_n=64) if one_tile else None


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
