# Two targets are for everybody: `make demo` and `make test`. Each sets up .venv first, and needs Python 3.11 or newer.
# CONTRIBUTING.md says which of the others to run when.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
# Exactly this version: an open range installs a build with several gigabytes of CUDA. Set TORCH to your own for a GPU.
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
# In parallel, one worker per core. PYTEST_XDIST_AUTO_NUM_WORKERS sets another number.
PYTEST := $(BIN)/python -m pytest --numprocesses=auto --dist=loadgroup --durations=10

.PHONY: demo demo-vllm test test-long test-attacks test-engines test-trainers test-perfetto test-browser environments lint docs bench clean

demo: $(VENV)/.ready
	$(BIN)/rolloutctl demo

# The real TRL trains on two real vLLM servers, on the CPU: 3 minutes. What it fetches first, once, it says.
demo-vllm: $(VENV)/.ready
	@set -e; vllm=$$($(BIN)/python -m tests.environments vllm); trl=$$($(BIN)/python -m tests.environments trl); \
	PYTHONPATH=. TRL_EXPERIMENTAL_SILENCE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $$trl -W ignore::FutureWarning \
	    docs/examples/grpo_vllm.py rolloutctl-demo/vllm-$$(date +%Y%m%d-%H%M%S) $$vllm

# COVERAGE="--cov --cov-report=term" also fails when less of the product is covered than pyproject.toml asks for.
test: $(VENV)/.ready
	$(PYTEST) $(COVERAGE)

# Simulations and searches at full length. `make test` has a short part of each.
test-long: $(VENV)/.ready
	$(PYTEST) -m long

# Attacks at full length, by real processes on real sockets and disks: at most ten minutes. One at a time.
test-attacks: $(VENV)/.ready
	$(BIN)/python -m pytest --durations=10 -m attacks

# The real vLLM and SGLang, each in an environment of its own (7 GB in all, built once, about two minutes each), and the
# source of other releases of both. ENGINE_TESTS: more arguments for pytest, e.g. to leave out the slowest.
test-engines: $(VENV)/.ready
	$(BIN)/python -m pytest -m engine_wheels $(ENGINE_TESTS)
	$(BIN)/python -m pytest -m engine_vllm $(ENGINE_TESTS)
	$(BIN)/python -m pytest -m engine_sglang $(ENGINE_TESTS)

# Real trainers, unmodified, each in an environment of its own. TRAINER_TESTS: more arguments for pytest.
test-trainers: $(VENV)/.ready
	$(BIN)/python -m pytest -m trainer_verl $(TRAINER_TESTS)
	$(BIN)/python -m pytest -m trainer_trl $(TRAINER_TESTS)

# Timelines, read by Perfetto's trace processor (16 MB, downloaded once). Needs node.
test-perfetto: $(VENV)/.ready
	$(BIN)/python -m pytest -m timeline_perfetto

# The page of `rolloutctl report` in a headless Chromium from the distribution.
test-browser: $(VENV)/.ready
	@command -v chromium >/dev/null || { echo "no chromium here: apt-get install chromium" >&2; exit 1; }
	$(PIP) install --editable ".[browser]"
	$(BIN)/python -m pytest -m browser

# Everything that the targets above install for themselves, in advance. Installs the browser only for root.
environments: $(VENV)/.ready
	command -v chromium > /dev/null || (apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium)
	$(BIN)/python -m tests.timeline.environment
	$(BIN)/python -m tests.environments vllm sglang router verl trl
	$(BIN)/python -m tests.engines.wheels

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site in build/docs. A warning is an error, and nothing is fetched.
docs: $(VENV)/.ready
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs build/docs

bench: $(VENV)/.bench-ready
	$(BIN)/python -m bench.fanout --out bench/fanout.json
	$(BIN)/python -m bench.machines --out bench/machines.json
	$(BIN)/python -m bench.join --out bench/join.json

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install "$(TORCH)"
	$(PIP) install --editable ".[torch,dev,docs,speed]"
	touch $@

$(VENV)/.bench-ready: $(VENV)/.ready
	$(PIP) install --editable ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage build dist rolloutctl-demo
