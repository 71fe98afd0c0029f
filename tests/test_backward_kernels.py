"""The backward in Triton: against autograd of the definition, what is not finite, bits, packed sequences, who runs.

On a GPU and in Triton's interpreter; elsewhere gradients are plain torch's (test_tiled.py). The laws ask both.
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from flashattn_lite import dispatch, tiled_backward
from flashattn_lite import target as targets
from flashattn_lite.kernels import backward_launch
from flashattn_lite.problem import Inputs, describe
from flashattn_lite.reference import attention_reference
from tests.exhaustive import quick

LENGTHS = (40, 70)  # queries, keys: several of the interpreter's tiles


pytestmark = pytest.mark.usefixtures("where_kernels_run")


@pytest.fixture
def launched(monkeypatch):
    """How often the kernels made gradients."""
    calls = []
    prepare = backward_launch.prepare

    def counted(*args):
        run = prepare(*args)
        return lambda *tensors: calls.append(1) or run(*tensors)

    monkeypatch.setattr(backward_launch, "prepare", counted)
    monkeypatch.setattr("flashattn_lite.calls._gradients", {})
    return calls


def tensors_of(device, dtype, *, batch=2, heads=4, heads_kv=2, lengths=LENGTHS, dim=16, dim_v=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, lengths[0], dim), (heads_kv, lengths[1], dim), (heads_kv, lengths[1], dim_v))
    return [torch.randn(batch, *shape, generator=generator).to(device, dtype) for shape in shapes]


def upstream_of(out, lse, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator).to(x) for x in (out, lse)]


def gradients(function, tensors, **options):
    """Of q, k, v and, if they are among the options, a float mask and sinks."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    for name in ("mask", "sinks"):
        if name in options and options[name].is_floating_point():
            options[name] = options[name].detach().requires_grad_()
            leaves.append(options[name])
    out, lse = function(*leaves[:3], **options, return_lse=True)
    return torch.autograd.grad([out, lse], leaves, upstream_of(out, lse))


def dtype_of(device):
    return torch.float32 if device.type == "cpu" else torch.bfloat16


FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "from the first key": {"causal": True, "q_start": 0},
    "window": {"window": (10, 5)},
    "left": {"window": (7, None), "q_start": -5},
    "right": {"window": (None, 3)},
    "soft cap": {"softcap": 2.0, "causal": True},
    "negative scale": {"scale": -0.3, "causal": True},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "float", "causal": True},
    "a mask far below": {"mask": "far"},
    "sinks": {"sinks": True, "causal": True},
    "far below, and sinks": {"mask": "far", "sinks": True},
    "lengths": {"kv_lens": [50, 0], "causal": True},
}


def options_of(name, device, dtype):
    """The options of a case, with their tensors."""
    options, generator = dict(FEATURES[name]), torch.Generator().manual_seed(5)
    len_q, len_k = LENGTHS
    if options.get("mask") == "bool":
        options["mask"] = (torch.rand(2, 1, len_q, len_k, generator=generator) < 0.7).to(device)
    elif options.get("mask") == "float":
        options["mask"] = torch.randn(1, 4, len_q, len_k, generator=generator).to(device)
    elif options.get("mask") == "far":  # some rows see nothing else: their lse hides log l
        mask = torch.zeros(2, 1, len_q, len_k)
        mask[..., len_k // 2 :] = -1e9
        mask[:, :, 3], mask[:, :, 5] = -1e30, torch.finfo(torch.float32).min
        mask[:, :, 7] = -math.inf
        options["mask"] = mask.to(device)
    if options.get("sinks"):
        options["sinks"] = torch.tensor([0.5, -1.0, 2.0, -1e30], device=device).to(dtype)
    if "kv_lens" in options:
        options["kv_lens"] = torch.tensor(options["kv_lens"], dtype=torch.int32, device=device)
    return options


# The others are parts of these, or stand beside a mask in test_backward_masks.py.
QUICK = ("from the first key", "left", "right", "soft cap", "negative scale", "bool mask", "far below, and sinks",
         "lengths")  # fmt: skip


@pytest.mark.parametrize("feature", quick(FEATURES, QUICK))
@pytest.mark.parametrize("given", ["", *(pytest.param(x, marks=pytest.mark.gpu) for x in ("float16", "float32"))])
def test_gradients_are_those_of_the_definition(feature, given, device, launched):
    dtype = getattr(torch, given) if given else dtype_of(device)
    tensors, options = tensors_of(device, dtype), options_of(feature, device, dtype)
    got = gradients(fa.attention, tensors, **options)
    assert len(launched) == 1
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in options.items()}
    wanted = gradients(attention_reference, [x.double() for x in tensors], **wide)
    # P, dS, O and results are rounded to the dtype: twice four eps of the largest gradient, and float32's sums.
    eps = 8 * torch.finfo(dtype).eps + 2e-6
    for ours, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), want, atol=eps * float(want.abs().max()), rtol=eps)


@pytest.mark.parametrize("dim", [(1, 1), (33, 8), (64, 64), (80, 48), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 5), (70, 100)], ids=str)
@pytest.mark.parametrize("single", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["", "float32"])
def test_head_dims_and_lengths(dim, lengths, single, device, launched):
    if single and max(dim) > 128:
        pytest.skip("gradients of float32 take head dims up to 128")
    dtype = torch.float32 if single else dtype_of(device)
    tensors = tensors_of(device, dtype, batch=1, heads=2, heads_kv=1, lengths=lengths, dim=dim[0], dim_v=dim[1])
    wanted = gradients(attention_reference, [x.double() for x in tensors], causal=True)
    eps = 8 * torch.finfo(dtype).eps + 2e-6  # as above
    for ours, want in zip(gradients(fa.attention, tensors, causal=True), wanted, strict=True):
        torch.testing.assert_close(ours.double(), want, atol=eps * float(want.abs().max()), rtol=eps)
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("spoiled", "value"),
    [("q", math.nan), ("k", math.inf), ("k", math.nan), ("v", math.nan), ("v", -math.inf), ("d_out", math.inf)],
)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 2)}, {}], ids=["causal", "window", "full"])
def test_what_is_not_finite_stays_where_it_is_seen(spoiled, value, options, device, interpreting):
    """NaN where a visible pair has a bad member, which is where plain torch has it; all else has the bits of before."""
    if interpreting and (not options or ("window" in options) != math.isinf(value)):
        pytest.skip("slow in the interpreter, which sees NaN with causality and infinities with a window")
    q, k, v = tensors_of(device, dtype_of(device), batch=1, lengths=(50, 50))
    d_out = upstream_of(q[..., :1].expand(*q.shape[:-1], v.shape[-1]), q)[0]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    before = torch.autograd.grad(fa.attention(*leaves, **options), leaves, d_out)
    {"q": q, "k": k, "v": v, "d_out": d_out}[spoiled][0, 1, 30, 3] = value
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(fa.attention(*leaves, **options), leaves, d_out)

    problem, inputs = problem_and_inputs(leaves, options)
    out, lse = (x.detach() for x in fa.attention(*leaves, **options, return_lse=True))
    needs = (True, True, True, False, False)
    told = tiled_backward.backward(problem, inputs, out, lse, d_out, torch.zeros_like(lse), needs)
    for ours, theirs, clean in zip(got, told, before, strict=False):
        hit = ours.isnan().any(-1)
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert 0 < hit.sum() < hit.numel()
        assert torch.equal(ours[~hit], clean[~hit])


def problem_and_inputs(tensors, options):
    inputs = Inputs(*(x.detach() for x in tensors))
    left, right = options.get("window", (None, None))
    problem = describe(inputs, causal=options.get("causal", False), q_start=None, window_left=left, window_right=right,
                       scale=1 / math.sqrt(inputs.q.shape[-1]), softcap=None)  # fmt: skip
    return problem, inputs


def test_a_sequence_has_its_bits_alone(device):
    dtype = dtype_of(device)
    tensors = tensors_of(device, dtype)
    leaves = [x.requires_grad_() for x in tensors]
    out = fa.attention(*leaves, causal=True)
    d_out, _ = upstream_of(out, out[..., 0])
    together = torch.autograd.grad(out, leaves, d_out)
    alone = [x[1:].detach().requires_grad_() for x in tensors]
    for one, both in zip(
        torch.autograd.grad(fa.attention(*alone, causal=True), alone, d_out[1:]), together, strict=True
    ):
        assert torch.equal(one, both[1:])


def test_repeats_have_the_same_bits(device):
    tensors = tensors_of(device, dtype_of(device))
    first = gradients(fa.attention, tensors, causal=True)
    for _ in range(100 if device.type == "cuda" else 1):
        again = gradients(fa.attention, tensors, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_a_loop_of_dense(causal, device, launched):
    """With a sequence of no queries, and on a GPU, where nobody reads the table first, rows that no sequence covers."""
    bare = 20 if device.type == "cuda" else 0
    lengths = (100 + bare, 110 + bare)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors_of(device, dtype_of(device), lengths=lengths))
    for x, end in ((q, 100), (k, 110), (v, 110)):
        x[end:] = math.nan
    tables = [torch.tensor(cu, dtype=torch.int32, device=device) for cu in ([0, 37, 37, 100], [0, 50, 60, 110])]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = fa.attention_varlen(*leaves, *tables, causal=causal, max_seqlen_q=63, max_seqlen_k=50)
    d_out = upstream_of(out, out[..., 0])[0]
    dq, dk, dv = torch.autograd.grad(out, leaves, d_out)
    assert len(launched) == 1
    assert not dq[100:].any() and not dk[110:].any() and not dv[110:].any()
    assert not dk[50:60].any() and not dv[50:60].any()
    for rows, keys in ((slice(0, 37), slice(0, 50)), (slice(37, 100), slice(60, 110))):
        one = [x[at].detach().transpose(0, 1)[None].requires_grad_() for x, at in ((q, rows), (k, keys), (v, keys))]
        alone = fa.attention(*one, causal=causal)
        wanted = torch.autograd.grad(alone, one, d_out[rows].transpose(0, 1)[None])
        for ours, want in zip((dq[rows], dk[keys], dv[keys]), wanted, strict=True):
            # P is made of an lse that packed and dense kernels need not round alike: two eps of the dtype.
            eps = 2 * torch.finfo(want.dtype).eps + 2e-6
            torch.testing.assert_close(ours.transpose(0, 1)[None], want, atol=eps * float(want.abs().max()), rtol=eps)


def test_strides_and_expanded_gradients_are_irrelevant(device):
    """Tensors as (batch, length, heads, dim), and the gradient of a sum, which has no strides."""
    dtype = dtype_of(device)
    tensors = tensors_of(device, dtype)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    results = []
    for given in (tensors, turned):
        leaves = [x.detach().requires_grad_() for x in given]
        results.append(torch.autograd.grad(fa.attention(*leaves, causal=True).sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_only_what_is_needed_is_made(device):
    q, k, v = tensors_of(device, dtype_of(device))
    whole = gradients(fa.attention, (q, k, v))
    for wanted in range(3):
        leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate((q, k, v))]
        out, lse = fa.attention(*leaves, return_lse=True)
        (one,) = torch.autograd.grad([out, lse], [leaves[wanted]], upstream_of(out, lse))
        assert torch.equal(one, whole[wanted])


def test_who_makes_the_gradients(device, interpreting):
    """The kernels, but for what they do not do: the reasons say so."""
    target = targets.of(torch.device(device.type, 0 if device.type == "cuda" else None))
    problem, inputs = problem_and_inputs(tensors_of(device, torch.float16), {})
    all_three = (True, True, True, False, False)
    assert not backward_launch.why_not(problem, inputs, all_three, target)
    with_mask = (True, True, True, True, False)
    for shape, reason in ((LENGTHS, ""), ((LENGTHS[0], 1), "one number for all keys"), ((), "one number for all keys")):
        masked = inputs._replace(mask=torch.zeros(shape, device=device, requires_grad=True))
        problem = describe(masked, causal=False, q_start=None, window_left=None, window_right=None, scale=1.0,
                           softcap=None)  # fmt: skip
        assert not backward_launch.why_not(problem, masked, all_three, target)
        told = backward_launch.why_not(problem, masked, with_mask, target)
        assert (reason in told[0]) if reason else not told
        assert fa.explain(*inputs[:3], mask=masked.mask).gradients == told
        run = dispatch.prepare_gradients(problem, masked, inputs.q, with_mask)
        out, lse = fa.attention(*inputs[:3], mask=masked.mask, return_lse=True)
        with torch.no_grad():
            d_mask = run(masked, out, lse, torch.ones_like(out), torch.zeros_like(lse))[3]
        assert d_mask.shape == shape
    double, inputs = problem_and_inputs(tensors_of(device, torch.float64), {})
    assert "float64" in backward_launch.why_not(double, inputs, all_three, target)[0]
    single, inputs = problem_and_inputs(tensors_of(device, torch.float32), {})
    refused = backward_launch.why_not(single, inputs, all_three, target)
    assert bool(refused) == (not interpreting and target.arch != 90)
    assert "gradients by Triton's kernels" in str(fa.explain(*problem_and_inputs(
        tensors_of(device, torch.float16), {})[1][:3]))  # fmt: skip


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu(device):
    q, k, v = (x[0].transpose(0, 1).contiguous().requires_grad_() for x in tensors_of(device, torch.bfloat16))
    cu_q, cu_k = (torch.tensor([0, 30, n], dtype=torch.int32, device=device) for n in LENGTHS)
    step = lambda: (
        fa.attention_varlen(q, k, v, cu_q, cu_k, causal=True, max_seqlen_q=60, max_seqlen_k=60).sum().backward()
    )
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
