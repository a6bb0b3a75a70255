"""The bus of one verl run, which lives in its task runner, and an agent beside each of its servers.

Nothing of verl is imported: replicas are what verl (0.9.1) hands over, used by their attributes alone. What goes wrong
before the first step is raised. After that nothing here ends a run or holds it up past a deadline: verl's own update of
the weights is called exactly once, whatever the bus can do around it.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

from controlplane.plane import ControlPlane
from controlplane.sending import SendWeights
from controlplane.tickets import Ticket
from controlplane.trainers.verl.servers import ServerEngines
from controlplane.trainers.verl.settings import SECTION, VerlSettings
from schemas.commands import Pushed
from schemas.config import AgentConfig, BusConfig
from schemas.errors import ConfigError, ExtraMissing, RolloutctlError, SyncInProgress
from schemas.identity import RolloutMode
from schemas.logs import logger_of
from schemas.profiler.config import ProfilerConfig
from schemas.reports import SyncReport
from workers.ray_placement import ReplicaNodes, place_agents

logger = logger_of("verl")

POLL_S: Final = 0.1
"""Seconds between two looks at who has joined."""
WAIT_S: Final = 1.0
"""Seconds between two tries to sync while an operator does."""


class Updated(NamedTuple):
    """How an update of the weights ended.

    Attributes:
        quarantined: Replicas that must not serve: their agents keep them paused.
        unattended: Replicas that no agent speaks for.
    """

    answer: Any
    quarantined: frozenset[int]
    unattended: frozenset[int]


class VerlRun:
    """The bus and the agents of one run. `start` makes it."""

    def __init__(self, plane: ControlPlane, settings: VerlSettings, resources: ExitStack) -> None:
        self._plane, self._settings, self._resources = plane, settings, resources
        self._labels: dict[frozenset[int], str] = {}  # of the newest weights, by the replicas of a manager
        self._step, self._left = ExitStack(), False

    @classmethod
    def start(cls, settings: VerlSettings, replicas: Sequence[Any], profiler: ProfilerConfig) -> Self:
        """Open the bus, and place an agent beside each server.

        Raises:
            ConfigError, LogError and other errors of `ControlPlane`: It can't be opened. Nothing was started.
        """
        placed, servers = _places(replicas)
        _require_reachable(settings.address, placed)
        Path(settings.log).parent.mkdir(parents=True, exist_ok=True)
        plane = ControlPlane(
            settings.address,
            log=settings.log,
            run=settings.run or None,
            config=BusConfig(log_copy=settings.log_copy or None),
            profiler=profiler,
            keys=settings.keys or None,
            insecure=settings.insecure,
        )
        with ExitStack() as stack:
            stack.enter_context(plane)
            if settings.metrics_port is not None:
                stack.callback(_serve_metrics(plane, str(settings.metrics_port)))
            placement = place_agents(
                bus=plane.address,
                replicas=placed,
                engine=ServerEngines(servers, Path(settings.traces)),
                state_dir=Path(settings.state) if settings.state else None,
                traces=Path(settings.traces),
                config=AgentConfig(memory="trainer"),  # verl releases it, and takes it back
                keys=settings.agent_keys or None,
            )
            stack.enter_context(placement)
            run = cls(plane, settings, stack)
            run._wait_for(frozenset(servers))
            run._resources = stack.pop_all()
        logger.info("bus at %s, log %s, agents %s", plane.address, settings.log, ", ".join(sorted(servers)))
        return run

    def close(self) -> None:
        """End the agents and the bus. Idempotent."""
        self.end_step()
        self._resources.close()

    def _wait_for(self, names: frozenset[str]) -> None:
        """Wait until the agents have joined. The run starts without those that do not."""
        until = time.monotonic() + self._settings.join_timeout
        while missing := names - self._live():
            if time.monotonic() > until:
                logger.error(
                    "agents %s did not join within %g s; verl goes on, and no command reaches their servers. Ray keeps "
                    "their logs among those of its actors",
                    ", ".join(sorted(missing)),
                    self._settings.join_timeout,
                )
                return
            threading.Event().wait(POLL_S)

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Open the profiling session of a step, if it is one to profile."""
        self.end_step()  # of a step that raised
        if self._left:
            return
        try:
            self._step.enter_context(self._plane.step(step))
        except RolloutctlError as error:
            logger.error("step %d is not profiled; verl goes on: %s", step, error)

    def end_step(self) -> None:
        """Close the session of the step. Idempotent."""
        try:
            self._step.close()
        except RolloutctlError as error:
            logger.error("the profile of a step was not closed; verl goes on: %s", error)

    # --- weights ------------------------------------------------------------------------------------------------------

    async def update(self, step: int | None, replicas: Iterable[int], update: Callable[[], Awaitable[Any]]) -> Updated:
        """Call verl's own update of the weights between a pause of these replicas and their commit.

        Args:
            step: verl's label of the weights; None for the label that they had before.
            replicas: Their `replica_rank`s.
            update: verl's update. It is called once, in this thread. When it returns, each server holds the weights and
                their label.

        Raises:
            Whatever `update` raises. The sync is aborted then.
        """
        ranks = frozenset(replicas)
        held = self._labels.get(ranks, "")
        label = held if step is None else str(step)
        if self._left or label == held:  # the same weights again, for servers that slept
            return Updated(await update(), frozenset(), frozenset())
        pushed = Future[None]()
        ticket = await self._begin_sync(label, ranks, pushed)
        try:
            answer = await update()
        except BaseException as error:
            logger.error("verl's own update of the weights of step %s failed: %s", label, error)
            pushed.set_exception(RuntimeError(f"verl's own update failed: {type(error).__name__}: {error}"))
            await _ended(ticket)
            raise
        pushed.set_result(None)
        report = await _ended(ticket)
        if report is None:  # the servers hold them all the same
            report = await _ended(await self._begin_sync(label, ranks, None))
        if report is None:
            self._leave(label)
            return Updated(answer, frozenset(), ranks)
        self._labels[ranks] = label
        return Updated(answer, frozenset(report.quarantined), frozenset(report.unproven))

    async def _begin_sync(
        self, label: str, ranks: frozenset[int], pushed: Future[None] | None
    ) -> Ticket[SyncReport] | None:
        """Ask for a sync, and return once it wants the weights, or has ended. An operator's is waited for."""
        until = time.monotonic() + self._settings.timeout
        while True:
            begun = Future[None]()
            ticket = self._sync(label, ranks, _sender(begun, pushed) if pushed is not None else None)
            if ticket is None:
                return None
            ticket.when_done(partial(_resolve, begun))
            await asyncio.wrap_future(begun)
            if not _in_progress(ticket) or time.monotonic() > until:
                return ticket
            logger.warning("the weights of step %s wait for the end of another sync", label)
            await asyncio.sleep(WAIT_S)

    def _sync(self, label: str, ranks: frozenset[int], send: SendWeights | None) -> Ticket[SyncReport] | None:
        """Ask for a sync of weights that verl pushes; None if that can't be done."""
        settings = self._settings
        try:
            limits: Any = {"quorum": settings.quorum, "timeout": settings.timeout}
            return self._plane.sync_weights(None, Pushed(label), send=send, replicas=ranks, **limits)
        except RolloutctlError as error:
            logger.error("the weights of step %s have no sync: %s", label, error)
            return None

    def _leave(self, label: str) -> None:
        """End the bus and its agents; verl goes on alone. Agents that stayed would keep their servers paused."""
        self._left = True
        logger.error("no replica is proven to serve the weights of step %s: verl goes on without rolloutctl", label)
        try:
            self.close()
        except RolloutctlError as error:
            logger.error("the bus did not end well: %s", error)

    def _live(self) -> frozenset[str]:
        return frozenset(line.agent for line in self._plane.status().agents if line.state == "live")


def _resolve(future: Future[None], _: object = None) -> None:
    with suppress(InvalidStateError):
        future.set_result(None)


def _sender(begun: Future[None], pushed: Future[None]) -> SendWeights:
    def send(_: tuple[int, ...]) -> None:
        _resolve(begun)
        pushed.result()

    return send


def _in_progress(ticket: Ticket[SyncReport]) -> bool:
    """Whether a sync was refused because another one has not ended."""
    try:
        return ticket.done and ticket.wait() is None
    except SyncInProgress:
        return True
    except RolloutctlError:
        return False


async def _ended(ticket: Ticket[SyncReport] | None) -> SyncReport | None:
    """Wait for a sync, and return the report of one that was committed. Log all that went wrong in it."""
    if ticket is None:
        return None
    try:
        report = await ticket
    except RolloutctlError as error:
        logger.error("a sync has no report: %s", error)
        return None
    if any(line.trouble for line in report.lines()):
        logger.error("%s", report)
    return report if report.status == "committed" else None


# --- places -----------------------------------------------------------------------------------------------------------


def _serve_metrics(plane: ControlPlane, address: str) -> Callable[[], object]:
    """Serve the metrics of the bus. Returns what ends it. Raises ExtraMissing or ConfigError."""
    try:
        from controlplane.metrics import BusCollector
        from schemas.transport.exposition import serve_metrics
    except ModuleNotFoundError as error:
        raise ExtraMissing(f"{SECTION}.metrics_port needs prometheus-client ({error})", "metrics") from None
    served, end = serve_metrics(BusCollector(plane), address)
    logger.info("metrics at %s", served)
    return end


def _places(replicas: Sequence[Any]) -> tuple[list[ReplicaNodes], dict[str, Any]]:
    """Return the nodes of each replica's servers, and the servers by their agents' names. Raises ConfigError."""
    import ray

    def node(_: Any) -> str:
        """Ray's id of the node of an actor, asked from inside: shipped by value."""
        import ray

        found: str = ray.get_runtime_context().get_node_id()
        return found

    ordered = sorted(replicas, key=lambda replica: int(replica.replica_rank))
    if [replica.replica_rank for replica in ordered] != list(range(len(ordered))) or not ordered:
        raise ConfigError(
            f"verl's replicas are {[r.replica_rank for r in ordered]}: rolloutctl needs 0, 1, 2 … of them"
        )
    placed: list[ReplicaNodes] = []
    servers: dict[str, Any] = {}
    for replica in ordered:
        if len(replica.servers) != replica.nnodes:
            raise ConfigError(
                f"replica {replica.replica_rank} has {len(replica.servers)} servers on {replica.nnodes} nodes "
                "(rollout.disaggregation?): rolloutctl supports one on each node. Use verl's own trainer_mode"
            )
        nodes = ray.get([server.__ray_call__.remote(node) for server in replica.servers])
        mode = RolloutMode(replica.rollout_mode.value)
        placed.append(ReplicaNodes(nodes, replica.gpus_per_replica_node, mode))
        servers |= {f"{replica.replica_rank}.{rank}": server for rank, server in enumerate(replica.servers)}
    return placed, servers


def _require_reachable(address: str, placed: Iterable[ReplicaNodes]) -> None:
    import ray

    here = ray.get_runtime_context().get_node_id()
    away = {node for replica in placed for node in replica.nodes} - {here}
    if away and urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"{SECTION}.address is {address}, and {len(away)} of the servers' nodes are other machines: set "
            f"+{SECTION}.address=tcp://<address of the task runner>:<port>, +{SECTION}.keys and +{SECTION}.agent_keys"
        )
