"""The attention backward for Hopper (sm_90a), in Gluon: the kernel; `backward_launch.py` starts it.

The usual launch of one of `backward.py`'s two sides, for 16-bit rows without a mask tensor (`tuning.BACKWARD_HOPPER`):
the same products in the same order, so the same bits. What is not finite is left to the launch with care, in Triton.

    KEYS:  a, b = K, V    c, d = Q, dO    S^T = a c^T, dP^T = b d^T    ga = dK += dS^T c, gb = dV += P^T d
    else:  a, b = Q, dO   c, d = K, V     S = a c^T,   dP = b d^T      ga = dQ += dS c

A block lives on each multiprocessor and works off tiles of BLOCK_M own rows, which it draws. Warps have roles:
  producer (1 warp)      draws tiles, tells the consumers, copies a, b and the tiles of c, d by TMA; of queries that are
                         streamed it loads m and delta, whose rows begin where the copy engine does not
  consumer (4 warps) x 2 64 own rows each, whose gradients stay in registers
A consumer adds dS c of a tile behind S and dP of the next one, so that the exponentials run under dP and dS c, and dS
is made under P^T d.

Barriers (mbarrier; each side counts its own phase)
  slot_full[2]   producer -> consumers: the next tile, one ahead at most, since a and b of it wait for
  own_full       TMA -> consumers: a and b                    own_empty       each consumer: its products are done
  full[STAGES]   TMA -> consumers: a tile of c and d, and     empty[STAGES]   each consumer: its products have used it
                 the producer: of m and delta
Shared memory (bytes): (BLOCK_M + STAGES * BLOCK_N) * (D + Dv) * 2, with KEYS STAGES * BLOCK_N * 8 more; a consumer's
gradients leave through 8 KiB.
Bytes moved: c and d once for every tile of own rows, mostly from L2, all else once.
Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2; Shah et al., FlashAttention-3 (arXiv 2407.08608): roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashattn_lite.kernels.attention_tiles import sequence
from flashattn_lite.kernels.backward import first_row, weights_of_all
from flashattn_lite.kernels.backward_rows import not_finite
from flashattn_lite.kernels.device.bounds import visited_start, visited_tiles
from flashattn_lite.kernels.device.scores import visible
from flashattn_lite.kernels.device.state import LN2
from flashattn_lite.kernels.gluon_names import tma_load
from flashattn_lite.kernels.hopper_producer import answer, ask
from flashattn_lite.kernels.hopper_scores import pack_p
from flashattn_lite.kernels.hopper_tasks import ROWS, barriers, stage, word
from flashattn_lite.problem import Features

CONSUMERS = gl.constexpr(2)


@dataclass(frozen=True)
class HopperBackwardTile:
    """Compile-time shape of a block; names as in `backward.BackwardTile`. ga is always made."""

    KEYS: bool
    MAKES_B: bool
    SEEN: Features
    BLOCK_N: int  # rows of a tile that is streamed
    STAGES: int  # such tiles in shared memory
    HELD: bool  # a consumer keeps its a and b in registers: products read half as much from shared memory
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    GROUP: int

    @property
    def BLOCK_M(self) -> int:
        return CONSUMERS.value * ROWS.value

    @property
    def HEADS(self) -> int:
        """Heads whose rows it streams."""
        return self.GROUP if self.KEYS else 1

    @property
    def S_LAYOUT(self) -> Any:
        """Of a consumer's S, P and dP."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.BLOCK_N, 16])

    def of_sum(self, width: int) -> Any:
        """The layout of a gradient [64, width]."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


class Task(NamedTuple):
    """A tile of own rows and what it meets."""

    entry: Any  # in memory
    head: Any  # of own rows
    row_lo: Any  # its first row
    start_m: Any  # the sequence's first row in memory, of own rows
    len_m: Any
    room: Any  # own rows that are there, in use or not
    start_n: Any  # and of those that are streamed
    len_n: Any
    diag_lo: Any
    diag_hi: Any
    visit: Any  # see `visited_tiles`


@gluon.jit
def task_of(tile, sizes, args, F: gl.constexpr, T: gl.constexpr):
    """The task of a tile number; each role works it out by itself."""
    num_m, heads, rows_q, rows_k, diag_lo, diag_hi = sizes
    head, b = tile // num_m % heads, tile // num_m // heads
    entry, start_q, len_q, start_k, room, len_k, diag_lo, diag_hi = sequence(b, rows_q, rows_k, diag_lo, diag_hi, args,
                                                                             F)  # fmt: skip
    row_lo = first_row(tile, num_m, T)
    if T.KEYS:
        start_m, len_m, start_n, len_n = start_k, len_k, start_q, len_q
        diag_lo, diag_hi = -diag_hi, -diag_lo
    else:
        start_m, len_m, room, start_n, len_n = start_q, len_q, len_q, start_k, len_k
    row_hi = gl.maximum(gl.minimum(row_lo + T.BLOCK_M, len_m), row_lo)
    SEEN: gl.constexpr = T.SEEN
    visit = visited_tiles(row_lo, row_hi, gl.where(row_lo < len_m, len_n, 0), diag_lo, diag_hi, T.BLOCK_N, SEEN)
    return Task(entry, head, row_lo, start_m, len_m, room, start_n, len_n, diag_lo, diag_hi, visit)


@gluon.jit
def own_rows_of(ring, WG: gl.constexpr, T: gl.constexpr):
    """This consumer's rows of a or b [64, D] as products take them: their place or, HELD, in registers."""
    rows = ring.index(WG).reshape([ROWS, ring.shape[-1]])
    if T.HELD:
        return rows.load(gl.DotOperandLayout(0, T.S_LAYOUT, 2))
    else:
        return rows


@gluon.jit
def streamed_tiles(rings, at, T: gl.constexpr):
    """(c [N, D], d [N, Dv]) at a place of the rings."""
    return rings[0].index(at).reshape([T.BLOCK_N, T.BLOCK_D]), rings[1].index(at).reshape([T.BLOCK_N, T.BLOCK_DV])


@gluon.jit
def numbers_at(ring, at, own, T: gl.constexpr):
    """-m or delta of query rows: of those that are streamed [1, N], at a place of the ring, or of own rows."""
    if T.KEYS:
        return ring.index(at).load(gl.SliceLayout(0, T.S_LAYOUT))[None, :]
    else:
        return own


@gluon.jit
def hidden(x, i, task, offs_m, T: gl.constexpr):
    """x [M, N] of the i-th tile of a visit, 0 for pairs that are not seen."""
    if i < task.visit[1]:
        SEEN: gl.constexpr = T.SEEN
        offs_n = visited_start(i, task.visit, T.BLOCK_N)
        offs_n += gl.arange(0, T.BLOCK_N, layout=gl.SliceLayout(0, T.S_LAYOUT))
        x = gl.where(visible(offs_m, offs_n, task.len_n, task.diag_lo, task.diag_hi, SEEN), x, 0.0)
    return x


@gluon.jit
def plus(g, x, y):
    """g + x y, under way; x [64, N] in registers, y [N, D] in shared memory."""
    return warpgroup_mma(pack_p(x, y, gl.DotOperandLayout(0, g.type.layout, 2)), y, g, is_async=True)


@gluon.jit
def step(ga, gb, ds, own, own_numbers, rings, bars, it, i, task, offs_m, args, FIRST: gl.constexpr, F: gl.constexpr,
         T: gl.constexpr):  # fmt: skip
    """Adds dS c of the tile before, unless this one is a row tile's FIRST, and P d of this one: (ga, gb, dS).

    It is the it-th tile of the block, the i-th of a visit.
    """
    full, empty = bars
    at, phase = stage(it, T)
    c, d = streamed_tiles(rings, at, T)
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, T.S_LAYOUT)
    BEHIND: gl.constexpr = 0 if FIRST else 1  # products of the tile before
    mbarrier.wait(full.index(at), phase)
    s = warpgroup_mma(own[0], c.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(own[1], d.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not FIRST:
        before, _phase = stage(it - 1, T)
        ga = plus(ga, ds, streamed_tiles(rings, before, T)[0])
    s = warpgroup_mma_wait(1 + BEHIND, [s])
    p, slope = weights_of_all(s, numbers_at(rings[2], at, own_numbers[0], T), args, F)
    p = hidden(p, i, task, offs_m, T)
    if T.MAKES_B:
        gb = plus(gb, p, d)
    dp = warpgroup_mma_wait(BEHIND + T.MAKES_B, [dp])
    ds = hidden(p * (dp - numbers_at(rings[3], at, own_numbers[1], T)) * slope, i, task, offs_m, T)
    if not FIRST:
        ga = warpgroup_mma_wait(T.MAKES_B, [ga])
    if T.MAKES_B:
        gb = warpgroup_mma_wait(0, [gb])
    if not FIRST:
        mbarrier.arrive(empty.index(before), count=1)
    return ga, gb, ds


@gluon.jit
def gradients(own, own_numbers, rings, bars, it, task, offs_m, args, F: gl.constexpr, T: gl.constexpr):
    """(ga [64, D], gb [64, Dv]) of a consumer's own rows over all that they see, heads one after the other."""
    ga = gl.full([ROWS, T.BLOCK_D], 0.0, gl.float32, T.of_sum(T.BLOCK_D))
    gb = gl.full([ROWS, T.BLOCK_DV], 0.0, gl.float32, T.of_sum(T.BLOCK_DV))
    ds = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, T.S_LAYOUT)
    visited = task.visit[0]
    count = T.HEADS * visited
    if count > 0:
        i = count * 0
        ga, gb, ds = step(ga, gb, ds, own, own_numbers, rings, bars, it, i, task, offs_m, args, True, F, T)
        for j in range(1, count):
            i = gl.where(i + 1 < visited, i + 1, 0)
            ga, gb, ds = step(ga, gb, ds, own, own_numbers, rings, bars, it + j, i, task, offs_m, args, False, F, T)
        at, _phase = stage(it + count - 1, T)
        ga = warpgroup_mma_wait(0, [plus(ga, ds, streamed_tiles(rings, at, T)[0])])
        mbarrier.arrive(bars[1].index(at), count=1)
    return ga, gb, it + count


@gluon.jit
def leave(g, g_ptr, place, strides, row_lo, len_m, room, DIM: gl.constexpr):
    """Writes a consumer's rows of a gradient; keys that are there but not in use get 0. place = (entry, head, row)."""
    WIDTH: gl.constexpr = g.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    g = gl.convert_layout(g.to(g_ptr.dtype.element_ty), LAYOUT)
    offs_m = row_lo + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    offs_d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    g = gl.where((offs_m < len_m)[:, None], g, 0.0)
    ptr = g_ptr + place[0].to(gl.int64) * strides[0] + place[1].to(gl.int64) * strides[1]
    ptrs = ptr + (place[2] + offs_m).to(gl.int64)[:, None] * strides[2] + offs_d.to(gl.int64)[None, :] * strides[3]
    gl.store(ptrs, g, mask=(offs_m < room)[:, None] & (offs_d < DIM)[None, :])


@gluon.jit
def consumer(own_s, rings, bars, talk, out, sizes, of_rows, args, WG: gl.constexpr, F: gl.constexpr,
             T: gl.constexpr):  # fmt: skip
    ga_ptr, gb_ptr, any_ptr, failed_ptr, m_ptr, delta_ptr, ga_strides, gb_strides = out
    slot, slot_full, own_full, own_empty = talk
    it, n_tile = 0, 0
    tile = heard(slot, slot_full, n_tile)
    while tile >= 0:
        task = task_of(tile, sizes, args, F, T)
        row_lo = task.row_lo + WG * ROWS
        offs_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, T.S_LAYOUT))
        offs_m = row_lo + offs_r
        own_numbers = (0.0, 0.0)
        if not T.KEYS:
            at = task.entry.to(gl.int64) * of_rows[0] + task.head.to(gl.int64) * of_rows[1] + task.start_m + offs_m
            exists = offs_m < task.len_m
            m_i = gl.load(m_ptr + at, mask=exists, other=0.0)
            own_numbers = (-m_i[:, None], gl.load(delta_ptr + at, mask=exists, other=0.0)[:, None])
        mbarrier.wait(own_full, n_tile & 1)
        own = (own_rows_of(own_s[0], WG, T), own_rows_of(own_s[1], WG, T))
        ga, gb, it = gradients(own, own_numbers, rings, bars, it, task, offs_m, args, F, T)
        mbarrier.arrive(own_empty, count=1)
        to = (task.entry, task.head, task.start_m)
        bad = gl.convert_layout(not_finite(ga), offs_r.type.layout)
        leave(ga * (args.scale_log2 * LN2), ga_ptr, to, ga_strides, row_lo, task.len_m, task.room, T.HEAD_DIM)
        if T.MAKES_B:
            bad |= gl.convert_layout(not_finite(gb), offs_r.type.layout)
            leave(gb, gb_ptr, to, gb_strides, row_lo, task.len_m, task.room, T.HEAD_DIM_V)
        bad = gl.where(offs_m < task.len_m, bad, 0)  # what lies behind the last row is nobody's
        gl.store(failed_ptr + (tile.to(gl.int64) * T.BLOCK_M + WG * ROWS) + offs_r, bad)
        gl.store(any_ptr + offs_r * 0, 1, mask=bad != 0)
        n_tile += 1
        tile = heard(slot, slot_full, n_tile)


@gluon.jit
def heard(slot, slot_full, n):
    """The n-th tile that the producer tells of; -1: there are no more."""
    at = n % 2
    mbarrier.wait(slot_full.index(at), n // 2 & 1)
    return word(slot, at)


@gluon.jit
def tell(tile, n, slot, slot_full):
    """Tells the consumers of the n-th tile; all have heard of the last but one, since they are done with it."""
    at = n % 2
    slot.index(at).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + tile)
    mbarrier.arrive(slot_full.index(at), count=1)


@gluon.jit
def producer(descs, numbers, own_s, rings, bars, talk, counter_ptr, sizes, of_rows, tiles, args, F: gl.constexpr,
             T: gl.constexpr):  # fmt: skip
    a_desc, b_desc, c_desc, d_desc = descs
    slot, slot_full, own_full, own_empty = talk
    offs_r = gl.arange(0, T.BLOCK_N, layout=gl.BlockedLayout([1], [32], [1], [0]))
    it, n_tile = 0, 0
    tile = gl.program_id(0)
    while tile < tiles:
        task = task_of(tile, sizes, args, F, T)
        asked = ask(counter_ptr)
        if task.row_lo < task.room:
            tell(tile, n_tile, slot, slot_full)
            row = task.start_m + task.row_lo
            mbarrier.wait(own_empty, n_tile & 1 ^ 1)
            mbarrier.expect(own_full, CONSUMERS * (a_desc.block_type.nbytes + b_desc.block_type.nbytes))
            for w in gl.static_range(CONSUMERS):
                tma_load(a_desc, [task.entry, task.head, row + w * ROWS, 0], own_full, own_s[0].index(w))
                tma_load(b_desc, [task.entry, task.head, row + w * ROWS, 0], own_full, own_s[1].index(w))
            n_tile += 1
            first = task.head // T.GROUP
            if T.KEYS:
                first = task.head * T.GROUP
            for g in range(T.HEADS):
                of_head = task.entry.to(gl.int64) * of_rows[0] + (first + g).to(gl.int64) * of_rows[1] + task.start_n
                for i in range(task.visit[0]):
                    at, phase = stage(it, T)
                    start_n = visited_start(i, task.visit, T.BLOCK_N)
                    full = bars[0].index(at)
                    if T.KEYS:  # on their way while it waits
                        exists = start_n + offs_r < task.len_n
                        m_i = gl.load(numbers[0] + (of_head + start_n) + offs_r, mask=exists, other=0.0)
                        delta = gl.load(numbers[1] + (of_head + start_n) + offs_r, mask=exists, other=0.0)
                    mbarrier.wait(bars[1].index(at), phase ^ 1)
                    mbarrier.expect(full, c_desc.block_type.nbytes + d_desc.block_type.nbytes)
                    tma_load(c_desc, [task.entry, first + g, task.start_n + start_n, 0], full, rings[0].index(at))
                    tma_load(d_desc, [task.entry, first + g, task.start_n + start_n, 0], full, rings[1].index(at))
                    if T.KEYS:
                        rings[2].index(at).store(-m_i)  # once, not by each consumer
                        rings[3].index(at).store(delta)
                        mbarrier.arrive(full, count=1)
                    it += 1
        tile = answer(asked)
    tell(-1, n_tile, slot, slot_full)


@gluon.jit(do_not_specialize=["any_ptr", "counter_ptr", "stride_lb", "stride_lh", "num_m", "tiles", "rows_q", "rows_k",
                              "diag_lo", "diag_hi", "heads"])  # fmt: skip
def backward_hopper_kernel(a_desc, b_desc, c_desc, d_desc, ga_ptr, gb_ptr, any_ptr, failed_ptr, m_ptr, delta_ptr,
                           counter_ptr, ga_strides, gb_strides, stride_lb, stride_lh, num_m, tiles, rows_q, rows_k,
                           diag_lo, diag_hi, heads, args, F: gl.constexpr, T: gl.constexpr):  # fmt: skip
    DTYPE: gl.constexpr = a_desc.dtype
    a_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, T.BLOCK_D], a_desc.layout)
    b_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, T.BLOCK_DV], b_desc.layout)
    c_s = gl.allocate_shared_memory(DTYPE, [T.STAGES, 1, 1, T.BLOCK_N, T.BLOCK_D], c_desc.layout)
    d_s = gl.allocate_shared_memory(DTYPE, [T.STAGES, 1, 1, T.BLOCK_N, T.BLOCK_DV], d_desc.layout)
    rings = (c_s, d_s, c_s, c_s)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if T.KEYS:
        m_s = gl.allocate_shared_memory(gl.float32, [T.STAGES, T.BLOCK_N], WORDS)
        rings = (c_s, d_s, m_s, gl.allocate_shared_memory(gl.float32, [T.STAGES, T.BLOCK_N], WORDS))
    slot = gl.allocate_shared_memory(gl.int32, [2, 1], WORDS)
    own_full, own_empty = barriers(1, 1).index(0), barriers(1, CONSUMERS).index(0)
    talk = (slot, barriers(2, 1), own_full, own_empty)
    bars = (barriers(T.STAGES, 1 + T.KEYS), barriers(T.STAGES, CONSUMERS))
    own_s, descs, numbers = (a_s, b_s), (a_desc, b_desc, c_desc, d_desc), (m_ptr, delta_ptr)
    out = (ga_ptr, gb_ptr, any_ptr, failed_ptr, m_ptr, delta_ptr, ga_strides, gb_strides)
    sizes, of_rows = (num_m, heads, rows_q, rows_k, diag_lo, diag_hi), (stride_lb, stride_lh)
    gl.warp_specialize([
        (consumer, (own_s, rings, bars, talk, out, sizes, of_rows, args, 0, F, T)),
        (consumer, (own_s, rings, bars, talk, out, sizes, of_rows, args, 1, F, T)),
        (producer, (descs, numbers, own_s, rings, bars, talk, counter_ptr, sizes, of_rows, tiles, args, F, T)),
    ], [4, 1], [240, 24])  # fmt: skip
