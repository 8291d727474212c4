# Everything happens in .venv, with the versions of constraints.txt. The package is installed there in editable form: Python finds the
# sources in the checkout and the compiled extension in the virtual environment, wherever it is started.
PYTHON ?= python3
EXTRAS ?= test,dev,demo,bench
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed
CSRC := CMakeLists.txt $(wildcard csrc/*)

# pytest-xdist starts one process per core, so each computes with one thread.
SINGLE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
PYTEST_ARGS ?= -n auto

.PHONY: help build demo bench gpu test matrix lint format clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

# torch goes first and by exact version. Where the index offers CUDA builds only, a CPU build saves gigabytes: set PIP_EXTRA_INDEX_URL or
# PIP_FIND_LINKS to where one is.
$(VENV)/.python: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt scikit-build-core nanobind cmake ninja
	@touch $@

$(INSTALLED): $(VENV)/.python pyproject.toml $(CSRC)
	$(PIP) install -c constraints.txt --no-build-isolation --editable ".[$(EXTRAS)]"
	@touch $@

build: $(INSTALLED)  ## Set up .venv and compile the extension

demo: $(INSTALLED)  ## Self-check of the kernels, then a small training run
	$(BIN)/python -m bapo_kernels check --quick
	$(BIN)/python demo/train.py

# verl asks for Ray, an older transformers and Python < 3.13; the one file of it that is compared needs only PyTorch.
bench: $(INSTALLED)  ## Beside other packages on this CPU (an hour; BENCH_ARGS=--quick: a minute): tables, CSV, figure
	-$(PIP) install --no-deps -c constraints.txt verl
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS) --plot

# It needs a CUDA (or ROCm) build of torch: on Linux, what PyPI has.
gpu: $(INSTALLED)  ## On a GPU machine: tests, checks, timings and report (GPU_ARGS="--budget 200")
	-$(PIP) install --no-deps -c constraints.txt verl
	$(BIN)/python -m bapo_kernels bench --gpu $(GPU_ARGS)

# verl by itself, and what its loss path on a CPU imports: its own requirements would put older versions of others in the place of ours.
# It is made for Python < 3.13; elsewhere its tests are skipped. Of OpenRLHF one file is compared, where there is a wheel of it.
$(VENV)/.trainers: $(INSTALLED)
	! $(BIN)/python -c "import sys; sys.exit(sys.version_info >= (3, 13))" || { \
		$(PIP) install --no-deps -c constraints.txt verl && \
		$(PIP) install -c constraints.txt ray tensordict hydra-core codetiming orjson peft; }
	-$(PIP) install --no-deps -c constraints.txt openrlhf
	@touch $@

test: $(INSTALLED) $(VENV)/.trainers  ## The whole test suite
	$(SINGLE_THREAD) $(BIN)/python -m pytest $(PYTEST_ARGS)

# Compiles only, no GPU is needed. Another version of Triton than that of constraints.txt is put beside .venv, and leaves the table as it is.
OTHER_TRITON := $(if $(TRITON),build/triton-$(TRITON))

matrix: $(INSTALLED) $(OTHER_TRITON)  ## Compile every Triton kernel for every chip (TRITON=3.9.0: with that version), and write the table
	PYTHONPATH=$(OTHER_TRITON) $(BIN)/python tests/compile_matrix.py --all --table $(or $(OTHER_TRITON),tests/compile_matrix).csv

build/triton-%:
	$(PIP) install --no-deps --target $@.part triton==$*
	mv $@.part $@

lint: $(INSTALLED)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## Let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove .venv and everything built
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find bapo_kernels tests -name __pycache__ -type d -exec rm -rf {} +
