"""A unit of a row in its slot of the ring: its state, its output, a chunk at a time."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn_lite.kernels.device.state import LOG2E, reference, weights
from flashattn_lite.kernels.gluon_names import barrier, reinterpret
from flashattn_lite.kernels.softmax_exchange import of_all, offsets
from flashattn_lite.kernels.softmax_tiles import larger_bfloat16, larger_float16, tops, widen
from flashattn_lite.kernels.softmax_window import by_element, chunk_of, store_between, turned, within


@gluon.jit
def weighed(x, top, DTYPE: gl.constexpr):
    """(p [M, N], fix [M]) of x in natural units: p * fix = exp(x - top). The twin of `softmax.weighed`, its reasons."""
    origin = reference(top)
    if DTYPE.primitive_bitwidth == 16:
        scale = gl.where(gl.abs(origin) < 65536.0, LOG2E, 1.0)
        m_ref = origin * scale
        return weights(x, scale[:, None], m_ref), gl.exp2(-gl.fma(origin, scale, -m_ref))
    else:
        zero = gl.zeros_like(origin)
        return weights(x - origin[:, None], LOG2E, zero), zero + 1.0


@gluon.jit
def larger(a, b, dtype: gl.constexpr):
    """The larger of each element of tiles as they were loaded; NaN is passed over."""
    if a.dtype != gl.int32:
        return gl.maximum(a, b)
    elif dtype == gl.bfloat16:
        return larger_bfloat16(a, b)
    else:
        return larger_float16(a, b)


@gluon.jit
def loaded(source, at, window, c: gl.constexpr, DTYPE: gl.constexpr, T: gl.constexpr, RING: gl.constexpr):
    """Chunk c of a unit as words [WARPS, CHUNK / WARPS], of the slot `at` of the ring or of global memory."""
    TILE: gl.constexpr = T.TILE
    if RING:
        return source[c].index(at).load(TILE)
    else:
        ptr, offs_w, part = source + at + c * T.CHUNK, offsets(T.CHUNK, TILE), chunk_of(window, c, T)
        if T.EVEN:
            return gl.load(ptr + offs_w)
        elif T.BETWEEN:
            return by_element(ptr, offs_w, part, DTYPE, T)
        else:
            return within(gl.load(ptr + offs_w, mask=offs_w < part[2], other=0), part, DTYPE, T)


@gluon.jit
def offer_state(source, at, window, rooms, DTYPE: gl.constexpr, T: gl.constexpr, RING: gl.constexpr):
    """Each warp puts (top, l_i) of its share of a unit into rooms for the others.

    BETWEEN: top is the whole unit's, because a warp's share is other elements where the row begins elsewhere.
    """
    CHUNKS: gl.constexpr = T.CHUNKS
    best = loaded(source, at, window, 0, DTYPE, T, RING)
    for c in gl.static_range(1, CHUNKS):
        best = larger(best, loaded(source, at, window, c, DTYPE, T, RING), DTYPE)
    wide = widen(best, DTYPE)
    top = tops(best, wide, DTYPE, T.WIDTH == 2)
    top = gl.convert_layout(top, gl.SliceLayout(1, wide.type.layout), assert_trivial=True)
    if T.BETWEEN:
        rooms[2].store(top)
    if RING:
        barrier()  # else the compiler takes the first loads' values and keeps them in registers
    if T.BETWEEN:
        top = gl.zeros_like(top) + gl.max(of_all(rooms[2]), 0)
    l_i, fix = weighed(widen(loaded(source, at, window, 0, DTYPE, T, RING), DTYPE), top, DTYPE)
    for c in gl.static_range(1, CHUNKS):
        p, _ = weighed(widen(loaded(source, at, window, c, DTYPE, T, RING), DTYPE), top, DTYPE)
        l_i += p
    if T.BETWEEN:
        l_i = turned(l_i, window[0])
    rooms[0].store(top)
    rooms[1].store(gl.sum(l_i, 1) * fix)


@gluon.jit
def clear(ptr, ring, at, window, DTYPE: gl.constexpr, T: gl.constexpr):
    """-inf for what is not the unit's in its slot of the ring, and what its copy from ptr could not bring."""
    CHUNKS: gl.constexpr = T.CHUNKS
    for c in gl.static_range(CHUNKS):
        part = chunk_of(window, c, T)
        if (part[0] > 0) | (part[1] < T.CHUNK * T.WIDTH):
            slot = ring[c].index(at)
            slot.store(within(slot.load(T.TILE), part, DTYPE, T))
    if T.BETWEEN:
        complete(ptr, ring, at, window, DTYPE, T)


@gluon.jit
def complete(ptr, ring, at, window, DTYPE: gl.constexpr, T: gl.constexpr):
    """Of the one unit that ends where x ends within 16 bytes: these, VECTOR words, into its slot of the ring.

    Behind a branch, and no tile in registers, because all units come by: a tile completed in registers took 4 to 8% of
    softmax's time (docs/experiments.md).
    """
    CHUNKS: gl.constexpr = T.CHUNKS
    _, end, words = window
    if words * T.WIDTH < end:
        VECTOR: gl.constexpr = T.ALIGN // T.WIDTH
        VECTORS: gl.constexpr = T.CHUNK // VECTOR
        ROW: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [T.WARPS], [0])
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        last = by_element(ptr, words + gl.arange(0, VECTOR, layout=ROW), window, DTYPE, T)
        at_vector = words // VECTOR
        for c in gl.static_range(CHUNKS):
            if (at_vector >= c * VECTORS) & (at_vector < (c + 1) * VECTORS):
                slot = reinterpret(ring[c].index(at), last.dtype, [VECTORS, VECTOR], FLAT)
                slot.index(at_vector - c * VECTORS).store(last)


@gluon.jit
def write(y_ptr, start, ring, slot, window, top, inv_l, DTYPE: gl.constexpr, T: gl.constexpr):
    """Writes y = exp(x - top) * inv_l of the unit in a slot of the ring; its first element to start, 64-bit."""
    CHUNKS: gl.constexpr = T.CHUNKS
    CHUNK: gl.constexpr = T.CHUNK * T.WIDTH  # elements
    WIDE: gl.constexpr = T.WIDE
    lead, end, _ = window
    y_ptr += start - lead
    if T.ALIKE:
        y_ptr = gl.multiple_of(y_ptr, 16)
    top = gl.full([T.WARPS], top, gl.float32, gl.SliceLayout(1, WIDE))
    for c in gl.static_range(CHUNKS):
        p, fix = weighed(widen(ring[c].index(slot).load(T.TILE), DTYPE), top, DTYPE)
        y = (p * (fix * inv_l)[:, None]).to(y_ptr.dtype.element_ty)
        ptr = y_ptr + c * CHUNK
        if T.BETWEEN:
            store_between(ptr, y, chunk_of(window, c, T), T)
        elif T.EVEN:
            gl.store(ptr + offsets(CHUNK, WIDE), y)
        else:
            offs_n = offsets(CHUNK, WIDE)
            gl.store(ptr + offs_n, y, mask=offs_n < (end - c * CHUNK) // T.ALIGN * T.ALIGN)
