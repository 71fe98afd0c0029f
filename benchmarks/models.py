"""Time and memory of whole models, with the attention that they have today and with ours: nothing else is changed.

python -m benchmarks.models [--models llama-8b-2k ...] [--modes eager compiled] [--out CSV]

The models are transformers' and diffusers' (benchmarks/model_works.py), in bf16, with random weights; those of a
library that is not there are absent. A model of transformers takes our attention by its name, one of diffusers by
replace_sdpa. Before they are timed both, compiled too, are compared with the same model in float32 with the attention
of today: ours may be off by 1.5 times as much as the rival (relative norms of the result, or of all gradients in
training). A run is a forward without gradients (of an answer 16, each of a token), or a forward and backward; it is
timed between two events. Ours and the rival take turns of 60 ms, behind 60 ms of the same, until both have 500 ms and
two turns: where the GPU waits for the host, what the host does counts as in use, and a host may change its pace.
An answer's lengths come again in each run, but of llama-8b-answer-new, all of whose lengths are new, as a process's
first answers' are.
Rows of metric ms (median, p20, p80 over runs), peak_mib (most memory beyond what lay there before a run) and
relative_error; of power none, whose counter is too slow for such turns. The column op says the mode and whether it
learns: forward, forward+compiled, train.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flashattn_lite
from benchmarks.command import need_gpu, parser_of
from benchmarks.model_works import WORKS, Inputs, Work
from benchmarks.progress import Progress
from benchmarks.provenance import COLUMNS, results_of, row_provenance, write_rows
from benchmarks.providers import in_a_line
from benchmarks.timing import Timing, sustained

OURS, NAME = "flashattn_lite", "attn_lite"
WARM_MS, TURN_MS, TIMED_MS = 60, 60, 500
MOST_ERROR = 1.5  # of the rival's: both round as they go, and what is wrong is off by its own size


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def attending(model: nn.Module, provider: str) -> AbstractContextManager[Any]:
    """Within this the model's attention is the provider's."""
    if hasattr(model, "set_attn_implementation"):  # of transformers
        flashattn_lite.integrations.transformers.register(NAME)
        choose: Callable[[str], None] = model.set_attn_implementation  # type: ignore[assignment]
        choose(NAME if provider == OURS else provider)
        return nullcontext()
    return flashattn_lite.replace_sdpa() if provider == OURS else nullcontext()


def result(out: Any) -> Tensor:
    if isinstance(out, tuple):
        return out[0]
    named: Tensor = out.logits if "logits" in out else out.last_hidden_state
    return named


def run(model: Callable[..., Any], inputs: Inputs, training: bool) -> Tensor:
    """The result; in training the loss, and gradients added to those in the parameters."""
    if not training:
        with torch.no_grad():
            return result(model(**inputs))
    out = model(**inputs)
    loss: Tensor = out.loss if "labels" in inputs else result(out).float().square().mean()
    loss.backward()
    return loss.detach()


def outcome(called: Callable[..., Any], model: nn.Module, inputs: Inputs, training: bool) -> list[Tensor]:
    """What is compared. called: the model, compiled or not."""
    model.zero_grad()
    out = run(called, inputs, training)
    if not training:
        return [out.float()]
    return [p.grad.float() for p in model.parameters() if p.grad is not None]


def error(got: list[Tensor], want: list[Tensor]) -> float:
    """Norm of the difference, over the norm."""
    off = sum((a - b).square().sum().item() for a, b in zip(got, want, strict=True))
    return (off / sum(b.square().sum().item() for b in want)) ** 0.5


def in_float32(inputs: Inputs) -> Inputs:
    wide = lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
    return {name: {n: wide(y) for n, y in x.items()} if isinstance(x, dict) else wide(x) for name, x in inputs.items()}


def exact(model: nn.Module, inputs: Inputs, work: Work) -> list[Tensor]:
    """The outcome in float32, with the attention of today."""
    wide = copy.deepcopy(model).float()
    with attending(wide, work.rival):
        return outcome(wide, wide, in_float32(inputs), work.training)


def errors(
    called: Callable[..., Any], model: nn.Module, inputs: Inputs, work: Work, want: list[Tensor]
) -> dict[str, float]:
    """By provider. ArithmeticError if ours is wrong, or nothing called it."""
    found = {}
    for provider in (work.rival, OURS):
        with attending(model, provider) as report:
            found[provider] = error(outcome(called, model, inputs, work.training), want)
        if provider == OURS and report is not None and called is model and not report.calls:
            raise ArithmeticError("nothing called ours")
    model.zero_grad()
    if not found[OURS] <= MOST_ERROR * found[work.rival]:
        raise ArithmeticError(f"wrong: relative error {found[OURS]:.2e}, {work.rival}'s {found[work.rival]:.2e}")
    return found


def peak_mib(call: Callable[[], Any]) -> float:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    called: Callable[..., Any], model: nn.Module, inputs: Inputs, work: Work
) -> dict[str, tuple[Timing, float]]:
    """By provider: its time, its memory."""

    times = itertools.count()

    def call() -> None:
        model.zero_grad()
        run(called, work.varied(inputs, next(times)), work.training)

    names = (work.rival, OURS)
    timings, memory = {name: Timing() for name in names}, dict[str, float]()
    for number in itertools.count():
        for name in names[:: -1 if number % 2 else 1]:
            with attending(model, name):
                call()
                memory.setdefault(name, peak_mib(call))
                timings[name].add(sustained(lambda _: call(), WARM_MS, TURN_MS))
        if number > 0 and min(sum(timing.milliseconds) for timing in timings.values()) >= TIMED_MS:
            break
    model.zero_grad()
    return {name: (timings[name], memory[name]) for name in names}


def rows_of(name: str, work: Work, modes: Sequence[str], device: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Those of one model."""
    torch.manual_seed(0)
    with default_dtype(dtype):
        with torch.device(device):
            model = work.make().train(work.training).requires_grad_(work.training)
        inputs = work.inputs(device)
        want = exact(model, inputs, work)
        for mode in modes:
            if mode == "compiled" and not work.compiled:
                continue
            torch._dynamo.reset()
            called = torch.compile(model, dynamic=False) if mode == "compiled" else model
            op = ("train" if work.training else "forward") + "+compiled" * (mode == "compiled")
            for provider, off in errors(called, model, inputs, work, want).items():
                yield {
                    "op": op,
                    "model": name,
                    "provider": provider,
                    "metric": "relative_error",
                    "median": f"{off:.2e}",
                }
            for provider, (timing, mib) in measure(called, model, inputs, work).items():
                cell = {"op": op, "model": name, "provider": provider}
                low, middle, high = (f"{timing.quantile(share):.3f}" for share in (0.2, 0.5, 0.8))
                yield {**cell, "metric": "ms", "median": middle, "p20": low, "p80": high}
                yield {**cell, "metric": "peak_mib", "median": f"{mib:.0f}"}


def columns() -> list[str]:
    """Those of all benchmarks, with the model's name in front of the problem."""
    at = COLUMNS.index("provider") + 1
    return [*COLUMNS[:at], "model", *COLUMNS[at:]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("models", __doc__)
    parser.add_argument("--models", nargs="+", choices=WORKS, default=list(WORKS), metavar="NAME", help="default: all")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/models.csv")
    options = parser.parse_args(argv)
    need_gpu(parser)
    out = options.out or results_of() / "models.csv"
    common = {**row_provenance("cuda"), "dtype": "bf16"}
    rows: list[dict[str, Any]] = []
    with Progress(len(options.models)) as bar:
        for number, name in enumerate(options.models):
            bar.show(number, name)
            try:
                for row in rows_of(name, WORKS[name], options.modes, "cuda", torch.bfloat16):
                    rows.append({**common, **row})
                    if row["metric"] == "ms":
                        print(f"{name} {row['op']}: {row['provider']} {row['median']} ms", flush=True)
            except Exception as reason:
                rows.append({**common, "model": name, "metric": "absent", "median": in_a_line(reason)})
                print(f"{name}: absent: {in_a_line(reason)}", flush=True)
            write_rows(out, rows, columns())
            torch.cuda.empty_cache()
    print(f"rows: {out}")


if __name__ == "__main__":
    main()
