# The two commands that anybody needs: `make check` reads the code, `make test` runs it.  tests/README.md says more.
PYTHON ?= python3
# How many of pytest's workers share the tests, a gigabyte of memory for each: one more than there are cores, since some
# tests wait.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, 1 + (os.cpu_count() or 2)))')
PYTEST = $(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal

# The tests start many interpreters: what they compile is kept, also where the environment says not to.
export PYTHONDONTWRITEBYTECODE =

.PHONY: docs install check test test-fast test-campaign test-fake-gpu durations format

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

# On GPUs that are none: torch's CUDA build, without a driver.  Where it is not installed it is, into .fake-gpu/.
test-fake-gpu:
	$(PYTHON) -m tests.fake_gpu

# Writes how long each test took to tests/durations.json: on a quiet machine, when tests have become slower on purpose.
durations:
	$(PYTEST) -m "not campaign" --record-durations

# The pages of docs/ as a site, in site/: what follows from the code is written anew.
docs:
	$(PYTHON) docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet --strict

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
