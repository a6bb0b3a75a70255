"""An timer rings at the moment that was set last, or earlier, under every event loop."""

import time

import anyio
import pytest
from anyio.lowlevel import checkpoint

from schemas.transport.timer import Timer

pytestmark = pytest.mark.anyio


async def test_it_rings_at_the_earliest_moment_that_was_set() -> None:
    rung: list[float] = []
    done = anyio.Event()

    def ring() -> None:
        rung.append(anyio.current_time())
        if len(rung) < 3:
            timer.set(anyio.current_time() + 0.01)
        else:
            done.set()

    timer = Timer(ring)
    started = anyio.current_time()
    timer.set(started + 0.05)
    async with anyio.create_task_group() as group:
        group.start_soon(timer.serve)
        timer.set(started + 3600)
        await checkpoint()
        timer.set(started + 0.02)
        with anyio.fail_after(10):
            await done.wait()
        group.cancel_scope.cancel()
    assert rung[0] >= started + 0.015  # a loop may round to milliseconds
    assert rung == sorted(rung)


async def test_it_can_be_set_again_while_it_serves_with_no_moment() -> None:
    rung = anyio.Event()
    timer = Timer(rung.set)
    async with anyio.create_task_group() as group:
        group.start_soon(timer.serve)
        await anyio.sleep(0.01)
        timer.set(anyio.current_time())
        with anyio.fail_after(10):
            await rung.wait()
        group.cancel_scope.cancel()


async def test_what_the_function_raises_ends_serving() -> None:
    def ring() -> None:
        raise ValueError("late")

    timer = Timer(ring)
    timer.set(anyio.current_time())
    with pytest.raises(ValueError, match="late"), anyio.fail_after(10):
        await timer.serve()


async def test_a_cancelled_timer_does_not_fire() -> None:
    rung: list[None] = []
    timer = Timer(lambda: rung.append(None))
    with anyio.move_on_after(0.01):
        await timer.serve()
    timer.set(anyio.current_time())
    await anyio.sleep(0.02)
    assert not rung


async def test_it_does_not_ring_again_and_again_before_its_moment() -> None:
    """uvloop rounds to whole milliseconds: what is due in 0.4 of one would be due now, and be set again, and again."""
    rung = 0
    reached = anyio.Event()

    def ring() -> None:
        nonlocal rung
        rung += 1
        if time.monotonic() < due_s:
            timer.set(anyio.current_time() + due_s - time.monotonic())
        else:
            reached.set()

    timer = Timer(ring)
    async with anyio.create_task_group() as group:
        group.start_soon(timer.serve)
        for fraction in range(20):
            reached = anyio.Event()
            due_s = time.monotonic() + 0.002 + fraction * 0.000_05
            timer.set(anyio.current_time() + due_s - time.monotonic())
            with anyio.fail_after(10):
                await reached.wait()
        group.cancel_scope.cancel()
    assert rung <= 40
