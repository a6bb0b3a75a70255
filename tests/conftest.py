"""Fixtures for every test."""

import gc
import os
import signal
import threading
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq
from hypothesis import settings

from controlplane.bus.key_folder import KeyFolder
from schemas.transport.sockets import Context
from tests import reaper

settings.register_profile("untimed", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("untimed")

LOOPS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
]


def pytest_configure(config: pytest.Config) -> None:
    """Processes that this run starts end with it. Several workers share the cores, so torch takes one in each.

    Started in the background of a script, a run ignores Ctrl-C, and so would all that it starts and interrupts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.add_cleanup(partial(reaper.finish, reaper.start()))
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage in what is imported and collected: it stays, and each look takes long."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each async test on every loop that the shells run on, or on asyncio alone if it is marked `one_loop`.

    `every_loop` is for a test that depends on the loop, in a module that is marked `one_loop`.
    """
    if "anyio_backend" not in metafunc.fixturenames:
        return
    if any("anyio_backend" in marker.args[0] for marker in metafunc.definition.iter_markers("parametrize")):
        return
    closest = metafunc.definition.get_closest_marker
    loops = LOOPS[:1] if closest("one_loop") and not closest("every_loop") else LOOPS
    metafunc.parametrize("anyio_backend", loops, indirect=True)


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """The loop that a test runs on, with its options."""
    backend: tuple[str, dict[str, object]] = request.param
    return backend


@pytest.fixture(scope="session")
def closing() -> Iterator[list[threading.Thread]]:
    """Threads that close the contexts of tests which have ended. Each must come to its end."""
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads), "a ZeroMQ context can't be closed"


@pytest.fixture
def context(closing: list[threading.Thread]) -> Iterator[Context]:
    """A ZeroMQ context whose sockets all close with the test.

    A closed socket still delivers for two seconds if its peer is gone. That is the product's choice and stays so in
    tests, but the next test does not wait for it.
    """
    context: Context = zmq.Context()
    yield context
    closing.append(threading.Thread(target=context.destroy, kwargs={"linger": 0}))
    closing[-1].start()


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLOUTCTL_KEY", "ROLLOUTCTL_KEY_FILE", "ROLLOUTCTL_SERVER_KEY", "ROLLOUTCTL_KEYS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    """The keys of a bus, with its own."""
    folder = KeyFolder(tmp_path / "keys")
    folder.make_server()
    return folder
