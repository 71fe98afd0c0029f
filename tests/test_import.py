"""Importing is light, and torch alone is enough: fresh processes, with triton blocked or every GPU query a trap."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK_TRITON = "import sys; sys.modules['triton'] = None\n"
TRAP_GPU_QUERIES = """
import torch
def trap(*args, **kwargs):
    raise AssertionError("a GPU query while importing")
for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties",
             "get_device_name", "init", "_lazy_init"):
    setattr(torch.cuda, name, trap)
for name in ("_cuda_getDeviceCount", "_cuda_init"):
    if hasattr(torch._C, name):
        setattr(torch._C, name, trap)
"""


def fresh(code: str) -> str:
    """What a fresh interpreter prints that runs the code with warnings as errors; its error output where it fails."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_needs_no_triton() -> None:
    assert fresh(BLOCK_TRITON + "import flashattn_lite; print(flashattn_lite.__version__)")


def test_import_brings_in_torch_only() -> None:
    loaded = fresh(
        """
        import sys
        import torch
        before = set(sys.modules)
        import flashattn_lite
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        foreign = new - set(sys.stdlib_module_names) - {"flashattn_lite", "torch"}
        print(*sorted(foreign | {name for name in ("triton", "matplotlib", "hypothesis") if name in sys.modules}))
        """
    )
    assert loaded == "", f"import flashattn_lite also imports {loaded}"


def test_import_asks_nothing_of_a_gpu() -> None:
    assert fresh(TRAP_GPU_QUERIES + "import flashattn_lite; print(torch.cuda._initialized)") == "False"


def test_a_finder_that_refuses_triton_is_no_triton() -> None:
    """As some test suites hide a package: before anybody could look for it."""
    code = """
        import sys
        import torch
        class Hidden:
            def find_spec(self, name, *_):
                if name.partition(".")[0] == "triton":
                    raise ImportError(f"{name} is hidden")
        sys.meta_path.insert(0, Hidden())
        import flashattn_lite
        q = torch.randn(1, 1, 2, 8)
        flashattn_lite.attention(q, q, q)
        print(flashattn_lite.explain(q, q, q).reasons["triton"][0])
        """
    assert fresh(code) == "triton can't be imported (triton is hidden)"


@pytest.mark.parametrize("causal", [False, True])
def test_cpu_attention_without_triton(causal: bool) -> None:
    error = fresh(
        BLOCK_TRITON
        + f"""
import torch, flashattn_lite
torch.manual_seed(0)
q, k, v = (torch.randn(2, 3, 50, 16, requires_grad=True) for _ in range(3))
out = flashattn_lite.attention(q, k, v, causal={causal})
out.sum().backward()
grads = [x.grad for x in (q, k, v)]
q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
scores = q64 @ k64.mT / 4
if {causal}:
    scores = scores.masked_fill(torch.ones(50, 50).triu(1).bool(), float("-inf"))
want = scores.softmax(-1) @ v64
want.sum().backward()
pairs = [(out, want), *zip(grads, (q64.grad, k64.grad, v64.grad))]
print(max(((ours - oracle).abs().max() / oracle.abs().max()).item() for ours, oracle in pairs))
"""
    )
    # float32 sums of up to 50 terms of about the result's size: 50 eps bounds their rounding
    assert float(error) < 50 * 2**-23


def test_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert fresh("import flashattn_lite; print(flashattn_lite.__version__)") == project["version"]
