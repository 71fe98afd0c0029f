"""The producer of the Hopper kernel: one warp that draws row tiles, tells the consumers, and copies Q, K and V by TMA.

It never waits for a tile to be finished, but for the room in shared memory that its next copy needs; except after a
sweep of LISTED tiles, when it asks whether rows failed and has those done again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashattn_lite.kernels.gluon_names import tma_load
from flashattn_lite.kernels.hopper_tasks import (
    CLEAN,
    END,
    EXACT,
    FAST,
    LISTED,
    MINUS,
    PLUS,
    REDO,
    REPORT,
    ROWS,
    entry_of,
    heads_of,
    key_start,
    locate,
    lse_pointers,
    past_empty,
    q_slot,
    rows_of,
    send,
)


@gluon.jit
def copy(desc, index, full, buffer):
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, index, full, buffer)


@gluon.jit
def serve(task, descs, rings, bars, it, n_tile, F: gl.constexpr, T: gl.constexpr):
    """Copies Q and every visited K and V tile of a row tile; K runs one ahead of V. Returns the ring's position."""
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    q_desc, k_desc, v_desc = descs
    q_s, k_s, v_s, _ = rings
    entry = entry_of(task, F)
    kv_head, in_group = heads_of(task, T)
    for w in gl.static_range(CONSUMERS):
        at, phase = q_slot(n_tile, w, T)
        mbarrier.wait(bars.q_empty.index(at), phase ^ 1)
        row = task.start_q + task.first + w * (ROWS // T.PACK)
        copy(q_desc, [entry, kv_head, row, in_group, 0], bars.q_full.index(at), q_s.index(at))
    for i in range(task.count + 1):
        at = (it + i) % T.STAGES
        if (i < task.count) | (T.APART == 0):
            mbarrier.wait(bars.k_empty.index(at), (((it + i) // T.STAGES) & 1) ^ 1)
        if i < task.count:
            row = task.start_k + key_start(i, task, T)
            copy(k_desc, [entry, kv_head, row, 0], bars.k_full.index(at), k_s.index(at))
        if i > 0:
            at = (it + i - 1) % T.STAGES
            if T.APART:
                mbarrier.wait(bars.v_empty.index(at), (((it + i - 1) // T.STAGES) & 1) ^ 1)
            row = task.start_k + key_start(i - 1, task, T)
            copy(v_desc, [entry, kv_head, row, 0], bars.v_full.index(at), v_s.index(at))
    return it + task.count


@gluon.jit
def report(task, n_message, n_report, talk, T: gl.constexpr):
    """Waits until the consumers have finished all that was sent; 1 if any of them says so."""
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    settled, verdicts = talk[3], talk[4]
    n_message = send(REPORT, task, n_message, talk)
    mbarrier.wait(settled, n_report & 1)
    verdict = 0
    for w in gl.static_range(CONSUMERS):
        verdict |= gl.max(verdicts.index(w).load(ONE), 0)
    return verdict, n_message, n_report + 1


@gluon.jit
def marked(task, lse, F: gl.constexpr, T: gl.constexpr):
    """1 if a row of the tile asks to be done again."""
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    found = 0
    for w in gl.static_range(CONSUMERS):
        offs_r = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [1], [0]))
        pos, head, exists = rows_of(offs_r, task, w, T)
        mark = gl.load(lse_pointers(lse, task, head, pos, F), mask=exists, other=0.0).to(gl.int32, bitcast=True)
        found |= gl.max(((mark == CLEAN) | (mark == EXACT)).to(gl.int32), 0)
    return found


@gluon.jit
def draw(counter_ptr):
    """The next tile of this block, past the last when there is none."""
    return gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)


@gluon.jit
def exists_one(tile, counter_ptr, sizes, args, F: gl.constexpr, T: gl.constexpr):
    """The tile, or the next drawn that does not lie past the end of its packed sequence."""
    if F.varlen:
        empty = tile < sizes.num_tiles
        while empty:
            task = locate(tile, sizes, args, F, T)
            empty = task.first >= task.len_q
            if empty:  # and so are those up to the next one that is not, for every block
                gl.atomic_max(counter_ptr, past_empty(task, sizes, F, T) - gl.num_programs(0))
                tile = draw(counter_ptr)
                empty = tile < sizes.num_tiles
    return tile


@gluon.jit
def producer(descs, rings, bars, talk, listed, counter_ptr, lse, sizes, args, F: gl.constexpr, T: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    it, n_tile, n_message, n_report = 0, 0, 0, 0
    tile = exists_one(gl.program_id(0), counter_ptr, sizes, args, F, T)
    while tile < sizes.num_tiles:
        count = 0
        while (tile < sizes.num_tiles) & (count < LISTED):
            task = locate(tile, sizes, args, F, T)
            n_message = send(tile * 4 + FAST, task, n_message, talk)
            listed.index(count).store(gl.full([1], tile, gl.int32, ONE))
            tile = draw(counter_ptr)  # on its way while the copies go out
            it = serve(task, descs, rings, bars, it, n_tile, F, T)
            tile = exists_one(tile, counter_ptr, sizes, args, F, T)
            n_tile += 1
            count += 1
        task = locate(tile * 0, sizes, args, F, T)
        failed, n_message, n_report = report(task, n_message, n_report, talk, T)
        if failed == 0:
            count = 0
        for i in range(count):
            again = gl.max(listed.index(i).load(ONE), 0)
            task = locate(again, sizes, args, F, T)
            mode = marked(task, lse, F, T)
            dirty = 0
            while mode != FAST:
                n_message = send(again * 4 + mode, task, n_message, talk)
                it = serve(task, descs, rings, bars, it, n_tile, F, T)
                n_tile += 1
                verdict, n_message, n_report = report(task, n_message, n_report, talk, T)
                if mode == REDO:
                    dirty |= verdict
                    mode = marked(task, lse, F, T)
                    if mode == FAST:
                        mode = dirty * PLUS
                elif mode == PLUS:
                    mode = MINUS
                else:
                    mode = FAST
    task = locate(tile * 0, sizes, args, F, T)
    n_message = send(END, task, n_message, talk)
