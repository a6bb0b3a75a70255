"""The agent's end of the bus on real sockets, on every event loop: joining, silence, malformed messages, uploads."""

import logging
from pathlib import Path

import anyio
import msgspec
import pytest
from msgspec.structs import replace

from schemas import wire
from schemas.agent_status import AgentStatus
from schemas.commands import ProfileCommand
from schemas.config import AgentConfig
from schemas.desired import Desired
from schemas.errors import AgentError, BusAddressError, EngineError, LogLocked
from schemas.events import CommandReceived, Decision
from schemas.logs import RateLimit
from schemas.outcomes import Acted, ErrorKind, Failed, Reason, Skipped
from schemas.transport.sockets import Context
from tests.running import python
from tests.unit.small_bus import FLUSH, PAUSE, PRIMARY, SECOND, STRANGER, Bus, Engine, Run, reaches, recorded, running
from tests.waiting import until
from workers.agent import Agent
from workers.link.connection import Connection
from workers.machine.readiness import in_sync

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


# Joining


async def test_an_agent_requests_a_snapshot_only_after_it_hears_the_publisher(bus: Bus, run: Run) -> None:
    async with run() as agent:
        hello = await bus.next(wire.Hello)
        assert hello.identity == PRIMARY
        bus.publisher.set_welcome(b"")  # a publisher without a welcome message
        bus.say(bus.welcome())
        await bus.next(AgentStatus)
        await bus.next(AgentStatus)
        assert not [message for message in bus.ignored if isinstance(message, wire.Join)]
        assert b"\x01" + wire.TOPIC_HEAD in bus.subscriptions
        bus.raw(wire.TOPIC_HEAD, wire.encode_header(bus.epoch, 0, 0), b"\xc0")
        await bus.next(wire.Join)
        assert not agent.state.joined
        bus.say(wire.Snapshot(desired=Desired()), seq=7)
        with anyio.fail_after(10):
            await agent.wait_ready()
        assert (agent.state.epoch, agent.state.seq) == (1, 7)


async def test_an_agent_reports_at_once_that_it_became_ready(bus: Bus, engine: Engine, run: Run) -> None:
    bus.heartbeat_ms = 3_600_000
    async with run():
        await bus.admit()
        while not (status := await bus.next(AgentStatus)).ready:
            pass
        assert status.engine == "fake 1"


async def test_an_agent_follows_a_bus_that_changes_the_interval_of_heartbeats(bus: Bus, run: Run) -> None:
    bus.heartbeat_ms = 3_600_000
    async with run():
        await bus.admit()
        request = await bus.next(wire.TimeRequest)  # with the heartbeat that says that it is ready
        bus.say(wire.TimeReply(sent_ns=request.sent_ns, received_ns=1, replied_ns=1, heartbeat_ms=20))
        with anyio.fail_after(20):
            for _ in range(5):
                await bus.next(AgentStatus)


async def test_hello_is_repeated_until_it_is_answered(bus: Bus, run: Run) -> None:
    async with run() as agent:
        first = await bus.next(wire.Hello)
        assert await bus.next(wire.Hello) == replace(first, attempt=1)
        await bus.admit()
        await reaches(agent, lambda state: state.joined)


async def test_an_agent_waits_for_a_bus_that_has_not_started_and_says_so(
    context: Context, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.link.connection.FIRST_WARNING_S", 0.01)
    address = f"ipc://{tmp_path}/bus"
    with caplog.at_level(logging.WARNING):
        async with running(address, context, engine, tmp_path) as agent, anyio.create_task_group() as tasks:
            with anyio.fail_after(10):
                while f"waits: nothing listens at {address}" not in caplog.text:
                    await anyio.lowlevel.checkpoint()
            bus = Bus(context, address)
            tasks.start_soon(bus.serve)
            await bus.admit()
            await reaches(agent, lambda state: state.joined)
            tasks.cancel_scope.cancel()
    bus.close()


@pytest.mark.every_loop
async def test_an_agent_loses_and_finds_only_a_bus_that_it_had(
    context: Context, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = anyio.Event()
    original = Connection._try_second_connection

    async def ask_elsewhere(connection: Connection) -> None:
        asked.set()
        await original(connection)

    monkeypatch.setattr("workers.link.link.SILENT_MS", -1_900)  # beside one heartbeat for a first hello
    monkeypatch.setattr("workers.link.connection.BUSY_S", 0.1)
    monkeypatch.setattr(Connection, "_try_second_connection", ask_elsewhere)
    address = f"ipc://{tmp_path}/bus"
    with caplog.at_level(logging.INFO):
        async with running(address, context, engine, tmp_path) as agent, anyio.create_task_group() as tasks:
            with anyio.fail_after(10):
                await asked.wait()
            monkeypatch.setattr("workers.link.link.SILENT_MS", 60_000)
            bus = Bus(context, address)
            tasks.start_soon(bus.serve)
            await bus.admit()
            await reaches(agent, lambda state: state.joined)
            tasks.cancel_scope.cancel()
    bus.close()
    assert "joined run" in caplog.text
    assert not [word for word in ("lost its bus", "found its bus", "joining again") if word in caplog.text]


async def test_an_agent_that_the_bus_has_forgotten_says_hello_again(bus: Bus, run: Run) -> None:
    async with run() as agent:
        hello = await bus.admit()
        await reaches(agent, lambda state: state.joined)
        bus.epoch = 2
        bus.greet()
        bus.say(STRANGER)
        again = await bus.admit()
        assert again == replace(hello, attempt=again.attempt)  # the same life of the same agent
        assert again.attempt > hello.attempt
        await reaches(agent, lambda state: state.epoch == 2)
        bus.publish(PAUSE)
        assert isinstance((await bus.outcome(1)).outcome, Acted)


async def test_an_agent_that_joins_a_newer_bus_asks_for_the_desired_state_once(
    bus: Bus, context: Context, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is issued between two snapshots is superseded by the second one."""
    monkeypatch.setattr("workers.link.link.random.uniform", lambda low, high: low)
    config = AgentConfig(hello_retry_ms=60_000)
    async with (
        Agent(
            bus=bus.address, identity=PRIMARY, engine=engine, state_dir=tmp_path, config=config, context=context
        ) as agent,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(agent.run)
        tasks.start_soon(bus.serve)
        await bus.admit()
        await reaches(agent, lambda state: state.joined)
        bus.epoch = 2
        bus.greet()
        bus.say(STRANGER)
        await bus.next(wire.Hello)
        bus.say(bus.welcome())
        await bus.next(wire.Join)
        bus.ignored.clear()
        for _ in range(3):
            await bus.next(AgentStatus)
        assert not [message for message in bus.ignored if isinstance(message, wire.Join)]
        bus.say(wire.Snapshot(desired=Desired()))
        await reaches(agent, lambda state: state.epoch == 2 and not state.needs_snapshot)
        tasks.cancel_scope.cancel()


async def test_a_snapshot_that_was_asked_for_again_supersedes_no_command(bus: Bus, engine: Engine, run: Run) -> None:
    """A bus whose trainer holds the interpreter answers a join late, and then the repeated one as well."""
    engine.gate = anyio.Event()
    async with run() as agent:
        await bus.next(wire.Hello)
        bus.say(bus.welcome())
        await bus.next(wire.Join)
        await bus.next(wire.Join)
        bus.say(wire.Snapshot(desired=Desired()))
        await reaches(agent, lambda state: state.joined and state.engine.tokenizer == "present")
        bus.publish(PAUSE)
        await reaches(agent, lambda state: state.activity is not None)
        bus.say(wire.Snapshot(desired=Desired(generation="paused")))
        bus.say(wire.Replay(records=(bus.record(2, FLUSH),)))
        await reaches(agent, lambda state: len(state.queue) == 1)
        engine.gate.set()
        for seq in (1, 2):
            assert isinstance((await bus.outcome(seq)).outcome, Acted)


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1:99999", "tcp://", "http://127.0.0.1:5555"])
async def test_a_wrong_address_is_an_error_at_once(
    address: str, context: Context, engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(BusAddressError):
        async with Agent(bus=address, identity=PRIMARY, engine=engine, state_dir=tmp_path, context=context):
            pass


async def test_two_agents_cannot_share_a_journal(bus: Bus, context: Context, tmp_path: Path, run: Run) -> None:
    async with run():
        with pytest.raises(LogLocked):
            async with running(bus, context, Engine(), tmp_path):
                pass


async def test_an_engine_that_cannot_be_opened_leaves_nothing_open(
    bus: Bus, context: Context, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse() -> None:
        raise EngineError("no engine here")

    monkeypatch.setattr(engine, "open", refuse)
    with pytest.raises(EngineError, match="no engine here"):
        async with Agent(bus=bus.address, identity=PRIMARY, engine=engine, state_dir=tmp_path, context=context):
            pass
    async with running(bus, context, Engine(), tmp_path) as agent:
        await bus.admit()
        await reaches(agent, lambda state: state.joined)


async def test_an_agent_ahead_of_a_bus_that_lost_its_tail_follows_it_and_says_so(
    bus: Bus, joined: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async with joined() as agent:
        for seq in (1, 2, 3):
            bus.publish(FLUSH)
            await bus.outcome(seq)
        bus.epoch, bus.seq = 2, 2
        bus.raw(wire.TOPIC_HEAD, wire.encode_header(2, 0, 2), b"\xc0")
        await bus.next(wire.Join)
        bus.say(wire.Snapshot(desired=Desired(generation="paused")))
        state = await reaches(agent, lambda state: state.epoch == 2 and not state.engine.generating)
        assert state.seq == 2 and not state.needs_snapshot
    assert "had applied the commands up to seq 3 of epoch 1, and the bus of epoch 2 goes on after seq 2" in caplog.text


# Half-open connections, and connections that libzmq gives up


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing answers and heads are noticed in tenths of a second."""
    monkeypatch.setattr("workers.link.link.SILENT_MS", 100)
    monkeypatch.setattr("workers.link.connection.BUSY_S", 0.1)


TOO_LARGE = bytes(wire.MAX_BYTES + 1)


async def serve_time(bus: Bus) -> None:
    """Answer every time request, and send heads, as a bus does."""
    while True:
        request = await bus.next(wire.TimeRequest)
        bus.say(wire.TimeReply(sent_ns=request.sent_ns, received_ns=1, replied_ns=1))
        bus.raw(wire.TOPIC_HEAD, wire.encode_header(bus.epoch, 0, bus.seq), b"\xc0")


async def test_a_frame_too_large_on_the_subscription_cuts_it_off_and_the_agent_subscribes_anew(
    bus: Bus, run: Run
) -> None:
    bus.head_interval_ms = 20
    async with run() as agent, anyio.create_task_group() as tasks:
        await bus.admit()
        tasks.start_soon(serve_time, bus)
        tasks.start_soon(bus.send_heads)  # or it subscribes anew for want of them
        await reaches(agent, lambda state: state.joined)
        subscribed = b"\x01" + wire.TOPIC_HEAD
        await until(lambda: subscribed in bus.subscriptions)  # the bus may read it after the agent has joined by it
        bus.subscriptions.clear()
        bus.raw(wire.TOPIC_COMMAND, wire.encode_header(1, 1, 1), TOO_LARGE)
        with anyio.fail_after(20):
            await until(lambda: subscribed in bus.subscriptions)
        bus.seq = 0
        bus.publish(PAUSE)
        await reaches(agent, lambda state: state.seq == 1)
        tasks.cancel_scope.cancel()


@pytest.mark.usefixtures("impatient")
async def test_a_frame_too_large_on_the_control_connection_cuts_it_off_and_the_agent_joins_anew(
    bus: Bus, run: Run
) -> None:
    async with run() as agent:
        hello = await bus.admit()
        await reaches(agent, lambda state: state.joined)
        first = bus.peer
        bus.router.send_nowait([first, wire.encode_header(1, 0, 0), TOO_LARGE])
        with anyio.fail_after(20):
            while bus.peer == first:
                await bus.next(wire.TimeRequest)  # on a new connection, from a stranger
        bus.say(STRANGER)
        again = await bus.admit()  # on a slow machine it may have said hello more than once
        assert again.attempt > hello.attempt and again == replace(hello, attempt=again.attempt)


@pytest.mark.usefixtures("impatient")
async def test_a_bus_that_is_only_busy_keeps_its_connection(bus: Bus, joined: Run) -> None:
    async with joined():
        old = bus.peer
        bus.ignored.clear()  # an agent whose welcome was late has said hello twice
        with anyio.fail_after(20):
            while bus.peer == old:  # it reads, and answers nothing, until it is asked on another connection
                await bus.next(wire.TimeRequest)
        bus.say(STRANGER)
        bus.peers.append(old)
        bus.say(wire.TimeReply(sent_ns=1, received_ns=1, replied_ns=1))
        bus.publish(PAUSE)
        await bus.outcome(1)
        assert bus.peer == old and not any(isinstance(message, wire.Hello) for message in bus.ignored)


# Lease, hostile bytes, orderly end


async def test_silence_for_the_length_of_the_lease_ends_a_pause(bus: Bus, engine: Engine, run: Run) -> None:
    bus.lease_ms = 100
    async with run() as agent:
        await bus.admit()
        bus.publish(PAUSE)
        await reaches(agent, lambda state: not state.engine.generating)
        await reaches(agent, lambda state: state.needs_snapshot and state.engine.generating is True)
        bus.raw(wire.TOPIC_HEAD, wire.encode_header(bus.epoch, 0, bus.seq), b"\xc0")
        await bus.next(wire.Join)
        bus.say(wire.Snapshot(desired=Desired(generation="paused")))
        await reaches(agent, lambda state: not state.needs_snapshot and not state.engine.generating)


async def test_the_lease_of_an_agent_that_restarts_without_a_bus_counts_from_its_start(
    bus: Bus, context: Context, engine: Engine, tmp_path: Path, run: Run
) -> None:
    bus.lease_ms = 100
    async with run() as agent:
        await bus.admit()
        bus.publish(PAUSE)
        await bus.outcome(1)
    assert not engine.generating
    address = bus.address
    bus.close()
    async with running(address, context, engine, tmp_path) as agent:
        await reaches(agent, lambda state: state.engine.generating is True)
        assert not agent.state.joined and not in_sync(agent.state)


async def test_an_engine_that_waits_for_a_bus_pauses_although_its_agent_restarts_without_one(
    bus: Bus, context: Context, engine: Engine, tmp_path: Path, run: Run
) -> None:
    bus.lease_ms = 100
    async with run():
        await bus.admit()
    address = bus.address
    bus.close()
    async with running(address, context, engine, tmp_path, on_lost_bus="pause") as agent:
        await reaches(agent, lambda state: not state.engine.generating)


async def test_a_bus_of_which_only_one_port_is_within_reach_renews_no_lease(bus: Bus, engine: Engine, run: Run) -> None:
    """It welcomes the agent and answers each request for the time, and publishes nothing that arrives."""
    bus.lease_ms = 300
    async with run() as agent:
        await bus.admit()
        bus.publish(PAUSE)
        await bus.outcome(1)
    async with run() as agent, anyio.create_task_group() as tasks:
        await bus.next(wire.Hello)
        bus.say(replace(bus.welcome(), publish_port=1))

        async def answer() -> None:
            while True:
                request = await bus.next(wire.TimeRequest)
                bus.say(wire.TimeReply(sent_ns=request.sent_ns, received_ns=1, replied_ns=1))

        tasks.start_soon(answer)
        await reaches(agent, lambda state: state.engine.generating is True)
        assert not agent.state.joined
        tasks.cancel_scope.cancel()


async def test_malformed_messages_are_counted_logged_once_and_change_nothing(
    bus: Bus, joined: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.link.link.malformed_logger.filters", [RateLimit(1, 60.0)])  # not the other loop's
    good = wire.encode(bus.envelope(PAUSE))
    hostile = [
        *((wire.TOPIC_COMMAND,), (wire.TOPIC_HEAD, b"", b"")),
        (wire.TOPIC_COMMAND, b"\xc1", good),
        *((wire.TOPIC_COMMAND, wire.encode_header(*head), good) for head in ((0, 1, 1), (1, 0, 1), (1, 1, 0))),
        (wire.TOPIC_COMMAND, wire.encode_header(1, 1, 2**63), good),
        (wire.TOPIC_COMMAND, wire.encode_header(1, 1, 1), good, b"more"),
        (wire.TOPIC_COMMAND, wire.encode_header(1, 1, 1), good.replace(b"run-1", b"run-2")),
        (wire.TOPIC_COMMAND + b"x", wire.encode_header(1, 1, 1), good),
    ]
    with caplog.at_level(logging.WARNING):
        async with joined() as agent:
            before = agent.state
            for frames in hostile:
                bus.raw(*frames)
            bus.router.send_nowait([bus.peer, b"x"])
            bus.router.send_nowait([bus.peer, wire.encode_header(1, 0, 0), b"\x81\xa4type\xa5nosuc"])
            bus.router.send_nowait([bus.peer, wire.encode_header(1, 0, 0), wire.encode(wire.Goodbye())])
            bus.publish(PAUSE, seq=1)
            await bus.outcome(1)
            bus.say(wire.Replay(records=(bus.record(1, PAUSE),)))
            await bus.outcome(1)
            assert before.seq == 0 and agent.state.seq == 1
            assert agent.malformed == len(hostile) + 3
    lines = [line for line in caplog.messages if "malformed" in line]
    assert len(lines) == 1 and "dropped a malformed message from the bus (1 so far): a message has 2 frames" in lines[0]


@pytest.mark.parametrize("way", ["published", "resent"])
async def test_a_record_that_cannot_be_read_is_answered_and_the_next_one_applied(
    bus: Bus, engine: Engine, joined: Run, way: str
) -> None:
    """A dropped record would be a hole that no resend can fill."""
    good = msgspec.msgpack.decode(wire.encode(bus.envelope(PAUSE)))
    bodies = [
        wire.encode({**good, "ttl_ms": 10**16}),
        wire.encode({**good, "target": {"replicas": [-1]}}),
        wire.encode({**good, "body": {"type": "engine", "operation": "explode"}}),
        wire.encode({**good, "body": {"type": "profile", "action": "start", "step": 2**60}}),
        wire.encode({**good, "run": 7}),
        wire.encode({}),
        b"\x00",
        *([b"\x91" * 4_000 + b"\xc0"] if way == "published" else []),  # no bus can keep such a record
    ]
    async with joined() as agent:
        if way == "resent":
            page = [{"origin": 1, "seq": seq, "envelope": msgspec.Raw(body)} for seq, body in enumerate(bodies, 1)]
            page.append({"origin": 1, "seq": len(page) + 1, "envelope": good})
            message = wire.encode({"type": "replay", "records": page})
            bus.router.send_nowait([bus.peer, wire.encode_header(1, 0, len(page)), message])
        else:
            for seq, body in enumerate(bodies, 1):
                bus.raw(wire.TOPIC_COMMAND, wire.encode_header(1, 1, seq), body)
            bus.publish(PAUSE, seq=len(bodies) + 1)
        for seq in range(1, len(bodies) + 1):
            outcome = (await bus.outcome(seq)).outcome
            assert isinstance(outcome, Failed) and outcome.error is ErrorKind.UNSUPPORTED
            assert "can't read" in outcome.message
        assert isinstance((await bus.outcome(len(bodies) + 1)).outcome, Acted)
        assert agent.state.seq == len(bodies) + 1 and agent.malformed == 0 and len(engine.calls) == 1


async def test_an_unknown_command_is_answered_and_does_not_stop_the_stream(
    bus: Bus, engine: Engine, joined: Run
) -> None:
    async with joined():
        unknown = msgspec.structs.replace(
            bus.envelope(PAUSE), body=msgspec.Raw(msgspec.msgpack.encode({"type": "new"}))
        )
        bus.seq = 1
        bus.raw(wire.TOPIC_COMMAND, wire.encode_header(1, 1, 1), wire.encode(unknown))
        failed = (await bus.outcome(1)).outcome
        assert isinstance(failed, Failed) and failed.error == ErrorKind.UNSUPPORTED
        bus.publish(ProfileCommand(action="stop", step=1))
        assert (await bus.outcome(2)).outcome == Skipped(Reason.NOT_PROFILING)


@pytest.mark.every_loop
async def test_an_agent_that_ends_uploads_its_decisions_and_says_goodbye(
    bus: Bus, engine: Engine, tmp_path: Path, run: Run
) -> None:
    bus.heartbeat_ms = 3_600_000
    async with run(SECOND) as agent:
        await bus.admit()
        bus.publish(PAUSE)
        await bus.outcome(1)
        await reaches(agent, lambda state: state.engine.tokenizer == "present")
    decisions: list[Decision] = []
    await bus.next(wire.Goodbye)
    for message in bus.ignored:
        if isinstance(message, wire.DecisionBatch):
            assert message.first == len(decisions) + 1
            decisions.extend(message.decisions)
    assert decisions == recorded(tmp_path, SECOND)
    assert engine.closed


# Decisions in the run's log


async def take(bus: Bus, log: list[Decision], through: int) -> None:
    """Acknowledge uploads, as the bus does, until `log` holds `through` decisions."""
    arrived = [message for message in bus.ignored if isinstance(message, wire.DecisionBatch)]
    while len(log) < through:
        message = arrived.pop(0) if arrived else await bus.next(wire.DecisionBatch)
        new = message.decisions[len(log) + 1 - message.first :] if message.first <= len(log) + 1 else ()
        log.extend(new)
        bus.say(wire.Ack(journal=message.journal, through=len(log)))


async def test_decisions_are_uploaded_once_and_in_order(bus: Bus, engine: Engine, tmp_path: Path, joined: Run) -> None:
    log: list[Decision] = []
    async with joined(SECOND):
        for seq in range(1, 11):
            bus.publish(PAUSE)
            await bus.outcome(seq)
        await take(bus, log, 14)  # started, epoch seen, snapshot, observed, and the commands
    log.extend((await bus.next(wire.DecisionBatch)).decisions)  # asked to end
    assert log == recorded(tmp_path, SECOND)
    kinds = {type(wire.event_decoder.decode(decision.event)) for decision in log}
    assert CommandReceived in kinds


async def test_a_full_batch_is_uploaded_at_once_and_what_follows_its_ack_waits_for_more(
    bus: Bus, tmp_path: Path, joined: Run
) -> None:
    """Batches of a few decisions, as fast as acks come, would cost the bus four times as much."""
    bus.heartbeat_ms = 3_600_000
    log: list[Decision] = []
    async with joined(SECOND):
        for seq in range(1, 261):
            bus.publish(PAUSE)
            await bus.outcome(seq)
        await take(bus, log, 256)
        bus.ignored.clear()
        bus.publish(PAUSE)
        await bus.outcome(261)
        assert not [message for message in bus.ignored if isinstance(message, wire.DecisionBatch)]
    log.extend((await bus.next(wire.DecisionBatch)).decisions)
    assert log == recorded(tmp_path, SECOND)


@pytest.mark.every_loop
async def test_an_upload_continues_after_a_reconnect_without_holes_or_duplicates(
    bus: Bus, engine: Engine, tmp_path: Path, joined: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.link.upload.ACK_TIMEOUT_MS", 0)  # a lost batch is sent again with each heartbeat
    log: list[Decision] = []
    async with joined(SECOND) as agent:
        await take(bus, log, 4)
        bus.publish(PAUSE)
        while (lost := await bus.next(wire.DecisionBatch)).first < 5:
            pass  # sent again before its acknowledgement arrived
        assert lost.first == 5  # never acknowledged: the bus dies with it
        bus.epoch = 2
        bus.greet()
        bus.say(STRANGER)
        await bus.admit(recorded=4)
        again = await bus.next(wire.DecisionBatch)
        assert again.first == 5 and again.decisions[: len(lost.decisions)] == lost.decisions
        log.extend(again.decisions)
        bus.say(wire.Ack(journal=again.journal, through=len(log)))
        await reaches(agent, lambda state: state.epoch == 2)
        await take(bus, log, 6)
    assert log == recorded(tmp_path, SECOND)[: len(log)]


async def test_an_agent_whose_disk_lost_decisions_that_the_log_holds_refuses_to_run(
    bus: Bus, context: Context, engine: Engine, tmp_path: Path
) -> None:
    agent = Agent(bus=bus.address, identity=PRIMARY, engine=engine, state_dir=tmp_path, context=context)

    async def greet() -> None:
        await bus.next(wire.Hello)
        bus.say(bus.welcome(recorded=50))

    async with agent, anyio.create_task_group() as tasks:
        tasks.start_soon(greet)
        with pytest.raises(AgentError, match="the disk lost what was written"):
            await agent.run()


def test_importing_the_package_loads_neither_the_agent_nor_torch() -> None:
    program = "import sys, workers; print([m for m in ('workers.agent', 'anyio', 'zmq', 'torch') if m in sys.modules])"
    done = python("-c", program)
    assert done.stdout.strip() == "[]"
    program = "import sys; from workers import Agent, Engine; print(Agent.__name__, 'torch' in sys.modules)"
    done = python("-c", program)
    assert done.stdout.strip() == "Agent False"
