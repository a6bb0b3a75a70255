"""`rolloutctl top` in a terminal of its own, and a log that is followed."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controlplane import ControlPlane
from controlplane.bus.key_folder import KeyFolder
from controlplane.cli.interrupt import CODE
from schemas.config import BusConfig
from tests.running import environment, rolloutctl, started
from tests.unit.small_bus import Engine
from tests.unit.test_plane import pair

pytestmark = pytest.mark.xdist_group("top")

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=100)
ANSWER_S = 60


class Terminal:
    """One command in a terminal, and what it has shown since the newest key."""

    def __init__(self, *words: object, columns: int = 120) -> None:
        self._ours, self._its = pty.openpty()
        fcntl.ioctl(self._its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self._before = termios.tcgetattr(self._its)
        self._shown = b""
        env = environment({"TERM": "xterm-256color"})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "controlplane.cli", *map(str, words)],
            stdin=self._its,
            stdout=self._its,
            stderr=self._its,
            env={name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline and self.process.poll() is None, self.text
            self._read(0.05)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b[\[(][0-9;?]*[A-Za-z]", "", self._shown.decode("utf-8", "replace"))

    def press(self, keys: str) -> None:
        self._shown = b""
        os.write(self._ours, keys.encode())

    def ends(self) -> int:
        """The exit code. The terminal is as it was, and shows what it showed before."""
        while self.process.poll() is None:
            self._read(0.05)
        os.write(self._its, b"the end")  # a terminal may hold bytes back until more are written
        while b"the end" not in self._shown:
            self._read(0.05)
        assert b"\x1b[?1049l" in self._shown and b"\x1b[?25h" in self._shown, self._shown
        assert b"Traceback" not in self._shown
        assert termios.tcgetattr(self._its) == self._before
        return self.process.returncode

    def _read(self, timeout_s: float) -> None:
        while select.select([self._ours], [], [], timeout_s)[0]:
            self._shown += os.read(self._ours, 65536)
            timeout_s = 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._its)


@contextmanager
def terminal(*words: object, columns: int = 120) -> Iterator[Terminal]:
    opened = Terminal(*words, columns=columns)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[ControlPlane]:
    with pair(tmp_path_factory.mktemp("top"), engine) as opened:
        yield opened


def test_keys_drive_the_fleet_and_q_leaves(plane: ControlPlane, engine: Engine) -> None:
    plane.resume().wait()
    with terminal("top", "--bus", plane.address, "--every", "0.1", columns=80) as top:
        top.wait_for(r"0\.0 +v0 +v0, generating")
        top.press("p")
        top.wait_for("pause all replicas.*Enter")
        top.press("\r")
        top.wait_for(r"pause \(seq \d+\): 1 acted, 1 skipped")
        assert not engine.generating
        top.press("\x1b[B")
        top.wait_for(r"\[replica 0\]")
        top.press("rn")
        top.wait_for("nothing was sent")
        assert not engine.generating
        top.press("r\n")
        top.wait_for(r"resume \(seq \d+\): 1 acted")
        assert engine.generating
        top.press("q")
        assert top.ends() == 0
    plane.resume().wait()


def test_a_bus_that_is_gone_is_asked_again_and_ctrl_c_leaves(tmp_path: Path) -> None:
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db") as plane:
        address = plane.address
        with terminal("top", "--bus", address, "--every", "0.1") as top:
            top.wait_for("0 agents")
            plane.close()
            top.wait_for("nothing listens")
            top.press("\x03")
            assert top.ends() == CODE


def test_an_observers_key_shows_and_touches_nothing(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.make_server()
    seeing, driving = folder.add("seeing", "observer", ()), folder.add("driving", "operator", ())
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", keys=folder.path) as plane:
        with terminal("top", "--bus", plane.address, "--key", seeing) as top:
            top.wait_for("this key may read, and not command")
            top.press("p")
            top.wait_for("observer's key: it may read the status, and not command. Nothing was sent")
            top.process.send_signal(signal.SIGTERM)
            assert top.ends() == 128 + signal.SIGTERM
        with terminal("top", "--bus", plane.address, "--key", driving) as top:
            top.wait_for("p pause")
            top.press("q")
            assert top.ends() == 0


def test_top_needs_a_terminal(plane: ControlPlane) -> None:
    done = rolloutctl("top", "--bus", plane.address)
    assert (done.returncode, done.stdout) == (2, "")
    assert "rolloutctl status" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_log_is_followed_while_it_is_written_until_the_bus_closes(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    with ControlPlane("tcp://127.0.0.1:0", log=log) as plane:
        words = ("-m", "controlplane.cli", "log", "show", "--follow", "--agent", "bus", log)
        with started(*words, stderr=subprocess.PIPE) as following:
            assert following.stdout is not None and following.stderr is not None
            assert "opens" in following.stdout.readline()
            plane.flush().wait()
            assert any("seq 2: flush" in line for line in following.stdout)
            plane.close()
            assert "bus closes" in following.stdout.read()
            assert (following.wait(ANSWER_S), following.stderr.read()) == (0, "")


def test_following_ends_with_ctrl_c_as_it_does_for_kubectl(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    words = ("-m", "controlplane.cli", "log", "show", "-f", log)
    with ControlPlane("tcp://127.0.0.1:0", log=log), started(*words, stderr=subprocess.PIPE) as following:
        assert following.stdout is not None and following.stdout.readline()
        following.send_signal(signal.SIGINT)
        assert following.wait(ANSWER_S) == CODE
