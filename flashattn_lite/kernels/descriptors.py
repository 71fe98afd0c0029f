"""What Triton's launcher does in Python is kept from one launch to the next, tensor maps above all.

A launch brings tensors where its kernel takes descriptors, which `Descriptors` makes of them. Of each, Triton makes a
tensor map at each launch: the function `launch` of its launcher puts maps, sizes and strides in the place of
descriptors, and hands all on to `launcher`, which is C. Without descriptors `launch` itself is. So it is in Triton 3.6
to 3.9, and `found` looks whether it is: then C is called with what was handed on before, and a map that was made for
that address serves again (`Launcher`). Where it is not, every launch is Triton's own.
"""

from __future__ import annotations

import copy
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

MOST = 1024  # maps that a kernel keeps; past that all are forgotten

Grid = tuple[int, int, int]


class Descriptors:
    """The tensor descriptors, if any, that a kernel takes as its arguments first <= i < last. Keeps no tensor alive."""

    def __init__(self, *descriptors: Any, first: int = 0) -> None:
        """Of any tensors with the shapes and strides that all launches have."""
        self.first, self.last = first, first + len(descriptors)
        self.blank = list(map(copy.copy, descriptors))
        for descriptor in self.blank:
            descriptor.base = None

    def of(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A launch's arguments, descriptors of its own in the place of tensors."""
        made = list(map(copy.copy, self.blank))
        for descriptor, base in zip(made, args[self.first : self.last], strict=True):
            descriptor.base = base
        return (*args[: self.first], *made, *args[self.last :])


class Launcher:
    """Launches one compiled kernel, by tensors where its arguments are descriptors.

    From launch to launch those tensors may differ in their addresses, not in sizes and strides; other arguments in all.
    `run` is Triton's launcher, `fixed` what it takes between the stream and the kernel's arguments.
    """

    def __init__(self, run: Any, fixed: tuple[Any, ...], descriptors: Descriptors) -> None:
        self.run, self.fixed, self.descriptors = run, fixed, descriptors
        self.first, self.last = descriptors.first, descriptors.last
        self.launcher = below(run.launch)
        self.kept: dict[tuple[int, int], list[Any]] = {}  # by descriptor and address: its map, sizes and strides
        self.nested = False  # the kernel's arguments are handed on as one list
        self.between: tuple[Any, ...] = ()  # what is handed on between the stream and the kernel's arguments

    def __call__(self, grid: Grid, stream: int, args: tuple[Any, ...], pointers: Sequence[int]) -> None:
        """pointers: where tensors are arguments by themselves, and no descriptors."""
        try:
            maps = [self.kept[i, args[i].data_ptr()] for i in range(self.first, self.last)]
        except KeyError:
            maps = self.learn(grid, stream, args)
        given = addressed(args, pointers)
        flat = [*given[: self.first], *itertools.chain.from_iterable(maps), *given[self.last :]]
        if self.nested:
            self.launcher(*grid, stream, *self.between, flat)
        else:
            self.launcher(*grid, stream, *self.between, *flat)

    def learn(self, grid: Grid, stream: int, args: tuple[Any, ...]) -> list[list[Any]]:
        """Has Triton make these descriptors' maps, and keeps them. LookupError if they are handed on otherwise."""
        handed = handed_on(self.run, *grid, stream, *self.fixed, *self.descriptors.of(args))
        ends = [self.first]
        for descriptor in self.descriptors.blank:
            ends.append(ends[-1] + 1 + 2 * len(descriptor.shape))
        count = ends[-1] + len(args) - self.last
        self.nested = isinstance(handed[-1], (list, tuple))
        at = len(handed) - (1 if self.nested else count)
        flat = [*handed[-1]] if self.nested else [*handed[at:]]
        self.between = handed[4:at]
        maps = [flat[start:end] for start, end in itertools.pairwise(ends)]
        others, given = [*flat[: self.first], *flat[ends[-1] :]], [*args[: self.first], *args[self.last :]]
        untouched = len(others) == len(given) and all(map(operator.is_, others, given))
        if handed[:4] != (*grid, stream) or not untouched or any(hasattr(of[0], "data_ptr") for of in maps):
            raise LookupError("Triton's launcher hands on something else")
        if len(self.kept) + len(maps) > MOST:
            self.kept.clear()
        for i, parts in enumerate(maps, self.first):
            self.kept[i, args[i].data_ptr()] = parts
        return maps


def addressed(args: Iterable[Any], pointers: Sequence[int]) -> list[Any]:
    """Arguments with addresses in the place of tensors, about each of which Triton's launcher would ask the driver."""
    given = [*args]
    for i in pointers:
        given[i] = given[i].data_ptr()
    return given


def below(launch: Any) -> Callable[..., None]:
    """What `launch` hands on to, or if it is of C, `launch`. LookupError where it hands on to something else."""
    if not isinstance(launch, types.FunctionType):
        return cast("Callable[..., None]", launch)
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
    launcher: Callable[..., None] = cells["launcher"].cell_contents
    return launcher


def handed_on(run: Any, *args: Any) -> tuple[Any, ...]:
    """What Triton's launcher `run`, called with args, hands on; nothing is launched."""
    handed: list[tuple[Any, ...]] = []
    catch = lambda *args: handed.append(args)
    recorder = copy.copy(run)  # not the launcher itself, which other threads use
    recorder.launch, launch = catch, run.launch
    if isinstance(launch, types.FunctionType):
        cells = zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True)
        closure = tuple(types.CellType(catch) if name == "launcher" else cell for name, cell in cells)
        recorder.launch = types.FunctionType(launch.__code__, launch.__globals__, closure=closure)
    recorder(*args)
    return handed[0]


_undescribed: dict[Any, Launcher] = {}  # by Triton's: of kernels without descriptors, the same for all shapes


def found(
    run: Any, fixed: tuple[Any, ...], descriptors: Descriptors, grid: Grid, stream: int, args: tuple[Any, ...]
) -> Launcher | None:
    """What launches the kernel of `run` from below; None if Triton's launcher is another."""
    if run in _undescribed:
        return _undescribed[run]
    try:
        if not plain(run):
            return None
        launcher = Launcher(run, fixed, descriptors)
        launcher.learn(grid, stream, args)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    if not descriptors.blank:
        _undescribed[run] = launcher
    return launcher


def plain(run: Any) -> bool:
    """Each launch is no more than a launch: it has no memory of its own, and nobody's instruments."""
    return run.global_scratch_size == run.profile_scratch_size == 0 and not getattr(run, "gsan_enabled", False)
