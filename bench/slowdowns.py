"""How much slower a training loop runs beside the bus. `bench.trainer` measures it with the rest.

Two processes run the same loop, in blocks of a second, one after the other; one of them also has a bus, whose agents
are light speakers in a process of their own. A pair of blocks gives one quotient. The order changes from pair to pair,
so that a machine that becomes slower counts for both. After half of the pairs the other process has the bus: two
processes differ by some percent, however equal they are, so a quotient of the first half is averaged with one of the
second. The slowdown is the median of those averages, with its interval of 95 %, which assumes nothing about the noise.

The loops and the speakers are pinned to one core, the bus's thread to another: what loop and bus share is the GIL. Time
in which a loop could have run, and another program had its core, is not counted where the kernel tells it (schedstat).

`waited` is the part of that time in which the loop's thread neither ran nor could have run: it waited for the GIL. A
loop of pure Python waits for nothing else. A slowdown beyond it would come from caches that the bus has used.
"""

import math
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bench.light_agents import go, spawned, two_cores
from bench.speakers import cpu_ns, thread_of_the_bus
from controlplane import ControlPlane
from schemas.commands import EngineCommand

Step = Callable[[], object]
Beside = Literal["idle", "commands"]
FLUSH = EngineCommand(operation="flush")


def python_step() -> object:
    """Some milliseconds of pure Python."""
    number = 1
    for _ in range(20_000):
        number = number * 1_103_515_245 + 12_345 & 0x7FFFFFFF
    return number


def torch_step() -> Step:
    """Return a step of training, of some milliseconds."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, labels = torch.randn(256, 256), torch.randint(16, (256,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


STEPS: dict[str, Callable[[], Step]] = {"python": lambda: python_step, "torch": torch_step}


@contextmanager
def bus(agents: int, core: int | None) -> Iterator[ControlPlane]:
    """A bus that light speakers have joined, which are pinned to a core."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ControlPlane("tcp://127.0.0.1:0", log=Path(folder) / "run.db") as plane,
        spawned(plane.address, agents, *(["--core", str(core)] if core is not None else [])) as child,
    ):
        ready = plane.wait_for_agents(agents)
        go(child)
        ready.wait()
        yield plane


# --- in a process with a loop -----------------------------------------------------------------------------------------


class Block(NamedTuple):
    """One block.

    Attributes:
        step_ms: Time of a step.
        waited: Share of it in which the loop's thread waited.
        bus: CPU time of the bus's thread, as a share of a core.
    """

    step_ms: float
    waited: float
    bus: float


def _kept_out_ns() -> int:
    """Time that this thread was ready to run and had no core; 0 where the kernel does not tell."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1])
    return 0


def block(step: Step, seconds: float, plane: ControlPlane | None, beside: Beside) -> Block:
    """Run the loop for a while. With a plane, and if that is asked for, a command is published once a second."""
    threads = {thread_of_the_bus()} if plane is not None else set[int]()
    steps, tickets = 0, []
    start = now = time.perf_counter_ns()  # before the other clocks, and `end` after them, so that they count less
    kept_out, cpu, bus_ns = _kept_out_ns(), time.thread_time_ns(), cpu_ns(threads)
    last, due = start + int(seconds * 1e9), start + int(seconds * 1e8)
    while now < last:
        step()
        steps += 1
        now = time.perf_counter_ns()
        if plane is not None and beside == "commands" and now >= due:
            tickets.append(plane.publish(FLUSH))
            due += 10**9
    bus_ns, cpu, kept_out = cpu_ns(threads) - bus_ns, time.thread_time_ns() - cpu, _kept_out_ns() - kept_out
    end = time.perf_counter_ns()
    for ticket in tickets:
        ticket.wait().raise_for_failures()
    took = end - start - kept_out
    return Block(took / steps / 1e6, max(0.0, 1 - cpu / took), bus_ns / (end - start))


def serve(connection: Connection, loop: str, agents: int, beside: Beside) -> None:
    """Do what the parent says, until it says nothing more: `("bus",)`, `("alone",)` or `("block", seconds)`."""
    core, other_core = two_cores()
    step, plane = STEPS[loop](), None
    with ExitStack() as stack:
        while True:
            try:
                word, *arguments = connection.recv()
            except EOFError:
                return
            if word == "block":
                connection.send(block(step, arguments[0], plane, beside))
                continue
            stack.close()
            plane = None
            if word == "bus":
                _pin(other_core)  # also the threads that the bus starts
                plane = stack.enter_context(bus(agents, core))
            _pin(core)
            connection.send(None)


def _pin(core: int | None) -> None:
    """Keep this thread on a core, and those that it starts from now on."""
    if core is not None:
        os.sched_setaffinity(threading.get_native_id(), {core})


# --- the measurement --------------------------------------------------------------------------------------------------


def slowdown(loop: str, agents: int, beside: Beside, seconds: float, pairs: int) -> dict[str, Any]:
    """Return the row of one loop. `pairs` of blocks are measured with the bus in each of the two processes."""
    with ExitStack() as stack:
        processes = [stack.enter_context(_process(loop, agents, beside)) for _ in range(2)]
        halves = [_half(processes[number], processes[1 - number], seconds, pairs) for number in range(2)]
    averages = sorted(
        math.sqrt(first[0].step_ms / first[1].step_ms * second[0].step_ms / second[1].step_ms)
        for first, second in zip(*halves, strict=True)
    )
    low, high = interval(averages)
    measured = [pair for half in halves for pair in half]
    return {
        "what": "slowdown",
        "loop": loop,
        "agents": agents,
        "beside": beside,
        "step_ms": round(statistics.median(alone.step_ms for _, alone in measured), 3),
        "percent": round(100 * (statistics.median(averages) - 1), 2),
        "low_percent": round(100 * (low - 1), 2),
        "high_percent": round(100 * (high - 1), 2),
        "waited_percent": round(100 * statistics.mean(with_bus.waited for with_bus, _ in measured), 2),
        "waited_alone_percent": round(100 * statistics.mean(alone.waited for _, alone in measured), 2),
        "bus_percent": round(100 * statistics.mean(with_bus.bus for with_bus, _ in measured), 2),
    }


def interval(values: list[float]) -> tuple[float, float]:
    """Return the interval that holds the median of what sorted values were drawn from, in 95 of 100 cases."""
    count = len(values)
    below, chance = 0, 0.5**count
    while below + 1 < count // 2 and (more := chance + math.comb(count, below + 1) * 0.5**count) <= 0.025:
        below, chance = below + 1, more
    return values[below], values[count - 1 - below]


def _half(with_bus: Connection, alone: Connection, seconds: float, pairs: int) -> list[tuple[Block, Block]]:
    for process, word in ((alone, "alone"), (with_bus, "bus")):
        process.send((word,))
        process.recv()
        _measured(process, seconds)
    found = []
    for number in range(pairs):
        if number % 2:
            first, second = _measured(with_bus, seconds), _measured(alone, seconds)
            found.append((first, second))
        else:
            first, second = _measured(alone, seconds), _measured(with_bus, seconds)
            found.append((second, first))
    return found


def _measured(process: Connection, seconds: float) -> Block:
    process.send(("block", seconds))
    found: Block = process.recv()
    return found


@contextmanager
def _process(loop: str, agents: int, beside: Beside) -> Iterator[Connection]:
    """A process with a loop."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, loop, agents, beside))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()
