"""The driver with unkind engines: reads that hang or raise, tasks of a backend that are cancelled, late calls."""

import asyncio
from pathlib import Path

import anyio
import pytest
from anyio import CancelScope
from anyio.lowlevel import checkpoint
from msgspec.structs import replace

from schemas import wire
from schemas.agent_status import RequestCounts
from schemas.commands import Drain
from schemas.errors import AgentError, EngineError
from schemas.events import (
    Call,
    EngineReturned,
    Event,
    Fault,
    Flush,
    Observation,
    Pause,
    Perform,
    Remedies,
    Resume,
    Returned,
    Tick,
)
from schemas.outcomes import Acted, ErrorKind, Failed
from schemas.transport.sockets import Context
from tests.unit.machines import command
from tests.unit.small_bus import FLUSH, PAUSE, RESUME, Bus, Engine, Run, reaches, running
from tests.waiting import until
from workers import agent as agent_module
from workers import driver
from workers.driver import EngineDriver
from workers.machine.state import Activity, AgentState

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


class Unkind(Engine):
    """Its reads go wrong while `reads` says how. `hanging` is set when one hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: str | BaseException = "well"
        self.hanging, self.released = anyio.Event(), anyio.Event()
        self.launched_from: str | None = None

    async def observe(self) -> Observation:
        if isinstance(self.reads, BaseException):
            raise self.reads
        if self.reads == "hang":
            self.hanging.set()
            await anyio.sleep_forever()
        if self.reads == "end late":
            self.hanging.set()
            with CancelScope(shield=True):
                await self.released.wait()
            raise asyncio.CancelledError
        return replace(await super().observe(), remedies=Remedies(launched_from=self.launched_from))


@pytest.fixture
def engine() -> Engine:
    return Unkind()


def unkind(engine: Engine) -> Unkind:
    assert isinstance(engine, Unkind)
    return engine


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [message for message in messages if text in message]


# --- observations -----------------------------------------------------------------------------------------------------


async def test_a_command_does_not_wait_for_an_observation_that_hangs(
    bus: Bus, engine: Engine, joined: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "OBSERVE_S", 3600.0)  # a command that waits for it is late
    monkeypatch.setattr(driver, "OBSERVE_SHARE", 0.002)  # of the time that is left after its call
    async with joined():
        unkind(engine).reads = "hang"
        with anyio.fail_after(60):
            await unkind(engine).hanging.wait()
        bus.publish(PAUSE)
        assert (await bus.outcome(1)).outcome == Acted(calls=("pause",))
        assert engine.calls == [Pause("abort")]


async def test_an_observation_that_ends_late_with_a_cancellation_of_its_own_ends_nothing_else(
    bus: Bus, engine: Engine, joined: Run
) -> None:
    """It gave way to a command, and its backend could not be cancelled at once."""
    async with joined() as agent:
        unkind(engine).reads = "end late"
        with anyio.fail_after(60):
            await unkind(engine).hanging.wait()
        bus.publish(PAUSE)
        await reaches(agent, lambda state: state.activity is not None)
        unkind(engine).reads = "well"
        unkind(engine).released.set()
        assert (await bus.outcome(1)).outcome == Acted(calls=("pause",))


async def test_an_engine_whose_observation_hangs_is_unknown_until_it_can_be_read(
    bus: Bus, engine: Engine, joined: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver, "OBSERVE_S", 0.05)
    async with joined() as agent:
        unkind(engine).reads = "hang"
        state = await reaches(agent, lambda state: state.engine.tokenizer == "unknown")
        assert state.engine.trouble == "fake 1 can't be read: Unkind.observe did not return within 0.05 s"
        unkind(engine).reads = "well"
        await reaches(agent, lambda state: state.engine.tokenizer == "present" and state.engine.trouble is None)
    assert len(warnings_of(caplog, "Unkind.observe did not return")) == 1


@pytest.mark.parametrize(
    ("raised", "says"),
    [(ZeroDivisionError("a bug"), "ZeroDivisionError: a bug"), (asyncio.CancelledError(), "was cancelled")],
    ids=lambda value: type(value).__name__,
)
async def test_an_observation_that_raises_is_logged_once_with_the_name_of_the_backend(
    raised: BaseException, says: str, bus: Bus, engine: Engine, joined: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async with joined() as agent:
        unkind(engine).reads = raised
        await reaches(agent, lambda state: state.engine.tokenizer == "unknown")
        unkind(engine).reads = "well"
        await reaches(agent, lambda state: state.engine.tokenizer == "present")
        bus.publish(PAUSE)
        assert (await bus.outcome(1)).outcome == Acted(calls=("pause",))
    (warned,) = warnings_of(caplog, "Unkind.observe raised")
    assert says in warned


@pytest.mark.parametrize("directory", [None, "/models/policy"])
async def test_an_engine_whose_first_weights_can_not_be_loaded_again_is_named_at_its_start(
    directory: str | None, bus: Bus, engine: Engine, joined: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    unkind(engine).launched_from = directory
    async with joined():
        bus.publish(PAUSE)
        await bus.outcome(1)
    said = [record.getMessage() for record in caplog.records if "can't be loaded again" in record.getMessage()]
    assert len(said) == (directory is None)


async def test_what_is_read_and_can_not_be_recorded_is_said_too(bus: Bus, engine: Engine, run: Run) -> None:
    engine.version = -1
    async with run() as agent:
        await bus.admit()
        state = await reaches(agent, lambda state: state.engine.trouble is not None)
        assert (
            state.engine.trouble is not None
            and "Unkind.observe returned what can't be recorded" in state.engine.trouble
        )


# --- calls ------------------------------------------------------------------------------------------------------------


async def test_a_cancelled_task_of_the_backend_is_an_outcome_and_the_driver_goes_on(
    bus: Bus, engine: Engine, joined: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def perform(call: Call, timeout_s: float) -> Returned:
        raise asyncio.CancelledError

    async with joined():
        with monkeypatch.context() as patched:
            patched.setattr(engine, "perform", perform)
            bus.publish(FLUSH)
            failed = (await bus.outcome(1)).outcome
        assert isinstance(failed, Failed) and failed.error is ErrorKind.UNKNOWN
        assert "a task of the engine's backend was cancelled" in failed.message
        bus.publish(RESUME)
        bus.publish(FLUSH)
        await bus.outcome(2)
        assert (await bus.outcome(3)).outcome == Acted(calls=("flush",))


async def test_a_call_whose_deadline_has_passed_is_not_begun() -> None:
    engine, events = Unkind(), list[Event]()
    trigger = command(PAUSE, ttl_ms=10)
    state = AgentState(activity=Activity(trigger=trigger, calls=(Pause("abort"),), call_id=1, deadline_ms=10))

    def handle(event: Event) -> None:
        events.append(event)
        if isinstance(event, EngineReturned):
            made.end()

    made = EngineDriver(engine, engine, None, 1000, lambda: state, handle, lambda: 10, lambda at_ms: None)
    made.request(Perform(call_id=1, call=Pause("abort")))
    with anyio.fail_after(60):
        await made.run()
    late, returned = events
    assert late == Tick(at_ms=10)  # so that the command is answered first
    assert isinstance(returned, EngineReturned) and isinstance(returned.result, Fault)
    assert returned.result.kind == "refused" and "not begun" in returned.result.message
    assert engine.calls == [] and engine.observations == 0


@pytest.mark.parametrize(
    ("call", "raises", "observations"), [(Flush(), None, 0), (Flush(), "lost", 1), (Pause("keep"), None, 1)]
)
async def test_an_engine_is_not_observed_after_a_call_that_no_observation_shows(
    call: Call, raises: str | None, observations: int
) -> None:
    """It may stand until it was observed. A call that failed may have been the end of it."""
    engine, seen = Unkind(), list[int]()
    engine.raises = EngineError(raises) if raises else None
    state = AgentState(activity=Activity(trigger=command(FLUSH), calls=(call,), call_id=1, deadline_ms=1000))

    def handle(event: Event) -> None:
        assert isinstance(event, EngineReturned) and (event.observation is not None) == bool(observations)
        seen.append(engine.observations)
        made.end()

    made = EngineDriver(engine, engine, None, 1000, lambda: state, handle, lambda: 10, lambda at_ms: None)
    made.request(Perform(call_id=1, call=call))
    with anyio.fail_after(60):
        await made.run()
    assert seen == [observations]


async def test_only_the_call_of_a_command_has_time_for_retries(bus: Bus, engine: Engine, run: Run) -> None:
    given: list[tuple[Call, float]] = []

    async def perform(call: Call, timeout_s: float) -> Returned:
        given.append((call, timeout_s))
        engine.generating = True
        return Returned()

    engine.generating = False  # so the agent resumes it by itself
    engine.perform = perform  # type: ignore[method-assign]
    async with run() as agent:
        await bus.admit()
        await agent.wait_ready()
        bus.publish(FLUSH)
        assert isinstance((await bus.outcome(1)).outcome, Acted)
    assert [call for call, _ in given] == [Resume(), Flush()]
    assert given[0][1] == 0 and given[1][1] > 1


async def test_a_command_does_not_wait_for_the_observation_after_a_call_of_the_machine(
    bus: Bus, engine: Engine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "OBSERVE_S", 3600.0)  # a command that waits for it is late
    monkeypatch.setattr(driver, "OBSERVE_SHARE", 0.002)  # of the time that is left after its call
    engine.generating = False  # so the agent resumes it by itself
    engine.begun = lambda: setattr(unkind(engine), "reads", "hang")
    async with run():
        await bus.admit()
        with anyio.fail_after(60):
            await unkind(engine).hanging.wait()
        bus.publish(PAUSE)
        assert isinstance((await bus.outcome(1)).outcome, Acted)
    assert engine.calls == [Resume(), Pause("abort")]


# --- the life of an agent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_life_that_ends_without_having_been_asked_raises(
    bus: Bus, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(self: EngineDriver) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(EngineDriver, "run", run)
    with pytest.RaisesGroup(AgentError):
        async with running(bus, context, Engine(), tmp_path):
            await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("raised", "says"),
    [(EngineError("there is nothing to attach to"), "nothing to attach to"), (asyncio.CancelledError(), "cancelled")],
    ids=lambda value: type(value).__name__,
)
async def test_an_open_that_raises_is_logged_and_followed_by_one_close(
    raised: BaseException, says: str, bus: Bus, context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Absent(Engine):
        closes = 0

        async def open(self) -> None:
            raise raised

        async def close(self) -> None:
            self.closes += 1
            raise OSError("nor to close")

    engine = Absent()
    with pytest.raises(EngineError, match=says):
        async with running(bus, context, engine, tmp_path):
            raise AssertionError("it was entered")
    assert engine.closes == 1
    (warned,) = warnings_of(caplog, "Absent.open raised: ")
    assert says in warned


async def test_a_close_that_is_cancelled_from_within_is_logged_and_ends_nothing_else(
    bus: Bus, context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stray(Engine):
        async def close(self) -> None:
            raise asyncio.CancelledError

    async with running(bus, context, Stray(), tmp_path):
        pass
    assert len(warnings_of(caplog, "Stray.close raised: a task of the engine's backend was cancelled")) == 1


async def test_a_close_that_ends_late_with_a_cancellation_of_its_own_ends_nothing_else(
    bus: Bus, context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took longer than closing may take, and its backend could not be cancelled at once."""
    monkeypatch.setattr(agent_module, "ENGINE_CLOSE_S", 0.0)

    class Late(Engine):
        async def close(self) -> None:
            with CancelScope(shield=True):
                await checkpoint()
            raise asyncio.CancelledError

    async with running(bus, context, Late(), tmp_path):
        pass
    assert len(warnings_of(caplog, "Late.close raised: a task of the engine's backend was cancelled")) == 1


# --- requests that may end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("says", [True, False])
async def test_a_drain_waits_for_requests_to_end_where_the_engine_says_how_many_run(
    says: bool, bus: Bus, tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "IDLE_S", 0.05)
    monkeypatch.setattr(driver, "LABEL_LAST_S", 0.02)
    engine = Engine()
    engine.running = 1 if says else None
    async with running(bus, context, engine, tmp_path) as agent:
        await bus.admit()
        await reaches(agent, lambda state: state.joined and state.engine.tokenizer == "present")
        bus.publish(Drain(grace_ms=60_000 if says else 300))
        if says:
            await reaches(agent, lambda state: state.idle_at_ms is not None)
            looked = engine.observations
            await until(lambda: engine.observations > looked + 5)
            engine.running, engine.waiting = 0, 1
            looked = engine.observations
            await until(lambda: engine.observations > looked + 5)
            assert engine.calls == []
            engine.waiting = 0
        assert (await bus.outcome(1)).outcome == Acted(calls=("await_idle", "pause") if says else ("pause",))
        assert engine.calls == [Pause("abort")]


async def test_an_agent_ends_well_once_its_drained_replica_is_retired(
    bus: Bus, tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "IDLE_S", 0.0)
    engine = Engine()
    engine.running = 0
    async with running(bus, context, engine, tmp_path) as agent, anyio.create_task_group() as tasks:
        await bus.admit()
        await reaches(agent, lambda state: state.joined and state.engine.tokenizer == "present")
        tasks.start_soon(agent.drain, 60)
        for _ in range(2):  # again, for as long as the bus has not heard of it
            assert (await bus.next(wire.Leave)).grace_ms == 60_000
        bus.publish(Drain(grace_ms=60_000))
        await bus.outcome(1)
        bus.say(wire.Rejoin(reason="retired", give_up=True))
        await bus.next(wire.Goodbye)
        tasks.cancel_scope.cancel()


async def test_an_agent_whose_replica_was_retired_waits_for_no_call_that_held_up_the_drain(
    bus: Bus, tmp_path: Path, context: Context
) -> None:
    engine = Engine()
    engine.gate = anyio.Event()
    async with running(bus, context, engine, tmp_path) as agent:
        await bus.admit()
        await reaches(agent, lambda state: state.joined and state.engine.tokenizer == "present")
        bus.publish(PAUSE)
        bus.publish(Drain(grace_ms=0))
        await reaches(agent, lambda state: len(state.queue) == 1)
        assert not agent.state.desired.draining
        bus.say(wire.Rejoin(reason="retired", give_up=True))
        await bus.next(wire.Goodbye)
    assert engine.calls == [Pause("abort")] and not engine.gate.is_set()


# --- how many requests there are --------------------------------------------------------------------------------------


async def test_the_bus_is_told_how_many_requests_there_are_if_that_changes_and_nothing_is_written_of_it(
    bus: Bus, engine: Engine, joined: Run
) -> None:
    engine.running, engine.waiting = 2, 5
    async with joined() as agent:
        assert await bus.next(RequestCounts) == RequestCounts(running=2, waiting=5)
        decided = agent.state
        engine.waiting = 6
        assert await bus.next(RequestCounts) == RequestCounts(running=2, waiting=6)
        looked, bus.ignored[:] = engine.observations, []
        await until(lambda: engine.observations > looked + 20)
        await bus.next(wire.TimeRequest)
        assert not any(isinstance(message, RequestCounts) for message in bus.ignored), "it did not change"
        assert agent.state is decided, "no decision was made"
        engine.running = None  # as after a call
        unkind(engine).reads = ValueError("It burns.")
        assert await bus.next(RequestCounts) == RequestCounts(), "an engine that can't be read"
