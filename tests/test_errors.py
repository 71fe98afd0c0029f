"""Bad input is refused at the door: the text names the argument, the relation, the value that came, and the remedy."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite import dispatch
from flashattn_lite.errors import BackendError
from flashattn_lite.target import of
from tests.refusals import NESTED, refusal_tests

Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
PACKED_Q, PACKED_K = torch.randn(10, 4, 8), torch.randn(12, 2, 8)
CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 10], [0, 5, 12]))


def call(**changes):
    arguments = {"q": Q, "k": K, "v": V, **changes}
    q, k, v = (arguments.pop(name) for name in "qkv")
    return lambda: fa.attention(q, k, v, **arguments)


def packed(**changes):
    arguments = {"q": PACKED_Q, "k": PACKED_K, "v": PACKED_K, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, **changes}
    tensors = [arguments.pop(name) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    return lambda: fa.attention_varlen(*tensors, **arguments)


REFUSED = {
    "not a tensor": (call(q=[1.0]), TypeError, "q: must be a torch.Tensor; got [1.0]. Convert it with torch.as_tensor."),
    "rank": (call(q=Q[0]), ValueError,
             "q: must have 4 dimensions (batch, heads, length, head_dim); got a tensor of shape (4, 5, 8), float32, on "
             "cpu. Add or remove dimensions."),
    "integers": (call(k=K.int()), TypeError,
                 "k: dtype must be float16, bfloat16, float32 or float64; got a tensor of shape (2, 2, 7, 8), int32, on"),
    "complex": (call(v=V + 0j), TypeError, "v: must be real; got a tensor of shape (2, 2, 7, 6), complex64, on cpu. "
                "Split it into its real and imaginary parts."),
    "sparse": (call(k=K.to_sparse()), TypeError, "k: must be a dense strided tensor; got"),
    "dtypes": (call(k=K.half()), TypeError, "k: dtype must equal q's (float32); got a tensor of shape (2, 2, 7, 8), "
               "float16, on cpu. Cast with k.to(q.dtype)."),
    "devices": (call(v=V.to("meta")), ValueError, "v: must be on q's device (cpu); got a tensor of shape (2, 2, 7, 6), "
                "float32, on meta. Move it: v.to(q.device)."),
    "device of sinks": (call(sinks=torch.zeros(4, device="meta")), ValueError, "sinks: must be on the device of the queries (cpu); got a "
                        "tensor of shape (4,), float32, on meta. Move it with .to(device)."),
    "device of a mask": (call(mask=torch.zeros(5, 7, device="meta")), ValueError, "mask: must be on the device of the queries (cpu); got"),
    "head dims": (call(k=K[..., :4]), ValueError, "k: head dim must equal q's (8); got a tensor of shape (2, 2, 7, 4)"),
    "no head dim": (call(v=V[..., :0]), ValueError, "v: head dim (the last) must be at least 1; got"),
    "large head dim": (call(v=torch.zeros(2, 2, 7, 257)), NotImplementedError, "v: head dim must be at most 256; got a "
                       "tensor of shape (2, 2, 7, 257), float32, on cpu. Call once for each 256 columns of v and join"),
    "large head dims": (call(q=torch.zeros(2, 4, 5, 257)), NotImplementedError, "q: head dim must be at most 256; got a "
                        "tensor of shape (2, 4, 5, 257), float32, on cpu. Call torch's own scaled_dot_product_attention"),
    "batch": (call(k=K[:1]), ValueError, "k: batch must equal q's (2); got a tensor of shape (1, 2, 7, 8), float32, on "
              "cpu. Expand it: k.expand(2, -1, -1, -1) costs no memory."),
    "batches": (call(k=torch.zeros(3, 2, 7, 8)), ValueError, "k: batch must equal q's (2); got a tensor of shape (3, 2, 7, "
                "8), float32, on cpu. Pass one sequence of keys for each of queries."),
    "tensors in a list": (call(q=[Q, 3, *range(90)]), TypeError, "q: must be a torch.Tensor; got [a tensor of shape (2, 4, 5, "
                          "8), float32, on cpu, 3, 0, 1, 2, 3, 4, 5, ...]. Convert it with torch.as_tensor."),
    "lengths": (call(v=V[:, :, :6]), ValueError, "v: length must equal k's (7); got a tensor of shape (2, 2, 6, 6)"),
    "groups": (call(q=Q[:, :3]), ValueError, "q: number of heads must be a multiple of k's (2); got a tensor of shape "
               "(2, 3, 5, 8), float32, on cpu. Pass equal shares of query heads for all key heads, or transpose what is "
               "not laid out (batch, heads, length, head_dim)."),
    "heads": (call(v=V[:, :1]), ValueError, "v: must have as many heads as k (2); got a tensor of shape (2, 1, 7, 6), "
              "float32, on cpu. Pass a value head per key head."),
    "no key head": (call(q=Q[:, :1], k=K[:, :0], v=V[:, :0]), ValueError, "k: must have at least one head for q's 1; got "),
    "mask shape": (call(mask=torch.ones(5, 6).bool()), ValueError, "mask: must be broadcastable to (batch, heads_q, "
                   "len_q, len_k) = (2, 4, 5, 7); got a tensor of shape (5, 6), bool, on cpu."),
    "mask of too many dims": (call(mask=torch.ones(1, 1, 1, 5, 7)), ValueError, "mask: must be broadcastable to (batch, "),
    "mask of a row of keys": (call(mask=torch.ones(2, 7).bool()), ValueError, "(2, 4, 5, 7); got a tensor of shape (2, 7), "
                              "bool, on cpu. For one row of keys per sequence pass mask[:, None, None, :]."),
    "mask of a sequence": (call(mask=torch.ones(2, 5, 7)), ValueError, "For one mask per sequence pass mask[:, None]."),
    "mask dtype": (call(mask=torch.ones(5, 7).int()), TypeError, "mask: dtype must be bool (True = visible) or a float "
                   "that is added; got a tensor of shape (5, 7), int32, on cpu. Pass .bool() if 1 means visible; as floats they "
                   "would be added."),
    "mask of another float": (call(mask=torch.ones(5, 7).to(torch.float8_e5m2)), TypeError, "mask: dtype must be bool "
                   "(True = visible) or a float that is added; got a tensor of shape (5, 7), float8_e5m2, on cpu. Cast it first."),
    "mask kind": (call(mask=True), TypeError, "mask: must be a torch.Tensor or None; got True."),
    "sinks": (call(sinks=torch.zeros(2)), ValueError, "sinks: must have shape (heads_q,) = (4,); got a tensor of shape "
              "(2,), float32, on cpu. Pass one for each query head."),
    "kv_lens dtype": (call(kv_lens=torch.tensor([1, 2])), TypeError, "kv_lens: dtype must be int32; got a tensor of "
                      "shape (2,), int64, on cpu. Cast it: .to(torch.int32)."),
    "kv_lens shape": (call(kv_lens=CU_Q), ValueError, "kv_lens: must have shape (batch,) = (2,); got a tensor of shape"),
    "kv_lens kind": (call(kv_lens=[1, 2]), TypeError, "kv_lens: must be an int32 torch.Tensor; got [1, 2]."),
    "scale nan": (call(scale=float("nan")), ValueError, "scale: must be finite; got nan. Pass such a number, or None for the default."),
    "scale of float64": (call(scale=1e39), ValueError, "scale: must be at most 1.7e+38 in size, half of float32's "
                         "most; got 1e+39. Pass such a number, or None for the default."),
    "scale of no float": (call(scale=-(10**400)), ValueError, "scale: must be at most 1.7e+38 in size, half of float32's most; got -1000000000000000000000000000000000000000"
                          "0000000000000000000.... Pass such a number, or None for the default."),
    "scale of a tensor": (call(scale=torch.tensor(0.5)), TypeError, "scale: must be a float or None; got a tensor of shape "
                          "(), float32, on cpu. Pass scale.item()."),
    "softcap that learns": (call(softcap=torch.tensor(3.0, requires_grad=True)), TypeError, "softcap: must be a float or "
                            "None; got a tensor of shape (), float32, on cpu. It would get no gradient: if it wants none, "
                            "pass softcap.item()."),
    "scale under vmap": (lambda: torch.vmap(lambda s: fa.attention(Q, Q, Q, scale=s))(torch.ones(2)), TypeError,
                         "To a transform of torch.func it is no number: pass 1.0 and multiply the queries by it."),
    "softcap under vmap": (lambda: torch.vmap(lambda s: fa.attention(Q, Q, Q, softcap=s))(torch.ones(2)), TypeError,
                           "To a transform of torch.func it is no number: call once for each of its values."),
    "scale a flag": (call(scale=True), TypeError, "scale: must be a float or None; got True. Pass such a number, or None for"),
    "q nested": (call(q=NESTED), TypeError, "q: must be a dense strided tensor; "
                 "got a nested tensor, float32, on cpu. Pad it with torch.nested.to_padded_tensor, or pack its sequences "
                 "for attention_varlen."),
    "kv_lens sparse": (call(kv_lens=torch.tensor([1, 2], dtype=torch.int32).to_sparse()), TypeError,
                       "kv_lens: must be a dense strided tensor; got a sparse_coo tensor of shape (2,), int32, on cpu. Call "
                       ".to_dense()."),
    "scale kind": (call(scale="1"), TypeError, "scale: must be a float or None; got '1'."),
    "softcap": (call(softcap=0.0), ValueError, "softcap: must be greater than 0; got 0.0. Pass None for no soft cap."),
    "softcap of float64": (call(softcap=1e-40), ValueError, "softcap: must be at least 1.2e-38, float32's least normal number; got "
                           "1e-40. Pass None for no soft cap."),
    "softcap inf": (call(softcap=float("inf")), ValueError, "softcap: must be finite; got inf."),
    "causal": (call(causal=1), TypeError, "causal: must be True or False; got 1. Pass bool(causal)."),
    "q_start": (call(q_start=1.5), TypeError, "q_start: must be an int or None; got 1.5."),
    "window": (call(window=5), TypeError, "window: must be a pair (left, right) or None; got 5. Pass (256, 0), say."),
    "window sign": (call(window=(-1, 0)), ValueError, "window: left must be at least 0; got (-1, 0). Pass None "
                    "(not -1) for no bound."),
    "window kind": (call(window=(1.0, 0)), TypeError, "window: left must be an int or None; got (1.0, 0)."),
    "backend": (call(backend="cuda"), ValueError, "backend: must be one of 'auto', 'split', 'hopper', 'triton', 'tiled'; got 'cuda'."),
    "return_lse": (call(return_lse="no"), TypeError, "return_lse: must be True or False; got 'no'. Pass one of them."),
    "packed return_lse": (packed(return_lse=1), TypeError, "return_lse: must be True or False; got 1."),
    "nested scale": (call(scale=NESTED), TypeError, "scale: must be a float or None; got a nested tensor, float32, on cpu."),
    "backends": (call(backend=["triton"]), ValueError, "got ['triton']. Pass one of these."),
    "cu order": (packed(cu_seqlens_q=CU_Q[[0, 2, 1]]), ValueError, "cu_seqlens_q: must not decrease; got [0, 10, 4]."),
    "cu start": (packed(cu_seqlens_q=CU_Q + 1), ValueError, "cu_seqlens_q: must start with 0; got [1, 5, 11]."),
    "cu end": (packed(cu_seqlens_k=CU_Q), ValueError, "cu_seqlens_k: must end with k's total length (12); got [0, 4, 10]"),
    "cu dtype": (packed(cu_seqlens_k=CU_K.long()), TypeError, "cu_seqlens_k: dtype must be int32; got a tensor of shape"),
    "cu sizes": (packed(cu_seqlens_k=CU_K[[0, 2]]), ValueError, "cu_seqlens_k: must have as many entries as cu_seqlens_q "
                 "(3); got a tensor of shape (2,)"),
    "max_seqlen": (packed(max_seqlen_q=5), ValueError, "max_seqlen_q: must be at least the longest sequence (6); got 5."),
    "max_seqlen sign": (packed(max_seqlen_k=-1), ValueError, "max_seqlen_k: must be at least 0; got -1. Pass an upper "
                        "bound on the lengths, or None."),
    "max_seqlen kind": (packed(max_seqlen_k=torch.tensor(9)), TypeError, "max_seqlen_k: must be an int or None; got a"),
    "packed rank": (packed(q=Q), ValueError, "q: must have 3 dimensions (total, heads, head_dim); got a tensor of shape"),
    "merge nothing": (lambda: fa.merge_attention([]), ValueError, "parts: must hold at least one (out, lse) pair; got []."),
    "merge a generator": (lambda: fa.merge_attention(x for x in ()), TypeError, "parts: must be a sequence of (out, lse) "
                          "pairs; got a generator. Pass a list of them."),
    "merge lse": (lambda: fa.merge_attention([(Q, Q[..., 0].mT)]), ValueError, "parts[0]: lse must have one value per row "
                  "of out (2, 4, 5, 8); got a tensor of shape (2, 5, 4)"),
    "merge shapes": (lambda: fa.merge_attention([(Q, Q[..., 0]), (Q[:1], Q[:1, ..., 0])]), ValueError,
                     "parts[1]: out must have the shape of parts[0]'s (2, 4, 5, 8); got a tensor of shape (1, 4, 5, 8), "
                     "float32, on cpu. Compute every part for the same queries."),
    "merge rank": (lambda: fa.merge_attention([(Q[0, 0], Q[0, 0, :, 0])]), ValueError, "parts[0]: out must be (batch, "
                   "heads, length, head_dim_v), or packed (total, heads, head_dim_v); got a tensor of shape (5, 8)"),
    # As many tokens as heads do not make lse's order a matter of taste; of others it must be (heads, total).
    "merge packed lse": (lambda: fa.merge_attention([(Q[0], Q[0, ..., 0])]), ValueError,
                         "parts[0]: lse must have one value per row of out (4, 5, 8); got a tensor of shape (4, 5)"),
    "merge device": (lambda: fa.merge_attention([(Q, Q[..., 0].to("meta"))]), ValueError,
                     "parts[0]: lse must be on out's device (cpu); got a tensor of shape (2, 4, 5), float32, on meta."),
}  # fmt: skip


test_refused_with_these_words, test_nothing_is_launched_for_bad_input = refusal_tests(
    REFUSED, "flashattn_lite.dispatch.prepare"
)


def test_explaining_refuses_in_the_same_words(monkeypatch):
    monkeypatch.setattr(fa, "attention", fa.explain)
    monkeypatch.setattr(fa, "attention_varlen", fa.explain_varlen)
    for run, error, text in REFUSED.values():
        with pytest.raises(error, match=re.escape(text)):
            run()


def test_a_named_backend_never_falls_back():
    doubles = Q.double()
    # The reason is the dtype, or that Triton is not there at all.
    words = r"backend: 'triton' can't run this problem. By backend: split: .*; hopper: .*; triton: .*(float64|triton).*; tiled: would run"
    with pytest.raises(BackendError, match=words):
        fa.attention(doubles, doubles, doubles, backend="triton")


def test_explain_says_what_runs_and_why_not():
    doubles = Q.double()
    explanation = fa.explain(doubles, doubles, doubles, causal=True)
    assert explanation.backend == "tiled"
    assert any("float64" in reason or "triton" in reason for reason in explanation.reasons["triton"])
    assert explanation.reasons["tiled"] == []
    assert "tiled on cpu" in str(explanation)
    assert "triton:" in str(explanation)
    assert explanation.gradients == explanation.reasons["triton"]
    assert f"gradients in plain torch: {explanation.gradients[0]}" in str(explanation)
    with pytest.raises(ValueError, match="scale: must be finite"):
        fa.explain(Q, K, V, scale=float("nan"))


def test_an_explanation_says_on_which_side_of_the_chosen_one_others_stand():
    explanation = dispatch.Explanation("b", 1, of(Q.device), {"a": [], "b": [], "c": ["no"], "d": []})
    a, c, d = str(explanation).splitlines()[1:]
    assert a == "  a: would run too, comes earlier in preference" and c == "  c: no"
    assert d == "  d: would run too, comes later in preference"


def test_diagonals_beyond_64_bits_are_those_of_the_formula():
    """start - left and start + right, each far out alone, may meet."""
    q, k, v = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 5, 1), torch.arange(5.0).view(1, 1, 5, 1)
    seen = {(-(2**70), (None, 2**71)): 2.0, (2**70, (2**70 - 2, None)): 3.0, (3, (2**70, None)): 2.0,
            (2**70, (2**65, None)): None, (-(2**70), (None, 2**70)): 0.0, (2**63, (2**63, 0)): 2.0,
            (-(2**63), (0, 2**63 + 1)): 0.5}  # fmt: skip
    for (start, window), mean in seen.items():
        asked = lambda q, k, v, start=start, window=window: fa.attention(
            q, k, v, q_start=start, window=window, return_lse=True
        )
        out, lse = asked(q, k, v)
        assert (lse.item() == -torch.inf) if mean is None else out.item() == pytest.approx(mean)
        out_c, lse_c = torch.compile(asked, backend="aot_eager", fullgraph=True)(q, k, v)
        assert torch.equal(out, out_c) and torch.equal(lse, lse_c)


def test_who_asks_for_whatever_runs_is_not_told_to():
    far = K[:1, :1, :1].expand(1, 1, 2**31, 8)
    with pytest.raises(BackendError, match=r"backend: none can run this problem\. By backend: .*tiled: .*2147483648"):
        fa.attention(Q[:1, :1], far, far, window=(3, 0))


def test_integers_of_numpy_are_integers():
    np = pytest.importorskip("numpy")
    one, three, many = np.int64(1), np.int32(3), np.int64(50)
    want = fa.attention(Q, K, V, q_start=1, window=(3, 1))
    assert torch.equal(fa.attention(Q, K, V, q_start=one, window=(three, one)), want)
    tensors = (PACKED_Q, PACKED_K, PACKED_K, CU_Q, CU_K)
    assert torch.equal(
        fa.attention_varlen(*tensors, max_seqlen_q=many, max_seqlen_k=many), fa.attention_varlen(*tensors)
    )
    lens = torch.tensor([7, 2], dtype=torch.int32)
    window = fa.attention_decode(Q, K, V, lens, window=(3, None))
    assert torch.equal(fa.attention_decode(Q, K, V, lens, window=(three, None)), window)
    assert torch.equal(fa.online_softmax(Q, dim=one), fa.online_softmax(Q, dim=1))


def test_other_numbers_have_the_same_limits_and_are_shown():
    np = pytest.importorskip("numpy")
    for options, text in (
        ({"scale": np.float32(3e38)}, "scale: must be at most 1.7e+38 in size, half of float32's most; got 3e+38."),
        (
            {"softcap": np.float32(1e-40)},
            "softcap: must be at least 1.2e-38, float32's least normal number; got 1e-40.",
        ),
        ({"softcap": np.int64(-3)}, "softcap: must be greater than 0; got -3."),
        ({"softcap": Fraction(10**60)}, "softcap: must be at most 1.7e+38 in size, half of float32's most; got 1000"),
        ({"window": (np.int64(-1), 0)}, "window: left must be at least 0; got (-1, 0)."),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(text)):
            fa.attention(Q, K, V, **options)
    assert torch.equal(fa.attention(Q, K, V, scale=np.float16(0.5)), fa.attention(Q, K, V, scale=0.5))


def test_numbers_as_torchs_function_takes_them():
    want = fa.scaled_dot_product_attention(Q, Q, Q, scale=0.5)
    assert torch.equal(fa.scaled_dot_product_attention(Q, Q, Q, dropout_p=False, scale=torch.tensor(0.5)), want)
    assert torch.equal(fa.scaled_dot_product_attention(Q, Q, Q, dropout_p=torch.tensor(0.0), scale=0.5), want)
    for transform in (torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        with pytest.raises((TypeError, NotImplementedError), match=r"^scale: "):
            transform(lambda x: fa.scaled_dot_product_attention(Q, Q, Q, scale=x).sum())(torch.tensor(0.5))


class Named(torch.Tensor):
    """A class that only names a tensor."""


@pytest.mark.parametrize("kind", [torch.nn.Parameter, Named])
def test_lengths_of_any_class_of_tensor_are_looked_at(kind):
    def of_kind(*numbers):
        x = torch.tensor(numbers, dtype=torch.int32)
        return torch.nn.Parameter(x, requires_grad=False) if kind is torch.nn.Parameter else x.as_subclass(kind)

    with pytest.raises(ValueError, match=r"^cu_seqlens_q: must not decrease; got \[0, 11, 10\]"):
        packed(cu_seqlens_q=of_kind(0, 11, 10))()
    with pytest.raises(ValueError, match=r"^max_seqlen_q: must be at least the longest sequence"):
        packed(cu_seqlens_q=of_kind(0, 4, 10), max_seqlen_q=5)()
    pages, lens, table = torch.randn(3, 2, 16, 8), of_kind(9, 3), of_kind(7, 2).unsqueeze(1)
    with pytest.raises(ValueError, match=r"^block_table\[0, 0\]: entries that kv_lens reaches must be from 0 to 2"):
        fa.attention_decode(Q[:, :, :1], pages, pages, lens, block_table=table)


def test_what_came_is_shown_as_it_came():
    x, few = torch.randn(1, 2, 3, 5, 8), torch.randn(3, 3, 7, 8)
    words = r"^key: batch dims and heads must broadcast with query's \(1, 2, 3, 5, 8\); got a tensor of shape \(3, 3, 7, 8\)"
    with pytest.raises(ValueError, match=words):
        fa.scaled_dot_product_attention(x, few, few)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"^value: length .* float32, on cpu\."):
        fa.scaled_dot_product_attention(few, few, few[:, :, 1:])
    with pytest.raises(TypeError, match=r"^query: must be a torch.Tensor; got \[\[\[") as refusal:
        fa.scaled_dot_product_attention(few.tolist(), few, few)
    assert len(str(refusal.value)) < 700
