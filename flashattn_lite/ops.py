"""The custom op: schema, shapes for tracing, and autograd, so that compilers and autograd see attention as one node."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashattn_lite import calls, flops
from flashattn_lite.arguments import check_window
from flashattn_lite.arguments_varlen import check_varlen_values
from flashattn_lite.calls import NUM_TENSORS, OPTION_NAMES, OPTIONS, allocate, problem_of
from flashattn_lite.problem import Inputs
from flashattn_lite.scalars import as_int

INTEGERS = ("q_start", "window_left", "window_right", "max_seqlen_q", "max_seqlen_k")
DIFFERENTIABLE = 5  # q, k, v, mask, sinks

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor? kv_lens, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)


def longest(cu_seqlens: Tensor) -> int:
    """The longest sequence of a packed batch; waits for the GPU, which callers avoid by passing max_seqlen."""
    return int(cu_seqlens.diff().max()) if cu_seqlens.shape[0] > 1 else 0


@torch.library.custom_op(
    "flashattn_lite::attention", mutates_args=(), schema=f"({TENSORS}, {OPTIONS}, str backend) -> (Tensor, Tensor)"
)
def attention(*args: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of a checked problem."""
    check_values(args)
    *given, backend = args
    return calls.attention((*measured(given), backend))


def measured(given: list[Any]) -> tuple[Any, ...]:
    """A call's arguments without the backend; the longest sequences of a packed batch known."""
    for side in ("q", "k"):
        cu, at = Inputs._fields.index(f"cu_seqlens_{side}"), NUM_TENSORS + OPTION_NAMES.index(f"max_seqlen_{side}")
        if given[cu] is not None and given[at] is None:
            given[at] = longest(given[cu])
    return tuple(given)


def check_values(args: calls.Arguments) -> None:
    """What the door could not read, because a compiler or a transform stood for it."""
    inputs = Inputs(*args[:NUM_TENSORS])
    check_window(tuple(args[NUM_TENSORS + OPTION_NAMES.index(f"window_{side}")] for side in ("left", "right")))
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        limits = (args[NUM_TENSORS + OPTION_NAMES.index(f"max_seqlen_{side}")] for side in "qk")
        check_varlen_values(inputs.q, inputs.k, inputs.cu_seqlens_q, inputs.cu_seqlens_k, *limits)


def call(args: calls.Arguments) -> tuple[Tensor, Tensor]:
    """(out, lse) of arguments that the door let through, as one op to autograd, compilers and tracers.

    Where only autograd looks on it is a node without the op, and where nothing does it runs by itself: an op costs some
    200 µs of Python a call that is recorded, and a process's first imports much of torch (1.3 s on a CPU).
    """
    given = list(args)
    for name in ("scale", "softcap"):  # the schema's floats
        at = NUM_TENSORS + OPTION_NAMES.index(name)
        given[at] = None if given[at] is None else float(given[at])
    for name in INTEGERS:  # its 64-bit integers; the kernels clamp much earlier
        at = NUM_TENSORS + OPTION_NAMES.index(name)
        whole = as_int(given[at])
        given[at] = max(-(2**62), min(2**62, whole)) if isinstance(whole, int) else whole
    args = tuple(given)  # a kernel would take an int for another type of argument
    if not calls.ordinary(args):  # torch.func.grad and its kin don't take an op's derivative
        flops.teach()
        return Transformed.apply(*args) if calls.under_grad() else attention(*args)
    ready = calls.prepared(args)
    done = _direct(ready, args)
    ready.trusted = True
    return done


def recall(args: calls.Arguments) -> tuple[Tensor, Tensor] | None:
    """(out, lse) if the door knows the metadata and nothing but autograd watches, else None."""
    ready = calls.known(args)
    return None if ready is None else _direct(ready, args)


def _direct(ready: calls.Ready, args: calls.Arguments) -> tuple[Tensor, Tensor]:
    return Recorded.apply(ready, *args) if calls.recorded(args[:NUM_TENSORS]) else calls.run(ready, args)


class Recorded(torch.autograd.Function):
    """The op's node, without the op: autograd's part of a call that no compiler, mode or transform has to see.

    Without a setup_context, for which torch would look at forward's signature anew in every call (16 of 28 us).
    """

    @staticmethod
    def forward(ctx: Any, ready: calls.Ready, *args: Any) -> tuple[Tensor, Tensor]:
        done = calls.run(ready, args)
        ctx.set_materialize_grads(False)
        _save(ctx, args, done)
        return done

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_gradients(ctx, ctx.needs_input_grad[1:], d_out, d_lse)


class Transformed(torch.autograd.Function):
    """The op under torch.func.grad and its kin, where each transform inside the outermost one decides anew."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        check_values(args)
        return call(args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, d_out, d_lse)

    @staticmethod
    def jvp(*_: Any) -> None:
        _no_forward_mode()

    @staticmethod
    def vmap(*args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return one_by_one(Transformed.apply, *args)


class Derivative(torch.autograd.Function):
    """The op of the gradients under torch.func.grad and its kin."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(derivative(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        _no_second_derivative()

    @staticmethod
    def jvp(*_: Any) -> None:
        _no_forward_mode()

    @staticmethod
    def vmap(*args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return one_by_one(Derivative.apply, *args)


def one_by_one(
    function: Callable[..., tuple[Tensor, ...]], info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The rule under torch.vmap: a call for each, their results stacked."""
    if info.batch_size == 0:
        shapes = function(*(_without(x, dim) for x, dim in zip(args, in_dims, strict=True)))
        device = next(x.device for x in args if isinstance(x, Tensor))
        outs = tuple(torch.empty((0, *x.shape), dtype=x.dtype, device=device) for x in shapes)
        return outs, (0,) * len(outs)
    each = [
        function(*(x.select(dim, i) if isinstance(dim, int) else x for x, dim in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    outs = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    return outs, (0,) * len(outs)


def _without(x: Any, dim: int | None) -> Any:
    """A tensor of no memory, with x's shape but for a dim."""
    if not isinstance(x, Tensor):
        return x
    shape = [size for i, size in enumerate(x.shape) if i != dim]
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _no_second_derivative(*_: Any) -> None:
    raise NotImplementedError(
        "attention: its gradients have no gradients of their own; got a backward pass through them (create_graph=True, "
        "a Hessian). Call flashattn_lite.reference.attention_reference instead: plain torch, L x S scores in memory."
    )


def _no_forward_mode() -> None:
    raise NotImplementedError(
        "attention: forward-mode derivatives are not implemented; got one inside of another transform (a Hessian). "
        "Call flashattn_lite.reference.attention_reference instead: plain torch, L x S scores in memory."
    )


def derivative(*args: Any) -> tuple[Tensor, ...]:
    """`attention_backward`, whatever transforms it."""
    flops.teach()
    return Derivative.apply(*args) if calls.under_grad() else attention_backward(*args)


@attention.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, problem = problem_of(args[:-1])
    return allocate(problem, inputs)


@torch.library.custom_op(
    "flashattn_lite::attention_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor d_lse, Tensor out, Tensor lse, {TENSORS}, {OPTIONS}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(*args: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, mask and sinks; an empty tensor where one is not needed."""
    d_out, d_lse, out, lse, *rest, needs = args
    grads = calls.gradients(d_out, d_lse, out, lse, *measured(rest), needs)
    return tuple(d_out.new_empty(0) if grad is None else grad for grad in grads)


@attention_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    d_out, _, _, _, *rest, needs = args
    inputs, _ = problem_of(tuple(rest))
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) if need and x is not None else d_out.new_empty(0)
        for x, need in zip(inputs[:DIFFERENTIABLE], needs, strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:NUM_TENSORS], *output)
    ctx.options = inputs[NUM_TENSORS:-1]


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, ctx.needs_input_grad, d_out, d_lse)


def _gradients(
    ctx: Any, asked: tuple[bool, ...], d_out: Tensor | None, d_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Of all the op's arguments."""
    *tensors, out, lse = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    needs = [x is not None and need for x, need in zip(tensors, asked[:DIFFERENTIABLE], strict=False)]
    results, call = (d_out, d_lse, out, lse), (*tensors, *ctx.options)
    # As for a call: where nothing looks on, not even autograd for gradients of gradients, without the op.
    alone = not torch.is_grad_enabled() and calls.ordinary((*call, None)) and calls.plain(results, ())
    grads = (calls.gradients if alone else derivative)(*results, *call, needs)
    returned = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return (*returned, *(None for _ in asked[DIFFERENTIABLE:]))


attention.register_autograd(_backward, setup_context=_save)
attention.register_vmap(functools.partial(one_by_one, attention))
attention_backward.register_autograd(_no_second_derivative)
attention_backward.register_vmap(functools.partial(one_by_one, attention_backward))
