# One command per job. `make run` needs only Python 3.11 or newer. `make test` also needs root or sudo once, to install
# redis-server and the other programs that tests start.
PYTHON  ?= python3
VENV    ?= .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
BACKENDS ?= 2
PORT    ?= 8000

.PHONY: run venv dev test lint types imports unit bench bench-gateway bench-curves bench-engine bench-routing soak gpu-check vllm-check docs dist sbom system-packages model clean help

help: ## Show this text
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

run: venv ## Set up everything, then start a gateway and two workers with a real model
	@$(BIN)/homing up --backends $(BACKENDS) --port $(PORT)

venv: $(RUN_STAMP) ## Create the virtual environment for `make run` and the examples

$(RUN_STAMP): pyproject.toml constraints.txt
	@echo "==> Installing Homing and the CPU worker into $(VENV) (about two minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --upgrade pip
	@$(PIP) install --quiet --progress-bar on --constraint constraints.txt --editable '.[engine,examples]'
	@touch $@

dev: $(DEV_STAMP) ## Add linters, type checker and test tools to it

$(DEV_STAMP): $(RUN_STAMP)
	@echo "==> Installing test tools into $(VENV)"
	@$(PIP) install --quiet --progress-bar on --constraint constraints.txt --editable '.[dev]'
	@touch $@

system-packages: ## Install the programs that tests start (redis-server, g++ …) if missing
	@tests/install-system-packages.sh

model: venv ## Fetch and convert the default model ahead of time
	@$(BIN)/python -m engine_adapter.engine.checkpoint.model_store

test: dev system-packages model lint types imports unit ## Run everything that CI checks

lint:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types:
	@$(BIN)/mypy

imports:
	@$(BIN)/lint-imports

unit:
	@$(BIN)/pytest -n 2 --dist loadgroup

bench: bench-gateway bench-curves bench-engine bench-routing ## Run all benchmarks (long)

bench-gateway: dev ## Compare CPU per request with other gateways, then bench-curves
	@$(BIN)/python tests/bench/gateway/run.py
	@$(BIN)/python tests/bench/gateway/curves.py

bench-curves: dev ## Measure how the cost grows with load and fleet, and what options add
	@$(BIN)/python tests/bench/gateway/curves.py

bench-engine: dev model ## Compare the worker with other engines
	@$(BIN)/python tests/bench/engine/run.py

bench-routing: dev ## Simulate every routing policy on every trace slice
	@$(BIN)/python -m gateway.replay.grid

soak: dev ## Run long: 1,500 streams for five minutes, chaos for fifteen
	@$(BIN)/pytest -m soak tests

vllm-check: dev ## Check that tenants are kept apart by a stock vLLM: at HOMING_VLLM_URL, or installed here
	@$(BIN)/pytest -m vllm tests/proxy

gpu-check: dev ## Check the kernels on a CUDA device: correctness, then minimum speed
	@$(BIN)/python tests/gpu/gpu_check.py

docs: dev ## Generate docs/configuration.md from the code
	@$(BIN)/python docs/write_reference.py
	@$(BIN)/python docs/write_layers.py

dist: dev ## Build and check wheel and source archive
	@rm -rf dist
	@$(BIN)/hatchling build
	@$(BIN)/twine check --strict dist/*

sbom: venv ## Write the packages of an install to dist/sbom.json (CycloneDX)
	@mkdir -p dist
	@$(PIP) install --quiet --constraint constraints.txt cyclonedx-bom
	@$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o dist/sbom.json $(BIN)/python

clean: ## Remove the virtual environment and caches of this checkout
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .homing
