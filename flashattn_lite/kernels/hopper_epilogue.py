"""How O leaves a consumer of the Hopper kernel: through shared memory, by TMA where the rows are all its own.

Of a part of the keys, or a chain of parts, acc leaves in its place, in float32, to where decode_merge.py reads it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from flashattn_lite.kernels.gluon_names import tma_store
from flashattn_lite.kernels.hopper_tasks import ROWS, entry_of, heads_of, rows_of, state_of, state_rows


@gluon.jit
def columns(pieces, first: gl.constexpr, T: gl.constexpr):
    """Columns first to first + O_WIDTH of O or acc."""
    return columns_of(pieces[first // T.BLOCK_DV], first % T.BLOCK_DV, T)


@gluon.jit
def columns_of(x, first: gl.constexpr, T: gl.constexpr):
    """The same of a piece [64, n]."""
    if x.shape[1] == T.O_WIDTH:
        return gl.convert_layout(x, T.PIECE_LAYOUT, assert_trivial=True)
    else:
        HALF: gl.constexpr = x.shape[1] // 2
        low, high = gl.split(gl.permute(gl.reshape(x, [ROWS, 2, HALF]), (0, 2, 1)))
        if first < HALF:
            return columns_of(low, first, T)
        else:
            return columns_of(high, first - HALF, T)


@gluon.jit
def deliver(out, FIRST: gl.constexpr, LAST: gl.constexpr, dst, o_s, task, exists, WG: gl.constexpr, F: gl.constexpr,
            T: gl.constexpr):  # fmt: skip
    """Writes a consumer's rows of O, O_WIDTH columns at a time, each through the next of O_SLOTS buffers."""
    if F.varlen:
        whole = task.first + (WG + 1) * (ROWS // T.PACK) <= task.len_q
        if (whole == 0) & (FIRST == 0):
            tma.store_wait(0)  # what follows adds no copy to count
    for i in gl.static_range(FIRST, LAST):
        buffer = o_s.index(WG * T.O_SLOTS + i % T.O_SLOTS)
        tma.store_wait(T.O_SLOTS - 1)  # what was in it before has left
        buffer.reshape([ROWS, T.O_WIDTH]).store(columns(out, i * T.O_WIDTH, T))
        if F.varlen:
            if whole:
                send_rows(dst, buffer, i * T.O_WIDTH, task, WG, F, T)
            else:  # the next rows in memory are another sequence's
                write_present(dst, buffer, i * T.O_WIDTH, task, exists, WG, F, T)
        else:
            send_rows(dst, buffer, i * T.O_WIDTH, task, WG, F, T)


@gluon.jit
def send_rows(dst, buffer, column: gl.constexpr, task, WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):
    """Begins the TMA copy of all of a consumer's rows of O, some columns of it."""
    fence_async_shared()
    kv_head, in_group = heads_of(task, T)
    row = task.start_q + task.first + WG * (ROWS // T.PACK)
    if T.PARTIAL:  # the states of a key/value head, dst[2][1] of them, lie behind one another
        kv_head = kv_head * dst[2][1] + state_of(task, T)
    tma_store(dst[0], [entry_of(task, F), kv_head, row, in_group, column], buffer)


@gluon.jit
def write_present(dst, buffer, column: gl.constexpr, task, exists, WG: gl.constexpr, F: gl.constexpr,
                  T: gl.constexpr):  # fmt: skip
    """Copies those rows of O that are there, 16 bytes at a time."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // T.O_WIDTH, T.O_WIDTH // 8], [4, 1], [1, 0])
    wanted = gl.convert_layout(exists.to(gl.int32), gl.SliceLayout(1, WIDE)) != 0
    offs_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    ptrs, inside = out_pointers(dst, offs_r, column, T.O_WIDTH, task, WIDE, WG, F, T)
    gl.store(ptrs, buffer.reshape([ROWS, T.O_WIDTH]).load(WIDE), mask=wanted[:, None] & inside)
    fence_async_shared()


@gluon.jit
def out_pointers(dst, offs_r, column, COLUMNS: gl.constexpr, task, LAYOUT: gl.constexpr,
                 WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """(pointers, which columns are there) of a consumer's rows offs_r [M] of O, COLUMNS of them from `column` on."""
    _, out_ptr, o_strides = dst
    pos, head, _ = rows_of(offs_r, task, WG, T)
    offs_d = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    # In whole eights, which they are, so that the compiler knows that 16-byte accesses are allowed.
    step_b, step_h, step_m = o_strides[0] // 8 * 8, o_strides[1] // 8 * 8, o_strides[2] // 8 * 8
    rows = out_ptr + entry_of(task, F).to(gl.int64) * step_b + head.to(gl.int64) * step_h
    rows += (task.start_q + pos).to(gl.int64) * step_m
    return rows[:, None] + offs_d[None, :], (offs_d < T.HEAD_DIM_V)[None, :]


@gluon.jit
def write_sum(l_row, exists, lse_ptrs, dst):
    """Writes a consumer's rows of l where states leave: dst[2][0] behind m."""
    gl.store(lse_ptrs + dst[2][0], l_row, mask=exists)


@gluon.jit
def write_state(acc, exists, dst, lse, task, WG: gl.constexpr, T: gl.constexpr):
    """Writes some of a consumer's rows of acc [64, Dv], from registers, where states leave."""
    wanted = of_pieces(exists, T)
    LEAVES: gl.constexpr = T.LEAVES
    for i in gl.static_range(LEAVES):
        ptrs, inside = state_pointers(i * T.O_WIDTH, dst, lse, task, WG, T)
        gl.store(ptrs, columns(acc, i * T.O_WIDTH, T), mask=wanted & inside)


@gluon.jit
def of_pieces(condition, T: gl.constexpr):
    """[64, 1] of [64], where pieces of O have their rows."""
    ROW: gl.constexpr = gl.SliceLayout(1, T.PIECE_LAYOUT)
    return (gl.convert_layout(condition.to(gl.int32), ROW, assert_trivial=True) != 0)[:, None]


@gluon.jit
def state_pointers(column: gl.constexpr, dst, lse, task, WG: gl.constexpr, T: gl.constexpr):
    """(pointers, which columns are there) of O_WIDTH columns of acc, from `column` on."""
    offs_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, T.PIECE_LAYOUT))
    offs_d = column + gl.arange(0, T.O_WIDTH, layout=gl.SliceLayout(0, T.PIECE_LAYOUT))
    pos, head, _ = rows_of(offs_r, task, WG, T)
    rows = dst[1] + state_rows(lse, task, head, pos, T) * T.HEAD_DIM_V
    return rows[:, None] + offs_d[None, :], (offs_d < T.HEAD_DIM_V)[None, :]
