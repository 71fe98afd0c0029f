"""Parts of float32 in memory: they sum to the tensor, whatever its strides, and what no tensor has is 0."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs Triton")
from flashattn_lite import target as targets
from flashattn_lite.kernels.interpreter import interpreted
from flashattn_lite.kernels.parts import ALIGNED, Parts


def parts_of(x: torch.Tensor, packed: bool) -> torch.Tensor:
    """[3, batch, heads, rows, columns]"""
    if x.device.type == "cpu" and not targets.interpreting():
        pytest.skip("Triton runs on CPU tensors in its interpreter only (TRITON_INTERPRET=1)")
    parts = Parts(x, packed)
    out, start = parts.empty(), parts.start
    with interpreted():
        start.kernel[start.grid](*parts.arguments(x, out), **start.options)
    return out


@pytest.mark.parametrize("dim", [1, 8, 33, 64, 128])
@pytest.mark.parametrize("kind", ["whole", "rows apart", "transposed", "one for all heads", "packed"])
def test_they_sum_to_the_tensor(kind, dim, device):
    make = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)
    x = {
        "whole": lambda: make(2, 3, 21, dim),
        "rows apart": lambda: make(2, 3, 21, dim + 5)[..., 2 : 2 + dim],
        "transposed": lambda: make(2, dim, 21, 3).transpose(1, 3),
        "one for all heads": lambda: make(2, 1, 21, dim).expand(2, 3, 21, dim),
        "packed": lambda: make(21, 3, dim),
    }[kind]()
    out = parts_of(x, kind == "packed").float()
    assert out.shape[-1] % ALIGNED == 0
    assert (out[..., dim:] == 0).all()  # they are multiplied by
    whole = x.transpose(0, 1)[None] if kind == "packed" else x
    assert torch.equal(out[..., :dim].double().sum(0), whole.double())


def test_what_is_not_finite_shows_in_the_first_part(device):
    x = torch.zeros(1, 1, 4, 8, device=device)
    x[0, 0, :3, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan], device=device)
    x[0, 0, 3, 0] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # a NaN whose first bits are inf's
    high = parts_of(x, False)[0, 0, 0, :, 0].float()
    assert high[0] == torch.inf and high[1] == -torch.inf
    assert not high.isfinite().any()
