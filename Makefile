# The two commands that anybody needs: `make check` reads the code, `make test` runs it.
PYTHON ?= python3

.PHONY: install check test test-fast format

install:
	$(PYTHON) -m pip install -c constraints.txt -e '.[test]'

check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	lint-imports

test-fast:
	$(PYTHON) -m pytest -q -m 'not ranks'

test:
	$(PYTHON) -m pytest -q

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
