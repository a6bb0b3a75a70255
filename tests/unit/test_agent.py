"""The agent's shell on real sockets, with a small bus and engine, on every event loop: commands, calls, restarts."""

import logging
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from schemas import wire
from schemas.commands import EngineCommand
from schemas.config import AgentConfig
from schemas.desired import Desired
from schemas.errors import (
    AgentError,
    CheckpointError,
    EngineError,
    LogFull,
    RefusedError,
    UnansweredError,
    UnsupportedError,
)
from schemas.events import (
    Answer,
    Call,
    CommandReceived,
    Effect,
    EngineReturned,
    Event,
    Observation,
    Pause,
    Perform,
    RequestResend,
    Resume,
    Returned,
    Tick,
)
from schemas.outcomes import Acted, ErrorKind, Failed, Reason, Skipped
from schemas.storage.record_file import RecordFile
from schemas.storage.records import RecordReader
from schemas.transport.sockets import Context
from tests.unit.journal_files import append, decoded, entries, entry
from tests.unit.small_bus import (
    FLUSH,
    PAUSE,
    PRIMARY,
    SECOND,
    STRANGER,
    Bus,
    Engine,
    Run,
    reaches,
    recorded,
)
from workers.agent import Agent

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


# Commands


async def test_a_skip_is_logged_at_debug_only(bus: Bus, joined: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Most nodes of a fleet skip most of the time."""
    with caplog.at_level(logging.DEBUG, "rolloutctl.agent"):
        async with joined(SECOND):
            bus.publish(PAUSE)
            assert (await bus.outcome(1)).outcome == Skipped(Reason.NOT_PRIMARY)
    assert [record.levelname for record in caplog.records if "not_primary" in record.getMessage()] == ["DEBUG"]


async def test_pages_of_replay_are_requested_until_nothing_is_missing(bus: Bus, joined: Run) -> None:
    async with joined(SECOND):
        bus.seq = 3
        bus.raw(wire.TOPIC_HEAD, wire.encode_header(bus.epoch, 0, 3), b"\xc0")
        for seq in (1, 2, 3):
            assert (await bus.next(wire.ResendRequest)).first == seq
            bus.say(wire.Replay(records=(bus.record(seq, PAUSE),)))
            await bus.outcome(seq)


async def test_choices_of_the_configuration_reach_the_machine(context: Context, engine: Engine, tmp_path: Path) -> None:
    config = AgentConfig(on_lost_bus="pause", wedged_after_s=7)
    agent = Agent(
        bus="tcp://127.0.0.1:1", identity=PRIMARY, engine=engine, state_dir=tmp_path, context=context, config=config
    )
    async with agent:
        settings = agent.state.settings
    assert (settings.on_lost_bus, settings.wedged_after_ms) == ("pause", 7000)


# Engine calls


async def test_a_call_is_awaited_past_its_deadline_and_never_cancelled(bus: Bus, engine: Engine, run: Run) -> None:
    engine.gate = anyio.Event()
    async with run() as agent:
        await bus.admit()
        await reaches(agent, lambda state: state.engine.tokenizer == "present")
        bus.publish(PAUSE, ttl_ms=20)
        late = (await bus.outcome(1)).outcome
        assert isinstance(late, Failed) and late.error == ErrorKind.ENGINE_TIMEOUT
        bus.publish(FLUSH)
        busy = (await bus.outcome(2)).outcome
        assert isinstance(busy, Failed) and busy.error == ErrorKind.ENGINE_BUSY
        engine.gate.set()
        await reaches(agent, lambda state: state.activity is None)
        assert engine.calls == [Pause("abort"), Resume()]  # it failed, so it does not last


async def test_the_failure_of_a_late_call_is_in_the_journal_before_it_is_sent(
    bus: Bus, engine: Engine, tmp_path: Path, run: Run
) -> None:
    """An agent that was killed right after it would find a call that was cut off, and may see that it was done."""
    engine.gate = anyio.Event()
    journal, told = tmp_path / "agent-0.0.journal", []

    def hear(event: Event, effects: Sequence[Effect]) -> None:  # in the same step, so nothing is written in between
        if any(isinstance(effect, Answer) for effect in effects):
            told.append((event, decoded(entries(journal)[-1].event)))

    async with run() as agent:
        agent.decisions.add(hear)
        await bus.admit()
        await reaches(agent, lambda state: state.engine.tokenizer == "present")
        bus.publish(PAUSE, ttl_ms=20)
        late = (await bus.outcome(1)).outcome
        engine.gate.set()
    assert isinstance(late, Failed) and late.error == ErrorKind.ENGINE_TIMEOUT
    ((event, last_on_disk),) = told
    assert isinstance(event, Tick) and last_on_disk == event


async def test_an_agent_that_is_cancelled_awaits_its_call_and_records_the_result(
    bus: Bus, engine: Engine, tmp_path: Path, run: Run
) -> None:
    gate = engine.gate = anyio.Event()
    begun = anyio.Event()
    engine.begun = begun.set

    async with anyio.create_task_group() as tasks:

        async def let_it_end() -> None:
            await begun.wait()
            scope.cancel()
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            gate.set()

        with anyio.CancelScope() as scope:
            async with run():
                tasks.start_soon(let_it_end)
                await bus.admit()
                bus.publish(PAUSE)
                await anyio.sleep_forever()
        assert isinstance((await bus.outcome(1)).outcome, Acted)
        await bus.next(wire.Goodbye)
    last = [wire.event_decoder.decode(decision.event) for decision in recorded(tmp_path)][-1]
    assert isinstance(last, EngineReturned) and last.result == Returned()


async def test_an_agent_that_is_cancelled_begins_no_queued_call(
    bus: Bus, engine: Engine, tmp_path: Path, run: Run
) -> None:
    gate = engine.gate = anyio.Event()
    begun = anyio.Event()
    engine.begun = begun.set

    async with anyio.create_task_group() as tasks:

        async def let_it_end() -> None:
            await begun.wait()
            with anyio.fail_after(10):
                while len(agents[0].state.queue) < 1:
                    await anyio.lowlevel.checkpoint()
            scope.cancel()
            await agents[0].wait_until(lambda state: state.stopping)
            gate.set()

        agents: list[Agent] = []
        with anyio.CancelScope() as scope:
            async with run() as agent:
                agents.append(agent)
                tasks.start_soon(let_it_end)
                await bus.admit()
                bus.publish(EngineCommand(operation="sleep"))  # a pause, then the sleep
                bus.publish(FLUSH)
                await anyio.sleep_forever()
        cut_short = (await bus.outcome(1)).outcome
        assert isinstance(cut_short, Failed) and "sleep was not begun" in cut_short.message
        await bus.next(wire.Goodbye)
    assert engine.calls == [Pause("abort")]
    effects = [wire.effects_decoder.decode(decision.effects) for decision in recorded(tmp_path)]
    assert [effect.call for some in effects for effect in some if isinstance(effect, Perform)] == [Pause("abort")]


async def test_an_observation_under_way_does_not_hold_up_an_agent_that_ends(
    engine: Engine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = anyio.Event()

    async def observe() -> Observation:
        hangs.set()
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(engine, "observe", observe)
    with anyio.fail_after(10):
        async with run():
            await hangs.wait()
    assert engine.closed


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (EngineError("it said no"), ErrorKind.ENGINE_ERROR),
        (CheckpointError("it is cut off"), ErrorKind.SOURCE_REFUSED),
        (UnsupportedError("it has no such route"), ErrorKind.UNSUPPORTED),
        (RefusedError("requests run"), ErrorKind.REFUSED),
        (UnansweredError("the connection broke"), ErrorKind.UNKNOWN),
        (ZeroDivisionError("a bug in a backend"), ErrorKind.ENGINE_ERROR),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_exception_of_the_engine_is_an_outcome(
    raised: Exception, kind: ErrorKind, bus: Bus, engine: Engine, run: Run
) -> None:
    engine.raises = raised
    async with run():
        await bus.admit()
        bus.publish(FLUSH)
        failed = (await bus.outcome(1)).outcome
        assert isinstance(failed, Failed) and failed.error == kind
        assert str(raised) in failed.message


async def test_a_result_that_cannot_be_recorded_fails_and_leaves_the_journal_readable(
    bus: Bus, engine: Engine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def perform(call: Call, timeout_s: float) -> Returned:
        return Returned(digest="")

    monkeypatch.setattr(engine, "perform", perform)
    async with run():
        await bus.admit()
        bus.publish(FLUSH)
        assert isinstance((await bus.outcome(1)).outcome, Failed)
    async with run() as agent:
        assert agent.state.seq == 1


async def test_only_changes_of_the_engine_are_recorded(engine: Engine, tmp_path: Path, run: Run) -> None:
    async with run(SECOND) as agent:
        await reaches(agent, lambda state: state.engine.tokenizer == "present")
        with anyio.fail_after(10):
            while engine.observations < 5:
                await anyio.lowlevel.checkpoint()
    assert len(recorded(tmp_path, SECOND)) == 3  # started, observed, asked to end


# Restart


async def test_an_agent_continues_from_its_journal(bus: Bus, engine: Engine, run: Run) -> None:
    async with run():
        first = await bus.admit()
        bus.publish(PAUSE)
        await bus.outcome(1)
    async with run() as agent:
        assert (agent.state.epoch, agent.state.seq, agent.state.engine.generating) == (1, 1, False)
        second = await bus.next(wire.Hello)
        assert second.journal == first.journal and second.incarnation != first.incarnation


async def test_a_cut_off_call_is_resolved_by_observing_the_engine(
    bus: Bus, engine: Engine, tmp_path: Path, run: Run
) -> None:
    async with run() as agent:
        await bus.admit()
        await agent.wait_ready()
        bus.publish(PAUSE)
        await bus.outcome(1)
    path = tmp_path / "agent-0.0.journal"
    whole = entries(path)
    with RecordReader.open(path) as file:
        header = file.header
    intent = next(
        index
        for index, found in enumerate(whole)
        if isinstance(wire.event_decoder.decode(found.event), CommandReceived)
        and isinstance(wire.effects_decoder.decode(found.effects)[0], Perform)
    )
    path.unlink()
    append(path, whole[: intent + 1], header)  # as a kill in the middle of the call would leave it
    paused = Desired(generation="paused")
    engine.calls.clear()
    async with run() as agent:
        await bus.admit(paused)
        await reaches(agent, lambda state: state.joined and state.interrupted is None)
        bus.say(wire.Replay(records=(bus.record(1, PAUSE),)))
        assert await bus.outcome(1) == wire.CommandOutcome(outcome=Acted(calls=("pause",)), rule=10)
        assert engine.calls == []


async def test_a_journal_of_other_logic_is_not_continued(bus: Bus, tmp_path: Path, run: Run) -> None:
    async with run():
        await bus.admit()
        bus.publish(PAUSE)
        await bus.outcome(1)
    path = tmp_path / "agent-0.0.journal"
    events = [wire.event_decoder.decode(found.event) for found in entries(path)]
    command = next(event for event in events if isinstance(event, CommandReceived))
    append(path, [entry(command, (RequestResend(7),))])
    with pytest.raises(AgentError, match="cannot be continued.*would be a different one today"):
        async with run():
            pass


async def test_an_agent_that_cannot_write_its_journal_stops_acting(
    bus: Bus, context: Context, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(bus=bus.address, identity=PRIMARY, engine=engine, state_dir=tmp_path, context=context)

    def full(file: RecordFile) -> None:
        raise LogFull(f"{file.path}: no space left")

    async def drive() -> None:
        await bus.admit()
        await agent.wait_ready()
        monkeypatch.setattr(RecordFile, "commit", full)
        bus.publish(PAUSE)

    with pytest.raises(AgentError, match="cannot write its decisions to its journal"):
        async with agent, anyio.create_task_group() as tasks:
            tasks.start_soon(drive)
            tasks.start_soon(bus.serve)
            with pytest.raises(AgentError, match="does nothing more"):
                await agent.run()
            tasks.cancel_scope.cancel()
    assert engine.calls == []
    monkeypatch.undo()
    await bus.next(wire.Goodbye)
    assert not [message for message in bus.ignored if isinstance(message, wire.CommandOutcome)]


async def test_an_agent_joins_a_bus_of_another_run_with_a_new_journal(bus: Bus, tmp_path: Path, run: Run) -> None:
    async with run() as agent:
        bus.epoch = 5
        bus.greet()
        first = await bus.admit()
        bus.publish(PAUSE)
        await bus.outcome(1)
        bus.run, bus.epoch, bus.seq = "run-2", 1, 0
        bus.greet()
        bus.say(STRANGER)
        await bus.next(wire.Hello)
        bus.say(bus.welcome())
        await bus.next(wire.Goodbye)
        second = await bus.admit()
        assert second.journal != first.journal and second.incarnation != first.incarnation
        await reaches(agent, lambda state: state.joined and state.epoch == 1 and state.seq == 0)
        bus.publish(FLUSH)
        assert isinstance((await bus.outcome(1)).outcome, Acted)
    assert (tmp_path / "agent-0.0.previous.journal").exists()
