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
from flashattn_lite import calls
from flashattn_lite import target as targets
from flashattn_lite.kernels import attention_hopper_launch, tuning_dealt, tuning_parts
from flashattn_lite.reference import attention_reference
from flashattn_lite.testing.results import assert_same_bits
from tests.exhaustive import also, quick
from tests.gluon_on_torch import Sources, hopper, launch
from tests.gluon_on_torch.broken import BROKEN, LATE, SHOWN_BY
from tests.gluon_on_torch.hopper import on_torch
from tests.test_decode import pages_of
from tests.test_hopper import take_parts

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="the same without TRITON_INTERPRET=1")
TURNS = 40  # orders in which a broken kernel may show it

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


def dealt_out() -> Iterator[Problem]:
    """To three blocks: of the first's rows none sees the first two tiles of keys, which nobody else there uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_ready", {})
        patch.setattr(attention_hopper_launch, "dealt", tuning_dealt.dealt)
        yield next(in_halves(64, 200, 2100, {"causal": True}))


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
    """A block takes all parts of a row tile, of two tiles each; some rows fail in the second, some by what V holds."""
    for dim in (128, 64):
        q, k, v = few_rows(dim, 4, 100, 700)
        k[:, :, 450] *= 60
        v[:, 0, 300, 3], v[:, 0, 650, 5] = math.inf, math.nan
        with pytest.MonkeyPatch.context() as patch:
            take_parts(patch, folded=True)
            patch.setattr(tuning_parts, "HOPPER_SPLITS", ((1 << 20, 256, 256),))
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


def in_two_chains() -> Iterator[Problem]:
    """Two chains of two parts, of rows that one block has: they fail in either, V has what is not finite in both."""
    for dim in (128, 96):
        q, k, v = few_rows(dim, 3, 16, 500)
        k[:, :, 100] *= 60
        k[:, :, 400] *= 60
        v[:, 0, 30, 3], v[:, 0, 450, 5] = math.inf, math.nan
        with pytest.MonkeyPatch.context() as patch:
            take_parts(patch, folded=True, few_rows=True)
            yield dict(q=q, k=k, v=v), {"causal": True, "sinks": torch.tensor([1.0, -2.0, 0.0])}


def given_back_apart() -> Iterator[Problem]:
    """Two chains beside which rings are so short that K is given back before V, of parts of three tiles and of two."""
    q, k, v = (x.expand(5, -1, -1, -1).clone() for x in few_rows(128, 2, 40, 700))
    lens = torch.tensor([700, 100, 100, 100, 100], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        take_parts(patch, folded=True, chains=True)
        patch.setattr(tuning_parts, "ONE_TILE_SPLIT", 192)
        yield dict(q=q, k=k, v=v, kv_lens=lens), {"causal": True}


def in_pages() -> Iterator[Problem]:
    """Pages shorter and longer than a tile, no whole tiles in all; sequences of few parts in room for many, or none."""
    for dim, page, folded in ((128, 16, False), (96, 128, True)):
        q, k, v = (x.expand(3, -1, -1, -1).clone() for x in few_rows(dim, 4, 16, 640 + 80 * (page == 16)))
        lens = torch.tensor([130, 0, k.shape[2]], dtype=torch.int32)
        with pytest.MonkeyPatch.context() as patch:
            take_parts(patch, folded=folded, few_rows=True)
            yield dict(q=q, k=k, v=v, kv_lens=lens), {"causal": True, "page": page}


def short() -> Iterator[Problem]:
    """Sequences that have fewer parts than there is room for, in sections of four heads, but for three and one."""
    q, k, v = (x.expand(3, -1, -1, -1).clone() for x in few_rows(128, 4, 100, 640))
    with pytest.MonkeyPatch.context() as patch:
        take_parts(patch, folded=False)
        lens = torch.tensor([640, 300, 130], dtype=torch.int32)
        yield dict(q=q, k=k, v=v, kv_lens=lens), {"causal": True}


def packed() -> Iterator[Problem]:
    """Two tiles of a sequence, the second of which ends where the next begins; O leaves by two rooms, or is padded."""
    for tensors, options in itertools.chain(in_halves(256, 200, 100, {}), in_halves(72, 200, 100, {})):
        yield {name: torch.cat([x, x.flip(2)]) for name, x in tensors.items()}, {**options, "packed": True}


def few_rows(dim: int, heads: int, rows: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    sizes = (heads, rows), (1, keys), (1, keys)
    return [torch.randn(1, *size, dim, generator=generator).half() for size in sizes]


def masked() -> Iterator[Problem]:
    """Masks that TMA copies: of each row and head or of all heads, numbers or bool; some rows see nothing, or fail.

    The last are of two sequences, too.
    """
    generator = torch.Generator().manual_seed(3)
    for dim, heads, len_q, len_k in ((64, 2, 100, 300), (64, 1, 200, 2100), (128, 1, 200, 304)):
        (tensors, _), _ = in_halves(dim, len_q, len_k, {})
        tensors["k"][:, :, 20] *= 60
        if dim == 128:
            tensors = {name: torch.cat([x, x.flip(2)]) for name, x in tensors.items()}
        mask = torch.randn(1, heads, len_q, len_k // 16 * 16 + 16, generator=generator).to(tensors["q"].dtype)
        mask[:, :, 5] = -math.inf
        yield {**tensors, "mask": mask[..., :len_k]}, {"causal": dim == 128}
        yield {**tensors, "mask": (mask > 0)[..., :len_k]}, {}


PROBLEMS: dict[str, Callable[[], Iterator[Problem]]] = {
    "usual": usual, "passed over": passed_over, "far ahead": far_ahead, "done again": done_again, "in parts": in_parts,
    "folded": folded, "in chains": in_chains, "in two chains": in_two_chains, "masked": masked, "in pages": in_pages,
    "short": short, "given back apart": given_back_apart, "packed": packed,
    "dealt out": dealt_out,
}  # fmt: skip


def answer(
    tensors: dict[str, Tensor], page: int | None = None, packed: bool = False, **options: object
) -> tuple[Tensor, Tensor]:
    """By the Hopper kernel; with `page` as a cache in pages, `packed` as sequences that lie behind one another."""
    given = {**options, "return_lse": True, "backend": "hopper"}
    if packed:
        rows = [x.transpose(1, 2).flatten(0, 1) for x in tensors.values()]
        batch, _, len_q, _ = tensors["q"].shape
        starts = [torch.arange(batch + 1, dtype=torch.int32) * n for n in (len_q, tensors["k"].shape[2])]
        out, lse = fa.attention_varlen(*rows, *starts, **given)
        return out.unflatten(0, (batch, len_q)).transpose(1, 2), lse.unflatten(1, (batch, len_q)).transpose(0, 1)
    if page is None:
        return fa.attention(**tensors, **given)
    k_pages, v_pages, table = pages_of(tensors["k"], tensors["v"], page)
    return fa.attention_decode(tensors["q"], k_pages, v_pages, tensors["kv_lens"], block_table=table, **given)


def check(*kinds: str, turns: int = 1) -> None:
    for tensors, options in itertools.chain.from_iterable(PROBLEMS[kind]() for kind in kinds * turns):
        out, lse = answer(tensors, **options)
        options = {name: x for name, x in options.items() if name not in ("page", "packed")}
        wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
        exact, exact_lse = attention_reference(**wide, **options, return_lse=True)
        # Four bfloat16 eps for P and O that are rounded to it; float32 for lse. What breaks is a tile or more off.
        torch.testing.assert_close(out.double(), exact, atol=2**-6, rtol=2**-6, equal_nan=True)
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", PROBLEMS)
def test_as_it_is_nothing_is_wrong(kind, monkeypatch):
    on_torch(monkeypatch)
    check(kind)


@pytest.mark.parametrize("kind", [*map(also, ("done again", "in parts", "folded")), "in chains", "in two chains"])
def test_sweeps_of_two_tiles_follow_one_another(kind, monkeypatch):
    """As more tiles than are listed do, 512 of a block; some have rows to do again between two sweeps."""
    on_torch(monkeypatch, Sources(("hopper_tasks", "LISTED = gl.constexpr(512)", "LISTED = gl.constexpr(2)")))
    check(kind)


def test_merges_of_many_rows_that_run_as_one_have_the_bits_of_each(monkeypatch):
    """Of sequences that have few parts, many, or none, with sinks, and V that is not finite."""
    on_torch(monkeypatch)
    take_parts(monkeypatch, folded=False)
    q, k, v = (x.expand(3, -1, -1, -1).clone() for x in few_rows(64, 2, 9, 640))
    v[:, 0, 100, 3] = math.inf
    lens, results = torch.tensor([640, 130, 0], dtype=torch.int32), []
    for run in (hopper.launch_as_one, lambda kernel, count, each, args: launch(kernel, count, args, seed=0)):
        monkeypatch.setattr(hopper, "launch_as_one", run)
        options = {"causal": True, "sinks": torch.tensor([1.0, -2.0])}
        results.append(answer(dict(q=q, k=k, v=v, kv_lens=lens), **options))
    assert_same_bits(*results, "a row that is merged alone", None)


@pytest.mark.parametrize("wrong", quick(BROKEN, BROKEN.keys() - LATE.keys()))
def test_one_thing_wrong_is_found(wrong, monkeypatch):
    on_torch(monkeypatch, Sources(BROKEN[wrong]))
    kinds = [SHOWN_BY[wrong]] if wrong in SHOWN_BY else PROBLEMS
    with pytest.raises(AssertionError):
        check(*kinds, turns=TURNS)
