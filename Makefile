# Two commands: `make train` and `make test`. Each does the set-up that is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# Two ranks; NCCL wants a GPU for each, so one on a host with a single GPU.
NP ?= $(if $(filter 1,$(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU ')),1,2)
# Passed on to the example: make train ARGS="--data-dir DIR"
ARGS ?=
# Of docker-test: bookworm or trixie alone, not both; gpu instead of the cpu image; WHEELS=host: take this host's Horovod.
BASE ?=
TARGET ?= cpu
WHEELS ?=
# Passed on to the benchmarks: make bench BENCH="--workload lenet --peer ddp,trainer"
BENCH ?=

# One process more than there are cores, at most 8: while some wait for what they started, others compute.
WORKERS := $(shell cores=$$(nproc); echo $$((cores < 8 ? cores + 1 : 8)))
# A worker that dies ends the run: pytest-xdist can wait for ever for the tests that it had.
WORKERS_OF_PYTEST := --dist loadfile --max-worker-restart 0
UNIT := python -m pytest -n $(WORKERS) $(WORKERS_OF_PYTEST) tests/unit
# XLA's time is mostly LLVM's, which makes code fast that runs a few steps.
COMPILE_FAST := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
# Each of these starts ranks.
THREE_AT_A_TIME := python -m pytest -n 3 $(WORKERS_OF_PYTEST)

# Debian's, of test-packages.
TEST_PACKAGES := openssh-server iproute2 util-linux slurmctld slurmd slurm-client munge default-jre-headless

# `python` and `horovodrun` are the environment's, in every recipe and in what they start.
export PATH := $(CURDIR)/$(BIN):$(PATH)
PIP := python -m pip install --quiet --disable-pip-version-check
# Succeeds if all of the packages that follow are installed. It imports none, which would take seconds each.
HAVE := python -c "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
# One thread a rank: two ranks that both take every core slow each other down.
RUN := OMP_NUM_THREADS=1 horovodrun -np $(NP)

# Keras's, asked in the recipe: on a GPU host .venv has no TensorFlow.
BACKEND = $$(python -c 'from importlib.util import find_spec; print("tensorflow" if find_spec("tensorflow") else "torch")')
# mypy reads code as the oldest Python does (pyproject.toml), but cannot read numpy's types so from numpy 2.5 on.
NEW_NUMPY = $$(python -c 'import numpy; print("--python-version 3.12" if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 5) else "")')

# Tests of any host run on CPUs: two and three ranks want no GPU each. `make gpu` has those for GPUs.
check test unit unit-all unit-and-jobs keras-unit ranks ranks-all jobs e2e e2e-all tooling engines models standin standin-torch attack faults mutants: export CUDA_VISIBLE_DEVICES :=
# Processes that run beside each other: threads that all want every core make the unit tests take four times as long.
check test unit unit-all unit-and-jobs keras-unit ranks ranks-all jobs e2e tooling models: export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
# In the order written, under make -j too: two trainings at once would share the cores.
.NOTPARALLEL:
.PHONY: help setup setup-tensorflow-gpu train train-torch train-keras test check lint types unit unit-all unit-and-jobs keras-unit ranks ranks-all jobs e2e e2e-all tooling standin standin-torch mutants test-packages packages engines models examples gpu-build-test attack faults gpu gpus gpu-build gpu-carry bench docs docker-test mpi5 newest package clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  Variables: PYTHON=python3, NP=2, ARGS="--data-dir DIR", HVDTRAIN_MPI=0 (no MPI), HVDTRAIN_GPU=0|1, HVDTRAIN_CACHE=DIR'

setup: $(STAMP) ## Make .venv: pinned frameworks, hvdtrain, and Horovod built for them

# What Horovod is built from, also whole files of its source.
HOROVOD := $(shell find hvdtrain/horovod_build -type f -not -name '*.pyc')

$(STAMP): pyproject.toml scripts/bootstrap.py hvdtrain/system/toolchain.py $(HOROVOD)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python >= 3.10 is needed. $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@$(PYTHON) -I scripts/bootstrap.py --venv $(VENV)
	@touch $@

setup-tensorflow-gpu: ## Make .venv-tensorflow: TensorFlow for GPUs, whose CUDA 12 cannot share an environment, and Horovod
	HVDTRAIN_GPU=1 $(PYTHON) -I scripts/bootstrap.py --venv .venv-tensorflow --extras tensorflow-gpu,keras
	.venv-tensorflow/bin/hvdtrain build

train: train-torch train-keras ## Train on two ranks, with PyTorch, then with Keras on TensorFlow (PyTorch on a GPU host)

train-torch: $(STAMP) ## The PyTorch half of `make train`
	$(RUN) python examples/mnist/train.py --framework torch $(ARGS)

train-keras: $(STAMP) ## The Keras half
	KERAS_BACKEND=$(BACKEND) $(RUN) python examples/mnist/train.py --framework keras $(ARGS)

test: lint types ranks unit-and-jobs ## Lint, types, and every claim about hvdtrain, each where it is cheapest to prove

check: lint types unit ## What is quick of `make test`, before every commit: lint, types, tests of one process

lint: $(STAMP) ## ruff, and import-linter: imports go downward
	ruff check .
	ruff format --check .
	lint-imports

types: $(STAMP) ## mypy
	mypy $(NEW_NUMPY)

unit: $(STAMP) ## Tests of one process, but for those that start others with a framework (marked slow)
	$(UNIT) -m "not slow"

unit-all: $(STAMP) # make models has Lightning's
	$(UNIT) -m "not tooling" --ignore tests/unit/lightning

keras-unit: $(STAMP) ## Keras's tests of one process on its other backends: `make unit` has them on torch
	KERAS_BACKEND=tensorflow python -m pytest -n $(WORKERS) $(WORKERS_OF_PYTEST) -m "not slow" tests/unit/keras
	KERAS_BACKEND=jax XLA_FLAGS="$(COMPILE_FAST)" python -m pytest -n $(WORKERS) $(WORKERS_OF_PYTEST) -m "not slow" tests/unit/keras

ranks: $(STAMP) ## Tests under horovodrun, each where its claim is cheapest to prove
	python tests/ranks/run.py

ranks-all: $(STAMP) ## Each of them on every framework and Keras backend, at every world size (35 minutes)
	python tests/ranks/run.py --all

# Beside each other: jobs often wait, for processes to end, networks and disks.
unit-and-jobs: $(STAMP)
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	$(MAKE) --no-print-directory unit-all WORKERS=2 > "$$log" 2>&1 & beside=$$!; \
	$(MAKE) --no-print-directory jobs; jobs=$$?; wait $$beside; unit=$$?; cat "$$log"; exit $$((jobs || unit))

jobs: $(STAMP) # Faults in the short version, and commands as a person types them: both start jobs
	$(THREE_AT_A_TIME) -m "not tooling" tests/faults tests/e2e --ignore tests/e2e/lightning

e2e: $(STAMP) ## Commands as a person types them
	$(THREE_AT_A_TIME) tests/e2e

tooling: $(STAMP) ## What the project uses itself: the harness of the rank tests, the benchmarks, the suite for GPUs
	$(THREE_AT_A_TIME) -m tooling tests/e2e/project tests/unit/benchmarks tests/unit/project

e2e-all: $(STAMP) ## Also those that prove a claim once more, with another launcher, signal or Keras backend
	HVDTRAIN_TEST_LONG=1 python -m pytest tests/e2e

standin: $(STAMP) ## Horovod's core as for GPUs, on a stand-in for CUDA and NCCL: order, numbers, failures (4 minutes)
	python -m pytest -n 2 --dist worksteal --max-worker-restart 0 tests/standin/test_core.py

standin-torch: $(STAMP) ## Rank tests of torch with Horovod's torch library on the stand-in (10 minutes)
	HVDTRAIN_TEST_LONG=1 python -m pytest tests/standin/test_torch.py

mutants: $(STAMP) ## Put defects into a copy of the core, one at a time: tests of `make test` must catch each (ARGS="bucket loss": some)
	python scripts/mutants.py $(ARGS)

test-packages: $(STAMP) ## As root: install what tests skip without (sshd, Slurm, Java, Ray, Spark, MLflow, W&B, Jupyter)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(TEST_PACKAGES) < /dev/null
	$(PIP) -e ".[ray,spark,loggers,notebook]"

packages: $(STAMP) # What engines, models and docs install, at once
	$(PIP) -e ".[ray,spark,loggers,models,lightning,docs]"

engines: $(STAMP) ## Ray, Spark, loggers (installed here), Slurm, mpirun, several hosts: what this machine lacks is skipped
	$(HAVE) ray pyspark pyarrow || $(PIP) -e ".[ray,spark]"
	-$(HAVE) mlflow wandb || $(PIP) -e ".[loggers]"
	python -m pytest -n 2 $(WORKERS_OF_PYTEST) --continue-on-collection-errors tests/engines tests/unit/callbacks/loggers

gpu-build-test: ## Set up for GPUs in .venv-gpu (5 GB), and look into what was built: needs no GPU
	$(MAKE) VENV=.venv-gpu HVDTRAIN_GPU=1 setup
	HVDTRAIN_TEST_NCCL=1 .venv-gpu/bin/python -m pytest tests/e2e/horovod_build/test_libraries.py

models: $(STAMP) ## transformers and its Trainer, peft, Lightning, ignite (installed here), all of torchmetrics: ranks give one process's numbers
	$(HAVE) transformers accelerate peft ignite lightning || $(PIP) -e ".[models,lightning]"
	python -m pytest -q tests/unit/lightning tests/e2e/lightning
	python -m pytest -q tests/unit/scripts/test_names.py -k "lightning or transformers" # `make unit-all` has the others
	python tests/ranks/run.py --only models
	HVDTRAIN_TEST_LONG=1 python -m pytest -q tests/unit/torch/test_every_torchmetric.py

examples: $(STAMP) ## Train the gallery of examples/ for longer, on two ranks (10 minutes); examples/README.md has the results
	rm -rf build/examples
	mkdir -p build/examples
	cd build/examples && $(RUN) python $(CURDIR)/examples/images/train.py --epochs 20
	cd build/examples && $(RUN) python $(CURDIR)/examples/gpt/train.py --epochs 20
	cd build/examples && python $(CURDIR)/examples/sweep/sweep.py --lr 0.01 0.03 0.1 0.3 1 --batch-size 16 64 256

attack: $(STAMP) ## Attacks on jobs by another user of this host, with a table (as root; ARGS=--page puts it into the page)
	python tests/attack/run.py $(ARGS)

faults: $(STAMP) ## Injected faults by the hundred, with a table (HVDTRAIN_FAULTS_SEED=0)
	HVDTRAIN_FAULTS=long python -m pytest tests/faults

# Over .venv: its frameworks and tools, with another Open MPI and a Horovod built for it.
MPI5 := $(CURDIR)/build/mpi5
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

mpi5: $(STAMP) ## The package index's Open MPI 5 in an environment of its own: build, and the tests that concern MPI
	python -m venv --clear $(MPI5)
	echo "import site; site.addsitedir('$$(python $(PURELIB))')" > "$$($(MPI5)/bin/python $(PURELIB))/over.pth"
	$(MPI5)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . \
		"$$(sed -n 's/^mpi = \["\(.*\)"\].*/\1/p' pyproject.toml)"
	export PATH="$(MPI5)/bin:$$PATH"; hvdtrain build && mpirun --version | grep 'Open MPI) 5' && \
		python -m pytest tests/e2e/launch/test_run*.py tests/e2e/distributed/test_tuning.py tests/e2e/horovod_build/test_horovod_changes.py \
			tests/engines/test_mpirun.py tests/engines/test_hosts.py && \
		python tests/ranks/run.py --np 2 --only torch

gpu-carry: ## Fill .gpu-carry/, where there is a network, with what `make gpu` installs: bring it along
	$(PYTHON) scripts/gpu.py carry

gpu-build: ## The part of `make gpu` that needs no GPU, with HVDTRAIN_GPU_ARCH=90
	$(PYTHON) scripts/gpu.py build

gpu: ## Build, test and measure on one GPU, without a network: PYTHON has torch (see CONTRIBUTING.md)
	$(PYTHON) scripts/gpu.py build test bench

gpus: ## The same for several GPUs, one rank each, into one file to send back: build, proof, rank tests, DDP (20 minutes)
	$(PYTHON) scripts/gpus.py

bench: $(STAMP) ## Step times side by side with peers (BENCH="--workload mlp"; pip install '.[bench]' adds peers)
	python -m benchmarks $(BENCH)

docs: $(STAMP) ## The site, in build/site/index.html: every link and name in it must be found
	$(HAVE) mkdocs || $(PIP) -e ".[docs]"
	python -m mkdocs build --strict --config-file docs/mkdocs.yml

docker-test: $(STAMP) ## Build the cpu image on Debian 12 and 13, run it (as root installs docker.io, debootstrap; BASE=bookworm: one; TARGET=gpu: on CPUs, 20 GB)
	python tests/docker/engine.py
	HVDTRAIN_DOCKER_TARGET=$(TARGET) HVDTRAIN_DOCKER_WHEELS=$(WHEELS) python -m pytest tests/docker -k "$(BASE)"

newest: ## The newest frameworks, in build/newest: Horovod built for them, and the core of the rank tests (4 GB)
	$(PYTHON) scripts/newest.py $(ARGS)

package: $(STAMP) ## The sdist and the wheel, in dist/, checked as a package index would
	rm -rf dist
	python -m hatchling build -d dist
	twine check --strict dist/*

clean: ## Remove what set-up and tests made; the wheel cache stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find hvdtrain tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
