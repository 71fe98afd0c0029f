"""How the library says no: one sentence that names the argument, the relation, the value that came, and the remedy."""

from __future__ import annotations

from numbers import Number

import torch

SHOWN, WIDTH = 8, 60  # of a sequence's elements, of a value's characters


class BackendError(NotImplementedError):
    """No backend (or not the one that was named) can run this problem; the message lists every backend's reasons."""


def message(argument: str, relation: str, got: object, remedy: str) -> str:
    """`argument: relation; got value. Remedy.`, with tensors shown as shape, dtype and device."""
    return f"{argument}: {relation}; got {show(got)}. {remedy}"


def show(value: object) -> str:
    """A value as an error shows it. No tensor prints its data, nor in a list (it may be large, or on a busy GPU)."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"a nested tensor, {show(value.dtype)}, on {value.device}"
    if isinstance(value, torch.Tensor):
        kind = "tensor" if value.layout == torch.strided else f"{show(value.layout)} tensor"
        return f"a {kind} of shape {tuple(value.shape)}, {show(value.dtype)}, on {value.device}"
    if isinstance(value, (torch.dtype, torch.layout)):
        return str(value).removeprefix("torch.")
    if isinstance(value, (torch.device, torch.Size)):
        return str(tuple(value)) if isinstance(value, torch.Size) else str(value)
    if isinstance(value, (tuple, list)):
        parts = [*map(show, value[:SHOWN]), *(["..."] if len(value) > SHOWN else [])]
        inside = ", ".join(parts) + ("," if isinstance(value, tuple) and len(value) == 1 else "")
        inside = inside if len(inside) <= SHOWN * WIDTH else f"{inside[: SHOWN * WIDTH]}..."  # of lists in lists
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and torch.compiler.is_compiling():
        return "a number"  # which the compiler may not know yet: then it has no text
    if isinstance(value, (Number, str)) or value is None:
        text = repr(value) if isinstance(value, str) else str(value)
        return text if len(text) <= WIDTH else f"{text[:WIDTH]}..."
    if getattr(value, "shape", None) == () and type(value).__module__ == "numpy":  # of its flags, say
        return f"NumPy's {value}"[:WIDTH]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of shape {value.shape}, {value.dtype}"
    return f"a {type(value).__name__}"


def value_error(argument: str, relation: str, got: object, remedy: str) -> ValueError:
    return ValueError(message(argument, relation, got, remedy))


def type_error(argument: str, relation: str, got: object, remedy: str) -> TypeError:
    return TypeError(message(argument, relation, got, remedy))


def not_implemented(argument: str, relation: str, got: object, remedy: str) -> NotImplementedError:
    return NotImplementedError(message(argument, relation, got, remedy))
