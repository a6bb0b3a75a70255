"""How fast a fleet serves a new LoRA adapter, beside the same change as a full checkpoint.

    python -m bench.adapters [--sizes 1,64] [--agents 1,8,64] [--rounds 8] [--out FILE]

From the moment in which the trainer has written the files to that in which all engines serve them. An adapter is always
digested whole, by the trainer and by every agent, before the load and again in it; of a checkpoint the headers are read
(`bench.checkpoints` has what its digest costs). Engines check the files as those of vLLM and SGLang do, and read every
byte once in the load, from the page cache; what an engine then does with them comes on top. The checkpoint has 32
times the bytes of the adapter: a rank of 16 for all modules of a width of 1,024. Models of today are wider.
Agents live in two processes, and the trainer beside them: here, many engines share the cores of one machine.

`stopped` is the longest time in which an engine did not generate. What the commit adds is the time from the moment in
which the last engine has loaded to that in which all serve, also in units of one fan-out: a command that calls every
engine once, published between the syncs of the same run.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from anyio import to_thread
from msgspec.structs import replace

from bench import tables
from bench.fanout import PATIENT
from bench.null_engine import NullEngine
from bench.processes import run_agents, spawn
from bench.tables import Row
from bench.weights import Moments
from controlplane import ControlPlane
from controlplane.tickets import Ticket
from schemas.commands import Checkpoint
from schemas.events import Call, CheckAdapter, CheckSource, Load, LoadAdapter, Pause, Resume, Returned, UnloadAdapter
from schemas.identity import Identity
from schemas.reports import SyncReport
from schemas.safetensors.format import TensorSpec
from workers.engines.adapter_files import WEIGHTS, checked_adapter
from workers.engines.checkpoint import SourceChecker
from workers.engines.observed import LoRALimits

RANK, WIDTH = 16, 1024
TIMES = WIDTH // (2 * RANK)
"""How many times larger the checkpoint is."""
BUFFER_BYTES = 1 << 20
TIMEOUT_S = 600.0
READ_MAX = 65_536
"""Megabytes of checkpoints that engines read in all rounds with one size and number of them. Then fewer are enough."""
BEGAN, LOADED, STOPPED = range(3)
"""What an engine notes: when its load began and ended, and how long it has not generated so far, in ns."""


def base_layout(megabytes: int) -> dict[str, TensorSpec]:
    """Return the tensors of the model whose adapter has this size."""
    count = (megabytes << 20) // (2 * RANK * WIDTH * 4)
    return {f"layers.{layer}.proj.weight": TensorSpec("F32", (WIDTH, WIDTH)) for layer in range(count)}


class ReadingEngine(NullEngine):
    """An engine that checks what it is to load, reads all of it, and notes its moments."""

    def __init__(self, agent: int, moments: Moments, root: Path, layout: dict[str, TensorSpec]) -> None:
        super().__init__()
        self._agent, self._moments, self._root, self._layout = agent, moments, root, layout
        self._sources = SourceChecker(root, layout)
        self._stopped_ns = self._paused_ns = 0
        self._change(adapters={})

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        """Become what the call asks for."""
        held = self._observation.adapters or {}
        match call:
            case Pause():
                self._paused_ns = time.monotonic_ns()
                self._change(generating=False)
            case Resume():
                self._stopped_ns += time.monotonic_ns() - self._paused_ns
                self._moments.put(self._agent, STOPPED, self._stopped_ns)
                self._change(generating=True)
            case CheckSource() | CheckAdapter():
                await to_thread.run_sync(self._directory, call)
            case Load(version=version):
                await to_thread.run_sync(self._read, call)
                self._change(version=version)
            case LoadAdapter(adapter=adapter):
                await to_thread.run_sync(self._read, call)
                self._change(adapters={**held, adapter.model: adapter.path})
            case UnloadAdapter(model=model):
                self._change(adapters={name: path for name, path in held.items() if name != model})
        return Returned()

    def _directory(self, call: CheckSource | CheckAdapter | Load | LoadAdapter) -> Path:
        if isinstance(call, CheckAdapter | LoadAdapter):
            return checked_adapter(self._root, call.adapter, self._layout, LoRALimits())
        assert isinstance(call.source, Checkpoint)
        return self._sources.checked_directory(call.source, call.manifest, None).whole

    def _read(self, call: Load | LoadAdapter) -> None:
        """Read all, as an engine would that has the memory for it already."""
        self._moments.note(self._agent, BEGAN)
        buffer = bytearray(BUFFER_BYTES)
        for path in self._directory(call).glob("*.safetensors"):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        self._moments.note(self._agent, LOADED)

    def _change(self, **changes: object) -> None:
        self._observation = replace(self._observation, **changes)


def reading_agents(first: int, count: int, bus: str, moments: str, agents: str, root: str, megabytes: str) -> None:
    """Run `count` agents in this process, on one event loop."""
    shared, layout = Moments(Path(moments), int(agents)), base_layout(int(megabytes))

    def make(number: int) -> tuple[Identity, ReadingEngine]:
        return Identity(replica=number, node_rank=0), ReadingEngine(number, shared, Path(root), layout)

    run_agents(range(first, first + count), bus, make, None)


# --- what a trainer writes --------------------------------------------------------------------------------------------


class Written:
    """The files of one adapter and one checkpoint. Each version of either is links to them."""

    def __init__(self, root: Path, megabytes: int) -> None:
        import torch  # here, because an agent needs none
        from safetensors.torch import save_file

        self._root, self._versions = root, 0
        layout = base_layout(megabytes)
        tensors = {}
        for name in (name.removesuffix(".weight") for name in layout):
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, WIDTH)
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(WIDTH, RANK)
        self._adapter, self._checkpoint = root / WEIGHTS, root / "model.safetensors"
        save_file(tensors, self._adapter)
        save_file({name: torch.zeros(spec.shape) for name, spec in layout.items()}, self._checkpoint)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["proj"], "bias": "none"}
        self._config = root / "adapter_config.json"
        self._config.write_text(json.dumps(config))
        os.sync()  # or the disk writes behind while all is measured

    def adapter(self) -> str:
        """Write the next version. Returns its path."""
        return self._link(self._adapter, self._config)

    def checkpoint(self) -> str:
        """Write the next version. Returns its path."""
        return self._link(self._checkpoint)

    def _link(self, *files: Path) -> str:
        self._versions += 1
        folder = self._root / str(self._versions)
        folder.mkdir()
        for file in files:
            os.link(file, folder / file.name)
        return folder.name


# --- measuring --------------------------------------------------------------------------------------------------------


@contextmanager
def reading_fleet(agents: int, megabytes: int, root: Path) -> Iterator[tuple[ControlPlane, Moments]]:
    """Open a control plane and its fleet."""
    moments = root / "moments"
    moments.touch()
    shared = Moments(moments, agents)
    with ControlPlane("tcp://127.0.0.1:0", log=root / "run.db", checkpoints=root, config=PATIENT) as plane:
        arguments = (plane.address, str(moments), str(agents), str(root), str(megabytes))
        with spawn("reading", agents, *arguments, module="bench.adapters"):
            plane.wait_for_agents(agents, timeout=120).wait()
            yield plane, shared


def fan_out_ns(plane: ControlPlane, agents: int) -> int:
    """Return how long a command takes that calls every engine once."""
    start = time.monotonic_ns()
    assert len(plane.flush().wait().acted) == agents
    return time.monotonic_ns() - start


def sync_ns(moments: Moments, sync: Callable[..., Ticket[SyncReport]]) -> dict[str, int]:
    """Sync, and return how long it took: in all, the slowest load, from there to the end, and generation stopped."""
    before = [moment[STOPPED] for moment in moments.read()]
    start = time.monotonic_ns()
    report = sync(timeout=TIMEOUT_S).wait()
    end = time.monotonic_ns()
    after = moments.read()
    assert len(report.loaded) == len(after), report
    return {
        "total": end - start,
        "load": max(loaded - began for began, loaded, _ in after),
        "commit": end - max(loaded for _, loaded, _ in after),
        "stopped": max(moment[STOPPED] - stopped for moment, stopped in zip(after, before, strict=True)),
    }


def measure(megabytes: int, agents: int, rounds: int) -> Row:
    """Return how long both take to reach this many engines: medians, in µs."""
    took: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        written = Written(root, megabytes)
        with reading_fleet(agents, megabytes, root) as (plane, moments):
            for _ in range(rounds + 1):
                found = {"fan_out": fan_out_ns(plane, agents)}
                adapter = partial(plane.sync_adapter, "policy", None, written.adapter())
                checkpoint = partial(plane.sync_weights, None, written.checkpoint())
                for name, sync in {"adapter": adapter, "checkpoint": checkpoint}.items():
                    found |= {f"{name}_{part}": ns for part, ns in sync_ns(moments, sync).items()}
                assert plane.adapters()["policy"].replicas == tuple(range(agents))
                took.append(found)
    medians = {name: statistics.median(each[name] for each in took[1:]) for name in took[0]}  # the first fills caches
    row: Row = {"megabytes": megabytes, "checkpoint_megabytes": TIMES * megabytes, "agents": agents}
    row |= {f"{name}_us": round(ns / 1000) for name, ns in medians.items()}
    times = medians["checkpoint_total"] / medians["adapter_total"]
    return row | {"times": round(times, 2), "commit_fan_outs": round(medians["adapter_commit"] / medians["fan_out"], 2)}


def milliseconds(name: str) -> tables.Cell:
    """Return a column of a time."""
    return lambda row: f"{row[f'{name}_us'] / 1000:,.1f} ms"


COLUMNS: dict[str, tables.Cell] = {
    "adapter, MB": "{megabytes}",
    "engines": "{agents}",
    "written to served": milliseconds("adapter_total"),
    "its slowest load": milliseconds("adapter_load"),
    "the commit adds": milliseconds("adapter_commit"),
    "one fan-out": milliseconds("fan_out"),
    "fan-outs": "{commit_fan_outs:.2f}",
    "generation stopped": milliseconds("adapter_stopped"),
    "checkpoint, MB": "{checkpoint_megabytes:,}",
    "its written to served": milliseconds("checkpoint_total"),
    "stopped by it": milliseconds("checkpoint_stopped"),
    "checkpoint / adapter": "{times:.1f}",
}


def table(rows: list[Row]) -> str:
    """Return a line for each size and fleet."""
    return tables.table(COLUMNS, rows)


def main() -> None:
    """Measure, print a table, write JSON."""
    if len(sys.argv) > 2 and sys.argv[1] == "--serve":
        reading_agents(int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
        return
    options = tables.read_options(__doc__, sizes="1,64", agents="1,8,64", rounds=12)
    rows: list[Row] = []
    for megabytes in (int(size) for size in options.sizes.split(",")):
        for agents in (int(count) for count in options.agents.split(",")):
            rounds = min(options.rounds, max(1, READ_MAX // (TIMES * megabytes * agents)))
            rows.append(measure(megabytes, agents, rounds))
    tables.publish(table(rows), rows, options.out)


if __name__ == "__main__":
    main()
