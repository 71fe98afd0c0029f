"""Tiles of rows for the softmax kernels: which unit has which, where they lie, how they are read and widened."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn_lite.kernels.device.integers import divided

# A word of two elements that are -inf, which adds 0 to a sum.
NOTHING_BFLOAT16: tl.constexpr = tl.constexpr(-0x007F0080)
NOTHING_FLOAT16: tl.constexpr = tl.constexpr(-0x03FF0400)
MOST_LEFT: tl.constexpr = tl.constexpr(1 << 30)  # words of a unit are fewer; divisible as they are


@triton.jit
def place(tile, size_1, size_r, ROWS: tl.constexpr, FLAT: tl.constexpr):
    """A tile's index in the two outer row dimensions and its first one in the inner one, all 64-bit.

    FLAT: there are no outer ones, and nothing to divide.
    """
    if FLAT:
        zero = tl.cast(0, tl.int64)
        return zero, zero, tl.cast(tile, tl.int64) * ROWS
    outer, inner = divided(tile, tl.cdiv(size_r, ROWS).to(tl.int32))
    i_0, i_1 = divided(outer, size_1)
    return i_0.to(tl.int64), i_1.to(tl.int64), inner.to(tl.int64) * ROWS


@triton.jit
def locate(tile, size_1, size_r, ROWS: tl.constexpr, FLAT: tl.constexpr):
    """`place` with the tile's ROWS indices in the inner dimension."""
    i_0, i_1, i_r = place(tile, size_1, size_r, ROWS, FLAT)
    return i_0, i_1, i_r + tl.arange(0, ROWS)


@triton.jit
def columns(tile, COLS: tl.constexpr):
    """Indices [COLS] of a row's columns that its tile of that number holds, 64-bit: their addresses share a base."""
    return tl.cast(tile, tl.int64) * COLS + tl.arange(0, COLS)


@triton.jit
def addresses(ptr, strides, at, offs_n, ALIGN: tl.constexpr, UNIT: tl.constexpr, ACROSS: tl.constexpr):
    """[M, N] of the rows `at`, as `locate` gives them. A unit stride is known when compiling: neighbours load together.

    strides: of the outer dimensions, of rows and of columns, divided by ALIGN.
    """
    stride_0, stride_1, stride_r, stride_n = strides
    i_0, i_1, offs_r = at
    ptr += (i_0 * stride_0 + i_1 * stride_1) * ALIGN
    if UNIT and ACROSS:
        return ptr + (offs_r[:, None] + offs_n[None, :].to(tl.int64) * (stride_n * ALIGN))
    elif UNIT:
        return ptr + (offs_r[:, None] * (stride_r * ALIGN) + offs_n[None, :])
    else:
        return ptr + (offs_r[:, None] * (stride_r * ALIGN) + offs_n[None, :].to(tl.int64) * (stride_n * ALIGN))


@triton.jit
def inside(at, offs_n, size_r, cols, EVEN: tl.constexpr):
    """[M, N], or [M, 1] where rows fill their tiles: which elements of a tile belong to rows."""
    rows = (at[2] < size_r)[:, None]
    if EVEN:
        return rows
    else:
        return rows & (offs_n < cols)[None, :]


@triton.jit
def load(ptr, strides, at, offs_w, size_r, words, ALIGN: tl.constexpr, UNIT: tl.constexpr, ACROSS: tl.constexpr,
         WIDTH: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """A tile [M, words] as it lies in memory; what lies outside its columns is -inf, which adds 0 to a sum.

    A word is WIDTH elements. Two of two bytes stay one: a compiler would take them apart to hold them over a loop.
    """
    there = inside(at, offs_w, size_r, words, EVEN)
    x = addresses(in_words(ptr, WIDTH), strides, at, offs_w, ALIGN // WIDTH, UNIT, ACROSS)
    return fetch(x, there, ptr.dtype.element_ty, EVEN)


@triton.jit
def in_words(ptr, WIDTH: tl.constexpr):
    """ptr to words of WIDTH elements."""
    if WIDTH == 2:
        return ptr.to(tl.pointer_type(tl.int32))
    else:
        return ptr


@triton.jit
def fetch(ptrs, there, DTYPE: tl.constexpr, EVEN: tl.constexpr):
    """Words of elements of DTYPE; those that are not there are -inf, or with EVEN nobody's."""
    if EVEN:
        return tl.load(ptrs, mask=there)
    elif ptrs.dtype.element_ty == tl.int32:
        beyond: tl.constexpr = NOTHING_BFLOAT16 if tl.bfloat16 == DTYPE else NOTHING_FLOAT16
        return tl.load(ptrs, mask=there, other=beyond)
    else:
        return tl.load(ptrs, mask=there, other=float("-inf"))


@triton.jit
def tile_of(ptr, stride_n, number, N: tl.constexpr, UNIT: tl.constexpr):
    """Addresses [1, N] of tile `number` of a row that begins at ptr, from one address: so the others are constants."""
    ptr += tl.cast(number, tl.int64) * N * stride_n
    offs = tl.arange(0, N)[None, :]
    if UNIT:
        return ptr + offs
    else:
        return ptr + offs.to(tl.int64) * stride_n


@triton.jit
def load_tile(ptr, strides, at, begin, i, rows, words, WORDS: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
              UNIT: tl.constexpr, ACROSS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """`load` of tile `begin + i`, of WORDS words, of the ROWS rows from the place `at` on; of none from `rows` on."""
    i_0, i_1, i_r = at
    if ROWS == 1 and UNIT and not ACROSS:
        # What does not hang on i is worked out once; addresses are one with constants, a mask is an int32 comparison.
        row = in_words(ptr, WIDTH) + (i_0 * strides[0] + i_1 * strides[1] + i_r * strides[2]) * (ALIGN // WIDTH)
        left = tl.where(i_r < rows, tl.minimum(words - begin * WORDS, MOST_LEFT), 0).to(tl.int32) - i * WORDS
        x, offs_w = tile_of(row + begin * WORDS, 1, i, WORDS, True), tl.arange(0, WORDS)[None, :]
        # Where a word is all that is loaded at once, each would need a mask: full tiles have none.
        if ALIGN <= WIDTH and left >= WORDS:
            y = fetch(x, None, ptr.dtype.element_ty, True)
        else:
            y = fetch(x, offs_w < left, ptr.dtype.element_ty, False)
        return y
    else:
        at_rows = i_0, i_1, i_r + tl.arange(0, ROWS)
        offs_w = columns(begin + i, WORDS)
        return load(ptr, strides, at_rows, offs_w, rows, words, ALIGN, UNIT, ACROSS, WIDTH, EVEN)


@triton.jit
def widen(x, dtype: tl.constexpr):
    """The float32 elements [M, N] of a tile as `load` gives it."""
    if x.dtype != tl.int32:
        return x.to(tl.float32)
    elif dtype == tl.bfloat16:
        return tl.interleave((x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True))
    else:
        low, high = x.to(tl.int16).to(dtype, bitcast=True), (x >> 16).to(tl.int16).to(dtype, bitcast=True)
        return tl.interleave(low.to(tl.float32), high.to(tl.float32))


@triton.jit
def larger_bfloat16(a, b):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def larger_float16(a, b):
    return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def tops(x, wide, dtype: tl.constexpr, BOTH: tl.constexpr):
    """Row maxima [M] of a tile x as it was loaded, `wide` in float32; NaN is passed over.

    BOTH: x is words, of which the GPU compares both halves, of three at once, in one instruction.
    """
    if not BOTH:
        return tl.max(wide, 1)
    elif dtype == tl.bfloat16:
        return tl.max(widen(tl.reduce(x, 1, larger_bfloat16)[:, None], dtype), 1)
    else:
        return tl.max(widen(tl.reduce(x, 1, larger_float16)[:, None], dtype), 1)


@triton.jit
def lanes(x, ROWS: tl.constexpr, COLS: tl.constexpr, LANES: tl.constexpr, ALIGN: tl.constexpr):
    """x [ROWS, COLS] as [ROWS * LANES, COLS / LANES]: what a thread holds of a row, if LANES share it."""
    x = tl.reshape(x, [ROWS, COLS // (LANES * ALIGN), LANES, ALIGN])
    return tl.reshape(tl.permute(x, (0, 2, 1, 3)), [ROWS * LANES, COLS // LANES])


@triton.jit
def unit_of(unit, splits, units, ACROSS: tl.constexpr):
    """(tile, split) of a unit. The units that are worked on at the same time are neighbours in memory."""
    if ACROSS:
        split, tile = divided(unit, divided(units, splits)[0])
    else:
        tile, split = divided(unit, splits)
    return tile, split
