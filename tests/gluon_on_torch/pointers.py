"""Pointers to global memory, and what Triton's language does with them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Record
from typing import Any

import torch
from torch import Tensor

from tests.gluon_on_torch.turns import pause
from tests.gluon_on_torch.values import RUBBISH, Dtype, Value, divide, dtype_of, of_all, of_tensor, value


class Pointer:
    """Places in a tensor's memory, counted in its elements."""

    vector = 1  # neighbours along the last dimension that are loaded or stored together, as the kernel has promised

    def __init__(self, memory: Tensor, at: Tensor, whole: Tensor | None = None) -> None:
        self.memory, self.at = memory, at
        self.whole = memory if whole is None else whole  # with elements at its end that fill no word
        self.dtype = Record(element_ty=dtype_of(memory.dtype))

    @staticmethod
    def to_tensor(x: Tensor) -> Pointer:
        x = x.detach()
        return Pointer(torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()), torch.tensor(x.storage_offset()))

    def to(self, dtype: Dtype) -> Pointer:
        """To words of another size."""
        size, other = self.memory.itemsize, dtype.torch.itemsize
        bytes_ = self.whole.view(torch.uint8)
        words = bytes_[: bytes_.numel() // other * other].view(dtype.torch)
        return Pointer(words, divide(self.at * size, torch.tensor(other)), self.whole)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + value(more).x, self.whole)

    def __sub__(self, less: Any) -> Pointer:
        return Pointer(self.memory, self.at - value(less).x, self.whole)

    def __getitem__(self, at: Any) -> Pointer:
        return Pointer(self.memory, self.at[at], self.whole)

    def vectors(self, counts: list[int]) -> Pointer:
        """`max_contiguous`: so many neighbours lie side by side."""
        runs = self.at.unflatten(-1, (-1, counts[-1]))
        assert (runs - runs[..., :1] == torch.arange(counts[-1])).all(), "these are no neighbours"
        self.vector = counts[-1]
        return self

    def multiple_of(self, counts: int | list[int]) -> Pointer:
        """So many bytes divide the addresses; of a list's last, those at which vectors of as many begin."""
        size, count = self.memory.itemsize, counts[-1] if isinstance(counts, list) else counts
        first = self.at[..., :: max(1, count // size)] if isinstance(counts, list) else self.at
        assert (first * size % count == 0).all(), "a vector is not aligned"
        return self

    def wanted(self, *others: Any) -> tuple[Tensor, ...]:
        """Places, mask and values, all of one shape; what is wanted lies in the tensor's memory."""
        at, mask, *values = torch.broadcast_tensors(self.at, *(value(other).x for other in others))
        inside = (at >= 0) & (at < self.memory.numel())
        assert of_all(inside | ~mask).all(), "outside of the tensor's memory"
        if self.vector > 1:
            runs = mask.unflatten(-1, (-1, self.vector))
            assert (runs == runs[..., :1]).all(), "a vector is read whole or not at all"
        return torch.where(inside, at, 0), mask, *values


def load(ptr: Pointer, mask: Any = True, other: Any = RUBBISH, eviction_policy: str = "") -> Value:
    at, mask, other = ptr.wanted(mask, other)
    return of_tensor(torch.where(mask, ptr.memory[at], other.to(ptr.memory.dtype)))


def store(ptr: Pointer, values: Any, mask: Any = True) -> None:
    at, mask, values = torch.broadcast_tensors(*map(of_all, ptr.wanted(mask, values)))
    ptr.memory[at[mask]] = values[mask].to(ptr.memory.dtype)


def atomic(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Value]:
    def act(ptr: Pointer, values: Any, mask: Any = True, sem: str = "") -> Value:
        pause()
        at, mask, values = ptr.wanted(mask, values)
        assert mask.sum() == 1, "one thread asks"
        old = torch.where(mask, ptr.memory[at], RUBBISH)
        ptr.memory[at[mask]] = change(ptr.memory[at[mask]], values[mask].to(ptr.memory.dtype))
        return Value(old)

    return act


FUNCTIONS: dict[str, Any] = dict(
    load=load, store=store, atomic_add=atomic(torch.add), atomic_max=atomic(torch.maximum),
    multiple_of=lambda ptr, counts: ptr.multiple_of(counts), max_contiguous=lambda ptr, counts: ptr.vectors(counts),
)  # fmt: skip
