# `make demo` and `make test` need nothing but Python, a C++ compiler and make.

PYTHON ?= python3
VENV ?= .venv
FRAMEWORKS ?= .venv-frameworks
DOCS ?= .venv-docs
# In parallel where pytest-xdist is there; a file's tests mostly in one process, which prepares once.
TESTFLAGS ?= $(shell $(PY) -c 'import xdist; print("-n auto --dist worksteal")' 2>/dev/null)
DEMOFLAGS ?=
SANITIZEFLAGS ?=

# Resolved before the environment's own python3 comes first on PATH: it must not make itself.
BASE_PYTHON := $(shell command -v $(PYTHON))
# Tools of the Python that the environment was made from are found, too, behind its own.
BASE_BIN := $(dir $(BASE_PYTHON))
export PATH := $(abspath $(VENV))/bin:$(BASE_BIN):$(PATH)
PY := $(VENV)/bin/python

SCRIPTS := scripts/*.py examples/char_gpt/*.py
# dlpack.h is vendored and keeps its own format.
CXX_FILES = $(shell find csrc tests/cpp tests/hip tests/L0/with_jax \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' \) \
	! -name dlpack.h | sort)

.PHONY: help env demo test test-l1 frameworks jax bench docs docs-test lint cuda sanitize hip-check
.PHONY: dist clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small GPT in fp32 and FP8 and compare them"
	@echo "make test       unit tests and the C++ program; FILES=\"...\" runs these tests alone"
	@echo "make test-l1    convergence tests, and all cases of the unit tests (hours)"
	@echo "make jax        tests of the front end for JAX, which is installed into build/jax (minutes)"
	@echo "make frameworks tests with Accelerate, Lightning, Megatron-Core and others, in an environment"
	@echo "                of their own, $(FRAMEWORKS)"
	@echo "make bench      benchmarks, their tables and charts"
	@echo "make docs       the documentation site, in build/site; needs no torch"
	@echo "make docs-test  opens it in a browser, and runs the notebooks and slow examples of the pages"
	@echo "make lint       ruff, clang-format, docstrings and mypy"
	@echo "make cuda       compile every .cu for an arch of each code path, where nvcc is found"
	@echo "make sanitize   the ops' tests and a fuzz under ASAN and UBSAN (minutes)"
	@echo "make hip-check  compile every .cu for AMD GPUs, where hipcc is found"
	@echo "make dist       an sdist and wheels in dist/; WHEELS=\"pure cpu\" names which (scripts/dist.py)"
	@echo "make clean      remove what the commands write and what is compiled in the user's cache"
	@echo "make distclean  remove the environment, too"
	@echo "PYTHON=...      the Python to use (default python3); its torch is used if it fits"

env:
	@$(BASE_PYTHON) scripts/environment.py $(VENV)

demo: env
	$(PY) examples/char_gpt/train.py --fp8-recipe delayed --out build/char_gpt $(DEMOFLAGS)

# What Python compiled is kept, whatever the environment says: many tests start processes.
test test-l1: export PYTHONDONTWRITEBYTECODE =

# FILES="tests/L0/ops/test_rope.py ..." runs these alone. Otherwise all libraries are compiled first, on
# all cores: the tests would wait for one after the other.
test: env
ifdef FILES
	$(PY) -m pytest $(FILES)
else
	-$(PY) -m apex_te build --device cpu
	$(PY) -m pytest $(TESTFLAGS) tests/L0
	$(PY) tests/cpp/run.py
endif

test-l1: env
	$(PY) -m pytest tests/L1
	$(PY) -m pytest $(TESTFLAGS) --long tests/L0

# JAX goes beside the environment, which `make test` uses without it.
jax: env
	@test -d build/jax/jax || $(PY) -m pip install --quiet --target build/jax "jax>=0.10" flax optax flatbuffers
	PYTHONPATH=build/jax $(PY) -m pytest $(TESTFLAGS) tests/L0/with_jax tests/L1/with_jax \
		tests/L0/test_reference.py \
		"tests/L0/test_doc_blocks.py::test_code_blocks_run[docs/jax.md+flax+jax]"

# Wants Python 3.11 or later, as the frameworks do.
frameworks:
	@$(BASE_PYTHON) scripts/environment.py $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/python scripts/frameworks.py
	$(FRAMEWORKS)/bin/python -m pytest tests/L1/frameworks tests/L1/docs/test_slow_blocks.py \
		"tests/L0/test_doc_blocks.py::test_code_blocks_run[docs/migration/torchao.md+torchao]" \
		tests/L0/test_reference.py

# Without a GPU: what can be measured on a CPU.
bench: env
	@set -e; \
	if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		files="benchmarks/run.py benchmarks/[!o]*/bench_*.py benchmarks/summary.py"; \
	else \
		files="benchmarks/build/bench_*.py benchmarks/run.py benchmarks/cpu.py"; \
	fi; \
	for file in $$files; do echo "== $$file"; $(PY) $$file; done

# In an environment of its own; without the network once that is there.
docs:
	@$(BASE_PYTHON) scripts/build_docs.py --environment $(DOCS)

docs-test: docs env
	$(PY) -m pytest tests/L1/docs

lint: env
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CXX_FILES)
	$(PY) scripts/check_docstrings.py
	$(PY) -m mypy
	MYPYPATH=examples/char_gpt:examples $(PY) -m mypy $(SCRIPTS)
	MYPYPATH=examples $(PY) -m mypy examples/common.py examples/*/digits.py examples/*/sort.py \
		examples/*/t5_copy.py examples/*/grpo.py

cuda: env
	$(PY) scripts/check_cuda.py

# Minutes: ASAN and UBSAN over the ops' unit tests and 100,000 calls of every function.
sanitize: env
	$(PY) scripts/sanitize.py $(SANITIZEFLAGS)

hip-check: env
	$(PY) scripts/check_hip.py

# By default all wheels that the compilers here can make; those with CUDA libraries take long.
dist: env
	$(PY) scripts/dist.py $(WHEELS)

# What the commands, tools and builds write, in the checkout and in the user's cache. Needs no
# environment, which distclean removes.
clean:
	rm -rf build dist *.egg-info prebuilt apex_te/prebuilt compile_commands.json
	rm -rf .ruff_cache .mypy_cache .pytest_cache .hypothesis
	find apex_te op_builder compatibility csrc tests scripts benchmarks examples \
		\( -name '*.so' -o -name '*.o' -o -name '*.pyc' \) -type f -delete 2>/dev/null || true
	find . -name __pycache__ -type d -not -path './.git/*' -not -path './$(VENV)/*' -prune \
		-exec rm -rf {} +
	-$(BASE_PYTHON) -B -m op_builder.jit.cli clean --all

distclean: clean
	rm -rf $(VENV) $(FRAMEWORKS) $(DOCS)
