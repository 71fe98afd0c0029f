"""What torch's FlopCounterMode counts for our ops: as for torch's own attention, products of whole score matrices.

torch.utils.flop_counter takes 0.15 s to import, so we don't: formulas are registered by the first call that somebody
looks on while that module is there, with the counters that are looking too. What a mask hides is counted, as torch
does; keys past kv_lens, and those of other packed sequences, are not. To read those lengths, as torch's own formulas do
those of packed sequences, waits for the GPU: only while somebody counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flashattn_lite.problem import Inputs


def known(lengths: Tensor) -> bool:
    """Whether there are numbers to be read: no compiler's stand-in, no meta tensor, nothing that a graph captures."""
    if type(lengths) is not Tensor or lengths.is_meta:
        return False
    return not (lengths.is_cuda and torch.cuda.is_current_stream_capturing())


def pairs(inputs: Inputs, capacity: int | None = None) -> int:
    """(Query, key) pairs of a head, all sequences together; capacity: keys of a sequence, if not k's own number."""
    q, k = inputs.q, inputs.k
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        if not (known(inputs.cu_seqlens_q) and known(inputs.cu_seqlens_k)):
            return int(q.shape[0]) * int(k.shape[0])  # as if one sequence: no fewer
        rows, keys = inputs.cu_seqlens_q.diff(), inputs.cu_seqlens_k.diff()
        if inputs.kv_lens is not None and known(inputs.kv_lens):
            keys = torch.minimum(keys, inputs.kv_lens.to(keys).clamp_min(0))
        return int((rows.long() * keys.long()).sum())
    most = int(k.shape[2] if capacity is None else capacity)
    if inputs.kv_lens is not None and known(inputs.kv_lens):
        return int(q.shape[2]) * int(inputs.kv_lens.clamp(0, most).sum())
    return int(q.shape[0]) * int(q.shape[2]) * most


def forward(*args: Any, **_: Any) -> int:
    """Of `flashattn_lite::attention`: Q K^T and P V."""
    inputs = Inputs(*args[: len(Inputs._fields)])
    return 2 * pairs(inputs) * inputs.q.shape[1] * (inputs.q.shape[-1] + inputs.v.shape[-1])


def backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *args: Any, **_: Any) -> int:
    """Of `flashattn_lite::attention_backward`: Q K^T anew, dO V^T, P^T dO, dS K and dS^T Q."""
    inputs = Inputs(*args[: len(Inputs._fields)])
    return 2 * pairs(inputs) * inputs.q.shape[1] * (3 * inputs.q.shape[-1] + 2 * inputs.v.shape[-1])


def decode(q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor, table: Tensor | None, *_: Any, **__: Any) -> int:
    """Of `flashattn_lite::attention_decode`, over the keys of each sequence in the cache."""
    capacity = k.shape[2] if table is None else table.shape[1] * k.shape[2]
    return 2 * pairs(Inputs(q, k, v, kv_lens=kv_lens), capacity) * q.shape[1] * (q.shape[-1] + v.shape[-1])


FORMULAS: dict[str, Callable[..., int]] = {
    "attention": forward,
    "attention_backward": backward,
    "attention_decode": decode,
}


def teach() -> None:
    """Registers FORMULAS for counters to come, and with those that look on now; a counter's own formula stays."""
    if torch.compiler.is_compiling():
        return
    module: Any = sys.modules.get("torch.utils.flop_counter")
    counting = getattr(module, "FlopCounterMode", None)
    if counting is None:  # not imported, or another thread is about to
        return
    looking = [getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack()]
    for name, formula in FORMULAS.items():
        op = getattr(torch.ops.flashattn_lite, name)
        registered = module.flop_registry.setdefault(op, formula)  # at once: threads may call first together
        for counter in looking:
            if isinstance(counter, counting):
                counter.flop_registry.setdefault(op, registered)
