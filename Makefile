# Everything a developer types. `make demo` and `make test` set up what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_HOME := $(CURDIR)/demo-warehouse
UI_PORT ?= 3000

.PHONY: help venv demo ui test lint types layers pytest clean-demo

help:
	@echo "make demo    train a small family, land it, merge under budgets, print the table"
	@echo "make ui      Dagster UI on 127.0.0.1:$(UI_PORT) with the demo's warehouse"
	@echo "make test    lint, types, layers and all tests"

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[ui,demo,dev]"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[peer]" \
		|| echo "mergekit did not install: parity is tested against recorded outputs only"
	touch $@

demo: venv
	$(BIN)/mergepipe demo --home $(DEMO_HOME)

ui: venv
	mkdir -p $(DEMO_HOME)/dagster
	cp -n dagster.yaml $(DEMO_HOME)/dagster/ 2>/dev/null || true
	MERGEPIPE_HOME=$(DEMO_HOME) DAGSTER_HOME=$(DEMO_HOME)/dagster \
	MERGEPIPE_UI_URL=http://127.0.0.1:$(UI_PORT) \
		$(BIN)/dagster dev -w workspace.yaml -h 127.0.0.1 -p $(UI_PORT)

test: venv lint types layers pytest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

layers: venv
	$(BIN)/lint-imports

pytest: venv
	$(BIN)/pytest -n 2 -q

clean-demo:
	rm -rf $(DEMO_HOME)
