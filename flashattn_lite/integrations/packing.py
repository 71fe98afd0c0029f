"""Packed sequences as transformers hands them to an attention function: where they begin and end in a batch of one."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flashattn_lite.api import attention_varlen
from flashattn_lite.errors import not_implemented, value_error
from flashattn_lite.flops import known
from flashattn_lite.problem import unpromised
from flashattn_lite.watchers import transformed

OF_THE_TEXT = (
    "Where they are a text's and this is another part of its model, load that with torch's attention: "
    'attn_implementation={"text_config": "attn_lite", "vision_config": "sdpa"}, say.'
)
OF_INDEXERS = {
    "indices": "Pass position_ids that start anew with each sequence, of which transformers makes the mask that the "
    "indexer goes by, and in compiled code leave cu_seq_lens_q and cu_seq_lens_k out.",
    "block_indices": "Pad the sequences to a batch.",
}
_read: Any = WeakIdKeyDictionary()  # packed lengths -> (version, the numbers): for all layers of a step at once


def may_read(x: Tensor) -> bool:
    """Whether anybody may look at x's numbers: not in compiled code, nor where a graph is made that others run."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed(x)) and known(x)


def numbers_of(cu: Tensor) -> list[int] | None:
    """None where nobody may read them."""
    if not may_read(cu):
        return None
    version = None if cu.is_inference() else cu._version
    if version is None or _read.get(cu, (None,))[0] != version:
        _read[cu] = version, cu.tolist()
    return _read[cu][1]


def check_packing(query: Tensor, key: Tensor, mask: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None) -> None:
    """That packed lengths, if there are any, are those of this query and key, of which a cache may have room for more.

    Models of images and texts hand those of the text to both.
    """
    if cu_q is None and cu_k is None:
        return
    if cu_q is None or cu_k is None:
        missing, other = ("cu_seq_lens_q", "cu_seq_lens_k") if cu_q is None else ("cu_seq_lens_k", "cu_seq_lens_q")
        remedy = "Pass both, the same twice where keys are packed as queries are."
        raise value_error(missing, f"must come with {other}", None, remedy)
    if query.shape[0] != 1:
        remedy = f"Pack the sequences into one row, or pad them to a batch and leave these out. {OF_THE_TEXT}"
        raise not_implemented("cu_seq_lens_q", "packed sequences must come in a batch of one", query, remedy)
    room = mask is not None or query.shape[2] != key.shape[2]
    sides = ("cu_seq_lens_q", cu_q, query.shape[2], False), ("cu_seq_lens_k", cu_k, key.shape[2], room)
    for name, cu, length, less in sides:
        if cu.dim() != 1:
            raise value_error(name, "must be (sequences + 1,)", cu, "Pass where each sequence begins, and the end.")
        ends = numbers_of(cu)
        if ends is None:
            continue
        if not ends or ends[0] != 0 or ends != sorted(ends) or ends[-1] > length or (ends[-1] < length and not less):
            relation = f"must ascend from 0 to the length of what is attended ({length})"
            raise value_error(name, relation, ends, f"Correct the lengths. {OF_THE_TEXT}")


def check_chosen(mask: Tensor | None, same: Tensor, indices: Tensor | None, block_indices: Tensor | None) -> None:
    """That an indexer knew of several packed sequences; same: keys of a query's own one, (L, S).

    Nobody hands it their lengths: of what it chose as if all were one, a query would be left those keys that happen to
    be of its own. One that chooses keys goes by the mask, which may say the same; one that chooses blocks does not.
    """
    name, chosen = ("block_indices", block_indices) if indices is None else ("indices", indices)
    if chosen is not None and (name == "block_indices" or not tells_apart(mask, same)):
        relation = "keys that an indexer chose must not come with the lengths of packed sequences"
        raise not_implemented(name, relation, chosen, OF_INDEXERS[name])


def tells_apart(mask: Tensor | None, same: Tensor) -> bool:
    """Whether a mask hides the keys of other packed sequences by itself, as far as anybody may look at it."""
    if mask is None or mask.dtype != torch.bool or torch.compiler.is_compiling() or not known(mask):
        return False
    return not bool((mask[..., : same.shape[1]] & ~same).any())


class Sequences(NamedTuple):
    """Packed sequences that a mask keeps apart, those of all rows of a batch one after the other."""

    number: Tensor  # (B, L), of each token's sequence in its row
    ends: list[int]  # where they begin, and the end
    cu_seqlens: Tensor
    longest: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """(B, L, Hq, Dv); query, key, value (B, H, L, D)."""
        longest = {"max_seqlen_q": self.longest, "max_seqlen_k": self.longest}
        return attend_apart(query, key, value, (self.cu_seqlens, self.cu_seqlens), {**options, **longest})

    def are(self, query: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> bool:
        """Whether they are this query's (B, Hq, L, D), and lengths that a model hands on, if any, say the same."""
        return self.ends[-1] == query.shape[0] * query.shape[2] and all(
            cu is None or numbers_of(cu) == self.ends for cu in (cu_q, cu_k)
        )


def sequences_of(number: Tensor) -> Sequences:
    """number (B, L): of each token's sequence in its row, as transformers counts them."""
    first = torch.ones_like(number, dtype=torch.bool)
    first[:, 1:] = number[:, 1:] != number[:, :-1]
    ends = [*first.flatten().nonzero().flatten().tolist(), number.numel()]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=number.device)
    return Sequences(number, ends, cu_seqlens, max(b - a for a, b in itertools.pairwise(ends)))


def packed_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: tuple[Tensor, Tensor], options: dict[str, Any], others: Any
) -> Tensor:
    """(1, L, Hq, Dv) of sequences that no mask keeps apart, nor hides what lies before a window."""
    left = None if others.get("sliding_window") is None else others["sliding_window"] - 1
    told = {side: others.get(f"max_length_{side}") for side in "qk"}  # which transformers has measured
    longest = {f"max_seqlen_{x}": unpromised(x, length) for x, length in told.items() if isinstance(length, int)}
    right = None if options["causal"] else left  # as FlashAttention, to which a model hands the same number
    return attend_apart(query, key, value, cu_seqlens, {"window": (left, right), **options, **longest})


def attend_apart(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: tuple[Tensor, Tensor], options: dict[str, Any]
) -> Tensor:
    """(B, L, Hq, Dv); query, key, value (B, H, L, D), of whose rows one after the other cu_seqlens says the ends."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out: Tensor = attention_varlen(q, k, v, *cu_seqlens, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def same_sequence(cu_q: Tensor, cu_k: Tensor, len_q: int, len_k: int) -> Tensor:
    """(L, S) of booleans: True for keys of a query's own packed sequence."""
    of_q, of_k = (
        torch.searchsorted(cu, torch.arange(n, device=cu.device, dtype=cu.dtype), right=True)
        for cu, n in ((cu_q, len_q), (cu_k, len_k))
    )
    return of_q.unsqueeze(1) == of_k
