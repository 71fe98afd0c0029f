"""The models that benchmarks/models.py runs: of known sizes, by their configs alone, with weights drawn by chance.

Of layers that are all alike a model has the first LAYERS; the UNet is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 8
TEXTS = 256, 512, 1024, 2048, 4096, 512, 1024, 2048, 768, 1280, 2816  # tokens, 16k in all
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """make(): a model; inputs(device): what it is called with. rival: the attention that such models have today.

    varied(inputs, n): what it is called with for the n-th time.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[str], Inputs]
    training: bool = False  # a step's gradients too
    compiled: bool = False  # also by torch.compile, which takes it some ten seconds
    rival: str = "sdpa"
    varied: Callable[[Inputs, int], Inputs] = lambda inputs, n: inputs


def llama(hidden: int, heads: int, heads_kv: int, inner: int, layers: int = LAYERS, cached: bool = True) -> nn.Module:
    """cached: it keeps keys and values for tokens to come, as models do that nobody tells otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=heads_kv, use_cache=cached,
                         intermediate_size=inner, num_hidden_layers=layers, vocab_size=32000,
                         max_position_embeddings=65536)  # fmt: skip
    return LlamaForCausalLM(config)


class Answering(nn.Module):
    """A language model that answers, token by token, beside a cache that grows: as `generate` runs it by default."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.set_attn_implementation = model, model.set_attn_implementation
        self.layers = model.config.num_hidden_layers

    def forward(self, input_ids: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor]:
        """Logits `(B, tokens, words)` of what follows on keys and values `(B, Hkv, S, D)`, the same in all layers."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(self.layers):
            cache.update(keys, values, layer)
        # By place, behind mask and positions: versions of transformers name the cache by one name or another.
        step = lambda x: self.model(x, None, None, cache, use_cache=True).logits
        return (torch.cat([step(x) for x in input_ids.split(1, dim=1)], 1),)


def mistral() -> nn.Module:
    """Mistral 7B, whose layers have a window of 4096."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(num_hidden_layers=LAYERS))


def gpt_oss() -> nn.Module:
    """gpt-oss 20B with 4 of its 32 experts: every second layer has a window of 128."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(num_hidden_layers=LAYERS, num_local_experts=4, vocab_size=32000))


def gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(
        Gemma2Config(hidden_size=3584, num_attention_heads=16, num_key_value_heads=8, head_dim=256, use_cache=False,
                     intermediate_size=14336, num_hidden_layers=LAYERS, vocab_size=32000)
    )  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(num_hidden_layers=LAYERS), add_pooling_layer=False)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=1024, num_hidden_layers=LAYERS, num_attention_heads=16, intermediate_size=4096)
    return ViTModel(config, add_pooling_layer=False)


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(d_model=1280, encoder_layers=LAYERS, encoder_attention_heads=20, encoder_ffn_dim=5120,
                           decoder_layers=1, decoder_attention_heads=20)  # fmt: skip
    encoder: nn.Module = WhisperModel(config).encoder
    return encoder


def sdxl() -> nn.Module:
    from diffusers import UNet2DConditionModel

    unet: nn.Module = UNet2DConditionModel(
        sample_size=128, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), block_out_channels=(320, 640, 1280),
        transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20), cross_attention_dim=2048,
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )  # fmt: skip
    return unet


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    model: nn.Module = WanTransformer3DModel(
        num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=LAYERS
    )
    return model


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    model: nn.Module = FluxTransformer2DModel(num_layers=LAYERS // 2, num_single_layers=LAYERS, guidance_embeds=True)
    return model


def normal(device: str, *shape: int) -> Tensor:
    """In the default dtype, which is the model's."""
    return torch.randn(shape, device=device)


def tokens(device: str, batch: int, length: int) -> Tensor:
    return torch.randint(30000, (batch, length), device=device)


def padded(device: str, batch: int, length: int, left: bool = False) -> Inputs:
    """Of half that length and more, padded on the right, or on the left."""
    lengths = torch.linspace(length // 2, length, batch, device=device)
    mask = (torch.arange(length, device=device) < lengths[:, None]).long()
    mask = mask.flip(1) if left else mask
    return {"input_ids": tokens(device, batch, length), "attention_mask": mask}


def learning(device: str, batch: int, length: int) -> Inputs:
    ids = tokens(device, batch, length)
    return {"input_ids": ids, "labels": ids}


def learning_packed(device: str, lengths: Sequence[int]) -> Inputs:
    """Texts of these lengths in one row, which positions that start anew keep apart."""
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    return {**learning(device, 1, sum(lengths)), "position_ids": positions[None]}


def learning_padded(device: str, batch: int, length: int) -> Inputs:
    given = padded(device, batch, length)
    return {**given, "labels": given["input_ids"].where(given["attention_mask"] == 1, -100)}


def flux_inputs(device: str, side: int, text: int) -> Inputs:
    """An image of side x side patches (1024 pixels: 64)."""
    return {
        "hidden_states": normal(device, 1, side * side, 64), "encoder_hidden_states": normal(device, 1, text, 4096),
        "pooled_projections": normal(device, 1, 768), "timestep": normal(device, 1), "guidance": normal(device, 1),
        "img_ids": torch.zeros(side * side, 3, device=device), "txt_ids": torch.zeros(text, 3, device=device),
        "return_dict": False,
    }  # fmt: skip


def sdxl_inputs(device: str) -> Inputs:
    """1024 x 1024 pixels, with and without the text."""
    added = {"text_embeds": normal(device, 2, 1280), "time_ids": normal(device, 2, 6)}
    return {
        "sample": normal(device, 2, 4, 128, 128), "encoder_hidden_states": normal(device, 2, 77, 2048),
        "timestep": torch.tensor(5, device=device), "added_cond_kwargs": added, "return_dict": False,
    }  # fmt: skip


def wan_inputs(device: str) -> Inputs:
    """81 frames of 480 x 832 pixels: 32760 tokens."""
    return {
        "hidden_states": normal(device, 1, 16, 21, 60, 104), "encoder_hidden_states": normal(device, 1, 512, 4096),
        "timestep": torch.tensor([5], device=device), "return_dict": False,
    }  # fmt: skip


def prompt(device: str, length: int) -> Inputs:
    return {"input_ids": tokens(device, 1, length), "logits_to_keep": 1}


def llama_8b() -> nn.Module:
    return llama(4096, 32, 8, 14336)


def llama_1b() -> nn.Module:
    return llama(2048, 32, 8, 8192, cached=False)


def answer(device: str, batch: int, cached: int, count: int = 16) -> Inputs:
    """So many tokens, after a prompt of Llama 8B."""
    cache = {name: normal(device, batch, 8, cached, 128) for name in ("keys", "values")}
    return {"input_ids": tokens(device, batch, count), **cache}


def behind_more(inputs: Inputs, n: int) -> Inputs:
    """An answer behind 2048 keys and more, no token of which has as many as any before, of some of those given."""
    end = 2048 + n * (inputs["input_ids"].shape[1] + 1)
    if end > inputs["keys"].shape[2]:
        raise ValueError(f"n: there are {inputs['keys'].shape[2]} keys; got {n}, for which {end} are needed")
    return {**inputs, **{name: inputs[name][:, :, :end] for name in ("keys", "values")}}


WORKS = {
    "llama-8b-512": Work(llama_8b, lambda device: prompt(device, 512), compiled=True),
    "llama-8b-2k": Work(llama_8b, lambda device: prompt(device, 2048), compiled=True),
    "llama-8b-16k": Work(llama_8b, lambda device: prompt(device, 16384)),
    "llama-8b-padded": Work(llama_8b, lambda device: {**padded(device, 4, 2048), "logits_to_keep": 1}),
    "llama-8b-padded-left": Work(llama_8b, lambda device: {**padded(device, 4, 2048, left=True), "logits_to_keep": 1}),
    "mistral-7b-16k": Work(mistral, lambda device: prompt(device, 16384)),
    "mistral-7b-32k": Work(mistral, lambda device: prompt(device, 32768)),
    "gpt-oss-4k": Work(gpt_oss, lambda device: prompt(device, 4096), rival="eager"),
    "llama-8b-answer-1x2k": Work(lambda: Answering(llama_8b()), lambda device: answer(device, 1, 2048)),
    "llama-8b-answer-16x8k": Work(lambda: Answering(llama_8b()), lambda device: answer(device, 16, 8192)),
    "llama-8b-answer-new": Work(
        lambda: Answering(llama_8b()), lambda device: answer(device, 1, 8192), varied=behind_more
    ),
    "gemma2-9b-4k": Work(gemma2, lambda device: prompt(device, 4096), rival="eager"),
    "bert-padded": Work(bert, lambda device: padded(device, 32, 512)),
    "vit-l": Work(vit, lambda device: {"pixel_values": normal(device, 32, 3, 224, 224)}, compiled=True),
    "whisper-large": Work(whisper, lambda device: {"input_features": normal(device, 8, 80, 3000)}),
    "flux": Work(flux, lambda device: flux_inputs(device, 64, 512), compiled=True),
    "sdxl": Work(sdxl, sdxl_inputs),
    "wan-480p": Work(wan, wan_inputs),
    "llama-1b-train": Work(llama_1b, lambda device: learning(device, 4, 2048), training=True, compiled=True),
    "llama-1b-padded-train": Work(llama_1b, lambda device: learning_padded(device, 4, 2048), training=True),
    "llama-1b-packed-train": Work(llama_1b, lambda device: learning_packed(device, TEXTS), training=True),
    "vit-l-train": Work(vit, lambda device: {"pixel_values": normal(device, 64, 3, 224, 224)}, training=True),
}
