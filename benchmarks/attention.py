"""Speed of the attention forward on a GPU, beside what else is there, all in one process.

python -m benchmarks.attention [--dtypes bf16 fp16] [--head-dims 64 128 256] [--lengths 512 ... 16384] [--out CSV]
python -m benchmarks.attention --profile [sm_90]    what our kernels take of that GPU, compiled offline: no GPU needed

16k tokens in all, hidden size 2048. In each cell every provider is first checked against float64 on sampled rows; one
that is wrong is not timed. Then two rounds, the second in opposite order: each provider runs 150 ms of its own kernel,
then 80 ms are timed, with inputs rotated past the L2 cache. FLOPs = 4 B H L S D, half of it for causal.
Rows of metric tflops (median, p20, p80 over calls), sm_mhz, watts, tflop_per_joule and relative_error; a provider that
can't be imported or refuses the problem has a row of metric absent, with the reason as its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import need_gpu, parser_of, positive
from benchmarks.progress import Progress
from benchmarks.provenance import DTYPES, RESULTS, results_of, row_provenance, write_rows
from benchmarks.providers import PROVIDERS, Provider, importable, in_a_line
from benchmarks.timing import Timing, median, sustained

TOKENS, HIDDEN = 16384, 2048
CACHE_BYTES = 192 << 20  # inputs rotate over at least three times an H200's L2
WARM_MS, TIMED_MS = 150.0, 80.0
# Relative norm against float64 on sampled rows. Fused peers are at a quarter of eps; at one eps something is wrong.
LARGEST_ERROR_EPS = 1.0

QKV = tuple[Tensor, Tensor, Tensor]
# Of an output or an input, those heads of those sequences that are checked: (length, dim) each.
Sample = Callable[[Tensor], list[Tensor]]


def relative_error(out: Tensor, qkv: QKV, causal: bool, sample: Sample) -> float:
    """Norm of the error against float64, over the norm, on 64 rows of each sampled head."""
    wrong = right = 0.0
    for o, q, k, v in zip(*map(sample, (out, *qkv)), strict=True):
        rows = torch.linspace(0, len(q) - 1, 64, device=q.device).long()
        scores = q[rows].double() @ k.double().T / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.arange(len(k), device=q.device) > rows[:, None], float("-inf"))
        exact = torch.softmax(scores, -1) @ v.double()
        wrong += (o[rows].double() - exact).square().sum().item()
        right += exact.square().sum().item()
    return (wrong / right) ** 0.5


def rotating_sets(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cuda") -> list[QKV]:
    """As many q, k and v as don't fit the L2 cache together."""
    random = lambda: torch.randn(shape, device=device, dtype=dtype)
    one_set = 3 * dtype.itemsize * math.prod(shape)
    return [(random(), random(), random()) for _ in range(max(2, -(-CACHE_BYTES // one_set)))]


def measure_cell(
    providers: dict[str, Provider], sets: list[QKV], causal: bool, sample: Sample, absent: dict[str, str]
) -> dict[str, tuple[Timing, float]]:
    """(timing, error) of each provider that is right; the others' reasons go into `absent`."""
    largest = LARGEST_ERROR_EPS * torch.finfo(sets[0][0].dtype).eps
    done: dict[str, tuple[Timing, float]] = {}
    inputs: dict[str, list[QKV]] = {}
    for name, provider in providers.items():
        try:
            laid = [(provider.lay(q), provider.lay(k), provider.lay(v)) for q, k, v in sets]
            with provider.setting():
                out = provider.call(*laid[0], causal)
            error = relative_error(provider.unlay(out), sets[0], causal, sample)
        except Exception as refusal:
            absent[name] = in_a_line(refusal)
            continue
        if not error <= largest:
            absent[name] = f"wrong: relative error {error:.2e}"
            continue
        done[name], inputs[name] = (Timing(), error), laid
    for order in (list(done), list(done)[::-1]):
        for name in order:
            run = lambda i, call=providers[name].call, laid=inputs[name]: call(*laid[i % len(laid)], causal)
            with providers[name].setting():
                done[name][0].add(sustained(run, WARM_MS, TIMED_MS))
    return done


def rows_of(cell: dict[str, Any], flop: float, name: str, timing: Timing, error: float) -> list[dict[str, Any]]:
    rate = lambda milliseconds: flop / milliseconds / 1e9
    row = {**cell, "provider": name}
    tflops = rate(timing.quantile(0.5))
    rows = [
        {**row, "metric": "tflops", "median": f"{tflops:.1f}",
         "p20": f"{rate(timing.quantile(0.8)):.1f}", "p80": f"{rate(timing.quantile(0.2)):.1f}"},
        {**row, "metric": "relative_error", "median": f"{error:.2e}"},
    ]  # fmt: skip
    if timing.joules:
        rows.append({**row, "metric": "sm_mhz", "median": f"{median(timing.megahertz):.0f}"})
        rows.append({**row, "metric": "watts", "median": f"{timing.watts:.0f}"})
        rows.append({**row, "metric": "tflop_per_joule", "median": f"{flop / 1e12 / timing.joules_per_call:.3f}"})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("attention", __doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--head-dims", nargs="+", type=positive, default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=positive, default=[512, 1024, 2048, 4096, 16384])
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/attention[_profile].csv")
    parser.add_argument("--profile", nargs="?", const="sm_90", choices=("sm_80", "sm_90", "sm_100"),
                        help="what our kernels take of that GPU (default sm_90), from an offline compile")  # fmt: skip
    options = parser.parse_args(argv)
    cells = [
        (dtype, dim, causal, length)
        for dtype in options.dtypes for dim in options.head_dims for causal in (True, False)
        for length in options.lengths
    ]  # fmt: skip
    if options.profile:
        folder = "h200" if options.profile == "sm_90" else options.profile  # whatever GPU is here: none is asked
        profile_cells(options.profile, cells, options.out or RESULTS / folder / "attention_profile.csv")
        return
    need_gpu(parser, "; on the CPU, python -m benchmarks.cpu")
    out = options.out or results_of() / "attention.csv"
    providers, missing = importable({name: PROVIDERS[name] for name in options.providers})
    torch.manual_seed(0)
    provenance = row_provenance("cuda")
    rows: list[dict[str, Any]] = [
        {**provenance, "op": "attention_forward", "provider": name, "metric": "absent", "median": why}
        for name, why in missing.items()
    ]
    with Progress(len(cells)) as bar:
        for number, (dtype, dim, causal, length) in enumerate(cells):
            bar.show(number, f"{dtype} head dim {dim} length {length} {'causal' if causal else 'full'}")
            heads, batch = HIDDEN // dim, max(1, TOKENS // length)
            cell = {**provenance, "op": "attention_forward", "batch": batch, "heads_q": heads, "heads_kv": heads,
                    "len_q": length, "len_kv": length, "head_dim": dim, "head_dim_v": dim, "dtype": dtype,
                    "causal": causal}  # fmt: skip
            absent: dict[str, str] = {}
            sets = rotating_sets((batch, heads, length, dim), DTYPES[dtype])
            done = measure_cell(providers, sets, causal, lambda x: [x[0, 0], x[-1, -1]], absent)
            flop = 4 * batch * heads * length * length * dim * (0.5 if causal else 1)
            for name, (timing, error) in done.items():
                rows += rows_of(cell, flop, name, timing, error)
            rows += [{**cell, "provider": n, "metric": "absent", "median": why} for n, why in absent.items()]
            print_cell(f"{dtype} d{dim} {'causal' if causal else 'full'} {length}", done, flop)
            write_rows(out, rows)
    for name, why in missing.items():
        print(f"absent: {name}: {why}")
    print(f"rows: {out}")


def profile_cells(gpu: str, cells: list[tuple[str, int, bool, int]], out: Path) -> None:
    from benchmarks import profile  # imports Triton

    profile.write(gpu, cells, HIDDEN, out)


def print_cell(title: str, done: dict[str, tuple[Timing, float]], flop: float) -> None:
    parts = []
    for name, (timing, _) in done.items():
        rate = flop / timing.quantile(0.5) / 1e9
        joules = timing.joules_per_call
        energy = f", {flop / 1e12 / joules:.2f} TFLOP/J" if joules else ""
        parts.append(f"{name} {rate:.0f} ({median(timing.megahertz):.0f} MHz{energy})")
    print(f"{title}: " + ", ".join(parts), flush=True)


if __name__ == "__main__":
    main()
