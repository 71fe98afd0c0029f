"""torch's signature and torch's rules for scaled_dot_product_attention, mapped onto the native op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from flashattn_lite import api, arguments, batch_dims, operators, ops, watchers
from flashattn_lite.arguments_mask import check_mask_shape, is_causal_bias, mask_remedy
from flashattn_lite.autocast import lowered
from flashattn_lite.errors import not_implemented, show, type_error, value_error
from flashattn_lite.scalars import from_array, is_number
from flashattn_lite.sdpa_known import Diagonal, arguments_of, recalled

NAMES = ("query", "key", "value")
Tensors = tuple[Tensor, Tensor, Tensor]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Drop-in for `torch.nn.functional.scaled_dot_product_attention`: softmax(query key^T * scale + attn_mask) value.

    Args:
        query: `(..., Hq, L, D)`, float16, bfloat16, float32 or float64 (that one on the tiled backend), any strides.
            Any number of leading batch dims, also none; they broadcast between query, key, value and attn_mask.
        key: `(..., H, S, D)`; value: `(..., H, S, Dv)`; D and Dv from 1 to 256.
        attn_mask: broadcastable to `(..., Hq, L, S)`: bool (True = visible), or float32 or query's dtype (added);
            or one of torch's causal_upper_left, causal_lower_right.
        dropout_p: only 0; more raises NotImplementedError.
        is_causal: key j is visible to query i iff `j <= i` (top-left). Not together with attn_mask.
        scale: default `1 / sqrt(D)`.
        enable_gqa: Hq may be a multiple of H. Without it, heads must be equal or 1 (which broadcasts), as in torch.

    Returns:
        `(..., Hq, L, Dv)` in query's dtype. A row that sees no key returns zeros.

    Numerics and gradients: as `flashattn_lite.attention`; gradients reach query, key, value and a float attn_mask.
    Inside `torch.autocast`, inputs are cast as torch's function casts them.

    Raises:
        ValueError, TypeError, NotImplementedError: before anything is launched, naming the argument.

    Source: torch's documentation of the function; the kernels' sources are in `flashattn_lite.attention`.

    Example:
        >>> q = torch.randn(2, 4, 10, 32)
        >>> ours = scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), atol=1e-5)
        True
    """
    tensors = query, key, value, attn_mask
    if has_torch_function(tensors) and not torch.compiler.is_compiling() and not is_causal_bias(attn_mask):
        # As torch's own: a tracer, a mode or a class that stands for a tensor may take the call.
        return handle_torch_function(
            scaled_dot_product_attention, tensors, *tensors, dropout_p, is_causal, scale, enable_gqa
        )
    done = recalled(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if done is not None:
        return done[0]
    out = _attend(*_checked(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    return operators.reshaped(out, out.shape[1:]) if max(query.dim(), key.dim(), value.dim()) == 2 else out


def backend_of(*args: Any) -> str:
    """The backend that runs a call with these arguments, all of `scaled_dot_product_attention`'s in its order."""
    q, k, v, mask, diagonal, scale = _checked(*args)
    while (inputs := batch_dims.viewed(q, k, v, mask)) is None:
        q, k, v, mask = batch_dims.entry(q, k, v, mask, 0)
    causal, q_start = diagonal
    explained = api.explain(*inputs[:3], causal=causal, q_start=q_start, scale=scale, mask=inputs.mask)
    return explained.backend


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Diagonal, float | None]:
    """(q, k, v, mask, diagonal, scale) for `_attend`: [*lead, H, length, dim] with equal batch dims."""
    for name, x in zip(NAMES, (query, key, value), strict=True):
        arguments.check_float_tensor(name, x)
        if x.dim() < 2:
            raise value_error(name, "must have at least 2 dimensions (..., length, head_dim)", x, "Unsqueeze it.")
    arguments.check_no_tangent(query=query, key=key, value=value, attn_mask=attn_mask, scale=scale)
    dropout_p, scale = _number(dropout_p), scale if isinstance(scale, bool) else _number(scale)
    _check_options(dropout_p, is_causal, scale, enable_gqa)
    diagonal: Diagonal = (is_causal, 0 if is_causal else None)
    if is_causal_bias(attn_mask) and not is_causal:
        diagonal, attn_mask = _diagonal_of(attn_mask, query, key), None
    given, given_mask = (query, key, value), attn_mask
    # torch's function is on autocast's list of those that run in the lower precision; so is this one.
    query, key, value, attn_mask = lowered(query.device, query, key, value, attn_mask)
    _check_mask(attn_mask, given_mask, query, is_causal)
    rank = max(query.dim(), key.dim(), value.dim())
    q, k, v = (batch_dims.with_dims(x, max(rank, 3)) for x in (query, key, value))
    q, k, v = _broadcast(q, k, v, given, enable_gqa)
    full = (*q.shape[:-1], k.shape[-2])[-rank:]
    mask = None if attn_mask is None else _broadcast_mask(attn_mask, given_mask, full)
    return q, k, v, mask, diagonal, None if scale is None else float(scale)


def _number(x: Any) -> Any:
    """A number as torch's function takes it: a flag, or a tensor of no dimension (whose GPU is waited for), too.

    Not one that wants a gradient, which would be lost without a word.
    """
    if isinstance(x, bool):
        return float(x)
    x = from_array(x)
    if not isinstance(x, Tensor) or x.dim() or x.is_complex() or x.requires_grad or x.is_meta:
        return x
    return x if not torch.compiler.is_compiling() and watchers.transformed(x) else x.item()


def _check_options(dropout_p: Any, is_causal: object, scale: object, enable_gqa: object) -> None:
    if not is_number(dropout_p):
        raise type_error("dropout_p", "must be a float", dropout_p, "Pass 0.0 for no dropout.")
    if not 0 <= dropout_p <= 1:
        raise value_error("dropout_p", "must be between 0 and 1", dropout_p, "Pass 0.0 for no dropout.")
    if dropout_p > 0:
        remedy = "Pass 0.0 (in evaluation: model.eval() does), or keep torch's function where you train with dropout."
        raise not_implemented("dropout_p", "dropout of attention weights is not implemented", dropout_p, remedy)
    arguments.check_flag("is_causal", is_causal)
    arguments.check_flag("enable_gqa", enable_gqa)
    arguments.check_options(causal=is_causal, q_start=0, window=None, scale=scale, softcap=None)


def _check_mask(attn_mask: Tensor | None, given: Tensor | None, query: Tensor, is_causal: bool) -> None:
    """given: as the caller has it, for errors: of another dtype maybe, under autocast."""
    if attn_mask is None:
        return
    if is_causal:
        remedy = "Pass one of them; for both, use flashattn_lite.attention(..., mask=, causal=True, q_start=0)."
        remedy = "Leave is_causal out: it says as much." if is_causal_bias(given) else remedy
        raise value_error("attn_mask", "must be None when is_causal is True", given, remedy)
    if not isinstance(attn_mask, Tensor):
        raise type_error("attn_mask", "must be a torch.Tensor or None", attn_mask, mask_remedy(attn_mask))
    arguments.check_strided("attn_mask", attn_mask)
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        remedy = mask_remedy(attn_mask)
        if given is not None and given.dtype != attn_mask.dtype:
            remedy = f"Autocast made it {show(attn_mask.dtype)}, and left query: pass it in query's dtype."
        relation = f"dtype must be bool, float32 or query's ({show(query.dtype)})"
        raise type_error("attn_mask", relation, attn_mask, remedy)
    if attn_mask.device != query.device:
        raise value_error("attn_mask", f"must be on query's device ({query.device})", given, "Move it with .to().")


def _diagonal_of(bias: Any, query: Tensor, key: Tensor) -> Diagonal:
    """What torch's causal_upper_left or causal_lower_right says: it holds no numbers."""
    lengths = (bias.seq_len_q, bias.seq_len_kv)
    if lengths != (query.shape[-2], key.shape[-2]):
        relation = f"must be made for (len_q, len_k) = {(query.shape[-2], key.shape[-2])}"
        raise value_error("attn_mask", relation, lengths, "Make one for these lengths.")
    return True, 0 if bias.variant.name == "UPPER_LEFT" else None


def _broadcast(q: Tensor, k: Tensor, v: Tensor, given: Tensors, enable_gqa: bool) -> Tensors:
    """q, k, v [..., H, length, dim] with equal batch dims (views, no copies), checked as a problem.

    given: as the caller has them, for errors: of other ranks maybe, and other dtypes under autocast.
    """
    _, nk, nv = NAMES
    for name, x, came in ((nk, k, given[1]), (nv, v, given[2])):
        if x.dtype != q.dtype:
            relation = f"dtype must equal query's ({show(q.dtype)})"
            raise type_error(name, relation, came, f"Cast with {name}.to(query.dtype).")
        if x.device != q.device:
            relation = f"must be on query's device ({q.device})"
            raise value_error(name, relation, came, f"Move it: {name}.to(query.device).")
    arguments.check_head_dims(*given, NAMES)
    if v.shape[-2] != k.shape[-2]:
        raise value_error(nv, f"length must equal key's ({k.shape[-2]})", given[2], "Pass one value for each key.")
    keep = 3 if enable_gqa else 2  # trailing dims that do not broadcast
    if enable_gqa:
        arguments.check_heads([x.shape[-3] for x in (q, k, v)], given, NAMES, "(..., heads, length, head_dim)")
    for name, x, came in ((nk, k, given[1]), (nv, v, given[2])):
        if not _broadcastable(q.shape[:-keep], x.shape[:-keep]):
            heads = not enable_gqa and not _broadcastable(q.shape[-3:-2], x.shape[-3:-2])
            remedy = "For grouped heads pass enable_gqa=True." if heads else "Make each 1 or as large as the other's."
            dims = "batch dims" if enable_gqa else "batch dims and heads"
            relation = f"{dims} must broadcast with query's {tuple(given[0].shape)}"
            raise value_error(name, relation, came, remedy)
    if not _broadcastable(k.shape[:-keep], v.shape[:-keep]):
        relation = f"batch dims must broadcast with key's {tuple(given[1].shape)}"
        raise value_error(nv, relation, given[2], "Make each 1 or as large as the other's.")
    lead = torch.broadcast_shapes(q.shape[:-keep], k.shape[:-keep], v.shape[:-keep])
    q, k, v = (batch_dims.expanded(x, (*lead, *x.shape[-keep:])) for x in (q, k, v))
    return q, k, v


def _broadcastable(a: torch.Size, b: torch.Size) -> bool:
    return all(x == y or x == 1 or y == 1 for x, y in zip(a, b, strict=True))


def _broadcast_mask(mask: Tensor, given: Tensor | None, full: tuple[int, ...]) -> Tensor:
    check_mask_shape("attn_mask", mask.shape, full, "(..., heads, len_q, len_k)", given)
    return batch_dims.with_dims(mask, max(len(full), 3))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, diagonal: Diagonal, scale: float | None) -> Tensor:
    """[..., H, length, dim] with any number of batch dims, as views of [B, H, length, dim] wherever strides allow."""
    lead = q.shape[:-3]
    inputs = batch_dims.viewed(q, k, v, mask)
    if inputs is None and torch.jit.is_tracing():  # a loop would be kept with as many entries as there are now
        q, k, v = (x.contiguous() for x in (q, k, v))
        mask = mask if mask is None else mask.expand(*lead, *mask.shape[-3:]).contiguous()
        inputs = batch_dims.viewed(q, k, v, mask)
    if inputs is None:  # one call for each entry of the first batch dim, never a copy
        return torch.stack([_attend(*batch_dims.entry(q, k, v, mask, i), diagonal, scale) for i in range(lead[0])])
    out, _ = ops.call(arguments_of(inputs, diagonal, scale))
    return operators.reshaped(out, (*lead, *out.shape[1:])) if len(lead) != 1 else out
