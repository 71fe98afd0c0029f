"""The rows of one consumer of the Hopper kernel: which they are, what they see, the state they begin and end with."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, EXACT_M, LOG2E, finish, merge, single
from flashattn_lite.kernels.hopper_tasks import ROWS, first_keys_early, key_start, rows_of


class Rows(NamedTuple):
    """The rows of a consumer, [64] each, in the layout of S's rows; first and last are positions."""

    pos: Any
    head: Any
    exists: Any
    first: Any
    last: Any
    settled: Any  # tiles of keys after which the reference stays


@gluon.constexpr_function
def settles_first(F, T):
    """Whether the first tile that is visited sets the reference of every row for good, whatever the lengths."""
    return T.SETTLES_AT_ONCE and F.mask == "" and not F.left and not F.right


@gluon.jit
def take_rows(task, S_LAYOUT: gl.constexpr, WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):
    """The rows of consumer WG in a row tile."""
    POSITIONS: gl.constexpr = ROWS // T.PACK
    pos, head, exists = rows_of(gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT)), task, WG, T)
    first = task.first + WG * POSITIONS
    return Rows(pos, head, exists, first, first + POSITIONS - 1, settled_after(first, task, F, T))


@gluon.jit
def rows_of_part(rows, task, F: gl.constexpr, T: gl.constexpr):
    """The same rows over the keys of another task."""
    return Rows(rows.pos, rows.head, rows.exists, rows.first, rows.last, settled_after(rows.first, task, F, T))


@gluon.jit
def settled_after(first, task, F: gl.constexpr, T: gl.constexpr):
    """How many tiles a consumer takes with care: those that need a mask, and those that set its rows' reference."""
    settled = task.edges
    if T.SETTLES_AT_ONCE and F.mask == "" and not F.left:
        # The tile with the last key that the first row sees is the first of which every row sees a key, and the last
        # that needs a mask.
        settled = gl.minimum(settled, tiles_past(past_last(first, task, F) - 1, task, F, T) + 1)
    if first_keys_early(F, T):
        # Tiles with a key that the first row does not see need a mask; block 0 comes behind the first of them.
        masked = tiles_past(past_last(first, task, F) - T.BLOCK_N, task, F, T)
        settled = gl.minimum(settled, gl.maximum(masked, 1) + 1)
    return settled


@gluon.jit
def past_last(row, task, F: gl.constexpr):
    """The key after the last that a row sees."""
    seen = task.len_k
    if F.right:
        seen = gl.minimum(gl.maximum(row + task.diag_hi + 1, 0), task.len_k)
    return seen


@gluon.jit
def tiles_past(key, task, F: gl.constexpr, T: gl.constexpr):
    """How many tiles, counted from the right end, begin after a key."""
    return gl.maximum(key_start(0, task, F, T) - key + T.BLOCK_N - 1, 0) // T.BLOCK_N


@gluon.jit
def past_keys(rows, task, F: gl.constexpr, T: gl.constexpr):
    """Leading tiles of which no row of this consumer sees a key; one tile is always left to it."""
    skip = task.first * 0
    if F.right:
        seen = past_last(gl.minimum(rows.last, task.len_q - 1), task, F)
        skip = gl.minimum(tiles_past(seen - 1, task, F, T), task.count - 1)
        if first_keys_early(F, T):
            skip = gl.minimum(skip, 1)
    return skip


@gluon.jit
def empty_state(T: gl.constexpr):
    """(m_i, l_i, acc in pieces) of rows that have seen nothing. l_i is [64, 4]: a thread adds up its part of a row."""
    m_i = gl.full([ROWS], EMPTY_M, gl.float32, gl.SliceLayout(1, T.S_LAYOUT))
    l_i = gl.full([ROWS, 4], EMPTY_L, gl.float32, T.L_LAYOUT)
    PIECES: gl.constexpr = T.V_PIECES
    acc = ()
    for _i in gl.static_range(PIECES):
        acc = acc + (gl.full([ROWS, T.BLOCK_DV], 0.0, gl.float32, T.O_LAYOUT),)
    return m_i, l_i, acc


@gluon.jit
def row_sums(l_i, T: gl.constexpr):
    """l [64] of l_i [64, 4]."""
    return gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, T.S_LAYOUT), assert_trivial=True)


@gluon.jit
def overflows(m_i, l_row, F: gl.constexpr, T: gl.constexpr):
    """Rows whose reference float32 can't hold, or of which p may have left its dtype."""
    overflow = (gl.abs(m_i) > EXACT_M) & (m_i != EMPTY_M)
    if F.mask == "float":  # of which a NaN may come that it hides: see add_mask. Then acc has it, and the row is CLEAN.
        overflow |= l_row >= T.LIMIT
    else:
        overflow |= (l_row < T.LIMIT) == 0
    return overflow


@gluon.jit
def add_sink(m_i, l_row, rows, args, F: gl.constexpr):
    """(m, l, factor of acc) of finished rows, with the sink."""
    weight = l_row * 0.0 + 1.0
    if F.sinks:
        sink = gl.load(args.sinks_ptr + rows.head, mask=rows.exists, other=0.0).to(gl.float32) * LOG2E
        sink, sink_l = single(sink)
        m_i, l_row, weight, _ = merge(m_i, l_row, sink, sink_l)
    return m_i, l_row, weight


@gluon.jit
def close(m_i, l_row, rows, args, F: gl.constexpr, T: gl.constexpr):
    """(lse, factor of acc, overflow) of finished rows, with the sink: what can be known while the last P V runs.

    PARTIAL: (m, l, overflow); the merge does the rest.
    """
    overflow = overflows(m_i, l_row, F, T)
    if T.PARTIAL:
        return m_i, l_row, overflow
    m_i, l_row, weight = add_sink(m_i, l_row, rows, args, F)
    inv_l, lse = finish(m_i, l_row)
    return lse, weight * inv_l, overflow


@gluon.jit
def is_bad(acc, T: gl.constexpr):
    """Rows with an infinity or NaN in acc, [64] in the layout of S's rows.

    Rows of large numbers whose sum overflows count too, but not of parts: who takes these may see them folded alone.
    """
    PIECES: gl.constexpr = T.V_PIECES
    ROW: gl.constexpr = gl.SliceLayout(1, T.S_LAYOUT)
    total = gl.full([ROWS], -0.0, gl.float32, ROW)
    for i in gl.static_range(PIECES):
        # Eight short chains of sums for one long one.
        x = acc[i]
        if T.SPLIT > 0:
            x = x * 0.0
        parts = gl.sum(gl.reshape(x, [ROWS, x.shape[1] // 32, 32]), 1)
        total += gl.convert_layout(gl.sum(parts, 1), ROW, assert_trivial=True)
    return total * 0.0 != 0.0
