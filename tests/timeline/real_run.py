"""A small run, real in all its parts: a bus, agents, tiny engines, torch's profiler; in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anyio.from_thread import start_blocking_portal

from controlplane import ControlPlane
from schemas.commands import Checkpoint, ProfilePlan
from schemas.config import AgentConfig, BusConfig
from schemas.identity import Identity
from workers.agent import Agent
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, save
from workers.engines.tiny.server import TinyClient
from workers.traces.node import NodeTraces

PLACES = (Identity(replica=0, node_rank=0), Identity(replica=1, node_rank=0))
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=200)


def record(folder: Path) -> Path:
    """Make the run and return its log; traces lie in `folder`/traces.

    Two weight syncs, a profiled step on each replica, two samples, a pause and a sleep. One replica after the other is
    profiled: a process has one profiler.
    """
    log = folder / "run.db"
    for version in (1, 2):
        save(TinyModel(TinyConfig(), seed=version), folder / f"v{version}")
    with (
        ControlPlane("tcp://127.0.0.1:0", log=log, config=QUICK, checkpoints=folder) as plane,
        agents(plane.address, folder),
    ):
        plane.wait_for_agents(len(PLACES), timeout=60).wait()
        plane.sync_weights(1, Checkpoint("v1")).wait().raise_for_failures()
        clients = [TinyClient(front(folder, place)) for place in PLACES]
        for place, client in zip(PLACES, clients, strict=True):
            _profiled(plane, place.replica, client)
        plane.sync_weights(2, Checkpoint("v2")).wait().raise_for_failures()
        for label in ("1", "2"):
            answer = {"token_ids": [1], "weight_versions": [{"version": label, "start": 0, "end": 1}]}
            for sample in plane.provenance(answer, replica=0):
                plane.accepts(sample, max_staleness=0)
        for command in (plane.pause, plane.sleep, plane.wake, plane.resume):
            command().wait().raise_for_failures()
    return log


def _profiled(plane: ControlPlane, replica: int, client: TinyClient) -> None:
    step, only = replica + 1, [replica]
    plane.start_profile(step, ProfilePlan(), replicas=only).wait().raise_for_failures()
    client.generate([[1, 2, 3]], 12)
    plane.stop_profile(step, replicas=only).wait().raise_for_failures()


def front(folder: Path, place: Identity) -> str:
    return f"ipc://{folder}/front-{place.replica}"


@contextmanager
def agents(address: str, folder: Path, checkpoints: Path | None = None) -> Iterator[None]:
    """Agents on a thread and loop of their own, as they would be in other processes."""
    with start_blocking_portal() as portal:
        running = [
            portal.start_task_soon(_run_agent, address, folder, place, checkpoints or folder) for place in PLACES
        ]
        try:
            yield
        finally:
            for agent in running:
                agent.cancel()


async def _run_agent(address: str, folder: Path, place: Identity, checkpoints: Path) -> None:
    traces = folder / "traces"
    engine = TinyEngine(place, checkpoints=checkpoints, traces=traces, serve=front(folder, place))
    config = AgentConfig(hello_retry_ms=20, observe_ms=20)
    node = NodeTraces(traces, place)
    async with Agent(bus=address, identity=place, engine=engine, state_dir=folder, traces=node, config=config) as agent:
        await agent.run()
