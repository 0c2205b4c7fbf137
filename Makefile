# Every target makes its own .venv when there is none: nothing but Python 3.11 and make is needed. The
# targets gpu-compile, gpu-plan and test-newest need Python 3.12 or 3.13.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# Python compiles a module when it is first imported; all modules at once would take pip a minute.
PIP := $(BIN)/pip install --disable-pip-version-check --quiet --no-compile
HASHED := $(PIP) --require-hashes --no-deps --requirement
FOR_A_GPU := JAX_PLATFORMS=cpu PYTHONPATH=.:clients:engine:server .gpu-compile/bin/python
PATHS := clients server engine tests examples benchmarks scripts

# Where it is set, every process compiles hundreds of modules again, which takes seconds per start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo run test test-faults test-faults-together test-faults-alone test-nightly test-newest test-docker check-deploy \
	gpu-compile gpu-programs gpu-ceilings gpu-meshes gpu-plan lint fix bench compat newcomer proto reference docs redis-server chromium clean

setup: .venv/dev.stamp  ## Everything for working on tuneserve

demo: .venv/demo.stamp  ## Three tenants train at once on one small base model, in two minutes
	$(BIN)/python examples/demo $(ARGS)

run: .venv/demo.stamp  ## The service on the embedded model: http://127.0.0.1:8410
	$(BIN)/tuneserve up $(ARGS)

# Most of the time of tests/engine goes to compiling small programs, which takes less than half the time
# without optimisation. Services and tests of bits run the code that users run, as do the faults and the
# nightly tests.
QUICKLY := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false
TOGETHER := --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: .venv/dev.stamp redis-server chromium  ## Every quick test; make test ARGS=tests/engine for some
ifdef ARGS
	$(BIN)/pytest -m "not nightly" $(ARGS)
else
	status=0; \
	XLA_FLAGS="$(QUICKLY) $$XLA_FLAGS" $(BIN)/pytest -m "not nightly and quick" $(TOGETHER) tests/engine tests/parity || status=1; \
	$(BIN)/pytest -m "not nightly and not quick" $(TOGETHER) || status=1; \
	exit $$status
endif

test-faults:  ## Killed processes, hostile clients, full disks: a few minutes
ifdef ARGS
	$(MAKE) .venv/dev.stamp redis-server
	$(BIN)/pytest -m "not nightly" $(ARGS)
else
	$(MAKE) test-faults-together test-faults-alone
endif

test-faults-together: .venv/dev.stamp redis-server
	$(BIN)/pytest -m "not nightly and not alone" --numprocesses 2 --dist loadfile tests/faults

test-faults-alone: .venv/dev.stamp redis-server
	$(BIN)/pytest -m "not nightly and alone" tests/faults

test-nightly: .venv/dev.stamp redis-server  ## The same for longer, and planted bugs
	$(BIN)/pytest -m nightly $(or $(ARGS),tests --ignore=tests/compat --ignore=tests/newcomer)

test-newest: .newest/stamp redis-server  ## Tests on the newest JAX, which needs Python 3.12; make test-newest ARGS=tests/engine
	.newest/bin/pytest -m "not nightly" $(TOGETHER) $(or $(ARGS),tests/engine tests/parity tests/server tests/client)

test-docker: .venv/dev.stamp  ## Builds and starts the containers, and kills a worker in its own; needs a Docker engine
	$(BIN)/python -m scripts.check_containers

check-deploy: .deploy/stamp  ## Renders the Helm chart, and checks it and the manifests against the schemas of Kubernetes
	.deploy/bin/python -m scripts.check_deploy

gpu-compile: gpu-programs $(if $(ARGS),,gpu-ceilings gpu-meshes)  ## The programs for an H200, compiled without one; ARGS=--full

gpu-programs: .gpu-compile/stamp
	$(FOR_A_GPU) -m scripts.gpu_compile $(ARGS)

gpu-ceilings: .gpu-compile/stamp
	$(FOR_A_GPU) -m scripts.gpu_compile.ceilings

gpu-meshes: .gpu-compile/stamp
	$(FOR_A_GPU) -m scripts.gpu_compile.meshes

gpu-plan: .gpu-compile/stamp  ## Predicted cost on a GPU; ARGS="qwen3-8b --device h200"
	$(FOR_A_GPU) benchmarks/gpu_plan.py $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/ruff check $(PATHS)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.check_sizes

fix: .venv/dev.stamp
	$(BIN)/ruff format $(PATHS)
	$(BIN)/ruff check --fix $(PATHS)

bench: .venv/dev.stamp  ## Every published figure, appended to benchmarks/results.md
	$(BIN)/python benchmarks/train.py $(ARGS)
	$(BIN)/python benchmarks/train.py --threads 1 $(ARGS)
	$(BIN)/python benchmarks/tenants.py $(ARGS)
	$(BIN)/python benchmarks/sample.py $(ARGS)
	$(BIN)/python benchmarks/forms.py $(ARGS)
	$(BIN)/python benchmarks/decode.py $(ARGS)
	$(BIN)/python benchmarks/compile.py $(ARGS)
	$(BIN)/python benchmarks/memory.py $(ARGS)
	$(BIN)/python benchmarks/head.py $(ARGS)
	$(BIN)/python benchmarks/osft.py $(ARGS)
	$(BIN)/python benchmarks/forgetting.py $(ARGS)
	$(BIN)/python benchmarks/latency.py $(ARGS)
	$(BIN)/python benchmarks/first_minute.py $(ARGS)
	$(BIN)/python benchmarks/queue_alone.py $(ARGS)
	$(BIN)/python benchmarks/samplers.py $(ARGS)
	$(BIN)/python benchmarks/scale.py --plots docs/images/scale.svg $(ARGS)
	$(BIN)/python benchmarks/trace.py $(ARGS)
	$(BIN)/python benchmarks/techniques.py $(ARGS)

compat: .venv/dev.stamp  ## Older SDKs, the cookbook and evaluation harnesses, each in a .venv of its own
	$(BIN)/pytest tests/compat $(ARGS)

newcomer: .venv/dev.stamp  ## The README's three commands in a fresh clone, installation included
	$(BIN)/pytest tests/newcomer $(ARGS)

proto: .venv/dev.stamp  ## Regenerates the protobuf module
	cd clients && ../$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. \
		tuneserve_client/wire/proto/wire.proto

docs: .venv/dev.stamp  ## Builds the documentation site into docs/_build/html; a dead link is an error
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html -d docs/_build/doctrees docs docs/_build/html

reference: .venv/dev.stamp  ## Writes docs/reference.md from the routes
	$(BIN)/python scripts/api_reference.py

redis-server chromium:
	@scripts/install_commands.sh $@

clean:
	rm -rf .venv .compat .deploy .gpu-compile .newest

.venv/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("$(PYTHON) is %d.%d, and \
	3.11 or newer is needed; if there is one: make $(MAKECMDGOALS) PYTHON=python3.11" % v)'
	$(PYTHON) -m venv .venv

# Every file from a registry has its hash in requirements/, but for torch, which only tests import.
.venv/demo.stamp: pyproject.toml requirements/build.txt requirements/demo.txt | .venv/bin/python
	@echo "installing into .venv (1 GB): a minute or two, once"
	$(HASHED) requirements/build.txt
	$(HASHED) requirements/demo.txt
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

.venv/dev.stamp: pyproject.toml constraints.txt requirements/dev.txt | .venv/bin/python
	@echo "installing into .venv (2 GB): a few minutes, once"
	$(HASHED) requirements/dev.txt
	$(PIP) --constraint constraints.txt torch
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@ .venv/demo.stamp

# The packages of .venv, but with those of the GPU image in place of older ones. JAX's plugin for a GPU
# goes again: with it, JAX would look for a GPU in every process.
.newest/stamp: pyproject.toml constraints.txt requirements/dev.txt requirements/gpu-compile.txt
	rm -rf .newest
	python=$$(PYTHON="$(PYTHON)" scripts/newer_python.sh) && "$$python" -m venv .newest
	.newest/$(HASHED:.venv/%=%) requirements/dev.txt
	.newest/$(HASHED:.venv/%=%) requirements/gpu-compile.txt
	.newest/bin/pip uninstall --quiet --yes jax-cuda12-plugin jax-cuda12-pjrt
	.newest/$(PIP:.venv/%=%) --constraint constraints.txt torch
	.newest/$(PIP:.venv/%=%) --no-deps --no-build-isolation -e .
	touch $@

# Helm as a library, which .venv does not need: 270 MB.
.deploy/stamp: scripts/check_deploy.txt
	rm -rf .deploy
	$(PYTHON) -m venv .deploy
	.deploy/$(HASHED:.venv/%=%) scripts/check_deploy.txt
	touch $@

# JAX's compiler for NVIDIA GPUs and the JAX of the GPU image, which need Python 3.12. With the compiler
# in .venv, JAX would look for a GPU in every process.
.gpu-compile/stamp: requirements/gpu-compile.txt
	rm -rf .gpu-compile
	python=$$(PYTHON="$(PYTHON)" scripts/newer_python.sh) && "$$python" -m venv .gpu-compile
	.gpu-compile/$(HASHED:.venv/%=%) requirements/gpu-compile.txt
	touch $@
