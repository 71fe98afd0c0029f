"""What a consumer of the Hopper kernel does with a row tile in which rows failed: all its keys again, step by step.

Nothing overlaps here, and nothing is as fast as it could be: it is rare, and its code must not weigh on the usual way.
REDO: rows marked EXACT at the running maximum throughout, rows marked CLEAN by the arithmetic of the first pass, to the
bit, both from a V freed of what is not finite. PLUS, MINUS: that infinity to the rows that see one in V, by a count of
such keys (a NaN is both). REDO writes marked rows alone, PLUS and MINUS what that infinity reaches.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from flashattn_lite.kernels.device.scores import row_maximum, scaled
from flashattn_lite.kernels.device.state import EMPTY_M, rounded
from flashattn_lite.kernels.gluon_names import barrier, reinterpret
from flashattn_lite.kernels.hopper_epilogue import (
    columns,
    of_pieces,
    out_pointers,
    state_pointers,
    write_state,
    write_sum,
)
from flashattn_lite.kernels.hopper_folds import chain_of, chain_rows, fold_rows, go_on, kept, no_parts, with_before
from flashattn_lite.kernels.hopper_pieces import (
    add_values,
    execute,
    finished,
    pieces_of,
    query_key,
    values_added,
    weighed,
)
from flashattn_lite.kernels.hopper_rows import close, empty_state, is_bad, overflows, row_sums, take_rows
from flashattn_lite.kernels.hopper_scores import hide, mask_tile, take
from flashattn_lite.kernels.hopper_tasks import (
    CLEAN,
    EXACT,
    MINUS,
    PLUS,
    REDO,
    ROWS,
    lse_pointers,
    part_of,
    q_slot,
    rows_of,
    stage,
)

CHUNK = gl.constexpr(1024)  # elements that a consumer takes at a time, eight a thread
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def writes_done():
    """Waits until what this thread sent by TMA is in memory, not only out of its buffer."""
    execute("cp.async.bulk.wait_group 0;")


@gluon.jit
def clean(v_s, at, mode, n_clean, cleaned, WG: gl.constexpr, T: gl.constexpr):
    """The tile of V at `at` in shared memory without what is not finite; PLUS, MINUS: 1 where it is that infinity.

    Element by element, so that it does not matter in which order they lie. Every consumer does its share and waits for
    the others. Returns 1 if there was any in that share.
    """
    CHUNKS: gl.constexpr = T.V_PIECES * T.BLOCK_N * T.BLOCK_DV // CHUNK
    EIGHT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    chunks = reinterpret(v_s, v_s.dtype, [T.STAGES * CHUNKS, CHUNK], FLAT)
    one = gl.where(mode == REDO, 0.0, 1.0)
    other = gl.where(mode == MINUS, float("inf"), float("-inf"))
    dirty = gl.full([CHUNK], 0, gl.int32, EIGHT)
    for i in range(WG, CHUNKS, T.WARPGROUPS):
        chunk = chunks.index(at * CHUNKS + i)
        x = chunk.load(EIGHT).to(gl.float32)
        infinite = (gl.abs(x) < float("inf")) == 0
        kept = gl.where(infinite, gl.where(x == other, 0.0, one), gl.where(mode == REDO, x, 0.0))
        chunk.store(kept.to(v_s.dtype))
        dirty |= infinite.to(gl.int32)
    fence_async_shared()
    mbarrier.arrive(cleaned, count=1)
    mbarrier.wait(cleaned, n_clean & 1)
    return gl.max(dirty, 0), n_clean + 1


@gluon.jit
def update(s, mask, m_i, l_i, i, exact, mode, rows, task, args, F: gl.constexpr, T: gl.constexpr):
    """The i-th tile of scores: (m_i, l_i, alpha, p); `mask` of mask_tile. PLUS, MINUS: p is 1 for each key seen."""
    s, scale = scaled(s, args, F)
    s = gl.where(mode == REDO, s, 0.0)
    s, scale = hide(s, scale, mask, i, rows, task, True, F, T)
    if F.mask == "float":  # which counts as seen whatever it adds
        s = gl.where((mode == REDO) | (s == float("-inf")), s, 0.0)
    row_scale = gl.full([ROWS], 0.0, gl.float32, m_i.type.layout) + scale
    # Past EXACT_M a product must be rounded before it is subtracted.
    before = gl.where(exact != 0, row_scale, 1.0)
    row_scale = gl.where(exact != 0, 1.0, row_scale)
    s = s * before[:, None]
    m_new = gl.maximum(m_i, row_maximum(s, row_scale, F))
    m_new = gl.where((i >= rows.settled) & (exact == 0), m_i, m_new)
    return take(s, row_scale[:, None], m_i, m_new, l_i, T)


@gluon.jit
def attend_again(task, mode, exact, rows, n_tile, it, n_clean, rings, bars, args, WG: gl.constexpr, F: gl.constexpr,
                 T: gl.constexpr):  # fmt: skip
    """(m_i, l [64], acc) over all keys of a task, 1 if V had what is not finite, as far as this consumer looked, and
    n_clean. From here on V's room is free: every consumer is done with it.
    """
    q_s, v_s = rings[0], rings[2]
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, T.O_LAYOUT, 2)
    m_i, l_i, acc = empty_state(T)
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, T.S_LAYOUT)
    dirty = 0
    writes_done()  # of O as the first pass left it, which is read and written from here on
    q_at, q_phase = q_slot(n_tile, WG, T)
    mbarrier.wait(bars.q_full.index(q_at), q_phase)
    for i in range(task.count):
        at, phase = stage(it, T)
        mbarrier.wait(bars.k_full.index(at), phase)
        s = query_key(q_at, rings, at, zero, False, T)
        s = warpgroup_mma_wait(0, [s])
        mask = mask_tile(at, i, rings, rows, task, args, WG, F, T)
        m_i, l_i, alpha, p = update(s, mask, m_i, l_i, i, exact, mode, rows, task, args, F, T)
        mbarrier.arrive(bars.k_empty.index(at), count=1)
        acc = weighed(acc, alpha, T)
        mbarrier.wait(bars.v_full.index(at), phase)
        v = pieces_of(at, v_s, T.BLOCK_N, T.V_PIECES)
        found, n_clean = clean(v_s, at, mode, n_clean, bars.cleaned, WG, T)
        dirty |= found
        acc = add_values(gl.convert_layout(p.to(q_s.dtype), P_LAYOUT, assert_trivial=True), v, acc, T)
        acc = values_added(acc, T)
        if T.APART:
            mbarrier.arrive(bars.v_empty.index(at), count=1)
        it += 1
    l_row = row_sums(l_i, T)
    mbarrier.arrive(bars.cleaned, count=1)
    mbarrier.wait(bars.cleaned, n_clean & 1)
    return m_i, l_row, acc, dirty, n_clean + 1


@gluon.jit
def marks_of(lse_ptrs, mode, rows):
    """(marks, which of them are EXACT) of a consumer's rows; PLUS, MINUS: none."""
    mark = gl.load(lse_ptrs, mask=rows.exists & (mode == REDO), other=0.0).to(gl.int32, bitcast=True)
    return mark, (mark == EXACT).to(gl.int32)


@gluon.jit
def again(task, mode, n_tile, it, n_clean, rings, bars, dst, lse, args, WG: gl.constexpr, F: gl.constexpr,
          T: gl.constexpr):  # fmt: skip
    """One row tile. Returns 1 if V had what is not finite, as far as this consumer looked, and n_clean."""
    DTYPE: gl.constexpr = rings[0].dtype
    S_LAYOUT: gl.constexpr = T.S_LAYOUT
    rows = take_rows(task, S_LAYOUT, WG, F, T)
    lse_ptrs = lse_pointers(lse, task, rows.head, rows.pos, F, T)
    mark, exact = marks_of(lse_ptrs, mode, rows)
    asked = rows.exists & ((mark == EXACT) | (mark == CLEAN))
    m_i, l_row, acc, dirty, n_clean = attend_again(task, mode, exact, rows, n_tile, it, n_clean, rings, bars, args, WG,
                                                   F, T)  # fmt: skip
    lse_row, weight, overflow = close(m_i, l_row, rows, args, F, T)
    if T.PARTIAL:
        if mode == REDO:
            write_sum(weight, asked, lse_ptrs, dst)
            write_state(acc, asked, dst, lse, task, WG, T)
        else:
            move_state(acc, mode, rows.exists, dst, lse, task, WG, T)
    else:
        out = finished(acc, gl.where(mode == REDO, weight, 1.0), DTYPE, T)
        write_rows(out, mode, rings[2], dst, lse, task, WG, F, T)
    mbarrier.arrive(bars.q_empty.index(q_slot(n_tile, WG, T)[0]), count=1)
    # A row with a clean V and its old reference may still show that it needs the maximum: by l_i, or by an acc that a
    # large V made infinite. It is done once more. At the maximum nothing is asked, so that this ends.
    mark = gl.where((exact == 0) & (overflow | is_bad(acc, T)), EXACT, 0)
    lse_row = gl.where(mark == 0, lse_row, mark.to(gl.float32, bitcast=True))
    gl.store(lse_ptrs, lse_row, mask=asked)
    return dirty, n_clean


@gluon.jit
def again_part(task, mode, chain, n_tile, it, n_clean, rings, bars, dst, lse, args, WG: gl.constexpr, F: gl.constexpr,
               T: gl.constexpr):  # fmt: skip
    """`again` of a part of a row tile whose parts are folded; and the chain.

    All marked rows are taken by the arithmetic of the first pass, each part anew. Those that fail in it, which 2 more
    in the first result says, are marked EXACT, and the part comes a second time, for these. So each row folds each part
    once; with the last it is written.
    """
    DTYPE: gl.constexpr = rings[0].dtype
    S_LAYOUT: gl.constexpr = T.S_LAYOUT
    part, behind, second = part_of(task, T)
    rows = take_rows(task, S_LAYOUT, WG, F, T)
    lse_ptrs = lse_pointers(lse, task, rows.head, rows.pos, F, T)
    mark, exact = marks_of(lse_ptrs, mode, rows)
    asked = rows.exists & ((mark == EXACT) | ((mark == CLEAN) & (second == 0)))
    m_i, l_row, acc, found, n_clean = attend_again(task, mode, exact, rows, n_tile, it, n_clean, rings, bars, args, WG,
                                                   F, T)  # fmt: skip
    # -inf: nothing that the row saw while its reference could move had a score, but later keys may have one.
    fails = (exact == 0) & (overflows(m_i, l_row, F, T) | is_bad(acc, T) | (m_i == EMPTY_M))
    found |= gl.max((asked & fails).to(gl.int32), 0) * 2
    done = asked & (fails == 0)
    mark = gl.where(fails, EXACT, CLEAN)
    lse_row = mark.to(gl.float32, bitcast=True)
    if mode == REDO:
        if (part % (T.CHAIN * T.CHAINS) == 0) & (second == 0):
            chain = no_parts(rings[3], WG, T)
        elif second == 0:
            chain = go_on(chain, part, T)
        chain = fold_rows(chain, part, m_i, l_row, acc, done, rings[3], WG, T)
    if T.PARTIAL:
        if mode != REDO:
            move_state(acc, mode, rows.exists, dst, lse, task, WG, T)
        if (mode == REDO) & (behind == 0):
            m_c, l_c, acc_c, _ = chain
            write_sum(l_c, done, lse_ptrs, dst)
            write_state(kept(acc_c, 0, rings[3], WG, T), done, dst, lse, task, WG, T)
            lse_row = gl.where(fails, lse_row, m_c)
    elif (mode != REDO) | (behind == 0):
        out, lse_row = chains_or_counts(chain, part, acc, mode, rows, rings[3], args, DTYPE, WG, F, T)
        lse_row = gl.where(fails, mark.to(gl.float32, bitcast=True), lse_row)
        write_rows(out, mode, rings[2], dst, lse, task, WG, F, T)
    mbarrier.arrive(bars.q_empty.index(q_slot(n_tile, WG, T)[0]), count=1)
    gl.store(lse_ptrs, lse_row, mask=asked)
    return found, n_clean, chain


@gluon.jit
def chains_or_counts(chain, part, acc, mode, rows, o_s, args, DTYPE: gl.constexpr, WG: gl.constexpr, F: gl.constexpr,
                     T: gl.constexpr):  # fmt: skip
    """(pieces of O, lse) of all parts, up to `part`; PLUS, MINUS: the counts that acc is of the part at hand."""
    m_c, l_c, acc_c, before = chain
    acc_c = kept(acc_c, chain_of(part, T), o_s, WG, T)
    m_c, l_c, acc_c = with_before(m_c, l_c, acc_c, before, o_s, True, WG, T)
    out, lse_row = chain_rows(m_c, l_c, acc_c, rows, args, DTYPE, F, T)
    PIECES: gl.constexpr = T.V_PIECES
    chosen = ()
    for i in gl.static_range(PIECES):
        chosen = chosen + (gl.where(mode == REDO, out[i], rounded(acc[i], DTYPE)),)
    return chosen, lse_row


@gluon.jit
def moved(had, seen, infinity):
    """What was there, with that infinity where a key that has it in V was seen."""
    return gl.where(seen != 0.0, (had.to(gl.float32) + infinity).to(had.dtype), had)


@gluon.jit
def move_state(acc, mode, exists, dst, lse, task, WG: gl.constexpr, T: gl.constexpr):
    """PLUS, MINUS of `write_rows` where states leave."""
    infinity = gl.where(mode == PLUS, float("inf"), float("-inf"))
    wanted = of_pieces(exists, T)
    LEAVES: gl.constexpr = T.LEAVES
    for i in gl.static_range(LEAVES):
        ptrs, inside = state_pointers(i * T.O_WIDTH, dst, lse, task, WG, T)
        had = gl.load(ptrs, mask=wanted & inside, other=0.0)
        gl.store(ptrs, moved(had, columns(acc, i * T.O_WIDTH, T), infinity), mask=wanted & inside)


@gluon.jit
def write_rows(out, mode, v_s, dst, lse, task, WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):
    """Rows [64, Dv] of O to where their lse still has a mark; PLUS, MINUS: that infinity to all where they are not 0.

    Through shared memory, where V was, 1024 elements at a time: all at once is long straight code, to compile and to
    spill for.
    """
    TAKEN: gl.constexpr = CHUNK // T.BLOCK_DV  # rows of a chunk
    CHUNKS: gl.constexpr = ROWS // TAKEN  # of a piece
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // T.BLOCK_DV, T.BLOCK_DV // 8], [4, 1], [1, 0])
    ROOMS: gl.constexpr = T.STAGES * T.V_PIECES * T.BLOCK_N // ROWS
    whole = reinterpret(v_s, v_s.dtype, [ROOMS, ROWS, T.BLOCK_DV], PLAIN)
    chunks = reinterpret(v_s, v_s.dtype, [ROOMS * CHUNKS, TAKEN, T.BLOCK_DV], PLAIN)
    infinity = gl.where(mode == PLUS, float("inf"), float("-inf"))
    PIECES: gl.constexpr = T.V_PIECES
    for i in gl.static_range(PIECES):
        whole.index(WG * T.V_PIECES + i).store(out[i])
    for i in range(T.V_PIECES * CHUNKS):
        offs_r = i % CHUNKS * TAKEN + gl.arange(0, TAKEN, layout=gl.SliceLayout(1, WIDE))
        pos, head, exists = rows_of(offs_r, task, WG, T)
        mark = gl.load(lse_pointers(lse, task, head, pos, F, T), mask=exists, other=0.0).to(gl.int32, bitcast=True)
        wanted = exists & ((mark == EXACT) | (mark == CLEAN) | (mode != REDO))
        ptrs, inside = out_pointers(dst, offs_r, i // CHUNKS * T.BLOCK_DV, T.BLOCK_DV, task, WIDE, WG, F, T)
        wanted = wanted[:, None] & inside
        new = chunks.index(WG * T.V_PIECES * CHUNKS + i).load(WIDE)
        had = gl.load(ptrs, mask=wanted & (mode != REDO), other=0.0)
        gl.store(ptrs, gl.where(mode == REDO, new, moved(had, new, infinity)), mask=wanted)
    fence_async_shared()
    barrier()  # every mark has been read
