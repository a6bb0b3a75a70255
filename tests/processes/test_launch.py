"""Servers that an agent launches: real guards and processes; whatever is killed, nothing is left behind."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import anyio
import psutil
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from schemas.errors import ConfigError, EngineError
from schemas.events import Call, Flush, Observation, Returned
from tests.processes.launches import (
    LONGEST_S,
    QUIET,
    STUBBORN,
    TREE,
    Servers,
    gone,
    guard_of,
    lives,
    printed,
    python,
    status_when,
    tree,
)
from tests.waiting import until
from workers.engine import Engine
from workers.server import guard
from workers.server.guard import RestartPolicy
from workers.server.launch import LaunchedEngine, ServerProcess

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

AGENT = """
import json, os, sys, anyio
from pathlib import Path
from workers.server.launch import ServerProcess
log, how, *command = sys.argv[1:]
async def main():
    server = ServerProcess(command, log=Path(log), grace_s=600)
    server.start()
    if (child := os.fork() if how == "fork" else None) == 0:  # it holds all that the agent holds
        os.read(0, 1)
        os._exit(0)
    while (status := server.status()).pid is None or not status.log_tail or status.log_tail[-1].startswith("---"):
        await anyio.sleep(0.01)
    print(json.dumps({"pid": status.pid, "last_line": status.log_tail[-1], "child": child}), flush=True)
    await anyio.sleep_forever()
anyio.run(main)
"""


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        yield Servers(tmp_path, stack)


class Attached:
    """An engine that finds its server by the file that the server writes once it is up."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign
        self.calls: list[str] = []

    async def open(self) -> None:
        self.calls.append("open")

    async def observe(self) -> Observation:
        instance = self.sign.read_text() if self.sign.exists() else None
        tokenizer: Literal["present", "unknown"] = "unknown" if instance is None else "present"
        return Observation(engine="attached 1", instance=instance, tokenizer=tokenizer, generating=True)

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        self.calls.append(f"{type(call).__name__} {timeout_s:g}")
        return Returned()

    async def close(self) -> None:
        self.calls.append("close")


# --- start and end ----------------------------------------------------------------------------------------------------


async def test_a_server_is_ended_with_all_that_it_started(servers: Servers) -> None:
    server = servers(TREE)
    assert server.status().state == "ended"
    server.start()
    server.start()
    status = await status_when(server, printed("tree"))
    processes = tree(status)
    assert (status.pid, status.launches, status.exit_code) == (processes[0].pid, 1, None)
    ended = await server.end()
    assert not any(lives(process) for process in processes)
    assert (ended.state, ended.pid, ended.launches, ended.exit_code) == ("ended", None, 1, -signal.SIGTERM)
    assert ended.last_exit == "was killed by SIGTERM"
    assert await server.end() == ended


async def test_a_server_that_ignores_sigterm_is_killed_when_the_grace_is_over(servers: Servers) -> None:
    server = await servers.up(STUBBORN, grace_s=0.2)
    assert (await server.end()).exit_code == -signal.SIGKILL


async def test_the_server_gets_sigterm_before_its_children(servers: Servers) -> None:
    orderly = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"])
def end(*_):
    lives = child.poll() is None
    child.kill()
    sys.exit(7 if lives else 8)
signal.signal(signal.SIGTERM, end)
while True:
    signal.pause()
"""
    server = await servers.up(orderly)
    assert (await server.end()).exit_code == 7


async def test_an_end_that_nothing_waits_for_continues(servers: Servers) -> None:
    server, processes = await servers.tree()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await server.end()
    await gone(processes)


async def test_the_output_of_a_server_is_appended_and_never_blocks_it(servers: Servers) -> None:
    (servers.folder / "server.log").write_text("of yesterday\n")
    server = servers(f"import sys; sys.stdout.write('x' * 300_000 + '\\n'); {QUIET}")
    server.start()
    status = await status_when(server, printed("up"))
    assert "of yesterday" not in status.log_tail and max(map(len, status.log_tail)) == 300
    assert (servers.folder / "server.log").read_text().startswith("of yesterday\n--- rolloutctl: launch 1 at ")


async def test_what_cannot_be_launched_is_an_error(servers: Servers, tmp_path: Path) -> None:
    for command in ((), ("no-such-server", "--port", "1")):
        with pytest.raises(ConfigError, match="no program"):
            ServerProcess(command, log=tmp_path / "log").start()
    with pytest.raises(ConfigError, match="output can't be written"):
        ServerProcess(python(QUIET), log=Path(__file__) / "log").start()
    with pytest.raises(ConfigError, match="not a plain file"):
        ServerProcess(python(QUIET), log=Path(os.devnull)).start()
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x00neither a program nor a script")
    broken.chmod(0o755)
    server = ServerProcess([str(broken)], log=tmp_path / "log")
    server.start()
    status = await status_when(server, lambda status: status.state == "given up")
    assert "can't be started" in status.note and (status.launches, status.last_exit) == (0, "never ran")
    await server.end()


# --- something dies ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def agent_process(folder: Path, code: str, how: str) -> AsyncIterator[tuple[Process, dict[str, Any]]]:
    """A process that holds a server, and its report once that runs. It is killed at the end, if not before."""
    command = [*python(AGENT), str(folder / "server.log"), how, *python(code)]
    async with await anyio.open_process(command, stderr=None) as agent:
        assert agent.stdout is not None
        try:
            with anyio.fail_after(LONGEST_S):
                report = await BufferedByteReceiveStream(agent.stdout).receive_until(b"\n", 1000)
            yield agent, json.loads(report)
        finally:
            with suppress(ProcessLookupError):
                agent.kill()


async def test_nothing_is_left_when_the_agent_is_killed(tmp_path: Path) -> None:
    async with agent_process(tmp_path, TREE, "alone") as (agent, report):
        processes = [psutil.Process(int(pid)) for pid in report["last_line"].split()[1:]]
        processes.append(guard_of(processes[0]))
        agent.kill()
        await gone(processes)


async def test_nothing_is_left_when_agent_and_guard_are_killed_together(tmp_path: Path) -> None:
    async with agent_process(tmp_path, TREE, "alone") as (agent, report):
        processes = [psutil.Process(int(pid)) for pid in report["last_line"].split()[1:]]
        guards = [guard_of(processes[0]), guard_of(guard_of(processes[0]))]
        agent.kill()
        guards[0].kill()
        await gone([*processes, *guards])


async def test_a_full_disk_under_the_log_stops_no_restart(servers: Servers) -> None:
    server = servers("import signal; signal.pause()")
    server.start()
    pid = (await status_when(server, lambda status: status.state == "running")).pid
    running = psutil.Process(pid)
    size = (servers.folder / "server.log").stat().st_size
    guard_of(running).rlimit(psutil.RLIMIT_FSIZE, (size, size))
    running.kill()
    status = await status_when(server, lambda status: status.state == "running" and status.launches == 2)
    assert status.pid != pid


async def test_a_child_of_the_agent_keeps_no_server_alive(tmp_path: Path) -> None:
    async with agent_process(tmp_path, QUIET, "fork") as (agent, report):
        server = psutil.Process(report["pid"])
        agent.kill()
        await gone([server])
        assert lives(psutil.Process(report["child"]))


async def test_an_agent_that_comes_back_waits_until_its_former_server_is_gone(servers: Servers) -> None:
    async with agent_process(servers.folder, STUBBORN, "alone") as (agent, report):
        former = psutil.Process(report["pid"])
        agent.kill()
        server = servers(QUIET)
        server.start()
        waited = await status_when(server, lambda status: bool(status.note) or status.state == "running")
        assert waited.state == "starting" and "another server still runs" in waited.note
        assert lives(former)
        former.kill()
        status = await status_when(server, printed("up"))
        assert not lives(former) and status.launches == 1


async def test_a_killed_guard_takes_the_server_along_and_is_replaced(servers: Servers) -> None:
    server, processes = await servers.tree()
    guard_of(processes[0]).kill()
    status = await status_when(server, lambda status: status.launches == 2 and printed("tree")(status))
    assert not any(lives(process) for process in processes)
    assert not {process.pid for process in processes} & {process.pid for process in tree(status)}


async def test_guards_that_are_killed_again_and_again_are_not_replaced(servers: Servers) -> None:
    server = servers(QUIET, restarts=RestartPolicy(most=1, first_wait_s=0.01))
    server.start()
    killed: list[psutil.Process] = []
    while len(killed) < 2:
        status = await status_when(server, lambda status: status.launches > len(killed) and printed("up")(status))
        killed.append(psutil.Process(status.pid))
        guard_of(killed[-1]).kill()
        await gone(killed)
    status = await status_when(server, lambda status: status.state == "given up")
    assert status.note == "its guard was lost 2 times"


async def test_a_guard_that_gets_sigterm_ends_the_server(servers: Servers) -> None:
    server, processes = await servers.tree()
    guard_of(processes[0]).terminate()
    status = await status_when(server, lambda status: status.state == "ended")
    assert status.note == "the guard received SIGTERM"
    assert not any(lives(process) for process in processes)


def test_a_guard_without_an_order_ends() -> None:
    command = [sys.executable, "-P", guard.__file__]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# --- the server ends by itself ----------------------------------------------------------------------------------------


async def test_a_server_that_ends_is_restarted_once_its_tree_is_gone(servers: Servers) -> None:
    server, processes = await servers.tree()
    processes[0].kill()
    status = await status_when(server, lambda status: status.launches == 2 and printed("tree")(status))
    assert status.exit_code == -signal.SIGKILL and status.pid != processes[0].pid
    assert not any(lives(process) for process in processes)


async def test_nothing_is_started_beside_what_a_server_left_behind(servers: Servers) -> None:
    leaving = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
os.write(1, b"left %d\\n" % child.pid)
sys.exit(5)
"""
    server = servers(leaving, restarts=RestartPolicy(most=1, first_wait_s=0.01), grace_s=600)
    server.start()
    for launch in (1, 2):
        status = await status_when(server, lambda status: status.exit_code == 5 and status.pid is None)
        assert (status.state, status.launches) == ("waiting to restart", launch)
        assert status.note == "once everything that it started is gone"
        left = psutil.Process(int(status.log_tail[-1].split()[1]))
        assert lives(left)
        left.kill()
        await status_when(server, lambda status: status.launches > launch or status.state == "given up")  # noqa: B023
    await status_when(server, lambda status: status.state == "given up")


async def test_a_server_that_ends_again_and_again_is_given_up(servers: Servers) -> None:
    server = servers("import sys; sys.exit('no such model')", restarts=RestartPolicy(most=2, first_wait_s=0.01))
    server.start()
    status = await status_when(server, lambda status: status.state == "given up")
    assert (status.launches, status.pid, status.exit_code) == (3, None, 1)
    assert status.note == "it was restarted 2 times within 3600 s" and status.log_tail == ("no such model",)
    assert (await server.end()).state == "given up"


async def test_a_wait_is_cut_short_by_the_end(servers: Servers) -> None:
    server = servers("pass", restarts=RestartPolicy(first_wait_s=3000, longest_wait_s=3000))
    server.start()
    # It first waits for what the server left behind, then for its time.
    status = await status_when(server, lambda status: status.note == "in 3000 s")
    assert (status.state, status.last_exit) == ("waiting to restart", "ended with exit code 0")
    assert (await server.end()).launches == 1


def test_waits_grow_and_starts_are_counted_within_the_window() -> None:
    plain = RestartPolicy(most=7, window_s=100)
    assert [plain.wait_s([0.0] * ends, 0) for ends in range(1, 9)] == [1, 2, 4, 8, 16, 30, 30, None]
    assert plain.wait_s([0.0] * 7 + [100.0], 100) == 1
    assert RestartPolicy(most=0).wait_s([0.0], 0) is None
    assert RestartPolicy(most=10_000).wait_s([0.0] * 10_000, 0) == 30


# --- the engine -------------------------------------------------------------------------------------------------------

SIGNED = """
import os, pathlib, signal, sys
sign = pathlib.Path("{sign}")
sign.with_suffix(".new").write_text("server")
print("loads", flush=True)
{between}
sign.with_suffix(".new").rename(sign)
signal.pause()
"""


async def observed(engine: Engine, holds: Callable[[Observation], bool]) -> Observation:
    with anyio.fail_after(LONGEST_S):
        while True:
            if holds(seen := await engine.observe()):
                return seen
            await anyio.sleep(0.01)


async def test_an_engine_lives_with_its_server(servers: Servers, tmp_path: Path) -> None:
    inner = Attached(tmp_path / "sign")
    server = servers(SIGNED.format(sign=inner.sign, between=""))
    engine = LaunchedEngine(inner, server)
    await engine.open()
    first = await observed(engine, lambda seen: seen.tokenizer == "present")
    assert first.engine == "attached 1" and first.generating and (first.instance or "").endswith(".server")
    assert await engine.perform(Flush(), 2.5) == Returned()

    pid = server.status().pid
    inner.sign.write_text("somebody else's server")
    os.kill(pid or pytest.fail("it does not run"), signal.SIGKILL)
    second = await observed(engine, lambda seen: seen.instance != first.instance)
    await status_when(server, lambda status: status.launches == 2 and printed("loads")(status))
    third = await observed(engine, lambda seen: (seen.instance or "").endswith(".server"))
    assert second.tokenizer == "unknown" or server.status().launches == 2
    assert third.instance != first.instance

    await engine.close()
    assert inner.calls == ["open", "Flush 2.5", "close"]
    assert server.status().state == "ended"
    assert (await engine.observe()).tokenizer == "unknown"


async def test_an_engine_that_does_not_open_leaves_no_server(servers: Servers, tmp_path: Path) -> None:
    class Refusing(Attached):
        async def open(self) -> None:
            raise EngineError("not today")

    server = servers(TREE)
    with pytest.raises(EngineError, match="not today"):
        await LaunchedEngine(Refusing(tmp_path / "sign"), server).open()
    assert server.status().state == "ended"


async def test_a_long_start_is_logged_now_and_then(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rolloutctl.launch")
    inner = Attached(tmp_path / "sign")
    go = tmp_path / "go"
    os.mkfifo(go)
    server = servers(SIGNED.format(sign=inner.sign, between=f"open('{go}').read()"))
    skipped_s = 0.0

    def clock() -> float:
        return server.status().since_s + skipped_s

    engine = LaunchedEngine(inner, server, clock=clock)
    await engine.open()
    await status_when(server, printed("loads"))
    for skipped_s in (0.0, 9.9, 10.0, 12.0, 19.9, 20.0):  # noqa: B007 (the clock reads it)
        assert (await engine.observe()).tokenizer == "unknown"
    go.write_text("")
    await until(inner.sign.exists)
    skipped_s = 73.0
    await observed(engine, lambda seen: seen.tokenizer == "present")
    await engine.observe()
    lines = [record.message for record in caplog.records]
    assert lines[0].startswith("tiny server launched (1), pid ")
    assert lines[1:] == [
        "tiny server still starting after 10 s: loads",
        "tiny server still starting after 20 s: loads",
        "tiny server is up, after 73 s",
    ]
    await engine.close()


async def test_a_server_that_does_not_come_up_in_time_is_restarted(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rolloutctl")  # whatever an earlier test has left
    inner = Attached(tmp_path / "sign")
    hangs_once = "first = pathlib.Path('first'); first.exists() or (first.touch(), signal.pause())"
    server = servers(SIGNED.format(sign=inner.sign, between=hangs_once.replace("first'", f"{tmp_path}/first'")))
    engine = LaunchedEngine(inner, server, up_within_s=300, clock=lambda: server.status().since_s + passed_s)
    passed_s = 299.0
    await engine.open()
    await until((tmp_path / "first").exists)
    await until(lambda: server.status().state == "running")  # the server may run before its guard reports it
    assert (await engine.observe()).tokenizer == "unknown" and not caplog.records
    passed_s = 301.0  # a difference of two clock readings is not exact, so not just 300
    await engine.observe()
    passed_s = 0.0
    await observed(engine, lambda seen: seen.tokenizer == "present")
    passed_s = 301.0
    inner.sign.unlink()  # once it was up, it may be away for a while
    await engine.observe()
    status = server.status()
    assert (status.state, status.launches, status.exit_code) == ("running", 2, -signal.SIGKILL)
    server.restart(1)
    lines = [record.message for record in caplog.records]
    assert lines[0] == "tiny server is not up after 301 s: restarting it"
    assert len([line for line in lines if "not up" in line]) == 1
    await engine.close()
    assert server.status().launches == 2


async def test_no_two_launches_look_the_same(servers: Servers, tmp_path: Path) -> None:
    server = servers(QUIET)
    seen = set()
    for _ in range(3):
        engine = LaunchedEngine(Attached(tmp_path / "sign"), server)
        await engine.open()
        await status_when(server, printed("up"))
        seen |= {(await engine.observe()).instance, (await engine.observe()).instance}
        await engine.close()
        seen.add((await engine.observe()).instance)
    assert len(seen) == 6 and None not in seen


async def test_that_a_server_stays_down_is_logged_once(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = servers("import sys; sys.exit('no such model')", restarts=RestartPolicy(most=0))
    engine = LaunchedEngine(Attached(tmp_path / "sign"), server)
    await engine.open()
    await status_when(server, lambda status: status.state == "given up")
    (tmp_path / "sign").write_text("another server on its port")
    for _ in range(3):
        assert (await engine.observe()).tokenizer == "unknown"
    (error,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert error.startswith("tiny server ended with exit code 1 and stays down: it was restarted 0 times within")
    assert str(server.log) in error and error.endswith("\n  no such model")
    await engine.close()


async def test_the_first_launch_may_differ_and_a_guard_that_is_lost_does_not_repeat_it(tmp_path: Path) -> None:
    print_and_stay = "import signal; print('{}', flush=True); signal.pause()"
    server = ServerProcess(
        python(print_and_stay.format("again")),
        first=python(print_and_stay.format("first")),
        log=tmp_path / "server.log",
        restarts=RestartPolicy(first_wait_s=0.01),
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.end)
        server.start()
        status = await status_when(server, printed("first"))
        server.restart(status.launches)
        status = await status_when(server, printed("again"))
        assert status.launches == 2 and status.pid is not None
        guard_of(psutil.Process(status.pid)).kill()
        status = await status_when(server, lambda status: status.launches == 3 and printed("again")(status))
