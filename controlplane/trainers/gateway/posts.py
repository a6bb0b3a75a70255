"""Carries out what `updates.decide` decides: commands on the bus, and the answers to the posts that wait for them.

All of it happens on one event loop. What a replica is known to serve is asked of the control plane each time.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from controlplane.plane import ControlPlane
from controlplane.trainers.gateway import routes
from controlplane.trainers.gateway.updates import (
    AnswerSent,
    BeginSync,
    CommandReplica,
    Event,
    GatewayState,
    MomentPassed,
    PostArrived,
    Remind,
    Reply,
    SyncEnded,
    decide,
)
from schemas.commands import Checkpoint, ProfileCommand
from schemas.errors import BusError, BusOverloaded, RolloutctlError, SyncInProgress
from schemas.formatting import is_trouble
from schemas.identity import RolloutMode, identity_of
from schemas.logs import logger_of
from schemas.reports import Report
from schemas.selection import trace_directory

logger = logger_of("gateway")


class _Waiting:
    """A request that waits for its answer."""

    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.status, self.message = 503, "the gateway ends"

    def answer(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        self.answered.set()


class Posts:
    """The posts of a trainer, from their meaning to their answer.

    Args:
        plane: The open control plane of the run.
        replicas: How many replicas there are.
        root: Root of the checkpoints.
        timeout_s: For each phase of a sync.
        moment_s: How long the first update waits for those of the other replicas.
    """

    def __init__(self, plane: ControlPlane, replicas: int, root: Path, timeout_s: float, moment_s: float) -> None:
        self._plane, self._root = plane, root
        self._timeout_s, self._moment_s = timeout_s, moment_s
        self._state = GatewayState(replicas=replicas)
        self._committed = 0
        self._waiting: dict[int, _Waiting] = {}
        self._posts = 0
        self._tasks: anyio.abc.TaskGroup

    async def serve(self) -> None:
        """Carry out what is decided, until cancelled. Posts that still wait are then answered 503."""
        try:
            async with anyio.create_task_group() as self._tasks:
                await anyio.sleep_forever()
        finally:
            for waiting in self._waiting.values():
                waiting.answered.set()

    async def answer(
        self, replica: int, meaning: routes.Meaning, is_disconnected: Callable[[], Awaitable[bool]]
    ) -> tuple[int, str]:
        """Have the machine decide about a post, and wait for its answer: a status and a message.

        Args:
            is_disconnected: Tells whether the client has gone meanwhile.
        """
        self._posts += 1
        post, waiting = self._posts, _Waiting()
        self._waiting[post] = waiting
        try:
            state = self._plane.bus.state
            unchanged = isinstance(meaning, routes.DeltaPost) and self._unchanged()
            self._turn(PostArrived(post=post, replica=replica, meaning=meaning, seq=state.seq, unchanged=unchanged))
            await waiting.answered.wait()
            delivered = not await is_disconnected()
        finally:
            del self._waiting[post]
        self._turn(AnswerSent(post, delivered))
        return waiting.status, waiting.message

    def note_transfer(self, replica: int, meaning: routes.TransferPost) -> None:
        """Note a post that the engine answers."""
        self._turn(PostArrived(post=0, replica=replica, meaning=meaning))

    def label_of(self, replica: int) -> str:
        """Return the trainer's label of the weights that the replica serves; empty if they have none."""
        serves_newest = self._committed and self._plane.serving().get(replica) == self._committed
        return self._state.label if serves_newest else ""

    def unfit(self, replica: int) -> str:
        """Return why a replica must not get requests; empty if nothing is known against it."""
        state = self._plane.bus.state
        member = state.members.get(f"{replica}.0")
        if member is None or member.state != "live":
            return "no agent has joined there" if member is None else f"its agent is {member.state}"
        if version := self.quarantined(replica):
            return f"quarantined since v{version}, until a later update includes it"
        desired = state.desired.get(replica, state.default_desired)
        stands = state.sync is not None or desired.generation != "running" or desired.asleep  # as it was told to
        never_syncs = member.hello.identity.mode is RolloutMode.COLOCATED
        if stands or never_syncs or replica in self._plane.serving():
            return ""
        condition = member.status.condition() if member.status is not None else "no heartbeat yet"
        return f"it is not proven to serve v{desired.version}: {condition}"

    def quarantined(self, replica: int) -> int:
        """Return the version that the replica could not follow; 0 if it serves. Cheap as long as nothing is wrong."""
        state = self._plane.bus.state
        desired, member = state.desired.get(replica), state.members.get(f"{replica}.0")
        told = desired.quarantined if desired is not None else 0
        says = member.status.quarantined if member is not None and member.status is not None else 0
        return 0 if (told or says) and replica in self._plane.serving() else told or says

    def _unchanged(self) -> bool:
        local, desired = self._state.local, self._plane.bus.state.default_desired
        return bool(local) and desired.version == 0 and not (self._root / local).exists()

    def _turn(self, event: Event) -> None:
        self._state, actions = decide(self._state, event)
        for action in actions:
            match action:
                case Reply(posts, status, message):
                    for post in posts:
                        if (waiting := self._waiting.get(post)) is not None:
                            waiting.answer(status, message)
                case Remind(number):
                    self._tasks.start_soon(self._remind, number)
                case BeginSync():
                    self._tasks.start_soon(self._sync, action)
                case CommandReplica():
                    self._tasks.start_soon(self._publish, action)

    async def _remind(self, number: int) -> None:
        await anyio.sleep(self._moment_s)
        self._turn(MomentPassed(number))

    async def _sync(self, begin: BeginSync) -> None:
        """Sync the fleet. The headers of the files are read in a thread."""
        named = f"{begin.path} ({begin.label})" if begin.label else begin.path
        logger.info("the trainer asks for %s", named)
        try:
            sync = partial(
                self._plane.sync_weights,
                None,
                Checkpoint(begin.path),
                in_flight=begin.in_flight,
                timeout=self._timeout_s,
            )
            report = await (await to_thread.run_sync(sync))
            status, message = (200 if report.status == "committed" else 409), str(report)
            if report.status == "committed":
                self._committed = report.version
        except RolloutctlError as error:
            status, message = status_of(error), str(error)
        (logger.info if status == 200 else logger.error)("%s: %s", named, message)
        self._turn(SyncEnded(number=begin.number, status=status, message=message))

    async def _publish(self, action: CommandReplica) -> None:
        waiting, replica, command = self._waiting.get(action.post), action.replica, action.command
        status, message = 503, "the gateway ends"
        try:
            report = await self._plane.publish(command, [replica])
            status, message = _outcome(report, replica)
            if isinstance(command, ProfileCommand) and (member := self._plane.bus.state.members.get(f"{replica}.0")):
                place = trace_directory(command.step, command.plan, member.hello.identity)
                message = f"{message}\nThe traces are in {place}, below the root of the agent's traces"
        except RolloutctlError as error:
            status, message = status_of(error), str(error)
        if waiting is not None:
            waiting.answer(status, message)


def status_of(error: RolloutctlError) -> int:
    """Return the status of an error: 409 for what another attempt won't change, 503 for what it may."""
    return 503 if isinstance(error, SyncInProgress | BusOverloaded | BusError) else 409


def _outcome(report: Report, replica: int) -> tuple[int, str]:
    """Return the answer that stands for one replica's part of a report."""
    own = [outcome for outcome in report.outcomes if identity_of(outcome.agent).unit == replica]
    if not own:
        return 503, f"no agent of replica {replica} has joined: {report.headline}"
    failed = any(is_trouble(outcome.conclusion) for outcome in own)
    profiling = isinstance(report.command, ProfileCommand)
    return (500 if profiling else 409) if failed else 200, str(report)
