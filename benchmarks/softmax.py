"""Speed of softmax and of its statistics on a GPU, beside what else is there and a copy of the same bytes.

python -m benchmarks.softmax [--dtypes bf16 fp32] [--cells 4096x4096 ...] [--providers ...] [--out CSV]

In each cell every provider is first checked against float64 on sampled rows; one that is wrong is not timed. Then two
rounds, the second in opposite order: 150 ms of warm-up, then 80 ms are timed (600 calls of either at most), with
inputs rotated past the L2 cache.
Some of these kernels take less time than Python takes to start them, so calls are timed in batches that the GPU finds
ready in its queue; the host's time for a call is a metric of its own. GB/s counts one read and one write (softmax and
copy), or one read (softmax_stats and what it is compared with: torch's amax, and a Triton kernel that only reads).
Rows of metric gbps (median, p20, p80 over calls), relative_error and host_us; a provider that can't be imported or
refuses the problem has a row of metric absent, with the reason as its value.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashattn_lite
from benchmarks.command import need_gpu, parser_of
from benchmarks.progress import Progress
from benchmarks.provenance import COLUMNS, results_of, row_provenance, write_rows
from benchmarks.providers import in_a_line
from benchmarks.timing import Timing, median

Call = Callable[[Tensor, Tensor], Any]  # (x, room for a result of x's shape) -> what it computed
CACHE_BYTES = 192 << 20  # inputs rotate over at least three times an H200's L2
WARM_MS, TIMED_MS = 150.0, 80.0
BATCH = 50  # calls that the GPU finds in its queue: some 200 launches and events, well below what a queue holds
MOST_BATCHES = 12  # of a call of a few microseconds, which its wait in the queue makes far longer for us
# What the GPU idles for each call in a batch, so that the host has queued all before the first starts: twice the host's
# time for a call and its events.
CYCLES_A_MICROSECOND, EVENTS_US = 2000, 20.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CELLS = (
    *((128, 16384), (4096, 4096), (8192, 32768), (1024, 131072), (16, 1048576), (32768, 1024)),
    *((8192, 50257), (32768, 4097)),  # rows between 16-byte addresses; 50257 is GPT-2's vocabulary
    (8192, 50304),  # as it is padded, to no power of two
)
# Largest error relative to the value: half an eps from rounding, a few float32 eps and |ln p| eps inside; beyond two
# eps and 64 float32 eps something is wrong.
LARGEST_ERROR_EPS, LARGEST_ERROR_EPS_32 = 2.0, 64.0


def compiled() -> Call:
    torch._dynamo.config.recompile_limit = 64  # one for each cell; past 8 it would run eagerly and not say so
    function = torch.compile(lambda x: torch.softmax(x, -1), dynamic=False)
    return lambda x, room: function(x)


def imported(module: str, name: str) -> Call:
    function = getattr(importlib.import_module(module), name)
    return lambda x, room: function(x)


def reader() -> Call:
    """A kernel that reads x and stores one number a program: what reading costs in Triton."""
    from benchmarks.read import read

    return lambda x, room: read(x.view(-1).view(torch.int32))


SOFTMAX: dict[str, Callable[[], Call]] = {
    "flashattn_lite": lambda: lambda x, room: flashattn_lite.online_softmax(x),
    "torch": lambda: lambda x, room: torch.softmax(x, -1),
    "torch.compile": compiled,
    "liger": lambda: imported("liger_kernel.transformers.functional", "liger_softmax"),
    "quack": lambda: imported("quack.softmax", "softmax"),
    "copy": lambda: lambda x, room: room.copy_(x),
}
STATS: dict[str, Callable[[], Call]] = {
    "flashattn_lite": lambda: lambda x, room: flashattn_lite.softmax_stats(x),
    "torch amax": lambda: lambda x, room: x.amax(-1),
    "read": reader,
}
OPS = {"softmax": SOFTMAX, "softmax_stats": STATS}
YARDSTICKS = ("copy", "torch amax", "read")  # not what is asked for: nothing to check


def relative_error(op: str, out: Any, x: Tensor) -> float:
    """Largest error relative to the exact value, on 16 rows."""
    rows = torch.linspace(0, x.shape[0] - 1, 16, device=x.device).long()
    wide = x[rows].double()
    m = wide.amax(-1, keepdim=True)
    p = torch.exp(wide - m)
    if op == "softmax":
        exact = p / p.sum(-1, keepdim=True)
        return ((out[rows].double() - exact).abs() / exact).max().item()
    if not torch.equal(out[0][rows].double(), m[:, 0]):
        return float("inf")
    return ((out[1][rows].double() - p.sum(-1)).abs() / p.sum(-1)).max().item()


def largest_error(op: str, dtype: torch.dtype) -> float:
    inside = LARGEST_ERROR_EPS_32 * torch.finfo(torch.float32).eps
    return inside + (LARGEST_ERROR_EPS * torch.finfo(dtype).eps if op == "softmax" else 0.0)


def queued(call: Callable[[int], Any], host_us: float, warm_ms: float, timed_ms: float) -> Timing:
    """Times call(i), each between two events, in batches that wait in the GPU's queue until they are complete."""
    once = median(_batch(call, host_us, 10))
    batches = lambda ms: range(min(max(1, round(ms / once / BATCH)), MOST_BATCHES))
    for _ in batches(warm_ms):
        _batch(call, host_us, BATCH)
    milliseconds = [ms for _ in batches(timed_ms) for ms in _batch(call, host_us, BATCH)]
    return Timing(milliseconds)


def _batch(call: Callable[[int], Any], host_us: float, count: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda._sleep(round(2 * (host_us + EVENTS_US) * CYCLES_A_MICROSECOND) * count)
    for i, (start, end) in enumerate(events):
        start.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def host_microseconds(call: Callable[[int], Any]) -> float:
    """Median time until a call returns, the GPU idle before each: what a small problem costs whatever the kernel."""
    seconds = []
    for i in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - start)
    return 1e6 * median(seconds)


def measure_cell(
    op: str, calls: dict[str, Call], shape: tuple[int, int], dtype: torch.dtype, absent: dict[str, str]
) -> dict[str, tuple[Timing, float, float]]:
    """(timing, error, host microseconds) of each provider that is right; the others' reasons go into `absent`."""
    one_set = 2 * shape[0] * shape[1] * torch.finfo(dtype).bits // 8
    sets = [
        (
            torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype),
            torch.empty(shape, device="cuda", dtype=dtype),
        )
        for _ in range(max(2, -(-CACHE_BYTES // one_set)))
    ]
    done: dict[str, tuple[Timing, float, float]] = {}
    for name, call in calls.items():
        try:
            out = call(*sets[0])
            error = 0.0 if name in YARDSTICKS else relative_error(op, out, sets[0][0])
        except Exception as refusal:
            absent[name] = in_a_line(refusal)
            continue
        if not error <= largest_error(op, dtype):
            absent[name] = f"wrong: relative error {error:.2e}"
            continue
        done[name] = Timing(), error, host_microseconds(lambda i, call=call: call(*sets[i % len(sets)]))  # type: ignore
    for order in (list(done), list(done)[::-1]):
        for name in order:
            run = lambda i, call=calls[name]: call(*sets[i % len(sets)])
            done[name][0].add(queued(run, done[name][2], WARM_MS, TIMED_MS))
    return done


def rows_of(
    cell: dict[str, Any], moved: int, name: str, timing: Timing, error: float, host: float
) -> list[dict[str, Any]]:
    rate = lambda share: f"{moved / timing.quantile(share) / 1e6:.0f}"
    row = {**cell, "provider": name}
    rows = [
        {**row, "metric": "gbps", "median": rate(0.5), "p20": rate(0.8), "p80": rate(0.2)},
        {**row, "metric": "host_us", "median": f"{host:.1f}"},
    ]
    if name not in YARDSTICKS:
        rows.append({**row, "metric": "relative_error", "median": f"{error:.2e}"})
    return rows


def ready(providers: dict[str, Callable[[], Call]], chosen: Sequence[str] | None) -> tuple[dict[str, Call], dict]:
    """The providers that can be had, and for the others why not."""
    calls, missing = {}, {}
    for name, make in providers.items():
        if chosen is None or name in chosen:
            try:
                calls[name] = make()
            except Exception as reason:
                missing[name] = in_a_line(reason)
    return calls, missing


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("softmax", __doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--cells", nargs="+", default=[f"{rows}x{cols}" for rows, cols in CELLS], help="rows x columns")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--providers", nargs="+", choices=sorted({*SOFTMAX, *STATS}))
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/softmax.csv")
    options = parser.parse_args(argv)
    need_gpu(parser)
    out = options.out or results_of() / "softmax.csv"
    torch.manual_seed(0)
    shapes = [tuple(int(n) for n in cell.split("x")) for cell in options.cells]
    cells = [(op, dtype, shape) for op in options.ops for dtype in options.dtypes for shape in shapes]
    provenance, rows = row_provenance("cuda"), []
    made = {op: ready(OPS[op], options.providers) for op in options.ops}
    for op, (_, missing) in made.items():
        for name, why in missing.items():
            rows.append({**provenance, "op": op, "provider": name, "metric": "absent", "median": why})
            print(f"absent: {op}: {name}: {why}")
    with Progress(len(cells)) as bar:
        for number, (op, dtype, shape) in enumerate(cells):
            bar.show(number, f"{op} {dtype} {shape[0]} x {shape[1]}")
            cell = {**provenance, "op": op, "rows": shape[0], "cols": shape[1], "dtype": dtype}
            absent: dict[str, str] = {}
            done = measure_cell(op, made[op][0], shape, DTYPES[dtype], absent)  # type: ignore[arg-type]
            moved = (2 if op == "softmax" else 1) * shape[0] * shape[1] * torch.finfo(DTYPES[dtype]).bits // 8
            for name, measured in done.items():
                rows += rows_of(cell, moved, name, *measured)
            rows += [{**cell, "provider": n, "metric": "absent", "median": why} for n, why in absent.items()]
            text = ", ".join(f"{n} {moved / t.quantile(0.5) / 1e6:.0f}" for n, (t, _, _) in done.items())
            print(f"{op} {dtype} {shape[0]} x {shape[1]}: {text}", flush=True)
            write_rows(out, rows, columns())
    print(f"rows: {out}")


def columns() -> list[str]:
    """Those of all benchmarks, with the rows and columns of a matrix before its dtype."""
    at = COLUMNS.index("dtype")
    return [*COLUMNS[:at], "rows", "cols", *COLUMNS[at:]]


if __name__ == "__main__":
    main()
