# The verbs of this house. CI calls the same ones (.ci/run). `make help` lists them.

PYTHON       ?= python3
VENV         ?= .venv
REQUIREMENTS ?= requirements/cpu.txt
# Extra words for pip. Where torch's CPU build is not found by itself:
#   make setup PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS    ?=
CONFIG       ?= configs/quickstart.yaml
# Processes that `make test` runs test files in: engines take seconds to start, mostly on one core.
JOBS         ?= 2

BIN       := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/.installed-$(notdir $(basename $(REQUIREMENTS)))
OPS       := $(VENV)/.ops-$(notdir $(basename $(REQUIREMENTS)))
PACKAGES  := console flows tasks stages configs

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c

# ninja and the compiler's output belong to this environment, so that two environments never rebuild each other's.
export PATH := $(BIN):$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions
# Nothing phones home.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup quickstart test test-fast torture lint format docs clean

help: ## list these verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(OPS) ## virtual environment in .venv, pinned packages, DeepSpeed's communication kernel

quickstart: setup ## the whole pipeline on a tiny model, about five minutes
	@$(BIN)/python -m flows.rlhf --config $(CONFIG)

test: setup ## every test, the real engines included, and coverage of at least 85 %
	@home=$$(mktemp -d); trap 'rm -rf "$$home"' EXIT
	export PREFECT_HOME=$$home COVERAGE_FILE=$(CURDIR)/.coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 40 $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

test-fast: setup ## unit, contract, architecture and security tests: no engine
	@home=$$(mktemp -d); trap 'rm -rf "$$home"' EXIT
	PREFECT_HOME=$$home $(BIN)/python -m pytest tests/unit tests/contract tests/architecture tests/security \
	  --ignore tests/security/test_full_run.py $(ARGS)

torture: setup ## the full fault campaign, some hours, and a report: make torture ARGS="--minutes 60"
	@home=$$(mktemp -d); trap 'rm -rf "$$home"' EXIT
	PREFECT_HOME=$$home $(BIN)/python -m tests.fault.torture $(ARGS)

lint: setup ## ruff, mypy, import contracts
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## write docs/artifacts.md from the schemas
	@$(BIN)/python -m stages.artifacts.document docs/artifacts.md

clean: ## build litter; never outputs/, never .venv
	@rm -rf .coverage .coverage.* htmlcov .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	rm -rf build dist ./*.egg-info
	find $(PACKAGES) tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

.ONESHELL:

$(INSTALLED): $(REQUIREMENTS) requirements/dev.txt
	@started=$$SECONDS
	if ! $(BIN)/python -c "" 2>/dev/null; then
	  $(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else
	    f"error: expected Python 3.11 or 3.12, found {v[0]}.{v[1]}; name one: make setup PYTHON=python3.11")'
	  echo "setup 1/3: virtual environment in $(VENV)"
	  $(PYTHON) -m venv --clear $(VENV)
	fi
	count=$$(cat $(REQUIREMENTS) requirements/dev.txt | grep -c ==)
	echo "setup 2/3: $$count pinned packages, 4 GB unpacked; two minutes or more. Details: $(VENV)/install.log"
	log=$(VENV)/install.log
	$(BIN)/python -m pip install --no-deps $(PIP_FLAGS) -r $(REQUIREMENTS) -r requirements/dev.txt > $$log 2>&1 &
	pip=$$!
	trap 'kill $$pip 2>/dev/null' INT TERM
	while sleep 1 && kill -0 $$pip 2>/dev/null; do
	  if (( (SECONDS - started) % 30 == 0 )); then
	    echo "setup 2/3: $$((SECONDS - started)) s, $$(grep -E '^(Collecting|Installing)' $$log | tail -n 1 | cut -c 1-60)"
	  fi
	done
	wait $$pip || { grep -v '^WARNING' $$log | tail -n 20; echo "error: pip failed; all it said is in $$log"; exit 1; }
	echo "setup 2/3: done after $$((SECONDS - started)) s"
	touch $@

# DeepSpeed compiles this kernel when it first runs. Done here, the first run does not pay for it, and a missing
# compiler is said now.
$(OPS): $(INSTALLED)
	@started=$$SECONDS
	if [ "$(notdir $(REQUIREMENTS))" != cpu.txt ]; then touch $@; exit 0; fi  # on GPUs NCCL does this work
	echo "setup 3/3: DeepSpeed's shared-memory communication kernel; half a minute"
	if ! DS_ACCELERATOR=cpu $(BIN)/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()" \
	  > $(VENV)/ops.log 2>&1; then
	  tail -n 20 $(VENV)/ops.log
	  echo "error: the kernel could not be built; it needs a C++ compiler and Python's headers" \
	    "(Debian, Ubuntu: apt install g++ python3-dev)"
	  exit 1
	fi
	echo "setup 3/3: done after $$((SECONDS - started)) s"
	touch $@
