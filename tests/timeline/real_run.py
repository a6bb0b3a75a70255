"""A small run, real in all its parts: a bus, agents, tiny engines, torch's profiler; in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

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

    Two weight syncs, a profiled step on each replica, a pause and a sleep. One replica after the other is profiled:
    a process has one profiler.
    """
    log = folder / "run.db"
    for version in (1, 2):
        save(TinyModel(TinyConfig(), seed=version), folder / f"v{version}")
    with (
        ControlPlane("tcp://127.0.0.1:0", log=log, config=QUICK, checkpoints=folder) as plane,
        _agents(plane.address, folder),
    ):
        plane.wait_for_agents(len(PLACES), timeout=60).wait()
        plane.sync_weights(1, Checkpoint("v1")).wait().raise_for_failures()
        clients = [TinyClient(_front(folder, place)) for place in PLACES]
        for place, client in zip(PLACES, clients, strict=True):
            _profiled(plane, place.replica, client)
        plane.sync_weights(2, Checkpoint("v2")).wait().raise_for_failures()
        for command in (plane.pause, plane.sleep, plane.wake, plane.resume):
            command().wait().raise_for_failures()
    return log


def _profiled(plane: ControlPlane, replica: int, client: TinyClient) -> None:
    step, only = replica + 1, [replica]
    plane.start_profile(step, ProfilePlan(), replicas=only).wait().raise_for_failures()
    client.generate([[1, 2, 3]], 12)
    plane.stop_profile(step, replicas=only).wait().raise_for_failures()


def _front(folder: Path, place: Identity) -> str:
    return f"ipc://{folder}/front-{place.replica}"


@contextmanager
def _agents(address: str, folder: Path) -> Iterator[None]:
    """Agents on a thread and loop of their own, as they would be in other processes."""
    portals: list[anyio.from_thread.BlockingPortal] = []
    scopes: list[anyio.CancelScope] = []
    begun = threading.Event()

    async def one(place: Identity) -> None:
        traces = folder / "traces"
        engine = TinyEngine(place, checkpoints=folder, traces=traces, serve=_front(folder, place))
        config = AgentConfig(hello_retry_ms=20, observe_ms=20)
        async with Agent(
            bus=address,
            identity=place,
            engine=engine,
            state_dir=folder,
            traces=NodeTraces(traces, place),
            config=config,
        ) as agent:
            await agent.run()

    async def main() -> None:
        async with anyio.create_task_group() as tasks, anyio.from_thread.BlockingPortal() as portal:
            portals.append(portal)
            scopes.append(tasks.cancel_scope)
            for place in PLACES:
                tasks.start_soon(one, place)
            begun.set()
            await anyio.sleep_forever()

    thread = threading.Thread(target=anyio.run, args=(main,))
    thread.start()
    try:
        begun.wait()
        yield
    finally:
        portals[0].call(scopes[0].cancel)
        thread.join()
