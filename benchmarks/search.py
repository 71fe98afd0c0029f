"""Draws attention problems by chance: head dims, dtypes, features. Looks for mistakes in their kernels' machine code.

python -m benchmarks.search [--seconds 300] [--seed 0] [--dtypes fp32 bf16 fp16]
python -m benchmarks.search --run [--device cuda] ...

The first needs no GPU: it compiles what a launch on sm_90 would take, the Hopper kernel, the portable one and the
backward's, past Triton's cache, and looks for `benchmarks.mistakes`. With --run each problem is computed, forward and
backward, from tensors that lie in any way, and held to the definition in float64 and to one more law by chance
(`flashattn_lite.testing.ALL_LAWS`). Exits with 1 if anything was found.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton

import flashattn_lite as fa
from benchmarks.mistakes import mistakes
from benchmarks.offline import GPUS, attention_plan, attention_problem, compiled
from flashattn_lite.kernels import attention_hopper_launch, attention_launch, backward_launch
from flashattn_lite.testing import ALL_LAWS, Case
from flashattn_lite.testing.laws import gradients_match_autograd, matches_oracle
from flashattn_lite.testing.tensors import LAYOUTS, lay_out

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
        yield compiled(GPU, (start.kernel, start.grid, args, start.options))


def case_of(
    dim: int, dim_v: int, dtype: torch.dtype, rows: int, features: dict[str, Any], seed: int, device: str
) -> Case:
    """Two sequences of four query and two key heads, 70 queries each."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)
    options = {name: x for name, x in features.items() if name not in ("mask", "sinks", "kv_lens")}
    if kind := features.get("mask"):
        mask = normal(1, 1, 1 if kind == "row" else 70, rows)
        options["mask"] = mask > -1 if kind in ("bool", "row") else mask if kind == "half" else mask.float()
    if features.get("sinks"):
        options["sinks"] = torch.randn(4, generator=generator).to(device)
    if features.get("kv_lens"):
        options["kv_lens"] = torch.tensor([rows, rows // 3], dtype=torch.int32, device=device)
    return Case(normal(2, 4, 70, dim), normal(2, 2, rows, dim), normal(2, 2, rows, dim_v), seed=seed, **options)


def laid_out(case: Case, layouts: Sequence[str]) -> Case:
    """With q, k and v as three of LAYOUTS."""
    q, k, v = (lay_out(x, layout) for x, layout in zip((case.q, case.k, case.v), layouts, strict=True))
    return case.replace(q=q, k=k, v=v)


def wrong(case: Case, backend: str, one_more: Any) -> list[str]:
    """What the definition and a law say of a problem that was computed."""
    found = []
    for law in (matches_oracle, gradients_match_autograd, one_more):
        try:
            law(functools.partial(fa.attention, backend=backend), case)
        except Exception as error:
            found.append(f"{backend}, {law.__name__}: {type(error).__name__} {str(error).splitlines()[0]}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="compute the problems on --device instead")
    parser.add_argument("--device", default="cuda")
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
            if options.run:
                if "varlen" in features:
                    continue
                backend = draw.choice(("auto", "triton")) if options.device == "cuda" else "auto"
                seed = draw.randrange(1 << 30)
                case = laid_out(case_of(*problem, seed, options.device), draw.choices(LAYOUTS, k=3))
                results = [wrong(case, backend, draw.choice(ALL_LAWS))]
            else:
                results = [mistakes(kernel) for kernel in draw.choice((forward, backward))(*problem)]
            count += len(results)
            for lines in filter(None, results):
                found += 1
                print(f"{name} ({dim}, {dim_v}) {features} {rows} keys: {lines[0]}", flush=True)
    what = "problems" if options.run else "kernels"
    print(f"{count} {what} by Triton {triton.__version__}, {found} of them with mistakes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
