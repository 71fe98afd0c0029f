"""Masks of transformers with what is known of them: kernels visit fewer keys, and nothing else changes."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import flashattn_lite as fa
from flashattn_lite.integrations import bounds, packing
from flashattn_lite.integrations import padding as paddings
from flashattn_lite.integrations import transformers as integration
from flashattn_lite.target import interpreting
from tests import test_integrations
from tests.test_integrations import SMALL, assert_close, pair, registered, tokens

__all__ = ["registered"]  # a fixture of all that is here

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
masking_utils = pytest.importorskip("transformers.masking_utils")
UNLESS_IT_IS_SAID = [
    pytest.mark.skipif(interpreting(), reason="whole models take too long through the interpreter"),
    pytest.mark.skipif(
        "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters,
        reason="this transformers does not say where queries begin",
    ),
]
pytestmark = UNLESS_IT_IS_SAID
WINDOW = test_integrations.WINDOW["sliding_window"]
# Models of tests/test_integrations.py and the windows of their two layers.
MODELS = {
    "llama": (None, None),
    "mistral": (WINDOW, WINDOW),
    "gemma2": (WINDOW, None),
    "gpt_oss": (WINDOW, None),
}


@pytest.fixture
def calls(monkeypatch):
    """What `attention` is asked for, and `attention_varlen`."""
    asked = []

    def spy(*tensors, **options):
        asked.append({"packed": len(tensors) > 3, **options})
        return (fa.attention_varlen if len(tensors) > 3 else fa.attention)(*tensors, **options)

    monkeypatch.setattr(integration, "attention", spy)
    monkeypatch.setattr(packing, "attention_varlen", spy)
    return asked


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("padded", ["", "left", "left of little", "right", "ones"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_visit_what_their_mask_may_show(device, name, padded, mode, calls, monkeypatch):
    monkeypatch.setattr(paddings, "WORTH_COPIES", 2 * 64 * 24 * 24 + (padded == "left of little"))
    ours, theirs = pair(name, device)
    x = tokens(device)
    mask = torch.ones_like(x)
    if padded not in ("", "ones"):
        mask[0, slice(-9, None) if padded == "right" else slice(9)] = 0
    given = {"attention_mask": mask} if padded else {}
    with mode():
        mine, expected = (model(x, **given).logits[mask.bool()] for model in (ours, theirs))
    assert_close(mine, expected)
    for options, window in zip(calls, MODELS[name], strict=True):
        assert (options.get("mask") is None) == (padded != "left of little")
        assert options["packed"] == (padded == "left")
        lens = options.get("kv_lens")
        assert (lens is not None) == (padded in ("left", "right"))
        assert lens is None or lens.tolist() == ([0, 15, 0, 24] if padded == "left" else [15, 24])
        if lens is None and window is None and padded != "left of little":
            assert options["causal"]
        else:
            assert options["window"] == (window and window - 1, 0)
        assert options.get("q_start", 0) == 0


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_second_prompt_beside_a_cache(device, name, padded, calls, monkeypatch):
    monkeypatch.setattr(paddings, "WORTH_COPIES", 0)
    ours, theirs = pair(name, device)
    x = tokens(device)
    mask = torch.ones_like(x)
    mask[0, : 3 * padded] = 0
    logits = []
    with torch.no_grad():
        for model in (ours, theirs):
            cache = model(x[:, :10], attention_mask=mask[:, :10])[1]
            logits.append(model(x[:, 10:], mask, None, cache).logits)  # versions name the cache by one name or another
    assert_close(*logits)
    for options, window in zip(calls[2:], MODELS[name], strict=True):
        kept = 10 if window is None else WINDOW - 1  # of the keys before
        assert options.get("mask") is None
        assert options["packed"] == (padded and window is None)  # a window begins behind the padding
        assert options["packed"] or options["q_start"] == kept
        assert options["window"] == (window and window - 1, 0)


@pytest.mark.skipif(not hasattr(transformers, "ModernBertConfig"), reason="not in this release")
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_whose_window_looks_both_ways(device, padded, calls):
    mask = torch.ones(2, 24, dtype=torch.long, device=device)
    mask[0, 15:] = not padded
    outs = []
    for implementation in ("attn_lite", "eager"):
        sizes = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "pad_token_id")}
        config = transformers.ModernBertConfig(
            num_hidden_layers=3, num_attention_heads=4, local_attention=8, attn_implementation=implementation, **sizes
        )
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config).to(device).eval()
        with torch.no_grad():
            outs.append(model(tokens(device), attention_mask=mask).last_hidden_state[mask.bool()])
    assert_close(*outs)
    windows = [options.get("window", (None, None)) for options in calls]
    assert windows == [(None, None), (4, 4), (4, 4)]  # every third layer sees all
    assert [options["mask"] is None and not options["packed"] for options in calls] == [True] * 3
    assert [options.get("kv_lens") is not None for options in calls] == [padded] * 3


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_compiled(device, name, padded, calls):
    """Nobody reads a mask there: where one is given, it is kept."""
    ours, theirs = pair(name, device)
    torch._dynamo.reset()  # models of other tests count against the limit of the same code
    compiled = torch.compile(ours, backend="eager", fullgraph=True, dynamic=True)
    for length in (24, 17):
        x = tokens(device, length=length)
        given = {"attention_mask": torch.ones_like(x)} if padded else {}
        with torch.no_grad():
            assert_close(compiled(x, **given).logits, theirs(x, **given).logits)
    for options, window in zip(calls, MODELS[name] * 2, strict=True):
        assert (options["mask"] is None) == (not padded)
        # Which versions of transformers make a mask where causality is all differs.
        assert options.get("causal") or options["window"] == (window and window - 1, 0)
        assert window is None or "window" in options


def band(bounds_, len_q, len_k):
    at = torch.arange(len_k) - torch.arange(len_q)[:, None] - bounds_.q_start
    sides = [len_k + len_q + abs(bounds_.q_start) if x is None else x for x in (bounds_.left, bounds_.right)]
    return (at <= sides[1]) & (at >= -sides[0])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_mask_shows_nothing_beyond_its_bounds(data):
    config = transformers.LlamaConfig()
    config.sliding_window = data.draw(st.integers(1, 12))
    chunk = data.draw(st.sampled_from([None, config.sliding_window, 5]))
    len_q, before, first = (data.draw(st.integers(low, 12)) for low in (1, 0, 0))
    first = min(first, before)
    len_k = len_q + before - first + data.draw(st.integers(0, 3))
    padding = data.draw(st.sampled_from([None, "ones", "some", "left", "right", "short"]))
    count = first + len_k - (padding == "short")
    rows = torch.tensor([data.draw(st.lists(st.booleans(), min_size=count, max_size=count)) for _ in range(2)])
    if padding in ("left", "right"):
        rows = rows.sort(1, descending=padding == "right")[0]
    padding = None if padding is None else rows if padding in ("some", "left", "right") else torch.ones(2, count).bool()
    kind = data.draw(st.sampled_from(["causal", "all", "window", "window both ways", "chunk"]))
    function, local = masking_utils.causal_mask_function, None
    if kind == "all":
        function = masking_utils.bidirectional_mask_function
    elif kind == "window":
        local = config.sliding_window
        function = masking_utils.sliding_window_causal_mask_function(local)
    elif kind == "window both ways":
        local = config.sliding_window
        function = masking_utils.sliding_window_bidirectional_mask_function(local)
    elif kind == "chunk":
        local = chunk or config.sliding_window + 1
        function = masking_utils.chunked_causal_mask_function(local, torch.zeros(2, dtype=torch.int64))
    if chunk:
        config.attention_chunk_size = chunk
    join = data.draw(st.sampled_from([None, None, None, None, masking_utils.and_masks, masking_utils.or_masks]))
    if join is not None:
        function = join(function, lambda b, h, q, k: (q + k) % 3 == 0)
    options = {"local_size": local} if local else {}
    causal = kind not in ("all", "window both ways")
    options["allow_is_causal_skip"], options["allow_is_bidirectional_skip"] = (
        join is None and way for way in (causal, not causal)
    )
    options |= {"batch_size": 2, "q_length": len_q, "kv_length": len_k, "q_offset": before, "kv_offset": first}
    options |= {"mask_function": function, "attention_mask": padding, "device": torch.device("cpu")}
    mask, theirs = integration.attention_mask(config=config, **options), masking_utils.sdpa_mask(**options)
    assert (mask is None) == (theirs is None)
    assert mask is None or torch.equal(mask, theirs)
    told = bounds.of(mask, len_q, len_k)
    if told is None:
        assert mask is None or len_q == 1 or join is not None or (chunk and not causal)
        return
    seen = band(told, len_q, len_k)
    assert not (mask & ~seen).any()
    if told.padding is not None:
        assert bool((mask == seen & keys_of(told.padding, len_k)).all())
    else:
        assert kind == "chunk" or padding is not None or ("window" in kind and chunk)


def keys_of(padding, len_k):
    """(B or 1, 1, 1, S): which keys the numbers leave."""
    at = torch.arange(len_k)
    if padding.ends is not None:
        return (at < padding.ends[:, None])[:, None, None]
    if padding.behind is not None:
        starts = padding.behind.cu_seqlens_k.diff()[::2, None]
        assert torch.equal(padding.behind.kv_lens[1::2], padding.behind.keys - starts[:, 0])
        return (at >= starts)[:, None, None]
    return torch.ones(1, 1, 1, len_k, dtype=torch.bool)


def told_mask(**options):
    given = {"batch_size": 2, "q_length": 5, "kv_length": 9, "q_offset": 4, **options}
    given = {"mask_function": masking_utils.causal_mask_function, "device": torch.device("cpu"), **given}
    return integration.attention_mask(config=transformers.LlamaConfig(), **given)


def test_what_was_done_to_a_mask_since_is_noticed():
    mask = told_mask()
    assert bounds.of(mask, 5, 9) == (4, None, 0, (None, None, None), None, mask._version)
    assert bounds.of(mask, 5, 8) is None
    for other in (mask[:, :, -5:], mask[..., :9], mask | False, mask.clone(), mask.float()):
        assert bounds.of(other, 5, 9) is None
    mask[:1, ..., 0, 8] = True
    assert bounds.of(mask, 5, 9) is None
    with torch.inference_mode():
        mask = told_mask()
        assert bounds.of(mask, 5, 9)
        mask[:1, ..., 0, 8] = True
        assert bounds.of(mask, 5, 9) is None


def test_padding_is_not_read_where_others_may_run_what_is_made():
    padding = torch.ones(2, 9, dtype=torch.bool)
    assert bounds.of(told_mask(attention_mask=padding), 5, 9).padding == (None, None, None)
    seen = []

    def traced(x):
        seen.append(paddings.padding_of(x, 0, 9, 9, None))
        return x.logical_not()

    torch.jit.trace(traced, padding, check_trace=False)
    torch.vmap(traced)(padding)
    torch.compile(traced, backend="eager")(padding)
    traced(padding.to("meta"))
    assert seen == [None] * len(seen)
    assert len(seen) >= 4


def test_what_is_not_known():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.jit, "is_tracing", lambda: True)  # into a graph that others may run
        assert bounds.of(told_mask(q_offset=torch.tensor(4)), 5, 9) is None  # of a static cache
    assert bounds.of(told_mask(q_offset=torch.tensor(4)), 5, 9).q_start == 4
    bidirectional = told_mask(mask_function=masking_utils.bidirectional_mask_function)  # but may be skipped as causal
    assert bounds.of(bidirectional, 5, 9) is None
    chunks = masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))
    assert bounds.of(told_mask(mask_function=chunks, local_size=3), 5, 9)[:4] == (4, None, 0, None)
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, 0] = False
    mask = told_mask(q_length=1, q_offset=8, attention_mask=padding)  # not worth a look in each step
    assert mask is not None
    assert bounds.of(mask, 1, 9) is None


def test_a_layer_compiled_by_itself_takes_the_mask_as_it_is():
    """What was told outside can't be looked at again there, and what changes with a cache would compile it anew."""
    frames = CompileCounter()

    @torch.compile(backend=frames)
    def known(mask, x):
        return x + (bounds.of(mask, 5, x.shape[0]) is not None)

    for before in range(4, 16):
        padding = torch.arange(5 + before) % torch.tensor([[3], [2]]) != 0
        mask = told_mask(kv_length=5 + before, q_offset=before, attention_mask=padding)
        assert not known(mask, torch.zeros(5 + before)).any()
    assert frames.frame_count <= 2
