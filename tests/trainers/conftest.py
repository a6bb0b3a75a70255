"""Fleets behind a gateway, with servers that stand in for their engines; and Ray clusters for recipes of the pages."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.engines.http_servers import HttpServer
from tests.running import ROOT
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


class RayWith(Protocol):
    """Opens a Ray cluster whose workers can import a stand-in of a trainer's module, beside what is in the folder."""

    def __call__(self, module: str, text: str, **runtime_env: Any) -> AbstractContextManager[None]: ...


@pytest.fixture
def ray_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayWith:
    """For recipes that read ROLLOUTCTL_FOLDER, which is the test's own folder."""
    import ray

    @contextmanager
    def cluster(module: str, text: str, **runtime_env: Any) -> Iterator[None]:
        *packages, _ = names = module.split(".")
        for depth in range(1, len(packages) + 1):
            tmp_path.joinpath(*packages[:depth]).mkdir()
            tmp_path.joinpath(*packages[:depth], "__init__.py").touch()
        tmp_path.joinpath(*names).with_suffix(".py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
        monkeypatch.setenv("ROLLOUTCTL_FOLDER", str(tmp_path))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.syspath_prepend(tmp_path)
        before = {*sys.modules}
        options: dict[str, Any] = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 100_000_000}
        ray.init("local", runtime_env=runtime_env, log_to_driver=False, **options)
        try:
            yield
        finally:
            ray.shutdown()
            for name in {*sys.modules} - before:
                if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
                    del sys.modules[name]

    return cluster
