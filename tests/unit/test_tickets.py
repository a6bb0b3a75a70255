"""A ticket ends once, for all that wait for it: threads, tasks and callbacks."""

import threading

import anyio
import pytest

from controlplane.tickets import Ticket
from schemas.errors import CommandError


def test_every_waiting_thread_gets_the_result() -> None:
    ticket: Ticket[str] = Ticket(1)
    got: list[str] = []
    threads = [threading.Thread(target=lambda: got.append(ticket.wait(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not ticket.done
    ticket.resolve("result")
    for thread in threads:
        thread.join(20)
    assert got == ["result"] * 4
    assert ticket.done and ticket.wait(0) == "result"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_every_waiting_task_gets_the_error() -> None:
    ticket: Ticket[str] = Ticket(1)
    failed = 0

    async def wait() -> None:
        nonlocal failed
        with pytest.raises(CommandError, match="refused"):
            await ticket
        failed += 1

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            threading.Thread(target=ticket.fail, args=(CommandError("refused"),)).start()
    assert failed == 3
    await wait()  # one that has ended


def test_a_wait_that_takes_too_long_may_be_repeated() -> None:
    ticket: Ticket[str] = Ticket(7)
    for timeout in (0.0, 0.001, -1.0):
        with pytest.raises(TimeoutError, match="ticket 7 is still open"):
            ticket.wait(timeout)
    ticket.resolve("late")
    assert ticket.wait(0.0) == "late"


def test_only_the_first_end_of_many_counts() -> None:
    ticket: Ticket[int] = Ticket(1)
    ends: list[int] = []
    ticket.when_done(lambda ended: ends.append(ended.wait()))
    start = threading.Barrier(8)

    def end(number: int) -> None:
        start.wait()
        ticket.resolve(number)
        ticket.fail(CommandError(str(number)))

    threads = [threading.Thread(target=end, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ends == [ticket.wait()]


def test_a_callback_that_raises_hinders_no_other(caplog: pytest.LogCaptureFixture) -> None:
    ticket: Ticket[int] = Ticket(1)
    called: list[int] = []

    def fail(_: Ticket[int]) -> None:
        raise ValueError("of a caller")

    ticket.when_done(fail)
    ticket.when_done(lambda ended: called.append(ended.wait()))
    ticket.resolve(5)
    ticket.when_done(lambda ended: called.append(ended.wait() + 1))  # at once
    assert called == [5, 6]
    assert "of a caller" in caplog.text
