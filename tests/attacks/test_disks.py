"""Attacks on the log's file: a second writer under another name, programs that delete, replace or cut it, and kills."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.logs import Run
from controlplane import ControlPlane
from controlplane.analysis.invariants import verify
from controlplane.cli.replay_log import replay_log
from controlplane.record import log as log_module
from controlplane.record.entries import LogMark
from controlplane.record.log import RunLog
from schemas.errors import BusFaulted, LogError, LogLocked
from schemas.storage.record_file import RecordFile
from schemas.storage.records import RecordReader
from tests.running import python, started
from tests.unit.record_files import fill, write

ADDRESS = "tcp://127.0.0.1:0"


def shortly_and(full: int) -> pytest.MarkDecorator:
    """Run a test with one round in the suite, and with many among the attacks."""
    return pytest.mark.parametrize("rounds", [1, pytest.param(full, marks=pytest.mark.attacks)])


# --- a second writer under another name -------------------------------------------------------------------------------

OPEN_A_BUS = """
import sys
from controlplane import ControlPlane
from schemas.errors import LogError
try:
    with ControlPlane("tcp://127.0.0.1:0", log=sys.argv[1]):
        print("opened")
except LogError as error:
    print(type(error).__name__, error)
"""


def second_bus(log: Path) -> str:
    done = python("-c", OPEN_A_BUS, log)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
@shortly_and(10)
def test_a_second_bus_on_the_same_log_is_refused_whatever_its_name(
    tmp_path: Path, link: Callable[[Path, Path], None], rounds: int
) -> None:
    log, name = tmp_path / "run.db", tmp_path / "other" / "name.db"
    name.parent.mkdir()
    with ControlPlane(ADDRESS, log=log) as plane:
        link(log, name)
        for _ in range(rounds):
            assert second_bus(name).startswith("LogLocked" if link is os.symlink else "LogError")
            with pytest.raises(LogError, match=r"name\.db: (another writer has this file open|.* 2 names)"):
                RunLog.open(name)
            plane.flush().wait(10)
    assert list(RunLog.read(log))[-1].kind == "closed"


def test_a_log_with_two_names_is_not_continued(tmp_path: Path) -> None:
    log, name = write(tmp_path / "run.db", 10), tmp_path / "name.db"
    os.link(log, name)
    for path in (log, name):
        with pytest.raises(LogError, match="2 names"):
            RecordFile.open(path)
    name.unlink()
    RecordFile.open(log).close()


def locks(path: Path) -> list[str]:
    """SQLite's locks of this process on a file."""
    inode = f":{path.stat().st_ino}"
    lines = Path("/proc/locks").read_text().splitlines()
    return sorted(line.split(":", 1)[1] for line in lines if f" {os.getpid()} " in line and f"{inode} " in line)


def test_a_refused_or_closed_writer_leaves_the_locks_of_readers_in_its_process(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with RecordFile.open(path) as file:
        fill(file, 10)
        before = locks(path)
        assert before
        with pytest.raises(LogLocked):
            RecordFile.open(path)
        with RecordReader.open(path):
            pass
        assert locks(path) == before
        reader = RecordReader.open(path)
        assert next(reader.records()).position == 1
    assert locks(path), "the reader's"
    with RecordFile.open(path) as file:
        reader.close()
        assert locks(path)
        fill(file, 20)
    assert locks(path) == []
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == str(path)]


HOLD_AND_FORK = """
import os, sys
from schemas.storage.record_file import RecordFile
file = RecordFile.open(sys.argv[1], durability="os")
file.append("k", "", 1, b"x")
file.commit()
if os.fork() == 0:
    os.setsid()
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


@shortly_and(20)
def test_a_killed_writer_leaves_its_lock_to_the_next_one(tmp_path: Path, rounds: int) -> None:
    log, name = tmp_path / "run.db", tmp_path / "name.db"
    name.symlink_to(log)
    for number in range(rounds):
        with started("-c", HOLD_AND_FORK, name) as process:
            assert process.stdout is not None and process.stdout.readline() == "forked\n"
            with pytest.raises(LogLocked):
                RecordFile.open(log)
            process.send_signal(signal.SIGKILL)
            process.wait()
            with RecordFile.open(log) as file:
                assert file.last_position == number + 1


# --- a file that is taken away ----------------------------------------------------------------------------------------


def delete_all(log: Path) -> None:
    for file in log.parent.glob(f"{log.name}*"):
        file.unlink()


def replace(log: Path) -> None:
    copy = log.with_name("copy.db")
    shutil.copy(log, copy)
    copy.rename(log)


TAKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "delete": (lambda log: log.unlink(), "was deleted or moved"),
    "delete all": (delete_all, "was deleted or moved"),
    "move": (lambda log: log.rename(log.with_name("elsewhere.db")), "was deleted or moved"),
    "replace": (replace, "was replaced by another file"),
    "cut": (lambda log: os.truncate(log, 100), r"was cut from \d+ to 100 bytes"),
    "cut the wal": (lambda log: os.truncate(f"{log}-wal", 0), r"run\.db-wal was cut from \d+ to 0 bytes"),
    "delete the wal": (lambda log: os.unlink(f"{log}-wal"), r"run\.db-wal was deleted"),
}


@pytest.mark.parametrize(("take", "words"), TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("through", ["its name", "a link"])
def test_a_bus_whose_log_is_taken_away_ends_with_a_clear_error(
    tmp_path: Path, take: Callable[[Path], None], words: str, through: str
) -> None:
    log = tmp_path / "run.db"
    name = log
    if through == "a link":
        name = tmp_path / "link.db"
        name.symlink_to(log)
    with ControlPlane(ADDRESS, log=name) as plane:
        plane.flush().wait(10)
        take(log)
        files = {path: path.read_bytes() for path in tmp_path.iterdir() if path.exists()}
        with pytest.raises(BusFaulted, match=words):
            plane.flush().wait(10)
        with pytest.raises(BusFaulted, match="go on in another file"):
            plane.flush()
    after = {path: path.read_bytes() for path in tmp_path.iterdir() if path.exists() and path in files}
    if take in (replace, delete_all):
        assert after.get(log) == files.get(log)  # nothing is written into what lies there now


# --- a log of bounded size --------------------------------------------------------------------------------------------


def last_position(path: Path) -> int:
    with RecordReader.open(path) as reader:
        return reader.last_position


def test_a_bus_keeps_its_log_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MARK_RECORDS", 200)
    monkeypatch.setattr(log_module, "MARK_SHARE", 0)
    path = tmp_path / "run.db"
    run = Run(path, agents=3, bytes_max=200_000)
    for _ in range(6):
        run.commands(400)
        with RecordReader.open(path) as reader:
            assert reader.used_bytes < 400_000
    run.close()
    assert path.stat().st_size < 500_000
    first = next(RunLog.read(path)).position
    assert first > last_position(path) * 2 // 3
    mark = next(iter(RunLog.walk(path)))
    assert isinstance(mark, LogMark) and mark.position == first - 1
    assert list(verify(RunLog.walk(path))) == [] and replay_log(RunLog.walk(path)).marks > 1
    with RunLog.open(path, bytes_max=200_000) as log:
        assert log.state.seq == 6 * 400 + 1
        assert log.folded < 400


def test_a_bus_keeps_its_log_to_an_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MARK_RECORDS", 200)
    monkeypatch.setattr(log_module, "MARK_SHARE", 0)
    path = tmp_path / "run.db"
    run = Run(path, agents=3, age_max_s=3)  # a command each ten milliseconds
    run.commands(2000)
    run.close()
    begin, end = next(RunLog.read(path)).at_ns, list(RunLog.read(path))[-1].at_ns
    assert 3 <= (end - begin) / 1e9 < 6
    assert list(verify(RunLog.walk(path))) == []
