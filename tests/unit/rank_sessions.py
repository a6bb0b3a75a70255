"""A training rank's profiler, commanded as by an agent but without a bus, from a thread beside the test's own."""

import gzip
import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import anyio
import torch

from schemas.commands import ProfilePlan
from schemas.desired import ProfileSession
from schemas.events import EngineCall, Returned, StartProfile, StopProfile
from schemas.identity import Identity
from schemas.selection import trace_directory
from tests.waiting import wait_until
from workers.profilers.session import RankProfiler

LAYER = torch.nn.Linear(4, 4)


def work() -> None:
    """A forward and a backward."""
    LAYER(torch.randn(2, 4)).sum().backward()


class Commanded:
    """The profiler of rank 3 of 8."""

    def __init__(self, root: Path, role: str = "actor") -> None:
        self.identity = Identity(replica=3, node_rank=0, role=role)
        self.root = root.resolve()
        self.profiler = RankProfiler(self.identity, traces=root, world_size=8)
        self._open: StopProfile | None = None

    def ask(self, call: EngineCall) -> "Future[Returned]":
        """Perform a call as an agent does: on another thread, with a loop of its own."""
        done: Future[Returned] = Future()

        def run() -> None:
            try:
                done.set_result(anyio.run(self.profiler.perform, call, 5.0))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return done

    def start(self, plan: ProfilePlan | None = None, step: int = 3) -> None:
        session = ProfileSession(step, plan or ProfilePlan())
        directory = trace_directory(step, session.plan, self.identity)
        self._open = StopProfile(session, directory)
        self.ask(StartProfile(session, directory)).result(60)

    def stopping(self) -> "Future[Returned]":
        """Begin a stop, and wait until the profiler has seen it."""
        assert self._open is not None
        session = self.profiler._session
        done = self.ask(self._open)
        wait_until(lambda: done.done() or session is None or session.closing)
        return done

    def stop(self) -> Returned:
        return self.stopping().result(60)

    def traces(self, returned: Returned) -> dict[str, dict[str, Any]]:
        """Read the traces of an outcome, by file name. All of them are JSON and of this rank."""
        assert {trace.rank for trace in returned.traces} <= {self.identity.replica}
        return {Path(trace.path).name: read(self.root / trace.path) for trace in returned.traces}

    def close(self) -> None:
        anyio.run(self.profiler.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        assert not torch.autograd.profiler._is_profiler_enabled


def read(file: Path) -> dict[str, Any]:
    raw = file.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)
    return trace


def stages(trace: dict[str, Any]) -> list[str]:
    """Return the names of the spans in a trace, in the order in which they begin."""
    spans = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [span["name"] for span in sorted(spans, key=lambda span: float(span["ts"]))]


def operators(trace: dict[str, Any]) -> int:
    return sum(event.get("cat") == "cpu_op" for event in trace["traceEvents"])
