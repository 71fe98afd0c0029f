"""Speed of the attention backward on a GPU, beside what else is there, all in one process.

python -m benchmarks.backward [--head-dims 64 128 256] [--lengths 512 2048 16384] [--providers ...] [--out CSV]

16k tokens in all, hidden size 2048, bf16. The forward runs once; timed is what autograd then does for the gradients of
q, k and v. Every provider is first checked against float64 on one head; one that is wrong is not timed. Then two
rounds, the second in opposite order: 100 ms of warm-up, then 60 ms are timed. FLOPs = 10 B H L S D, half of it for
causal: five products, although ours makes seven. Rows as benchmarks.attention writes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention import HIDDEN, LARGEST_ERROR_EPS, QKV, TOKENS, print_cell, rows_of
from benchmarks.progress import Progress
from benchmarks.provenance import results_of, row_provenance, write_rows
from benchmarks.providers import PROVIDERS, Provider, carried_by_xformers, importable, in_a_line
from benchmarks.timing import Timing, sustained

WARM_MS, TIMED_MS = 100.0, 60.0
NAMES = ("flashattn_lite", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "flex", "fa3", "fa4")
Backward = Callable[[], Sequence[Tensor]]  # gradients of q, k and v


def by_autograd(provider: Provider, qkv: QKV, d_out: Tensor, causal: bool) -> Backward:
    """What autograd does behind one forward."""
    leaves = [provider.lay(x).detach().requires_grad_() for x in qkv]
    out = provider.unlay(provider.call(leaves[0], leaves[1], leaves[2], causal))
    return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)


def by_fa3(qkv: QKV, d_out: Tensor, causal: bool) -> Backward:
    """The op in xformers' file: it has no autograd of its own."""
    q, k, v, above = (x.transpose(1, 2).contiguous() for x in (*qkv, d_out))
    out, lse, *_ = carried_by_xformers()(q, k, v, is_causal=causal)
    grads = [torch.empty_like(x) for x in (q, k, v)]

    def call() -> list[Tensor]:
        torch.ops.flash_attn_3.bwd(above, q, k, v, out, lse, *grads, is_causal=causal)
        return [x.transpose(1, 2) for x in grads]

    return call


def exact_gradients(qkv: QKV, d_out: Tensor, causal: bool) -> Sequence[Tensor]:
    """In float64, of the first head."""
    q, k, v = (x[0, 0].double().requires_grad_() for x in qkv)
    scores = q @ k.T / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.autograd.grad(torch.softmax(scores, -1) @ v, (q, k, v), d_out[0, 0].double())


def relative_error(grads: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Norm of the error of the first head over the norm, of the three gradients together."""
    wrong = sum((grad[0, 0].double() - want).square().sum().item() for grad, want in zip(grads, exact, strict=True))
    return float((wrong / sum(want.square().sum().item() for want in exact)) ** 0.5)


def measure(
    providers: dict[str, Provider], qkv: QKV, causal: bool, absent: dict[str, str]
) -> dict[str, tuple[Timing, float]]:
    """(timing, error) of each provider that is right; the others' reasons go into `absent`."""
    d_out = torch.randn_like(qkv[2])
    exact = exact_gradients(qkv, d_out, causal)
    done: dict[str, tuple[Timing, float]] = {}
    calls: dict[str, Backward] = {}
    for name, provider in providers.items():
        try:
            with provider.setting():
                make = by_fa3(qkv, d_out, causal) if name == "fa3" else by_autograd(provider, qkv, d_out, causal)
                error = relative_error(make(), exact)
        except Exception as refusal:
            absent[name] = in_a_line(refusal)
            continue
        if not error <= LARGEST_ERROR_EPS * torch.finfo(d_out.dtype).eps:
            absent[name] = f"wrong: relative error {error:.2e}"
            continue
        done[name], calls[name] = (Timing(), error), make
    for order in (list(done), list(done)[::-1]):
        for name in order:
            run = lambda _, call=calls[name]: call()
            done[name][0].add(sustained(run, WARM_MS, TIMED_MS))
    return done


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backward", description=__doc__)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 16384])
    parser.add_argument("--providers", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/backward.csv")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    out = options.out or results_of() / "backward.csv"
    providers, missing = importable({name: PROVIDERS[name] for name in options.providers})
    torch.manual_seed(0)
    common = {**row_provenance("cuda"), "op": "attention_backward"}
    rows: list[dict[str, Any]] = [
        {**common, "provider": name, "metric": "absent", "median": why} for name, why in missing.items()
    ]
    cells = [(dim, causal, n) for dim in options.head_dims for causal in (True, False) for n in options.lengths]
    with Progress(len(cells)) as bar:
        for number, (dim, causal, length) in enumerate(cells):
            title = f"bf16 d{dim} {'causal' if causal else 'full'} {length}"
            bar.show(number, title)
            heads, batch = HIDDEN // dim, max(1, TOKENS // length)
            cell = {**common, "batch": batch, "heads_q": heads, "heads_kv": heads, "len_q": length, "len_kv": length,
                    "head_dim": dim, "head_dim_v": dim, "dtype": "bf16", "causal": causal}  # fmt: skip
            absent: dict[str, str] = {}
            q, k, v = (torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            done = measure(providers, (q, k, v), causal, absent)
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
