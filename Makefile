# Everything starts here: `make serve`, `make test`. Needs Python 3.11+ (with venv), make and a C++ compiler.
# Stamps in the virtual environment let repeated runs skip what is done.

# `make serve DEVICE=cuda`: vLLM and PyTorch for NVIDIA GPUs, and the kernels for them (needs nvcc 13).
DEVICE ?= cpu
ifeq ($(filter $(DEVICE),cpu cuda),)
$(error DEVICE is $(DEVICE), wanted cpu or cuda)
endif
# Which lock file of deploy/requirements the environment is made from: `LOCK=cuda-0.33` has vLLM 0.33.
LOCK   ?= $(DEVICE)
VENV   ?= $(if $(filter cuda,$(DEVICE)),.venv-cuda,.venv)
PYTHON ?= python3
HOST   ?= 127.0.0.1
PORT   ?= 8000
# More flags for the server (`make serve ARGS="--api-key secret"`) or for pytest (`make test TESTS=tests/unit`).
ARGS   ?=
TESTS  ?= tests
# Lanes of tests, each on processors of its own: 0 is one test after another, auto one lane for each processor.
LANES  ?= auto
# 1: the tests that run once more, on other runners and in more processes, what others cover.
LONG   ?=

# torch's CPU build: found by pip as it is configured, else on PyTorch's own index.
TORCH_CPU       ?= torch==2.13.0+cpu
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN    := $(VENV)/bin
PY     := $(BIN)/python
PIP    := $(PY) -m pip --disable-pip-version-check --no-input
STAMPS := $(VENV)/.stamps
LOCKS  := deploy/requirements
# Where torch is there: the lock for CUDA has it.
TORCH  := $(STAMPS)/$(if $(filter cuda,$(DEVICE)),runtime,torch)
NATIVE := $(shell find csrc -type f 2>/dev/null)

# An environment for CPUs compiles the CUDA library as well with `make NWOR_CUDA=ON`, where nvcc is at hand.
export NWOR_CUDA ?= $(if $(filter cuda,$(DEVICE)),ON,OFF)
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1

.PHONY: help serve test test-host-0.33 test-gpu verify-gpu lint format types lock cuda cuda-check wheel sbom bench-server setup setup-dev clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make serve    set up, build and serve the bundled demo model on http://$(HOST):$(PORT)"
	@echo "make test     set up, build and run tests that need no GPU; LONG=1 for all of them"
	@echo "make test-host-0.33  unit tests of the host's code beside vLLM 0.33's files"
	@echo "make test-gpu the same on NVIDIA GPUs: their tests, compute-sanitizer, benchmarks; docs/release.md"
	@echo "              (make serve DEVICE=cuda serves on one)"
	@echo "make lint     ruff, check and format      make types   mypy --strict"
	@echo "make format   let ruff fix and format     make lock    resolve the lock files anew"
	@echo "make cuda     compile the CUDA library (needs nvcc, no GPU); make cuda-check does for a check, faster"
	@echo "make wheel    build the wheel into dist/cpu, with NWOR_CUDA=ON into dist/cuda"
	@echo "make sbom     bills of materials and the licence list into dist"
	@echo "make bench-server   compare with stock vllm serve"
	@echo "make clean    remove builds and caches    make distclean   the virtual environment too"

serve: setup
	$(PY) -m server --demo --host $(HOST) --port $(PORT) $(ARGS)

# Each server and each lane would compile the same sources again where no bytecode may be written.
# What waits for a server may wait too long beside a full lane, so what has failed there is run once more, alone; both
# results stand above the end.
PYTEST = env -u PYTHONDONTWRITEBYTECODE NWOR_TESTS_LONG=$(LONG) $(PY) -m pytest --dist loadscope --durations 25 -rs
test: setup-dev
	$(PYTEST) -n $(LANES) $(TESTS) || { [ $$? = 1 ] && [ $(LANES) != 0 ] && echo "what failed, alone" && \
		$(PYTEST) -n 0 --last-failed --last-failed-no-failures=none $(TESTS); }

# Unit tests of the host's code beside vLLM 0.33's own Python files, which run on a CPU where they start no engine.
# There is no build of 0.33 for CPUs, so all but its files is what the environment has for 0.32.
HOST_0_33 := build/vllm-0.33
HOST_TESTS = $(shell grep -lE "^ *(from|import) (vllm|nwor\.engine|server)\b" tests/unit/test_*.py)
test-host-0.33: setup-dev $(HOST_0_33)/.stamp
	env VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(abspath $(HOST_0_33)) NWOR_TESTS_REQUIRE= \
		$(PY) -m pytest -n $(LANES) --dist loadscope -rs $(HOST_TESTS)

$(HOST_0_33)/.stamp: $(LOCKS)/vllm-0.33.txt | $(STAMPS)/venv
	rm -rf $(HOST_0_33)
	$(PIP) install --no-deps --require-hashes --target $(HOST_0_33) -r $<
	@touch $@

# Everything that shows a build to be right and fast on GPUs, with a record of it: see docs/release.md.
test-gpu:
	$(MAKE) DEVICE=cuda NWOR_CUDA=ON verify-gpu

# racecheck wants libraries of its own: the same kernels, linked once more.
verify-gpu: setup-dev
	$(BIN)/cmake --build build/$(DEVICE)-py3-none-* --target nwor_cuda_racecheck
	$(PY) -m tests.gpu.verify --racecheck-libraries build/$(DEVICE)-py3-none-*/cuda/racecheck $(ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup-dev
	$(BIN)/mypy

# Compiles the CUDA library for all architectures, which needs nvcc but no GPU; installs nothing.
cuda: $(STAMPS)/runtime $(STAMPS)/build
	$(BIN)/cmake -S csrc -B build/cuda -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DNWOR_CUDA=ON -DPython_EXECUTABLE=$(abspath $(PY))
	$(BIN)/cmake --build build/cuda

# The CUDA sources through compiler and assembler without what takes long, optimization. No code is for 100 alone:
# what it compiles, 80 or 90a does.
cuda-check: $(STAMPS)/runtime $(STAMPS)/build
	$(BIN)/cmake -S csrc -B build/cuda-check -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DNWOR_CUDA=ON "-DNWOR_CUDA_ARCHS=80-real;90a-real" -DCMAKE_CUDA_FLAGS=-Ofc=max \
		-DPython_EXECUTABLE=$(abspath $(PY))
	$(BIN)/cmake --build build/cuda-check

# Needs a compiler and torch's headers, not the rest of the run-time packages; see docs/release.md.
WHEEL_DIR = dist/$(if $(filter ON,$(NWOR_CUDA)),cuda,cpu)
wheel: $(TORCH) $(STAMPS)/build
	rm -rf $(WHEEL_DIR)
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) wheel --no-build-isolation --no-deps --no-index -w $(WHEEL_DIR) .
	@ls -l $(WHEEL_DIR)

sbom: setup-dev
	$(PY) deploy/release/sbom.py dist

bench-server: setup-dev
	$(PY) -m benchmarks.server $(ARGS)

setup: $(STAMPS)/package
setup-dev: $(STAMPS)/package $(STAMPS)/dev

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is %s: make PYTHON=/path/to/python3.11" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: Makefile | $(STAMPS)/venv
	$(PIP) install --no-deps "$(TORCH_CPU)" || $(PIP) install --no-deps --index-url $(TORCH_CPU_INDEX) "$(TORCH_CPU)"
	@touch $@

$(STAMPS)/runtime: | $(if $(filter cuda,$(DEVICE)),$(STAMPS)/venv,$(STAMPS)/torch)
$(STAMPS)/runtime: $(LOCKS)/$(LOCK).txt
	$(PIP) install --no-deps --require-hashes -r $<
	@touch $@

$(STAMPS)/build: $(LOCKS)/build.txt | $(STAMPS)/venv
	$(PIP) install --no-deps --require-hashes -r $<
	@touch $@

$(STAMPS)/dev: $(LOCKS)/dev.txt | $(STAMPS)/runtime $(STAMPS)/build
	$(PIP) install --no-deps --require-hashes -r $<
	@touch $@

$(STAMPS)/package: pyproject.toml $(NATIVE) | $(STAMPS)/runtime $(STAMPS)/build
	@start=$$(date +%s); \
	$(PIP) install --no-build-isolation --no-deps --config-settings=build-dir=build/$(DEVICE)-{wheel_tag} -e . && \
	echo "built and installed in $$(( $$(date +%s) - start )) s"
	@touch $@

# torch for the CPU and the three packages that text models do without stay out of the lock (see cpu.in).
UV_LOCK = $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-annotate --no-header

lock: $(STAMPS)/dev
	$(UV_LOCK) $(LOCKS)/cpu.in --override $(LOCKS)/overrides.txt --no-emit-package torch \
		--no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec -o $(LOCKS)/cpu.txt
	$(UV_LOCK) $(LOCKS)/cuda.in -o $(LOCKS)/cuda.txt
	$(UV_LOCK) $(LOCKS)/cuda-0.33.in -o $(LOCKS)/cuda-0.33.txt
	$(UV_LOCK) $(LOCKS)/vllm-0.33.in --no-deps -o $(LOCKS)/vllm-0.33.txt
	$(UV_LOCK) $(LOCKS)/build.in -c $(LOCKS)/cpu.txt -o $(LOCKS)/build.txt
	$(UV_LOCK) $(LOCKS)/dev.in -c $(LOCKS)/cpu.txt -c $(LOCKS)/build.txt -o $(LOCKS)/dev.txt

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find nwor server tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f .venv/.stamps/package .venv-cuda/.stamps/package $(STAMPS)/package

distclean: clean
	rm -rf .venv .venv-cuda $(VENV)
