# make demo    make the environment, build, and train a GPT whose state lives on disk
# make test    the same set-up, then the checks and the tests
# make check   the same set-up, the checks, and the tests that need no disk traffic and no transformers (90 s on 2 cores)
# make test-integrations    installs Lightning, TRL and bitsandbytes into .venv, and tests with them
# make test-versions    the core tests with the least and the newest torch and Python (downloads gigabytes)
#
# PYTHON=python3.12       the Python that the environment is made from (3.10 or newer)
# TORCH_INDEX_URL=...     also look for torch here; https://download.pytorch.org/whl/cpu has the smaller CPU build
# VERSIONS="..."          what test-versions tests: python3.10:2.11.0 is Python 3.10 with torch 2.11.0
# DEMO_ARGS="..."         arguments of examples/train_gpt.py;  PYTEST_ARGS="..."  arguments of pytest, else four processes

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX_URL ?=
VERSIONS ?= python3.10:2.11.0 python3.13:2.15.0
DEMO_ARGS ?=
PYTEST_ARGS ?= -n 4 --dist worksteal

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
CHECKED := tests/unit tests/house tests/memory tests/native tests/params/test_traps.py tests/optim/test_ordinary.py
NATIVE := $(wildcard csrc/*/*.c csrc/*/*.h csrc/*/*.cpp)

# Tests start many processes. Without compiled files each would compile all that it imports; empty means not set.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo test check test-integrations test-versions lint simulated-gpu compiled-tests format sanitize clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -10

install: $(INSTALLED)

# The stamp is newer than everything that installing depends on, so that running it again costs nothing. pip would compile
# every module that it installs. Python compiles those that are used when they are first imported, which is far fewer.
$(INSTALLED): pyproject.toml setup.py constraints-dev.txt csrc/aio/build_aio.py $(NATIVE)
	@$(PYTHON) tools/check_prerequisites.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile --constraint constraints-dev.txt \
		$(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) torch
	rm -f deepoffload/native/*.so
	$(PIP) install --quiet --no-compile --constraint constraints-dev.txt --editable '.[dev]'
	touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python examples/train_gpt.py $(DEMO_ARGS)

# What one core does before the tests begin: the checks, compiling the simulated GPU, and compiling what tests import.
test: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint simulated-gpu compiled-tests
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

check: lint
	$(BIN)/python -m pytest -q $(PYTEST_ARGS) -m "not slow" $(CHECKED)

test-integrations: $(INSTALLED)
	$(PIP) install --quiet --constraint constraints-dev.txt --editable '.[integrations]'
	$(BIN)/python -m pytest -q tests/integrations

test-versions:
	TORCH_INDEX_URL="$(TORCH_INDEX_URL)" bash tools/test_versions.sh $(VERSIONS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/lint-imports
	$(BIN)/mypy

simulated-gpu: $(INSTALLED)
	$(BIN)/python -c "from tests.support.simulated_gpu.build import build; build()"

# Python compiles a file when it is first imported. Four processes that begin together would each compile all of them.
compiled-tests: $(INSTALLED)
	@said=$$($(BIN)/python -m pytest --collect-only -qq 2>&1) || { printf '%s\n' "$$said"; exit 1; }

format: $(INSTALLED)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

sanitize: $(INSTALLED)
	PATH="$(abspath $(BIN)):$$PATH" bash tests/native/run_sanitizers.sh
	PATH="$(abspath $(BIN)):$$PATH" bash tests/native/run_sanitizers_cpu_adam.sh

clean:
	rm -rf $(VENV) .venv-versions build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f deepoffload/native/*.so
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +
