"""Real English text that every Python brings along: the language reference as `help()` shows it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent


def corpus() -> tuple[str, str]:
    """(text, where it comes from)."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package Python's documentation apart
        files = [ROOT / "LICENSE", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        return "\n".join(file.read_text(encoding="utf-8") for file in files), "this repository's licence and docs"
    return "\n\n".join(topics.values()), "Python's language reference (pydoc_data.topics)"


def encode(text: str) -> Tensor:
    """Bytes as token numbers, int64."""
    return torch.tensor(list(text.encode("utf-8")))


def decode(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")
