"""Decoding: attention of a few last tokens over a cache, contiguous or paged; its op, its public call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from flashattn_lite import arguments, arguments_decode, calls, dispatch, flops, keys, operators
from flashattn_lite import target as targets
from flashattn_lite.decode_backends import BACKENDS
from flashattn_lite.options import Cached
from flashattn_lite.problem import AttentionProblem, Inputs, Window, describe
from flashattn_lite.scalars import as_int64, from_array
from flashattn_lite.watchers import bare, plain

Ready = tuple[AttentionProblem, dispatch.Run]  # a call that was prepared, for all tensors of its metadata
NUM_TENSORS = 6  # they come first in the op's arguments


def problem_of(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    table: Tensor | None,
    sinks: Tensor | None,
    *numbers: Any,
) -> tuple[Inputs, AttentionProblem]:
    """Inputs and problem from arguments in the order of the op's schema; len_k is the capacity of a sequence."""
    inputs = Inputs(q, k_cache, v_cache, sinks=sinks, kv_lens=kv_lens)
    causal, left, right, scale, softcap = numbers
    problem = describe(
        inputs, causal=causal, q_start=None, window_left=left, window_right=right, scale=scale, softcap=softcap
    )
    room = problem.len_k if table is None else table.shape[1] * k_cache.shape[2]
    return inputs, replace(problem, len_k=room, cache=True)


def _decode(*args: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked arguments, but for values that the door could not read."""
    _, k_cache, _, kv_lens, table, _, _, left, right, *_ = args
    arguments.check_window((left, right))
    if table is not None:
        arguments_decode.check_table_values(table, kv_lens, k_cache)
    tensors, options = args[:NUM_TENSORS], args[NUM_TENSORS:]
    ready = _prepared(*args)
    if args[0].is_cuda:
        calls.remember(_ready, _key(tensors, options), ready)  # the door's keys have one option less: a window whole
    return _run(ready, tensors)


def _again(*args: Any) -> tuple[Tensor, Tensor] | None:
    """As `_decode`, of a call that was there before: on a GPU, where no values are looked at."""
    tensors = args[:NUM_TENSORS]
    ready = calls.look_up(_ready, _key, tensors, args[NUM_TENSORS:]) if args[0].is_cuda else None
    return None if ready is None else _run(ready, tensors)


def _shapes(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, problem = problem_of(*args[:-1])
    return calls.allocate(problem, inputs)


attention_decode_op = operators.define(
    "attention_decode",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor kv_lens, Tensor? block_table, Tensor? sinks, "
    "bool causal, SymInt? window_left, SymInt? window_right, float? scale, float? softcap, str backend) "
    "-> (Tensor, Tensor)",
    _decode,
    _shapes,
    _again,
)


def _prepared(*args: Any) -> Ready:
    """From checked arguments, in the order of the op's schema."""
    *given, backend = args
    inputs, problem = problem_of(*given)
    chosen, target = dispatch.choose(problem, inputs, backend, BACKENDS), targets.of(problem.device)
    return problem, chosen.prepare(problem, inputs, *calls.allocate(problem, inputs), target, given[4])


def _run(ready: Ready, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    problem, run = ready
    q, k, v, kv_lens, table, sinks = tensors
    inputs = Inputs(q, k, v, sinks=sinks, kv_lens=kv_lens)
    out, lse = calls.allocate(problem, inputs)
    run(inputs, out, lse, table)
    return out, lse


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "attention_decode: has no gradient; got a backward pass through it. Call attention(q, k, v, kv_lens=...), "
        "which has one, or decode under torch.no_grad()."
    )


# An op that raises when it runs: compilers trace a backward pass ahead, whether or not one will come.
_no_gradient_op = operators.define(
    "attention_decode_backward",
    "(Tensor d_out, SymInt[] size) -> Tensor",
    _refuse,
    lambda d_out, size: d_out.new_empty(size),
)


def _save(ctx: Any, args: tuple[Any, ...], _: Any) -> None:
    ctx.sizes = [x.shape if isinstance(x, Tensor) else () for x in args]


def _backward(ctx: Any, needs: tuple[bool, ...], d_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return tuple(_no_gradient_op(d_out, size) if need else None for size, need in zip(ctx.sizes, needs, strict=True))


operators.derive(attention_decode_op, _save, _backward, _refuse)
operators.one_by_one(attention_decode_op)


@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_lens: Tensor, *,
    return_lse: Literal[False] = ..., **options: Unpack[Cached],
) -> Tensor: ...  # fmt: skip
@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_lens: Tensor, *,
    return_lse: Literal[True], **options: Unpack[Cached],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_lens: Tensor, *,
    return_lse: bool, **options: Unpack[Cached],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    *,
    block_table: Tensor | None = None,
    causal: bool = True,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""`attention` of the last few tokens of each sequence over its cache, at the cost of reading that cache once.

    For each sequence b, query head h and token i, over the keys j < kv_lens[b] that are visible to it:

        scores_j = q_i . k_j * scale        then softcap * tanh(scores_j / softcap)
        lse      = log(sum_j exp(scores_j) + exp(sinks_h)),     out = sum_j exp(scores_j - lse) v_j

    Args:
        q: `(B, Hq, L, D)`, float16, bfloat16, float32 (float64 on the tiled backend), any strides; L from 1 to 16.
            Token i of sequence b stands at position `kv_lens[b] - L + i`: its own key is in the cache already.
        k_cache: `(B, Hkv, S_max, D)`, or pages `(pages, Hkv, page_size, D)`; q's dtype and device, any strides. Hq is a
            multiple of Hkv. A page size is a power of two from 16 up.
        v_cache: as k_cache, with a head dim Dv of its own; D and Dv from 1 to 256.
        kv_lens: `(B,)` int32 on q's device, never read by the host on a GPU: keys from `kv_lens[b]` on do not exist,
            whatever lies there. Clamped to what the cache holds.
        block_table: `(B, max_pages)` int32 on q's device: key j of sequence b is row `j % page_size` of page
            `block_table[b, j // page_size]`. Entries past the length may hold anything. The others are checked on
            the CPU; a GPU clamps them into the cache or reads 0: a wrong table gives a wrong result, never an access
            outside.
        causal: token i sees keys up to its own position. False: all of kv_lens[b].
        window: `(left, right)`: only keys from `left` before to `right` behind that position; None is unbounded.
        scale: default `1 / sqrt(D)`.
        softcap: in units of scaled scores, from 1.2e-38 to 1.7e38.
        sinks: `(Hq,)`, natural units: one more logit per head that enters the denominator only.
        return_lse: also return lse.
        backend: "auto", or one of "hopper" (sm_90, many query rows), "triton" (split over the keys, any
            GPU of Triton's), "tiled" (plain torch): it runs or a `BackendError` says why not.

    Returns:
        out `(B, Hq, L, Dv)` in q's dtype, or `(out, lse)`; lse is float32 `(B, Hq, L)`, natural log.
        A row that sees no key has out 0 and lse -inf (lse = its sink, where there is one).

    Numerics: as `attention`. A row's bits do not depend on the batch, its place in it, the other rows, or whether its
    keys lie in pages, and where; on "tiled" they do on the room in the cache. "hopper" takes more than 16 rows (L times
    Hq / Hkv; of head dims up to 64 more than 64) in 16 bits, if rows of all tensors lie at 16-byte addresses, and has
    other bits than "triton". Lengths and tables may change between replays of a CUDA graph: what is captured depends
    on shapes alone. No gradient: a backward pass raises.

    Raises:
        ValueError, TypeError, NotImplementedError: before anything is launched, naming the argument.

    Source: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023); pages: Kwon et al., PagedAttention, arXiv 2309.06180.

    Example:
        >>> q = torch.randn(2, 8, 1, 64); k = v = torch.randn(10, 2, 16, 64)
        >>> lens = torch.tensor([40, 5], dtype=torch.int32)
        >>> table = torch.tensor([[7, 0, 3], [9, -1, -1]], dtype=torch.int32)
        >>> attention_decode(q, k, v, lens, block_table=table).shape
        torch.Size([2, 8, 1, 64])
    """
    arguments.check_flag("return_lse", return_lse)
    tensors, given = (q, k_cache, v_cache, kv_lens, block_table, sinks), (causal, window, scale, softcap, backend)
    done = _recall(tensors, given)
    if done is None:
        options = _checked(tensors, given)
        done = _at_once(tensors, given, options)
        if done is None:
            flops.teach()
            done = attention_decode_op(*tensors, *options)
    return done if return_lse else done[0]


_ready: dict[tuple[Any, ...], Ready] = {}


def _key(tensors: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """With types, since 1 == True, and with torch's setting for TF32, which is read when a call is prepared."""
    window = given[1] if type(given[1]) is tuple else ()
    types = (*map(type, given), *map(type, window))
    return (*map(keys.metadata, tensors), given, types, tensors[0].dtype == torch.float32 and targets.takes_tf32())


def _at_once(
    tensors: tuple[Any, ...], given: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of arguments that the door let through if nothing has to see the op, else None."""
    window = given[1] or ()
    if type(window) is not tuple or not plain(tensors, (*options, *window)) or calls.recorded(tensors):
        return None
    ready = _prepared(*tensors, *options)
    if tensors[0].is_cuda:  # on a CPU the door reads lengths and tables, which are others every time
        calls.remember(_ready, _key(tensors, given), ready)
    return _run(ready, tensors)


def _recall(tensors: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """(out, lse) if the door knows arguments of this kind and nothing watches, else None: nothing was checked yet."""
    if torch.compiler.is_compiling() or type(tensors[0]) is not Tensor:
        return None
    ready = calls.look_up(_ready, _key, tensors, given)
    return None if ready is None or calls.recorded(tensors) else _run(ready, tensors)


def explain_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    *,
    block_table: Tensor | None = None,
    causal: bool = True,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> dispatch.Explanation:
    """Which backend and tile `attention_decode` would run with these arguments, and why not the others.

    Args:
        As `attention_decode`. Nothing is computed.

    Returns:
        An `Explanation` as `explain` returns it, with `.gradients` None: decoding has none.

    Raises:
        What `attention_decode` would raise for these arguments.

    Example:
        >>> x = torch.randn(1, 2, 1, 16)
        >>> explain_decode(x, x, x, torch.ones(1, dtype=torch.int32), backend="tiled").backend
        'tiled'
    """
    arguments.check_flag("return_lse", return_lse)
    tensors = (q, k_cache, v_cache, kv_lens, block_table, sinks)
    options = _checked(tensors, (causal, window, scale, softcap, backend))
    inputs, problem = problem_of(*map(bare, tensors), *options[:-1])
    chosen, target = dispatch.choose(problem, inputs, backend, BACKENDS), targets.of(problem.device)
    tile = chosen.tile(problem, inputs, target)
    return dispatch.Explanation(chosen.name, tile, target, dispatch.reasons(problem, inputs, BACKENDS))


def _checked(tensors: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options in the op's order, as numbers, once every argument has passed the door."""
    (q, k_cache, v_cache, kv_lens, block_table, sinks), (*options, backend) = tensors, given
    causal, window, scale, softcap = map(from_array, options)
    arguments_decode.check_decode(q, k_cache, v_cache, kv_lens, block_table)
    arguments.check_no_tangent(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
    arguments.check_options(causal=causal, q_start=None, window=window, scale=scale, softcap=softcap)
    arguments.check_sinks(sinks, q)
    dispatch.check_backend(backend, BACKENDS)
    left, right = map(as_int64, window or (None, None))
    scale, softcap = (None if x is None else float(x) for x in (scale, softcap))
    return causal, left, right, scale, softcap, backend
