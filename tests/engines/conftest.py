"""What is slow to set up is shared by all tests of a run: fleets of real engines, and the sources of releases."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.engines import wheels
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


@pytest.fixture(scope="session")
def fetched_wheels() -> None:
    """Fetch all wheels, several at a time: one by one they take minutes."""
    wheels.fetch_all()
