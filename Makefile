PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.tritium-ready

# Inductor's output is shared by all tests of one run and thrown away with the folder.
TEST_CACHE ?= .cache/test-inductor
# A file stays with one worker: what it compiles once serves all its tests. tests/conftest.py says which files come first.
WORKERS ?= 2
# Each worker has a core: two threads of each would wait for one another at the end of every parallel loop.
THREADS ?= 1

.PHONY: setup demo test test-all ready check fmt bench docs clean

setup: $(STAMP)

# torch goes first: whatever depends on it then finds it installed, and pip does not fetch another build.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev,cli,diffusers,report]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

PYTEST = OMP_NUM_THREADS=$(THREADS) TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(TEST_CACHE) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: ready
	rm -rf $(TEST_CACHE)
	$(PYTEST) -m "not gpu and not thorough"

# Also what repeats a quicker test for more models, dtypes and sizes; twice the time.
test-all: ready
	rm -rf $(TEST_CACHE)
	$(PYTEST) -m "not gpu"

# One core each.
ready: setup
	$(MAKE) -j2 check docs

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/tritium bench flux --against eager,inductor

docs: setup
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) .cache site
