"""Fixtures for tests of the agent's shell: a small bus, a small engine, and an agent between them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from schemas.identity import Identity
from schemas.transport.sockets import Context
from tests.unit.small_bus import PRIMARY, Bus, Engine, Run, reaches, running
from workers.agent import Agent


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


@pytest.fixture
def joined(bus: Bus, run: Run) -> Run:
    """Runs an agent that has joined the bus and seen its engine."""

    @asynccontextmanager
    async def join(identity: Identity = PRIMARY) -> AsyncIterator[Agent]:
        async with run(identity) as agent:
            await bus.admit()
            await reaches(agent, lambda state: state.joined and state.engine.tokenizer != "unknown")
            yield agent

    return join
