"""What a weight sync adds to the load itself, and how fast weights go through a checkpoint.

    python -m bench.weights [--agents 1,8,64] [--rounds 30] [--load-ms 100] [--sizes 64,2048] [--out FILE]

Syncs. A fleet whose engines take a known time to load, in units of one fan-out: a command that calls every engine once,
published between the syncs of the same run. Agents live in two processes, and engines note when they load and resume on
the clock that all processes share. A sync is three commands (prepare, load, commit) with five engine calls (check,
pause, load, flush, resume).

Checkpoints. A trainer in torch saves its weights with safetensors and syncs one or two replicas to them, on a disk and
on a memory file system. `total` is all of it: the save, the manifest (with `digest`, over every byte), three phases.
Engines read before the pause (prepare), so `load` is what a load adds while generation stands still.
Beside it: the same bytes copied twice from memory to memory by one core, since here they are written once, and read
once by each replica. That memory was in use before. A new file needs new pages, and to get those takes longer than the
copy: `into new` is one copy into memory that the process has not touched before. Files are read from the page cache, as
by replicas on the trainer's machine, and the disk writes behind: waiting for a disk comes on top.
"""

import argparse
import json
import mmap
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor

from bench.null_engine import NullEngine
from bench.processes import spawn
from controlplane import ControlPlane
from schemas.carriers.filesystems import filesystem_type, read_mounts
from schemas.commands import Checkpoint, Manifest, WeightSync
from schemas.events import Call, Load, Pause, Resume, Returned
from schemas.identity import Identity
from workers.agent import Agent
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, memory_of, weights

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
MANIFEST = Manifest(tensors=1, nbytes=1, layout="0" * 64)
"""Of weights that nobody reads."""

PARTS = ("added", "prepare", "load", "commit", "to_serving", "to_report")
"""What a sync adds to the slowest load, and in which phase; from the last load to the last resume, to the report."""

Row = dict[str, object]

# --- a sync beside a fan-out ------------------------------------------------------------------------------------------


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
        struct.pack_into("=q", self._memory, agent * self._LAYOUT.size + 8 * moment, time.monotonic_ns())

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
                self._observation = replace(self._observation, version=version)
            case Pause():
                self._observation = replace(self._observation, generating=False)
            case Resume():
                self._observation = replace(self._observation, generating=True)
                self._moments.note(self._agent, 2)
        return Returned()


def timed_agents(first: int, count: int, bus: str, moments: str, agents: str, load_ms: str) -> None:
    """Run `count` agents in this process, on one event loop."""
    shared = Moments(Path(moments), int(agents))

    async def run_agent(number: int, state: Path) -> None:
        engine = TimedEngine(number, shared, int(load_ms) / 1000)
        identity = Identity(replica=number, node_rank=0)
        async with Agent(bus=bus, identity=identity, engine=engine, state_dir=state) as agent:
            await agent.run()

    async def main() -> None:
        with tempfile.TemporaryDirectory() as state:
            async with anyio.create_task_group() as group:
                for number in range(first, first + count):
                    group.start_soon(run_agent, number, Path(state) / str(number))

    anyio.run(main, backend_options={"use_uvloop": True})


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


def measure_sync(agents: int, rounds: int, load_ms: int) -> Row:
    """Return what a sync of `agents` engines costs beside their load, in µs and in fan-outs; medians."""
    fan_outs: list[int] = []
    took: dict[str, list[int]] = {name: [] for name in PARTS}
    with timed_fleet(agents, load_ms) as (plane, moments):
        for number in range(rounds + 3):
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
            )
            for name, part in zip(PARTS, parts, strict=True):
                took[name].append(part)
    row: Row = {"agents": agents, "load_ms": load_ms, "fan_out_us": round(statistics.median(fan_outs) / 1000)}
    for name, values in took.items():
        row[f"{name}_us"] = round(statistics.median(values) / 1000)
        row[f"{name}_fan_outs"] = round(statistics.median(values) / statistics.median(fan_outs), 2)
    return row


# --- checkpoints beside copies ----------------------------------------------------------------------------------------

HIDDEN = 1152
LAYER_BYTES = 12 * HIDDEN**2 * 4
"""Of a layer of the tiny model: 64 MB."""
REPLICAS = 2


def shape(megabytes: int) -> TinyConfig:
    """Return the shape of a model of about this size."""
    return TinyConfig(hidden=HIDDEN, heads=4, layers=max(1, round(megabytes * 1e6 / LAYER_BYTES)))


def checkpoint_agents(first: int, count: int, bus: str, megabytes: str) -> None:
    """Run one replica in this process: an agent and its engine, whose model has this size."""
    assert count == 1

    async def main() -> None:
        identity = Identity(replica=first, node_rank=0)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            engine = TinyEngine(identity, checkpoints=Path("/"), traces=place, seed=first, config=shape(int(megabytes)))
            async with Agent(bus=bus, identity=identity, engine=engine, state_dir=place) as agent:
                await agent.run()

    anyio.run(main, backend_options={"use_uvloop": True})


def seconds(work: Callable[[], object]) -> float:
    """Return how long some work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Copies:
    """Copies from memory to memory by one core.

    Args:
        tensors: What is copied.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._held = [memory_of(tensor) for tensor in tensors.values()]
        self._buffers = [bytearray(part) for part in self._held]

    def two(self) -> None:
        """Copy into memory that is in use, and back."""
        for part, buffer in zip(self._held, self._buffers, strict=True):
            memoryview(buffer)[:] = part
        for part, buffer in zip(self._held, self._buffers, strict=True):
            part[:] = buffer

    def into_new(self) -> None:
        """Copy into memory that the process has not touched before."""
        for part in self._held:
            bytes(part)


def measure_checkpoints(megabytes: int, rounds: int) -> Iterator[Row]:
    """Yield a row for each file system, number of replicas, and digest: seconds, the fastest of some rounds."""
    tensors = weights(TinyModel(shape(megabytes), seed=9))
    nbytes, copies = sum(tensor.nbytes for tensor in tensors.values()), Copies(tensors)
    new = min(seconds(copies.into_new) for _ in range(rounds))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plane = stack.enter_context(ControlPlane("tcp://127.0.0.1:0", log=Path(folder) / "run.db", checkpoints="/"))
        stack.enter_context(spawn("checkpoints", REPLICAS, plane.address, str(megabytes), module="bench.weights"))
        plane.wait_for_agents(REPLICAS, timeout=120).wait()
        for _ in range(2):  # the first two syncs get an engine the memory for its two sets of weights
            sync_once(plane, Path(folder), tensors, REPLICAS, False)
        for where in [place for place in (tempfile.gettempdir(), MEMORY) if place is not None]:
            for replicas, content in [(1, False), (1, True), (2, False), (2, True)]:
                both, taken = [], []
                for _ in range(rounds):
                    both.append(seconds(copies.two))
                    taken.append(sync_once(plane, Path(where), tensors, replicas, content))
                best = min(taken, key=lambda parts: parts["total"])
                yield {
                    "file_system": filesystem_type(where, read_mounts()),
                    "megabytes": round(nbytes / 1e6),
                    "replicas": replicas,
                    "digest": content,
                    **{f"{name}_s": round(took, 4) for name, took in best.items()},
                    "two_copies_s": round(min(both), 4),
                    "copy_into_new_s": round(new, 4),
                    "share_of_copies": round(min(both) / best["total"], 2),
                }


def sync_once(
    plane: ControlPlane, where: Path, tensors: dict[str, Tensor], replicas: int, content: bool
) -> dict[str, float]:
    """Save, sync and delete; return the seconds of each part."""
    with tempfile.TemporaryDirectory(dir=where) as folder:
        start = time.perf_counter()
        save_file(tensors, Path(folder) / "model.safetensors")
        saved = time.perf_counter()
        source = str(Path(folder).relative_to("/"))
        ticket = plane.sync_weights(None, source, content=content, replicas=range(replicas))
        asked = time.perf_counter()
        report = ticket.wait()
        end = time.perf_counter()
    assert len(report.loaded) == replicas, report
    parts = {"total": end - start, "save": saved - start, "manifest": asked - saved}
    for phase in report.phases:
        assert isinstance(phase.command, WeightSync)
        parts[phase.command.phase] = max(outcome.latency_us for outcome in phase.outcomes) / 1e6
    return parts


# --- tables -----------------------------------------------------------------------------------------------------------

SYNCS = {
    "agents": "agents",
    "fan-out µs": "fan_out_us",
    "sync adds µs": "added_us",
    "fan-outs": "added_fan_outs",
    "prepare": "prepare_fan_outs",
    "load": "load_fan_outs",
    "commit": "commit_fan_outs",
    "loaded to serving µs": "to_serving_us",
    "fan-outs ": "to_serving_fan_outs",
    "loaded to report µs": "to_report_us",
    "fan-outs  ": "to_report_fan_outs",
}
CHECKPOINTS = {
    "files": "file_system",
    "MB": "megabytes",
    "replicas": "replicas",
    "digest": "digest",
    "save s": "save_s",
    "manifest": "manifest_s",
    "prepare": "prepare_s",
    "load": "load_s",
    "commit": "commit_s",
    "total s": "total_s",
    "two copies": "two_copies_s",
    "into new": "copy_into_new_s",
    "copies/total": "share_of_copies",
}


def table(columns: dict[str, str], rows: list[Row]) -> str:
    """Return the rows as text, under these titles."""
    cells = [[str(row[key]) for key in columns.values()] for row in rows]
    widths = [max(len(title), 8) for title in columns]
    lines = (zip(line, widths, strict=True) for line in [list(columns), *cells])
    return "\n".join("  ".join(cell.rjust(width) for cell, width in line) for line in lines)


def main() -> None:
    """Measure, print tables, write JSON."""
    if len(sys.argv) > 2 and sys.argv[1] == "--serve":
        serve: dict[str, Callable[..., None]] = {"timed": timed_agents, "checkpoints": checkpoint_agents}
        serve[sys.argv[2]](int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="1,8,64")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--load-ms", type=int, default=100)
    parser.add_argument("--sizes", default="64,2048")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    syncs = [measure_sync(int(agents), options.rounds, options.load_ms) for agents in _numbers(options.agents)]
    print(table(SYNCS, syncs), flush=True)  # noqa: T201
    checkpoints: list[Row] = []
    for megabytes in _numbers(options.sizes):
        rows = list(measure_checkpoints(megabytes, 8 if megabytes < 256 else 2))
        print("\n" + table(CHECKPOINTS, rows), flush=True)  # noqa: T201
        checkpoints += rows
    if options.out is not None:
        options.out.write_text(json.dumps({"syncs": syncs, "checkpoints": checkpoints}, indent=1) + "\n")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


if __name__ == "__main__":
    main()
