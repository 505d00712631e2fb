# Two commands for a new clone:
#     make quickstart      train a Hawk language model on real text, and generate
#     make test            the tests of one backend, and those that depend on none
# make help lists the others.
#
# Everything is installed into .venv, with the versions of constraints.txt. On Linux a plain torch
# is the one for NVIDIA GPUs, several gigabytes: where PIP_EXTRA_INDEX_URL names PyTorch's own index
# of CPU wheels, pip takes the small one.

PYTHON ?= python3
VENV ?= .venv
KERAS_BACKEND := $(or $(KERAS_BACKEND),jax)
# Each worker gets consecutive tests, which share compiled programs; idle workers steal the rest.
PYTEST_ARGS ?= --numprocesses=auto --maxprocesses=8 --dist=worksteal

BACKENDS := jax torch tensorflow
PAPERS := extrapolation gates grouped_queries large_models lightning_ablations listops phone_book \
  recall scaling state_size synthetic_tasks throughput training_speed
BIN := $(VENV)/bin
# Python compiles the modules that are imported; pip would compile all, which takes a minute. pip
# shows its progress, because a download takes minutes.
PIP_INSTALL := $(BIN)/python -m pip install --no-compile --constraint constraints.txt
INSTALLED := pyproject.toml constraints.txt $(VENV)/.created

MAKEFLAGS += --no-builtin-rules

# Without bytecode files, each process would compile Keras and the backends again, for 10 seconds.
unexport PYTHONDONTWRITEBYTECODE

# libtpu, a test dependency, queries the TPU type at import and warns without one: set a type.
ifeq ($(wildcard /dev/accel* /dev/vfio/*),)
export TPU_ACCELERATOR_TYPE ?= v5litepod-4
export TPU_WORKER_HOSTNAMES ?= localhost
endif

.PHONY: help quickstart test test-all test-nightly test-once test-gpu test-devices test-export test-harness test-ray
.PHONY: tpu-report smoke faults durations fuzz lint format clean docs docs-serve tables notebooks
.PHONY: $(PAPERS:%=paper-%) $(BACKENDS:%=test-%) $(BACKENDS:%=test-devices-%)
.PHONY: $(BACKENDS:%=test-export-%) $(BACKENDS:%=fuzz-%)

help:
	@echo "make quickstart   train Hawk on the text of Python's documentation (KERAS_BACKEND=$(KERAS_BACKEND))"
	@echo "make paper-NAME   a figure of a paper, in minutes on two cores: $(PAPERS)"
	@echo "make smoke        one quick test per planted fault, all backends, under a minute"
	@echo "make test         the tests of one backend (KERAS_BACKEND=$(KERAS_BACKEND)), and those that depend on none"
	@echo "make test-all     the tests on $(BACKENDS); make test-jax runs one backend"
	@echo "make test-nightly all tests on all backends, including nightly ones, and the planted faults"
	@echo "make durations    update tests/durations.json, the CPU seconds of each test file"
	@echo "make faults       apply each planted fault to a copy of the package; a test must fail"
	@echo "make test-devices tests on several simulated devices; make test-devices-jax for one backend"
	@echo "make test-gpu     the tests of one backend, jax or torch, on an NVIDIA GPU"
	@echo "make tpu-report   test and time the kernels for TPUs on a TPU, and write a file to send back"
	@echo "make test-export  model.export to each format, run by its runtime; make test-export-torch"
	@echo "make test-harness language models under lm-evaluation-harness, on tasks of local text"
	@echo "make test-ray     the recipes with Ray: two replicas, two actors on this machine"
	@echo "make fuzz         operations on thousands of random inputs, hours; make fuzz-jax for one backend"
	@echo "make docs         the manual, into build/site; make docs-serve shows it while you write"
	@echo "make tables       the manual's generated tables and API lists, from the package"
	@echo "make lint         ruff and mypy"
	@echo "make format       format the code and fix lint errors with ruff"
	@echo "make notebooks    those of guides/recipes, from their scripts"
	@echo "make clean        remove the environments and what was built"

quickstart: $(VENV)/.quickstart-$(KERAS_BACKEND)
	KERAS_BACKEND=$(KERAS_BACKEND) $(BIN)/python guides/quickstart.py

# What a guide takes: make paper-extrapolation PAPER="--full --text FILE"
PAPER ?=

$(PAPERS:%=paper-%): paper-%: $(VENV)/.quickstart-$(KERAS_BACKEND)
	KERAS_BACKEND=$(KERAS_BACKEND) $(BIN)/python guides/papers/run.py $* $(PAPER)

# --keep-going: later targets run even if an earlier one fails.
test: $(VENV)/.test
	$(MAKE) --keep-going --no-print-directory test-$(KERAS_BACKEND) $(if $(filter torch,$(KERAS_BACKEND)),,test-once)

test-all: $(VENV)/.test
	$(MAKE) --keep-going --no-print-directory $(BACKENDS:%=test-%)

# CI passes TESTS_<backend>, files and folders, and NIGHTLY_<backend>, those whose nightly tests run
# as well; pytest exits with 5 if none of these is for the backend. BUDGET=check compares CPU seconds
# with tests/durations.json.
BUDGET ?=
$(BACKENDS:%=test-%): test-%: $(VENV)/.test
	KERAS_BACKEND=$* $(BIN)/python -m pytest $(PYTEST_ARGS) $(BUDGET:%=--budget=%) \
	  $(NIGHTLY_$*:%=--nightly=%) $(TESTS_$*) $(if $(TESTS_$*),|| test $$? -eq 5)

# On a machine with an NVIDIA GPU. GPU_PYTHON names the Python of an environment that exists; otherwise
# this package and its backend for CUDA are installed into .venv-gpu-….
GPU_VENV := .venv-gpu-$(KERAS_BACKEND)

test-gpu: $(if $(GPU_PYTHON),,$(GPU_VENV)/.test)
	XLA_PYTHON_CLIENT_PREALLOCATE=false KERAS_BACKEND=$(KERAS_BACKEND) \
	  $(or $(GPU_PYTHON),$(GPU_VENV)/bin/python) -m pytest --numprocesses=auto --dist=worksteal $(TESTS)

$(GPU_VENV)/.test: $(INSTALLED)
	$(if $(filter jax torch,$(KERAS_BACKEND)),,$(error KERAS_BACKEND must be jax or torch; got "$(KERAS_BACKEND)"))
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --no-compile --constraint constraints.txt \
	  --editable ".[$(KERAS_BACKEND)$(if $(filter jax,$(KERAS_BACKEND)),-cuda),test]"
	@touch $@

# On a machine with a TPU; TPU_PYTHON names the Python of an environment that exists. A trial on a
# CPU: make tpu-report REPORT=--toy
TPU_VENV := .venv-tpu

tpu-report: $(if $(TPU_PYTHON),,$(TPU_VENV)/.installed)
	$(or $(TPU_PYTHON),$(TPU_VENV)/bin/python) -m benchmarks.tpu_report $(REPORT)

$(TPU_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --no-compile --constraint constraints.txt \
	  --editable ".[jax]" "jax[tpu]" pytest
	@touch $@

# Tests that depend on no backend; on torch, `make test` runs them with the others.
test-once: $(VENV)/.test
	KERAS_BACKEND=torch $(BIN)/python -m pytest -m once $(PYTEST_ARGS)

test-nightly: $(VENV)/.test
	$(MAKE) --keep-going --no-print-directory $(BACKENDS:%=test-%) $(BACKENDS:%=NIGHTLY_%=tests) \
	  test-export test-harness test-ray faults

# Remove cached bytecode and programs first: CI starts from a fresh clone and compiles them too.
durations: $(VENV)/.test
	rm -rf .pytest_cache/jax .pytest_cache/torchinductor $$(find tests -name __pycache__)
	$(MAKE) --no-print-directory $(BACKENDS:%=test-%) BUDGET=write

smoke: $(VENV)/.test
	env -u KERAS_BACKEND $(BIN)/python -m tests.faults --smoke

faults: $(VENV)/.test
	env -u KERAS_BACKEND $(BIN)/python -m tests.faults

test-devices: $(VENV)/.test
	$(MAKE) --keep-going --no-print-directory $(BACKENDS:%=test-devices-%)

# Where a process has eight devices, or starts others, more workers would only wait for each other.
$(BACKENDS:%=test-devices-%): test-devices-%: $(VENV)/.test
	KERAS_BACKEND=$* $(BIN)/python -m pytest tests/devices --nightly=tests/devices

# Exporters and their runtimes, lm-evaluation-harness and Ray bring packages along that nothing else
# here needs: they have environments of their own, which find all other packages in .venv. A runtime
# that is missing there is a failure.
EXPORT := .venv-export
HARNESS := .venv-harness
RAY := .venv-ray

test-export:
	$(MAKE) --keep-going --no-print-directory $(BACKENDS:%=test-export-%)

$(BACKENDS:%=test-export-%): test-export-%: $(EXPORT)/.installed
	EXPORT_RUNTIMES=installed KERAS_BACKEND=$* $(EXPORT)/bin/python -m pytest $(PYTEST_ARGS) tests/export \
	  $(if $(NIGHTLY_$*),--nightly=tests/export)

test-harness: $(HARNESS)/.installed
	KERAS_BACKEND=torch $(HARNESS)/bin/python -m pytest tests/test_lm_evaluation_harness.py

test-ray: $(RAY)/.installed
	KERAS_BACKEND=torch $(RAY)/bin/python -m pytest tests/test_ray.py

$(EXPORT)/.installed: ADDED := ai-edge-litert jax2onnx onnx onnxruntime onnxscript openvino tf2onnx
$(HARNESS)/.installed: ADDED := "lm_eval[api]"
$(RAY)/.installed: ADDED := ray[data,serve]

# Packages of .venv are found by a file of site-packages that Python reads at its start.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
$(EXPORT)/.installed $(HARNESS)/.installed $(RAY)/.installed: $(VENV)/.test
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" \
	  > $$($(@D)/bin/python -c '$(SITE)')/packages_of_venv.pth
	$(BIN)/python -m pip --python $(@D)/bin/python install --quiet --no-compile --constraint constraints.txt $(ADDED)
	@touch $@

# How many draws, and the first: make fuzz FUZZ="--draws 500 --start 2000"
FUZZ ?= --draws many

fuzz: $(VENV)/.test
	$(MAKE) --keep-going --no-print-directory $(BACKENDS:%=fuzz-%)

$(BACKENDS:%=fuzz-%): fuzz-%: $(VENV)/.test
	KERAS_BACKEND=$* $(BIN)/python -m pytest tests/fuzz/test_operations.py --nightly=tests/fuzz \
	  --tb=short $(PYTEST_ARGS) $(FUZZ)

# The site reads docstrings without importing the package, and so needs no backend: of pyproject.toml
# it takes the extra `docs` alone. Dead links are errors.
DOCS := .venv-docs
MKDOCS := NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" $(DOCS)/bin/mkdocs
EXTRA_DOCS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

docs: $(DOCS)/.installed
	@$(MKDOCS) build --strict --config-file docs/site/mkdocs.yml
	@echo "build/site/index.html"

docs-serve: $(DOCS)/.installed
	@$(MKDOCS) serve --config-file docs/site/mkdocs.yml

# Presets, implementations and lists of the API reference; the tests compare them with the package.
tables: $(VENV)/.test
	KERAS_BACKEND=torch $(BIN)/python docs/site/tables.py
	$(BIN)/python docs/site/reference.py

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt \
	  $$($(DOCS)/bin/python -c '$(EXTRA_DOCS)')
	@touch $@

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks:
	$(PYTHON) guides/recipes/notebooks.py

clean:
	rm -rf $(VENV) .venv-gpu-* $(TPU_VENV) $(EXPORT) $(HARNESS) $(RAY) $(DOCS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# Empty files record what is installed; one that is older than its prerequisites is made again.
$(VENV)/.created:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
	  echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.quickstart-%: $(INSTALLED)
	$(if $(filter $*,$(BACKENDS)),,$(error KERAS_BACKEND must be one of $(BACKENDS); got "$*"))
	@echo "Installing keras_recurrent, $* and the server into $(VENV), once. This takes minutes, and 3 GB with JAX."
	$(PIP_INSTALL) --editable ".[$*,guides,serve]"
	@touch $@

# With the small half of JAX's CUDA plugin, programs are lowered for GPUs without one.
$(VENV)/.test: $(INSTALLED)
	@echo "Installing keras_recurrent, the three backends and the test tools into $(VENV), once. This takes minutes and 5 GB."
	$(PIP_INSTALL) --editable ".[jax,torch,tensorflow,test]"
	$(if $(filter Linux,$(shell uname)),$(PIP_INSTALL) --no-deps jax-cuda12-plugin)
	@touch $@
