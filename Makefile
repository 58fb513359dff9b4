# The two main commands: `make check` runs linters and type checks, `make test` runs the tests.  See tests/README.md.
PYTHON ?= python3
# Number of pytest workers, each of which needs 1 GB of memory, and 10 CPU seconds to import everything. Most tests start
# ranks, so that as many workers as there are cores keep these busy.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(max(2, min(4, os.cpu_count() or 2)))')
PYTEST = $(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal

# The tests start many interpreters: keep their bytecode, even if the environment disables that.
export PYTHONDONTWRITEBYTECODE =

.PHONY: docs install check test test-fast test-campaign test-fake-gpu times format

install:
	$(PYTHON) -m pip install -c constraints.txt -e '.[test]'

check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	lint-imports

test-fast:
	$(PYTEST) -m "not slow and not campaign"

test:
	$(PYTEST) -m "not campaign"

test-campaign:
	$(PYTHON) -m tests.campaign

# Tests with torch's CUDA build on a fake GPU, without a driver.  Installs that build into .fake-gpu/ if it is missing.
test-fake-gpu:
	$(PYTHON) -m tests.fake_gpu

# Runs the same tests as `make test`, and prints where their CPU time goes.
times:
	$(PYTEST) -m "not campaign" -p tests.times

# Builds a website from docs/ in site/, after regenerating the pages that are generated from the code.
docs:
	$(PYTHON) docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet --strict

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
