"""Who stands for a tensor, or looks on while a call runs: transforms, dispatch modes, tracers, profilers.

By names of torch's that are private, and the same in 2.11 and 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad

try:  # by their names alone, because every call asks
    from torch._C import _is_tracing, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._autograd import _profiler_enabled
    from torch._C._functorch import peek_interpreter_stack
    from torch._ops import _len_torch_dispatch_stack_pre_dispatch
except ImportError:  # a torch that names these otherwise: everything may look on, so the op is seen

    def _is_tracing() -> bool:
        return True


# As exact types: what derives from them may compute otherwise. An op's list has flags in it.
NUMBERS = (type(None), bool, int, float, str, list)
ORDINARY = (Tensor, torch.nn.Parameter)


def transformed(x: Tensor) -> bool:
    """Whether a transform of torch.func stands for x."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def bare(x: Any) -> Any:
    """What transforms of torch.func stand for, of what is mapped over one entry, to look at alone; else x."""
    if not isinstance(x, Tensor) or not transformed(x):
        return x
    with pyfunctorch.temporarily_clear_interpreter_stack():
        while transformed(x):
            mapped = torch._C._functorch.maybe_get_bdim(x)  # -1: not by this one
            x = torch._C._functorch.get_unwrapped(x)
            x = x if mapped < 0 else x.select(mapped, 0)
        return x


def unbatched(x: Tensor) -> Tensor:
    """What torch.vmap maps over, since its stand-in can't be asked whether it has a tangent; else x."""
    while torch._C._functorch.is_batchedtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def mapped(x: Tensor) -> bool:
    """Whether torch.vmap maps over x, at any level: then no number of it can be asked for."""
    while transformed(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def distributed(x: Tensor) -> bool:
    """Whether x is a DTensor, whose class has been imported where there is one."""
    module = None if torch.compiler.is_compiling() else sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # another thread may be importing it just now
    return kind is not None and isinstance(x, kind)


def shares_out(function: Any) -> bool:
    """Whether what stands in the place of torch's attention is context_parallel's: a process has a part of the keys."""
    if isinstance(function, BuiltinFunctionType):  # torch's own, in most calls
        return False
    module: str = getattr(function, "__globals__", {}).get("__name__", "")
    return module.startswith("torch.distributed.")


def batched(x: Tensor) -> bool:
    """Many tensors in the guise of one, as autograd.grad(is_grads_batched=True) hands a backward pass."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


def plain(tensors: Iterable[Any], options: Iterable[Any] = ()) -> bool:
    """Ordinary dense tensors, a model's parameters too, and numbers, and no compiler, mode or transform looks on."""
    if torch.compiler.is_compiling():
        return False
    for x in tensors:  # in every call, and all() takes twice as long; options are told by their types alone
        if x is not None and not (type(x) in ORDINARY and dense_and_real(x)):
            return False
    return all(type(x) in NUMBERS for x in options) and not watched()


def dense_and_real(x: Tensor) -> bool:
    """Numbers that lie in memory as they are: torch's stand-ins for zeros and for functions of views are none."""
    if x.layout is not torch.strided or x.is_nested or x.is_meta or x.is_neg() or batched(x):
        return False
    return not (x._is_zerotensor() or torch._is_functional_tensor(x))


def watched() -> bool:
    """A dispatch mode, a function transform, forward-mode autograd, a tracer or a profiler must see the op."""
    if forward_ad._current_level >= 0 or _is_tracing() or _len_torch_dispatch_stack() > 0 or _profiler_enabled():
        return True
    if _len_torch_dispatch_stack_pre_dispatch() > 0:  # a tracer ahead of autograd, counted apart
        return True
    if _len_torch_function_stack() > 0 and any(map(looks_on, function_modes())):
        return True
    return peek_interpreter_stack() is not None


def function_modes() -> Iterator[Any]:
    """The active modes that see calls of torch's functions."""
    return (torch._C._get_function_stack_at(i) for i in range(_len_torch_function_stack()))


def looks_on(mode: Any) -> bool:
    """A default device (torch.set_default_device, `with torch.device()`) only concerns those who make new tensors."""
    return (type(mode).__module__, type(mode).__qualname__) != ("torch.utils._device", "DeviceContext")
