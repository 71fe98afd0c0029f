"""Which models of transformers the registered function is for, as their own classes say, and what masks they get."""

from __future__ import annotations

import sys

import pytest
import torch

from flashattn_lite.integrations import transformers as integration
from tests.test_integrations import SMALL, assert_close, pytestmark, registered, tokens, transformers  # noqa: F401

ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
MODELS = {  # that compute attention themselves, have another idea of masks, or none of who is causal
    "BloomForCausalLM": ("Bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 100}),
    "MptForCausalLM": ("Mpt", {"d_model": 32, "n_layers": 1, "n_heads": 4, "vocab_size": 100, "max_seq_len": 64}),
    "XGLMForCausalLM": (
        "XGLM",
        {"d_model": 32, "ffn_dim": 32, "num_layers": 1, "attention_heads": 4, "vocab_size": 100},
    ),
    "ClapTextModel": ("ClapText", ENCODER),
    "SplinterModel": ("Splinter", ENCODER),
    "BlipTextModel": ("BlipText", ENCODER),  # which has another file than its config's name says
}


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_that_do_not_take_torchs_attention_are_refused(name, derived):
    """They would add our mask to their scores: as None it hides nothing, as a bool no more than 1."""
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")
    if derived:  # somebody's own, of no other model
        config = type("Config", (config,), {"__module__": __name__})
    config = config(**options)
    model = getattr(transformers, name)._from_config(config, attn_implementation="attn_lite")
    with pytest.raises(NotImplementedError, match=r"^config: its model must take torch's attention, or others by name"):
        model(tokens("cpu"))


def test_a_model_that_rewrites_masks_is_refused():
    """By its config alone: it is large."""
    with pytest.raises(NotImplementedError, match=r"^config: its model must take .*; got a DeepseekV4Config\."):
        integration.attention_mask(config=transformers.DeepseekV4Config())


def test_what_no_class_has_said_is_asked_again(monkeypatch):
    """A config's mask may be asked for before the models are imported."""
    kind, _ = MODELS["BloomForCausalLM"]
    config = getattr(transformers, f"{kind}Config")
    assert transformers.BloomForCausalLM  # is imported
    monkeypatch.setattr(integration, "_functions", {})
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "transformers.models.bloom.modeling_bloom")
        assert integration.functions_of(config) == "torch"
    assert integration.functions_of(config) == "none"


def test_somebodys_own_models_are_taken():
    """Of a config that derives from nothing of a model's, or whose models say otherwise."""

    class Config(transformers.PreTrainedConfig):
        pass

    class FromBloom(transformers.BloomConfig):
        pass

    class Model(transformers.PreTrainedModel):
        config_class, _supports_attention_backend = FromBloom, True

    assert integration.functions_of(Config) == "torch"
    globals()["Model"] = Model
    try:
        assert integration.functions_of(FromBloom) == "others"
    finally:
        del globals()["Model"]


@pytest.mark.parametrize("masked", [False, True])
def test_a_causal_model_whose_modules_do_not_say_so(masked):
    """VideoPrism's text: torch's function is not for it, so that no mask means nothing to its modules."""
    sizes = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    models = pytest.importorskip("transformers.models.videoprism.modeling_videoprism")
    outputs = []
    for implementation in ("attn_lite", "eager"):
        config = transformers.VideoPrismTextConfig(**sizes, num_attention_heads=4)
        torch.manual_seed(0)
        model = models.VideoPrismTextModel._from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
            x = tokens("cpu")
            mask = torch.ones_like(x)
            mask[1, 20:] = 1 - int(masked)
            outputs.append(model(x, attention_mask=mask).last_hidden_state[:, :20])  # of 24, and one of its own
    assert_close(*outputs)


def test_a_mask_of_integers_is_refused_by_its_name():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(TypeError, match=r"^attention_mask: must be of booleans or floats; got .* Pass \.bool\(\)"):
        integration.attention_forward(torch.nn.Module(), q, q, q, torch.ones(1, 1, 4, 4, dtype=torch.int64))
