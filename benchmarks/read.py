"""The ceiling of kernels that only read: a Triton kernel that reads bytes and keeps next to nothing of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096  # of 4 bytes a step: 16 KiB, four 16-byte loads in each of 256 threads
STEPS, FEW = 8, 2  # steps a program: 128 KiB; and where that makes few programs, one of which then waits for itself
FEW_BYTES = 64 << 20  # below which programs are short


@triton.jit
def read_kernel(x_ptr, out_ptr, words, WORDS: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[i] = the exclusive or of the i-th WORDS * STEPS words of x."""
    start = tl.program_id(0).to(tl.int64) * (WORDS * STEPS)
    folded = tl.zeros([WORDS], tl.int32)
    for step in tl.static_range(STEPS):
        offs = start + step * WORDS + tl.arange(0, WORDS)
        folded ^= tl.load(x_ptr + offs, mask=offs < words, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.xor_sum(folded, 0))


def read(words: Tensor) -> Tensor:
    """words: int32, contiguous. One int32 for each program."""
    steps = STEPS if 4 * words.numel() >= FEW_BYTES else FEW
    programs = triton.cdiv(words.numel(), WORDS * steps)
    out = words.new_empty(programs)
    read_kernel[(programs,)](words, out, words.numel(), WORDS, steps, num_warps=8)
    return out
