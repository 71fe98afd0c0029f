"""Within torch's context_parallel, which stands in place of torch's attention, a process has a share of the keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F

import flashattn_lite as fa
from flashattn_lite.integrations.transformers import attention_forward

experimental = pytest.importorskip("torch.distributed.tensor.experimental")


@pytest.fixture
def parallel() -> Iterator[AbstractContextManager[None]]:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        yield experimental.context_parallel(mesh, buffers=[torch.zeros(1, 2, 8, 4)], buffer_seq_dims=[2])
    finally:
        dist.destroy_process_group()


def test_ours_does_not_take_its_place(parallel):
    torchs = F.scaled_dot_product_attention
    with parallel:
        shared = F.scaled_dot_product_attention
        assert shared is not torchs
        for put_in in (lambda: fa.replace_sdpa().__enter__(), fa.install):
            with pytest.raises(
                NotImplementedError, match="scaled_dot_product_attention: torch's context_parallel stands"
            ):
                put_in()
        assert F.scaled_dot_product_attention is shared
    assert F.scaled_dot_product_attention is torchs


def test_what_was_installed_before_stays(parallel):
    report = fa.install()
    try:
        ours = F.scaled_dot_product_attention
        with parallel, pytest.raises(NotImplementedError, match="context_parallel"):
            fa.install()  # which does not stand there now
        assert F.scaled_dot_product_attention is ours and fa.install() is report
        F.scaled_dot_product_attention(*[torch.randn(1, 2, 3, 8)] * 3)
        assert report.calls == 1
    finally:
        fa.uninstall()


def test_a_model_of_transformers_is_told(parallel):
    q, layer = torch.randn(1, 2, 3, 16), torch.nn.Module()
    out, _ = attention_forward(layer, q, q, q, None)
    with parallel, pytest.raises(NotImplementedError, match="attn_implementation: within torch's context_parallel"):
        attention_forward(layer, q, q, q, None)
    assert torch.equal(attention_forward(layer, q, q, q, None)[0], out)
