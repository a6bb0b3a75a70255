"""What the trainer feels: the time of a `publish`, and how long a training loop beside the bus waits for the GIL.

    python -m bench.trainer [--agents 1024] [--real 64] [--loops python,torch] [--seconds 20] [--out FILE]

`publish` is measured in the caller's thread beside real agents in other processes, one command after the other.

The loops are one of pure Python, which never lets go of the GIL, and one of torch: steps of a small MLP on one thread.
Beside each stands a bus with light speakers. Loop and speakers are pinned to one core and the bus's thread to another,
so what the loop shares with the bus is the GIL. `waited` is the part of its time in which the loop's thread neither ran
nor could have run; time in which another program had its core is not counted where the kernel tells it (schedstat). It
is at most what the bus's thread takes. Quotients of whole blocks with and without a bus differ by more than that.

A latency is the time of a command from `publish` to its report while the loop goes on. The bus's thread gets the GIL
after at most a switch interval (`sys.setswitchinterval`), several times for each command.
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

from bench import tables
from bench.light_agents import go, spawned, two_cores
from bench.processes import spawn
from bench.speakers import cpu_ns, thread_of_the_bus
from bench.tables import Row
from controlplane import ControlPlane
from controlplane.tickets import Ticket
from schemas.commands import EngineCommand
from schemas.reports import Report

Step = Callable[[], object]
Beside = Literal["idle", "commands"]
FLUSH: Final = EngineCommand(operation="flush")
GAP_S = 0.03
"""Time from a report to the next command, for latencies."""
SHORT_US = 500
"""Switch interval while a command is open, for the other half of them."""


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
def bus(agents: int) -> Iterator[ControlPlane]:
    """A bus on one core, that light speakers on the other have joined; this thread then runs on theirs."""
    core, other_core = two_cores()
    cores = os.sched_getaffinity(0)
    _pin(other_core)  # also the threads that the bus starts
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            ControlPlane("tcp://127.0.0.1:0", log=Path(folder) / "run.db") as plane,
            spawned(plane.address, agents, *(["--core", str(core)] if core is not None else [])) as child,
        ):
            ready = plane.wait_for_agents(agents)
            go(child)
            ready.wait()
            _pin(core)
            yield plane
    finally:
        os.sched_setaffinity(threading.get_native_id(), cores)


def _pin(core: int | None) -> None:
    """Keep this thread on a core, and those that it starts from now on."""
    if core is not None:
        os.sched_setaffinity(threading.get_native_id(), {core})


def _kept_out_ns() -> int:
    """Time that this thread was ready to run and had no core; 0 where the kernel does not tell."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1])
    return 0


def microseconds(took_us: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile, for a row."""
    cuts = statistics.quantiles(took_us, n=100)
    return {"p50_us": round(cuts[49], 1), "p99_us": round(cuts[98], 1)}


def publishing(agents: int, commands: int) -> Row:
    """Return the time of `publish` in the caller's thread."""
    took = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ControlPlane("tcp://127.0.0.1:0", log=Path(folder) / "run.db") as plane,
        spawn("rolloutctl", agents, plane.address, "1", ""),
    ):
        plane.wait_for_agents(agents, timeout=120).wait()
        for _ in range(commands):
            start = time.perf_counter_ns()
            ticket = plane.publish(FLUSH)
            took.append((time.perf_counter_ns() - start) / 1000)
            assert len(ticket.wait().acted) == agents
    return {"what": "publish", "agents": agents} | microseconds(took)


def latency(plane: ControlPlane, loop: str, agents: int, switch_us: int, commands: int) -> Row:
    """Return the time from publish to report beside a loop that goes on."""
    step, took = STEPS[loop](), []
    for _ in range(commands):
        done: list[float] = []

        def note(_: Ticket[Report], done: list[float] = done) -> None:
            done.append(time.perf_counter())

        start = time.perf_counter()
        plane.publish(FLUSH).when_done(note)
        while not done or time.perf_counter() < done[0] + GAP_S:
            step()
        took.append(1e6 * (done[0] - start))
    return {"what": "latency", "loop": loop, "agents": agents, "switch_ms": switch_us / 1000} | microseconds(took)


def waiting(plane: ControlPlane, loop: str, agents: int, beside: Beside, seconds: float) -> Row:
    """Return how long a loop waited for the GIL beside a bus that is idle or publishes a command a second."""
    step, tickets, threads = STEPS[loop](), [], {thread_of_the_bus()}
    for _ in range(20):
        step()
    start = now = time.perf_counter_ns()  # before the other clocks, and `took` after them, so that they count less
    kept_out, cpu, bus_ns = _kept_out_ns(), time.thread_time_ns(), cpu_ns(threads)
    last, due = start + int(seconds * 1e9), start + int(seconds * 1e8)
    while now < last:
        step()
        now = time.perf_counter_ns()
        if beside == "commands" and now >= due:
            tickets.append(plane.publish(FLUSH))
            due += 10**9
    bus_ns, cpu, kept_out = cpu_ns(threads) - bus_ns, time.thread_time_ns() - cpu, _kept_out_ns() - kept_out
    took = time.perf_counter_ns() - start
    for ticket in tickets:
        ticket.wait().raise_for_failures()
    return {
        "what": "waiting",
        "loop": loop,
        "agents": agents,
        "beside": beside,
        "waited_percent": round(100 * max(0.0, 1 - cpu / (took - kept_out)), 2),
        "bus_percent": round(100 * bus_ns / took, 2),
    }


def words(row: Row) -> str:
    """Return what a row is about."""
    if row["what"] == "publish":
        return f"`publish` beside {row['agents']} agents"
    if row["what"] == "latency":
        return f"a command to {row['agents']} beside a loop in {row['loop']}, switch interval {row['switch_ms']} ms"
    commands = " and a command a second" if row["beside"] == "commands" else ""
    return f"a loop in {row['loop']} beside {row['agents']:,} idle agents{commands}"


def figures(row: Row) -> str:
    """Return what was measured."""
    if row["what"] == "publish":
        return f"{row['p50_us']} µs, p99 {row['p99_us']} µs"
    if row["what"] == "latency":
        return f"{row['p50_us'] / 1000:.1f} ms, p99 {row['p99_us'] / 1000:.1f} ms"
    return f"waited {row['waited_percent']:.2f} % of the time; the bus's thread {row['bus_percent']} % of a core"


def table(rows: list[Row]) -> str:
    """Return a line for each row."""
    return tables.table({"what": words, "median": figures}, rows)


def main() -> None:
    """Measure, print a table, write JSON."""
    options = tables.read_options(
        __doc__, agents=1024, real=64, loops=",".join(STEPS), seconds=20.0, commands=600, latencies=60
    )
    loops, rows = options.loops.split(","), [publishing(options.real, options.commands)]
    usual_us = round(1e6 * sys.getswitchinterval())
    for agents in (1, options.real):
        for switch_us in (usual_us, SHORT_US):
            sys.setswitchinterval(switch_us / 1e6)
            with bus(agents) as plane:
                rows += [latency(plane, loop, agents, switch_us, options.latencies) for loop in loops]
    sys.setswitchinterval(usual_us / 1e6)
    with bus(options.agents) as plane:
        for loop in loops:
            rows += [waiting(plane, loop, options.agents, beside, options.seconds) for beside in ("idle", "commands")]
    tables.publish(table(rows), rows, options.out)


if __name__ == "__main__":
    main()
