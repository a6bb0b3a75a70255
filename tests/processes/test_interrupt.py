"""Ctrl-C ends every command, also one that waits for what never comes. Nothing here would end by itself."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread

import psutil
import pytest

from controlplane import ControlPlane
from controlplane.cli.interrupt import CODE
from tests.processes.launches import lives
from tests.running import environment, python
from tests.waiting import wait_until

HUNG = """
import threading
from anyio import to_thread
from tests.unit.small_bus import Engine as Small


class Engine(Small):
    async def perform(self, call, timeout_s):
        print("called", flush=True)
        return await to_thread.run_sync(threading.Event().wait)  # for ever
"""


class Command:
    """One command as a process, with its output in files."""

    def __init__(self, folder: Path, *words: object, env: dict[str, str] | None = None) -> None:
        self._out = folder / f"{words[0]}.out"
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "controlplane.cli", *map(str, words)],
                env=environment({"PYTHONPATH": f"{environment()['PYTHONPATH']}:{folder}", **(env or {})}),
                stdout=out,
                stderr=out,
                cwd=folder,
            )

    @property
    def output(self) -> str:
        return self._out.read_text()

    def wait_for(self, text: str) -> str:
        wait_until(lambda: re.search(text, self.output) is not None or self.process.poll() is not None)
        found = re.search(text, self.output)
        assert found is not None, self.output
        return found[0]

    def interrupt(self) -> None:
        assert self.process.poll() is None, self.output
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == CODE, self.output
        assert "Traceback" not in self.output


@contextmanager
def command(folder: Path, *words: object, env: dict[str, str] | None = None) -> Iterator[Command]:
    running = Command(folder, *words, env=env)
    try:
        yield running
    finally:
        with suppress(psutil.Error):
            for child in psutil.Process(running.process.pid).children(recursive=True):
                child.kill()
        running.process.kill()
        running.process.wait()


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        yield listening


@pytest.mark.parametrize(
    "words",
    [
        ("status", "--bus", "tcp://ADDRESS", "--timeout", "3600"),
        ("pause", "--bus", "tcp://ADDRESS", "--timeout", "3600"),
        ("retire", "3", "--bus", "tcp://ADDRESS"),
        ("engine", "probe", "http://ADDRESS"),
        ("conform", "--engine", "vllm", "--url", "http://ADDRESS", "--yes"),
        ("agent", "--bus", "tcp://ADDRESS", "--replica", "0", "--node-rank", "1", "--nnodes", "2", "--engine", "tiny"),
    ],
    ids=lambda words: str(words[0]),
)
def test_a_command_that_waits_for_an_answer(tmp_path: Path, deaf: socket.socket, words: tuple[str, ...]) -> None:
    address = f"127.0.0.1:{deaf.getsockname()[1]}"
    state = {"XDG_STATE_HOME": str(tmp_path)}
    with command(tmp_path, *(word.replace("ADDRESS", address) for word in words), env=state) as waiting:
        connection, _ = deaf.accept()
        with connection:
            waiting.interrupt()


def test_an_agent_whose_engine_never_returns_and_an_operator_who_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "hung.py").write_text(HUNG)
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db") as plane, ExitStack() as stack:
        place = ("--bus", plane.address, "--replica", "0", "--state-dir", tmp_path / "state")
        agent = stack.enter_context(command(tmp_path, "agent", *place, "--engine", "hung:Engine"))
        wait_until(lambda: bool(plane.status().agents) or agent.process.poll() is not None)
        operator = stack.enter_context(command(tmp_path, "pause", "--bus", plane.address, "--timeout", "3600"))
        agent.wait_for("called")
        operator.interrupt()
        agent.interrupt()
        assert "ended without waiting for what was under way" in agent.output


def test_an_agent_with_a_server_that_ignores_every_signal(tmp_path: Path) -> None:
    stubborn = (
        "import os, signal; [signal.signal(each, signal.SIG_IGN) for each in (signal.SIGTERM, signal.SIGINT)]; "
        "print('up', os.getpid(), flush=True); signal.pause()"
    )
    place = ("--bus", "tcp://127.0.0.1:1", "--replica", "0", "--state-dir", tmp_path)
    server = ("--engine", "sglang", "--url", "http://127.0.0.1:1", "--launch", "--", sys.executable, "-c", stubborn)
    log = tmp_path / "server-0.0.log"
    with command(tmp_path, "agent", *place, *server) as agent:
        wait_until(lambda: (log.exists() and "up " in log.read_text()) or agent.process.poll() is not None)
        pid = re.search(r"^up (\d+)", log.read_text(), re.MULTILINE)
        assert pid is not None, agent.output
        launched = psutil.Process(int(pid[1]))
        agent.interrupt()
        _, alive = psutil.wait_procs([launched], timeout=60)
        assert not alive


def test_a_gateway_in_the_middle_of_a_request(tmp_path: Path, deaf: socket.socket) -> None:
    engine = f"http://127.0.0.1:{deaf.getsockname()[1]}"
    words = (
        "--address",
        "tcp://127.0.0.1:0",
        "--log",
        tmp_path / "run.db",
        "--listen",
        "127.0.0.1:0",
        "--engine",
        engine,
    )
    with command(tmp_path, "gateway", *words) as gateway:
        url = gateway.wait_for(r"http://127.0.0.1:\d+/replica/0")

        def read() -> None:  # which is passed on also without an agent
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/server_info", timeout=60)

        asking = Thread(target=read)
        asking.start()
        connection, _ = deaf.accept()
        with connection:
            gateway.interrupt()
        asking.join()


def test_an_observing_bus(tmp_path: Path) -> None:
    with command(tmp_path, "observe", "--address", "tcp://127.0.0.1:0", "--log", tmp_path / "run.db") as observing:
        observing.wait_for("observing at")
        observing.interrupt()


def test_a_log_that_is_shown_to_nobody(tmp_path: Path) -> None:
    """Its pipe is full, and nothing reads it."""
    log = Path(__file__).parents[1] / "replays" / "trained.db"
    shown = subprocess.Popen(
        [sys.executable, "-m", "controlplane.cli", "log", "show", "--json", log],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with shown:
        assert shown.stdout is not None and shown.stderr is not None
        assert shown.stdout.read(1) == b"{"
        shown.send_signal(signal.SIGINT)
        shown.communicate(timeout=60)
    assert shown.returncode == CODE


ASKED = """
import atexit, signal, subprocess, sys, time
import click
from controlplane.cli import __main__ as program
@click.command()
def asked():
    {body}
program.COMMANDS["status"] = "asked:asked"
if __name__ == "__main__":
    program.main()
"""


def test_a_command_that_is_just_starting_a_child(tmp_path: Path) -> None:
    """Popen has made the process, and the program does not know it yet."""
    child = "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])"
    body = f"{child}; click.echo(child.pid, nl=False); signal.raise_signal(signal.SIGINT)"
    (tmp_path / "asked.py").write_text(ASKED.format(body=body))
    ended = python("-m", "asked", "status", cwd=tmp_path)
    assert ended.returncode == CODE, ended.stderr
    # A signal is sent, not carried out, by the time that its sender ends.
    wait_until(lambda: not runs(int(ended.stdout)))


@pytest.mark.parametrize(
    "importing",
    [
        "exec('signal.raise_signal(signal.SIGINT)')",
        "type('Model', (), {{'field': type('Field', (), {{'__set_name__': lambda *_: {raised}}})()}})",
    ],
    ids=["exec", "set_name"],
)
def test_a_command_that_is_interrupted_within_an_import(tmp_path: Path, importing: str) -> None:
    """As of dataclasses. CPython ends by the signal after an exec, and before 3.12 makes an error of the other."""
    body = importing.format(raised="signal.raise_signal(signal.SIGINT)")
    (tmp_path / "asked.py").write_text(ASKED.format(body=body))
    ended = python("-m", "asked", "status", cwd=tmp_path)
    assert (ended.returncode, ended.stderr.strip()) == (CODE, "")


def runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return lives(psutil.Process(pid))
    return False


@pytest.mark.long
@pytest.mark.parametrize("when", ["starting", "training"])
def test_the_demo_and_all_of_its_agents(tmp_path: Path, when: str) -> None:
    def agents() -> list[psutil.Process]:
        return psutil.Process(demo.process.pid).children(recursive=True)

    began: dict[str, Callable[[], bool]] = {
        "starting": lambda: len(agents()) == 4,
        "training": lambda: (out / "checkpoints" / "version_3").exists(),
    }
    out = tmp_path / "out"
    with command(tmp_path, "demo", "--out", out, "--steps", "1000") as demo:
        wait_until(lambda: began[when]() or demo.process.poll() is not None)
        running = agents()
        demo.interrupt()
        _, alive = psutil.wait_procs(running, timeout=60)
        assert not alive
