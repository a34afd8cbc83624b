# Two commands matter:   make train    make test
# Both make .venv first: pinned packages, an MPI, Horovod built against them (a cached wheel), the extension.
#
#   PYTHON=python3.11   the Python to build .venv with
#   MPI=system          the system's MPI in place of the one from PyPI
#   RANKS=2             processes of `make train`
#   FRAMEWORK=pytorch   what `make train`, `compare` and the benchmarks use: pytorch or tensorflow (train: keras, for fit)
#   DENSITY=0.001       what DGC sends in `make train`
#   CUDA_HOME           where the CUDA toolkit lies, if nvcc is not on PATH
#
# `make test-gpu`, `sanitize-gpu` and `bench-gpu` use no .venv: PYTHON is any Python that has a PyTorch with CUDA.

SHELL := /bin/bash
ifneq ($(words $(CURDIR)),1)
$(error hvd_sparse: make cannot work in a path with spaces: $(CURDIR). Move it, or use pip install --no-build-isolation .)
endif
export PYTHON ?= python3
export MPI ?= wheel
VENV ?= $(CURDIR)/.venv
override VENV := $(abspath $(VENV))
export VENV
export REQUIREMENTS ?= requirements.txt
RANKS ?= 2
FRAMEWORK ?= pytorch
DENSITY ?= 0.001

SOURCES := $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh') CMakeLists.txt setup.py
FORMATTED := $(filter %.cc %.h %.cu %.cuh,$(SOURCES)) $(wildcard benchmarks/*.cc) $(shell find tests/native -name '*.cc' -o -name '*.h' -o -name '*.cuh')
RUN := scripts/run.sh
ifeq ($(filter $(FRAMEWORK),pytorch tensorflow keras),)
$(error hvd_sparse: FRAMEWORK must be pytorch, tensorflow or keras, got $(FRAMEWORK))
endif

.PHONY: help setup train test test-all test-native test-single test-parallel test-tensorflow test-compat sanitize sanitize-threads fuzz coverage build-cuda test-gpu sanitize-gpu bench-gpu docs lint format bench profile bench-rows bench-steps bench-network bench-exchanges bench-network-exchanges bench-lifespan bench-stragglers bench-server compare results results-asynchronous results-adamw results-boundaries results-exchanges results-hybrid results-network test-faults bench-micro bench-sidco clean
.DEFAULT_GOAL := help
.NOTPARALLEL:  # set-ups change one environment, and tests need the processors

help:  ## show this
	@echo "make train   the main job: digits under horovodrun, dense and DGC side by side"
	@echo "make test    what catches faults: native, sanitized, one process, 1 to 4 ranks"
	@echo
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1|\2/' | column -t -s '|'

setup: $(VENV)/.extension-all  ## make .venv, build Horovod and the extension

$(VENV)/.environment: $(REQUIREMENTS) scripts/environment.sh scripts/step.sh
	@scripts/environment.sh && touch $@

# For one framework, torch or tensorflow, or for all.
.PRECIOUS: $(VENV)/.horovod-%
$(VENV)/.horovod-%: $(VENV)/.environment scripts/horovod.sh
	@scripts/horovod.sh $* && touch $@

$(VENV)/.extension-%: $(VENV)/.horovod-% $(SOURCES) scripts/extension.sh
	@scripts/extension.sh $* && touch $@

# At first, training waits for its own framework alone. When the other one is asked for, too, all is built: Horovod for
# one framework replaces that for the other.
TRAINED := $(if $(filter pytorch,$(FRAMEWORK)),torch,tensorflow)
OTHERS := $(VENV)/.extension-all $(VENV)/.horovod-$(if $(filter torch,$(TRAINED)),tensorflow,torch)
train: $(VENV)/.extension-$(if $(wildcard $(OTHERS)),all,$(TRAINED))  ## train the digits example, dense and DGC side by side
	@$(RUN) python scripts/train.py --framework $(FRAMEWORK) --ranks $(RANKS) --density $(DENSITY)

test: setup lint  ## run what catches faults: a choice of every suite
	@scripts/test.sh all

test-all: setup lint  ## run every test there is, more than an hour
	@$(RUN) pip install --quiet --disable-pip-version-check -r requirements-ddp.txt
	@HVD_SPARSE_TESTS=all scripts/test.sh all

test-native test-single test-parallel: test-%: setup
	@scripts/test.sh $*

test-tensorflow: setup
	@scripts/test.sh tensorflow

test-compat:  ## run TensorFlow's tests on TensorFlow 2.15 with Keras 2, in an environment of its own
	@rm -f .venv-compat/.extension-all  # a copy of the package is installed there
	@$(MAKE) VENV=$(CURDIR)/.venv-compat REQUIREMENTS=requirements-compat.txt test-tensorflow

sanitize: setup  ## run the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/test.sh sanitize

sanitize-threads: setup  ## run what the core does on several threads under ThreadSanitizer
	@scripts/test.sh threads

fuzz: setup  ## give the payload decoder random bytes for a minute: libFuzzer where clang++ is, else mutations alone
	@scripts/test.sh fuzz

test-faults: setup  ## kill, stop, delay, corrupt, resize: what is lost, what hangs; table in benchmarks/results (an hour)
	@$(RUN) python tests/faults/run.py

coverage: setup  ## count the lines of the core that the native tests run
	@scripts/test.sh coverage

build-cuda: setup  ## compile the CUDA code and its ops for three generations of GPUs; needs nvcc, no GPU
	@scripts/cuda.sh

test-gpu:  ## build in place with PYTHON, and test the ops on a GPU against those on the CPU
	@scripts/gpu.sh test

sanitize-gpu:  ## the same under compute-sanitizer: memory, races, barriers; takes long
	@scripts/gpu.sh sanitize

bench-gpu:  ## build in place with PYTHON, check, then time the ops on a GPU
	@scripts/gpu.sh bench

docs: setup $(VENV)/.docs  ## build the documentation site, build/docs; a warning is an error
	@$(RUN) sphinx-build -W --keep-going -q -j auto docs build/docs && echo "build/docs/index.html"

$(VENV)/.docs: requirements-docs.txt scripts/docs.sh
	@scripts/docs.sh && touch $@

lint: setup  ## check style and types: ruff, mypy, clang-format
	@$(RUN) ruff check . && $(RUN) mypy && $(RUN) ruff format --check . && $(RUN) clang-format --dry-run --Werror $(FORMATTED)

format: setup  ## put style right
	@$(RUN) ruff check --fix . && $(RUN) ruff format . && $(RUN) clang-format -i $(FORMATTED)

bench: setup  ## check, then time the native functions
	@$(RUN) python benchmarks/kernels.py --framework $(FRAMEWORK)

profile: setup  ## where the time of a compress and of a sum goes: times, bytes, instructions (valgrind)
	@scripts/profile.sh

bench-rows: setup  ## check, then time selection in the rows of a matrix
	@$(RUN) python benchmarks/rows.py

bench-steps: setup  ## time whole steps of models of many tensors against Horovod's dense ones
	@$(RUN) mpirun -np $(RANKS) python benchmarks/steps.py --framework $(FRAMEWORK)

bench-network: setup  ## train on hosts that a slow network joins, against Horovod, DDP and PowerSGD
	@$(RUN) python benchmarks/network/run.py --framework $(FRAMEWORK)

bench-exchanges: setup  ## what a rank receives and decodes, gather and reduce-scatter, 2 to 256 simulated ranks
	@$(RUN) python benchmarks/exchanges.py

bench-network-exchanges: setup  ## gather, reduce-scatter, hierarchical on emulated hosts
	@$(RUN) python benchmarks/network/exchanges.py

bench-lifespan: setup  ## time DCT's steps with and without a refresh of the threshold
	@$(RUN) mpirun -np $(RANKS) python benchmarks/lifespan.py

bench-micro: setup  ## what MiCRO's selection and steps cost against exact top-k, and its density
	@$(RUN) python benchmarks/micro.py --output benchmarks/results/micro.md

bench-sidco: setup  ## what SIDCo's compress costs over Gradient Dropping's
	@$(RUN) python benchmarks/sidco.py --output benchmarks/results/sidco.md

bench-stragglers: setup  ## batches a second with one slow worker, asynchronous against Horovod
	@$(RUN) python benchmarks/stragglers.py

bench-server: setup  ## what a push costs a parameter server, over passes over all elements
	@$(RUN) python benchmarks/server.py

compare: setup  ## train one model with every method; table and plots in comparison/
	@$(RUN) mpirun -np 4 python examples/compare_methods.py --framework $(FRAMEWORK)

results: setup  ## train every example over seeds and ranks, and write benchmarks/results (hours)
	@$(RUN) python benchmarks/convergence.py

results-asynchronous: setup  ## train with 4 to 32 simulated asynchronous workers over seeds, the rate tuned for each method (hours)
	@$(RUN) python benchmarks/asynchronous.py

results-adamw: setup  ## train a small transformer with Adam on simulated ranks, several methods, over seeds (two hours)
	@$(RUN) python benchmarks/adamw.py

results-exchanges: setup  ## train with a gather and with reduce-scatters on simulated ranks, over seeds (hours)
	@$(RUN) python benchmarks/exchange_convergence.py

results-boundaries: setup  ## train a click model with sparse activations over seeds (half an hour)
	@$(RUN) python benchmarks/boundaries.py

results-hybrid: setup  ## train it in stages and replicas on 4 and 6 ranks over seeds (half an hour)
	@$(RUN) python benchmarks/hybrid.py

results-network: setup  ## train on slow networks: the whole grid, time to accuracy, asynchronous methods (hours)
	@$(RUN) python benchmarks/network/run.py --hosts 2 4 8 --rates 100mbit 1gbit 10gbit none --models mlp10 mlp38 lstm resnet50
	@$(RUN) python benchmarks/network/run.py --framework tensorflow --rates 100mbit 1gbit 10gbit none --models mlp10 mlp38
	@$(RUN) python benchmarks/network/accuracy.py
	@$(RUN) python benchmarks/network/asynchronous.py
	@$(RUN) python benchmarks/network/dgc_figure_6.py

clean:  ## remove .venv and everything built; Horovod's wheel stays in the user's cache
	rm -rf .venv .venv-compat build dist hvd_sparse/lib *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
