"""What keys rely on and what is around them: libzmq, addresses, secrets, memory, and our own processes."""

import logging
import resource
import socket
import struct
import sys
from pathlib import Path

import anyio
import pytest
import zmq
from click.testing import CliRunner
from msgspec.structs import replace

from controlplane import ControlPlane
from controlplane.bus.access import Access
from controlplane.bus.bus import Bus
from controlplane.bus.key_folder import KeyFolder
from controlplane.bus.operator import ask_status
from controlplane.cli.__main__ import cli
from controlplane.record.log import RunLog
from schemas.errors import AddressInUse, BusAddressError, KeyFileError, KeyRefused
from schemas.transport.keys import Credentials, KeyPair, environment_of_children, read_peer_keys
from schemas.transport.sockets import Context, agent_dealer, bus_router
from tests.attacks.keyed_bus import ANYWHERE, HERE, QUICK, agent_of, bus_of, live, reach, source
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


# --- what libzmq does, and the rest relies on -------------------------------------------------------------------------


async def gets_in(context: Context, address: str, pair: KeyPair, server: KeyPair) -> bool:
    async with agent_dealer(context, address, Credentials(pair, server.public)) as dealer:
        with anyio.move_on_after(1):
            return await dealer.refusal() is None
    return False


async def test_our_sockets_let_no_peer_in_while_there_is_no_handler(context: Context) -> None:
    pair = KeyPair.generate()
    async with bus_router(context, HERE, pair=pair) as router:
        assert not await gets_in(context, router.address, KeyPair.generate(), pair)


async def test_a_message_carries_the_key_of_its_sender_and_no_frame_can_say_otherwise(
    folder: KeyFolder, tmp_path: Path
) -> None:
    keys = read_peer_keys(folder.add("node", "agent", ("0",)))
    context: Context = zmq.Context()
    access = Access(folder)
    async with anyio.create_task_group() as tasks:
        handler = access.bind(context)
        tasks.start_soon(access.serve, handler)
        async with (
            bus_router(context, HERE, pair=access.pair) as router,
            agent_dealer(context, router.address, Credentials(keys.pair, keys.server)) as dealer,
        ):
            await dealer.send([b"x" * 40, b"forged"])
            with anyio.fail_after(20):
                key, _, *frames = await router.recv()
        tasks.cancel_scope.cancel()
    handler.close(0)
    context.destroy(0)
    assert key.decode() == keys.pair.public
    assert frames == [b"x" * 40, b"forged"]


# --- addresses, contexts and secrets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [ANYWHERE, "tcp://*:0", "tcp://[::]:0"])
async def test_beyond_loopback_needs_keys_or_a_warning_in_every_start_and_status(
    folder: KeyFolder, tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BusAddressError, match="without keys any program.*rolloutctl keys new"):
        async with bus_of(None, tmp_path, address):
            pass
    async with bus_of(folder, tmp_path, address) as bus:
        assert not bus.status().insecure
    assert "INSECURE" not in caplog.text
    for terminal in (False, True):
        caplog.clear()
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        async with bus_of(None, tmp_path, address, insecure=True) as bus:
            assert bus.status().insecure
            assert "INSECURE" in str(bus.status())
        (warning,) = (record.getMessage() for record in caplog.records if "INSECURE" in record.getMessage())
        assert warning.startswith("\x1b[1;31mINSECURE: every program that can reach" if terminal else "INSECURE: every")


async def test_two_buses_with_keys_live_in_one_process_and_share_no_key(folder: KeyFolder, tmp_path: Path) -> None:
    other = KeyFolder(tmp_path / "other")
    other.make_server()
    mine, theirs = (source(each.add("ops", "operator", ())) for each in (folder, other))
    (tmp_path / "b").mkdir()
    async with bus_of(folder, tmp_path, HERE) as first_bus, bus_of(other, tmp_path / "b", HERE) as second:
        assert (await ask_status(first_bus.address, keys=mine)).run == first_bus.state.run
        assert (await ask_status(second.address, keys=theirs)).run == second.state.run
        for bus, keys in ((first_bus, theirs), (second, mine)):
            with pytest.raises(KeyRefused):
                await ask_status(bus.address, keys=keys)
    context: Context = zmq.Context()
    async with bus_of(folder, tmp_path, HERE, context=context):
        with pytest.raises(KeyFileError, match="a context of its own"):
            async with bus_of(other, tmp_path / "b", HERE, context=context):
                pass
    context.destroy(0)


async def test_a_bus_with_keys_whose_address_is_in_use_does_not_open_and_leaves_nothing_behind(
    folder: KeyFolder, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    async with bus_of(folder, tmp_path, HERE) as bus:
        with pytest.raises(AddressInUse):
            async with bus_of(folder, tmp_path / "b", bus.address):
                pass
        keys = source(folder.add("ops", "operator", ()))
        await until(lambda: bus._access is not None and len(bus._access._list.grants) == 1)
        assert (await ask_status(bus.address, keys=keys)).run == bus.state.run
    async with bus_of(folder, tmp_path / "b", bus.address) as second:
        assert (await ask_status(second.address, keys=keys)).run == second.state.run


def test_a_control_plane_refuses_a_key_that_others_can_read(folder: KeyFolder, tmp_path: Path) -> None:
    (folder.path / "server.key").chmod(0o644)
    with (
        pytest.raises(KeyFileError, match="others can use it"),
        ControlPlane(ANYWHERE, log=tmp_path / "run.db", keys=folder.path),
    ):
        pass


def left_on_disk(root: Path, but: Path) -> list[str]:
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_relative_to(but)]
    return [path.read_bytes().decode("latin-1") for path in files]


async def test_no_secret_is_in_a_log_an_error_or_the_runs_log(
    folder: KeyFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    issued = folder.add("node", "agent", ("0",))
    async with bus_of(folder, tmp_path) as bus, agent_of(reach(bus), issued, tmp_path / "state") as (agent, ended):
        await until(lambda: live(bus) == ["0.0"])
        folder.revoke("node")
        await until(lambda: bool(ended))
        shown = [repr(bus), repr(agent), repr(vars(agent)), repr(ended), caplog.text]
    secrets = [folder.server_pair().secret]
    shown += left_on_disk(tmp_path, folder.path)
    assert not [text for text in shown for secret in secrets if secret in text]


# --- strangers before their handshake ---------------------------------------------------------------------------------

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00"


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"CURVE", b"\xff" * 20])
@pytest.mark.parametrize("mebibytes", [1, pytest.param(256, marks=pytest.mark.attacks)])
async def test_a_peer_without_a_key_is_hung_up_on_before_it_can_fill_any_memory(
    context: Context, folder: KeyFolder, tmp_path: Path, mechanism: bytes, mebibytes: int
) -> None:
    """Without keys, one connection that sends frames without end costs as much memory as it sends."""
    frame = b"\x03" + struct.pack(">Q", 60_000) + b"x" * 60_000  # large, and more follow
    keys = source(folder.add("ops", "operator", ()))
    async with bus_of(folder, tmp_path) as bus:
        host, _, port = reach(bus).removeprefix("tcp://").partition(":")
        before = resident()
        async with await anyio.connect_tcp(host, int(port)) as raw:
            await raw.send(GREETING + mechanism.ljust(20, b"\0") + b"\0" + bytes(31))
            with anyio.fail_after(60), pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
                for _ in range(mebibytes * 16):
                    await raw.send(frame)
                while True:
                    await raw.receive()
        assert resident() - before < 64 << 20
        assert (await ask_status(reach(bus), keys=keys)).agents == ()


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [["status"], ["pause"], ["retire", "0"], ["agent", "--engine", "tiny", "--replica", "0"]],
    ids=lambda words: words[0],
)
def test_no_command_uses_a_key_that_others_can_read(
    folder: KeyFolder, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = folder.add("node", "agent", ("0",))
    node.chmod(0o644)
    monkeypatch.setenv("ROLLOUTCTL_KEY_FILE", str(node))
    result = CliRunner().invoke(cli, [*command, "--bus", HERE])
    assert isinstance(result.exception, KeyFileError)
    assert "others can use it (mode 0644)" in str(result.exception)


def test_programs_that_an_agent_starts_do_not_get_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUTCTL_KEY", KeyPair.generate().secret)
    monkeypatch.setenv("ROLLOUTCTL_SERVER_KEY", KeyPair.generate().public)
    assert "ROLLOUTCTL_KEY" not in environment_of_children()
    assert "ROLLOUTCTL_SERVER_KEY" in environment_of_children()


async def test_the_publish_port_is_the_one_that_was_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = replace(QUICK, publish_port=port)
    async with (
        Bus(HERE, RunLog.open(tmp_path / "run.db"), config) as bus,
        agent_of(bus.address, None, tmp_path / "state") as (_, ended),
    ):
        await until(lambda: live(bus) == ["0.0"])
        assert bus.publisher.address.endswith(f":{port}")
        assert bus.state.settings.publish_port == port
        assert not ended
