"""Tensors whose entries lie further apart than 32 bits count: the portable kernels' addresses, in the interpreter."""

from __future__ import annotations

import math
import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from flashattn_lite import calls
from flashattn_lite import target as targets
from flashattn_lite.kernels import attention_launch, decode_launch, softmax_launch
from flashattn_lite.kernels.tuning_softmax import SoftmaxTile
from flashattn_lite.problem import Inputs, describe

NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python has no name for everywhere: pages that nobody touches take no memory


@pytest.fixture(autouse=True)
def only_interpreted(interpreting: bool) -> None:
    if not interpreting:
        pytest.skip("needs TRITON_INTERPRET=1, which computes in a mapping of memory that is hardly there")


def far(x: Tensor, dim: int) -> Tensor:
    """x with the entries of one dimension so far apart that 32 bits hold the stride, not the last offset.

    An offset that wraps around stays within the mapping, where it finds zeros.
    """
    strides = list(x.contiguous().stride())
    strides[dim] = 2**32 // (4 if x.shape[dim] <= 4 else 16)
    size = 2**31 + 1 + sum(step * (n - 1) for n, step in zip(x.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    room = mmap.mmap(-1, size * x.element_size(), flags=flags)
    room.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(room, dtype=x.dtype).as_strided(x.shape, strides, 2**31).copy_(x)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("dim", range(4))
def test_attention_and_its_gradients(dim: int) -> None:
    given = [randn(3, 3, 4, columns) for columns in (16, 16, 16, 4)]

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v, mask)]
        out = fa.attention(*leaves[:3], mask=leaves[3], backend="triton")
        return [out, *torch.autograd.grad(out, leaves, far(torch.ones_like(out), dim))]

    for near, apart in zip(call(*given), call(*(far(x, dim) for x in given)), strict=True):
        assert torch.equal(near, apart)


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("rows", [1, 40])
def test_packed_sequences(dim: int, rows: int) -> None:
    """One row each, by decoding's kernels, and more."""
    cu = torch.tensor([0, 1, 4] if rows > 1 else [0, 1, 2, 3, 4], dtype=torch.int32)
    given = [randn(4, 3, 16) for _ in "qkv"]
    call = lambda *x: fa.attention_varlen(*x, cu, cu, max_seqlen_q=rows, max_seqlen_k=3)
    assert torch.equal(call(*given), call(*(far(x, dim) for x in given)))


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("page", [0, 16, 256])
def test_caches(dim: int, page: int) -> None:
    given = [randn(3, 3, 3, 16), *(randn(3, 3, page or 3, 16) for _ in "kv")]
    lens = torch.full((3,), 2 * page or 3, dtype=torch.int32)
    pages = {"block_table": torch.tensor([[1, 2]] * 3, dtype=torch.int32)} if page else {}
    call = lambda *x: fa.attention_decode(*x, lens, **pages)
    apart = [far(x, dim) if x.shape[dim] <= 16 else x for x in given]
    assert torch.equal(call(*given), call(*apart))


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("launch", [attention_launch, decode_launch], ids=lambda launch: launch.__name__[-16:-7])
def test_results(launch: Any, dim: int) -> None:
    """Which a caller does not give: a large batch's are as far apart, one behind the other."""
    inputs = Inputs(*(randn(3, 3, rows, 16) for rows in (2, 40, 40)))
    problem = describe(inputs, **dict.fromkeys(calls.OPTION_NAMES) | {"causal": True})
    made = []
    for lay in (lambda x: x, lambda x: far(x, dim)):
        out, lse = lay(torch.full_like(inputs.q, math.nan)), torch.full((3, 3, 2), math.nan)
        launch.prepare(problem, inputs, out, lse, targets.of(out.device))(inputs, out, lse)
        made.append((out, lse))
    assert all(map(torch.equal, *made)) and not made[0][0].isnan().any()


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("results", [1, 2], ids=["softmax", "statistics"])
@pytest.mark.parametrize(
    ("tile", "axis"),
    [
        (SoftmaxTile(4, 64, 4), 3),
        (SoftmaxTile(4, 64, 4), 1),
        (SoftmaxTile(1, 16, 4), 3),
        (SoftmaxTile(2, 8, 4, steps=2), 2),
        (SoftmaxTile(1, 8, 4, sweeps=True), 3),
    ],
    ids=str,
)
def test_softmax(tile: SoftmaxTile, axis: int, results: int, dim: int) -> None:
    """Rows of one tile, shared by several programs, swept by one; along the last dimension and across."""
    given = randn(*(39 if i == axis else 3 for i in range(4)))
    made = []
    for lay in (lambda x: x, lambda x: far(x, dim)):
        empty = torch.full_like(given if results == 1 else given.narrow(axis, 0, 1), math.nan)
        filled = tuple(lay(empty.clone()) for _ in range(results))
        launches = softmax_launch.plan(lay(given), filled, axis, tile=tile)
        assert launches is not None
        with softmax_launch.interpreted():
            for kernel, grid, args, kwargs in launches:
                kernel[grid](*args, **kwargs)
        made.append(filled)
    for near, apart in zip(*made, strict=True):  # rows whose neighbours come to lie closer are summed in another order
        torch.testing.assert_close(near, apart, rtol=1e-6, atol=0)  # of 39 numbers: some float32 eps
        assert not near.isnan().any()
