# The commands of this repository. Each makes what it needs in .venv, so a bare machine needs only Python, make and
# a package index that pip can reach. `make plan` is the first thing to run.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
READY := $(VENV)/.ready-plan
DEV := $(VENV)/.ready-dev
PIP := $(PY) -m pip install -qq --disable-pip-version-check --constraint constraints/test.txt

# What is set for another environment must not leak into this one.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_USER

.DEFAULT_GOAL := help
.PHONY: help plan test lint proof bench docs gpu clean
.PHONY: lint-style lint-format lint-types lint-imports lint-spelling lint-dependencies lint-unused lint-size lint-names

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' Makefile

plan: $(READY) ## find the best plans for a 70B model on 64 cards; installs the planner first, without torch
	$(BIN)/trainledger plan llama-3-70b --gpus 64 --gpu h100

# A file stays with one worker, for its tests share what they have run once; more workers than four wait for ranks.
test: $(DEV) ## run every test that takes less than ten minutes in all
	$(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: lint-style lint-format lint-types lint-imports lint-spelling lint-dependencies lint-unused lint-size lint-names ## check style, types, layers, spelling, sizes

lint-style: $(DEV)
	$(BIN)/ruff check

lint-format: $(DEV)
	$(BIN)/ruff format --check

lint-types: $(DEV)
	$(BIN)/basedpyright --pythonpath $(PY)

lint-imports: $(DEV)
	$(BIN)/lint-imports --no-logo

lint-spelling: $(DEV)
	$(BIN)/codespell

lint-dependencies: $(DEV)
	$(BIN)/deptry src

# A field that is only encoded looks unused to vulture, so its variables and attributes are left out. Its exit
# status 3 means that it found something.
lint-unused: $(DEV)
	@echo "$(BIN)/vulture"
	@found=$$($(BIN)/vulture); status=$$?; [ $$status -eq 0 ] || [ $$status -eq 3 ] || exit $$status; \
	! echo "$$found" | grep -E "unused (class|function|method|property|import|argument)|unreachable|unsatisfiable"

lint-size: $(DEV)
	$(PY) scripts/size.py src scripts tests

lint-names: $(DEV)
	$(PY) scripts/check_names.py

# Cells that have passed with the same code are not run again. pytest's exit status 5 means that no test was collected.
proof: $(DEV) ## prove every model in every layout, which takes hours and can be stopped; then the long tests
	$(PY) scripts/proof.py
	@$(PY) -m pytest -m proof --timeout 3600 --session-timeout 86400; status=$$?; \
	if [ $$status -eq 5 ]; then echo "make proof: no test is marked 'proof' in this checkout"; else exit $$status; fi

bench: $(DEV) ## measure plans per second, start and import times, the training program and its observers
	$(PY) scripts/bench.py
	$(PY) scripts/bench_runtime.py

docs: $(DEV) ## write the generated pages anew
	$(PY) scripts/docs.py

# What was measured is kept before the checks begin, and they run whatever could not be measured.
gpu: $(DEV) ## measure the CUDA card that is at hand beside the ledger, in six minutes, and run the checks that need one
	@echo "Checks that need a CUDA device:"
	@$(PY) -m pytest -m gpu --collect-only -qq
	@nvidia-smi --list-gpus 2>/dev/null || { \
		echo "make gpu: no CUDA device is at hand (nvidia-smi lists none); run it on a machine that has one" >&2; exit 1; }
	@status=0; $(PY) scripts/gpu.py --record || status=$$?; $(PY) -m pytest -m gpu || status=$$?; exit $$status

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "trainledger needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
			"Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment; its venv module may be a package of its own" \
			"(python3-venv on Debian and Ubuntu)" >&2; exit 1; }

# The bytecode is written here, for some machines forbid Python to write it when a module is first imported.
$(READY): pyproject.toml constraints/test.txt | $(PY)
	@echo "installing the planner into $(VENV)"
	@$(PIP) --editable .
	@$(PY) -m compileall -q src
	@touch $@

$(DEV): $(READY)
	@echo "installing the development tools into $(VENV)"
	@$(PIP) --editable '.[dev,train]'
	@touch $@
