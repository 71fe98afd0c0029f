"""Tensors in registers, pointers to global memory, and what Triton's language computes with them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace as Record
from typing import Any

import torch
from torch import Tensor

from tests.gluon_on_torch.turns import pause

RUBBISH = 7  # of any type: no NaN or infinity, which kernels mend
NO_LAYOUT = Record(layout=None)


class Dtype:
    def __init__(self, name: str, of: torch.dtype) -> None:
        self.name, self.torch = name, of
        self.primitive_bitwidth = 1 if of == torch.bool else 8 * of.itemsize

    def is_fp16(self) -> bool:
        return self.torch == torch.float16

    def is_fp64(self) -> bool:
        return self.torch == torch.float64

    def __repr__(self) -> str:
        return self.name


DTYPES = {
    name: Dtype(name, getattr(torch, name))
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
UINT32 = Dtype("uint32", torch.int64)  # PyTorch has next to nothing for its own


def dtype_of(x: torch.dtype) -> Dtype:
    return DTYPES[str(x).removeprefix("torch.")]


class Value:
    """A tensor in registers, or a scalar; types meet as in Triton, whose integers divide towards zero."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    type = NO_LAYOUT
    shape = property(lambda self: list(self.x.shape))
    dtype = property(lambda self: dtype_of(self.x.dtype))

    def as_type(self, dtype: torch.dtype) -> Tensor:
        x = self.x
        return x if x.dtype == dtype else x.to(dtype)

    def to(self, dtype: Dtype, bitcast: bool = False) -> Value:
        if dtype is UINT32:
            return Value(self.x.to(torch.int64) & 0xFFFFFFFF)
        return Value(self.x.view(dtype.torch) if bitcast else self.x.to(dtype.torch))

    def __getitem__(self, at: Any) -> Value:
        return Value(self.x[at])

    def __bool__(self) -> bool:
        assert self.x.numel() == 1, "a choice by a tensor"
        return bool(self.x)

    def __index__(self) -> int:
        return int(self.x)

    def __neg__(self) -> Value:
        return Value(-self.x)

    def __hash__(self) -> int:
        raise TypeError("a value of the GPU is no key")


class Scalar(Value):
    """An integer or a bool, which Python computes in a fraction of PyTorch's time; it must fit into its type."""

    def __init__(self, number: int, rank: int) -> None:
        self.number, self.rank = number, rank  # rank: of its type in WHOLE
        limit = LIMITS[rank]
        assert -limit <= number < limit, f"{number} is no {WHOLE[rank]}"

    x = property(lambda self: constant(self.number, TYPES[self.rank]))
    shape = property(lambda self: [])
    dtype = property(lambda self: DTYPES[WHOLE[self.rank]])

    def as_type(self, dtype: torch.dtype) -> Tensor:
        return constant(self.number, dtype)

    def to(self, dtype: Dtype, bitcast: bool = False) -> Value:
        if dtype is UINT32:
            return Scalar(self.number & 0xFFFFFFFF, WHOLE.index("int64"))
        if bitcast or dtype.name not in WHOLE:
            return Value(self.x).to(dtype, bitcast)
        rank = WHOLE.index(dtype.name)
        return Scalar((self.number + LIMITS[rank]) % (2 * LIMITS[rank]) - LIMITS[rank] if rank else bool(self), rank)

    def __bool__(self) -> bool:
        return bool(self.number)

    def __index__(self) -> int:
        return self.number

    def __neg__(self) -> Value:
        return Scalar(-self.number, self.rank)

    __hash__ = Value.__hash__


WHOLE = ("bool", "int32", "int64")
LIMITS = (2, 1 << 31, 1 << 63)
TYPES = tuple(DTYPES[name].torch for name in WHOLE)


@functools.lru_cache(1 << 14)
def constant(number: int, dtype: torch.dtype) -> Tensor:
    """Nobody writes into it."""
    return torch.tensor(number, dtype=dtype)


def of_tensor(x: Tensor) -> Value:
    """A tensor or a scalar."""
    if x.ndim == 0 and dtype_of(x.dtype).name in WHOLE:
        return Scalar(x.item(), WHOLE.index(dtype_of(x.dtype).name))
    return Value(x)


def value(x: Any) -> Value:
    """Numbers become scalars of 32 bits if they fit."""
    if isinstance(x, Value):
        return x
    if isinstance(x, int):
        return Scalar(x, 0 if isinstance(x, bool) else 1 if -LIMITS[1] <= x < LIMITS[1] else 2)
    return Value(torch.tensor(x, dtype=torch.float32))


WHOLES, KNOWN = (Scalar, int), (Value, int, float)  # a type made of types would be made anew at each question


def whole(x: Any) -> bool:
    return isinstance(x, WHOLES)


def alike(*values: Any) -> list[Tensor]:
    """Tensors of the type in which these meet: numbers take the others' if those can hold them."""
    known = {TYPES[one.rank] if isinstance(one, Scalar) else one.x.dtype for one in values if isinstance(one, Value)}
    if any(isinstance(one, float) for one in values) and not any(dtype.is_floating_point for dtype in known):
        known.add(torch.float32)
    if not known:
        return [value(one).x for one in values]
    if known == {torch.bool} and any(type(one) is int for one in values):
        known = {torch.int32}
    dtype = functools.reduce(torch.promote_types, known)
    return [one.as_type(dtype) if isinstance(one, Value) else of_number(one, dtype) for one in values]


def of_number(number: int | float, dtype: torch.dtype) -> Tensor:
    return constant(number, dtype) if isinstance(number, int) else torch.tensor(number, dtype=dtype)


def divide(a: Tensor, b: Tensor) -> Tensor:
    assert not a.dtype.is_floating_point
    return torch.div(a, b, rounding_mode="trunc")


def divide_numbers(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def method(on_tensors: Any, on_numbers: Any, compares: bool, swapped: bool) -> Any:
    """x op y, or with `swapped` y op x; pointers and what is no value have a say."""

    def act(self: Value, other: Any) -> Any:
        if isinstance(self, Scalar) and isinstance(other, WHOLES):
            other = value(other)
            a, b = (other.number, self.number) if swapped else (self.number, other.number)
            result, rank = on_numbers(a, b), max(self.rank, other.rank)
            return Scalar(result, 0 if compares else rank if rank or isinstance(result, bool) else 1)
        if isinstance(other, KNOWN):
            return Value(on_tensors(*(alike(other, self) if swapped else alike(self, other))))
        return NotImplemented

    return act


for name, on_tensors, on_numbers in (
    ("add", torch.add, operator.add), ("sub", torch.sub, operator.sub), ("mul", torch.mul, operator.mul),
    ("truediv", torch.div, None), ("floordiv", divide, divide_numbers),
    ("mod", torch.fmod, lambda a, b: a - divide_numbers(a, b) * b), ("and", torch.bitwise_and, operator.and_),
    ("or", torch.bitwise_or, operator.or_), ("xor", torch.bitwise_xor, operator.xor),
    ("rshift", torch.bitwise_right_shift, operator.rshift), ("lshift", torch.bitwise_left_shift, operator.lshift),
    *((name, getattr(torch, name), getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
):  # fmt: skip
    compares = name in ("eq", "ne", "lt", "le", "gt", "ge")
    setattr(Value, f"__{name}__", method(on_tensors, on_numbers, compares, swapped=False))
    if not compares:
        setattr(Value, f"__r{name}__", method(on_tensors, on_numbers, compares, swapped=True))


class Pointer:
    """Places in a tensor's memory, counted in its elements."""

    vector = 1  # neighbours along the last dimension that are loaded or stored together, as the kernel has promised

    def __init__(self, memory: Tensor, at: Tensor) -> None:
        self.memory, self.at = memory, at
        self.dtype = Record(element_ty=dtype_of(memory.dtype))

    @staticmethod
    def to_tensor(x: Tensor) -> Pointer:
        x = x.detach()
        return Pointer(torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()), torch.tensor(x.storage_offset()))

    def to(self, dtype: Dtype) -> Pointer:
        """To words of another size."""
        size, other = self.memory.itemsize, dtype.torch.itemsize
        whole = self.memory.numel() * size // other * other // size
        return Pointer(self.memory[:whole].view(dtype.torch), divide(self.at * size, torch.tensor(other)))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + value(more).x)

    def __sub__(self, less: Any) -> Pointer:
        return Pointer(self.memory, self.at - value(less).x)

    def __getitem__(self, at: Any) -> Pointer:
        return Pointer(self.memory, self.at[at])

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
        assert (inside | ~mask).all(), "outside of the tensor's memory"
        if self.vector > 1:
            runs = mask.unflatten(-1, (-1, self.vector))
            assert (runs == runs[..., :1]).all(), "a vector is read whole or not at all"
        return torch.where(inside, at, 0), mask, *values


def load(ptr: Pointer, mask: Any = True, other: Any = RUBBISH, eviction_policy: str = "") -> Value:
    at, mask, other = ptr.wanted(mask, other)
    return of_tensor(torch.where(mask, ptr.memory[at], other.to(ptr.memory.dtype)))


def store(ptr: Pointer, values: Any, mask: Any = True) -> None:
    at, mask, values = ptr.wanted(mask, values)
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


def largest(x: Value, axis: int) -> Value:
    """Without NaN, where there is a number."""
    if not x.x.dtype.is_floating_point:
        return of_tensor(x.x.amax(axis))
    return Value(torch.where(x.x.isnan(), -math.inf, x.x).amax(axis).where(~x.x.isnan().all(axis), math.nan))


def either(function: Callable[..., Tensor], on_numbers: Callable[[int, int], int]) -> Callable[[Any, Any], Value]:
    def act(a: Any, b: Any) -> Value:
        if whole(a) and whole(b):
            a, b = value(a), value(b)
            return Scalar(on_numbers(a.number, b.number), max(a.rank, b.rank))
        return Value(function(*alike(a, b)))

    return act


def elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Value]:
    return lambda x: Value(function(value(x).x))


def rounded(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Value]:
    """By way of float64: PyTorch's float32 has other last bits at the end of a tensor than within."""
    return lambda x: Value(function(value(x).x.double()).float())


def where(condition: Any, a: Any, b: Any) -> Value:
    if whole(condition) and whole(a) and whole(b):
        a, b = value(a), value(b)
        return Scalar((a if condition else b).number, max(a.rank, b.rank))
    return Value(torch.where(value(condition).x, *alike(a, b)))


def fma(a: Any, b: Any, c: Any) -> Value:
    a, b, c = (value(one).x.double() for one in (a, b, c))
    return Value((a * b + c).float())


def total(x: Value, axis: int) -> Value:
    """In an order that nothing depends on: exactly enough."""
    return Value(x.x.double().sum(axis).float() if x.x.dtype.is_floating_point else x.x.sum(axis, dtype=x.x.dtype))


def clamp(x: Value, low: float, high: float, propagate_nan: Any = None) -> Value:
    return Value(x.x.clamp(low, high))


def full(shape: list[int], x: Any, dtype: Dtype, layout: Any = None) -> Value:
    return Value(value(x).x.to(dtype.torch).expand(list(map(int, shape))).clone())


def gather(x: Value, at: Value, axis: int) -> Value:
    return Value(x.x.gather(axis, at.x.long()))


def reduce(x: Value, axis: int, function: Callable[[Value, Value], Value]) -> Value:
    """Neighbours by pairs, then pairs."""
    parts = x.x.movedim(axis, 0)
    while len(parts) > 1:
        parts = function(Value(parts[::2]), Value(parts[1::2])).x
    return Value(parts[0])


def interleave(a: Value, b: Value) -> Value:
    return Value(torch.stack(alike(a, b), -1).flatten(-2))


FUNCTIONS: dict[str, Any] = dict(
    arange=lambda start, end, layout=None: Value(torch.arange(int(start), int(end), dtype=torch.int32)),
    full=full, zeros=lambda shape, dtype, layout=None: full(shape, 0, dtype), zeros_like=elementwise(torch.zeros_like),
    load=load, store=store, cast=lambda x, dtype: value(x).to(dtype), atomic_add=atomic(torch.add),
    atomic_max=atomic(torch.maximum), max=largest, sum=total, where=where, fma=fma, clamp=clamp, reduce=reduce,
    maximum=either(torch.fmax, max), minimum=either(torch.fmin, min), abs=elementwise(torch.abs),
    exp2=rounded(torch.exp2), log2=rounded(torch.log2), rsqrt=elementwise(torch.rsqrt),
    ceil=elementwise(torch.ceil), gather=gather,
    cdiv=lambda a, b: (a + b - 1) // b,
    reshape=lambda x, shape: Value(x.x.reshape(shape)),
    permute=lambda x, order: Value(x.x.permute(order)), split=lambda x: tuple(map(Value, x.x.unbind(-1))),
    interleave=interleave, convert_layout=lambda x, layout, assert_trivial=False: x,
    multiple_of=lambda ptr, counts: ptr.multiple_of(counts), max_contiguous=lambda ptr, counts: ptr.vectors(counts),
)  # fmt: skip
