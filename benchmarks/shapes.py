"""Speed of attention at the shapes that models call it with, beside what else is there, all in one process.

python -m benchmarks.shapes [--shapes bert-padded llama-8k ...] [--providers ...] [--out CSV]

benchmarks/attention.py has one size of problem in many lengths; this has what practice has besides: masks, windows,
odd lengths and head dims, cross attention, a prompt that comes in chunks, few query rows over many keys.
For each shape every provider is first checked against float64 on the first and the last head; one that is wrong is not
timed. Then each is captured in a CUDA graph, so that host time does not count (benchmarks/host_time.py has that), with
inputs rotated past the L2 cache, and runs in two rounds, the second in opposite order: 150 ms of warm-up, 80 ms timed.
Masks are made once and given to all, as a model would; `sdpa` is torch's own choice.
Rows of metric us (of a call; median, p20, p80 over replays), sm_mhz, watts and relative_error, with the shape's name
behind the lengths; a provider that can't be imported or refuses the problem has a row of metric absent, with the reason
as its value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import flashattn_lite
from benchmarks.attention import CACHE_BYTES, LARGEST_ERROR_EPS
from benchmarks.command import need_gpu, parser_of
from benchmarks.decode import GRAPH_MS, captured, replay_in_turn
from benchmarks.progress import Progress
from benchmarks.provenance import COLUMNS, DTYPES, results_of, row_provenance, write_rows
from benchmarks.providers import carried_by_xformers, in_a_line
from benchmarks.timing import Timing, median, sustained
from flashattn_lite.reference import attention_reference

DTYPE_OF = {**DTYPES, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """One problem. Queries are the last of the keys."""

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    head_dim: int
    head_dim_v: int = 0  # 0: as head_dim
    causal: bool = False
    window: int | None = None  # keys before its own that a query sees
    softcap: float | None = None
    sinks: bool = False
    # "padding": [B, 1, 1, S] bool, half of the keys to all; "causal": [B, 1, L, S] bool, as transformers makes it;
    # "random": [L, S] bool, one key in ten hidden; "bias": [1, H, L, S] in the dtype of q.
    mask: str = ""
    dtype: str = "bf16"

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def cross(self) -> bool:
        return self.len_q != self.len_kv


def own(batch: int, heads: int, length: int, dim: int, **rest: Any) -> Shape:
    """Self-attention with as many key as query heads."""
    return Shape(batch, heads, heads, length, length, dim, **rest)


def grouped(batch: int, len_q: int, len_kv: int, **rest: Any) -> Shape:
    """Causal, 32 query and 8 key heads of 128."""
    return Shape(batch, 32, 8, len_q, len_kv, 128, causal=True, **rest)


def one_key_head(len_q: int, len_kv: int) -> Shape:
    """Causal, one sequence, eight query heads of 128: what one of eight GPUs has of a model with eight key heads."""
    return Shape(1, 8, 1, len_q, len_kv, 128, causal=True)


SHAPES = {
    "prompt-128": grouped(1, 128, 128),
    "prompt-256": grouped(1, 256, 256),
    "prompt-256-d80": own(1, 32, 256, 80, causal=True),
    "prompt-512-d256": Shape(1, 16, 8, 512, 512, 256, causal=True),
    "prompt-2k-1-key-head": one_key_head(2048, 2048),
    "llama-512": grouped(1, 512, 512),
    "llama-2k": grouped(1, 2048, 2048),
    "llama-8k": grouped(1, 8192, 8192),
    "llama-2k-fp16": grouped(1, 2048, 2048, dtype="fp16"),
    "llama-2k-mask": grouped(4, 2048, 2048, mask="causal"),
    "gpt2": own(8, 12, 1024, 64, causal=True),
    "bert-128": own(32, 12, 128, 64),
    "bert-512": own(32, 12, 512, 64),
    "bert-padded": own(32, 12, 512, 64, mask="padding"),
    "t5-bias": own(4, 12, 1024, 64, mask="bias"),
    "random-mask": own(2, 16, 2048, 128, mask="random"),
    "vit-257": own(32, 16, 257, 64),
    "vit-257-d80": own(32, 16, 257, 80),
    "vit-257-d80-x1": own(1, 16, 257, 80),
    "vit-257-d104": own(32, 16, 257, 104),
    "vit-577": own(32, 16, 577, 64),
    "vit-577-x1": own(1, 16, 577, 64),
    "siglip-d72": own(16, 16, 729, 72),
    "siglip-256-d72": own(32, 16, 256, 72),
    "siglip-4k-d72": own(1, 16, 4096, 72),
    "diffusion-d40": own(2, 8, 4096, 40),
    "diffusion-d64": own(2, 20, 1024, 64),
    "diffusion-d80": own(2, 8, 1024, 80),
    "diffusion-text": Shape(2, 10, 10, 4096, 77, 64),
    "diffusion-d160": own(2, 8, 256, 160),
    "image-4608": own(1, 24, 4608, 128),
    "video-32k": own(1, 12, 32760, 128),
    "speech-1500": own(8, 20, 1500, 64),
    "speech-1500-x1": own(1, 20, 1500, 64),
    "speech-text": Shape(8, 20, 20, 224, 1500, 64),
    "speech-token": Shape(8, 20, 20, 1, 1500, 64),
    "softcap-window-d256": Shape(1, 16, 8, 8192, 8192, 256, causal=True, softcap=50.0, window=4095),
    "window-1k-d256": Shape(1, 16, 8, 8192, 8192, 256, causal=True, window=1023),
    "window-4k": grouped(1, 16384, 16384, window=4095),
    "sinks-window-128": Shape(1, 64, 8, 4096, 4096, 64, causal=True, window=127, sinks=True),
    "latent-192-128": own(1, 16, 4096, 192, head_dim_v=128, causal=True),
    "d96": own(1, 32, 4096, 96, causal=True),
    "d112": own(1, 32, 4096, 112, causal=True),
    "d160": own(1, 16, 4096, 160),
    "d192": own(1, 16, 4096, 192),
    "chunk-2k-of-32k": grouped(1, 2048, 32768),
    "chunk-512-of-8k": grouped(1, 512, 8192),
    "chunk-128-of-8k": grouped(1, 128, 8192),
    "chunk-64-of-8k": grouped(1, 64, 8192),
    "chunk-16-of-8k": grouped(1, 16, 8192),
    "chunk-64-of-8k-x8": grouped(8, 64, 8192),
    "chunk-64-of-8k-x8-d64": Shape(8, 32, 8, 64, 8192, 64, causal=True),
    "chunk-128-of-8k-x4": grouped(4, 128, 8192),
    "chunk-256-of-8k-x2": grouped(2, 256, 8192),
    "chunk-32-of-4k-x16": grouped(16, 32, 4096),
    "chunk-16-of-4k-x16": grouped(16, 16, 4096),
    "chunk-64-of-4k": grouped(1, 64, 4096),
    "chunk-64-of-4k-x8-32-heads": Shape(8, 32, 32, 64, 4096, 128, causal=True),
    "chunk-16-of-2k-x32": grouped(32, 16, 2048),
    "chunk-16-of-8k-x8": grouped(8, 16, 8192),
    "chunk-16-of-4k-x16-d96": Shape(16, 32, 8, 16, 4096, 96, causal=True),
    "chunk-16-of-8k-d256": Shape(1, 32, 8, 16, 8192, 256, causal=True),
    "chunk-16-of-4k-x16-d192": Shape(16, 32, 8, 16, 4096, 192, causal=True),
    "chunk-16-of-4k-x8-d256": Shape(8, 32, 8, 16, 4096, 256, causal=True),
    "chunk-16-of-4k-x16-d256": Shape(16, 32, 8, 16, 4096, 256, causal=True),
    "chunk-512-of-32k": grouped(1, 512, 32768),
    "chunk-512-of-4k-1-key-head": one_key_head(512, 4096),
    "chunk-512-of-8k-1-key-head": one_key_head(512, 8192),
    "chunk-1k-of-16k-1-key-head": one_key_head(1024, 16384),
    "chunk-512-1-key-head": one_key_head(512, 32768),
    "chunk-64-of-32k-1-key-head": one_key_head(64, 32768),
    "chunk-128-of-128k": grouped(1, 128, 131072),
    "tokens-16-of-8k-1-key-head": one_key_head(16, 8192),
    "tokens-16-of-16k-1-key-head": one_key_head(16, 16384),
    "tokens-16-of-32k-1-key-head": one_key_head(16, 32768),
    "tokens-16-1-key-head": one_key_head(16, 131072),
    "tokens-16-of-16k-group-8": Shape(1, 64, 8, 16, 16384, 128, causal=True),
    "tokens-16-of-8k-group-8-x8": Shape(8, 64, 8, 16, 8192, 128, causal=True),
    "tokens-16-of-16k-group-8-x8": Shape(8, 64, 8, 16, 16384, 128, causal=True),
    "tokens-16-of-16k-group-8-x16": Shape(16, 64, 8, 16, 16384, 128, causal=True),
    "token-32k-1-key-head": one_key_head(1, 32768),
    "token-128k-1-key-head": one_key_head(1, 131072),
    "token-128": grouped(1, 1, 128),
    "token-128-x64": grouped(64, 1, 128),
    "token-256-x8": grouped(8, 1, 256),
    "token-512": grouped(1, 1, 512),
    "token-512-x8": grouped(8, 1, 512),
    "token-512-x64": grouped(64, 1, 512),
    "token-512-d64": Shape(8, 12, 12, 1, 512, 64, causal=True),
    "token-32-heads": Shape(8, 32, 32, 1, 4096, 128, causal=True),
    "token-1-key-head": Shape(8, 32, 1, 1, 8192, 128, causal=True),
    "token-group-8": Shape(8, 64, 8, 1, 8192, 128, causal=True),
    "tokens-4-group-8": Shape(8, 64, 8, 4, 8192, 128, causal=True),
    "token-d64": Shape(8, 32, 8, 1, 8192, 64, causal=True),
    "token-padded": Shape(8, 32, 8, 1, 4096, 128, mask="padding"),
    "token-bias": Shape(8, 12, 12, 1, 2048, 64, mask="bias"),
    "fp32-d64": own(2, 8, 1024, 64, dtype="fp32"),
    "fp32-d128": own(1, 8, 4096, 128, dtype="fp32"),
}


@dataclass
class Data:
    """One set of inputs; what all sets share is made once."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None


Call = Callable[[Data], Tensor]
Maker = Callable[[Shape], Call]


def mask_of(shape: Shape, device: str) -> Tensor | None:
    batch, len_q, len_kv = shape.batch, shape.len_q, shape.len_kv
    if shape.mask == "padding":
        lengths = torch.randint(len_kv // 2, len_kv + 1, (batch, 1), device=device)
        return (torch.arange(len_kv, device=device) < lengths)[:, None, None, :]
    if shape.mask == "causal":
        return torch.ones(batch, 1, len_q, len_kv, dtype=torch.bool, device=device).tril(len_kv - len_q)
    if shape.mask == "random":
        return torch.rand(len_q, len_kv, device=device) < 0.9
    if shape.mask == "bias":
        return torch.randn(1, shape.heads_q, len_q, len_kv, device=device).to(DTYPE_OF[shape.dtype])
    return None


def make_sets(shape: Shape, device: str, most: int = CACHE_BYTES) -> list[Data]:
    """As many sets of inputs as rotate past the L2 cache."""
    dtype = DTYPE_OF[shape.dtype]
    mask = mask_of(shape, device)
    sinks = torch.randn(shape.heads_q, device=device) if shape.sinks else None
    sizes = (
        (shape.batch, shape.heads_q, shape.len_q, shape.head_dim),
        (shape.batch, shape.heads_kv, shape.len_kv, shape.head_dim),
        (shape.batch, shape.heads_kv, shape.len_kv, shape.dim_v),
    )
    one_set = sum(torch.Size(size).numel() for size in sizes) * dtype.itemsize
    sets = []
    for _ in range(max(2, -(-most // one_set))):
        q, k, v = (torch.randn(size, device=device).to(dtype) for size in sizes)
        sets.append(Data(q, k, v, mask, sinks))
    return sets


def options_of(shape: Shape) -> dict[str, Any]:
    """Ours, and the reference's. A mask tensor that says what is causal says all of it."""
    window = None if shape.window is None else (shape.window, 0)
    return {"causal": shape.causal and shape.mask != "causal", "window": window, "softcap": shape.softcap}


def ours(shape: Shape) -> Call:
    options = options_of(shape)
    return lambda x: flashattn_lite.attention(x.q, x.k, x.v, mask=x.mask, sinks=x.sinks, **options)


def sdpa(shape: Shape) -> Call:
    if shape.window is not None or shape.softcap or shape.sinks:
        raise NotImplementedError("torch's attention has no window, soft cap or sinks")
    causal = options_of(shape)["causal"]
    bias = causal_lower_right(shape.len_q, shape.len_kv) if causal and shape.cross and shape.len_q > 1 else None
    options = {"is_causal": causal and not shape.cross, "enable_gqa": shape.heads_q != shape.heads_kv}
    return lambda x: F.scaled_dot_product_attention(
        x.q, x.k, x.v, attn_mask=x.mask if bias is None else bias, **options
    )


def sdpa_cudnn(shape: Shape) -> Call:
    call = sdpa(shape)

    def chosen(x: Data) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return call(x)

    return chosen


def flash_attention_3(shape: Shape) -> Call:
    """With splits of its own choice, as xformers' build has it."""
    forward = carried_by_xformers()
    if shape.mask or shape.sinks:
        raise NotImplementedError("FlashAttention-3 has no mask tensors and no sinks")
    left, right = (-1, -1) if shape.window is None else (shape.window, 0)
    options = {"is_causal": shape.causal, "window_size_left": left, "window_size_right": right,
               "softcap": shape.softcap or 0.0, "num_splits": 0}  # fmt: skip
    return lambda x: forward(x.q.transpose(1, 2), x.k.transpose(1, 2), x.v.transpose(1, 2), **options)[0].transpose(
        1, 2
    )


PROVIDERS: dict[str, Maker] = {
    "flashattn_lite": ours,
    "sdpa": sdpa,
    "sdpa-cudnn": sdpa_cudnn,
    "fa3": flash_attention_3,
}


def relative_error(out: Tensor, shape: Shape, x: Data) -> float:
    """Norm of the error against float64, over the norm, on the first and the last head."""
    wrong = right = 0.0
    group = shape.heads_q // shape.heads_kv
    full = None if x.mask is None else x.mask.expand(shape.batch, shape.heads_q, shape.len_q, shape.len_kv)
    for b, h in ((0, 0), (shape.batch - 1, shape.heads_q - 1)):
        q, k, v = x.q[b, h], x.k[b, h // group], x.v[b, h // group]
        mask = None if full is None else full[b, h][None, None]
        sinks = None if x.sinks is None else x.sinks[h : h + 1]
        exact = attention_reference(q[None, None], k[None, None], v[None, None], **options_of(shape), mask=mask,
                                    sinks=sinks, dtype=torch.float64)  # fmt: skip
        assert isinstance(exact, Tensor)
        exact = exact[0, 0]
        wrong += (out[b, h].double() - exact).square().sum().item()
        right += exact.square().sum().item()
    return (wrong / right) ** 0.5


@dataclass
class Result:
    timing: Timing
    error: float
    graph: torch.cuda.CUDAGraph


def measure(shape: Shape, makers: dict[str, Maker], absent: dict[str, str]) -> tuple[dict[str, Result], int]:
    """The result of each provider that is right, and the calls in one of its replays."""
    sets = make_sets(shape, "cuda")
    largest = LARGEST_ERROR_EPS * torch.finfo(DTYPE_OF[shape.dtype]).eps
    done: dict[str, Result] = {}
    calls = 0
    for name, make in makers.items():
        try:
            call = make(shape)
            error = relative_error(call(sets[0]), shape, sets[0])
            # Of float32 it is said how wrong one is; whose products are rounded to fewer digits is no rival there.
            if not error <= largest * (1 if shape.dtype != "fp32" else 32):
                absent[name] = f"wrong: relative error {error:.2e}"
                continue
            if not calls:
                one = sustained(lambda _, call=call: call(sets[0]), 1.0, 1.0).quantile(0.5)  # type: ignore[misc]
                calls = len(sets) * max(1, round(GRAPH_MS / (one * len(sets))))
            done[name] = Result(Timing(), error, captured(call, sets, calls))  # type: ignore[arg-type]
        except Exception as refusal:
            absent[name] = in_a_line(refusal)
    replay_in_turn({name: (result.graph, result.timing) for name, result in done.items()})
    return done, calls


def rows_of(cell: dict[str, Any], calls: int, name: str, result: Result) -> list[dict[str, Any]]:
    timing, row = result.timing, {**cell, "provider": name}
    microseconds = lambda share: f"{timing.quantile(share) * 1e3 / calls:.1f}"
    rows = [
        {**row, "metric": "us", "median": microseconds(0.5), "p20": microseconds(0.2), "p80": microseconds(0.8)},
        {**row, "metric": "relative_error", "median": f"{result.error:.2e}"},
    ]
    if timing.joules:
        rows.append({**row, "metric": "sm_mhz", "median": f"{median(timing.megahertz):.0f}"})
        rows.append({**row, "metric": "watts", "median": f"{timing.watts:.0f}"})
    return rows


def columns() -> list[str]:
    """Those of all benchmarks, with the shape's name behind the lengths."""
    at = COLUMNS.index("len_kv") + 1
    return [*COLUMNS[:at], "shape", *COLUMNS[at:]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("shapes", __doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME", help="default: all"
    )
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/shapes.csv")
    options = parser.parse_args(argv)
    need_gpu(parser)
    out = options.out or results_of() / "shapes.csv"
    torch.manual_seed(0)
    common = {**row_provenance("cuda"), "op": "attention"}
    rows: list[dict[str, Any]] = []
    with Progress(len(options.shapes)) as bar:
        for number, name in enumerate(options.shapes):
            bar.show(number, name)
            shape = SHAPES[name]
            cell = {**common, "batch": shape.batch, "heads_q": shape.heads_q, "heads_kv": shape.heads_kv,
                    "len_q": shape.len_q, "len_kv": shape.len_kv, "shape": name, "head_dim": shape.head_dim,
                    "head_dim_v": shape.dim_v, "dtype": shape.dtype, "causal": shape.causal}  # fmt: skip
            absent: dict[str, str] = {}
            done, calls = measure(shape, {name: PROVIDERS[name] for name in options.providers}, absent)
            for provider, result in done.items():
                rows += rows_of(cell, calls, provider, result)
            rows += [{**cell, "provider": n, "metric": "absent", "median": why} for n, why in absent.items()]
            times = (f"{n} {r.timing.quantile(0.5) * 1e3 / calls:.1f} us" for n, r in done.items())
            print(f"{name}: " + ", ".join(times), flush=True)
            for provider, why in absent.items():
                print(f"  absent: {provider}: {why}", flush=True)
            write_rows(out, rows, columns())
            del done
            torch.cuda.empty_cache()
    print(f"rows: {out}")


if __name__ == "__main__":
    main()
