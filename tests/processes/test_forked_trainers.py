"""Children of a trainer, such as the workers of a data loader, hold none of its sockets and can't use its bus."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controlplane import ControlPlane
from controlplane.metrics import BusCollector
from schemas.errors import AddressInUse
from schemas.transport.exposition import serve_metrics
from tests.running import started

OUTLIVES = """
import os, signal, sys
from pathlib import Path
from controlplane import ControlPlane
plane = ControlPlane("tcp://127.0.0.1:0", log=sys.argv[1])
plane.open()
places = serve(plane)
reader, writer = os.pipe()
if (child := os.fork()) == 0:
    os.setsid()
    os.write(writer, b"forked")
    signal.pause()
os.read(reader, 6)  # until then it holds what its parent holds
print(child, *places, flush=True)
signal.pause()
"""
NOTHING_ELSE = """
def serve(plane):
    return [plane.address]
"""
METRICS = """
def serve(plane):
    from controlplane.metrics import BusCollector
    from schemas.transport.exposition import serve_metrics
    return [serve_metrics(BusCollector(plane), "0")[0]]
"""
GATEWAY = """
def serve(plane):
    from controlplane.trainers.gateway.service import Gateway
    gateway = Gateway(plane, replicas=1, checkpoints=Path(sys.argv[1]).parent, ports=True)
    return [url.rpartition(":")[2] for url in (gateway.url, gateway.base_urls()[0])]
"""
REOPENS = """
import os, signal, sys
from controlplane import ControlPlane
from schemas.config import BusConfig
plane = ControlPlane("tcp://127.0.0.1:0", log=sys.argv[1])
plane.open()
address, port = plane.address, int(plane.bus.publisher.address.rpartition(":")[2])
reader, writer = os.pipe()
if (child := os.fork()) == 0:
    os.write(writer, b"forked")
    signal.pause()
os.read(reader, 6)
plane.close()
with ControlPlane(address, log=sys.argv[1], config=BusConfig(publish_port=port)):
    print("open again", flush=True)
os.kill(child, signal.SIGKILL)
"""
CHILD_ASKS = """
import asyncio, os, signal, sys
from controlplane import ControlPlane
async def waits():
    await ticket
with ControlPlane("tcp://127.0.0.1:0", log=sys.argv[1]) as plane:
    ticket, ended = plane.wait_for_agents(1), plane.pause(timeout=1)
    ended.wait()
    if os.fork() == 0:
        for ask in (
            plane.status, lambda: plane.wait_for_agents(1).wait(), plane.serving, plane.pause, ticket.wait,
            lambda: ticket.wait(60), lambda: asyncio.run(waits()),
        ):
            try:
                ask()
            except Exception as error:
                print(type(error).__name__, "does not survive a fork" in str(error), flush=True)
        plane.close()
        print("closed", ended.wait().acted, flush=True)
        sys.exit()
    os.wait()
    print(plane.status().run != "", flush=True)
"""


@contextmanager
def killed(serve: str, log: Path) -> Iterator[list[str]]:
    """A trainer that was killed, and what its child inherited, which lives on meanwhile: where it served."""
    with started("-c", serve + OUTLIVES, log) as trainer:
        assert trainer.stdout is not None
        child, *places = trainer.stdout.readline().split()
        try:
            trainer.send_signal(signal.SIGKILL)
            trainer.wait(60)
            yield places
            os.kill(int(child), 0)
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_trainer_restarts_beside_the_children_of_the_one_that_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    with killed(NOTHING_ELSE, log) as (address,), ControlPlane(address, log=log) as plane:
        assert plane.address == address


def test_the_port_of_its_metrics_is_free_again_too(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    with killed(METRICS, log) as (served,), ControlPlane("tcp://127.0.0.1:0", log=log) as plane:
        again, end = serve_metrics(BusCollector(plane), served.split(":")[2].removesuffix("/metrics"))
        end()
        assert again == served


def test_the_ports_of_its_gateway_are_free_again_too(tmp_path: Path) -> None:
    with killed(GATEWAY, tmp_path / "run.db") as ports:
        assert len(ports) == 2
        for port in map(int, ports):
            with socket.create_server(("127.0.0.1", port)):
                pass


def test_a_bus_is_opened_again_beside_children_that_live_on(tmp_path: Path) -> None:
    with started("-c", REOPENS, tmp_path / "run.db") as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "open again\n"
        assert trainer.wait(60) == 0


def test_a_child_that_asks_the_bus_of_its_parent_gets_an_error_at_once(tmp_path: Path) -> None:
    with started("-c", CHILD_ASKS, tmp_path / "run.db") as trainer:
        assert trainer.stdout is not None
        assert [trainer.stdout.readline() for _ in range(9)] == ["BusError True\n"] * 7 + ["closed ()\n", "True\n"]
        assert trainer.wait(60) == 0


def test_an_address_in_use_names_the_process_that_listens_there(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with (
            pytest.raises(AddressInUse, match=f"in use, by process {os.getpid()} "),
            ControlPlane(address, log=tmp_path / "run.db"),
        ):
            pass


def test_a_fork_keeps_the_sockets_that_are_not_of_a_bus(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with socket.socket() as other, ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db"):
        other.bind(("127.0.0.1", 0))
        other.listen()
        if (child := os.fork()) == 0:
            listens = other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            theirs.send(b"yes" if listens else b"no")
            os._exit(0)
        assert ours.recv(3) == b"yes"
        os.waitpid(child, 0)
    ours.close()
    theirs.close()
