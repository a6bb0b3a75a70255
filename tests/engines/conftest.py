"""Fleets of real engines, shared by all tests of a run: they are slow to set up."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.engines.sglang_fleet import SGLangFleet
from tests.engines.vllm_fleet import VLLMFleet


@pytest.fixture(scope="session")
def vllm_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMFleet]:
    with ExitStack() as open_:
        yield VLLMFleet(tmp_path_factory.mktemp("vllm"), open_)


@pytest.fixture(scope="session")
def sglang_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangFleet]:
    with ExitStack() as open_:
        yield SGLangFleet(tmp_path_factory.mktemp("sglang"), open_)
