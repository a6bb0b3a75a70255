"""The live copy of a log: a run goes on from it elsewhere, whatever happened to its writer, and has one writer."""

import os
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from controlplane import BusConfig, ControlPlane
from controlplane.machine.coordinator import CoordinatorState, decide
from controlplane.machine.events import CoordinatorEvent, Issued, Retired
from controlplane.record.log import RunLog
from schemas.commands import EngineCommand, Target
from schemas.errors import BusAddressError, BusFaulted, ConfigError, LogCorrupt, LogError, LogFull, LogLocked
from schemas.storage import record_copy
from schemas.storage.record_copy import RecordCopy
from schemas.storage.record_file import RecordFile
from tests.unit.test_run_log import batch, events
from tests.waiting import wait_until

OPENED, FLUSH, CLOSED = events()


@pytest.fixture(autouse=True)
def short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_copy, "WATCH_S", 0.6)
    monkeypatch.setattr(record_copy, "TOUCH_S", 0.1)
    monkeypatch.setattr(record_copy, "COPY_S", 0.05)


class Machine:
    """One machine: a local disk, and the folder that it shares with the others."""

    def __init__(self, disk: Path, shared: Path) -> None:
        self.path, self.copy = disk / "run.db", shared / "copy"
        disk.mkdir(exist_ok=True)

    def open(self, run: str | None = "auto", age_max_s: int | None = None) -> RunLog:
        return RunLog.open(self.path, run, copy=str(self.copy), age_max_s=age_max_s)


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "here", tmp_path)


@pytest.fixture
def there(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "there", tmp_path)


def decided(log: RunLog, state: CoordinatorState, *batch: CoordinatorEvent) -> CoordinatorState:
    for event in batch:
        state, effects = decide(state, event)
        log.append(event, effects, 1)
    log.commit()
    return state


def killed(log: RunLog) -> None:
    """What a killed process leaves: no last group, no good order, and no locks."""
    copy = log._copy
    assert copy is not None and copy._thread is not None
    copy.fault = "killed"  # so that `writer` keeps its name
    copy._ends = True
    copy._thread.join()
    log._file.close()


def records(path: Path) -> list[object]:
    return list(RunLog.read(path))


def test_a_run_goes_on_elsewhere_with_all_that_was_published(here: Machine, there: Machine) -> None:
    log = here.open("r")
    state = decided(log, log.state, OPENED, FLUSH)
    killed(log)
    with there.open("resume") as moved:
        assert (moved.run, moved.state) == ("r", state)
        after = decided(moved, moved.state, OPENED, FLUSH)
        assert (after.epoch, after.seq) == (state.epoch + 1, state.seq + 2)
    assert records(there.path)[: len(records(here.path))] == records(here.path)


def test_a_command_is_published_only_once_the_copy_has_it(
    here: Machine, there: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushing, reached = threading.Event(), threading.Event()
    real = os.fsync

    def slow(descriptor: int) -> None:
        if threading.current_thread().name == "rolloutctl-log-copy":
            reached.set()
            flushing.wait(20)
        real(descriptor)

    monkeypatch.setattr(record_copy, "WAIT_S", 0.1)
    with here.open("r") as log:
        state = decided(log, log.state, OPENED)
        monkeypatch.setattr(os, "fsync", slow)
        with pytest.raises(LogLocked, match="the copy of the log is behind"):
            decided(log, state, FLUSH)
        assert reached.wait(20)
        flushing.set()
        monkeypatch.setattr(record_copy, "WAIT_S", 20)
        log.commit()
    assert len(records(here.path)) == 2


def test_what_no_agent_has_seen_yet_is_copied_soon_without_being_waited_for(here: Machine, there: Machine) -> None:
    log = here.open("r")
    decided(log, log.state, OPENED)
    log.append_batch("0.0", batch(1, 3), 1)
    log.commit()
    copy = log._copy
    assert copy is not None
    wait_until(lambda: copy.copied == 2)
    killed(log)
    with there.open() as moved:
        assert moved.recorded("0.0", "j") == 3


def test_a_group_that_was_cut_off_is_not_there_and_the_run_goes_on_before_it(here: Machine, there: Machine) -> None:
    log = here.open("r")
    state = decided(log, log.state, OPENED)
    decided(log, state, FLUSH)
    killed(log)
    (part,) = (path for path in here.copy.glob("*.records") if path.stat().st_size)
    os.truncate(part, part.stat().st_size - 1)
    with there.open() as moved:
        assert moved.state == state
        decided(moved, moved.state, OPENED)
    with there.open() as again:
        assert again.state.epoch == 2
    third = Machine(there.path.parent.parent / "third", there.copy.parent)
    with third.open() as again:
        assert again.state.epoch == 2


def test_a_writer_that_lives_is_not_overtaken(here: Machine, there: Machine) -> None:
    with here.open("r") as log:
        decided(log, log.state, OPENED)
        for run in ("resume", "new", "auto"):
            with pytest.raises(LogLocked, match=rf"another program writes this copy .*pid {os.getpid()} on"):
                there.open(run)
        assert not there.path.exists()
        decided(log, log.state, FLUSH)


def test_a_writer_that_was_taken_for_dead_publishes_nothing_more(here: Machine, there: Machine) -> None:
    log = here.open("r")
    state = decided(log, log.state, OPENED)
    (here.copy / "writer").write_text("", "utf-8")  # what a watch sees of one that is cut off
    with there.open() as moved:
        with pytest.raises(LogError, match="another program goes on with this run"):
            decided(log, state, FLUSH)
        with pytest.raises(LogError, match="another program goes on with this run"):
            log.check_copy()
        decided(moved, moved.state, OPENED)
    with pytest.raises(LogError, match="another program goes on with this run"):
        log.commit()
    log.close()
    with here.open() as back:  # its own tail, which no agent has seen, is put aside
        assert back.state.epoch == 2
    assert (here.path.parent / "run.r.db").exists()


def test_two_that_begin_at_the_same_moment_are_one_writer(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RecordCopy.claim(here.copy)):
        monkeypatch.setattr(record_copy, "_require_unwritten", lambda _: None)
        monkeypatch.setattr(record_copy, "_names", lambda _: iter(()))  # as the other saw the folder a moment before
        with pytest.raises(LogLocked, match="another program has begun to write this copy"):
            RecordCopy.claim(here.copy)


def test_a_log_on_this_machine_that_has_more_than_the_copy_is_continued(here: Machine) -> None:
    log = here.open("r")
    state = decided(log, log.state, OPENED)
    killed(log)
    with RunLog.open(here.path) as without:  # for a while without the copy
        state = decided(without, without.state, OPENED, FLUSH)
    with here.open() as log:
        assert log.state == state
    here.path.unlink()
    with here.open("resume") as log:
        assert log.state == state


def test_a_log_that_went_on_without_the_copy_and_has_dropped_its_end_is_not_put_aside(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.record.log.MARK_SHARE", 0)
    monkeypatch.setattr("controlplane.record.log.MARK_RECORDS", 1)
    with here.open("r") as log:
        decided(log, log.state, OPENED)
    with RunLog.open(here.path, age_max_s=60) as without:
        state = decided(without, without.state, OPENED)
        for number in range(4):
            state, effects = decide(state, FLUSH)
            without.append(FLUSH, effects, number * 10**11, state)
            without.commit()
        assert without._file.first_position > 2
    with pytest.raises(LogError, match="has dropped records from 2 on before they were copied.*name another folder"):
        here.open()
    with RunLog.open(here.path) as without:
        assert without.state == state


def test_the_copy_of_another_run_is_no_copy(here: Machine, there: Machine) -> None:
    with here.open("r") as log:
        decided(log, log.state, OPENED)
    with RunLog.open(there.path, "other") as log:
        decided(log, log.state, OPENED)
    with pytest.raises(ConfigError, match="is the log of run other, and its copy that of run r: to go on with"):
        there.open()


def test_a_file_is_no_folder_for_a_copy(here: Machine) -> None:
    here.copy.touch()
    with pytest.raises(LogError, match=f"the copy of the log in {here.copy} can't be read or written: Not a directory"):
        here.open()


def test_a_new_run_puts_the_copy_of_the_earlier_one_aside(here: Machine) -> None:
    with here.open("r") as log:
        decided(log, log.state, OPENED)
    with here.open("new") as log:
        assert log.state.epoch == 0
    assert len(list(here.copy.parent.glob("copy.*"))) == 1


def test_there_must_be_a_log_or_a_copy_to_resume(here: Machine) -> None:
    with pytest.raises(ConfigError, match=r'run="resume": there is no log .*, nor a copy. .*"auto" begins'):
        here.open("resume")
    assert not here.copy.exists()


def test_a_hole_is_found(here: Machine, there: Machine) -> None:
    with here.open("r") as log:
        decided(log, log.state, OPENED)
    with here.open() as log:
        decided(log, log.state, OPENED)
    with here.open() as log:
        decided(log, log.state, OPENED)
    second = sorted(path for path in here.copy.glob("*.records") if path.stat().st_size)[1]
    second.unlink()
    with pytest.raises(LogCorrupt, match="is missing; the next one is"):
        there.open()


def test_a_folder_that_takes_nothing_for_a_while_is_waited_for(
    here: Machine, there: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(record_copy, "WAIT_S", 0.2)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    log = here.open("r")
    state = decided(log, log.state, OPENED)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LogLocked, match="No space left on device"):
            decided(log, state, FLUSH)
    monkeypatch.setattr(record_copy, "WAIT_S", 20)
    log.commit()
    assert "can't be written (No space left on device); commands wait for it" in caplog.text
    wait_until(lambda: "is written again" in caplog.text)
    killed(log)
    with there.open() as moved:
        assert moved.state.seq == 2


def test_the_copy_of_a_long_log_is_dropped_with_it(
    here: Machine, there: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_copy, "PART_BYTES", 4096)
    monkeypatch.setattr("controlplane.record.log.MARK_RECORDS", 20)
    monkeypatch.setattr("controlplane.record.log.MARK_SHARE", 0)
    with here.open("r", age_max_s=60) as log:
        state = decided(log, log.state, OPENED)
        for number in range(150):
            at_ns = number * 10**10
            log.append_batch("0.0", batch(1 + 100 * number, 100), at_ns)
            flush = Issued(
                at_us=2, at_ns=2, ticket=1, command=EngineCommand(operation="flush"), target=Target(), timeout_ms=50
            )
            state, effects = decide(state, flush)
            log.append(flush, effects, at_ns, state)
            log.commit()
    assert min(here.copy.glob("*.records")).stat().st_size == 0  # what the first life wrote at first is gone
    assert len(list(here.copy.glob("*-00000001.records"))) == 0
    with there.open() as moved:
        assert moved.state == state
        assert moved._file.first_position > 1
        assert records(there.path)[-len(records(here.path)) :] == records(here.path)


def test_a_bus_that_has_a_successor_stops_by_itself(here: Machine, there: Machine) -> None:
    def plane(machine: Machine) -> ControlPlane:
        config = BusConfig(log_copy=str(machine.copy), head_interval_ms=50)
        return ControlPlane("tcp://127.0.0.1:0", log=machine.path, run="auto", config=config)

    with plane(here) as first:
        (here.copy / "writer").write_text("", "utf-8")
        with plane(there) as second:
            wait_until(lambda: not first.bus.is_up)
            with pytest.raises(BusFaulted, match="another program goes on with this run"):
                first.flush()
            assert second.bus.state.epoch == 2 and second.bus.is_up
            assert second.flush().wait(20).outcomes == ()


def test_a_bus_whose_address_can_not_be_written_is_not_left_open(here: Machine) -> None:
    config = BusConfig(address_file=str(here.path / "none" / "bus"), log_copy=str(here.copy))
    with (
        pytest.raises(BusAddressError, match="for the address of the bus"),
        ControlPlane("tcp://127.0.0.1:0", log=here.path, config=config),
    ):
        pass
    here.open("resume").close()  # at once: it closed in good order


def test_an_agent_keeps_what_the_copy_does_not_have(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_copy, "COPY_S", 3600)
    with here.open("r") as log:
        decided(log, log.state, OPENED)
        assert log.settled
        log.append_batch("0.0", batch(1), 1)
        log.commit()
        assert not log.pending and not log.settled


def test_a_group_that_fills_several_files_is_flushed_in_each_of_them(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, real = set[int](), os.fsync

    def noted(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(record_copy, "PART_BYTES", 256)
    monkeypatch.setattr(record_copy, "COPY_S", 3600)
    monkeypatch.setattr(os, "fsync", noted)
    with here.open("r") as log:
        state = decided(log, log.state, OPENED)
        for number in range(20):
            log.append_batch("0.0", batch(1 + 100 * number, 100), 1)
        log.commit()
        decided(log, state, FLUSH)
        parts = [part.stat() for part in here.copy.glob("*.records")]
        assert len(parts) > 5
        assert {part.st_ino for part in parts if part.st_size} <= flushed


def test_of_two_that_begin_at_the_same_moment_no_earlier_one_goes_on(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, later = record_copy._write, list[RecordCopy]()

    def overtaken(path: Path, text: str) -> None:
        if not later:
            monkeypatch.setattr(record_copy, "_write", real)
            later.append(RecordCopy.claim(here.copy))
        real(path, text)

    monkeypatch.setattr(record_copy, "_write", overtaken)
    with pytest.raises(LogLocked, match="another program has begun to write this copy"):
        RecordCopy.claim(here.copy)


def test_a_mark_whose_records_are_in_the_next_file_stays_with_them(
    here: Machine, there: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.record.log.MARK_SHARE", 0)
    monkeypatch.setattr("controlplane.record.log.MARK_RECORDS", 2)
    log = here.open("r", age_max_s=60)
    state = decided(log, log.state, OPENED)
    monkeypatch.setattr(record_copy, "PART_BYTES", 1)  # so that each mark ends a file
    for number in range(8):
        state, effects = decide(state, FLUSH)
        log.append(FLUSH, effects, number * 10**11, state)
        log.commit()
        wait_until(lambda: log.settled)
    first, marks = log._file.first_position, log._file.mark_positions()
    killed(log)
    with there.open() as moved:
        assert moved.state == state
        assert 1 < moved._file.first_position <= first and set(marks) <= set(moved._file.mark_positions())


def test_a_mark_is_copied_again_if_its_group_was_not_noted(
    here: Machine, there: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.record.log.MARK_SHARE", 0)
    monkeypatch.setattr("controlplane.record.log.MARK_RECORDS", 1)
    log = here.open("r")
    state = decided(log, log.state, OPENED)
    real, failures = record_copy.RecordCopy._require_newest, iter([OSError(116, "Stale file handle")])

    def stale(copy: RecordCopy) -> None:
        for error in failures:
            raise error
        real(copy)

    monkeypatch.setattr(record_copy.RecordCopy, "_require_newest", stale)
    state, effects = decide(state, FLUSH)
    log.append(FLUSH, effects, 1, state)
    with suppress(LogLocked):
        log.commit()
    wait_until(lambda: log.settled)
    marks = log._file.mark_positions()
    killed(log)
    with there.open() as moved:
        assert marks and moved._file.mark_positions() == marks


def test_a_file_that_can_not_be_deleted_leaves_no_hole(
    here: Machine, there: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.record.log.MARK_SHARE", 0)
    monkeypatch.setattr("controlplane.record.log.MARK_RECORDS", 1)
    log = here.open("r", age_max_s=60)
    state = decided(log, log.state, OPENED)
    monkeypatch.setattr(record_copy, "PART_BYTES", 1)
    real, failures = Path.unlink, iter([OSError(5, "Input/output error")])

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".records":
            for error in failures:
                raise error
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    for number in range(8):
        state, effects = decide(state, FLUSH)
        log.append(FLUSH, effects, number * 10**11, state)
        log.commit()
        wait_until(lambda: log.settled)
    wait_until(lambda: next(failures, None) is None)
    killed(log)
    with there.open() as moved:
        assert moved.state == state


def test_a_status_says_that_the_folder_of_the_copy_is_what_a_command_waits_for(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        if threading.current_thread().name == "rolloutctl-log-copy":
            raise OSError(28, "No space left on device")

    config = BusConfig(log_copy=str(here.copy))
    with ControlPlane("tcp://127.0.0.1:0", log=here.path, config=config) as plane:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            ticket = plane.flush()
            wait_until(lambda: bool(plane.bus.clock.hold_up))
            assert f"{here.copy}: the copy of the log is behind (No space left on device)" in plane.status().hold_up
        assert ticket.wait(20).outcomes == ()


def test_a_start_that_can_not_write_the_log_anew_leaves_nothing_of_it(
    here: Machine, there: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with here.open("r") as log:
        decided(log, log.state, OPENED)

    def full(_: RecordFile) -> int:
        raise LogFull("no space")

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "commit", full)
        with pytest.raises(LogFull):
            there.open()
    assert list(there.path.parent.iterdir()) == []


def test_a_retired_place_is_told_to_none_before_the_copy_has_it(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_copy, "COPY_S", 3600)
    with here.open("r") as log:
        state = decided(log, log.state, OPENED)
        log.append(FLUSH, (Retired(ticket=1, agents=()),), 1, state)
        log.commit()
        assert log.settled


def test_a_copying_that_ends_by_a_fault_of_its_own_stops_the_bus(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bool:
        raise RuntimeError("a fault")

    with here.open("r") as log:
        state = decided(log, log.state, OPENED)
        monkeypatch.setattr(RecordCopy, "_copy", broken)
        with pytest.raises(LogError, match=r"RuntimeError\('a fault'\)"):
            decided(log, state, FLUSH)


def test_a_folder_that_can_not_be_put_aside_is_an_error_of_the_log(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with here.open("r") as log:
        decided(log, log.state, OPENED)

    def taken(*_: object) -> Path:
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(Path, "rename", taken)
    with pytest.raises(LogError, match="the copy of the log in .* can't be read or written: Directory not empty"):
        here.open("new")
