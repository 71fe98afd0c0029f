"""Where units of rows lie in memory and in their slots of the ring, which are copied by 16 bytes at once.

A slot begins at a 16-byte address. Where rows do too, a unit is its slot's COLS elements. BETWEEN: where they do not, a
unit is elements `lead` to `end` of its slot, and by 16 bytes shorter; what else its first and last 16 bytes hold is its
neighbours', read and replaced by -inf. What lies behind x is nobody's: where x ends within 16 bytes, its elements among
them come by loads of their own (`by_element`). All the same a row has the same bits wherever it lies: a maximum knows
no order, and a thread's sums, one for each place in a chunk, are taken in the places that they would have with lead 0
(`turned`). What a turn takes around the end is a chunk late: its first summand is 0 then.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn_lite.kernels.device.integers import divided
from flashattn_lite.kernels.softmax_exchange import offsets
from flashattn_lite.kernels.softmax_tiles import NOTHING_BFLOAT16, NOTHING_FLOAT16


@gluon.jit
def start_of(unit, sizes, strides, T: gl.constexpr):
    """(where a unit starts, in elements, 64-bit; its tile; its split).

    strides: of the three row dimensions, and where the first row starts.
    """
    splits, size_1, size_r, _ = sizes
    stride_0, stride_1, stride_r, first = strides
    tile, split = unit, unit * 0
    if T.PARTS > 1:
        tile, split = divided(unit, splits)
    if T.FLAT:
        start = first + tile.to(gl.int64) * stride_r
    else:
        outer, inner = divided(tile, size_r.to(gl.int32))
        i_0, i_1 = divided(outer, size_1)
        start = first + i_0.to(gl.int64) * stride_0 + i_1.to(gl.int64) * stride_1 + inner.to(gl.int64) * stride_r
    return start + split.to(gl.int64) * T.OWN, tile, split


@gluon.jit
def slot_of(unit, cols, sizes, strides, T: gl.constexpr):
    """Where a unit's slot starts in memory, in words, 64-bit; and its window: (lead, end, words up to there).

    The words are whole 16 bytes that may be read: up to `end`, except where x itself ends within 16 bytes.
    """
    ALIGN: gl.constexpr = T.ALIGN
    start, _, split = start_of(unit, sizes, strides, T)
    lead = split * 0
    if T.BETWEEN:
        lead = (start & (ALIGN - 1)).to(gl.int32)
    end = lead + gl.minimum(cols - split.to(gl.int64) * T.OWN, T.OWN).to(gl.int32)
    vectors = (end + ALIGN - 1) // ALIGN
    if T.BETWEEN:
        vectors = gl.minimum(vectors, sizes[3] - start // ALIGN).to(gl.int32)
    # Multiples of 16 bytes, as the compiler sees.
    return start // ALIGN * (ALIGN // T.WIDTH), (lead, end, vectors * (ALIGN // T.WIDTH))


@gluon.jit
def chunk_of(window, c: gl.constexpr, T: gl.constexpr):
    """A window as seen from chunk c: so all chunks share the few offsets that a thread holds."""
    lead, end, words = window
    return lead - c * T.CHUNK * T.WIDTH, end - c * T.CHUNK * T.WIDTH, words - c * T.CHUNK


@gluon.constexpr_function
def nothing(dtype):
    """A word whose elements are -inf, which adds 0 to a sum."""
    return {gl.bfloat16: NOTHING_BFLOAT16, gl.float16: NOTHING_FLOAT16}.get(dtype, float("-inf"))


@gluon.jit
def by_element(ptr, offs_w, window, DTYPE: gl.constexpr, T: gl.constexpr):
    """Words offs_w behind ptr, loaded element by element where these are the unit's; -inf for all others."""
    lead, end, _ = window
    ptrs, offs_n = ptr + offs_w, offs_w * T.WIDTH
    here = (offs_n >= lead) & (offs_n < end)
    if T.WIDTH == 2:
        HALF: gl.constexpr = nothing(DTYPE) >> 16
        ptrs, odd = ptr.to(gl.pointer_type(gl.int16)) + offs_n, (offs_n + 1 >= lead) & (offs_n + 1 < end)
        low, high = gl.load(ptrs, mask=here, other=HALF), gl.load(ptrs + 1, mask=odd, other=HALF)
        return (low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16)
    else:
        return gl.load(ptrs, mask=here, other=nothing(DTYPE))


@gluon.jit
def within(x, window, DTYPE: gl.constexpr, T: gl.constexpr):
    """Words x [WARPS, N] of a chunk, with -inf, which adds 0 to a sum, for elements that are not the unit's."""
    lead, end, words = window
    TILE: gl.constexpr = T.TILE
    offs_w = offsets(T.CHUNK, TILE)
    beyond: gl.constexpr = nothing(DTYPE)
    if not T.BETWEEN:
        return gl.where(offs_w < words, x, beyond)
    elif x.dtype == gl.int32:
        low = gl.where((2 * offs_w >= lead) & (2 * offs_w < end), x, beyond)
        high = gl.where((2 * offs_w + 1 >= lead) & (2 * offs_w + 1 < end), x, beyond)
        return (low & 0xFFFF) | (high & -65536)
    else:
        return gl.where((offs_w >= lead) & (offs_w < end), x, beyond)


@gluon.jit
def turned(l_i, lead):
    """l_i [M, N], in which elements follow row after row, from its element `lead` on, around."""
    COUNT: gl.constexpr = l_i.shape[0] * l_i.shape[1]
    flat = gl.reshape(l_i, [COUNT])
    flat = gl.gather(flat, (gl.arange(0, COUNT, layout=flat.type.layout) + lead) & (COUNT - 1), 0)
    return gl.convert_layout(gl.reshape(flat, l_i.shape), l_i.type.layout, assert_trivial=True)


@gluon.jit
def store_between(ptr, y, window, T: gl.constexpr):
    """Stores the unit's of y [WARPS, N], a chunk whose place in memory starts at ptr.

    ALIKE: ptr is a 16-byte address. Where it is not, what lies side by side is stored by neighbours in a warp.
    """
    COUNT: gl.constexpr = y.shape[0] * y.shape[1]
    ALIGN: gl.constexpr = T.ALIGN
    STEP: gl.constexpr = ALIGN if T.ALIKE else 1
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, STEP], [1, 32], [T.WARPS, 1], [1, 0])
    lead, end, _ = window
    y, offs_n = gl.convert_layout(y, LAYOUT), offsets(COUNT, LAYOUT)
    if (lead <= 0) & (end >= COUNT):
        gl.store(ptr + offs_n, y)
    else:
        here = (offs_n >= lead) & (offs_n < end)
        if T.ALIKE:
            first, last = gl.maximum(lead + ALIGN - 1, 0) // ALIGN * ALIGN, gl.maximum(end, 0) // ALIGN * ALIGN
            inner = (offs_n >= first) & (offs_n < last)
            gl.store(ptr + offs_n, y, mask=inner)
            here = here & (inner == 0)
        gl.store(ptr + offs_n, y, mask=here)
