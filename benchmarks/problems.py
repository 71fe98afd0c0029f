"""Draws attention problems by chance at the sizes of models, computes each in many ways, and looks for differences.

python -m benchmarks.problems [--seconds 300] [--seed 0] [--device cuda]

Tensors lie in any way, or are expanded. Each problem is held to the definition in float64, forward and backward, and to
one more law by chance (`flashattn_lite.testing.ALL_LAWS`); to the bit it must be the same twice and for a sequence
alone, its gradients too, and on a GPU on two streams at once and in a CUDA graph that is replayed with other numbers.
Several processes, each with a seed of its own, may share a GPU: kernels take seconds to compile. Exits with 1 if
anything was found.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import flashattn_lite as fa
from flashattn_lite.testing import ALL_LAWS, Case
from flashattn_lite.testing.gradients import run_backward
from flashattn_lite.testing.laws import gradients_match_autograd, matches_oracle
from flashattn_lite.testing.locality import batch_slot_is_irrelevant, repeats_have_the_same_bits
from flashattn_lite.testing.tensors import LAYOUTS, lay_out

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 128, 128, 16, 40, 72, 80, 96, 160, 192, 256)
QUERIES = (1, 2, 4, 16, 33, 64, 128, 200, 257, 513, 1030, 2049)
KEYS = (64, 100, 257, 1024, 1500, 2048, 4097, 8192, 9001, 20011, 70001)
SCORES = {"cuda": 1 << 24, "cpu": 1 << 20}  # of a problem at most: the definition holds all of them, in float64
Check = Callable[[Any, Case], None]


def problem(draw: random.Random, device: torch.device) -> Case:
    """One attention problem; the same draws make the same one."""
    seed, dtype = draw.randrange(1 << 30), draw.choice(DTYPES)
    generator = torch.Generator().manual_seed(seed)
    batch, heads_kv, group = draw.choice((1, 2, 3)), draw.choice((1, 2)), draw.choice((1, 2, 4))
    dim = draw.choice(HEAD_DIMS)
    dim_v = draw.choice((dim, dim, 64, 128))
    while True:
        len_q, len_k = draw.choice(QUERIES), draw.choice(KEYS)
        if batch * heads_kv * group * len_q * len_k <= SCORES[device.type]:
            break
    scale = draw.choice((1, 1, 8))  # of scores, beside those of normal numbers

    def some(heads: int, length: int, columns: int, factor: int = 1) -> Tensor:
        numbers = factor * torch.randn(batch, heads, length, columns, generator=generator)
        return lay_out(numbers.to(device, dtype), draw.choice(LAYOUTS))

    q = some(heads_kv * group, len_q, dim, scale)
    k, v = some(heads_kv, len_k, dim), some(heads_kv, len_k, dim_v)
    if draw.random() < 0.15:
        over = draw.choice((0, 1))
        k, v = (x.narrow(over, 0, 1).expand_as(x) for x in (k, v))
    options: dict[str, Any] = {}
    if draw.random() < 0.5:
        options["causal"] = True
    if draw.random() < 0.2:
        options["window"] = (draw.choice((None, 100, 700)), draw.choice((None, 0, 50)))
    if draw.random() < 0.2:
        options["softcap"] = 20.0
    if draw.random() < 0.3:
        options["kv_lens"] = torch.tensor([draw.randrange(len_k + 1) for _ in range(batch)]).to(device, torch.int32)
    if draw.random() < 0.2:
        options["sinks"] = torch.randn(heads_kv * group, generator=generator).to(device)
    if draw.random() < 0.35:
        shape = draw.choice((1, batch)), draw.choice((1, heads_kv * group)), draw.choice((1, len_q)), len_k
        mask = torch.randn(shape, generator=generator)
        mask = mask > -1 if draw.random() < 0.5 else mask.to(draw.choice((dtype, torch.float32)))
        options["mask"] = lay_out(mask.to(device), draw.choice(LAYOUTS))
    return Case(q, k, v, **options, seed=seed, note=f"scores times {scale}")


def results(attention: Any, case: Case) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(attention(case.q, case.k, case.v, **case.options(), return_lse=True))


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor], what: str) -> None:
    for x, y in zip(got, want, strict=True):
        equal = torch.equal(x.nan_to_num(nan=7.0), y.nan_to_num(nan=7.0)) and torch.equal(x.isnan(), y.isnan())
        assert equal, f"{what}: {int((x != y).sum())} of {x.numel()} elements differ"


def gradients_have_their_bits(attention: Any, case: Case) -> None:
    """Those of q, k and v, twice, and for the last sequence alone, where kernels of ours make them."""
    last = case.q.shape[0] - 1
    d_out = torch.randn(*case.q.shape[:3], case.v.shape[-1], generator=case.generator()).to(case.q)

    def gradients(some: Case, d_out: Tensor) -> list[Tensor]:
        found = run_backward(attention, some, d_out, None)
        return [x for x in map(found.get, ("q", "k", "v")) if x is not None]

    whole = gradients(case, d_out)
    assert_same(gradients(case, d_out), whole, "gradients, again")
    if case.q.is_cuda and fa.explain(case.q, case.k, case.v, **case.options()).gradients:
        return  # plain torch, whose products on a GPU are other ones for other batches (docs/design.md)
    alone = gradients(case.sequence(last), d_out[last:])
    assert_same(alone, [x[last:] for x in whole], "gradients of a sequence alone")


def streams_do_not_meet(attention: Any, case: Case) -> None:
    """The same call on two streams at once."""
    want, side = results(attention, case), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = results(attention, case)
    again = results(attention, case)
    torch.cuda.synchronize()
    assert_same(other, want, "on a second stream")
    assert_same(again, want, "beside a second stream")


def graphs_see_new_numbers(attention: Any, case: Case) -> None:
    """A captured call, replayed twice with another q and other lengths in the same places."""
    q, lens = case.q.clone(memory_format=torch.preserve_format), case.kv_lens
    case = case.replace(q=q, kv_lens=None if lens is None else lens.clone())
    results(attention, case)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(attention, case)
    q.copy_(q.flip(2) / 2)
    if case.kv_lens is not None:
        case.kv_lens.copy_(case.kv_lens // 2)
    want = results(attention, case)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, want, "a replay")


def checks(draw: random.Random, device: torch.device) -> list[Check]:
    everywhere = [matches_oracle, gradients_match_autograd, repeats_have_the_same_bits, batch_slot_is_irrelevant]
    gpu = [streams_do_not_meet, graphs_see_new_numbers] if device.type == "cuda" else []
    return [*everywhere, gradients_have_their_bits, *gpu, draw.choice(ALL_LAWS)]


def differences(attention: Any, case: Case, asked: Sequence[Check]) -> list[str]:
    """What each check found, if anything."""
    found = []
    for check in asked:
        try:
            check(attention, case)
        except Exception as error:
            found.append(f"{check.__name__}: {type(error).__name__} {error}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.problems", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    options = parser.parse_args(argv)
    draw, end = random.Random(options.seed), time.monotonic() + options.seconds
    count = found = 0
    while time.monotonic() < end:
        backend = draw.choice(("auto", "auto", "triton")) if options.device.type == "cuda" else "auto"
        case, attention = problem(draw, options.device), functools.partial(fa.attention, backend=backend)
        for line in differences(attention, case, checks(draw, options.device)):
            found += 1
            print(f"{backend}, {line}\n  {case}", flush=True)
        count += 1
    print(f"{count} problems by torch {torch.__version__}, {found} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
