"""torch.autocast around a call: what it casts, and how a computation stays as it is written."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Asked first, because every call does, and a device's name takes longer. A private name of torch's.
_anywhere = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def as_written(device: torch.device) -> AbstractContextManager[None]:
    """Every product in the dtypes of its operands, also inside a caller's torch.autocast."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def autocasts(device: torch.device) -> bool:
    """Whether torch.autocast is on for tensors of that device; meta knows none, and says so by an error."""
    return _anywhere() and device.type != "meta" and torch.is_autocast_enabled(device.type)


def lowered(device: torch.device, *args: Any) -> tuple[Any, ...]:
    """A function's arguments as a caller's torch.autocast casts them where the function runs in its lower precision."""
    if not autocasts(device):
        return args
    dtype = torch.get_autocast_dtype(device.type)
    casts = (isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 for x in args)
    return tuple(x.to(dtype) if cast else x for x, cast in zip(args, casts, strict=True))
