PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo docs test test-all lint browser clean

help:
	@echo "make demo      what adapting, FATA and the guard do: about two minutes, a page at the end"
	@echo "make test      lint, type check and the tests that a change is likely to break"
	@echo "make test-all  the same with all tests, as in CI"
	@echo "make lint      ruff and mypy alone"
	@echo "make docs      build the documentation into site/, strictly: no dead link"
	@echo "make clean     remove the environment"

demo: $(VENV)/.installed
	@$(BIN)/fata demo

docs: $(VENV)/.documented
	@echo "== documentation"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(BIN)/python -m http.server --directory site"

test: lint browser
	@echo "== tests (without the slow ones: make test-all)"
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

test-all: lint browser
	@echo "== all tests"
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: $(VENV)/.tested
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== imports"
	@$(BIN)/lint-imports --no-logo 2>&1

$(VENV)/.installed: pyproject.toml
	@echo "== creating $(VENV) and installing (PyTorch takes a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[all]"
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	@echo "== installing what the tests need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[all,test]"
	@touch $@

$(VENV)/.documented: $(VENV)/.installed
	@echo "== installing what the documentation needs"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	@touch $@

# Not a Python package: apt-get installs it where it may. Without it tests are skipped; in CI they fail.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && echo "== installing Chromium" && apt-get update -qq \
	  && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends \
	    chromium chromium-driver >/dev/null; } \
	|| echo "== no browser tests: they need chromium and chromedriver (Debian: chromium-driver)"

clean:
	rm -rf $(VENV)
