"""The definition against examples worked by hand: softmax step by step, attention small enough to write down."""

from __future__ import annotations

import math
import sys

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite import state
from flashattn_lite.reference import (
    attention_reference,
    attention_varlen_reference,
    empty_state,
    merge_states,
    softmax_blocked,
    softmax_naive,
    softmax_online,
    softmax_safe,
)

EXAMPLE = (1.0, 3.0, 2.0, 5.0)
# e^-4 + e^-2 + e^-3 + 1, and the state after each element, by hand
EXAMPLE_M = (1.0, 3.0, 3.0, 5.0)
EXAMPLE_D = (1.0, 1.135335283, 1.503214724, 1.203437990)
HOSTILE = (0.2, 0.5, 0.1, -0.5, -0.4, 100.0)


def tensor(values: tuple[float, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def close(got: torch.Tensor, want: object, tolerance: float = 1e-9) -> bool:
    return bool(torch.allclose(got, torch.as_tensor(want, dtype=got.dtype), rtol=0, atol=tolerance))


def test_worked_example_all_at_once() -> None:
    p, (m, d) = softmax_safe(tensor(EXAMPLE))
    assert m == 5.0
    assert round(float(d), 4) == 1.2034
    assert close(p, [math.exp(x - 5) / 1.203437990 for x in EXAMPLE])
    assert close(softmax_naive(tensor(EXAMPLE)), p)


def test_worked_example_step_by_step() -> None:
    p, (m, d) = softmax_online(tensor(EXAMPLE))
    assert m.tolist() == list(EXAMPLE_M)
    assert close(d, EXAMPLE_D)
    assert close(p, softmax_safe(tensor(EXAMPLE))[0])


def test_worked_example_in_two_blocks() -> None:
    """[1, 3] is (3, 1.1353), [2, 5] is (5, 1.0498); merged: 1.1353 e^-2 + 1.0498 = 1.2034."""
    first, second = (softmax_safe(tensor(part))[1] for part in (EXAMPLE[:2], EXAMPLE[2:]))
    assert [float(m) for m, _ in (first, second)] == [3.0, 5.0]
    assert close(torch.stack([first[1], second[1]]), [1.135335283, 1.049787068])
    for p, (m, d) in (softmax_blocked(tensor(EXAMPLE), block) for block in (1, 2, 3, 4, 5)):
        assert m == 5.0
        assert close(d, 1.203437990)
        assert close(p, softmax_safe(tensor(EXAMPLE))[0])
    assert close(merge_states(first, second)[1], 1.203437990)


def test_the_house_state_walks_the_same_steps() -> None:
    """state.py in log2 units: m / ln 2 and the same d, element by element."""
    m, d = torch.tensor([-math.inf]).double(), torch.zeros(1).double()
    for x, want_m, want_d in zip(EXAMPLE, EXAMPLE_M, EXAMPLE_D, strict=True):
        m, d, _, _ = state.update(m, d, torch.tensor([[x]]).double(), state.LOG2E)
        assert close(m * state.LN2, [want_m])
        assert close(d, [want_d])
    assert close(state.finish(m, d)[1], torch.logsumexp(tensor(EXAMPLE), 0))


def test_one_large_element_takes_all() -> None:
    for dtype in (torch.float32, torch.float64):
        x = tensor(HOSTILE, dtype)
        for p in (softmax_safe(x)[0], softmax_online(x)[0], softmax_blocked(x, 4)[0]):
            assert close(p, [0, 0, 0, 0, 0, 1], 1e-12)
            assert p[-1] == 1
    assert close(softmax_naive(tensor(HOSTILE)), [0, 0, 0, 0, 0, 1], 1e-12)  # e^100 fits float64


@pytest.mark.parametrize(
    ("dtype", "x"), [(torch.float32, HOSTILE), (torch.float16, (1.0, 12.0)), (torch.float64, (0.0, 800.0))]
)
def test_naive_overflows_and_safe_does_not(dtype: torch.dtype, x: tuple[float, ...]) -> None:
    naive = softmax_naive(tensor(x, dtype))
    assert naive[-1].isnan()
    assert (naive[:-1] == 0).all()
    safe, _ = softmax_safe(tensor(x, dtype))
    assert abs(float(safe.sum()) - 1) <= torch.finfo(dtype).eps


def test_every_block_size() -> None:
    """1024 elements in fp32, in blocks of 1 to 1024: within 1e-6 of the whole, and a distribution."""
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)) * 4
    whole, _ = softmax_safe(x)
    for block in range(1, 1025):
        p, _ = softmax_blocked(x, block)
        assert (p - whole).abs().max() <= 1e-6, block
        assert abs(float(p.sum()) - 1) <= 1e-6, block


def test_merge_is_associative_and_commutative_and_has_an_identity() -> None:
    a, b, c = (softmax_safe(tensor(x))[1] for x in ((1.0, 3.0), (2.0, 5.0, -1.0), (HOSTILE)))
    for left, right in (
        (merge_states(merge_states(a, b), c), merge_states(a, merge_states(b, c))),
        (merge_states(a, b), merge_states(b, a)),
        (merge_states(empty_state(a[0]), a), a),
    ):
        assert left[0] == right[0]
        assert close(left[1], right[1], 1e-12)


def test_any_reference_gives_the_same_softmax() -> None:
    x = tensor(EXAMPLE)
    for m in (-3.0, 0.0, 4.9, 40.0):
        e = torch.exp(x - m)
        assert close(e / e.sum(), softmax_safe(x)[0])


def test_attention_by_hand() -> None:
    """One query, scores [1, 3, 2, 5] by scale 1, values that pick out the weights."""
    q, k = torch.ones(1, 1, 1, 1).double(), tensor(EXAMPLE).view(1, 1, 4, 1)
    v = torch.eye(4).double().view(1, 1, 4, 4)
    out, lse = attention_reference(q, k, v, scale=1.0, return_lse=True)
    assert close(out.view(4), softmax_safe(tensor(EXAMPLE))[0])
    assert close(lse.view(1), [5 + math.log(1.203437990)])
    out, lse = attention_reference(q, k, v, scale=1.0, sinks=tensor((5.0,)), return_lse=True)
    assert close(out.sum().view(1), [1.203437990 / 2.203437990])
    assert close(lse.view(1), [5 + math.log(2.203437990)])
    out, _ = attention_reference(q, k, v, scale=1.0, window=(1, 0), return_lse=True)  # keys 2 and 3
    assert close(out.view(4), [0, 0, 1 / (1 + math.exp(3)), 1 / (1 + math.exp(-3))])
    out = attention_reference(q, k, v, scale=1.0, softcap=2.0)
    assert close(out.view(4), torch.softmax(2 * torch.tanh(tensor(EXAMPLE) / 2), 0))


def test_who_sees_whom(device: torch.device) -> None:
    """Zero scores: each row is the mean of the values that it sees, so the output shows the mask."""
    q, k = torch.zeros(1, 1, 2, 1, device=device), torch.zeros(1, 1, 4, 1, device=device)
    v = torch.eye(4, device=device).view(1, 1, 4, 4)
    seen = lambda **options: [row.nonzero().flatten().tolist() for row in attention_reference(q, k, v, **options)[0, 0]]
    assert seen() == [[0, 1, 2, 3]] * 2
    assert seen(causal=True) == [[0, 1, 2], [0, 1, 2, 3]]
    assert seen(causal=True, q_start=0) == [[0], [0, 1]]
    assert seen(causal=True, q_start=-1) == [[], [0]]
    assert seen(window=(1, 0)) == [[1, 2], [2, 3]]
    assert seen(window=(None, 1), q_start=0) == [[0, 1], [0, 1, 2]]
    assert seen(kv_lens=torch.tensor([3], dtype=torch.int32, device=device), causal=True) == [[0, 1], [0, 1, 2]]
    mask = torch.tensor([[True, False, False, True], [False] * 4], device=device)
    assert seen(mask=mask) == [[0, 3], []]
    assert seen(mask=torch.where(mask, 0.0, -math.inf)) == [[0, 3], []]


def test_a_lowest_mask_is_far_but_visible() -> None:
    """-inf hides; the lowest float does not: a row with nothing else is the mean."""
    q, v = torch.randn(1, 1, 1, 4), torch.eye(3).view(1, 1, 3, 3)
    mask = torch.full((3,), torch.finfo(torch.float32).min)
    assert close(attention_reference(q, torch.randn(1, 1, 3, 4), v, mask=mask).view(3), [1 / 3] * 3, 1e-7)


def test_unseen_nan_reaches_neither_values_nor_gradients() -> None:
    """Two queries, three keys: nobody sees key 2, only query 1 sees key 1."""

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attention_reference(*leaves, causal=True, q_start=0)
        return out, *torch.autograd.grad(out.sum(), leaves)

    q, k, v = (torch.randn(1, 1, n, 2).double() for n in (2, 3, 3))
    clean = run(q, k, v)
    k[:, :, 2], v[:, :, 2] = math.nan, math.inf
    for got, want in zip(run(q, k, v), clean, strict=True):
        assert close(got, want, 1e-12)
    k[:, :, 1], v[:, :, 1] = math.nan, math.inf
    out, d_q, _, _ = run(q, k, v)
    assert out[:, :, 1].isnan().all()
    assert close(out[:, :, 0], clean[0][:, :, 0], 1e-12)
    assert close(d_q[:, :, 0], clean[1][:, :, 0], 1e-12)


def test_gradients_by_finite_differences() -> None:
    shapes = ((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 3), (3, 4), (2,))
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).double() for i, shape in enumerate(shapes)]
    call = lambda q, k, v, mask, sinks: attention_reference(
        q, k, v, mask=mask, sinks=sinks, causal=True, softcap=3.0, return_lse=True
    )
    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in inputs])


def test_packed_without_sequences() -> None:
    x, cu = torch.zeros(0, 2, 4), torch.zeros(1, dtype=torch.int32)
    out, lse = attention_varlen_reference(x, x, x, cu, cu, return_lse=True)
    assert (tuple(out.shape), tuple(lse.shape)) == ((0, 2, 4), (2, 0))


FAR = sys.maxsize


@pytest.mark.parametrize(
    "options",
    [{"window": (None, FAR)}, {"window": (FAR, 0)}, {"q_start": 2**62, "window": (2**62, 2**62)},
     {"q_start": -(2**62), "window": (2**62 + 3, None)}, {"q_start": 2**80, "causal": True},
     {"q_start": 2**80, "window": (2**80, 2)}, {"scale": 10**30}, {"softcap": 10**30}],
    ids=str,
)  # fmt: skip
def test_numbers_past_64_bits_are_far_out(options):
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0)) * (1e-15 if "scale" in options else 1)
    got, want = (each(q, q, q, return_lse=True, **options) for each in (attention_reference, fa.attention))
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1].to(got[1].dtype))


def test_a_callers_autocast_does_not_round_it():
    q = torch.randn(1, 2, 16, 32)
    want = attention_reference(q, q, q)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention_reference(q, q, q), want)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [({"return_lse": "no"}, TypeError, "return_lse: must be True or False"),
     ({"dtype": "float32"}, TypeError, "dtype: must be float16, bfloat16, float32 or float64; got 'float32'"),
     ({"dtype": torch.int32}, TypeError, "dtype: must be float16, bfloat16, float32 or float64; got int32"),
     ({"causal": "yes"}, TypeError, "causal: must be True or False")],
    ids=str,
)  # fmt: skip
def test_options_are_checked_without_a_sequence_too(options, error, text):
    q, cu = torch.randn(0, 2, 8), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(error, match="^" + text):
        attention_reference(torch.randn(1, 2, 3, 8), *(torch.randn(1, 2, 3, 8),) * 2, **options)
    with pytest.raises(error, match="^" + text):
        attention_varlen_reference(q, q, q, cu, cu, **options)
