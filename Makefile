# `make help` lists the targets. Set-up happens by itself, on first use and when the lock changes.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow lint types format lock setup-gpu setup-tpu clean

BIN := .venv/bin
READY := .venv/.ready
UV = $$(command -v .tools/uv/bin/uv || command -v uv)
# pyright asks its registry for a newer release unless told not to.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PYTHON
# Large pages for XLA's temporaries: a third of the system time of a training step on the CPU.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml .requirements.lock .ci/setup
	@.ci/setup

quickstart: $(READY) ## train the small agent; ARGS="--set seed=1 --out runs/seed1" overrides
	@$(BIN)/rl-jax run configs/quickstart.toml --out runs/quickstart $(ARGS)

test: $(READY) ## every test but the slow ones; ARGS="tests/losses -k dis" selects
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(READY) ## the tests marked slow
	@$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(READY) ## ruff's rules, its format, and pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

types: $(READY) ## pyright alone
	@$(BIN)/pyright

format: $(READY) ## format the code and apply ruff's safe fixes
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

# uv.lock would record a registry's address in every line; a requirements file with hashes does not.
lock: $(READY) ## resolve pyproject.toml anew into .requirements.lock; ARGS=--upgrade for newer ones
	@$(UV) pip compile pyproject.toml --quiet --universal --extra report --extra dev \
		--generate-hashes --no-emit-index-url --no-annotate --no-header \
		--python $(BIN)/python --output-file .requirements.lock $(ARGS)

setup-gpu: $(READY) ## add the packages for NVIDIA GPUs
	@$(UV) pip install --python $(BIN)/python --no-build-isolation --editable '.[gpu]'

setup-tpu: $(READY) ## add the packages for TPUs
	@$(UV) pip install --python $(BIN)/python --no-build-isolation --editable '.[tpu]'

clean: ## remove what set-up, tests and linters made; runs/ stays
	rm -rf .venv .tools .pytest_cache .ruff_cache .hypothesis
	find rl_jax models launch tests -name __pycache__ -type d -prune -exec rm -rf {} +
