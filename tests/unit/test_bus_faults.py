"""A bus whose turn raises, whose log hangs or is locked, or whose trainer's sender hangs: no caller waits for it."""

import contextlib
import errno
import logging
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import zmq

from controlplane import ControlPlane
from controlplane.bus import bus_loop, operator
from controlplane.bus import thread as bus_thread
from controlplane.bus.bus import Bus
from controlplane.bus.callers import Callers
from controlplane.bus.key_folder import KeyFolder
from controlplane.bus.operator import ask_status
from controlplane.bus.turn_clock import TurnClock
from controlplane.machine import coordinator, events
from controlplane.record.log import RunLog
from controlplane.tickets import Ticket
from schemas import wire
from schemas.commands import Pushed, Target
from schemas.config import BusConfig
from schemas.errors import BusClosed, BusFaulted, CommandError, LogError
from schemas.events import Resume
from schemas.reports import Report
from schemas.storage import database
from schemas.storage.record_file import RecordFile
from schemas.transport.keys import KeySource
from schemas.transport.sockets import Context, agent_dealer
from tests.unit.small_bus import FLUSH, PAUSE, PRIMARY, Engine, running
from tests.unit.test_plane import ADDRESS, agents, checkpoint
from tests.waiting import until, wait_until

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=100)
SHORT = BusConfig(head_interval_ms=50, heartbeat_ms=40, agent_timeout_ms=1_000, lease_ms=2_000)
ALL = Target()


# --- what escapes a turn ----------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_a_first_answer_without_a_body_is_malformed_like_any_other(tmp_path: Path, context: Context) -> None:
    log = RunLog.open(tmp_path / "run.db")
    async with Bus(ADDRESS, log, QUICK, context=context) as bus, agent_dealer(context, bus.address) as dealer:
        await dealer.send([wire.encode_header(0), b""])
        await dealer.send([b"", b""])
        await until(lambda: bus.inbox.malformed == 2)
        assert (await bus.publish(FLUSH, ALL, 10_000)).seq == 2


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_an_error_in_a_turn_ends_the_bus_with_its_cause_and_the_leases_of_the_agents(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def decide(state: Any, event: Any) -> Any:
        if isinstance(event, events.Issued) and event.command == FLUSH:
            raise ZeroDivisionError("a mistake of ours")
        return original(state, event)

    original, engine, log = coordinator.decide, Engine(), RunLog.open(tmp_path / "run.db")
    async with (
        Bus(ADDRESS, log, SHORT, context=context) as bus,
        running(bus.address, context, engine, tmp_path, PRIMARY),
    ):
        await until(lambda: bus.state.members["0.0"].joined if bus.state.members else False)
        assert (await bus.publish(PAUSE, ALL, 10_000)).acted == ("0.0",)
        monkeypatch.setattr(bus_loop, "decide", decide)
        ticket = bus.publish(FLUSH, ALL, 10_000)
        with anyio.fail_after(20), pytest.raises(BusFaulted, match="a mistake of ours") as caught:
            await ticket
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(BusFaulted, match=r"ZeroDivisionError.*Nothing was sent") as caught:
            bus.publish(FLUSH, ALL, 10_000)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(BusFaulted):
            bus.view()
        assert (await ask_status(bus.address)).seq == 2
        await until(lambda: Resume() in engine.calls)  # its lease has ended
    assert "Traceback" in caplog.text and "a mistake of ours" in caplog.text


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_an_error_in_a_task_of_the_bus_ends_it_with_its_cause(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raises(*_: object) -> Any:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr("controlplane.bus.callers.Callers.build_manifests", raises)
    async with Bus(ADDRESS, RunLog.open(tmp_path / "run.db"), QUICK, context=context) as bus:
        await until(lambda: bus.fault is not None)
        with pytest.raises(BusFaulted, match="KeyError: 'a mistake of ours'"):
            bus.publish(FLUSH, ALL, 10_000)


def test_the_watch_of_a_bus_outlives_its_own_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[None] = []

    def raises(_: object) -> bool:
        looks.append(None)
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(bus_loop.BusLoop, "watch", raises)
    with ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK) as plane:
        wait_until(lambda: len(looks) > 2)
        assert plane.flush().wait(20).seq == 2
    assert caplog.text.count("Traceback") == 1 and "too many open files" in caplog.text


# --- nothing was sent -------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_what_is_published_while_the_bus_closes_is_not_sent_if_its_caller_hears_so(
    tmp_path: Path, context: Context
) -> None:
    async with Bus(ADDRESS, RunLog.open(tmp_path / "run.db"), QUICK, context=context) as bus:

        def begin_to_close(_: object) -> None:  # after `publish` has looked, and before its order is in the queue
            bus.closed = True

        bus.orders.add(begin_to_close)
        with pytest.raises(BusClosed, match="is not open. Nothing was sent"):
            await bus.publish(FLUSH, ALL, 10_000)
    assert "issued" not in [entry.kind for entry in RunLog.read(tmp_path / "run.db")]


# --- a log that hangs, or is locked -----------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(log: Path) -> Iterator[None]:
    """A transaction of another program."""
    other = sqlite3.connect(log, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


def held_up(plane: ControlPlane, timeout: float) -> Ticket[Report]:
    """Publish a command whose turn can't write to the log."""
    ticket = plane.flush(timeout=timeout)
    wait_until(lambda: bool(plane.bus.clock.hold_up))
    return ticket


def test_a_bus_waits_for_a_log_that_another_program_has_locked(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    with ControlPlane(ADDRESS, log=log, config=QUICK) as plane:
        with locked(log):
            ticket = held_up(plane, timeout=60)
            assert plane.status().seq == 1 and not ticket.done
        assert ticket.wait(20).seq == 2
        assert plane.flush().wait(20).seq == 3


def test_tickets_end_by_their_deadlines_while_the_log_is_locked_and_the_bus_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "run.db"
    with ControlPlane(ADDRESS, log=log, config=QUICK) as plane:
        with locked(log):
            taken = held_up(plane, timeout=1)
            queued = plane.abort_requests(timeout=1)
            with pytest.raises(BusFaulted, match=r"the file locked, or this process starves\. Agents may have it"):
                taken.wait(20)
            with pytest.raises(BusFaulted, match=r"has taken no record for \d+ s: .*Nothing was sent"):
                queued.wait(20)
            assert "The bus waits for it, for 60 s at most" in caplog.text
        report = plane.flush().wait(20)
        wait_until(lambda: "takes records again" in caplog.text)
    issued = [entry.typed_event() for entry in RunLog.read(log) if entry.kind == "issued"]
    assert [event.command.operation for event in issued] == ["flush", "flush"] and report.seq == 3  # type: ignore[union-attr]


def test_a_log_that_stays_locked_for_a_lease_ends_the_bus(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    with ControlPlane(ADDRESS, log=log, config=SHORT) as plane:
        with locked(log):
            ticket = held_up(plane, timeout=60)
            with pytest.raises(BusFaulted, match="keeps the file locked"):
                ticket.wait(20)
            with pytest.raises(BusFaulted, match="Nothing was sent"):
                plane.flush()
            with pytest.raises(BusFaulted):
                plane.serving()
        assert "keeps the file locked" in str(plane.bus.fault)


def test_a_bus_that_has_stopped_is_not_said_to_go_on(caplog: pytest.LogCaptureFixture) -> None:
    moments, callers = [0], Callers(16, lambda *_: None)
    clock = TurnClock(Path("run.db"), SHORT, lambda: moments[-1], str)
    clock.begin()
    for at_us in (1_500_000, 3_000_000):
        moments.append(at_us)
        clock.watch(callers, lambda error: BusFaulted(str(error)))
    clock.end()
    clock.watch(callers, lambda error: BusFaulted(str(error)))
    assert "The bus waits for it" in caplog.text and "goes on" not in caplog.text


def test_a_bus_that_closes_waits_for_a_locked_log_and_records_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 1)
    log = tmp_path / "run.db"
    plane = ControlPlane(ADDRESS, log=log, config=QUICK)
    plane.open()
    bus = plane.bus
    with ThreadPoolExecutor(1) as pool:
        with locked(log):
            closing = pool.submit(plane.close)
            wait_until(lambda: bool(bus.clock.hold_up) or closing.done())
        closing.result(20)
    assert [entry.kind for entry in RunLog.read(log)][-1] == "closed"


class Disk(threading.Event):
    """Hangs from the moment on that the event is cleared, and goes on when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.holds_up = threading.Event()  # something waits for it
        self.set()

    def reach(self) -> None:
        if not self.is_set():
            self.holds_up.set()
        self.wait()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    goes_on, write = Disk(), RecordFile._write

    def hanging(file: RecordFile, *args: Any) -> None:
        if file.path.name == "run.db":
            goes_on.reach()
        write(file, *args)

    monkeypatch.setattr(RecordFile, "_write", hanging)
    yield goes_on
    goes_on.set()


def test_nothing_waits_for_a_disk_that_hangs(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_thread, "CLOSE_S", 0.1)
    monkeypatch.setattr("controlplane.plane.STATUS_MS", 1_000)
    config = BusConfig(head_interval_ms=50, agent_timeout_ms=1_000, lease_ms=2_500)
    plane = ControlPlane(ADDRESS, log=tmp_path / "run.db", config=config)
    plane.open()
    bus = plane.bus
    assert plane.serving() == {}
    disk.clear()
    tickets: list[Ticket[Any]] = [plane.flush(timeout=1), plane.flush(timeout=600)]
    tickets.append(plane.sync_weights(None, Pushed("1"), timeout=1))
    for ticket in tickets:  # by its deadline, or by that of the bus
        with pytest.raises(BusFaulted, match="its disk hangs"):
            ticket.wait(20)
    with pytest.raises(BusFaulted):
        plane.serving()
    with pytest.raises(BusFaulted):
        plane.wait_for_agents(1, timeout=1).wait(20)
    assert "keeps the file locked, or this process starves, and the bus has stopped" in plane.status().hold_up
    with pytest.raises(BusFaulted, match=r"has not closed within 0\.1 s\. the log .*: its disk hangs"):
        plane.close()
    disk.set()
    wait_until(lambda: bus._exited)
    wait_until(lambda: not any(thread.name == "rolloutctl-bus" for thread in threading.enumerate()))
    RunLog.open(tmp_path / "run.db").close()


@pytest.mark.parametrize("keyed", [False, True])
def test_operators_are_told_since_when_a_disk_hangs_and_the_fleet_as_last_known(
    tmp_path: Path, disk: Disk, keyed: bool
) -> None:
    keys = None
    if keyed:
        folder = KeyFolder(tmp_path / "keys")
        folder.make_server()
        keys = KeySource.find(folder.add("tester", "observer", ()))
    with (
        ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK, keys=folder.path if keyed else None) as plane,
        agents(plane.address, tmp_path, {} if keyed else {PRIMARY: Engine()}),
        contextlib.ExitStack() as stack,
    ):
        ask = partial(anyio.run, ask_status, plane.address, 20, keys)
        if not keyed:
            plane.wait_for_agents(1, timeout=20).wait()
        disk.clear()
        stack.callback(disk.set)  # before they close
        ticket = plane.flush(timeout=60)
        assert disk.holds_up.wait(20)  # a turn that still answers may begin before the one that hangs
        for _ in range(2):
            fleet = ask()
            assert "has taken no record for" in fleet.hold_up and "All this is from before" in fleet.hold_up
            assert fleet.warnings[0] == fleet.hold_up and fleet.read_only is keyed
            assert [line.agent for line in fleet.agents] == ([] if keyed else ["0.0"])
        assert plane.status().hold_up
        disk.set()
        ticket.wait(20)
        wait_until(lambda: not plane.status().hold_up)
        assert ask().hold_up == "" and plane.bus.router.safety_polls == 0
        assert plane.pause().wait(20).acted == (() if keyed else ("0.0",))


@pytest.mark.parametrize("lease_ms", [60_000, 2_500])
def test_an_operator_whose_command_meets_a_disk_that_hangs_hears_of_it_in_time(
    tmp_path: Path, disk: Disk, lease_ms: int
) -> None:
    config = BusConfig(head_interval_ms=50, agent_timeout_ms=1_000, lease_ms=lease_ms)
    with contextlib.suppress(BusFaulted), ControlPlane(ADDRESS, log=tmp_path / "run.db", config=config) as plane:
        address, stops = plane.address, lease_ms < 60_000
        disk.clear()
        try:
            with pytest.raises(
                CommandError, match=r"has taken no record for \d+ s: its disk hangs.*Agents may have it"
            ):
                anyio.run(partial(operator.submit, address, FLUSH, ALL, 60 if stops else 1))
            for command in (
                partial(operator.submit, address, PAUSE, ALL, 60),
                partial(operator.sync, address, "weights"),
                partial(operator.retire, address, ("0.0",)),
            ):
                with pytest.raises(CommandError, match=r"has taken no record for .*its disk hangs.*Nothing was sent"):
                    anyio.run(command)
        finally:
            disk.set()
        wait_until(lambda: not plane.status().hold_up or stops)
    issued = [entry.typed_event() for entry in RunLog.read(tmp_path / "run.db") if entry.kind == "issued"]
    assert [event.command for event in issued] == [FLUSH]  # type: ignore[union-attr]


@pytest.mark.parametrize("during", ["open", "first_record"])
def test_a_start_on_a_disk_that_hangs_ends_in_time_and_names_the_log(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    monkeypatch.setattr(bus_thread, "OPEN_S", 0.5)
    log = tmp_path / "run.db"
    if during == "open":
        opened = database.connect

        def connect(*args: Any) -> sqlite3.Connection:
            disk.wait()
            return opened(*args)

        monkeypatch.setattr(database, "connect", connect)
    disk.clear()
    plane = ControlPlane(ADDRESS, log=log, config=QUICK)
    with pytest.raises(LogError, match=rf"the log {log} could not be opened within 0\.5 s: the disk hangs"):
        plane.open()
    with pytest.raises(BusClosed):
        plane.status()
    disk.set()
    wait_until(lambda: not any(thread.name == "rolloutctl-bus" for thread in threading.enumerate()))
    with ControlPlane(ADDRESS, log=log, config=QUICK) as again:
        assert again.flush().wait(20).acted == ()


# --- subscriptions that hold it up ------------------------------------------------------------------------------------


def test_tickets_end_by_their_deadlines_while_subscriptions_hold_up_the_bus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_in, poll = Disk(), zmq.zmq_poll

    def slow(*args: Any) -> Any:
        taken_in.reach()
        return poll(*args)

    monkeypatch.setattr(zmq, "zmq_poll", slow)
    with ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK) as plane:
        taken_in.clear()
        assert taken_in.holds_up.wait(20)
        with pytest.raises(BusFaulted, match=r"faster than the bus can take in, or this .* no time to run\. Nothing"):
            plane.flush(timeout=1).wait(20)
        taken_in.set()
        assert plane.flush().wait(20).seq == 2


# --- a sender that hangs ----------------------------------------------------------------------------------------------


def test_a_bus_closes_though_a_sender_hangs_and_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun, never = threading.Event(), threading.Event()

    def send(_: tuple[int, ...]) -> None:
        begun.set()
        never.wait()

    with (
        caplog.at_level(logging.WARNING),
        ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path) as plane,
        agents(plane.address, tmp_path, {PRIMARY: Engine()}),
    ):
        plane.wait_for_agents(1, timeout=20).wait()
        plane.sync_weights(7, checkpoint(tmp_path / "seven"), send=send, timeout=600)
        assert begun.wait(20)
    assert "`send` has not returned: thread rolloutctl-send-7" in caplog.text
    never.set()
