"""Replicas of the tiny engine under real agents, and a gateway in front of them, as a trainer meets them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
from anyio import to_thread
from anyio.abc import TaskStatus

from controlplane.analysis.invariants import verify
from controlplane.machine.events import Conclude
from controlplane.plane import ControlPlane
from controlplane.record.log import RunLog
from controlplane.trainers.gateway.service import Gateway
from schemas.commands import AdapterSync, EpochStart, WeightSync
from schemas.config import AgentConfig, BusConfig
from schemas.events import EngineCall, Load, LoadAdapter, Observation, Returned
from schemas.formatting import describe
from schemas.identity import Digests, Identity
from schemas.reports import Report, SyncReport
from tests.engines.http_servers import HttpRequest, Reply
from workers.agent import Agent
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, digest, save, weights
from workers.engines.tiny.server import TinyClient
from workers.router import RouterRegistration
from workers.traces.node import NodeTraces

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=500)


@contextmanager
def on_a_thread(*mains: Callable[..., Any]) -> Iterator[None]:
    """Run async functions on a thread and loop of their own until the block ends. Each says when it has started."""
    begun = threading.Event()
    ends: list[Callable[[], object]] = []

    async def main() -> None:
        async with anyio.create_task_group() as tasks, anyio.from_thread.BlockingPortal() as portal:
            ends.append(lambda: portal.call(tasks.cancel_scope.cancel))
            for function in mains:
                await tasks.start(function)
            begun.set()
            await anyio.sleep_forever()

    thread = threading.Thread(target=anyio.run, args=(main,))
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        ends[0]()
        thread.join()


class GatedEngine(TinyEngine):
    """A tiny engine whose loads a test can hold back."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.may_load = threading.Event()
        self.may_load.set()

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        if isinstance(call, Load | LoadAdapter):
            await to_thread.run_sync(self.may_load.wait)
        return await super().perform(call, timeout_s)


class GatewayFleet:
    """What a test asks of the replicas behind a gateway.

    Attributes:
        folder: Root of the checkpoints that the trainer writes; `other` is that of the replica that sees other files.
        router: Where agents that are started from now on keep the gateway's URLs of their replicas; empty for nowhere.
    """

    router = ""

    def __init__(self, folder: Path, plane: ControlPlane, engines: list[GatedEngine]) -> None:
        self.folder, self.plane, self.engines = folder, plane, engines
        self.gateway: Gateway
        self.endpoints: Sequence[str] = ()
        self._agents: dict[int, ExitStack] = {}

    def start_agent(self, replica: int) -> None:
        """Start the agent of a replica; its engine is launched anew."""
        place, engine = Identity(replica=replica, node_rank=0), self.engines[replica]
        traces, config = NodeTraces(self.folder / "traces", place), AgentConfig(hello_retry_ms=20, observe_ms=20)

        async def run(*, task_status: TaskStatus[None]) -> None:
            async with Agent(
                bus=self.plane.address,
                identity=place,
                engine=engine,
                state_dir=self.folder / "state",
                traces=traces,
                config=config,
                endpoint=self.endpoints[replica] if self.endpoints else "",
            ) as agent:
                task_status.started()
                if not self.router:
                    await agent.run()
                    return
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(RouterRegistration(self.router, self.urls[replica], poll_s=0.2).follow, agent)
                    await agent.run()

        self._agents[replica] = ExitStack()
        self._agents[replica].enter_context(on_a_thread(run))

    def stop_agent(self, replica: int) -> None:
        """Have it leave, with its engine."""
        self._agents[replica].close()

    @property
    def urls(self) -> list[str]:
        return self.gateway.base_urls()

    @property
    def addresses(self) -> list[str]:
        """`host:port` of each replica, for trainers that take no path."""
        return [url.removeprefix("http://") for url in self.urls]

    def write(self, name: str, seed: int, *, hidden: int = 48) -> Path:
        """Write a checkpoint, as the trainer does, and return its absolute path."""
        directory = self.folder / "run" / name
        (directory / "model.safetensors").unlink(missing_ok=True)
        save(TinyModel(TinyConfig(hidden=hidden), seed=seed), directory)
        return directory

    def held(self) -> list[Observation]:
        return [TinyClient(f"ipc://{self.folder}/front-{n}", timeout_s=20).describe() for n in range(len(self.engines))]

    def digests(self) -> list[str]:
        return [held.digest or "" for held in self.held()]

    def generates_on(self) -> list[int]:
        """Version of the tokens that each replica generates now. It must do so within some seconds."""
        versions = []
        for n in range(len(self.engines)):
            (completion,) = TinyClient(f"ipc://{self.folder}/front-{n}", timeout_s=10).generate([[1]], 4)
            versions += sorted(set(completion.versions))
        return versions

    def concluded(self) -> list[Report | SyncReport]:
        """Every report of the run so far."""
        entries = [entry for entry in RunLog.read(self.folder / "run.db") if not entry.agent]
        effects = [effect for entry in entries for effect in entry.typed_effects()]
        return [effect.report for effect in effects if isinstance(effect, Conclude) and effect.report is not None]

    def syncs(self) -> list[tuple[str, tuple[int, ...]]]:
        """How each sync ended, and which replicas loaded it."""
        return [(report.status, report.loaded) for report in self.concluded() if isinstance(report, SyncReport)]

    def operations(self) -> list[str]:
        """Every command that is no sync."""
        commands = [report.command for report in self.concluded() if isinstance(report, Report)]
        return [
            describe(command) for command in commands if not isinstance(command, WeightSync | AdapterSync | EpochStart)
        ]


@contextmanager
def gateway_fleet(
    folder: Path,
    *,
    replicas: int = 2,
    joined: int | None = None,
    engines: Sequence[str] = (),
    roots: Sequence[Path] = (),
    endpoints: Sequence[str] = (),
    digests: Digests = "announced",
    **options: Any,
) -> Iterator[GatewayFleet]:
    """A bus, agents, tiny engines and a gateway; the log is verified at the end.

    Args:
        folder: Root of the checkpoints, and place of everything else.
        joined: How many of the replicas have agents from the beginning; None for all.
        engines: HTTP servers that requests are passed on to.
        roots: Root of the checkpoints of each replica, where it is not the trainer's.
        endpoints: Where the agent of each replica says that its server is.
        digests: After which loads engines compute them.
        options: Of the gateway.
    """
    joined = replicas if joined is None else joined
    places = [Identity(replica=n, node_rank=0) for n in range(replicas)]
    made = [
        GatedEngine(
            place,
            checkpoints=roots[n] if roots else folder / "run",
            traces=folder / "traces",
            serve=f"ipc://{folder}/front-{n}",
            seed=100 + n,
            digests=digests,
        )
        for n, place in enumerate(places)
    ]
    (folder / "run").mkdir(exist_ok=True)
    (folder / "state").mkdir()
    plane = ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=QUICK, checkpoints=folder / "run")
    with plane, ExitStack() as open_:
        fleet = GatewayFleet(folder, plane, made)
        fleet.endpoints = endpoints
        for n in range(replicas):
            if n < joined:
                fleet.start_agent(n)
            open_.callback(fleet.stop_agent, n)
            open_.callback(made[n].may_load.set)
        plane.wait_for_agents(joined, timeout=30).wait()
        fleet.gateway = Gateway(
            plane, replicas=replicas, checkpoints=folder / "run", engines=engines, timeout_s=60, **options
        )
        open_.enter_context(on_a_thread(fleet.gateway.serve))
        yield fleet
    assert list(verify(RunLog.read(folder / "run.db"))) == []


MODEL = "policy"
"""What the engine servers call it."""


def engine(request: HttpRequest) -> Reply:
    """An engine server's routes that are passed on."""
    match request.verb, request.path.partition("?")[0]:
        case "GET", "/v1/models":
            return 200, {"data": [{"id": MODEL}]}
        case "GET", "/server_info" | "/get_server_info":
            sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1}
            states = [{"world_size": 2}]  # SGLang 0.5.23: one for each rank of its data parallelism
            return 200, {
                **sizes,
                "served_model_name": MODEL,
                "disaggregation_mode": "null",
                "host": "0.0.0.0",
                "port": 30000,
                "internal_states": states,
            }
        case "GET", "/get_world_size":
            return 200, {"world_size": 1}
        case "GET", "/health" | "/health_generate":
            return 200, b""
        case "GET", "/model_info":
            return 200, {"weight_version": "3", "model_path": "/m"}
        case "POST", "/fetch_weights" | "/pull_weights" | "/init_weight_transfer_engine":
            return 200, {"success": True, "status": "ok"}
        case "POST", "/generate":
            return 200, {"text": request.body.decode()}
    return 404, {"detail": "Not Found"}


def digest_of(seed: int) -> str:
    """What an engine says of the weights of a seed."""
    return digest(weights(TinyModel(TinyConfig(), seed=seed)))
