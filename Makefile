# better-compute: `make help` lists what there is. Needs Python 3.11+, make and git; everything else comes from the hash locks.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Certificates of the system, so that an inspecting proxy's own authority is believed where the operator installed it.
export UV_SYSTEM_CERTS ?= 1
UV := VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv
# Each prints one line a figure; together they take under 6 minutes on 2 quiet cores.
BENCHES := gateway_streams commands events journal bcd_idle herd herd_sim
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# One test process more than cores: a fifth of their time tests wait for other processes. The long runs only compute.
TEST_JOBS ?= $(shell expr $(JOBS) + 1)

# What `make sim` runs: one seed or a range (1..200), a scenario's name or file.
SEED ?= 1
SCENARIO ?= all

.PHONY: help setup demo test test-long sim check format golden proto fuzz mutation bench docs lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.uv: requirements-setup.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-setup.lock
	@touch $@

$(VENV)/.runtime: $(VENV)/.uv requirements.lock pyproject.toml
	$(UV) pip install --quiet --require-hashes -r requirements.lock
	$(UV) pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.lock
	$(UV) pip install --quiet --require-hashes -r requirements-dev.lock
	@touch $@

setup: $(VENV)/.dev  ## the environment for development, from the hash locks

demo: $(VENV)/.runtime  ## control plane and three real nodes on this host; ONCE=1 ends after the first full round
	$(BIN)/better-compute dev --nodes 3 $(if $(ONCE),--once)

test: $(VENV)/.dev  ## all tests but the exhaustive ones, in under 8 minutes on 2 cores
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal

test-long: $(VENV)/.dev  ## the exhaustive runs
	$(BIN)/python -m pytest -n $(JOBS) -m long --timeout 3600

sim: $(VENV)/.dev  ## simulate seeded faults on virtual time: SEED=7 or SEED=1..200, SCENARIO=name or file.toml
	$(BIN)/better-compute sim run --seed $(SEED) --scenario $(SCENARIO)

check: $(VENV)/.dev  ## lint, types, import contracts, protocol lint and breaking changes
	$(BIN)/python -m pytest -q -p no:cacheprovider -n 0 tests/tidy

format: $(VENV)/.dev  ## format the code
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format --quiet

golden: $(VENV)/.dev  ## tell the stories of tests/stories anew; read the difference before you commit it
	$(BIN)/python -m tests.stories.rewrite

proto: $(VENV)/.dev  ## generate the code of proto/ anew
	$(BIN)/python -m proto.generate

fuzz: $(VENV)/.dev  ## the decoders of foreign bytes under atheris; SECONDS=60 each, TARGET= one of them
	$(BIN)/python -m tests.fuzz.run $(if $(TARGET),$(TARGET) $(or $(SECONDS),60),)

$(VENV)/mutation/.installed: $(VENV)/.dev requirements-mutation.lock
	$(UV) pip install --quiet --target $(VENV)/mutation --require-hashes -r requirements-mutation.lock
	@touch $@

mutation: $(VENV)/mutation/.installed  ## change the rules of sessions and commands one by one; a test must notice: docs/mutation.md
	PYTHONPATH=$(VENV)/mutation $(BIN)/python -m mutmut run --max-children $(JOBS)
	PYTHONPATH=$(VENV)/mutation $(BIN)/python -m mutmut results

bench: $(VENV)/.dev  ## the figures of docs/performance.md, as JSON lines; QUICK=1 only shows that the benches run
	@for name in $(BENCHES); do $(BIN)/python bench/$$name.py $(if $(QUICK),--quick); done

docs: $(VENV)/.dev  ## the generated pages of docs/
	$(BIN)/python -m docs.generate

lock:  ## compile the hash locks anew from the ranges in pyproject.toml
	@compile="$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11"; \
	$$compile requirements-setup.in -o requirements-setup.lock; \
	$$compile pyproject.toml --group build -o requirements.lock; \
	$$compile pyproject.toml --group dev -o requirements-dev.lock; \
	$$compile requirements-mutation.in --constraint requirements-dev.lock -o requirements-mutation.lock

clean:  ## remove the environment and all caches
	rm -rf $(VENV) mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
