"""Which of a trainer's posts belong together, which command they become, and how each is answered.

A trainer posts one request to each replica, and the bus has one command for all of them. So the posts are gathered:

Rule 1  The first update opens a set. The sync begins when every replica was asked, or when a moment has passed: it is
        one command to the whole fleet in any case, since a part of it must never move alone.
Rule 2  Every post for the same weights waits for the same report, whether it came before the sync or during it. Weights
        are the same if path, label and files are: a trainer that went back a step writes others to the same path. As
        long as the sync has not begun, it will load the newest files there.
Rule 3  Posts for other weights meanwhile are refused. If the sync has not begun, so is the whole set.
Rule 4  A post that repeats one whose answer never arrived (its sender had gone) gets the answer of that sync. One whose
        answer did arrive is a new request.
Rule 5  A pause is acknowledged and not performed: the sync pauses by itself, for as long as it takes. So a trainer
        that ends after its pause leaves no engine paused. Its mode becomes the `in_flight` of the sync.
Rule 6  A resume or a flush that belongs to an update is acknowledged, too. Alone, each is a command to that replica.

All of it happens on one event loop, so what a method finds holds until it awaits. What a replica is known to serve is
asked of the control plane each time.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

import anyio
from anyio import to_thread

from controlplane.plane import ControlPlane
from controlplane.trainers.gateway import routes
from schemas.commands import Checkpoint, EngineCommand
from schemas.errors import BusError, BusOverloaded, CheckpointError, RolloutctlError, SyncInProgress
from schemas.formatting import format_replicas, is_trouble
from schemas.identity import InFlight, identity_of
from schemas.logs import logger_of
from schemas.safetensors.reading import file_states

logger = logger_of("gateway")

LOOK_AGAIN_S: Final = 0.2
"""Between two looks at whether all replicas are known."""
Answer = tuple[int, str]
"""A status and a message."""
IsDisconnected = Callable[[], Awaitable[bool]]


class Asked(NamedTuple):
    """The weights that a post asks for.

    Attributes:
        files: Differs whenever the files at the path were written again.
    """

    path: str
    label: str
    files: str = ""


class UpdateSet:
    """Posts that wait for the same sync, and then its report.

    Attributes:
        replicas: Those that were asked.
        complete: All of them were, or the set was refused.
        begun: The sync has begun.
        delivered: Replicas whose answer arrived.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked, self.replicas = asked, set[int]()
        self.complete, self.begun = anyio.Event(), False
        self.ended, self.answer = anyio.Event(), (503, "the gateway ends")
        self.delivered = set[int]()

    def end(self, answer: Answer) -> None:
        """Answer all posts."""
        self.answer = answer
        self.complete.set()
        self.ended.set()


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
        self._plane, self._replicas, self._root = plane, range(replicas), root
        self._timeout_s, self._moment_s = timeout_s, moment_s
        self._current: UpdateSet | None = None
        self._ended: UpdateSet | None = None  # the newest that has its report
        self._paused: dict[int, InFlight] = {}  # replicas that the trainer paused since the last sync, and how
        self._synced = set[int]()  # replicas that were in a sync since the trainer last paused them
        self._local = ""  # SkyRL's local checkpoint, once it is known
        self._label, self._committed = "", 0  # of the weights committed last
        self._tasks: anyio.abc.TaskGroup

    async def serve(self) -> None:
        """Sync as posts ask for it, until cancelled. Updates that still wait are then answered 503."""
        try:
            async with anyio.create_task_group() as self._tasks:
                await anyio.sleep_forever()
        finally:
            if self._current is not None:
                self._current.end(self._current.answer)

    async def answer(self, replica: int, meaning: routes.Meaning, is_disconnected: IsDisconnected) -> Answer:
        """Do what a post means, and return its answer.

        Args:
            replica: Whose base URL it was posted to.
            meaning: Of the post.
            is_disconnected: Tells whether the client has gone meanwhile.
        """
        match meaning:
            case routes.PausePost(mode):
                self._paused[replica] = mode
                self._synced.discard(replica)
                return 200, "the next sync pauses"
            case routes.Plain.RESUME:
                self._paused.pop(replica, None)
                if self._current is not None or replica in self._synced:
                    return 200, "the end of a sync resumes"
                return await self._command(replica, "resume")
            case routes.Plain.FLUSH:
                if self._current is not None or replica in self._paused:
                    return 200, "the next sync flushes"
                return await self._command(replica, "flush")
            case routes.Plain.PART:
                return 200, "a sync does this by itself"
            case routes.UpdatePost(path, label):
                return await self._update(replica, await self._asked(path, label), is_disconnected)
            case routes.DeltaPost(label):
                return await self._delta(replica, label, is_disconnected)
            case _:
                raise TypeError(f"{meaning} is not answered here")

    def note_transfer(self, meaning: routes.TransferPost) -> None:
        """Note a post that the engine answers."""
        self._local = meaning.path

    def label_of(self, replica: int) -> str:
        """Return the trainer's label of the weights that the replica serves; empty if they have none."""
        serves_newest = self._committed and self._plane.serving().get(replica) == self._committed
        return self._label if serves_newest else ""

    # --- updates ------------------------------------------------------------------------------------------------------

    async def _asked(self, path: str, label: str) -> Asked:
        """Add what the disk knows of the files. In a thread: a disk may hang."""
        try:
            found = await to_thread.run_sync(file_states, self._root / path, abandon_on_cancel=True)
        except CheckpointError:  # the sync says what is wrong
            return Asked(path, label)
        return Asked(path, label, str(found))

    async def _delta(self, replica: int, label: str, is_disconnected: IsDisconnected) -> Answer:
        local = self._local
        if not local:
            return 409, (
                "this gateway has not seen /init_weight_transfer_engine, which names the local checkpoint: it was "
                "started after the trainer. Start the trainer again"
            )
        written = await to_thread.run_sync((self._root / local).exists, abandon_on_cancel=True)
        if not written and not self._plane.view().has_committed:  # what was launched is what is wanted
            self._synced, self._label = set(self._replicas), label
            self._paused.clear()
            return 200, "no weight has changed since the engines were launched"
        return await self._update(replica, await self._asked(local, label), is_disconnected)

    async def _update(self, replica: int, asked: Asked, is_disconnected: IsDisconnected) -> Answer:
        current, ended = self._current, self._ended
        if current is None and ended is not None and ended.asked == asked and replica not in ended.delivered:
            return await self._deliver(ended, replica, is_disconnected)
        if current is None:
            current = self._current = UpdateSet(asked)
            self._tasks.start_soon(self._sync, current)
        elif current.asked != asked and (current.begun or current.asked[:2] != asked[:2]):
            return self._conflict(current, replica, asked)
        current.asked = asked
        current.replicas.add(replica)
        if len(current.replicas) == len(self._replicas):
            current.complete.set()
        await current.ended.wait()
        return await self._deliver(current, replica, is_disconnected)

    async def _deliver(self, ended: UpdateSet, replica: int, is_disconnected: IsDisconnected) -> Answer:
        if not await is_disconnected():
            ended.delivered.add(replica)
        return ended.answer

    def _conflict(self, current: UpdateSet, replica: int, asked: Asked) -> Answer:
        rewritten = ", which was written again since then" if asked.path == current.asked.path else ""
        message = (
            f"replica {replica} is asked to load {asked.path}{rewritten}, and replicas {sorted(current.replicas)} are "
            f"asked to load {current.asked.path}. The fleet moves together"
        )
        if current.begun:
            return 503, f"{message}: that sync goes on, ask again when it has ended"
        self._current = None
        current.end((409, f"{message}: nothing was loaded"))
        return current.answer

    async def _sync(self, current: UpdateSet) -> None:
        """Sync the fleet once all posts of a set are there. The headers of the files are read in a thread."""
        with anyio.move_on_after(self._moment_s):
            await current.complete.wait()
        if current.ended.is_set():
            return
        current.begun, self._ended = True, None
        path, label, _ = current.asked
        named = f"{path} ({label})" if label else path
        modes = list(self._paused.values())
        logger.info("the trainer asks for %s", named)
        try:
            await self._replicas_known()
            sync = partial(
                self._plane.sync_weights,
                None,
                Checkpoint(path),
                in_flight=modes[-1] if modes else "abort",
                timeout=self._timeout_s,
            )
            report = await (await to_thread.run_sync(sync))
            answer = (200 if report.status == "committed" else 409), str(report)
            if report.status == "committed":
                self._committed, self._label = report.version, label
        except RolloutctlError as error:
            answer = status_of(error), str(error)
        (logger.info if answer[0] == 200 else logger.error)("%s: %s", named, answer[1])
        self._current, self._ended, self._synced = None, current, set(self._replicas)
        self._paused.clear()
        current.end(answer)

    async def _replicas_known(self) -> None:
        """Wait for replicas that the run does not know yet, as long as for a phase: a trainer may start before them."""
        said = False
        with anyio.move_on_after(self._timeout_s):
            while unknown := self._unknown():
                if not said:
                    logger.warning("the update waits for the agents of %s to join", format_replicas(unknown))
                said = True
                await anyio.sleep(LOOK_AGAIN_S)

    def _unknown(self) -> list[int]:
        state = self._plane.view().state
        joined = {name for name, member in state.members.items() if member.joined} | state.retired
        return [replica for replica in self._replicas if f"{replica}.0" not in joined]

    # --- one replica --------------------------------------------------------------------------------------------------

    async def _command(self, replica: int, operation: Literal["resume", "flush"]) -> Answer:
        try:
            report = await self._plane.publish(EngineCommand(operation=operation), [replica])
        except RolloutctlError as error:
            return status_of(error), str(error)
        own = [outcome for outcome in report.outcomes if identity_of(outcome.agent).unit == replica]
        if not own:
            return 503, f"no agent of replica {replica} has joined: {report.headline}"
        return 409 if any(is_trouble(outcome.conclusion) for outcome in own) else 200, str(report)


def status_of(error: RolloutctlError) -> int:
    """Return the status of an error: 409 for what another attempt won't change, 503 for what it may."""
    return 503 if isinstance(error, SyncInProgress | BusOverloaded | BusError) else 409
