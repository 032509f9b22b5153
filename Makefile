# shardwise: `make demo` and `make test` are all a fresh clone needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-full lint types bench docs clean help

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(STAMP): pyproject.toml constraints.txt src/shardwise/runtime/columns.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: $(STAMP)   ## capture, ask, train and compare on this machine
	$(BIN)/python examples/demo.py

# Tests that compute on ranks of their own need the cores for them; the others, and those that mostly wait, share
# the cores.
RANKED  := tests/runtime tests/transparency tests/fit tests/keras/test_keras_training.py
WAITING := tests/fit/test_fit_alone.py $(addprefix tests/runtime/test_,environment.py heap.py launch.py)
SHARED  := $(filter-out $(RANKED) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/))) $(WAITING)

test: lint       ## lint, types, import order and the default test suite (< 10 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not full" -n 3 $(addprefix --ignore=,$(RANKED)) $(SHARED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not full" $(addprefix --ignore=,$(WAITING)) $(RANKED)

test-full: lint  ## everything, including the long products
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 $(addprefix --ignore=,$(RANKED)) $(SHARED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(addprefix --ignore=,$(WAITING)) $(RANKED)

lint: $(STAMP)   ## style, types and import order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## run every benchmark in benchmarks/ one after another
	@set -e; for run in benchmarks/*/run.py; do echo "== $$run"; $(BIN)/python $$run; done

docs: $(STAMP)   ## build the documentation into docs/_build/html
	$(BIN)/sphinx-build -W -q -b html docs docs/_build/html

clean:           ## remove what the other targets made
	rm -rf $(VENV) build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis
