# Everything runs in .venv, which the targets create themselves: `make demo` or `make test` in a fresh clone is enough.

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Processes that share the tests, file by file; WORKERS=0 runs them in one, for a debugger.
WORKERS ?= 2

# A candidate counts only if it runs (version managers leave names behind that do not), is new enough and can make
# a virtual environment.
PROBE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
FIND_PYTHON = for name in python3.12 python3.11 python3; do \
	if $$name -c '$(PROBE)' >/dev/null 2>&1; then echo $$name; break; fi; done
PYTHON ?= $(shell $(FIND_PYTHON))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install install-dev demo studies test lint typecheck test-slow test-gpu clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done
	@echo '  PYTHON=/path/to/python3.12 chooses the interpreter, ARGS="--seed 1" goes to the command'

install: $(VENV)/.installed ## create .venv and install reasonlab into it

install-dev: $(VENV)/.installed-dev ## the same, with the tools for tests and checks

demo: $(VENV)/.installed ## train the bundled tiny model by RL and draw what happened (ARGS="--seed 1")
	@$(BIN)/reasonlab demo $(ARGS)

test: lint typecheck ## all checks: ruff, mypy, pytest (ARGS="-k engine")
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

studies: $(VENV)/.installed ## all studies at laptop scale
	@$(BIN)/reasonlab study k15-dynamics --scale cpu $(ARGS)
	@$(BIN)/reasonlab study long2short --scale cpu $(ARGS)
	@$(BIN)/reasonlab study mel-vs-grpo --scale cpu $(ARGS)
	@$(BIN)/reasonlab study rm-scaling --scale cpu $(ARGS)
	@$(BIN)/reasonlab study prm-selection --scale cpu $(ARGS)

lint: $(VENV)/.installed-dev ## style and formatting
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || \
		{ echo "error: unformatted files; run $(BIN)/ruff format ." >&2; exit 1; }

typecheck: $(VENV)/.installed-dev ## types, strictly
	@$(BIN)/mypy --no-error-summary

test-slow: $(VENV)/.installed-dev ## the tests that take longer
	@$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

test-gpu: $(VENV)/.installed-dev ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

clean: ## remove caches and build products
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	@rm -rf $(VENV)

# pip is the last thing a new environment gets, so an environment that has it is whole.
$(BIN)/pip:
	@python="$(PYTHON)"; \
	if [ -z "$$python" ] || ! "$$python" -c '$(PROBE)' >/dev/null 2>&1; then \
		echo "error: $${python:-python3} is missing, older than 3.11 or without its venv module." \
			"Install Python 3.12 (on Debian and Ubuntu also python3-venv), or name a suitable one:" \
			"make install PYTHON=/path/to/python3.12" >&2; \
		exit 2; \
	fi; \
	"$$python" -m venv $(VENV)

# torch goes first, so that its size shows up in its own step and a broken download is not repeated with the rest.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing reasonlab into $(VENV) (the first time this downloads torch and takes minutes)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing reasonlab and its development tools into $(VENV) (the first time this takes minutes)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.installed $@
