# make bundle   builds specs/core.yaml into out/ and proves it in the simulator
# make test     lint, types and tests
# make bench    on a machine with an H100 or H200: builds the sm_90a kernels, times them beside cuDNN, writes out/bench/
# make mutants  plants every fault in our kernels, one at a time, and shows that verify finds it (an hour or so)
# All make their own environment; they need Python 3.11 and nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?= -n auto

.PHONY: bundle test lint types bench mutants clean
.DEFAULT_GOAL := bundle

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-build: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[build]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[build,dev]'
	touch $@ $(VENV)/.installed-build

$(VENV)/.installed-bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[build,bench,torch]'
	touch $@ $(VENV)/.installed-build

bundle: $(VENV)/.installed-build
	log="$$(mktemp)"; trap 'rm -f "$$log"' EXIT; \
	$(BIN)/fmha-gen build specs/core.yaml -o out | tee "$$log"; \
	$(BIN)/fmha-gen verify "$$(tail -n 1 "$$log")" --quick

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest $(PYTEST_ARGS)

bench: $(VENV)/.installed-bench
	$(BIN)/fmha-gen build specs/core.yaml --arch sm_90a -o out/sm_90a
	$(BIN)/fmha-gen bench out/sm_90a/core-0.1.0 -o out/bench

mutants: $(VENV)/.installed-dev
	$(BIN)/pytest tests/mutants --full $(PYTEST_ARGS)

clean:
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache
