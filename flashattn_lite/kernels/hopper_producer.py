"""The producer of the Hopper kernel: one warp that draws tiles, tells the consumers, and copies what they need by TMA.

It never waits for a tile to be finished, but for the room in shared memory that its next copy needs; except after a
sweep of LISTED tiles, when it asks whether rows failed and has those done again.
Keys in pages come by a copy of each page that a tile lies in.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashattn_lite.kernels.gluon_names import reinterpret, tma_load
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
    may_be_empty,
    no_task,
    past_empty,
    q_slot,
    rows_of,
    send,
    span_of,
    stage,
    task_of,
)


@gluon.jit
def copy(desc, index, full, ring, at, PIECES: gl.constexpr):
    """Copies the rows at `index`, all but its columns, to the `at`-th place of a ring."""
    mbarrier.expect(full, PIECES * desc.block_type.nbytes)
    for i in gl.static_range(PIECES):
        tma_load(desc, index + [i * ring.shape[-1]], full, ring.index(at * PIECES + i))


@gluon.jit
def pages_of_tile(key, task, args, T: gl.constexpr):
    """The pages of a tile of keys, from `key` of its part on; past the part's end -1, of which 0 is read."""
    KEYS: gl.constexpr = min(T.PAGE, T.BLOCK_N)
    entries = args.table_ptr + task.b.to(gl.int64) * args.table_stride + (task.start_k + key) // T.PAGE
    found = ()
    for i in gl.static_range(T.BLOCK_N // KEYS):
        found = found + (gl.load(entries + i, mask=key + i * KEYS < task.len_k, other=-1),)
    return found


@gluon.jit
def copy_pages(desc, pages, kv_head, row, full, ring, at, PIECES: gl.constexpr, T: gl.constexpr):
    """`copy` of a tile of keys from these pages, of which the first lies `row` keys into its page."""
    KEYS: gl.constexpr = min(T.PAGE, T.BLOCK_N)
    COUNT: gl.constexpr = T.BLOCK_N // KEYS
    mbarrier.expect(full, PIECES * COUNT * desc.block_type.nbytes)
    rooms = reinterpret(ring, ring.dtype, [ring.shape[0] * COUNT, 1, 1, KEYS, ring.shape[-1]], desc.layout)
    for i in gl.static_range(PIECES):
        first = (at * PIECES + i) * COUNT
        for j in gl.static_range(COUNT):
            tma_load(desc, [pages[j], kv_head, row, i * ring.shape[-1]], full, rooms.index(first + j))


@gluon.jit
def copy_tile(task, i, it, desc, full, ring, empty, LATER: gl.constexpr, PIECES: gl.constexpr, args, F: gl.constexpr,
              T: gl.constexpr):  # fmt: skip
    """Copies the i-th tile of keys that a row tile visits, of K or of V; the first is the ring's it-th.

    `empty` says that there is room for it, or for the tile that comes LATER; None: it has said so.
    """
    kv_head, _ = heads_of(task, T)
    at, _ = stage(it + i, T)
    key = key_start(i, task, F, T)
    if T.PAGE > 0:  # they are on their way while it waits
        pages = pages_of_tile(key, task, args, T)
    if empty is not None:
        room, phase = stage(it + i + LATER, T)
        mbarrier.wait(empty.index(room), phase ^ 1)
    row = task.start_k + key
    if T.PAGE > 0:
        copy_pages(desc, pages, kv_head, row % T.PAGE, full.index(at), ring, at, PIECES, T)
    else:
        copy(desc, [entry_of(task, F), kv_head, row], full.index(at), ring, at, PIECES)


@gluon.jit
def copy_masks(task, i, it, desc, full, ring, args, F: gl.constexpr, T: gl.constexpr):
    """Copies what all consumers need of the mask for the i-th tile of keys, into the room that K's has shown."""
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    at, _ = stage(it + i, T)
    step_b, step_h, _, _ = args.mask_strides
    b, head = gl.where(step_b == 0, 0, task.b), gl.where(step_h == 0, 0, task.head)
    start_n = key_start(i, task, F, T)
    mbarrier.expect(full.index(at), CONSUMERS * desc.block_type.nbytes)
    for w in gl.static_range(CONSUMERS):
        tma_load(desc, [b, head, task.first + w * ROWS, start_n], full.index(at), ring.index(at * CONSUMERS + w))


@gluon.jit
def copy_q(task, w: gl.constexpr, desc, rings, bars, n_tile, F: gl.constexpr, T: gl.constexpr):
    """Copies the rows of Q of consumer w."""
    kv_head, in_group = heads_of(task, T)
    at, phase = q_slot(n_tile, w, T)
    mbarrier.wait(bars.q_empty.index(at), phase ^ 1)
    row = task.start_q + task.first + w * (ROWS // T.PACK)
    copy(desc, [entry_of(task, F), kv_head, row, in_group], bars.q_full.index(at), rings[0], at, T.PIECES)


@gluon.jit
def serve(message, task, n_message, talk, descs, rings, bars, it, n_tile, begins, ends, counter_ptr, args,
          F: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """Tells the consumers of a row tile and copies its Q and every K and V tile that it visits; K runs one ahead of V.

    The first K tile comes before the Q of all consumers but one, so that this one may begin. With a counter, the next
    row tile is asked for, as late as can be: who has drawn a short one ahead of a long one ends late. Returns (number
    of the next message, what `ask` gave). begins, ends: not so between two parts of the same row tile.
    """
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    q_desc, k_desc, v_desc, mask_desc = descs
    k_s, v_s = rings[1], rings[2]
    if begins:
        copy_q(task, 0, q_desc, rings, bars, n_tile, F, T)
    for i in range(task.count):
        copy_tile(task, i, it, k_desc, bars.k_full, k_s, bars.k_empty, 0, T.PIECES, args, F, T)
        if T.MASK_COPIED:
            copy_masks(task, i, it, mask_desc, bars.k_full, rings[4], args, F, T)
        if i == 0:
            if begins:
                for w in gl.static_range(1, CONSUMERS):
                    copy_q(task, w, q_desc, rings, bars, n_tile, F, T)
            n_message = send(message, task, n_message, talk)
        elif T.APART:
            copy_tile(task, i - 1, it, v_desc, bars.v_full, v_s, bars.v_empty, 0, T.V_PIECES, args, F, T)
        else:  # V is given back with the K behind it, whose room was there
            copy_tile(task, i - 1, it, v_desc, bars.v_full, v_s, None, 0, T.V_PIECES, args, F, T)
    asked = 0
    if counter_ptr is not None:
        asked = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        if ends:
            asked = ask(counter_ptr)
    if T.APART:
        copy_tile(task, task.count - 1, it, v_desc, bars.v_full, v_s, bars.v_empty, 0, T.V_PIECES, args, F, T)
    else:
        copy_tile(task, task.count - 1, it, v_desc, bars.v_full, v_s, bars.k_empty, 1, T.V_PIECES, args, F, T)
    return n_message, asked


@gluon.jit
def ask(counter_ptr):
    """Asks for the next tile of this block; `answer` waits for its number."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    return gl.atomic_add(counter_ptr + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")


@gluon.jit
def answer(asked):
    """The tile that was asked for, past the last when there is none."""
    lane = gl.arange(0, 32, layout=asked.type.layout)
    return gl.max(gl.where(lane == 0, asked, 0), 0) + gl.num_programs(0)


@gluon.jit
def exists_one(tile, counter_ptr, sizes, args, F: gl.constexpr, T: gl.constexpr):
    """The tile, or the next drawn that does not lie past the end of its sequence."""
    if may_be_empty(F, T):
        empty = tile < sizes.num_tiles
        while empty:
            past = past_empty(tile, sizes, args, F, T)
            empty = past > tile
            if empty:  # and so are those up to that one, for every block
                gl.atomic_max(counter_ptr, past - gl.num_programs(0), sem="relaxed")
                tile = answer(ask(counter_ptr))
                empty = tile < sizes.num_tiles
    return tile


@gluon.jit
def report(n_message, n_report, talk, T: gl.constexpr):
    """Waits until the consumers have finished all that was sent. Returns what any of them says, or-ed.

    1: rows failed, or V is not finite; 2: a part comes a second time (`again_part`).
    """
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    settled, verdicts = talk[3], talk[4]
    n_message = send(REPORT, no_task(n_message), n_message, talk)
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
        mark = gl.load(lse_pointers(lse, task, head, pos, F, T), mask=exists, other=0.0).to(gl.int32, bitcast=True)
        found |= gl.max(((mark == CLEAN) | (mark == EXACT)).to(gl.int32), 0)
    return found


@gluon.jit
def once_more(message, task, n_message, n_report, talk, descs, rings, bars, it, n_tile, args, F: gl.constexpr,
              T: gl.constexpr):  # fmt: skip
    """`serve` of a task that was finished, waited for: (verdict, the numbers of what comes next)."""
    n_message, _ = serve(message, task, n_message, talk, descs, rings, bars, it, n_tile, True, True, None, args, F, T)
    it += task.count
    n_tile += 1
    verdict, n_message, n_report = report(n_message, n_report, talk, T)
    return verdict, n_message, n_report, it, n_tile


@gluon.jit
def redo(tile, n_message, n_report, talk, descs, rings, bars, it, n_tile, lse, sizes, args, F: gl.constexpr,
         T: gl.constexpr):  # fmt: skip
    """Has a tile that was finished done again, step by step, while it has marks; see hopper_again.py."""
    task = locate(tile, sizes, args, F, T)
    mode = marked(task, lse, F, T)
    dirty = 0
    while mode != FAST:
        verdict, n_message, n_report, it, n_tile = once_more(tile * 4 + mode, task, n_message, n_report, talk, descs,
                                                             rings, bars, it, n_tile, args, F, T)  # fmt: skip
        if mode == REDO:
            dirty |= verdict
            mode = marked(task, lse, F, T)
            if mode == FAST:
                mode = dirty * PLUS
        elif mode == PLUS:
            mode = MINUS
        else:
            mode = FAST
    return n_message, n_report, it, n_tile


@gluon.jit
def redo_parts(tile, n_message, n_report, talk, descs, rings, bars, it, n_tile, lse, sizes, args, F: gl.constexpr,
               T: gl.constexpr):  # fmt: skip
    """`redo` of a tile whose parts were folded: its whole chain, a second time the parts in which rows still fail."""
    span, first = span_of(tile, sizes, args, F, T)
    part, second, dirty = first, 0, 0
    mode = marked(task_of(span, part, second, F, T), lse, F, T)
    while mode != FAST:
        task = task_of(span, part, second, F, T)
        verdict, n_message, n_report, it, n_tile = once_more(tile * 4 + mode, task, n_message, n_report, talk, descs,
                                                             rings, bars, it, n_tile, args, F, T)  # fmt: skip
        if mode == REDO:
            dirty |= verdict & 1
            second = gl.where(second == 0, verdict // 2, 0)
        if second == 0:
            part += 1
            if part == span.past:
                part = first
                mode = gl.where(mode == REDO, dirty * PLUS, gl.where(mode == PLUS, MINUS, FAST))
    return n_message, n_report, it, n_tile


@gluon.jit
def serve_parts(tile, n_message, talk, descs, rings, bars, it, n_tile, counter_ptr, sizes, args, F: gl.constexpr,
                T: gl.constexpr):  # fmt: skip
    """`serve` of the parts of a row tile that are this block's, and where the ring stands behind them."""
    span, first = span_of(tile, sizes, args, F, T)
    asked = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    for part in range(first, span.past):
        task = task_of(span, part, 0, F, T)
        n_message, asked = serve(tile * 4 + FAST, task, n_message, talk, descs, rings, bars, it, n_tile, part == first,
                                 part == span.past - 1, counter_ptr, args, F, T)  # fmt: skip
        it += task.count
    return n_message, asked, it


@gluon.jit
def producer(descs, rings, bars, talk, listed, counter_ptr, lse, sizes, args, F: gl.constexpr, T: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    it, n_tile, n_message, n_report = 0, 0, 0, 0
    tile = exists_one(gl.program_id(0), counter_ptr, sizes, args, F, T)
    while tile < sizes.num_tiles:
        count = 0
        while (tile < sizes.num_tiles) & (count < LISTED):
            listed.index(count).store(gl.full([1], tile, gl.int32, ONE))
            if T.FOLDS:
                n_message, asked, it = serve_parts(tile, n_message, talk, descs, rings, bars, it, n_tile, counter_ptr,
                                                   sizes, args, F, T)  # fmt: skip
                tile = exists_one(answer(asked), counter_ptr, sizes, args, F, T)
            else:
                task = locate(tile, sizes, args, F, T)
                n_message, asked = serve(tile * 4 + FAST, task, n_message, talk, descs, rings, bars, it, n_tile, True,
                                         True, counter_ptr, args, F, T)  # fmt: skip
                tile = exists_one(answer(asked), counter_ptr, sizes, args, F, T)
                it += task.count
            n_tile += 1
            count += 1
        failed, n_message, n_report = report(n_message, n_report, talk, T)
        if failed == 0:
            count = 0
        for i in range(count):
            again = gl.max(listed.index(i).load(ONE), 0)
            if T.FOLDS:
                n_message, n_report, it, n_tile = redo_parts(again, n_message, n_report, talk, descs, rings, bars, it,
                                                             n_tile, lse, sizes, args, F, T)  # fmt: skip
            else:
                n_message, n_report, it, n_tile = redo(again, n_message, n_report, talk, descs, rings, bars, it,
                                                       n_tile, lse, sizes, args, F, T)  # fmt: skip
    send(END, no_task(tile), n_message, talk)
