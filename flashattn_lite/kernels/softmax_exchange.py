"""How the warps of a program of the ring kernel, and its programs, tell each other states and numbers.

Warps: by a place each in shared memory. Programs: a part is two words of 64 bits, (top, epoch) and (l_i, epoch), each
of which is there as a whole or not at all; a word that bears this launch's epoch is of this launch.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, LOG2E, reference


@gluon.jit
def offsets(COLS: gl.constexpr, TILE: gl.constexpr):
    """[WARPS, COLS / WARPS] of a unit's columns: each warp has its own stretch, and a state of its own."""
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = COLS // WARPS
    offs_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, TILE))
    return offs_w[:, None] * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, TILE))[None, :]


@gluon.jit
def warp_room(dtype: gl.constexpr):
    """Room for a value that each warp has for the others. One each: Triton would put barriers between stores to one."""
    return gl.allocate_shared_memory(dtype, [gl.num_warps()], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def of_all(room):
    """What each warp has put into a room [WARPS], in every thread."""
    WARPS: gl.constexpr = gl.num_warps()
    return room.load(gl.BlockedLayout([WARPS], [32], [WARPS], [0]))


@gluon.jit
def merged(m_s, l_s):
    """(top, l_i) of the states that warps have put into their rooms: scalars, in every thread the same."""
    m_i = of_all(m_s)
    top = gl.max(m_i, 0)
    return top, gl.sum(of_all(l_s) * gl.exp2((m_i - reference(top)) * LOG2E), 0)


@gluon.jit
def word_of(value, epoch):
    return (epoch.to(gl.int64) << 32) | (value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF)


@gluon.jit
def value_of(word):
    return word.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def publish(parts_ptr, unit, top, l_i, epoch):
    """One thread writes a unit's part, in words that are there as a whole or not at all."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p st.relaxed.gpu.global.v2.b64 [$1], {$2, $3}; mov.u32 $0, 0; }",
        "=r,l,l,l",
        [parts_ptr + unit.to(gl.int64) * 2, word_of(top, epoch), word_of(l_i, epoch)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def look(parts_ptr, tile, splits, PARTS: gl.constexpr):
    """The words of a row's parts [WARPS, PARTS / WARPS] as each warp finds its share of them, past the L1 cache."""
    WARPS: gl.constexpr = gl.num_warps()
    SHARE: gl.constexpr = max(1, PARTS // WARPS)
    offs_s = offsets(SHARE * WARPS, gl.BlockedLayout([1, max(1, SHARE // 32)], [1, 32], [WARPS, 1], [1, 0]))
    ptrs = parts_ptr + (tile * splits + gl.minimum(offs_s, splits - 1)).to(gl.int64) * 2
    m_word, l_word = gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.v2.b64 {$0, $1}, [$2];", "=l,=l,l", [ptrs],
        dtype=(gl.int64, gl.int64), is_pure=False, pack=1,
    )  # fmt: skip
    return m_word, l_word, offs_s < splits


@gluon.jit
def offer(words, epoch, row_rooms):
    """Each warp merges its share of a row's parts for the others, and tells them if one is missing."""
    m_s, l_s, missing_s = row_rooms
    m_word, l_word, real = words
    m_i, l_i = gl.where(real, value_of(m_word), EMPTY_M), gl.where(real, value_of(l_word), EMPTY_L)
    published = ((m_word >> 32).to(gl.int32) == epoch) & ((l_word >> 32).to(gl.int32) == epoch)
    top = gl.max(m_i, 1)
    m_s.store(top)
    l_s.store(gl.sum(l_i * gl.exp2((m_i - reference(top)[:, None]) * LOG2E), 1))
    missing_s.store(gl.max(gl.where(published, 0, 1), 1))


@gluon.jit
def taken(row_rooms):
    """(top, l_i) of the row whose parts warps have offered, and if one is missing: scalars."""
    m_s, l_s, missing_s = row_rooms
    top, l_i = merged(m_s, l_s)
    return top, l_i, gl.max(of_all(missing_s), 0)


@gluon.jit
def asked(parts_ptr, tile, splits, epoch, row_rooms, PARTS: gl.constexpr):
    """A look at a row's parts that is waited for."""
    offer(look(parts_ptr, tile, splits, PARTS), epoch, row_rooms)
    return taken(row_rooms)


@gluon.jit
def draw(counter_ptr, LAYOUT: gl.constexpr):
    """[WARPS]: the counter, which goes up by 1, in the first warp's place, else 0. On its way until it is used."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; mov.u32 $0, 0;"
        " @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
        "=r,l", [counter_ptr + gl.zeros([gl.num_warps()], gl.int32, LAYOUT)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
