"""What every test stands on: devices, hypothesis profiles, `torch.empty` full of NaN, a header that says what runs."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator

# Before torch, which reads it once. With a worker a core, threads that spin while they wait for one another keep each
# other off it: an exp of a hundred numbers took 8 to 16 ms, a scheduler's turn or two.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch
from torch._subclasses import FakeTensor

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
WITHOUT_KERNELS = {  # files
    "test_benchmarks", "test_commands", "test_context_parallel", "test_docs", "test_first_call", "test_flops",
    "test_import", "test_interpreter", "test_layers", "test_longer_calls", "test_models", "test_operands",
    "test_options", "test_problems", "test_published",
    "test_published_readme", "test_reference", "test_small_calls", "test_testing_bounds", "test_testing_decoding",
    "test_testing_kit", "test_testing_options", "test_testing_packed", "test_testing_tensors", "test_testing_writes",
    "test_tiled", "test_tiled_bits",
}  # fmt: skip
LARGEST_FILL = 2**30  # bytes; a test of far addresses reserves more than it means to touch

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-triton", action="store_true", help="make `import triton` fail, as on macOS and Windows")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--without-triton"):
        assert "triton" not in sys.modules, "too late to block triton"
        sys.modules["triton"] = None  # type: ignore[assignment]
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker.startswith("gw") and torch.cuda.device_count() > 1:  # before CUDA starts: each worker sees one GPU
        every = ",".join(map(str, range(torch.cuda.device_count())))
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker[2:]) % len(gpus)]
    if not torch.cuda.is_available():
        torch.set_num_threads(min(2, torch.get_num_threads()))
        os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # an eighth of what Triton takes to compile


def pytest_report_header(config: pytest.Config) -> list[str]:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    if config.getoption("--without-triton"):
        triton += ", blocked"
    elif INTERPRETING:
        triton += ", interpreted on CPU tensors"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return [f"torch: {torch.__version__}, {torch.get_num_threads()} threads; gpu: {gpu}; triton: {triton}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = None
        if item.get_closest_marker("gpu") or item.get_closest_marker("hopper"):
            reason = _why_no_gpu()
        if INTERPRETING and item.path.stem in WITHOUT_KERNELS:
            reason = "runs no kernel: the same without TRITON_INTERPRET=1"
        if reason is None and item.get_closest_marker("hopper") and torch.cuda.get_device_capability() != (9, 0):
            reason = f"needs an sm_90a GPU; this one is sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "needs a GPU; torch.cuda.is_available() is False"
    if INTERPRETING:
        return "Triton is interpreting (TRITON_INTERPRET=1), which is for CPU tensors"
    return None


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the library serves; "cuda" is skipped, with the reason, where there is none."""
    return torch.device(request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.hopper])])
def hopper_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the Hopper kernel runs: its source on PyTorch (tests/gluon_on_torch), or a Hopper GPU.

    Row tiles are whole, few as they are; tests/test_hopper_dealt.py deals them out.
    """
    pytest.importorskip("triton", reason="the kernels need Triton")
    if INTERPRETING:
        pytest.skip("the same without TRITON_INTERPRET=1")
    from tests.gluon_on_torch.hopper import on_torch, whole_row_tiles

    if request.param == "cpu":
        on_torch(monkeypatch)
    else:
        whole_row_tiles(monkeypatch)
    return torch.device(request.param)


@pytest.fixture(scope="session")
def interpreting() -> bool:
    """True where Triton's kernels run on CPU tensors, through its interpreter."""
    return INTERPRETING


@pytest.fixture(scope="session", autouse=True)
def nan_in_empty() -> Iterator[None]:
    """`torch.empty` and its kin come filled with NaN (integers: the largest), so that an unwritten element shows.

    torch's own switch for this, deterministic mode, also changes which algorithms run.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
            patch.setattr(torch, name, _filled(getattr(torch, name)))
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(torch.Tensor, name, _filled(getattr(torch.Tensor, name)))
        yield


def _filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def filled(*args: object, **kwargs: object) -> torch.Tensor:
        out = make(*args, **kwargs)
        if isinstance(out, FakeTensor) or out.is_meta or out.layout != torch.strided:
            return out
        if out.numel() * out.element_size() > LARGEST_FILL:
            return out
        with torch.no_grad():
            if out.dtype.is_floating_point or out.dtype.is_complex:
                out.fill_(float("nan"))
            elif out.dtype != torch.bool and not out.is_quantized:
                out.fill_(torch.iinfo(out.dtype).max)
        return out

    return filled


@pytest.fixture
def where_kernels_run(device, interpreting):
    if device.type == "cpu" and not interpreting:
        pytest.skip("no kernel runs on CPU tensors but in the interpreter")
