# blockline: from one PyTorch block to ONNX, onnxruntime and TensorRT. `make help` explains each target.

# The Pythons that the lock and the tests are for, and the first of them that runs here and can make an environment.
PYTHONS := 3.11 3.12 3.13 3.14
PYTHON ?= $(or $(shell for version in $(PYTHONS); do python$$version -c 'import ensurepip, venv' 2>/dev/null && echo python$$version && break; done),python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

MODEL ?= smollm2-135m
CHECKPOINT ?= $(if $(filter smollm2-135m,$(MODEL)),build/checkpoints/smollm2-135m)
UNIT ?= $(if $(CHECKPOINT),model,block)
LAYERS ?=
DTYPE ?= fp16
BUNDLE ?= build/$(MODEL)
BACKEND ?= auto
MAX_BATCH ?=
MAX_SEQ ?=
CACHE_CAPACITY ?=
PROMPT ?= The capital of France is
QUICK ?=
WORKERS ?= 2

export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup lock checkpoint export validate build inspect compare decode generate run test bench bench-peers interop-peers gpu-check doctor lint clean

help: ## show this list
	@echo "Targets (variables: MODEL CHECKPOINT UNIT LAYERS DTYPE BUNDLE BACKEND MAX_BATCH MAX_SEQ CACHE_CAPACITY PROMPT QUICK WORKERS):"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(READY) ## make .venv with everything that the commands and tests need, each file checked by its SHA-256

$(READY): pyproject.toml $(wildcard locks/*.txt) locks/install.py
	@command -v "$(PYTHON)" >/dev/null || { echo "python: got no $(PYTHON) here, expected one of Python $(PYTHONS); install one, or name one: make setup PYTHON=/path/to/python3.13" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; got = "%d.%d" % sys.version_info[:2]; sys.exit(got not in "$(PYTHONS)".split() and "python: $(PYTHON) is Python " + got + ", expected one of $(PYTHONS); install one, or name one: make setup PYTHON=/path/to/python3.13")'
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m locks.install
	@touch $@

build/checkpoints/smollm2-135m/config.json: | $(READY)
	$(BIN)/python -m exporter import smollm2-135m -o $(@D)

checkpoint: build/checkpoints/smollm2-135m/config.json ## fetch the small real model, SmolLM2-135M (about 90 MB)

export: $(READY) $(if $(filter build/checkpoints/smollm2-135m,$(CHECKPOINT)),build/checkpoints/smollm2-135m/config.json) ## export MODEL (or CHECKPOINT) to BUNDLE and validate it
	$(BIN)/python -m exporter export $(if $(CHECKPOINT),--checkpoint "$(CHECKPOINT)",--model $(MODEL)) --unit $(UNIT) \
	    $(if $(LAYERS),--layers $(LAYERS)) --dtype $(DTYPE) -o "$(BUNDLE)"

validate: $(READY) ## compare BUNDLE's graph in onnxruntime with the eager definition again
	$(BIN)/python -m exporter validate "$(BUNDLE)"

build: $(READY) ## compile BUNDLE into a TensorRT engine (no GPU needed with tensorrt-rtx)
	$(BIN)/python -m engines build "$(BUNDLE)" --backend $(BACKEND) $(if $(MAX_BATCH),--max-batch $(MAX_BATCH)) \
	    $(if $(MAX_SEQ),--max-seq-len $(MAX_SEQ)) $(if $(CACHE_CAPACITY),--cache-capacity $(CACHE_CAPACITY))

inspect: $(READY) ## show BUNDLE's network as TensorRT understands it, and its engines
	$(BIN)/python -m engines inspect "$(BUNDLE)" --backend $(BACKEND) $(if $(CACHE_CAPACITY),--cache-capacity $(CACHE_CAPACITY))

compare: $(READY) ## compare every backend that runs here with eager, operation by operation; writes BUNDLE's compare.html beside it
	$(BIN)/python -m engines compare "$(BUNDLE)" --html "$(patsubst %/,%,$(BUNDLE)).compare.html"

decode: $(READY) ## time prefill and decode of BUNDLE on random input
	$(BIN)/python -m runtime decode "$(BUNDLE)" --backend $(BACKEND) $(if $(MAX_BATCH),--batch $(MAX_BATCH)) \
	    $(if $(CACHE_CAPACITY),--cache-capacity $(CACHE_CAPACITY))

generate: $(READY) ## continue PROMPT with BUNDLE
	$(BIN)/python -m runtime generate "$(BUNDLE)" --backend $(BACKEND) --prompt "$(PROMPT)" \
	    $(if $(CACHE_CAPACITY),--cache-capacity $(CACHE_CAPACITY))

run: $(READY) export ## everything, from nothing: set up, fetch the small model, export, validate, compile, decode, report
	$(BIN)/python -m engines build "$(BUNDLE)" --backend $(BACKEND) --max-seq-len 128 --cache-capacity 1024
	$(BIN)/python -m runtime report "$(BUNDLE)" --prompt "$(PROMPT)"

test: export OMP_WAIT_POLICY := passive# threads that wait for work by spinning would take the other worker's core
test: $(READY) checkpoint ## set up and run the tests, files spread over WORKERS processes
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(if $(QUICK),-m "not slow")

bench: $(READY) $(if $(QUICK),,checkpoint) ## our step beside everyone else's, all figures and plots; QUICK=1 is a small run without peers
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick)

bench-peers: $(READY) ## make the environments of other runtimes (optimum, onnxruntime-genai, llama.cpp) under build/peers
	$(BIN)/python -m benchmarks.peers.environments

interop-peers: $(READY) ## make only the environments of optimum and onnxruntime-genai; `make test` then runs their tests
	$(BIN)/python -m benchmarks.peers.environments optimum genai

gpu-check: ## on a machine with a GPU: parity, aliases, graphs and speed of what is installed; no network needed
	$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) -m benchmarks.own.gpu_check

doctor: $(READY) ## what is installed, what really works here, and how to fix what does not
	$(BIN)/python -m runtime doctor

lint: $(READY) ## check style, types, and the environment against the lock
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m pip check
	$(BIN)/python -m locks.check

lock: ## renew the lock from pyproject.toml; LOCK=--upgrade takes the newest versions
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r locks/uv.txt
	build/lock/bin/python -m locks.renew $(LOCK)

clean: ## remove what was built; checkpoints and peers stay
	find build -mindepth 1 -maxdepth 1 ! -name checkpoints ! -name peers -exec rm -rf {} + 2>/dev/null || true
