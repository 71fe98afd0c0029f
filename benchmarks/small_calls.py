"""Small calls of each way through the kernels, for a tool that watches what they do to memory.

    python -m benchmarks.small_calls    # once, so that Triton's cache has the kernels
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m benchmarks.small_calls

Likewise synccheck and racecheck. Without torch's cache each tensor is an allocation of its own, so that a read past its
end is seen. Every call is made twice, the second time with rows that are done again, of softmax from another address.
On a GPU of 132 multiprocessors: which row tiles are dealt out, folded or in chains follows from their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashattn_lite
from benchmarks.command import device, parser_of

LOUD = 40.0  # q and k full of it: a score far above what a row's first tiles lead to expect


def randn(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def int32(device: str, numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def dense(
    heads: tuple[int, int], len_q: int, len_k: int, dim: int, device: str, again: bool, *, batch: int = 1,
    dtype: torch.dtype = torch.bfloat16, mask: bool = False, grad: bool = False, **options: Any,
) -> None:  # fmt: skip
    """`mask`: numbers, a row for each query and head, in the dtype of q. `grad`: of all of them, too."""
    q = randn(device, batch, heads[0], len_q, dim, dtype=dtype)
    k, v = (randn(device, batch, heads[1], len_k, dim, dtype=dtype) for _ in range(2))
    if mask:
        options["mask"] = randn(device, batch, heads[0], len_q, len_k, dtype=dtype)
    if again:
        q[..., 1, :], k[..., len_k // 2, :], v[..., len_k - 3, 0] = LOUD, LOUD, float("inf")
    if grad:
        for x in (q, k, v, *options.values()):
            if isinstance(x, Tensor):
                x.requires_grad_()
    out, _ = flashattn_lite.attention(q, k, v, return_lse=True, **options)
    if grad:
        out.sum().backward()


def cache(tokens: int, keys: int, dim: int, device: str, again: bool, *, batch: int, heads: int = 32, page: int = 0,
          **options: Any) -> None:  # fmt: skip
    """Eight key heads; sequences of nearly `keys` keys, with `page` in pages that lie anywhere."""
    q = randn(device, batch, heads, tokens, dim)
    pages = batch * keys // page if page else batch
    k, v = (randn(device, pages, 8, page or keys, dim) for _ in range(2))
    if again:
        q[..., 0, :], k[..., (page or keys) // 2, :] = LOUD, LOUD
    table = torch.randperm(pages, device=device).int().view(batch, -1) if page else None
    lens = int32(device, [keys - 3 * i for i in range(batch)])
    flashattn_lite.attention_decode(q, k, v, lens, block_table=table, **options)


def packed(device: str, again: bool) -> None:
    """Few rows of three sequences, of which one has none."""
    q, k, v = randn(device, 7, 32, 128), randn(device, 2000, 8, 128), randn(device, 2000, 8, 128)
    if again:
        q[1], k[600] = LOUD, LOUD
    bounds = int32(device, [0, 3, 3, 7]), int32(device, [0, 700, 900, 2000])
    flashattn_lite.attention_varlen(q, k, v, *bounds, causal=True, max_seqlen_q=4, max_seqlen_k=1100)


def softmax(rows: int, cols: int, dim: int, device: str, again: bool, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Of `rows` rows along `dim`, and their statistics; `again`: from an address that divides by an element alone."""
    sizes = (rows, cols) if dim else (cols, rows)
    x = randn(device, rows * cols + again, dtype=dtype)[int(again) :].view(sizes)
    flashattn_lite.online_softmax(x, dim)
    flashattn_lite.softmax_stats(x, dim)


CALLS: dict[str, Callable[[str, bool], None]] = {  # (device, whether some rows are done again)
    "whole, 64": partial(dense, (16, 16), 1100, 1100, 64, batch=4),
    "whole, 128": partial(dense, (16, 16), 300, 300, 128, batch=4, causal=True),
    "whole, 256": partial(dense, (16, 16), 300, 300, 256, batch=4, causal=True),
    "dealt out, 128": partial(dense, (8, 8), 300, 300, 128, causal=True),
    "dealt out, 64": partial(dense, (8, 8), 577, 577, 64),
    "dealt out, 80": partial(dense, (4, 2), 300, 300, 80, causal=True),
    "dealt out, 256": partial(dense, (4, 4), 300, 300, 256, dtype=torch.float16, causal=True),
    "parts, 128": partial(dense, (8, 2), 128, 2100, 128, causal=True),
    "parts, 256": partial(dense, (8, 2), 64, 2100, 256),
    "folded, 128": partial(dense, (32, 8), 64, 4100, 128, batch=8, causal=True),
    "folded, 64": partial(dense, (32, 8), 65, 4100, 64, batch=8),
    "folded, 256": partial(dense, (32, 8), 16, 2048, 256, batch=14, causal=True),
    "a mask by TMA": partial(dense, (8, 8), 256, 320, 128, mask=True),
    "packed few rows": packed,
    "float32": partial(dense, (4, 2), 300, 300, 64, dtype=torch.float32, causal=True),
    "odd head dim": partial(dense, (4, 2), 300, 300, 33, causal=True),
    "gradients, 64": partial(dense, (4, 2), 300, 300, 64, grad=True, window=(100, 20)),
    "gradients, 128": partial(dense, (4, 2), 300, 300, 128, grad=True, causal=True),
    "gradients, mask": partial(dense, (4, 2), 200, 320, 64, grad=True, mask=True),
    "gradients, float32": partial(dense, (4, 2), 300, 300, 40, dtype=torch.float32, grad=True, causal=True),
    "gradients, float32, mask": partial(dense, (4, 2), 200, 320, 128, dtype=torch.float32, grad=True, mask=True),
    "softmax, short rows": partial(softmax, 64, 1000, -1),
    "softmax, rows of many units": partial(softmax, 4, 300_008, -1),
    "softmax, float32": partial(softmax, 8, 33_000, -1, dtype=torch.float32),
    "softmax, across": partial(softmax, 40, 3000, 0),
    "softmax, odd rows": partial(softmax, 64, 4097, -1),
    "softmax, odd rows, float32": partial(softmax, 64, 4097, -1, dtype=torch.float32),
    "softmax, odd rows of many units": partial(softmax, 4, 300_001, -1),
}
for name, page in (("cache", 0), ("pages", 16)):
    CALLS |= {
        f"{name}, parts": partial(cache, 16, 1024, 128, batch=1, page=page),
        f"{name}, 256": partial(cache, 16, 1024, 256, batch=2, page=page),
        f"{name}, two chains": partial(cache, 16, 2048, 128, batch=16, page=page),
        f"{name}, dealt out": partial(cache, 16, 2048, 128, batch=8, heads=64, page=page),
        f"{name}, one token": partial(cache, 1, 1024, 128, batch=64, page=page),
        f"{name}, window": partial(cache, 1, 2048, 64, batch=2, page=page, window=(300, 0)),
        f"{name}, 4 tokens": partial(cache, 4, 2048, 128, batch=2, page=page),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("small_calls", __doc__)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS), metavar="NAME", help="default: all")
    parser.add_argument("--device", type=device, default="cuda", help="%(default)s, or cpu")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    for name in options.calls:
        print(name, flush=True)  # first: what a tool reports lies below
        for again in (False, True):
            CALLS[name](options.device.type, again)
            if options.device.type == "cuda":
                torch.cuda.synchronize()


if __name__ == "__main__":
    main()
