"""What holds for every attention, ready to be run on yours: random problems, an oracle with an error budget, and laws.

    from flashattn_lite.testing import check

    def mine(q, k, v, *, causal=False, return_lse=False): ...

    check(mine, features={"causal", "gqa", "lse"})

`check` draws problems (strategies.py, needs hypothesis), asks each law (laws.py, locality.py; packed.py, decoding.py),
and shrinks the first failure to the smallest problem that still fails. Without hypothesis, ask any law about a case of
your own: `matches_oracle(mine, Case(q, k, v, causal=True))`.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.arguments import FLOAT_DTYPES, MAX_HEAD_DIM
from flashattn_lite.errors import show, type_error, value_error
from flashattn_lite.scalars import is_int
from flashattn_lite.testing.case import Attention, Case, Law, PackedCase
from flashattn_lite.testing.decoding import DECODE_FEATURES, DECODE_LAWS, last_tokens
from flashattn_lite.testing.laws import ALL_LAWS, matches_oracle
from flashattn_lite.testing.oracle import Expected, assert_close_to_oracle, expect
from flashattn_lite.testing.packed import PACKED_LAWS

SIZES = ("device", "dtypes", "max_batch", "max_heads", "max_len", "max_dim")

__all__ = [
    "ALL_LAWS",
    "DECODE_LAWS",
    "PACKED_LAWS",
    "Case",
    "Expected",
    "PackedCase",
    "assert_close_to_oracle",
    "check",
    "check_decode",
    "check_packed",
    "expect",
    "matches_oracle",
]


def check(
    attention: Attention,
    *,
    n: int = 50,
    laws: Sequence[Law] = ALL_LAWS,
    features: Collection[str] | None = None,
    seed: int = 0,
    shrink: bool = True,
    **sizes: Any,
) -> None:
    """Asks every law n random problems; the first that fails raises, with the smallest problem found that fails it.

    Args:
        attention: called as `attention(q, k, v, **options, return_lse=True)`, with options of
            `flashattn_lite.attention`, and only those that differ from their defaults. q (B, Hq, L, D),
            k (B, Hkv, S, D), v (B, Hkv, S, Dv); returns (out, lse). One law calls it without return_lse too, and then
            it returns out alone, as in all laws without "lse" in features. It may not write to what it is given, nor
            to memory that this is a view of.
        n: problems per law.
        laws: default ALL_LAWS; those that need a feature which is not given are left out.
        features: what attention knows, of `strategies.FEATURES`: "gqa", "causal", "q_start", "window", "scale",
            "softcap", "mask", "sinks", "kv_lens", "lse", "gradients"; and what it must stand, "strides" (other than
            contiguous), "hostile" (numbers that break careless softmaxes), "poison" (NaN in keys that nobody sees).
            Default: all.
        seed: the same seed draws the same problems.
        shrink: look for a smaller problem before raising; without it the first failure is raised as it came.
        sizes: device, dtypes, max_batch, max_heads, max_len, max_dim of `strategies.cases`.

    Raises:
        AssertionError: the law's message, with the place, the value, the bound and the problem.
        ValueError, TypeError: for n, laws, features and sizes.

    >>> from flashattn_lite.reference import attention_reference
    >>> check(attention_reference, n=2, laws=[matches_oracle], max_len=5)
    """
    from flashattn_lite.testing.strategies import FEATURES, cases

    known = _known(features, FEATURES)
    asked = _asked(attention, known)
    _check_sizes(sizes)
    for law in _checked(laws):
        if getattr(law, "needs", frozenset()) <= known:
            _ask(functools.partial(law, asked), cases(features=known, **sizes), n, law, seed, shrink)


def check_packed(
    attention_varlen: Callable[..., Any],
    *,
    n: int = 50,
    laws: Sequence[Callable[..., None]] = PACKED_LAWS,
    features: Collection[str] | None = None,
    seed: int = 0,
    shrink: bool = True,
    **sizes: Any,
) -> None:
    """`check` for packed sequences.

    Args:
        attention_varlen: a callable with flashattn_lite.attention_varlen's signature; return_lse=True gives
            out (total_q, Hq, Dv) and lse (Hq, total_q), and without it out alone, as `check` has it.
        laws: default PACKED_LAWS.
        n, features, seed, shrink, sizes: as `check`; sizes are those of `strategies.packed_cases`.

    Raises:
        AssertionError, ValueError, TypeError: as `check`.

    >>> from flashattn_lite.reference import attention_varlen_reference
    >>> check_packed(attention_varlen_reference, n=2, max_len=5)
    """
    from flashattn_lite.testing.strategies import FEATURES, packed_cases

    known = _known(features, FEATURES)
    asked = _asked(attention_varlen, known)
    _check_sizes(sizes)
    for law in _checked(laws):
        if getattr(law, "needs", frozenset()) <= known:
            _ask(functools.partial(law, asked), packed_cases(features=known, **sizes), n, law, seed, shrink)


def check_decode(
    attention_decode: Callable[..., Any],
    *,
    n: int = 50,
    laws: Sequence[Callable[..., None]] = DECODE_LAWS,
    seed: int = 0,
    shrink: bool = True,
    **sizes: Any,
) -> None:
    """`check` for decoding: 1 to 16 query tokens over a cache or its pages, with what lies past the lengths as NaN.

    Args:
        attention_decode: a callable with flashattn_lite.attention_decode's signature.
        laws: default DECODE_LAWS.
        n, seed, shrink, sizes: as `check`.

    Raises:
        AssertionError, ValueError, TypeError: as `check`.

    >>> from flashattn_lite import attention_decode
    >>> check_decode(attention_decode, n=2, max_len=5)
    """
    from flashattn_lite.testing.strategies import cases

    _check_sizes(sizes, shortest=1)
    problems = cases(features=DECODE_FEATURES, **sizes).filter(lambda case: case.q.shape[2] > 0).map(last_tokens)
    for law in _checked(laws):
        _ask(functools.partial(law, attention_decode), problems, n, law, seed, shrink)


def _asked(attention: Callable[..., Any], known: frozenset[str]) -> Callable[..., Any]:
    """The attention as laws call it: with an lse, or with None for one where it does not know "lse"."""
    if "lse" not in known:

        def without_lse(*args: Any, return_lse: bool, **options: Any) -> Any:
            result = attention(*args, **options)
            assert isinstance(result, Tensor), f"without 'lse' among features it must return out; got {show(result)}"
            return result, None

        return without_lse

    def with_lse(*args: Any, **options: Any) -> Any:
        result = attention(*args, **options)
        if isinstance(result, (tuple, list)) and len(result) == 2:
            assert result[1] is not None, "with return_lse=True it must return (out, lse); its lse is None"
        return result

    return with_lse


def _checked(laws: Iterable[Callable[..., None]]) -> tuple[Callable[..., None], ...]:
    asked = tuple(laws) if isinstance(laws, Iterable) else ()
    if not isinstance(laws, Iterable) or not all(map(callable, asked)):
        raise type_error("laws", "must be a list of functions law(attention, case)", laws, "Pass [matches_oracle].")
    if not asked:
        raise value_error("laws", "must hold one law at least", laws, "With none nothing would be asked.")
    return asked


def _known(features: Collection[str] | None, every: frozenset[str]) -> frozenset[str]:
    if isinstance(features, str):
        raise type_error("features", "must be several names", features, f"Pass [{features!r}].")
    known = every if features is None else frozenset(features)
    if not known <= every:
        raise ValueError(f"features: must be among {sorted(every)}; got {sorted(known - every)}. Leave them out.")
    return known


def _check_sizes(sizes: dict[str, Any], shortest: int = 0) -> None:
    dtypes = sizes.get("dtypes", (torch.float32,))
    if not isinstance(dtypes, (tuple, list)) or not all(x in FLOAT_DTYPES for x in dtypes) or not dtypes:
        relation = "must be a list of float16, bfloat16, float32 or float64, one at least"
        raise type_error("dtypes", relation, dtypes, "Pass [torch.float32], say.")
    for name, most in sizes.items():
        if name not in SIZES:
            raise ValueError(f"{name}: is no size; got {show(most)}. Sizes are {', '.join(SIZES)}.")
        least = shortest if name == "max_len" else 1
        if name.startswith("max_") and (not is_int(most) or most < least):
            raise value_error(
                name, f"must be an int from {least} up", most, "It is the largest that a problem may have."
            )
    if sizes.get("max_dim", 1) > MAX_HEAD_DIM:
        raise value_error("max_dim", f"must be at most {MAX_HEAD_DIM}", sizes["max_dim"], "The oracle takes no more.")
    try:
        holds_numbers = torch.empty(0, device=sizes.get("device", "cpu")).device.type != "meta"
    except (RuntimeError, TypeError, AssertionError):  # torch's own words list twenty devices; not built for it
        holds_numbers = False
    if not holds_numbers:
        remedy = "Pass 'cpu', or 'cuda' where there is such a GPU."
        raise value_error("device", "must be one of this machine that holds numbers", sizes["device"], remedy)


def _ask(
    question: Callable[[Any], None], problems: Any, n: int, law: Callable[..., None], seed: int, shrink: bool
) -> None:
    import hypothesis
    from hypothesis import HealthCheck, Phase

    if not is_int(n) or n < 1:
        raise value_error("n", "must be a positive int", n, "It is the number of problems for each law.")
    settings = hypothesis.settings(
        max_examples=n,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )

    failures: list[AssertionError] = []

    def problem(case: Any) -> None:
        try:
            question(case)
        except AssertionError as failure:
            failures.append(failure)
            raise

    asked = settings(hypothesis.given(problems)(problem))
    name = getattr(law, "__name__", type(law).__name__)
    try:
        hypothesis.seed(zlib.crc32(f"{name} {seed}".encode()))(asked)()
    except hypothesis.errors.Flaky:  # it failed, and did not when it was asked again: that is no excuse
        if not failures:
            raise
        raise failures[-1] from None
