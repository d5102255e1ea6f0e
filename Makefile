# Everything runs in an environment of its own, made at first use. PYTHON, VENV and TORCH make one
# of other versions: make test PYTHON=python3.13 VENV=.venv313 TORCH=2.15.0
PYTHON ?= python3
VENV := .venv
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONSTRAINTS := $(VENV)/constraints.txt

.PHONY: help demo test lint types docs conformance bench hooks clean

help:  ## show this help
	@awk -F ':.*## +' '/^[a-z]+:.*## / {printf "%-12s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## train a model over three processes; DEMO="--steps 100" passes options
	$(BIN)/telegrad demo $(DEMO)

test: $(INSTALLED)  ## run all tests; TESTS=tests/rpc runs a part
	$(BIN)/python -m pytest $(TESTS)

lint: $(INSTALLED)  ## check style and formatting (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## check types (mypy --strict)
	$(BIN)/mypy

docs: $(VENV)/.docs  ##  build docs/_build/index.html; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -n -q docs docs/_build
	@echo "docs/_build/index.html"

conformance: $(INSTALLED)  ## run torch's own suites on telegrad; SUITES=RpcTest runs a part
	$(BIN)/python -m conformance $(SUITES)

bench: $(INSTALLED)  ## measure beside torch's RPC; BENCHES=echo runs a part
	$(BIN)/telegrad bench $(BENCHES)

hooks: $(INSTALLED)  ## check style, formatting and types before each commit
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) pre-commit
	$(BIN)/pre-commit install

# torch is installed first, by itself and pinned: a resolver that may choose takes a build with
# gigabytes of CUDA libraries.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) torch numpy
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[docs]'
	touch $@

clean:  ## delete everything that make has made
	rm -rf $(VENV) telegrad-demo docs/_build build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
