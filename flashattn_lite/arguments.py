"""The door: every argument is checked here, once, before anything is launched. Never reads a GPU tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashattn_lite.errors import not_implemented, show, type_error, value_error
from flashattn_lite.scalars import SYMBOLS, is_finite, is_int, is_number, negative, plain, unless_known
from flashattn_lite.watchers import distributed, transformed, unbatched

MAX_HEAD_DIM = 256
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT32 = torch.finfo(torch.float32)
QKV = ("q", "k", "v")


def check_float_tensor(name: str, x: object) -> None:
    """A dense real floating tensor of a dtype that we compute in."""
    if not isinstance(x, Tensor):
        raise type_error(name, "must be a torch.Tensor", x, "Convert it with torch.as_tensor.")
    check_strided(name, x)
    if x.is_complex():
        raise type_error(name, "must be real", x, "Split it into its real and imaginary parts.")
    if x.dtype not in FLOAT_DTYPES:
        raise type_error(name, "dtype must be float16, bfloat16, float32 or float64", x, "Cast it first.")


def check_strided(name: str, x: Tensor) -> None:
    if distributed(x):
        remedy = "Call with .to_local() where whole heads or sequences are local, and wrap what comes with from_local."
        raise not_implemented(name, "distributed tensors (DTensor) are not implemented", x, remedy)
    if x.is_nested or x.layout != torch.strided:
        pad = "Pad it with torch.nested.to_padded_tensor, or pack its sequences for attention_varlen."
        raise type_error(name, "must be a dense strided tensor", x, pad if x.is_nested else "Call .to_dense().")


def readable(x: Tensor) -> bool:
    """Whether x's values can be looked at here: it is on the CPU, and no compiler or transform stands for it.

    A Parameter, or a class that only names a tensor, holds its numbers itself; a fake tensor does not.
    """
    itself = type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    return x.device.type == "cpu" and itself and not torch.compiler.is_compiling() and not transformed(x)


def check_no_tangent(**tensors: object) -> None:
    """No kernel carries forward-mode derivatives: they would be lost without a word."""
    if torch.compiler.is_compiling():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(unbatched(x)).tangent is not None:
            remedy = "Use reverse mode where there is one (backward(), torch.func.grad), or plain torch "
            remedy += "(flashattn_lite.reference's attention_reference, torch.softmax)."
            raise not_implemented(name, "forward-mode derivatives are not implemented", x, remedy)


def check_qkv(q: Any, k: Any, v: Any, names: Sequence[str], layout: str) -> None:
    """Kind, rank, dtype, device, head dims and grouping; the lengths and batches are the caller's."""
    for name, x in zip(names, (q, k, v), strict=True):
        check_float_tensor(name, x)
    rank = layout.count(",") + 1
    for name, x in zip(names, (q, k, v), strict=True):
        if x.dim() != rank:
            raise value_error(name, f"must have {rank} dimensions {layout}", x, "Add or remove dimensions.")
    nq, nk, nv = names
    for name, x in ((nk, k), (nv, v)):
        if x.dtype != q.dtype:
            raise type_error(name, f"dtype must equal {nq}'s ({show(q.dtype)})", x, f"Cast with {name}.to({nq}.dtype).")
        if x.device != q.device:
            raise value_error(name, f"must be on {nq}'s device ({q.device})", x, f"Move it: {name}.to({nq}.device).")
    check_head_dims(q, k, v, names)
    check_heads([x.shape[1] for x in (q, k, v)], (q, k, v), names, layout)


def check_head_dims(q: Tensor, k: Tensor, v: Tensor, names: Sequence[str]) -> None:
    nq, nk, nv = names
    for name, x in ((nq, q), (nv, v)):
        if x.shape[-1] < 1:
            raise value_error(name, "head dim (the last) must be at least 1", x, "Pass at least one column.")
        if x.shape[-1] > MAX_HEAD_DIM:
            remedy = (
                "Call torch's own scaled_dot_product_attention for it, outside of replace_sdpa (an image decoder of "
                'diffusers: output_type="latent" inside, decode outside).'
            )
            if name == nv:
                remedy = f"Call once for each {MAX_HEAD_DIM} columns of {nv} and join the results with torch.cat."
            raise not_implemented(name, f"head dim must be at most {MAX_HEAD_DIM}", x, remedy)
    if k.shape[-1] != q.shape[-1]:
        raise value_error(nk, f"head dim must equal {nq}'s ({q.shape[-1]})", k, f"Project {nk} to {nq}'s head dim.")


def check_heads(heads: Sequence[int], given: Sequence[Tensor], names: Sequence[str], layout: str) -> None:
    """`heads` of q, k and v; `given`: these as the caller has them, `layout`: what their dimensions are."""
    (heads_q, heads_k, heads_v), (q, k, v), (nq, nk, nv) = heads, given, names
    if heads_v != heads_k:
        raise value_error(nv, f"must have as many heads as {nk} ({heads_k})", v, "Pass a value head per key head.")
    if heads_k == 0 and heads_q != 0:
        raise value_error(nk, f"must have at least one head for {nq}'s {heads_q}", k, "Pass the head they share.")
    if heads_k and heads_q % heads_k:
        remedy = f"Pass equal shares of query heads for all key heads, or transpose what is not laid out {layout}."
        raise value_error(nq, f"number of heads must be a multiple of {nk}'s ({heads_k})", q, remedy)


def check_dense(
    q: Any, k: Any, v: Any, names: Sequence[str] = QKV, remedy: str = "Pass one sequence of keys for each of queries."
) -> None:
    """q [B, Hq, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv]."""
    nq, nk, nv = names
    check_qkv(q, k, v, names, "(batch, heads, length, head_dim)")
    for name, x in ((nk, k), (nv, v)):
        if x.shape[0] != q.shape[0]:
            if x.shape[0] == 1:
                remedy = f"Expand it: {name}.expand({q.shape[0]}, -1, -1, -1) costs no memory."
            raise value_error(name, f"batch must equal {nq}'s ({q.shape[0]})", x, remedy)
    if v.shape[2] != k.shape[2]:
        raise value_error(nv, f"length must equal {nk}'s ({k.shape[2]})", v, "Pass one value for each key.")


def check_options(
    *,
    causal: object,
    q_start: object,
    window: object,
    scale: Any,
    softcap: Any,
) -> None:
    """The plain-number options."""
    check_flag("causal", causal)
    if q_start is not None and not is_int(q_start):
        remedy = "Pass an int. For one per sequence leave it out and pass kv_lens: it is then kv_lens[b] - L."
        raise type_error("q_start", "must be an int or None", q_start, remedy)
    check_window(window)
    for name, x, default in (("scale", scale, "the default"), ("softcap", softcap, "no soft cap")):
        if x is None:
            continue
        remedy = f"Pass such a number, or None for {default}."
        if not is_number(x):
            remedy = number_instead(name, x) if isinstance(x, Tensor) and x.numel() == 1 else remedy
            raise type_error(name, "must be a float or None", x, remedy)
        if not is_finite(x):
            raise value_error(name, "must be finite", x, remedy)
        if not isinstance(x, SYMBOLS) and abs(plain(x)) > FLOAT32.max / 2:  # kernels take it in units of log2
            raise value_error(name, f"must be at most {FLOAT32.max / 2:.2g} in size, half of float32's most", x, remedy)
    if softcap is not None and not unless_known(softcap > 0):
        raise value_error("softcap", "must be greater than 0", softcap, "Pass None for no soft cap.")
    if softcap is not None and not isinstance(softcap, SYMBOLS) and plain(softcap) < FLOAT32.tiny:
        relation = f"must be at least {FLOAT32.tiny:.2g}, float32's least normal number"
        raise value_error("softcap", relation, softcap, "Pass None for no soft cap.")


def number_instead(name: str, x: Tensor) -> str:
    """The remedy for a scale or softcap that is a tensor of one element."""
    multiply = "pass 1.0 and multiply the queries by it"
    if transformed(x):
        instead = multiply if name == "scale" else "call once for each of its values"
        return f"To a transform of torch.func it is no number: {instead}."
    if x.requires_grad:
        instead = f"{multiply}, or pass scale.item()" if name == "scale" else f"if it wants none, pass {name}.item()"
        return f"It would get no gradient: {instead}."
    return f"Pass {name}.item()."


def check_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        remedy = "Pass one of them." if flag is None or isinstance(flag, str) else f"Pass bool({name})."
        raise type_error(name, "must be True or False", flag, remedy)


def check_window(window: object) -> None:
    if window is None:
        return
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise type_error("window", "must be a pair (left, right) or None", window, "Pass (256, 0), say.")
    for side, x in zip(("left", "right"), window, strict=True):
        if x is None:
            continue
        if not is_int(x):
            raise type_error("window", f"{side} must be an int or None", window, "Pass an int, or None for no bound.")
        if negative(x):
            raise value_error("window", f"{side} must be at least 0", window, "Pass None (not -1) for no bound.")


def check_sinks(sinks: Any, q: Tensor) -> None:
    if sinks is None:
        return
    check_float_tensor("sinks", sinks)
    check_device("sinks", sinks, q)
    if sinks.shape != (q.shape[1],):
        raise value_error(
            "sinks", f"must have shape (heads_q,) = ({q.shape[1]},)", sinks, "Pass one for each query head."
        )


def check_kv_lens(kv_lens: Any, q: Tensor, batch: int) -> None:
    if kv_lens is None:
        return
    check_int32("kv_lens", kv_lens, q)
    if kv_lens.shape != (batch,):
        raise value_error("kv_lens", f"must have shape (batch,) = ({batch},)", kv_lens, "Pass one for each sequence.")


def check_int32(name: str, x: object, like: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise type_error(name, "must be an int32 torch.Tensor", x, "Pass torch.tensor(..., dtype=torch.int32).")
    check_strided(name, x)
    if x.dtype != torch.int32:
        raise type_error(name, "dtype must be int32", x, "Cast it: .to(torch.int32).")
    check_device(name, x, like)


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise value_error(name, f"must be on the device of the queries ({q.device})", x, "Move it with .to(device).")
