"""What is true of attention over packed sequences: laws `law(attention_varlen, case)`.

`attention_varlen` is any callable with flashattn_lite.attention_varlen's signature.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.errors import show
from flashattn_lite.testing.case import Attention, PackedCase, needs
from flashattn_lite.testing.gradients import expect_gradients, run_backward, within_range
from flashattn_lite.testing.locality import packed_neighbours_are_irrelevant, packed_slot_is_irrelevant
from flashattn_lite.testing.oracle import assert_close_to_oracle, expect
from flashattn_lite.testing.results import arguments_stay, assert_within, run_packed


def packed_is_a_loop_of_dense(attention_varlen: Attention, case: PackedCase) -> None:
    """Each packed sequence gets what dense attention gives it alone."""
    out, lse = run_packed(attention_varlen, case)
    for b, (rows, _) in enumerate(case.sequences()):
        dense_out = out[rows].transpose(0, 1).unsqueeze(0)
        dense_lse = None if lse is None else lse[:, rows].unsqueeze(0)
        assert_close_to_oracle(dense_out, dense_lse, case.dense(b))


@needs("lse")
def packed_lse_is_only_told(attention_varlen: Attention, case: PackedCase) -> None:
    """Without return_lse the result is out, alone."""
    with arguments_stay(case):
        alone = attention_varlen(case.q, case.k, case.v, case.cu_seqlens_q, case.cu_seqlens_k, **case.options())
    assert isinstance(alone, Tensor), f"without return_lse it must return out; got {show(alone)} in {case}"
    out, _ = run_packed(attention_varlen, case)
    for b, (rows, _) in enumerate(case.sequences()):
        got, want = (x[rows].transpose(0, 1).unsqueeze(0) for x in (alone, out))
        assert_within("out", got, want, 2 * expect(case.dense(b)).out_bound, case)


@needs("gradients")
def packed_gradients_are_those_of_dense(attention_varlen: Attention, case: PackedCase) -> None:
    """Each packed sequence gets the gradients that it has alone; the sinks' are summed over the sequences."""
    if not case.q.shape[0]:
        return
    case = within_range(case)
    generator, device = case.generator(), case.q.device
    d_out = torch.randn(*case.q.shape[:2], case.v.shape[-1], generator=generator).to(case.q)
    with torch.no_grad():
        _, lse = run_packed(attention_varlen, case)
    d_lse = None if lse is None else torch.randn(lse.shape, generator=generator).to(device)
    packed = functools.partial(bound_to, attention_varlen, case.cu_seqlens_q, case.cu_seqlens_k)
    grads = run_backward(packed, case, d_out, d_lse)
    missing = [name for name, grad in grads.items() if grad is None]
    if not case.k.shape[0]:  # to autograd that is 0
        grads |= {name: torch.zeros_like(getattr(case, name)) for name in missing}
    else:
        assert not missing, f"no gradient reaches {', '.join(missing)} in {case}"
    sinks, every = [], True
    for b, (rows, keys) in enumerate(case.sequences()):
        if not bool(torch.isfinite(expect(case.dense(b), eager=False).out).all()):
            every = False
            continue
        own = d_out[rows].transpose(0, 1).unsqueeze(0), None if d_lse is None else d_lse[:, rows].unsqueeze(0)
        for name, (want, bound) in expect_gradients(case.dense(b), *own).items():
            if name == "sinks":
                sinks.append((want, bound))
                continue
            grad = grads[name]
            assert grad is not None
            got = grad[rows if name == "q" else keys].transpose(0, 1).unsqueeze(0)
            assert_within(f"gradient of {name} of sequence {b}", got, want, bound, case)
    if sinks and every:
        grad = grads["sinks"]
        assert grad is not None
        want, bound = (torch.stack(x).sum(0) for x in zip(*sinks, strict=True))
        assert_within("gradient of sinks", grad, want, bound, case)


def bound_to(attention_varlen: Attention, cu_q: Tensor, cu_k: Tensor, *tensors: Tensor, **options: Any) -> Any:
    """A call of packed attention by its tensors and options alone."""
    return attention_varlen(*tensors, cu_q, cu_k, **options)


PACKED_LAWS = (
    packed_is_a_loop_of_dense,
    packed_gradients_are_those_of_dense,
    packed_lse_is_only_told,
    packed_neighbours_are_irrelevant,
    packed_slot_is_irrelevant,
)
