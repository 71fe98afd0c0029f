"""Keys that a model's indexer chose: the mask that they become, and models that choose against their own attention."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashattn_lite as fa
from flashattn_lite.integrations import transformers as integration
from flashattn_lite.integrations.masks import chosen_mask
from flashattn_lite.target import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="the same without TRITON_INTERPRET=1")
LATENT = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 32, "index_topk": 5, "index_head_dim": 32, "index_n_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
BLOCKS = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 32, "dense_intermediate_size": 64,
    "shared_intermediate_size": 32, "num_hidden_layers": 2, "layer_types": ["minimax_m3_sparse"] * 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2,
    "num_local_experts": 4, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
MODELS = {
    "DeepSeek-V3.2": ("DeepseekV32", LATENT),
    "GLM-5": ("GlmMoeDsa", LATENT),
    "MiniMax-M3": ("MiniMaxM3VLText", BLOCKS),
}


@given(st.data())
def test_the_mask_has_the_keys_that_were_chosen(data):
    draw = lambda least, most: data.draw(st.integers(least, most))
    batch, groups, of_group, rows, keys, size = draw(1, 2), draw(1, 3), draw(1, 2), draw(1, 4), draw(1, 9), draw(1, 4)
    seed = torch.Generator().manual_seed(draw(0, 1000))
    blocks = -(-keys // size)
    make = lambda *shape, most: torch.randint(-1, most, shape, generator=seed, dtype=torch.int32)
    indices = make(batch, rows, draw(1, 5), most=keys) if draw(0, 1) else None
    of_blocks = make(batch, groups, rows, draw(1, 3), most=blocks) if draw(0, 1) else None
    module = types.SimpleNamespace(indexer=types.SimpleNamespace(block_size=size))
    query, key = torch.empty(batch, groups * of_group, rows, 8), torch.empty(batch, groups, keys, 8)
    mask = chosen_mask(module, query, key, indices, of_blocks)
    if indices is None and of_blocks is None:
        assert mask is None
        return
    mask = mask.expand(batch, groups * of_group, rows, keys)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, mask.shape)).reshape(-1, 4).tolist():
        there = indices is None or j in indices[b, i]
        there &= of_blocks is None or j // size in of_blocks[b, h // of_group, i]
        assert mask[b, h, i, j] == there


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("rows", [1, 7])
def test_what_a_mask_and_causality_hide_stays_hidden(kind, rows, device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 16, device=device) for n in (rows, 7, 7))
    seen = torch.rand(2, 1, rows, 7, device=device) < 0.7
    seen[..., 0] = True
    given_mask = {"none": None, "bool": seen, "float": torch.randn(2, 1, rows, 7, device=device)}[kind]
    indices = torch.rand(2, rows, 7, device=device).argsort(-1)[..., :4]
    indices[..., 0] = 0
    module = types.SimpleNamespace(is_causal=True)
    out, _ = integration.attention_forward(module, q, k, v, given_mask, indices=indices)
    hidden = ~torch.zeros(2, rows, 7, dtype=torch.bool, device=device).scatter(-1, indices, True)[:, None]
    if kind == "none" and rows > 1:
        hidden = hidden | torch.ones(rows, 7, dtype=torch.bool, device=device).triu(1)
    bias = torch.zeros(2, 1, rows, 7, device=device) if kind != "float" else given_mask
    bias = bias.masked_fill(hidden | (~seen if kind == "bool" else False), -torch.inf)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    torch.testing.assert_close(out, exact.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_choose_keys(name, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    fa.integrations.transformers.register()
    model_name, options = MODELS[name]
    Config = getattr(transformers, f"{model_name}Config", None)
    if Config is None:
        pytest.skip(f"this transformers has no {model_name}")
    ids = torch.randint(3, 99, (2, 23), generator=torch.Generator().manual_seed(1))
    padded = torch.ones_like(ids)
    padded[0, :6] = 0
    results, hidden = [], []

    def noted(*given):
        mask = chosen_mask(*given)
        hidden.append(mask is not None and not mask.all().item())
        return mask

    monkeypatch.setattr(integration, "chosen_mask", noted)
    for implementation in ("attn_lite", "eager"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(Config(**options), attn_implementation=implementation)
        with torch.no_grad():
            for parameter in model.parameters():  # scores that are not all alike
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape) * (parameter.shape[-1] ** -0.5))
        model = model.eval()
        with torch.no_grad():
            whole, of_padded = model(ids).logits, model(ids, attention_mask=padded).logits[padded.bool()]
            answer = model.generate(ids, attention_mask=padded, max_new_tokens=6, do_sample=False, eos_token_id=None)
        results.append((whole, of_padded, answer))
    assert hidden and all(hidden)  # each layer, in each step
    (ours, ours_padded, our_answer), (theirs, theirs_padded, their_answer) = results
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours_padded, theirs_padded, rtol=1e-4, atol=1e-4)
    assert torch.equal(our_answer, their_answer)


def test_the_choice_is_compiled_into_one_graph(device):
    q = torch.randn(1, 2, 5, 16, device=device)
    indices = torch.randint(0, 5, (1, 5, 3), device=device)

    def attend(q, indices):
        return integration.attention_forward(torch.nn.Module(), q, q, q, None, is_causal=False, indices=indices)[0]

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, indices), attend(q, indices))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"indices": torch.zeros(1, 3, 2).long()}, ValueError, "indices: must be (B, L, count) with (B, L) = (1, 4)"),
        ({"indices": torch.zeros(1, 1, 4, 2).long()}, ValueError, "indices: must be (B, L, count)"),
        ({"block_indices": torch.zeros(1, 2, 3, 2).long()}, ValueError, "block_indices: must be (B, groups of 2 heads"),
        ({"block_indices": torch.zeros(1, 3, 4, 2).long()}, ValueError, "block_indices: must be (B, groups of 2 heads"),
    ],
)
def test_choices_of_another_shape_are_refused(given, error, text):
    q, module = torch.randn(1, 2, 4, 8), torch.nn.Module()
    module.indexer = types.SimpleNamespace(block_size=2)
    with pytest.raises(error) as raised:
        integration.attention_forward(module, q, q, q, None, **given)
    assert text in str(raised.value)


def test_blocks_of_unknown_length_are_refused():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=r"^block_indices: the module's indexer must say its block_size"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, block_indices=torch.zeros(1, 2, 4, 1).long())


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_what_is_past_the_keys_is_refused(name):
    """Not left out: that is what numbers below 0 are for."""
    module, x = torch.nn.Module(), torch.randn(1, 2, 9, 16)
    module.is_causal, module.indexer = False, types.SimpleNamespace(block_size=3)
    count, shape = (9, (1, 9, 2)) if name == "indices" else (3, (1, 1, 9, 2))
    for wrong in (count, count + 1):
        there = torch.tensor([0, wrong]).expand(shape)
        with pytest.raises(ValueError, match=f"^{name}: must be below {count}; got {wrong}"):
            integration.attention_forward(module, x, x, x, None, **{name: there})
