"""What one agent costs its node: CPU for a command, CPU and memory while nothing happens.

    python -m bench.agents [--agents 64] [--commands 60] [--idle 10] [--out FILE]

`command` is CPU time of an agent for one command, with libzmq's threads and the engine that does nothing, in a fleet of
two processes on one bus. `idle` is the share of a core, and the memory, of one agent as `rolloutctl agent` starts it,
in a process of its own; and beside it what the bus in the trainer takes for the idle fleet. `libraries` is the memory
of a process that has only imported what an agent is built on: no agent can have less. `import` is the time to import
the three packages.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import tables
from bench.processes import Fleet, spawn
from bench.speakers import cpu_ns, thread_of_the_bus
from bench.tables import Row
from controlplane import ControlPlane
from schemas.commands import EngineCommand

FLUSH = EngineCommand(operation="flush")


def process_cpu_ns(pids: list[int]) -> int:
    """CPU time of processes. The id of a process's clock is made of its own, see clock_getcpuclockid(3)."""
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in pids)


def resident_mb(pid: int) -> float:
    """Memory of a process that is resident, in megabytes (10^6)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def bus() -> Iterator[ControlPlane]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ControlPlane("tcp://127.0.0.1:0", log=Path(folder) / "run.db") as plane,
    ):
        yield plane


def commanded(agents: int, commands: int, nodes: int, idle_s: float) -> list[dict[str, Any]]:
    """Return the CPU time of a command, and that of a bus with idle agents."""
    with bus() as plane, spawn("rolloutctl", agents, plane.address, str(nodes), "") as fleet:
        plane.wait_for_agents(agents, timeout=120).wait()
        for _ in range(5):
            plane.publish(FLUSH).wait()
        used_ns = fleet_cpu_ns(fleet)
        for _ in range(commands):
            report = plane.publish(FLUSH).wait()
            assert len(report.acted) == (agents if nodes == 1 else 0)
        command_us = (fleet_cpu_ns(fleet) - used_ns) / 1000 / commands / agents
        time.sleep(min(1.0, idle_s))  # uploads
        share, agents_share = shares(fleet, idle_s)
    what = "acting" if nodes == 1 else "skipping"
    rows = [{"what": f"command, {what}", "agents": agents, "cpu_us": round(command_us, 1)}]
    if nodes == 1:
        rows.append({"what": "idle, bus", "agents": agents, "core_percent": round(100 * share, 3)})
        rows.append({"what": "idle, each", "agents": agents, "core_percent": round(100 * agents_share / agents, 3)})
    return rows


def fleet_cpu_ns(fleet: Fleet) -> int:
    """CPU time of all processes of a fleet."""
    return process_cpu_ns([child.pid for child in fleet.children])


def shares(fleet: Fleet, idle_s: float) -> tuple[float, float]:
    """Return the shares of a core that the bus's thread and the fleet take while nothing is published."""
    thread, used_ns = cpu_ns({thread_of_the_bus()}), fleet_cpu_ns(fleet)
    time.sleep(idle_s)
    return (cpu_ns({thread_of_the_bus()}) - thread) / 1e9 / idle_s, (fleet_cpu_ns(fleet) - used_ns) / 1e9 / idle_s


def alone(idle_s: float) -> dict[str, Any]:
    """Return what one agent takes that is a process of its own."""
    with bus() as plane, tempfile.TemporaryDirectory() as folder:
        words = [
            "--bus",
            plane.address,
            "--replica",
            "0",
            "--engine",
            "bench.null_engine:NullEngine",
            "--state-dir",
            folder,
        ]
        command = [sys.executable, "-m", "controlplane.cli", "agent", *words, "--traces", f"{folder}/traces"]
        child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            plane.wait_for_agents(1, timeout=60).wait()
            plane.publish(FLUSH).wait()
            time.sleep(min(2.0, idle_s))  # uploads
            used_ns = process_cpu_ns([child.pid])
            time.sleep(idle_s)
            share = (process_cpu_ns([child.pid]) - used_ns) / 1e9 / idle_s
            memory = resident_mb(child.pid)
        finally:
            child.kill()
            child.wait()
    return {"what": "idle, alone", "agents": 1, "core_percent": round(100 * share, 3), "memory_mb": round(memory, 1)}


def libraries() -> dict[str, Any]:
    """Return the memory of a process that has imported an agent's libraries, and nothing of ours."""
    code = "import anyio._backends._asyncio, click, msgspec, uvloop, zmq; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        memory = resident_mb(child.pid)
        child.kill()
    return {"what": "libraries", "memory_mb": round(memory, 1)}


def importing(times: int = 5) -> dict[str, Any]:
    """Return how long the three packages take to import, in a new process; the shortest of some."""
    code = "import time; start = time.perf_counter(); import controlplane, schemas, workers; "
    code += "print(time.perf_counter() - start)"
    took = [float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(times)]
    return {"what": "import", "s": round(min(took), 3)}


WORDS = {
    "idle, alone": "an idle agent, a process of its own",
    "idle, each": "an idle agent among {} in two processes",
    "idle, bus": "the bus's thread, {} idle agents",
    "command, acting": "an agent, a command on which its engine is called",
    "command, skipping": "an agent, a command that it skips",
    "libraries": "a process that has only imported Python's asyncio, uvloop, pyzmq, msgspec, anyio and click",
    "import": "`import controlplane, schemas, workers`",
}
UNITS = {"cpu_us": "{} µs of CPU", "core_percent": "{} % of a core", "memory_mb": "{} MB", "s": "{} s"}


def table(rows: list[Row]) -> str:
    """Return what each row says, in words."""
    lines = (
        [
            WORDS[row["what"]].format(row.get("agents")),
            ", ".join(unit.format(row[key]) for key, unit in UNITS.items() if key in row),
        ]
        for row in rows
    )
    return tables.markdown(["what", "takes"], list(lines))


def main() -> None:
    """Measure, print, write JSON."""
    options = tables.read_options(__doc__, agents=64, commands=60, idle=10.0)
    rows = [importing(), libraries(), alone(options.idle)]
    rows += commanded(options.agents, options.commands, 1, options.idle)
    rows += commanded(options.agents, options.commands, 2, options.idle)
    tables.publish(table(rows), rows, options.out)


if __name__ == "__main__":
    main()
