"""Where the time goes: in the bus's thread while light speakers answer, and in a process of real agents.

    python -m bench.parts [--agents 1,64] [--seconds 3] [--out FILE]

A sampling profiler in the thread that does the work: the bus and the agents each run in the main thread of a process of
their own. A sample counts for the part whose file is nearest in the stack, with the CPU time of the thread since the
sample before. What libzmq and the system do within a call counts for the part that called them; libzmq's own threads do
not count.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import anyio

from bench.fanout import our_agents
from bench.light_agents import go, pin, spawned, two_cores
from bench.processes import own_temporary_files
from bench.tables import Row, pivot
from controlplane.bus.bus import Bus
from controlplane.record.log import RunLog
from schemas.commands import EngineCommand, Target

SAMPLE_S = 0.001
PARTS = {
    "schemas/storage/": "log or journal",
    "controlplane/record/": "log or journal",
    "workers/link/journal": "log or journal",
    "schemas/transport/": "sockets: send, receive, wait",
    "controlplane/machine/": "decide",
    "workers/machine/": "decide",
    "schemas/desired": "decide",
    "schemas/selection": "decide",
    "schemas/wire": "encode, decode",
    "workers/link/upload": "uploads",
    "workers/link/frames": "encode, decode",
    "controlplane/bus/inbox": "inbox",
    "controlplane/bus/callers": "tickets",
    "controlplane/tickets": "tickets",
    "controlplane/bus/": "turn",
    "workers/driver": "engine's driver",
    "workers/": "agent and link",
}
"""The part that a file belongs to: the first that its path holds."""
OTHER = "event loop"


class Sampler:
    """Samples the main thread of this process while it runs.

    Attributes:
        parts: CPU time by part, in ns.
    """

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()
        self._used_ns = 0
        self._known: dict[str, str | None] = {}

    def start(self) -> None:
        """Begin."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.siginterrupt(signal.SIGPROF, False)
        self._used_ns = time.thread_time_ns()
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)

    def stop(self) -> dict[str, float]:
        """End, and return the share of each part in percent."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        total = max(1, self.parts.total())
        return {part: round(100 * count / total, 1) for part, count in self.parts.most_common()}

    def _sample(self, _: int, frame: FrameType | None) -> None:
        used_ns, self._used_ns = time.thread_time_ns() - self._used_ns, time.thread_time_ns()
        while frame is not None:
            part = self._part_of(frame.f_code.co_filename)
            if part is not None:
                self.parts[part] += used_ns
                return
            frame = frame.f_back
        self.parts[OTHER] += used_ns

    def _part_of(self, file: str) -> str | None:
        if file not in self._known:
            self._known[file] = next((part for piece, part in PARTS.items() if piece in file), None)
        return self._known[file]


# --- in processes of their own ----------------------------------------------------------------------------------------


async def commanded(bus: Bus, count: int, seconds: float) -> None:
    """Publish one command after the other."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        report = await bus.publish(EngineCommand(operation="flush"), Target(), 60_000)
        assert len(report.acted) == count, report


async def whole(bus: Bus, count: int) -> None:
    """Return when the fleet is."""
    await bus.wait_until(
        lambda state: (
            sum(
                member.state == "live" and member.status is not None and member.status.ready
                for member in state.members.values()
            )
            >= count
        )
    )


def sample_bus(count: int, seconds: float) -> dict[str, float]:
    """Return the parts of the bus's thread, with light speakers that upload."""
    core, speakers_core = two_cores()
    pin(core)
    sampler = Sampler()
    options = ["--uploads", *(["--core", str(speakers_core)] if speakers_core is not None else [])]

    async def main() -> None:
        async with Bus("tcp://127.0.0.1:0", RunLog.open(Path(folder) / "run.db")) as bus:
            with spawned(bus.address, count, *options) as child:
                go(child)
                await whole(bus, count)
                await commanded(bus, count, seconds / 4)
                sampler.start()
                try:
                    await commanded(bus, count, seconds)
                finally:  # else a signal finds this process without its handler, and ends it
                    parts.update(sampler.stop())

    parts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(main, backend_options={"use_uvloop": True})
    return parts


def sample_agents(count: int, seconds: float) -> dict[str, float]:
    """Return the parts of real agents' thread, in a process of their own."""

    async def main() -> None:
        async with Bus("tcp://127.0.0.1:0", RunLog.open(Path(folder) / "run.db")) as bus:
            with agents_of(bus.address, count) as child:
                await whole(bus, count)
                await commanded(bus, count, seconds / 4)
                child.send_signal(signal.SIGUSR1)
                await commanded(bus, count, seconds)
                child.send_signal(signal.SIGUSR2)
                assert child.stdout is not None
                parts.update(json.loads(await anyio.to_thread.run_sync(child.stdout.readline)))

    parts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(main, backend_options={"use_uvloop": True})
    return parts


@contextmanager
def agents_of(address: str, count: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.parts", "--serve", str(count), address]
    with (
        own_temporary_files() as environment,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child,
    ):
        try:
            yield child
        finally:
            child.kill()


def serve(count: str, address: str) -> None:
    """Run agents. They are sampled from SIGUSR1 to SIGUSR2, which prints the parts."""
    sampler = Sampler()
    signal.signal(signal.SIGUSR1, lambda *_: sampler.start())
    signal.signal(signal.SIGUSR2, lambda *_: print(json.dumps(sampler.stop()), flush=True))  # noqa: T201
    our_agents(0, int(count), address, "1", "")


def table(rows: list[Row]) -> str:
    """Return a line for each part."""
    return pivot(rows, "{part}", "{who}, N={agents}", "{percent:.0f} %", "part")


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="1,64")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(*options.serve)
        return
    rows: list[Row] = []
    for count in (int(count) for count in options.agents.split(",")):
        for who, sample in (("agent", sample_agents), ("bus", sample_bus)):
            for part, percent in sample(count, options.seconds).items():
                rows.append({"who": who, "agents": count, "part": part, "percent": percent})
    print(table(rows))  # noqa: T201
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
