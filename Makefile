# `make demo` and `make test` are all the set-up that a machine with python3.11, git, gcc, g++ and make needs.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

# The stamp is named after the contents of what was installed from, so that a checkout that only touches the files,
# or a cached environment, installs nothing; and after the folder, which an editable install points at.
INSTALLED := $(VENV)/installed-$(shell (pwd; cat pyproject.toml constraints.txt) | cksum | cut -d ' ' -f 1)
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench bench-cpu soak coverage hf-tests clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(INSTALLED) ## serve mixed requests on the model that ships; ARGS='--help' shows the options
	$(BIN)/selective-compile demo $(ARGS)

# A process for each core, with one thread each: teams of threads on shared cores wait for one another.
# Lint, of one thread, runs beside them; what it says comes last. Inductor's own worker processes would be too many.
test: RUN := --short
test: test-all ## lint and the tests, of what takes long a part of its cases; ARGS='-k window' goes to pytest

test-all: $(INSTALLED)-test ## lint and the whole test suite: an hour on two cores
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.txt 2>&1 & lint=$$!; \
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
	$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder --durations=10 $(RUN) $(ARGS); tests=$$?; \
	wait $$lint; lint=$$?; cat $(VENV)/lint.txt; exit $$((tests || lint))

lint: $(INSTALLED)-test ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p selective_compile

bench: $(INSTALLED)-bench ## speed, waiting times and memory next to generate and generate_batch; wants a quiet machine
	$(BIN)/selective-compile bench $(ARGS)

bench-cpu: $(INSTALLED)-bench ## next to OpenVINO GenAI and vLLM, too, which it installs apart; an hour for a model and trace
	$(BIN)/selective-compile bench --peers all $(ARGS)

soak: $(INSTALLED) ## a hundred thousand short requests with stops, errors and lost readers: what is left? some minutes
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py $(ARGS)

coverage: $(INSTALLED) ## every model type of transformers against the model alone; writes docs/coverage.md
	$(BIN)/selective-compile coverage --out docs/coverage.json $(ARGS)

hf-tests: $(INSTALLED)-hf-tests ## transformers' own generation tests; TRANSFORMERS=path of a checkout of its repository
	OMP_NUM_THREADS=1 $(BIN)/python tests/hf_generation/run.py '$(TRANSFORMERS)' --json docs/generation_tests.json $(ARGS)

clean: ## remove the environment, caches and build output
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and at its exact version: asked for without one, pip may try several builds of some GB each.
$(INSTALLED):
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/installed-*
	$(BIN)/python -m pip install "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) setuptools wheel
	$(INSTALL) --no-build-isolation --editable .
	touch $@

# What tests, benchmarks and transformers' own tests want beside it: a demo prints nothing of theirs, and waits for none.
$(INSTALLED)-%: $(INSTALLED)
	$(INSTALL) --no-build-isolation --editable '.[$*]'
	touch $@
