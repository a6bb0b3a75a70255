"""Fixtures for every test."""

from collections.abc import Iterator

import pytest
import zmq
from hypothesis import settings

from schemas.carriers.sockets import Context

settings.register_profile("untimed", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("untimed")

LOOPS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each async test on every loop that the shells run on, or on asyncio alone if it is marked `one_loop`."""
    if "anyio_backend" not in metafunc.fixturenames:
        return
    if any("anyio_backend" in marker.args[0] for marker in metafunc.definition.iter_markers("parametrize")):
        return
    loops = LOOPS[:1] if metafunc.definition.get_closest_marker("one_loop") else LOOPS
    metafunc.parametrize("anyio_backend", loops, indirect=True)


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """The loop that a test runs on, with its options."""
    backend: tuple[str, dict[str, object]] = request.param
    return backend


@pytest.fixture
def context() -> Iterator[Context]:
    """A ZeroMQ context whose sockets all close with the test."""
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)
