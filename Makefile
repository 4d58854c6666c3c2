# One command per chore. Everything runs in .venv, which the first command makes.

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu check bench simulate protos format k8s-apply-check clean

help: ## list the commands
	@echo "usage: make COMMAND"
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) \
		| while IFS='|' read -r name text; do printf '  %-16s %s\n' "$$name" "$$text"; done

setup: .venv/.stamp ## make .venv with everything in it (done by the others when needed)

.venv/.stamp: pyproject.toml constraints.txt scripts/setup_env.py
	@$(PYTHON) scripts/setup_env.py

demo: .venv/.stamp ## serve a small real model on this machine and watch speculation work
	@$(BIN)/python examples/demo.py

test: .venv/.stamp ## run the tests
	@$(BIN)/python -m pytest --durations=10

test-slow: .venv/.stamp ## run the tests that take minutes
	@$(BIN)/python -m pytest -m "slow and not gpu" --timeout=1800 --durations=10

test-gpu: .venv/.stamp ## run the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu --timeout=600 --durations=10

check: .venv/.stamp ## lint, types, import rules, sizes, protobuf code, manifests (CHECK=name for one)
	@$(BIN)/python scripts/check.py $(CHECK)

bench: .venv/.stamp ## measure against transformers (ROWS=pattern for some rows)
	@$(BIN)/python benchmarks/bench.py $(if $(ROWS),--rows "$(ROWS)")

simulate: .venv/.stamp ## the best policy for many clients, drafters and slow links (docs/simulator.md)
	@$(BIN)/python -m benchmarks.simulate

protos: .venv/.stamp ## generate the protobuf code anew
	@$(BIN)/python scripts/protos.py

format: .venv/.stamp ## format Python and protobuf sources
	@$(BIN)/ruff check --fix-only --quiet . && $(BIN)/ruff format . && $(BIN)/buf format --write

k8s-apply-check: .venv/.stamp ## apply the manifests to a real API server (K8S_TOOLS=DIR)
	@$(BIN)/python scripts/apply_check.py $(K8S_TOOLS)

clean: ## remove .venv and everything built
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
