"""What a consumer of the Hopper kernel does with one tile of scores: hide, weigh, pack, add up; fast or with care."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn_lite.kernels.device.scores import add_mask, row_maximum, scaled, visible
from flashattn_lite.kernels.device.state import shift, weights
from flashattn_lite.kernels.hopper_tasks import ROWS, key_start


@gluon.jit
def row_sum(p, l_i, T: gl.constexpr):
    """[64, 4] from p [64, N]: the four lanes that share a row meet only at the end of the tile."""
    parts = gl.reshape(p, [ROWS, T.BLOCK_N // 8, 4, 2])
    return gl.convert_layout(gl.sum(gl.sum(parts, 3), 1), l_i.type.layout, assert_trivial=True)


@gluon.jit
def fast(s, m_i, l_i, args, F: gl.constexpr, T: gl.constexpr):
    """A tile that every row sees whole, at the reference that the rows have: (l_i, p)."""
    s, scale = scaled(s, args, F)
    p = weights(s, scale, m_i)  # [M, N]
    return l_i + row_sum(p, l_i, T), p


@gluon.jit
def sees_whole(start_n, rows, task, F: gl.constexpr, T: gl.constexpr):
    """Whether all rows of a consumer see all keys of a tile, but for a mask tensor."""
    whole = start_n + T.BLOCK_N <= task.len_k
    if F.left:
        whole = whole & (rows.last + task.diag_lo <= start_n)
    if F.right:
        whole = whole & (start_n + T.BLOCK_N <= rows.first + task.diag_hi + 1)
    return whole


@gluon.jit
def mask_tile(at, i, rings, rows, task, args, WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):
    """The i-th tile of the mask tensor [M, N], [1, N] without MASK_ROWS; 0 if there is none. Not waited for.

    MASK_COPIED: it is in shared memory, and came with the `at`-th tile of K. Else neighbouring keys come by one load
    where MASK_ALIGN allows it: all are read if the first exists.
    """
    if F.mask == "":
        return 0
    elif T.MASK_COPIED:
        return rings[4].index(at * T.WARPGROUPS + WG).reshape([ROWS, T.BLOCK_N]).load(T.S_LAYOUT)
    else:
        ALIGN: gl.constexpr = T.MASK_ALIGN
        LAYOUT: gl.constexpr = T.MASK_LAYOUT
        ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
        BYTES: gl.constexpr = ALIGN * (args.mask_ptr.dtype.element_ty.primitive_bitwidth // 8)
        start_n = key_start(i, task, F, T)
        offs_n = gl.arange(0, T.BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        exists = (offs_n // ALIGN * ALIGN < task.len_k - start_n)[None, :]
        step_b, step_h, step_m, step_n = args.mask_strides
        ptr = args.mask_ptr + task.b.to(gl.int64) * step_b + start_n.to(gl.int64) * step_n
        columns = (offs_n.to(gl.int64) * step_n)[None, :]
        if T.MASK_ROWS:
            head, pos = gl.convert_layout(rows.head, ROW), gl.convert_layout(rows.pos, ROW)
            ptr += head.to(gl.int64) * step_h + pos.to(gl.int64) * step_m
            ptrs = ptr[:, None] + columns
            exists = (gl.convert_layout(rows.exists.to(gl.int32), ROW) != 0)[:, None] & exists
        else:
            ptrs = ptr + task.head.to(gl.int64) * step_h + columns  # of packed heads step_h is 0
        return gl.load(gl.max_contiguous(gl.multiple_of(ptrs, [1, BYTES]), [1, ALIGN]), mask=exists, other=0)


@gluon.jit
def hide(s, scale, mask, i, rows, task, EXACT: gl.constexpr, F: gl.constexpr, T: gl.constexpr):
    """(scores of the i-th tile with a float mask added, -inf where a row may not look; the factor to log2 units).

    `mask` of mask_tile.
    """
    if F.mask != "" and not T.MASK_COPIED:
        mask = gl.convert_layout(mask, T.S_LAYOUT)
    if F.mask == "float":
        s, scale = add_mask(s, scale, mask, EXACT)
    if F.mask == "bool":
        s = gl.where(mask != 0, s, float("-inf"))
    start_n = key_start(i, task, F, T)
    if not sees_whole(start_n, rows, task, F, T):
        offs_n = start_n + gl.arange(0, T.BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))
        s = gl.where(visible(rows.pos, offs_n, task.len_k, task.diag_lo, task.diag_hi, F), s, float("-inf"))
    return s, scale


@gluon.jit
def take(s, scale, m_i, m_new, l_i, T: gl.constexpr):
    """Takes scores into the state at the reference m_new: (m_new, l_i, alpha, p)."""
    m_ref, alpha = shift(m_i, m_new)
    p = weights(s, scale, m_ref)  # [M, N]
    alpha_l = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=True)
    return m_new, gl.fma(l_i, alpha_l[:, None], row_sum(p, l_i, T)), alpha, p


@gluon.jit
def careful(s, mask, m_i, l_i, i, rows, task, args, F: gl.constexpr, T: gl.constexpr):
    """The i-th tile, masked, at the running maximum: (m_i, l_i, alpha, p). `mask` of mask_tile."""
    s, scale = scaled(s, args, F)
    s, scale = hide(s, scale, mask, i, rows, task, False, F, T)
    return take(s, scale, m_i, gl.maximum(m_i, row_maximum(s, scale, F)), l_i, T)


@gluon.jit
def computed_first(l_i):
    """l_i, computed before anything that follows starts: keeps ptxas from waiting for P V ahead of the softmax.

    By a store under a condition that never holds (l_i is a sum of powers, or NaN), of both rows of a thread at once.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; .reg .b32 at; setp.lt.f32 never, $2, 0f00000000; mov.b32 at, $2; "
        "@never st.shared.v2.f32 [at], {$2, $3}; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=f,=f,f,f", [l_i], dtype=gl.float32, is_pure=False, pack=2)  # fmt: skip


@gluon.jit
def pack_p(p, v, LAYOUT: gl.constexpr):
    """P [64, N] as an operand of its product with v, in v's dtype.

    By an asm that stays where it is, because ptxas would do it behind the next scores: then P in float32, P and S are
    all in registers, and some are spilled.
    """
    KIND: gl.constexpr = "f16x2" if v.dtype.is_fp16() else "bf16x2"
    w = gl.inline_asm_elementwise("cvt.rn." + KIND + ".f32 $0, $2, $1;", "=r,f,f", [p], dtype=v.dtype, is_pure=False,
                                  pack=2)  # fmt: skip
    return gl.convert_layout(w, LAYOUT, assert_trivial=True)
