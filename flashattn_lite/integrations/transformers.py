"""Our attention in models of Hugging Face's transformers, by the name that a model is loaded with."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.api import attention
from flashattn_lite.errors import not_implemented, type_error, value_error
from flashattn_lite.tiles import lowered


def register(name: str = "attn_lite") -> None:
    """Makes `attn_implementation=name` mean this library, in models that are loaded from then on.

    Args:
        name: what the models are told. Not one with "flash" in it, which transformers takes for a build of
            FlashAttention, nor one of its own. Once more does nothing.

    Masks are those that transformers makes for torch's function: boolean, or none where causality or nothing is all
    that they would say. Grouped heads, soft caps (Gemma) and sinks (gpt-oss) are taken as they are: no copies of keys.

    Raises:
        ImportError: transformers is not there, or older than 5.
        ValueError, TypeError: for the name. In a model, NotImplementedError for dropout in training, weights as an
            output (`output_attentions`), the paged cache of continuous batching, and models that compute attention
            themselves (Bloom and MPT; Falcon and GPT-Neo end in a KeyError of their own).

    Example:
        >>> import flashattn_lite
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> flashattn_lite.integrations.transformers.register()
        >>> config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="attn_lite")
        >>> model(torch.arange(6)[None]).logits.shape
        torch.Size([1, 6, 32000])
    """
    if not isinstance(name, str):
        raise type_error("name", "must be a string", name, 'Pass what attn_implementation= will get, say "attn_lite".')
    if not name or "flash" in name or "|" in name or "/" in name:
        relation = 'must not be empty nor have "flash", "|" or "/" in it, which mean something else to transformers'
        raise value_error("name", relation, name, 'The default is "attn_lite".')
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "register: needs transformers, 5 or newer. Install it: pip install 'transformers>=5'"
        ) from error
    if AttentionInterface().get(name, attention_forward) is not attention_forward or name == "eager":
        raise value_error("name", "must not be one that transformers has", name, 'The default is "attn_lite".')
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(*args: Any, config: Any = None, **options: Any) -> Tensor | None:
    """The mask that transformers makes for torch's function.

    Raises:
        NotImplementedError: for a model that computes attention itself. It would add this mask, or none, to its scores.
    """
    if not looks_functions_up(config):
        remedy = 'Load the model with attn_implementation="eager".'
        raise not_implemented("config", "its model must look attention functions up by name", config, remedy)
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, config=config, **options)


def looks_functions_up(config: Any) -> bool:
    """Whether the code of a config's model takes its attention from transformers' table, as far as its file says."""
    home = type(config).__module__
    module = sys.modules.get(home.replace("configuration_", "modeling_"))
    if "configuration_" not in home or module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return True
    return any(getattr(x, "_supports_sdpa", False) for x in vars(module).values() if isinstance(x, type))


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: (out `(B, L, Hq, Dv)`, None in the place of the weights).

    Args:
        query, key, value: `(B, Hq, L, D)`, `(B, Hkv, S, D)`, `(B, Hkv, S, Dv)`.
        attention_mask: what the mask function made, or None; `(B or 1, Hq or 1, L, S or more)`, bool or added.
        is_causal: default the module's. It counts where there is no mask and more than one query, and is top-left.
        softcap, s_aux: soft cap and sinks `(Hq,)`. position_bias: added to the scores. scaling: default 1 / sqrt(D).
        others: what transformers tells every function (a window, say, which the mask has in it).

    Source: transformers 5.23, sdpa_attention_forward, for what the arguments mean.
    """
    if dropout:
        remedy = "Set attention_dropout=0.0 in the model's config, or train with its own implementation."
        raise not_implemented("dropout", "dropout of attention weights is not implemented", dropout, remedy)
    if others.get("output_attentions"):
        remedy = 'Load the model with attn_implementation="eager" for them.'
        raise not_implemented("output_attentions", "the weights are never held", True, remedy)
    if cache is not None:
        remedy = "Use a dynamic or static cache, or a function of transformers' own."
        raise not_implemented("cache", "continuous batching is not implemented", type(cache).__name__, remedy)
    query, key, value, attention_mask = lowered(query.device, query, key, value, attention_mask)
    if query.shape[0] != key.shape[0] and 1 in (query.shape[0], key.shape[0]):  # learned queries, say
        query, key, value = (x.expand(max(query.shape[0], key.shape[0]), -1, -1, -1) for x in (query, key, value))
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(is_causal and attention_mask is None and query.shape[2] > 1)
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
    out = attention(
        query,
        key,
        value,
        causal=causal,
        q_start=0 if causal else None,  # a static cache is longer than what has been written
        scale=scaling,
        softcap=softcap,
        mask=biased(attention_mask, position_bias),
        sinks=s_aux,
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def biased(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """What a mask hides and a bias adds, as one mask."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else mask + bias
