"""The stacks of an engine that does not answer: when the machine asks for them, and what py-spy finds for real."""

import stat
import threading
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from msgspec.structs import replace

from schemas import events
from schemas.carriers.sockets import Context
from schemas.commands import EngineCommand, Pushed, WeightSync
from schemas.config import AgentConfig
from schemas.errors import ConfigError
from schemas.events import Call, DumpStacks, MachineSettings, Perform, Returned, StacksDumped, Tick
from schemas.outcomes import ErrorKind, Failed
from tests.running import python
from tests.unit.journal_files import entries
from tests.unit.machines import PRESENT, answers, command, fold
from tests.unit.machines import agent as joined_agent
from tests.unit.small_bus import FLUSH, PAUSE, PRIMARY, Bus, Engine, reaches
from workers import stacks
from workers.agent import Agent
from workers.machine.decide import AgentState, is_written_first, next_deadline
from workers.machine.readiness import trouble
from workers.stacks import StackDumps

SLEEP = EngineCommand(operation="sleep", tags=frozenset({"weights"}))
PAUSED = replace(PRESENT, generating=False)
NOTE = "The stacks of the agent's process are in /state/stacks-0.0.txt."


def curious() -> AgentState:
    """An agent that asks for stacks."""
    state = joined_agent()
    return replace(state, settings=replace(state.settings, dump_stacks=True))


def files(folder: Path, agent: str = PRIMARY.agent) -> list[Path]:
    return sorted(folder.glob(f"stacks-{agent}-*.txt"))


def message(effects: list[events.Effect]) -> str:
    (answer,) = answers(effects)
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.ENGINE_TIMEOUT
    return answer.outcome.message


# --- the machine ------------------------------------------------------------------------------------------------------


def test_stacks_are_asked_for_once_shortly_before_the_deadline_and_named_in_the_outcome() -> None:
    state, _ = fold(curious(), command(PAUSE, ttl_ms=40_000))
    assert next_deadline(state) == 37_000
    state, effects = fold(state, Tick(at_ms=37_000))
    assert effects == [DumpStacks(1)] and next_deadline(state) == 40_000
    assert is_written_first(state, effects)
    state, effects = fold(state, Tick(at_ms=37_001), StacksDumped(at_ms=38_000, call_id=1, note=NOTE))
    assert effects == []
    state, effects = fold(state, Tick(at_ms=40_000))
    assert message(effects).endswith(f"nothing else is sent to this engine. {NOTE}")
    assert trouble(state).endswith(f"waits for the answer. {NOTE.rstrip('.')}")


def test_of_a_short_time_a_quarter_is_left_for_the_dump() -> None:
    state, _ = fold(curious(), command(PAUSE, ttl_ms=800))
    assert next_deadline(state) == 600


def test_an_outcome_does_not_wait_for_a_dump() -> None:
    state, effects = fold(curious(), command(PAUSE, ttl_ms=800), Tick(at_ms=900))
    assert [type(effect) for effect in effects] == [Perform, DumpStacks, events.Answer]
    assert "has not ended yet" in message(effects)
    state, effects = fold(state, StacksDumped(at_ms=950, call_id=1, note=NOTE))
    assert effects == [] and NOTE.rstrip(".") in trouble(state)


def test_each_call_of_a_command_is_looked_into_by_itself() -> None:
    state, _ = fold(curious(), command(SLEEP, ttl_ms=40_000), Tick(at_ms=37_000))
    state, effects = fold(state, events.EngineReturned(at_ms=38_000, call_id=1, result=Returned(), observation=PAUSED))
    assert next_deadline(state) == 39_500, "a quarter of what was left"
    state, effects = fold(state, StacksDumped(at_ms=38_100, call_id=1, note=NOTE), Tick(at_ms=39_500))
    assert effects == [DumpStacks(2)]
    _, effects = fold(state, Tick(at_ms=40_000))
    assert NOTE not in message(effects), "those were of the call before"


def test_nothing_is_asked_for_unless_it_was_chosen_nor_of_a_trainer_that_pushes_late() -> None:
    assert MachineSettings().dump_stacks is False
    state, effects = fold(joined_agent(), command(PAUSE, ttl_ms=800), Tick(at_ms=900))
    assert [type(effect) for effect in effects] == [Perform, events.Answer]

    state = replace(curious(), engine=replace(curious().engine, label="old", version_label="old"))
    sync = WeightSync(phase="prepare", version=1, source=Pushed(label="new"))
    state, effects = fold(state, command(sync))
    assert state.activity is not None
    paused = replace(PAUSED, label="old")
    state, effects = fold(state, events.EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=paused))
    state, effects = fold(state, command(WeightSync(phase="load", version=1), 2, ttl_ms=800))
    assert [type(effect.call) for effect in effects if isinstance(effect, Perform)] == [events.AwaitPush]
    assert next_deadline(state) == 800


def test_a_note_about_a_call_that_has_returned_changes_nothing() -> None:
    state, _ = fold(curious(), command(FLUSH, ttl_ms=800), Tick(at_ms=700))
    state, _ = fold(state, events.EngineReturned(at_ms=710, call_id=1, result=Returned(), observation=PRESENT))
    assert fold(state, StacksDumped(at_ms=720, call_id=1, note=NOTE)) == (state, [])


# --- py-spy, for real -------------------------------------------------------------------------------------------------


class Hangs(Engine):
    """An engine in the agent's process, which waits in a function of a name that a test can look for."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def waits_for_a_collective_that_never_comes(self) -> None:
        self.released.wait()

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        await to_thread.run_sync(self.waits_for_a_collective_that_never_comes, abandon_on_cancel=True)
        return await super().perform(call, timeout_s)


@pytest.mark.anyio
async def test_the_function_in_which_an_engine_hangs_is_in_a_file_that_the_journal_names(
    bus: Bus, context: Context, tmp_path: Path
) -> None:
    engine = Hangs()
    config = AgentConfig(hello_retry_ms=20, observe_ms=10)
    node = Agent(
        bus=bus.address,
        identity=PRIMARY,
        engine=engine,
        state_dir=tmp_path,
        stacks=StackDumps(),
        config=config,
        context=context,
    )
    async with node as agent, anyio.create_task_group() as tasks:
        tasks.start_soon(agent.run)
        tasks.start_soon(bus.serve)
        await bus.admit()
        await reaches(agent, lambda state: state.engine.tokenizer == "present" and state.joined)
        bus.publish(PAUSE, ttl_ms=1000)
        with anyio.fail_after(60):
            activity = (await agent.wait_until(lambda state: bool(state.activity and state.activity.stacks))).activity
            outcome = (await bus.outcome(1)).outcome
        assert isinstance(outcome, Failed) and outcome.error is ErrorKind.ENGINE_TIMEOUT
        engine.released.set()
        tasks.cancel_scope.cancel()
    (file,) = files(tmp_path)
    assert activity is not None and str(file) in str(activity.stacks)
    assert "waits_for_a_collective_that_never_comes (" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    journal = [entry.event for entry in entries(tmp_path / f"agent-{PRIMARY.agent}.journal")]
    assert any(str(file).encode() in bytes(event) for event in journal)


@pytest.mark.anyio
async def test_only_the_newest_files_are_kept_and_none_is_larger_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "FILE_BYTES", 100)
    dumps = StackDumps(foreign_server=True)
    (tmp_path / "stacks-9.0-20200101T000000.000Z.txt").write_text("of another agent")
    monkeypatch.chdir(tmp_path)
    notes = [await dumps.dump(Path(), "0.0", "load") for _ in range(stacks.KEPT + 2)]
    kept = files(tmp_path)
    assert len(kept) == stacks.KEPT and str(kept[-1]) in notes[-1]
    assert all(file.stat().st_size <= 100 for file in kept)
    assert (tmp_path / "stacks-9.0-20200101T000000.000Z.txt").exists()
    assert notes[0].endswith("the server's are not: this agent did not launch it.")


@pytest.mark.anyio
async def test_what_py_spy_can_not_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = StackDumps(foreign_server=True)
    spy = tmp_path / "py-spy"
    monkeypatch.setattr(dumps, "_program", str(spy))
    assert "can't be run (No such file" in await dumps.dump(tmp_path, "0.0", "load")
    spy.write_text("#!/bin/sh\necho 'Error: Permission Denied: try sudo'\nexit 1\n")
    spy.chmod(0o755)
    assert "not permitted to read the process" in await dumps.dump(tmp_path, "0.0", "load")
    spy.write_text("#!/bin/sh\necho 'Error: Failed to find python version from target process'\nexit 1\n")
    assert (await dumps.dump(tmp_path, "0.0", "load")).endswith("find python version from target process.")
    spy.write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr(stacks, "DUMP_S", 0.1)
    assert (await dumps.dump(tmp_path, "0.0", "load")).endswith("not done within 0.1 s.")
    spy.write_text("#!/bin/sh\nyes 'frame of a deep recursion'\n")
    monkeypatch.setattr(stacks, "DUMP_S", 60.0)
    monkeypatch.setattr(stacks, "PROCESS_BYTES", 10_000)
    note = await dumps.dump(tmp_path, "0.0", "load")
    (file,) = files(tmp_path)
    assert str(file) in note and file.stat().st_size < 11_000
    missing = await dumps.dump(tmp_path / "gone", "0.0", "load")
    assert "could not be written to" in missing and missing.endswith("No such file or directory.")


def test_an_agent_without_py_spy_does_not_start_with_the_option(tmp_path: Path) -> None:
    words = ["--dump-stacks", "--bus", "tcp://127.0.0.1:1", "--replica", "0", "--engine", "tiny"]
    code = (
        "import sysconfig, sys\n"
        f"sysconfig.get_path = lambda name: {str(tmp_path)!r}\n"
        "from controlplane.cli.__main__ import main\n"
        f"sys.argv = ['rolloutctl', 'agent', *{words!r}]\nmain()"
    )
    ended = python("-c", code, env={"PATH": str(tmp_path)})
    assert ended.returncode == 2 and "pip install 'rolloutctl[stacks]'" in ended.stderr, ended.stderr


def test_without_py_spy_there_are_no_dumps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="need py-spy, which is not installed"):
        StackDumps()
