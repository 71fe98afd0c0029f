"""Softmax of long rows in Gluon: units of a row pass through a ring in shared memory, the output comes LAG units later.

A unit is COLS neighbouring elements of one row, a row is `splits` units. The programs are all on the GPU at once. The
first units of each are given, a unit for every program by turns; for the later ones it draws numbers from a counter:
with equal shares of the units some programs end late, and the launch takes 4 to 6% longer. A step of a program takes
one unit in and writes one out:

1. its copy, begun AHEAD steps before by cp.async, has landed; the copy of a later unit begins in the slot that is free,
   and the number of the next one is drawn;
2. (top, l_i) of the unit, the same state as in `softmax.py`, is published as the unit's part;
3. of the unit LAG steps back all parts of its row are merged and y = exp(x - top) / l_i is written.

So nobody stands and waits for neighbours: their parts were published while this program worked on its last units. A
look at them goes out at a step's begin and is needed at its end. Invariant: in a step a program publishes its part
before it waits for anything, and numbers only grow, so that no two wait for each other unless one of them has more than
LAG + 1 units of a row. And nobody waits for ever: after PATIENCE looks a program computes all parts of a row itself,
because nothing promises that its neighbours are on the GPU, or how fast they are.

A part bears the launch's epoch (softmax_exchange.py), a number that no launch had before for this memory, which began
as zeros: neither a count nor a fence nor a clearing is needed. Parts are merged in one order by whoever needs them,
computed in one order by whoever computes them: a row has the same bits whichever program takes which unit, waits or
gives up.

PARTS 1: a unit is a row, LAG is 0, nothing is published or drawn.

CHUNKS: a unit is worked on in so many equal pieces, and a thread sums an element of each; AGAIN: the pieces are loaded
twice, for maximum and sum, and none is kept in registers.

Each element is read once from global memory, twice from shared memory, and written once. Shared memory: SLOTS units of
raw elements (LAG + 1 of them held, AHEAD on their way) and six values a warp, by which warps exchange their states.
Three barriers a step: before a slot is filled anew, when a copy has landed, at the exchange. A bfloat16 element costs
14 instructions with 64 of them a thread, 10 in PARTS 1 with 128.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from flashattn_lite.kernels.device.integers import divided
from flashattn_lite.kernels.device.state import LOG2E, finish, reference, weights
from flashattn_lite.kernels.gluon_names import async_load, barrier
from flashattn_lite.kernels.softmax_exchange import (
    asked,
    draw,
    look,
    merged,
    of_all,
    offer,
    offsets,
    publish,
    room_of,
    taken,
)
from flashattn_lite.kernels.softmax_tiles import larger_bfloat16, larger_float16, tops, widen


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
def loaded(source, at, left, c: gl.constexpr, CHUNKS: gl.constexpr, WORDS: gl.constexpr, EVEN: gl.constexpr,
           DTYPE: gl.constexpr, TILE: gl.constexpr, RING: gl.constexpr):  # fmt: skip
    """Chunk c of a unit as words [WARPS, WORDS / CHUNKS / WARPS], of the slot `at` of the ring or of global memory."""
    if RING:
        return source[c].index(at).load(TILE)
    elif EVEN:
        return gl.load(source + at + offsets(WORDS // CHUNKS, TILE) + c * (WORDS // CHUNKS))
    else:
        offs_w = offsets(WORDS // CHUNKS, TILE) + c * (WORDS // CHUNKS)
        return without_tail(gl.load(source + at + offs_w, mask=offs_w < left, other=0), offs_w < left, DTYPE)


@gluon.jit
def state_of(source, at, left, CHUNKS: gl.constexpr, WORDS: gl.constexpr, EVEN: gl.constexpr, DTYPE: gl.constexpr,
             BOTH: gl.constexpr, TILE: gl.constexpr, RING: gl.constexpr, AGAIN: gl.constexpr):  # fmt: skip
    """(top, l_i) [WARPS] of a unit. AGAIN: elements are loaded again for their exponentials, not kept in registers."""
    best = loaded(source, at, left, 0, CHUNKS, WORDS, EVEN, DTYPE, TILE, RING)
    for c in gl.static_range(1, CHUNKS):
        best = larger(best, loaded(source, at, left, c, CHUNKS, WORDS, EVEN, DTYPE, TILE, RING), DTYPE)
    wide = widen(best, DTYPE)
    top = gl.convert_layout(tops(best, wide, DTYPE, BOTH), gl.SliceLayout(1, wide.type.layout), assert_trivial=True)
    if AGAIN and RING:
        barrier()  # else the compiler takes the first loads' values and keeps them
    l_i, fix = weighed(widen(loaded(source, at, left, 0, CHUNKS, WORDS, EVEN, DTYPE, TILE, RING), DTYPE), top, DTYPE)
    for c in gl.static_range(1, CHUNKS):
        p, _ = weighed(widen(loaded(source, at, left, c, CHUNKS, WORDS, EVEN, DTYPE, TILE, RING), DTYPE), top, DTYPE)
        l_i += p
    return top, gl.sum(l_i, 1) * fix


@gluon.jit
def start_of(unit, sizes, strides, COLS: gl.constexpr, ALIGN: gl.constexpr, FLAT: gl.constexpr, PARTS: gl.constexpr):
    """(where a unit starts, 64-bit, its tile, its split); strides come divided by ALIGN."""
    splits, size_1, size_r = sizes
    stride_0, stride_1, stride_r = strides
    tile, split = unit, unit * 0
    if PARTS > 1:
        tile, split = divided(unit, splits)
    if FLAT:
        start = tile.to(gl.int64) * stride_r
    else:
        outer, inner = divided(tile, size_r.to(gl.int32))
        i_0, i_1 = divided(outer, size_1)
        start = i_0.to(gl.int64) * stride_0 + i_1.to(gl.int64) * stride_1 + inner.to(gl.int64) * stride_r
    return start * ALIGN + split.to(gl.int64) * COLS, tile, split


@gluon.jit
def left_of(cols, split, COLS: gl.constexpr):
    """How many of a unit's columns its row has, COLS at most."""
    return gl.minimum(cols - split.to(gl.int64) * COLS, COLS).to(gl.int32)


@gluon.jit
def without_tail(x, there, dtype: gl.constexpr):
    """-inf for words that are not there: it adds 0 to a sum."""
    if dtype == gl.bfloat16:
        beyond: gl.constexpr = -0x007F0080  # -inf, twice
    elif dtype == gl.float16:
        beyond: gl.constexpr = -0x03FF0400
    else:
        beyond: gl.constexpr = float("-inf")
    return gl.where(there, x, beyond)


@gluon.jit
def computed(x_ptr, parts_ptr, tile, epoch, words, sizes, strides, rooms, WORDS: gl.constexpr,
             PARTS: gl.constexpr, ALIGN: gl.constexpr, EVEN: gl.constexpr, FLAT: gl.constexpr, BOTH: gl.constexpr,
             DTYPE: gl.constexpr, TILE: gl.constexpr, CHUNKS: gl.constexpr):  # fmt: skip
    """Computes and publishes all parts of a row, over what others may be publishing now: the same bits."""
    for other in range(sizes[0]):
        unit = tile * sizes[0] + other
        start, _, split = start_of(unit, sizes, strides, WORDS, ALIGN, FLAT, PARTS)
        m_w, l_w = state_of(
            x_ptr, start, left_of(words, split, WORDS), CHUNKS, WORDS, EVEN, DTYPE, BOTH, TILE, False, False
        )
        rooms[0].store(m_w)
        rooms[1].store(l_w)
        top, l_i = merged(rooms[0], rooms[1])
        publish(parts_ptr, unit, top, l_i, epoch)


@gluon.jit
def awaited(found, x_ptr, parts_ptr, tile, epoch, words, sizes, strides, rooms, row_rooms, WORDS: gl.constexpr,
            PARTS: gl.constexpr, PATIENCE: gl.constexpr, ALIGN: gl.constexpr, EVEN: gl.constexpr, FLAT: gl.constexpr,
            BOTH: gl.constexpr, DTYPE: gl.constexpr, TILE: gl.constexpr, CHUNKS: gl.constexpr):  # fmt: skip
    """(top, l_i) of a row, of which `found` is what `taken` gave: looked for again while a part is missing."""
    top, l_i, missing = found
    looks = 0
    while (missing != 0) & (looks < PATIENCE):
        top, l_i, missing = asked(parts_ptr, tile, sizes[0], epoch, row_rooms, PARTS)
        looks += 1
    if missing != 0:
        computed(x_ptr, parts_ptr, tile, epoch, words, sizes, strides, rooms,
                 WORDS, PARTS, ALIGN, EVEN, FLAT, BOTH, DTYPE, TILE, CHUNKS)  # fmt: skip
        barrier()  # from here on all threads see what one has published
        top, l_i, _ = asked(parts_ptr, tile, sizes[0], epoch, row_rooms, PARTS)
    return top, l_i


@gluon.jit
def begin(x_ptr, i, unit, units, words, sizes, strides, ring, SLOTS: gl.constexpr, WORDS: gl.constexpr,
          PARTS: gl.constexpr, ALIGN: gl.constexpr, EVEN: gl.constexpr, FLAT: gl.constexpr, TILE: gl.constexpr,
          CHUNKS: gl.constexpr):  # fmt: skip
    """Begins the copy of this program's i-th unit into the ring; past the last an empty copy, which is counted."""
    if unit < units:
        start, _, split = start_of(unit, sizes, strides, WORDS, ALIGN, FLAT, PARTS)
        for c in gl.static_range(CHUNKS):
            slot = ring[c].index(i % SLOTS)
            offs_w = offsets(WORDS // CHUNKS, TILE) + c * (WORDS // CHUNKS)
            if EVEN:
                async_load(slot, x_ptr + start + offs_w)
            else:
                mask = offs_w < left_of(words, split, WORDS)
                async_load(slot, x_ptr + start + offs_w, mask=mask)
    async_copy.commit_group()


@gluon.jit
def end(ring, at, left, CHUNKS: gl.constexpr, WORDS: gl.constexpr, DTYPE: gl.constexpr, TILE: gl.constexpr):
    """-inf behind the last word of a unit in the ring, if it is not full."""
    if left < WORDS:
        for c in gl.static_range(CHUNKS):
            there = offsets(WORDS // CHUNKS, TILE) + c * (WORDS // CHUNKS) < left
            slot = ring[c].index(at)
            slot.store(without_tail(slot.load(TILE), there, DTYPE))
        barrier()


@gluon.jit
def write(y_ptr, ring, slot, left, top, inv_l, CHUNKS: gl.constexpr, COLS: gl.constexpr, EVEN: gl.constexpr,
          DTYPE: gl.constexpr, TILE: gl.constexpr, WIDE: gl.constexpr):  # fmt: skip
    """Writes y = exp(x - top) * inv_l of the unit in a slot of the ring."""
    top = gl.full([gl.num_warps()], top, gl.float32, gl.SliceLayout(1, WIDE))
    for c in gl.static_range(CHUNKS):
        p, fix = weighed(widen(ring[c].index(slot).load(TILE), DTYPE), top, DTYPE)
        y = (p * (fix * inv_l)[:, None]).to(y_ptr.dtype.element_ty)
        offs_n = offsets(COLS // CHUNKS, WIDE) + c * (COLS // CHUNKS)
        if EVEN:
            gl.store(y_ptr + offs_n, y)
        else:
            gl.store(y_ptr + offs_n, y, mask=offs_n < left)


@gluon.jit
def first_numbers(first, programs, LAG: gl.constexpr, AHEAD: gl.constexpr):
    """Units of LAG steps ago, none yet (-1), to AHEAD steps later: given by turns."""
    numbers = ()
    for _ in gl.static_range(LAG):
        numbers = numbers + (first * 0 - 1,)
    for i in gl.static_range(AHEAD + 1):
        numbers = numbers + (first + i * programs,)
    return numbers


@gluon.jit
def ring_of(WORD: gl.constexpr, SLOTS: gl.constexpr, WORDS: gl.constexpr, CHUNKS: gl.constexpr):
    """An allocation for each chunk of all slots: Triton would put barriers between copies into one."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring = ()
    for _ in gl.static_range(CHUNKS):
        ring = ring + (gl.allocate_shared_memory(WORD, [SLOTS, WARPS, WORDS // CHUNKS // WARPS], ROWS),)
    return ring


# Nothing is specialized on a size or a stride, as in `softmax.py`: what comes in elements comes divided by ALIGN, which
# is 16 bytes or 4: what a thread copies, loads and stores at once.
@gluon.jit(do_not_specialize=[2, *range(4, 16)])
def ring_kernel(
    x_ptr, y_ptr, counter_ptr, parts_ptr, epoch: gl.int32, units: gl.int32, cols: gl.int64, splits: gl.int32,
    size_1: gl.int32, size_r: gl.int64, stride_x0: gl.int64, stride_x1: gl.int64, stride_xr: gl.int64,
    stride_y0: gl.int64, stride_y1: gl.int64, stride_yr: gl.int64,
    COLS: gl.constexpr, SLOTS: gl.constexpr, LAG: gl.constexpr, PARTS: gl.constexpr, PATIENCE: gl.constexpr,
    ALIGN: gl.constexpr, EVEN: gl.constexpr, FLAT: gl.constexpr, WIDTH: gl.constexpr, BOTH: gl.constexpr,
    CHUNKS: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """y = softmax(x) along the columns, which lie side by side.

    counter_ptr: an int32 zero of this launch alone; parts_ptr: two int64 a unit; neither is used with PARTS 1.
    """
    WARPS: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = COLS // WIDTH
    WORD: gl.constexpr = gl.int32 if WIDTH == 2 else gl.float32
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    STEP: gl.constexpr = ALIGN // WIDTH
    AHEAD: gl.constexpr = SLOTS - LAG - 1
    TILE: gl.constexpr = gl.BlockedLayout([1, STEP], [1, 32], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, ALIGN], [1, 32], [WARPS, 1], [1, 0])  # TILE after `widen`
    gl.static_assert(AHEAD >= 0)
    gl.static_assert(LAG == 0 or PARTS > 1)
    x_strides, y_strides = (stride_x0, stride_x1, stride_xr), (stride_y0, stride_y1, stride_yr)
    sizes = (splits, size_1, size_r)
    ring = ring_of(WORD, SLOTS, WORDS, CHUNKS)
    rooms = (room_of(gl.float32), room_of(gl.float32))
    if PARTS > 1:
        row_rooms = (room_of(gl.float32), room_of(gl.float32), room_of(gl.int32))
        number_s = room_of(gl.int32)
    x_ptr = x_ptr.to(gl.pointer_type(WORD))
    words, cols = cols * STEP, cols * ALIGN
    first, programs = gl.program_id(0), gl.num_programs(0)
    numbers = first_numbers(first, programs, LAG, AHEAD)
    for j in gl.static_range(AHEAD):
        begin(x_ptr, j, numbers[LAG + j], units, words, sizes, x_strides, ring,
              SLOTS, WORDS, PARTS, STEP, EVEN, FLAT, TILE, CHUNKS)  # fmt: skip
    i = 0
    while numbers[0] < units:  # of LAG steps ago
        unit = numbers[LAG]
        y_start, tile, split = start_of(gl.maximum(numbers[0], 0), sizes, y_strides, COLS, ALIGN, FLAT, PARTS)
        if PARTS > 1:
            next_w = draw(counter_ptr, gl.SliceLayout(1, TILE))
            parts = look(parts_ptr, tile, splits, PARTS)
        begin(x_ptr, i + AHEAD, numbers[LAG + AHEAD], units, words, sizes, x_strides, ring,
              SLOTS, WORDS, PARTS, STEP, EVEN, FLAT, TILE, CHUNKS)  # fmt: skip
        async_copy.wait_group(AHEAD)
        if unit < units:
            if not EVEN:
                _, _, own = start_of(unit, sizes, x_strides, COLS, ALIGN, FLAT, PARTS)
                end(ring, i % SLOTS, left_of(words, own, WORDS), CHUNKS, WORDS, DTYPE, TILE)
            m_w, l_w = state_of(ring, i % SLOTS, WORDS, CHUNKS, WORDS, EVEN, DTYPE, BOTH, TILE, True, AGAIN)
            rooms[0].store(m_w)
            rooms[1].store(l_w)
        if PARTS > 1:
            number_s.store(next_w)
            offer(parts, epoch, row_rooms)
        top, l_i = merged(rooms[0], rooms[1])
        later = numbers[LAG + AHEAD] + programs
        if PARTS > 1:
            later = gl.max(of_all(number_s), 0) + (AHEAD + 1) * programs
            if unit < units:
                publish(parts_ptr, unit, top, l_i, epoch)
            found = taken(row_rooms)
        if numbers[0] >= 0:
            if PARTS > 1:
                top, l_i = awaited(found, x_ptr, parts_ptr, tile, epoch, words, sizes, x_strides, rooms, row_rooms,
                                   WORDS, PARTS, PATIENCE, STEP, EVEN, FLAT, BOTH, DTYPE, TILE, CHUNKS)  # fmt: skip
            inv_l, _ = finish(top, l_i)  # not in `write`: Triton 3.6 crashes
            write(y_ptr + y_start, ring, (i + SLOTS - LAG) % SLOTS, left_of(cols, split, COLS), top, inv_l,
                  CHUNKS, COLS, EVEN, DTYPE, TILE, WIDE)  # fmt: skip
        numbers = numbers[1:] + (later,)
        i += 1
