# make demo and make test do all the set-up on a fresh machine that has Python 3.10+ with venv.
PYTHON ?= python3
# Test processes; each computes on one thread (see tests/conftest.py).
WORKERS ?= 2
# What a machine without a GPU gets; a machine with one keeps the torch it has.
CPU_TORCH ?= torch==2.13.0
# With it the Hopper kernels are compiled, though not run, by the tests of a machine without a GPU.
CPU_TRITON ?= triton==3.6.0
# And under the newest release, in a folder of its own (tests/kernels/test_compile.py).
NEWEST_TRITON ?= triton==3.9.0
# More arguments for the demo, such as ARGS="--text FILE".
ARGS ?=
# Of `make pytest`: all tests, or some, such as TESTS=tests/ops/test_packing.py.
TESTS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format pytest docs clean

help:
	@echo "make demo    train a small byte-level model here (sets everything up first)"
	@echo "make test    every check: lint, types, contracts, doc-tests, tests"
	@echo "make pytest  the tests alone, or some of them: TESTS=tests/ops/test_packing.py"
	@echo "make lint    the checks that run no test"
	@echo "make format  rewrite the code as ruff formats it"
	@echo "make docs    build the documentation into site/"
	@echo "make clean   remove the environment and all that was built"

demo: $(VENV)/.demo
	@$(BIN)/longdelta demo $(ARGS)

# One failure hides no other: every check runs, and the last lines say which failed.
test: $(VENV)/.dev
	@$(MAKE) --keep-going --no-print-directory $(CHECKS) pytest

CHECKS := check-style check-format check-types check-contracts check-spelling report-sizes
.PHONY: $(CHECKS)
lint: $(VENV)/.dev
	@$(MAKE) --keep-going --no-print-directory $(CHECKS)
check-style:
	$(BIN)/ruff check --output-format concise .
check-format:
	$(BIN)/ruff format --check .
check-types:
	$(BIN)/mypy
check-contracts:
	$(BIN)/lint-imports
check-spelling:
	$(BIN)/codespell src tests docs README.md CONTRIBUTING.md CHANGELOG.md
report-sizes:
	$(BIN)/python tests/contracts/sizes.py

pytest: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/pytest -n $(WORKERS) $(TESTS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch comes before the project: its requirement is then met, and pip looks for no other build.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "longdelta needs Python 3.10 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@if ! nvidia-smi -L >/dev/null 2>&1; then \
		echo "No GPU here: setting up $(VENV) with $(CPU_TORCH)"; \
		$(PYTHON) -m venv $(VENV) && $(PIP) "$(CPU_TORCH)"; \
	else \
		echo "GPU here: setting up $(VENV) with the torch of $(PYTHON), else the newest"; \
		$(PYTHON) -m venv --system-site-packages $(VENV) \
			&& { $(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) torch; }; \
	fi
	@touch $@

# The bench extra lets `longdelta plan --draw` draw, and brings numpy, which torch warns about without.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@$(PIP) --editable ".[bench]"
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@$(PIP) --editable ".[dev]"
	@nvidia-smi -L >/dev/null 2>&1 \
		|| { $(PIP) "$(CPU_TRITON)" \
			&& $(PIP) --no-deps --upgrade --target $(VENV)/triton-newest "$(NEWEST_TRITON)"; } \
		|| echo "No Triton for this machine: the Hopper kernels are not compiled in its tests"
	@touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	@$(PIP) --editable ".[docs]"
	@touch $@
