# Every target makes its own .venv when there is none: nothing but Python 3.11 and make is needed.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt
PATHS := clients server engine tests examples benchmarks scripts

.PHONY: setup demo run test test-faults test-nightly lint fix bench compat proto redis-server clean

setup: .venv/dev.stamp  ## Everything for working on tuneserve

demo: .venv/demo.stamp  ## Three tenants train at once on one small base model, in two minutes
	$(BIN)/python examples/demo.py $(ARGS)

run: .venv/demo.stamp  ## The service on the embedded model: http://127.0.0.1:8410
	$(BIN)/tuneserve up $(ARGS)

test: .venv/dev.stamp redis-server  ## Every quick test; make test ARGS=tests/engine for some
	$(BIN)/pytest $(ARGS)

test-faults: .venv/dev.stamp redis-server  ## Killed processes, hostile clients, full disks: a few minutes
	$(BIN)/pytest -m "not nightly" $(or $(ARGS),tests/faults)

test-nightly: .venv/dev.stamp redis-server  ## The same for longer, and planted bugs
	$(BIN)/pytest -m nightly $(or $(ARGS),tests/faults tests/nightly)

lint: .venv/dev.stamp
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/ruff check $(PATHS)
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: .venv/dev.stamp
	$(BIN)/ruff format $(PATHS)
	$(BIN)/ruff check --fix $(PATHS)

bench: .venv/dev.stamp  ## Every published figure, appended to benchmarks/results.md
	$(BIN)/python benchmarks/train.py $(ARGS)
	$(BIN)/python benchmarks/train.py --threads 1 $(ARGS)
	$(BIN)/python benchmarks/tenants.py $(ARGS)
	$(BIN)/python benchmarks/sample.py $(ARGS)
	$(BIN)/python benchmarks/decode.py $(ARGS)
	$(BIN)/python benchmarks/compile.py $(ARGS)
	$(BIN)/python benchmarks/memory.py $(ARGS)
	$(BIN)/python benchmarks/latency.py $(ARGS)
	$(BIN)/python benchmarks/queue_alone.py $(ARGS)
	$(BIN)/python benchmarks/trace.py $(ARGS)
	$(BIN)/python benchmarks/techniques.py $(ARGS)

compat: .venv/dev.stamp  ## Older SDKs and the cookbook, each in a .venv of its own
	$(BIN)/pytest tests/compat $(ARGS)

proto: .venv/dev.stamp  ## Regenerates the protobuf module
	cd clients && ../$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. \
		tuneserve_client/proto/wire.proto

redis-server:
	@scripts/install_redis_server.sh

clean:
	rm -rf .venv .compat

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e '.[demo]'
	touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e '.[dev]'
	touch $@ .venv/demo.stamp
