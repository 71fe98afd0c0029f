"""Q, K, V and O of the Hopper kernel piece by piece of their columns: tiles come in powers of two, head dims do not.

Of 65 to 96 columns three pieces of 32, of 129 to 192 three of 64, else one: `hopper_config.pieces`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashattn_lite.kernels.device.state import rounded


@gluon.jit
def pieces_of(at, ring, LENGTH: gl.constexpr, PIECES: gl.constexpr):
    """The `at`-th LENGTH rows of Q, K or V in shared memory, piece by piece."""
    pieces = ()
    for i in gl.static_range(PIECES):
        pieces = pieces + (ring.index(at * PIECES + i).reshape([LENGTH, ring.shape[-1]]),)
    return pieces


@gluon.jit
def unknown(number):
    """The number, of which LLVM no longer knows that it is the same in every step of a loop."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def execute(instruction: gl.constexpr):
    """An instruction with no result, where it stands. Of named barriers Triton takes the lowest numbers."""
    gl.inline_asm_elementwise(instruction + " mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def query_key(q, rings, at, zero, HELD: gl.constexpr, T: gl.constexpr):
    """Q K^T [64, N] of the `at`-th tile of K in shared memory, under way; q is HELD in registers, or Q's place."""
    PIECES: gl.constexpr = T.PIECES
    if not HELD:
        if T.BLOCK_D == 256:
            # Else the descriptors of its 16 products are worked out ahead of the loops, and there are not as many
            # uniform registers: each would come from another register, or from the stack, at every step.
            q = unknown(q)
        q = pieces_of(q, rings[0], zero.shape[0], PIECES)
    k = pieces_of(at, rings[1], T.BLOCK_N, PIECES)
    s = warpgroup_mma(q[0], k[0].permute((1, 0)), zero, use_acc=False, is_async=True)
    for i in gl.static_range(1, PIECES):
        s = warpgroup_mma(q[i], k[i].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def add_values(w, v, acc, T: gl.constexpr):
    """O + P V, under way, piece by piece [64, BLOCK_DV]; w is P as an operand."""
    PIECES: gl.constexpr = T.V_PIECES
    added = ()
    for i in gl.static_range(PIECES):
        added = added + (warpgroup_mma(w, v[i], acc[i], is_async=True),)
    return added


@gluon.jit
def values_added(acc, T: gl.constexpr):
    """The pieces of O once all products are done."""
    acc = warpgroup_mma_wait(0, acc)
    if T.V_PIECES == 1:
        return (acc,)
    else:
        return acc


@gluon.jit
def weighed(acc, alpha, T: gl.constexpr):
    """The pieces of O times alpha [64], which is of rows of S."""
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, T.O_LAYOUT), assert_trivial=True)[:, None]
    PIECES: gl.constexpr = T.V_PIECES
    products = ()
    for i in gl.static_range(PIECES):
        products = products + (acc[i] * alpha,)
    return products


@gluon.jit
def finished(acc, weight, DTYPE: gl.constexpr, T: gl.constexpr):
    """The pieces of O in its dtype."""
    acc = weighed(acc, weight, T)
    PIECES: gl.constexpr = T.V_PIECES
    out = ()
    for i in gl.static_range(PIECES):
        out = out + (rounded(acc[i], DTYPE),)
    return out
