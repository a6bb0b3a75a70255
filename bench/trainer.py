"""What the trainer feels: the time of a `publish`, and how much slower a training loop runs beside the bus.

    python -m bench.trainer [--agents 1024] [--real 64] [--loops python,torch] [--rounds 6] [--out FILE]

`publish` is measured in the caller's thread beside real agents in other processes, one command after the other.

The loops are one of pure Python, which never lets go of the GIL, and one of torch: steps of a small MLP on one thread.
Blocks of a loop alone, beside idle agents, and beside idle agents with a command a second follow each other in
turn. In each, the bus is opened anew, and its agents (light speakers, in a process of their own) join before the clock
starts. A slowdown is the median over rounds, each block against the blocks alone before and after it. Beside it stands
the share of a core that the bus's thread took meanwhile, which varies less where other programs run: if it took the
GIL from the loop for all of that time, the loop would be slower by as much.

A latency is the time of a command from `publish` to its report while the loop goes on. The bus's thread gets the GIL
after at most a switch interval (`sys.setswitchinterval`), several times for each command.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from bench.light_agents import go, spawned, two_cores
from bench.processes import spawn
from bench.speakers import cpu_ns, thread_of_the_bus
from controlplane import ControlPlane
from controlplane.tickets import Ticket
from schemas.commands import EngineCommand
from schemas.reports import Report

Step = Callable[[], object]
Beside = Literal["idle", "commands"]
FLUSH = EngineCommand(operation="flush")
GAP_S = 0.03
"""Time from a report to the next command, for latencies."""


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
    """A bus that light speakers have joined."""
    _, core = two_cores()
    with (
        tempfile.TemporaryDirectory() as folder,
        ControlPlane("tcp://127.0.0.1:0", log=Path(folder) / "run.db") as plane,
        spawned(plane.address, agents, *(["--core", str(core)] if core is not None else [])) as child,
    ):
        ready = plane.wait_for_agents(agents)
        go(child)
        ready.wait()
        yield plane


def microseconds(took_us: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile, for a row."""
    cuts = statistics.quantiles(took_us, n=100)
    return {"p50_us": round(cuts[49], 1), "p99_us": round(cuts[98], 1)}


def publishing(agents: int, commands: int) -> dict[str, Any]:
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


def step_ms(step: Step, block_s: float, plane: ControlPlane | None = None) -> float:
    """Return the mean time of a step over a block. With a plane, a command is published every second."""
    start = now = time.perf_counter()
    steps, due, tickets = 0, start + 0.1, []
    while now < start + block_s:
        step()
        steps += 1
        now = time.perf_counter()
        if plane is not None and now >= due:
            tickets.append(plane.publish(FLUSH))
            due += 1.0
    took = time.perf_counter() - start
    for ticket in tickets:
        ticket.wait().raise_for_failures()
    return 1000 * took / steps


def slowdowns(loop: str, agents: int, block_s: float, rounds: int) -> list[dict[str, Any]]:
    """Return one row for what stands beside the loop."""
    step = STEPS[loop]()
    step_ms(step, block_s / 4)
    alone = [step_ms(step, block_s)]
    found: dict[Beside, list[float]] = {"idle": [], "commands": []}
    shares: dict[Beside, list[float]] = {"idle": [], "commands": []}
    for _ in range(rounds):
        for beside, ratios in found.items():
            with bus(agents) as plane:
                threads, start = {thread_of_the_bus()}, time.perf_counter()
                used_ns = cpu_ns(threads)
                took_ms = step_ms(step, block_s, plane if beside == "commands" else None)
                shares[beside].append((cpu_ns(threads) - used_ns) / 1e9 / (time.perf_counter() - start))
            alone.append(step_ms(step, block_s))
            ratios.append(took_ms / statistics.mean(alone[-2:]))
    noise = statistics.median(abs(second / first - 1) for first, second in zip(alone, alone[1:], strict=False))
    return [
        {
            "what": "slowdown",
            "loop": loop,
            "agents": agents,
            "beside": beside,
            "step_ms": round(statistics.median(alone), 3),
            "percent": round(100 * (statistics.median(ratios) - 1), 2),
            "bus_percent": round(100 * statistics.median(shares[beside]), 2),
            "noise_percent": round(100 * noise, 2),
        }
        for beside, ratios in found.items()
    ]


def latency(plane: ControlPlane, loop: str, agents: int, switch_s: float, commands: int) -> dict[str, Any]:
    """Return the time from publish to report beside a loop that goes on."""
    step, took = STEPS[loop](), []
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(switch_s)
    for _ in range(commands):
        done: list[float] = []

        def note(_: Ticket[Report], done: list[float] = done) -> None:
            done.append(time.perf_counter())

        start = time.perf_counter()
        plane.publish(FLUSH).when_done(note)
        while not done or time.perf_counter() < done[0] + GAP_S:
            step()
        took.append(1e6 * (done[0] - start))
    sys.setswitchinterval(before_s)
    return {"what": "latency", "loop": loop, "agents": agents, "switch_ms": 1000 * switch_s} | microseconds(took)


def line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    if row["what"] == "slowdown":
        beside = "idle agents" + (" and a command a second" if row["beside"] == "commands" else "")
        return (
            f"a loop in {row['loop']} (steps of {row['step_ms']} ms) beside {row['agents']} {beside}: "
            f"{row['percent']:+.2f} % (the bus's thread: {row['bus_percent']} % of a core; blocks alone differ by "
            f"{row['noise_percent']} %)"
        )
    where = f"beside {row['agents']} agents"
    if row["what"] == "latency":
        where = f"of a command to {row['agents']} beside a loop in {row['loop']}, switch interval {row['switch_ms']} ms"
    return f"{row['what']} {where}: median {row['p50_us']:,.0f} µs, p99 {row['p99_us']:,.0f} µs"


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1024)
    parser.add_argument("--real", type=int, default=64)
    parser.add_argument("--loops", default=",".join(STEPS))
    parser.add_argument("--block", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--latencies", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(line(row), flush=True)  # noqa: T201

    loops = options.loops.split(",")
    add(publishing(options.real, 100 * options.rounds))
    for agents in (1, options.real):
        with bus(agents) as plane:
            for loop in loops:
                for switch_s in (sys.getswitchinterval(), 0.0005):
                    add(latency(plane, loop, agents, switch_s, options.latencies))
    for loop in loops:
        for row in slowdowns(loop, options.agents, options.block, options.rounds):
            add(row)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
