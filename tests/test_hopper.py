"""The Hopper kernel alone, on a GPU and on PyTorch: the laws, rows that must be done again, many tiles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashattn_lite as fa
from flashattn_lite import calls
from flashattn_lite.errors import BackendError
from flashattn_lite.kernels import attention_hopper_launch, tuning_dealt, tuning_hopper, tuning_parts
from flashattn_lite.kernels.operands import takes_tma
from flashattn_lite.reference import attention_reference
from flashattn_lite.testing import ALL_LAWS, PACKED_LAWS, Case, assert_close_to_oracle, check, check_packed
from flashattn_lite.testing.results import assert_same_bits
from tests.exhaustive import SEED, one_in, problems

PROBLEMS = problems(cpu=1, cuda=2)
LENGTH, QUERIES = {"cpu": 500, "cuda": 1500}, {"cpu": 130, "cuda": 1500}
HEADS = {"cpu": 1, "cuda": 2}
HALVES = [torch.float16, torch.bfloat16]
ROUNDED = {"rtol": 2**-6, "atol": 2**-6}  # two bfloat16 eps, of P and of the result; a key or sink too many is more


def in_pieces(x: Tensor) -> Tensor:
    """x as it lies if the kernel takes that; else with zeros after its head dim, up to whole 16-byte pieces."""
    if x.shape[-1] % 8 == 0 and takes_tma(x, heads_packed=True):
        return x
    # To contiguous() any strides are contiguous where a tensor has one row.
    return F.pad(x, (0, -x.shape[-1] % 8)).clone(memory_format=torch.contiguous_format)


def in_rows(mask: Tensor) -> Tensor:
    """The mask with every row at a 16-byte address, as the kernel copies it by TMA; one number for all as it is."""
    return mask if mask.dim() == 0 else F.pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]


def hopper(function: Any, copied: bool = False) -> Any:
    """attention or attention_varlen by this kernel, for any head dim; empty problems are for others.

    `copied`: masks lie so that they are copied.
    """

    def call(q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: float | None = None, **options: Any) -> Any:
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        empty = "auto" if q.is_cuda else "tiled"  # on PyTorch only the Hopper kernel runs on "a GPU"
        backend = empty if min(q.numel(), k.numel(), v.numel()) == 0 else "hopper"
        options = {**options, "scale": scale, "backend": backend}
        if copied and options.get("mask") is not None:
            options["mask"] = in_rows(options["mask"])
        result = function(in_pieces(q), in_pieces(k), in_pieces(v), *args, **options)
        if isinstance(result, tuple):
            return result[0][..., : v.shape[-1]], result[1]
        return result[..., : v.shape[-1]]

    return call


@pytest.fixture(params=["whole", "in parts", "in parts of one block"])
def in_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether few keys are enough to be taken in parts, and by whom; what was prepared otherwise is forgotten."""
    if "one block" in request.param and request.node.callspec.params.get("dim") == 256:
        pytest.skip("two blocks would read each key: as in parts; fewer rows are folded in test_hopper_few_rows.py")
    if request.param != "whole":
        take_parts(monkeypatch, "of one block" in request.param)


def take_parts(patch: pytest.MonkeyPatch, folded: bool, chains: bool = False, few_rows: bool = False) -> None:
    """`chains`: of two parts, of which there are more past that, not longer ones; `few_rows`: so of one consumer, two
    chains at most, and of a cache too.
    """
    patch.setattr(tuning_parts, "HOPPER_SPLITS", ((1 << 20, 128, 256),))
    if chains or few_rows:
        patch.setattr(tuning_parts, "LONG_PARTS", 1 if chains else 1 << 10)
        for module in (tuning_parts, tuning_hopper):
            patch.setattr(module, "SHORT_ROWS", 1 << 20)
            patch.setattr(module, "ONE_TILE_SPLIT", 128 if few_rows else tuning_parts.ONE_TILE_SPLIT)
        for module in (tuning_parts, attention_hopper_launch):
            patch.setattr(module, "FEW_PARTS", 4 if few_rows else 2)
    if few_rows:
        patch.setattr(tuning_parts, "CACHE_SPLIT", 128)
        patch.setattr(tuning_parts, "HALF_TILES", 0)
    patch.setattr(tuning_parts, "FOLDED", 0.0 if folded else math.inf)
    patch.setattr(calls, "_ready", {})


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("law", ALL_LAWS, ids=lambda law: law.__name__)
def test_law(law: Any, seed: int, hopper_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time with row tiles that are dealt out, and masks that are copied."""
    if seed == 1:
        monkeypatch.setattr(attention_hopper_launch, "dealt", tuning_dealt.dealt)
    sizes = {"max_batch": 2, "max_heads": 4, "max_len": 300, "max_dim": 256}
    check(hopper(fa.attention, copied=seed == 1), laws=[law], n=PROBLEMS[hopper_device.type], seed=SEED + seed,
          device=hopper_device, dtypes=HALVES, **sizes)  # fmt: skip


@pytest.mark.parametrize("over", ["the batch", "heads", "both"])
def test_tensors_that_are_expanded(over, hopper_device):
    """Steps of 0 are taken as they are: the bits are those of copies that lie side by side."""
    torch.manual_seed(0)
    one = [1 if over != "heads" else 2, 1 if over != "the batch" else 2]
    q = torch.randn(2, 4, 130, 64, device=hopper_device, dtype=torch.bfloat16)
    k, v = (torch.randn(*one, 300, 64, device=hopper_device, dtype=q.dtype).expand(2, 2, -1, -1) for _ in range(2))
    assert 0 in k.stride()
    options = {"causal": True, "return_lse": True, "backend": "hopper"}
    assert all(map(torch.equal, fa.attention(q, k, v, **options), fa.attention(q, k.clone(), v.clone(), **options)))
    q = q[:1].expand(2, -1, -1, -1)
    assert all(map(torch.equal, fa.attention(q, k, v, **options), fa.attention(q.clone(), k, v, **options)))


@pytest.mark.parametrize(("tokens", "heads_kv"), [(20, 1), (100, 2), (200, 1)])
def test_more_parts_of_long_contexts(tokens, heads_kv, hopper_device):
    """Past FEW_PARTS of them: the oracle, and the bits of one sequence alone."""
    if hopper_device.type != "cuda":
        pytest.skip("tens of thousands of keys take long without a GPU")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 64, device=hopper_device, dtype=torch.bfloat16)
               for heads, n in ((8, tokens), (heads_kv, 70_001), (heads_kv, 70_001)))  # fmt: skip
    lens = torch.tensor([70_001, 33_333], dtype=torch.int32, device=hopper_device)
    options = {"causal": True, "kv_lens": lens, "sinks": torch.linspace(-1, 3, 8, device=hopper_device)}
    out, lse = fa.attention(q, k, v, **options, return_lse=True, backend="hopper")
    assert_close_to_oracle(out, lse, Case(q, k, v, **options))
    options["kv_lens"] = lens[1:]
    alone = fa.attention(q[1:], k[1:], v[1:], **options, return_lse=True, backend="hopper")
    assert_same_bits((out[1:], lse[1:]), alone, "the second of two sequences", None)


@pytest.mark.parametrize("law", PACKED_LAWS, ids=lambda law: law.__name__)
def test_packed_law(law: Any, hopper_device: torch.device) -> None:
    check_packed(hopper(fa.attention_varlen), laws=[law], n=PROBLEMS[hopper_device.type], seed=SEED,
                 device=hopper_device, dtypes=HALVES)  # fmt: skip


GROWTH = {
    "from tile to tile by little": lambda s: torch.linspace(1, 12, s),
    "by 1e4": lambda s: torch.linspace(0, 1e4, s),
    "an outlier late": lambda s: torch.where(torch.arange(s) == s - 200, 60.0, 1.0),
    "a sink": lambda s: torch.where(torch.arange(s) == 0, 60.0, 1.0),
    "everywhere past exact references": lambda s: torch.full((s,), 1e8),
}


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("dim", "growth", "causal"), one_in(3, [64, 128, 256], GROWTH, [False, True]))
def test_scores_far_above_the_reference(dtype, dim, growth, causal, hopper_device):
    """Rows whose first tiles say little about the others; most fail the first time in most of these."""
    if hopper_device.type == "cpu" and (dtype == torch.bfloat16) != (dim == 256):
        pytest.skip("slow without a GPU: a head dim has one dtype there")
    torch.manual_seed(0)
    heads, length = HEADS[hopper_device.type], LENGTH[hopper_device.type]
    q, k, v = (torch.randn(1, heads, length, dim, device=hopper_device) for _ in range(3))
    q = q[:, :, -QUERIES[hopper_device.type] :]
    factor = GROWTH[growth](length).to(hopper_device)[:, None]
    if dtype == torch.float16:
        factor = factor.clamp(max=1e3)
    q, k, v = (x.to(dtype) for x in (q, k * factor, v))
    out, lse = fa.attention(q, k, v, causal=causal, return_lse=True, backend="hopper")
    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), causal=causal, return_lse=True)
    eager = attention_reference(q, k, v, causal=causal)
    budget = 2 * (eager.double() - exact).abs().max() + 4 * torch.finfo(dtype).eps
    assert (out.double() - exact).abs().max() <= budget
    # A score is a sum whose terms cancel: its float32 error is in eps of their magnitudes, not of the sum.
    magnitude = (q.double().abs() @ k.double().abs().transpose(2, 3)).amax(-1) / math.sqrt(dim)
    assert ((lse.double() - exact_lse).abs() <= 1e-4 + 8 * torch.finfo(torch.float32).eps * magnitude).all()


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_values_so_large_that_only_the_maximum_keeps_their_sum(dim, hopper_device):
    """At the first reference P V is infinite although l is not: done again with a clean V it still is, then exactly."""
    heads, lengths = HEADS[hopper_device.type], (QUERIES[hopper_device.type], 1500)
    q, k = (torch.zeros(1, heads, n, dim, device=hopper_device, dtype=torch.bfloat16) for n in lengths)
    q[..., 0] = 1
    k[:, :, 300:1300, 0] = 10  # of scores 0 the first tiles, of 10 a thousand keys between them
    v = torch.full_like(k, 1e35)
    out = fa.attention(q, k, v, scale=1.0, backend="hopper")
    torch.testing.assert_close(out, torch.full_like(q, 1e35), rtol=1e-2, atol=0)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bias"),
    one_in(2, HALVES, [-30.0, -200.0, -1e9, -1e10, -1e30, torch.finfo(torch.float32).min]),
    ids=str,
)
def test_a_bias_hides_nothing_that_v_holds_and_shows_nothing(bias, dtype, copied, hopper_device):
    """Row 3 looks at all keys through the bias, rows of the second entry at the first key, which row 5 may not see."""
    if hopper_device.type == "cpu" and copied != (dtype == torch.bfloat16):
        pytest.skip("slow without a GPU: a dtype has one way of copying there")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, n, 64, device=hopper_device).to(dtype) for n in (20, 200, 200))
    mask = torch.zeros(2, 1, 20, 200, device=hopper_device)
    mask[:, :, 3], mask[1, :, :, 0], mask[:, :, 5, 0] = bias, bias, -math.inf
    for value in (math.inf, -math.inf, math.nan):
        v[:, :, 0, 7] = value
        out = hopper(fa.attention, copied)(q, k, v, mask=mask)
        exact = attention_reference(q.double(), k.double(), v.double(), mask=mask.double())
        assert torch.equal(out.isfinite(), exact.isfinite())
        torch.testing.assert_close(out[:, :, 5].double(), exact[:, :, 5], atol=0.03, rtol=0)


@pytest.mark.gpu
@pytest.mark.hopper
def test_more_tiles_than_one_look_takes():
    """Over 512 row tiles a multiprocessor, some with rows to do again: a second sweep follows the first."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count * 3 * 520 // 64
    torch.manual_seed(0)
    q, k, v = (torch.randn(64, heads, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    clean = fa.attention(q, k, v, causal=True, backend="hopper")
    v[::7, ::5, 4] = float("nan")
    out = fa.attention(q, k, v, causal=True, backend="hopper")
    assert torch.equal(out[..., :4, :], clean[..., :4, :])
    assert out[::7, ::5, 4:].isnan().all()
    assert torch.equal(out[1::7], clean[1::7])
    exact = attention_reference(*(x[:2].double() for x in (q, k, v)), causal=True)
    torch.testing.assert_close(out[1].double(), exact[1], atol=0.03, rtol=0)


@pytest.mark.parametrize("group", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("length", [1, 3, 17, 32])
def test_packed_heads_compute_the_same(group, length, hopper_device):
    """The query heads of one key/value head in one tile, also where their number is no power of two."""
    torch.manual_seed(0)
    q = torch.randn(2, 2 * group, length, 128, device=hopper_device, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 700, 128, device=hopper_device, dtype=torch.bfloat16) for _ in range(2))
    out, lse = fa.attention(q, k, v, causal=True, return_lse=True, backend="hopper")
    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), causal=True, return_lse=True)
    torch.testing.assert_close(out.double(), exact, atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-6)


def test_shapes_that_it_does_not_take_say_why(hopper_device):
    x = torch.zeros(1, 1, 4, 20, device=hopper_device, dtype=torch.bfloat16)
    with pytest.raises(BackendError, match=r"rows of whole 16-byte pieces.*head dim 20"):
        fa.attention(x, x, x, backend="hopper")
    assert fa.explain(x, x, x).backend == "triton"


def test_sinks_beside_which_a_row_weighs_nothing_hide_no_infinity(hopper_device):
    """Infinities are counted by weights of 1, of which the sink's part must not be taken."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, h, n, 64, generator=generator).half().to(hopper_device) for h, n in ((2, 16), (1, 140), (1, 140))
    )
    v[:, :, 5, 3], v[:, :, 40, 5] = math.inf, -math.inf
    sinks = torch.tensor([40.0, 1.0], device=hopper_device)
    out = fa.attention(q, k, v, sinks=sinks, backend="hopper")
    exact = attention_reference(q.double(), k.double(), v.double(), sinks=sinks)
    torch.testing.assert_close(out.double(), exact, **ROUNDED, equal_nan=True)


def test_a_copied_mask_of_one_entry_serves_the_batch(hopper_device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, n, 64, generator=generator).bfloat16().to(hopper_device) for n in (100, 128, 128))
    mask = torch.randn(1, 1, 100, 128, generator=generator).bfloat16().to(hopper_device)
    out = fa.attention(q, k, v, mask=mask, backend="hopper")
    exact = attention_reference(q.double(), k.double(), v.double(), mask=mask.double())
    torch.testing.assert_close(out.double(), exact, **ROUNDED)


@pytest.mark.parametrize("growth", [(0.5, 3), (3, 0.5)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_v_holds_changes_no_other_column(dtype, growth, hopper_device):
    """To the bit: such rows are done again at the references of the first pass, which later scores pass by."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator).to(hopper_device, dtype) for n in (100, 500, 500))
    k *= torch.linspace(*growth, 500, device=hopper_device)[:, None].to(dtype)
    options = {"causal": True, "return_lse": True, "backend": "hopper"}
    out, lse = fa.attention(q, k, v, **options)
    v[:, :, 20, 0], v[:, :, 250, 1] = math.inf, math.nan
    again, again_lse = fa.attention(q, k, v, **options)
    assert not again[..., :2].isfinite().any()
    assert torch.equal(again[..., 2:], out[..., 2:]) and torch.equal(again_lse, lse)


def test_a_mask_hides_keys_that_are_nan(hopper_device):
    """By -inf, which the first pass adds to what it hides."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator).bfloat16().to(hopper_device) for n in (100, 200, 200))
    mask = torch.randn(1, 1, 100, 200, generator=generator).to(hopper_device)
    mask[..., 70] = -math.inf
    exact = attention_reference(q.double(), k.double(), v.double(), mask=mask.double())
    k[:, :, 70] = math.nan
    out = fa.attention(q, k, v, mask=mask, backend="hopper")
    torch.testing.assert_close(out.double(), exact, **ROUNDED)


@pytest.mark.parametrize("options", [{}, {"causal": True, "q_start": 60}], ids=str)
def test_a_mask_that_is_loaded(options, hopper_device):
    """Its rows are at odd addresses. Of causal rows the first consumer's see nothing of the first tile."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 128, generator=generator).bfloat16().to(hopper_device) for n in (128, 201, 201))
    mask = torch.randn(1, 1, 128, 201, generator=generator).to(hopper_device)
    out, lse = fa.attention(q, k, v, mask=mask, **options, return_lse=True, backend="hopper")
    assert_close_to_oracle(out, lse, Case(q, k, v, mask=mask, **options))
