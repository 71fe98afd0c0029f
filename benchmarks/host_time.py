"""Host time of one attention call, with no wait for the GPU in it: python -m benchmarks.host_time [--out CSV].

The problem is tiny (4 sequences of 128, 8 heads of 64, bf16) and the GPU is waited for after every 20 calls, outside of
what is timed: a queue of 1024 launches never fills, so that a call never waits, whatever the GPU does. Each call is
timed by itself; 600 calls a provider in 30 rounds, the providers in turn in each, garbage collection off.
With grad, the inputs ask for gradients: the forward then builds its node, and no backward runs.
Rows of metric host_us (microseconds; median, p20, p80 over calls). The column op says dense or packed, without or with
"+grad". torch's switch of backend is set outside of what is timed. A provider that can't be imported or refuses has a
row of metric absent, with the reason as its value.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command import need_gpu, parser_of
from benchmarks.packed_providers import PACKED, pack
from benchmarks.progress import Progress
from benchmarks.provenance import results_of, row_provenance, write_rows
from benchmarks.providers import OURS, PROVIDERS, Provider, importable, in_a_line, sdpa

BATCH, HEADS, LENGTH, HEAD_DIM = 4, 8, 128, 64
ROUNDS, CALLS, WARM = 30, 20, 10  # calls in a round: times some 10 launches each, far below the queue's 1024

Run = Callable[[], Any]  # one call on fixed inputs


@dataclass
class Subject:
    """One provider on one problem: what it runs, and the nanoseconds of each of its calls."""

    name: str
    run: Run
    provider: Provider
    nanoseconds: list[int] = field(default_factory=list)

    def warm(self) -> None:
        with self.provider.setting():
            for _ in range(WARM):
                self.run()
        torch.cuda.synchronize()

    def measure(self) -> None:
        clock, run, samples = time.perf_counter_ns, self.run, self.nanoseconds
        torch.cuda.synchronize()
        with self.provider.setting():
            run()  # the first one after a pause is slower
            for _ in range(CALLS):
                start = clock()
                run()
                samples.append(clock() - start)

    def microseconds(self, share: float) -> str:
        ordered = sorted(self.nanoseconds)
        return f"{ordered[round(share * (len(ordered) - 1))] / 1e3:.1f}"


def packed(name: str) -> Provider:
    return PACKED[name]()(pack([LENGTH] * BATCH, "cuda"))


DENSE: dict[str, Callable[[], Provider]] = {"sdpa": sdpa, **PROVIDERS}
VARLEN: dict[str, Callable[[], Provider]] = {name: partial(packed, name) for name in (*OURS, "sdpa-varlen")}
# op -> shape of q, k and v; who takes it
FORMS: dict[str, tuple[tuple[int, ...], dict[str, Callable[[], Provider]]]] = {
    "attention_forward": ((BATCH, HEADS, LENGTH, HEAD_DIM), DENSE),
    "attention_varlen_forward": ((BATCH * LENGTH, HEADS, HEAD_DIM), VARLEN),
}


def check(out: Tensor, qkv: Sequence[Tensor], causal: bool) -> None:
    """What is timed must be right, and must be part of a graph where gradients are asked for."""
    if out.requires_grad != qkv[0].requires_grad:
        raise NotImplementedError("its output asks for no gradient where its inputs do")
    per_head = (lambda x: x.unflatten(0, (BATCH, LENGTH)).transpose(1, 2)) if out.dim() == 3 else (lambda x: x)
    out, q, k, v = (per_head(x.detach()).double() for x in (out, *qkv))
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    error = ((out - exact).norm() / exact.norm()).item()
    if not error <= torch.finfo(torch.bfloat16).eps:  # fused peers are at a quarter of it
        raise ArithmeticError(f"wrong: relative error {error:.2e}")


def subjects(
    providers: dict[str, Provider], qkv: Sequence[Tensor], causal: bool, absent: dict[str, str]
) -> list[Subject]:
    """Those that run it; the others' reasons go into `absent`."""
    found = []
    for name, provider in providers.items():
        subject = Subject(name, lambda call=provider.call: call(*qkv, causal), provider)  # type: ignore[misc]
        try:
            with provider.setting():
                out = subject.run()
            check(out, qkv, causal)  # outside: a backend of torch's that was chosen takes no float64
            subject.warm()
        except Exception as refusal:
            absent[name] = in_a_line(refusal)
        else:
            found.append(subject)
    return found


def measure(
    providers: dict[str, Provider], qkv: Sequence[Tensor], causal: bool, cell: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The rows of one problem."""
    absent: dict[str, str] = {}
    turns = subjects(providers, qkv, causal, absent)
    gc.collect()
    gc.disable()
    try:
        for number in range(ROUNDS):
            for subject in turns[:: -1 if number % 2 else 1]:
                subject.measure()
    finally:
        gc.enable()
    for subject in turns:
        low, middle, high = map(subject.microseconds, (0.2, 0.5, 0.8))
        yield {**cell, "provider": subject.name, "metric": "host_us", "median": middle, "p20": low, "p80": high}
    for name, why in absent.items():
        yield {**cell, "provider": name, "metric": "absent", "median": why}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("host_time", __doc__)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/host_time.csv")
    options = parser.parse_args(argv)
    need_gpu(parser, ": without one there is no launch to time")
    out = options.out or results_of() / "host_time.csv"
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    problems = list(itertools.product((False, True), repeat=2))  # causal, grad
    provenance = row_provenance("cuda")
    with Progress(len(FORMS) * len(problems)) as bar:
        for form, (op, (shape, makers)) in enumerate(FORMS.items()):
            providers, missing = importable(makers)
            rows += [{**provenance, "op": op, "provider": name, "metric": "absent", "median": why}
                     for name, why in missing.items()]  # fmt: skip
            for number, (causal, grad) in enumerate(problems):
                qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]
                cell = {**provenance, "op": op + "+grad" * grad, "batch": BATCH, "heads_q": HEADS, "heads_kv": HEADS,
                        "len_q": LENGTH, "len_kv": LENGTH, "head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM,
                        "dtype": "bf16", "causal": causal}  # fmt: skip
                bar.show(form * len(problems) + number, f"{cell['op']} {'causal' if causal else 'full'}")
                rows += measure(providers, qkv, causal, cell)
                write_rows(out, rows)
    print_table(rows)
    print(f"rows: {out}")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Medians in microseconds, a line for each provider and op."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if "causal" in row:
            shown = row["median"] if row["metric"] == "host_us" else "absent"
            table.setdefault((row["provider"], row["op"]), {})["causal" if row["causal"] else "full"] = shown
    print(f"{'provider':24} {'op':32} {'full':>8} {'causal':>8}  µs of host time a call, median")
    for (provider, op), shown in sorted(table.items()):
        print(f"{provider:24} {op:32} {shown['full']:>8} {shown['causal']:>8}")
    for row in rows:
        if row["metric"] == "absent":
            print(f"absent: {row['provider']}, {row['op']}: {row['median']}")


if __name__ == "__main__":
    main()
