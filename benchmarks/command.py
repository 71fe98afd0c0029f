"""What the command lines of all benchmarks have in common: help as it is written, and what no measurement can be of."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """`python -m benchmarks.NAME`, whose help begins with a module's docstring, line by line."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc, formatter_class=formatter)


def need_gpu(parser: argparse.ArgumentParser, otherwise: str = "") -> None:
    """Ends with status 2 where there is none, and says what there is instead."""
    if not torch.cuda.is_available():
        parser.error("needs a GPU" + otherwise)


def positive(text: str) -> int:
    """A number of something that is measured, which 0 of is nothing to measure."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text!r}")
    return int(text)


def device(text: str) -> torch.device:
    """A torch device that this machine has."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # the latter where torch is not built for it
        raise argparse.ArgumentTypeError(f"{text!r} can't be used here: {str(error).splitlines()[0]}") from None
    return torch.device(text)


def existing(text: str) -> Path:
    """A file or folder to read."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no {text}")
    return Path(text)
