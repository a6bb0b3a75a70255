"""One command, followed through trainer, bus and agent: the functions of the product that it runs through, in order.

`python -m tests.command_trace` prints those of a flush, `python -m tests.command_trace sync` those of a weight sync.
"""

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from types import FrameType
from typing import NamedTuple

import anyio

from controlplane import ControlPlane
from schemas import Identity
from tests.running import ROOT
from tests.unit.small_bus import Engine
from workers import Agent

PRODUCT = tuple(f"{ROOT / name}/" for name in ("schemas", "controlplane", "workers"))


class Call(NamedTuple):
    """One call of a function of the product."""

    file: str
    function: str
    thread: str


class Trace:
    """Notes each call of the product's functions, in every thread that begins while it is installed."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.on = False

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """The profile function: called by the interpreter."""
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(PRODUCT):
            file = str(Path(code.co_filename).relative_to(ROOT))
            self.calls.append(Call(file, code.co_qualname, threading.current_thread().name))

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self.note)
        try:
            yield
        finally:
            threading.setprofile(None)


def run_traced(command: Callable[[ControlPlane], object]) -> list[Call]:
    """Run one command on a bus with one agent over TCP, and return the calls between its publishing and its report."""
    trace, joined, over = Trace(), threading.Event(), threading.Event()
    with tempfile.TemporaryDirectory() as name, trace.installed():
        folder = Path(name)
        with ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", checkpoints=gettempdir()) as plane:

            async def serve() -> None:
                identity = Identity(replica=0, node_rank=0)
                node = Agent(bus=plane.address, identity=identity, engine=Engine(), state_dir=folder)
                async with node as agent, anyio.create_task_group() as tasks:
                    tasks.start_soon(agent.run)
                    joined.set()
                    await anyio.to_thread.run_sync(over.wait)
                    tasks.cancel_scope.cancel()

            beside = threading.Thread(target=partial(anyio.run, serve), name="agent")
            beside.start()
            joined.wait(60)
            plane.wait_for_agents(1, timeout=60).wait()
            sys.setprofile(trace.note)
            trace.on = True
            try:
                command(plane)
            finally:
                trace.on = False
                sys.setprofile(None)
                over.set()
                beside.join(60)
    return trace.calls


def sync(plane: ControlPlane) -> object:
    """Sync a checkpoint of one tensor."""
    tensor = {"one": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header = json.dumps(tensor).encode().ljust(96)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1")
        return plane.sync_weights(None, Path(name).name).wait()


if __name__ == "__main__":
    calls = run_traced(sync if sys.argv[1:] == ["sync"] else lambda plane: plane.flush().wait())
    for number, call in enumerate(calls, 1):
        print(f"{number:4} {call.thread[:14]:<14} {call.file}:{call.function}")  # noqa: T201
    functions, files = {call[:2] for call in calls}, {call.file for call in calls}
    print(f"{len(calls)} calls of {len(functions)} functions in {len(files)} files")  # noqa: T201
