# Two targets are for everybody: `make demo` and `make test`. Each installs into .venv what it needs, and needs Python 3.11
# or newer.
# CONTRIBUTING.md says which of the others to run when.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
# Where an index serves this version with CUDA, that is several gigabytes: then nothing is fetched until you have chosen, by
# setting TORCH. With uv it is the build for TORCH_BACKEND: cpu, auto (for the GPU that is here), cu130 …
TORCH  ?= torch==2.13.0
UV     ?= $(shell command -v uv)
TORCH_BACKEND ?= cpu
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
# In parallel: three workers for two cores, since half of a test's time is waiting.
export PYTEST_XDIST_AUTO_NUM_WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 3 / 2)
PYTEST := $(BIN)/python -m pytest --numprocesses=auto --dist=loadgroup --durations=10

# The tests start hundreds of processes: they share what Python compiles, whatever this shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-vllm demo-lora demo-gameday test test-long test-attacks test-engines test-vllm test-gpu test-soak test-trainers test-perfetto test-browser test-pythons test-recipes test-mutants environments lint docs bench clean

demo: $(VENV)/.demo-ready
	$(BIN)/rolloutctl demo

# The real TRL trains on two real vLLM servers, on the CPU, whole weights or a LoRA adapter: 3 minutes. What it fetches first,
# once, it says.
demo-vllm demo-lora: $(VENV)/.demo-ready
	@set -e; vllm=$$($(BIN)/python -m tests.environments vllm); trl=$$($(BIN)/python -m tests.environments trl); \
	PYTHONPATH=. TRL_EXPERIMENTAL_SILENCE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $$trl -W ignore::FutureWarning \
	    docs/examples/grpo_$(@:demo-%=%).py rolloutctl-demo/$(@:demo-%=%)-$$(date +%Y%m%d-%H%M%S) $$vllm

# The same training on a game day: a server is killed while it loads, an answer is lost, an agent stands still. With the verdict.
demo-gameday: $(VENV)/.demo-ready
	@set -e; vllm=$$($(BIN)/python -m tests.environments vllm); trl=$$($(BIN)/python -m tests.environments trl); \
	plan=docs/examples/gameday.toml; out=rolloutctl-demo/gameday-$$(date +%Y%m%d-%H%M%S); \
	PYTHONPATH=. TRL_EXPERIMENTAL_SILENCE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/rolloutctl chaos run $$plan \
	    --log $$out/run.db -- $$trl -W ignore::FutureWarning docs/examples/grpo_vllm.py $$out $$vllm $$plan

# COVERAGE="--cov --cov-report=term" also fails when less of the product is covered than pyproject.toml asks for.
test: $(VENV)/.ready
	$(PYTEST) $(COVERAGE)

# Simulations and searches at full length. `make test` has a short part of each.
test-long: $(VENV)/.ready
	$(PYTEST) -m long

# A random sample of small changes of the machines, made by Cosmic Ray, each tried alone: how many are noticed by the
# suite, and how many by the simulation alone? Begins no other after 40 minutes. MUTANTS: arguments of `python -m tests.mutants`.
test-mutants: $(VENV)/.ready
	$(PIP) install --editable ".[mutants]"
	$(BIN)/python -m tests.mutants $(MUTANTS)

# Attacks at full length, by real processes on real sockets and disks: at most ten minutes. One at a time.
test-attacks: $(VENV)/.ready
	$(BIN)/python -m pytest --durations=10 -m attacks tests/attacks

# The real vLLM and SGLang, each in an environment of its own (7 GB in all, built once, about two minutes each).
# ENGINE_TESTS: more arguments for pytest, e.g. to leave out the slowest.
test-engines: $(VENV)/.ready
	$(BIN)/python -m pytest -m engine_vllm $(ENGINE_TESTS)
	$(BIN)/python -m pytest -m engine_sglang $(ENGINE_TESTS)

# All that runs a real vLLM, TRL's tests too. ROLLOUTCTL_TEST_VLLM chooses the vLLM: docs/engines.md.
test-vllm: $(VENV)/.ready
	$(BIN)/python -m pytest -m "engine_vllm or trainer_trl" $(ENGINE_TESTS)

# What needs a GPU to be proven: at most ten minutes. GPU_PYTHON: an interpreter with a torch for CUDA and the extra `dev`, in
# place of .venv, whose torch is for the CPU unless TORCH or TORCH_BACKEND says otherwise.
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.ready)
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m pytest -m gpu -rs --durations=10 tests/gpu $(GPU_TESTS)

# Real engines under constant requests, a sync with in_flight="keep" every 10 s, MINUTES on each.
MINUTES ?= 10
test-soak: $(VENV)/.ready
	$(BIN)/python -m tests.engines.soak vllm --minutes $(MINUTES)
	$(BIN)/python -m tests.engines.soak sglang --minutes $(MINUTES)

# Real trainers, unmodified, each in an environment of its own. TRAINER_TESTS: more arguments for pytest.
test-trainers: $(VENV)/.ready
	$(BIN)/python -m pytest -m trainer_verl $(TRAINER_TESTS)
	$(BIN)/python -m pytest -m "trainer_trl or trainer_clients" $(TRAINER_TESTS)

# Timelines, read by Perfetto's trace processor (16 MB, downloaded once). Needs node.
test-perfetto: $(VENV)/.ready
	$(BIN)/python -m pytest -m timeline_perfetto

# The page of `rolloutctl report` in a headless Chromium from the distribution.
test-browser: $(VENV)/.ready
	@command -v chromium >/dev/null || { echo "no chromium here: apt-get install chromium" >&2; exit 1; }
	$(PIP) install --editable ".[browser]"
	$(BIN)/python -m pytest -m browser

# The package alone, without extras, for each Python in its classifiers that is here: installed, imported, logs replayed.
# Half a minute each.
test-pythons: $(VENV)/.ready
	$(BIN)/python -m tests.pythons

# docs/recipes, by the programs that check such files (180 MB).
test-recipes: $(VENV)/.ready
	$(PIP) install --editable ".[recipes]"
	$(BIN)/python -m pytest tests/processes/test_recipes.py

# Everything that the targets above install for themselves, in advance. Installs the browser only for root.
environments: $(VENV)/.ready
	command -v chromium > /dev/null || (apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium)
	$(BIN)/python -m tests.timeline.environment
	$(BIN)/python -m tests.environments vllm sglang router verl trl clients

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site in build/docs. A warning is an error, and nothing is fetched.
docs: $(VENV)/.docs-ready
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs build/docs

# All benchmarks, one after the other, on a machine that does nothing else: about 14 minutes. Then their figures go into
# docs/performance.md and README.md. One that fails leaves its old figures, and the others still run.
bench: $(VENV)/.bench-ready
	rm -f bench/*.json
	-timeout 400 $(BIN)/python -m bench.fanout --out bench/fanout.json
	-timeout 400 $(BIN)/python -m bench.speakers --out bench/speakers.json
	-timeout 400 $(BIN)/python -m bench.speakers --agents 64,1024 --blocks 3 --uploads --out bench/uploads.json
	-timeout 400 $(BIN)/python -m bench.trainer --out bench/trainer.json
	-timeout 400 $(BIN)/python -m bench.agents --out bench/agents.json
	-timeout 400 $(BIN)/python -m bench.join --agents 256,1024 --out bench/join.json
	-timeout 400 $(BIN)/python -m bench.machines --out bench/machines.json
	-timeout 400 $(BIN)/python -m bench.logs --commands 30000 --out bench/logs.json
	-timeout 400 $(BIN)/python -m bench.weights --out bench/weights.json
	-timeout 400 $(BIN)/python -m bench.checkpoints --out bench/checkpoints.json
	-timeout 600 $(BIN)/python -m bench.adapters --out bench/adapters.json
	$(BIN)/python -m bench.page

$(VENV)/.demo-ready: pyproject.toml
	@echo "Once: torch ($(TORCH); TORCH=... for another build) and some small packages, into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
ifneq ($(UV),)
	$(UV) pip install --python $(BIN)/python --torch-backend $(TORCH_BACKEND) "$(TORCH)"
else
ifeq ($(origin TORCH),file)
	@$(PIP) install --dry-run --report - "$(TORCH)" | $(BIN)/python -m tests.torch_build "$(TORCH)"
endif
	$(BIN)/python -m pip --disable-pip-version-check install "$(TORCH)"
endif
	$(PIP) install --editable ".[torch,speed]"
	touch $@

$(VENV)/.ready: $(VENV)/.demo-ready
	@echo "Once: what the tests need, with Ray and mypy, into $(VENV)"
	$(PIP) install --editable ".[dev]"
	touch $@

$(VENV)/.docs-ready: $(VENV)/.ready
	$(PIP) install --editable ".[docs]"
	touch $@

$(VENV)/.bench-ready: $(VENV)/.ready
	$(PIP) install --editable ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage build dist rolloutctl-demo
