"""How long a process's first call of attention takes, with nothing compiled yet and with what another one compiled.

python -m benchmarks.first_call [--backward] [--head-dims 64 128 256] [--lengths 512 4096] [--repeats 3]
                                [--providers ...] [--out CSV]

Each time is that of a process of its own, one at a time: bf16, causal, 16k tokens, hidden size 2048. Torch and the
provider's module are imported and the GPU is in use before the clock starts; what a call itself still imports, compiles
and loads counts, until its result is there. A process that found nothing compiled comes first, in a folder of its own
for what is kept; the next process finds that folder full.
Rows of seconds (median, least and most over the repeats in the columns median, p20, p80): first_s with nothing
compiled, again_s with it. Of ours also what Triton says that its steps took, once, in one more process with nothing
compiled: walk_s (Python walks over the kernel's source), then the stages by their names (ttgir_s, llir_s, ptx_s,
cubin_s). With --backward the time is that of a first training step, forward and backward, and has no steps.
Python keeps its bytecode from one process to the next, so that only a machine's first one reads sources of modules.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention import HIDDEN, TOKENS
from benchmarks.command import need_gpu, parser_of, positive
from benchmarks.progress import Progress
from benchmarks.provenance import ROOT, results_of, row_provenance, write_rows
from benchmarks.providers import PROVIDERS, in_a_line

NAMES = ("flashattn_lite", "flex")
KEPT = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # where a process looks for what another one compiled
LARGEST_ERROR = 2.0**-7  # relative norm against torch's own; bf16's eps


def listen() -> dict[str, float]:
    """Seconds that Triton compiles from here on, by step."""
    from triton import knobs

    seconds: dict[str, float] = {}

    def add(*, times: Any, cache_hit: bool, **_: Any) -> None:
        steps = [] if cache_hit else [("walk", times.ir_initialization), *times.lowering_stages]
        for name, microseconds in steps:
            seconds[f"{name}_s"] = seconds.get(f"{name}_s", 0.0) + microseconds / 1e6

    knobs.compilation.listener = add
    return seconds


def first_call(name: str, dim: int, length: int, backward: bool, steps: bool) -> dict[str, float]:
    """In this process: seconds of the call, or of Triton's steps. What comes of it is checked afterwards."""
    provider = PROVIDERS[name]()
    heads = HIDDEN // dim
    q, k, v = (
        provider.lay(torch.randn(TOKENS // length, heads, length, dim, device="cuda", dtype=torch.bfloat16))
        for _ in range(3)
    )
    d_out = torch.randn_like(q)
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]
    by_step = listen() if steps else {}  # which imports Triton ahead of the call
    with provider.setting():
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = provider.call(q, k, v, True)
        # From a number, as of a loss: to be given a gradient, torch imports sympy.
        grads = torch.autograd.grad((out * d_out).sum(), inputs) if backward else ()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    q, k, v, d_out = (provider.unlay(x.detach())[:1].float().requires_grad_(backward) for x in (q, k, v, d_out))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    wants = [want, *(torch.autograd.grad(want, (q, k, v), d_out) if backward else ())]
    for x, right in zip((out, *grads), wants, strict=True):
        error = ((provider.unlay(x)[:1].float() - right).norm() / right.norm()).item()
        if not error <= LARGEST_ERROR:
            raise ArithmeticError(f"wrong: relative error {error:.2e}")
    return by_step if steps else {"s": seconds}


def in_a_process(folder: str, *args: Any) -> dict[str, float]:
    """`first_call(*args)` in a fresh process that keeps in that folder what it compiles."""
    code = f"import json; from benchmarks.first_call import first_call; print(json.dumps(first_call(*{args!r})))"
    variables = os.environ | {variable: str(Path(folder) / variable) for variable in KEPT}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"status {done.returncode}").splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, dim: int, length: int, backward: bool, repeats: int) -> dict[str, list[float]]:
    """Seconds of each metric, one a repeat."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for metric in ("first_s", "again_s"):
                found.setdefault(metric, []).append(in_a_process(folder, name, dim, length, backward, False)["s"])
    if name == "flashattn_lite" and not backward:
        with tempfile.TemporaryDirectory() as folder:
            found |= {step: [seconds] for step, seconds in in_a_process(folder, name, dim, length, False, True).items()}
    return found


def rows_of(name: str, dim: int, length: int, backward: bool, repeats: int) -> list[dict[str, Any]]:
    heads = HIDDEN // dim
    cell: dict[str, Any] = {
        "op": "first_step" if backward else "first_call", "provider": name, "batch": TOKENS // length,
        "heads_q": heads, "heads_kv": heads, "len_q": length, "len_kv": length, "head_dim": dim, "head_dim_v": dim,
        "dtype": "bf16", "causal": True,
    }  # fmt: skip
    try:
        found = measure(name, dim, length, backward, repeats)
    except Exception as reason:
        return [cell | {"metric": "absent", "median": in_a_line(reason)}]
    rows = []
    for metric, seconds in found.items():
        ordered = sorted(seconds)
        low, middle, high = (f"{x:.2f}" for x in (ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]))
        rows.append(cell | {"metric": metric, "median": middle, "p20": low, "p80": high})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("first_call", __doc__)
    parser.add_argument("--backward", action="store_true", help="the first training step")
    parser.add_argument("--head-dims", nargs="+", type=positive, default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=positive, default=[512, 4096])
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(NAMES))
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/first_call.csv, or first_step.csv")
    options = parser.parse_args(argv)
    need_gpu(parser, ": without one nothing is compiled")
    out = options.out or results_of() / ("first_step.csv" if options.backward else "first_call.csv")
    provenance = row_provenance("cuda")
    rows: list[dict[str, Any]] = []
    cells = list(itertools.product(options.head_dims, options.lengths, options.providers))
    with Progress(len(cells)) as bar:
        for done, (dim, length, name) in enumerate(cells):
            bar.show(done, f"{name}, head dim {dim}, {length} keys")
            found = rows_of(name, dim, length, options.backward, options.repeats)
            told = ", ".join(f"{row['metric']} {row['median']}" for row in found)
            print(f"d{dim} {length}: {name} {told}", flush=True)
            rows += [{**provenance, **row} for row in found]
            write_rows(out, rows)
    print(f"rows: {out}")


if __name__ == "__main__":
    main()
