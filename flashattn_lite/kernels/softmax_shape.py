"""The compile-time shape of the ring kernel, and the layouts that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon import language as gl


@dataclass(frozen=True)
class RingShape:
    """Compile-time shape: what rows and their layout fix, and what tuning chose (tuning_softmax.RingTile)."""

    ITEMSIZE: int  # bytes of an element
    COLS: int  # elements of a slot
    WARPS: int
    SLOTS: int  # of the ring
    LAG: int  # steps from a unit to its output
    PARTS: int  # units of a row, as a power of two
    PATIENCE: int  # looks at a row's parts before a program computes them itself
    CHUNKS: int  # equal pieces of a slot, one after the other
    EVEN: bool  # every unit fills its slot
    BETWEEN: bool  # rows begin between 16-byte addresses
    ALIKE: bool  # y lies in 16 bytes as x does
    FLAT: bool  # all rows lie equally far apart
    STATS: bool  # (top, l_i) of rows and no output

    @property
    def ALIGN(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.ITEMSIZE

    @property
    def WIDTH(self) -> int:
        """Elements of a word of 4 bytes, in which units are copied and loaded."""
        return 4 // self.ITEMSIZE

    @property
    def CHUNK(self) -> int:
        """Words of a chunk."""
        return self.COLS // self.WIDTH // self.CHUNKS

    @property
    def OWN(self) -> int:
        """Elements of a unit."""
        return self.COLS - self.ALIGN if self.BETWEEN else self.COLS

    @property
    def AHEAD(self) -> int:
        """Steps from the beginning of a unit's copy to the unit."""
        return self.SLOTS - self.LAG - 1

    @property
    def TILE(self) -> Any:
        """Of a chunk's words [WARPS, CHUNK / WARPS]."""
        return gl.BlockedLayout([1, self.ALIGN // self.WIDTH], [1, 32], [self.WARPS, 1], [1, 0])

    @property
    def WIDE(self) -> Any:
        """Of its elements: TILE after `widen`."""
        return gl.BlockedLayout([1, self.ALIGN], [1, 32], [self.WARPS, 1], [1, 0])
