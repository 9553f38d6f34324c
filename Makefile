# make test: environment, installation, formatter check, linter, types, tests, kernels in Triton's interpreter.
# PYTHON and VENV may be set.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: install format check test demo clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "electra needs Python 3.11 or newer, this is %d.%d; choose another: make PYTHON=python3.12 test" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -n $(WORKERS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) tests/test_kernels.py

demo: install
	$(BIN)/electra demo

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
