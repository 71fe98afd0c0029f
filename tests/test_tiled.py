"""The tiled path in plain torch: the definition in float64, gradients, hostile numbers, bits, and memory."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashattn_lite import state, tiled, tiled_backward
from flashattn_lite.problem import AttentionProblem, Inputs, describe
from flashattn_lite.tiles import TileShape

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_head": {"heads": (1, 1)},
    "gqa": {"heads": (6, 2)},
    "odd_dims": {"dims": (5, 3)},
    "causal": {"causal": True},
    "late_start": {"causal": True, "q_start": -9},  # the first rows see nothing
    "window": {"window_left": 6, "window_right": 2},
    "softcap": {"softcap": 1.5},
    "negative_scale": {"scale": -0.3},
    "float_mask": {"mask": (2, 4, 23, 37)},
    "key_mask": {"mask": (2, 1, 1, 37), "causal": True},
    "bool_mask": {"mask": (1, 23, 37), "bool": True},
    "sinks": {"sinks": True, "causal": True, "q_start": -9},
    "kv_lens": {"kv_lens": [0, 30], "mask": (23, 1)},
    "kv_lens_window": {"kv_lens": [17, 99], "window_left": 8, "window_right": 0},
}  # fmt: skip
each_feature = pytest.mark.parametrize("feature", FEATURES)


SMALL = {"small_tiles": TileShape(rows=5, keys=7, slots=3), "square_tiles": TileShape(rows=4, keys=4, slots=2)}


@pytest.fixture(params=["whole", *SMALL])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as they are (these problems fit in one), so small that every edge is crossed, and square ones, of which
    many lie alike about a diagonal.
    """
    if request.param in SMALL:
        for module in (tiled, tiled_backward):
            monkeypatch.setattr(module, "tile_of", lambda *_: SMALL[request.param])


def pose(
    device: torch.device, dtype: torch.dtype, *, heads: Any = (4, 2), dims: Any = (16, 16), **options: Any
) -> tuple[Inputs, dict[str, Any]]:
    """Random inputs of B = 2, L = 23, S = 37, and the options left for `describe`. What follows is drawn alike, too."""
    random = functools.partial(torch.randn, generator=torch.manual_seed(0), dtype=torch.float64)
    q, k, v = (
        random(2, h, n, d) for h, n, d in ((heads[0], 23, dims[0]), (heads[1], 37, dims[0]), (heads[1], 37, dims[1]))
    )
    mask = random(options.pop("mask")) if "mask" in options else None
    if mask is not None:
        mask = mask > -0.5 if options.pop("bool", False) else mask.masked_fill(mask > 1, -math.inf)
    sinks = random(heads[0]) if options.pop("sinks", False) else None
    lens = torch.tensor(options.pop("kv_lens"), dtype=torch.int32, device=device) if "kv_lens" in options else None
    q, k, v, mask, sinks = (
        x if x is None else x.to(device, x.dtype if x.dtype == torch.bool else dtype) for x in (q, k, v, mask, sinks)
    )
    return Inputs(q, k, v, mask, sinks, lens), options


def problem_of(inputs: Inputs, **options: Any) -> AttentionProblem:
    plain = {"causal": False, "q_start": None, "window_left": None, "window_right": None, "softcap": None}
    return describe(inputs, **{**plain, "scale": inputs.q.shape[-1] ** -0.5, **options})


def run(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    q = inputs.q
    out = torch.full((*q.shape[:-1], inputs.v.shape[-1]), math.nan, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:-1] if q.dim() == 4 else (q.shape[1], q.shape[0]), math.nan, device=q.device)
    tiled.forward(problem_of(inputs, **options), inputs, out, lse)
    return out, lse


def run_backward(inputs: Inputs, d_out: Tensor, d_lse: Tensor | None, **options: Any) -> tuple[Tensor | None, ...]:
    needs = tuple(x is not None and x.is_floating_point() for x in inputs[:5])
    out, lse = run(inputs, **options)
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    return tiled_backward.backward(problem_of(inputs, **options), inputs, out, lse, d_out, d_lse, needs)


def naive(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """The definition, in the dtype of the inputs, with the whole matrix of scores."""
    problem, (q, k, v) = problem_of(inputs, **options), inputs[:3]
    group, len_q, len_k = problem.group, q.shape[2], k.shape[2]
    s = q @ k.repeat_interleave(group, 1).mT * problem.scale
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    lens = (
        torch.full((q.shape[0],), len_k, device=q.device) if inputs.kv_lens is None else inputs.kv_lens.clamp(max=len_k)
    )
    i, j = torch.arange(len_q, device=q.device)[:, None], torch.arange(len_k, device=q.device)
    end = (lens - len_q).view(-1, 1, 1, 1) if problem.features.end_aligned else 0
    seen = j < lens.view(-1, 1, 1, 1)
    if problem.features.left:
        seen = seen & (j >= i + end + problem.diag_lo)
    if problem.features.right:
        seen = seen & (j <= i + end + problem.diag_hi)
    if problem.features.mask == "bool":
        seen = seen & inputs.mask
    elif inputs.mask is not None:
        s = s + inputs.mask
    s = s.masked_fill(~seen, -math.inf)
    sinks = torch.full_like(q[0, :, 0, 0], -math.inf) if inputs.sinks is None else inputs.sinks
    s = torch.cat([s, sinks[None, :, None, None].expand(*q.shape[:3], 1)], -1)
    top = s.detach().amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(top == -math.inf, 0, top))
    total = p.sum(-1, keepdim=True)
    total = torch.where(top == -math.inf, 1, total)
    out = (p / total)[..., :-1] @ v.repeat_interleave(group, 1)
    return out, (top + total.log()).squeeze(-1)


def double(inputs: Inputs) -> Inputs:
    return Inputs(*(x.double() if x is not None and x.is_floating_point() else x for x in inputs))


def assert_within(got: Tensor, want: Tensor, eager: Tensor, dtype: torch.dtype) -> None:
    """Within twice the error of eager torch in the same dtype, plus 8 eps of the size of the result (16 sums of it)."""
    finite = want.isfinite()
    torch.testing.assert_close(got[~finite].double(), want[~finite], equal_nan=True, rtol=0, atol=0)
    size = want[finite].abs().max().item() if finite.any() else 0.0
    budget = 2 * (eager.double() - want)[finite].abs().nan_to_num(0).amax().item() if finite.any() else 0.0
    error = (got.double() - want)[finite].abs().max().item() if finite.any() else 0.0
    assert error <= budget + 8 * torch.finfo(dtype).eps * max(size, 1), f"error {error}, eager's twice {budget}"


@each_feature
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("tiles")
def test_forward_is_the_definition(feature: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs, options = pose(device, dtype, **FEATURES[feature])
    (out, lse), want = run(inputs, **options), naive(double(inputs), **options)
    eager = naive(inputs, **options)
    assert_within(out, want[0], eager[0], dtype)
    # lse is float32 always, from float32 scores.
    assert_within(lse, want[1], want[1], torch.float32)


@each_feature
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("tiles")
def test_backward_is_autograd_of_the_definition(feature: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs, options = pose(device, dtype, **FEATURES[feature])
    d_out, d_lse = torch.randn_like(run(inputs, **options)[0]), torch.randn(inputs.q.shape[:3], device=device)
    got = run_backward(inputs, d_out, d_lse, **options)

    def autograd(inputs: Inputs) -> tuple[Tensor, ...]:
        leaves = Inputs(*(x.clone().requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs))
        out, lse = naive(leaves, **options)
        total = (out * d_out.to(out)).sum() + (lse * d_lse.to(out)).masked_fill(lse == -math.inf, 0).sum()
        return torch.autograd.grad(total, [x for x in leaves[:5] if x is not None and x.requires_grad])

    # lse, and with it P, is known to float32 only.
    eps = torch.promote_types(dtype, torch.float32) if dtype != torch.float64 else torch.float32
    for mine, want, eager in zip(
        [g for g in got if g is not None], autograd(double(inputs)), autograd(inputs), strict=True
    ):
        assert mine.shape == want.shape
        assert mine.dtype == dtype
        assert_within(mine, want, eager, dtype if dtype.itemsize < 4 else eps)


class Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        ctx.options, ctx.inputs = options, Inputs(*tensors)
        return run(ctx.inputs, **options)[0]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        return None, *run_backward(ctx.inputs, d_out, None, **ctx.options), None


@each_feature
def test_gradcheck(feature: str, device: torch.device) -> None:
    inputs, options = pose(device, torch.float64, **FEATURES[feature])
    leaves = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs[:6]]
    attend = functools.partial(Differentiable.apply, options)
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_is_dense_by_sequence(causal: bool, device: torch.device) -> None:
    lens_q, lens_k = (7, 0, 19, 1), (9, 4, 19, 0)
    q, k, v = (torch.randn(sum(n), h, 16, device=device) for n, h in ((lens_q, 4), (lens_k, 2), (lens_k, 2)))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(device, torch.int32) for n in (lens_q, lens_k))
    packed, d_out = Inputs(q, k, v, None, None, None, cu_q, cu_k), torch.randn_like(q)
    out, lse = run(packed, causal=causal)
    grads = run_backward(packed, d_out, None, causal=causal)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = Inputs(*(x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))))
        want, want_lse = run(one, causal=causal)
        torch.testing.assert_close(out[rows].transpose(0, 1)[None], want)
        torch.testing.assert_close(lse[None, :, rows], want_lse)
        want_grads = run_backward(one, d_out[rows].transpose(0, 1)[None], None, causal=causal)
        for got, expected, part in zip(grads[:3], want_grads[:3], (rows, keys, keys), strict=True):
            torch.testing.assert_close(got[part].transpose(0, 1)[None], expected)


@pytest.mark.parametrize("size", [1e-30, 1.0, 40.0, 1e3, 1e6])
def test_scores_of_any_size(size: float, device: torch.device) -> None:
    """Rows whose 2^s leaves float32, some or all of them: the running maximum takes over."""
    inputs, _ = pose(device, torch.float32, heads=(2, 2))
    inputs.q[:, :, ::2] *= size
    want, eager = naive(double(inputs)), naive(inputs)
    for got, expected, rounded in zip(run(inputs), want, eager, strict=True):
        assert_within(got, expected, rounded, torch.float32)


def test_values_up_to_overflow(device: torch.device) -> None:
    """2^s * v overflows about the reference 0, and not about the maximum."""
    inputs, _ = pose(device, torch.float32, heads=(1, 1))
    inputs = inputs._replace(q=inputs.q * 12, v=inputs.v * 1e35)
    (out, _), (want, _), (eager, _) = run(inputs), naive(double(inputs)), naive(inputs)
    assert_within(out / 1e35, want / 1e35, eager / 1e35, torch.float32)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.usefixtures("tiles")
def test_unseen_garbage_changes_no_bit(garbage: float, device: torch.device) -> None:
    inputs, _ = pose(device, torch.float32)
    d_out = torch.randn_like(inputs.q)
    spoiled = Inputs(inputs.q, *(x.clone() for x in inputs[1:3]))
    for x in spoiled[1:3]:
        x[:, :, 20:] = garbage
    rows = slice(0, 23 - (37 - 20))  # bottom-right: row i sees keys to i + 14
    clean, dirty = run(inputs, causal=True), run(spoiled, causal=True)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[:, :, rows], b[:, :, rows])
    d_out[:, :, rows.stop :] = 0
    dq, *_ = run_backward(inputs, d_out, None, causal=True)
    dq_spoiled, *_ = run_backward(spoiled, d_out, None, causal=True)
    assert torch.equal(dq[:, :, rows], dq_spoiled[:, :, rows])


@pytest.mark.usefixtures("tiles")
def test_a_bad_row_poisons_the_keys_that_it_sees(device: torch.device) -> None:
    inputs, _ = pose(device, torch.float32)
    d_out = torch.randn_like(inputs.q)
    clean = run_backward(inputs, d_out, None, causal=True)
    inputs.q[:, :, 4, 0] = math.nan  # sees keys to 18
    dq, dk, dv = run_backward(inputs, d_out, None, causal=True)[:3]
    assert dq[:, :, 4].isnan().all()
    assert torch.equal(dq.isnan().any(-1)[0, 0].nonzero().flatten().cpu(), torch.tensor([4]))
    for got, want in ((dk, clean[1]), (dv, clean[2])):
        assert got[:, :, :19].isnan().all()
        assert torch.equal(got[:, :, 19:], want[:, :, 19:])


@pytest.mark.parametrize("length", [1, 2, 77, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bits_are_the_row_s_own(length: int, dtype: torch.dtype) -> None:
    """The same bits in any slot of any batch, whatever the other sequences hold (a promise of the CPU alone)."""
    q, k, v = (torch.randn(3, 4, n, 20, dtype=dtype) for n in (length, 301, 301))
    alone = [run(Inputs(q[b : b + 1], k[b : b + 1], v[b : b + 1])) for b in range(3)]
    among = run(Inputs(q, k, v))
    q[0], k[2], v[2] = math.nan, math.nan, math.inf
    spoiled = run(Inputs(q, k, v))
    for i in range(2):
        assert all(torch.equal(alone[b][i][0], among[i][b]) for b in range(3))
        assert torch.equal(spoiled[i][1], among[i][1])


def test_pinned_update_is_update() -> None:
    s = torch.randn(3, 50, 64).masked_fill(torch.rand(3, 50, 64) < 0.1, -math.inf)
    m_i, l_i = torch.zeros(3, 50), torch.rand(3, 50)
    m_new, l_new, alpha, p = state.update(m_i, l_i, s, 1.0, pinned=torch.ones(3, 50, dtype=torch.bool))
    assert torch.equal(m_new, m_i) and torch.equal(alpha, torch.ones(3, 50))
    assert torch.equal(state.update_pinned_(l_i, s), p)
    assert torch.equal(l_i, l_new)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@each_feature
def test_backward_never_waits_for_the_gpu(feature: str) -> None:
    inputs, options = pose(torch.device("cuda"), torch.bfloat16, **FEATURES[feature])
    d_out, _ = run(inputs, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_backward(inputs, d_out, None, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_nothing_is_as_large_as_the_scores(device: torch.device) -> None:
    q = torch.randn(1, 1, 4096, 8, device=device)
    mask = torch.randn(4096, device=device)
    inputs = Inputs(q, q, q, mask.view(1, 1, 1, -1))
    bound = {"cpu": 2**20, "cuda": 2**22}[device.type]  # elements; the scores have 2**24
    with Largest() as largest:
        run_backward(inputs, q, None, window_left=200, window_right=0)
    assert largest.elements <= bound
