"""What a user calls: attention, attention_varlen, and what explains them. Checks at the door, then one op."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from flashattn_lite import arguments, calls, dispatch, ops
from flashattn_lite.arguments_mask import check_mask
from flashattn_lite.arguments_varlen import check_varlen
from flashattn_lite.options import Dense, Packed
from flashattn_lite.problem import NUM_TENSORS, Window
from flashattn_lite.scalars import from_array
from flashattn_lite.watchers import bare, plain


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Dense]
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Dense]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Dense]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    q_start: int | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Fused attention, softmax(scores) v, without ever holding the L x S scores.

    For each batch b, query head h and query i, over the keys j that are visible to it:

        scores_j = q_i . k_j * scale        then softcap * tanh(scores_j / softcap), then + mask_ij
        lse      = log(sum_j exp(scores_j) + exp(sinks_h))
        out      = sum_j exp(scores_j - lse) v_j

    Args:
        q: `(B, Hq, L, D)`, heads before tokens (of what is laid out `(B, L, Hq, D)` pass `q.transpose(1, 2)`, a view);
            float16, bfloat16, float32 (float64 on the tiled backend); any strides.
        k: `(B, Hkv, S, D)`, q's dtype and device. Hq is a multiple of Hkv; head h reads key head h // (Hq / Hkv).
        v: `(B, Hkv, S, Dv)`. D and Dv are any integers from 1 to 256; L and S any, 0 too.
        causal: key j is visible to query i iff `j <= i + q_start`.
        q_start: position of query 0 among the keys; default `S - L` (with kv_lens: `kv_lens[b] - L`), which aligns
            the last query with the last key. 0 is torch's `is_causal`.
        window: `(left, right)`: key j is visible iff `i + q_start - left <= j <= i + q_start + right`;
            None leaves a side unbounded.
        scale: default `1 / sqrt(D)`; up to 1.7e38 in size.
        softcap: in units of scaled scores, from 1.2e-38 to 1.7e38.
        mask: bool (True = visible) or float (added to the scaled scores), broadcastable to `(B, Hq, L, S)`,
            read by its strides and never expanded in memory. Composes with causal and window. -inf hides; a finite
            number beyond 2.35e38 in size (float32's lowest, say) counts as that much, in lse too.
        sinks: `(Hq,)`, natural units, up to 2.35e38 (past that its head may be NaN): one more logit per
            head that enters the denominator only.
        kv_lens: `(B,)` int32 on q's device; on a GPU the host never reads it. Keys from `kv_lens[b]` on do not exist.
            A length below 0 counts as 0, one above S as S.
        return_lse: also return lse.
        backend: "auto", or one of "split" (decoding's kernels, few query rows), "hopper" (sm_90, 16 bits), "triton"
            (any GPU of Triton's), "tiled" (plain torch, any device): it runs or a `BackendError` says why not.

    Returns:
        out `(B, Hq, L, Dv)` in q's dtype, or `(out, lse)`; lse is float32 `(B, Hq, L)`, natural log.
        A row that sees no key has out 0 and lse -inf (lse = its sink, where there is one).

    Numerics: scores, softmax state and sums in float32 (float64 for float64); the probabilities are rounded to v's
    dtype for their product with v (not by "tiled"), and divided by their sum at the end, so that values of v past
    the largest float32 over S may overflow. On a GPU float32 is multiplied as TF32 where
    `torch.set_float32_matmul_precision` says so. A NaN or infinity reaches the rows that see it and no other (an
    infinity in v whose weight underflows to 0 gives infinity on one backend and NaN on another). A row's bits do not
    depend on the batch, on what other rows hold, or on repeats; how many rows and keys there are, strides and
    alignment choose kernels and tiles, and so may show. (What plain torch computes on a GPU, float64 and some
    gradients, has bits that the batch decides.) Differentiable in q, k, v, sinks and a float mask, with memory
    linear in L and S, by backward() or torch.func.grad, compiled or not; gradients have no gradients of their own,
    and forward-mode derivatives are refused.

    Raises:
        ValueError, TypeError, NotImplementedError: before anything is launched, naming the argument.

    Source: Dao, FlashAttention-2, arXiv 2307.08691; Milakov and Gimelshein, arXiv 1805.02867.

    Example:
        >>> q = torch.randn(1, 8, 5, 64); k = v = torch.randn(1, 2, 100, 64)
        >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 8, 5, 64]), torch.Size([1, 8, 5]))
    """
    arguments.check_flag("return_lse", return_lse)
    tensors = (q, k, v, mask, sinks, kv_lens, None, None)
    rest = (causal, q_start, window, scale, softcap, None, None, backend)
    done = _recall(tensors, *rest)
    if done is None:
        rest = _checked(tensors, *rest)
        done = ops.call(_arguments(tensors, *rest))
    return done if return_lse else done[0]


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[False] = ..., **options: Unpack[Packed],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[True], **options: Unpack[Packed],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: bool, **options: Unpack[Packed],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    q_start: int | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_lens: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""`attention` over packed sequences: sequence b is rows `cu_seqlens[b]` to `cu_seqlens[b + 1]`, no padding.

    It takes no mask. `explain_varlen` says which backend would run.

    Args:
        q: `(total_q, Hq, D)`; k: `(total_k, Hkv, D)`; v: `(total_k, Hkv, Dv)`; dtypes and strides as in `attention`.
        cu_seqlens_q, cu_seqlens_k: `(batch + 1,)` int32 on q's device, from 0 to the total, not decreasing.
            Their values are checked on the CPU; on a GPU they are clamped into the tensors by the kernel, so that
            a wrong table can give a wrong result for a sequence but never an access outside.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths; with both a GPU call never waits for the device.
            The CPU checks them (ValueError). A GPU does not: of a longer sequence rows past max_seqlen_q have out 0 and
            lse -inf, and keys past max_seqlen_k no gradient. Where `max_seqlen_q * Hq / Hkv` is at most 16, the keys
            are split over the GPU, as of `attention` with few rows, and those past max_seqlen_k are not seen either.
        kv_lens: `(batch,)` int32: keys of sequence b from `kv_lens[b]` on do not exist.
        causal, q_start, window, scale, softcap, sinks, return_lse, backend: as in `attention`, for each sequence.

    Returns:
        out `(total_q, Hq, Dv)`, or `(out, lse)` with lse float32 `(Hq, total_q)`. A row that sees no key, and a row
        that no sequence covers, has out 0 and lse -inf.

    Numerics, gradients: as `attention`; where plain torch makes them, it reads cu_seqlens on the host.

    Raises:
        ValueError, TypeError, NotImplementedError: before anything is launched, naming the argument.

    Source: as `attention`.

    Example:
        >>> x = torch.randn(7, 4, 32)
        >>> cu = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> attention_varlen(x, x, x, cu, cu, causal=True).shape
        torch.Size([7, 4, 32])
    """
    arguments.check_flag("return_lse", return_lse)
    tensors = (q, k, v, None, sinks, kv_lens, cu_seqlens_q, cu_seqlens_k)
    rest = (causal, q_start, window, scale, softcap, max_seqlen_q, max_seqlen_k, backend)
    # On a CPU the values of cu_seqlens are checked too.
    done = _recall(tensors, *rest) if isinstance(q, Tensor) and q.is_cuda else None
    if done is None:
        rest = _checked_packed(tensors, *rest)
        done = ops.call(_arguments(tensors, *rest))
    return done if return_lse else done[0]


def _checked(tensors: tuple[Any, ...], *rest: Any) -> tuple[Any, ...]:
    """The options, as numbers, once every argument has passed the door."""
    q, k, v, *_ = tensors
    rest = tuple(map(from_array, rest))
    arguments.check_dense(q, k, v)
    _check_others(tensors, q.shape[0], *rest)
    return rest


def _checked_packed(tensors: tuple[Any, ...], *rest: Any) -> tuple[Any, ...]:
    """The same of packed sequences."""
    q, k, v, _, _, _, cu_seqlens_q, cu_seqlens_k = tensors
    rest = tuple(map(from_array, rest))
    check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest[5:7])
    _check_others(tensors, cu_seqlens_q.shape[0] - 1, *rest)
    return rest


def _check_others(
    tensors: tuple[Any, ...], batch: int, causal: Any, q_start: Any, window: Any, scale: Any, softcap: Any, *rest: Any
) -> None:
    q, k, v, mask, sinks, kv_lens, _, _ = tensors
    arguments.check_no_tangent(q=q, k=k, v=v, mask=mask, sinks=sinks)
    arguments.check_options(causal=causal, q_start=q_start, window=window, scale=scale, softcap=softcap)
    check_mask(mask, q, k.shape[2])
    arguments.check_sinks(sinks, q)
    arguments.check_kv_lens(kv_lens, q, batch)
    dispatch.check_backend(rest[-1])


def _recall(tensors: tuple[Any, ...], *rest: Any) -> tuple[Tensor, Tensor] | None:
    """The result, if the door knows arguments of this kind; nothing has been checked here yet."""
    q, window = tensors[0], rest[2]
    if torch.compiler.is_compiling() or type(q) is not Tensor:
        return None
    if window is not None and (type(window) is not tuple or len(window) != 2):
        return None
    return ops.recall(_arguments(tensors, *rest))


def _arguments(
    tensors: tuple[Any, ...], causal: Any, q_start: Any, window: Any, scale: Any, softcap: Any, *rest: Any
) -> calls.Arguments:
    """A call's arguments in the op's order."""
    left, right = window or (None, None)
    return (*tensors, causal, q_start, left, right, scale, softcap, *rest)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    q_start: int | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> dispatch.Explanation:
    """Which backend and tile `attention` would run with these arguments, and for every other the reasons why not.

    Args:
        As `attention`. Nothing is computed.

    Returns:
        An `Explanation`: `.backend`, `.tile`, `.target`, `.reasons` (a dict of lists, empty where a backend would
        run), `.gradients` (why plain torch would compute the gradients, empty where Triton's kernels would: of the
        tensors that require one, of q, k, v and sinks where none does); `print` shows it as a table.

    Raises:
        What `attention` would raise for these arguments.

    Example:
        >>> x = torch.randn(1, 2, 8, 16)
        >>> explain(x, x, x, backend="tiled").backend
        'tiled'
    """
    arguments.check_flag("return_lse", return_lse)
    tensors = (q, k, v, mask, sinks, kv_lens, None, None)
    rest = (causal, q_start, window, scale, softcap, None, None, backend)
    return _explained(tensors, *_checked(tensors, *rest))


def explain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    q_start: int | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_lens: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> dispatch.Explanation:
    """Which backend and tile `attention_varlen` would run with these arguments, and why not the others.

    Args:
        As `attention_varlen`. Nothing is computed; a max_seqlen that is not given is read from its cu_seqlens.

    Returns:
        An `Explanation`, as `explain` returns it.

    Raises:
        What `attention_varlen` would raise for these arguments.

    Example:
        >>> x, cu = torch.randn(7, 4, 32), torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> explain_varlen(x, x, x, cu, cu, backend="tiled").backend
        'tiled'
    """
    arguments.check_flag("return_lse", return_lse)
    tensors = (q, k, v, None, sinks, kv_lens, cu_seqlens_q, cu_seqlens_k)
    rest = (causal, q_start, window, scale, softcap, max_seqlen_q, max_seqlen_k, backend)
    return _explained(tensors, *_checked_packed(tensors, *rest))


def _explained(tensors: tuple[Any, ...], *rest: Any) -> dispatch.Explanation:
    """Of a call that has passed the door."""
    args = ops.as_schema(_arguments(tuple(map(bare, tensors)), *rest))
    if plain(args[:NUM_TENSORS], args[NUM_TENSORS:]):  # else nobody knows how long sequences are
        args = ops.measured(args)
    inputs, problem = calls.problem_of(args[:-1])
    return dispatch.explain(problem, inputs, rest[-1])
