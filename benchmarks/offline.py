"""Compiles kernels for a GPU that is not there, and reads what they take of it."""

from __future__ import annotations

import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flashattn_lite.kernels.start import Plan
from flashattn_lite.kernels.tuning import SHARED_RESERVED
from flashattn_lite.problem import AttentionProblem, Inputs, describe
from flashattn_lite.target import Target

Planner = Callable[..., Plan]  # plan(problem, inputs, out, lse, target)

GPUS = {
    "sm_80": (GPUTarget("cuda", 80, 32), Target("cuda", 80, "sm_80")),
    "sm_90": (GPUTarget("cuda", 90, 32), Target("cuda", 90, "sm_90")),
    "sm_100": (GPUTarget("cuda", 100, 32), Target("cuda", 100, "sm_100")),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Target("hip", "gfx942", "gfx942")),
}
# NVIDIA's CUDA C++ Programming Guide, table of technical specifications by compute capability.
SHARED_A_MULTIPROCESSOR = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}  # bytes
REGISTERS, REGISTER_UNIT = 65536, 256  # 32-bit, a multiprocessor; a warp is given multiples of the unit
WARPS, WARP_UNIT, BLOCKS = 64, 4, 32  # at most, a multiprocessor; a warp per scheduler


class OfflineDriver:
    """Answers what the compiler asks of a driver, with no GPU behind it."""

    def __init__(self, gpu: str) -> None:
        self.target = GPUS[gpu][0]
        # Triton keeps compiled kernels by device: a number that no real one has.
        self.device = 1000 + list(GPUS).index(gpu)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def offline(gpu: str) -> Iterator[None]:
    """Inside, Triton compiles for that GPU, whatever the machine has."""
    before = driver._active
    driver._active = OfflineDriver(gpu)
    try:
        yield
    finally:
        driver._active = before


def compiled(gpu: str, plan: Plan) -> Any:
    """The compiled kernel of a launch. `.asm` has its code by stage, `.metadata` its shared memory and warps."""
    kernel, grid, args, kwargs = plan
    with offline(gpu):
        return kernel.warmup(*args, grid=grid, **kwargs)


def attention_plan(
    plan: Planner,
    gpu: str,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    *,
    rows: int = 64,
    heads: int = 4,
    varlen: bool = False,
    sinks: bool = False,
    kv_lens: bool = False,
    mask: str = "",
    window: tuple[int | None, int | None] = (None, None),
    **options: Any,
) -> Plan:
    """The launch of a small problem with these features, on CPU tensors that nobody reads.

    `rows` queries and as many keys; `mask` is "", "bool", "float", "half" (in the dtype of q) or "row" (bool, one row
    for all queries); `options` are causal, q_start, scale, softcap.
    """
    inputs, problem = attention_problem(
        head_dim, head_dim_v, dtype, rows, heads, varlen, sinks, kv_lens, mask, window, options
    )
    shape = inputs.q.shape[:-1]
    lse = torch.empty(shape[::-1] if varlen else shape)
    return plan(problem, inputs, torch.empty_like(inputs.v), lse, GPUS[gpu][1])


def attention_problem(
    head_dim: int, head_dim_v: int, dtype: torch.dtype, rows: int, heads: int, varlen: bool, sinks: bool,
    kv_lens: bool, mask: str, window: tuple[int | None, int | None], options: dict[str, Any],
) -> tuple[Inputs, AttentionProblem]:  # fmt: skip
    shape = (rows, heads) if varlen else (1, heads, rows)
    q, v = torch.empty(*shape, head_dim, dtype=dtype), torch.empty(*shape, head_dim_v, dtype=dtype)
    cu = torch.tensor([0, rows], dtype=torch.int32) if varlen else None
    masks = {"bool": torch.bool, "float": torch.float32, "half": dtype, "row": torch.bool}
    inputs = Inputs(
        *(q, q, v),
        torch.zeros(1, 1, 1 if mask == "row" else rows, rows, dtype=masks[mask]) if mask else None,
        torch.zeros(heads) if sinks else None,
        torch.tensor([rows], dtype=torch.int32) if kv_lens else None,
        *(cu, cu),
    )
    defaults = {"causal": False, "q_start": None, "scale": 1 / math.sqrt(head_dim), "softcap": None}
    left, right = window
    return inputs, describe(inputs, window_left=left, window_right=right, **{**defaults, **options})


@dataclass(frozen=True)
class Usage:
    """What one program of a kernel takes: 32-bit registers and bytes of stack a thread, shared bytes, warps.

    A kernel whose warps trade registers among themselves starts with this many each; their sum stays.
    """

    registers: int
    stack: int  # registers that were spilled lie there
    shared: int
    warps: int

    def blocks(self, gpu: str) -> int:
        """Programs that one multiprocessor holds at once."""
        a_warp = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = REGISTERS // a_warp // WARP_UNIT * WARP_UNIT // self.warps
        by_shared = SHARED_A_MULTIPROCESSOR[gpu] // (self.shared + SHARED_RESERVED)
        return min(by_registers, by_shared, WARPS // self.warps, BLOCKS)

    def occupancy(self, gpu: str) -> float:
        """Resident warps, as a share of what a multiprocessor can hold."""
        return self.blocks(gpu) * self.warps / WARPS


def usage(kernel: Any) -> Usage:
    """Of a kernel compiled for an NVIDIA GPU, from the resource report of its binary."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.findall(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    assert found, "no resource report"
    registers, stack = (max(map(int, column)) for column in zip(*found, strict=True))
    return Usage(registers, stack, kernel.metadata.shared, kernel.metadata.num_warps)
