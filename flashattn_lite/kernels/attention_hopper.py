"""The attention forward for Hopper (sm_90a), in Gluon: the kernel; `attention_hopper_launch.py` starts it.

One block lives on each multiprocessor and works off row tiles. A tile is BLOCK_M rows: query positions of one head, or
of all PACK heads that share a K/V head, head by head within a position. Warps have roles:
  producer (1 warp)             draws tiles, tells them to the consumers, copies Q, K and V into shared memory by TMA
  consumer (4 warps) x 2 or 3   64 rows each: S = Q K^T and O += P V by wgmma, P and O in registers
A consumer starts S of the next key tile before it adds P V of this one, and its softmax runs under the latter.

State of each row, as in attention.py: (m_i, l_i, acc), m_i in log2 units. `visited_tiles` gives the tiles with masked
edges and one whole tile first: those move m_i (running maximum); the whole tiles after them keep it, with no maximum
and no rescale. At the end a row whose l_i passed LIMIT (p may have overflowed its dtype), whose reference float32 can't
hold, or whose acc is not finite leaves a mark in its lse. After a sweep of up to LISTED tiles the producer has the
marked ones done again, REDO: EXACT rows at the running maximum throughout, CLEAN ones (a V that is not finite, seen or
not: 0 * NaN is NaN) as before to the bit; both from a V freed of what is not finite. PLUS and MINUS then give those
infinities to the rows that see them (a NaN counts as both). Only marked rows are written again.

Barriers (mbarrier; each side counts its own phase)
  slot_full[2]   producer -> consumers: a message is there          slot_empty[2]  each consumer: it was read
  q_full[w]      TMA -> consumer w: its rows of Q                    q_empty[w]     consumer w: they may be overwritten
  k_full, v_full[STAGES]  TMA -> consumers: a tile of K, of V       k_empty, v_empty[STAGES]  each consumer: done with it
  settled        consumers -> producer: everything sent so far is finished and its verdict written
Shared memory (bytes, 16-bit dtypes): Q and O BLOCK_M * D * 2 each (one buffer for both with O_OVER_Q), K and V
STAGES * BLOCK_N * D * 2 each, the list 4 * LISTED; 195 KiB at head dim 128, of 227.
Bytes moved: Q and O once, K and V once per row tile, mostly from L2 (heads come in sections that fit there).
Source: Shah et al., FlashAttention-3 (arXiv 2407.08608), for the roles and the overlap; docs/theory.md for the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashattn_lite.kernels.device.bounds import clamp_sequence, tile_start, visited_tiles
from flashattn_lite.kernels.device.scores import add_mask, to_log2, visible
from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, LOG2E, finish, merge, shift, weights

# What changed its name between Triton 3.6 and 3.9.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

FAST, REDO, PLUS, MINUS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)  # what to do with a tile
REPORT, END = gl.constexpr(-1), gl.constexpr(-2)  # messages that are no tile
CLEAN, EXACT = gl.constexpr(0x7FC00001), gl.constexpr(0x7FC00002)  # marks in lse: NaN that no arithmetic makes
EXACT_M = gl.constexpr(2.0**24)  # up to here float32 holds a reference to within 1, see attention.py
LISTED = gl.constexpr(512)  # tiles between two looks at the marks
ROWS = gl.constexpr(64)  # rows of a consumer: wgmma's M


@dataclass(frozen=True)
class HopperTile:
    """Compile-time shape: what a problem fixes, and what tuning chose for it."""

    WARPGROUPS: int  # consumers
    BLOCK_N: int  # keys
    STAGES: int  # of the K ring and of the V ring
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int  # HEAD_DIM as a power of two from 64 up; TMA fills the rest with zeros
    BLOCK_DV: int
    GROUP: int  # query heads of one key/value head
    PACK: int  # of them in one row tile, as a power of two; 1: one
    O_OVER_Q: bool  # O leaves through Q's buffer
    LIMIT: float  # of l_i, so that no p has left its dtype's range


# ---------------------------------------------------------------------------------------------------- where a tile lies
@gluon.jit
def place(tile, sizes, args, F: gl.constexpr, T: gl.constexpr):
    """(batch, head, row tile) of a tile number: heads in sections that share L2, long causal rows first."""
    num_m, heads, num_heads, section = sizes[0], sizes[1], sizes[2], sizes[3]
    before = tile // (section * num_m)
    rest = tile - before * section * num_m
    width = gl.minimum(section, num_heads - before * section)
    block_m = rest // width
    head = before * section + rest - block_m * width
    if F.right:
        block_m = num_m - 1 - block_m
    b = head // heads
    return b, head - b * heads, block_m


@gluon.jit
def extent(b, block_m, sizes, args, F: gl.constexpr, T: gl.constexpr):
    """((batch entry, first row of Q, of K), (len_q, len_k, diag_lo, diag_hi), first position, visit) of a row tile."""
    len_q, len_k, diag_lo, diag_hi = sizes[4], sizes[5], sizes[6], sizes[7]
    entry, start_q, start_k = b, b * 0, b * 0
    if F.varlen:
        entry = b * 0  # the sequences lie behind one another in one batch entry
        start_q, len_q = clamp_sequence(gl.load(args.cu_seqlens_q_ptr + b), gl.load(args.cu_seqlens_q_ptr + b + 1), len_q)
        start_k, len_k = clamp_sequence(gl.load(args.cu_seqlens_k_ptr + b), gl.load(args.cu_seqlens_k_ptr + b + 1), len_k)
    if F.kv_lens:
        len_k = gl.minimum(gl.maximum(gl.load(args.kv_lens_ptr + b), 0), len_k)
    if F.end_aligned:
        diag_lo += len_k - len_q
        diag_hi += len_k - len_q
    POSITIONS: gl.constexpr = ROWS * T.WARPGROUPS // T.PACK
    first = block_m * POSITIONS
    last = gl.minimum(first + POSITIONS, len_q)
    visit = visited_tiles(first, last, len_k, diag_lo, diag_hi, T.BLOCK_N, F)
    visit = (gl.maximum(visit[0], 1), gl.maximum(visit[1], 1), visit[2], visit[3], visit[4], visit[5])
    return (entry, start_q, start_k), (len_q, len_k, diag_lo, diag_hi), first, visit


@gluon.jit
def key_start(i, visit, T: gl.constexpr):
    """First key of the i-th tile: the edges from the right end on, then the whole tiles."""
    edges = visit[1]
    at = gl.where(i < edges, edges - 1 - i, i)
    return tile_start(at, edges, visit[2], visit[3], visit[4], visit[5], visit[0] - edges, T.BLOCK_N)


# ------------------------------------------------------------------------------------------------------------- producer
@gluon.jit
def copy(desc, index, full, buffer):
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, index, full, buffer)


@gluon.jit
def serve(tile, descs, rings, bars, it, n_tile, sizes, args, F: gl.constexpr, T: gl.constexpr):
    """Copies Q and every visited K and V tile of a row tile; K runs one ahead of V. Returns the ring's position."""
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    q_desc, k_desc, v_desc = descs
    q_s, k_s, v_s, _ = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = bars
    b, h, block_m = place(tile, sizes, args, F, T)
    origin, _, first, visit = extent(b, block_m, sizes, args, F, T)
    if T.PACK > 1:
        kv_head, in_group = h, 0
    else:
        kv_head, in_group = h // T.GROUP, h % T.GROUP
    for w in gl.static_range(CONSUMERS):
        mbarrier.wait(q_empty.index(w), (n_tile & 1) ^ 1)
        row = origin[1] + first + w * (ROWS // T.PACK)
        copy(q_desc, [origin[0], kv_head, row, in_group, 0], q_full.index(w), q_s.index(w))
    for i in range(visit[0] + 1):
        if i < visit[0]:
            at = it + i
            mbarrier.wait(k_empty.index(at % T.STAGES), ((at // T.STAGES) & 1) ^ 1)
            row = origin[2] + key_start(i, visit, T)
            copy(k_desc, [origin[0], kv_head, row, 0], k_full.index(at % T.STAGES), k_s.index(at % T.STAGES))
        if i > 0:
            at = it + i - 1
            mbarrier.wait(v_empty.index(at % T.STAGES), ((at // T.STAGES) & 1) ^ 1)
            row = origin[2] + key_start(i - 1, visit, T)
            copy(v_desc, [origin[0], kv_head, row, 0], v_full.index(at % T.STAGES), v_s.index(at % T.STAGES))
    return it + visit[0]


@gluon.jit
def send(message, n_message, talk):
    """Tells every consumer."""
    slot, slot_full, slot_empty, _, _ = talk
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at = n_message % 2
    mbarrier.wait(slot_empty.index(at), ((n_message // 2) & 1) ^ 1)
    slot.index(at).store(gl.full([1], message, gl.int32, ONE))
    mbarrier.arrive(slot_full.index(at), count=1)
    return n_message + 1


@gluon.jit
def report(n_message, n_report, talk, T: gl.constexpr):
    """Waits until the consumers have finished all that was sent; 1 if any of them says so."""
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    settled, verdicts = talk[3], talk[4]
    n_message = send(REPORT, n_message, talk)
    mbarrier.wait(settled, n_report & 1)
    verdict = 0
    for w in gl.static_range(CONSUMERS):
        verdict |= gl.max(verdicts.index(w).load(ONE), 0)
    return verdict, n_message, n_report + 1


@gluon.jit
def marked(tile, lse, sizes, args, F: gl.constexpr, T: gl.constexpr):
    """1 if a row of the tile asks to be done again."""
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    b, h, block_m = place(tile, sizes, args, F, T)
    origin, lengths, first, _ = extent(b, block_m, sizes, args, F, T)
    found = 0
    for w in gl.static_range(CONSUMERS):
        offs_r = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [1], [0]))
        pos, head, exists = rows_of(offs_r, first + w * (ROWS // T.PACK), h, lengths[0], T)
        mark = gl.load(lse_pointers(lse, origin, head, pos), mask=exists, other=0.0)
        mark = mark.to(gl.int32, bitcast=True)
        found |= gl.max(((mark == CLEAN) | (mark == EXACT)).to(gl.int32), 0)
    return found


@gluon.jit
def draw(counter_ptr, sizes, args, F: gl.constexpr, T: gl.constexpr):
    """The next tile of this block, past the end when there is none; tiles past the end of a sequence are passed over."""
    num_tiles = sizes[8]
    tile = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
    if F.varlen:
        tile = skip_empty(tile, counter_ptr, sizes, args, F, T)
    return tile


@gluon.jit
def skip_empty(tile, counter_ptr, sizes, args, F: gl.constexpr, T: gl.constexpr):
    num_tiles = sizes[8]
    again = tile < num_tiles
    while again:
        b, _, block_m = place(tile, sizes, args, F, T)
        _, lengths, first, _ = extent(b, block_m, sizes, args, F, T)
        again = first >= lengths[0]
        if again:
            tile = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
            again = tile < num_tiles
    return tile


@gluon.jit
def producer(descs, rings, bars, talk, listed, counter_ptr, lse, sizes, args, F: gl.constexpr, T: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_tiles = sizes[8]
    it, n_tile, n_message, n_report = 0, 0, 0, 0
    tile = gl.program_id(0)
    if F.varlen:
        tile = skip_empty(tile, counter_ptr, sizes, args, F, T)
    while tile < num_tiles:
        count = 0
        while (tile < num_tiles) & (count < LISTED):
            n_message = send(tile * 4 + FAST, n_message, talk)
            listed.index(count).store(gl.full([1], tile, gl.int32, ONE))
            it = serve(tile, descs, rings, bars, it, n_tile, sizes, args, F, T)
            tile = draw(counter_ptr, sizes, args, F, T)
            n_tile += 1
            count += 1
        failed, n_message, n_report = report(n_message, n_report, talk, T)
        if failed == 0:
            count = 0
        for i in range(count):
            again = gl.max(listed.index(i).load(ONE), 0)
            mode = marked(again, lse, sizes, args, F, T)
            dirty = 0
            while mode != FAST:
                n_message = send(again * 4 + mode, n_message, talk)
                it = serve(again, descs, rings, bars, it, n_tile, sizes, args, F, T)
                n_tile += 1
                verdict, n_message, n_report = report(n_message, n_report, talk, T)
                if mode == REDO:
                    dirty |= verdict
                    mode = marked(again, lse, sizes, args, F, T)
                    if mode == FAST:
                        mode = dirty * PLUS
                elif mode == PLUS:
                    mode = MINUS
                else:
                    mode = FAST
    n_message = send(END, n_message, talk)


# ------------------------------------------------------------------------------------------------------------- consumer
@gluon.jit
def rows_of(offs_r, first, h, len_q, T: gl.constexpr):
    """(position, query head, exists) of rows offs_r of a consumer whose first position is `first`."""
    if T.PACK > 1:
        pos = first + offs_r // T.PACK
        in_group = offs_r % T.PACK
        return pos, h * T.GROUP + in_group, (pos < len_q) & (in_group < T.GROUP)
    else:
        pos = first + offs_r
        return pos, h + offs_r * 0, pos < len_q


@gluon.jit
def lse_pointers(lse, origin, head, pos):
    lse_ptr, lse_strides = lse
    return lse_ptr + origin[0].to(gl.int64) * lse_strides[0] + head.to(gl.int64) * lse_strides[1] + (origin[1] + pos)


@gluon.jit
def receive(n_message, talk):
    slot, slot_full, slot_empty, _, _ = talk
    FOUR: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = n_message % 2
    mbarrier.wait(slot_full.index(at), (n_message // 2) & 1)
    message = gl.max(slot.index(at).load(FOUR), 0)
    mbarrier.arrive(slot_empty.index(at), count=1)
    return message


@gluon.jit
def row_sum(p, l_i, T: gl.constexpr):
    """[64, 4] from p [64, N]: the four lanes that share a row meet only at the end of the tile."""
    parts = gl.reshape(p, [ROWS, T.BLOCK_N // 8, 4, 2])
    return gl.convert_layout(gl.sum(gl.sum(parts, 3), 1), l_i.type.layout, assert_trivial=True)


@gluon.jit
def clean(v, mode, n_clean, cleaned, WG: gl.constexpr, T: gl.constexpr):
    """V [N, Dv] in shared memory without what is not finite; PLUS, MINUS: 1 where it is that infinity, else 0.

    Every consumer does its share and waits for the others. Returns 1 if there was any in that share.
    """
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // T.BLOCK_DV, T.BLOCK_DV // 8], [4, 1], [1, 0])
    dirty = 0
    PARTS: gl.constexpr = T.BLOCK_N // 16
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    for part in gl.static_range(WG, PARTS, CONSUMERS):
        rows = v.slice(part * 16, 16, dim=0)
        x = rows.load(WIDE).to(gl.float32)  # [16, Dv]
        finite = gl.abs(x) < float("inf")
        infinity = gl.where(mode == MINUS, float("-inf"), float("inf"))
        hit = gl.where((x != x) | (x == infinity), 1.0, 0.0)
        x = gl.where(mode == REDO, gl.where(finite, x, 0.0), hit)
        rows.store(x.to(v.dtype))
        dirty |= 1 - gl.min(gl.min(finite.to(gl.int32), 1), 0)
    fence_async_shared()
    mbarrier.arrive(cleaned, count=1)
    mbarrier.wait(cleaned, n_clean & 1)
    return dirty, n_clean + 1


@gluon.jit
def fast(s, m_i, l_i, args, F: gl.constexpr, T: gl.constexpr):
    """A tile that every row sees whole, at the reference that the rows have: (l_i, p)."""
    scale = args.scale_log2
    if F.scale_first:
        s = to_log2(s, args.scale_log2, args.softcap, F)
        scale = 1.0
    p = weights(s, scale, m_i)  # [M, N]
    return l_i + row_sum(p, l_i, T), p


@gluon.jit
def careful(s, m_i, l_i, i, mode, rows, visit, args, F: gl.constexpr, T: gl.constexpr):
    """The i-th tile, masked, at the running maximum where that may move: (m_i, l_i, alpha, p)."""
    b, pos, head, exists, exact, len_k, diag_lo, diag_hi = rows
    scale = args.scale_log2
    if F.scale_first:
        s = to_log2(s, args.scale_log2, args.softcap, F)
        scale = 1.0
    row_scale = gl.full([ROWS], 0.0, gl.float32, m_i.type.layout) + scale
    if mode == REDO:  # past EXACT_M a product must be rounded before it is subtracted
        s = gl.where((exact != 0)[:, None], s * scale, s)
        row_scale = gl.where(exact != 0, 1.0, row_scale)
    elif mode != FAST:
        s = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, s.type.layout)
    offs_n = key_start(i, visit, T) + gl.arange(0, T.BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))
    seen = visible(pos, offs_n, len_k, diag_lo, diag_hi, F)  # [M, N]
    if F.mask != "":
        ptrs = args.mask_ptr + b.to(gl.int64) * args.mask_strides[0] + head.to(gl.int64)[:, None] * args.mask_strides[1]
        ptrs += pos.to(gl.int64)[:, None] * args.mask_strides[2] + offs_n.to(gl.int64)[None, :] * args.mask_strides[3]
        mask = gl.load(ptrs, mask=exists[:, None] & (offs_n < len_k)[None, :], other=0)  # [M, N]
        if F.mask == "bool":
            seen = seen & (mask != 0)
        else:
            s = add_mask(s, mask)
    s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(s, 1) * row_scale)
    m_new = gl.where((i >= visit[1]) & (exact == 0), m_i, m_new)
    m_ref, alpha = shift(m_i, m_new)
    p = weights(s, row_scale[:, None], m_ref)  # [M, N]
    alpha_l = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=True)
    return m_new, gl.fma(l_i, alpha_l[:, None], row_sum(p, l_i, T)), alpha, p


@gluon.jit
def attend(state, p, q, rings, bars, it, first, last, mode, rows, visit, args, CAREFUL: gl.constexpr,
           WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """Takes tiles first <= i < last into the state; p is that of tile first - 1, whose V has not been added yet."""
    o, m_i, l_i, dirty, n_clean = state
    _, k_s, v_s, _ = rings
    _, _, k_full, k_empty, v_full, v_empty, cleaned = bars
    P_LAYOUT: gl.constexpr = p.type.layout
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.BLOCK_N, 16])
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    for i in range(first, last):
        at = it % T.STAGES
        k_at = (it + 1) % T.STAGES
        phase = (it // T.STAGES) & 1
        v = v_s.index(at).reshape([T.BLOCK_N, T.BLOCK_DV])
        if CAREFUL:
            if mode != FAST:
                mbarrier.wait(v_full.index(at), phase)
                found, n_clean = clean(v, mode, n_clean, cleaned, WG, T)
                dirty |= found
        mbarrier.wait(k_full.index(k_at), ((it + 1) // T.STAGES) & 1)
        k = k_s.index(k_at).reshape([T.BLOCK_N, T.BLOCK_D])
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)  # [M, N]
        mbarrier.wait(v_full.index(at), phase)
        o = warpgroup_mma(p, v, o, is_async=True)  # [M, Dv]
        s = warpgroup_mma_wait(1, [s])  # the scores are there; P V goes on under the softmax
        if CAREFUL:
            m_i, l_i, alpha, w = careful(s, m_i, l_i, i, mode, rows, visit, args, F, T)
        else:
            l_i, w = fast(s, m_i, l_i, args, F, T)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(v_empty.index(at), count=1)
        mbarrier.arrive(k_empty.index(k_at), count=1)  # with V's: one meeting of the warps less
        p = gl.convert_layout(w.to(p.dtype), P_LAYOUT, assert_trivial=True)
        if CAREFUL:
            o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout), assert_trivial=True)[:, None]
        it += 1
    return (o, m_i, l_i, dirty, n_clean), p, it


@gluon.jit
def pass_over(count, bars, it, T: gl.constexpr):
    """Gives back tiles that no row of this consumer sees; the other consumers use them."""
    _, _, k_full, k_empty, v_full, v_empty, _ = bars
    for _ in range(count):
        phase = (it // T.STAGES) & 1
        mbarrier.wait(k_full.index(it % T.STAGES), phase)
        mbarrier.arrive(k_empty.index(it % T.STAGES), count=1)
        mbarrier.wait(v_full.index(it % T.STAGES), phase)
        mbarrier.arrive(v_empty.index(it % T.STAGES), count=1)
        it += 1
    return it


@gluon.jit
def consumer(rings, bars, talk, dst, lse, sizes, args, WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):
    q_s, k_s, v_s, o_s = rings
    settled, verdicts = talk[3], talk[4]
    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleaned = bars
    DTYPE: gl.constexpr = q_s.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.BLOCK_DV, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    # What is left when each thread adds up its own part of a row of S.
    L_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[64, 4])  # fmt: skip
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    q_buffer = q_s.index(WG)
    q = q_buffer.reshape([ROWS, T.BLOCK_D])
    o_buffer = o_s.index(WG)
    it, n_tile, n_message, n_clean, failed, dirty = 0, 0, 0, 0, 0, 0
    message = receive(n_message, talk)
    while message != END:
        tile, mode = message // 4, message % 4
        b, h, block_m = place(tile, sizes, args, F, T)
        origin, lengths, tile_first, visit = extent(b, block_m, sizes, args, F, T)
        len_q, len_k, diag_lo, diag_hi = lengths
        first = tile_first + WG * (ROWS // T.PACK)
        pos, head, exists = rows_of(gl.arange(0, ROWS, layout=ROW), first, h, len_q, T)
        lse_ptrs = lse_pointers(lse, origin, head, pos)
        exact = gl.full([ROWS], 0, gl.int32, ROW)
        write = exists
        if mode == REDO:
            mark = gl.load(lse_ptrs, mask=exists, other=0.0).to(gl.int32, bitcast=True)
            exact = (mark == EXACT).to(gl.int32)
            write = exists & ((mark == EXACT) | (mark == CLEAN))
        rows = (b, pos, head, exists, exact, len_k, diag_lo, diag_hi)
        skip = 0
        if F.right:  # tiles past the last key that these rows see
            seen_to = gl.minimum(gl.maximum(gl.minimum(first + ROWS // T.PACK, len_q) + diag_hi, 0), len_k)
            skip = gl.maximum(key_start(0, visit, T) - seen_to + T.BLOCK_N, 0) // T.BLOCK_N
            skip = gl.where(mode == FAST, gl.minimum(skip, visit[0] - 1), 0)
        it = pass_over(skip, bars, it, T)

        # The first tile has nothing to overlap with.
        m_i = gl.full([ROWS], EMPTY_M, gl.float32, ROW)
        l_i = gl.full([ROWS, 4], EMPTY_L, gl.float32, L_LAYOUT)
        o = gl.full([ROWS, T.BLOCK_DV], 0.0, gl.float32, O_LAYOUT)
        mbarrier.wait(q_full.index(WG), n_tile & 1)
        at = it % T.STAGES
        mbarrier.wait(k_full.index(at), (it // T.STAGES) & 1)
        k = k_s.index(at).reshape([T.BLOCK_N, T.BLOCK_D])
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)  # [M, N]
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(at), count=1)
        m_i, l_i, alpha, w = careful(s, m_i, l_i, skip, mode, rows, visit, args, F, T)
        p = gl.convert_layout(w.to(DTYPE), P_LAYOUT, assert_trivial=True)

        careful_to = gl.where(mode == FAST, visit[1], visit[0])
        state = (o, m_i, l_i, dirty, n_clean)
        state, p, it = attend(state, p, q, rings, bars, it, skip + 1, careful_to, mode, rows, visit, args, True, WG, F,
                              T)  # fmt: skip
        if F.mask == "":
            state, p, it = attend(state, p, q, rings, bars, it, gl.maximum(careful_to, skip + 1), visit[0], mode, rows,
                                  visit, args, False, WG, F, T)  # fmt: skip
        o, m_i, l_i, dirty, n_clean = state
        if not T.O_OVER_Q:
            mbarrier.arrive(q_empty.index(WG), count=1)  # the next Q may land under what follows

        at = it % T.STAGES
        mbarrier.wait(v_full.index(at), (it // T.STAGES) & 1)
        v = v_s.index(at).reshape([T.BLOCK_N, T.BLOCK_DV])
        if mode != FAST:
            found, n_clean = clean(v, mode, n_clean, cleaned, WG, T)
            dirty |= found
        o = warpgroup_mma(p, v, o, is_async=True)  # [M, Dv]
        l_row = gl.convert_layout(gl.sum(l_i, 1), ROW, assert_trivial=True)
        overflow = ((l_row < T.LIMIT) == 0) | ((gl.abs(m_i) > EXACT_M) & (m_i != EMPTY_M))
        weight = gl.full([ROWS], 1.0, gl.float32, ROW)
        if F.sinks:
            sink = gl.load(args.sinks_ptr + head, mask=exists, other=0.0).to(gl.float32) * LOG2E
            m_i, l_row, weight, sink_weight = merge(m_i, l_row, sink, gl.where(sink == EMPTY_M, EMPTY_L, 1.0))
        inv_l, lse_row = finish(m_i, l_row)
        weight = gl.where(mode >= PLUS, 1.0, weight * inv_l)  # counts need only be positive
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(v_empty.index(at), count=1)
        it += 1

        bad = gl.convert_layout(gl.sum(o, 1), ROW, assert_trivial=True) * 0.0 != 0.0  # infinite or NaN
        mark = gl.where(overflow, EXACT, gl.where(bad, CLEAN, 0))
        mark = gl.where(exact != 0, 0, mark)
        if mode <= REDO:
            final = gl.where(mark == 0, lse_row, mark.to(gl.float32, bitcast=True))
            gl.store(lse_ptrs, final, mask=write)
            write = write & (mark == 0)
            if mode == FAST:
                failed |= gl.max(((mark != 0) & exists).to(gl.int32), 0)
        out = (o * gl.convert_layout(weight, ROW_O, assert_trivial=True)[:, None]).to(DTYPE)  # [M, Dv]
        deliver(out, dst, o_buffer, origin, first, h, len_q, write, mode, F, T)
        if T.O_OVER_Q:
            mbarrier.arrive(q_empty.index(WG), count=1)

        n_tile += 1
        n_message += 1
        message = receive(n_message, talk)
        while message == REPORT:
            writes_done()
            verdicts.index(WG).store(gl.full([1], 0, gl.int32, ONE) + (failed | dirty))
            mbarrier.arrive(settled, count=1)
            failed, dirty = 0, 0
            n_message += 1
            message = receive(n_message, talk)
    writes_done()


@gluon.jit
def writes_done():
    """Waits until what this thread sent by TMA is in memory, not only out of its buffer."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32,
                              is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def deliver(out, dst, o_buffer, origin, first, h, len_q, write, mode, F: gl.constexpr, T: gl.constexpr):
    """Writes a consumer's rows of O: all by TMA in a dense tensor, else those in `write`, or infinities where hit."""
    o_desc, out_ptr, o_strides = dst
    flat = o_buffer.reshape([ROWS, T.BLOCK_DV])
    tma.store_wait(0)  # the rows before have left the buffer
    flat.store(out)
    by_rows = mode != FAST
    if F.varlen:
        by_rows = mode >= FAST  # always: the rows after the last belong to the next sequence
    if by_rows:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // T.BLOCK_DV, T.BLOCK_DV // 8], [4, 1], [1, 0])
        ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
        x = flat.load(WIDE)  # [M, Dv]
        pos, head, _ = rows_of(gl.arange(0, ROWS, layout=ROW), first, h, len_q, T)
        offs_d = gl.arange(0, T.BLOCK_DV, layout=gl.SliceLayout(0, WIDE))
        ptrs = out_ptr + origin[0].to(gl.int64) * o_strides[0] + head.to(gl.int64)[:, None] * o_strides[1]
        ptrs += (origin[1] + pos).to(gl.int64)[:, None] * o_strides[2] + offs_d[None, :]
        wanted = gl.convert_layout(write.to(gl.int32), ROW) != 0
        wanted = wanted[:, None] & (offs_d < T.HEAD_DIM_V)[None, :]
        if mode >= PLUS:
            wanted = wanted & (x > 0.0)
            infinity = gl.where(mode == PLUS, float("inf"), float("-inf"))
            x = (gl.load(ptrs, mask=wanted, other=0.0).to(gl.float32) + infinity).to(x.dtype)
        gl.store(ptrs, x, mask=wanted)
        fence_async_shared()
    else:
        fence_async_shared()
        if T.PACK > 1:
            kv_head, in_group = h, 0
        else:
            kv_head, in_group = h // T.GROUP, h % T.GROUP
        tma_store(o_desc, [origin[0], kv_head, origin[1] + first, in_group, 0], o_buffer)
        if T.O_OVER_Q:
            tma.store_wait(0)


# --------------------------------------------------------------------------------------------------------------- kernel
@gluon.jit(do_not_specialize=["counter_ptr", "lse_strides", "sizes"])
def attention_hopper_kernel(q_desc, k_desc, v_desc, o_desc, out_ptr, o_strides, lse_ptr, lse_strides, counter_ptr,
                            sizes, args, F: gl.constexpr, T: gl.constexpr):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    STAGES: gl.constexpr = T.STAGES
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS // T.PACK, T.PACK, T.BLOCK_D], q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [T.STAGES, 1, 1, T.BLOCK_N, T.BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [T.STAGES, 1, 1, T.BLOCK_N, T.BLOCK_DV], v_desc.layout)
    if T.O_OVER_Q:
        o_s = q_s
    else:
        o_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS // T.PACK, T.PACK, T.BLOCK_DV], o_desc.layout)
    slot = gl.allocate_shared_memory(gl.int32, [2, 1], WORDS)
    verdicts = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], WORDS)
    listed = gl.allocate_shared_memory(gl.int32, [LISTED, 1], WORDS)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], BARRIER)
    slot_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    slot_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    settled = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    cleaned = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(slot_full.index(i), count=1)
        mbarrier.init(slot_empty.index(i), count=CONSUMERS)
    mbarrier.init(settled, count=CONSUMERS)
    mbarrier.init(cleaned, count=CONSUMERS)

    rings = (q_s, k_s, v_s, o_s)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, cleaned)
    talk = (slot, slot_full, slot_empty, settled, verdicts)
    descs = (q_desc, k_desc, v_desc)
    lse = (lse_ptr, lse_strides)
    dst = (o_desc, out_ptr, o_strides)
    # Registers a thread: 168 (128 with three consumers) at launch; the producer gives most of its own to the consumers.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (rings, bars, talk, dst, lse, sizes, args, 0, F, T)),
            (consumer, (rings, bars, talk, dst, lse, sizes, args, 1, F, T)),
            (producer, (descs, rings, bars, talk, listed, counter_ptr, lse, sizes, args, F, T)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (rings, bars, talk, dst, lse, sizes, args, 0, F, T)),
            (consumer, (rings, bars, talk, dst, lse, sizes, args, 1, F, T)),
            (consumer, (rings, bars, talk, dst, lse, sizes, args, 2, F, T)),
            (producer, (descs, rings, bars, talk, listed, counter_ptr, lse, sizes, args, F, T)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
