"""Record files: committed records stay readable, there is one writer, and a full disk loses nothing."""

import os
import sqlite3
import textwrap
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from queue import Queue
from subprocess import Popen
from typing import Any

import pytest

from schemas.errors import ConfigError, LogCorrupt, LogError, LogLocked
from schemas.storage import checkpointer, database, filesystems, writer_lock
from schemas.storage.checkpointer import Checkpointer
from schemas.storage.filesystems import filesystem_type, is_network
from schemas.storage.record_file import RecordFile
from schemas.storage.records import PAGE_RECORDS, RecordReader
from tests.running import started
from tests.unit.record_files import HEADER, append, fill, positions, read, record, records, write
from tests.waiting import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "log.sqlite"


def writer(code: str, *arguments: object) -> AbstractContextManager[Popen[str]]:
    """A process that runs code with `file`, the record file named by its first argument.

    With the argument `truncate` it believes to be on a network file system; with `checkpoints` they are run often.
    """
    start = """
        import os, sys
        from schemas.storage import checkpointer, filesystems
        from schemas.storage.record_file import RecordFile
        from schemas.storage.records import RecordReader
        from schemas.errors import LogFull
        if "truncate" in sys.argv:
            filesystems.is_network = lambda filesystem: True
        if "checkpoints" in sys.argv:
            checkpointer.CHECKPOINT_BYTES, checkpointer.WAL_BYTES_MAX = 50_000, 100_000
        file = RecordFile.open(sys.argv[1], durability="os")
        """
    return started("-c", textwrap.dedent(start) + textwrap.dedent(code), *arguments)


def line(process: Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# --- writing and reading ----------------------------------------------------------------------------------------------


def test_committed_records_are_read_back_in_order(path: Path) -> None:
    with RecordFile.open(path, HEADER) as file:
        assert (file.first_position, file.last_position) == (1, 0)
        assert list(file.records()) == []
        fill(file, 1000)
        assert (file.first_position, file.last_position) == (1, 1000)
        assert list(file.records()) == records(1, 1000)
        assert file.header == HEADER
    assert read(path) == records(1, 1000)


def test_nothing_is_in_the_file_before_its_group_is_committed(path: Path) -> None:
    with RecordFile.open(path) as file:
        assert [file.append("k", "", 1, b"x") for _ in range(3)] == [1, 2, 3]
        assert (file.pending, file.last_position) == (3, 0)
        assert read(path) == []
        assert file.commit() == 3
        assert (file.pending, file.last_position) == (0, 3)
        assert len(read(path)) == 3
        assert file.commit() == 3


def test_a_reopened_file_is_appended_to_and_keeps_its_header(path: Path) -> None:
    write(path, 25)
    with RecordFile.open(path, {"run": "another"}) as file:
        assert file.header == HEADER
        fill(file, 40)
    assert read(path) == records(1, 40)


def test_closing_commits_what_is_buffered_and_leaves_one_file(path: Path) -> None:
    with RecordFile.open(path) as file:
        file.append("k", "", 1, b"x")
    file.close()
    assert len(read(path)) == 1
    assert [near.name for near in path.parent.iterdir()] == [path.name]


def test_a_reader_may_start_anywhere(path: Path) -> None:
    write(path, 600)
    with RecordReader.open(path) as reader:
        assert list(reader.records(598)) == records(598, 600)
        assert list(reader.records(601)) == []


def test_a_reader_sees_what_is_committed_while_it_reads(path: Path) -> None:
    with RecordFile.open(path) as file, RecordReader.open(path) as reader:
        fill(file, 10)
        found = reader.records()
        assert next(found).position == 1
        fill(file, 700)
        assert list(found) == records(2, 700)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader._connection.execute("DELETE FROM records")


def test_only_the_owner_can_read_the_folder_and_its_files(path: Path) -> None:
    before = os.umask(0)
    try:
        with RecordFile.open(path) as file:
            fill(file, 10)
            modes = {near.name: near.stat().st_mode & 0o777 for near in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert set(modes) == {path.name + end for end in ("", "-wal", "-shm", "-lock")}
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize(("durability", "synchronous"), [("disk", 2), ("os", 1)])
def test_durability_decides_when_sqlite_flushes(path: Path, durability: database.Durability, synchronous: int) -> None:
    with RecordFile.open(path, durability=durability) as file:
        assert file._connection.execute("PRAGMA synchronous").fetchone() == (2,), "the first group is always flushed"
        file.append("k", "", 1, b"opened")
        file.commit()
        assert file._connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
        assert file.journal_mode == "wal"


def test_a_value_that_would_spoil_its_group_is_refused_at_once(path: Path) -> None:
    with RecordFile.open(path) as file:
        for at_ns in (-(1 << 63) - 1, 1 << 63):
            with pytest.raises(ValueError, match="nanoseconds"):
                file.append("k", "", at_ns, b"")
        with pytest.raises(TypeError):
            file.append("k", "", 1, "text")  # type: ignore[arg-type]
        with pytest.raises(UnicodeEncodeError):
            file.append("\ud800", "", 1, b"")
        assert file.append("k", "", (1 << 63) - 1, b"") == 1


def test_a_header_may_not_use_the_keys_of_the_file(path: Path) -> None:
    with pytest.raises(ConfigError, match="'format'"):
        RecordFile.open(path, {"format": "9"})
    assert not path.exists()


def test_records_appended_while_another_thread_commits_all_arrive(path: Path) -> None:
    with RecordFile.open(path, durability="os") as file:
        stop = threading.Event()

        def commit() -> None:
            while not stop.is_set():
                file.commit()

        thread = threading.Thread(target=commit)
        thread.start()
        for added in records(1, 5000):
            append(file, added)
        stop.set()
        thread.join()
    assert read(path) == records(1, 5000)


# --- dropping old records ---------------------------------------------------------------------------------------------


def test_space_of_dropped_records_is_reused_and_positions_continue(path: Path) -> None:
    with RecordFile.open(path, HEADER) as file:
        fill(file, 500)
        size = path.stat().st_size
        for _ in range(20):
            file.drop_before(file.last_position - 99)
            file.commit()
            assert file.first_position == file.last_position - 99
            fill(file, file.last_position + 200)
        assert list(file.records()) == records(4301 - 100, 4500)
        file.drop_before(4501)
        file.commit()
        assert (file.first_position, file.last_position, list(file.records())) == (4501, 4500, [])
        file.drop_before(1)
        file.commit()
        assert file.first_position == 4501
    assert path.stat().st_size <= 2 * max(size, 65536)
    with RecordFile.open(path) as file:
        assert file.append("k", "", 1, b"") == 4501


def test_a_reader_skips_records_that_are_dropped_while_it_reads(path: Path) -> None:
    with RecordFile.open(path) as file, RecordReader.open(path) as reader:
        fill(file, 1000)
        found = reader.records()
        assert next(found).position == 1
        file.drop_before(900)
        file.commit()
        assert positions(list(found)) == [*range(2, PAGE_RECORDS + 1), *range(900, 1001)]
        found = reader.records()
        next(found)
        file.drop_before(1001)
        file.commit()
        assert list(found) == records(901, 1000)


def test_a_reader_ends_when_all_records_are_dropped(path: Path) -> None:
    with RecordFile.open(path) as file, RecordReader.open(path) as reader:
        fill(file, 1000)
        found = reader.records()
        assert next(found).position == 1
        file.drop_before(1001)
        file.commit()
        assert list(found) == records(2, PAGE_RECORDS)


def test_records_are_dropped_with_the_next_commit_and_so_are_their_marks(path: Path) -> None:
    write(path, 500)
    with RecordFile.open(path) as file, RecordReader.open(path) as reader:
        for last in (500, 900):
            fill(file, last)
            file.append_mark(1, b"state")
        fill(file, 1000)
        used = file.used_bytes
        file.drop_before(901)
        assert (reader.first_position, len(list(reader.records()))) == (1, 1000)
        file.commit()
        assert (reader.first_position, list(reader.records())) == (901, records(901, 1000))
        assert file.mark_positions() == [900] and file.used_bytes < used


# --- one writer -------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_until_the_first_closes(path: Path) -> None:
    with RecordFile.open(path) as file:
        with pytest.raises(LogLocked, match="another writer has this file open") as caught:
            RecordFile.open(path)
        assert str(path) in str(caught.value)
        fill(file, 5)
    with RecordFile.open(path) as file:
        assert file.last_position == 5


@pytest.mark.parametrize("look", [1, 2])
def test_a_writer_may_end_at_any_moment_while_another_one_opens(
    path: Path, look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir(exist_ok=True)
    beside, stat, looks = f"{path}-lock", os.stat, list[object]()

    def stat_late(place: str, *arguments: Any, **options: Any) -> os.stat_result:
        looks.extend([place] if place == beside else [])
        if place == beside and len(looks) == look:
            os.unlink(beside)  # which the writer does that ends
        return stat(place, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat_late)
    writer_lock.release(writer_lock.acquire(path))
    assert looks and not Path(beside).exists()


def test_a_failed_opening_releases_the_lock(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database, but long enough to look like one" * 100)
    for _ in range(2):
        with pytest.raises(LogCorrupt):
            RecordFile.open(path)


def test_a_file_whose_records_are_committed_closes_though_another_program_has_locked_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.1)
    file = RecordFile.open(path)
    fill(file, 10)
    append(file, record(11))
    file.commit()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    file.close()
    other.close()
    with RecordFile.open(path) as again:
        assert again.last_position == 11


def test_a_fork_may_not_write_and_leaves_the_file_alone(path: Path) -> None:
    read_end, write_end = os.pipe()
    with RecordFile.open(path) as file:
        fill(file, 5)
        if (child := os.fork()) == 0:
            text = "no error"
            try:
                file.append("k", "", 1, b"")
                file.commit()
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
            RecordFile.open(path)
        fill(file, 9)
    assert len(read(path)) == 9


# --- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", ["wal", "truncate", "wal checkpoints"])
def test_a_killed_writer_loses_nothing_that_it_had_committed(path: Path, journal: str) -> None:
    append_for_ever = """
        assert file.journal_mode == sys.argv[2]
        while True:
            for _ in range(50):
                file.append("k", "", 1, b"x" * 300)
            print(file.commit(), flush=True)
        """
    committed = 0
    for life in range(3):
        with writer(append_for_ever, path, *journal.split()) as process:
            for _ in range(20 + life):
                committed = int(line(process))
        found = read(path)
        assert len(found) >= committed and len(found) % 50 == 0
        assert positions(found) == list(range(1, len(found) + 1))
    with RecordFile.open(path) as file:
        assert file.append("k", "", 1, b"") == len(found) + 1


# --- no space ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", ["wal", "truncate"])
def test_a_limit_on_file_sizes_counts_as_a_full_disk(path: Path, journal: str) -> None:
    append_up_to_the_limit = """
        import resource
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
        try:
            while True:
                for _ in range(10):
                    file.append("k", "", 1, bytes(3000))
                file.commit()
        except LogFull as error:
            print(error)
        with RecordReader.open(sys.argv[1]) as reader:
            print(file.pending, file.last_position, sum(1 for _ in reader.records()))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        print(file.commit())
        """
    with writer(append_up_to_the_limit, path, journal) as process:
        out, _ = process.communicate()
    error, state, recovered = out.splitlines()
    pending, last, count = map(int, state.split())
    assert "no space left" in error
    assert pending == 10 and last == count >= 50
    assert int(recovered) == last + 10
    assert len(read(path)) == last + 10
    assert not list(path.parent.glob("*.probe"))


def fail_to_flush(*_: object) -> None:
    """Raise SQLite's error for a file that the system could not write to the disk."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    raise error


def test_a_failed_flush_ends_writing_for_good(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingDisk:
        def execute(self, *_: object) -> None:
            fail_to_flush()

    with RecordFile.open(path) as file:
        fill(file, 10)
        file.append("k", "", 1, b"x")
        with monkeypatch.context() as patch:
            # No disk here fails on demand, so SQLite's error is raised where a flush would raise it.
            patch.setattr(file, "_cursor", FailingDisk())
            with pytest.raises(LogError, match="disk I/O error"):
                file.commit()
        for _ in range(2):
            with pytest.raises(LogError, match="takes no more records"):
                file.commit()
    assert len(read(path)) == 10


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> "Queue[tuple[int, int]]":
    """The checkpoints that are run, each as the pages of the log and how many are copied. They come often."""
    monkeypatch.setattr(checkpointer, "CHECKPOINT_BYTES", 100_000)
    run: Queue[tuple[int, int]] = Queue()

    def copy(self: Checkpointer) -> tuple[int, int]:
        assert threading.current_thread().name == "rolloutctl-checkpoints"
        run.put(found := original(self))
        return found

    original = Checkpointer._copy
    monkeypatch.setattr(Checkpointer, "_copy", copy)
    return run


def fill_until_checkpoint(file: RecordFile) -> None:
    """Append and commit records until a checkpoint is due, and commit no more."""
    assert file._checkpointer is not None
    while not file._checkpointer.due:
        append(file, record(file.last_position + 1))
        file.commit()
    append(file, record(file.last_position + 1))
    file.commit()


def test_a_thread_copies_the_log_and_commits_begin_it_anew(path: Path, checkpoints: "Queue[tuple[int, int]]") -> None:
    with RecordFile.open(path) as file:
        assert file._connection.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
        sizes = []
        for _ in range(5):
            fill_until_checkpoint(file)
            pages, copied = checkpoints.get()
            assert pages == copied >= 100_000 / 4096
            assert file._bound("last") == file.last_position, "what is only in the file is covered by `last`"
            sizes.append(path.with_name(f"{path.name}-wal").stat().st_size)
        assert max(sizes) < 2 * min(sizes), "the log begins anew each time"
        last = file.last_position
    assert read(path) == records(1, last)


def test_a_reader_that_holds_its_place_holds_up_nothing(path: Path, checkpoints: "Queue[tuple[int, int]]") -> None:
    with RecordFile.open(path) as file:
        fill(file, 10)
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM records").fetchone() == (10,)
        fill_until_checkpoint(file)
        pages, copied = checkpoints.get()
        assert copied < pages
        fill_until_checkpoint(file)
        assert checkpoints.get()[1] == copied
        assert reader.execute("SELECT count(*) FROM records").fetchone() == (10,)
        reader.close()
        fill_until_checkpoint(file)
        pages, copied = checkpoints.get()
        assert copied == pages
        last = file.last_position
    assert read(path) == records(1, last)


def test_a_log_that_is_too_long_keeps_commits_out_while_its_rest_is_copied(
    path: Path, checkpoints: "Queue[tuple[int, int]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "WAL_BYTES_MAX", 100_000)
    copy = Checkpointer._copy
    kept_out = []

    def copy_beside_commits(self: Checkpointer) -> tuple[int, int]:
        kept_out.append(self._committing.locked())
        found = copy(self)
        if len(kept_out) == 1:  # the commit that began this checkpoint may not have returned yet
            file.append("k", "", 1, bytes(128 * 1024))
            file.commit()
        return found

    with RecordFile.open(path) as file:
        monkeypatch.setattr(Checkpointer, "_copy", copy_beside_commits)
        fill_until_checkpoint(file)
        first, second = checkpoints.get(), checkpoints.get()
        assert kept_out[1:] == [True]
        assert second[0] > first[0] and second[1] == second[0]


def test_a_checkpoint_that_fails_to_flush_ends_writing_for_good(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "CHECKPOINT_BYTES", 100_000)
    monkeypatch.setattr(Checkpointer, "_copy", fail_to_flush)
    with RecordFile.open(path) as file:
        fill_until_checkpoint(file)
        last = file.last_position
        wait_until(lambda: bool(file._faulted))
        file.append("k", "", 1, b"")
        with pytest.raises(LogError, match="takes no more records"):
            file.commit()
    assert read(path) == records(1, last)


def test_another_failure_of_a_checkpoint_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "CHECKPOINT_BYTES", 100_000)
    failed = threading.Event()

    def fail(self: Checkpointer) -> tuple[int, int]:
        failed.set()
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Checkpointer, "_copy", fail)
    with RecordFile.open(path) as file:
        for _ in range(3):
            fill_until_checkpoint(file)
            assert failed.wait(10)
            failed.clear()
        last = file.last_position
    assert read(path) == records(1, last)


# --- file systems -----------------------------------------------------------------------------------------------------

MOUNTS = [
    ("/", "ext4"),
    ("/home", "nfs4"),
    ("/lustre", "lustre"),
    ("/home/local", "tmpfs"),
    ("/mnt/my share", "cifs"),
    ("/weka", "fuse.s3fs"),
    ("/weka", "tmpfs"),
]


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/var/log/x", "ext4"),
        ("/", "ext4"),
        ("/home", "nfs4"),
        ("/home/me/run/log", "nfs4"),
        ("/home/local/run/log", "tmpfs"),
        ("/homework/log", "ext4"),
        ("/lustre/run/log", "lustre"),
        ("/mnt/my share/log", "cifs"),
        ("/weka/log", "tmpfs"),
    ],
)
def test_the_deepest_and_newest_mount_names_the_file_system(
    path: str, filesystem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystems, "mounts", lambda: MOUNTS)
    assert filesystem_type(path) == filesystem


def test_without_mounts_the_file_system_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filesystems.mounts(), "this machine says what is mounted"
    monkeypatch.setattr(filesystems, "mounts", list)
    assert filesystem_type("/var") == ""


def test_network_file_systems_are_known_by_name() -> None:
    for name in ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "fuse", "fuse.sshfs", "ceph", "9p"):
        assert is_network(name), name
    for name in ("ext4", "xfs", "tmpfs", "overlay", "btrfs", "zfs", "fuseblk", "nfsd", ""):
        assert not is_network(name), name


def test_a_file_on_a_network_file_system_has_a_rollback_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "mounts", lambda: [("/", "nfs4")])
    with RecordFile.open(path) as file, RecordReader.open(path) as reader:
        assert file.journal_mode == "truncate" and file._checkpointer is None
        fill(file, 400)
        found = reader.records()
        assert next(found).position == 1
        fill(file, 410)  # would wait for the reader and fail if it held its lock between two pages
        assert len(list(found)) == 409
        assert not path.with_name(path.name + "-wal").exists()


def test_a_file_in_wal_mode_is_converted_on_a_network_file_system(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, 10)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    monkeypatch.setattr(filesystems, "mounts", lambda: [("/", "nfs4")])
    with RecordFile.open(path) as file:
        assert file.journal_mode == "truncate"
        fill(file, 20)
    assert read(path) == records(1, 20)
