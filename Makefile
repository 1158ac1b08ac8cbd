# Bare `make` lists the targets. Each does its own set-up in .venv, and does it again only when pyproject.toml or
# constraints.txt changed. PYTHON names the interpreter that .venv is made with: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Compose 2, or the 1.29 that Debian ships.
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose) -f deploy/compose.yaml
PROTOS := $(wildcard protos/paceline/v1/*.proto)
# Two fast tests at once, since they mostly wait; tests/conftest.py says which stay together. AT_ONCE= runs one after the
# other. Those that judge by seconds run alone.
AT_ONCE ?= -n 2 --dist loadscope

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup protos dashboards chart format check test test-slow test-alone soak train bench bench-replay wheels images up down clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/installed  ## install what is needed into .venv

protos: .venv/installed  ## generate services/paceline/v1 from protos/
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=services --pyi_out=services --grpc_python_out=services $(PROTOS)
	rm -f services/paceline/v1/rows_pb2_grpc.py services/paceline/v1/times_pb2_grpc.py

dashboards: .venv/installed  ## write the Grafana dashboards anew
	$(BIN)/python deploy/grafana/dashboards.py

chart: .venv/installed  ## write the chart's schema, its table in docs/ and its presets anew
	$(BIN)/python deploy/chart/values.py

format: .venv/installed  ## format the code and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: .venv/installed  ## format, lint, types, import arrows, generated code up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_imports.py tests/unit/test_protos.py tests/contract/test_dashboards.py
	$(BIN)/pytest -q tests/contract/test_chart.py -k "up_to_date or warn_of"

test: .venv/installed  ## the fast tests: functions, contracts, single services (ARGS="-k name" narrows it)
	$(BIN)/pytest $(AT_ONCE) $(ARGS)

test-slow: .venv/installed  ## the slow tests: long waits, and the whole system with services killed
	$(BIN)/pytest -m "slow and not alone" $(AT_ONCE) $(ARGS)

test-alone: .venv/installed  ## the slow tests that judge by seconds: nothing else may run beside them
	$(BIN)/pytest -m alone $(ARGS)

soak: .venv/installed  ## ten minutes of everything that replay does at once: its memory stays flat
	PACELINE_SOAK_SECONDS=600 $(BIN)/pytest -m slow tests/integration/test_replay_soak.py

train: .venv/installed  ## train SAC on Pendulum-v1 (ARGS="run.seed=1" changes settings)
	$(BIN)/paceline train configs/pendulum-sac.yaml $(ARGS)

bench: .venv/benchmarks  ## print throughput figures of this machine, quick versions
	set -e; for script in tests/bench/*.py; do echo "== $$script"; $(BIN)/python $$script --quick; done

bench-replay: .venv/benchmarks  ## replay against its goals, ten minutes on an idle machine (ARGS=--quick: one)
	$(BIN)/python tests/bench/replay.py $(ARGS)

wheels: .venv/installed  ## get what the images install, by this machine's pip: a build then needs no index
	$(BIN)/pip wheel --quiet --wheel-dir deploy/wheels -c constraints.txt '.[replay,learner,collector]' async-timeout
	rm -f deploy/wheels/paceline-*

images:  ## build the images (BASE= another base, TAG= another tag, ARGS="--build-arg NAME=VALUE")
	set -e; for target in replay collector learner; do \
	  docker build -f deploy/Dockerfile --target $$target --tag paceline/$$target:$(TAG) --build-arg VERSION=$(TAG) \
	    $(if $(BASE),--build-arg BASE=$(BASE)) --build-arg REVISION="$$(git rev-parse HEAD 2>/dev/null || echo unknown)" $(ARGS) .; done

up:  ## start the whole system in containers, and train (ARGS="--scale collector=8")
	$(COMPOSE) up --detach $(ARGS)

down:  ## stop it; volumes stay (ARGS=--volumes removes them, and with them the run)
	$(COMPOSE) down $(ARGS)

clean:  ## remove .venv, caches and build output; runs/ stays
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis services/*.egg-info
	find services tests -name __pycache__ -prune -exec rm -rf {} +

.venv/installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there: install Python 3.11 or newer, or name yours as in make setup PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) --version) is too old: Paceline needs 3.11 or newer; install it and name it as in make setup PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv/benchmarks: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	@touch $@
