PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint clean

help:
	@echo "make demo   adapt a trained network to corrupted images by every method: a table and a page"
	@echo "make test   lint, type check and all tests"
	@echo "make lint   ruff and mypy alone"
	@echo "make clean  remove the environment"

demo: $(VENV)/.installed
	@$(BIN)/fata demo

test: lint
	@echo "== tests"
	@$(BIN)/python -m pytest -q -n 2

lint: $(VENV)/.installed
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy

$(VENV)/.installed: pyproject.toml
	@echo "== creating $(VENV) and installing (PyTorch takes a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	@touch $@

clean:
	rm -rf $(VENV)
