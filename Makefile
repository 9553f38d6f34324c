# Targets install what they need into VENV. PYTHON, VENV and WORKERS (test processes) may be set.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The packaged model: a pair of at most 5 MB in 8 bits. CORPUS is a folder of English text, TRAINING_DATA describes it
# and its licences in the model card.
PACKAGED ?= electra/packaged
PACKAGED_WORK ?= build/packaged
PACKAGED_SETTINGS ?= --size small --layers 7 --positions 128 --generator-layers 4 --generator-width 128 --packing examples \
	--corrective-lm-weight 1 --bag-of-words-weight 1 --minutes 15 --phases fraction=0.7 fraction=0.3,temperature=2

.PHONY: install format check test test-slow site page-packages demo packaged-model clean

install: $(VENV)/dev-installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "electra needs Python 3.11 or newer, this is %d.%d; choose another: make PYTHON=python3.12 test" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo-installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[plot,onnx]'
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

# The documentation, in build/site/html.
site: install
	$(BIN)/python docs/build_site.py

# The JavaScript libraries of the page (electra export --to page), with npm; a wheel built afterwards contains them.
page-packages: $(VENV)/demo-installed
	$(BIN)/python -m electra.exporting.node_packages

demo: $(VENV)/demo-installed
	@$(BIN)/python -m electra.exporting.node_packages 2>/dev/null || echo "without npm the demo writes no page"
	$(BIN)/electra demo

# Makes the packaged model, on a GPU. Interrupted, it continues.
packaged-model: $(VENV)/demo-installed
	@test -n "$(CORPUS)" && test -n "$(TRAINING_DATA)" || { echo 'name a folder of text, and say what it is and its licences: make packaged-model CORPUS=texts/ TRAINING_DATA="reports of 2025 (CC BY 4.0)"'; exit 2; }
	test -d $(PACKAGED_WORK)/vocab || $(BIN)/electra tokenizer --corpus $(CORPUS) --vocab-size 24576 --lowercase --output $(PACKAGED_WORK)/vocab
	$(BIN)/electra shard --corpus $(CORPUS) --tokenizer $(PACKAGED_WORK)/vocab --output $(PACKAGED_WORK)/shards
	$(BIN)/electra pretrain --data $(PACKAGED_WORK)/shards --output $(PACKAGED_WORK)/run --resume $(PACKAGED_SETTINGS)
	rm -rf $(PACKAGED_WORK)/packaged
	text="$(TRAINING_DATA)"; $(BIN)/electra export --model $(PACKAGED_WORK)/run --to package --training-data "$${text%.}. The weights have the license of electra, Apache 2.0." --output $(PACKAGED_WORK)/packaged
	sed -i -e '1s/^---$$/---\nlanguage: en\nlicense: apache-2.0/' -e 's/^# packaged$$/# The model in the package/' -e 's/^A text encoder/A small English text encoder/' $(PACKAGED_WORK)/packaged/README.md
	rm -rf $(PACKAGED)
	cp -r $(PACKAGED_WORK)/packaged $(PACKAGED)
	$(BIN)/python benchmarks/replaced_words.py --model $(PACKAGED)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
