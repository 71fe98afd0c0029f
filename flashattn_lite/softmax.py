"""softmax and its (m, l) for rows of any length: checks, the custom ops, their gradients under every transform."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashattn_lite import operators, softmax_tiled, state
from flashattn_lite import target as targets
from flashattn_lite.arguments import check_float_tensor, check_no_tangent
from flashattn_lite.calls import remember
from flashattn_lite.errors import show, type_error, value_error
from flashattn_lite.keys import place
from flashattn_lite.scalars import as_int, from_array, is_int
from flashattn_lite.watchers import dense_and_real, watched

Stats = tuple[Tensor, Tensor]


def online_softmax(x: Tensor, dim: int = -1) -> Tensor:
    r"""Softmax of x along dim, for rows of any length: y_j = exp(x_j - max(x)) / sum_k exp(x_k - max(x)).

    Args:
        x: a tensor of any shape and strides, float16, bfloat16, float32 or float64. Rows that are spread over more
            than three dimensions that can't be joined take several launches.
        dim: int, the dimension that sums to 1. Default: the last.

    Returns:
        A tensor of x's shape and dtype; of x's strides too if x is dense.

    Rows that see nothing: where every element is -inf, the result is 0. This is the one difference from
    `torch.softmax`, which gives NaN there. A row that holds NaN or +inf becomes NaN; no other row does.

    Numerics: float32 inside (float64 for float64), rounded once at the end. A probability p is off by a few float32
    eps and |ln p| eps more, relative: sums are added pairwise. A row's result depends on its values, length, dtype,
    strides and alignment and on the GPU, bit for bit; on its length because that decides how many blocks share it.

    Gradients: exact, of any order, from the output alone. As torch's, in 16 bits from the rounded one, so that where
        float16 runs out of small numbers they are worse: over a million columns of like size 6% off.

    Cost: one read and one write of x on NVIDIA GPUs from sm_80 on, for rows of up to 1.3 million elements of 4 bytes or
    3.2 million of 2 (on an H200), at any alignment. On other GPUs, and where a row's elements lie apart, rows of up to
    2048 elements (at 16-byte addresses 32768) are read once, of up to 2^18 twice, the second time from the L2 cache if
    that holds them. Longer rows, and rows of more than 512 elements that lie side by side (stride 1 from row to row),
    take two reads and one write, in two launches. On a CPU it is torch's softmax and a second division.

    Raises:
        TypeError: x is not a dense real tensor of these dtypes, or dim is no int.
        ValueError: dim is out of range.
        NotImplementedError: forward-mode derivatives, distributed tensors.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867).

    Example:
        >>> online_softmax(torch.tensor([1.0, 3.0, 2.0, 5.0]))
        tensor([0.0152, 0.1125, 0.0414, 0.8310])
    """
    if not torch.compiler.is_compiling() and (y := _softmax_again(x, dim)) is not None:
        return y
    dim = _checked_dim(x, dim)
    return _softmax_op(x, dim) if x.dim() else operators.reshaped(_softmax_op(x.unsqueeze(0), 0), ())


def softmax_stats(x: Tensor, dim: int = -1) -> Stats:
    r"""The softmax state of x along dim, in one read: m = max(x), l = sum_k exp(x_k - m).

    Then softmax(x) = exp(x - m) / l and logsumexp(x) = m + ln(l).

    Args:
        x: a tensor of any shape and strides, float16, bfloat16, float32 or float64 (as in `online_softmax`).
        dim: int, the dimension to reduce. Default: the last.

    Returns:
        (m, l), natural units, both float32 and of x's shape without dim.

    Rows that see nothing: a row of length 0, or of -inf only, has m = -inf and l = 0, and gradient 0. A row that holds
    NaN or +inf has l = NaN.

    Numerics: float32 inside; m is exact, l is a sum of numbers from 0 to 1, taken tile by tile. float64 is computed in
    float64 and then rounded, m and l each.

    Gradients: exact, those of `m = x.amax(dim); l = (x - m.unsqueeze(dim)).exp().sum(dim)`: equal maxima share m's.

    Raises:
        TypeError: x is not a dense real tensor of these dtypes, or dim is no int.
        ValueError: dim is out of range.
        NotImplementedError: forward-mode derivatives, distributed tensors.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867).

    Example:
        >>> softmax_stats(torch.tensor([1.0, 3.0, 2.0, 5.0]))
        (tensor(5.), tensor(1.2034))
    """
    if not torch.compiler.is_compiling() and (done := _stats_again(x, dim)) is not None:
        return done
    dim = _checked_dim(x, dim)
    return _stats_op(x, dim) if x.dim() else _stats_op(x.unsqueeze(0), 0)


def merge_softmax_stats(a: Stats, b: Stats) -> Stats:
    r"""The softmax state over the union of two disjoint sets, from the state over each.

    m = max(m_a, m_b), l = l_a exp(m_a - m) + l_b exp(m_b - m): associative, commutative, with identity (-inf, 0).

    Args:
        a: (m_a, l_a), natural units, of one shape; float32 as `softmax_stats` returns them, or float64.
        b: (m_b, l_b), of a's dtype and device and a shape that broadcasts with a's.

    Returns:
        (m, l) of the broadcast shape and of a's dtype.

    Rows that see nothing: two empty states (-inf, 0) merge to (-inf, 0).

    Numerics: m is exact; l is off by a few eps, and the order of merges changes it by no more.

    Gradients: exact, through plain torch; equal m_a and m_b share m's.

    Raises:
        TypeError: a or b is no pair of float32 or float64 tensors, or their dtypes differ.
        ValueError: shapes or devices do not match.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867), section 3.1.

    Example:
        >>> x = torch.tensor([1.0, 3.0, 2.0, 5.0])
        >>> merge_softmax_stats(softmax_stats(x[:1]), softmax_stats(x[1:]))
        (tensor(5.), tensor(1.2034))
    """
    _check_stats(a, b)
    (m_a, l_a), (m_b, l_b) = a, b
    m = torch.maximum(m_a, m_b)
    # Measured from the common maximum, so that m keeps its bits and no m is too large for log2 units.
    origin = state.reference(m)
    _, l_i, _, _ = state.merge((m_a - origin) * state.LOG2E, l_a, (m_b - origin) * state.LOG2E, l_b)
    return m, l_i


_ready: dict[tuple[Any, ...], Any] = {}  # by metadata: what starts a call again, or None where nothing short does


def _recall(op: str, x: Tensor, dim: int) -> Any:
    """What starts this call without checks, plan or dispatcher, if nothing else has to see it; from the second on."""
    if type(x) is not Tensor or type(dim) is not int or not x.is_cuda or not dense_and_real(x):
        return None
    if watched() or (x.requires_grad and torch.is_grad_enabled()):
        return None
    key = op, x.shape, x.stride(), x.dtype, x.device, dim, place(x)
    if key not in _ready:
        remember(_ready, key, _prepared(op, x, dim))
        return None  # this call is checked, by the door or by what has prepared it
    return _ready.get(key)  # None too where another thread has just made room by forgetting all


def _softmax_again(x: Tensor, dim: int) -> Tensor | None:
    ready = _recall("softmax", x, dim)
    if ready is None:
        return None
    y = torch.empty_like(x)
    ready(x, y)
    return y


def _stats_again(x: Tensor, dim: int) -> Stats | None:
    ready = _recall("stats", x, dim)
    if ready is None:
        return None
    m, l_sum = _stats_like(x, dim % x.dim())
    ready(x, m, l_sum)
    return m, l_sum


def _prepared(op: str, x: Tensor, dim: int) -> Any:
    known = x.dtype in (torch.float16, torch.bfloat16, torch.float32) and -x.dim() <= dim < x.dim()
    if not known or x.numel() == 0 or not runs_triton(x):
        return None
    from flashattn_lite.kernels import softmax_launch as kernels

    dim %= x.dim()
    results = (torch.empty_like(x),) if op == "softmax" else tuple(r.unsqueeze(dim) for r in _stats_like(x, dim))
    return kernels.prepare(x, results, dim)


def _checked_dim(x: Tensor, dim: int) -> int:
    """dim, counted from 0."""
    check_float_tensor("x", x)
    check_no_tangent(x=x)
    dim = from_array(dim)
    if not is_int(dim):
        raise type_error("dim", "must be an int", dim, "Pass one dimension; flatten several into one.")
    return _from_front(dim, x.dim())


def _from_front(dim: int, dims: int) -> int:
    """dim counted from 0, also where somebody calls an op itself."""
    rank = max(dims, 1)
    if not -rank <= dim < rank:
        relation = f"must be from {-rank} to {rank - 1} for x of {dims} dimensions"
        raise value_error("dim", relation, dim, "Pass -1 for the last.")
    return as_int(dim) % rank


def _check_stats(a: Stats, b: Stats) -> None:
    for side, pair in (("a", a), ("b", b)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise type_error(side, "must be a pair (m, l)", pair, "Pass what softmax_stats returned.")
        for name, part in zip("ml", pair, strict=True):
            check_float_tensor(f"{name}_{side}", part)
            if part.dtype not in (torch.float32, torch.float64):
                raise type_error(f"{name}_{side}", "dtype must be float32 or float64", part, "Cast it: .float().")
    (m_a, l_a), (m_b, l_b) = a, b
    for name, part in (("l_a", l_a), ("m_b", m_b), ("l_b", l_b)):
        if part.dtype != m_a.dtype:
            raise type_error(name, f"dtype must equal m_a's ({show(m_a.dtype)})", part, "Cast one of them.")
        if part.device != m_a.device:
            raise value_error(name, f"must be on m_a's device ({m_a.device})", part, "Move it with .to(device).")
    for side, (m, l_i) in (("a", a), ("b", b)):
        if m.shape != l_i.shape:
            relation = f"shape must equal m_{side}'s {tuple(m.shape)}"
            raise value_error(f"l_{side}", relation, l_i, "Pass what softmax_stats returned.")
    try:
        torch.broadcast_shapes(m_a.shape, m_b.shape)
    except RuntimeError:
        remedy = "Pass two of the same rows, over different columns."
        raise value_error("m_b", f"shape must broadcast with m_a's {tuple(m_a.shape)}", m_b, remedy) from None


def runs_triton(x: Tensor) -> bool:
    """Whether x runs the Triton kernels: on a GPU, or on the CPU in Triton's interpreter; float64 never does."""
    target = targets.of(x.device)
    return x.dtype != torch.float64 and not target.no_triton and (x.is_cuda or target.interpreting)


def _softmax(x: Tensor, dim: int) -> Tensor:
    dim = _from_front(dim, x.dim())
    y = torch.empty_like(x)
    if y.numel() == 0:
        return y
    if runs_triton(x):
        from flashattn_lite.kernels import softmax_launch as kernels

        (kernels.launch if x.is_cuda else kernels.interpret)(x, (y,), dim)
    else:
        softmax_tiled.softmax(x.movedim(dim, -1), y.movedim(dim, -1))
    return y


def _stats(x: Tensor, dim: int) -> Stats:
    dim = _from_front(dim, x.dim())
    m, l_sum = _stats_like(x, dim)
    if x.numel() == 0:  # no rows, or rows of nothing
        return m.fill_(state.EMPTY_M), l_sum.fill_(state.EMPTY_L)
    if runs_triton(x):
        from flashattn_lite.kernels import softmax_launch as kernels

        results = m.unsqueeze(dim), l_sum.unsqueeze(dim)
        (kernels.launch if x.is_cuda else kernels.interpret)(x, results, dim)
    else:
        softmax_tiled.stats(x.movedim(dim, -1), m, l_sum)
    return m, l_sum


def _stats_like(x: Tensor, dim: int) -> Stats:
    dim = _from_front(dim, x.dim())
    shape = x.shape[:dim] + x.shape[dim + 1 :]
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


_softmax_op = operators.define(
    "online_softmax", "(Tensor x, SymInt dim) -> Tensor", _softmax, lambda x, dim: torch.empty_like(x), _softmax_again
)
_stats_op = operators.define(
    "softmax_stats", "(Tensor x, SymInt dim) -> (Tensor, Tensor)", _stats, _stats_like, _stats_again
)


def _softmax_setup(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.dim = inputs[1]
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, _: Any, d_y: Tensor) -> tuple[Tensor, None]:
    """dx = y (dy - sum(y dy))."""
    (y,) = ctx.saved_tensors
    if y.device.type == "cpu":  # across rows torch sums number by number
        d_y, y = (x.movedim(ctx.dim, -1).contiguous() for x in (d_y, y))
        if y.numel() == y.shape[-1:].numel():  # a lone row, whose sum torch takes in another order: as one of two
            d_row, row = (x.flatten().expand(2, -1).contiguous() for x in (d_y, y))
            d_x = torch.ops.aten._softmax_backward_data(d_row, row, -1, y.dtype)[0].view(y.shape)
        else:
            d_x = torch.ops.aten._softmax_backward_data(d_y, y, -1, y.dtype)
        return d_x.movedim(-1, ctx.dim).contiguous(), None
    return torch.ops.aten._softmax_backward_data(d_y, y, ctx.dim, y.dtype), None


def _stats_setup(ctx: Any, inputs: tuple[Tensor, int], output: Stats) -> None:
    ctx.dim = _from_front(inputs[1], inputs[0].dim())
    ctx.save_for_backward(inputs[0])


def _stats_backward(ctx: Any, _: Any, d_m: Tensor, d_l: Tensor) -> tuple[Tensor, None]:
    """With p = exp(x - m): dx = dl p, and the maxima share dm - dl l, because l falls by l where m rises by 1."""
    (x,) = ctx.saved_tensors
    if x.shape[ctx.dim] == 0:
        return torch.zeros_like(x), None
    inner = x.to(softmax_tiled.inner_dtype(x))
    d_m, d_l = (grad.unsqueeze(ctx.dim).to(inner.dtype) for grad in (d_m, d_l))
    m = inner.amax(ctx.dim, keepdim=True)
    p = torch.exp(inner - state.reference(m))
    at_top = (inner == m) & (m != state.EMPTY_M)
    total = softmax_tiled.row_sums(p, ctx.dim) if p.device.type == "cpu" else p.sum(ctx.dim, keepdim=True)
    share = (d_m - d_l * total) / at_top.sum(ctx.dim, keepdim=True).clamp_min(1)
    return (d_l * p + torch.where(at_top, share, 0.0)).to(x.dtype), None


def _no_jvp(*_: Any) -> Any:
    """A tangent below other transforms, where the door does not see it."""
    raise NotImplementedError(
        "x: forward-mode derivatives are not implemented; got one inside of another transform (torch.func.hessian, "
        "say). Use reverse mode twice: torch.func.jacrev(torch.func.jacrev(f))."
    )


operators.derive(_softmax_op, _softmax_setup, _softmax_backward, _no_jvp)
operators.derive(_stats_op, _stats_setup, _stats_backward, _no_jvp)


def _batched(op: Any, out_dims: Any, _: Any, in_dims: Any, x: Tensor, dim: int) -> Any:
    """An op's rule under torch.vmap: one call, of a tensor with one dimension more."""
    return op(x.movedim(in_dims[0], 0), _from_front(dim, x.dim() - 1) + 1), out_dims


torch.library.register_vmap(_softmax_op, functools.partial(_batched, _softmax_op, 0))
torch.library.register_vmap(_stats_op, functools.partial(_batched, _stats_op, (0, 0)))
