"""How long N real agents take to join one bus, and to be together again after it was killed.

    python -m bench.join [--agents 128,256,512,1024] [--out FILE]

`joined`: from the start of the processes of the agents until all are ready. `answered`: from a command to its report,
the median of some. `again`: the bus is killed with SIGKILL and started again on its log and address; from the kill
until all are ready. Real TCP sockets and real journals; the engines do nothing, and live in two processes.
Beside each stands the CPU time that it took, which tells more where other programs run. Journals and log lie in memory:
elsewhere each agent has a disk of its own, and creating a thousand files on one would be what is measured.
"""

import contextlib
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import zmq

from bench import tables
from bench.null_engine import NullEngine
from bench.processes import shares
from bench.tables import Row
from controlplane.bus.bus import Bus
from controlplane.record.log import RunLog
from schemas.commands import EngineCommand, Target
from schemas.identity import Identity
from workers.agent import Agent

PATIENCE_S = 120
COMMANDS = 5
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


# --- in processes of their own ----------------------------------------------------------------------------------------


def bus(address: str, log: str, agents: str) -> None:
    """Open the bus, print its address, then a line when the fleet is whole; end with stdin."""

    async def main() -> None:
        async with Bus(address, RunLog.open(log)) as opened:
            print(opened.address, flush=True)  # noqa: T201
            await opened.wait_until(
                lambda state: (
                    sum(
                        member.state == "live" and member.status is not None and member.status.ready
                        for member in state.members.values()
                    )
                    >= int(agents)
                )
            )
            print("whole", flush=True)  # noqa: T201
            took_s = []
            for _ in range(COMMANDS):
                start = time.monotonic()
                report = await opened.publish(EngineCommand(operation="flush"), Target(), 60_000)
                assert len(report.acted) == int(agents), report
                took_s.append(time.monotonic() - start)
            print(statistics.median(took_s), flush=True)  # noqa: T201
            await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)

    anyio.run(main, backend_options={"use_uvloop": True})


def agents(first: str, count: str, address: str) -> None:
    """Run `count` agents on one event loop, until stdin ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))  # an agent that dials anew has four for a moment

    async def run_agent(number: int, state: Path) -> None:
        engine, place = NullEngine(tokenizer=True), Identity(replica=number, node_rank=0)
        async with Agent(bus=address, identity=place, engine=engine, state_dir=state, context=context) as agent:
            await agent.run()

    async def main() -> None:
        with tempfile.TemporaryDirectory(dir=MEMORY) as state:
            async with anyio.create_task_group() as group:
                for number in range(int(first), int(first) + int(count)):
                    group.start_soon(run_agent, number, Path(state))
                await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
                group.cancel_scope.cancel()

    anyio.run(main, backend_options={"use_uvloop": True})


# --- the measurement --------------------------------------------------------------------------------------------------


@contextmanager
def child(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.join", "--serve", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    with process:
        try:
            yield process
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close() if process.stdin is not None else None
            process.wait(PATIENCE_S)
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """The next line of a child; an error if it takes too long or ends."""
    assert process.stdout is not None
    timer = threading.Timer(PATIENCE_S, process.kill)
    timer.start()
    try:
        text = process.stdout.readline()
    finally:
        timer.cancel()
    assert text, f"a process ended, or was silent for {PATIENCE_S} s"
    return text


def cpu_s(*processes: subprocess.Popen[str]) -> float:
    """CPU time that living processes have used."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(count: int) -> Row:
    """Return one row: seconds until joined, and until together again."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, contextlib.ExitStack() as stack:
        log = str(Path(folder) / "run.db")
        first = stack.enter_context(child("bus", "tcp://127.0.0.1:0", log, str(count)))
        address = line(first).strip()
        start = time.monotonic()
        fleet = [
            stack.enter_context(child("agents", str(begin), str(share), address)) for begin, share in shares(count)
        ]
        line(first)
        joined = {"joined_s": time.monotonic() - start, "bus_cpu_s": cpu_s(first), "agents_cpu_s": cpu_s(*fleet)}
        joined["answered_s"] = float(line(first))
        first.send_signal(signal.SIGKILL)
        start, used_s = time.monotonic(), cpu_s(*fleet)
        first.wait()
        second = stack.enter_context(child("bus", address, log, str(count)))
        line(second)
        line(second)
        again = {
            "again_s": time.monotonic() - start,
            "again_bus_cpu_s": cpu_s(second),
            "again_agents_cpu_s": cpu_s(*fleet) - used_s,
        }
    return {"agents": count, **{name: round(figure, 3) for name, figure in (joined | again).items()}}


def table(rows: list[Row]) -> str:
    """Return a line for each fleet."""
    columns: dict[str, tables.Cell] = {
        "real agents": "{agents:,}",
        "joined, s": "{joined_s:.2f}",
        "a command, s": "{answered_s:.2f}",
        "again after a killed bus, s": "{again_s:.2f}",
        "CPU of the bus to join, s": "{bus_cpu_s:.2f}",
    }
    return tables.table(columns, rows)


def main() -> None:
    """Measure, print a table, write JSON."""
    if len(sys.argv) > 2 and sys.argv[1] == "--serve":
        {"bus": bus, "agents": agents}[sys.argv[2]](*sys.argv[3:])
        return
    options = tables.read_options(__doc__, agents="128,256,512,1024")
    rows = [measure(int(count)) for count in options.agents.split(",")]
    tables.publish(table(rows), rows, options.out)


if __name__ == "__main__":
    main()
