"""Our ops as torch's dispatcher knows them: one node each to autograd, torch.func, vmap, compilers and tracers.

As torch.library.custom_op makes them, but for the derivative: that one's is a Function which torch.func refuses, inside
of compiled code too. Here it is a Function of a single level of transforms, which is where the dispatcher asks for it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.autograd.function import _SingleLevelFunction

from flashattn_lite.watchers import plain

NAMESPACE = "flashattn_lite"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_short: dict[Any, Callable[..., Any]] = {}  # by op: its results with no more dispatching, or None

Results = tuple[Tensor, ...]


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    again: Callable[..., Any] = lambda *_: None,
) -> Any:
    """The op `flashattn_lite::name` without a derivative; tensors come first in its schema.

    run: its results, fresh tensors; fake: their shapes. again: the same as run, if it knows of a call like this one and
    nothing looks on, else None: compiled code asks for neither checks nor plans anew.
    """
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))

    @torch._disable_dynamo
    def computed(*args: Any) -> Any:
        return run(*args) if (results := again(*args)) is None else results

    _library.impl(name, computed, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    tensors = sum("Tensor" in str(argument.type) for argument in op._schema.arguments)

    def short(*args: Any) -> Any:
        if (results := again(*args)) is not None:
            return results
        return computed(*args) if plain(args[:tensors], args[tensors:]) else None

    _short[op] = short
    return op


def derive(op: Any, save: Callable[..., Any], backward: Callable[..., Any], no_tangents: Callable[..., Any]) -> None:
    """Gives an op its derivative.

    save(ctx, arguments, results); backward(ctx, needs, *gradients of the results) gives those of all arguments, of
    which `needs` says by place whether one is needed; no_tangents raises what a forward-mode derivative gets.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        # Inside of a Function derivatives are switched off, but torch.func's other levels still want theirs.
        nested = torch._C._are_functorch_transforms_active()
        with torch.set_grad_enabled(nested), _set_fwd_grad_enabled(nested):
            results = below(args)
        save(ctx, args, results)
        return results

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(lambda ctx, *gradients: backward(ctx, ctx.needs_input_grad, *gradients)),
        "jvp": staticmethod(no_tangents),
        # What compiled autograd names a node by, which torch has on the class for all levels alone.
        "_compiled_autograd_key": torch.autograd.Function.__dict__.get("_compiled_autograd_key"),
    }
    name = op._schema.name.removeprefix(f"{NAMESPACE}::")
    # Named after the op, as graphs and profiles show it: AttentionBackward.
    title = name.title().replace("_", "")
    node: Any = types.new_class(title, (_SingleLevelFunction,), exec_body=lambda namespace: namespace.update(members))

    def below(args: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    short = _short[op]

    def dispatched(*args: Any) -> Any:
        # To be dispatched once more would take compiled code as long as all else here. Where Dynamo follows, it is not:
        # what an op does is nothing to compile.
        quick = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        if quick and (results := short(*args)) is not None:
            return results
        # The door sees those of its own level; here come those of transforms around it, without requires_grad too.
        if any(isinstance(x, Tensor) and unpack_dual(x).tangent is not None for x in args):
            no_tangents()
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return below(args)
        with enable_single_level_autograd_function():
            return node.apply(*args)

    _library.impl(name, dispatched, "Autograd")


def reshaped(result: Tensor, shape: tuple[Any, ...]) -> Tensor:
    """What an op returned in another shape, as a view only where autograd has to see who writes to it.

    Elsewhere it is as fresh as the result was: a view that is made under no_grad can't be written to in place later.
    torch.jit.trace follows sizes into `reshape` alone; into an op that is called by name they go as numbers.
    """
    if result.requires_grad or torch.jit.is_tracing():
        return result.reshape(shape)
    return torch.ops.aten._unsafe_view(result, shape)


def one_by_one(op: Any) -> None:
    """Gives an op its rule under torch.vmap: a call for each, their results stacked."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Results, tuple[int, ...]]:
        pairs = list(zip(args, in_dims, strict=True))
        if info.batch_size == 0:
            shapes = op(*(_without(x, dim) for x, dim in pairs))
            device = next(x.device for x in args if isinstance(x, Tensor))
            outs = tuple(torch.empty((0, *x.shape), dtype=x.dtype, device=device) for x in shapes)
            return outs, (0,) * len(outs)
        each = [
            op(*(x.select(dim, i) if isinstance(dim, int) else x for x, dim in pairs)) for i in range(info.batch_size)
        ]
        outs = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
        return outs, (0,) * len(outs)

    torch.library.register_vmap(op, rule, lib=_library)


def _without(x: Any, dim: int | None) -> Any:
    """A tensor of no memory, with x's shape but for a dim."""
    if not isinstance(x, Tensor):
        return x
    shape = [size for i, size in enumerate(x.shape) if i != dim]
    return torch.empty(shape, dtype=x.dtype, device="meta")
