# make demo        the whole job on a small checkpoint, in a fresh venv, without torch
# make lint        style, format, types
# make test-fast   the quick tests, about two minutes
# make test        all that need no GPU
# make engines     fetches the wheels of the engines that tests compare with: 45 MB
# make campaign    breaks a run at every single call; half an hour
# make mutants     plants mistakes that the tests must notice; writes tests/mutants/RESULTS.md; run by hand
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo
# some tests wait for servers, so one process more than cores is worth it
PARALLEL ?= -n $(shell expr $$(nproc) + 1) --dist worksteal

.PHONY: demo lint engines test test-fast campaign mutants schemas wheel clean

$(BIN)/marlin-convert: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(BIN)/marlin-convert
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

demo: $(BIN)/marlin-convert
	rm -rf $(DEMO)
	@echo "== 1. make a small checkpoint in the form of Kimi-K2.6"
	$(BIN)/python examples/make_checkpoint.py small $(DEMO)/checkpoint
	@echo "== 2. plan: what would be written for 8 GPUs"
	$(BIN)/marlin-convert plan $(DEMO)/checkpoint $(DEMO)/tp8 --tp 8
	@echo "== 3. convert"
	$(BIN)/marlin-convert convert $(DEMO)/checkpoint $(DEMO)/tp8 --tp 8
	@echo "== 4. verify: from the disk, then against the checkpoint itself"
	$(BIN)/marlin-convert verify $(DEMO)/tp8
	$(BIN)/marlin-convert verify $(DEMO)/tp8 --source $(DEMO)/checkpoint
	@echo "== 5. inspect: the folder, and the codes of one packed tensor"
	$(BIN)/marlin-convert inspect $(DEMO)/tp8
	$(BIN)/marlin-convert inspect $(DEMO)/tp8 --rank 3 --tensor language_model.model.layers.1.mlp.experts.w13_weight_packed

lint: $(VENV)/.test
	$(BIN)/ruff check convert tests examples
	$(BIN)/ruff format --check convert tests examples
	$(BIN)/mypy

test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -m "not gpu and not slow and not campaign" $(PARALLEL)

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not gpu and not campaign" $(PARALLEL)

# not installed: tests run parts of their source. Add vllm's versions by ENGINES='vllm==0.33.0', 336 MB each
ENGINES ?= sglang==0.5.17 sglang==0.5.23
engines: $(VENV)/.test
	for engine in $(ENGINES); do $(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	    --python-version 3.12 --implementation cp --platform manylinux_2_34_x86_64 --dest .engines $$engine || exit; done

campaign: $(VENV)/.test
	$(BIN)/python -m pytest -m campaign $(PARALLEL)

mutants: $(VENV)/.test
	$(BIN)/python tests/mutants/run.py

schemas: $(BIN)/marlin-convert
	$(BIN)/python -m marlin_convert.documents.schemas --write schemas

wheel: $(VENV)/.test
	$(BIN)/python -m build --quiet

clean:
	rm -rf $(VENV) $(DEMO) dist build
