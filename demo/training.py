"""Training the demo's model within a budget of steps and seconds, whichever ends first."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.progress import Progress
from demo.model import GPT

BATCH = 8
PEAK_RATE = 1e-2
WARM_UP = 0.05  # of the budget


class Muon(torch.optim.Optimizer):
    """Momentum whose every step is made orthogonal: a few times fewer steps than AdamW needs on these matrices.

    Source: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. Here in float32,
    because torch's own computes in bfloat16, for which many CPUs have no units.
    """

    def __init__(self, weights: Iterable[nn.Parameter], lr: float, momentum: float = 0.9) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                # Rows and columns of an orthogonal matrix are small; 0.2 makes its entries as large as an AdamW step's.
                size = 0.2 * max(weight.shape) ** 0.5
                weight -= group["lr"] * size * orthogonal(weight.grad.lerp(mean, group["momentum"]))


def orthogonal(x: Tensor) -> Tensor:
    """About the orthogonal matrix nearest to x, by five Newton-Schulz steps: singular values land near 1."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x  # the paper's coefficients
    return x


def train(model: GPT, data: Tensor, steps: int, seconds: float) -> tuple[int, float, float]:
    """(steps taken, seconds, smoothed loss in nats a byte). The rate follows the budget spent, so it ends at 0."""
    hidden = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if all(weight is not other for other in hidden)]
    optimizers = (
        Muon(hidden, lr=PEAK_RATE),
        torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    )
    offsets = torch.arange(model.context + 1, device=data.device)
    start, step, smooth = time.monotonic(), 0, math.log(256)
    with Progress(1.0) as bar:
        while (spent := max(step / steps, (time.monotonic() - start) / seconds)) < 1:
            starts = torch.randint(len(data) - model.context, (BATCH, 1)).to(data.device)
            batch = data[starts + offsets]
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            model.zero_grad(set_to_none=True)
            loss.backward()
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = PEAK_RATE * rate(spent)
                optimizer.step()
            step += 1
            smooth += (loss.item() - smooth) / min(step, 20)
            bar.show(spent, f"step {step}, loss {smooth:.2f}")
    return step, time.monotonic() - start, smooth


def rate(spent: float) -> float:
    """Up in a line, down in a line."""
    return min((spent + 0.002) / WARM_UP, (1 - spent) / (1 - WARM_UP))
