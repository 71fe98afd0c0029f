"""The backends as data: in order of preference, each with the reasons why it would not run a problem."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from flashattn_lite import target as targets
from flashattn_lite import tiled, tiled_backward
from flashattn_lite.errors import BackendError, value_error
from flashattn_lite.problem import AttentionProblem, Gradients, Inputs
from flashattn_lite.target import Target

Run = Callable[..., None]  # of (inputs, out, lse), and of a cache the block table


class Backend(Protocol):
    """What every backend answers."""

    name: str

    def why_not(self, problem: AttentionProblem, inputs: Inputs, target: Target) -> list[str]: ...

    def tile(self, problem: AttentionProblem, inputs: Inputs, target: Target) -> Any: ...

    def prepare(self, problem: AttentionProblem, *given: Any) -> Run:
        """What fills out and lse. given: inputs, out, lse, target and, of a cache, its block table or None."""


class Kernels:
    """What backends that start kernels share. Their modules import Triton, so they are imported when first needed."""

    def launcher(self) -> Any:
        """The module that starts them."""
        raise NotImplementedError

    def tile(self, problem: AttentionProblem, inputs: Inputs, target: Target) -> Any:
        return self.launcher().config_of(problem, inputs, target)

    def prepare(self, *given: Any) -> Run:
        run: Run = self.launcher().prepare(*given)
        return run


class Hopper(Kernels):
    """The Gluon kernel for sm_90a. Gluon changes between versions of Triton: where it does not fit, it says so."""

    name = "hopper"

    def launcher(self) -> Any:
        from flashattn_lite.kernels import attention_hopper_launch

        return attention_hopper_launch

    def why_not(self, problem: AttentionProblem, inputs: Inputs, target: Target) -> list[str]:
        if target.no_triton:
            return [target.no_triton]
        if not target.hopper:
            return [f"it needs a Hopper GPU (sm_90a); these tensors are on {target.name}"]
        try:
            launcher = self.launcher()
        except Exception as error:
            return [f"Gluon of the installed Triton does not take it ({type(error).__name__}: {error})"]
        reasons: list[str] = launcher.why_not(problem, inputs)
        return reasons


class Triton(Kernels):
    """The portable kernel."""

    name = "triton"

    def launcher(self) -> Any:
        from flashattn_lite.kernels import attention_launch

        return attention_launch

    def why_not(self, problem: AttentionProblem, inputs: Inputs, target: Target) -> list[str]:
        reasons: list[str] = [target.no_triton] if target.no_triton else self.launcher().why_not(problem, target)
        return reasons


class Split(Kernels):
    """Decoding's kernels, for few query rows: they split the keys over the whole GPU and read them once a key head."""

    name = "split"

    def launcher(self) -> Any:
        from flashattn_lite.kernels import decode_launch

        return decode_launch

    def why_not(self, problem: AttentionProblem, inputs: Inputs, target: Target) -> list[str]:
        if target.no_triton:
            return [target.no_triton]
        from flashattn_lite.kernels import tuning_parts

        reasons: list[str] = self.launcher().why_not_attention(problem, target)
        if not reasons and tuning_parts.ahead_of_decoding(problem) and not Hopper().why_not(problem, inputs, target):
            reasons.append("of more than 16 rows over so many keys the Hopper kernel is faster, and takes them")
        return reasons


class Tiled:
    """Plain torch on any device: the CPU's path, and what remains where nothing else fits."""

    name = "tiled"

    def why_not(self, problem: AttentionProblem, inputs: Inputs, target: Target) -> list[str]:
        return tiled.why_not(problem)

    def tile(self, problem: AttentionProblem, inputs: Inputs, target: Target) -> Any:
        return tiled.tile_of(problem)

    def prepare(self, problem: AttentionProblem, *given: Any) -> Run:
        return functools.partial(tiled.forward, problem)


BACKENDS: tuple[Backend, ...] = (Split(), Hopper(), Triton(), Tiled())


def check_backend(backend: object, backends: Sequence[Backend] = BACKENDS) -> None:
    """Refuses what is no name of a backend, nor "auto"."""
    names = ("auto", *(candidate.name for candidate in backends))
    if not isinstance(backend, str) or backend not in names:
        raise value_error(
            "backend",
            f"must be one of {', '.join(map(repr, names))}",
            backend,
            "Pass one of these.",
        )


def reasons(problem: AttentionProblem, inputs: Inputs, backends: Sequence[Backend] = BACKENDS) -> dict[str, list[str]]:
    """For every backend, in order of preference, why it would not run this problem (empty: it would)."""
    target = targets.of(problem.device)
    return {backend.name: backend.why_not(problem, inputs, target) for backend in backends}


def choose(problem: AttentionProblem, inputs: Inputs, backend: str, backends: Sequence[Backend]) -> Backend:
    """The named backend, or for "auto" the first without a reason against it. Never falls back from a name."""
    target = targets.of(problem.device)
    for candidate in backends:
        if backend in ("auto", candidate.name) and not candidate.why_not(problem, inputs, target):
            return candidate
    table = "; ".join(
        f"{name}: {' and '.join(why) or 'would run'}" for name, why in reasons(problem, inputs, backends).items()
    )
    if backend == "auto":
        raise BackendError(f"backend: none can run this problem. By backend: {table}. Pass what one of them takes.")
    raise BackendError(
        f"backend: {backend!r} can't run this problem. By backend: {table}. Use 'auto', or one that would run."
    )


def prepare(problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, backend: str) -> Run:
    """What fills out and lse by the chosen backend, for these tensors and any others of the same metadata."""
    target = targets.of(problem.device)
    return choose(problem, inputs, backend, BACKENDS).prepare(problem, inputs, out, lse, target)


def why_no_kernel(problem: AttentionProblem, inputs: Inputs, needs: tuple[bool, ...]) -> list[str]:
    """Why Triton's kernels would not make the gradients that are needed, of q, k, v, mask, sinks; empty: they would."""
    target = targets.of(problem.device)
    if target.no_triton:
        return [target.no_triton]
    from flashattn_lite.kernels import backward_launch

    return backward_launch.why_not(problem, inputs, needs, target)


def prepare_gradients(problem: AttentionProblem, inputs: Inputs, d_out: Tensor, needs: tuple[bool, ...]) -> Gradients:
    """What makes the gradients that are needed, for tensors of this metadata: Triton's kernels, else plain torch."""
    if why_no_kernel(problem, inputs, needs):
        return lambda inputs, out, lse, d_out, d_lse: tiled_backward.backward(
            problem, inputs, out, lse, d_out, d_lse, needs
        )
    from flashattn_lite.kernels import backward_launch

    return backward_launch.prepare(problem, inputs, d_out, needs, targets.of(problem.device))


@dataclass(frozen=True)
class Explanation:
    """What would run, and why nothing before or after it would. `str()` gives the table.

    `gradients`: why plain torch would make them, not Triton's kernels (empty: they would); None where there are none.
    """

    backend: str
    tile: Any
    target: Target
    reasons: dict[str, list[str]]
    gradients: list[str] | None = None

    def __str__(self) -> str:
        lines = [f"{self.backend} on {self.target.name}: {self.tile}"]
        place = "earlier"
        for name, why in self.reasons.items():
            if name == self.backend:
                place = "later"
            else:
                lines.append(f"  {name}: {'; '.join(why) or f'would run too, comes {place} in preference'}")
        if self.gradients is not None:
            by = f"in plain torch: {'; '.join(self.gradients)}" if self.gradients else "by Triton's kernels"
            lines.append(f"  gradients {by}")
        return "\n".join(lines)


def explain(problem: AttentionProblem, inputs: Inputs, backend: str) -> Explanation:
    """What would run a call, and what would make its gradients."""
    chosen = choose(problem, inputs, backend, BACKENDS)
    target = targets.of(problem.device)
    asked = tuple(x is not None and x.requires_grad for x in inputs[:5])
    needs = asked if any(asked) else (True, True, True, False, inputs.sinks is not None)
    gradients = why_no_kernel(problem, inputs, needs)
    return Explanation(chosen.name, chosen.tile(problem, inputs, target), target, reasons(problem, inputs), gradients)
