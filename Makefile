# Each target does all the set-up it needs, once.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: help hunt test test-quick fuzz check docs agree bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hitproof needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	mkdir -p .venv/types && ln -sfn ../.. .venv/types/hitproof
	touch $@

hunt: .venv/installed ## the main job: search, shrink, confirm on real vLLM, report (ARGS="--budget 5m")
	$(BIN)/hitproof hunt $(ARGS); status=$$?; [ $$status -le 1 ] || exit $$status

test: .venv/installed ## all tests, real vLLM and its engine included (makes a 3 GB environment once)
	$(BIN)/hitproof vllm env
	$(BIN)/pytest $(ARGS)

test-quick: .venv/installed ## all tests but the engine's
	$(BIN)/pytest -m "not engine" $(ARGS)

fuzz: .venv/installed ## the fuzz properties alone (HITPROOF_PROFILE=quick, ci or nightly)
	$(BIN)/pytest -m fuzz $(ARGS)

check: .venv/installed ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p hitproof.model -p hitproof.properties -p hitproof.fuzz -p hitproof.replay -p hitproof.cli

docs: .venv/installed ## write the generated documents
	$(BIN)/hitproof docs write

agree: .venv/installed ## model against real vLLM on 20,000 random traces each (about half an hour)
	$(BIN)/hitproof conform --release 0.25.0 --release 0.32.0 --traces 20000

bench: .venv/installed ## speed of the model beside vLLM's own manager
	$(BIN)/python benchmarks/manager_speed.py

clean: ## remove the environment of the project itself
	rm -rf .venv
