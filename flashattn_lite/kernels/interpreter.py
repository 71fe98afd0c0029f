"""What a launch through Triton's interpreter needs besides CPU tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from flashattn_lite import forks
from flashattn_lite.kernels.start import Plan
from flashattn_lite.problem import AttentionProblem, Inputs


def interpret(plans: Iterable[Plan]) -> None:
    """Starts the launches that have blocks, in their order."""
    for kernel, grid, args, kwargs in plans:
        if grid[0]:
            with interpreted():
                kernel[grid](*args, **kwargs)


def fill(plans: Callable[..., Iterable[Plan]], problem: AttentionProblem, inputs: Inputs, out: Tensor) -> None:
    """Fills out by plans(problem, inputs, out), in float32 where the interpreter has no bfloat16."""
    to = out
    if problem.dtype == torch.bfloat16:
        problem, inputs = widened(problem, inputs)
        to = torch.empty_like(out, dtype=torch.float32)
    interpret(plans(problem, inputs, to))
    if to is not out:
        out.copy_(to)


def widened(problem: AttentionProblem, inputs: Inputs) -> tuple[AttentionProblem, Inputs]:
    """A bfloat16 problem in float32: of such operands of tl.dot the interpreter multiplies the bits (3.6 to 3.9)."""
    wide = inputs._replace(q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())
    return replace(problem, dtype=torch.float32), wide


_one_at_a_time = forks.lock()  # of a launch; a fork waits for its end


@contextmanager
def interpreted() -> Iterator[None]:
    """Around a launch: one thread at a time, because the interpreter keeps its place in globals of the process.

    It computes with NumPy, which warns where IEEE arithmetic gives an infinity or NaN as it should.
    """
    import numpy

    with (
        _one_at_a_time,
        patching_once(),
        unchecked(),
        remembering(),
        numpy.errstate(all="ignore"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)  # a maximum of NaN alone
        yield


@contextmanager
def patching_once() -> Iterator[None]:
    """The interpreter replaces the language's functions at a launch, and again at each call of a device function.

    That took a third of its time (3.6 to 3.9). Here it does so at a device function's first call in a launch.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        if function in patched:
            return interpreter._LangPatchScope()  # in which nothing was changed
        scope = patch(function)
        if not patched:  # the launch itself, at whose end all is as it was
            restore = scope.restore

            def restore_and_forget() -> None:
                restore()
                patched.clear()

            scope.restore = restore_and_forget
        patched.add(function)
        return scope

    interpreter._patch_lang = patch_once
    try:
        yield
    finally:
        interpreter._patch_lang = patch


@contextmanager
def unchecked() -> Iterator[None]:
    """Integers are not asked whether they overflow: without `debug` Triton drops the answer.

    It took two fifths of the time of a test of decoding (3.9; 3.6 does the same).
    """
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    interpreter_builder.options = replace(options, sanitize_overflow=options.sanitize_overflow and options.debug)
    try:
        yield
    finally:
        interpreter_builder.options = options


@contextmanager
def remembering() -> Iterator[None]:
    """What a value has from its type, and a type from its element and shape, is worked out once in a launch.

    For each value anew it took a third of the time of a test of the backward (3.9; 3.6 does the same).
    """
    from triton.language.core import _unwrap_if_constexpr, block_type, tensor
    from triton.runtime import interpreter

    np_dtype, block, value = interpreter._get_np_dtype, block_type.__init__, tensor.__init__
    np_dtypes: dict[str, Any] = {}
    blocks: dict[tuple, dict] = {}
    values: dict[str, dict] = {}

    def np_dtype_once(dtype: Any) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    def block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *map(_unwrap_if_constexpr, shape))
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key]

    def value_once(self: Any, handle: Any, type: Any) -> None:
        if type.name not in values:
            value(self, handle, type)
            values[type.name] = {**self.__dict__, "handle": None}  # else the first one's numbers live on
        self.__dict__ = {**values[type.name], "handle": handle}

    interpreter._get_np_dtype, block_type.__init__, tensor.__init__ = np_dtype_once, block_once, value_once
    try:
        yield
    finally:
        interpreter._get_np_dtype, block_type.__init__, tensor.__init__ = np_dtype, block, value


def take_scalars_from_arrays() -> None:
    """Lets the interpreter of Triton 3.6 count loops with NumPy 2.4, whose int() takes no array of one element."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))  # as Triton 3.7 has it

    interpreter._patch_lang_tensor = patch_with_index


if triton.knobs.runtime.interpret and triton.__version__.startswith("3.6."):
    take_scalars_from_arrays()
