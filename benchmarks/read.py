"""The ceiling of kernels that only read: a Triton kernel that reads bytes and keeps next to nothing of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096  # of 4 bytes a step: 16 KiB, four 16-byte loads in each of 256 threads
STEPS = 8  # steps a program, all under way at once: 128 KiB


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
    """words: int32, contiguous. One int32 for each 128 KiB."""
    programs = triton.cdiv(words.numel(), WORDS * STEPS)
    out = words.new_empty(programs)
    read_kernel[(programs,)](words, out, words.numel(), WORDS, STEPS, num_warps=8)
    return out
