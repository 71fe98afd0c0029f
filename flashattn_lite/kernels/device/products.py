"""Matrix products of float32 on units that multiply 16 bits: each factor as three bfloat16, six products.

Three times 8 bits are float32's 24, and the parts have one sign, so that nothing cancels between them: a product with a
factor of 1 is exact. What is left out is below 2^-22 of |a| |b|. Source: Henry, Tang, Heinecke, Leveraging the bfloat16
artificial intelligence datatype for higher-precision computations (arXiv 1904.06376); parts are cut off here, not
rounded, because rounded ones overflow near float32's largest number and differ in sign.
"""

import triton
import triton.language as tl


@triton.jit
def leading(x):
    """The first 8 bits of float32 x."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def parts(x):
    """Three bfloat16 tensors whose sum is x; of an infinity the first is it and the others are 0, of a NaN all are."""
    high = leading(x)
    rest = tl.where(tl.abs(x) == float("inf"), 0.0, x - high)
    middle = leading(rest)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def corrections(a, b, TURNED: tl.constexpr):
    """All of a @ b but the product of the first parts; a and b from `parts`, smallest products first.

    TURNED: in the order in which those of b^T @ a^T are added, and so with the same bits.
    """
    first: tl.constexpr = 0 if TURNED else 2
    last: tl.constexpr = 2 - first
    sum = tl.dot(a[first], b[last])
    sum = tl.dot(a[1], b[1], sum)
    sum = tl.dot(a[last], b[first], sum)
    sum = tl.dot(a[first // 2], b[last // 2], sum)
    return tl.dot(a[last // 2], b[first // 2], sum)


@triton.jit
def product(a, b, TURNED: tl.constexpr = False):
    """a @ b in float32, from `parts`. Where an infinity meets a 0 in them, it is NaN; see `product_of_any`."""
    return tl.dot(a[0], b[0], corrections(a, b, TURNED))


@triton.jit
def product_of_any(a, b):
    """The bits of `product` where that is finite; an infinity in a or b gives what it gives in float32."""
    rest = corrections(a, b, False)
    return tl.dot(a[0], b[0], tl.where(tl.abs(rest) < float("inf"), rest, 0.0))
