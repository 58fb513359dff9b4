# The two commands that anybody needs: `make check` reads the code, `make test` runs it.
PYTHON ?= python3

.PHONY: install check test test-fast test-slow test-faults format

install:
	$(PYTHON) -m pip install -c constraints.txt -e '.[test]'

check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	lint-imports

test-fast:
	$(PYTHON) -m pytest -q tests/test_config.py tests/test_data.py tests/test_environment.py tests/test_layers.py \
	    tests/test_loss.py tests/test_prepare.py

test:
	$(PYTHON) -m pytest -q

test-slow:
	$(PYTHON) -m pytest -q -m slow

test-faults:
	$(PYTHON) -m pytest -q -m "" tests/test_faults.py

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
