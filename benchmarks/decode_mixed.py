"""Speed of decoding sequences of unequal lengths on a GPU, as a server has them, beside FlashAttention-3 and torch.

python -m benchmarks.decode_mixed [--cells 8x8192 64x2048x4 ...] [--providers ...] [--out CSV]

A cell is batch x room [x query tokens]; 32 query heads, 8 key heads, head dim 128, bf16, causal at each sequence's end.
Lengths are drawn evenly from an eighth of the room to all of it, from a fixed seed. Everybody is told the room, nobody
on the host the lengths, unless packed sequences show their sum. The same numbers lie three times on the card: in a
cache with room for each sequence, in pages of 16 keys in a random order, and packed.
`flashattn_lite` is attention_decode with kv_lens, `-paged` with a block table, `-packed` attention_varlen; `fa3` and
`fa3-packed` FlashAttention-3 with seqused_k and with cu_seqlens_k, splits by its own choice; `sdpa` torch's attention
with a mask of what each token sees, which has no other way to say it. `read` is benchmarks/read.py's kernel on the
packed K and V. Checked against float64 first, in CUDA graphs, timed as in benchmarks/decode.py.
Rows of metric us (a call; median, p20, p80 over replays), sm_mhz, watts and relative_error; len_kv is the room. A
provider that can't be imported or is wrong has a row of metric absent, with the reason as its value.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashattn_lite
from benchmarks.attention import CACHE_BYTES, LARGEST_ERROR_EPS
from benchmarks.decode import (
    DIM,
    GRAPH_MS,
    HEADS_KV,
    HEADS_Q,
    PAGE,
    READ_BYTES_PER_MS,
    Measured,
    captured,
    options_of,
    replay_in_turn,
    run,
)
from benchmarks.providers import carried_by_xformers, importable, in_a_line
from benchmarks.shapes import Result, rows_of
from benchmarks.timing import Timing
from flashattn_lite.reference import attention_reference

CELLS = ("8x8192", "16x4096", "32x8192", "64x2048", "128x1024", "8x8192x4", "64x2048x4", "16x4096x16", "64x2048x16")


@dataclass
class Data:
    """One set of inputs. Packed: (rows, heads, dim), sequences behind one another."""

    q: Tensor  # [B, Hq, L, D]
    k: Tensor  # [B, Hkv, room, D]
    v: Tensor
    lens: Tensor
    visible: Tensor  # [B, 1, L, room]
    pages: tuple[Tensor, Tensor, Tensor]  # k, v, table
    q_packed: Tensor
    kv_packed: Tensor  # [2, keys, Hkv, D]
    cu_q: Tensor
    cu_k: Tensor

    @property
    def tokens(self) -> int:
        return self.q.shape[2]

    @property
    def room(self) -> int:
        return self.k.shape[2]


Call = Callable[[Data], Tensor]  # gives (B, Hq, L, D)


def drawn(batch: int, room: int) -> list[int]:
    draw = random.Random(batch * room)
    return [draw.randint(room // 8, room) for _ in range(batch)]


def make_data(batch: int, room: int, tokens: int, device: str = "cuda") -> Data:
    to = {"device": device, "dtype": torch.bfloat16}
    q = torch.randn(batch, HEADS_Q, tokens, DIM, **to)  # type: ignore[call-overload]
    k, v = (torch.randn(batch, HEADS_KV, room, DIM, **to) for _ in range(2))  # type: ignore[call-overload]
    lens = torch.tensor(drawn(batch, room), dtype=torch.int32, device=device)
    keys = torch.arange(room, device=device)
    there = keys < lens[:, None]
    last = lens[:, None] - tokens + torch.arange(tokens, device=device)  # key that a token sees last
    order = torch.randperm(batch * room // PAGE, device=device)
    k_pages, v_pages = (
        torch.empty_like(x.view(-1, HEADS_KV, PAGE, DIM)).index_copy_(
            0, order, x.unflatten(2, (-1, PAGE)).movedim(2, 1).flatten(0, 1)
        )
        for x in (k, v)
    )
    q_packed = q.transpose(1, 2).flatten(0, 1).contiguous()
    kv_packed = torch.stack([x.transpose(1, 2)[there] for x in (k, v)])
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
    cu_k = F.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
    table = order.view(batch, -1).to(torch.int32)
    visible = (keys <= last[..., None])[:, None]
    return Data(q, k, v, lens, visible, (k_pages, v_pages, table), q_packed, kv_packed, cu_q, cu_k)


def ours(data: Data) -> Tensor:
    return flashattn_lite.attention_decode(data.q, data.k, data.v, data.lens)


def ours_paged(data: Data) -> Tensor:
    k, v, table = data.pages
    return flashattn_lite.attention_decode(data.q, k, v, data.lens, block_table=table)


def ours_packed(data: Data) -> Tensor:
    k, v = data.kv_packed
    out = flashattn_lite.attention_varlen(
        data.q_packed, k, v, data.cu_q, data.cu_k, causal=True, max_seqlen_q=data.tokens, max_seqlen_k=data.room
    )
    return dense(out, data)


def dense(out: Any, data: Data) -> Tensor:
    """(B, Hq, L, D) of a packed result."""
    return out.unflatten(0, (-1, data.tokens)).transpose(1, 2)


def sdpa(data: Data) -> Tensor:
    return F.scaled_dot_product_attention(data.q, data.k, data.v, attn_mask=data.visible, enable_gqa=True)


def flash_3() -> Call:
    forward = carried_by_xformers()

    def call(data: Data) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (data.q, data.k, data.v))
        return forward(q, k, v, seqused_k=data.lens, is_causal=True, num_splits=0)[0].transpose(1, 2)

    return call


def flash_3_packed() -> Call:
    forward = carried_by_xformers()

    def call(data: Data) -> Tensor:
        limits = {"max_seqlen_q": data.tokens, "max_seqlen_k": data.room}
        tables = {"cu_seqlens_q": data.cu_q, "cu_seqlens_k": data.cu_k}
        return dense(forward(data.q_packed, *data.kv_packed, **tables, **limits, is_causal=True, num_splits=0)[0], data)

    return call


def pure_read() -> Call:
    from benchmarks.read import read

    return lambda data: read(data.kv_packed.view(-1).view(torch.int32))


PROVIDERS: dict[str, Callable[[], Call]] = {
    "flashattn_lite": lambda: ours,
    "flashattn_lite-paged": lambda: ours_paged,
    "flashattn_lite-packed": lambda: ours_packed,
    "read": pure_read,
    "sdpa": lambda: sdpa,
    "fa3": flash_3,
    "fa3-packed": flash_3_packed,
}


def relative_error(out: Tensor, data: Data) -> float:
    """Norm of the error against float64, over the norm, on the first and last head of the first and last sequence."""
    wrong = right = 0.0
    for b, h in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        length, shared = int(data.lens[b]), h // (HEADS_Q // HEADS_KV)
        one = (data.q[b, h], data.k[b, shared, :length], data.v[b, shared, :length])
        exact = attention_reference(*(x[None, None] for x in one), causal=True, dtype=torch.float64)
        wrong += (out[b, h].double() - exact).square().sum().item()  # type: ignore[operator]
        right += exact.square().sum().item()  # type: ignore[union-attr]
    return (wrong / right) ** 0.5


def measure_cell(
    providers: dict[str, Call], batch: int, room: int, tokens: int, absent: dict[str, str]
) -> tuple[dict[str, Result], int]:
    """The result of each provider that is right, and the calls in one of its replays."""
    size = 4 * HEADS_KV * DIM * sum(drawn(batch, room))  # bytes of K and V
    count = max(2, -(-CACHE_BYTES // size))
    sets = [make_data(batch, room, tokens) for _ in range(count)]
    calls = count * max(1, round(GRAPH_MS * READ_BYTES_PER_MS / (size * count)))
    done: dict[str, Result] = {}
    for name, call in providers.items():
        try:
            error = 0.0 if name == "read" else relative_error(call(sets[0]), sets[0])
            if not error <= LARGEST_ERROR_EPS * torch.finfo(torch.bfloat16).eps:
                absent[name] = f"wrong: relative error {error:.2e}"
                continue
            done[name] = Result(Timing(), error, captured(call, sets, calls))  # type: ignore[arg-type]
        except Exception as refusal:
            absent[name] = in_a_line(refusal)
    replay_in_turn({name: (result.graph, result.timing) for name, result in done.items()})
    return done, calls


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of("decode_mixed", __doc__, CELLS, PROVIDERS, argv)
    made, missing = importable({name: PROVIDERS[name] for name in options.providers})

    def measure(cell: dict[str, Any], sizes: tuple[int, int, int], absent: dict[str, str]) -> Measured:
        done, calls = measure_cell(made, *sizes, absent)
        rows = [row for name, result in done.items() for row in rows_of(cell, calls, name, result)]
        return rows, [f"{name} {r.timing.quantile(0.5) * 1e3 / calls:.1f} us" for name, r in done.items()]

    run(options.cells, missing, options.out, measure)


if __name__ == "__main__":
    main()
