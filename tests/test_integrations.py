"""Models of transformers with our attention against the same models with their own, plain one."""

from __future__ import annotations

import inspect
import itertools
import types

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.integrations import packing
from flashattn_lite.integrations import padding as paddings
from flashattn_lite.integrations import transformers as integration
from flashattn_lite.target import interpreting

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.skipif(interpreting(), reason="whole models take too long through the interpreter")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 8}
BY_TURNS = ["sliding_attention", "full_attention"]
DECODERS = {  # grouped heads; windows; soft caps and windows by turns; sinks and windows by turns
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", WINDOW),
    "gemma2": ("Gemma2Config", {**WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "gpt_oss": ("GptOssConfig", {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "flint": ("FlintConfig", {**WINDOW, "layer_types": BY_TURNS}),
    "granite_swa": ("GraniteSWAConfig", {**WINDOW, "layer_types": BY_TURNS}),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        {**WINDOW, "layer_types": BY_TURNS, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "mimo_v2_flash": ("MiMoV2FlashConfig", {**WINDOW, "layer_types": BY_TURNS, "mlp_layer_types": ["dense"] * 2}),
    "vaultgemma": ("VaultGemmaConfig", {**WINDOW, "layer_types": BY_TURNS, "query_pre_attn_scalar": 16}),
}
# Which releases of transformers have them differs.
DECODERS = {name: given for name, given in DECODERS.items() if hasattr(transformers, given[0])}


@pytest.fixture(scope="module", autouse=True)
def registered():
    fa.integrations.transformers.register()
    fa.integrations.transformers.register()  # once more does nothing


def pair(name, device, dtype=torch.float32):
    """(ours, theirs): one model, twice, with the same weights."""
    config_name, options = DECODERS[name]
    models = []
    for implementation in ("attn_lite", "eager"):
        config = getattr(transformers, config_name)(**SMALL, **options)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        with torch.no_grad():
            for parameter in model.parameters():  # scores that are not all alike
                parameter.copy_(torch.randn(parameter.shape) * (parameter.shape[-1] ** -0.5))
        models.append(model.to(device, dtype).eval())
    assert models[0].config._attn_implementation == "attn_lite"
    return models


def assert_close(mine, expected):
    """Float32 through two layers: up to 1e-6 of the largest was seen on a CPU (Gemma's gradients); ten times that."""
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max()))


def tokens(device, batch=2, length=24):
    return torch.randint(2, 100, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("padded", ["", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_gradients_are_theirs(device, name, padded, monkeypatch):
    layers = []
    monkeypatch.setattr(paddings, "WORTH_COPIES", 0)
    for module, name_ in ((integration, "attention"), (packing, "attention_varlen")):
        attend = getattr(module, name_)
        spy = lambda *args, attend=attend, **options: layers.append(options.get("mask")) or attend(*args, **options)
        monkeypatch.setattr(module, name_, spy)
    ours, theirs = pair(name, device)
    x = tokens(device)
    mask = torch.ones_like(x)
    if padded:
        mask[0, {"left": slice(9), "right": slice(-9, None)}[padded]] = 0
    seen = mask.bool()
    results = []
    for model in (ours, theirs):
        logits = model(x, attention_mask=mask).logits
        logits[seen].square().sum().backward()
        results.append((logits[seen].detach(), model.get_input_embeddings().weight.grad))
    assert layers == [None] * 2  # of one of the models
    for mine, expected in zip(*results, strict=True):
        assert bool(expected.abs().max() > 1e-3)
        assert_close(mine, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_the_same_text_comes_out(device, name, cache):
    """Greedy, a batch padded on the left, through a cache that grows and through one of a fixed size."""
    ours, theirs = pair(name, device)
    x = tokens(device)
    mask = torch.ones_like(x)
    mask[1, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "cache_implementation": cache,
               "disable_compile": True}  # fmt: skip
    mine, expected = (model.generate(x, **options) for model in (ours, theirs))
    assert mine.shape == (2, 36) and torch.equal(mine, expected)


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences_are_kept_apart(device, name, monkeypatch):
    """By cu_seq_lens alone: positions go on, as if they were one. Half of these layers have a window's mask too."""
    packed, varlen = [], packing.attention_varlen
    monkeypatch.setattr(
        packing, "attention_varlen", lambda *args, **options: packed.append(0) or varlen(*args, **options)
    )
    ours, theirs = pair(name, device)
    x, ends = tokens(device, batch=1), [0, 7, 8, 24]
    cu = torch.tensor(ends, dtype=torch.int32, device=device)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 16, "max_length_k": 16}
    mine = ours(x, **lengths, use_cache=False).logits
    parts = [torch.arange(a, b, device=device) for a, b in itertools.pairwise(ends)]
    alone = [theirs(x[:, part], position_ids=part[None], use_cache=False).logits for part in parts]
    assert_close(mine, torch.cat(alone, dim=1))
    assert len(packed) == {"llama": 2, "mistral": 0}.get(name, 1)


def test_packed_sequences_beside_a_bias_a_mask_and_in_a_batch():
    q, bias, mask = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 6), torch.ones(1, 1, 6, 6).tril() == 1
    cu = torch.tensor([0, 2, 6])
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    added = torch.where(mask, 0.0, -torch.inf)
    apart = added + torch.where(torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)) == 1, bias, -torch.inf)
    exact = torch.nn.functional.scaled_dot_product_attention(q, q, q, apart).transpose(1, 2)
    for given in ({"is_causal": True}, {"attention_mask": mask}, {"attention_mask": added}):
        given = {"attention_mask": None, **given, "position_bias": bias, **lengths}
        out, _ = integration.attention_forward(torch.nn.Module(), q, q, q, **given)
        torch.testing.assert_close(out, exact)
    with pytest.raises(NotImplementedError, match=r"^cu_seq_lens_q: packed sequences must come in a batch of one"):
        integration.attention_forward(torch.nn.Module(), *[q.expand(2, -1, -1, -1)] * 3, None, **lengths)


def test_an_encoder_looks_both_ways(device):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    outs = []
    mask = torch.ones(2, 24, dtype=torch.long, device=device)
    mask[1, 15:] = 0
    for implementation in ("attn_lite", "eager"):
        torch.manual_seed(0)
        config = transformers.BertConfig(**sizes, vocab_size=100)
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation).to(device).eval()
        outs.append(model(tokens(device), attention_mask=mask).last_hidden_state[mask.bool()])
    assert_close(*outs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_when_compiled(device, dynamic):
    ours, theirs = pair("llama", device)
    x = tokens(device)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch.no_grad():
        assert_close(compiled(x).logits, theirs(x).logits)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("flash_lite", ValueError, 'name: must not be empty nor have "flash", "|" or "/" in it'),
        ("attn/lite", ValueError, "which mean something else to transformers; got 'attn/lite'."),
        ("", ValueError, "name: must not be empty"),
        ("sdpa", ValueError, "name: must not be one that transformers has; got 'sdpa'"),
        ("eager", ValueError, "name: must not be one that transformers has"),
        (3, TypeError, "name: must be a string; got 3"),
    ],
)
def test_names_that_are_refused(name, error, text):
    with pytest.raises(error) as raised:
        integration.register(name)
    assert text in str(raised.value)


def test_models_of_5_0_and_5_1_are_not_served(monkeypatch):
    """Their masks have a column too many, or are none where nothing is causal, for all that is not called "sdpa"."""
    monkeypatch.setattr("transformers.__version__", "5.1.0")
    with pytest.raises(ImportError, match=r"needs transformers, 5\.2 or newer.*\(here is 5\.1\.0\)"):
        integration.register()


@pytest.mark.parametrize(
    ("argument", "value"),
    [("dropout", 0.1), ("output_attentions", True), ("cache", object()), ("sinks", torch.zeros(1, 2, 4, 1))],
)
def test_what_it_does_not_do_is_named(argument, value):
    q = torch.randn(1, 2, 4, 8)
    integration.attention_forward(torch.nn.Module(), q, q, q, None, indices=None, block_indices=None, sinks=None)
    with pytest.raises(NotImplementedError, match=f"^{argument}: "):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, **{argument: value})


@pytest.mark.parametrize(
    ("name", "wanted"), [("attn_pdrop", "attn_pdrop"), ("dropout_rate", "dropout_rate"), ("bias", "attention_dropout")]
)
def test_dropout_is_named_as_the_models_config_names_it(name, wanted):
    module, q = torch.nn.Module(), torch.randn(1, 2, 4, 8)
    module.config = types.SimpleNamespace(**{name: 0.1, "attention_bias": 0.1})
    with pytest.raises(NotImplementedError, match=f"Make the model with {wanted} of 0.0 in its config"):
        integration.attention_forward(module, q, q, q, None, dropout=0.1)


def test_dropout_is_that_of_attention_where_the_config_was_changed_behind_the_model():
    module, q = torch.nn.Module(), torch.randn(1, 2, 4, 8)
    module.config = types.SimpleNamespace(resid_pdrop=0.1, attn_pdrop=0.0, embd_pdrop=0.1)
    with pytest.raises(NotImplementedError, match="Make the model with attn_pdrop of 0"):
        integration.attention_forward(module, q, q, q, None, dropout=0.1)


def test_autocast_makes_one_dtype_of_them():
    """Positions turn q and k into float32 in some models, v stays what the product before it gave."""
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = integration.attention_forward(torch.nn.Module(), q, k, v.bfloat16(), torch.zeros(4, 4))
    assert out.dtype == torch.bfloat16
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.bfloat16().float() for x in (q, k, v)))
    torch.testing.assert_close(out.float(), exact.transpose(1, 2), rtol=0.02, atol=0.02)  # five eps of bfloat16 at 1


def test_a_bias_is_added_to_what_the_mask_leaves():
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    bias, mask = torch.randn(1, 4, 6, 6), torch.rand(2, 1, 6, 6) > 0.3
    mask[..., 0] = True
    for kind in (mask, torch.where(mask, 0.0, float("-inf")), None):
        out, weights = integration.attention_forward(
            torch.nn.Module(), q, k, v, kind, position_bias=bias, is_causal=True
        )
        seen = torch.ones(6, 6, dtype=torch.bool).tril() if kind is None else mask
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, torch.where(seen, bias, float("-inf")))
        torch.testing.assert_close(out, exact.transpose(1, 2))
        assert weights is None
    assert integration.biased(None, None) is None


def test_head_dims_beyond_ours_are_refused_with_what_a_model_can_do():
    q, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 257)
    with pytest.raises(
        NotImplementedError, match=r"^value: head dims go up to 256; .*\(1, 2, 4, 257\).*Load the model"
    ):
        integration.attention_forward(torch.nn.Module(), q, q, v, None)


@pytest.mark.parametrize("cached", [False, True])
def test_layers_that_share_keys_and_keep_the_last_queries(cached):
    """Gemma 4: of a prompt's queries they take those whose logits are asked for, which begin late in it."""
    options = {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16, **WINDOW}
    config = {**SMALL, **options, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    logits = []
    for implementation in ("attn_lite", "eager"):
        torch.manual_seed(0)
        kind = transformers.Gemma4TextConfig(**config, hidden_size_per_layer_input=16, vocab_size_per_layer_input=100)
        model = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation=implementation).eval()
        given = {"logits_to_keep": 1 if cached else 3}
        if cached:
            name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
            given[name] = transformers.StaticCache(config=kind, max_cache_len=100)
        with torch.no_grad():
            logits.append(model(tokens("cpu"), **given).logits)
    assert_close(*logits)


@pytest.mark.parametrize("few", ["query", "key"])
def test_a_batch_of_one_is_every_sequences(few):
    """Learned queries, say, beside keys of each sequence."""
    sizes = {"query": (1, 3), "key": (3, 1)}[few]
    q = torch.randn(sizes[0], 4, 6, 8, requires_grad=True)
    k, v = (torch.randn(sizes[1], 2, 5, 8) for _ in range(2))
    for mask in (None, torch.rand(3, 1, 6, 5) > 0.3):
        out, _ = integration.attention_forward(torch.nn.Module(), q, k, v, mask, is_causal=False)
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(x.expand(3, -1, -1, -1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))), mask
        )
        torch.testing.assert_close(out, exact.transpose(1, 2))


def test_a_long_prompt_is_no_large_head_dim():
    """Shapes are (batch, heads, tokens, head dim): only the last is limited."""
    q, wide, v = torch.randn(1, 2, 300, 8), torch.randn(1, 2, 4, 300), torch.randn(1, 2, 4, 8)
    assert integration.attention_forward(torch.nn.Module(), q, q, q, None)[0].shape == (1, 300, 2, 8)
    with pytest.raises(NotImplementedError, match="head dims go up to 256"):
        integration.attention_forward(torch.nn.Module(), wide, wide, v, None)
