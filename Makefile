# Needs Python >= 3.11, pip and make; everything else goes into .venv inside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help install demo test lint test-long bench format docs picture clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

TOOLS := $(VENV)/.tools

$(TOOLS): requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "gpu-worker-pool needs Python 3.11 or later; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $(TOOLS)

$(READY): $(TOOLS) pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $(READY)

install: $(READY) ## set up .venv with the package and its test tools

demo: $(READY) ## watch simulated workers share simulated GPUs
	@$(BIN)/gpu-pool demo

test: lint ## check style and types, run the tests
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not long"

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test-long: $(READY) ## check the same properties over many more random histories
	$(BIN)/python -m pytest -n 2 -m long --timeout 3600

bench: $(READY) ## measure speed, as ratios within one run
	$(BIN)/python -m bench.core
	$(BIN)/python -m bench.server
	$(BIN)/python -m bench.client
	$(BIN)/python -m bench.leases
	$(BIN)/python -m bench.cli
	$(BIN)/python -m bench.page

format: $(READY) ## format the code with ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY) ## redraw the diagrams in docs/ from the code
	$(BIN)/python docs/draw_diagrams.py

picture: $(READY) ## retake the README's picture of the live page
	$(BIN)/python -m tests.dashboard.take_picture

clean: ## remove .venv and everything generated
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
