"""What a weight sync adds to the load itself.

    python -m bench.weights [--agents 1,8,64] [--rounds 30] [--load-ms 100] [--out FILE]

A fleet whose engines take a known time to load, in units of one fan-out: a command that calls every engine once,
published between the syncs of the same run. Agents live in two processes, and engines note when they load and resume on
the clock that all processes share. A sync is three commands (prepare, load, commit) with five engine calls (check,
pause, load, flush, resume). `plain` is as many commands and calls without a sync, one command after the other: sleep
(pause, sleep), wake (wake, resume) and flush.
"""

import mmap
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
from msgspec.structs import replace

from bench import tables
from bench.null_engine import NullEngine
from bench.processes import run_agents, spawn
from bench.tables import Row
from controlplane import ControlPlane
from schemas.commands import Checkpoint, Manifest
from schemas.events import Call, Load, Pause, Resume, Returned, Sleep, Wake
from schemas.identity import Identity
from schemas.outcomes import Acted

MANIFEST = Manifest(tensors=1, nbytes=1, layout="0" * 64)
"""Of weights that nobody reads."""

PARTS = ("added", "prepare", "load", "commit", "to_serving", "to_report", "plain")
"""What a sync adds to the slowest load, and in which phase; from the last load to the last resume, to the report; and
the same calls without a sync."""
CALLS = 5
"""Engine calls of a sync."""


class Moments:
    """When each engine began its load, ended it, and resumed: ns of the monotonic clock, in a file that is shared."""

    _LAYOUT = struct.Struct("=3q")

    def __init__(self, path: Path, agents: int) -> None:
        with path.open("r+b") as file:
            file.truncate(agents * self._LAYOUT.size)
            self._memory = mmap.mmap(file.fileno(), 0)
        self._agents = agents

    def note(self, agent: int, moment: int) -> None:
        """Write down that it is now."""
        self.put(agent, moment, time.monotonic_ns())

    def put(self, agent: int, moment: int, ns: int) -> None:
        """Write down another number in the place of a moment."""
        struct.pack_into("=q", self._memory, agent * self._LAYOUT.size + 8 * moment, ns)

    def read(self) -> list[tuple[int, int, int]]:
        """Return the moments of each engine."""
        return [self._LAYOUT.unpack_from(self._memory, self._LAYOUT.size * agent) for agent in range(self._agents)]


class TimedEngine(NullEngine):
    """An engine whose loads take a known time, and which notes its moments."""

    def __init__(self, agent: int, moments: Moments, load_s: float) -> None:
        super().__init__(tokenizer=True)
        self._agent, self._moments, self._load_s = agent, moments, load_s

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        """Become what the call asks for."""
        match call:
            case Load(version=version):
                self._moments.note(self._agent, 0)
                await anyio.sleep(self._load_s)
                self._moments.note(self._agent, 1)
                self._change(version=version)
            case Pause():
                self._change(generating=False)
            case Resume():
                self._change(generating=True)
                self._moments.note(self._agent, 2)
            case Sleep(tags=tags):
                self._change(asleep=tags)
            case Wake():
                self._change(asleep=frozenset())
        return Returned()

    def _change(self, **changes: object) -> None:
        self._observation = replace(self._observation, **changes)


def timed_agents(first: int, count: int, bus: str, moments: str, agents: str, load_ms: str) -> None:
    """Run `count` agents in this process, on one event loop."""
    shared = Moments(Path(moments), int(agents))

    def make(number: int) -> tuple[Identity, TimedEngine]:
        return Identity(replica=number, node_rank=0), TimedEngine(number, shared, int(load_ms) / 1000)

    run_agents(range(first, first + count), bus, make, None)


@contextmanager
def timed_fleet(agents: int, load_ms: int) -> Iterator[tuple[ControlPlane, Moments]]:
    """Open a control plane and its fleet."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "moments"
        path.touch()
        moments = Moments(path, agents)
        with ControlPlane("tcp://127.0.0.1:0", log=Path(folder) / "run.db") as plane:
            arguments = (plane.address, str(path), str(agents), str(load_ms))
            with spawn("timed", agents, *arguments, module="bench.weights"):
                plane.wait_for_agents(agents, timeout=30).wait()
                yield plane, moments


def plain_ns(plane: ControlPlane, agents: int) -> int:
    """Return how long the commands and calls of a sync take without one, in ns."""
    start = time.monotonic_ns()
    reports = [plane.sleep().wait(), plane.wake().wait(), plane.flush().wait()]
    end = time.monotonic_ns()
    acted = [outcome.conclusion for report in reports for outcome in report.outcomes]
    assert sum(len(one.calls) for one in acted if isinstance(one, Acted)) == CALLS * agents, reports
    return end - start


def measure_sync(agents: int, rounds: int, load_ms: int) -> Row:
    """Return what a sync of `agents` engines costs beside their load, in µs and in fan-outs; medians."""
    fan_outs: list[int] = []
    took: dict[str, list[int]] = {name: [] for name in PARTS}
    with timed_fleet(agents, load_ms) as (plane, moments):
        for number in range(rounds + 3):
            plain = plain_ns(plane, agents)
            start = time.monotonic_ns()
            assert len(plane.flush().wait().acted) == agents
            middle = time.monotonic_ns()
            report = plane.sync_weights(None, Checkpoint("weights"), manifest=MANIFEST).wait()
            end = time.monotonic_ns()
            assert len(report.loaded) == agents, report
            if number < 3:
                continue  # caches fill
            began, loaded, resumed = zip(*moments.read(), strict=True)
            slowest = max(after - before for before, after in zip(began, loaded, strict=True))
            fan_outs.append(middle - start)
            prepare, load, commit = (1000 * max(o.latency_us for o in phase.outcomes) for phase in report.phases)
            parts = (
                end - middle - slowest,
                prepare,
                load - slowest,
                commit,
                max(resumed) - max(loaded),
                end - max(loaded),
                plain,
            )
            for name, part in zip(PARTS, parts, strict=True):
                took[name].append(part)
    row: Row = {"agents": agents, "load_ms": load_ms, "fan_out_us": round(statistics.median(fan_outs) / 1000)}
    for name, values in took.items():
        row[f"{name}_us"] = round(statistics.median(values) / 1000)
        row[f"{name}_fan_outs"] = round(statistics.median(values) / statistics.median(fan_outs), 2)
    return row


COLUMNS: dict[str, tables.Cell] = {
    "agents": "{agents}",
    "one fan-out": lambda row: f"{row['fan_out_us'] / 1000:.1f} ms",
    "a sync adds to the load": lambda row: f"{row['added_us'] / 1000:.1f} ms",
    "fan-outs": "{added_fan_outs:.2f}",
    "its calls in plain commands": lambda row: f"{row['plain_us'] / 1000:.1f} ms",
    "plain fan-outs": "{plain_fan_outs:.2f}",
    "all loaded to all serving": lambda row: f"{row['to_serving_us'] / 1000:.1f} ms",
    "serving fan-outs": "{to_serving_fan_outs:.2f}",
}


def table(rows: list[Row]) -> str:
    """Return a line for each fleet."""
    return tables.table(COLUMNS, rows)


def main() -> None:
    """Measure, print a table, write JSON."""
    if len(sys.argv) > 2 and sys.argv[1] == "--serve":
        timed_agents(int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
        return
    options = tables.read_options(__doc__, agents="1,8,64", rounds=30, load_ms=100)
    agents = [int(count) for count in options.agents.split(",")]
    rows = [measure_sync(count, options.rounds, options.load_ms) for count in agents]
    tables.publish(table(rows), rows, options.out)


if __name__ == "__main__":
    main()
