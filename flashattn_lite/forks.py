"""What a process that forks hands its child in working order, whatever its other threads do at that moment.

The child has the one thread that forked. A lock that another one holds is never given back there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def lock() -> Any:
    """An RLock for short work; a fork waits until no other thread holds it."""
    made = threading.RLock()
    if hasattr(os, "register_at_fork"):  # Windows has no forks
        os.register_at_fork(before=made.acquire, after_in_parent=made.release, after_in_child=made.release)
    return made


class computed_once(Generic[T]):
    """`functools.cached_property` without a lock: Python 3.11 holds one for all instances while it computes.

    Two threads that ask an instance at once may each compute it.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value = vars(instance)[self.compute.__name__] = self.compute(instance)
        return value
