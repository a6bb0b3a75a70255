"""For how long no token comes during a sync: by the engine's own calls alone, and under agents of two checkouts.

    git worktree add /tmp/before COMMIT
    python -m tests.engines.pauses vllm --megabytes 400 --before /tmp/before            # or sglang; --cold

One server, one request that is frozen (`keep`) during each sync, and the same two checkpoints throughout. The rows take
turns, so that what else the machine does falls on all of them. `--cold` drops the files from the page cache before each
load. The aim: not more than 50 ms above what the engine takes by itself.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final

import httpx

from controlplane import ControlPlane
from controlplane.record.log import RunLog
from schemas.commands import Checkpoint, WeightSync
from schemas.events import CommandReceived, EngineReturned, Perform
from schemas.identity import LAUNCH_LABEL
from schemas.wire import effects_decoder, event_decoder
from tests.engines.models import SMALL, Size, save_model, save_weights, weights
from tests.engines.reports import BUS
from tests.engines.servers import AgentProcess, EngineServer, begin
from tests.engines.soak import FROZEN, FROZEN_PROMPT, UNI, UNI_VARIABLES
from workers.machine.state import call_name

ROOT: Final = Path(__file__).parents[2]
LAYER_BYTES: Final = 22_034_432
"""Of a layer whose hidden size is 1,024, in float32."""
BESIDE: Final = 4
"""Tokens before and after a sync."""
ALONE: Final = "the engine alone"

Phases = dict[str, float]
"""Milliseconds of each phase."""


class Bench:
    """A server with two checkpoints, and a bus."""

    def __init__(self, kind: str, size: Size, folder: Path, cold: bool, open_: ExitStack) -> None:
        self.kind, self.folder, self.cold, self.version = kind, folder, cold, 0
        self.model = save_model(folder / "a", 1, size)
        save_weights(folder / "b", weights(2, size))
        options, variables = (UNI, UNI_VARIABLES) if kind == "vllm" else ((), {})
        self.server = open_.enter_context(EngineServer(kind, self.model, folder, *options, variables=variables))
        self.server.wait_up("/health" if kind == "vllm" else "/server_info")
        self.plane: ControlPlane = open_.enter_context(
            ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=BUS, checkpoints=folder)
        )

    @contextmanager
    def agent(self, checkout: Path) -> Iterator[None]:
        """An agent of that checkout, until the end of the block."""
        options = ("--engine", self.kind, "--url", self.server.url)
        with AgentProcess(self.plane.address, self.folder, "0.0", 1, *options, checkout=checkout) as agent:
            self.plane.wait_for_agents(1, timeout=120).wait()
            yield
            agent.end()

    def measured(self, load: Callable[[Path], Phases]) -> Phases:
        """Load the other weights while a request is frozen. Returns also for how long it got no token."""
        self.version += 1
        directory = self.folder / ("b" if self.version % 2 else "a")
        if self.cold:
            _evict(directory)
        stream = begin(self.kind, self.server.url, FROZEN_PROMPT, FROZEN[self.kind], None)
        stream.grows_to(BESIDE)
        phases = load(directory)
        stream.grows_to(len(stream.tokens) + BESIDE)
        stream.end()
        gaps = [1000 * (after - before) for before, after in pairwise(stream.came)]
        return {**phases, "no token": max(gaps), "a token takes": statistics.median(gaps)}

    def sync(self, directory: Path) -> Phases:
        """By the agent that is there."""
        began = time.monotonic()
        ticket = self.plane.sync_weights(self.version, Checkpoint(directory.name), in_flight="keep", timeout=120)
        ticket.wait().raise_unless_committed()
        return {"in all": 1000 * (time.monotonic() - began)}

    def load(self, directory: Path) -> Phases:
        """By the calls that an agent makes, and nothing else."""
        phases: Phases = {}
        with httpx.Client(base_url=self.server.url, timeout=300) as client:
            for name, path, body in _calls(self.kind, str(directory)):
                began = time.monotonic()
                client.post(path, json=body).raise_for_status()
                phases[name] = 1000 * (time.monotonic() - began)
        return {**phases, "in all": sum(phases.values())}

    def by_call(self) -> dict[int, Phases]:
        """What the agents' log says of each version: how long each call took, with the observation after it."""
        found: dict[int, Phases] = defaultdict(dict)
        version, begun, call = 0, 0, ""
        for entry in RunLog.read(self.folder / "run.db"):
            if not entry.agent:
                continue
            event, effects = event_decoder.decode(entry.event), effects_decoder.decode(entry.effects)
            if isinstance(event, CommandReceived) and isinstance(event.command, WeightSync):
                version = event.command.version
            if isinstance(event, EngineReturned) and call:
                found[version][call] = float(event.at_ms - begun)
            for effect in effects:
                if isinstance(effect, Perform):
                    begun, call = event.at_ms, call_name(effect.call)
        return found


def _calls(kind: str, directory: str) -> list[tuple[str, str, dict[str, object]]]:
    label: dict[str, object] = {"new_version": LAUNCH_LABEL}  # an agent trusts no other one that is not its own
    if kind == "vllm":
        reload: dict[str, object] = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        return [
            ("pause", "/pause?mode=keep&clear_cache=false", {}),
            ("load", "/collective_rpc", reload),
            ("label", "/update_weight_version", label),
            ("flush", "/reset_prefix_cache?reset_running_requests=true", {}),
            ("resume", "/resume", {}),
        ]
    from_disk: dict[str, object] = {"model_path": directory, "load_format": "safetensors", "flush_cache": True}
    return [
        ("pause", "/pause_generation", {"mode": "retract"}),
        ("load", "/update_weights_from_disk", from_disk),
        ("label", "/update_weight_version", label | {"abort_all_requests": False}),
        ("resume", "/continue_generation", {}),
    ]


def _evict(directory: Path) -> None:
    """Drop its files from the page cache."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(bench: Bench, before: Path | None, rounds: int, each: int) -> None:
    """Measure, and print the medians."""
    rows: dict[str, list[Phases]] = defaultdict(list)
    agents = {**({"before": before} if before else {}), "now": ROOT}
    synced: list[tuple[int, Phases]] = []
    for _ in range(rounds):
        rows[ALONE] += [bench.measured(bench.load) for _ in range(each)]
        for name, checkout in agents.items():
            with bench.agent(checkout):
                for _ in range(each):
                    rows[name].append(bench.measured(bench.sync))
                    synced.append((bench.version, rows[name][-1]))
    by_call = bench.by_call()
    for version, phases in synced:
        phases |= by_call[version]
    for name, found in rows.items():
        names = sorted({phase for phases in found for phase in phases}, key=ORDER.index)
        medians = {phase: statistics.median(phases.get(phase, 0.0) for phases in found) for phase in names}
        _say(f"{name:16} " + ", ".join(f"{phase} {value:.0f}" for phase, value in medians.items()))


ORDER: Final = ("check_source", "pause", "load", "label", "flush", "resume", "in all", "a token takes", "no token")


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.pauses", description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=["vllm", "sglang"])
    parser.add_argument("--megabytes", type=int, default=0, help="size of the weights; as small as possible without")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each load")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", type=int, default=4, help="loads of each row in each round")
    options = parser.parse_args()
    size = Size(1024, max(1, options.megabytes * 1_000_000 // LAYER_BYTES), 16, 2) if options.megabytes else SMALL
    with ExitStack() as open_:
        folder = Path(open_.enter_context(tempfile.TemporaryDirectory(prefix="rolloutctl-pauses-")))
        bench = Bench(options.kind, size, folder, options.cold, open_)
        megabytes = (folder / "b" / "model.safetensors").stat().st_size / 1e6
        _say(f"{options.kind}, {megabytes:.0f} MB, {'cold' if options.cold else 'warm'}; medians, in ms")
        run(bench, options.before, options.rounds, options.each)
    return 0


if __name__ == "__main__":
    sys.exit(main())
