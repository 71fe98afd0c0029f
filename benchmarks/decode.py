"""Speed of decoding on a GPU, beside what else is there and a pure read of the same bytes, all in one process.

python -m benchmarks.decode [--cells 1x8192 8x8192x16 ...] [--providers ...] [--out CSV]

A cell is batch x keys [x query tokens]; 32 query heads, 8 key heads, head dim 128, bf16, a full cache, causal. In each
cell every provider is first checked against float64; one that is wrong is not timed. Then each is captured in a CUDA
graph, as decoding runs in practice, of enough calls that the graph's own launch does not count, with inputs rotated
past the L2 cache. Two rounds, the second in opposite order: 150 ms of warm-up, then 80 ms timed.
`read` is benchmarks/read.py's kernel on the bytes of K and V; `flashattn_lite-paged` reads pages of 16 keys in a random
order. Rows of metric gbps (K and V read; median, p20, p80 over replays), host_us (of one call without a graph),
sm_mhz, watts and relative_error; a provider that can't be imported or refuses the problem has a row of metric absent,
with the reason as its value.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import flashattn_lite
from benchmarks.attention import CACHE_BYTES, LARGEST_ERROR_EPS, TIMED_MS, WARM_MS
from benchmarks.command import need_gpu, parser_of
from benchmarks.progress import Progress
from benchmarks.provenance import results_of, row_provenance, write_rows
from benchmarks.providers import Provider, compiled_flex, flash_attention, flash_attention_3, importable
from benchmarks.timing import Timing, median, sustained

HEADS_Q, HEADS_KV, DIM, PAGE = 32, 8, 128, 16
CELLS = ("1x1024", "1x1024x4", "1x1024x16", "1x2048", "1x4096", "1x4096x4", "1x4096x16", "1x8192", "1x32768",
         "1x131072", "4x8192x16", "8x2048x16", "8x4096x16", "8x8192", "8x8192x4", "8x8192x16", "16x2048", "64x512",
         "64x1024x16", "64x8192")  # fmt: skip
GRAPH_MS = 1.0  # of calls in one graph at least, at the speed of a read: its launch takes a few microseconds
READ_BYTES_PER_MS = 4.5e9


@dataclass
class Data:
    """One set of inputs; K and V lie behind one another. Pages only where a provider asks for them."""

    q: Tensor
    kv: Tensor  # [2, B, Hkv, S, D]
    lens: Tensor
    table: Tensor  # [B, S / PAGE]
    pages: tuple[Tensor, Tensor] | None = None

    @property
    def k(self) -> Tensor:
        return self.kv[0]

    @property
    def v(self) -> Tensor:
        return self.kv[1]


Call = Callable[[Data], Tensor]
Measured = tuple[list[dict[str, Any]], list[str]]  # rows of a cell; the speed of each provider, to print
Measure = Callable[[dict[str, Any], tuple[int, int, int], dict[str, str]], Measured]  # (cell, its sizes, absent)


def make_data(batch: int, keys: int, tokens: int, paged: bool) -> Data:
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, HEADS_Q, tokens, DIM, **bf16)  # type: ignore[call-overload]
    kv = torch.randn(2, batch, HEADS_KV, keys, DIM, **bf16)  # type: ignore[call-overload]
    lens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    order = torch.randperm(batch * keys // PAGE, device="cuda")
    pages = None
    if paged:
        k_pages, v_pages = (
            torch.empty_like(x.view(-1, HEADS_KV, PAGE, DIM)).index_copy_(
                0, order, x.unflatten(2, (-1, PAGE)).movedim(2, 1).flatten(0, 1)
            )
            for x in kv
        )
        pages = k_pages, v_pages
    return Data(q, kv, lens, order.view(batch, -1).to(torch.int32), pages)


def ours(data: Data) -> Tensor:
    return flashattn_lite.attention_decode(data.q, data.k, data.v, data.lens)


def ours_paged(data: Data) -> Tensor:
    assert data.pages is not None
    return flashattn_lite.attention_decode(data.q, *data.pages, data.lens, block_table=data.table)


def sdpa(backend: SDPBackend) -> Call:
    def call(data: Data) -> Tensor:
        tokens, keys = data.q.shape[2], data.kv.shape[3]
        mask = None if tokens == 1 else causal_lower_right(tokens, keys)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(data.q, data.k, data.v, attn_mask=mask, enable_gqa=True)

    return call


def flex() -> Call:
    from torch.nn.attention.flex_attention import create_block_mask

    compiled = compiled_flex()
    masks: dict[tuple[int, int], Any] = {}

    def call(data: Data) -> Tensor:
        tokens, keys = data.q.shape[2], data.kv.shape[3]
        if (tokens, keys) not in masks:  # for one token too: it splits the keys at blocks of a mask only
            rule = lambda b, h, i, j: i + (keys - tokens) >= j
            masks[tokens, keys] = create_block_mask(rule, None, None, tokens, keys)
        return compiled(data.q, data.k, data.v, block_mask=masks[tokens, keys], enable_gqa=True)

    return call


def flash(make: Callable[[], Provider]) -> Call:
    call = make().call
    return lambda data: call(data.q, data.k, data.v, True)


def pure_read() -> Call:
    from benchmarks.read import read

    return lambda data: read(data.kv.view(-1).view(torch.int32))


PROVIDERS: dict[str, Callable[[], Call]] = {
    "flashattn_lite": lambda: ours,
    "flashattn_lite-paged": lambda: ours_paged,
    "read": pure_read,
    "sdpa-cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
    "flex": flex,
    "fa2": lambda: flash(lambda: flash_attention("flash_attn")),
    "fa3": lambda: flash(lambda: flash_attention_3(splits=0)),
    "fa4": lambda: flash(lambda: flash_attention("flash_attn.cute")),
}


def relative_error(call: Call, data: Data) -> float:
    """Norm of the error against float64, over the norm, on all rows of the first and last head."""
    out = call(data)
    batch, heads, tokens, _ = data.q.shape
    keys = data.kv.shape[3]
    wrong = right = 0.0
    for b, h in ((0, 0), (batch - 1, heads - 1)):
        k, v = (x[b, h // (HEADS_Q // HEADS_KV)].double() for x in data.kv)
        scores = data.q[b, h].double() @ k.T / DIM**0.5
        hidden = torch.arange(keys, device="cuda") > torch.arange(keys - tokens, keys, device="cuda")[:, None]
        exact = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v
        wrong += (out[b, h].double() - exact).square().sum().item()
        right += exact.square().sum().item()
    return (wrong / right) ** 0.5


def captured(call: Call, sets: list[Data], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls over the rotating sets; everything is compiled and warm before it is captured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for data in sets:
            call(data)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(sets[i % len(sets)])
    return graph


def host_microseconds(call: Call, data: Data) -> float:
    times = []
    for _ in range(30):
        start = time.perf_counter()
        call(data)
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


@dataclass
class Result:
    timing: Timing
    error: float
    host_us: float
    graph: torch.cuda.CUDAGraph


def measure_cell(
    providers: dict[str, Call], batch: int, keys: int, tokens: int, absent: dict[str, str]
) -> tuple[dict[str, Result], float]:
    """The result of each provider that is right, and the bytes of K and V that one of its replays reads."""
    size = 2 * batch * HEADS_KV * keys * DIM * 2
    count = max(2, -(-CACHE_BYTES // size))
    sets = [make_data(batch, keys, tokens, "flashattn_lite-paged" in providers) for _ in range(count)]
    calls = count * max(1, round(GRAPH_MS * READ_BYTES_PER_MS / (size * count)))
    done: dict[str, Result] = {}
    for name, call in providers.items():
        try:
            error = 0.0 if name == "read" else relative_error(call, sets[0])
            if not error <= LARGEST_ERROR_EPS * torch.finfo(torch.bfloat16).eps:
                absent[name] = f"wrong: relative error {error:.2e}"
                continue
            host = host_microseconds(call, sets[0])
            done[name] = Result(Timing(), error, host, captured(call, sets, calls))
        except Exception as refusal:
            absent[name] = f"{type(refusal).__name__}: {(str(refusal) or '-').splitlines()[0][:120]}"
    replay_in_turn({name: (result.graph, result.timing) for name, result in done.items()})
    return done, size * calls


def replay_in_turn(graphs: dict[str, tuple[torch.cuda.CUDAGraph, Timing]]) -> None:
    """Two rounds over all graphs, the second in opposite order; adds each one's replays to its timing."""
    for order in (list(graphs), list(graphs)[::-1]):
        for name in order:
            graph, timing = graphs[name]
            timing.add(sustained(lambda _, graph=graph: graph.replay(), WARM_MS, TIMED_MS))  # type: ignore[misc]


def rows_of(cell: dict[str, Any], size: float, name: str, result: Result) -> list[dict[str, Any]]:
    timing, row = result.timing, {**cell, "provider": name}
    rate = lambda share: f"{size / timing.quantile(share) / 1e6:.0f}"
    rows = [
        {**row, "metric": "gbps", "median": rate(0.5), "p20": rate(0.8), "p80": rate(0.2)},
        {**row, "metric": "host_us", "median": f"{result.host_us:.0f}"},
    ]
    if name != "read":
        rows.append({**row, "metric": "relative_error", "median": f"{result.error:.2e}"})
    if timing.joules:
        rows.append({**row, "metric": "sm_mhz", "median": f"{median(timing.megahertz):.0f}"})
        rows.append({**row, "metric": "watts", "median": f"{timing.watts:.0f}"})
    return rows


def parse_cell(text: str) -> tuple[int, int, int]:
    batch, keys, *tokens = (int(part) for part in text.split("x"))
    return batch, keys, tokens[0] if tokens else 1


def options_of(name: str, doc: str | None, cells: Sequence[str], providers: Iterable[str], argv: Any) -> Any:
    """The command line of a benchmark of such cells."""
    parser = parser_of(name, doc)
    parser.add_argument("--cells", nargs="+", default=list(cells), help="batch x keys [x query tokens]")
    parser.add_argument("--providers", nargs="+", choices=providers, default=list(providers))
    parser.add_argument("--out", type=Path, help=f"default: benchmarks/results/<GPU>/{name}.csv")
    options = parser.parse_args(argv)
    need_gpu(parser)
    options.out = options.out or results_of() / f"{name}.csv"
    return options


def run(cells: Sequence[str], missing: dict[str, str], out: Path, measure: Measure) -> None:
    """Measures cell after cell; the rows so far are written after each."""
    torch.manual_seed(0)
    common = {**row_provenance("cuda"), "op": "attention_decode"}
    absent_of = lambda cell, why: [{**cell, "provider": n, "metric": "absent", "median": w} for n, w in why.items()]
    rows: list[dict[str, Any]] = absent_of(common, missing)
    with Progress(len(cells)) as bar:
        for number, text in enumerate(cells):
            bar.show(number, text)
            batch, keys, tokens = parse_cell(text)
            cell = {**common, "batch": batch, "heads_q": HEADS_Q, "heads_kv": HEADS_KV, "len_q": tokens, "len_kv": keys,
                    "head_dim": DIM, "head_dim_v": DIM, "dtype": "bf16", "causal": True}  # fmt: skip
            absent: dict[str, str] = {}
            measured, speeds = measure(cell, (batch, keys, tokens), absent)
            rows += measured + absent_of(cell, absent)
            print(f"batch {batch}, {keys} keys, {tokens} tokens: {', '.join(speeds)}", flush=True)
            for name, why in absent.items():
                print(f"  absent: {name}: {why}", flush=True)
            write_rows(out, rows)
            torch.cuda.empty_cache()
    for name, why in missing.items():
        print(f"absent: {name}: {why}")
    print(f"rows: {out}")


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of("decode", __doc__, CELLS, PROVIDERS, argv)
    made, missing = importable({name: PROVIDERS[name] for name in options.providers})

    def measure(cell: dict[str, Any], sizes: tuple[int, int, int], absent: dict[str, str]) -> Measured:
        done, size = measure_cell(made, *sizes, absent)
        rows = [row for name, result in done.items() for row in rows_of(cell, size, name, result)]
        return rows, [f"{name} {size / r.timing.quantile(0.5) / 1e6:.0f} GB/s" for name, r in done.items()]

    run(options.cells, missing, options.out, measure)


if __name__ == "__main__":
    main()
