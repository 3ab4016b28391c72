# `make demo` and `make test` need Python >= 3.10 (with venv), a C++ compiler and make; the rest is set up in .venv.
#   make PYTHON=python3.12        another interpreter
#   make TORCH=torch==2.14.1      another torch
#   make test ARGS="-k qsa -x"    arguments for pytest (for `make bench`: what to measure)
PYTHON ?= python3
TORCH ?= torch==2.13.0
BUILD_TOOLS := setuptools==84.2.1 ninja==1.13.2
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/installed-$(subst =,-,$(TORCH))
PIP := $(PY) -m pip --disable-pip-version-check --quiet

.PHONY: help demo test test-gpu test-gpu2 test-mps cuda-report gfx950-report bench build clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    the main job: a real model, attention and gated residual in a model, two tensor-parallel processes"
	@echo "make test    the whole test suite"
	@echo "make test-gpu  on an NVIDIA or AMD GPU, with the torch of GPU_PYTHON (python3): kernels, then packed against raw scales"
	@echo "make test-gpu2  gemm_ar on two GPUs: exactness, soak, missing ranks"
	@echo "make test-mps  on a Mac: the Metal operators on its GPU, then their kernels in pairs, with times"
	@echo "make cuda-report  registers, spills and shared memory of the CUDA kernels (needs nvcc, no GPU)"
	@echo "make gfx950-report  what the compiler makes of the AMD kernels, beside Triton's; a cycle model (ARGS=--write: into the README)"
	@echo "make bench   measure every operator against its peers (ARGS=... for one of them)"
	@echo "make build   the environment and the library only"
	@echo "make clean   remove the environment and everything that was built"

demo: build
	$(PY) -m mori_ops.demo $(ARGS)

test: build
	$(PY) -m pytest $(ARGS)

# The Python on PATH, because it is the one whose torch sees the device; it needs pytest and rich.
GPU_PYTHON ?= python3
test-gpu:
	$(GPU_PYTHON) -c 'import torch; assert torch.cuda.is_available(), "this torch sees no GPU"'
	$(GPU_PYTHON) setup.py -q build_ext --inplace
	$(GPU_PYTHON) -m pytest tests/test_cuda.py tests/test_qsa_cuda.py tests/test_gr_cuda.py tests/test_cuda_runtime.py $(ARGS)
	$(GPU_PYTHON) -m pytest --device cuda tests/test_mxfp8.py tests/test_quantize.py tests/test_gr.py tests/test_qsa.py tests/test_public_reports.py $(ARGS)
	$(GPU_PYTHON) -m bench mxfp8_layouts --device cuda --no-save

test-gpu2:
	$(GPU_PYTHON) setup.py -q build_ext --inplace
	$(GPU_PYTHON) -m pytest tests/test_gemm_ar_gpus.py $(ARGS)

test-mps: build
	@$(PY) -c 'import torch; torch.backends.mps.is_available() or exit("make test-mps needs the mps device of a Mac")'
	$(PY) -m pytest tests/metal/test_operators.py tests/metal/test_attention.py tests/metal/test_projection.py tests/metal/test_dispatch.py
	$(PY) -m bench compare $(ARGS)

# Needs nvcc, no GPU.
cuda-report: build
	$(PY) -m tests.cuda_report

gfx950-report: build
	$(PY) -m tests.gfx950.report $(ARGS)

bench: ARGS ?= all
bench: build
	$(PY) -m bench $(ARGS)

# Compiles what has changed since the last time.
build: $(INSTALLED)
	@$(PY) setup.py -q build_ext --inplace > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }

# torch is named again beside the package, so that no other requirement can replace it.
$(INSTALLED): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("mori_ops needs Python >= 3.10: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "$(TORCH)" $(BUILD_TOOLS)
	$(PIP) install --no-build-isolation "$(TORCH)" -e ".[test,demo,bench]"
	@rm -f $(VENV)/installed-* && touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info mori_ops/_C*.so
