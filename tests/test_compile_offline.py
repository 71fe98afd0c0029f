"""Every kernel compiles without a GPU, for every GPU family that we name, and does not spill where it must be fast."""

from __future__ import annotations

import math
import os
import re
import subprocess
import tempfile

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from flashattn_lite import target as targets  # noqa: E402
from flashattn_lite.kernels import attention_launch  # noqa: E402
from flashattn_lite.problem import Inputs, describe  # noqa: E402
from flashattn_lite.target import Target  # noqa: E402

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="TRITON_INTERPRET=1 leaves nothing to compile")

GPUS = {
    "sm_80": (GPUTarget("cuda", 80, 32), Target("cuda", 80, "sm_80")),
    "sm_90": (GPUTarget("cuda", 90, 32), Target("cuda", 90, "sm_90")),
    "sm_100": (GPUTarget("cuda", 100, 32), Target("cuda", 100, "sm_100")),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Target("hip", "gfx942", "gfx942")),
}
MASKS = {
    "bool": torch.ones(1, 1, 64, 64, dtype=torch.bool),
    "float": torch.zeros(1, 1, 64, 64),
}
# name: (head dim, head dim of v, dtype, options). Between them every feature and every branch of the kernel.
CASES = {
    "full": (128, 128, torch.float16, {}),
    "causal": (64, 64, torch.bfloat16, {"causal": True}),
    "everything": (80, 40, torch.bfloat16, {"causal": True, "window": (9, None), "softcap": 30.0, "mask": "float",
                                           "sinks": True, "kv_lens": True}),
    "bool mask": (128, 128, torch.float16, {"mask": "bool"}),
    "window": (256, 256, torch.bfloat16, {"window": (64, 64), "q_start": 3}),
    "packed": (128, 128, torch.bfloat16, {"causal": True, "varlen": True, "sinks": True}),
    "float32": (64, 64, torch.float32, {"causal": True}),
    "odd": (33, 1, torch.float16, {"scale": -0.5}),
}  # fmt: skip


class OfflineDriver:
    """Answers what the compiler asks of a driver, with no GPU behind it."""

    def __init__(self, gpu: str) -> None:
        self.target = GPUS[gpu][0]
        self.device = list(GPUS).index(gpu)  # Triton keeps compiled kernels by device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@pytest.fixture
def compile_for(monkeypatch):
    """compile_for(gpu, plan) -> the compiled kernel of `plan = (kernel, grid, args, kwargs)`."""

    def run(gpu: str, plan: tuple) -> object:
        monkeypatch.setattr(driver, "_active", OfflineDriver(gpu))
        kernel, grid, args, kwargs = plan
        return kernel.warmup(*args, grid=grid, **kwargs)

    return run


def attention_plan(gpu: str, head_dim: int, head_dim_v: int, dtype: torch.dtype, options: dict) -> tuple:
    options = dict(options)
    varlen = options.pop("varlen", False)
    shape = (64, 4) if varlen else (1, 4, 64)
    q, v = torch.empty(*shape, head_dim, dtype=dtype), torch.empty(*shape, head_dim_v, dtype=dtype)
    cu = torch.tensor([0, 64], dtype=torch.int32) if varlen else None
    sinks = torch.zeros(4) if options.pop("sinks", False) else None
    kv_lens = torch.tensor([64], dtype=torch.int32) if options.pop("kv_lens", False) else None
    inputs = Inputs(q, q, v, MASKS.get(options.pop("mask", None)), sinks, kv_lens, cu, cu)
    left, right = options.pop("window", (None, None))
    options = {"causal": False, "q_start": None, "scale": 1 / math.sqrt(head_dim), "softcap": None, **options}
    problem = describe(inputs, window_left=left, window_right=right, **options)
    lse = torch.empty(shape[-1::-1] if varlen else shape)
    return attention_launch.plan(problem, inputs, torch.empty_like(v), lse, GPUS[gpu][1])


@pytest.mark.parametrize(
    ("gpu", "case"),
    [(gpu, case) for gpu in GPUS for case in CASES if gpu == "sm_90" or case in ("causal", "everything", "packed")],
)
def test_attention_compiles(compile_for, gpu, case):
    kernel = compile_for(gpu, attention_plan(gpu, *CASES[case]))
    assert kernel.metadata.shared <= {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}[gpu] << 10
    code = kernel.asm["amdgcn" if gpu == "gfx942" else "ptx"]
    assert "attention_kernel" in code


def spilled_bytes(kernel) -> int:
    """Bytes of stack a thread uses, from the resource report of the compiled binary."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    stack = re.findall(r"STACK:(\d+)", report.stdout + report.stderr)
    assert stack, "no resource report"
    return max(map(int, stack))


# Bytes of stack a thread. The careful pass, which rare rows take, puts some registers there (320 bytes at head dim 256,
# at the speeds of docs/performance.md); the 1,300 bytes of an earlier form reached into the pass that all rows take and
# cost it a quarter of its speed.
STACK_LIMIT = 320


@pytest.mark.parametrize(
    ("head_dim", "causal", "len_k"),
    [(64, False, 64), (64, True, 64), (128, False, 64), (128, True, 64), (128, False, 16384), (256, True, 64)],
)
def test_attention_does_not_spill_on_hopper(compile_for, head_dim, causal, len_k):
    q = torch.empty(1, 2, 64, head_dim, dtype=torch.bfloat16)
    k = torch.empty(1, 2, len_k, head_dim, dtype=torch.bfloat16)
    inputs = Inputs(q, k, k)
    problem = describe(
        inputs, causal=causal, q_start=None, window_left=None, window_right=None, scale=0.1, softcap=None
    )
    plan = attention_launch.plan(problem, inputs, torch.empty_like(q), torch.empty(1, 2, 64), GPUS["sm_90"][1])
    assert spilled_bytes(compile_for("sm_90", plan)) <= STACK_LIMIT


def test_lengths_do_not_recompile(compile_for):
    """The compiled kernel of one length serves any other: lengths, offsets and scale are run-time arguments."""
    hashes = set()
    for rows in (1, 16, 17, 4096):
        q = torch.empty(2, 4, rows, 64, dtype=torch.float16)
        inputs = Inputs(q, q, q)
        problem = describe(
            inputs, causal=True, q_start=rows, window_left=None, window_right=None, scale=1 / rows, softcap=None
        )
        plan = attention_launch.plan(problem, inputs, torch.empty_like(q), torch.empty(2, 4, rows), GPUS["sm_90"][1])
        hashes.add(compile_for("sm_90", plan).hash)
    assert len(hashes) == 1
