# Everything runs in an environment of its own, made at first use. PYTHON, VENV and TORCH make one
# of other versions: make test PYTHON=python3.13 VENV=.venv313 TORCH=2.15.0
PYTHON ?= python3
VENV := .venv
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONSTRAINTS := $(VENV)/constraints.txt

.PHONY: demo test lint types docs conformance bench clean

demo: $(INSTALLED)
	$(BIN)/telegrad demo $(DEMO)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(TESTS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -n -q docs docs/_build
	@echo "docs/_build/index.html"

conformance: $(INSTALLED)
	$(BIN)/python -m conformance $(SUITES)

bench: $(INSTALLED)
	$(BIN)/telegrad bench $(BENCHES)

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

clean:
	rm -rf $(VENV) telegrad-demo docs/_build build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
