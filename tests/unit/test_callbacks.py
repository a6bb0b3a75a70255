"""What an event loop calls without waking a task: for each message of a socket, and for notifications of threads."""

import asyncio
import threading
from collections.abc import Iterator

import anyio
import pytest
from anyio.lowlevel import checkpoint

from schemas.transport import async_socket
from schemas.transport.sockets import Context
from schemas.transport.wakeup import Wakeup
from tests.unit.socket_pairs import connected, pair, turns
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_a_served_socket_passes_every_message_in_order(context: Context) -> None:
    """Also those that arrive while the handler sends, which clears the edge."""
    left, right = await connected(context)
    got: list[int] = []

    def receive(frames: list[bytes]) -> None:
        got.append(int(frames[0]))
        assert right.send_nowait([b"answer"])

    async with left, right, anyio.create_task_group() as group:
        group.start_soon(right.serve, receive)
        with anyio.fail_after(20):
            for number in range(500):
                await left.send([b"%d" % number])
                if number % 7 == 0:
                    assert right.send_nowait([b"touches"])
                    await until(lambda: len(got) > number)  # noqa: B023
            await until(lambda: len(got) == 500)
        group.cancel_scope.cancel()
    assert got == list(range(500))
    assert right.safety_polls == 0


async def test_serving_yields_to_other_tasks_in_a_flood(context: Context) -> None:
    left, right = await connected(context)
    taken = 0

    def receive(frames: list[bytes]) -> None:
        nonlocal taken
        taken += 1

    async with left, right:
        for _ in range(500):
            await left.send([b"x"])
        async with anyio.create_task_group() as group:
            group.start_soon(right.serve, receive)
            seen = []
            with anyio.fail_after(20):
                while taken < 500:
                    seen.append(taken)
                    await checkpoint()
            group.cancel_scope.cancel()
    steps = [after - before for before, after in zip(seen, seen[1:], strict=False)]
    assert max(steps) <= 2 * async_socket.BURST


async def test_what_a_handler_raises_ends_serving(context: Context) -> None:
    left, right = await connected(context)

    def receive(frames: list[bytes]) -> None:
        raise ValueError(frames[0])

    async with left, right:
        await left.send([b"first"])
        with pytest.raises(ValueError, match="first"), anyio.fail_after(10):
            await right.serve(receive)
        await left.send([b"second"])
        with anyio.fail_after(10):
            assert await right.recv() == [b"second"]


async def test_a_cancelled_server_leaves_later_messages_to_others(context: Context) -> None:
    left, right = await connected(context)
    got: list[bytes] = []
    async with left, right:
        async with anyio.create_task_group() as group:
            group.start_soon(right.serve, lambda frames: got.extend(frames))
            await left.send([b"first"])
            await until(lambda: got == [b"first"])
            group.cancel_scope.cancel()
        await left.send([b"second"])
        with anyio.fail_after(10):
            assert await right.recv() == [b"second"]


async def test_closing_ends_serving(context: Context) -> None:
    left, right = pair(context)
    ended = False

    async def serve() -> None:
        nonlocal ended
        with pytest.raises(anyio.ClosedResourceError):
            await right.serve(lambda frames: None)
        ended = True

    async with left:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(serve)
                await until(lambda: bool(right._waiters))
                right.close()
    assert ended


def test_a_handler_may_use_anyio_in_an_asyncio_loop_that_anyio_did_not_start(context: Context) -> None:
    """As in a trainer of one's own, under `asyncio.run`."""
    times: list[float] = []

    async def main() -> None:
        left, right = await connected(context)

        def receive(frames: list[bytes]) -> None:
            times.append(anyio.current_time())
            scope.cancel()

        async with left, right:
            await left.send([b"x"])
            with anyio.fail_after(10), anyio.CancelScope() as scope:
                await right.serve(receive)

    asyncio.run(main())
    assert len(times) == 1


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    made = Wakeup()
    yield made
    # In the loop's thread, and after its end.
    made.close()


async def test_all_work_handed_over_before_a_notification_is_seen_after_it(wakeup: Wakeup) -> None:
    handed: list[int] = []
    seen: list[int] = []
    total = 20_000

    def hand_over() -> None:
        for number in range(total):
            handed.append(number)
            wakeup.notify()

    thread = threading.Thread(target=hand_over)
    thread.start()
    with anyio.fail_after(20):
        while len(seen) < total:
            await wakeup.wait()
            seen.extend(handed[len(seen) :])
    thread.join()
    assert seen == list(range(total))


async def test_several_notifications_before_a_wait_count_as_one(wakeup: Wakeup) -> None:
    for _ in range(3):
        wakeup.notify()
    await wakeup.wait()
    with anyio.move_on_after(0.01) as scope:
        await wakeup.wait()
    assert scope.cancelled_caught
    wakeup.notify()
    with anyio.fail_after(10):
        await wakeup.wait()


async def test_closing_a_wakeup_wakes_its_waiter_and_later_notifications_do_nothing(wakeup: Wakeup) -> None:
    async def wait() -> None:
        with pytest.raises(anyio.ClosedResourceError):
            await wakeup.wait()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await until(lambda: wakeup._waiting)
            wakeup.close()
            wakeup.close()
    wakeup.notify()
    with pytest.raises(anyio.ClosedResourceError):
        await wakeup.wait()


async def test_a_served_wakeup_calls_for_all_work_handed_over_by_threads(wakeup: Wakeup) -> None:
    work: list[int] = []
    taken: list[int] = []

    def take() -> None:
        while work:
            taken.append(work.pop(0))

    def hand_over(thread: int) -> None:
        for number in range(200):
            work.append(thread * 1000 + number)
            wakeup.notify()

    async with anyio.create_task_group() as group:
        group.start_soon(wakeup.serve, take)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as threads:
                for thread in range(4):
                    threads.start_soon(anyio.to_thread.run_sync, hand_over, thread)
            await until(lambda: len(taken) == 800)
        group.cancel_scope.cancel()
    assert len(set(taken)) == 800


@pytest.mark.parametrize("end", ["closed", "raises"])
async def test_serving_a_wakeup_ends_with_an_error_when_it_closes_or_its_function_raises(
    wakeup: Wakeup, end: str
) -> None:
    ended: list[type[Exception]] = []

    def fail() -> None:
        raise ValueError

    async def serve() -> None:
        try:
            await wakeup.serve(fail)
        except (anyio.ClosedResourceError, ValueError) as error:
            ended.append(type(error))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            await turns(3)
            wakeup.close() if end == "closed" else wakeup.notify()
    assert ended == [anyio.ClosedResourceError if end == "closed" else ValueError]
