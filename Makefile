# Two targets are for everybody: `make demo` and `make test`. Both set up .venv first, from a Python 3.11 and nothing else.
# `make test-engines` is for those who change what speaks to an engine.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
# Exactly this one: an open range takes a build with several gigabytes of CUDA. Set TORCH to your own for a GPU.
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: demo test test-engines test-perfetto test-browser environments lint bench clean

demo: $(VENV)/.ready
	$(BIN)/rolloutctl demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest

# The real vLLM and SGLang, each in an environment of its own (7 GB in all, built once, about two minutes each), and the
# source of other releases of both. ENGINE_TESTS: more words for pytest, to leave out what takes long.
test-engines: $(VENV)/.ready
	$(BIN)/python -m pytest -m engine_wheels $(ENGINE_TESTS)
	$(BIN)/python -m pytest -m engine_vllm $(ENGINE_TESTS)
	$(BIN)/python -m pytest -m engine_sglang $(ENGINE_TESTS)

# Timelines, read by the trace processor of Perfetto (16 MB, downloaded once). Needs node.
test-perfetto: $(VENV)/.ready
	$(BIN)/python -m pytest -m timeline_perfetto

# All that the targets above install for themselves, at once: for CI, beside the suite. The browser only for root.
environments: $(VENV)/.ready
	command -v chromium > /dev/null || (apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium)
	$(BIN)/python -m tests.timeline.environment
	$(BIN)/python -m tests.engines.environments vllm sglang router
	$(BIN)/python -m tests.engines.wheels

# The page of `rolloutctl report` in a headless Chromium, which comes from the distribution.
test-browser: $(VENV)/.ready
	@command -v chromium >/dev/null || { echo "no chromium here: apt-get install chromium" >&2; exit 1; }
	$(PIP) install --editable ".[browser]"
	$(BIN)/python -m pytest -m browser

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench-ready
	$(BIN)/python -m bench.fanout --out bench/fanout.json
	$(BIN)/python -m bench.machines --out bench/machines.json

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install "$(TORCH)"
	$(PIP) install --editable ".[torch,dev,speed]"
	touch $@

$(VENV)/.bench-ready: $(VENV)/.ready
	$(PIP) install --editable ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage build dist rolloutctl-demo
