"""Attacks on a bus with keys: peers without a key, with a wrong or a revoked one, and keys that claim too much."""

import logging
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from controlplane.bus.binding import bound
from controlplane.bus.key_folder import KeyFolder
from controlplane.bus.operator import ask_status, submit
from controlplane.machine.events import SyncRequested
from schemas import wire
from schemas.commands import Checkpoint, Target
from schemas.errors import AddressInUse, CommandError, IdentityTaken, KeyRefused
from schemas.transport.async_socket import AsyncZmqSocket
from schemas.transport.keys import Credentials, KeyPair, read_peer_keys, write_private
from schemas.transport.sockets import Context, agent_dealer, agent_subscriber
from tests.attacks.keyed_bus import (
    FLUSH,
    HERE,
    NOBODY,
    agent_of,
    bus_of,
    first,
    following,
    live,
    reach,
    source,
    stranger,
)
from tests.unit.small_bus import Engine
from tests.waiting import until
from workers.link import connection, link
from workers.link.heartbeat import Heartbeat

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


# --- which peers come in ----------------------------------------------------------------------------------------------


async def test_only_a_key_of_the_folder_comes_in_and_all_others_learn_why_not(
    context: Context, folder: KeyFolder, tmp_path: Path
) -> None:
    good = read_peer_keys(folder.add("node", "agent", ("0",)))
    async with bus_of(folder, tmp_path) as bus:
        for pair, server, says in (
            (good.pair, good.server, ""),
            (KeyPair.generate(), good.server, NOBODY),
            (good.pair, KeyPair.generate().public, "another key than this side was given"),
        ):
            async with agent_dealer(context, reach(bus), Credentials(pair, server)) as dealer:
                assert says in await first(dealer)
        async with agent_dealer(context, reach(bus)) as dealer:
            assert "admits no peer without a key" in await first(dealer)
    async with (
        bus_of(None, tmp_path, HERE) as plain,
        agent_dealer(context, plain.address, Credentials(good.pair, good.server)) as dealer,
    ):
        said = await first(dealer)
        assert "has no keys" in said or "another key than this side was given for it, or none" in said


async def test_a_bus_with_keys_that_hangs_up_before_it_has_said_so_is_told_from_one_that_ends(context: Context) -> None:
    """libzmq hangs up as soon as it has read the whole greeting of a peer of another mechanism."""
    mechanism = b"CURVE"

    async def serve(stream: SocketStream) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):  # the test may end while it is asked
            async with stream:
                await stream.send(b"\xff" + bytes(8) + b"\x7f\x03")
                told = b""
                with anyio.move_on_after(0.5):
                    while len(told) < 32:
                        told += await stream.receive()
                if len(told) < 32:
                    await stream.send(b"\x01" + mechanism.ljust(20, b"\0") + bytes(32))

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, serve)
        address = f"tcp://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        async with agent_dealer(context, address) as dealer:
            with anyio.fail_after(20):
                refused = await dealer.refusal()
            assert refused is not None
            assert "admits no peer without a key" in refused.reason
            mechanism = b"NULL"
            dealer.redial(None)
            with anyio.move_on_after(2):
                await dealer.refusal()
                pytest.fail("a bus without keys may hang up because it ends, and may be back soon")
        tasks.cancel_scope.cancel()


async def test_a_subscriber_without_an_allowed_key_hears_nothing(
    context: Context, folder: KeyFolder, tmp_path: Path
) -> None:
    good = read_peer_keys(folder.add("node", "observer", ()))
    async with bus_of(folder, tmp_path) as bus:
        address = f"tcp://127.0.0.1:{bus.publisher.address.rpartition(':')[2]}"
        unknown = Credentials(stranger(folder).pair, good.server)
        async with (
            agent_subscriber(context, address, [wire.TOPIC_HEAD]) as plain,
            agent_subscriber(context, address, [wire.TOPIC_HEAD], unknown) as refused,
            agent_subscriber(context, address, [wire.TOPIC_HEAD], Credentials(good.pair, good.server)) as allowed,
        ):
            with anyio.fail_after(20):
                for _ in range(10):  # heads
                    await allowed.recv()
            assert plain.recv_nowait() is None
            assert refused.recv_nowait() is None


@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=pytest.mark.attacks)])
async def test_no_bytes_and_no_folder_end_the_handler(
    context: Context, folder: KeyFolder, tmp_path: Path, rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers that break off, records that can't be read, a folder that goes: those that are allowed still come in."""
    good = read_peer_keys(folder.add("node", "observer", ()))
    keys = Credentials(good.pair, good.server)
    async with bus_of(folder, tmp_path) as bus:
        host, _, port = reach(bus).removeprefix("tcp://").partition(":")
        for number in range(rounds):
            async with await anyio.connect_tcp(host, int(port)) as raw:
                await raw.send(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE" + struct.pack("33x") + b"\xff" * 300)
            async with agent_dealer(context, reach(bus), Credentials(KeyPair.generate(), good.server)) as dealer:
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
        for unknown, says in ((source(stranger(folder)), NOBODY), (None, "admits no peer without a key")):
            with pytest.raises(KeyRefused, match=says):
                await ask_status(where, keys=unknown)
        assert bus.state.seq == published


@pytest.mark.parametrize("role", ["operator", "observer"])
async def test_a_peer_that_is_no_agent_joins_no_fleet(folder: KeyFolder, tmp_path: Path, role: Any) -> None:
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
            await until(lambda: following(bus) == ["0.0"])
            assert (await bus.publish(FLUSH, Target(), 5_000)).acted
        assert not ended


async def test_a_connection_of_one_agent_can_speak_for_no_other(
    context: Context, folder: KeyFolder, tmp_path: Path
) -> None:
    """The victim 0.0 is live. An agent with a key for 1 says goodbye, hello and answers in its name."""
    victim, thief = (folder.add(f"node-{place}", "agent", (place,)) for place in ("0", "1"))
    async with bus_of(folder, tmp_path) as bus, agent_of(reach(bus), victim, tmp_path / "state") as (agent, ended):
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
        await until(lambda: following(bus) == ["1.0"])
        assert bus.state.members["0.0"].state == "gone"
        report = await bus.publish(FLUSH, Target(), 5_000)
        assert report.acted == ("1.0",)
        async with agent_dealer(context, reach(bus), Credentials(kept.pair, kept.server)) as dealer:
            assert NOBODY in await first(dealer)
        assert not none
    assert "key node-0 was revoked" in caplog.text


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


async def test_a_subscription_with_a_revoked_key_ends_and_the_others_miss_nothing(
    context: Context, folder: KeyFolder, tmp_path: Path
) -> None:
    leaver, stayer = source(folder.add("spy", "observer", ())), folder.add("node", "agent", ("0",))
    assert leaver is not None
    async with bus_of(folder, tmp_path) as bus, agent_of(reach(bus), stayer, tmp_path / "state") as (agent, ended):
        await until(lambda: live(bus) == ["0.0"])
        address = f"tcp://127.0.0.1:{bus.publisher.address.rpartition(':')[2]}"
        async with agent_subscriber(
            context, address, [wire.TOPIC_COMMAND, wire.TOPIC_HEAD], leaver.credentials()
        ) as spy:
            with anyio.fail_after(20):
                for _ in range(2):  # the welcome, and a head: the bus has read both subscriptions
                    assert (await spy.recv())[0].startswith(wire.TOPIC_HEAD)
                await bus.publish(FLUSH, Target(), 5_000)
                while (await spy.recv())[0] != wire.TOPIC_COMMAND:
                    pass
            before = bus.publisher
            folder.revoke("spy")
            await until(lambda: bus.publisher is not before)
            for _ in range(3):
                assert (await bus.publish(FLUSH, Target(), 20_000)).acted == ("0.0",)
            heard = []
            while frames := spy.recv_nowait():
                heard.append(frames[0])
            assert wire.TOPIC_COMMAND not in heard
        assert bus.publisher.address == before.address
        assert agent.state.seq == bus.state.seq
        assert not ended


async def test_a_publish_port_that_another_process_takes_meanwhile_is_waited_for(
    folder: KeyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Subscribers stay until the new socket is bound, so that no command is lost to them."""
    folder.add("spy", "observer", ())
    attempts = []

    async def in_use_at_first(bind: Callable[[], AsyncZmqSocket]) -> AsyncZmqSocket:
        attempts.append(bind)
        if len(attempts) < 3:
            raise AddressInUse("taken")
        return await bound(bind)

    async with (
        bus_of(folder, tmp_path) as bus,
        agent_of(reach(bus), folder.add("node", "agent", ("0",)), tmp_path / "state") as (_, ended),
    ):
        await until(lambda: live(bus) == ["0.0"])
        before = bus.publisher
        monkeypatch.setattr("controlplane.bus.bus.bound", in_use_at_first)
        folder.revoke("spy")
        await until(lambda: bool(attempts))
        assert (await bus.publish(FLUSH, Target(), 20_000)).acted == ("0.0",)
        await until(lambda: bus.publisher is not before)
        assert "a revoked key still hears what is published" in caplog.text
        assert (await bus.publish(FLUSH, Target(), 20_000)).acted == ("0.0",)
        assert not ended


async def test_an_agent_gets_a_new_key_as_it_runs_and_then_the_old_one_is_refused(
    context: Context, folder: KeyFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rolloutctl")
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
        new = folder.add("node-2", "agent", ("0",))
        write_private(tmp_path / "node.key", read_peer_keys(new), replace=True)
        await until(lambda: bus.state.members["0.0"].peer != peer and following(bus) == ["0.0"])
        folder.revoke("node")
        assert (await bus.publish(FLUSH, Target(), 5_000)).acted
        async with agent_dealer(context, reach(bus), Credentials(old.pair, old.server)) as dealer:
            await until(lambda: old.pair.public in bus._access._list.revoked)  # type: ignore[union-attr]
        async with agent_dealer(context, reach(bus), Credentials(old.pair, old.server)) as dealer:
            assert NOBODY in await first(dealer)
        assert (await bus.publish(FLUSH, Target(), 5_000)).acted
        assert bus.state.members["0.0"].hello.incarnation == incarnation, "the agent did not restart"
        assert not ended


async def test_a_new_key_waits_until_no_sync_is_open(
    folder: KeyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats, beat = list[None](), Heartbeat.beat

    def counted(heartbeat: Heartbeat, *, doubtful: bool) -> None:
        beat(heartbeat, doubtful=doubtful)
        beats.append(None)

    monkeypatch.setattr(Heartbeat, "beat", counted)
    issued = folder.add("node", "agent", ("0",))
    (tmp_path / "node.key").touch(0o600)
    (tmp_path / "node.key").write_bytes(issued.read_bytes())
    async with (
        bus_of(folder, tmp_path) as bus,
        agent_of(reach(bus), tmp_path / "node.key", tmp_path / "state") as (_, ended),
    ):
        await until(lambda: following(bus) == ["0.0"])
        peer = bus.state.members["0.0"].peer
        target = Target()
        ticket = bus.sync(
            SyncRequested(
                version=1, source=Checkpoint("v1"), manifest=None, target=target, timeout_ms=20_000, sends=True
            )
        )
        await bus.wait_until(lambda state: state.sync is not None and state.sync.held_until_us is not None)
        write_private(tmp_path / "node.key", read_peer_keys(folder.add("node-2", "agent", ("0",))), replace=True)
        beats.clear()
        await until(lambda: len(beats) > 3)  # after each of them the agent looks whether its key file has changed
        bus.note_sent(ticket)
        await bus.wait_until(lambda state: state.sync is not None and state.sync.held_until_us is None)
        assert bus.state.members["0.0"].peer == peer
        assert (await ticket).status == "committed"
        await until(lambda: bus.state.members["0.0"].peer != peer and following(bus) == ["0.0"])
        assert not ended


# --- what an agent's log says -----------------------------------------------------------------------------------------


async def test_the_log_of_an_agent_says_why_it_does_not_get_in_and_it_gets_in_once_it_may(
    folder: KeyFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its key is allowed later: libzmq would never try again by itself."""
    issued = folder.add("node", "agent", ("0",))
    record = folder.path / "allowed" / "node.json"
    record.rename(tmp_path / "later")
    async with bus_of(folder, tmp_path) as bus, agent_of(reach(bus), issued, tmp_path / "state") as (_, ended):
        await until(lambda: "the bus refused this key" in caplog.text)
        assert "this key is not one of the bus's" in caplog.text, "the log of the bus says it too"
        assert live(bus) == []
        (tmp_path / "later").rename(record)
        await until(lambda: live(bus) == ["0.0"])
        assert not ended


@pytest.mark.parametrize(
    ("has", "needs", "says"),
    [(False, True, "admits no peer without a key"), (True, False, "has no keys|for it, or none")],
    ids=["plain agent", "plain bus"],
)
async def test_a_plain_side_and_one_with_keys_tell_each_other_apart(
    folder: KeyFolder,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    has: bool,
    needs: bool,
    says: str,
) -> None:
    monkeypatch.setattr(link, "SILENT_MS", 1)
    monkeypatch.setattr(connection, "CONNECT_S", 0.2)
    keys = folder.add("node", "agent", ("0",)) if has else None
    async with (
        bus_of(folder if needs else None, tmp_path, HERE) as bus,
        agent_of(bus.address, keys, tmp_path / "state") as (_, ended),
    ):
        await until(lambda: re.search(says, caplog.text) is not None)
        assert live(bus) == []
        assert not ended
