"""The Hopper kernel on PyTorch is one that notices: its own source with one thing wrong, by any turns, is found out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from flashattn_lite import target as targets
from flashattn_lite.reference import attention_reference
from tests.gluon_on_torch import Sources
from tests.gluon_on_torch.hopper import on_torch
from tests.test_hopper import take_parts

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="the same without TRITON_INTERPRET=1")
TURNS = 40  # orders in which a broken kernel may show it

# (what is wrong: the module, what stands there, what stands there instead)
BROKEN = {
    "K is read before it lands": (
        "hopper_steps", "        mbarrier.wait(bars.k_full.index(k_at), k_phase)\n", ""),
    "V is read before it lands": (
        "hopper_steps", "        mbarrier.wait(bars.v_full.index(at), phase)\n        acc", "        acc"),
    "V that a consumer passes over is not waited for": (
        "hopper_steps",
        "    if passed:\n        at, phase = stage(it, T)\n        mbarrier.wait(bars.v_full.index(at), phase)\n",
        "    if passed:\n        at, phase = stage(it, T)\n"),
    "Q is read before it lands": (
        "attention_hopper", "    mbarrier.wait(bars.q_full.index(q_at), q_phase)\n", ""),
    "scores are used before they are there": (
        "hopper_steps", "warpgroup_mma_wait(T.V_PIECES, [s])", "warpgroup_mma_wait(T.V_PIECES + 1, [s])"),
    "K is given back too early": (
        "hopper_steps",
        "        s = warpgroup_mma_wait(T.V_PIECES, [s])  # the scores are there; P V goes on under the softmax\n"
        "        if T.APART:\n            mbarrier.arrive(bars.k_empty.index(k_at), count=1)\n",
        "        if T.APART:\n            mbarrier.arrive(bars.k_empty.index(k_at), count=1)\n"
        "        s = warpgroup_mma_wait(T.V_PIECES, [s])\n"),
    "V is given back too early": (
        "hopper_steps", "        acc = values_added(acc, T)\n        if T.APART:\n"
        "            mbarrier.arrive(bars.v_empty.index(at), count=1)\n        else:\n"
        "            mbarrier.arrive(bars.k_empty.index(k_at), count=1)\n",
        "        if T.APART:\n            mbarrier.arrive(bars.v_empty.index(at), count=1)\n        else:\n"
        "            mbarrier.arrive(bars.k_empty.index(k_at), count=1)\n        acc = values_added(acc, T)\n"),
    "V is never given back": (
        "attention_hopper",
        "    if T.APART:\n        mbarrier.arrive(bars.v_empty.index(v_at), count=1)\n\n", "\n"),
    "copies do not wait for room": ("hopper_producer", "    if empty is not None:\n", "    if False:\n"),
    "one piece's bytes are expected for all": (
        "hopper_producer", "PIECES * desc.block_type.nbytes", "desc.block_type.nbytes"),
    "Q's copy does not wait for room": (
        "hopper_producer", "    mbarrier.wait(bars.q_empty.index(at), phase ^ 1)\n", ""),
    "a phase is counted wrongly": ("hopper_tasks", "(use // T.STAGES & 1)", "(use // T.STAGES + 1 & 1)"),
    "messages do not wait for room": (
        "hopper_tasks", "    mbarrier.wait(slot_empty.index(at), ((n_message // 2) & 1) ^ 1)\n", ""),
    "O is overwritten while it leaves": (
        "hopper_epilogue", "        tma.store_wait(T.O_SLOTS - 1)  # what was in it before has left\n", ""),
    "O leaves with no fence": (
        "hopper_epilogue",
        '    """Begins the TMA copy of all of a consumer\'s rows of O, some columns of it."""\n'
        "    fence_async_shared()\n",
        ""),
    "a block ends before its O has left": (
        "attention_hopper", "    tma.store_wait(0)  # no block ends before its O has left\n", ""),
    "turns are not passed on": ("attention_hopper", "    if WG == 1:\n        pass_turn(WG, T)\n", ""),
    "the accumulator is not rescaled": (
        "hopper_steps",
        "        if CAREFUL:\n            acc = weighed", "        if False:\n            acc = weighed"),
    "edges are not hidden": ("hopper_scores", "    if not sees_whole(start_n, rows, task, F, T):\n", "    if False:\n"),
    "a redo does not wait for the first pass": (
        "hopper_again",
        "    writes_done()  # of O as the first pass left it, which is read and written from here on\n", ""),
    "V is cleaned by each as if alone": (
        "hopper_again", "    mbarrier.wait(cleaned, n_clean & 1)\n    return", "    return"),
    "clean V is read with no fence": (
        "hopper_again", "    fence_async_shared()\n    mbarrier.arrive(cleaned", "    mbarrier.arrive(cleaned"),
    "O takes V's room too early": (
        "hopper_again",
        "    mbarrier.wait(bars.cleaned, n_clean & 1)\n", ""),
    "parts overlap": ("hopper_tasks", "len_k - start_k, 0), span.each * T.BLOCK_N)", "len_k - start_k, 0), len_k)"),
    "a mask is read before it lands": (
        "attention_hopper", "barriers(STAGES, 1 + T.MASK_COPIED)", "barriers(STAGES, 1)"),
    "a mask is read from the room of the step before": (
        "hopper_steps", "mask = mask_tile(k_at, i,", "mask = mask_tile(at, i,"),
    "all consumers get the first one's mask": (
        "hopper_producer", "task.first + w * ROWS, start_n", "task.first, start_n"),
    "a mask of one head is taken for one of many": (
        "hopper_producer", "gl.where(step_h == 0, 0, task.head)", "task.head"),
    "K of the next part is read before it lands": (
        "hopper_folds", "    mbarrier.wait(bars.k_full.index(k_at), k_phase)\n", ""),
    "V at the end of a part is read before it lands": (
        "hopper_folds", "    mbarrier.wait(bars.v_full.index(at), phase)\n", ""),
    "scores of the next part are used before they are there": (
        "hopper_folds", "warpgroup_mma_wait(T.V_PIECES, [s])", "warpgroup_mma_wait(T.V_PIECES + 1, [s])"),
    "a part is folded where O leaves": (
        "hopper_folds", "    tma.store_wait(0)  # the last tile's O has left the room\n", ""),
    "parts that fail are not noticed": ("hopper_folds", "(over != 0) | is_bad(acc, T)", "(over != 0)"),
    "a part that fails is folded all the same": ("hopper_again", "asked & (fails == 0)", "asked"),
    "a part is folded twice": ("hopper_again", "((mark == CLEAN) & (second == 0))", "(mark == CLEAN)"),
    "parts are folded to the chain of the tile before": (
        "hopper_again", "        if (part % T.FEW == 0) & (second == 0):\n", "        if False:\n"),
    "a chain goes on from the one before": ("hopper_again", "if (part % T.FEW == 0) &", "if (part == 0) &"),
    "chains begin at the first part": ("hopper_tasks", "            part *= T.FEW\n", ""),
    "a chain ends with all parts": (
        "hopper_tasks", "gl.minimum((tiles + each - 1) // each, part + T.FEW)", "(tiles + each - 1) // each"),
    "all chains leave the first one's state": (
        "hopper_tasks", "part_of(task, T)[0] // T.FEW", "part_of(task, T)[0] * 0"),
    "a chain that was done again is not written": (
        "hopper_again", "        if (mode == REDO) & (behind == 0):\n", "        if False:\n"),
    "infinities of a chain are not written": (
        "hopper_again",
        "        if mode != REDO:\n            move_state(acc, mode, rows.exists, dst, lse, task, WG, T)\n        if",
        "        if"),
    "Q comes with each part": ("hopper_producer", "    if begins:\n        copy_q", "    if True:\n        copy_q"),
    "each part asks for the next row tile": ("hopper_producer", "        if ends:\n", "        if True:\n"),
    "rows that failed are not noticed": ("attention_hopper", "gl.where(is_bad(acc, T), CLEAN, 0)", "0"),
}  # fmt: skip


# The problems that show what the others never would.
SHOWN_BY = {
    "V that a consumer passes over is not waited for": "passed over",
    "messages do not wait for room": "far ahead",
    **dict.fromkeys(
        (
            "K of the next part is read before it lands",
            "V at the end of a part is read before it lands",
            "scores of the next part are used before they are there",
            "a part is folded where O leaves",
            "parts that fail are not noticed",
            "a part that fails is folded all the same",
            "a part is folded twice",
            "parts are folded to the chain of the tile before",
            "Q comes with each part",
            "each part asks for the next row tile",
        ),
        "folded",
    ),
    **dict.fromkeys(
        (
            "a chain goes on from the one before",
            "chains begin at the first part",
            "a chain ends with all parts",
            "all chains leave the first one's state",
            "a chain that was done again is not written",
            "infinities of a chain are not written",
        ),
        "in chains",
    ),
    "parts overlap": "in parts",
    "a redo does not wait for the first pass": "done again",
    "V is cleaned by each as if alone": "done again",
    "clean V is read with no fence": "done again",
    "O takes V's room too early": "done again",
    "rows that failed are not noticed": "done again",
    "a mask is read before it lands": "masked",
    "a mask is read from the room of the step before": "masked",
    "all consumers get the first one's mask": "masked",
    "a mask of one head is taken for one of many": "masked",
}

Problem = tuple[dict[str, Tensor], dict[str, object]]


def usual() -> Iterator[Problem]:
    """Several tiles, each of several of keys, for every tile of the table."""
    for dim, len_q, len_k, options in (
        (64, 200, 300, {"causal": True}), (64, 200, 2100, {}), (64, 400, 520, {}),
        (64, 260, 2100, {"window": (130, 9)}), (96, 200, 300, {}), (128, 300, 400, {}), (128, 140, 2100, {}),
        (192, 200, 300, {"causal": True}), (192, 140, 2100, {}), (256, 200, 200, {"window": (70, 3)}),
    ):  # fmt: skip
        yield from in_halves(dim, len_q, len_k, options)


def passed_over() -> Iterator[Problem]:
    """Some consumers see nothing of the first tiles of keys, and the rings are short."""
    yield from in_halves(256, 260, 300, {"causal": True})


def far_ahead() -> Iterator[Problem]:
    """Two row tiles whose K, V and Q fit on chip together, so that the producer is done before a message is read."""
    yield from in_halves(64, 400, 520, {"window": (0, None), "q_start": 400})


def in_halves(dim: int, len_q: int, len_k: int, options: dict[str, object]) -> Iterator[Problem]:
    for dtype in (torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(dim + len_q)
        sizes = {"q": (1, 2, len_q, dim), "k": (1, 1, len_k, dim), "v": (1, 1, len_k, 128 if dim == 192 else dim)}
        yield {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}, options


def done_again() -> Iterator[Problem]:
    """Late outliers, a reference that fails, infinities of either kind in V."""
    generator = torch.Generator().manual_seed(1)
    for dim in (64, 96, 128, 192, 256):
        q, k, v = (torch.randn(1, 2, 300, dim, generator=generator).half() for _ in range(3))
        k[:, :, 20] *= 60
        v[:, 0, 70, 3], v[:, 1, 200, 5], v[:, 1, 280, 9] = math.inf, -math.inf, math.nan
        yield dict(q=q, k=k, v=v), {"causal": True}


def in_parts() -> Iterator[Problem]:
    """Few rows over many keys: one of them sees nothing of the last part, one has a row that fails in the first."""
    for heads, rows, options in ((1, 100, {"causal": True, "q_start": 1990}), (2, 40, {"window": (3000, 5)})):
        q, k, v = few_rows(128, heads, rows, 4300)
        k[:, :, 20] *= 60
        yield dict(q=q, k=k, v=v), options


def folded() -> Iterator[Problem]:
    """Enough row tiles that a block takes all parts of each; some rows fail in the second, some by what V holds too."""
    for dim in (128, 64):
        q, k, v = few_rows(dim, 4, 100, 2100)
        k[:, :, 1500] *= 60
        v[:, 0, 1100, 3], v[:, 0, 2050, 5] = math.inf, math.nan
        yield dict(q=q, k=k, v=v), {"causal": True, "sinks": torch.tensor([1.0, -2.0, 0.0, 5.0])}


def in_chains() -> Iterator[Problem]:
    """Chains of two parts, two chains to a row tile; rows fail in each, and V has what is not finite in the second."""
    for dim in (128, 64):
        q, k, v = few_rows(dim, 3, 100, 500)
        k[:, :, 100] *= 60
        k[:, :, 400] *= 60
        v[:, 0, 300, 3], v[:, 0, 450, 5] = math.inf, math.nan
        with pytest.MonkeyPatch.context() as patch:
            take_parts(patch, folded=True, chains=True)
            yield dict(q=q, k=k, v=v), {"causal": True, "sinks": torch.tensor([1.0, -2.0, 0.0])}


def few_rows(dim: int, heads: int, rows: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    sizes = (heads, rows), (1, keys), (1, keys)
    return [torch.randn(1, *size, dim, generator=generator).half() for size in sizes]


def masked() -> Iterator[Problem]:
    """Masks that TMA copies: of each row and head or of all heads, numbers or bool; some rows see nothing, or fail."""
    generator = torch.Generator().manual_seed(3)
    for dim, heads, len_q, len_k in ((64, 2, 100, 300), (64, 1, 200, 2100), (128, 1, 200, 304)):
        (tensors, _), _ = in_halves(dim, len_q, len_k, {})
        tensors["k"][:, :, 20] *= 60
        mask = torch.randn(1, heads, len_q, len_k // 16 * 16 + 16, generator=generator).to(tensors["q"].dtype)
        mask[:, :, 5] = -math.inf
        yield {**tensors, "mask": mask[..., :len_k]}, {"causal": dim == 128}
        yield {**tensors, "mask": (mask > 0)[..., :len_k]}, {}


PROBLEMS: dict[str, Callable[[], Iterator[Problem]]] = {
    "usual": usual, "passed over": passed_over, "far ahead": far_ahead, "done again": done_again, "in parts": in_parts,
    "folded": folded, "in chains": in_chains, "masked": masked,
}  # fmt: skip


def check(*kinds: str, turns: int = 1) -> None:
    for tensors, options in itertools.chain.from_iterable(PROBLEMS[kind]() for kind in kinds * turns):
        out, lse = fa.attention(**tensors, **options, return_lse=True, backend="hopper")
        wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
        exact, exact_lse = attention_reference(**wide, **options, return_lse=True)
        # Four bfloat16 eps for P and O that are rounded to it; float32 for lse. What breaks is a tile or more off.
        torch.testing.assert_close(out.double(), exact, atol=2**-6, rtol=2**-6, equal_nan=True)
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-5)


def test_as_it_is_nothing_is_wrong(monkeypatch):
    on_torch(monkeypatch)
    check(*PROBLEMS)


def test_sweeps_of_two_tiles_follow_one_another(monkeypatch):
    """As more tiles than are listed do, 512 of a block; some have rows to do again between two sweeps."""
    on_torch(monkeypatch, Sources(("hopper_tasks", "LISTED = gl.constexpr(512)", "LISTED = gl.constexpr(2)")))
    check("done again", "in parts", "folded", "in chains")


@pytest.mark.parametrize("wrong", BROKEN)
def test_one_thing_wrong_is_found(wrong, monkeypatch):
    on_torch(monkeypatch, Sources(BROKEN[wrong]))
    kinds = [SHOWN_BY[wrong]] if wrong in SHOWN_BY else PROBLEMS
    with pytest.raises(AssertionError):
        check(*kinds, turns=TURNS)
