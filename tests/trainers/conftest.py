"""Fleets behind a gateway, with servers that stand in for their engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.http_servers import HttpServer
from tests.trainers.gateway_fleet import GatewayFleet, engine, gateway_fleet


@pytest.fixture
def servers() -> Iterator[list[HttpServer]]:
    with HttpServer(engine) as first, HttpServer(engine) as second:
        yield [first, second]


@pytest.fixture
def fleet(tmp_path: Path, servers: list[HttpServer]) -> Iterator[GatewayFleet]:
    """With a path for each replica."""
    with gateway_fleet(tmp_path, engines=[server.url for server in servers]) as made:
        yield made


@pytest.fixture
def ports(tmp_path: Path, servers: list[HttpServer]) -> Iterator[GatewayFleet]:
    """With a port for each replica."""
    with gateway_fleet(tmp_path, engines=[server.url for server in servers], ports=True) as made:
        yield made
