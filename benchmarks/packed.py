"""Speed of attention over packed sequences on a GPU, beside what else is there, all in one process.

python -m benchmarks.packed [--packings 32x512 8x2048 mixed] [--head-dims 64 128] [--providers ...] [--out CSV]

16k tokens of self-attention, hidden size 2048, bf16. `32x512` and `8x2048` are sequences of one length; `mixed` is what
practice looks like: 33 sequences of 16 to 3628 tokens, median 235 (log-normal, drawn from a fixed seed). Everyone is
told the longest length, so that no call waits for the GPU to learn it.
In each cell every provider is first checked against float64 on sampled rows of the first, the longest and the last
sequence; one that is wrong is not timed. Then two rounds, the second in opposite order: each provider runs 150 ms of
its own kernel, then 80 ms are timed, with inputs rotated past the L2 cache. FLOPs = 4 H D times the sum of the squared
lengths, half of it for causal: what a provider computes of padding does not count.
`sdpa-padded` is torch's attention on sequences padded to the longest one, as without packing, with a mask of the padded
keys unless it is causal; padding and unpadding are not timed, nor is the making of the block mask of `flex`.
Rows of metric tflops (median, p20, p80 over calls), sm_mhz, watts, tflop_per_joule and relative_error; a provider that
can't be imported or refuses the problem has a row of metric absent, with the reason as its value. batch is the number
of sequences, len_q and len_kv the longest length.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention import HIDDEN, TOKENS, Sample, measure_cell, print_cell, rotating_sets, rows_of
from benchmarks.command import need_gpu, parser_of, positive
from benchmarks.packed_providers import PACKED, pack
from benchmarks.progress import Progress
from benchmarks.provenance import COLUMNS, results_of, row_provenance, write_rows
from benchmarks.providers import importable


def mixed() -> list[int]:
    """Log-normal lengths around 192, from 16 to 8192; the last sequence takes what is left of the tokens."""
    draw = random.Random(0)
    lengths: list[int] = []
    while left := TOKENS - sum(lengths):
        lengths.append(min(left, 8192, max(16, round(draw.lognormvariate(math.log(192), 1.75)))))
    return lengths


PACKINGS = {"32x512": [512] * 32, "8x2048": [2048] * 8, "mixed": mixed()}


def flop_of(lengths: Sequence[int], heads: int, head_dim: int, causal: bool) -> float:
    return 4 * heads * head_dim * sum(length**2 for length in lengths) * (0.5 if causal else 1)


def sampled(lengths: Sequence[int]) -> Sample:
    """The first and last head of the first, the longest and the last sequence."""
    places = list(pairwise([0, *accumulate(lengths)]))
    chosen = sorted({places[0], max(places, key=lambda place: place[1] - place[0]), places[-1]})
    return lambda x: [x[begin:end, head] for begin, end in chosen for head in (0, -1)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("packed", __doc__)
    parser.add_argument("--packings", nargs="+", choices=PACKINGS, default=list(PACKINGS))
    parser.add_argument("--head-dims", nargs="+", type=positive, default=[64, 128])
    parser.add_argument("--providers", nargs="+", choices=PACKED, default=list(PACKED))
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/packed.csv")
    options = parser.parse_args(argv)
    need_gpu(parser)
    out = options.out or results_of() / "packed.csv"
    made, missing = importable({name: PACKED[name] for name in options.providers})
    torch.manual_seed(0)
    common = {**row_provenance("cuda"), "op": "attention_varlen"}
    rows: list[dict[str, Any]] = [
        {**common, "provider": name, "metric": "absent", "median": why} for name, why in missing.items()
    ]
    cells = list(product(options.packings, options.head_dims, (True, False)))
    with Progress(len(cells)) as bar:
        for number, (name, dim, causal) in enumerate(cells):
            kind = "causal" if causal else "full"
            bar.show(number, f"{name} head dim {dim} {kind}")
            packing, heads = pack(PACKINGS[name], "cuda"), HIDDEN // dim
            lengths, longest = packing.lengths, packing.longest
            cell = {**common, "batch": len(lengths), "heads_q": heads, "heads_kv": heads, "len_q": longest,
                    "len_kv": longest, "packing": name, "head_dim": dim, "head_dim_v": dim, "dtype": "bf16",
                    "causal": causal}  # fmt: skip
            absent: dict[str, str] = {}
            providers = {provider: of(packing) for provider, of in made.items()}
            sets = rotating_sets((sum(lengths), heads, dim), torch.bfloat16, packing.cu_seqlens.device)
            done = measure_cell(providers, sets, causal, sampled(lengths), absent)
            flop = flop_of(lengths, heads, dim, causal)
            for provider, (timing, error) in done.items():
                rows += rows_of(cell, flop, provider, timing, error)
            rows += [{**cell, "provider": n, "metric": "absent", "median": why} for n, why in absent.items()]
            spread = f"{len(lengths)} sequences, median {statistics.median(lengths):g}, longest {longest}"
            print_cell(f"{name} ({spread}) d{dim} {kind}", done, flop)
            write_rows(out, rows, columns())
    for name, why in missing.items():
        print(f"absent: {name}: {why}")
    print(f"rows: {out}")


def columns() -> list[str]:
    """Those of all benchmarks, with the packing's name behind the lengths."""
    at = COLUMNS.index("len_kv") + 1
    return [*COLUMNS[:at], "packing", *COLUMNS[at:]]


if __name__ == "__main__":
    main()
