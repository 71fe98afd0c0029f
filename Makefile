# Everything a fresh machine needs is Python 3.11+ and make: each target first makes its own virtual environment.
PYTHON ?= python3
VENV ?= .venv
# The release the suite is tested with. pip's default build on Linux brings the CUDA libraries (some GB); without a GPU the
# CPU build that PyTorch's install page offers is enough: make test TORCH="torch --index-url <the page's CPU index>".
# Where $(PYTHON) has a torch already (a container image, say), that one is used and nothing is installed over it.
TORCH ?= torch==2.13.0

RUN := $(VENV)/bin/python
# A worker a core. What one test compiles, the others find in Triton's cache.
PYTEST_FLAGS ?= -n auto --dist worksteal
PYTEST := $(RUN) -m pytest $(PYTEST_FLAGS)
# CI's minutes do not hold every tile: tests/exhaustive.py. A GPU compiles what it runs anyway.
QUICK := -m 'gpu or not exhaustive'
# The public face once more, where Triton can't be imported; what lies below it is the same code as in the first run.
TORCH_ONLY := $(addprefix tests/,test_attention.py test_calls.py test_decode.py test_decode_errors.py test_errors.py test_sdpa.py test_softmax.py)

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(VENV)/setup.stamp  ## make the virtual environment and install into it

demo: setup  ## train a small GPT, swap the attention, compare, measure memory (under three minutes)
	$(RUN) -m demo

test: setup  ## the suite: CPU (and GPU where there is one), Triton's interpreter, and torch alone
	$(PYTEST) $(QUICK)
	if $(RUN) -c 'import triton' 2>/dev/null; then TRITON_INTERPRET=1 $(PYTEST) $(QUICK); else echo 'no Triton: no interpreter run'; fi
	$(PYTEST) --without-triton $(TORCH_ONLY)

test-exhaustive: setup  ## what test leaves out: kernels compiled in more tiles; for who changes one (on two cores more than ten minutes)
	$(PYTEST) -m exhaustive
	if $(RUN) -c 'import triton' 2>/dev/null; then TRITON_INTERPRET=1 $(PYTEST) -m exhaustive; fi

lint: $(VENV)/lint.stamp  ## ruff (lint and format), mypy, and the test that holds the layers
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q tests/test_layers.py

bench-memory: setup  ## measure peak memory, write the CSV, draw the plot
	$(RUN) -m benchmarks.memory
	$(RUN) -m benchmarks.plot memory

clean:  ## remove the virtual environment and everything that was built
	rm -rf $(VENV) demo/out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/setup.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON=")'
	$(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)
	$(RUN) -c 'import torch' 2>/dev/null || $(RUN) -m pip install $(TORCH)
	$(RUN) -m pip install -e '.[test,plot]'
	touch $@

$(VENV)/lint.stamp: $(VENV)/setup.stamp
	$(RUN) -m pip install -e '.[lint]'
	touch $@

.PHONY: help setup demo test test-exhaustive lint bench-memory clean
