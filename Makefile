# SPDX-License-Identifier: BSD-3-Clause
# muster: `make demo` trains a model with four processes, `make test` proves the whole tree. Both
# prepare the machine first.
#
#   make demo        build what the demo needs and train the digits with 4 processes
#   make test        every suite on a seeded sample of its matrix; the torch-free half under
#                    ASan+UBSan and TSan too
#   make fuzz        every parser's fuzzer for half a minute (about two minutes in all)
#   make test-long   the same with full matrices, soaks and fuzzers (up to an hour)
#   make bench       muster against Gloo, Open MPI and Intel MPI on this machine (under 10 minutes);
#                    a table and a picture in bench/results
#   make bench-gates every figure that muster promises, measured and judged; 50 minutes, with
#                    those between hosts (as root)
#   make docs        the pages of docs/ and the references of C++, Python and the commands, as HTML
#                    in build/docs
#   make man         the manual pages of the commands, in build/man/man1
#   make build       everything, optimised, in build/release
#   make wheel       dist/muster_dist-*.whl, which needs no compiler: an extension for each of the
#                    newest three minors of torch (tools/wheel/matrix.toml), manylinux by auditwheel
#   make deb         dist/muster-cli_*.deb (the command) and dist/libmuster-dev_*.deb (headers and
#                    libraries of the torch-free half)
#   make format      clang-format over all C++ files, ruff over all Python
#   make clean       remove the build folders (not .venv)
#
# Variables: CXX (default: clang++ where there is one, which compiles in little more than half of
# g++'s time; build/tsan is always g++'s; a build folder keeps the compiler that it was made with),
# JOBS (default: number of cores), MUSTER_TEST_SEED (default: tests/seed for `make test`, from the
# clock for `make fuzz` and `make test-long`; printed),
# MUSTER_PYTHON or MUSTER_LIBTORCH (an installed torch to use instead of a .venv; see tools/setup).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build
.PHONY: setup build demo test fuzz test-long bench bench-gates docs man wheel deb format clean \
  tests-built
MAKEFLAGS += --no-print-directory

JOBS ?= $(shell nproc)
# The same seed goes to every test of a run, through the environment.
ifndef MUSTER_TEST_SEED
NEW_SEED := $(filter fuzz test-long,$(MAKECMDGOALS))
MUSTER_TEST_SEED := $(if $(NEW_SEED),$(shell date +%s),$(file <tests/seed))
endif
export MUSTER_TEST_SEED

ifeq ($(origin CXX),default)
CXX = $(shell command -v clang++ || command -v c++)
endif
MUSTER_ALL_TESTS ?= OFF
CONFIGURE = CXX="$(CXX)" cmake -DMUSTER_ALL_TESTS=$(MUSTER_ALL_TESTS) \
  -DMUSTER_LIBTORCH="$(MUSTER_LIBTORCH)" -DPython_EXECUTABLE="$(MUSTER_PYTHON)" \
  --log-level=WARNING --preset
BUILD = cmake --build -j $(JOBS) --preset
# Many tests wait for what they are about: three at once for each core.
RUN_TESTS = tools/run_tests --no-tests=error -j $$((3 * $(JOBS)))

setup:
	@tools/setup

build: setup
	@$(CONFIGURE) release
	@$(BUILD) release

demo:
	@MUSTER_TORCH=$${MUSTER_TORCH:-LIBTORCH} tools/setup
	@$(CONFIGURE) release
	@$(BUILD) release --target bin/muster bin/digits
	build/release/bin/muster run --standalone --nproc-per-node 4 build/release/bin/digits

# The three builds are tested by one ctest, so that its last lines tell of all of them.
tests-built: setup
	@echo "MUSTER_TEST_SEED=$(MUSTER_TEST_SEED)"
	@$(CONFIGURE) release
	@echo "== building build/release"
	@$(BUILD) release
	@for preset in asan tsan; do \
	  echo "== building build/$$preset (the torch-free half)"; $(CONFIGURE) $$preset; \
	  $(BUILD) $$preset; \
	done
	@printf 'subdirs("%s")\n' release asan tsan > build/CTestTestfile.cmake

test: tests-built
	@$(RUN_TESTS) --timeout 300

# Those free of torch in the build with AddressSanitizer, where a mistake shows; torch's half is not
# in it, so its fuzzers run in release. They share the cores: each gets its half minute
# (MUSTER_FUZZ_SECONDS) beside others.
fuzz: tests-built
	@MUSTER_FUZZ_SECONDS=$${MUSTER_FUZZ_SECONDS:-30} ctest --test-dir build \
	  --output-on-failure --no-tests=error -j $$((4 * $(JOBS))) --timeout 300 \
	  -R '^asan:.*(Fuzz\.|DamagedQuestionsAndAnswers)'\
	'|^rpc\.Rpc(Value|Introduction|Worker|Autograd)Fuzz$$'

# The libraries of tests/clients come from PyPI, torch's own tests from Debian.
test-long: export MUSTER_CLIENTS = ON
test-long: export MUSTER_TORCH_TESTS = ON
test-long: MUSTER_ALL_TESTS = ON
test-long: tests-built
	@tools/check_alone
	@MUSTER_TEST_LONG=1 $(RUN_TESTS) --timeout 3600

# The rivals come from Debian and PyPI.
bench: export MUSTER_RIVALS = ON
bench: setup
	@$(CONFIGURE) release
	@$(BUILD) release --target bin/muster-lab bin/muster_bench_worker
	@bench/run standard

bench-gates: export MUSTER_RIVALS = ON
bench-gates: setup
	@$(CONFIGURE) release
	@$(BUILD) release --target bin/muster bin/muster-lab \
	  $(addprefix bin/muster_bench_,worker floors services ddp) \
	  muster_python
	@bench/run gates

# Sphinx comes from PyPI, into the environment that has torch; doxygen from Debian. The reference of
# the commands is what they and the programs of muster-lab print. Sphinx fails over a name that has
# moved to another page since the last time, so it keeps nothing from then.
docs: export MUSTER_DOCS = ON
docs: DOCS_PYTHON = $(or $(MUSTER_PYTHON),.venv/bin/python)
docs: setup
	@$(CONFIGURE) release
	@$(BUILD) release --target bin/muster bin/muster-lab muster_python \
	  $(addprefix bin/muster_bench_,worker floors services ddp rpc)
	@$(DOCS_PYTHON) -m pip install --quiet --disable-pip-version-check -r tools/docs-requirements.txt
	@PYTHONPATH=build/release/python $(DOCS_PYTHON) -m sphinx --quiet -W --keep-going \
	  --fresh-env -b html docs build/docs
	@echo "build/docs/index.html"

man: setup
	@$(CONFIGURE) release
	@$(BUILD) release --target bin/muster
	build/release/bin/muster man-pages build/man/man1

wheel: setup
	@CXX="$(CXX)" $(or $(MUSTER_PYTHON),.venv/bin/python) tools/wheel/build --jobs $(JOBS)

deb: setup
	@$(CONFIGURE) release
	@$(BUILD) release --target muster_package_files
	@cpack --config build/release/CPackConfig.cmake
	@ls dist/*.deb

format:
	@MUSTER_CHECKS=ON tools/setup
	@tools/check_format --mend

clean:
	rm -rf build
