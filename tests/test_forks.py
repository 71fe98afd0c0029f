"""A forked child works, whatever the other threads were doing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from flashattn_lite.forks import computed_once
from tests.conftest import INTERPRETING


class Slow:
    def __init__(self, wait=lambda: None):
        self.wait, self.computed = wait, 0

    @computed_once
    def value(self):
        self.computed += 1
        self.wait()
        return "it"


def test_computed_once():
    slow = Slow()
    assert [slow.value, slow.value, slow.computed] == ["it", "it", 1]
    assert "value" in vars(slow)


def test_no_instance_waits_for_another():
    """As it would by Python 3.11's `functools.cached_property`, whose lock a child inherits."""
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: Slow(lambda: (started.set(), end.wait(30))).value)
    thread.start()
    assert started.wait(30)
    other = threading.Thread(target=lambda: Slow().value)
    other.start()
    other.join(10)
    waits = other.is_alive()
    end.set()
    thread.join()
    assert not waits


CHILD = """
import os, signal, threading, time, torch
import flashattn_lite as fa
from flashattn_lite.{module} import {lock} as lock
torch.set_num_threads(1)
x = torch.randn(1, 2, 5, 16)

def work():
    with fa.replace_sdpa() as report:
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert report.calls == 1
    return out + fa.attention(x, x, x, kv_lens=torch.tensor([3], dtype=torch.int32), backend="{backend}")

want, held = work(), threading.Event()

def hold():
    with lock:
        held.set()
        time.sleep(0.3)

threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(60)  # ends a child that waits for ever
    os._exit(not torch.equal(work(), want))
ended = os.waitpid(child, 0)[1]
assert ended == 0, ended
assert torch.equal(work(), want)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.parametrize(
    ("module", "lock", "backend"),
    [
        ("replace", "_lock", "tiled"),
        pytest.param(
            *("kernels.interpreter", "_one_at_a_time", "triton"),
            marks=pytest.mark.skipif(not INTERPRETING, reason="no kernel runs on CPU tensors but in the interpreter"),
        ),
    ],
)
def test_a_child_works_that_was_forked_while_a_lock_was_held(module, lock, backend):
    code = CHILD.format(module=module, lock=lock, backend=backend)
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


COLLECTED = """
import gc, os, threading
from flashattn_lite.kernels.compiling import no_garbage_collected
inside, end = threading.Event(), threading.Event()

def compile():
    with no_garbage_collected():
        inside.set()
        end.wait(60)

thread = threading.Thread(target=compile)
thread.start()
inside.wait()
child = os.fork()
if not child:
    alone = gc.isenabled()
    with no_garbage_collected():
        off = not gc.isenabled()
    os._exit(not (alone and off and gc.isenabled()))
ended = os.waitpid(child, 0)[1]
assert not gc.isenabled()
end.set()
thread.join()
assert gc.isenabled() and ended == 0, ended
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_garbage_is_collected_in_a_child_whose_parent_compiles():
    pytest.importorskip("triton", reason="the kernels need Triton")
    command = [sys.executable, "-W", "ignore", "-c", COLLECTED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
