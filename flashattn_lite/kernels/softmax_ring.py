"""Softmax of long rows in Gluon: units of a row pass through a ring in shared memory, the output comes LAG units later.

A unit is COLS neighbouring elements of one row (softmax_window.py), a row is `splits` units. The programs are all on
the GPU at once. The first units of each are given, a unit for every program by turns; for the later ones it draws
numbers from a counter: with equal shares of the units some programs end late, and the launch takes 4 to 6% longer. A
step of a program takes one unit in and writes one out:

1. its copy, begun AHEAD steps before by cp.async, has landed; the copy of a later unit begins in the slot that is free,
   and the number of the next one is drawn, as long as there are any;
2. (top, l_i) of the unit, the same state as in `softmax.py`, is published as the unit's part;
3. of the unit LAG steps back all parts of its row are merged and y = exp(x - top) / l_i is written.

So nobody stands and waits for neighbours: their parts were published while this program worked on its last units. A
look at them goes out at a step's begin and is needed behind the unit's own part: that others may need, so it waits for
neither look nor draw. Invariant: in a step a program publishes its part before it waits for anything, and numbers only
grow, so that no two wait for each other unless one of them has more than LAG + 1 units of a row. And nobody waits for
ever: after PATIENCE looks a program computes all parts of a row itself, because nothing promises that its neighbours
are on the GPU, or how fast they are.

A part bears the launch's epoch (softmax_exchange.py), a number that no launch had before for this memory, which began
as zeros: neither a count nor a fence nor a clearing is needed. Parts are merged in one order by whoever needs them,
computed in one order by whoever computes them: a row has the same bits whichever program takes which unit, waits or
gives up.

PARTS 1: a unit is a row, LAG is 0, nothing is published or drawn. STATS: (top, l_i) of rows and no output.

CHUNKS: a unit is worked on in so many equal pieces, of each of which a thread sums the same places. They are loaded
twice, for maximum and sum, and none is kept in registers.

Each element is read once from global memory, three times from shared memory, and written once. Shared memory: SLOTS
units of raw elements (LAG + 1 of them held, AHEAD on their way) and seven values a warp, by which warps exchange their
states; for rows between 16-byte addresses a float32 more for each place in a chunk. Barriers of a step: before a slot
is filled anew, when a copy has landed, between its two readings, at the two exchanges. A bfloat16 element costs 14
instructions with 64 of them a thread, 10 in PARTS 1 with 128.

| file | what of it |
| --- | --- |
| softmax_shape.py | what it is compiled for |
| softmax_ring.py | who takes which unit when, and who waits for whom |
| softmax_window.py | where a unit lies in memory and in its slot |
| softmax_unit.py | a unit's state and its output |
| softmax_exchange.py | how warps and programs tell each other states |
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from flashattn_lite.kernels.device.state import finish
from flashattn_lite.kernels.gluon_names import async_load, barrier
from flashattn_lite.kernels.softmax import store_stats
from flashattn_lite.kernels.softmax_exchange import (
    asked,
    draw,
    look,
    merged,
    of_all,
    offer,
    offsets,
    publish,
    taken,
    warp_room,
)
from flashattn_lite.kernels.softmax_unit import clear, offer_state, write
from flashattn_lite.kernels.softmax_window import chunk_of, slot_of, start_of


@gluon.jit
def computed(x_ptr, parts_ptr, tile, epoch, cols, sizes, strides, rooms, DTYPE: gl.constexpr, T: gl.constexpr):
    """Computes and publishes all parts of a row, over what others may be publishing now: the same bits."""
    for other in range(sizes[0]):
        unit = tile * sizes[0] + other
        start, window = slot_of(unit, cols, sizes, strides, T)
        offer_state(x_ptr, start, window, rooms, DTYPE, T, False)
        top, l_i = merged(rooms[0], rooms[1])
        publish(parts_ptr, unit, top, l_i, epoch)


@gluon.jit
def awaited(found, x_ptr, parts_ptr, tile, epoch, cols, sizes, strides, rooms, row_rooms, DTYPE: gl.constexpr,
            T: gl.constexpr):  # fmt: skip
    """(top, l_i) of a row, of which `found` is what `taken` gave: looked for again while a part is missing."""
    top, l_i, missing = found
    looks = 0
    while (missing != 0) & (looks < T.PATIENCE):
        top, l_i, missing = asked(parts_ptr, tile, sizes[0], epoch, row_rooms, T.PARTS)
        looks += 1
    if missing != 0:
        computed(x_ptr, parts_ptr, tile, epoch, cols, sizes, strides, rooms, DTYPE, T)
        barrier()  # from here on all threads see what one has published
        top, l_i, _ = asked(parts_ptr, tile, sizes[0], epoch, row_rooms, T.PARTS)
    return top, l_i


@gluon.jit
def begin(x_ptr, i, unit, units, cols, sizes, strides, ring, T: gl.constexpr):
    """Begins the copy of this program's i-th unit into the ring; past the last an empty copy, which is counted."""
    CHUNKS: gl.constexpr = T.CHUNKS
    TILE: gl.constexpr = T.TILE
    if unit < units:
        start, window = slot_of(unit, cols, sizes, strides, T)
        for c in gl.static_range(CHUNKS):
            slot, offs_w = ring[c].index(i % T.SLOTS), offsets(T.CHUNK, TILE)
            ptrs = x_ptr + start + c * T.CHUNK + offs_w
            if T.EVEN:
                async_load(slot, ptrs)
            else:
                async_load(slot, ptrs, mask=offs_w < chunk_of(window, c, T)[2])
    async_copy.commit_group()


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
def ring_of(WORD: gl.constexpr, T: gl.constexpr):
    """An allocation for each chunk of all slots: Triton would put barriers between copies into one."""
    CHUNKS: gl.constexpr = T.CHUNKS
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring = ()
    for _ in gl.static_range(CHUNKS):
        ring = ring + (gl.allocate_shared_memory(WORD, [T.SLOTS, T.WARPS, T.CHUNK // T.WARPS], ROWS),)
    return ring


# Nothing is specialized on a size or a stride, as in `softmax.py`. lead_x, lead_y: how many elements behind a 16-byte
# address x and y lie; vectors_x: whole 16 bytes from x's to the end of its last row.
@gluon.jit(do_not_specialize=[3, *range(5, 20)])
def ring_kernel(
    x_ptr, y_ptr, l_ptr, counter_ptr, parts_ptr, epoch: gl.int32, units: gl.int32, cols: gl.int64, splits: gl.int32,
    size_1: gl.int32, size_r: gl.int64, stride_x0: gl.int64, stride_x1: gl.int64, stride_xr: gl.int64,
    stride_y0: gl.int64, stride_y1: gl.int64, stride_yr: gl.int64,
    lead_x: gl.int64, lead_y: gl.int64, vectors_x: gl.int64, T: gl.constexpr,
):  # fmt: skip
    """y = softmax(x) along the columns, which lie side by side; STATS: y = max(x), and l = sum of exp(x - y).

    counter_ptr: an int32 zero of this launch alone; parts_ptr: two int64 a unit; neither is used with PARTS 1.
    """
    WORD: gl.constexpr = gl.int32 if T.WIDTH == 2 else gl.float32
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    LAG: gl.constexpr = T.LAG
    AHEAD: gl.constexpr = T.AHEAD
    gl.static_assert(AHEAD >= 0 and (LAG == 0 or T.PARTS > 1))
    x_strides, y_strides = (stride_x0, stride_x1, stride_xr, lead_x), (stride_y0, stride_y1, stride_yr, lead_y)
    x_ptr, y_ptr = gl.multiple_of(x_ptr - lead_x, 16).to(gl.pointer_type(WORD)), y_ptr - lead_y
    ring, sizes = ring_of(WORD, T), (splits, size_1, size_r, vectors_x)
    rooms = (warp_room(gl.float32), warp_room(gl.float32), warp_room(gl.float32))
    if T.PARTS > 1:
        row_rooms = (warp_room(gl.float32), warp_room(gl.float32), warp_room(gl.int32))
        number_s = warp_room(gl.int32)
    first, programs = gl.program_id(0), gl.num_programs(0)
    i, numbers = 0, first_numbers(first, programs, LAG, AHEAD)
    for j in gl.static_range(AHEAD):
        begin(x_ptr, j, numbers[LAG + j], units, cols, sizes, x_strides, ring, T)
    while numbers[0] < units:  # of LAG steps ago
        unit, late, last = numbers[LAG], gl.maximum(numbers[0], 0), numbers[LAG + AHEAD]
        y_start, tile, split = start_of(late, sizes, y_strides, T)
        if T.PARTS > 1:
            next_w = gl.full([T.WARPS], 0, gl.int32, gl.SliceLayout(1, T.TILE))
            if last < units:  # else all later ones are past the end
                next_w = draw(counter_ptr, gl.SliceLayout(1, T.TILE))
            parts = look(parts_ptr, tile, splits, T.PARTS)
        begin(x_ptr, i + AHEAD, last, units, cols, sizes, x_strides, ring, T)
        async_copy.wait_group(AHEAD)
        if unit < units:
            start, window = slot_of(unit, cols, sizes, x_strides, T)
            if not T.EVEN:
                clear(x_ptr + start, ring, i % T.SLOTS, window, DTYPE, T)
            offer_state(ring, i % T.SLOTS, window, rooms, DTYPE, T, True)
        top, l_i = merged(rooms[0], rooms[1])
        later = last + programs
        if T.PARTS > 1:
            if unit < units:
                publish(parts_ptr, unit, top, l_i, epoch)
            number_s.store(next_w)
            offer(parts, epoch, row_rooms)
            found = taken(row_rooms)
            later = gl.where(last < units, gl.max(of_all(number_s), 0) + (AHEAD + 1) * programs, units)
        if numbers[0] >= 0:
            if T.PARTS > 1:
                top, l_i = awaited(found, x_ptr, parts_ptr, tile, epoch, cols, sizes, x_strides, rooms, row_rooms,
                                   DTYPE, T)  # fmt: skip
            if T.STATS:
                store_stats(y_ptr, l_ptr, y_start, split == 0, top, l_i)
            else:
                inv_l, _ = finish(top, l_i)  # not in `write`: Triton 3.6 crashes
                _, window = slot_of(late, cols, sizes, x_strides, T)
                write(y_ptr, y_start, ring, (i + T.SLOTS - LAG) % T.SLOTS, window, top, inv_l, DTYPE, T)
        numbers = numbers[1:] + (later,)
        i += 1
