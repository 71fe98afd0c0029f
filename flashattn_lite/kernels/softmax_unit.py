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
def loaded(source, at, window, c: gl.constexpr, CHUNKS: gl.constexpr, WORDS: gl.constexpr, EVEN: gl.constexpr,
           BETWEEN: gl.constexpr, WIDTH: gl.constexpr, DTYPE: gl.constexpr, TILE: gl.constexpr,
           RING: gl.constexpr):  # fmt: skip
    """Chunk c of a unit as words [WARPS, WORDS / CHUNKS / WARPS], of the slot `at` of the ring or of global memory."""
    if RING:
        return source[c].index(at).load(TILE)
    else:
        ptr, offs_w = source + at + c * (WORDS // CHUNKS), offsets(WORDS // CHUNKS, TILE)
        part = chunk_of(window, c, WORDS // CHUNKS, WIDTH)
        if EVEN:
            return gl.load(ptr + offs_w)
        elif BETWEEN:
            return by_element(ptr, offs_w, part, WIDTH, DTYPE)
        else:
            x = gl.load(ptr + offs_w, mask=offs_w < part[2], other=0)
            return within(x, part, DTYPE, BETWEEN, TILE)


@gluon.jit
def offer_state(source, at, window, rooms, CHUNKS: gl.constexpr, WORDS: gl.constexpr, EVEN: gl.constexpr,
                BETWEEN: gl.constexpr, WIDTH: gl.constexpr, DTYPE: gl.constexpr, BOTH: gl.constexpr,
                TILE: gl.constexpr, RING: gl.constexpr):  # fmt: skip
    """Each warp puts (top, l_i) of its share of a unit into rooms for the others.

    BETWEEN: top is the whole unit's, because a warp's share is other elements where the row begins elsewhere.
    """
    best = loaded(source, at, window, 0, CHUNKS, WORDS, EVEN, BETWEEN, WIDTH, DTYPE, TILE, RING)
    for c in gl.static_range(1, CHUNKS):
        x = loaded(source, at, window, c, CHUNKS, WORDS, EVEN, BETWEEN, WIDTH, DTYPE, TILE, RING)
        best = larger(best, x, DTYPE)
    wide = widen(best, DTYPE)
    top = gl.convert_layout(tops(best, wide, DTYPE, BOTH), gl.SliceLayout(1, wide.type.layout), assert_trivial=True)
    if BETWEEN:
        rooms[2].store(top)
    if RING:
        barrier()  # else the compiler takes the first loads' values and keeps them in registers
    if BETWEEN:
        top = gl.zeros_like(top) + gl.max(of_all(rooms[2]), 0)
    x = loaded(source, at, window, 0, CHUNKS, WORDS, EVEN, BETWEEN, WIDTH, DTYPE, TILE, RING)
    l_i, fix = weighed(widen(x, DTYPE), top, DTYPE)
    for c in gl.static_range(1, CHUNKS):
        x = loaded(source, at, window, c, CHUNKS, WORDS, EVEN, BETWEEN, WIDTH, DTYPE, TILE, RING)
        p, _ = weighed(widen(x, DTYPE), top, DTYPE)
        l_i += p
    if BETWEEN:
        l_i = turned(l_i, window[0])
    rooms[0].store(top)
    rooms[1].store(gl.sum(l_i, 1) * fix)


@gluon.jit
def clear(ptr, ring, at, window, CHUNKS: gl.constexpr, WORDS: gl.constexpr, ALIGN: gl.constexpr,
          BETWEEN: gl.constexpr, WIDTH: gl.constexpr, DTYPE: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """-inf for what is not the unit's in its slot of the ring, and what its copy from ptr could not bring."""
    for c in gl.static_range(CHUNKS):
        part = chunk_of(window, c, WORDS // CHUNKS, WIDTH)
        if (part[0] > 0) | (part[1] < WORDS // CHUNKS * WIDTH):
            slot = ring[c].index(at)
            slot.store(within(slot.load(TILE), part, DTYPE, BETWEEN, TILE))
    if BETWEEN:
        complete(ptr, ring, at, window, CHUNKS, WORDS, WIDTH, ALIGN // WIDTH, DTYPE)


@gluon.jit
def complete(ptr, ring, at, window, CHUNKS: gl.constexpr, WORDS: gl.constexpr, WIDTH: gl.constexpr,
             VECTOR: gl.constexpr, DTYPE: gl.constexpr):  # fmt: skip
    """Of the one unit that ends where x ends within 16 bytes: these, VECTOR words, into its slot of the ring.

    Behind a branch, and no tile in registers, because all units come by: a tile completed in registers took 4 to 8% of
    softmax's time (docs/experiments.md).
    """
    _, end, words = window
    if words * WIDTH < end:
        ROW: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0])
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        VECTORS: gl.constexpr = WORDS // CHUNKS // VECTOR
        last = by_element(ptr, words + gl.arange(0, VECTOR, layout=ROW), window, WIDTH, DTYPE)
        at_vector = words // VECTOR
        for c in gl.static_range(CHUNKS):
            if (at_vector >= c * VECTORS) & (at_vector < (c + 1) * VECTORS):
                slot = reinterpret(ring[c].index(at), last.dtype, [VECTORS, VECTOR], FLAT)
                slot.index(at_vector - c * VECTORS).store(last)


@gluon.jit
def write(y_ptr, start, ring, slot, window, top, inv_l, CHUNKS: gl.constexpr, COLS: gl.constexpr, EVEN: gl.constexpr,
          BETWEEN: gl.constexpr, ALIKE: gl.constexpr, ALIGN: gl.constexpr, DTYPE: gl.constexpr, TILE: gl.constexpr,
          WIDE: gl.constexpr):  # fmt: skip
    """Writes y = exp(x - top) * inv_l of the unit in a slot of the ring; its first element to start, 64-bit."""
    y_ptr += start - window[0]
    if ALIKE:
        y_ptr = gl.multiple_of(y_ptr, 16)
    top = gl.full([gl.num_warps()], top, gl.float32, gl.SliceLayout(1, WIDE))
    for c in gl.static_range(CHUNKS):
        p, fix = weighed(widen(ring[c].index(slot).load(TILE), DTYPE), top, DTYPE)
        y = (p * (fix * inv_l)[:, None]).to(y_ptr.dtype.element_ty)
        part, ptr = chunk_of(window, c, COLS // CHUNKS, 1), y_ptr + c * (COLS // CHUNKS)
        if BETWEEN:
            store_between(ptr, y, part, ALIGN, ALIKE)
        elif EVEN:
            gl.store(ptr + offsets(COLS // CHUNKS, WIDE), y)
        else:
            offs_n = offsets(COLS // CHUNKS, WIDE)
            gl.store(ptr + offs_n, y, mask=offs_n < part[1] // ALIGN * ALIGN)
