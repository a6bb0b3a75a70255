"""What the trainer feels: the time of a `publish`, and how much slower a training loop runs beside the bus.

    python -m bench.trainer [--agents 1024] [--real 64] [--loops python,torch] [--pairs 20] [--out FILE]

`publish` is measured in the caller's thread beside real agents in other processes, one command after the other.

The loops are one of pure Python, which never lets go of the GIL, and one of torch: steps of a small MLP on one thread.
`bench.slowdowns` says how their slowdowns are measured. Beside each stands the share of a core that the bus's thread
took meanwhile: if it kept the GIL from the loop for all of that time, the loop would be slower by as much.

A latency is the time of a command from `publish` to its report while the loop goes on. The bus's thread gets the GIL
after at most a switch interval (`sys.setswitchinterval`), several times for each command.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.light_agents import two_cores
from bench.processes import spawn
from bench.slowdowns import FLUSH, STEPS, Beside, bus, slowdown
from controlplane import ControlPlane
from controlplane.tickets import Ticket
from schemas.reports import Report

BESIDE: Final[tuple[Beside, ...]] = ("idle", "commands")
GAP_S = 0.03
"""Time from a report to the next command, for latencies."""


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
            f"{row['percent']:+.2f} % (between {row['low_percent']:+.2f} and {row['high_percent']:+.2f}); it waited "
            f"{row['waited_percent']} % of the time, alone {row['waited_alone_percent']} %; the bus's thread took "
            f"{row['bus_percent']} % of a core"
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
    parser.add_argument("--block", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--commands", type=int, default=600)
    parser.add_argument("--latencies", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(line(row), flush=True)  # noqa: T201

    loops = options.loops.split(",")
    add(publishing(options.real, options.commands))
    for agents in (1, options.real):
        with bus(agents, two_cores()[1]) as plane:
            for loop in loops:
                for switch_s in (sys.getswitchinterval(), 0.0005):
                    add(latency(plane, loop, agents, switch_s, options.latencies))
    for loop in loops:
        for beside in BESIDE:
            add(slowdown(loop, options.agents, beside, options.block, options.pairs))
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
