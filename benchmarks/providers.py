"""The rivals and us behind one call, `call(q, k, v, causal)` on (batch, heads, length, dim)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn_lite

Call = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


class Provider(NamedTuple):
    """A call, and what must hold around it. Entered once around many calls: torch's switch alone costs some µs.

    One that wants its inputs otherwise is given what `lay` makes of each, and `unlay` undoes it in the result: neither
    belongs to the call.
    """

    call: Call
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext
    lay: Callable[[Tensor], Tensor] = lambda x: x
    unlay: Callable[[Tensor], Tensor] = lambda x: x


def ours(backend: str) -> Provider:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flashattn_lite.attention(q, k, v, causal=causal, backend=backend)

    return Provider(call)


def sdpa(backend: SDPBackend | None = None) -> Provider:
    """torch's, by the named backend; None is its own choice."""

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Provider(call) if backend is None else Provider(call, lambda: sdpa_kernel(backend))


def compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # It is compiled anew for each shape; past the limit, 8 by default, torch would silently run it uncompiled.
    torch._dynamo.config.recompile_limit = 1000
    return torch.compile(flex_attention, dynamic=False)


def flex() -> Provider:
    from torch.nn.attention.flex_attention import create_block_mask

    compiled = compiled_flex()
    masks: dict[tuple[int, bool], Any] = {}

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        length = q.shape[2]
        if (length, causal) not in masks:
            rule = lambda b, h, i, j: i >= j
            masks[length, causal] = create_block_mask(rule, None, None, length, length) if causal else None
        return compiled(q, k, v, block_mask=masks[length, causal])

    return Provider(call)


def flash_attention(module: str, **options: Any) -> Provider:
    """A package of Dao's: takes and returns (batch, length, heads, dim)."""
    function = importlib.import_module(module).flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Provider(call)


def flash_attention_3(splits: int = 1) -> Provider:
    """Dao's own build if there is one, else the same kernels as xformers' wheel (up to 0.0.34) carries them.

    splits: of the keys; one, as flash_attn_func has it, or 0: it chooses, as flash_attn_with_kvcache has it.
    """
    if importlib.util.find_spec("flash_attn_interface"):
        return flash_attention("flash_attn_interface", num_splits=splits)
    forward = carried_by_xformers()

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out, *_ = forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, num_splits=splits)
        return out.transpose(1, 2)

    return Provider(call)


def carried_by_xformers() -> Callable[..., tuple[Tensor, ...]]:
    """torch.ops.flash_attn_3.fwd, loaded from its file: `import xformers` would ask for its own build of torch.

    The file needs a CUDA 12 runtime (libcudart.so.12) on the library path, beside the one that torch brings.
    """
    found = importlib.util.find_spec("xformers")
    folders = (found.submodule_search_locations or ()) if found else ()
    files = [file for folder in folders for file in Path(folder, "flash_attn_3").glob("_C*.so")]
    if not files:
        raise ModuleNotFoundError("No module named 'flash_attn_interface', and no xformers that carries flash_attn_3")
    torch.ops.load_library(str(files[0]))
    return torch.ops.flash_attn_3.fwd.default


OURS = {"flashattn_lite": "auto", "flashattn_lite-triton": "triton"}  # provider -> backend
PROVIDERS: dict[str, Callable[[], Provider]] = {
    **{name: lambda backend=backend: ours(backend) for name, backend in OURS.items()},  # type: ignore[misc]
    "sdpa-cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": lambda: sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "flex": flex,
    "fa2": lambda: flash_attention("flash_attn"),
    "fa3": flash_attention_3,
    "fa4": lambda: flash_attention("flash_attn.cute"),
}


def importable(makers: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """What each maker made, and the reasons of those that could not."""
    made, absent = {}, {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except Exception as reason:
            absent[name] = in_a_line(reason)
    return made, absent


def in_a_line(reason: Exception) -> str:
    """An error as the value of a row: its type and its first line."""
    first, *_ = str(reason).splitlines() or [""]
    return f"{type(reason).__name__}: {first[:160]}"
