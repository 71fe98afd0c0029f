"""Host time of one call, with no wait for the GPU in it: python -m benchmarks.host_time [--ops ...] [--out CSV].

The problems are tiny (benchmarks/host_calls.py: attention of 4 sequences of 128, 8 heads of 64, bf16) and the GPU is
waited for after every 20 runs, outside of what is timed: a queue of 1024 launches never fills, so that a call never
waits, whatever the GPU does. Each run is timed by itself; 600 runs a provider in 30 rounds, the providers in turn in
each, garbage collection off. A run is one call; in compiled code eight in a row, whose time is divided by eight.
With grad, the inputs ask for gradients: the forward then builds its node, and no backward runs.
Rows of metric host_us (microseconds of a call; median, p20, p80 over runs). The column op says what was called: dense,
packed, with a mask, decoding, softmax, and "+grad" or "+compiled". torch's switch of backend is set outside of what is
timed. A provider that can't be imported or refuses has a row of metric absent, with the reason as its value.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import need_gpu, parser_of
from benchmarks.host_calls import BATCH, HEAD_DIM, HEADS, LENGTH, Calls, every
from benchmarks.progress import Progress
from benchmarks.provenance import results_of, row_provenance, write_rows
from benchmarks.providers import Provider, importable, in_a_line

ROUNDS, RUNS, WARM = 30, 20, 10  # runs in a round: times some ten launches each, below the queue's 1024

Run = Callable[[], Any]  # on fixed inputs


@dataclass
class Subject:
    """One provider on one problem: what it runs, of how many calls, and the nanoseconds of each run."""

    name: str
    run: Run
    provider: Provider
    row: int = 1
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
            for _ in range(RUNS):
                start = clock()
                run()
                samples.append(clock() - start)

    def microseconds(self, share: float) -> str:
        ordered = sorted(self.nanoseconds)
        return f"{ordered[round(share * (len(ordered) - 1))] / self.row / 1e3:.1f}"


def check(out: Tensor, calls: Calls) -> None:
    """What is timed must be right, and must be part of a graph where gradients are asked for."""
    first, *rest = calls.inputs
    if out.requires_grad != first.requires_grad:
        raise NotImplementedError("its output asks for no gradient where its inputs do")
    exact, *others = (x.detach().double() if x.is_floating_point() else x for x in (first, *rest))
    for _ in range(calls.row):
        exact = calls.exact(exact, *others, calls.causal)
    error = ((out.detach().double() - exact).norm() / exact.norm()).item()
    if not error <= torch.finfo(torch.bfloat16).eps:  # fused peers are at a quarter of it
        raise ArithmeticError(f"wrong: relative error {error:.2e}")


def subjects(providers: dict[str, Provider], calls: Calls, absent: dict[str, str]) -> list[Subject]:
    """Those that run it; the others' reasons go into `absent`."""
    found = []
    for name, provider in providers.items():
        run = lambda call=provider.call: call(*calls.inputs, calls.causal)
        subject = Subject(name, run, provider, calls.row)
        try:
            with provider.setting():
                out = subject.run()
            check(out, calls)  # outside: a backend of torch's that was chosen takes no float64
            subject.warm()
        except Exception as refusal:
            absent[name] = in_a_line(refusal)
        else:
            found.append(subject)
    return found


def measure(calls: Calls, cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of one kind of call."""
    providers, absent = importable(calls.makers)
    turns = subjects(providers, calls, absent)
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


def cell_of(calls: Calls) -> dict[str, Any]:
    cell: dict[str, Any] = {"op": calls.op, "dtype": "bf16", "causal": calls.causal}
    if calls.op.startswith("attention"):
        len_q = 1 if "decode" in calls.op else LENGTH
        cell |= {"batch": BATCH, "heads_q": HEADS, "heads_kv": HEADS, "len_q": len_q, "len_kv": LENGTH,
                 "head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM}  # fmt: skip
    return cell


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("host_time", __doc__)
    parser.add_argument("--ops", nargs="+", help="those that begin with one of these; default: all")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/host_time.csv")
    options = parser.parse_args(argv)
    need_gpu(parser, ": without one there is no launch to time")
    out = options.out or results_of() / "host_time.csv"
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    provenance = row_provenance("cuda")
    chosen = [calls for calls in every() if calls.op.startswith(tuple(options.ops or ("",)))]
    with Progress(len(chosen)) as bar:
        for number, calls in enumerate(chosen):
            bar.show(number, f"{calls.op} {'causal' if calls.causal else 'full'}")
            rows += measure(calls, {**provenance, **cell_of(calls)})
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
        print(f"{provider:24} {op:32} {shown.get('full', '-'):>8} {shown.get('causal', '-'):>8}")
    for row in rows:
        if row["metric"] == "absent":
            print(f"absent: {row['provider']}, {row['op']}: {row['median']}")


if __name__ == "__main__":
    main()
