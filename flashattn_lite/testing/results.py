"""Running an attention on a case, which has to stay as it is, and comparing what comes back: form, values, bits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flashattn_lite.errors import show
from flashattn_lite.testing.case import Attention, Case, PackedCase, Result, memory_of, tensors_of


def run(attention: Attention, case: Case) -> Result:
    with arguments_stay(case):
        result = attention(case.q, case.k, case.v, **case.options(), return_lse=True)
    out, lse = pair(result, case)
    assert_form(out, lse, case)
    return out, lse


def run_packed(attention_varlen: Attention, case: PackedCase) -> Result:
    """out (total_q, Hq, Dv), lse (Hq, total_q)."""
    lens = (case.cu_seqlens_q, case.cu_seqlens_k)
    with arguments_stay(case):
        result = attention_varlen(case.q, case.k, case.v, *lens, **case.options(), return_lse=True)
    out, lse = pair(result, case)
    total, heads, dim = case.q.shape[0], case.q.shape[1], case.v.shape[2]
    assert tuple(out.shape) == (total, heads, dim), f"out must have shape {(total, heads, dim)}; got {tuple(out.shape)}"
    if lse is not None:
        shape = tuple(lse.shape)
        assert shape == (heads, total), f"lse must have shape {(heads, total)}; got {shape} in {case}"
    return out, lse


@contextlib.contextmanager
def arguments_stay(case: Case | PackedCase) -> Iterator[None]:
    """Fails if a tensor or memory that it is a view of was written to: keys past kv_lens are others' too.

    Not while a CUDA graph is captured: nothing runs then, and to look would end the capture.
    """
    if case.q.is_cuda and torch.cuda.is_current_stream_capturing():
        yield
        return
    memory = {name: memory_of(x, torch.uint8) for name, x in tensors_of(case).items()}
    before = {name: x.clone() for name, x in memory.items()}
    yield
    for name, x in memory.items():
        wrong = x != before[name]
        written = f"{int(wrong.sum())} of {wrong.numel()} bytes"
        assert not bool(wrong.any()), f"{name} was written to ({written}): what it is given is not its own\nin {case}"


def pair(result: object, case: object) -> Result:
    """What an attention returned, if it is (out, lse)."""
    two = isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[0], Tensor)
    two = two and (result[1] is None or isinstance(result[1], Tensor))  # type: ignore[index]
    assert two, f"with return_lse=True it must return (out, lse); got {show(result)} in {case}"
    return result[0], result[1]  # type: ignore[index]


def assert_form(out: Tensor, lse: Tensor | None, case: Case) -> None:
    """Shape, dtype and device of a result."""
    rows = tuple(case.q.shape[:3])
    for name, x, shape, dtype in (
        ("out", out, (*rows, case.v.shape[-1]), case.q.dtype),
        ("lse", lse, rows, torch.promote_types(case.q.dtype, torch.float32)),
    ):
        if x is None:
            continue
        dtypes = (dtype,) if name == "out" else (torch.float32, dtype)
        assert tuple(x.shape) == shape, f"{name} must have shape {shape}; got {tuple(x.shape)} in {case}"
        assert x.dtype in dtypes, f"{name} must be {dtypes[0]}; got {x.dtype} in {case}"
        assert x.device == case.q.device, f"{name} must be on {case.q.device}; got {x.device} in {case}"


def assert_within(name: str, got: Tensor, want: Tensor, bound: Tensor | float, case: object) -> None:
    """|got - want| <= bound where want is finite; -inf equals -inf; NaN and inf stand for each other."""
    assert got.shape == want.shape, f"{name} has shape {tuple(got.shape)}, should have {tuple(want.shape)}\nin {case}"
    got, want = got.detach().double(), want.detach().double()
    bound = torch.as_tensor(bound, dtype=torch.float64, device=got.device).expand_as(want)
    finite = torch.isfinite(want)
    same_kind = ~torch.isfinite(got) & ((want == -math.inf) <= (got == -math.inf))
    wrong = ~torch.where(finite, (got - want).abs() <= bound, same_kind)
    if not bool(wrong.any()):
        return
    excess = ((got - want).abs() / bound).nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(~wrong, -1.0)
    at = torch.unravel_index(excess.argmax(), excess.shape)
    place = ", ".join(str(int(i)) for i in at)
    raise AssertionError(
        f"{name}[{place}] is {got[at].item():.9g}, should be {want[at].item():.9g} within {bound[at].item():.3g} "
        f"({int(wrong.sum())} of {wrong.numel()} elements are wrong)\nin {case}"
    )


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one shape have other bits; a NaN's are not looked at."""
    return ~(((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan()))


def assert_same_bits(got: Result, want: Result, what: str, case: object) -> None:
    """Equal to the last bit; a NaN equals a NaN."""
    for name, a, b in (("out", got[0], want[0]), ("lse", got[1], want[1])):
        if a is None or b is None:
            continue
        shapes = f"{what}: {name} has shape {tuple(a.shape)}, had {tuple(b.shape)}"
        assert a.shape == b.shape, f"{shapes}\nin {case}"
        wrong = differ(a, b)
        if bool(wrong.any()):
            at = torch.unravel_index(wrong.flatten().int().argmax(), wrong.shape)
            place = ", ".join(str(int(i)) for i in at)
            raise AssertionError(
                f"{what}: {name}[{place}] is {a[at].item():.9g}, was {b[at].item():.9g} "
                f"({int(wrong.sum())} of {wrong.numel()} elements differ)\nin {case}"
            )
