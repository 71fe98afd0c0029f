"""Draws attention problems by chance: head dims, dtypes, features. Looks for mistakes in their kernels' machine code.

python -m benchmarks.search [--seconds 300] [--seed 0] [--dtypes fp32 bf16 fp16]

Needs no GPU: it compiles what a launch on sm_90 would take, the Hopper kernel, the portable one and the backward's,
past Triton's cache, and looks for `benchmarks.mistakes`. Exits with 1 if any were found.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton

from benchmarks.command import parser_of
from benchmarks.mistakes import mistakes
from benchmarks.offline import GPUS, attention_plan, attention_problem, compiled
from flashattn_lite.kernels import attention_hopper_launch, attention_launch, backward_launch

GPU = "sm_90"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (8, 16, 24, 32, 33, 40, 48, 63, 64, 72, 80, 96, 100, 112, 128, 130, 136, 160, 192, 200, 256)
NARROW = (4, 8, 16, 24, 32, 64)
FEATURES: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"mask": "float"}, {"mask": "half"}, {"mask": "bool"}, {"mask": "row"},
    {"kv_lens": True, "causal": True}, {"varlen": True, "causal": True}, {"window": (9, 3), "softcap": 2.0},
    {"sinks": True, "causal": True},
)  # fmt: skip
KINDS: dict[str, Any] = {"varlen": False, "sinks": False, "kv_lens": False, "mask": "", "window": (None, None)}


def forward(dim: int, dim_v: int, dtype: torch.dtype, rows: int, features: dict[str, Any]) -> Iterator[Any]:
    """The portable kernel, and the Hopper kernel where it takes this."""
    shape = (GPU, dim, dim_v, dtype)
    yield compiled(GPU, attention_plan(attention_launch.plan, *shape, rows=rows, **features))
    if dtype != torch.float32 and dim % 8 == dim_v % 8 == 0:
        yield compiled(GPU, attention_plan(attention_hopper_launch.plan, *shape, rows=rows, **features))


def backward(dim: int, dim_v: int, dtype: torch.dtype, rows: int, features: dict[str, Any]) -> Iterator[Any]:
    varlen, sinks, kv_lens, mask, window = (features.get(name, default) for name, default in KINDS.items())
    rest = {name: x for name, x in features.items() if name not in KINDS}
    inputs, problem = attention_problem(dim, dim_v, dtype, rows, 4, varlen, sinks, kv_lens, mask, window, rest)
    target, packed = GPUS[GPU][1], problem.features.varlen
    needs = (True, True, True, problem.features.mask == "float", problem.features.sinks)
    if backward_launch.why_not(problem, inputs, needs, target):
        return
    out = torch.empty(*inputs.q.shape[:-1], dim_v, dtype=dtype)
    lse = torch.empty((4, rows) if packed else (1, 4, rows))
    call = backward_launch.Call(problem, inputs, out, needs, target)
    for start, args in call.launches(inputs, out, lse, out, lse, *call.allocate(inputs, lse)):
        yield compiled(GPU, start.plan(args))


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("search", __doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args(argv)
    draw, end = random.Random(options.seed), time.monotonic() + options.seconds
    count = found = 0
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        while time.monotonic() < end:
            name, dim, features = draw.choice(options.dtypes), draw.choice(HEAD_DIMS), draw.choice(FEATURES)
            dim_v, rows = draw.choice((dim, *NARROW)), draw.choice((64, 100, 4096))
            problem = (dim, dim_v, DTYPES[name], rows, features)
            results = [mistakes(kernel) for kernel in draw.choice((forward, backward))(*problem)]
            count += len(results)
            for lines in filter(None, results):
                found += 1
                print(f"{name} ({dim}, {dim_v}) {features} {rows} keys: {lines[0]}", flush=True)
    print(f"{count} kernels by Triton {triton.__version__}, {found} of them with mistakes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
