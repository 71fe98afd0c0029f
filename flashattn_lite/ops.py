"""The custom op: schema, shapes for tracing, and autograd, so that compilers and autograd see attention as one node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashattn_lite import calls, flops, operators
from flashattn_lite.arguments import check_window
from flashattn_lite.arguments_varlen import check_varlen_values
from flashattn_lite.calls import AT, OPTIONS, allocate, problem_of
from flashattn_lite.problem import NUM_TENSORS, Inputs, unpromised
from flashattn_lite.scalars import as_int64, diagonals_as_int64
from flashattn_lite.watchers import plain

PROMISES = ("max_seqlen_q", "max_seqlen_k")
DIFFERENTIABLE = 5  # q, k, v, mask, sinks
CU_SEQLENS_Q = Inputs._fields.index("cu_seqlens_q")

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor? kv_lens, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)


def longest(cu_seqlens: Tensor) -> int:
    """The longest sequence of a packed batch; waits for the GPU, which callers avoid by passing max_seqlen."""
    return int(cu_seqlens.diff().max()) if cu_seqlens.shape[0] > 1 else 0


def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of a checked problem."""
    check_values(args)
    args = measured(args)
    return calls.run(calls.prepared(args), args)


def _again(*args: Any) -> tuple[Tensor, Tensor] | None:
    """As `_attention`, of a call that was there before; not of packed sequences, whose lengths may be others."""
    if args[CU_SEQLENS_Q] is not None:
        return None
    ready = calls.met(args)
    return None if ready is None else calls.run(ready, args)


def _shapes(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, problem = problem_of(args[:-1])
    return allocate(problem, inputs)


attention = operators.define(
    "attention", f"({TENSORS}, {OPTIONS}, str backend) -> (Tensor, Tensor)", _attention, _shapes, _again
)


def measured(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A call's arguments, with or without the backend, the longest sequences of a packed batch known."""
    if args[CU_SEQLENS_Q] is None:
        return args
    given = list(args)
    for side in ("q", "k"):
        cu, at = Inputs._fields.index(f"cu_seqlens_{side}"), AT[f"max_seqlen_{side}"]
        if given[at] is None:
            given[at] = unpromised(side, longest(given[cu]))
    return tuple(given)


def check_values(args: calls.Arguments) -> None:
    """What the door could not read, because a compiler or a transform stood for it."""
    inputs = Inputs(*args[:NUM_TENSORS])
    check_window((args[AT["window_left"]], args[AT["window_right"]]))
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        limits = (args[AT[name]] for name in PROMISES)
        check_varlen_values(inputs.q, inputs.k, inputs.cu_seqlens_q, inputs.cu_seqlens_k, *limits)


def as_schema(args: calls.Arguments) -> calls.Arguments:
    """With Python's numbers, as the schema has them: for an int a kernel would take another type of argument."""
    given = list(args)
    for name in ("scale", "softcap"):
        given[AT[name]] = None if given[AT[name]] is None else float(given[AT[name]])
    at = AT["q_start"]  # and behind it a window's two sides
    given[at : at + 3] = diagonals_as_int64(*given[at : at + 3])
    for name in PROMISES:
        given[AT[name]] = as_int64(given[AT[name]])
    return tuple(given)


def call(args: calls.Arguments) -> tuple[Tensor, Tensor]:
    """(out, lse) of arguments that the door let through, as one op to autograd, compilers and tracers.

    Where only autograd looks on it is a node without the op, and where nothing does it runs by itself: an op costs some
    200 µs of Python a call that is recorded, and a process's first imports much of torch (1.3 s on a CPU).
    """
    args = as_schema(args)
    if not plain(args[:NUM_TENSORS], args[NUM_TENSORS:]):
        flops.teach()
        return attention(*args)
    args = measured(args)
    ready = calls.prepared(args)
    done = direct(ready, args)
    calls.trust(ready, args)
    return done


def recall(args: calls.Arguments) -> tuple[Tensor, Tensor] | None:
    """(out, lse) if the door knows the metadata and nothing but autograd watches, else None."""
    ready = calls.known(args)
    return None if ready is None else direct(ready, args)


def direct(ready: calls.Ready, args: calls.Arguments) -> tuple[Tensor, Tensor]:
    """(out, lse) of a known call, as a node to autograd where it records."""
    if not calls.recorded(args[:NUM_TENSORS]):
        return calls.run(ready, args)
    return Attention.apply(ready, args[DIFFERENTIABLE:], *args[:DIFFERENTIABLE])


class Attention(torch.autograd.Function):
    """The op's node, without the op: autograd's part of a call that no compiler, mode, transform or profiler must see.

    Named as the op's, since graphs show it: AttentionBackward.
    Without a setup_context, for which torch would look at forward's signature anew in every call (16 of 28 us), and
    given one by one only what may have a gradient, since autograd looks at all that it is given.
    """

    @staticmethod
    def forward(ctx: Any, ready: calls.Ready, rest: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        args = (*tensors, *rest)
        done = calls.run(ready, args)
        _save(ctx, args, done)
        return done

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *_gradients(ctx, ctx.needs_input_grad[2:], d_out, d_lse)


def _no_second_derivative(*_: Any) -> None:
    raise NotImplementedError(
        "attention: its gradients have no gradients of their own; got a backward pass through them (create_graph=True, "
        "a Hessian). Call flashattn_lite.reference's attention_reference, or attention_varlen_reference, instead: "
        "plain torch, L x S scores in memory (torch's is_causal is its causal=True, q_start=0)."
    )


def _no_forward_mode(*_: Any) -> None:
    raise NotImplementedError(
        "attention: forward-mode derivatives are not implemented; got one inside of another transform or of compiled "
        "code. Call flashattn_lite.reference's attention_reference instead: plain torch, L x S scores in memory "
        "(torch's is_causal is its causal=True, q_start=0)."
    )


def _attention_backward(*args: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, mask and sinks; an empty tensor where one is not needed."""
    d_out, d_lse, out, lse, *rest, needs = args
    grads = calls.gradients(d_out, d_lse, out, lse, *measured(tuple(rest)), needs)
    return tuple(d_out.new_empty(0) if grad is None else grad for grad in grads)


def _shapes_backward(*args: Any) -> tuple[Tensor, ...]:
    d_out, _, _, _, *rest, needs = args
    inputs, _ = problem_of(tuple(rest))
    return tuple(
        torch.empty_like(x) if need and x is not None else d_out.new_empty(0)
        for x, need in zip(inputs[:DIFFERENTIABLE], needs, strict=True)
    )


attention_backward = operators.define(
    "attention_backward",
    f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, {TENSORS}, {OPTIONS}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _attention_backward,
    _shapes_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:NUM_TENSORS], *output)
    ctx.options = inputs[NUM_TENSORS:-1]


def _gradients(
    ctx: Any, asked: tuple[bool, ...], d_out: Tensor | None, d_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Of all the op's arguments."""
    *tensors, out, lse = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    needs = [x is not None and need for x, need in zip(tensors, asked[:DIFFERENTIABLE], strict=False)]
    results, call = (d_out, d_lse, out, lse), (*tensors, *ctx.options)
    # As for a call: where nothing looks on, not even autograd for gradients of gradients, without the op.
    direct = not torch.is_grad_enabled()
    real = type(out) is Tensor and not torch.compiler.is_compiling()  # whose metadata may be asked for
    grads = calls.known_gradients(*results, *call, needs) if direct and real else None
    if grads is None and direct and plain((*tensors, *results), ctx.options):
        grads = calls.gradients(*results, *measured(call), needs)
    elif grads is None:
        flops.teach()
        grads = attention_backward(*results, *call, needs)
    returned = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return (*returned, *(None for _ in asked[DIFFERENTIABLE:]))


operators.derive(attention, _save, _gradients, _no_forward_mode)
operators.derive(attention_backward, lambda *_: None, _no_second_derivative, _no_forward_mode)
operators.one_by_one(attention)
operators.one_by_one(attention_backward)
