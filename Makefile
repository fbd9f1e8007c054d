# Everything runs in a virtual environment of its own; the first target that needs it makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := $(VENV)/.peers

PROCESSES ?= 2
# The tests of test-ci wait for Ray half of the time: three processes keep two cores busy.
CI_PROCESSES ?= 3

.PHONY: demo test test-ci test-all test-gpu chaos check bench bench-full bench-gpu format clean

demo: $(INSTALLED)  ## install, then train thirteen models at once on real data
	$(BIN)/raypool demo

test: $(INSTALLED)  ## install, then run the quick tests, in PROCESSES=2 processes; plain pytest runs them in its own, for a debugger
	$(BIN)/pytest -n $(PROCESSES)

test-ci: $(INSTALLED)  ## what .ci/run tests besides: threads, processes, faults, documents
	$(BIN)/pytest -n $(CI_PROCESSES) -m "ci and not long"
	$(BIN)/pytest -n $(CI_PROCESSES) tests/chaos -m "" --seeds 3

test-all: $(INSTALLED)  ## everything: all of the above, 200 chaos seeds, notebooks, whole grids: hours
	$(BIN)/pytest -n $(PROCESSES) -m ""
	$(MAKE) chaos

test-gpu: $(INSTALLED)  ## the tests that need a GPU, recorded under benchmarks/results; without one: says so, and fails
	$(BIN)/python -m benchmarks.gpu_tests

SEEDS ?= 200
chaos: $(INSTALLED)  ## kills at random moments; make chaos SEEDS=1 FIRST=1234 repeats one of them
	$(BIN)/pytest -n $(CI_PROCESSES) tests/chaos -m "" --seeds $(SEEDS) $(if $(FIRST),--first-seed $(FIRST))

check: $(INSTALLED)  ## formatting, lint, types, layers, the documentation's site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_layers.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(PEERS)  ## how fast, as ratios against the peers: ten minutes
	$(BIN)/python -m benchmarks

bench-full: $(PEERS)  ## likewise, all that there is: most of an hour
	$(BIN)/python -m benchmarks full

bench-gpu: $(INSTALLED)  ## how fast on a GPU: several trainings on one, logs, transfers
	$(BIN)/python -m benchmarks gpu

format: $(INSTALLED)  ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what was installed and made
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'raypool needs Python 3.11 or newer; run: make PYTHON=python3.11 ...'"
	@echo "Installing raypool and what it needs into $(VENV): some minutes, the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo,plots,watch,joblib,cluster,docs,dev]"
	touch $@

$(PEERS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	touch $@
