"""Framed files on a disk: a group is there as a whole or not at all, there is one writer, and old groups can go."""

import errno
import logging
import os
import signal
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen

import pytest

from schemas.carriers import drafts, framed_file
from schemas.carriers.framed_file import FramedFile, FrameReader
from schemas.carriers.framing import FramePlace
from schemas.errors import LogCorrupt, LogError, LogFull, LogLocked
from tests.running import started

HEADER = {"journal": "j", "agent": "0.0"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "agent-0.0.journal"


def opened(path: Path, flush: bool = False) -> FramedFile:
    return FramedFile.create_or_open(path, HEADER, flush)


def payload(number: int) -> bytes:
    return number.to_bytes(4, "big") * (number % 90)


def fill(file: FramedFile, last: int) -> None:
    """Write groups up to a sequence."""
    while file.sequence <= last:
        file.append(file.sequence % 3 + 1, payload(file.sequence))


def sequences(path: Path) -> list[int]:
    """The sequences of the groups in a file, whose content is checked."""
    found = []
    with FrameReader.open(path) as reader:
        for frame in reader.frames():
            sequence = frame.place.sequence
            assert (frame.kind, frame.payload) == (sequence % 3 + 1, payload(sequence))
            found.append(sequence)
    return found


def drop(file: FramedFile, place: FramePlace) -> None:
    """Drop groups, and wait until the copy can take the file's place."""
    file.drop_before(place)
    assert file._made is not None
    file._made.result()


def writer(code: str, *arguments: object) -> AbstractContextManager[Popen[str]]:
    """A process that runs code with `file`, which its first argument names."""
    start = """
        import os, sys
        from pathlib import Path
        from schemas.carriers.framed_file import FramedFile
        from schemas.errors import LogFull
        file = FramedFile.create_or_open(Path(sys.argv[1]), {"journal": "j"}, False)
        """
    return started("-c", textwrap.dedent(start) + textwrap.dedent(code), *arguments)


def line(process: Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# --- writing and reading ----------------------------------------------------------------------------------------------


def test_groups_are_read_back_in_order_also_while_more_are_written(path: Path) -> None:
    with opened(path) as file, FrameReader.open(path) as reader:
        assert list(reader.frames()) == [] and reader.header == HEADER
        fill(file, 300)
        found = reader.frames()
        assert next(found).place == file.first
        fill(file, 400)
        assert [frame.place.sequence for frame in found] == list(range(2, 401))
        assert sequences(path) == list(range(1, 401))


def test_a_reopened_file_is_appended_to_and_keeps_its_header(path: Path) -> None:
    with opened(path) as file:
        fill(file, 25)
    with FramedFile.create_or_open(path, {"journal": "another"}, flush=True) as file:
        assert file.header == HEADER
        fill(file, 40)
    file.close()
    assert sequences(path) == list(range(1, 41))
    with pytest.raises(LogError, match="is closed"):
        file.append(1, b"")


def test_only_the_owner_can_read_the_folder_and_its_files(path: Path) -> None:
    before = os.umask(0)
    try:
        with opened(path) as file:
            fill(file, 10)
            drop(file, file.end)
            assert {near.stat().st_mode & 0o777 for near in path.parent.iterdir()} == {0o600}
            fill(file, 11)
    finally:
        os.umask(before)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [(near.name, near.stat().st_mode & 0o777) for near in path.parent.iterdir()] == [(path.name, 0o600)]


def test_an_empty_file_is_a_new_one(path: Path) -> None:
    """A writer that is killed before it has written the header leaves one."""
    path.parent.mkdir()
    path.touch()
    with opened(path) as file:
        fill(file, 3)
    assert sequences(path) == [1, 2, 3]


@pytest.mark.parametrize("flush", [True, False])
def test_each_group_is_flushed_if_it_is_to_be_on_the_disk(
    path: Path, flush: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    with opened(path, flush) as file:
        monkeypatch.setattr(os, "fdatasync", flushed.append)
        fill(file, 5)
        assert len(flushed) == (5 if flush else 0)
    assert len(flushed) == (6 if flush else 1)  # closing flushes what was left to the system


def test_what_is_no_journal_is_refused_with_its_name_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    for refused in (FrameReader.open, opened):
        path.write_bytes(b"SQLite format 3\0" * 100)
        for _ in range(2):  # the lock is released again
            with pytest.raises(LogCorrupt, match=r"agent-0\.0\.journal: not a journal"):
                refused(path)
        assert path.read_bytes() == b"SQLite format 3\0" * 100
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(LogError, match="not a regular file"):
            refused(path)
        path.unlink()
    with pytest.raises(LogError, match="can't be read: No such file"):
        FrameReader.open(path)


def test_damage_is_found_before_anything_is_written(path: Path) -> None:
    with opened(path) as file:
        fill(file, 20)
        at = file.end.at
        fill(file, 30)
    spoiled = bytearray(path.read_bytes())
    spoiled[at + 30] ^= 1
    path.write_bytes(spoiled)
    for _ in range(2):
        with pytest.raises(LogCorrupt, match=f"group 21, at byte {at}, is damaged.*a whole one follows") as caught:
            opened(path)
        assert caught.value.position == 21
    assert path.read_bytes() == spoiled
    with FrameReader.open(path) as reader, pytest.raises(LogCorrupt):
        assert [frame.place.sequence for frame in reader.frames()] == list(range(1, 21))


# --- one writer -------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_under_any_name_and_while_the_file_is_replaced(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.journal"
    link.symlink_to(path)

    def refused() -> None:
        for name in (path, link):
            with pytest.raises(LogLocked, match="another writer has this file open"):
                opened(name)

    with opened(link) as file:
        refused()
        for last in (10, 20):
            fill(file, last)
            drop(file, file.end)
            refused()
            fill(file, last + 1)
            refused()
    assert link.is_symlink() and sequences(link) == sequences(path) == [21]
    with opened(path) as file:
        assert file.sequence == 22


def test_a_file_with_two_names_is_not_continued(path: Path, tmp_path: Path) -> None:
    opened(path).close()
    os.link(path, tmp_path / "other")
    with pytest.raises(LogError, match="2 names"):
        opened(path)


def test_a_fork_may_not_write_and_leaves_file_and_lock_alone(path: Path) -> None:
    read_end, write_end = os.pipe()
    with opened(path) as file:
        fill(file, 5)
        drop(file, file.end)
        if (child := os.fork()) == 0:
            text = "no error"
            try:
                file.append(1, b"")
            except LogError as error:
                text = str(error)
                file.close()
            finally:
                os.write(write_end, text.encode())
                os._exit(0)
        os.close(write_end)
        os.waitpid(child, 0)
        with open(read_end, "rb") as pipe:
            assert b"used in its fork" in pipe.read()
        with pytest.raises(LogLocked):
            opened(path)
        fill(file, 9)
    assert sequences(path) == [6, 7, 8, 9]


def test_a_fork_that_outlives_its_writer_does_not_keep_the_lock(path: Path) -> None:
    fork = """
        if os.fork() == 0:
            print("forked", flush=True)
        sys.stdin.read()
        """
    with writer(fork, path) as process:
        assert line(process) == "forked"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        opened(path).close()


# --- a file that is taken away ----------------------------------------------------------------------------------------


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


TAKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.unlink(), "was deleted or moved"),
    (move, "was deleted or moved"),
    (replace, "was replaced by another file"),
    (lambda path: os.truncate(path, 50), r"was cut from \d+ to 50 bytes"),
    (lambda path: os.truncate(path, 0), r"was cut from \d+ to 0 bytes"),
    (extend, r"was extended from \d+ to \d+ bytes"),
]


@pytest.mark.parametrize(("take", "words"), TAKEN, ids=["delete", "move", "replace", "cut", "empty", "extend"])
@pytest.mark.parametrize("dropping", [True, False])
def test_nothing_is_written_once_another_program_has_changed_the_file(
    path: Path, take: Callable[[Path], object], words: str, dropping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as file:
        fill(file, 10)
        if dropping:
            drop(file, file.end)
        take(path)
        if take is move:
            monkeypatch.setattr(framed_file, "monotonic", lambda: time.monotonic() + framed_file.LOOK_S)
        left = path.read_bytes() if path.exists() else None
        for _ in range(2):
            with pytest.raises(LogError, match=f"another program interfered.*{words}"):
                file.append(1, b"x")
    assert (path.read_bytes() if path.exists() else None) == left
    assert not list(path.parent.glob("*.new"))


def test_a_file_that_was_moved_takes_groups_for_a_moment_and_loses_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [time.monotonic()]
    monkeypatch.setattr(framed_file, "monotonic", lambda: now_s[0])
    with opened(path) as file:
        fill(file, 10)
        move(path)
        now_s[0] += 0.9 * framed_file.LOOK_S
        fill(file, 20)
        now_s[0] += 0.2 * framed_file.LOOK_S
        with pytest.raises(LogError, match="was deleted or moved"):
            file.append(1, b"x")
    assert sequences(path.with_name("elsewhere")) == list(range(1, 21))


# --- no space, and a failing disk -------------------------------------------------------------------------------------


def fail_after(monkeypatch: pytest.MonkeyPatch, count: int, number: int) -> None:
    """Let the next write take a few bytes, and fail."""
    pwrite = os.pwrite
    left = [count]

    def short(descriptor: int, data: bytes, at: int) -> int:
        if not left[0]:
            raise OSError(number, os.strerror(number))
        written = pwrite(descriptor, data[: left[0]], at)
        left[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", short)


@pytest.mark.parametrize("count", [0, 1, 20, 150])
def test_a_full_disk_takes_no_part_of_a_group_and_the_next_attempt_succeeds(
    path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as file:
        fill(file, 50)
        size = path.stat().st_size
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            with monkeypatch.context() as patch:
                fail_after(patch, count, number)
                with pytest.raises(LogFull, match="group 51 was not written: no space left"):
                    fill(file, 51)
            assert path.stat().st_size == size and file.sequence == 51
        fill(file, 60)
    assert sequences(path) == list(range(1, 61))


def test_a_limit_on_file_sizes_counts_as_a_full_disk(path: Path) -> None:
    append_up_to_the_limit = """
        import resource
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        try:
            while True:
                file.append(1, bytes(3000))
        except LogFull as error:
            print(error)
        print(file.sequence)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        file.append(1, bytes(3000))
        print(file.sequence)
        """
    with writer(append_up_to_the_limit, path) as process:
        out, _ = process.communicate()
    error, failed, recovered = out.splitlines()
    assert "no space left" in error and int(recovered) == int(failed) + 1 > 10
    with FrameReader.open(path) as reader:
        assert [frame.payload for frame in reader.frames()] == [bytes(3000)] * int(failed)


@pytest.mark.parametrize("count", [0, 20])
def test_a_failed_write_ends_writing_for_good(path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as file:
        fill(file, 50)
        with monkeypatch.context() as patch:
            fail_after(patch, count, errno.EIO)
            with pytest.raises(LogError, match="group 51 was not written: Input/output error"):
                fill(file, 51)
        for _ in range(2):
            with pytest.raises(LogError, match="takes no more groups"):
                fill(file, 51)
    assert sequences(path) == list(range(1, 51))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_flush_ends_writing_for_good(path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with opened(path, flush=True) as file:
        fill(file, 10)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(LogError):
                fill(file, 11)
        for _ in range(2):
            with pytest.raises(LogError, match="takes no more groups"):
                fill(file, 11)
    assert sequences(path) == list(range(1, 11))


def test_a_group_that_was_interrupted_is_taken_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def interrupted(descriptor: int, data: bytes, at: int) -> int:
        pwrite(descriptor, data, at)
        raise KeyboardInterrupt

    with opened(path) as file:
        fill(file, 10)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fill(file, 11)
        assert sequences(path) == list(range(1, 11))
        fill(file, 12)
    assert sequences(path) == list(range(1, 13))


# --- dropping old groups ----------------------------------------------------------------------------------------------


def test_dropped_groups_make_room_and_the_file_goes_on(path: Path) -> None:
    with opened(path) as file:
        for last in range(200, 3200, 200):
            fill(file, last)
            place = file.end
            fill(file, last + 50)  # kept by the copy
            drop(file, place)
            fill(file, last + 60)  # the first of them brings what was written meanwhile
            assert file.first == place and sequences(path) == list(range(last + 1, last + 61))
            assert [frame.place.sequence for frame in file.frames()] == list(range(last + 1, last + 61))
            (kept,) = [frame for frame in file.frames() if frame.place.sequence == last + 30]
            assert next(file.frames(kept.place)) == kept
        assert path.stat().st_size < 100_000
    with opened(path) as file:
        assert (file.first.sequence, file.sequence) == (3001, 3061)
        fill(file, 3100)
    assert sequences(path) == list(range(3001, 3101))


def test_a_reader_of_a_file_that_was_replaced_reads_it_to_its_end(path: Path) -> None:
    with opened(path) as file:
        fill(file, 100)
        with FrameReader.open(path) as reader:
            found = reader.frames()
            next(found)
            drop(file, file.end)
            fill(file, 110)
            assert [frame.place.sequence for frame in found] == list(range(2, 101))


@pytest.mark.parametrize("step", ["Draft", "write_all", "rename"])
def test_a_copy_that_fails_costs_only_its_space(
    path: Path, step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(path) as file:
        fill(file, 100)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(os if step == "rename" else drafts, step, fail)
            drop(file, place := file.end)
            fill(file, 110)
        assert "keeps groups that it could drop, and grows" in caplog.text
        file.drop_before(place)  # not tried again and again
        fill(file, 120)
        assert sequences(path) == list(range(1, 121))
        drop(file, file.end)
        fill(file, 130)
    assert sequences(path) == list(range(121, 131))
    assert [near.name for near in path.parent.iterdir()] == [path.name]


def test_a_copy_that_a_dead_or_closing_writer_left_is_removed(path: Path) -> None:
    with opened(path) as file:
        fill(file, 10)
        file.drop_before(file.end)
    assert [near.name for near in path.parent.iterdir()] == [path.name]
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(b"half a copy")
    with opened(path) as file:
        assert not beside.exists()
        fill(file, 20)
    assert sequences(path) == list(range(1, 21))
