"""The tile of a launch of the Hopper kernel, as tables and parts of keys make it, and what it takes on chip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton

from flashattn_lite.kernels.tuning import SHARED_KIB, SHARED_RESERVED, padded
from flashattn_lite.problem import AttentionProblem

NEVER = 1 << 31  # keys
HOPPER_TALK = 3 << 10  # bytes of shared memory for the list of row tiles, messages and barriers, at most
# From Triton 3.8 on each product has registers of its own for P, and for a Q that is held. Older ptxas sees that they
# are the same, that of CUDA 13.4, which Triton 3.9 is the first to take for sm_90, does not. Bytes of stack a thread,
# causal, with V in three pieces and in one, 96 columns 656 and 160, 192 216 and 160; Triton 3.8, in three, 40 and 24.
OPERANDS_COPIED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
V_IN_PIECES = not OPERANDS_COPIED


@dataclass(frozen=True)
class HopperConfig:
    """A row of the Hopper kernel's table; from `split` to `folds_in_room` what `tuning_parts.py` adds to it."""

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
    long: int = 0  # and from which on there are more than FEW_PARTS
    parts: int = 1  # of a sequence's keys, at most
    chain: int = 1  # neighbouring parts that are folded one after the other, whoever takes them
    folds: bool = False  # no task of its own: a block takes chains of parts of a row tile, and folds their states
    chains: int = 1  # that a block takes
    alone: bool = False  # and there are no more, so that no state leaves
    folds_in_room: bool = False  # the acc of those before waits in shared memory, not in registers
    dealt: int = 1  # blocks that a row tile is dealt out to, see `tuning_dealt.py`
    mask_copied: bool = False  # tiles of a mask tensor come by TMA, each with the K of its keys


def in_sectors(head_dim: int) -> bool:
    """Whether rows are whole sectors of memory, 32 bytes; if not, the copy engine is slower, by narrow pieces most."""
    return head_dim % 16 == 0


def pieces(head_dim: int, in_three: bool = True) -> tuple[int, int]:
    """(pieces, columns of one) in which the Hopper kernel takes Q or K: of a power of two, or three of 32 or 64."""
    for columns in (32, 64):
        if in_three and 2 * columns < head_dim <= 3 * columns and (columns == 64 or in_sectors(head_dim)):
            return 3, columns
    return 1, max(64, padded(head_dim))


def pieces_of_v(head_dim_v: int) -> tuple[int, int]:
    """(pieces, columns of one) in which the Hopper kernel takes V and adds up O."""
    return pieces(head_dim_v, in_three=V_IN_PIECES)


def pieces_of_pages(of: tuple[int, int]) -> tuple[int, int]:
    """The same columns in pieces as wide as the copy engine lays them behind one another, so that pages can lie there.

    Of a cache in one piece too, which has the bits of one in pages.
    """
    count, columns = of
    return count * columns // min(columns, 64), min(columns, 64)


def widest_of(problem: AttentionProblem) -> int:
    """The larger of the head dims, as `pieces` fills them."""
    return max(math.prod(pieces(problem.head_dim)), math.prod(pieces_of_v(problem.head_dim_v)))


def room_of(config: HopperConfig) -> int:
    """Bytes of shared memory of a block."""
    room = SHARED_KIB[90] << 10
    return room if config.blocks == 1 else room // config.blocks - SHARED_RESERVED
