"""A mask that transformers need not make: it has what the mask has, and is made for whoever reads it."""

from __future__ import annotations

import copy
import functools
import io

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import flashattn_lite as fa
from flashattn_lite.integrations import bounds, lazy_mask
from flashattn_lite.integrations import padding as paddings
from flashattn_lite.integrations.lazy_mask import LazyMask
from flashattn_lite.integrations.padding import NOTHING_PADDED
from flashattn_lite.integrations.transformers import attention_forward
from tests.test_integrations import assert_close, pair, registered, tokens
from tests.test_integrations_bounds import MODELS, UNLESS_IT_IS_SAID, masking_utils, told_mask, transformers

__all__ = ["registered"]  # a fixture of all that is here
pytestmark = UNLESS_IT_IS_SAID
POSITIONS = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)  # of two sequences in a row


@pytest.fixture
def count(monkeypatch):
    """How often a mask was made, by transformers or by us; on no device none is."""
    masks = []

    def counted(make, *given, **options):
        mask = make(*given, **options)
        if mask is not None and mask.device.type != "meta":
            masks.append(mask)
        return mask

    for module, name in ((lazy_mask, "band_mask"), (masking_utils, "sdpa_mask")):
        monkeypatch.setattr(module, name, functools.partial(counted, getattr(module, name)))
    return lambda: len(masks)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("work", ["prompt", "ones", "second prompt", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_no_mask_of_all_pairs_is_made(device, name, work, mode, count):
    ours, theirs = pair(name, device)
    x, logits = tokens(device), []
    with mode():
        for model in (ours, theirs):
            given = {"prompt": {}, "ones": {"attention_mask": torch.ones_like(x)}}.get(work, {})
            if work == "packed":
                given = {"position_ids": POSITIONS.to(device), "use_cache": False}
            if work == "second prompt":
                cache = model(x[:, :10])[1]
                logits.append(model(x[:, 10:], None, None, cache).logits)
            else:
                logits.append(model(x, **given).logits)
            if model is ours:
                assert count() == 0
    assert_close(*logits)


@pytest.mark.parametrize("padded", ["", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_nor_beside_a_cache_of_a_fixed_size(device, name, padded, count, monkeypatch):
    """Two prompts in room for more; padding of the first, and of the second, behind which there is but room."""
    monkeypatch.setattr(paddings, "WORTH_COPIES", 0)
    x, logits = tokens(device), []
    there = torch.ones_like(x)
    there[0, {"": slice(0), "left": slice(4), "right": slice(-4, None)}[padded]] = 0
    ours, theirs = pair(name, device)
    for model in (ours, theirs):
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        with torch.no_grad():
            for part, end in ((slice(10), 10), (slice(10, 24), 24)):
                out = model(x[:, part], there[:, :end] if padded else None, None, cache).logits
                logits.append(out[there[:, part].bool()])
        assert model is theirs or count() == 0
    for mine, expected in zip(logits[:2], logits[2:], strict=True):
        assert_close(mine, expected)


ALL_SEE_ALL = {"mask_function": masking_utils.bidirectional_mask_function, "allow_is_causal_skip": False,
               "allow_is_bidirectional_skip": True, "q_offset": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("padded", "options", "known"),
    [
        ([3, 0], {}, "behind"),
        ([0, -2], {}, "ends"),
        ([0, -9], {}, "ends"),  # which sees nothing
        ([3, -2], {}, None),  # on either side
        ([0, -2], ALL_SEE_ALL, "ends"),  # as encoders have it, and what looks at them
        ([0, -6], ALL_SEE_ALL, "ends"),
        ([3, 0], ALL_SEE_ALL, None),  # rows of padding see keys
        ([6, 0], {"q_offset": 2, "kv_length": 9}, "behind"),  # two keys behind are not there yet
        ([6, -1], {"q_offset": 2, "kv_length": 9}, "behind"),
        ([0, 0], {"q_offset": 2, "kv_length": 9}, "all"),
    ],
)
def test_which_padding_is_told_by_numbers(padded, options, known):
    there = torch.ones(2, 9, dtype=torch.bool)
    for row, count in enumerate(padded):
        there[row, slice(count) if count > 0 else slice(9 + count, None)] = False
    told = bounds.of(told_mask(attention_mask=there, local_size=None, **options), 5, 9)
    found = None if told is None else told.padding
    assert (found is None) == (known is None)
    if found is not None:
        assert (found.ends is not None, found.behind is not None) == (known == "ends", known == "behind")


def test_padding_of_a_batch_of_one_stays_a_mask_for_more(device):
    there = torch.arange(9, device=device)[None] < 6
    mask = told_mask(batch_size=1, attention_mask=there, device=torch.device(device))
    q, k = torch.randn(3, 2, 5, 16, device=device), torch.randn(3, 2, 9, 16, device=device)
    out, _ = attention_forward(torch.nn.Module(), q, k, k, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask.made())
    assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize("padded", [slice(3), slice(-3, None)])
def test_a_bias_is_added_beside_padding(device, padded, monkeypatch):
    monkeypatch.setattr(paddings, "WORTH_COPIES", 0)
    there = torch.ones(2, 9, dtype=torch.bool, device=device)
    there[0, padded] = False
    mask = told_mask(q_length=9, q_offset=0, attention_mask=there, device=torch.device(device))
    q, bias = torch.randn(2, 4, 9, 16, device=device), torch.randn(1, 4, 9, 9, device=device)
    out, _ = attention_forward(torch.nn.Module(), q, q, q, mask, position_bias=bias)
    both = bias.masked_fill(~mask.made(), float("-inf"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=both).transpose(1, 2)
    assert_close(out[there], expected[there])


READS = {
    "operators": lambda mask: mask & True,
    "a slice": lambda mask: mask[..., :],
    "a copy": lambda mask: mask.clone(),
    "a deep copy": copy.deepcopy,
    "numbers": lambda mask: mask.float().bool(),
    "where it is": lambda mask: mask.cpu(),
    "a function": lambda mask: torch.where(mask, True, False),
    "in a list": lambda mask: torch.cat([mask]),
    "by name": lambda mask: torch.logical_and(input=mask, other=mask),
    "numpy": lambda mask: torch.from_numpy(mask.numpy()),
    "numpy's own": lambda mask: torch.from_numpy(np.asarray(mask)),
    "a list": lambda mask: torch.tensor(mask.tolist()),
    "a file": lambda mask: through_a_file(mask),
    "vmap": lambda mask: torch.vmap(lambda x: x & mask[0, 0])(torch.ones(2, 1, 5, 9, dtype=torch.bool)),
    "made": LazyMask.made,
}


def through_a_file(mask):
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", READS)
def test_who_reads_it_has_the_mask(read, mode, count):
    with mode():
        mask = told_mask()
        expected = masking_utils.sdpa_mask(batch_size=2, q_length=5, kv_length=9, q_offset=4, local_size=3)
        assert type(mask) is LazyMask
        assert (mask.shape, mask.dtype, mask.device) == (expected.shape, expected.dtype, expected.device)
        assert mask.dim() == expected.dim()
        assert not mask.is_floating_point()
        before = count()
        got = READS[read](mask)
        assert type(got) is LazyMask or torch.equal(got, expected)
        assert torch.equal(mask.made(), expected)
        assert torch.equal(mask, expected)
        assert count() == before + 1


def test_what_is_written_into_it_stays():
    for write in (lambda x: x.__setitem__((0, 0, 0, 8), True), lambda x: x[..., 0, :].fill_(True), torch.Tensor.zero_):
        mask, expected = (LazyMask((1, 1, 5, 9), "cpu", (4, None, 0)) for _ in range(2))
        expected = expected.made().clone()
        setattr(mask, bounds.NAME, bounds.Bounds(4, None, 0, NOTHING_PADDED, None, mask._version))
        assert bounds.of(mask, 5, 9)
        for x in (mask, expected):
            write(x)
        assert torch.equal(mask, expected)
        assert bounds.of(mask, 5, 9) is None


def test_attention_takes_it_as_a_mask(device):
    number = torch.tensor([[0] * 4 + [1] * 5, [0] * 9], device=device)
    there = torch.arange(9, device=device) < torch.tensor([[4], [9]], device=device)
    for band, *given in [
        ((0, 3, 0),),
        ((0, 3, 0), number),
        ((0, None, 0), None, there),
        ((0, None, None), None, there),
    ]:
        mask = LazyMask((2, 1, 9, 9), device, band, *given)
        assert mask.stride() == mask.made().stride()
        assert mask.data_ptr() == mask.made().data_ptr()
        q, k = (torch.randn(2, 3, 9, 16, device=device) for _ in range(2))
        for _ in range(2):  # a known call, the second time
            assert torch.equal(fa.attention(q, k, k, mask=mask), fa.attention(q, k, k, mask=mask.made()))


def test_what_was_written_into_it_is_noticed_in_compiled_code():
    known = torch.compile(lambda mask, x: x + (bounds.of(mask, 5, 9) is not None), backend="eager", fullgraph=True)
    mask = told_mask()
    assert known(mask, torch.zeros(1)) == 1
    mask[0, 0, 0, 8] = True
    assert known(mask, torch.zeros(1)) == 0


@pytest.mark.parametrize("work", ["prompts", "packed", "second prompts", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_compiled_by_themselves(name, work, monkeypatch):
    """In one piece, and not anew for each length, cache or pack."""
    torch._dynamo.reset()
    monkeypatch.setattr(paddings, "WORTH_COPIES", 0)
    ours, theirs = pair(name, "cpu")
    frames = CompileCounter()
    for layer in ours.model.layers:
        layer.compile(backend=frames, fullgraph=True)
    compiled = []
    for length in (24, 17, 19, 30):
        x = tokens("cpu", length=length)
        given, there = {}, torch.ones_like(x, dtype=torch.bool)
        if work in ("left", "right"):
            there[0, {"left": slice(5), "right": slice(-5, None)}[work]] = False
            given = {"attention_mask": there.long()}
        if work == "packed":
            parts = [2] * len(compiled) + [10]  # of more and more texts
            positions = torch.cat([torch.arange(n) for n in (*parts, length - sum(parts))])
            given = {"position_ids": positions.expand(2, -1)}
        logits = []
        with torch.no_grad():
            for model in (ours, theirs):
                if work == "second prompts":
                    cache = model(x[:, : length // 2])[1]
                    logits.append(model(x[:, length // 2 :], None, None, cache).logits)
                else:
                    logits.append(model(x, use_cache=False, **given).logits[there])
        assert_close(*logits)
        compiled.append(frames.frame_count)
    assert compiled[-1] == compiled[1] <= 8
