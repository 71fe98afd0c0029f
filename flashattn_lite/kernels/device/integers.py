"""Integers on the device."""

import triton
import triton.language as tl


@triton.jit
def divided(a, b):
    """(a // b, a % b) of int32 that are not negative. A GPU divides 64 bits in a subroutine of half a microsecond."""
    quotient = tl.cast(tl.cast(a, tl.uint32) // tl.cast(b, tl.uint32), tl.int32)
    return quotient, a - quotient * b
