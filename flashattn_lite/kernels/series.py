"""Launches that follow one another, and the same again for other tensors, of which only the addresses are put in.

Triton's launcher takes 6 to 8 us of C for a launch, of which the driver needs 4, and half as much Python comes first.
So after some calls a series goes to the driver (cuLaunchKernelEx) as it lies in memory. What a kernel takes is in its
signature; numbers are the same each time, but for those that are given; which of these a parameter is, and which
tensor, or which place in one, each pointer is, the launches of stand-ins show. The driver is asked whether the
parameters are what we take them for. Where anything is otherwise, for AMD, and where an address has no tensor map yet,
each launch is Triton's (`descriptors.Launcher`).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flashattn_lite.kernels.compiling import Launch
from flashattn_lite.kernels.descriptors import Launcher
from flashattn_lite.kernels.start import Starter, current_stream, hooked, start_all

Launches = Callable[..., Sequence[Launch]]
Given = tuple[Any, ...]  # a call's tensors, and what else has an address; None where there is none; or Numbers, last

# Bytes of a number by its type; a pointer has 8. A tensor map has 128, at a multiple of 128 in Triton's object for it.
SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8, "fp32": 4}
WORD, MAP = 8, 128
WORTH = 16  # calls: to know their launches costs 100 to 300 us, and saves 5 to 20 a call
OVERLAPS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Series:
    """`series(*given)` starts launches(*given), in their order, on the current device.

    launches: makes them of tensors of the same metadata, and of Numbers; all else is the same each time. It is also
    asked for the launches of stand-ins; where it takes anything else of them than views, a copy, say, the series stays
    Triton's.
    """

    def __init__(self, launches: Launches) -> None:
        self.launches = launches
        self.started = 0  # by Triton
        self.again: Again | None = None

    def __call__(self, *given: Any) -> None:
        if self.again is not None and not hooked() and self.again(given):
            return
        launches = self.launches(*given)
        start_all(launches)
        self.started += 1
        if self.started == WORTH and all(starter.launcher for starter, _ in launches if starter.grid[0]):
            self.again = again(self.launches, given)


class Numbers(NamedTuple):
    """What differs from call to call besides addresses, and is compiled alike: strides of tensors, and a length."""

    steps: tuple[tuple[int, ...] | None, ...]
    length: int
    flat: tuple[int, ...]

    @classmethod
    def of(cls, steps: tuple[tuple[int, ...] | None, ...], length: int) -> Numbers:
        return cls(steps, length, (*(step for each in steps if each is not None for step in each), length))

    def marked(self) -> Numbers:
        """Of stand-ins, each of which knows where its number is among the flat ones."""
        marks = map(Mark, itertools.count())
        steps = tuple([None if each is None else tuple([next(marks) for _ in each]) for each in self.steps])
        return Numbers.of(steps, next(marks))


class Mark(int):
    """A stand-in for a number that is given."""


class Varying(NamedTuple):
    """A parameter that is one of the numbers given, by its place among them."""

    number: int
    size: int


class Number(NamedTuple):
    """A parameter that stays."""

    bits: int
    size: int


class Pointer(NamedTuple):
    """A place in a tensor that is given, in bytes from its address."""

    tensor: int
    offset: int
    size: int = WORD


class Map(NamedTuple):
    """The tensor map of a tensor that is given, as a launcher keeps it for one of its descriptors."""

    tensor: int
    kept: dict[tuple[int, int], list[Any]]
    descriptor: int
    size: int = MAP


Parameter = Number | Varying | Pointer | Map


class Prepared(NamedTuple):
    """A launch that was started: its kernel's parameters, threads and bytes of shared memory of a block."""

    starter: Starter
    parameters: list[Parameter]
    threads: int
    shared: int


class Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads_x", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Room:
    """A series in memory: first the addresses of what is given, then of places in it, numbers given, all others."""

    def __init__(self, series: Sequence[Prepared], given: int, places: Sequence[Pointer], varying: int) -> None:
        numbers = [of.bits for launch in series for of in launch.parameters if isinstance(of, Number)]
        first = given + len(places) + varying
        self.words = (ctypes.c_uint64 * (first + len(numbers)))()
        self.words[first:] = numbers
        self.numbers: Numbers | None = None  # those given that are in there
        self.maps: list[tuple[Any, int]] = []  # where addresses of maps belong
        self.configs: list[Config] = []
        self.launches: list[tuple[int, int, int, None]] = []  # config, function, parameters, nothing more
        self.overlaps = Attribute(OVERLAPS, 0, (ctypes.c_int * 16)(1))
        self.pointers: list[Any] = []  # of each launch, to its parameters
        for launch in series:
            pointers = (ctypes.c_void_p * len(launch.parameters))()
            for i, of in enumerate(launch.parameters):
                if isinstance(of, Map):
                    self.maps.append((pointers, i))
                    continue
                if isinstance(of, Number):
                    word, first = first, first + 1
                elif isinstance(of, Varying):
                    word = given + len(places) + of.number
                else:
                    word = given + places.index(of) if of.offset else of.tensor
                pointers[i] = ctypes.addressof(self.words) + WORD * word
            config = Config(*launch.starter.grid, launch.threads, 1, 1, launch.shared)
            config.attributes = ctypes.addressof(self.overlaps)
            config.count = bool(launch.starter.options.get("launch_pdl"))
            self.configs.append(config)
            self.pointers.append(pointers)
            function = launch.starter.compiled.function
            self.launches.append((ctypes.addressof(config), function, ctypes.addressof(pointers), None))


class Again:
    """A series as the driver takes it: `again(given)` starts it for other tensors, or is False and starts nothing."""

    def __init__(
        self, series: Sequence[Prepared], present: Sequence[int], launch: Callable[..., int], varying: int = 0
    ) -> None:
        """present: indices of what is given and has an address. varying: how many numbers are given behind it."""
        self.series, self.present, self.launch, self.varying = series, present, launch, varying
        self.index = series[0].starter.index
        every = [of for launch in series for of in launch.parameters]
        self.places = list(dict.fromkeys(of for of in every if isinstance(of, Pointer) and of.offset))
        self.maps = [of for of in every if isinstance(of, Map)]
        self.rooms: list[Room] = []  # that nobody uses: the driver is called without Python's lock

    def __call__(self, given: Given) -> bool:
        addresses = [given[i].data_ptr() for i in self.present]
        try:  # this list keeps them alive until the driver has read them
            maps = [kept[descriptor, addresses[tensor]][0] for tensor, kept, descriptor, _ in self.maps]
        except KeyError:
            return False
        try:
            room = self.rooms.pop()
        except IndexError:
            room = Room(self.series, len(addresses), self.places, self.varying)
        words = [*addresses, *(addresses[of] + offset for of, offset, _ in self.places)] if self.places else addresses
        room.words[: len(words)] = words
        if self.varying and room.numbers is not given[-1]:
            room.numbers = given[-1]
            room.words[len(words) : len(words) + self.varying] = room.numbers.flat
        for (pointers, i), of in zip(room.maps, maps, strict=True):
            pointers[i] = id(of) + MAP
        stream = current_stream(self.index)
        for config, launch in zip(room.configs, room.launches, strict=True):
            config.stream = stream
            if code := self.launch(*launch):
                if config is room.configs[0]:
                    return False  # Triton's launcher says what is wrong, or makes a context for a thread without one
                raise RuntimeError(f"the CUDA driver refused a launch: error {code}")
        self.rooms.append(room)
        return True


def again(launches: Launches, given: Given) -> Again | None:
    """Launches that were started for `given`, by launchers, as the driver takes them; None where that is not known."""
    driver = cuda_driver()
    numbers = given[-1] if given and isinstance(given[-1], Numbers) else None
    present = [i for i, x in enumerate(given) if x is not None and x is not numbers]
    with torch.inference_mode(False):  # where views would not say what they are of
        stand_ins = [None if x is None else stand_in(x) for x in given]
        try:
            started = [launch for launch in launches(*stand_ins) if launch[0].grid[0]]
            series = [prepared(*launch, [stand_ins[i] for i in present]) for launch in started]
        except (AttributeError, LookupError, TypeError, ValueError):
            return None
    if driver is None or not series:
        return None
    ask, launch = driver
    for of in series:
        if sizes(ask, of.starter.compiled.function) != [parameter.size for parameter in of.parameters]:
            return None
    return Again(series, present, launch, 0 if numbers is None else len(numbers.flat))


def stand_in(x: Any) -> Any:
    """Of a tensor's shape and strides, without memory; also for what else has an address, and for numbers."""
    if isinstance(x, Numbers):
        return x.marked()
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.empty(1, dtype=x.dtype, device="meta")


def prepared(starter: Starter, args: tuple[Any, ...], stand_ins: Sequence[Any]) -> Prepared:
    """The launch `starter(args)`, args of stand-ins; LookupError or ValueError where it can't be known."""
    compiled, kept = starter.compiled, cast("Launcher", starter.launcher).kept
    if compiled.metadata.num_ctas != 1 or compiled.metadata.launch_cooperative_grid:
        raise LookupError("a launch of another kind")
    parameters: list[Parameter] = []
    for i, (kind, x) in enumerate(zip(compiled.src.signature.values(), args, strict=True)):
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            # All maps lie alike: Triton allocates each at a multiple of its size.
            known = [(address, parts) for (of, address), parts in list(kept.items()) if of == i]
            (address, parts), place = known[0], place_in(x, stand_ins)
            if place.offset or not lies_in(parts[0], address):
                raise LookupError("a tensor map elsewhere")
            parameters.append(Map(place.tensor, kept, i))
            rank = len(parts) // 2
            parameters += [number(kind, n) for kind, n in zip(["i32"] * rank + ["i64"] * rank, parts[1:], strict=True)]
        else:
            parameters += leaves(kind, x, stand_ins)
    threads, _, shared = compiled.packed_metadata
    parameters += [Number(0, WORD)] * 2  # scratch memory, of which none is used
    return Prepared(starter, parameters, 32 * threads, shared)


def leaves(kind: Any, x: Any, stand_ins: Sequence[Any]) -> Iterator[Parameter]:
    """Parameters of an argument, by its type in a signature."""
    if isinstance(kind, tuple):
        for part, own in zip(kind, x, strict=True):
            yield from leaves(part, own, stand_ins)
    elif kind[0] == "*":
        yield Number(0, WORD) if x is None else place_in(x, stand_ins)
    elif kind != "constexpr":
        yield number(kind, x)


def place_in(x: Tensor, stand_ins: Sequence[Any]) -> Pointer:
    """Which stand-in x is, or is a view of. LookupError: none, as a copy."""
    whole = x if x._base is None else x._base
    for i, of in enumerate(stand_ins):
        if of is whole:
            return Pointer(i, x.storage_offset() * x.element_size())
    raise LookupError("a tensor that is not given")


def number(kind: str, x: Any) -> Number | Varying:
    """A number of that type, as the driver has it."""
    if isinstance(x, Mark):
        return Varying(int(x), SIZES[kind])
    bits = ctypes.c_uint32.from_buffer(ctypes.c_float(x)).value if kind == "fp32" else int(x)
    return Number(bits & (1 << 64) - 1, SIZES[kind])


def lies_in(tensor_map: Any, address: int) -> bool:
    """Whether Triton's object has the map where we take it to be: a map begins with the address."""
    at = id(tensor_map)  # of the object, in CPython
    known = type(tensor_map).__basicsize__ == 2 * MAP and at % MAP == 0
    return known and ctypes.c_uint64.from_address(at + MAP).value == address


@functools.cache
def cuda_driver() -> tuple[Callable[..., int], Callable[..., int]] | None:
    """cuFuncGetParamInfo and cuLaunchKernelEx, where there are both."""
    if torch.version.hip:
        return None
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        ask, launch = cuda.cuFuncGetParamInfo, cuda.cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    ask.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    launch.argtypes = (ctypes.c_void_p,) * 4
    return ask, launch


def sizes(ask: Callable[..., int], function: int) -> list[int]:
    """Of a kernel's parameters, as the driver has them."""
    offset, size, found = ctypes.c_size_t(), ctypes.c_size_t(), list[int]()
    while ask(function, len(found), ctypes.byref(offset), ctypes.byref(size)) == 0:
        found.append(size.value)
    return found
