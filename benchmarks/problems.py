"""Draws problems by chance at the sizes of models, computes each in many ways, and looks for differences.

python -m benchmarks.problems [--seconds 300] [--seed 0] [--device cuda] [--kinds dense packed decoding softmax]

Each problem (problems_drawn.py) is held to the definition in float64, forward and, where there is one, backward, and to
one more law by chance (of `flashattn_lite.testing`); to the bit it must be the same twice and for a sequence alone, its
gradients too, a cache in pages that of a contiguous one, and on a GPU the same on two streams at once and in a CUDA
graph that is replayed with other numbers and lengths. Softmax (problems_softmax.py): likewise, its statistics too.
Several processes, each with a seed of its own, may share a GPU: kernels take seconds to compile. Exits with 1 if
anything was found.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashattn_lite as fa
from benchmarks import problems_drawn as drawn
from benchmarks import problems_softmax as of_softmax
from benchmarks.bits import assert_same
from benchmarks.command import device, parser_of
from benchmarks.problems_softmax import SoftmaxCase
from flashattn_lite.testing import ALL_LAWS, DECODE_LAWS, PACKED_LAWS, Case, PackedCase
from flashattn_lite.testing.decoding import paged_is_contiguous, through_attention
from flashattn_lite.testing.gradients import differentiable, run_backward
from flashattn_lite.testing.laws import gradients_match_autograd, matches_oracle
from flashattn_lite.testing.locality import batch_slot_is_irrelevant, repeats_have_the_same_bits
from flashattn_lite.testing.packed import bound_to
from flashattn_lite.testing.results import run, run_packed

Check = Callable[[Any, Any], None]


def results(attention: Any, case: Case | PackedCase | SoftmaxCase) -> tuple[Tensor, ...]:
    if isinstance(case, SoftmaxCase):
        return attention(case.x, case.dim)
    with torch.no_grad():
        found = run_packed(attention, case) if isinstance(case, PackedCase) else run(attention, case)
    return tuple(x for x in found if x is not None)


def gradients_have_their_bits(attention: Any, case: Case | PackedCase) -> None:
    """Those of q, k and v, twice, and for the last sequence alone, where kernels of ours make them."""
    d_out = torch.randn(*case.q.shape[:-1], case.v.shape[-1], generator=case.generator()).to(case.q)

    def gradients(some: Case | PackedCase, d_out: Tensor) -> list[Tensor]:
        call = attention
        if isinstance(some, PackedCase):
            call = functools.partial(bound_to, attention, some.cu_seqlens_q, some.cu_seqlens_k)
        found = run_backward(call, some, d_out, None)
        return [x for x in map(found.get, ("q", "k", "v")) if x is not None]

    whole = gradients(case, d_out)
    assert_same(gradients(case, d_out), whole, "gradients, again")
    if isinstance(case, PackedCase):
        last = len(case.sequences()) - 1
        dense, (rows, keys) = case.dense(last), case.sequences()[last]
    else:
        last = case.q.shape[0] - 1
        dense, rows, keys = case, slice(last, None), slice(last, None)
    learns = dense.replace(**{name: getattr(dense, name).detach().requires_grad_() for name in differentiable(dense)})
    if learns.q.is_cuda and fa.explain(learns.q, learns.k, learns.v, **learns.options()).gradients:
        return  # plain torch, whose products on a GPU are other ones for other batches (docs/design.md)
    alone = gradients(case.sequence(last), d_out[rows])
    among = [x[part] for x, part in zip(whole, (rows, keys, keys), strict=True)]
    assert_same(alone, among, "gradients of a sequence alone")


def streams_do_not_meet(attention: Any, case: Any) -> None:
    """The same call on two streams at once."""
    want, side = results(attention, case), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = results(attention, case)
    again = results(attention, case)
    torch.cuda.synchronize()
    assert_same(other, want, "on a second stream")
    assert_same(again, want, "beside a second stream")


def may_be_captured(attention: Any, case: Any) -> bool:
    """Without promises the lengths of packed sequences are read by the host."""
    return not isinstance(case, PackedCase) or {"max_seqlen_q", "max_seqlen_k"} <= attention.keywords.keys()


def graphs_see_new_numbers(attention: Any, case: Any) -> None:
    """A captured call, replayed twice with another q (or x) and other lengths in the same places."""
    if not may_be_captured(attention, case):
        return
    names = ("q", "x", "kv_lens", "cu_seqlens_q", "cu_seqlens_k")
    given = {name: getattr(case, name, None) for name in names}
    own = {name: x.clone(memory_format=torch.preserve_format) for name, x in given.items() if x is not None}
    case = case.replace(**own)
    results(attention, case)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(attention, case)
    for name, x in own.items():
        if name in ("q", "x"):
            x.copy_(x.flip(-2) / 2)
        elif name == "kv_lens":
            x.copy_(x // 2)
        else:  # the same sequences' lengths, in another order
            x[1:] = x.diff().flip(0).cumsum(0)
    want = results(attention, case)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, want, "a replay")


class Kind(NamedTuple):
    """Problems of one of the public functions."""

    draw: Callable[[random.Random, torch.device], tuple[Any, Any]]
    asked: tuple[Check, ...]
    on_gpu: tuple[Check, ...]  # asked there too
    laws: tuple[Check, ...]  # one of them, by chance, if there are any


KINDS = {
    "dense": Kind(
        drawn.dense,
        (matches_oracle, gradients_match_autograd, repeats_have_the_same_bits, batch_slot_is_irrelevant,
         gradients_have_their_bits),
        (streams_do_not_meet, graphs_see_new_numbers),
        ALL_LAWS,
    ),
    "packed": Kind(
        drawn.packed,
        (*PACKED_LAWS, gradients_have_their_bits),
        (streams_do_not_meet, graphs_see_new_numbers),
        PACKED_LAWS,
    ),
    "decoding": Kind(
        drawn.decoding,
        (*map(through_attention, (matches_oracle, repeats_have_the_same_bits, batch_slot_is_irrelevant)),
         paged_is_contiguous),
        tuple(map(through_attention, (streams_do_not_meet, graphs_see_new_numbers))),
        DECODE_LAWS,
    ),
    "softmax": Kind(
        of_softmax.softmax,
        (of_softmax.is_softmax, of_softmax.repeats_have_the_same_bits, of_softmax.other_rows_are_irrelevant),
        (streams_do_not_meet, graphs_see_new_numbers),
        (),
    ),
}  # fmt: skip


def checks(draw: random.Random, kind: Kind, device: torch.device) -> list[Check]:
    by_chance = draw.sample(kind.laws, min(1, len(kind.laws)))
    return [*kind.asked, *(kind.on_gpu if device.type == "cuda" else ()), *by_chance]


def differences(attention: Any, case: Any, asked: Sequence[Check]) -> list[str]:
    """What each check found, if anything."""
    found = []
    for check in asked:
        try:
            check(attention, case)
        except Exception as error:
            found.append(f"{check.__name__}: {type(error).__name__} {error}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("problems", __doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--device", type=device, default="cuda", help="%(default)s, or cpu")
    options = parser.parse_args(argv)
    draw, end = random.Random(options.seed), time.monotonic() + options.seconds
    count = found = 0
    while time.monotonic() < end:
        kind = KINDS[draw.choice(options.kinds)]
        attention, case = kind.draw(draw, options.device)
        for line in differences(attention, case, checks(draw, kind, options.device)):
            found += 1
            print(f"{attention.keywords}, {line}\n  {case}", flush=True)
        count += 1
    print(f"{count} problems by torch {torch.__version__}, {found} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
