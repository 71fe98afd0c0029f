"""Attention on the CPU and its gradients, ours and torch's, in turn in one process: `python -m benchmarks.cpu`.

`--beside N`: while N other processes multiply matrices with as many threads as there are cores.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import flashattn_lite
from benchmarks.command import parser_of, positive
from benchmarks.provenance import results_of, row_provenance, write_rows

THREADS = 2
SHAPES = [(1, 8, length, 64) for length in (1024, 2048, 4096, 8192)] + [(32, 8, 128, 32)]  # batch, heads, length, dim
OPS = ("forward", "forward+backward")
ROUNDS = 7


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flashattn_lite.attention(q, k, v, causal=causal, backend="tiled")


Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
PROVIDERS: dict[str, Attention] = {
    "flashattn_lite": ours,
    "torch": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
}


def check(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """What is timed is checked first: the last rows, and their gradients, against the definition in float64."""
    rows = min(64, q.shape[2])
    q_exact, k_exact, v_exact = (x.double().requires_grad_() for x in (q[:, :, -rows:], k, v))
    scores = q_exact @ k_exact.mT / q.shape[3] ** 0.5
    if causal:
        hidden = torch.ones(rows, k.shape[2], dtype=torch.bool).triu(k.shape[2] - rows + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out_exact = scores.softmax(-1) @ v_exact
    upstream = torch.zeros_like(q)
    upstream[:, :, -rows:] = torch.randn(out_exact.shape)
    grads = torch.autograd.grad(out_exact, (q_exact, k_exact, v_exact), upstream[:, :, -rows:].double())
    for name, attention in PROVIDERS.items():
        out, (dq, *others) = with_gradients(attention, q, k, v, causal, upstream)
        # float32 sums of weights that add up to 1 and values of size 5 err by some 1e-6.
        pairs = zip((out[:, :, -rows:], dq[:, :, -rows:], *others), (out_exact, *grads), strict=True)
        errors = [(x - y).abs().max().item() for x, y in pairs]
        assert max(errors) < 1e-5, f"{name} is wrong by {errors} in out, dq, dk, dv"


def with_gradients(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, causal: bool, upstream: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """out, and (dq, dk, dv) of sum(out * upstream)."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, causal)
    return out, torch.autograd.grad(out, (q, k, v), upstream)


def measure(op: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, list[float]]:
    """Milliseconds by provider, one sample a round, the providers in turn."""
    upstream = torch.randn(*q.shape[:-1], v.shape[-1])
    samples: dict[str, list[float]] = {name: [] for name in PROVIDERS}
    for _ in range(ROUNDS):
        for name, attention in PROVIDERS.items():
            start = time.perf_counter()
            if op == "forward":
                attention(q, k, v, causal)
            else:
                with_gradients(attention, q, k, v, causal, upstream)
            samples[name].append((time.perf_counter() - start) * 1e3)
    return samples


def measure_all(shapes: list[tuple[int, int, int, int]]) -> Iterator[dict[str, object]]:
    """CSV rows; the table is printed on the way."""
    provenance = row_provenance("cpu")
    print(f"{provenance['gpu']}, torch {provenance['torch']}, float32, median (least) of {ROUNDS} in ms")
    print(
        f"{'':16} {'B':>3} {'H':>3} {'L':>5} {'D':>4} causal "
        + " ".join(f"{name:>20}" for name in PROVIDERS)
        + "  torch / ours"
    )
    for batch, heads, length, dim in shapes:
        q, k, v = (torch.randn(batch, heads, length, dim) for _ in range(3))
        for op, causal in itertools.product(OPS, (False, True)):
            check(q, k, v, causal)
            samples = measure(op, q, k, v, causal)
            cells = [f"{statistics.median(times):11.2f} ({min(times):6.2f})" for times in samples.values()]
            ratio = statistics.median(samples["torch"]) / statistics.median(samples["flashattn_lite"])
            least = min(samples["torch"]) / min(samples["flashattn_lite"])
            line = f"{op:16} {batch:3} {heads:3} {length:5} {dim:4} {causal!s:>6} "
            print(line + " ".join(f"{cell:>20}" for cell in cells) + f"  {ratio:.2f} ({least:.2f})", flush=True)
            for name, times in samples.items():
                p20, median, p80 = (sorted(times)[round(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8))
                yield {
                    **provenance, "op": op, "provider": name, "batch": batch, "heads_q": heads,
                    "heads_kv": heads, "len_q": length, "len_kv": length, "head_dim": dim, "head_dim_v": dim,
                    "dtype": "float32", "causal": causal, "metric": "ms", "median": f"{median:.4f}",
                    "p20": f"{p20:.4f}", "p80": f"{p80:.4f}",
                }  # fmt: skip


@contextmanager
def busy(processes: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Inside, so many other processes, which it gives, keep the cores busy."""
    code = "import torch; x = torch.randn(400, 400); print(flush=True)\nwhile True: x @ x"
    others = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(processes)]
    try:
        for other in others:
            assert other.stdout is not None and other.stdout.readline(), "a process ended before it was busy"
        yield others
    finally:
        for other in others:
            other.kill()
            other.communicate()


def main() -> None:
    parser = parser_of("cpu", __doc__)
    default = results_of("cpu") / "attention.csv"
    parser.add_argument("--csv", type=Path, nargs="?", const=default, help="write rows there; default: %(const)s")
    parser.add_argument("--longest", type=positive, default=8192, help="leave longer sequences out")
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="other processes, busy; not with --csv")
    options = parser.parse_args()
    if options.beside and options.csv is not None:
        parser.error("--csv: rows are those of a machine with nothing else to do; got --beside too")
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    with busy(options.beside):
        rows = list(measure_all([shape for shape in SHAPES if shape[2] <= options.longest]))
    if options.csv is not None:
        write_rows(options.csv, rows)


if __name__ == "__main__":
    main()
