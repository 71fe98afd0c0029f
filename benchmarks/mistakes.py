"""The kinds of mistakes of ptxas that we know, found in machine code with no GPU. The PTX is right (docs/design.md).

Where two matrices of different swizzles lie at one place in shared memory, one after the other, ptxas 12.8 computes
wgmma descriptors of one of them of a register that nobody wrote, or that something else is in: results are wrong or
accesses illegal. Where a factor of a wgmma stays in registers for all steps of a loop, it may put the packed factor of
another one there.
"""

from __future__ import annotations

from typing import Any

from benchmarks.descriptors import differences
from benchmarks.overwritten import overwritten
from benchmarks.sass import disassembled, flow, functions
from benchmarks.unwritten import unwritten


def mistakes(kernel: Any) -> list[str]:
    """What is wrong with a kernel's machine code; nothing, if it is as the PTX asks."""
    code = [flow(function) for function in functions(disassembled(kernel))]
    ptx = kernel.asm["ptx"]
    return [
        *differences(ptx, code),
        *overwritten(ptx, code),
        *(line for function in code for line in unwritten(function)),
    ]
