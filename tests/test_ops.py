"""The custom op as compilers see it: schema, fake, autograd, torch.compile without a graph break, torch.export."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flashattn_lite as fa
from flashattn_lite import calls, ops
from flashattn_lite.reference import attention_reference
from tests.exhaustive import once


def op_arguments(**changes):
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    tensors = {"q": q, "k": k, "v": v, "mask": None, "sinks": None, "kv_lens": None, "cu_seqlens_q": None,
               "cu_seqlens_k": None}  # fmt: skip
    options = {"causal": True, "q_start": None, "window_left": None, "window_right": None, "scale": 0.3,
               "softcap": None, "max_seqlen_q": None, "max_seqlen_k": None, "backend": "auto"}  # fmt: skip
    return tuple({**tensors, **options, **changes}.values())


CU = torch.tensor([0, 2, 5], dtype=torch.int32)
CASES = {
    "causal": {},
    "transposed": {"q": torch.randn(2, 5, 4, 8).transpose(1, 2)},
    "everything": {"mask": torch.randn(5, 7), "sinks": torch.randn(4), "window_left": 3, "softcap": 2.0, "q_start": 1},
    "bool mask": {"mask": torch.rand(2, 1, 5, 7) > 0.3, "causal": False},
    "kv_lens": {"kv_lens": torch.tensor([3, 7], dtype=torch.int32)},
    "packed": {"q": torch.randn(5, 4, 8), "k": torch.randn(5, 2, 8), "v": torch.randn(5, 2, 6), "cu_seqlens_q": CU,
               "cu_seqlens_k": CU, "max_seqlen_q": 3, "max_seqlen_k": 3},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case, interpreting):
    if interpreting and case != "everything":
        pytest.skip("slow in the interpreter; what an op promises does not depend on the kernel")
    arguments = op_arguments(**CASES[case])
    float_tensors = [x for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()]
    torch.library.opcheck(ops.attention, arguments)
    for x in float_tensors:
        x.requires_grad_()
    torch.library.opcheck(ops.attention, arguments)
    for x in float_tensors:
        x.requires_grad_(False)


def test_schema_lists_the_inputs_in_their_order():
    """Inputs and options are passed by position; a schema in another order would mix them up silently."""
    names = [argument.name for argument in torch.ops.flashattn_lite.attention.default._schema.arguments]
    assert names == [*fa.problem.Inputs._fields, *calls.OPTION_NAMES, "backend"]


def attend(q, k, v):
    out, lse = fa.attention(q, k, v, causal=True, window=(4, None), softcap=5.0, return_lse=True)
    return out.sum() + (lse * lse).sum()


@once
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph_forward_and_backward(dynamic, interpreting):
    if interpreting and not dynamic:
        pytest.skip("slow in the interpreter")
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (5, 6, 9):
        leaves = [torch.randn(2, heads, length, 8, requires_grad=True) for heads in (4, 2, 2)]
        eager = torch.autograd.grad(attend(*leaves), leaves)
        for ours, expected in zip(torch.autograd.grad(compiled(*leaves), leaves), eager, strict=True):
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("wrong", "value", "text"),
    [(lambda x, n: fa.attention(x, x, x, softcap=n), -1.0, "softcap: must be greater than 0; got a number."),
     (lambda x, n: fa.attention(x, x, x, window=(n, 0)), -1, "window: left must be at least 0; got (a number, "),
     (lambda x, n: fa.online_softmax(x, dim=n), 7, "dim: must be from -4 to 3 for x of 4 dimensions; got a number."),
     (lambda x, n: fa.attention(x, x, x, softcap=-2.0 * x.dim()), 1, "softcap: must be greater than 0; got a number.")],
    ids=["softcap", "window", "dim", "a constant"],
)  # fmt: skip
def test_a_wrong_number_is_named_by_a_compiler_that_does_not_know_it(wrong, value, text):
    """A symbol has no text, so its value is not said. Where the graph breaks it is, by the call that runs eagerly."""
    compiled = torch.compile(wrong, backend="eager", dynamic=True, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        compiled(torch.randn(1, 2, 6, 8), value)
    assert text in str(raised.value)


def test_a_backward_alone_is_compiled(interpreting):
    """By torch's compiled autograd, which asks each node of an eager forward for a name. It warns of much."""
    if interpreting:
        pytest.skip("the same without TRITON_INTERPRET=1")
    code = """
import torch
import flashattn_lite as fa

x, cu = torch.nn.Parameter(torch.randn(2, 2, 6, 8)), torch.tensor([0, 2], dtype=torch.int32)
for loss in (
    lambda: fa.attention(x, x, x).square().sum(),
    lambda: fa.attention_varlen(x[0], x[0], x[0], cu, cu).square().sum(),
    lambda: fa.online_softmax(x).square().sum(),
    lambda: fa.softmax_stats(x)[1].square().sum(),
):
    want, x.grad = torch.autograd.grad(loss(), x)[0], None
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda y: y.backward(), backend="aot_eager")(loss())
    torch.testing.assert_close(x.grad, want)
    y, x.grad = loss(), None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        y.backward()
    torch.testing.assert_close(x.grad, want)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_nobody_asks_where_fake_tensors_lie():
    """torch warns of it, and says that it will raise."""
    with FakeTensorMode(), warnings.catch_warnings(action="error"):
        x, cu = torch.empty(2, 2, 6, 8), torch.empty(3, dtype=torch.int32)
        packed = torch.empty(12, 2, 8)
        assert fa.attention(x, x, x).shape == x.shape
        leaf = torch.empty(2, 2, 6, 8, requires_grad=True)
        assert torch.autograd.grad(fa.attention(leaf, x, x).sum(), leaf)[0].shape == x.shape
        assert fa.attention_decode(x, x, x, cu[1:]).shape == x.shape
        assert fa.attention_varlen(packed, packed, packed, cu, cu, max_seqlen_q=6, max_seqlen_k=6).shape == packed.shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_fake_tensor_may_be_on_a_gpu_that_is_not_there(interpreting):
    with FakeTensorMode():
        x = torch.empty(2, 2, 6, 8, device="cuda")
        assert interpreting or "torch sees no GPU here" in str(fa.explain(x, x, x))
        assert fa.attention(x, x, x).device.type == "cuda"


@pytest.mark.parametrize("function", ["scaled_dot_product_attention", "attention_varlen"])
def test_compile_sees_one_op(function):
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if "flashattn_lite" in str(node.target))
        return graph.forward

    if function == "attention_varlen":
        run = lambda q, k, v: fa.attention_varlen(q, k, v, CU, CU, causal=True, max_seqlen_q=3, max_seqlen_k=3)
        inputs = [torch.randn(5, 2, 8) for _ in range(3)]
    else:
        run = lambda q, k, v: fa.scaled_dot_product_attention(q, k, v, is_causal=True)
        inputs = [torch.randn(2, 2, 5, 8) for _ in range(3)]
    out = torch.compile(run, fullgraph=True, backend=backend)(*inputs)
    torch.testing.assert_close(out, run(*inputs))
    assert len(seen) == 1


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_tracer_sees_one_op(pre_dispatch, mode):
    q = torch.randn(2, 3, 5, 8)
    for call in (lambda q: fa.scaled_dot_product_attention(q, q, q, is_causal=True), lambda q: fa.attention(q, q, q)):
        graph = make_fx(call, tracing_mode=mode, pre_dispatch=pre_dispatch)(q)
        assert sum("flashattn_lite.attention" in str(node.target) for node in graph.graph.nodes) == 1
        assert torch.equal(graph(q + 1), call(q + 1))


@once
def test_export_with_dynamic_shapes():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fa.scaled_dot_product_attention(q, k, v, is_causal=True)

    sizes = torch.export.Dim("batch"), torch.export.Dim("length", min=2), torch.export.Dim("head_dim", max=256)
    shape = dict(zip((0, 2, 3), sizes, strict=True))
    inputs = tuple(torch.randn(2, 3, 6, 8) for _ in range(3))
    exported = torch.export.export(Model(), inputs, dynamic_shapes=(shape, shape, shape))
    other = tuple(torch.randn(3, 3, 11, 20) for _ in range(3))
    torch.testing.assert_close(exported.module()(*other), Model()(*other))


def test_lse_carries_gradient():
    leaves = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    grads = torch.autograd.grad(attend(*leaves), leaves)
    out, lse = attention_reference(*wide, causal=True, window=(4, None), softcap=5.0, return_lse=True)
    expected = torch.autograd.grad(out.sum() + (lse * lse).sum(), wide)
    for ours, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)  # float32, a dozen operations


def test_merge_is_differentiable_also_where_both_parts_are_empty():
    out = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    lse = torch.tensor([[[0.5, -torch.inf, -torch.inf]]], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([[[0.1, 0.2, -torch.inf]]], dtype=torch.float64)
    merged, merged_lse = fa.merge_attention([(out, lse), (out.detach() + 1, other)])
    grads = torch.autograd.grad(merged.sum() + merged_lse[..., :2].sum(), (out, lse))
    assert all(grad.isfinite().all() for grad in grads)
    assert torch.equal(merged[0, 0, 2], torch.zeros(2, dtype=torch.float64))
    assert merged_lse[0, 0, 2] == -torch.inf


@once
@pytest.mark.parametrize("causal", [False, True])
def test_function_transforms(causal):
    """torch.func.grad, vjp, jacrev, vmap, vmap of grad and grad of vmap: what autograd and a loop give."""
    q, k, v = (torch.randn(3, 1, 2, 5, 8) for _ in range(3))
    loss = lambda q, k, v: fa.attention(q, k, v, causal=causal, return_lse=True)[0].square().sum()
    exact = lambda q, k, v: attention_reference(q, k, v, causal=causal).square().sum()

    def gradients(function, *inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*inputs), inputs)

    every = (0, 1, 2)
    want = gradients(exact, q[0], k[0], v[0])
    torch.testing.assert_close(torch.func.grad(loss, every)(q[0], k[0], v[0]), want)
    torch.testing.assert_close(torch.func.vjp(loss, q[0], k[0], v[0])[1](torch.ones(())), want)
    torch.testing.assert_close(torch.func.jacrev(loss, every)(q[0], k[0], v[0]), want)
    torch.testing.assert_close(torch.vmap(loss)(q, k, v), torch.stack([exact(*x) for x in zip(q, k, v, strict=True)]))
    each = [gradients(exact, *x) for x in zip(q, k, v, strict=True)]
    torch.testing.assert_close(
        torch.vmap(torch.func.grad(loss, every))(q, k, v), tuple(map(torch.stack, zip(*each, strict=True)))
    )
    none = torch.vmap(loss)(q[:0], k[:0], v[:0])
    assert none.shape == (0,)
    assert torch.vmap(fa.attention)(q[:0], k[:0], v[:0]).shape == (0, *fa.attention(q[0], k[0], v[0]).shape)
    wanted = torch.randn(4, *q[0].shape)
    inputs = [x[0].clone().requires_grad_() for x in (q, k, v)]
    out = fa.attention(*inputs, causal=causal)
    batched = torch.autograd.grad(out, inputs, wanted, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, inputs, x, retain_graph=True) for x in wanted]
    torch.testing.assert_close(batched, tuple(map(torch.stack, zip(*each, strict=True))))
    each = [gradients(exact, *x) for x in zip(q, k, v, strict=True)]
    many = torch.func.grad(lambda *inputs: torch.vmap(loss)(*inputs).sum(), every)
    torch.testing.assert_close(many(q, k, v), tuple(map(torch.stack, zip(*each, strict=True))))
    with pytest.raises(NotImplementedError, match="no gradients of their own"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, k[0], v[0]).sum())(q[0])
    with pytest.raises(NotImplementedError, match="attention: forward-mode derivatives are not implemented"):
        torch.func.hessian(lambda q: loss(q, k[0], v[0]))(q[0])
    with pytest.raises(NotImplementedError, match="q: forward-mode"):
        torch.func.jacfwd(loss)(q[0], k[0], v[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: fa.attention(x, x, x, causal=True),
        lambda x: fa.scaled_dot_product_attention(x[0], x[0], x[0])[None],
        fa.online_softmax,
        lambda x: fa.softmax_stats(x)[1],
    ],
    ids=["attention", "sdpa", "softmax", "stats"],
)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(lambda x: f(x).square().sum()),
        lambda f: lambda x: torch.func.vjp(f, x)[1](f(x))[0],
        torch.func.jacrev,
        lambda f: torch.vmap(torch.func.grad(lambda x: f(x[None]).square().sum())),
        lambda f: torch.func.grad(lambda x: torch.vmap(lambda x: f(x[None]))(x).square().sum()),
    ],
    ids=["grad", "vjp", "jacrev", "vmap of grad", "grad of vmap"],
)
def test_function_transforms_inside_of_compiled_code(function, transform, interpreting):
    if interpreting:
        pytest.skip("the same without TRITON_INTERPRET=1")
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 8)
    change = transform(function)
    compiled = torch.compile(change, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), change(x))
    torch.testing.assert_close(compiled(x + 1), change(x + 1))


def test_packed_shapes_alone_are_enough():
    """On the meta device nothing can be read."""
    x, cu = torch.empty(7, 4, 8, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    out = fa.attention_varlen(x, x, x, cu, cu)
    assert out.shape == x.shape and out.is_meta
