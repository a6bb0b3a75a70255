"""The bus on real sockets with real agents, on every event loop: commands, hostile peers, a full disk, restarts."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
import zmq
from msgspec import Raw

from controlplane.bus.bus import Bus
from controlplane.bus.operator import ask_status, submit
from controlplane.machine.coordinator import CoordinatorState
from controlplane.record.log import RunLog
from schemas import errors, wire
from schemas.commands import (
    Checkpoint,
    Command,
    EngineCommand,
    EpochStart,
    ProfileCommand,
    ProfilePlan,
    Target,
    WeightSync,
)
from schemas.config import BusConfig
from schemas.events import Decision, Resume, Started
from schemas.formatting import kind_and_reason
from schemas.identity import Identity
from schemas.outcomes import Acted
from schemas.reports import Report
from schemas.transport.async_socket import AsyncZmqSocket
from schemas.transport.sockets import Context, agent_dealer
from tests.attacks.proxy import HOST, proxied
from tests.unit.small_bus import FLUSH, PAUSE, PRIMARY, RESUME, SECOND, Engine, reaches, running

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, agent_timeout_ms=1_000, retransmit_ms=50)
OTHER = Identity(replica=1, node_rank=0)
ALL = Target()


@asynccontextmanager
async def opened(
    folder: Path, context: Context, address: str = "tcp://127.0.0.1:0", config: BusConfig = QUICK
) -> AsyncIterator[Bus]:
    async with Bus(address, RunLog.open(folder / "run.db"), config, context=context) as bus:
        yield bus


@asynccontextmanager
async def fleet(bus: Bus, context: Context, folder: Path, *places: Identity) -> AsyncIterator[list[Engine]]:
    """An agent for each place, all of them live, and joined: a snapshot would supersede what is published before it."""
    engines = [Engine() for _ in places]
    async with AsyncExitStack() as stack:
        agents = [
            await stack.enter_async_context(running(bus.address, context, engine, folder, place))
            for place, engine in zip(places, engines, strict=True)
        ]
        await reached(bus, lambda state: live(state) == {place.agent for place in places})
        for agent in agents:
            await reaches(agent, lambda state: state.joined)
        yield engines


def live(state: CoordinatorState) -> set[str]:
    return {name for name, member in state.members.items() if member.state == "live"}


async def reached(bus: Bus, holds: Callable[[CoordinatorState], bool]) -> CoordinatorState:
    with anyio.fail_after(20):
        return await bus.wait_until(holds)


def outcomes(report: Report) -> dict[str, str]:
    """Return each agent's outcome in one word."""
    return {outcome.agent: kind_and_reason(outcome.conclusion)[1] or "acted" for outcome in report.outcomes}


@pytest.mark.every_loop
@pytest.mark.parametrize("scheme", ["tcp", "ipc", "inproc"])
async def test_every_agent_answers_every_command(tmp_path: Path, context: Context, scheme: str) -> None:
    address = {"tcp": "tcp://127.0.0.1:0", "ipc": f"ipc://{tmp_path}/bus", "inproc": "inproc://bus"}[scheme]
    async with opened(tmp_path, context, address) as bus:
        async with fleet(bus, context, tmp_path, PRIMARY, SECOND, OTHER) as engines:
            tickets = [bus.publish(command, ALL, 10_000) for command in (PAUSE, PAUSE, RESUME, FLUSH)]
            reports = [await ticket for ticket in tickets]
            named = await bus.publish(FLUSH, Target(replicas=frozenset({1})), 10_000)
        assert [outcomes(report) for report in reports] == [
            {"0.0": "acted", "0.1": "not_primary", "1.0": "acted"},
            {"0.0": "already", "0.1": "not_primary", "1.0": "already"},
            {"0.0": "acted", "0.1": "not_primary", "1.0": "acted"},
            {"0.0": "acted", "0.1": "not_primary", "1.0": "acted"},
        ]
        assert outcomes(named) == {"0.0": "not_targeted", "0.1": "not_targeted", "1.0": "acted"}
        assert [report.seq for report in reports] == [2, 3, 4, 5]
        assert [len(engine.calls) for engine in engines] == [3, 0, 4]
        assert bus.router.safety_polls == bus.publisher.safety_polls == bus.inbox.malformed == 0
        await reached(bus, lambda state: not live(state))


async def test_the_log_has_the_decisions_of_every_agent(tmp_path: Path, context: Context) -> None:
    async with opened(tmp_path, context) as bus:
        async with fleet(bus, context, tmp_path, PRIMARY, SECOND):
            await bus.publish(PAUSE, ALL, 10_000)
        await reached(bus, lambda state: not live(state))
    entries = list(RunLog.read(tmp_path / "run.db"))
    assert [entry.kind for entry in entries if not entry.agent].count("issued") == 1
    for agent in ("0.0", "0.1"):
        numbers = [entry.number for entry in entries if entry.agent == agent]
        assert numbers == list(range(1, len(numbers) + 1))
        assert "command" in {entry.kind for entry in entries if entry.agent == agent}


async def test_only_agents_that_do_not_answer_are_missing_at_the_deadline(tmp_path: Path, context: Context) -> None:
    async with opened(tmp_path, context) as bus, fleet(bus, context, tmp_path, PRIMARY, OTHER) as engines:
        engines[0].gate = gate = anyio.Event()
        report = await bus.publish(PAUSE, ALL, 300)
        assert outcomes(report)["1.0"] == "acted"
        assert outcomes(report)["0.0"] in ("engine_timeout", "deadline")
        gate.set()
        await bus.publish(FLUSH, ALL, 10_000)


async def test_a_late_joiner_is_brought_to_the_desired_state(tmp_path: Path, context: Context) -> None:
    async with opened(tmp_path, context) as bus, fleet(bus, context, tmp_path, PRIMARY):
        await bus.publish(PAUSE, ALL, 10_000)
        engine = Engine()
        async with running(bus.address, context, engine, tmp_path, OTHER) as agent:
            with anyio.fail_after(10):
                await agent.wait_until(lambda state: not engine.generating)
            assert agent.state.seq == 2


async def joined(bus: Bus, dealer: zmq.Socket[bytes]) -> None:
    """Make a plain socket the agent 0.0."""
    dealer.connect(bus.address)
    hello = wire.Hello(identity=PRIMARY, incarnation="a", journal="j", host="h", pid=1)
    for message in (hello, wire.Join()):
        dealer.send_multipart([wire.encode_header(0), wire.encode(message)])
    await reached(bus, lambda state: live(state) == {"0.0"})


async def test_an_agent_whose_goodbye_was_not_read_yet_has_left_and_is_not_lost(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(peer: str, epoch: int, seq: int, message: wire.Downward) -> None:
        if not dealer.closed:  # it leaves between the bus's reading and sending
            dealer.send_multipart([wire.encode_header(1), wire.encode(wire.Goodbye())])
            dealer.close()
            assert monitor.poll(10_000)
        original(peer, epoch, seq, message)

    async with opened(tmp_path, context) as bus:
        with context.socket(zmq.DEALER) as dealer:
            await joined(bus, dealer)
            original = bus._send
            with bus.router._sock.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                monkeypatch.setattr(bus, "_send", send)
                report = await bus.publish(PAUSE, ALL, 10_000)  # unanswered, it is sent again
            bus.router._sock.disable_monitor()
        assert outcomes(report) == {"0.0": "gone"}
        assert bus.state.members["0.0"].state == "left"


async def test_an_answer_counts_before_the_goodbye_that_follows_it(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit() -> None:  # in the middle of a turn
        monkeypatch.setattr(bus._log, "commit", original)
        original()
        answer = wire.CommandOutcome(outcome=Acted(calls=()), rule=10)
        dealer.send_multipart([wire.encode_header(1, 1, 2), wire.encode(answer)])
        dealer.send_multipart([wire.encode_header(1), wire.encode(wire.Goodbye())])
        dealer.close()
        assert monitor.poll(10_000)

    async with opened(tmp_path, context) as bus:
        with context.socket(zmq.DEALER) as dealer:
            await joined(bus, dealer)
            with bus.router._sock.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                original = bus._log.commit
                monkeypatch.setattr(bus._log, "commit", commit)
                assert outcomes(await bus.publish(PAUSE, ALL, 10_000)) == {"0.0": "acted"}
            bus.router._sock.disable_monitor()


@pytest.mark.every_loop
async def test_agents_rejoin_a_bus_that_restarts_on_its_log(tmp_path: Path, context: Context) -> None:
    address, engine = f"ipc://{tmp_path}/bus", Engine()
    async with running(address, context, engine, tmp_path, PRIMARY) as agent:
        async with opened(tmp_path, context, address) as first:
            await reached(first, lambda state: live(state) == {"0.0"})
            await first.publish(PAUSE, ALL, 10_000)
            assert not engine.generating
        async with opened(tmp_path, context, address) as second:
            assert (second.state.epoch, second.state.run) == (2, first.state.run)
            await reached(second, lambda state: live(state) == {"0.0"})
            with anyio.fail_after(10):
                await agent.wait_until(lambda state: engine.generating)  # the pause ended with its trainer
            assert outcomes(await second.publish(PAUSE, ALL, 10_000)) == {"0.0": "acted"}


# --- hostile input ----------------------------------------------------------------------------------------------------


def hostile() -> list[tuple[str, list[bytes]]]:
    status = wire.encode(wire.Rejoin(reason="a message for the other direction"))
    return [
        ("no frames", [b"", b""]),
        ("noise", [b"\xff" * 10, b"\x00" * 20]),
        ("too many frames", [wire.encode_header(1)] * 20),
        ("another major version", [wire.encode(wire.Header(wire.MAGIC, wire.MAJOR + 1, 0, 1, 0, 0)), status]),
        ("unknown tag", [wire.encode_header(1), b"\x81\xa4type\xa7surpris"]),
        ("wrong direction", [wire.encode_header(1), status]),
        ("large", [wire.encode_header(1), b"x" * (wire.MAX_BYTES - 100)]),
    ]


SAYS = {
    "no frames": "unreadable header",
    "noise": "unreadable header",
    "too many frames": "2 frames, not 20",
    "another major version": f"protocol version {wire.MAJOR + 1}, this side speaks {wire.MAJOR}",
    "unknown tag": "Invalid value 'surpris'",
    "wrong direction": "Invalid value 'rejoin'",
    "large": "Expected `object`, got `int`",
}


@pytest.mark.parametrize("what", list(SAYS))
async def test_a_malformed_message_is_answered_and_disturbs_no_agent(
    tmp_path: Path, context: Context, what: str
) -> None:
    async with opened(tmp_path, context) as bus, fleet(bus, context, tmp_path, PRIMARY):
        async with agent_dealer(context, bus.address) as dealer:
            await dealer.send(dict(hostile())[what])
            report = await bus.publish(PAUSE, ALL, 10_000)
            assert outcomes(report) == {"0.0": "acted"}
            # The dealer's message and a question after it come in order, so the bus has seen both when it answers.
            await dealer.send(
                [wire.encode_header(1), wire.encode(wire.CommandOutcome(outcome=Acted(calls=()), rule=0))]
            )
            refused = await _answer(dealer)  # it may have been an operator's
            assert isinstance(refused, wire.RequestRejected) and SAYS[what] in refused.reason
            assert isinstance(await _answer(dealer), wire.Rejoin)
        assert bus.inbox.malformed == 1
        assert bus.state.members.keys() == {"0.0"}


def _hello(place: Identity, attempt: int = 0) -> list[bytes]:
    hello = wire.Hello(identity=place, incarnation="a", journal="j", host="h", pid=1, attempt=attempt)
    return [wire.encode_header(0), wire.encode(hello)]


async def _answer(dealer: AsyncZmqSocket) -> wire.Downward | wire.Reply:
    with anyio.fail_after(10):
        _, body = wire.parse_frames(await dealer.recv())
    return wire.decode_downward(body)


async def test_a_connection_speaks_for_one_agent_only(tmp_path: Path, context: Context) -> None:
    async with opened(tmp_path, context) as bus, agent_dealer(context, bus.address) as dealer:
        await dealer.send(_hello(PRIMARY))
        assert isinstance(await _answer(dealer), wire.Welcome)
        await dealer.send(_hello(OTHER))
        await dealer.send(_hello(PRIMARY, attempt=1))
        assert isinstance(await _answer(dealer), wire.Welcome)
        assert bus.inbox.malformed == 1
        assert bus.state.members.keys() == {"0.0"}


async def test_decisions_of_another_journal_than_the_hello_named_are_dropped(tmp_path: Path, context: Context) -> None:
    """The log counts each journal's decisions: those under a made-up name would be a second history of one agent."""
    started = wire.encode(Started(at_ms=0, identity=PRIMARY, incarnation="a"))
    decisions = (Decision(Raw(started), Raw(wire.encode(()))),)
    async with opened(tmp_path, context) as bus, agent_dealer(context, bus.address) as dealer:
        await dealer.send(_hello(PRIMARY))
        assert isinstance(await _answer(dealer), wire.Welcome)
        for journal in ("other", "j"):
            batch = wire.DecisionBatch(journal=journal, first=1, decisions=decisions)
            await dealer.send([wire.encode_header(1), wire.encode(batch)])
        assert await _answer(dealer) == wire.Ack(journal="j", through=1)
        assert bus.inbox.malformed == 1
    entries = [entry for entry in RunLog.read(tmp_path / "run.db") if entry.agent]
    assert [(entry.agent, entry.journal, entry.number) for entry in entries] == [("0.0", "j", 1)]


async def test_a_connection_that_chose_its_own_routing_id_is_no_agents(tmp_path: Path, context: Context) -> None:
    own = context.socket(zmq.DEALER)
    own.set(zmq.ROUTING_ID, b"0.0/a")
    async with opened(tmp_path, context) as bus, AsyncZmqSocket(own, bus.address) as dealer:
        own.connect(bus.address)
        await dealer.send(_hello(PRIMARY))
        await dealer.send([wire.encode_header(0), wire.encode(wire.Join())])
        assert isinstance(await _answer(dealer), wire.Rejoin)
        assert bus.inbox.malformed == 1 and not bus.state.members


async def test_a_newer_connection_of_an_agent_takes_the_place_of_the_older(tmp_path: Path, context: Context) -> None:
    async with (
        opened(tmp_path, context) as bus,
        agent_dealer(context, bus.address) as old,
        agent_dealer(context, bus.address) as new,
    ):
        await old.send(_hello(PRIMARY))
        assert isinstance(await _answer(old), wire.Welcome)
        await old.send([wire.encode_header(0), wire.encode(wire.Join())])
        assert isinstance(await _answer(old), wire.Snapshot)
        before = bus.state.members["0.0"]
        await new.send(_hello(PRIMARY, attempt=2))
        assert isinstance(await _answer(new), wire.Welcome)
        member = bus.state.members["0.0"]
        assert member.peer != before.peer and not member.fresh
        # What lay in the queue of the old connection comes too late: an old hello changes nothing, the rest is refused.
        await old.send(_hello(PRIMARY, attempt=1))
        await old.send([wire.encode_header(0), wire.encode(wire.Join())])
        assert isinstance(await _answer(old), wire.Rejoin)
        assert bus.state.members["0.0"].peer == member.peer
        await new.send([wire.encode_header(0), wire.encode(wire.Join())])
        assert isinstance(await _answer(new), wire.Snapshot)
        assert live(bus.state) == {"0.0"}


async def test_a_broken_connection_in_the_middle_of_a_call_is_no_lost_agent(tmp_path: Path, context: Context) -> None:
    # The agent has nothing to say for an hour, so only the new connection itself tells the bus of it.
    hour_ms = 3_600_000
    quiet = BusConfig(head_interval_ms=50, heartbeat_ms=hour_ms, agent_timeout_ms=hour_ms, retransmit_ms=hour_ms)
    engine = Engine()
    async with opened(tmp_path, context, config=quiet) as bus:
        control, publish = int(bus.address.rpartition(":")[2]), bus.state.settings.publish_port
        assert publish is not None
        async with proxied(control, publish) as proxy:
            address = f"tcp://{HOST}:{control}"
            async with running(address, context, engine, tmp_path, PRIMARY):
                await reached(bus, lambda state: live(state) == {"0.0"})
                before = bus.state.members["0.0"].peer
                engine.gate, engine.begun = anyio.Event(), (begun := anyio.Event()).set
                ticket = bus.publish(PAUSE, ALL, 60_000)
                await begun.wait()
                proxy.cut(control)
                await reached(bus, lambda state: state.members["0.0"].peer != before and live(state) == {"0.0"})
                engine.gate.set()
                assert outcomes(await ticket) == {"0.0": "acted"}
            await reached(bus, lambda state: not live(state))  # a bus with agents waits for their last decisions


async def test_strangers_leave_no_trace_in_the_log(tmp_path: Path, context: Context) -> None:
    async with opened(tmp_path, context) as bus, agent_dealer(context, bus.address) as dealer:
        for message in (wire.Join(), wire.TimeRequest(sent_ns=1), wire.ResendRequest(first=1, credit=1)):
            await dealer.send([wire.encode_header(0), wire.encode(message)])
            assert isinstance(await _answer(dealer), wire.Rejoin)
        assert not bus.inbox.last_heard_us
    assert [entry.kind for entry in RunLog.read(tmp_path / "run.db")] == ["opened", "closed"]


async def test_an_oversized_frame_disconnects_its_sender(tmp_path: Path, context: Context) -> None:
    async with opened(tmp_path, context) as bus, fleet(bus, context, tmp_path, PRIMARY):
        async with agent_dealer(context, bus.address) as dealer:
            await dealer.send([wire.encode_header(1), b"x" * (wire.MAX_BYTES + 1)])
            assert outcomes(await bus.publish(PAUSE, ALL, 10_000)) == {"0.0": "acted"}
        assert bus.state.members.keys() == {"0.0"}


@pytest.mark.parametrize(
    "command",
    [EpochStart(previous_epoch=0, logic=1), WeightSync(phase="prepare", version=1, source=Checkpoint("a"))],
    ids=["epoch", "phase of a sync"],
)
async def test_a_phase_of_a_sync_or_an_epoch_cannot_be_published(
    tmp_path: Path, context: Context, command: Command
) -> None:
    async with opened(tmp_path, context) as bus:
        with pytest.raises(errors.CommandError, match="can be published by itself"):
            bus.publish(command, ALL, 1000)
        assert bus.state.seq == 1


async def test_an_invalid_command_never_reaches_the_log(tmp_path: Path, context: Context) -> None:
    async with opened(tmp_path, context) as bus:
        with pytest.raises(errors.CommandError, match="not a command that can be published.*Nothing was sent"):
            bus.publish(EngineCommand(operation="explode"), ALL, 1000)  # type: ignore[arg-type]
        with pytest.raises(errors.CommandError, match="not a command that can be published"):
            bus.publish(PAUSE, ALL, -5)
    assert [entry.kind for entry in RunLog.read(tmp_path / "run.db")] == ["opened", "closed"]


async def test_a_list_given_for_a_set_becomes_a_set(tmp_path: Path, context: Context) -> None:
    async with opened(tmp_path, context) as bus:
        plan = ProfilePlan(ranks=[0, 8])  # type: ignore[arg-type]
        target = Target(replicas=[0])  # type: ignore[arg-type]
        report = await bus.publish(ProfileCommand(action="check", step=1, plan=plan), target, 1000)
        assert report.command == ProfileCommand(action="check", step=1, plan=ProfilePlan(ranks=frozenset({0, 8})))


async def test_open_commands_are_bounded(tmp_path: Path, context: Context) -> None:
    config = BusConfig(queue=3)
    async with opened(tmp_path, context, config=config) as bus:
        tickets = [bus.publish(PAUSE, ALL, 1000) for _ in range(3)]
        with pytest.raises(errors.BusOverloaded, match="3 commands are open"):
            bus.publish(PAUSE, ALL, 1000)
        for ticket in tickets:
            await ticket
        await bus.publish(PAUSE, ALL, 1000)


# --- addresses, files, space ------------------------------------------------------------------------------------------


async def test_a_second_bus_on_one_port_is_refused(tmp_path: Path, context: Context) -> None:
    async with opened(tmp_path, context) as bus:
        second = Bus(bus.address, RunLog.open(tmp_path / "other.db"), context=context)
        with pytest.raises(errors.AddressInUse, match=bus.address.rpartition(":")[2]):
            await second.__aenter__()
        assert (await bus.publish(PAUSE, ALL, 1000)).outcomes == ()


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:5555", "http://127.0.0.1:1", "127.0.0.1:5555", ""])
async def test_a_public_or_invalid_address_is_refused(tmp_path: Path, context: Context, address: str) -> None:
    with pytest.raises(errors.BusAddressError):
        async with opened(tmp_path, context, address):
            pass
    RunLog.open(tmp_path / "run.db").close()  # and the log is free again


async def test_a_bus_that_cannot_record_stops_publishing(tmp_path: Path, context: Context) -> None:
    log = RunLog.open(tmp_path / "run.db")
    async with (
        Bus("tcp://127.0.0.1:0", log, QUICK, context=context) as bus,
        fleet(bus, context, tmp_path, PRIMARY) as engines,
    ):
        await bus.publish(PAUSE, ALL, 10_000)
        (pages,) = log._file._connection.execute("PRAGMA page_count").fetchone()
        log._file._connection.execute(f"PRAGMA max_page_count = {pages}")
        full = "has stopped publishing: .*no space left"
        with anyio.fail_after(20), pytest.raises(errors.BusFaulted, match=full):
            while True:
                await bus.publish(FLUSH, ALL, 10_000)
        with pytest.raises(errors.BusFaulted):
            bus.publish(RESUME, ALL, 10_000)
        with pytest.raises(errors.CommandError, match="has stopped publishing"):
            await submit(bus.address, RESUME, ALL, 1.0)
        assert (await ask_status(bus.address)).seq >= 2
        assert Resume() not in engines[0].calls  # the last flush may still be on its way
    entries = list(RunLog.read(tmp_path / "run.db"))
    assert [entry.kind for entry in entries].count("issued") >= 1  # what was recorded stays readable


async def test_a_bus_that_has_stopped_does_not_spin_on_the_deadlines_of_open_commands(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: bool) -> None:
        raise errors.LogFull("no space left")

    def begin() -> None:
        moments.append(anyio.current_time())
        if len(moments) == 4:
            enough.set()
        original()

    log, moments, enough = RunLog.open(tmp_path / "run.db"), list[float](), anyio.Event()
    async with Bus("tcp://127.0.0.1:0", log, QUICK, context=context) as bus:
        async with fleet(bus, context, tmp_path, PRIMARY) as engines:
            engines[0].gate = gate = anyio.Event()
            ticket = bus.publish(PAUSE, ALL, 100)
            await reached(bus, lambda state: state.seq == 2)
            monkeypatch.setattr(log, "commit", full)
            with anyio.fail_after(20), pytest.raises(errors.BusFaulted):
                await ticket  # its end can't be recorded, so its deadline stays in the past
            gate.set()
        assert bus.state.open
        original = bus.begin
        monkeypatch.setattr(bus, "begin", begin)
        with anyio.fail_after(20):
            await enough.wait()
    assert moments[3] - moments[0] > 2 * QUICK.head_interval_ms / 1000


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.every_loop
async def test_closing_ends_every_ticket(tmp_path: Path, context: Context) -> None:
    address, engine = f"ipc://{tmp_path}/bus", Engine()
    async with running(address, context, engine, tmp_path, PRIMARY):
        async with opened(tmp_path, context, address) as bus:
            await reached(bus, lambda state: live(state) == {"0.0"})
            engine.gate = gate = anyio.Event()
            ticket = bus.publish(PAUSE, ALL, 60_000)
            await reached(bus, lambda state: state.seq == 2)
        assert outcomes(await ticket) == {"0.0": "bus_restarted"}
        gate.set()
        with pytest.raises(errors.BusClosed):
            bus.publish(PAUSE, ALL, 1000)
        with pytest.raises(errors.BusClosed):
            await bus.wait_until(lambda state: False)


async def test_the_log_has_the_last_decisions_of_agents_that_outlive_the_bus(tmp_path: Path, context: Context) -> None:
    address = f"ipc://{tmp_path}/bus"
    # The agent sends its decisions within a quarter of a heartbeat, and the bus waits for three eighths of one.
    config = BusConfig(heartbeat_ms=4_000, agent_timeout_ms=20_000)
    async with (
        running(address, context, Engine(), tmp_path, PRIMARY) as agent,
        opened(tmp_path, context, address, config) as bus,
    ):
        await reached(bus, lambda state: live(state) == {"0.0"})
        await bus.publish(PAUSE, ALL, 10_000)
        decided = agent._journal.number
    assert decided in [entry.number for entry in RunLog.read(tmp_path / "run.db")]


async def test_the_callers_own_error_is_not_wrapped(tmp_path: Path, context: Context) -> None:
    with pytest.raises(ZeroDivisionError):
        async with opened(tmp_path, context):
            raise ZeroDivisionError
    assert [entry.kind for entry in RunLog.read(tmp_path / "run.db")] == ["opened", "closed"]


# --- operators --------------------------------------------------------------------------------------------------------


async def test_an_operator_sees_the_fleet_and_publishes_a_command(tmp_path: Path) -> None:
    context: Context = zmq.Context.instance()
    async with opened(tmp_path, context) as bus, fleet(bus, context, tmp_path, PRIMARY, SECOND):
        report = await submit(bus.address, PAUSE, ALL, 10.0)
        assert outcomes(report) == {"0.0": "acted", "0.1": "not_primary"}
        await reached(bus, lambda state: (status := state.members["0.0"].status) is not None and not status.generating)
        fleet_seen = await ask_status(bus.address)
        assert (fleet_seen.seq, [line.agent for line in fleet_seen.agents]) == (2, ["0.0", "0.1"])
        with pytest.raises(errors.CommandError, match="can be published by itself"):
            await submit(bus.address, EpochStart(previous_epoch=0, logic=1), ALL, 1.0)  # type: ignore[arg-type]


async def test_an_operator_without_a_bus_gets_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(errors.BusUnreachable, match=r"nothing listens at ipc://.*\(No such file or directory\)"):
        await ask_status(f"ipc://{tmp_path}/nobody", 30)
