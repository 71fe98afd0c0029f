"""The kit must catch bugs of packed attention too, and say what it is asked wrongly."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from flashattn_lite.reference import attention_reference, attention_varlen_reference
from flashattn_lite.testing import (
    PACKED_LAWS,
    Case,
    PackedCase,
    check,
    check_packed,
    laws,
    matches_oracle,
    packed,
)
from tests.wrong_attentions import Tripled

FLOATS = "must be a list of float16, bfloat16, float32 or float64, one at least"


def test_packed_laws_catch_neighbours_and_pass_the_definition() -> None:
    sizes = {"max_batch": 3, "max_heads": 2, "max_len": 17, "max_dim": 17}
    check_packed(attention_varlen_reference, n=6, **sizes)

    def one_sequence(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any) -> Any:
        options.pop("kv_lens", None)
        ends = [torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in (q, k)]
        return attention_varlen_reference(q, k, v, *ends, **options)

    def doubled(*args: Tensor, return_lse: bool = False, **options: Any) -> Any:
        out, lse = attention_varlen_reference(*args, **options, return_lse=True)
        return (out, lse) if return_lse else 2 * out

    for law in PACKED_LAWS:
        wrong = doubled if law is packed.packed_lse_is_only_told else one_sequence
        with pytest.raises(AssertionError, match=r"in (Packed)?Case"):
            check_packed(wrong, laws=[law], n=100, shrink=False, **sizes)

    def steep(q: Tensor, k: Tensor, *rest: Tensor, **options: Any) -> Any:
        return attention_varlen_reference(q, Tripled.apply(k), *rest, **options)

    def steep_sinks(*args: Tensor, sinks: Any = None, **options: Any) -> Any:
        return attention_varlen_reference(*args, sinks=None if sinks is None else Tripled.apply(sinks), **options)

    law = packed.packed_gradients_are_those_of_dense
    for wrong, of in ((steep, "k of sequence"), (steep_sinks, "sinks")):
        with pytest.raises(AssertionError, match=f"gradient of {of}"):
            check_packed(wrong, laws=[law], n=100, shrink=False, **sizes)
    check_packed(steep, laws=[law], features={"lse"}, n=5, **sizes)  # it is not asked of who has none


def test_no_keys_need_no_gradient() -> None:
    """Torch's own function gives a constant then, of which autograd knows no gradient: it is 0."""

    def constant(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor, return_lse: bool = False, **options: Any) -> Any:
        attend = attention_varlen_reference if tables else attention_reference
        out, lse = attend(q, k, v, *tables, **options, return_lse=True)
        if not k.numel():
            out, lse = out.detach(), lse if "sinks" in options else lse.detach()
        return (out, lse) if return_lse else out

    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 1, 0, 8)
    for case in (Case(q, k, k), Case(q, k, k, mask=torch.randn(4, 1)), Case(q, k, k, sinks=torch.randn(3))):
        laws.gradients_match_autograd(constant, case)
    tables = torch.tensor([0, 1, 4], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    q, k = q[0].transpose(0, 1), k[0].transpose(0, 1)
    packed.packed_gradients_are_those_of_dense(constant, PackedCase(q, k, k, *tables))


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "a"])
def test_a_number_of_problems_that_is_none_is_refused(n):
    with pytest.raises(ValueError, match=r"^n: must be a positive int; got .*\. It is the number of problems for each"):
        check(attention_reference, n=n)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"dtypes": ["float16"]}, f"dtypes: {FLOATS}; got ['float16']"),
     ({"dtypes": [torch.int32]}, f"dtypes: {FLOATS}; got [int32]"),
     ({"dtypes": [torch.float8_e4m3fn]}, f"dtypes: {FLOATS}; got [float8_e4m3fn]"),
     ({"dtypes": []}, f"dtypes: {FLOATS}; got []"),
     ({"max_len": -1}, "max_len: must be an int from 0 up; got -1"),
     ({"max_heads": 0}, "max_heads: must be an int from 1 up; got 0"),
     ({"max_dim": 257}, "max_dim: must be at most 256; got 257"),
     ({"max_size": 3}, "max_size: is no size; got 3. Sizes are device, dtypes, max_batch, "),
     ({"device": "meta"}, "device: must be one of this machine that holds numbers; got 'meta'"),
     ({"device": "gpu"}, "device: must be one of this machine that holds numbers; got 'gpu'. Pass 'cpu', or"),
     ({"laws": matches_oracle}, "laws: must be a list of functions law(attention, case); got "),
     ({"laws": ["matches_oracle"]}, "laws: must be a list of functions law(attention, case); got ['matches_oracle']"),
     ({"laws": []}, "laws: must hold one law at least; got []"),
     ({"features": "causal"}, "features: must be several names; got 'causal'. Pass ['causal'].")],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_sizes_that_are_none_are_named(options, text):
    for ask in (check, check_packed):
        with pytest.raises((TypeError, ValueError), match="^" + re.escape(text)):
            ask(attention_reference, n=1, **options)


def test_who_has_an_lse_must_give_it():
    def silent(attention):
        return lambda *args, **options: (attention(*args, **options)[0], None)

    for ask, attention in ((check, attention_reference), (check_packed, attention_varlen_reference)):
        with pytest.raises(AssertionError, match="its lse is None"):
            ask(silent(attention), features={"lse", "causal"}, n=1, shrink=False)


def test_packed_attention_without_lse_is_enough():
    def mine(q, k, v, cu_q, cu_k, *, causal=False):
        return attention_varlen_reference(q, k, v, cu_q, cu_k, causal=causal)

    known = {"causal", "gqa", "gradients", "strides"}
    check_packed(mine, features=known, n=5, max_len=9, max_dim=17)
    steep = lambda *args, **options: 2 * mine(*args, **options)
    for law in PACKED_LAWS[:2]:
        with pytest.raises(AssertionError):
            check_packed(steep, laws=[law], features=known, n=50, shrink=False, max_len=9, max_dim=17)


@pytest.mark.parametrize("result", [None, torch.zeros(1), (torch.zeros(1),), (1, 2), (torch.zeros(1), 3.0)], ids=str)
def test_what_is_no_result_is_named(result):
    asked = (lambda attention: check(attention, n=1, shrink=False)), (lambda attention: check_packed(attention, n=1))
    for ask in asked:
        with pytest.raises(AssertionError, match=r"^with return_lse=True it must return \(out, lse\); got .* in "):
            ask(lambda *_, **__: result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_no_broken_law():
    with pytest.raises(ValueError, match=r"^device: must be one of this machine that holds numbers; got 'cuda'"):
        check(attention_reference, n=1, device="cuda")


def test_a_pair_that_nobody_asked_for_is_named():
    pair = lambda *args, **options: attention_reference(*args, return_lse=True, **options)
    with pytest.raises(AssertionError, match=r"^without 'lse' among features it must return out; got \("):
        check(pair, features={"causal"}, n=1, shrink=False)


def test_packed_poison_is_caught_where_weights_of_zero_meet_it():
    """In a sequence's own keys, behind causality, a window or its length."""

    def careless(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any) -> Any:
        out, lse = attention_varlen_reference(q, k, v.nan_to_num(posinf=0.0), cu_q, cu_k, **options)
        for rows, keys in PackedCase(q, k, v, cu_q, cu_k).sequences():
            out[rows] += (0.0 * v[keys]).sum()
        return out, lse

    law, known = packed.packed_is_a_loop_of_dense, {"causal", "kv_lens", "window", "gqa", "lse"}
    check_packed(careless, laws=[law], features=known, n=30, max_len=17, max_dim=17)
    with pytest.raises(AssertionError, match=r"unseen keys hold (nan|inf)"):
        check_packed(careless, laws=[law], features={*known, "poison"}, n=60, shrink=False, max_len=17, max_dim=17)
