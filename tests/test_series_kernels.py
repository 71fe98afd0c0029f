"""What the driver is handed for the kernels of each call is what their PTX declares."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the launches are Triton's")
from benchmarks.offline import attention_problem, compiled
from flashattn_lite import target as targets
from flashattn_lite.kernels import attention_hopper_launch, backward_launch, decode_launch, series
from flashattn_lite.problem import Inputs, describe
from tests.targets import H200


def calls():
    """The launches of one call each: of Hopper's kernel, its merge, decoding, a backward."""
    kinds = (False, False, False, "", (None, None))
    inputs, problem = attention_problem(64, 64, torch.bfloat16, 200, 4, *kinds, {"causal": True})
    out, lse = torch.empty_like(inputs.q), torch.empty(1, 4, 200)
    counter = torch.zeros(1, dtype=torch.int32)
    yield attention_hopper_launch.Call(problem, inputs, out, lse, H200).launches(*inputs, None, out, lse, None, counter)
    call = backward_launch.Call(problem, inputs, out, (True, True, True, False, False), H200)
    yield list(call.launches(inputs, out, lse, out, None, *call.allocate(inputs, lse)))
    q, k = (torch.empty(1, 4, length, 128, dtype=torch.bfloat16) for length in (1, 4096))
    none = dict.fromkeys(("q_start", "window_left", "window_right", "softcap"))
    problem, inputs = describe(Inputs(q, k, k), causal=True, scale=0.1, **none), Inputs(q, k, k)
    out, lse = torch.empty_like(q), torch.empty(1, 4, 1)
    call = decode_launch.Call(problem, inputs, out, lse, H200)
    yield call.launches(*call.given(inputs, out, lse, None))


@pytest.mark.skipif(targets.interpreting(), reason="TRITON_INTERPRET=1 leaves nothing to compile")
def test_kernels_take_what_is_handed_to_them(monkeypatch):
    """As the PTX declares it."""
    monkeypatch.setattr(series, "lies_in", lambda *_: True)
    bits = {"u64": 64, "u32": 32, "f32": 32, "b64": 64, "b32": 32, "u16": 16, "u8": 8}
    for launches in calls():
        for start, args in launches:
            kernel = compiled("sm_90", start.plan(args))
            described = zip(
                start.descriptors.blank, range(start.descriptors.first, start.descriptors.last), strict=True
            )
            kept = {(i, 0): [object(), *x.shape, *x.strides] for x, i in described}
            learnt = SimpleNamespace(kept=kept)
            ready = SimpleNamespace(compiled=kernel, launcher=learnt, grid=start.grid, options=start.options)
            kernel.packed_metadata = (4, 1, 0)
            flat = [x for x in in_a_row(args) if isinstance(x, torch.Tensor)]
            roots = list(
                {id(x if x._base is None else x._base): x if x._base is None else x._base for x in flat}.values()
            )
            prepared = series.prepared(ready, args, roots)
            declared = re.findall(r"\.param \.(?:align \d+ \.b8 \w+\[(\d+)\]|(\w+) )", kernel.asm["ptx"])
            sizes = [int(array) if array else bits[kind] // 8 for array, kind in declared]
            assert [x.size for x in prepared.parameters] == sizes, kernel.name


def in_a_row(args):
    for x in args:
        if isinstance(x, tuple):
            yield from in_a_row(x)
        else:
            yield x
