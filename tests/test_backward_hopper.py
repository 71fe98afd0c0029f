"""The Hopper backward's own source on PyTorch, by turns that chance makes, against float64's gradients."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from flashattn_lite import problem as problems
from flashattn_lite import target as targets
from flashattn_lite.kernels import backward_hopper, backward_launch
from flashattn_lite.kernels.operands import score_args
from flashattn_lite.problem import Inputs
from flashattn_lite.reference import attention_reference, attention_varlen_reference
from flashattn_lite.state import LOG2E
from flashattn_lite.target import Target
from tests.gluon_on_torch import Sources, launch

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="the same without TRITON_INTERPRET=1")
HOPPER = Target("cuda", 90, "sm_90 on PyTorch", multiprocessors=2)
LENGTHS = torch.tensor([170, 0, 300], dtype=torch.int32)
BOUNDS = torch.tensor([0, 90, 90, 230, 300], dtype=torch.int32)
# (batch, heads of q and of k, queries, keys, head dim, of v, options). Most have more tiles than programs, and more
# streamed tiles than stages.
CASES: dict[str, tuple[int, int, int, int, int, int, int, dict[str, Any]]] = {
    "causal": (1, 2, 2, 300, 330, 64, 64, {"causal": True}),
    "full, 128": (2, 1, 1, 130, 330, 128, 128, {}),
    "causal, 128": (1, 1, 1, 300, 260, 128, 128, {"causal": True}),
    "window": (1, 2, 1, 200, 420, 64, 64, {"window": (70, 33)}),
    "window, 128": (1, 2, 2, 200, 300, 128, 64, {"window": (None, 40), "q_start": 11, "softcap": 2.0}),
    "group, cap": (1, 4, 2, 150, 150, 40, 56, {"causal": True, "softcap": 3.0}),
    "many": (1, 6, 6, 150, 70, 64, 64, {}),
    "few": (1, 2, 2, 3, 5, 128, 128, {}),
    "nothing seen": (1, 1, 1, 200, 200, 64, 64, {"window": (0, 0), "q_start": 150}),
    "lengths": (3, 1, 1, 70, 300, 64, 64, {"causal": True, "kv_lens": LENGTHS}),
    "lengths, full": (3, 2, 2, 70, 300, 64, 64, {"kv_lens": LENGTHS}),
    "packed": (1, 2, 1, 300, 300, 64, 128, {"causal": True, "packed": True}),
}
NEEDS = {"all": (True, True, True), "q": (True, False, False), "k": (False, True, False), "v": (False, False, True)}


def gradients(
    case: str, dtype: torch.dtype, needs: tuple[bool, ...], seed: int, sources: Sources | None = None
) -> tuple[list[tuple[Tensor, Tensor]], backward_launch.Call]:
    """(those that the Hopper kernel makes, float64's) and the call."""
    problem, inputs, out, lse, d_out, expected = posed(case, dtype, seed)
    call = backward_launch.Call(problem, inputs, d_out, (*needs, False, False), HOPPER)
    grads = [torch.full_like(x, torch.nan) for x in inputs[:3]]
    ran = run(call, inputs, out, lse, d_out, grads, seed, sources or Sources())
    for side, _, any_failed, failed in ran:
        assert any_failed == 0
        assert not (failed > 0).any()
        assert problem.features.varlen or (failed == 0).all()  # each tile has said so
        assert side.fast
    return [(grads[i], expected[i]) for _, made, *_ in ran for i in made], call


def posed(case: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """(problem, inputs, out and lse in float64, d_out, the gradients of q, k and v in float64)."""
    batch, heads_q, heads_k, len_q, len_k, dim, dim_v, options = CASES[case]
    options = dict(options)
    packed, kv_lens = options.pop("packed", False), options.pop("kv_lens", None)
    shapes = [(heads_q, len_q, dim), (heads_k, len_k, dim), (heads_k, len_k, dim_v), (heads_q, len_q, dim_v)]
    make = torch.Generator().manual_seed(seed)
    q, k, v, d_out = (torch.randn(batch, *shape, generator=make).to(dtype) for shape in shapes)
    bounds: tuple[Any, ...] = (None, None)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    if packed:
        q, k, v, d_out = (x[0].transpose(0, 1).contiguous() for x in (q, k, v, d_out))
        bounds = (BOUNDS, BOUNDS)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        out, lse = attention_varlen_reference(*exact, *bounds, **options, return_lse=True)
    else:
        out, lse = attention_reference(*exact, **options, kv_lens=kv_lens, return_lse=True)
    expected = torch.autograd.grad(out, exact, d_out.double())

    inputs = Inputs(q, k, v, None, None, kv_lens, *bounds)
    left, right = options.pop("window", (None, None))
    longest = {"max_seqlen_q": 140, "max_seqlen_k": 140} if packed else {}
    given = {"causal": False, "q_start": None, "scale": None, "softcap": None, **options, **longest}
    problem = problems.describe(inputs, window_left=left, window_right=right, **given)
    return problem, inputs, out.detach(), lse.detach(), d_out, expected


def run(
    call: backward_launch.Call, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, grads: list[Tensor], seed: int,
    sources: Sources,
) -> list[tuple[Any, list[int], Tensor, Tensor]]:  # fmt: skip
    """Runs the usual launches of sides that the kernel takes: (side, which gradients it makes, any, failed) of each."""
    features = call.problem.features
    room = backward_launch.Rows.room(features, lse.float())
    rows = backward_launch.Rows(features, room)
    rows.m.copy_(torch.where(lse == -torch.inf, torch.inf, lse * LOG2E))
    delta = (d_out.double() * out).sum(-1)
    rows.delta.copy_(delta.T if features.varlen else delta)
    read, ran = (*inputs[:3], d_out), []
    kernel = sources.load(backward_hopper.__name__).backward_hopper_kernel
    for side in call.sides:
        if side.fast is None:
            continue
        own, streamed = side.pairs(read)
        of_own = (1, 2) if side.keys else (0, 0)
        zeros = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
        failed = torch.full((side.owned,), -1, dtype=torch.int32)
        written = (*(grads[i] for i in of_own), zeros[0], failed)
        args = side.fast.arguments(own, streamed, written, rows.m, rows.delta, zeros[1],
                                   score_args(call.problem, inputs))  # fmt: skip
        launch(kernel, side.fast.start.grid[0], side.fast.start.described(args), seed)
        makes = (True, side.fast.tile.MAKES_B)
        made = [i for i, makes_it in zip(of_own, makes, strict=True) if makes_it]
        ran.append((side, made, zeros[0], failed))
    return ran


def close(grad: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """P and dS are rounded to the dtype; where nothing is seen, gradients are 0."""
    return bool((grad.double() - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_right(case, dtype):
    compared, call = gradients(case, dtype, NEEDS["all"], seed=3)
    assert len(compared) == (1 if max(CASES[case][5:7]) > 64 else 2)  # dQ, or dK and dV
    assert all(close(grad, expected, dtype) for grad, expected in compared)
    assert all(side.owned == side.fast.owned for side in call.sides if side.fast)


@pytest.mark.parametrize("case", ["causal", "window"])
def test_what_is_not_needed_changes_no_bit(case):
    (both, _), _ = gradients(case, torch.bfloat16, NEEDS["all"], seed=5)
    ((alone, _),), call = gradients(case, torch.bfloat16, NEEDS["k"], seed=5)
    assert torch.equal(alone, both[0])
    _, of_v = gradients(case, torch.bfloat16, NEEDS["v"], seed=5)
    (side,) = of_v.sides
    assert side.fast is None  # and the tile is such that its bits are the same
    assert (side.tile.BLOCK_M, side.tile.BLOCK_N) == (call.sides[0].fast.tile.BLOCK_M, call.sides[0].fast.tile.BLOCK_N)


@pytest.mark.parametrize("case", ["causal", "lengths, full", "causal, 128", "window, 128", "many"])
def test_rows_that_are_not_finite_are_told_of(case):
    """Each, wherever its tile lies, and no other; of what lies behind a sequence's last key none."""
    problem, inputs, out, lse, d_out, _ = posed(case, torch.bfloat16, 2)
    d_out[:, -1, d_out.shape[2] * 3 // 4, 2] = torch.inf  # of the last head, not in the first tile
    if inputs.kv_lens is not None:
        for b, length in enumerate(inputs.kv_lens.tolist()):
            inputs.k[b, :, length:], inputs.v[b, :, length:] = torch.nan, torch.nan
    call = backward_launch.Call(problem, inputs, d_out, (*NEEDS["all"], False, False), HOPPER)
    grads = [torch.full_like(x, torch.nan) for x in inputs[:3]]
    ((side, made, any_failed, failed),) = run(call, inputs, out, lse, d_out, grads, 2, Sources())
    tile = side.fast.tile
    spoiled = torch.stack([~grads[i].isfinite().all(-1) for i in made]).any(0)  # [batch, head, row]
    tiles = torch.nn.functional.pad(spoiled, (0, -spoiled.shape[-1] % tile.BLOCK_M)).unflatten(-1, (-1, tile.BLOCK_M))
    order = tiles.flip(2) if tile.SEEN.right else tiles
    assert torch.equal(failed.view(order.shape) != 0, order)
    assert spoiled.any()
    assert not spoiled.all()
    assert any_failed == 1
    if inputs.kv_lens is not None:
        assert all((grads[i][b, :, length:] == 0).all() for i in made for b, length in enumerate(inputs.kv_lens))


def test_without_gluon_the_kernel_in_triton_serves(monkeypatch):
    hide = "import sys; sys.modules['triton.experimental.gluon'] = None; "
    found = hide + "from flashattn_lite.kernels import backward_launch; sys.exit(backward_launch.hopper is not None)"
    assert subprocess.run([sys.executable, "-c", found], check=False).returncode == 0
    monkeypatch.setattr(backward_launch, "hopper", None)
    problem, inputs, _, _, d_out, _ = posed("causal", torch.bfloat16, 1)
    call = backward_launch.Call(problem, inputs, d_out, (*NEEDS["all"], False, False), HOPPER)
    assert [side.fast for side in call.sides] == [None, None]


# name: (text that is there once, what is there instead, a case that shows it). Each is a mistake that could be made.
BROKEN = {
    "nobody waits for a and b": ("        mbarrier.wait(own_full, n_tile & 1)\n", "", "causal"),
    "a and b are overwritten": ("            mbarrier.wait(own_empty, n_tile & 1 ^ 1)\n", "", "causal"),
    "nobody waits for c and d": ("    mbarrier.wait(full.index(at), phase)\n", "", "causal"),
    "c and d are overwritten": (
        "                    mbarrier.wait(bars[1].index(at), phase ^ 1)\n", "", "causal, 128"),
    "a tile is given back too early": ("empty.index(before)", "empty.index(at)", "causal, 128"),
    "m and delta are not told of": ("barriers(T.STAGES, 1 + T.KEYS)", "barriers(T.STAGES, 1)", "causal"),
    "a tile is told of where the one before was": ("    at = n % 2\n    slot", "    at = n * 0\n    slot", "many"),
    "dP is not waited for": ("warpgroup_mma_wait(BEHIND + T.MAKES_B, [dp])", "dp", "few"),
    "the last dS is left out": ("ga = warpgroup_mma_wait(0, [plus(ga, ds, ", "(0, [plus(ga, ds, ", "few"),
    "heads of a group are left out": ("count = T.HEADS * visited", "count = visited", "group, cap"),
    "a head of a group comes twice": ("[task.entry, first + g, task.start_n + start_n, 0], full, rings[0]",
                                      "[task.entry, first, task.start_n + start_n, 0], full, rings[0]", "group, cap"),
    "the slope of the cap is left out": (" * slope, i, task", ", i, task", "group, cap"),
    "edges are seen whole": ("if i < task.visit[1]:", "if i < 0:", "causal"),
    "failed rows are of another tile": ("tile.to(gl.int64) * T.BLOCK_M + WG", "n_tile * T.BLOCK_M + WG", "many"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_noticed(name):
    old, new, case = BROKEN[name]
    for seed in range(40):
        try:
            sources = Sources(("backward_hopper", old, new))
            compared, _ = gradients(case, torch.bfloat16, NEEDS["all"], seed, sources)
            assert compared
            assert all(close(grad, expected, torch.bfloat16) for grad, expected in compared)
        except (AssertionError, AttributeError, IndexError, RuntimeError):
            return
    pytest.fail(f"not noticed: {name}")


def on_the_gpu(case: str, dtype: torch.dtype) -> tuple[backward_launch.Call, tuple[Any, ...]]:
    """A call that takes the Hopper kernel, and what it is called with."""
    problem, inputs, *results, _ = posed(case, dtype, 7)
    inputs = Inputs(*(x if x is None else x.cuda() for x in inputs))
    out, lse, d_out = (x.cuda() for x in results)
    target = targets.of(inputs.q.device)
    if not target.hopper:
        pytest.skip("the kernel is for Hopper")
    call = backward_launch.Call(problem, inputs, d_out, (*NEEDS["all"], False, False), target)
    assert any(side.fast for side in call.sides)
    return call, (inputs, out.to(dtype), lse.float(), d_out, None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_kernel_in_triton(case, dtype):
    call, given = on_the_gpu(case, dtype)
    ours = call(*given)[:3]
    for side in call.sides:
        side.fast, side.zeros = None, 1  # its usual launch is then Triton's, in the tile of the launch with care
    for x, y in zip(ours, call(*given)[:3], strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["causal", "causal, 128", "many", "packed"])
def test_repeats_have_the_same_bits(case):
    call, given = on_the_gpu(case, torch.bfloat16)
    first, other = call(*given)[:3], torch.cuda.Stream()
    busy = torch.randn(2048, 2048, device="cuda")
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(300):
        with torch.cuda.stream(other):
            busy = (busy @ busy).tanh()
        again = call(*given)[:3]
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
