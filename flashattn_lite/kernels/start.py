"""Starting one compiled kernel again and again, in few microseconds: what only the shapes decide is worked out once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton import knobs

from flashattn_lite.kernels.compiling import Launch, compile_together
from flashattn_lite.kernels.descriptors import Descriptors, Launcher, addressed, found

T = TypeVar("T")

POOL = 1 << 14  # counters zeroed at a time: 64 KiB
# Every kernel asks for the fma that it means: one of s * scale - m behind our back would make p of the largest score
# differ from 1 (device/state.py).
AS_WRITTEN = {"enable_fp_fusion": False}


class Plan(NamedTuple):
    """One launch, to look at, to compile or to interpret: `kernel[grid](*args, **kwargs)`."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Starter:
    """One kernel, grid and set of options, started on one device, the current one; `on` makes it the tensors'.

    The first call compiles, or finds the kernel in Triton's cache. Later calls go past Triton's inspection of the
    arguments, so every call must bring arguments of the same types, compile-time values and alignments; None or a
    constexpr stays what it was. Where the kernel takes descriptors, a call brings the tensors.
    """

    def __init__(
        self, kernel: Any, blocks: int, options: dict[str, Any], descriptors: Descriptors | None = None
    ) -> None:
        self.kernel, self.grid, self.options = kernel, (blocks, 1, 1), {**options, **AS_WRITTEN}
        self.descriptors = descriptors or Descriptors()
        # Once there was a call: the device's index, and where tensors are arguments by themselves, no descriptors.
        self.index, self.pointers = 0, list[int]()
        self.compiled: Any = None
        self.runner: Any = None
        self.launcher: Launcher | None = None

    def __call__(self, args: tuple[Any, ...]) -> None:
        compiled = self.compiled
        if compiled is None:
            self.index = torch.cuda.current_device()
            stream = current_stream(self.index)
            described = self.described(args)
            self.pointers = [i for i, x in enumerate(described) if hasattr(x, "data_ptr")]
            compiled = self.kernel[self.grid](*described, **self.options)
            below = compiled.run, without_hooks(compiled), self.descriptors
            launcher = found(*below, self.grid, stream, args)
            if self.compiled is None:  # else another thread was first, and its launcher may be in use
                self.launcher, self.runner, self.compiled = launcher, compiled[self.grid], compiled
            return
        stream = current_stream(self.index)
        if hooked():
            self.runner(*self.described(args), stream=stream)
        elif self.launcher is not None:
            self.launcher(self.grid, stream, args, self.pointers)
        else:
            given = addressed(self.described(args), self.pointers)
            compiled.run(*self.grid, stream, *without_hooks(compiled), *given)

    def described(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A call's arguments as the kernel takes them."""
        return self.descriptors.of(args)

    def plan(self, args: tuple[Any, ...]) -> Plan:
        return Plan(self.kernel, self.grid, self.described(args), self.options)


def start_all(launches: Sequence[Launch]) -> None:
    """Those that have blocks, in their order; where the first was not started yet, what is new is compiled before."""
    launches = [launch for launch in launches if launch[0].grid[0]]
    if len(launches) > 1 and launches[0][0].compiled is None:
        compile_together(launches)
    for start, args in launches:
        start(args)


def options_of(config: Any) -> dict[str, Any]:
    """Of a kernel of attention with such a tile."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def on(device: torch.device, launch: Callable[..., T], *args: Any) -> T:
    """launch(*args) while that GPU is the current one, which decides about streams, captures and kernels."""
    if torch.cuda.current_device() == device.index:
        return launch(*args)
    with torch.cuda.device(device):
        return launch(*args)


def without_hooks(compiled: Any) -> tuple[Any, ...]:
    """What `compiled.run` takes between stream and arguments, without the metadata that only hooks look at."""
    return compiled.function, compiled.packed_metadata, None, None, None


def hooked() -> bool:
    """Whether somebody wants to see Triton's launches, as a profiler does."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def current_stream(index: int) -> int:
    """Handle of torch's current stream on that device."""
    return torch._C._cuda_getCurrentRawStream(index)


def lasting_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros to keep from call to call, written in the order of the current stream.

    By a thread of their own: what this one allocates may belong to a pool of somebody's, in which nothing may stay
    (torch.cuda.use_mem_pool, and torch.compile when it warms up for CUDA graphs). Not an executor's, which starts none
    once the main thread has returned. Python 3.12 (as 3.12.1) then starts none at all, nor in an exit handler.
    """
    stream, made = torch.cuda.current_stream(device), Future[Tensor]()

    def make() -> None:
        try:
            with torch.cuda.stream(stream):
                made.set_result(torch.zeros(count, dtype=dtype, device=device))
        except BaseException as error:
            made.set_exception(error)

    try:
        Thread(target=make).start()
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
        make()  # the process ends, and with it whatever pool this is
    return made.result()


class Address:
    """One place in a tensor, as a kernel argument: a view of it, made in a tenth of the time."""

    __slots__ = ("address", "base", "dtype")

    def __init__(self, base: Tensor, offset: int) -> None:
        self.address, self.base, self.dtype = base.data_ptr() + offset, base, base.dtype

    def data_ptr(self) -> int:
        return self.address


class Counters:
    """Zeros on the GPU, one for each launch and never given twice, so that no two launches can meet on one.

    They are zeroed many at a time, in the order of the stream that uses them. A launch that a CUDA graph captures
    brings a zero of its own, set again by each replay.
    """

    def __init__(self) -> None:
        self.pools: dict[tuple[int, int], tuple[Tensor, Any]] = {}

    def next(self, device: torch.device) -> Tensor | Address:
        """An int32 zero. `device` is the current one."""
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(1, dtype=torch.int32, device=device)
        key = device.index, current_stream(device.index)
        pool = self.pools.get(key)
        at = POOL if pool is None else next(pool[1])
        if pool is None or at >= POOL:
            pool = lasting_zeros(POOL, torch.int32, device), itertools.count(1)
            self.pools[key] = pool
            at = 0
        return Address(pool[0], 4 * at)


counters = Counters()
