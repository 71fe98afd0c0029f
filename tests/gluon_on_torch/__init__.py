"""Gluon on PyTorch: runs a kernel's own source on a machine with no GPU, its roles as threads that go by turns.

A kernel's file is read again with another `triton` to import (`Sources`), and launched (`launch`). One thread goes at a
time; wherever one could notice another, chance decides who goes on, by weights that make some of them slow. What
hardware does behind a kernel's back has turns too: a copy lands, a product is computed, a buffer is read for a TMA
store, its bytes arrive, each at some moment between the request and the wait for it. Memory that nobody has filled, or
that is being filled, holds RUBBISH. When nobody can go on, the run ends with who waits for what.

An error is: a product used before it was waited for; an address outside of a tensor; shared memory that a thread wrote
and asynchronous hardware reads, or overwrites, with no fence between; an arrival too many; a copy still under way at a
program's end.
The merge's programs, which wait for nobody, run many as one, by `torch.vmap` (`launch_as_one`).
Not shown: layouts (Triton checks those when it compiles), warps within a role, registers, speed, the GPU's last bits.

| file | what of it |
| --- | --- |
| turns.py | who goes on, until all have come to their end |
| values.py | tensors in registers, and what Triton's language computes with them |
| pointers.py | pointers to global memory |
| memory.py | shared memory, barriers, and the hardware that copies and multiplies |
| sources.py | the modules to import, a kernel read again, its launch |
"""

from tests.gluon_on_torch.sources import Sources, launch
from tests.gluon_on_torch.values import RUBBISH

__all__ = ["RUBBISH", "Sources", "launch"]
