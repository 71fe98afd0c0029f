"""Registers, stack, shared memory and occupancy of the attention kernels, by configuration; needs no GPU.

`python -m benchmarks.attention --profile [GPU]` runs it over the cells of that benchmark and writes a CSV next to its
results. A kernel that serves several lengths has one row, at the first of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.offline import GPUS, attention_plan, compiled, usage
from benchmarks.progress import Progress
from benchmarks.provenance import DTYPES, PROBLEM, PROVENANCE, row_provenance, write_rows
from flashattn_lite.kernels.start import Plan

# Provider -> the module that starts its kernel, by plan(problem, inputs, out, lse, target).
LAUNCHERS = {
    "flashattn_lite": "flashattn_lite.kernels.attention_hopper_launch",
    "flashattn_lite-triton": "flashattn_lite.kernels.attention_launch",
}
ONLY_ON = {"flashattn_lite": "sm_90"}  # elsewhere it is the portable kernel
TAKEN = ("kernel", "tile", "warps", "registers", "stack_bytes", "shared_bytes", "blocks_per_sm", "occupancy")
COLUMNS = (*PROVENANCE, "op", "provider", *PROBLEM, *TAKEN)
BLOCKS = ("BLOCK_M", "BLOCK_N")
NVIDIA = tuple(gpu for gpu, (target, _) in GPUS.items() if target.backend == "cuda")

Cell = tuple[str, int, bool, int]  # dtype, head dim, causal, length


def tile_text(plan: Plan) -> str:
    """The compile-time shape that travels among a launch's arguments, as "128x64"."""
    _, _, args, kwargs = plan
    for value in (*args, *kwargs.values(), kwargs):
        fields = value if isinstance(value, dict) else {name: getattr(value, name, None) for name in BLOCKS}
        if all(fields.get(name) for name in BLOCKS):
            return "x".join(str(fields[name]) for name in BLOCKS)
    return "-"


def row_of(gpu: str, plan: Plan) -> dict[str, Any]:
    kernel = compiled(gpu, plan)
    took = usage(kernel)
    return {
        "kernel": kernel.metadata.name,
        "tile": tile_text(plan),
        "warps": took.warps,
        "registers": took.registers,
        "stack_bytes": took.stack,
        "shared_bytes": took.shared,
        "blocks_per_sm": took.blocks(gpu),
        "occupancy": f"{took.occupancy(gpu):.2f}",
    }


def profile(gpu: str, cells: Sequence[Cell], hidden: int) -> list[dict[str, Any]]:
    """A row for each kernel that the cells take; heads = hidden / head dim, as in the benchmark."""
    provenance = {**row_provenance("cpu"), "gpu": f"{gpu}, compiled offline"}
    rows: list[dict[str, Any]] = []
    plans = []
    for provider, module in LAUNCHERS.items():
        if ONLY_ON.get(provider, gpu) != gpu:
            continue
        planner = importlib.import_module(module).plan
        seen = set()
        for dtype, dim, causal, length in cells:
            heads = hidden // dim
            plan = attention_plan(planner, gpu, dim, dim, DTYPES[dtype], rows=length, heads=heads, causal=causal)
            key = (dtype, dim, causal, tile_text(plan), repr(plan[3]))
            if key in seen:
                continue
            seen.add(key)
            cell = {"provider": provider, "batch": 1, "heads_q": heads, "heads_kv": heads, "len_q": length,
                    "len_kv": length, "head_dim": dim, "head_dim_v": dim, "dtype": dtype, "causal": causal}  # fmt: skip
            plans.append((cell, plan))
    with Progress(len(plans)) as bar:
        for number, (cell, plan) in enumerate(plans):
            bar.show(number, f"{cell['provider']} {cell['dtype']} head dim {cell['head_dim']}")
            rows.append({**provenance, "op": "attention_forward", **cell, **row_of(gpu, plan)})
    return rows


def write(gpu: str, cells: Sequence[Cell], hidden: int, out: Path) -> None:
    rows = profile(gpu, cells, hidden)
    write_rows(out, rows, COLUMNS)
    shown = ("provider", "dtype", "head_dim", "causal", "len_kv", *TAKEN[1:])
    table = [[str(row[name]) for name in shown] for row in rows]
    widths = [max(map(len, column)) for column in zip(shown, *table, strict=True)]
    for line in (shown, *table):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    print(f"rows: {out}")
