"""The compile-time shape of the Hopper kernel, and the layouts that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon import language as gl


@dataclass(frozen=True)
class HopperTile:
    """Compile-time shape: what a problem fixes, and what tuning chose for it."""

    WARPGROUPS: int  # consumers
    DEALT: int  # blocks that a row tile is dealt out to: neighbouring ones visit keys as one with all their rows would
    BLOCK_N: int  # keys
    PAGE: int  # keys of a page; 0: they lie in one piece
    STAGES: int  # of the K ring and of the V ring
    Q_SLOTS: int  # buffers of 64 rows of Q, used in turn by the consumers
    HEAD_DIM_V: int
    PIECES: int  # in which Q and K lie, one behind the other
    BLOCK_D: int  # columns of a piece, a power of two; TMA fills what is more than the head dim with zeros
    V_PIECES: int  # in which V lies, and O is added up
    BLOCK_DV: int
    GROUP: int  # query heads of one key/value head
    PACK: int  # of them in one row tile, as a power of two; 1: one
    Q_HELD: bool  # a consumer keeps its Q in registers: products read half as much from shared memory
    O_WIDTH: int  # columns of O that leave at a time
    O_SLOTS: int  # buffers for them, of each consumer
    APART: bool  # K is given back as soon as its scores are there, not with the V of the step before
    CARRIED: str  # what a consumer takes to its next step of its places in the rings: "", that in V's (v), both (kv)
    TURNS: bool  # two consumers issue their products by turns
    SETTLES_AT_ONCE: bool  # the first tile of which a row sees a key sets its reference for good
    MASK_ROWS: bool  # rows of a tile may see different rows of a mask tensor
    MASK_ALIGN: int  # its keys that one load may take, see `mask_align`
    MASK_COPIED: bool  # its tiles come by TMA, each with the K of its keys
    LIMIT: float  # of l_i, so that no p has left its dtype's range
    SPLIT: int  # keys of a part, at least; 0: a row tile takes all of its own
    FEW: int  # of how many, at most
    LONG: int  # keys of one, at least, where there are more
    LANES: int  # parts of a sequence's keys, at most
    CHAIN: int  # neighbouring parts that are folded one after the other, whoever takes them
    CHAINS: int  # that a block takes, with FOLDS; two only where there are no more
    FOLDS: bool  # a block takes chains of parts of a row tile, one after the other, and folds their states
    FOLDS_IN_ROOM: bool  # the acc of those before waits in shared memory, not in registers
    ALONE: bool  # there are no more than a block takes: nothing to merge

    @property
    def PARTIAL(self) -> bool:
        """A task is a row tile and a part, with FOLDS a chain: its (m, l, acc) leave in the place of lse and O."""
        return self.SPLIT > 0 and not self.ALONE

    @property
    def S_LAYOUT(self) -> Any:
        """Of a consumer's scores, and of P."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.BLOCK_N, 16])

    @property
    def O_LAYOUT(self) -> Any:
        """Of a piece of O."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.BLOCK_DV, 16])

    @property
    def PIECE_LAYOUT(self) -> Any:
        """Of the columns of O that leave at a time."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.O_WIDTH, 16])

    @property
    def MASK_LAYOUT(self) -> Any:
        """[64, N] of a mask as it is loaded: that of S or, where it can be, four keys of a row a thread, not two.

        That is half as many lines of the cache to ask for. Of more keys, lanes and registers would differ from those of
        S in two bits, and Triton would bring one to the other through shared memory, not by shuffles.
        """
        if not self.MASK_ROWS or self.MASK_ALIGN < 4:
            return self.S_LAYOUT
        return gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [8, 0], *([0, key] for key in (16, 32, 64) if key < self.BLOCK_N)],
            lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[64, self.BLOCK_N],
        )

    @property
    def L_LAYOUT(self) -> Any:
        """[64, 4]: what is left when each thread adds up its own part of a row of S."""
        return gl.DistributedLinearLayout(
            reg_bases=[[8, 0]],
            lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[64, 4],
        )

    @property
    def OWNED(self) -> int:
        """Parts in one of the chains that a task has with FOLDS; else its one part."""
        return self.CHAIN if self.FOLDS else 1

    @property
    def LEAVES(self) -> int:
        """How many times O_WIDTH columns of O leave."""
        return self.V_PIECES * self.BLOCK_DV // self.O_WIDTH

    @property
    def BLOCK_M(self) -> int:
        """Rows of a tile, for those who read it."""
        return 64 * self.WARPGROUPS
