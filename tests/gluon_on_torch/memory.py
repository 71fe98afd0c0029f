"""Shared memory, the barriers on which it changes hands, and the hardware that copies and multiplies."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace as Record
from typing import Any

import torch
from torch import Tensor

from tests.gluon_on_torch.pointers import Pointer, load
from tests.gluon_on_torch.turns import Role, here, pause
from tests.gluon_on_torch.values import NO_LAYOUT, RUBBISH, Dtype, Value, dtype_of


class Shared:
    """Elements, and of each whether a role wrote it with no fence behind."""

    def __init__(self, x: Tensor, written: Tensor) -> None:
        self.x, self.written = x, written
        self.dtype = dtype_of(x.dtype)

    type = NO_LAYOUT
    shape = property(lambda self: list(self.x.shape))

    def map(self, change: Callable[[Tensor], Tensor]) -> Shared:
        return Shared(change(self.x), change(self.written))

    def index(self, at: Any) -> Shared:
        assert 0 <= int(at) < len(self.x)
        return self.map(lambda x: x[int(at)])

    def reshape(self, shape: list[int]) -> Shared:
        return self.map(lambda x: x.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self.map(lambda x: x.permute(order))

    def load(self, layout: Any) -> Value:
        return Value(self.x.clone())

    def store(self, values: Value) -> None:
        assert values.shape == self.shape
        self.x.copy_(values.x)
        self.written.fill_(True)
        unfenced().append(self)

    def for_hardware(self) -> Tensor:
        assert not self.written.any(), "written with no fence behind it"
        return self.x.clone()


class BarrierLayout:
    pass


def allocate_shared_memory(dtype: Dtype, shape: list[int], layout: Any) -> Any:
    if isinstance(layout, BarrierLayout):
        return Barriers(shape[0])
    return Shared(torch.full(shape, RUBBISH, dtype=dtype.torch), torch.zeros(shape, dtype=torch.bool))


def reinterpret(memory: Shared, dtype: Dtype, shape: list[int], layout: Any) -> Shared:
    words = dtype.torch.itemsize // memory.x.itemsize  # of a wider element the first stands for all
    return Shared(memory.x.view(-1).view(dtype.torch).view(shape), memory.written.view(-1)[::words].view(shape))


def unfenced() -> list[Shared]:
    """What this role has written since its last fence."""
    return here.role.__dict__.setdefault("unfenced", [])


def fence_async_shared() -> None:
    for part in unfenced():
        part.written.fill_(False)
    unfenced().clear()


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self.all[int(at)]


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have landed."""

    count = arrivals = awaited = phases = 0

    def arrive(self, count: int) -> None:
        self.arrivals += count
        assert self.arrivals <= self.count, "one arrival too many"
        self.look()

    def __repr__(self) -> str:
        return f"a barrier in phase {self.phases}, {self.arrivals} of {self.count} here, {self.awaited} bytes to come"

    def look(self) -> None:
        if self.arrivals == self.count and self.awaited == 0:
            self.arrivals, self.phases = 0, self.phases + 1


def init(barrier: Barrier, count: int) -> None:
    assert barrier.count == 0
    barrier.count = count


def expect(barrier: Barrier, nbytes: int) -> None:
    barrier.awaited += nbytes
    barrier.arrive(1)
    pause()


def arrive(barrier: Barrier, count: int = 1) -> None:
    barrier.arrive(count)
    pause()


def wait(barrier: Barrier, phase: Any) -> None:
    """For the end of a phase of this parity: the one that goes on, or the one before."""
    parity = int(phase)
    pause(lambda: barrier.phases & 1 != parity, lambda: f"parity {parity} of {barrier}")


# -------------------------------------------------------------------------------------------------- copies by hardware
class Descriptor:
    """A tensor of which TMA copies blocks: zeros beyond its ends, where nothing is written."""

    def __init__(self, of: Any) -> None:
        base = of.base.detach()
        self.x = base.as_strided(of.shape, of.strides, base.storage_offset())
        self.block, self.layout, self.dtype = of.block_shape, of.layout, dtype_of(base.dtype)
        self.block_type = Record(nbytes=math.prod(of.block_shape) * base.element_size())

    def parts(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(in the tensor, in the block) of the elements that both have."""
        inside, own = [], []
        for first, size, length in zip(at, self.block, self.x.shape, strict=True):
            low = max(first, 0)
            high = max(min(first + size, length), low)
            inside.append(slice(low, high))
            own.append(slice(low - first, high - first))
        return tuple(inside), tuple(own)


class Copy:
    """A block on its way, of a role of a program."""

    def __init__(self, desc: Descriptor, at: list[Any], buffer: Shared) -> None:
        assert buffer.shape == list(desc.block) and buffer.dtype is desc.dtype
        self.desc, self.at, self.buffer, self.role = desc, [int(i) for i in at], buffer, here.role
        self.run = here.role.run
        self.weight = self.run.weight()
        self.run.events.append(self)


class Load(Copy):
    def __init__(self, desc: Descriptor, at: list[Any], full: Barrier, buffer: Shared) -> None:
        super().__init__(desc, at, buffer)
        assert not buffer.written.any(), "written with no fence behind it, and overwritten"
        self.full = full
        buffer.x.fill_(RUBBISH)

    def happen(self) -> None:
        inside, own = self.desc.parts(self.at)
        self.buffer.x.zero_()
        self.buffer.x[own] = self.desc.x[inside]
        self.buffer.written.zero_()
        self.full.awaited -= self.desc.block_type.nbytes
        self.full.look()
        self.run.events.remove(self)


def tma_load(desc: Descriptor, at: list[Any], full: Barrier, buffer: Shared) -> None:
    Load(desc, at, full, buffer)
    pause()


class Store(Copy):
    """Its buffer is read first, then its bytes arrive."""

    read: Tensor | None = None
    arrived = False

    def happen(self) -> None:
        if self.read is None:
            self.read = self.buffer.for_hardware()
        else:
            inside, own = self.desc.parts(self.at)
            self.desc.x[inside] = self.read[own]
            self.arrived = True
            self.run.events.remove(self)


def stores() -> list[Store]:
    """This role's, the oldest first; from the first on of which not all has arrived."""
    every: list[Store] = here.role.__dict__.setdefault("stores", [])
    while every and every[0].arrived:
        every.pop(0)
    return every


def tma_store(desc: Descriptor, at: list[Any], buffer: Shared) -> None:
    buffer.for_hardware()
    stores().append(Store(desc, at, buffer))
    pause()


def store_wait(pendings: int) -> None:
    """Until all but the last so many of this role's stores have been read out of their buffers."""
    older = stores()[: max(len(stores()) - pendings, 0)]
    pause(lambda: all(one.read is not None for one in older), lambda: "its stores' buffers")


def writes_done() -> None:
    every = stores()[:]
    pause(lambda: all(one.arrived for one in every), lambda: "its stores")


def check_done(program: Any) -> None:
    """At a program's end, when others get its shared memory, nothing reads or writes it any more."""
    own = [event for event in here.role.run.events if event.role.program is program]
    assert all(isinstance(event, Store) and event.read is not None for event in own), "a copy is under way at the end"


class Fetch:
    """Words on their way by cp.async."""

    def __init__(self, buffer: Shared, ptr: Pointer, mask: Any) -> None:
        self.buffer, self.ptr, self.mask, self.role = buffer, ptr, mask, here.role
        self.weight = self.role.run.weight()
        self.role.run.events.append(self)
        buffer.x.fill_(RUBBISH)

    def happen(self) -> None:
        self.buffer.x.copy_(load(self.ptr, self.mask).x)
        self.role.run.events.remove(self)
        for group in self.role.fetches:
            if self in group:
                group.remove(self)


def fetches() -> list[list[Fetch]]:
    """This role's, by groups; the last is not closed yet."""
    return here.role.__dict__.setdefault("fetches", [[]])


def async_load(buffer: Shared, ptr: Pointer, mask: Any = True) -> None:
    fetches()[-1].append(Fetch(buffer, ptr, mask))


def commit_group() -> None:
    fetches().append([])
    pause()


def wait_group(pendings: int) -> None:
    """Until all but the last so many groups have landed."""
    older = fetches()[: max(len(fetches()) - 1 - pendings, 0)]
    pause(lambda: not any(older), lambda: "copies by cp.async")


# ------------------------------------------------------------------------------------------------------------- products
class Product(Value):
    """Of two tensors by wgmma: to be used when it was waited for."""

    result: Tensor | None = None

    def __init__(self, a: Value | Shared, b: Shared, acc: Value, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc

    @property
    def x(self) -> Tensor:
        raise AssertionError("a product is used before it was waited for")


class Unit:
    """Computes a role's products in the order in which they were issued."""

    def __init__(self, role: Role) -> None:
        self.role, self.events, self.weight = role, role.run.events, role.run.weight()
        self.queue: list[Product] = []

    def issue(self, product: Product) -> None:
        if not self.queue:
            self.events.append(self)
        self.queue.append(product)

    def happen(self) -> None:
        one = self.queue.pop(0)
        a = one.a.x if isinstance(one.a, Value) else one.a.for_hardware()
        product = a.double() @ one.b.for_hardware().double()
        if one.use_acc:
            product += one.acc.result if isinstance(one.acc, Product) else one.acc.x
        one.result = product.float()
        if not self.queue:
            self.events.remove(self)


def unit() -> Unit:
    """This role's."""
    role = here.role
    if not hasattr(role, "unit"):
        role.unit = Unit(role)
    return role.unit


def warpgroup_mma(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    product = Product(a, b, acc, use_acc)
    unit().issue(product)
    pause()
    return product if is_async else warpgroup_mma_wait(0, [product])


def warpgroup_mma_wait(outstanding: int, products: list[Any]) -> Value:
    while len(unit().queue) > outstanding:
        unit().happen()
    assert all(product.result is not None for product in products), "a product that this does not wait for"
    pause()
    results = tuple(Value(product.result) for product in products)
    return results if len(results) > 1 else results[0]
