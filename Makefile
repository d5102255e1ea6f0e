# Everything runs in an environment of its own, .venv, made at first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

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
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0 numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) telegrad-demo docs/_build build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
