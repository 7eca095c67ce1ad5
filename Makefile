# Every target sets itself up from nothing: a virtual environment in .venv, made once.

TORCH ?= torch==2.13.0
TRITON ?= triton==3.9.0
PROVIDER ?= cpu.torch
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BACKENDS := cpu triton cuda rocm npu
JOBS ?= 2

# Two spinning OpenMP threads on busy cores cost far more than they bring to small operations.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test check lint types contracts unit fuzz package conformance kernels interpreted compiled report size matrix clean

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

# Reading 10^5 mutated configs gives a spec or a config error; `unit` takes fewer.
fuzz: export HAL_FUZZ_CONFIGS = 100000
fuzz: $(VENV)/.ready
	$(BIN)/pytest tests/model/test_fuzz.py

package: $(VENV)/.ready
	$(BIN)/pytest tests/packaging

# The conformance kit on a provider's own device; an absent device and an empty manifest are failures.
conformance: $(VENV)/.ready
	$(BIN)/pytest --pyargs hal.testing --hal-provider $(PROVIDER) --hal-require-device

# The Triton kernels without a GPU: in the interpreter, then compiled for every arch.
kernels: interpreted compiled

interpreted: $(VENV)/.ready .triton/.ready
	TRITON_INTERPRET=1 PYTHONPATH=.triton $(BIN)/pytest tests/interpreted -n $(JOBS)

compiled: $(VENV)/.ready .triton/.ready
	PYTHONPATH=.triton $(BIN)/pytest tests/compiled -n $(JOBS)

# The conformance kit on a provider, for the proofs of its manifest. Run where its device is.
report: $(VENV)/.ready
	$(BIN)/pytest --pyargs hal.testing --hal-provider $(PROVIDER) --hal-require-device \
		--hal-report docs/reports/$(PROVIDER).json

size: $(VENV)/.ready
	$(BIN)/python tests/support/size.py

matrix: $(VENV)/.ready
	$(BIN)/hal matrix --markdown > docs/support-matrix.md

$(VENV)/.ready: pyproject.toml $(BACKENDS:%=backends/%/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[dev]' $(BACKENDS:%=-e backends/%)
	touch $@

# Triton stands beside the environment, since no other target may come to need it.
.triton/.ready: | $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .triton '$(TRITON)'
	touch $@

clean:
	rm -rf $(VENV) .triton build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache examples/models
