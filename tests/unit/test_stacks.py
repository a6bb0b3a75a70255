"""The stacks of an engine that does not answer: when the machine asks for them, and what py-spy finds for real."""

import stat
import threading
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from schemas import events
from schemas.config import AgentConfig
from schemas.errors import ExtraMissing
from schemas.events import Call, Pause, Returned, Tick
from schemas.outcomes import ErrorKind, Failed
from schemas.transport.sockets import Context
from tests.running import python
from tests.unit.journal_files import entries
from tests.unit.machines import agent as joined_agent
from tests.unit.machines import answers, command, fold
from tests.unit.small_bus import PAUSE, PRIMARY, Bus, Engine, reaches
from workers import stacks
from workers.agent import Agent
from workers.machine.readiness import trouble
from workers.stacks import StackDumps

NOTE = "The stacks of the agent's process are in /state/stacks-0.0.txt."


def files(folder: Path, agent: str = PRIMARY.agent) -> list[Path]:
    return sorted(folder.glob(f"stacks-{agent}-*.txt"))


def message(effects: list[events.Effect]) -> str:
    (answer,) = answers(effects)
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.ENGINE_TIMEOUT
    return answer.outcome.message


# --- the machine ------------------------------------------------------------------------------------------------------


def test_the_outcome_of_a_late_call_and_the_status_name_its_stacks() -> None:
    state, _ = fold(joined_agent(), command(PAUSE, ttl_ms=800))
    late, effects = fold(state, Tick(at_ms=800, stacks=NOTE))
    assert message(effects).endswith(f"nothing else is sent to this engine. {NOTE}")
    assert trouble(late).endswith(f"waits for the answer. {NOTE.rstrip('.')}")
    late, effects = fold(state, Tick(at_ms=800))
    assert message(effects).endswith("nothing else is sent to this engine.")
    assert trouble(late).endswith("waits for the answer")


# --- the agent --------------------------------------------------------------------------------------------------------


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


class Noted(StackDumps):
    """Takes no time, and notes which calls were looked into."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def dump(self, folder: Path, agent: str, call: str) -> str:
        self.calls.append(call)
        return NOTE


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_the_stacks_of_a_call_are_taken_shortly_before_its_deadline_and_once(
    bus: Bus, context: Context, tmp_path: Path
) -> None:
    engine, dumps = Hangs(), Noted()
    config = AgentConfig(hello_retry_ms=20, observe_ms=10)
    node = Agent(
        bus=bus.address,
        identity=PRIMARY,
        engine=engine,
        state_dir=tmp_path,
        stacks=dumps,
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
            outcome = (await bus.outcome(1)).outcome
        assert isinstance(outcome, Failed) and outcome.error is ErrorKind.ENGINE_TIMEOUT
        assert outcome.message.endswith(NOTE) and dumps.calls == ["pause"]
        engine.released.set()
        tasks.cancel_scope.cancel()
    journal = [entry.event for entry in entries(tmp_path / f"agent-{PRIMARY.agent}.journal")]
    assert any(NOTE.encode() in bytes(event) for event in journal)


# --- py-spy, for real -------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_the_function_in_which_an_engine_hangs_is_in_a_file(tmp_path: Path) -> None:
    engine = Hangs()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.perform, Pause("abort"), 0)
        await anyio.wait_all_tasks_blocked()
        note = await StackDumps().dump(tmp_path, PRIMARY.agent, "pause")
        engine.released.set()
    (file,) = files(tmp_path)
    assert str(file) in note and "waits_for_a_collective_that_never_comes (" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.anyio
@pytest.mark.one_loop
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
@pytest.mark.one_loop
async def test_what_py_spy_can_not_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = StackDumps(foreign_server=True)
    spy = tmp_path / "py-spy"
    monkeypatch.setattr(dumps, "_program", str(spy))
    assert "can't be run (No such file" in await dumps.dump(tmp_path, "0.0", "load")
    spy.write_text("#!/bin/sh\necho 'Error: Permission Denied: try sudo'\nexit 1\n")
    spy.chmod(0o755)
    assert "not permitted to read the process" in await dumps.dump(tmp_path, "0.0", "load")
    stopped = "Process 7: python\nPython v3.11.7 (/bin/python)\n\nError: Failed to get stack traces\n\nCaused by:\n"
    spy.write_text(f"#!/bin/sh\necho '{stopped}'\nexit 1\n")
    assert (await dumps.dump(tmp_path, "0.0", "load")).endswith("dumped: Error: Failed to get stack traces.")
    spy.write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr(stacks, "DUMP_S", 0.1)
    assert (await dumps.dump(tmp_path, "0.0", "load")).endswith("not done within 0.1 s.")
    spy.write_text("#!/bin/sh\nyes 'frame of a deep recursion' | head -1000\n")
    monkeypatch.setattr(stacks, "DUMP_S", 60.0)
    monkeypatch.setattr(stacks, "PROCESS_CHARACTERS", 10_000)
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
    assert ended.returncode == 3 and "its extra `stacks`" in ended.stderr, ended.stderr


def test_without_py_spy_there_are_no_dumps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExtraMissing, match="need py-spy, which is not installed"):
        StackDumps()
