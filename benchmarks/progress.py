"""A progress bar on the terminal's error output, and silence where that is not a terminal."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType
from typing import Self, TextIO

WIDTH = 24


class Progress:
    """`with Progress(total) as bar: bar.show(done, "what runs")`; the line is gone when the block ends."""

    def __init__(self, total: float, stream: TextIO | None = None) -> None:
        self.total = max(total, 1e-9)
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()

    def __enter__(self) -> Self:
        return self

    def show(self, done: float, text: str) -> None:
        if self.live:
            filled = min(WIDTH, round(WIDTH * done / self.total))
            line = f"  {'━' * filled}{'╌' * (WIDTH - filled)}  {text}"
            self.stream.write("\r\033[K" + line[: shutil.get_terminal_size().columns - 1])
            self.stream.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.live:
            self.stream.write("\r\033[K")
            self.stream.flush()
