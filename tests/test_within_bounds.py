"""No kernel reads or writes beside a tensor, whatever it then does with what it read: looked at in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashattn_lite as fa

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="the kernels need Triton")
ZONE = 2**14  # elements on either side that no kernel may touch
Guard = Callable[[Tensor], Tensor]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "float mask": {"mask": lambda rows: torch.zeros(2, 4, rows, 37)},
    "bool mask": {"mask": lambda rows: torch.ones(2, 1, rows, 37, dtype=torch.bool)},
    "kv_lens": {"kv_lens": lambda _: torch.tensor([37, 20], dtype=torch.int32)},
    "sinks": {"sinks": lambda _: torch.zeros(4)},
}


@pytest.fixture
def guard(interpreting: bool, monkeypatch: pytest.MonkeyPatch) -> Guard:
    """Copies tensors to where a zone lies on either side, which every load and store is asked about."""
    if not interpreting:
        pytest.skip("needs TRITON_INTERPRET=1, which shows where a kernel reads")
    zones: list[tuple[int, int]] = []
    kept: list[Tensor] = []

    def guarded(x: Tensor) -> Tensor:
        room = torch.zeros(2 * ZONE + x.numel(), dtype=x.dtype)
        begin, end = (room[at:].data_ptr() for at in (ZONE, ZONE + x.numel()))
        zones.extend([(room.data_ptr(), begin), (end, end + ZONE * x.element_size())])
        kept.append(room)
        return room.as_strided(x.shape, x.contiguous().stride(), ZONE).copy_(x)

    def looked_at(name: str, mask_at: int) -> None:
        launched = getattr(interpreter.InterpreterBuilder, name)

        def checked(self: Any, ptrs: Any, *args: Any, **options: Any) -> Any:
            places, mask = np.broadcast_arrays(ptrs.data, args[mask_at].data)
            places = places[mask.astype(bool)].astype(np.int64)
            for begin, end in zones:
                assert not ((places >= begin) & (places < end)).any(), f"{name} beside a tensor"
            return launched(self, ptrs, *args, **options)

        monkeypatch.setattr(interpreter.InterpreterBuilder, name, checked)

    looked_at("create_masked_load", 0)
    looked_at("create_masked_store", 1)
    return guarded


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_and_its_gradients(name: str, rows: int, dim: int, guard: Guard) -> None:
    options = {key: guard(x(rows)) if callable(x) else x for key, x in OPTIONS[name].items()}
    leaves = [guard(randn(*shape, dim)).requires_grad_() for shape in ((2, 4, rows), (2, 2, 37), (2, 2, 37))]
    out = fa.attention(*leaves, **options, backend="auto" if rows == 1 else "triton")
    if rows > 1:
        torch.autograd.grad(out, leaves, guard(torch.ones_like(out)))


@pytest.mark.parametrize("rows", [1, 30])
def test_packed_sequences(rows: int, guard: Guard) -> None:
    leaves = [guard(randn(*shape, 16)).requires_grad_() for shape in ((rows + 5, 4), (47, 2), (47, 2))]
    tables = [guard(torch.tensor(ends, dtype=torch.int32)) for ends in ([0, rows, rows + 5], [0, 23, 47])]
    out = fa.attention_varlen(*leaves, *tables, max_seqlen_q=max(rows, 5), max_seqlen_k=24)
    torch.autograd.grad(out, leaves, guard(torch.ones_like(out)))


@pytest.mark.parametrize("lens", [[32, 1], [64, 64], [0, 33]], ids=str)
@pytest.mark.parametrize("page", [0, 16, 64])
def test_caches(lens: list[int], page: int, guard: Guard) -> None:
    q, k, v = (guard(randn(*shape, 16)) for shape in ((2, 4, 1), *((6 if page else 2, 2, page or 64),) * 2))
    table = (torch.arange(8) % 6).view(2, 4)[:, : 64 // (page or 64)].to(torch.int32)
    pages = {"block_table": guard(table)} if page else {}
    fa.attention_decode(q, k, v, guard(torch.tensor(lens, dtype=torch.int32)), **pages)


def test_the_zones_are_looked_at(guard: Guard) -> None:
    x = guard(randn(2, 2, 37, 16))
    longer = x.as_strided((2, 2, 38, 16), x.stride(), x.storage_offset())
    with pytest.raises(Exception, match="create_masked_load beside a tensor"):  # the interpreter wraps it in its own
        fa.attention(longer, longer, longer, backend="triton")
