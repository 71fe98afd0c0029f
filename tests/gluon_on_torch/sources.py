"""What a kernel imports in Triton's place, a kernel's file read again with it, and its launch."""

from __future__ import annotations

import builtins
import importlib
import re
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import torch
from torch import Tensor

from tests.gluon_on_torch import memory, pointers, values
from tests.gluon_on_torch.pointers import Pointer
from tests.gluon_on_torch.turns import Run, here, pause
from tests.gluon_on_torch.values import DTYPES, UINT32, Value, value

AT_ONCE = 64  # programs
NUMBERS = (int, float)
WARPS = 2  # of a role, for kernels that ask; more would only be slower


# ------------------------------------------------------------------------------------------------------------- assembly
def asm(text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    """By what stands in it; a text that no kernel had before is an error."""
    if text == "mov.u32 $0, $1;":  # part of others, too
        return value(args[0])
    for part, act in (
        ("bar.", named_barrier),
        ("cp.async.bulk.wait_group 0;", lambda text, args, dtype: memory.writes_done()),
        ("cvt.rn.", lambda text, args, dtype: args[0].to(dtype)),
        ("xor.b32 $0, $1, zero;", lambda text, args, dtype: args[0]),
        ("@never st.shared", lambda text, args, dtype: args[0]),
        ("griddepcontrol.launch_dependents", lambda text, args, dtype: None),
        ("max.bf16x2", larger_halves),
        ("max.f16x2", larger_halves),
        ("atom.relaxed.gpu.global.add", draw),
        ("st.relaxed.gpu.global.v2.b64", store_words),
        ("ld.relaxed.gpu.global.v2.b64", load_words),
    ):
        if part in text:
            return act(text, args, dtype)
    raise NotImplementedError(text)


def named_barrier(text: str, args: Any, dtype: Any) -> None:
    """`bar.arrive` of one role, `bar.sync` of another, both of 128 threads."""
    kind, number = re.match(r"bar\.(arrive|sync) (\d+), 256;", text).groups()
    arrived = here.role.program.arrived
    if kind == "arrive":
        assert number not in arrived, "a second arrival ends the barrier"
        arrived.add(number)
        pause()
    else:
        pause(lambda: number in arrived, lambda: f"bar.sync {number}")
        arrived.remove(number)


def larger_halves(text: str, args: list[Value], dtype: Any) -> Value:
    half = torch.bfloat16 if "bf16" in text else torch.float16
    return Value(torch.fmax(*(word.x.contiguous().view(half) for word in args)).view(torch.int32))


def draw(text: str, args: list[Pointer], dtype: Any) -> Value:
    """[WARPS]: the counter, which goes up by 1, in the first place."""
    pause()
    (ptr,) = args
    drawn = torch.zeros(WARPS, dtype=torch.int32)
    drawn[0] = ptr.memory[ptr.at[0]]
    ptr.memory[ptr.at[0]] += 1
    return Value(drawn)


def in_any_order() -> list[int]:
    """Of two words, each there as a whole or not at all."""
    return here.role.run.random.sample(range(2), 2)


def store_words(text: str, args: list[Any], dtype: Any) -> None:
    ptr, *words = args
    for i in in_any_order():
        pause()
        pointers.store(ptr + i, words[i])


def load_words(text: str, args: list[Pointer], dtype: Any) -> list[Any]:
    (ptr,) = args
    words: list[Any] = [None, None]
    for i in in_any_order():
        pause()
        words[i] = pointers.load(ptr + i)
    return words


# -------------------------------------------------------------------------------------------------------------- kernels
def warp_specialize(parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    assert len(warps) == len(registers) == len(parts) - 1
    role = here.role
    others = [
        role.run.add(role.program, f"{role.name}, {act.__name__} {number}", lambda act=act, args=args: act(*args))
        for number, (act, args) in enumerate(parts[1:], 1)
    ]
    parts[0][0](*parts[0][1])
    pause(lambda: all(other.done for other in others), lambda: "the other roles")


def jit(act: Any = None, **options: Any) -> Any:
    """The function itself; where it takes values, numbers become such."""
    if act is None:
        return jit
    kinds = [str(act.__annotations__.get(name, "")) for name in act.__code__.co_varnames]
    takes = [as_it_is if "constexpr" in kind else as_long if kind.endswith("int64") else as_value for kind in kinds]

    def call(*args: Any) -> Any:
        return act(*[take(x) for take, x in zip(takes, args, strict=False)])

    call.__name__ = act.__name__
    return call


def as_it_is(x: Any) -> Any:
    return x


def as_value(x: Any) -> Any:
    """An argument without an annotation."""
    return value(x) if type(x) in NUMBERS else x


def as_long(x: Any) -> Any:
    """One whose annotation says 64 bits."""
    return value(x).to(DTYPES["int64"]) if type(x) in NUMBERS else x


class constexpr:
    """As an annotation; called, what it is called with."""

    def __new__(cls, x: Any) -> Any:
        return x


def nothing(*args: Any, **options: Any) -> None:
    return None


# ---------------------------------------------------------------------------------------------------------- the modules
LAYOUTS = ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "DotOperandLayout", "NVMMADistributedLayout",
           "DistributedLinearLayout")  # fmt: skip
mbarrier = Record(MBarrierLayout=memory.BarrierLayout, init=memory.init, expect=memory.expect, arrive=memory.arrive,
                  wait=memory.wait)  # fmt: skip
tma = Record(async_load=memory.tma_load, async_store=memory.tma_store, store_wait=memory.store_wait)
hopper = Record(mbarrier=mbarrier, tma=tma, warpgroup_mma=memory.warpgroup_mma,
                warpgroup_mma_wait=memory.warpgroup_mma_wait, fence_async_shared=memory.fence_async_shared)  # fmt: skip
async_copy = Record(async_load=memory.async_load, commit_group=memory.commit_group, wait_group=memory.wait_group)
language = Record(
    **DTYPES, **dict.fromkeys(LAYOUTS, nothing), **values.FUNCTIONS, **pointers.FUNCTIONS, uint32=UINT32,
    constexpr=constexpr, static_range=range, static_assert=nothing, pointer_type=lambda dtype: dtype,
    PropagateNan=Record(ALL=None), inline_asm_elementwise=asm, num_warps=lambda: WARPS,
    program_id=lambda axis: value(here.role.program.number), num_programs=lambda axis: value(here.role.program.count),
    thread_barrier=pause, warp_specialize=warp_specialize, allocate_shared_memory=memory.allocate_shared_memory,
    extra=Record(cuda=Record(gdc_wait=nothing)), shared_memory_descriptor=Record(reinterpret=memory.reinterpret),
    nvidia=Record(hopper=hopper, ampere=Record(async_copy=async_copy)),
)  # fmt: skip
gluon = Record(jit=jit, constexpr_function=lambda act: act, language=language)
triton = Record(jit=jit, language=language, cdiv=lambda a, b: -(-a // b), experimental=Record(gluon=gluon))
OF_THE_GPU = re.compile(r"^@(triton|gluon)\.jit|^from triton\.experimental", re.MULTILINE)


class Sources:
    """Modules of kernels, read again; what they import that holds nothing of a kernel is the module itself."""

    def __init__(self, *edits: tuple[str, str, str]) -> None:
        """edits: (a module's last name, text that is there once, what is there instead)."""
        self.edits = edits
        self.loaded: dict[str, Any] = {}

    def load(self, name: str) -> Any:
        if name in self.loaded:
            return self.loaded[name]
        module = importlib.import_module(name)
        path = Path(module.__file__ or "")
        text = path.read_text(encoding="utf-8") if path.suffix == ".py" else ""
        if not (name.startswith("flashattn_lite.kernels") and OF_THE_GPU.search(text)):
            return module
        known = {"__name__": name, "__builtins__": {**vars(builtins), "__import__": self.find}}
        for module_name, old, new in self.edits:
            if module_name == path.stem:
                if text.count(old) != 1:  # no AssertionError, which a test of a broken kernel waits for
                    raise ValueError(f"{old!r} is {text.count(old)} times in {path.name}")
                text = text.replace(old, new)
        exec(compile(text, str(path), "exec"), known)
        self.loaded[name] = Record(**{key: x for key, x in known.items() if key != "__builtins__"})
        return self.loaded[name]

    def find(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name.split(".")[0] == "triton":
            found = triton
            for part in name.split(".")[1:] if fromlist else ():
                found = getattr(found, part)
            return found
        if fromlist and name.startswith("flashattn_lite.kernels"):
            return self.load(name)
        return builtins.__import__(name, globals, locals, fromlist, level)


def given(x: Any) -> Any:
    """An argument of a launch as the kernel sees it."""
    if isinstance(x, Tensor):
        return Pointer.to_tensor(x)
    if hasattr(x, "block_shape"):
        return memory.Descriptor(x)
    if isinstance(x, tuple):
        parts = (value(part) if type(part) in NUMBERS else given(part) for part in x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def launch_as_one(kernel: Any, count: int, each: int, args: tuple[Any, ...]) -> None:
    """The same of programs that wait for nobody, `each` of them in one run: as far as they choose, all alike."""
    args = tuple(map(given, args))

    def act(number: Tensor) -> Tensor:
        here.role = Record(program=Record(number=values.of_tensor(number), count=count))
        kernel(*args)
        return number

    for first in range(0, count, each):
        with torch.no_grad():
            torch.vmap(act)(torch.arange(first, first + each, dtype=torch.int32))


def launch(kernel: Any, count: int, args: tuple[Any, ...], seed: int, at_once: int = AT_ONCE) -> None:
    """Runs `count` programs of a kernel of `Sources`, so many at a time."""
    args = tuple(map(given, args))
    for first in range(0, count, at_once):
        run = Run(seed + first)
        for number in range(first, min(first + at_once, count)):
            program = Record(number=number, count=count, arrived=set())
            run.add(program, f"program {number}", lambda: (kernel(*args), memory.check_done(here.role.program)))
        run.to_its_end()
