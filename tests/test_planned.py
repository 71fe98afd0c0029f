"""Calls for GPUs that are not there, up to their launches: what the host works out for each kernel of any problem.

Nothing is computed. A launch is counted, and looked at: as many arguments as its kernel has, programs, legal
descriptors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the launches need Triton")
import flashattn_lite as fa
from flashattn_lite import calls
from flashattn_lite import target as targets
from flashattn_lite.kernels import (
    attention_hopper_launch,
    attention_launch,
    backward_launch,
    decode_launch,
    start,
)
from flashattn_lite.target import Target, interpreting
from flashattn_lite.testing.strategies import cases, packed_cases
from tests.starters import starters_run
from tests.targets import H200, OTHERS

pytestmark = pytest.mark.skipif(interpreting(), reason="the same without TRITON_INTERPRET=1")
GPUS = {"H200": H200, **OTHERS}
HALF = (torch.float16, torch.bfloat16)
KERNELS = {"hopper": "attention_hopper_kernel", "triton": "attention_kernel", "split": "partial_kernel"}


@st.composite
def large_cases(draw: st.DrawFn) -> Any:
    """What the Hopper kernel takes, and the kernels of few rows over many keys: `cases` has few of those."""
    case = draw(cases(dtypes=HALF, features={"causal", "window", "softcap", "sinks", "mask"}, max_batch=1, max_dim=64))
    rows, keys = (draw(st.sampled_from(sizes)) for sizes in ((1, 8, 100, 300), (200, 700, 3000)))
    dim, dim_v = (draw(st.sampled_from((64, 96, 128))) for _ in range(2))
    make = lambda length, dim: torch.zeros(2, 2, length, dim, dtype=case.q.dtype)
    mask = None if case.mask is None else torch.zeros(rows, keys, dtype=case.mask.dtype)
    sinks = None if case.sinks is None else torch.zeros(2)
    return case.replace(q=make(rows, dim), k=make(keys, dim), v=make(keys, dim_v), mask=mask, sinks=sinks)


class Counters:
    """Of launches that a GPU does not see."""

    def next(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32)


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def look(argument: Any) -> None:
    """What a driver would refuse of a tensor map."""
    if isinstance(argument, tuple):
        for part in argument:
            look(part)
    elif hasattr(argument, "block_shape"):  # https://docs.nvidia.com/cuda/cuda-driver-api, cuTensorMapEncodeTiled
        itemsize = argument.base.element_size()
        assert argument.base.data_ptr() % 16 == 0
        assert all(0 < size < 2**32 for size in argument.shape)
        assert all(0 <= step * itemsize < 2**40 and step * itemsize % 16 == 0 for step in argument.strides[:-1])
        assert argument.strides[-1] == 1
        assert all(0 < size <= 256 for size in argument.block_shape)
        # Of states that share a tensor, and parts, there may be more behind it.
        assert reach(argument.shape, argument.strides) <= reach(argument.base.shape, argument.base.stride())


@contextmanager
def planning(gpu: Target) -> Iterator[list[str]]:
    """Inside, calls on CPU tensors are planned for that GPU; the names of the kernels that would have started."""
    started: list[str] = []

    def note(self: start.Starter, args: tuple[Any, ...]) -> None:
        started.append(self.kernel.fn.__name__)
        assert self.grid[0] > 0
        names = set(self.kernel.arg_names)
        assert len(args) + len(names & self.options.keys()) == len(names), started[-1]
        look(args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "of", lambda device: gpu)
        starters_run(patch, note)
        for module in (attention_hopper_launch, attention_launch, backward_launch, decode_launch):
            patch.setattr(module, "on", lambda device, launch, *args: launch(*args))
        patch.setattr(attention_hopper_launch, "counters", Counters())
        patch.setattr(calls, "_ready", {})
        patch.setattr(calls, "_gradients", {})
        yield started


def attend(function: Any, case: Any, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
    """Forward and backward; not all gradients are always asked for."""
    asked = [x.detach().requires_grad_(case.seed % 3 == 0 or i != case.seed % 3) for i, x in enumerate(tensors[:3])]
    mask = options.get("mask")
    if mask is not None and mask.is_floating_point():
        options["mask"] = mask.detach().requires_grad_(case.seed % 2 == 0)
    out, lse = function(*asked, *tensors[3:], **options, return_lse=True)
    (out.float().sum() + lse.nan_to_num(0, 0, 0).sum()).backward()


@pytest.mark.parametrize("gpu", GPUS)
@given(data=st.data())
def test_any_call_is_planned(gpu, data):
    drawn = data.draw(st.one_of(cases(max_len=600, max_dim=256), packed_cases(max_len=300, max_dim=256), large_cases()))
    with planning(GPUS[gpu]) as started:
        if hasattr(drawn, "cu_seqlens_q"):
            packed = (drawn.q, drawn.k, drawn.v, drawn.cu_seqlens_q, drawn.cu_seqlens_k)
            explained = fa.explain_varlen(*packed, **drawn.options())
            attend(fa.attention_varlen, drawn, packed, drawn.options())
        else:
            explained = fa.explain(drawn.q, drawn.k, drawn.v, **drawn.options())
            attend(fa.attention, drawn, (drawn.q, drawn.k, drawn.v), drawn.options())
    assert started or 0 in drawn.q.shape
    forward = {name for name in started if name in KERNELS.values()}
    assert forward <= {KERNELS[explained.backend]}


def test_packed_sequences_are_explained_as_long_as_they_are():
    x, cu = torch.zeros(4000, 4, 64, dtype=torch.bfloat16), torch.arange(0, 4001, 100, dtype=torch.int32)
    with planning(H200):
        told, known, longer = (
            fa.explain_varlen(x, x, x, cu, cu, max_seqlen_q=most, max_seqlen_k=most) for most in (None, 100, 4000)
        )
    assert (told.backend, told.tile) == ("hopper", known.tile) != ("hopper", longer.tile)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "empty",
    [(0, 2, 2, 3, 5), (2, 0, 0, 3, 5), (2, 0, 2, 3, 5), (2, 2, 2, 0, 5), (2, 2, 2, 3, 0)],
    ids=["no sequence", "no head", "no head of q", "no query", "no key"],
)
def test_there_is_no_descriptor_of_an_empty_tensor(empty, dtype):
    batch, heads_q, heads_kv, rows, keys = empty
    make = lambda heads, length: torch.zeros(batch, heads, length, 64, dtype=dtype, requires_grad=True)
    with planning(H200):
        fa.attention(make(heads_q, rows), make(heads_kv, keys), make(heads_kv, keys)).sum().backward()


@pytest.mark.parametrize("gpu", GPUS)
@given(data=st.data())
def test_any_step_of_a_cache_is_planned(gpu, data):
    drawn = data.draw(cases(max_len=600, max_dim=256, features={"gqa", "strides", "softcap", "sinks", "scale"}))
    drawn = drawn.replace(q=drawn.q[:, :, :16])
    hypothesis.assume(0 not in drawn.q.shape and drawn.k.shape[2])
    batch = drawn.q.shape[0]
    lens = torch.full((batch,), drawn.k.shape[2], dtype=torch.int32)
    names = ("scale", "softcap", "sinks")
    options = {name: value for name, value in drawn.options().items() if name in names}
    with planning(GPUS[gpu]) as started:
        fa.attention_decode(drawn.q, drawn.k, drawn.v, lens, **options)
        pages = [torch.zeros(3, x.shape[1], 16, x.shape[3], dtype=x.dtype) for x in (drawn.k, drawn.v)]
        table = torch.zeros(batch, 3, dtype=torch.int32)
        fa.attention_decode(drawn.q, *pages, lens, block_table=table, **options)
        explained = fa.explain_decode(drawn.q, *pages, lens, block_table=table, **options)
    assert len(started) >= 2
    # Decoding's own kernels are its "triton".
    assert {"hopper": "attention_hopper_kernel", "triton": "partial_kernel"}[explained.backend] in started
