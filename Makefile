# Needs Python >= 3.11, pip and make; everything else goes into .venv inside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests and measures start thousands of programs: without bytecode each of them would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
#: How long `make soak` runs: make soak MINUTES=5
MINUTES ?= 30
.PHONY: help install demo demo-fleet test lint test-long test-lowest soak release-check bench format docs picture clean test-integrations

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

demo-fleet: $(READY) ## watch three servers share one queue on PostgreSQL, while the dispatcher is killed
	@$(BIN)/python -m tests.fleet.demo

test: lint ## check style and types, run the tests
	$(BIN)/python -m pytest -n 5 --dist worksteal -m "not long"

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test-integrations: $(READY) ## try the recipes for other libraries with these libraries
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-integrations.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e integrations/hydra
	$(BIN)/python -m pytest tests/integrations tests/workers/test_joblib.py

test-long: $(READY) ## check the same properties over many more random histories
	$(BIN)/python -m pytest -n 2 -m long --timeout 3600

LOWEST := .venv-lowest
# What meets the packages that we need: servers, clients, the command line and the ledger.
LOWEST_TESTS := tests/unit/gpu_server tests/unit/leases tests/unit/hardware/test_nvml.py tests/unit/test_replies.py tests/unit/test_config.py \
  $(addprefix tests/integration/test_,server.py tls.py lease_api.py unix_socket.py http_client.py notify.py client.py \
  hostile_connections.py) tests/ledger/test_any_ledger.py tests/cli/test_views.py tests/cli/test_servers.py

test-lowest: $(READY) ## try the oldest versions that pyproject.toml allows
	$(PYTHON) -m venv --clear $(LOWEST)
	$(BIN)/python .ci/lowest_versions.py > $(LOWEST)/needed.txt
	@cat $(LOWEST)/needed.txt
	grep -E '^(pytest.*|hypothesis|execnet|editables|hatchling)==' requirements-dev.txt > $(LOWEST)/tools.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -r $(LOWEST)/needed.txt -r $(LOWEST)/tools.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	$(LOWEST)/bin/python -m pytest -n 2 -m "not long" -W default $(LOWEST_TESTS)

soak: $(READY) ## run a server for half an hour under kills, freezes and a full disk (MINUTES=30)
	$(BIN)/python -m tests.chaos.soak $(MINUTES)

release-check: $(READY) ## build the package, check it, and try it in an empty environment
	$(BIN)/python docs/make_manual.py --check
	$(BIN)/python .ci/release_check.py
	$(BIN)/python -m pytest -q -m long tests/acceptance/test_container.py

bench: $(READY) ## measure speed, as ratios within one run
	$(BIN)/python -m bench.core
	$(BIN)/python -m bench.scheduling
	$(BIN)/python -m bench.server
	$(BIN)/python -m bench.client
	$(BIN)/python -m bench.leases
	$(BIN)/python -m bench.cli
	$(BIN)/python -m bench.starts
	$(BIN)/python -m bench.map
	$(BIN)/python -m bench.page
	$(BIN)/python -m bench.workers
	$(BIN)/python -m bench.fleet
	$(BIN)/python -m bench.fleet_database
	$(BIN)/python -m bench.fleet_servers

format: $(READY) ## format the code with ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY) ## redraw the diagrams in docs/ from the code, and the man page from the commands
	$(BIN)/python docs/draw_diagrams.py
	$(BIN)/python docs/make_manual.py

picture: $(READY) ## retake the README's picture of the live page
	$(BIN)/python -m tests.dashboard.take_picture

clean: ## remove .venv and everything generated
	rm -rf $(VENV) $(LOWEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
