"""Facts of the machine that a problem would run on, read lazily: importing this asks no GPU and no Triton."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """`kind`: "cuda", "hip", "cpu"; `arch`: 90 for sm_90, "gfx942" for AMD; `no_triton`: why Triton can't be used."""

    kind: str
    arch: int | str
    name: str
    no_triton: str = ""
    interpreting: bool = False
    multiprocessors: int = 1

    @property
    def hopper(self) -> bool:
        """An NVIDIA GPU of compute capability 9.0, and no interpreter."""
        return self.is_cuda(90) and self.arch == 90

    def is_cuda(self, least: int) -> bool:
        """An NVIDIA GPU of this compute capability (90 is 9.0) or newer, and no interpreter."""
        return self.kind == "cuda" and isinstance(self.arch, int) and self.arch >= least and not self.interpreting


@functools.cache
def why_no_triton() -> str:
    """Empty if Triton can be imported, else the reason."""
    try:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        import triton  # noqa: F401
    except Exception as error:
        return f"triton can't be imported ({error})"
    return ""


@functools.cache
def interpreting() -> bool:
    """Triton runs its kernels in its interpreter, on CPU tensors (TRITON_INTERPRET=1 when Triton was imported)."""
    if why_no_triton():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def _gpu(index: int) -> Target:
    if not torch.cuda.is_available():  # of a fake tensor, which may be on a device that is not there
        return Target("cuda", 0, "no GPU", "torch sees no GPU here")
    properties = torch.cuda.get_device_properties(index)
    name, count = properties.name, properties.multi_processor_count
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0], name, why_no_triton(), multiprocessors=count)
    return Target("cuda", properties.major * 10 + properties.minor, name, why_no_triton(), multiprocessors=count)


def takes_tf32() -> bool:
    """Whether the user lets torch multiply float32 matrices on a GPU as TF32, by either of its settings.

    torch.get_float32_matmul_precision() knows the older one only, and raises where both were used.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def of(device: torch.device) -> Target:
    """The target behind a torch device. Cached: one query per GPU and process."""
    if device.type == "cuda" and not interpreting():
        return _gpu(torch.cuda.current_device() if device.index is None else device.index)
    return Target(device.type, 0, device.type, why_no_triton(), interpreting())
