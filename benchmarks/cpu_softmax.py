"""Softmax and its statistics on the CPU, ours and torch's, in turn in one process: `python -m benchmarks.cpu_softmax`.

Two threads. The errors are the largest of 16 rows, relative to float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashattn_lite
from benchmarks import tables
from benchmarks.command import parser_of
from benchmarks.cpu import THREADS
from benchmarks.provenance import results_of, row_provenance, write_rows
from benchmarks.softmax import columns, largest_error, relative_error

ROUNDS = 15
CELLS = [(65536, 64), (4096, 4096), (128, 50257), (16, 1 << 20), (1, 1 << 24)]
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
OPS: dict[str, dict[str, Callable[[Tensor], Any]]] = {
    "softmax": {"flashattn_lite": flashattn_lite.online_softmax, "torch": lambda x: torch.softmax(x, -1)},
    "softmax_stats": {
        "flashattn_lite": flashattn_lite.softmax_stats, "torch logsumexp": lambda x: torch.logsumexp(x, -1)
    },
}  # fmt: skip


def measure(op: str, x: Tensor) -> dict[str, list[float]]:
    """Milliseconds by provider, one sample a round after a first call, the providers in turn."""
    samples: dict[str, list[float]] = {name: [] for name in OPS[op]}
    for lap in range(ROUNDS + 1):
        for name, function in OPS[op].items():
            start = time.perf_counter()
            function(x)
            if lap:
                samples[name].append((time.perf_counter() - start) * 1e3)
    return samples


def measure_all() -> Iterator[dict[str, object]]:
    """CSV rows; a line of each is printed on the way."""
    provenance = row_provenance("cpu")
    for op, providers in OPS.items():
        for rows, cols in CELLS:
            for dtype, torch_dtype in DTYPES.items():
                x = (3 * torch.randn(rows, cols)).to(torch_dtype)
                cell = {**provenance, "op": op, "rows": rows, "cols": cols, "dtype": dtype}
                for name, function in providers.items():
                    if op == "softmax" or name == "flashattn_lite":  # torch's logsumexp is another number
                        error = relative_error(op, function(x), x)
                        # Of long rows torch's own sums are off by more than ours may be.
                        if name == "flashattn_lite" and not error <= largest_error(op, torch_dtype):
                            raise ArithmeticError(f"{op} {rows} x {cols} {dtype}: wrong by {error:.3g}")
                        yield cell | {"provider": name, "metric": "relative_error", "median": f"{error:.3g}"}
                for name, times in measure(op, x).items():
                    p20, median, p80 = (sorted(times)[round(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8))
                    print(f"{op:14} {rows:6} x {cols:8} {dtype:8} {name:16} {median:9.3f} ms", flush=True)
                    yield cell | {
                        "provider": name, "metric": "ms", "median": f"{median:.4f}", "p20": f"{p20:.4f}",
                        "p80": f"{p80:.4f}",
                    }  # fmt: skip


def table(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """torch's time over ours (of statistics: its logsumexp's), and errors of float32, for docs/performance.md."""
    read = [{name: str(value) for name, value in row.items()} for row in rows]
    times, errors = (tables.speeds(read, metric, "op", "dtype", "rows", "cols") for metric in ("ms", "relative_error"))
    cells = [(str(count), str(cols)) for count, cols in CELLS]
    lines = tables.header("", *map(" x ".join, cells))
    for op, providers in OPS.items():
        ours, other = providers
        for dtype in DTYPES:
            of = [times[op, dtype, *cell] for cell in cells]
            lines.append(tables.line(f"{op}, {dtype}", *(f"{cell[other] / cell[ours]:.2f}" for cell in of)))
    for name in OPS["softmax"]:
        of = [errors["softmax", "float32", *cell] for cell in cells]
        lines.append(tables.line(f"error of {name}", *(f"{cell[name]:.1e}" for cell in of)))
    return lines


def main() -> None:
    parser = parser_of("cpu_softmax", __doc__)
    default = results_of("cpu") / "softmax.csv"
    parser.add_argument("--csv", type=Path, nargs="?", const=default, help="write rows there; default: %(const)s")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    rows = list(measure_all())
    print("\n".join(table(rows)))
    if options.csv is not None:
        write_rows(options.csv, rows, columns())


if __name__ == "__main__":
    main()
