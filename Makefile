# From a clone to a running model: `make demo`. From a clone to green tests: `make test`.
#
# Everything goes into one virtual environment. Stamps in it remember what is done, so that a second
# call does nothing twice and a call after an interruption goes on from the step that was cut short.
#
#   PYTHON=python3.12    the interpreter that the environment is made with (3.11 or newer)
#   VENV=.venv-py312     where the environment is
#   CUDA=off             leave the CUDA half out even where nvcc is; system or pypi: whose nvcc it must be
#   JAX=0.11.2           a certain version of jax and jaxlib instead of the newest supported one
#   VERBOSE=1            show the output of every step
#   PYTEST_ARGS="-k quant"   more arguments for pytest; "-n 0" runs the tests in one process

PYTHON ?= python3
VENV ?= .venv
JAX ?=
CUDA ?= auto
PYTEST_ARGS ?=
DEMO_ARGS ?=
BAZEL_TARGETS ?= //:all

ifneq ($(filter-out auto system pypi off,$(CUDA))$(words $(CUDA)),1)
$(error CUDA is '$(CUDA)'; it must be auto, system, pypi or off)
endif
# The long name: pip before 23.1, which Debian 12 has, does not know -C.
CUDA_SETTING := --config-settings=cmake.define.B12X_CUDA=$(CUDA)

STAMPS := $(VENV)/.b12x
VENV_PYTHON := $(VENV)/bin/python
STEP := LOG_DIR=build/logs sh tools/step.sh
PIP := "$(VENV_PYTHON)" -m pip --disable-pip-version-check --no-input

VENV_STAMP := $(STAMPS)/venv
DEPS_STAMP := $(STAMPS)/deps$(addprefix -jax-,$(JAX))
LINT_STAMP := $(STAMPS)/lint
PACKAGE_STAMP := $(STAMPS)/package
DOCS_STAMP := $(STAMPS)/docs
# A build with another CUDA setting is another build.
BUILD_STAMP := $(STAMPS)/build-cuda-$(CUDA)

# What the extension is compiled from. Python files are not here: the install is editable.
BUILD_INPUTS := CMakeLists.txt pyproject.toml tools/find_nvcc.py $(shell find cmake ffi cuda -type f 2>/dev/null)
CXX_FILES = $(shell find ffi cuda -type f \
  \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)

# A PYTHON that the command line names must be the one that the environment was made with.
ifeq ($(origin PYTHON),command line)
ifneq ($(wildcard $(VENV_STAMP)),)
ifeq ($(filter clean distclean,$(MAKECMDGOALS)),)
version_of = $(shell "$(1)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifneq ($(call version_of,$(PYTHON)),$(call version_of,$(VENV_PYTHON)))
$(error $(VENV) holds Python $(call version_of,$(VENV_PYTHON)), not $(PYTHON): \
  name another with VENV=..., or run `make distclean` first)
endif
endif
endif
endif

# The variables of another Python must not leak into this one.
unexport PYTHONHOME PYTHONPATH
export PIP_USER := 0

.PHONY: help demo test lint format build wheel bazel-test docs clean distclean
.DELETE_ON_ERROR:
.SUFFIXES:

help:
	@echo "make demo       set up, build, and let the model in examples/flax_moe write"
	@echo "                (with nvcc the CUDA half too, a few minutes; CUDA=off leaves it out)"
	@echo "make test       set up, build, and run the tests"
	@echo "make lint       ruff, mypy, clang-format, and the rules between the parts of the code"
	@echo "make format     let ruff and clang-format rewrite the sources"
	@echo "make build      set up and build the extension only"
	@echo "make wheel      build a manylinux wheel in dist/ and try it in an empty environment"
	@echo "make docs       build the documentation site in build/docs; a warning is an error"
	@echo "make bazel-test build and test with Bazel (BAZEL_TARGETS=//:tests/test_native for a part)"
	@echo "make clean      remove what was built; distclean removes the environment as well"

demo: $(BUILD_STAMP)
	@"$(VENV_PYTHON)" -m examples.flax_moe.demo $(DEMO_ARGS)
	@echo "To go on: \`. $(VENV)/bin/activate\`, then python is the one of this environment; or" \
	  "$(VENV_PYTHON) -m jax_b12x doctor"

test: $(BUILD_STAMP)
	@echo "==> Running the tests"
	@"$(VENV_PYTHON)" -m pytest -n auto --maxprocesses 8 --dist loadfile $(PYTEST_ARGS)

lint: $(DEPS_STAMP) $(LINT_STAMP)
	@$(STEP) ruff-check "Linting Python (ruff check)" "$(VENV)/bin/ruff" check .
	@$(STEP) ruff-format "Checking its format (ruff format)" "$(VENV)/bin/ruff" format --check .
	@$(STEP) mypy "Checking its types (mypy)" "$(VENV)/bin/mypy"
	@$(if $(CXX_FILES),$(STEP) clang-format "Checking the format of C++ and CUDA (clang-format)" \
	  "$(VENV)/bin/clang-format" --dry-run -Werror $(CXX_FILES))
	@$(STEP) doors "Checking the rules between the parts (tools/check_doors.py)" \
	  "$(VENV_PYTHON)" tools/check_doors.py

format: $(LINT_STAMP)
	@"$(VENV)/bin/ruff" check --fix --quiet . || true
	@"$(VENV)/bin/ruff" format .
	@$(if $(CXX_FILES),"$(VENV)/bin/clang-format" -i $(CXX_FILES))

build: $(BUILD_STAMP)
	@echo "The extension in $(VENV) is up to date."

# Built in an environment of its own, so that the wheel runs on every supported jaxlib; with the CUDA
# half wherever that may come from, unless CUDA=off (see tools/build_backend.py).
wheel: $(PACKAGE_STAMP)
	@sh tools/preflight.sh "$(VENV_PYTHON)"
	@rm -rf build/wheel dist
	@$(STEP) wheel "Building the wheel" \
	  $(PIP) wheel --verbose --no-deps --wheel-dir build/wheel $(CUDA_SETTING) .
	@PATH="$(abspath $(VENV)/bin):$$PATH" $(STEP) auditwheel "Making it a manylinux wheel" \
	  "$(VENV_PYTHON)" -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	@$(STEP) check-wheel "Trying it in an empty environment" \
	  sh tools/check_wheel.sh dist/*.whl "$(abspath $(VENV_PYTHON))"
	@ls -l dist

docs: $(DEPS_STAMP) $(DOCS_STAMP)
	@$(STEP) docs "Building the documentation (sphinx)" \
	  "$(VENV_PYTHON)" -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs
	@echo "It begins at build/docs/index.html"

# Bazel takes jaxlib's headers, nanobind and what the tests import from the environment, and nothing
# from a network; the extension is its own, not the one of `make build`.
bazel-test: $(DEPS_STAMP)
	@command -v bazel >/dev/null || { \
	  echo "There is no bazel here. On Debian or Ubuntu: sudo apt-get install bazel-bootstrap"; exit 1; }
	bazel test $(BAZEL_TARGETS) --keep_going --local_test_jobs=2 \
	  --repo_env=B12X_PYTHON="$(abspath $(VENV_PYTHON))" --repo_env=B12X_CUDA=$(CUDA)

clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rm -f "$(STAMPS)"/build*
	@find jax_b12x tests examples tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	@rm -rf "$(VENV)"

$(VENV_STAMP):
	@sh tools/preflight.sh "$(PYTHON)"
	@$(STEP) venv "Making the virtual environment $(VENV)" \
	  sh tools/make_venv.sh "$(PYTHON)" "$(VENV)"
	@touch "$@"

$(DEPS_STAMP): pyproject.toml tools/requirements.py $(VENV_STAMP)
	@rm -f "$(STAMPS)"/deps* "$(STAMPS)"/build*
	@"$(VENV_PYTHON)" tools/requirements.py --jax "$(JAX)" build runtime test example \
	  > "$(STAMPS)/requirements.txt"
	@$(STEP) deps "Installing jax and what else is needed (a few hundred MB the first time)" \
	  $(PIP) install -r "$(STAMPS)/requirements.txt"
	@"$(VENV_PYTHON)" tools/requirements.py cmake > "$(STAMPS)/requirements-cmake.txt"
	@test ! -s "$(STAMPS)/requirements-cmake.txt" || \
	  $(STEP) cmake "Installing CMake and Ninja" $(PIP) install -r "$(STAMPS)/requirements-cmake.txt"
	@touch "$@"

$(LINT_STAMP): pyproject.toml tools/requirements.py $(VENV_STAMP)
	@"$(VENV_PYTHON)" tools/requirements.py lint > "$(STAMPS)/requirements-lint.txt"
	@$(STEP) lint-deps "Installing the linters" $(PIP) install -r "$(STAMPS)/requirements-lint.txt"
	@touch "$@"

$(PACKAGE_STAMP): pyproject.toml tools/requirements.py $(VENV_STAMP)
	@"$(VENV_PYTHON)" tools/requirements.py package > "$(STAMPS)/requirements-package.txt"
	@$(STEP) package-deps "Installing auditwheel" $(PIP) install -r "$(STAMPS)/requirements-package.txt"
	@touch "$@"

$(DOCS_STAMP): pyproject.toml tools/requirements.py $(VENV_STAMP)
	@"$(VENV_PYTHON)" tools/requirements.py docs > "$(STAMPS)/requirements-docs.txt"
	@$(STEP) docs-deps "Installing sphinx" $(PIP) install -r "$(STAMPS)/requirements-docs.txt"
	@touch "$@"

$(BUILD_STAMP): $(BUILD_INPUTS) $(DEPS_STAMP)
	@sh tools/preflight.sh "$(VENV_PYTHON)"
	@$(STEP) build "Compiling the extension$(if $(filter off,$(CUDA)),, (with nvcc a few minutes; CUDA=off leaves CUDA out))" \
	  $(PIP) install --no-build-isolation --no-deps --verbose $(CUDA_SETTING) -e .
	@rm -f "$(STAMPS)"/build* && touch "$@"
