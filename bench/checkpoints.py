"""How fast weights go through a checkpoint, beside copies of the same bytes and beside the least that could be done.

    python -m bench.checkpoints [--sizes 64,2048] [--rounds 8] [--out FILE]

A trainer in torch saves its weights with safetensors and syncs one or two replicas to them: on a disk, on a memory file
system, and on one that is mounted with huge pages. `total` is all of it: the save, the manifest (with `digest`, over
every byte), three phases. Engines check the files before the pause (prepare), and read them in `load`, while generation
stands still. Files are read from the page cache, as by replicas on the trainer's machine, and the disk writes behind:
waiting for a disk comes on top.

`two copies` is the same bytes copied twice from memory to memory by one core, since here they are written once, and
read once by each replica. That memory was in use before, while a new file needs new pages. `floor` is therefore the
least that keeps the promises, by this process alone: a new file, written and renamed, and read by all cores into
memory in use, once for each replica; with `digest`, also sha256 by all cores, once of what is written and once of what
each replica reads.

The file system with huge pages is mounted where only this program and its children see it (`unshare`). A machine that
does not allow that has no rows for it.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from bench import tables
from bench.processes import own_temporary_files, run_agents, spawn
from bench.tables import Row
from controlplane import ControlPlane
from schemas.commands import WeightSync
from schemas.identity import Identity
from schemas.storage.filesystems import filesystem_type
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, memory_of, weights

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
MOUNT = 'mount -t tmpfs -o huge=always none "$0" && exec "$@"'
HIDDEN_MAX = 1152
"""Width of a model; a layer of that width has 64 MB."""
REPLICAS = 2
PIECE_BYTES = 4 << 20
"""What a thread of the floor takes at a time."""
STEP_BYTES = 1 << 20
"""What it reads and then digests at a time, so that the bytes are still in the core's cache."""


def shape(megabytes: int) -> TinyConfig:
    """Return the shape of a model of about this size."""
    hidden = min(HIDDEN_MAX, 4 * round((megabytes * 1e6 / 48) ** 0.5 / 4))  # 12 squares of four-byte numbers a layer
    return TinyConfig(hidden=hidden, heads=4, layers=max(1, round(megabytes * 1e6 / 48 / hidden**2)))


def checkpoint_agents(first: int, count: int, bus: str, megabytes: str) -> None:
    """Run agents in this process, each with an engine whose model has this size."""

    def make(number: int) -> tuple[Identity, TinyEngine]:
        identity, traces = Identity(replica=number, node_rank=0), Path(tempfile.gettempdir())
        return identity, TinyEngine(
            identity, checkpoints=Path("/"), traces=traces, seed=number, config=shape(int(megabytes))
        )

    run_agents(range(first, first + count), bus, make, None)


# --- what a checkpoint is compared with -------------------------------------------------------------------------------


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """Return how long some work takes."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


class Bytes:
    """The bytes of some tensors, and as much memory again, which is in use."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._held = [memoryview(memory_of(tensor)) for tensor in tensors.values()]
        self._buffers = [memoryview(bytearray(part)) for part in self._held]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._held)

    def copy_twice(self) -> None:
        """Copy from memory to memory, and back."""
        for part, buffer in zip(self._held, self._buffers, strict=True):
            buffer[:] = part
        for part, buffer in zip(self._held, self._buffers, strict=True):
            part[:] = buffer

    def through_file(self, folder: Path, replicas: int, content: bool) -> None:
        """Write a new file, rename it, and read it, as the floor does."""
        part, whole = folder / "floor.part", folder / "floor"
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            with part.open("xb", buffering=0) as file:
                for tensor in self._held:
                    _write(file.fileno(), tensor)
            part.rename(whole)
            if content:
                list(threads.map(_digest, (piece for _, piece in _pieces(self._held))))
            with whole.open("rb", buffering=0) as file:
                read = partial(_read, file.fileno(), content)
                for _ in range(replicas):
                    list(threads.map(read, _pieces(self._buffers)))


def _pieces(parts: list[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Yield pieces of the file's bytes, and where each begins in the file."""
    before = 0
    for part in parts:
        for start in range(0, part.nbytes, PIECE_BYTES):
            yield before + start, part[start : start + PIECE_BYTES]
        before += part.nbytes


def _write(file: int, part: memoryview) -> None:
    while part:
        part = part[os.write(file, part) :]


def _digest(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def _read(file: int, content: bool, piece: tuple[int, memoryview]) -> None:
    digest, (offset, memory) = hashlib.sha256(), piece
    for start in range(0, memory.nbytes, STEP_BYTES):
        step = memory[start : start + STEP_BYTES]
        assert os.preadv(file, [step], offset + start) == step.nbytes
        if content:
            digest.update(step)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def folders(huge_pages: str) -> dict[str, str]:
    """Return where checkpoints are written, by the type of the file system."""
    places = [place for place in (tempfile.gettempdir(), MEMORY) if place is not None]
    found = {filesystem_type(os.path.realpath(place)): place for place in places}
    return {**found, "tmpfs, huge pages": huge_pages} if huge_pages else found


def measure_checkpoints(megabytes: int, rounds: int, huge_pages: str) -> Iterator[Row]:
    """Yield a row for each file system, number of replicas, and digest: seconds, the fastest of some rounds."""
    tensors = weights(TinyModel(shape(megabytes), seed=9))
    data = Bytes(tensors)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plane = stack.enter_context(ControlPlane("tcp://127.0.0.1:0", log=Path(folder) / "run.db", checkpoints="/"))
        stack.enter_context(spawn("checkpoints", REPLICAS, plane.address, str(megabytes), module="bench.checkpoints"))
        plane.wait_for_agents(REPLICAS, timeout=120).wait()
        for _ in range(2):  # the first two syncs get an engine the memory for its two sets of weights
            sync_once(plane, Path(folder), tensors, REPLICAS, False)
        for file_system, where in folders(huge_pages).items():
            for replicas, content in [(1, False), (1, True), (2, False), (2, True)]:
                copies, floors, taken = [], [], []
                for _ in range(rounds):
                    copies.append(seconds(data.copy_twice))
                    with tempfile.TemporaryDirectory(dir=where) as place:
                        floors.append(seconds(data.through_file, Path(place), replicas, content))
                    taken.append(sync_once(plane, Path(where), tensors, replicas, content))
                best = min(taken, key=lambda parts: parts["total"])
                yield {
                    "file_system": file_system,
                    "megabytes": round(data.nbytes / 1e6),
                    "replicas": replicas,
                    "digest": content,
                    **{f"{name}_s": round(took, 4) for name, took in best.items()},
                    "floor_s": round(min(floors), 4),
                    "two_copies_s": round(min(copies), 4),
                    "floor_of_total": round(min(floors) / best["total"], 2),
                    "copies_of_total": round(min(copies) / best["total"], 2),
                    "copies_of_floor": round(min(copies) / min(floors), 2),
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


def scaled(name: str, factor: float, text: str) -> tables.Cell:
    """Return a column of a figure in another unit."""
    return lambda row: text.format(factor * row[name])


def table(rows: list[Row]) -> str:
    """Return a line for each case, in milliseconds."""
    times = ("save", "manifest", "prepare", "load", "commit", "total", "floor", "two_copies")
    shares = ("floor_of_total", "copies_of_total", "copies_of_floor")
    columns: dict[str, tables.Cell] = {
        "file system": "{file_system}",
        "MB": "{megabytes:,}",
        "replicas": "{replicas}",
        "digest": lambda row: "on" if row["digest"] else "off",
        **{name.replace("_", " "): scaled(f"{name}_s", 1000, "{:,.1f}") for name in times},
        **{name.replace("_of_", " / "): scaled(name, 100, "{:.0f} %") for name in shares},
    }
    return tables.table(columns, rows)


def main() -> None:
    """Measure, print tables, write JSON."""
    if len(sys.argv) > 2 and sys.argv[1] == "--serve":
        checkpoint_agents(int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64,2048")
    parser.add_argument("--rounds", type=int, default=8, help="of sizes below 256; a quarter as many of larger ones")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--huge-pages", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.huge_pages is None:
        sys.exit(run_beside_huge_pages(sys.argv[1:]))
    rows: list[Row] = []
    for megabytes in (int(size) for size in options.sizes.split(",")):
        rounds = options.rounds if megabytes < 256 else max(1, options.rounds // 4)
        found = list(measure_checkpoints(megabytes, rounds, options.huge_pages))
        print(table(found), flush=True)  # noqa: T201
        rows += found
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def run_beside_huge_pages(arguments: list[str]) -> int:
    """Run this program where a memory file system with huge pages is mounted, if it may be; return its exit status."""
    with own_temporary_files() as environment, tempfile.TemporaryDirectory() as folder:
        begin = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNT, folder]
        known = shutil.which("unshare") is not None
        mounted = known and not subprocess.run([*begin, "true"], capture_output=True, check=False).returncode
        program = [sys.executable, "-m", "bench.checkpoints", *arguments, "--huge-pages", folder if mounted else ""]
        return subprocess.run([*begin, *program] if mounted else program, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
