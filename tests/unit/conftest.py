"""Fixtures for tests of the agent's shell: a small bus, a small engine, and an agent between them."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from schemas.transport.sockets import Context
from tests.unit.small_bus import Bus, Engine, Run, running


@pytest.fixture
async def bus(context: Context) -> AsyncIterator[Bus]:
    bus = Bus(context)
    yield bus
    bus.close()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def run(bus: Bus, context: Context, engine: Engine, tmp_path: Path) -> Run:
    return partial(running, bus, context, engine, tmp_path)
