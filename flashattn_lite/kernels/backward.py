"""The portable attention backward in Triton: the kernels; `backward_launch.py` starts them.

With P = exp(S - lse), dP = dO V^T, delta = rowsum(dO * O) - d_lse and dS = P * (dP - delta), each pair of a query and a
key adds to dV = P^T dO, dQ = scale dS K and dK = scale dS^T Q. Both sides are one kernel, `backward_kernel`: a program
owns rows a, b and streams all rows c, d that they meet,

    KEYS:  a, b = K, V    c, d = Q, dO    S^T = a c^T, dP^T = b d^T    ga = dK += dS^T c, gb = dV += P^T d
    else:  a, b = Q, dO   c, d = K, V     S = a c^T,   dP = b d^T      ga = dQ += dS c

so every gradient is summed by one program, in one order: no atomics, the same bits whatever else is there. S and dP are
made twice for that, seven products for five; where registers do not hold both dK and dV each has a launch, eight.
Before, `backward_rows.py` writes what P and dS need of each query row.
Bytes moved: c and d once for every tile of own rows, mostly from L2, all else once.

What is not finite gets no further than it may. A query row is bad if its q, dO, lse or delta is not finite: its
reference is NaN then, and so is all that it enters. But in the sums over c and d 0 * NaN is NaN, also where a row is
not seen. So a program whose gradients are not all finite says so in `failed` and `any`, and a second launch, CAREFUL,
makes those once more without the bad rows of c and d: what sees one of them is NaN, the other rows' bits are the same.
(In the same launch that code took registers from the usual way: 140 a thread became 255, head dim 64. As many programs
as the usual launch has, each with a look at its own rows, took 2 to 7 us to find nothing.)
Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from flashattn_lite.kernels.attention_tiles import (
    Shape,
    factor,
    foremost,
    load_factor,
    mask_of,
    mask_tile,
    plus_product,
    sequence,
    times,
    transposed,
    without,
)
from flashattn_lite.kernels.backward_rows import not_finite
from flashattn_lite.kernels.device.bounds import visited_start, visited_tiles
from flashattn_lite.kernels.device.scores import add_mask, scaled, visible
from flashattn_lite.kernels.device.state import LN2, LOG2E
from flashattn_lite.problem import Features


@dataclass(frozen=True)
class BackwardTile(Shape):
    """Of backward_kernel; with TMA c and d are tensor descriptors, float32 in parts as those of parts, a and b too."""

    KEYS: bool  # it owns keys of a key/value head and streams the queries of the head's group; else the reverse
    MAKES_A: bool  # the gradient of a
    MAKES_B: bool  # the gradient of b, where it owns keys
    SEEN: Features  # as its own rows see what it streams: of keys, left and right change places
    CAREFUL: bool = False  # the launch that does again what failed

    @property
    def HEADS(self) -> int:
        """Heads whose rows it streams."""
        return self.GROUP if self.KEYS else 1


@triton.jit
def numbers_of(rows, offs, exists, APART: tl.constexpr):
    """(m_i, log2 l, delta) of query rows as rows_kernel left them at `rows`. APART: log2 l is not in m_i."""
    m_i = tl.load(rows[0] + offs, mask=exists, other=0.0)
    delta = tl.load(rows[2] + offs, mask=exists, other=0.0)
    log_l = tl.zeros_like(m_i)
    if APART:
        log_l = tl.load(rows[1] + offs, mask=exists, other=0.0)
    return m_i, log_l, delta


@triton.jit
def capped(s, args, F: tl.constexpr):
    """(scores of products s, the factor to log2 units, d of the capped score by the score)."""
    slope = 1.0
    s, scale = scaled(s, args, F)
    if F.softcap:
        share = s / (args.softcap * LOG2E)
        slope = 1.0 - share * share
    return s, scale, slope


@triton.jit
def weights_of_all(s, minus_m, args, F: tl.constexpr):
    """(P [M, N], d of the capped score by the score) from products s of rows that all see each other."""
    s, scale, slope = capped(s, args, F)
    return tl.exp2(tl.fma(s, scale, minus_m)), slope


@triton.jit
def weights_of(s, m_i, log_l, offs_m, offs_n, mask_ptr, len_m, len_n, diag_lo, diag_hi, args, dtype: tl.constexpr,
               WHOLE: tl.constexpr, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """(P [M, N], which pairs are seen, d of the capped score by the score) from products s of own and streamed rows.

    m_i, log_l: [M, 1], or [1, N] where queries are streamed. dtype: of the rows.
    """
    if WHOLE:
        seen = True
        p, slope = weights_of_all(s, -m_i, args, F)
    else:
        s, scale, slope = capped(s, args, F)
        SEEN: tl.constexpr = T.SEEN
        seen = visible(offs_m, offs_n, len_n, diag_lo, diag_hi, SEEN)  # [M, N]
        if F.mask != "":
            if T.KEYS:
                bias = mask_tile(mask_ptr, offs_n[None, :], offs_m[:, None], len_n, len_m, args, T)
            else:
                bias = mask_tile(mask_ptr, offs_m[:, None], offs_n[None, :], len_m, len_n, args, T)
        if F.mask == "bool":
            seen = seen & (bias != 0)
        GUARDED: tl.constexpr = dtype == tl.float32 if F.mask == "float" else T.CAREFUL
        if GUARDED:
            # Made again in another order a product differs by its rounding, of 1e10 by 1024. What is so near to the
            # maximum, or above it, is the maximum. A mask's numbers are added alike wherever: they widen nothing.
            # Beside a mask, in the usual launch too, for float32 alone: of 16 bits all orders gave the same bits.
            near = 0.5 - tl.abs(s) * tl.abs(scale * 2.0**-21)
        if F.mask == "float":
            seen = seen & (bias != float("-inf"))
            s, scale = add_mask(s, scale, bias, True)
        power = tl.fma(s, scale, -m_i)
        if F.mask == "float" or T.CAREFUL:
            below = s * scale - m_i
            if GUARDED:
                below = tl.where(below > near, 0.0, below)
            if F.mask == "float":
                power = below - log_l
            else:  # rows that are not counted anew keep the bits that the usual launch gives them
                power = tl.where(log_l != 0.0, below - log_l, power)
        p = tl.exp2(power)
        p = tl.where(seen, p, 0.0)
    return p, seen, slope


@triton.jit
def add_tiles(ga, gb, poisoned, own, streamed, own_rows, rows, mask_ptr, first, last, visit, offs_m, len_m, len_n,
              diag_lo, diag_hi, args, WHOLE: tl.constexpr, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Adds the tiles first <= i < last of a visit to the gradients of own rows; WHOLE: all pairs in them are seen.

    own: factors. CAREFUL: without bad rows of what is streamed; own rows that see one are poisoned.
    """
    for i in tl.range(first, last):
        start_n = visited_start(i, visit, T.BLOCK_N)
        offs_n = start_n + tl.arange(0, T.BLOCK_N)
        c = load_factor(streamed[0], start_n, len_n, T.BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T.TMA, not WHOLE, T)
        d = load_factor(streamed[1], start_n, len_n, T.BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T.TMA, not WHOLE, T)
        dtype: tl.constexpr = tl.float32 if T.PRODUCTS == "parts" else c.dtype
        m_i, log_l, delta = own_rows
        if T.KEYS:
            m_i, log_l, delta = numbers_of(rows, offs_n, offs_n < len_n, F.mask == "float" or T.CAREFUL)
        if T.CAREFUL:
            bad = not_finite(foremost(c, T)) | not_finite(foremost(d, T))
            if T.KEYS:
                bad |= (m_i != m_i).to(tl.int32)
            c, d = without(c, bad, T), without(d, bad, T)
        if T.KEYS:
            m_i, log_l, delta = m_i[None, :], log_l[None, :], delta[None, :]
        s = times(own[0], transposed(c, T), T, T.KEYS)  # [M, N], with the bits of Q K^T
        p, seen, slope = weights_of(s, m_i, log_l, offs_m, offs_n, mask_ptr, len_m, len_n, diag_lo, diag_hi, args,
                                    dtype, WHOLE, F, T)  # fmt: skip
        if T.CAREFUL:
            good = (bad == 0)[None, :]
            poisoned |= tl.max((seen & (bad != 0)[None, :]).to(tl.int32), 1)
            p = tl.where(good, p, 0.0)
        if T.MAKES_A:
            ds = p * (times(own[1], transposed(d, T), T) - delta) * slope
            if not WHOLE:
                ds = tl.where(seen, ds, 0.0)
            if T.CAREFUL:
                ds = tl.where(good, ds, 0.0)
            ga = plus_product(ga, factor(ds.to(dtype), T), c, T)
        if T.MAKES_B:
            gb = plus_product(gb, factor(p.to(dtype), T), d, T)
    return ga, gb, poisoned


@triton.jit
def gradients(own, own_rows, c_src, d_src, rows, place, visit, offs_m, len_m, len_n, diag_lo, diag_hi, args,
              F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """(ga [M, D], gb [M, Dv], poisoned [M]) of own rows over all that they see.

    c_src, d_src: as load_tile takes them, of the first head that is streamed; place = (batch, query head, where rows of
    head 0 begin, stride of a head there).
    """
    ga = tl.full([T.BLOCK_M, T.BLOCK_D], 0.0, tl.float32)
    gb = tl.full([T.BLOCK_M, T.BLOCK_DV], 0.0, tl.float32)
    poisoned = tl.full([T.BLOCK_M], 0, tl.int32)
    for g in tl.range(0, T.HEADS):
        streamed = ((c_src[0], c_src[1], c_src[2] + g, c_src[3], c_src[4]),
                    (d_src[0], d_src[1], d_src[2] + g, d_src[3], d_src[4]))  # fmt: skip
        at = place[2] + (place[1] + g).to(tl.int64) * place[3]
        of_head = (rows[0] + at, rows[1] + at, rows[2] + at)
        mask_ptr = args.mask_ptr
        if F.mask != "":
            mask_ptr = mask_of(place[0], place[1] + g, args)
        edges = visit[0] if T.CAREFUL else visit[1]
        ga, gb, poisoned = add_tiles(ga, gb, poisoned, own, streamed, own_rows, of_head, mask_ptr, 0, edges, visit,
                                     offs_m, len_m, len_n, diag_lo, diag_hi, args, False, F, T)  # fmt: skip
        if F.mask == "" and not T.CAREFUL:
            ga, gb, poisoned = add_tiles(ga, gb, poisoned, own, streamed, own_rows, of_head, mask_ptr, edges, visit[0],
                                         visit, offs_m, len_m, len_n, diag_lo, diag_hi, args, True, F, T)  # fmt: skip
    return ga, gb, poisoned


@triton.jit
def leave(g, poisoned, g_ptr, place, strides, offs_m, len_m, room, DIM: tl.constexpr, BLOCK: tl.constexpr,
          CAREFUL: tl.constexpr):  # fmt: skip
    """Writes rows of a gradient [M, BLOCK]; keys that are there but not in use get 0. place = (entry, head, row)."""
    offs_d = tl.arange(0, BLOCK)
    if CAREFUL:
        g = tl.where((poisoned != 0)[:, None], float("nan"), g)
    g = tl.where((offs_m < len_m)[:, None], g, 0.0)
    ptr = g_ptr + place[0].to(tl.int64) * strides[0] + place[1].to(tl.int64) * strides[1]
    ptrs = ptr + (place[2] + offs_m).to(tl.int64)[:, None] * strides[2] + offs_d.to(tl.int64)[None, :] * strides[3]
    tl.store(ptrs, g.to(g_ptr.dtype.element_ty), mask=(offs_m < room)[:, None] & (offs_d < DIM)[None, :])


@triton.jit
def own_tile(tile, a_src, b_src, c_src, d_src, ga_ptr, gb_ptr, m_ptr, log_l_ptr, delta_ptr, a_strides, b_strides,
             c_strides, d_strides, ga_strides, gb_strides, stride_lb, stride_lh, row_lo, of_sequence, num_m, heads,
             args, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Makes and leaves the gradients of a tile's own rows, from row_lo on; [M] those that are not finite.

    of_sequence: as `sequence` has it, of the tile's entry.
    """
    batch, start_q, len_q, start_k, room, len_k, diag_lo, diag_hi = of_sequence
    h, entry = tile // num_m % heads, tile // num_m // heads  # own head
    if T.KEYS:
        start_m, len_m, start_n, len_n, first = start_k, len_k, start_q, len_q, h * T.GROUP
        diag_lo, diag_hi = -diag_hi, -diag_lo
        query_head = first
    else:
        start_m, len_m, room, start_n, len_n, first = start_q, len_q, len_q, start_k, len_k, h // T.GROUP
        query_head = h
    offs_m = row_lo + tl.arange(0, T.BLOCK_M)
    a = load_factor((a_src, batch, h, start_m, a_strides), row_lo, len_m, T.BLOCK_M, T.HEAD_DIM, T.BLOCK_D, False, True,
                    T)  # fmt: skip
    own = (a, 0)
    if T.MAKES_A:
        b = load_factor((b_src, batch, h, start_m, b_strides), row_lo, len_m, T.BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV,
                        False, True, T)  # fmt: skip
        own = (a, b)
    c, d = (c_src, batch, first, start_n, c_strides), (d_src, batch, first, start_n, d_strides)
    rows = (m_ptr, log_l_ptr, delta_ptr)
    place = (entry, query_head, batch.to(tl.int64) * stride_lb + start_q, stride_lh)
    at = place[2] + query_head.to(tl.int64) * stride_lh
    own_rows = (0, 0, 0)
    if not T.KEYS:
        APART: tl.constexpr = F.mask == "float" or T.CAREFUL
        m_i, log_l, delta = numbers_of((m_ptr + at, log_l_ptr + at, delta_ptr + at), offs_m, offs_m < len_m, APART)
        own_rows = (m_i[:, None], log_l[:, None], delta[:, None])
    row_hi = tl.maximum(tl.minimum(row_lo + T.BLOCK_M, len_m), row_lo)
    SEEN: tl.constexpr = T.SEEN
    visit = visited_tiles(row_lo, row_hi, tl.where(row_lo < len_m, len_n, 0), diag_lo, diag_hi, T.BLOCK_N, SEEN)

    to = (batch, h, start_m)
    ga, gb, poisoned = gradients(own, own_rows, c, d, rows, place, visit, offs_m, len_m, len_n, diag_lo, diag_hi, args,
                                 F, T)  # fmt: skip
    bad = tl.zeros_like(poisoned)
    if T.MAKES_A:
        bad |= not_finite(ga)
        ga *= args.scale_log2 * LN2
        leave(ga, poisoned, ga_ptr, to, ga_strides, offs_m, len_m, room, T.HEAD_DIM, T.BLOCK_D, T.CAREFUL)
    if T.MAKES_B:
        bad |= not_finite(gb)
        leave(gb, poisoned, gb_ptr, to, gb_strides, offs_m, len_m, room, T.HEAD_DIM_V, T.BLOCK_DV, T.CAREFUL)
    return bad


@triton.jit
def first_row(tile, num_m, T: tl.constexpr):
    """Of a tile's own rows; who sees most goes first."""
    block_m = tile % num_m
    if T.SEEN.right:
        block_m = num_m - 1 - block_m
    return block_m * T.BLOCK_M


@triton.jit(do_not_specialize=["any_ptr", "stride_lb", "stride_lh", "num_m", "tiles", "rows_q", "rows_k", "diag_lo",
                               "diag_hi", "heads"])  # fmt: skip
def backward_kernel(a_src, b_src, c_src, d_src, ga_ptr, gb_ptr, any_ptr, failed_ptr, m_ptr, log_l_ptr, delta_ptr,
                    a_strides, b_strides, c_strides, d_strides, ga_strides, gb_strides, stride_lb, stride_lh, num_m,
                    tiles, rows_q, rows_k, diag_lo, diag_hi, heads, args, F: tl.constexpr,
                    T: tl.constexpr):  # fmt: skip
    """A program makes one tile; with care, where `any` is no longer 0, what failed among the tiles in its turn."""
    offs = tl.arange(0, T.BLOCK_M)
    if T.CAREFUL:
        if tl.load(any_ptr) != 0:
            for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
                tile = tl.cast(i, tl.int32)  # the interpreter has Python's int
                of_sequence = sequence(tile // num_m // heads, rows_q, rows_k, diag_lo, diag_hi, args, F)
                row_lo = first_row(tile, num_m, T)
                SEEN_BY: tl.constexpr = 5 if T.KEYS else 2  # len_k, or len_q
                failed_ptrs = failed_ptr + tile.to(tl.int64) * T.BLOCK_M + offs
                if tl.max(tl.load(failed_ptrs, mask=row_lo + offs < of_sequence[SEEN_BY], other=0), 0) != 0:
                    own_tile(tile, a_src, b_src, c_src, d_src, ga_ptr, gb_ptr, m_ptr, log_l_ptr, delta_ptr, a_strides,
                             b_strides, c_strides, d_strides, ga_strides, gb_strides, stride_lb, stride_lh, row_lo,
                             of_sequence, num_m, heads, args, F, T)  # fmt: skip
    else:
        tile = tl.program_id(0)
        of_sequence = sequence(tile // num_m // heads, rows_q, rows_k, diag_lo, diag_hi, args, F)
        row_lo = first_row(tile, num_m, T)
        ROOM: tl.constexpr = 4 if T.KEYS else 2  # of keys, or len_q
        if row_lo >= of_sequence[ROOM]:
            return
        bad = own_tile(tile, a_src, b_src, c_src, d_src, ga_ptr, gb_ptr, m_ptr, log_l_ptr, delta_ptr, a_strides,
                       b_strides, c_strides, d_strides, ga_strides, gb_strides, stride_lb, stride_lh, row_lo,
                       of_sequence, num_m, heads, args, F, T)  # fmt: skip
        tl.store(failed_ptr + tile.to(tl.int64) * T.BLOCK_M + offs, bad)
        tl.store(any_ptr + offs * 0, 1, mask=bad != 0)
