# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_DIR := runs/digits
TEST_JOBS ?= 2
WHEELS := $(VENV)/transformers
PIP_LOG := $(VENV)/pip.log
IN_DEV := test recipes benchmark site

PYTEST = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadgroup
# --cpu keeps a personal accelerate configuration out of it, and the hidden devices keep the Trainer
# off a GPU, so that the demo is the same run everywhere. One thread: its matrices are too small to
# share, and several threads wait for each other many times over on a machine that is busy.
LAUNCH = CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 $(BIN)/accelerate launch --cpu --num_processes 1 \
	--num_machines 1 --mixed_precision no --dynamo_backend no --num_cpu_threads_per_process 1

# While pip unpacks it says nothing, for minutes: how much is there, and what it began last.
HOW_FAR = echo "  $$(du -sm $(VENV) | cut -f 1) MB; $$(grep -E '^ *(Collecting|Downloading|Installing)' \
	$(PIP_LOG) | tail -n 1 | cut -c 1-80)"

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all overrides check benchmark tables site dist clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

venv: $(VENV)/.installed-dev  ## make .venv with everything development needs

demo: $(VENV)/.installed-recipes  ## train privately on handwritten digits, half a minute
	@rm -rf $(DEMO_DIR)
	@$(LAUNCH) -m recipes.digits --output_dir $(DEMO_DIR)
	@echo; echo "Check what was saved against its ledger:  $(BIN)/dp-grape verify $(DEMO_DIR)"
	@echo 'Train on your own data: see "Make your own script private" in README.md.'

test: $(VENV)/.installed-test  ## run the tests but the slow ones, and the examples in docstrings
	$(PYTEST) -m "not slow" --doctest-modules dp_grape_hf tests

test-all: $(VENV)/.installed-test $(VENV)/.installed-site  ## run all tests, and the examples in docstrings
	$(PYTEST) --doctest-modules dp_grape_hf tests

# Fetches the newest wheel of each minor release, from the oldest that setup.cfg allows up to the
# first one that does not exist. The test checks that the list is complete.
overrides: $(VENV)/.installed-test  ## compare the overrides with the Trainer of every supported release
	@minor=10; while $(BIN)/python -m pip download -qq --disable-pip-version-check --no-deps \
		--only-binary :all: --dest $(WHEELS) "transformers==5.$$minor.*" 2>/dev/null; \
		do minor=$$((minor + 1)); done
	HF_HUB_OFFLINE=1 DP_GRAPE_WHEELS=$(WHEELS) $(BIN)/python -m pytest -q tests/trainer/test_override_checks.py

check: $(VENV)/.installed-dev  ## lint, formatting and types
	$(BIN)/ruff check dp_grape_hf recipes tests
	$(BIN)/ruff format --check dp_grape_hf recipes tests
	$(BIN)/mypy dp_grape_hf

benchmark: $(VENV)/.installed-benchmark  ## time one private step next to its alternatives
	HF_HUB_OFFLINE=1 $(BIN)/python -m recipes.benchmark

tables: $(VENV)/.installed-recipes  ## render the tables of results in the pages; fails if one was stale
	HF_HUB_OFFLINE=1 $(BIN)/python -m recipes.report

site: $(VENV)/.installed-site  ## build the pages, the notebooks and the reference in build/site
	HF_HUB_OFFLINE=1 $(BIN)/python -m mkdocs build --strict --config-file recipes/site/mkdocs.yml

dist: $(VENV)/.installed-test  ## build in dist what is uploaded to PyPI
	$(BIN)/python -m recipes.site.distributions

clean:  ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find dp_grape_hf recipes tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-%: setup.cfg pyproject.toml .ci/constraints.txt | $(BIN)/python
	@echo "installing dp_grape_hf[$*] into $(VENV) (the first time takes a few minutes) ..."
	@while sleep 10; kill -0 $$$$ 2>/dev/null; do $(HOW_FAR); done 2>/dev/null & \
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile \
		--constraint .ci/constraints.txt --editable '.[$*]' >$(PIP_LOG) 2>&1; failed=$$?; kill $$!; \
		test $$failed -eq 0 || { tail -n 20 $(PIP_LOG); exit 1; }
# On all cores, which pip would not use. A few files are of other versions of Python, and are left.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib 2>/dev/null || true
# A reference for the tests, alone: what it asks for is for its 8-bit optimizers.
	$(if $(filter test dev,$*),@$(BIN)/python -m pip install -qq --disable-pip-version-check \
		--no-deps galore-torch==1.0)
	@touch $@ $(if $(filter dev,$*),$(IN_DEV:%=$(VENV)/.installed-%))

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.11 ..."; exit 1; }
	@echo "creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
