# Everything a developer types. `make demo` and `make test` set up what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_HOME := $(CURDIR)/demo-warehouse
UI_PORT ?= 3000
# What `make bench` measures; e.g. `make bench BENCH_K="2 5 20" BENCH_PEER=` leaves mergekit out.
BENCH_PRESET ?= qwen3-0.6b
BENCH_K ?= 2 5
BENCH_ROUNDS ?= 3
BENCH_PEER ?= --peer
BENCH_ROWS ?= bench/rows.jsonl
TORTURE ?= all
PYTEST := $(BIN)/pytest -q --durations=25

# Each process that a test starts would compile the whole program again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv install without-peers build demo ui test test-all test-long lint ruff types check kernels layers bench torture soak clean-demo

help:
	@echo "make demo    train a small family, land it, merge under budgets, print the table"
	@echo "make ui      Dagster UI on 127.0.0.1:$(UI_PORT) with the demo's warehouse"
	@echo "make test    lint, types, layers and the tests (6 minutes)"
	@echo "make check   the types of assets, sensors and the door as pyright and ty see them"
	@echo "make test-all  and parity by random recipes, real daemons, the browser (20 minutes)"
	@echo "make torture faults, kills, rot, hostile inputs, lying servers and more, long (over an hour)"
	@echo "make soak    a real daemon through a seeded month of events (10 minutes)"
	@echo "make bench   merges against the disk and mergekit, cold"

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[ui,demo,dev,peer,lm-eval,llm]" \
		|| $(MAKE) without-peers
	touch $@

install: venv

# Where an index lacks a program that tests compare with: those tests are skipped, and say so.
without-peers:
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[ui,demo,dev]"
	for extra in peer lm-eval llm; do \
		$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$$extra]" \
			|| echo "the extra $$extra did not install: its tests are skipped"; \
	done

build: venv
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build

demo: venv
	$(BIN)/mergepipe demo --home $(DEMO_HOME)

ui: venv
	DAGSTER_HOME= $(BIN)/mergepipe ui --home $(DEMO_HOME) --port $(UI_PORT)

test: venv lint
	$(MAKE) -j 2 types kernels
	$(MAKE) layers
	HYPOTHESIS_PROFILE=quick $(PYTEST) --dist worksteal -n 3 -m "not long"

test-all: test test-long

# These wait for daemons and browsers, which a module's tests share: each module has one worker.
test-long: venv
	$(PYTEST) --dist loadscope --no-loadscope-reorder -n 4 -m long

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

ruff: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: venv
	$(BIN)/mypy

# As Dagster's community integrations are judged; pyright brings a node.
check: venv
	$(BIN)/python -m pip install --quiet "pyright[nodejs]==1.1.414" ty==0.0.37
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/ty check --python $(VENV)

# Before the suite, beside another check: its workers would compile them each for itself.
kernels: venv
	$(BIN)/python -m mergepipe_pipeline.demo.kernels --carried

layers: venv
	$(BIN)/lint-imports

bench: venv
	mkdir -p bench
	$(BIN)/python -m tests.lab.bench.bench_startup --preset $(BENCH_PRESET) -k $(firstword $(BENCH_K)) \
		--rounds $(BENCH_ROUNDS) --json $(BENCH_ROWS)
	$(BIN)/python -m tests.lab.bench.bench_merge --preset $(BENCH_PRESET) -k $(BENCH_K) \
		--rounds $(BENCH_ROUNDS) $(BENCH_PEER) --json $(BENCH_ROWS)

torture: venv
	$(BIN)/python -m tests.lab.torture $(TORTURE)

soak: venv
	$(BIN)/python -W ignore -m tests.lab.soak --minutes 10

clean-demo:
	rm -rf $(DEMO_HOME)
