"""Speed of the attention backward on a GPU, beside what else is there, all in one process.

python -m benchmarks.backward [--dtype bf16|fp32] [--head-dims 64 128 256] [--lengths 512 2048 16384] [--bias]
                              [--providers ...] [--out CSV]

16k tokens in all, hidden size 2048. The forward runs once; timed is what autograd then does for the gradients of q, k
and v, with --bias also that of a mask with a number for each head, query and key (T5's, say), summed over the batch.
Every provider is first checked against float64 on one head; one that is wrong is not timed. Then two rounds, the second
in opposite order: 100 ms of warm-up, then 60 ms are timed. FLOPs = 10 B H L S D, half of it for causal: five products,
although ours makes seven, of head dims above 128 eight, for a mask two more. Rows as benchmarks.attention writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn_lite
from benchmarks.attention import HIDDEN, TOKENS, print_cell, rows_of
from benchmarks.command import need_gpu, parser_of, positive
from benchmarks.progress import Progress
from benchmarks.provenance import results_of, row_provenance, write_rows
from benchmarks.providers import PROVIDERS, Provider, carried_by_xformers, compiled_flex, importable, in_a_line
from benchmarks.timing import Timing, sustained

WARM_MS, TIMED_MS = 100.0, 60.0
# Relative norm against float64. Of 16 bits fused peers are at a third of eps; float32's own sums are off by some.
LARGEST_ERROR_EPS = {"bf16": 1.0, "fp32": 16.0}
NAMES = ("flashattn_lite", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "flex", "fa3", "fa4")
Backward = Callable[[], Sequence[Tensor]]  # gradients of what was given


class Maker(NamedTuple):
    """Makes a provider's backward of given inputs, d_out and causal; `setting` must hold around both."""

    make: Callable[[Sequence[Tensor], Tensor, bool], Backward]
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext


def by_autograd(call: Callable[..., Tensor], given: Sequence[Tensor], d_out: Tensor) -> Backward:
    """What autograd does behind one forward."""
    leaves = [x.detach().requires_grad_() for x in given]
    out = call(*leaves)
    return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)


def of(provider: Provider) -> Maker:
    def make(given: Sequence[Tensor], d_out: Tensor, causal: bool) -> Backward:
        call = lambda q, k, v: provider.unlay(provider.call(q, k, v, causal))
        return by_autograd(call, [provider.lay(x) for x in given], d_out)

    return Maker(make, provider.setting)


def by_fa3(given: Sequence[Tensor], d_out: Tensor, causal: bool) -> Backward:
    """The op in xformers' file: it has no autograd of its own."""
    q, k, v, above = (x.transpose(1, 2).contiguous() for x in (*given, d_out))
    out, lse, *_ = carried_by_xformers()(q, k, v, is_causal=causal)
    grads = [torch.empty_like(x) for x in (q, k, v)]

    def call() -> list[Tensor]:
        torch.ops.flash_attn_3.bwd(above, q, k, v, out, lse, *grads, is_causal=causal)
        return [x.transpose(1, 2) for x in grads]

    return call


def with_bias() -> dict[str, Maker]:
    """Who takes a mask that wants a gradient: call(q, k, v, bias [1, H, L, S])."""

    def flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return compiled_flex()(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[0, h, i, j])

    def of_call(call: Callable[..., Tensor], setting: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Maker:
        return Maker(lambda given, d_out, _: by_autograd(call, given, d_out), setting)

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flashattn_lite.attention(q, k, v, mask=bias)

    torchs = lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return {
        "flashattn_lite": of_call(ours),
        "sdpa-efficient": of_call(torchs, lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)),
        "sdpa-cudnn": of_call(torchs, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
        "sdpa-math": of_call(torchs, lambda: sdpa_kernel(SDPBackend.MATH)),
        "flex": of_call(flex),
    }


def exact_gradients(given: Sequence[Tensor], d_out: Tensor, causal: bool) -> Sequence[Tensor]:
    """In float64, of the first head; of all sequences if there is a bias, whose gradient is their sum, else of one."""
    some = slice(None) if len(given) > 3 else slice(1)
    leaves = [x[some, 0].double().requires_grad_() for x in given]
    q, k, v, *bias = leaves
    scores = q @ k.mT / q.shape[-1] ** 0.5
    for x in bias:
        scores = scores + x
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.autograd.grad(torch.softmax(scores, -1) @ v, leaves, d_out[some, 0].double())


def relative_error(grads: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Norm of the error of the first head over the norm, of the gradients together."""
    wrong = sum(
        (grad[: len(want), 0].double() - want).square().sum().item() for grad, want in zip(grads, exact, strict=True)
    )
    return float((wrong / sum(want.square().sum().item() for want in exact)) ** 0.5)


def measure(
    makers: dict[str, Maker], given: Sequence[Tensor], causal: bool, largest: float, absent: dict[str, str]
) -> dict[str, tuple[Timing, float]]:
    """(timing, error) of each provider that is right; the others' reasons go into `absent`."""
    d_out = torch.randn_like(given[2])
    exact = exact_gradients(given, d_out, causal)
    done: dict[str, tuple[Timing, float]] = {}
    calls: dict[str, Backward] = {}
    for name, maker in makers.items():
        try:
            with maker.setting():
                run = maker.make(given, d_out, causal)
                error = relative_error(run(), exact)
        except Exception as refusal:
            absent[name] = in_a_line(refusal)
            continue
        if not error <= largest:
            absent[name] = f"wrong: relative error {error:.2e}"
            continue
        done[name], calls[name] = (Timing(), error), run
    for order in (list(done), list(done)[::-1]):
        for name in order:
            run_once = lambda _, call=calls[name]: call()
            done[name][0].add(sustained(run_once, WARM_MS, TIMED_MS))
    return done


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("backward", __doc__)
    parser.add_argument("--dtype", choices=LARGEST_ERROR_EPS, default="bf16")
    parser.add_argument("--head-dims", nargs="+", type=positive, default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=positive, default=[512, 2048, 16384])
    parser.add_argument(
        "--providers", nargs="+", choices=NAMES, default=list(NAMES), help="with --bias all that take one"
    )
    parser.add_argument("--bias", action="store_true", help="a mask that wants a gradient; up to 2048 keys, not causal")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/backward.csv, _fp32, _bias")
    options = parser.parse_args(argv)
    need_gpu(parser)
    name = "backward" + "_fp32" * (options.dtype == "fp32") + "_bias" * options.bias
    out = options.out or results_of() / f"{name}.csv"
    missing: dict[str, str] = {}
    if options.bias:
        makers = with_bias()
    else:
        providers, missing = importable({name: PROVIDERS[name] for name in options.providers})
        makers = {name: Maker(by_fa3) if name == "fa3" else of(provider) for name, provider in providers.items()}
    torch.manual_seed(0)
    common = {**row_provenance("cuda"), "op": "attention_backward_bias" if options.bias else "attention_backward"}
    rows: list[dict[str, Any]] = [
        {**common, "provider": name, "metric": "absent", "median": why} for name, why in missing.items()
    ]
    cells = [
        (dim, causal, n) for dim in options.head_dims for causal in (True, False) for n in options.lengths
        if not options.bias or (not causal and n <= 2048)
    ]  # fmt: skip
    dtype, kind = options.dtype, {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    with Progress(len(cells)) as bar:
        for number, (dim, causal, length) in enumerate(cells):
            title = f"{dtype} d{dim} {'causal' if causal else 'full'} {length}"
            bar.show(number, title)
            heads, batch = HIDDEN // dim, max(1, TOKENS // length)
            cell = {**common, "batch": batch, "heads_q": heads, "heads_kv": heads, "len_q": length, "len_kv": length,
                    "head_dim": dim, "head_dim_v": dim, "dtype": dtype, "causal": causal}  # fmt: skip
            absent: dict[str, str] = {}
            shapes = [(batch, heads, length, dim)] * 3 + [(1, heads, length, length)] * options.bias
            given = [torch.randn(shape, device="cuda", dtype=kind) for shape in shapes]
            done = measure(makers, given, causal, LARGEST_ERROR_EPS[dtype] * torch.finfo(kind).eps, absent)
            flop = 10 * batch * heads * length * length * dim * (0.5 if causal else 1)
            for name, (timing, error) in done.items():
                rows += rows_of(cell, flop, name, timing, error)
            rows += [{**cell, "provider": n, "metric": "absent", "median": why} for n, why in absent.items()]
            print_cell(title, done, flop)
            for name, why in absent.items():
                print(f"  absent: {name}: {why}", flush=True)
            write_rows(out, rows)
    print(f"rows: {out}")


if __name__ == "__main__":
    main()
