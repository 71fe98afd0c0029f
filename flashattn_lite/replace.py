"""Our attention in the place of `torch.nn.functional.scaled_dot_product_attention`, and what was called there."""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from flashattn_lite import forks, sdpa, sdpa_known
from flashattn_lite.arguments_mask import is_causal_bias
from flashattn_lite.autocast import autocasts
from flashattn_lite.errors import not_implemented
from flashattn_lite.watchers import ORDINARY, shares_out, watched

MOST, SHOWN = 1000, 20  # kinds of calls that a report tells apart, and prints

# Of reports, of what stands in torch's place, and of who put it there. A context that was dropped ends where Python
# collects it, which may be under the lock.
_lock = forks.lock()


class _Here(threading.local):
    counted = 0  # calls that this thread brought into a report, refused ones too


_here = _Here()


class Kind(NamedTuple):
    """Calls that run alike: shapes, dtype, device, options."""

    query: tuple[int | str, ...]
    key: tuple[int | str, ...]
    value: tuple[int | str, ...]
    dtype: torch.dtype
    device: str
    mask: tuple[int | str, ...] | None
    is_causal: bool
    transformed: bool  # seen by vmap, another transform, a mode or a subclass of Tensor: what is behind it runs

    def __str__(self) -> str:
        shapes = " ".join(f"{name} {shape}" for name, shape in zip(sdpa.NAMES, self[:3], strict=True))
        options = (", causal" if self.is_causal else "") + (f", mask {self.mask}" if self.mask is not None else "")
        return f"{shapes} {str(self.dtype).removeprefix('torch.')} on {self.device}{options}"


class Report:
    """What called torch's function while ours stood there: `calls`, `kinds`, `backends`, `refused`. `print` shows it.

    Calls from inside of compiled or exported code are not counted: they are a part of it. Of a call under vmap or
    another transform no backend is named: it runs what is behind it. A call takes a few microseconds longer to be
    counted.
    """

    def __init__(self) -> None:
        self.kinds: dict[Kind, int] = {}  # calls of each
        self.backends: dict[Kind, str] = {}  # what ran them
        self.refused: dict[str, int] = {}  # errors that callers got, by text
        self.others = 0  # calls of further kinds, once there are many: a cache that grows is a new one at each step
        self._known: dict[Hashable, Kind] = {}  # by what `sdpa_known.known` says of a call

    def __getstate__(self) -> dict[str, Any]:
        """A copy has what was counted: how calls run is this process's."""
        return {**self.__dict__, "_known": {}}

    @property
    def calls(self) -> int:
        """Calls that ran."""
        return sum(self.kinds.values()) + self.others

    def __repr__(self) -> str:
        return f"Report(calls={self.calls}, kinds={len(self.kinds)}, refused={sum(self.refused.values())})"

    def __str__(self) -> str:
        with _lock:
            return self._lines()

    def _lines(self) -> str:
        lines = [f"{self.calls} calls of scaled_dot_product_attention, {sum(self.refused.values())} refused"]
        often = sorted(self.kinds.items(), key=lambda item: -item[1])
        lines += [f"  {count} x {self.backends[kind]}: {kind}" for kind, count in often[:SHOWN]]
        if rest := self.calls - sum(count for _, count in often[:SHOWN]):
            lines.append(f"  {rest} of other shapes")
        lines += [f"  {count} x refused: {text}" for text, count in [*self.refused.items()][:SHOWN]]
        if rest := sum([*self.refused.values()][SHOWN:]):
            lines.append(f"  {rest} refused for other reasons")
        if len(lines) == 1:
            lines.append("  nothing called it but compiled or exported code, if any, which is not counted;")
            lines.append("  what goes past it: help(flashattn_lite.replace_sdpa)")
        return "\n".join(lines)

    def _ran(
        self, alike: Hashable, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0,
        is_causal: Any = False, scale: Any = None, enable_gqa: Any = False,
    ) -> None:  # fmt: skip
        """Takes in a call of torch's function. alike: of a known call, what `sdpa_known.known` says of it."""
        _here.counted += 1
        if alike in self._known:
            with _lock:
                self.kinds[self._known[alike]] += 1
            return
        given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        kind = _kind(given, is_causal) if all(isinstance(x, Tensor) for x in given[:3]) else None
        backend = "under a transform"
        if kind and not kind.transformed and kind not in self.backends and len(self.kinds) < MOST:
            backend = sdpa.backend_of(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        with _lock:
            if kind in self.kinds:
                self.kinds[kind] += 1
            elif kind and len(self.kinds) < MOST:
                self.kinds[kind], self.backends[kind] = 1, backend
            else:  # what a tracer or somebody's class stands for, too
                self.others += 1
                return
            if alike is not None and len(self._known) < MOST:
                self._known[alike] = kind

    def _refuses(self, error: Exception) -> None:
        text = str(error)
        _here.counted += 1
        with _lock:
            if text in self.refused or len(self.refused) < MOST:
                self.refused[text] = self.refused.get(text, 0) + 1


def _kind(given: tuple[Any, ...], is_causal: Any) -> Kind:
    query, key, value, attn_mask, *_ = (*given, None)
    bias = is_causal_bias(attn_mask)  # a tensor of nothing, and causal
    mask = _shape(attn_mask) if isinstance(attn_mask, Tensor) and not bias else None
    tensors = given[:3] if bias else given
    lower = autocasts(query.device) and query.dtype != torch.float64
    dtype = torch.get_autocast_dtype(query.device.type) if lower else query.dtype
    q, k, v = map(_shape, (query, key, value))
    return Kind(q, k, v, dtype, query.device.type, mask, bool(is_causal) or bias, _transformed(tensors))


def _transformed(given: tuple[Any, ...]) -> bool:
    """Whether a mode or transform looks on, or somebody's class stands for a tensor."""
    for x in given:
        if type(x) not in ORDINARY:
            return True
    return watched()


def _shape(x: Tensor) -> tuple[int | str, ...]:
    """As numbers, and a compiler's symbols by their names: to compare them would give them values."""
    return tuple(size if type(size) is int else str(size) for size in x.shape)


def _asked_first(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...] | None:
    """Arguments of which some, or a mode, may take the call as they may take torch's; None: nobody asks for it.

    They know it by where it stands, and get the arguments as they were given. A tracer of torch.fx is left to ours,
    by whose name a node can be pickled; a causal bias is a mask to us.
    """
    given: tuple[Any, ...] = (*args, *options.values())
    if not has_torch_function(given):  # as in most calls
        return None
    given = tuple(x for x in given if not is_causal_bias(x))
    if not has_torch_function(given) or any(isinstance(x, torch.fx.Proxy) for x in given):
        return None
    return given


class _Standing:
    """Ours in the place of what stood there `before`. Taken out of the middle, it hands on what still calls it."""

    def __init__(self, report: Report) -> None:
        self.report, self.alive, self.before = report, True, F.scaled_dot_product_attention

        @functools.wraps(sdpa.scaled_dot_product_attention)
        def scaled_dot_product_attention(*args: Any, **options: Any) -> Tensor:
            if not self.alive:
                return self.before(*args, **options)
            if torch.compiler.is_compiling():
                return sdpa.scaled_dot_product_attention(*args, **options)
            if (asked := _asked_first(args, options)) is not None:
                counted = _here.counted
                out = handle_torch_function(self.function, asked, *args, **options)
                if _here.counted == counted:  # they did not hand it back
                    report._ran(None, *args, **options)
                return out
            try:
                there = sdpa_known.known(*args, **options)
                out, alike = there or (sdpa.scaled_dot_product_attention(*args, **options), None)
            except (ValueError, TypeError, NotImplementedError) as error:
                report._refuses(error)
                raise
            report._ran(alike, *args, **options)
            return out

        scaled_dot_product_attention.standing = self  # type: ignore[attr-defined]
        self.function: Any = scaled_dot_product_attention


_installed: _Standing | None = None


def _at(function: Any) -> _Standing | None:
    """Whose function this is; None: not of ours."""
    standing = getattr(function, "standing", None)  # functools.wraps would copy it too
    return standing if standing is not None and standing.function is function else None


def _reaches(standing: _Standing) -> bool:
    """Whether it stands there, below others of ours at most."""
    at = _at(F.scaled_dot_product_attention)
    while at is not None and at is not standing:
        at = _at(at.before)
    return at is standing


def _put_in(report: Report) -> _Standing:
    if shares_out(F.scaled_dot_product_attention):
        relation = "torch's context_parallel stands in its place, without which each process sees its own keys alone"
        remedy = "Keep torch's function where it is in use."
        raise not_implemented("scaled_dot_product_attention", relation, F.scaled_dot_product_attention, remedy)
    standing = _Standing(report)
    F.scaled_dot_product_attention = standing.function
    return standing


def _take_out(standing: _Standing) -> None:
    """In any order: those above it stay, and whoever left before it does not come back."""
    standing.alive = False
    while (top := _at(F.scaled_dot_product_attention)) is not None and not top.alive:
        F.scaled_dot_product_attention = top.before
    # Who still calls it, or one above it, does not come by all that ever stood there.
    _pass_over_ended(standing)
    while top is not None:
        _pass_over_ended(top)
        top = _at(top.before)


def _pass_over_ended(standing: _Standing) -> None:
    while (below := _at(standing.before)) is not None and not below.alive:
        standing.before = below.before


@contextmanager
def replace_sdpa() -> Iterator[Report]:
    """Inside, `torch.nn.functional.scaled_dot_product_attention` is ours, in every thread. Never falls back to torch's.

    Yields:
        A `Report`, to print or to read: `.calls` (how many ran), `.kinds` (how many of which shapes, dtype, device and
        mask), `.backends` (what ran each kind), `.refused` (errors that callers got, by text).

    What looks the function up when it runs (`F.scaled_dot_product_attention(...)`, as most models do) is served. Not:
    - a name bound before (`from torch.nn.functional import scaled_dot_product_attention`);
    - compiled code, which may keep what it was compiled with: torch's from before, ours from inside, afterwards too;
    - torch's MultiheadAttention where it is asked for weights, as it is by default (pass need_weights=False), and it
      and TransformerEncoder in evaluation without gradients, where torch runs a kernel for the whole layer
      (`torch.backends.mha.set_fastpath_enabled(False)`). A report then counts nothing.
    - modes and tensor classes whose `__torch_function__` compares `func` with torch's function, as a table made before
      does: they are asked with ours, and do not know it. In compiled code none is asked.
    What torch serves and ours refuses must run outside: head dims past 256, which most image decoders of diffusers have
    (`output_type="latent"` inside, decode outside), an export to ONNX, torch's context_parallel. What chooses among
    torch's kernels (`sdpa_kernel`) changes nothing.
    A model that checkpoints activations calls the function again in its backward pass: run that inside too.
    Contexts may be nested, overlap in threads and hold an `install()`, which stays when they end; each counts what is
    called while it is the last that was entered. What stands there can't be pickled, nor scripted by torch.jit.script.

    Raises:
        NotImplementedError: within torch's context_parallel. And inside, whatever
            `flashattn_lite.scaled_dot_product_attention` raises: of dropout the same.

    Example:
        >>> layer, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 5, 16)
        >>> with replace_sdpa() as report:
        ...     out, _ = layer(x, x, x, need_weights=False)
        >>> report.calls
        1
    """
    with _lock:
        standing = _put_in(Report())
    try:
        yield standing.report
    finally:
        with _lock:
            _take_out(standing)


def install() -> Report:
    """As `replace_sdpa`, until `uninstall`. Once more returns the same report, and puts back what was thrown out.

    Example:
        >>> report = install()
        >>> torch.nn.functional.scaled_dot_product_attention(*[torch.randn(1, 2, 3, 8)] * 3).shape
        torch.Size([1, 2, 3, 8])
        >>> uninstall()
        >>> report.calls
        1
    """
    global _installed
    with _lock:
        if _installed is None:
            _installed = _put_in(Report())
        elif not _reaches(_installed):
            standing = _put_in(_installed.report)
            _installed.alive = False
            _installed = standing
        return _installed.report


def uninstall() -> None:
    """Takes out what `install` put in; does nothing where it was not called.

    What was put there since, a `replace_sdpa()` or somebody else's function, stays; where it calls what it found, it
    calls torch's from here on.
    """
    global _installed
    with _lock:
        if _installed is not None:
            _take_out(_installed)
            _installed = None
