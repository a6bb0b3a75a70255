"""Attacks on a bus with keys: peers without a key, with a wrong one or a revoked one, and keys that claim too much.

Real sockets throughout. The first part pins what libzmq does, since the rest relies on it.
"""

import logging
import re
import resource
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import zmq
from click.testing import CliRunner
from msgspec.structs import replace

from controlplane import ControlPlane
from controlplane.bus.access import ZAP_ADDRESS, Access
from controlplane.bus.bus import Bus
from controlplane.bus.key_folder import KeyFolder
from controlplane.bus.operator import ask_status, submit
from controlplane.cli.__main__ import cli
from controlplane.record.log import RunLog
from schemas import wire
from schemas.carriers.handshakes import DialledSocket
from schemas.carriers.keys import (
    Credentials,
    KeyPair,
    KeySource,
    PeerKeys,
    environment_of_children,
    read_peer_keys,
    write_private,
)
from schemas.carriers.sockets import Context, agent_dealer, agent_subscriber, bus_router
from schemas.commands import EngineCommand, Target
from schemas.config import AgentConfig, BusConfig
from schemas.errors import BusAddressError, CommandError, IdentityTaken, KeyFileError, KeyRefused
from schemas.identity import Identity
from tests.running import rolloutctl, started
from tests.unit.small_bus import Engine
from tests.waiting import until, wait_until
from workers.agent import Agent

pytestmark = pytest.mark.anyio

ANYWHERE = "tcp://0.0.0.0:0"
HERE = "tcp://127.0.0.1:0"
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=100, agent_timeout_ms=2_000, retransmit_ms=200)
HASTY = AgentConfig(hello_retry_ms=20, observe_ms=50)
FLUSH = EngineCommand(operation="flush")
NOBODY = "it does not know it, or it was revoked"


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.make_server()
    return folder


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLOUTCTL_KEY", "ROLLOUTCTL_KEY_FILE", "ROLLOUTCTL_SERVER_KEY", "ROLLOUTCTL_KEYS"):
        monkeypatch.delenv(name, raising=False)


@asynccontextmanager
async def bus_of(folder: KeyFolder | None, log: Path, address: str = ANYWHERE, **options: Any) -> AsyncIterator[Bus]:
    async with Bus(address, RunLog.open(log / "run.db"), QUICK, keys=folder, **options) as bus:
        yield bus


def reach(bus: Bus) -> str:
    """The address of a bus on 0.0.0.0, as a peer dials it."""
    return bus.address.replace("0.0.0.0", "127.0.0.1")


def stranger(folder: KeyFolder) -> PeerKeys:
    """Well-made keys that nobody allowed."""
    return PeerKeys(name="stranger", pair=KeyPair.generate(), servers=folder.servers())


def source(keys: PeerKeys | Path | None) -> KeySource | None:
    return KeySource.find(keys) if keys is not None else None


async def first(dealer: DialledSocket) -> str:
    """Why the first handshake failed; empty if it did not."""
    with anyio.fail_after(20):
        refused = await dealer.refusal()
    return refused.reason if refused is not None else ""


@asynccontextmanager
async def agent_of(
    bus: str, keys: PeerKeys | Path | None, state: Path, replica: int = 0, engine: Engine | None = None
) -> AsyncIterator[tuple[Agent, list[BaseException]]]:
    """An agent at work, and the errors that ended it."""
    ended: list[BaseException] = []

    async def run(agent: Agent) -> None:
        try:
            await agent.run()
        except Exception as error:
            ended.append(error)

    identity = Identity(replica=replica, node_rank=0)
    async with (
        Agent(bus=bus, identity=identity, engine=engine or Engine(), state_dir=state, config=HASTY, keys=keys) as agent,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(run, agent)
        yield agent, ended
        tasks.cancel_scope.cancel()


def live(bus: Bus) -> list[str]:
    return sorted(name for name, member in bus.state.members.items() if member.state == "live")


# --- what libzmq does, and the rest relies on -------------------------------------------------------------------------


@contextmanager
def handler_that(answers: Callable[[bytes], bytes], context: Context) -> Iterator[None]:
    """A handler in a thread, as pyzmq has them, that answers for each key and dies when `answers` raises."""
    sock = context.socket(zmq.REP)
    sock.bind(ZAP_ADDRESS)

    def serve() -> None:
        while True:
            try:
                _, request, *_, key = sock.recv_multipart()
                sock.send_multipart([b"1.0", request, answers(key), b"", b"", b""])
            except Exception:
                sock.close(0)
                return

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    if thread.is_alive():
        with context.socket(zmq.REQ) as end:  # a message that it can't read ends it
            end.connect(ZAP_ADDRESS)
            end.send(b"end")
            thread.join(10)
    assert not thread.is_alive()


def guarded(context: Context, pair: KeyPair, **options: Any) -> tuple["zmq.Socket[bytes]", str]:
    """A plain CURVE server."""
    sock = context.socket(zmq.ROUTER)
    sock.set(zmq.LINGER, 0)
    sock.set(zmq.CURVE_SERVER, 1)
    sock.set(zmq.CURVE_SECRETKEY, pair.secret.encode())
    for name, value in options.items():
        sock.set(getattr(zmq, name), value)
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    return sock, f"tcp://127.0.0.1:{port}"


async def gets_in(context: Context, address: str, pair: KeyPair, server: KeyPair) -> bool:
    async with agent_dealer(context, address, Credentials(pair, server.public)) as dealer:
        with anyio.move_on_after(1):
            return await dealer.refusal() is None
    return False


@pytest.mark.one_loop
async def test_a_curve_server_without_a_handler_lets_any_key_in_unless_it_enforces_its_domain(context: Context) -> None:
    pair = KeyPair.generate()
    server, address = guarded(context, pair)
    with server:
        assert await gets_in(context, address, KeyPair.generate(), pair)
    server, address = guarded(context, pair, ZAP_DOMAIN=b"x", ZAP_ENFORCE_DOMAIN=1)
    with server:
        assert not await gets_in(context, address, KeyPair.generate(), pair)


@pytest.mark.one_loop
async def test_our_sockets_let_nobody_in_while_there_is_no_handler(context: Context) -> None:
    pair = KeyPair.generate()
    async with bus_router(context, HERE, pair=pair) as router:
        assert not await gets_in(context, router.address, KeyPair.generate(), pair)


@pytest.mark.one_loop
async def test_a_handler_in_a_thread_that_dies_of_an_exception_shuts_everybody_out(context: Context) -> None:
    """Why ours is not pyzmq's: one credential that its callback can't stand, and no peer joins any more."""
    pair, good, bad = KeyPair.generate(), KeyPair.generate(), KeyPair.generate()
    raw = zmq.utils.z85.decode(bad.public.encode())

    def answers(key: bytes) -> bytes:
        if key == raw:
            raise LookupError("a callback that raises")
        return b"200"

    with handler_that(answers, context):
        server, address = guarded(context, pair, ZAP_DOMAIN=b"x", ZAP_ENFORCE_DOMAIN=1)
        with server:
            assert await gets_in(context, address, good, pair)
            assert not await gets_in(context, address, bad, pair)
            assert not await gets_in(context, address, good, pair)


@pytest.mark.one_loop
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
            agent_dealer(context, router.address, Credentials(keys.pair, keys.servers[0])) as dealer,
        ):
            await dealer.send([b"x" * 40, b"forged"])
            with anyio.fail_after(20):
                key, _, *frames = await router.recv()
        tasks.cancel_scope.cancel()
    handler.close(0)
    context.destroy(0)
    assert key.decode() == keys.pair.public
    assert frames == [b"x" * 40, b"forged"]


# --- who comes in -----------------------------------------------------------------------------------------------------


async def test_only_a_key_of_the_folder_comes_in_and_everybody_else_learns_why_not(
    context: Context, folder: KeyFolder, tmp_path: Path
) -> None:
    good = read_peer_keys(folder.add("node", "agent", ("0",)))
    async with bus_of(folder, tmp_path) as bus:
        for pair, server, says in (
            (good.pair, good.servers[0], ""),
            (KeyPair.generate(), good.servers[0], NOBODY),
            (good.pair, KeyPair.generate().public, "another key than this side was given"),
        ):
            async with agent_dealer(context, reach(bus), Credentials(pair, server)) as dealer:
                assert says in await first(dealer)
        async with agent_dealer(context, reach(bus)) as dealer:
            assert "lets nobody in without a key" in await first(dealer)
    async with (
        bus_of(None, tmp_path, HERE) as plain,
        agent_dealer(context, plain.address, Credentials(good.pair, good.servers[0])) as dealer,
    ):
        said = await first(dealer)
        assert "has no keys" in said or "another key than this side was given for it, or none" in said


@pytest.mark.one_loop
async def test_a_subscriber_without_an_allowed_key_hears_nothing(
    context: Context, folder: KeyFolder, tmp_path: Path
) -> None:
    good = read_peer_keys(folder.add("node", "observer", ()))
    async with bus_of(folder, tmp_path) as bus:
        address = f"tcp://127.0.0.1:{bus._publisher.address.rpartition(':')[2]}"
        unknown = Credentials(stranger(folder).pair, good.servers[0])
        async with (
            agent_subscriber(context, address, [wire.TOPIC_HEAD]) as plain,
            agent_subscriber(context, address, [wire.TOPIC_HEAD], unknown) as refused,
            agent_subscriber(context, address, [wire.TOPIC_HEAD], Credentials(good.pair, good.servers[0])) as allowed,
        ):
            with anyio.fail_after(20):
                for _ in range(10):  # heads
                    await allowed.recv()
            assert plain.recv_nowait() is None
            assert refused.recv_nowait() is None


@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=pytest.mark.attacks)])
@pytest.mark.one_loop
async def test_no_bytes_and_no_folder_end_the_handler(
    context: Context, folder: KeyFolder, tmp_path: Path, rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers that break off, records that can't be read, a folder that goes: those who are allowed still come in."""
    good = read_peer_keys(folder.add("node", "observer", ()))
    keys = Credentials(good.pair, good.servers[0])
    async with bus_of(folder, tmp_path) as bus:
        host, _, port = reach(bus).removeprefix("tcp://").partition(":")
        for number in range(rounds):
            async with await anyio.connect_tcp(host, int(port)) as raw:
                await raw.send(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE" + struct.pack("33x") + b"\xff" * 300)
            async with agent_dealer(context, reach(bus), Credentials(KeyPair.generate(), good.servers[0])) as dealer:
                assert NOBODY in await first(dealer)
            (folder.path / "allowed" / f"bad{number}.json").write_bytes(b"\xff" * 1000)
            async with agent_dealer(context, reach(bus), keys) as dealer:
                assert await first(dealer) == ""
        (folder.path / "allowed").rename(tmp_path / "gone")
        (folder.path / "allowed").write_text("not a folder")
        await until(lambda: "can't be read again" in caplog.text)
        async with agent_dealer(context, reach(bus), keys) as dealer:
            assert await first(dealer) == ""


# --- what a key may claim ---------------------------------------------------------------------------------------------


async def test_a_role_may_do_what_it_is_for_and_nothing_else(folder: KeyFolder, tmp_path: Path) -> None:
    keys = {role: source(folder.add(role, role, ())) for role in ("agent", "operator", "observer")}
    async with bus_of(folder, tmp_path) as bus:
        where = reach(bus)
        for role in ("operator", "observer"):
            assert (await ask_status(where, keys=keys[role])).insecure is False
        assert (await submit(where, FLUSH, Target(), 5, keys["operator"])).seq > 0
        published = bus.state.seq
        for role, ask in (
            ("observer", partial(submit, where, FLUSH, Target(), 5)),
            ("agent", partial(submit, where, FLUSH, Target(), 5)),
        ):
            with pytest.raises(CommandError, match=f"key {role} is for {role}s, and may not publish commands"):
                await ask(keys=keys[role])
        with pytest.raises(CommandError, match="key agent is for agents, and may not read the status"):
            await ask_status(where, keys=keys["agent"])
        for unknown, says in ((source(stranger(folder)), NOBODY), (None, "lets nobody in without a key")):
            with pytest.raises(KeyRefused, match=says):
                await ask_status(where, keys=unknown)
        assert bus.state.seq == published


@pytest.mark.parametrize("role", ["operator", "observer"])
async def test_who_is_no_agent_joins_no_fleet(folder: KeyFolder, tmp_path: Path, role: Any) -> None:
    keys = folder.add("ops", role, ())
    async with bus_of(folder, tmp_path) as bus, agent_of(reach(bus), keys, tmp_path / "state") as (_, ended):
        await until(lambda: bool(ended))
        assert isinstance(ended[0], IdentityTaken)
        assert f"key ops is for {role}s, and may not join the fleet" in str(ended[0])
        assert bus.state.members == {}


async def test_an_agent_takes_no_other_place_than_its_own(folder: KeyFolder, tmp_path: Path) -> None:
    keys = folder.add("node-0", "agent", ("0",))
    async with bus_of(folder, tmp_path) as bus:
        async with agent_of(reach(bus), keys, tmp_path / "state", replica=1) as (_, ended):
            await until(lambda: bool(ended))
        assert "key node-0 is for 0, and may not be agent 1.0" in str(ended[0])
        assert bus.state.members == {}
        async with agent_of(reach(bus), keys, tmp_path / "state", replica=0) as (_, ended):
            await until(lambda: live(bus) == ["0.0"])
            assert (await bus.publish(FLUSH, Target(), 5_000)).acted
        assert not ended


@pytest.mark.one_loop
async def test_a_connection_of_one_agent_can_speak_for_no_other(
    context: Context, folder: KeyFolder, tmp_path: Path
) -> None:
    """The victim 0.0 is live. An agent with a key for 1 says goodbye, hello and answers in its name."""
    victim, thief = (folder.add(f"node-{place}", "agent", (place,)) for place in ("0", "1"))
    async with (
        bus_of(folder, tmp_path) as bus,
        agent_of(reach(bus), victim, tmp_path / "state") as (agent, ended),
    ):
        await until(lambda: live(bus) == ["0.0"])
        stolen = bus.state.members["0.0"].hello
        own = source(thief)
        assert own is not None
        async with agent_dealer(context, reach(bus), own.credentials()) as dealer:
            for message in (stolen, wire.Goodbye(), wire.Join(), stolen):
                await dealer.send([wire.encode_header(bus.state.epoch), wire.encode(message)])
            says = ""
            with anyio.fail_after(20):
                while "may not be agent 0.0" not in says:
                    reply = wire.decode_downward(wire.parse_frames(await dealer.recv())[1])
                    assert isinstance(reply, wire.Rejoin)
                    says = reply.reason if reply.give_up else ""
        assert (await bus.publish(FLUSH, Target(), 5_000)).acted
        assert live(bus) == ["0.0"]
        assert not ended


# --- revocation and rotation ------------------------------------------------------------------------------------------


async def test_a_key_that_is_revoked_during_the_run_is_out_at_once_and_others_stay(
    context: Context, folder: KeyFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leaver, stayer = (folder.add(f"node-{place}", "agent", (place,)) for place in ("0", "1"))
    kept = read_peer_keys(leaver)
    async with (
        bus_of(folder, tmp_path) as bus,
        agent_of(reach(bus), kept, tmp_path / "a", 0) as (_, ended),
        agent_of(reach(bus), stayer, tmp_path / "b", 1) as (_, none),
    ):
        await until(lambda: live(bus) == ["0.0", "1.0"])
        folder.revoke("node-0")
        await until(lambda: bool(ended))
        assert isinstance(ended[0], IdentityTaken)
        assert "key node-0 was revoked" in str(ended[0])
        await until(lambda: live(bus) == ["1.0"])
        assert bus.state.members["0.0"].state == "gone"
        report = await bus.publish(FLUSH, Target(), 5_000)
        assert report.acted == ("1.0",)
        async with agent_dealer(context, reach(bus), Credentials(kept.pair, kept.servers[0])) as dealer:
            assert NOBODY in await first(dealer)
        assert not none
    assert "key node-0 was revoked" in caplog.text


@pytest.mark.one_loop
async def test_a_connection_with_a_revoked_key_gets_nowhere_even_if_it_ignores_what_it_is_told(
    context: Context, folder: KeyFolder, tmp_path: Path
) -> None:
    keys = source(folder.add("ops", "operator", ()))
    assert keys is not None
    async with bus_of(folder, tmp_path) as bus, agent_dealer(context, reach(bus), keys.credentials()) as dealer:

        async def ask(request: wire.Operator) -> wire.Downward | wire.Reply:
            await dealer.send([wire.encode_header(0), wire.encode(request)])
            with anyio.fail_after(20):
                return wire.decode_downward(wire.parse_frames(await dealer.recv())[1])

        assert not isinstance(await ask(wire.StatusRequest()), wire.RequestRejected)
        folder.revoke("ops")
        with anyio.fail_after(20):
            reply = await ask(wire.StatusRequest())
            while not isinstance(reply, wire.RequestRejected):
                reply = await ask(wire.StatusRequest())
        assert reply.reason == "key ops was revoked"
        before = bus.state.seq
        for _ in range(20):
            reply = await ask(wire.Submit(command=FLUSH, target=Target(), timeout_ms=1000))
            assert isinstance(reply, wire.RequestRejected)
        assert bus.state.seq == before


@pytest.mark.one_loop
async def test_a_subscription_with_a_revoked_key_ends_and_the_others_miss_nothing(
    context: Context, folder: KeyFolder, tmp_path: Path
) -> None:
    leaver, stayer = source(folder.add("spy", "observer", ())), folder.add("node", "agent", ("0",))
    assert leaver is not None
    async with bus_of(folder, tmp_path) as bus, agent_of(reach(bus), stayer, tmp_path / "state") as (agent, ended):
        await until(lambda: live(bus) == ["0.0"])
        address = f"tcp://127.0.0.1:{bus._publisher.address.rpartition(':')[2]}"
        async with agent_subscriber(
            context, address, [wire.TOPIC_HEAD, wire.TOPIC_COMMAND], leaver.credentials()
        ) as spy:
            with anyio.fail_after(20):
                await spy.recv()  # a head: it is subscribed
                await bus.publish(FLUSH, Target(), 5_000)
                while (await spy.recv())[0] != wire.TOPIC_COMMAND:
                    pass
            before = bus._publisher
            folder.revoke("spy")
            await until(lambda: bus._publisher is not before)
            for _ in range(3):
                assert (await bus.publish(FLUSH, Target(), 20_000)).acted == ("0.0",)
            heard = []
            while frames := spy.recv_nowait():
                heard.append(frames[0])
            assert wire.TOPIC_COMMAND not in heard
        assert bus._publisher.address == before.address
        assert agent.state.seq == bus.state.seq
        assert not ended


async def test_an_agent_gets_a_new_key_as_it_runs_and_then_the_old_one_is_refused(
    context: Context, folder: KeyFolder, tmp_path: Path
) -> None:
    issued = folder.add("node", "agent", ("0",))
    old = read_peer_keys(issued)
    (tmp_path / "node.key").touch(0o600)
    (tmp_path / "node.key").write_bytes(issued.read_bytes())
    engine = Engine()
    async with (
        bus_of(folder, tmp_path) as bus,
        agent_of(reach(bus), tmp_path / "node.key", tmp_path / "state", engine=engine) as (agent, ended),
    ):
        await until(lambda: live(bus) == ["0.0"])
        incarnation, peer = bus.state.members["0.0"].hello.incarnation, bus.state.members["0.0"].peer
        new = folder.rotate("node")
        write_private(tmp_path / "node.key", read_peer_keys(new), replace=True)
        await until(lambda: bus.state.members["0.0"].peer != peer and live(bus) == ["0.0"])
        folder.finish("node")
        assert (await bus.publish(FLUSH, Target(), 5_000)).acted
        async with agent_dealer(context, reach(bus), Credentials(old.pair, old.servers[0])) as dealer:
            await until(lambda: old.pair.public in bus._access._list.revoked)  # type: ignore[union-attr]
        async with agent_dealer(context, reach(bus), Credentials(old.pair, old.servers[0])) as dealer:
            assert NOBODY in await first(dealer)
        assert (await bus.publish(FLUSH, Target(), 5_000)).acted
        assert bus.state.members["0.0"].hello.incarnation == incarnation, "the agent did not restart"
        assert not ended


async def test_the_key_of_the_bus_is_replaced_between_two_lives_of_the_trainer_and_no_agent_restarts(
    folder: KeyFolder, tmp_path: Path
) -> None:
    issued = folder.add("node", "agent", ("0",))
    folder.rotate_server()
    async with bus_of(folder, tmp_path) as bus:
        address = bus.address
    async with agent_of(reach(bus), issued, tmp_path / "state") as (_, ended):
        async with bus_of(folder, tmp_path, address) as bus:
            await until(lambda: live(bus) == ["0.0"])
            incarnation = bus.state.members["0.0"].hello.incarnation
        folder.finish_server()
        async with bus_of(folder, tmp_path, address) as bus:
            await until(lambda: live(bus) == ["0.0"])
            assert bus.state.members["0.0"].hello.incarnation == incarnation
            assert (await bus.publish(FLUSH, Target(), 5_000)).acted
        assert not ended


# --- what an agent's log says -----------------------------------------------------------------------------------------


async def test_the_log_of_an_agent_says_why_it_does_not_get_in_and_it_gets_in_once_it_may(
    folder: KeyFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its key is allowed later: libzmq would never try again by itself."""
    issued = folder.add("node", "agent", ("0",))
    record = folder.path / "allowed" / "node.json"
    record.rename(tmp_path / "later")
    async with (
        bus_of(folder, tmp_path) as bus,
        agent_of(reach(bus), issued, tmp_path / "state") as (_, ended),
    ):
        await until(lambda: "the bus refused this key" in caplog.text)
        assert "this key is not one of the bus's" in caplog.text, "the log of the bus says it too"
        assert live(bus) == []
        (tmp_path / "later").rename(record)
        await until(lambda: live(bus) == ["0.0"])
        assert not ended


@pytest.mark.parametrize(
    ("has", "needs", "says"),
    [(False, True, "lets nobody in without a key"), (True, False, "has no keys|for it, or none")],
    ids=["plain agent", "plain bus"],
)
async def test_a_plain_side_and_one_with_keys_tell_each_other_apart(
    folder: KeyFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture, has: bool, needs: bool, says: str
) -> None:
    keys = folder.add("node", "agent", ("0",)) if has else None
    async with (
        bus_of(folder if needs else None, tmp_path, HERE) as bus,
        agent_of(bus.address, keys, tmp_path / "state") as (_, ended),
    ):
        await until(lambda: re.search(says, caplog.text) is not None)
        assert live(bus) == []
        assert not ended


# --- addresses, contexts and secrets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [ANYWHERE, "tcp://*:0", "tcp://[::]:0"])
async def test_beyond_loopback_needs_keys_or_a_warning_in_every_start_and_status(
    folder: KeyFolder, tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BusAddressError, match="without keys anybody.*rolloutctl keys new"):
        async with bus_of(None, tmp_path, address):
            pass
    async with bus_of(folder, tmp_path, address) as bus:
        assert not bus.status().insecure
    assert "INSECURE" not in caplog.text
    for _ in range(2):
        caplog.clear()
        async with bus_of(None, tmp_path, address, insecure=True) as bus:
            assert bus.status().insecure
            assert "INSECURE" in str(bus.status())
        assert "INSECURE: anybody who can reach" in caplog.text


@pytest.mark.one_loop
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


@pytest.mark.one_loop
async def test_no_secret_is_in_a_log_an_error_or_the_runs_log(
    folder: KeyFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    issued = folder.add("node", "agent", ("0",))
    async with (
        bus_of(folder, tmp_path) as bus,
        agent_of(reach(bus), issued, tmp_path / "state") as (agent, ended),
    ):
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
@pytest.mark.one_loop
async def test_who_has_no_key_is_hung_up_on_before_it_can_fill_any_memory(
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


@contextmanager
def agent_process(bus: str, state: Path, *options: object, env: dict[str, str] | None = None) -> Iterator[Path]:
    """`rolloutctl agent` beside a tiny engine; what it says is in the file."""
    place = ("--engine", "tiny", "--replica", 0, "--state-dir", state, "--traces", state / "traces")
    said = state / "said"
    state.mkdir(exist_ok=True)
    with (
        said.open("wb") as log,
        started("-m", "controlplane.cli", "agent", "--bus", bus, *place, *options, stderr=log, env=env),
    ):
        yield said


@pytest.mark.parametrize(
    "way",
    ["option", pytest.param("file", marks=pytest.mark.attacks), pytest.param("secret", marks=pytest.mark.attacks)],
)
def test_processes_with_keys_work_on_a_bus_on_all_addresses_and_without_keys_they_do_not(
    folder: KeyFolder, tmp_path: Path, way: str
) -> None:
    node, ops = folder.add("node", "agent", ("0",)), folder.add("ops", "operator", ())
    keys = read_peer_keys(node)
    options, env = {
        "option": (("--keys", node), {}),
        "file": ((), {"ROLLOUTCTL_KEY_FILE": str(node)}),
        "secret": ((), {"ROLLOUTCTL_KEY": keys.pair.secret, "ROLLOUTCTL_SERVER_KEY": keys.servers[0]}),
    }[way]
    with ControlPlane(ANYWHERE, log=tmp_path / "run.db", config=QUICK, keys=folder.path) as plane:
        bus = plane.address.replace("0.0.0.0", "127.0.0.1")
        with agent_process(bus, tmp_path / "a", *options, env=env):
            refused = rolloutctl("status", "--bus", bus)
            assert (refused.returncode, "lets nobody in without a key" in refused.stderr) == (3, True)
            plane.wait_for_agents(1).wait(60)
            assert plane.flush().wait(60).acted == ("0.0",)
            paused = rolloutctl("pause", "--bus", bus, "--key", ops)
            assert (paused.returncode, "acted" in paused.stdout) == (0, True)


@pytest.mark.attacks
def test_an_agent_process_without_a_key_says_why_it_does_not_get_in(folder: KeyFolder, tmp_path: Path) -> None:
    with ControlPlane(ANYWHERE, log=tmp_path / "run.db", config=QUICK, keys=folder.path) as plane:
        with agent_process(plane.address.replace("0.0.0.0", "127.0.0.1"), tmp_path / "a") as said:
            wait_until(lambda: "lets nobody in without a key" in said.read_text())
        assert plane.status().agents == ()


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


@pytest.mark.one_loop
async def test_the_publish_port_is_the_one_that_was_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = replace(QUICK, publish_port=port)
    async with (
        Bus(HERE, RunLog.open(tmp_path / "run.db"), config) as bus,
        agent_of(bus.address, None, tmp_path / "state") as (_, ended),
    ):
        await until(lambda: live(bus) == ["0.0"])
        assert bus._publisher.address.endswith(f":{port}")
        assert bus.state.settings.publish_port == port
        assert not ended
