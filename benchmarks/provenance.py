"""Rows of results that say where they come from: the columns all benchmarks share, and their CSV."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PROVENANCE = ("date", "commit", "gpu", "driver", "torch", "triton")
PROBLEM = ("batch", "heads_q", "heads_kv", "len_q", "len_kv", "head_dim", "head_dim_v", "dtype", "causal")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # as the column dtype writes them
COLUMNS = (*PROVENANCE, "op", "provider", *PROBLEM, "metric", "median", "p20", "p80")


def row_provenance(device: str | None = None) -> dict[str, str]:
    """The provenance columns of a row measured now, here, on `device` ("cuda" where there is one, else "cpu")."""
    on_gpu = torch.cuda.is_available() if device is None else device == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if on_gpu else cpu_model(),
        "driver": driver() if on_gpu else "-",
        "torch": torch.__version__,
        "triton": version("triton"),
    }


def results_of(device: str = "cuda") -> Path:
    """The folder of what is measured here: of the GPU by its name ("h200", "geforce-rtx-4090"), else "cpu"."""
    if device != "cuda":
        return RESULTS / "cpu"
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", name).strip("-")


@cache
def commit() -> str:
    """Short hash of the checkout, with "-dirty" where code differs from it; $COMMIT in a copy that lacks it."""
    if told := os.environ.get("COMMIT"):
        return told
    try:
        short = _output("git", "rev-parse", "--short", "HEAD")
        # A run changes results and plots itself: they say nothing about what was measured.
        changed = _output("git", "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return short + "-dirty" if changed else short


def cpu_model() -> str:
    """The CPU as the system names it, and the threads that torch uses of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name} ({torch.get_num_threads()} threads)"


@cache
def driver() -> str:
    try:
        return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def write_rows(path: Path, rows: Iterable[Mapping[str, object]], columns: Sequence[str] = COLUMNS) -> None:
    """Replaces the file; a row with a column that is not among `columns` is an error, a missing one is left empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=20)
    return done.stdout.strip()
