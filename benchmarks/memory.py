"""Peak memory of attention above its inputs and outputs, as the sequence grows: by hand, torch's, and ours.

python -m benchmarks.memory [--device cpu|cuda] [--out memory.csv] [--lengths 256 512 ...] [--no-rss]

The peak of torch's allocator; on the CPU also, as a second opinion, the growth of the resident set of a fresh process
per measurement (the `metric` column says which). Attention is not causal, so that every score counts.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn_lite
from benchmarks.command import need_gpu, parser_of, positive
from benchmarks.peak import Call, peak_allocated_bytes, peak_cuda_bytes, peak_rss_bytes
from benchmarks.progress import Progress
from benchmarks.provenance import results_of, row_provenance, write_rows

Attention = Callable[..., Any]  # (q, k, v) -> out
OPS = ("forward", "forward+backward")
SMALL = 96  # rows of the warm-up, which also compiles, and of the check


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v


def torch_with(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


PROVIDERS: dict[str, Attention] = {
    "naive": naive,
    "torch": F.scaled_dot_product_attention,
    "torch flash": torch_with(SDPBackend.FLASH_ATTENTION),
    "torch efficient": torch_with(SDPBackend.EFFICIENT_ATTENTION),
    "torch cudnn": torch_with(SDPBackend.CUDNN_ATTENTION),
    "torch math": torch_with(SDPBackend.MATH),
    "flashattn_lite": flashattn_lite.attention,
}
ON_CPU = ("naive", "torch", "flashattn_lite")
QUADRATIC = ("naive", "torch math")


@dataclass(frozen=True)
class Case:
    """One measurement: which provider does what, on which shape."""

    device: str
    provider: str
    op: str
    length: int
    heads: int
    head_dim: int
    metric: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def call(self, length: int) -> Call:
        """The call to measure, over inputs that exist when this returns."""
        shape = (1, self.heads, length, self.head_dim)
        generator = torch.Generator(self.device).manual_seed(0)
        q, k, v, grad = (
            torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator) for _ in range(4)
        )
        attend = PROVIDERS[self.provider]
        if self.op == "forward":
            return lambda: (attend(q, k, v),)

        def both() -> tuple[Tensor, ...]:
            out = attend(q, k, v)
            return out, *torch.autograd.grad(out, (q, k, v), grad)

        for x in (q, k, v):
            x.requires_grad_()
        return both

    def measure(self) -> int:
        self.call(SMALL)()
        call = self.call(self.length)
        if self.metric == "peak_rss_bytes":
            return peak_rss_bytes(call)
        return peak_cuda_bytes(call) if self.device == "cuda" else peak_allocated_bytes(call)


def check(case: Case) -> str | None:
    """A result is measured after it is checked: against float64 on the same rounded inputs. A refusal is a reason."""
    shape = (1, case.heads, SMALL, case.head_dim)
    q, k, v = (torch.randn(shape, device=case.device, dtype=case.dtype) for _ in range(3))
    oracle = naive(q.double(), k.double(), v.double())
    try:
        error = (PROVIDERS[case.provider](q, k, v) - oracle).abs().max()
    except RuntimeError as refusal:
        if case.provider.startswith("torch "):  # a backend asked for by name that does not serve this GPU or dtype
            return str(refusal).splitlines()[0]
        raise
    allowed = 2 * (naive(q, k, v) - oracle).abs().max() + 4 * torch.finfo(case.dtype).eps * oracle.abs().max()
    assert error <= allowed, f"{case.provider} is wrong: off by {error:.2e}, allowed {allowed:.2e}"
    return None


def why_absent(case: Case) -> str | None:
    """The reason not to start a measurement on the CPU: a process that swaps or is killed says nothing."""
    if case.device != "cpu" or case.provider not in QUADRATIC:
        return None
    needs = 3 * case.heads * case.length**2 * 4  # scores, probabilities, and the gradient of one of them
    available = available_bytes()
    return f"needs {needs / 1e9:.0f} GB of {available / 1e9:.0f}" if needs > 0.8 * available else None


def available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration):
        return 8 * 2**30


def measure(case: Case, refusal: str | None) -> dict[str, object]:
    """The row's metric and numbers; where nothing could be measured, the metric says why."""
    reason = refusal or why_absent(case)
    if reason is None:
        try:
            if case.metric == "peak_rss_bytes":
                # Blocks that glibc keeps for reuse after a free say nothing about the call: it returns them at once.
                os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
                context = multiprocessing.get_context("forkserver")
                context.set_forkserver_preload(["torch", "flashattn_lite"])
                with ProcessPoolExecutor(1, context) as pool:
                    value = pool.submit(case.measure).result()
            else:
                value = case.measure()
            return {"metric": case.metric, "median": value, "p20": value, "p80": value}
        except BrokenProcessPool:
            reason = "out of memory"
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            reason = "out of memory"
    return {"metric": "absent", "median": f"{case.metric}: {reason}"}


def cases(device: str, lengths: Sequence[int], heads: int, head_dim: int, rss: bool) -> list[Case]:
    providers = tuple(PROVIDERS) if device == "cuda" else ON_CPU
    metrics = ("peak_allocated_bytes", "peak_rss_bytes") if rss else ("peak_allocated_bytes",)
    grid = itertools.product(metrics, OPS, lengths, providers)
    return [Case(device, provider, op, length, heads, head_dim, metric) for metric, op, length, provider in grid]


def row(case: Case, refusal: str | None) -> dict[str, object]:
    problem = {
        "op": case.op,
        "provider": case.provider,
        "batch": 1,
        "heads_q": case.heads,
        "heads_kv": case.heads,
        "len_q": case.length,
        "len_kv": case.length,
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim,
        "dtype": str(case.dtype).removeprefix("torch."),
        "causal": False,
    }
    return {**row_provenance(case.device), **problem, **measure(case, refusal)}


def main(argv: Sequence[str] | None = None) -> Path:
    parser = parser_of("memory", __doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<device>/memory.csv")
    parser.add_argument("--lengths", type=positive, nargs="+", help="default: 256 to 8192, on CUDA 512 to 65536")
    parser.add_argument("--heads", type=positive, help="default: 4, on CUDA 16")
    parser.add_argument("--head-dim", type=positive, help="default: 64, on CUDA 128")
    parser.add_argument("--no-rss", action="store_true", help="CPU: leave out the second opinion")
    options = parser.parse_args(argv)
    on_gpu = options.device == "cuda"
    if on_gpu:
        need_gpu(parser, "; or --device cpu")
    lengths = options.lengths or [2**n for n in (range(9, 17) if on_gpu else range(8, 14))]
    heads, head_dim = options.heads or (16 if on_gpu else 4), options.head_dim or (128 if on_gpu else 64)
    out = options.out or results_of(options.device) / "memory.csv"

    todo = cases(options.device, lengths, heads, head_dim, rss=not (on_gpu or options.no_rss))
    refusals = {case.provider: check(case) for case in todo if case.length == lengths[0] and case.op == "forward"}
    rows = []
    with Progress(len(todo)) as bar:
        for done, case in enumerate(todo):
            bar.show(done, f"{case.provider}, {case.op}, {case.length} tokens ({case.metric})")
            rows.append(row(case, refusals[case.provider]))
    write_rows(out, rows)
    print(f"{len(rows)} rows: {out}")
    return out


if __name__ == "__main__":
    main()
