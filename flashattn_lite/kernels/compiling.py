"""Compiling several kernels side by side, ahead of the launches that are the first to need them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

from flashattn_lite import forks

Launch = tuple[Any, tuple[Any, ...]]  # a start.Starter with its arguments

_met: set[Any] = set()  # forms of launches whose kernels are compiled, or were asked for


def compile_together(launches: Iterable[Launch]) -> None:
    """Compiles the kernels of those launches whose form is new, side by side; starts none of them.

    Python walks over one kernel's source at a time, but Triton lets go of Python's lock for what comes behind. What
    fails here fails again when it is started, and is told there; where the interpreter ends, no thread starts. A single
    new one is left to its launch, and so is one that only an address or a number makes other code.
    """
    device = torch.cuda.current_device()
    new: dict[Any, Launch] = {}
    for start, args in launches:
        if start.grid[0] and (form := (device, *form_of(start, args))) not in _met:
            new[form] = start, start.described(args)
    _met.update(new)
    if len(new) < 2:
        return

    def compile(start: Any, args: tuple[Any, ...]) -> None:
        with torch.cuda.device(device):
            start.kernel.warmup(*args, grid=start.grid, **start.options)

    with no_garbage_collected(), suppress(RuntimeError), ThreadPoolExecutor() as pool:
        for launch in new.values():
            pool.submit(compile, *launch)


def form_of(start: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What decides about the code but for alignments and the like: compile-time values, types of the rest, options."""
    given = zip(args, start.kernel.params, strict=False)
    kinds = (x if param.is_constexpr else getattr(x, "dtype", type(x)) for x, param in given)
    return start.kernel, *start.options.items(), *kinds


_lock = forks.lock()
_inside, _collected = 0, False  # threads for which no garbage is collected; whether it was before


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """ast.parse of two threads at once may fail for nothing (seen on Python 3.11.7).

    A collection that begins within one may let the other in, and they count how deep they are as one.
    """
    global _inside, _collected
    with _lock:
        if not _inside:
            _collected = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _collect_again()


def _collect_again() -> None:
    if _collected:
        gc.enable()


def _in_child() -> None:
    """A forked child has none of the threads that were inside."""
    global _inside
    if _inside:
        _inside = 0
        _collect_again()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
