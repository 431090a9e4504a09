PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.tritium-ready
TORCH   = torch==2.13.0
# torch's CUDA wheels require this Triton. Its CPU wheels name none, and pip would install the newest, which belongs to another torch.
TRITON  = 'triton==3.7.*'

# Inductor's output is shared by all tests of one run and thrown away with the folder.
TEST_CACHE ?= .cache/test-inductor
# A file stays with one worker: what it compiles once serves all its tests. tests/conftest.py says which files come first.
WORKERS ?= 2
# Each worker has a core: two threads of each would wait for one another at the end of every parallel loop.
THREADS ?= 1

# What `make test-newest` runs: everything that reaches into torch.
NEWEST_TESTS = tests/tiling tests/compiler tests/fusions tests/ops tests/census

.PHONY: setup demo test test-all test-newest ready check fmt bench docs dist clean

setup: $(STAMP)

# torch goes first: whatever depends on it then finds it installed, and pip does not fetch another build.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH) $(TRITON)
	$(BIN)/python -m pip install --quiet --editable '.[dev,cli,diffusers,report,parallel,serve,ray]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py
	@echo 'demo/compare.png has the images and 10 times their differences, demo/report.html the report'

PYTEST = OMP_NUM_THREADS=$(THREADS) TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(TEST_CACHE) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: ready
	rm -rf $(TEST_CACHE)
	$(PYTEST) -m "not gpu and not thorough"

# Also what repeats a quicker test for more models, dtypes and sizes; twice the time.
test-all: ready
	rm -rf $(TEST_CACHE)
	$(PYTEST) -m "not gpu"

# The newest torch that pip finds, in an environment of its own. Its only wheel for Linux is the CUDA build, 5.4 GB with its
# packages; no GPU is needed. Remove the folder to get a newer torch.
test-newest: VENV = .venv-newest
test-newest: TEST_CACHE = .cache/test-inductor-newest
test-newest:
	$(MAKE) setup VENV=$(VENV) TORCH=torch TRITON=triton
	rm -rf $(TEST_CACHE)
	$(PYTEST) -m "not gpu and not thorough" $(NEWEST_TESTS)

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

# The wheel is built from the unpacked sdist, so that it holds nothing that only this folder has.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) .venv-newest .cache site dist build
