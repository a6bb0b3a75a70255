"""A file that names the bus: written by the trainer, read by agents and operators, again when the bus is gone."""

import socket
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from controlplane import BusConfig, ControlPlane
from controlplane.bus.key_folder import KeyFolder
from controlplane.bus.operator import ask_status
from schemas.errors import BusAddressError, BusUnreachable
from schemas.transport.addresses import NOWHERE, read_address, write_address
from tests.attacks.keyed_bus import agent_of, bus_of, reach
from tests.timeline.real_run import PLACES, QUICK, agents
from tests.waiting import until, wait_until
from workers.state_folder import state_folder

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


def test_a_file_names_the_host_of_a_bus_that_listens_everywhere(tmp_path: Path) -> None:
    for anywhere in ("0.0.0.0", "*", "[::]"):
        write_address(tmp_path / "bus", f"tcp://{anywhere}:5555")
        assert read_address(str(tmp_path / "bus")) == f"tcp://{socket.gethostname()}:5555"
    assert [path.name for path in tmp_path.iterdir()] == ["bus"]
    with pytest.raises(BusAddressError, match="for the address of the bus: No such file"):
        write_address(tmp_path / "none" / "bus", "tcp://a:1")


def test_an_address_is_no_file_and_a_missing_file_is_no_address(tmp_path: Path) -> None:
    assert read_address("tcp://trainer:5555") == "tcp://trainer:5555"
    assert read_address("localhost:5555") == "localhost:5555"  # and refused where it is dialled
    assert read_address(str(tmp_path / "bus")) == NOWHERE
    (tmp_path / "bus").write_bytes(b"\xff\n")
    assert read_address(str(tmp_path / "bus")) == NOWHERE


def test_agents_of_one_file_remember_under_its_path_wherever_the_bus_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    assert state_folder("./bus") == state_folder(str(tmp_path / "bus"))


async def test_an_operator_is_told_that_the_file_names_no_bus(tmp_path: Path) -> None:
    with pytest.raises(BusUnreachable, match="bus names no bus: is the trainer running"):
        await ask_status(str(tmp_path / "bus"))


def test_agents_that_start_before_their_bus_find_it_by_the_file_and_so_they_do_when_it_moves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.link.connection.FIRST_WARNING_S", 0.1)
    config = BusConfig(
        heartbeat_ms=QUICK.heartbeat_ms, agent_timeout_ms=QUICK.agent_timeout_ms, address_file=str(tmp_path / "bus")
    )

    def plane(name: str) -> ControlPlane:
        return ControlPlane("tcp://127.0.0.1:0", log=tmp_path / name, run="r", config=config)

    with agents(str(tmp_path / "bus"), tmp_path):
        wait_until(lambda: "names no bus yet" in caplog.text, 20)
        for _ in range(2):  # each life listens on another port
            with plane("run.db") as bus:
                bus.wait_for_agents(len(PLACES), timeout=60).wait()
                assert read_address(str(tmp_path / "bus")) == bus.address


async def test_an_agent_that_is_refused_where_its_bus_was_follows_the_file(
    tmp_path: Path, folder: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits, before it dials again where it was refused, when the file names another bus."""
    monkeypatch.setattr("workers.link.connection.REREAD_S", 0.05)
    monkeypatch.setattr("workers.link.connection.jittered_s", lambda *_: 0.5)
    key = folder.add("fleet", "agent", ())
    hung_up = anyio.Event()

    async def hang_up(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
        hung_up.set()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, hang_up)
        write_address(tmp_path / "bus", f"tcp://127.0.0.1:{listener.extra(SocketAttribute.local_port)}")
        async with bus_of(folder, tmp_path) as bus, agent_of(str(tmp_path / "bus"), key, tmp_path) as (_, errors):
            await hung_up.wait()
            write_address(tmp_path / "bus", reach(bus))
            await until(lambda: bool(errors or bus.state.members), 20)
            await anyio.sleep(1)
            assert not errors and bus.state.members["0.0"].state == "live"
        tasks.cancel_scope.cancel()
