"""The backward's kernels compile without a GPU, for every GPU family that we name, and fit its shared memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")
from benchmarks.mistakes import mistakes
from benchmarks.offline import GPUS, attention_problem, compiled, usage
from benchmarks.sass import disassembled
from flashattn_lite import target as targets
from flashattn_lite.kernels import backward_launch, tuning
from tests.exhaustive import also, quick

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="TRITON_INTERPRET=1 leaves nothing to compile")

SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}  # KiB
# name: (head dim, head dim of v, dtype, options). Between them every feature and every branch of the kernels.
CASES = {
    "64": (64, 64, torch.bfloat16, {"causal": True}),
    "128": (128, 128, torch.float16, {"causal": True}),
    "256": (256, 256, torch.bfloat16, {"causal": True}),
    "everything": (80, 40, torch.bfloat16, {"causal": True, "window": (9, None), "softcap": 30.0, "mask": "float",
                                           "sinks": True, "kv_lens": True}),
    "bool mask": (128, 128, torch.float16, {"mask": "bool"}),
    "packed": (128, 128, torch.bfloat16, {"window": (64, 64), "varlen": True}),
    "packed, 64": (64, 64, torch.bfloat16, {"causal": True, "softcap": 30.0, "varlen": True}),
    "odd": (33, 1, torch.float16, {"scale": -0.5}),
    "float32, odd": (33, 8, torch.float32, {"mask": "float"}),
    "bias": (64, 64, torch.bfloat16, {"mask": "half"}),
    "bias, 256": (256, 256, torch.bfloat16, {"mask": "float"}),
    "float32": (64, 64, torch.float32, {"causal": True}),
    "float32, 128": (128, 128, torch.float32, {"mask": "float"}),
}  # fmt: skip
# Bytes of stack a thread in the usual launches, at the speeds of docs/performance.md.
IN_GLUON = {"64": 1, "128": 1, "packed": 1, "packed, 64": 1}  # of the usual launches: one side's, see BACKWARD_HOPPER
STACK_LIMIT = {"64": 96, "128": 160, "256": 96, "bias": 120, "float32": 128, "float32, 128": 800}


def kernels(gpu: str, case: str):
    """(careful, the compiled kernel) of each launch, in their order: rows, parts, of queries and keys, of a mask."""
    head_dim, head_dim_v, dtype, options = CASES[case]
    kinds = {"varlen": False, "sinks": False, "kv_lens": False, "mask": "", "window": (None, None)}
    given = [options.get(name, default) for name, default in kinds.items()]
    rest = {name: x for name, x in options.items() if name not in kinds}
    inputs, problem = attention_problem(head_dim, head_dim_v, dtype, 64, 4, *given, rest)
    out = torch.empty(*inputs.q.shape[:-1], head_dim_v, dtype=dtype)
    lse = torch.empty((4, 64) if problem.features.varlen else (1, 4, 64))
    needs = (True, True, True, problem.features.mask == "float", problem.features.sinks)
    call = backward_launch.Call(problem, inputs, out, needs, GPUS[gpu][1])
    launches = call.launches(inputs, out, lse, out, lse, *call.allocate(inputs, lse))
    return [(getattr(args[-1], "CAREFUL", False), compiled(gpu, start.plan(args))) for start, args in launches]


@pytest.mark.parametrize(
    ("gpu", "case"),
    quick([("sm_90", case) for case in CASES], [("sm_90", "everything")])
    + [("sm_80", "bias"), ("sm_100", "bias"), ("gfx942", "bias, 256")]  # all three kernels
    + [also("sm_80", "everything"), also("sm_100", "256"), also("gfx942", "256")],
)
def test_it_compiles_and_fits(gpu, case):
    launches = kernels(gpu, case)
    both = max(CASES[case][:2]) <= 128  # dK and dV in one launch
    parts = 4 if CASES[case][2] == torch.float32 else 0  # of q, k, v and dO
    assert len(launches) == parts + (5 if both else 7) + (CASES[case][3].get("mask") in ("float", "half"))
    assert all(kernel.metadata.shared <= SHARED[gpu] << 10 for _, kernel in launches)
    if gpu == "sm_90":
        assert not [line for careful, kernel in launches for line in mistakes(kernel) if not careful]
        in_gluon = [kernel for _, kernel in launches if kernel.metadata.name == "backward_hopper_kernel"]
        assert len(in_gluon) == IN_GLUON.get(case, 0)
        for kernel in in_gluon:  # products of two tiles are under way at once: ptxas has not put one behind the other
            assert "DEPBAR.LE gsb0, 0x2" in disassembled(kernel)
    if case.startswith("odd"):  # as forward: rows that are not aligned stay off wgmma
        assert not any("wgmma" in kernel.asm["ptx"] for _, kernel in launches)
    if gpu == "sm_90" and case in STACK_LIMIT:
        usual = [kernel for careful, kernel in launches if not careful]
        assert max(usage(kernel).stack for kernel in usual) <= STACK_LIMIT[case]
        assert all("wgmma" in kernel.asm["ptx"] for kernel in usual[1 + parts :])


@pytest.mark.parametrize(
    ("gpu", "dims", "tf32", "reason"),
    [("sm_90", (128, 128), False, ""), ("sm_90", (129, 64), False, "up to 128"), ("sm_90", (64, 129), False, "up to")]
    + [("sm_90", (64, 64), True, "in TF32")]
    + [(gpu, (64, 64), False, "on this GPU") for gpu in ("sm_80", "sm_100", "gfx942")],
)  # fmt: skip
def test_who_makes_gradients_of_float32(gpu, dims, tf32, reason, monkeypatch):
    """Where its products were measured, in parts; what is left out never ran, or spills."""
    monkeypatch.setattr(tuning, "takes_tf32", lambda: tf32)
    kinds = (False, False, False, "", (None, None))
    inputs, problem = attention_problem(*dims, torch.float32, 64, 4, *kinds, {})
    told = backward_launch.why_not(problem, inputs, (True, True, True, False, False), GPUS[gpu][1])
    assert (len(told) == 1 and reason in told[0]) if reason else not told
