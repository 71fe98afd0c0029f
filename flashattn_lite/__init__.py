"""Fused attention: a drop-in for torch's function, a native call with every option, and the online softmax."""

from flashattn_lite import integrations
from flashattn_lite.api import attention, attention_varlen, explain, explain_varlen
from flashattn_lite.decode import attention_decode, explain_decode
from flashattn_lite.errors import BackendError
from flashattn_lite.merge import merge_attention
from flashattn_lite.replace import install, replace_sdpa, uninstall
from flashattn_lite.sdpa import scaled_dot_product_attention
from flashattn_lite.softmax import merge_softmax_stats, online_softmax, softmax_stats

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "attention",
    "attention_decode",
    "attention_varlen",
    "explain",
    "explain_decode",
    "explain_varlen",
    "install",
    "integrations",
    "merge_attention",
    "merge_softmax_stats",
    "online_softmax",
    "replace_sdpa",
    "scaled_dot_product_attention",
    "softmax_stats",
    "uninstall",
]
