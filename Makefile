# Every target sets itself up from nothing: a virtual environment in .venv, made once.

TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BACKENDS := cpu triton cuda rocm npu
JOBS ?= 2

# Two spinning OpenMP threads on busy cores cost far more than they bring to small operations.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test check lint types contracts unit package conformance size matrix clean

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py

test: check unit

check: lint types contracts

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

contracts: $(VENV)/.ready
	$(BIN)/lint-imports

unit: $(VENV)/.ready
	$(BIN)/pytest tests -n $(JOBS)

package: $(VENV)/.ready
	$(BIN)/pytest tests/packaging

# The tests of one device's hardware; no test at all is a failure.
conformance: $(VENV)/.ready
	$(BIN)/pytest tests -m $(DEVICE)

size: $(VENV)/.ready
	$(BIN)/python tests/support/size.py

matrix: $(VENV)/.ready
	$(BIN)/hal matrix --markdown > docs/support-matrix.md

$(VENV)/.ready: pyproject.toml $(BACKENDS:%=backends/%/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[dev]' $(BACKENDS:%=-e backends/%)
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache examples/models
