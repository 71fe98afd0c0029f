"""The device helpers are the torch twins, to rounding, and compile in both dialects, because they have no layout."""

from __future__ import annotations

import math

import pytest
import torch

triton = pytest.importorskip("triton", reason="the helpers need Triton")
import triton.language as tl  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from benchmarks.offline import GPUS, OfflineDriver  # noqa: E402
from flashattn_lite import scores, state  # noqa: E402
from flashattn_lite import target as targets  # noqa: E402
from flashattn_lite.kernels.device import scores as device_scores  # noqa: E402
from flashattn_lite.kernels.device import state as device_state  # noqa: E402
from flashattn_lite.problem import Features  # noqa: E402

M, N = 16, 32
update, update_to, update_fixed = device_state.update, device_state.update_to, device_state.update_fixed
single, merge, finish = device_state.single, device_state.merge, device_state.finish
to_log2, visible = device_scores.to_log2, device_scores.visible
add_mask, row_maximum = device_scores.add_mask, device_scores.row_maximum


@triton.jit
def every_helper(s, m_i, l_i, mask, offs_m, offs_n, F: tl.constexpr):
    """One pass through all of them: (m, l, p, inv_l, lse)."""
    s = to_log2(s, 0.25, 3.0, F)
    scale = 1.0
    if F.mask == "float":
        s, scale = add_mask(s, scale, mask, True)
    s = tl.where(visible(offs_m, offs_n, 30, -9, 4, F), s, float("-inf"))
    m_new, l_new, alpha, p = update(m_i, l_i, s, scale)
    m_new, l_new, _, _ = merge(m_new, l_new * alpha, m_i, l_i)
    sink, l_sink = single(m_i)
    m_new, l_new, _, _ = merge(m_new, l_new, sink, l_sink)
    l_fixed, _ = update_fixed(m_new, l_new, s, scale)
    inv_l, lse = finish(m_new, l_fixed)
    return m_new, l_fixed, p, inv_l, lse


@triton.jit
def in_triton(s_ptr, m_ptr, l_ptr, mask_ptr, p_ptr, row_ptr, F: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    offs_m, offs_n = tl.arange(0, M), tl.arange(0, N)
    tile = offs_m[:, None] * N + offs_n[None, :]
    m_new, l_new, p, inv_l, lse = every_helper(
        tl.load(s_ptr + tile), tl.load(m_ptr + offs_m), tl.load(l_ptr + offs_m), tl.load(mask_ptr + tile), offs_m,
        offs_n, F,
    )  # fmt: skip
    tl.store(p_ptr + tile, p)
    tl.store(row_ptr + offs_m, m_new)
    tl.store(row_ptr + M + offs_m, l_new)
    tl.store(row_ptr + 2 * M + offs_m, inv_l)
    tl.store(row_ptr + 3 * M + offs_m, lse)


@gluon.jit
def in_gluon(s_ptr, m_ptr, l_ptr, mask_ptr, p_ptr, row_ptr, F: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
             LAYOUT: gl.constexpr):  # fmt: skip
    offs_m = gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
    offs_n = gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    tile = offs_m[:, None] * N + offs_n[None, :]
    m_new, l_new, p, inv_l, lse = every_helper(
        gl.load(s_ptr + tile), gl.load(m_ptr + offs_m), gl.load(l_ptr + offs_m), gl.load(mask_ptr + tile), offs_m,
        offs_n, F,
    )  # fmt: skip
    gl.store(p_ptr + tile, p)
    gl.store(row_ptr + offs_m, m_new)
    gl.store(row_ptr + M + offs_m, l_new)
    gl.store(row_ptr + 2 * M + offs_m, inv_l)
    gl.store(row_ptr + 3 * M + offs_m, lse)


def tiles(seed: int, device: torch.device) -> list[torch.Tensor]:
    """s [M, N], m_i, l_i [M], mask [M, N]: ordinary rows, rows that have seen nothing, hidden and far-off scores."""
    generator = torch.Generator().manual_seed(seed)
    s, mask = (torch.randn(M, N, generator=generator) * 6 for _ in range(2))
    m_i, l_i = torch.randn(M, generator=generator) * 4, torch.rand(M, generator=generator) * 3 + 1
    m_i[::3], l_i[::3] = -math.inf, 0.0
    mask[mask > 8] = -math.inf
    mask[2], mask[5, 3], s[7] = -math.inf, torch.finfo(torch.float32).min, s[7] * 1e-3
    return [x.to(device) for x in (s, m_i, l_i, mask)]


def by_the_twins(s, m_i, l_i, mask, features):
    offs_m, offs_n = torch.arange(M, device=s.device), torch.arange(N, device=s.device)
    s = scores.to_log2_(s.clone(), 0.25 * state.LN2, 3.0 if features.softcap else None)
    s = scores.add_mask(s, mask) if features.mask else s
    seen = scores.visible(offs_m, offs_n, -9 if features.left else None, 4 if features.right else None) & (offs_n < 30)
    s = torch.where(seen, s, -math.inf)
    m_new, l_new, alpha, p = state.update(m_i, l_i, s, 1.0)
    m_new, l_new, _, _ = state.merge(m_new, l_new * alpha, m_i, l_i)
    m_new, l_new, _, _ = state.merge(m_new, l_new, *state.single(m_i))
    ref = state.reference(m_new)
    l_fixed = l_new + torch.exp2(s - ref.unsqueeze(-1)).sum(-1)
    inv_l, lse = state.finish(m_new, l_fixed)
    return p, torch.stack([m_new, l_fixed, inv_l, lse])


FEATURES = [Features(), Features(left=True, right=True, mask="float"), Features(right=True, softcap=True, mask="float")]


# NumPy, which the interpreter computes with, warns where IEEE arithmetic gives an infinity as it should.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("features", FEATURES, ids=["plain", "window", "softcap"])
def test_the_twins_agree(device, features, seed):
    if device.type == "cpu" and not targets.interpreting():
        pytest.skip("Triton runs on CPU tensors in its interpreter only (TRITON_INTERPRET=1)")
    s, m_i, l_i, mask = tiles(seed, device)
    p, rows = torch.empty(M, N, device=device), torch.empty(4, M, device=device)
    in_triton[(1,)](s, m_i, l_i, mask, p, rows, features, M, N, enable_fp_fusion=False)
    p_twin, rows_twin = by_the_twins(s, m_i, l_i, mask, features)
    held = rows_twin[0] != -math.inf  # update_fixed asks for a finite reference
    # A few float32 eps of values of size 20: exp2 and tanh are not the same functions here and there.
    torch.testing.assert_close(p, p_twin, atol=4e-6, rtol=2e-5)
    torch.testing.assert_close(rows[:, held], rows_twin[:, held], atol=4e-6, rtol=2e-5)


@triton.jit
def masked_state(s_ptr, mask_ptr, p_ptr, row_ptr, EXACT: tl.constexpr, FIRST: tl.constexpr, F: tl.constexpr,
                 M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The state of rows over one tile with a mask: p, m, l. FIRST: multiplied before the softmax subtracts."""
    offs_m, offs_n = tl.arange(0, M), tl.arange(0, N)
    tile = offs_m[:, None] * N + offs_n[None, :]
    s, scale = add_mask(tl.load(s_ptr + tile), 0.25, tl.load(mask_ptr + tile), EXACT)
    if FIRST:
        s, scale = s * scale, 1.0
    m_i, l_i = tl.full([M], float("-inf"), tl.float32), tl.full([M], 0.0, tl.float32)
    m_new, l_new, _, p = update_to(m_i, l_i, tl.maximum(m_i, row_maximum(s, scale, F)), s, scale)
    tl.store(p_ptr + tile, p)
    tl.store(row_ptr + offs_m, m_new)
    tl.store(row_ptr + M + offs_m, l_new)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_one_fma_cannot_add_shows(device, dtype):
    """Rows that add_mask without EXACT may spoil have a NaN or a reference past EXACT_M; others the bits of EXACT."""
    if device.type == "cpu" and not targets.interpreting():
        pytest.skip("Triton runs on CPU tensors in its interpreter only (TRITON_INTERPRET=1)")
    s, _, _, mask = tiles(0, device)
    mask = mask.to(dtype)
    lowest, highest = torch.finfo(dtype).min, torch.finfo(dtype).max
    mask[3], mask[4, :9], mask[4, 9:] = lowest, lowest, -math.inf  # nothing but what is far below
    mask[5, ::2], mask[6, 1::2], mask[8, 7], mask[9] = lowest, -math.inf, highest, lowest / 2
    s[10, 5], mask[10, 5], s[11], mask[11] = math.nan, -math.inf, -math.inf, 0
    found = {}
    for exact, first in ((False, False), (True, False), (True, True)):
        p, rows = torch.empty(M, N, device=device), torch.empty(2, M, device=device)
        masked_state[(1,)](s, mask, p, rows, exact, first, Features(mask="float"), M, N, enable_fp_fusion=False)
        found[exact, first] = p, rows
    (p, (m_i, l_i)), (exact_p, exact_rows) = found[False, False], found[True, False]
    shown = l_i.isnan() | ((m_i.abs() > device_state.EXACT_M.value) & (m_i != -math.inf))
    assert torch.equal(p[~shown], exact_p[~shown])
    assert torch.equal(torch.stack([m_i, l_i])[:, ~shown], exact_rows[:, ~shown])
    rows_of = {torch.float16: [10], torch.float64: [3, 4, 8, 9]}  # of float64 all masks are added with care
    assert shown.nonzero()[:, 0].tolist() == rows_of.get(dtype, [3, 4, 8, 9, 10])
    exact_p = found[True, True][0]
    assert not exact_p.isnan().any()
    if dtype != torch.float16:  # whose lowest number leaves room for the score
        assert (exact_p[3] == 1).all() and (exact_p[4] == (torch.arange(N, device=device) < 9)).all()


@pytest.mark.skipif(targets.interpreting(), reason="TRITON_INTERPRET=1 leaves nothing to compile")
@pytest.mark.parametrize("dialect", ["triton", "gluon"])
@pytest.mark.parametrize("gpu", GPUS)
def test_helpers_compile_in_both_dialects(monkeypatch, gpu, dialect):
    monkeypatch.setattr(triton.runtime.driver, "_active", OfflineDriver(gpu))
    s, m_i, l_i, mask = tiles(0, torch.device("cpu"))
    arguments = [s, m_i, l_i, mask, torch.empty(M, N), torch.empty(4, M), FEATURES[2], M, N]
    kernel = in_triton
    if dialect == "gluon":
        lanes = GPUS[gpu][0].warp_size
        arguments.append(gl.BlockedLayout([1, 4], [lanes // 8, 8], [4, 1], [1, 0]))
        kernel = in_gluon
    compiled = kernel.warmup(*arguments, grid=(1,), num_warps=4, enable_fp_fusion=False)
    assert f"in_{dialect}" in compiled.asm["amdgcn" if gpu == "gfx942" else "ptx"]
