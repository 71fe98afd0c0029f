"""Running checked calls by their metadata: what one call worked out, the next of the same shapes finds again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashattn_lite import dispatch, keys
from flashattn_lite.problem import NUM_TENSORS, AttentionProblem, Inputs, describe
from flashattn_lite.scalars import unless_known
from flashattn_lite.watchers import watched

OPTIONS = (  # as the op's schema has them
    "bool causal, SymInt? q_start, SymInt? window_left, SymInt? window_right, float? scale, float? softcap, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k"
)
OPTION_NAMES = tuple(option.split()[-1] for option in OPTIONS.split(", "))
AT = {name: NUM_TENSORS + i for i, name in enumerate(OPTION_NAMES)}  # where they are in a call's arguments
MOST = 4096  # calls remembered; past that all are forgotten, which costs some microseconds each

Arguments = tuple[Any, ...]  # the tensors of Inputs, the options by OPTION_NAMES, the backend's name


@dataclass(eq=False)
class Ready:
    """A call that was prepared. `trusted`: the door has let its metadata through."""

    problem: AttentionProblem
    run: Callable[[Inputs, Tensor, Tensor], None]
    trusted: bool = False


_ready: dict[tuple[Any, ...], Ready] = {}
_like: dict[tuple[Any, ...], Ready] = {}  # by `keys.but_length`: trusted ones, of which longer ones can be made
_gradients: dict[tuple[Any, ...], dispatch.Gradients] = {}


def problem_of(args: tuple[Any, ...]) -> tuple[Inputs, AttentionProblem]:
    """Inputs and problem from a call's arguments without the backend."""
    inputs = Inputs(*args[:NUM_TENSORS])
    return inputs, describe(inputs, **dict(zip(OPTION_NAMES, args[NUM_TENSORS:], strict=True)))


def allocate(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) to be filled. out keeps the order of q's heads and rows in memory: what follows needs no copy.

    Packed: contiguous. Rows that no sequence covers are the backend's to fill too, as rows that see nothing.
    """
    q, dim_v = inputs.q, problem.head_dim_v
    if problem.features.varlen:
        total = q.shape[0]
        lse = q.new_empty(problem.heads_q, total, dtype=torch.float32)
        return q.new_empty(total, problem.heads_q, dim_v), lse
    batch, heads, len_q = problem.batch, problem.heads_q, problem.len_q
    lse = q.new_empty(batch, heads, len_q, dtype=torch.float32)
    heads_apart = q.stride(1) >= q.stride(2)
    if heads_apart is not True and not unless_known(heads_apart):
        # Not as a view of what lies so, which could not be written to in place later.
        return q.new_empty_strided((batch, heads, len_q, dim_v), (len_q * heads * dim_v, dim_v, heads * dim_v, 1)), lse
    return q.new_empty(batch, heads, len_q, dim_v), lse


def run(ready: Ready, args: Arguments) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that was prepared for this metadata."""
    inputs = Inputs(*args[:NUM_TENSORS])
    out, lse = allocate(ready.problem, inputs)
    ready.run(inputs, out, lse)
    return out, lse


def prepared(args: Arguments) -> Ready:
    """The call of this metadata, as it was prepared before or now."""
    key = keys.of_call(args)
    ready = _ready.get(key)
    if ready is None:
        inputs, problem = problem_of(args[:-1])
        ready = Ready(problem, dispatch.prepare(problem, inputs, *allocate(problem, inputs), args[-1]))
        remember(_ready, key, ready)
    return ready


def gradients(*args: Any) -> tuple[Tensor | None, ...]:
    """Of q, k, v, mask and sinks, from d_out, d_lse, out, lse, a call's arguments without the backend, what is needed.

    What the shapes decide is worked out once, as for a call.
    """
    d_out, d_lse, out, lse, *rest, needs = args
    if d_out.stride(-1) != 1:  # the gradient of a sum, say, has no strides at all
        d_out = d_out.contiguous()
    lse = lse.contiguous()  # who kept it for autograd may hand it back otherwise
    d_lse = None if d_lse is None else d_lse.contiguous()
    key = keys.of_gradients((d_out, d_lse, out, lse, *rest, needs))
    make = _gradients.get(key)
    if make is None:
        inputs, problem = problem_of(tuple(rest))
        make = dispatch.prepare_gradients(problem, inputs, d_out, tuple(needs))
        remember(_gradients, key, make)
    return make(Inputs(*rest[:NUM_TENSORS]), out, lse, d_out, d_lse)


def known_gradients(*args: Any) -> tuple[Tensor | None, ...] | None:
    """As `gradients`, if it knows the metadata and nothing watches, else None. args are unchecked.

    What `gradients` makes contiguous first is not known: it remembers what it has then.
    """
    make = look_up(_gradients, keys.of_gradients, args)
    if make is None:
        return None
    d_out, d_lse, out, lse, *tensors = args[: 4 + NUM_TENSORS]
    return make(Inputs(*tensors), out, lse, d_out, d_lse)


def known(args: Arguments) -> Ready | None:
    """The call, if the door let this metadata through and nothing but autograd watches. Not for a compiler to trace."""
    ready = met(args)
    return ready if ready is not None and ready.trusted else None


def met(args: Arguments) -> Ready | None:
    """The call, if it was there or one like it was, and nothing but autograd watches. args are unchecked.

    One like it: a cache that grows is a new shape at each token, whose launches differ in few numbers.
    """
    ready = look_up(_ready, keys.of_call, args)
    like = look_up(_like, keys.but_length, args) if ready is None else None
    if like is None:
        return ready
    problem = replace(like.problem, len_k=args[1].shape[2])
    ready = Ready(problem, like.run.longer(problem, Inputs(*args[:NUM_TENSORS])), trusted=True)
    remember(_ready, keys.of_call(args), ready)
    return ready


def trust(ready: Ready, args: Arguments) -> None:
    """The door has let these through, and so it would those of about as many keys."""
    ready.trusted = True
    # With a window how many tiles are seen changes at other lengths, too.
    if hasattr(ready.run, "longer") and not ready.problem.features.left and (key := keys.but_length(args)):
        remember(_like, key, ready)


def look_up(ready: dict[Any, Any], key: Callable[..., Any], *of: Any) -> Any:
    """What `remember` kept under key(*of), else None; None too if more than autograd watches. `of` is unchecked."""
    try:
        call = ready.get(key(*of))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):  # no tensors, strides, hash
        return None
    return None if call is None or watched() else call


def remember(ready: dict[tuple[Any, ...], Any], key: tuple[Any, ...], call: Any) -> None:
    """Keeps a prepared call; no more than MOST of them."""
    if len(ready) >= MOST:
        ready.clear()
    ready[key] = call


def recorded(tensors: tuple[Any, ...]) -> bool:
    """Autograd records a call with these."""
    if not torch.is_grad_enabled():
        return False
    for x in tensors:  # noqa: SIM110 - in every call, and any() takes twice as long
        if x is not None and x.requires_grad:
            return True
    return False
