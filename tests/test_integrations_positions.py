"""Packed sequences that positions tell: read off the mask that transformers makes of them, and taken without it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashattn_lite.integrations import bounds, packing
from flashattn_lite.integrations import transformers as integration
from tests.test_integrations import assert_close, pair, registered, tokens
from tests.test_integrations_bounds import MODELS, UNLESS_IT_IS_SAID, band

__all__ = ["registered"]  # a fixture of all that is here
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
masking_utils = pytest.importorskip("transformers.masking_utils")
pytestmark = UNLESS_IT_IS_SAID


def packed_parts(window, number, extra=None):
    """What transformers joins to the function of such a mask, of positions that start anew."""
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    for join, other in [extra] if extra else []:
        function = join(function, other)
    first = torch.ones_like(number, dtype=torch.bool)
    first[:, 1:] = number[:, 1:] != number[:, :-1]
    at = torch.arange(number.shape[1]).expand_as(number)
    positions = at - torch.where(first, at, 0).cummax(1).values
    assert torch.equal(masking_utils.find_packed_sequence_indices(positions), number)
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # not in older releases
        function = masking_utils.remap_positions_for_packed_sequence(function, positions)
    return function, masking_utils.packed_sequence_mask_function(number)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_packed_sequences_are_read_off_a_mask(data):
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 12))
    rows = [data.draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(batch)]
    steps = torch.tensor(rows)
    steps[:, 0], steps[0, 1] = False, True  # two sequences at least: else transformers makes no such mask
    number, window = steps.cumsum(1), data.draw(st.sampled_from([None, 1, 3]))
    config = transformers.LlamaConfig()
    config.sliding_window = window
    options = {"local_size": window} if window else {}
    options |= {"batch_size": batch, "q_length": length, "kv_length": length, "q_offset": 0}
    options |= {"allow_is_causal_skip": False, "device": torch.device("cpu"), "config": config}
    make = lambda function, padding=None: integration.attention_mask(
        mask_function=function, attention_mask=padding, **options
    )
    parts = packed_parts(window, number)
    mask = make(masking_utils.and_masks(*parts))
    assert torch.equal(mask, masking_utils.sdpa_mask(mask_function=masking_utils.and_masks(*parts), **options))
    told = bounds.of(mask, length, length)
    assert told.padding is None
    assert told.sequences.ends == told.sequences.cu_seqlens.tolist()
    apart = torch.block_diag(*[torch.ones(b - a, b - a) for a, b in itertools.pairwise(told.sequences.ends)]) == 1
    apart = torch.stack([apart[i : i + length, i : i + length] for i in range(0, batch * length, length)])
    assert torch.equal(mask[:, 0], apart & band(told, length, length))
    assert told.sequences.longest == apart.sum(-1).max()
    even = lambda b, h, q, k: (q + k) % 2 == 0
    unknown = [masking_utils.or_masks(*parts), masking_utils.and_masks(*parts, even)]
    unknown.append(masking_utils.and_masks(*packed_parts(2 if window else 3, number)))
    for join in (masking_utils.and_masks, masking_utils.or_masks):
        unknown.append(masking_utils.and_masks(*packed_parts(window, number, (join, even))))
        unknown.append(join(masking_utils.and_masks(*parts), even))
    for function in unknown:
        assert bounds.of(make(function), length, length) is None
    padding = torch.ones(batch, length, dtype=torch.bool)  # which transformers never joins to it
    assert bounds.of(make(masking_utils.and_masks(*parts), padding), length, length) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.jit, "is_tracing", lambda: True)  # into a graph that others may run
        assert bounds.of(make(masking_utils.and_masks(*parts)), length, length) is None


@pytest.mark.parametrize("lengths", ["", "same", "other"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"gpt_oss"}))  # which hands no positions to its masks
def test_positions_that_start_anew(device, name, batch, lengths, monkeypatch):
    if lengths and batch > 1:
        pytest.skip("lengths come with a batch of one")
    packed, varlen = [], packing.attention_varlen
    monkeypatch.setattr(
        packing, "attention_varlen", lambda *args, **options: packed.append(0) or varlen(*args, **options)
    )
    x, results = tokens(device, batch=batch), []
    positions = torch.cat([torch.arange(n) for n in (10, 14)] + [torch.arange(n) for n in (3, 9, 12)])
    positions = positions.view(2, 24)[:batch].to(device)
    cu = torch.tensor([0, 10, 24] if lengths == "same" else [0, 24], dtype=torch.int32, device=device)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 24, "max_length_k": 24} if lengths else {}
    for model, more in zip(pair(name, device), (given, {}), strict=True):
        logits = model(x, position_ids=positions, use_cache=False, **more).logits
        logits.square().sum().backward()
        results.append((logits.detach(), model.get_input_embeddings().weight.grad))
    for mine, expected in zip(*results, strict=True):
        assert_close(mine, expected)
    assert len(packed) == (0 if lengths == "other" else 2)
