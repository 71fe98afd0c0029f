"""Our attention in models of Hugging Face's transformers, by the name that a model is loaded with."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flashattn_lite.api import attention
from flashattn_lite.arguments import MAX_HEAD_DIM
from flashattn_lite.autocast import lowered
from flashattn_lite.errors import not_implemented, type_error, value_error
from flashattn_lite.integrations import bounds
from flashattn_lite.integrations.lazy_mask import LazyMask
from flashattn_lite.integrations.masks import biased, chosen_mask, joined, seen_or_mean
from flashattn_lite.integrations.packing import check_chosen, check_packing, packed_forward, same_sequence
from flashattn_lite.watchers import shares_out

# By model_type: models whose code joins numbers to the mask that it is given, although that is of booleans.
REWRITES_MASKS = ("deepseek_v4",)
OTHER_IMPLEMENTATION = 'Load the model with attn_implementation="sdpa", or "eager" where it has none.'
# By model_type: models that torch's function is not for (no soft caps, no sinks), whose modules say if they are causal.
SAY_CAUSAL = ("flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma")
_functions: dict[type, str] = {}


def register(name: str = "attn_lite") -> None:
    """Makes `attn_implementation=name` mean this library, in models that this process loads from then on.

    Args:
        name: what the models are told. Not one with "flash" in it, which transformers takes for a build of
            FlashAttention, nor one of its own. Once more does nothing.

    Masks are those that transformers makes for torch's function: boolean, or none where causality or nothing is all
    that they would say. Keys that causality, a window or padding hides are not read, and no mask of all pairs is made,
    unless the model reads it (from transformers 5.8 on; not, in compiled code, of a static cache or padding, nor of
    padding on both sides of a batch, or on the left of a small one or of an encoder's): in compiled code a model must
    not write into a mask. Grouped heads, soft caps (Gemma) and sinks (gpt-oss) are taken as they are: no copies of
    keys. Packed sequences are kept apart by `cu_seq_lens_q` and `cu_seq_lens_k`, as a model hands them on, or by
    position_ids that start anew, if the model hands them to its masks: of those compiled code makes a mask of all pairs
    and reads it. Beside a cache such sequences are not kept apart; there, or by lengths alone, chunks (Llama 4) are
    counted from the row's start and Doge chooses among all of it: pack by position_ids with `use_cache=False` there.
    Keys that a model's indexer chooses (DeepSeek-V3.2, GLM-5, MiniMax-M3) become a mask, as for torch's function: all
    keys are read still. Such models pack by position_ids, MiniMax-M3 not at all: no indexer is told of `cu_seq_lens_q`.

    Raises:
        ImportError: transformers is not there, or older than 5.2: models of 5.0 and 5.1 hand over masks of one column
            too many, or none where they are not causal, for all that is not called "sdpa".
        ValueError, TypeError: for the name. In a model, NotImplementedError for dropout in training, weights as an
            output (`output_attentions`, where a model hands it on: GPT-2, OPT, SigLIP and others give none, as beside
            torch's function), sinks per query, head dims above 256, packed lengths beside an indexer's choice, torch's
            context_parallel (but in compiled code, where a process then sees its own keys alone, as with "eager"), and
            models that by transformers' account take neither torch's function nor others and ask for a mask (Bloom,
            MPT, CLAP and others). Some run their own attention without a word (XLNet, DeBERTa, WavLM). Models that look
            up a class of their own by the name end in a KeyError (Falcon, SAM, SAM-HQ, BARK, Data2VecVision, and with
            SAM in them DeepSeek-OCR 2, DeepSeek-VL hybrid and Unlimited-OCR; GPT-Neo, GIT and SuperGlue, which have no
            "sdpa"): load those that have "sdpa" with it, and call `flashattn_lite.install`. Continuous batching is
            refused by transformers.

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
    needed = "register: needs transformers, 5.2 or newer. Install it: pip install 'transformers>=5.2'"
    try:
        from transformers import AttentionInterface, __version__
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(needed) from error
    if tuple(map(int, __version__.split(".")[:2])) < (5, 2):
        raise ImportError(f"{needed} (here is {__version__})")
    if AttentionInterface().get(name, attention_forward) is not attention_forward or name == "eager":
        raise value_error("name", "must not be one that transformers has", name, 'The default is "attn_lite".')
    torch.compiler.assume_constant_result(functions_of)  # a look through modules is nothing for a compiler to trace
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(*args: Any, config: Any = None, **options: Any) -> Tensor | None:
    """The mask that transformers makes for torch's function, with what is known of its bounds.

    Raises:
        NotImplementedError: for a model that can't do with it. It would add this mask, or none, to scores of its own.
    """
    kind, functions = getattr(config, "model_type", None), functions_of(type(config))
    if kind in REWRITES_MASKS or functions == "none":
        raise not_served(config)
    from transformers.masking_utils import sdpa_mask

    # That no mask means causal is for modules to say, of which those may not that torch's function is not for. And
    # layers that share keys may keep the last queries only: those are not causal from the first key on.
    silent = functions == "others" and kind not in SAY_CAUSAL
    skip = {"allow_is_causal_skip": False} if getattr(config, "num_kv_shared_layers", 0) or silent else {}
    make = partial(sdpa_mask, *args, config=config, **{**options, **skip})
    return bounds.mask_with_bounds(make, config, options)


def not_served(config: Any) -> NotImplementedError:
    """Of a model that would do something else with the mask that it is given."""
    remedy = 'Load the model with attn_implementation="eager".'
    return not_implemented("config", "its model must take torch's attention, or others by name", config, remedy)


def functions_of(config: type) -> str:
    """What models of a class of configs take, as their own classes say: "torch" its function, "others", or "none".

    What derives from a model's config goes by that one, if no class of models is its own. What no loaded class says
    (code outside of transformers, laid out in another way) is taken for the first.
    """
    if config in _functions:  # asked in every step of a model
        return _functions[config]
    for base in config.__mro__:
        package, _, file = base.__module__.rpartition(".")
        if base.__module__ == "transformers.configuration_utils":  # what all configs derive from
            break
        beside = f"{package}.modeling_" if file.startswith("configuration_") else base.__module__
        modules = [x for name, x in list(sys.modules.items()) if name.startswith(beside) and x is not None]
        classes = [x for module in modules for x in list(vars(module).values()) if isinstance(x, type)]
        models = [x for x in classes if hasattr(x, "_supports_sdpa")]
        own = [x for x in models if getattr(x, "config_class", None) is base]
        if beside != base.__module__:
            own = own or models
        if own:
            others = any(getattr(x, "_supports_attention_backend", False) for x in own)
            found = "torch" if any(x._supports_sdpa for x in own) else "others" if others else "none"
            _functions[config] = found
            return found
    return "torch"


def dropout_of(module: torch.nn.Module, dropout: float) -> str:
    """What the model's config calls this dropout of attention weights; models name it as they like.

    The config may say another number by now: modules keep the one that they were made with.
    """
    config = getattr(getattr(module, "config", None), "__dict__", {})
    names = [name for name in config if "drop" in name and isinstance(config[name], (int, float))]
    equal = [name for name in names if config[name] == dropout]
    return next((name for name in (*equal, *names) if "att" in name), " and ".join(equal) or "attention_dropout")


def check_taken(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    cache: Any,
    others: dict[str, Any],
) -> None:
    """Refuses, of what a model hands to an attention function, what ours would leave out of account."""
    if dropout:
        remedy = (
            f"Make the model with {dropout_of(module, dropout)} of 0.0 in its config (it keeps what it was made with), "
            "or train with its own implementation."
        )
        raise not_implemented("dropout", "dropout of attention weights is not implemented", dropout, remedy)
    if others.get("output_attentions"):
        remedy = 'Load the model with attn_implementation="eager" for them.'
        raise not_implemented("output_attentions", "the weights are never held", True, remedy)
    if others.get("sinks") is not None:  # which some models hand to what is neither "eager" nor "sdpa"
        relation = "sinks that differ from query to query are not implemented"
        raise not_implemented("sinks", relation, others["sinks"], OTHER_IMPLEMENTATION)
    for name, x in (("query", query), ("value", value)):
        if x.shape[-1] > MAX_HEAD_DIM:
            raise not_implemented(name, f"head dims go up to {MAX_HEAD_DIM}", x, OTHER_IMPLEMENTATION)
    if not torch.compiler.is_compiling() and shares_out(functional.scaled_dot_product_attention):
        relation = "within torch's context_parallel each process would see its own keys alone"
        raise not_implemented("attn_implementation", relation, "attn_lite", OTHER_IMPLEMENTATION)
    if cache is not None:
        remedy = "Use a dynamic or static cache, or a function of transformers' own."
        raise not_implemented("cache", "continuous batching is not implemented", type(cache).__name__, remedy)
    if attention_mask is None:
        return
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        remedy = "Pass .bool(), or (batch, keys) of 1 and 0, of which transformers makes a mask."
        raise type_error("attention_mask", "must be of booleans or floats", attention_mask, remedy)
    columns = attention_mask.shape[-1]
    if columns != key.shape[2] and columns != 1:  # not `in`: two unknown lengths are never that to a compiler
        remedy = "Leave out the cache, or its keys' part of the mask (a checkpointed layer in training has no cache)."
        relation = f"must have a column for each of {key.shape[2]} keys, else nobody knows which are whose"
        raise value_error("attention_mask", relation, attention_mask, remedy)
    config = getattr(module, "config", None)
    if attention_mask.dtype == torch.bool and getattr(config, "model_type", None) in REWRITES_MASKS:
        raise not_served(config)  # a mask of the caller's, for which nobody asked `attention_mask`


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
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: (out `(B, L, Hq, Dv)`, None in the place of the weights).

    Args:
        query, key, value: `(B, Hq, L, D)`, `(B, Hkv, S, D)`, `(B, Hkv, S, Dv)`.
        attention_mask: what the mask function made, or None; `(B or 1, Hq or 1, L, S)`, bool or added.
        is_causal: default the module's. It counts where there is no mask and more than one query, and is top-left.
        softcap, s_aux: soft cap and sinks `(Hq,)`. position_bias: added to the scores. scaling: default 1 / sqrt(D).
        cu_seq_lens_q, cu_seq_lens_k: where packed sequences begin and end in a batch of one, `(sequences + 1,)`. They
            are kept apart, whatever the mask says; without a mask as `attention_varlen` does it, in linear memory.
        indices, block_indices: keys, or blocks of them, that a query sees of what the mask leaves (masks.py).
        others: what transformers tells every function (a window, say, which the mask has in it).

    Source: transformers 5.24, sdpa_attention_forward, for what the arguments mean.
    """
    check_taken(module, query, key, value, attention_mask, dropout, cache, others)
    check_packing(query, key, attention_mask, cu_seq_lens_q, cu_seq_lens_k)
    told = bounds.of(attention_mask, query.shape[2], key.shape[2])
    query, key, value, attention_mask = lowered(query.device, query, key, value, attention_mask)
    if query.shape[0] != key.shape[0] and 1 in (query.shape[0], key.shape[0]):  # learned queries, say
        query, key, value = (x.expand(max(query.shape[0], key.shape[0]), -1, -1, -1) for x in (query, key, value))
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(is_causal and attention_mask is None and query.shape[2] > 1)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    distance: dict[str, Any] = {"causal": causal, "q_start": 0 if causal else None}  # a static cache has room for more
    if indices is not None or block_indices is not None or (told is not None and not told.fits(query)):
        told = None  # what is chosen hides more, by the mask that there is
    sequences = told.sequences if told is not None and position_bias is None else None
    if told is not None and sequences is not None and sequences.are(query, cu_seq_lens_q, cu_seq_lens_k):
        return sequences.attend(query, key, value, {"window": (told.left, told.right), **options}), None
    if told is not None and cu_seq_lens_q is None:
        distance, padding = told.options(), told.padding
        behind = None if padding is None else padding.behind
        if behind is not None and position_bias is None and behind.is_worth_it(query):
            return behind.attend(query, key, value, {"window": (told.left, told.right), **options}), None
        if padding is not None and behind is None:
            attention_mask = None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        cu_seqlens = cu_seq_lens_q.int(), cu_seq_lens_k.int()
        unmasked = attention_mask is None and position_bias is None and indices is None and block_indices is None
        if unmasked and query.shape[2] == key.shape[2]:
            return packed_forward(query, key, value, cu_seqlens, {"causal": causal, **options}, others), None
        same = same_sequence(*cu_seqlens, query.shape[2], key.shape[2])
        if cu_seq_lens_q.shape[0] > 2:
            check_chosen(attention_mask, same, indices, block_indices)
        attention_mask = joined(attention_mask, same)
    if isinstance(attention_mask, LazyMask):
        attention_mask = attention_mask.made()
    chosen = chosen_mask(module, query, key, indices, block_indices)
    attention_mask = attention_mask if chosen is None else joined(attention_mask, chosen)
    out = attention(
        query,
        key,
        value,
        mask=biased(attention_mask, position_bias),
        **distance,
        **options,
    )
    if block_indices is not None and attention_mask is not None:
        out = seen_or_mean(out, value, attention_mask)
    return out.transpose(1, 2).contiguous(), None
