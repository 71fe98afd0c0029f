"""Tensors in registers, and what Triton's language computes with them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace as Record
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, maybe_get_bdim

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
        return x if x.dtype is dtype else x.to(dtype)

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


def of_all(x: Tensor) -> Tensor:
    """What torch.vmap shows one program of, of all of them: along a first dimension."""
    if not is_batchedtensor(x):
        return x
    return get_unwrapped(x).movedim(maybe_get_bdim(x), 0)


WHOLE = ("bool", "int32", "int64")
LIMITS = (2, 1 << 31, 1 << 63)
TYPES = tuple(DTYPES[name].torch for name in WHOLE)


@functools.lru_cache(1 << 14)
def constant(number: int | float, dtype: torch.dtype) -> Tensor:
    """Nobody writes into it."""
    return torch.tensor(number, dtype=dtype)


def of_tensor(x: Tensor) -> Value:
    """A tensor or a scalar; of programs that run as one (`of_all`) what all have alike."""
    if x.ndim or x.dtype not in TYPES:
        return Value(x)
    numbers = of_all(x).view(-1)
    return Scalar(numbers[0].item(), TYPES.index(x.dtype)) if (numbers == numbers[0]).all() else Value(x)


def value(x: Any) -> Value:
    """Numbers become scalars of 32 bits if they fit."""
    if isinstance(x, Value):
        return x
    if isinstance(x, int):
        return Scalar(x, rank_of(x))
    return Value(of_number(x, torch.float32))


def rank_of(number: int) -> int:
    """Of the type that a number has by itself."""
    return 0 if isinstance(number, bool) else 1 if -LIMITS[1] <= number < LIMITS[1] else 2


WHOLES, KNOWN = (Scalar, int), (Value, int, float)  # a type made of types would be made anew at each question


def whole(x: Any) -> bool:
    return isinstance(x, WHOLES)


def alike(*values: Any) -> list[Tensor]:
    """Tensors of the type in which these meet: numbers take the others' if those can hold them."""
    dtype, of_floats = None, False
    for one in values:
        if isinstance(one, Value):
            own = TYPES[one.rank] if type(one) is Scalar else one.x.dtype
            dtype = own if dtype is None or dtype is own else torch.promote_types(dtype, own)
        elif type(one) is float:
            of_floats = True
    if of_floats and (dtype is None or not dtype.is_floating_point):
        dtype = torch.float32
    if dtype is None:
        return [value(one).x for one in values]
    if dtype is torch.bool and any(type(one) is int for one in values):
        dtype = torch.int32
    return [one.as_type(dtype) if isinstance(one, Value) else of_number(one, dtype) for one in values]


def of_number(number: int | float, dtype: torch.dtype) -> Tensor:
    known = isinstance(number, int) or (number != 0 and number == number)  # 0.0 and -0.0 are one key, NaN is none
    return constant(number, dtype) if known else torch.tensor(number, dtype=dtype)


def divide(a: Tensor, b: Tensor) -> Tensor:
    assert not a.dtype.is_floating_point
    return torch.div(a, b, rounding_mode="trunc")


def divide_numbers(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def method(on_tensors: Any, on_numbers: Any, compares: bool, swapped: bool) -> Any:
    """x op y, or with `swapped` y op x; pointers and what is no value have a say."""

    def act(self: Value, other: Any) -> Any:
        kind = type(other)
        if kind is Value and type(self) is Value and self.x.dtype is other.x.dtype:  # most are; the rest costs time
            return of_tensor(on_tensors(other.x, self.x) if swapped else on_tensors(self.x, other.x))
        if isinstance(self, Scalar) and isinstance(other, WHOLES):
            number, rank = (other.number, other.rank) if kind is Scalar else (other, rank_of(other))
            result = on_numbers(number, self.number) if swapped else on_numbers(self.number, number)
            return Scalar(result, 0 if compares else max(self.rank, rank) or (0 if isinstance(result, bool) else 1))
        if isinstance(other, KNOWN):
            return of_tensor(on_tensors(*(alike(other, self) if swapped else alike(self, other))))
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
    cast=lambda x, dtype: value(x).to(dtype), max=largest, sum=total, where=where, fma=fma, clamp=clamp, reduce=reduce,
    maximum=either(torch.fmax, max), minimum=either(torch.fmin, min), abs=elementwise(torch.abs),
    exp2=rounded(torch.exp2), log2=rounded(torch.log2), rsqrt=elementwise(torch.rsqrt),
    ceil=elementwise(torch.ceil), gather=gather,
    cdiv=lambda a, b: (a + b - 1) // b,
    reshape=lambda x, shape: Value(x.x.reshape(shape)),
    permute=lambda x, order: Value(x.x.permute(order)), split=lambda x: tuple(map(Value, x.x.unbind(-1))),
    interleave=interleave, convert_layout=lambda x, layout, assert_trivial=False: x,
)  # fmt: skip
