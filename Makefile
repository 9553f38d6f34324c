# Targets install what they need into VENV. PYTHON, VENV and WORKERS (test processes) may be set.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: install format check test test-slow demo clean

install: $(VENV)/dev-installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "electra needs Python 3.11 or newer, this is %d.%d; choose another: make PYTHON=python3.12 test" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo-installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[plot]'
	@touch $@

$(VENV)/dev-installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(VENV)/demo-installed $@

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Everything that guards correctness; the Triton kernels run in Triton's interpreter.
test: check
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) tests/test_kernels.py

# What is long by nature: faults and kills, the demo, benchmark scripts.
test-slow: install
	$(PYTEST) -m slow

demo: $(VENV)/demo-installed
	$(BIN)/electra demo

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
