"""Roles as threads of which one goes at a time, and who is next: by chance, the same for the same seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

here = threading.local()  # .role: the one that this thread plays


class Deadlock(AssertionError):
    """Nobody can go on."""


class Stopped(Exception):
    """Another role failed."""


class Event(Protocol):
    """What hardware will do at some moment."""

    weight: float

    def happen(self) -> None: ...


class Role:
    """One thread: a part of a program, or all of it."""

    def __init__(self, run: Run, program: Any, name: str, act: Callable[[], None]) -> None:
        self.run, self.program, self.name, self.act = run, program, name, act
        self.number = len(run.roles) + 1
        self.weight = run.weight()
        self.turn = threading.Lock()  # open when it is this role's
        self.turn.acquire()
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for: Callable[[], str] = lambda: "its turn"
        self.done = False

    def play(self) -> None:
        here.role = self
        torch.set_grad_enabled(False)  # of this thread
        self.turn.acquire()
        try:
            if self.run.failure is None:
                self.act()
        except Stopped:
            pass
        except BaseException as error:
            self.run.fail(error)
        self.done = True
        self.run.next()


class Run:
    """One launch."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.roles: list[Role] = []
        self.events: list[Event] = []
        self.failure: BaseException | None = None
        self.over = threading.Lock()  # open when all have ended
        self.over.acquire()

    def weight(self) -> float:
        """How likely a role or an event is the next, beside the others; one in four waits until nobody else can go."""
        return 10 ** self.random.choice([-9, *(self.random.uniform(-2, 0) for _ in range(3))])

    def add(self, program: Any, name: str, act: Callable[[], None]) -> Role:
        role = Role(self, program, name, act)
        self.roles.append(role)
        threading.Thread(target=role.play, daemon=True).start()
        return role

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def next(self) -> None:
        """Lets hardware act until a role's turn has come, and gives it the turn. After a failure only to end."""
        while waiting := [role for role in self.roles if not role.done]:
            able = waiting if self.failure else [role for role in waiting if role.ready()]
            choices = able if self.failure else [*able, *self.events]
            if not choices:
                self.fail(Deadlock("; ".join(f"{role.name} waits for {role.waits_for()}" for role in waiting)))
                continue
            chosen = self.random.choices(choices, [one.weight for one in choices])[0]
            if isinstance(chosen, Role):
                chosen.turn.release()
                return
            try:
                chosen.happen()
            except BaseException as error:
                self.fail(error)
        self.over.release()

    def to_its_end(self) -> None:
        self.next()
        self.over.acquire()
        if self.failure:
            raise self.failure
        while self.events:
            self.events[0].happen()


def pause(ready: Callable[[], bool] = lambda: True, waits_for: Callable[[], str] = lambda: "its turn") -> None:
    """Lets others go on, until this role can and chance says so."""
    role = here.role
    role.ready, role.waits_for = ready, waits_for
    role.run.next()
    role.turn.acquire()
    if role.run.failure:
        raise Stopped
