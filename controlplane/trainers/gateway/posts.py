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
        that ends after its pause leaves no engine paused. Its mode is the `in_flight` of all syncs until one commits
        or the trainer resumes: an update that fails is asked again without another pause. Of several pauses, that of
        the strongest (AReaL aborts what runs, and then has SGLang's scheduler stop in place).
Rule 6  A resume or a flush that belongs to an update is acknowledged, too. Alone, each is a command to that replica.
Rule 7  Posts about an adapter are a set of their own, beside those of other adapters and of the weights. Rules 1 to 4
        hold for each. A version is synced from a copy, in a directory that no other version ever has.

All of it happens on one event loop, so what a method finds holds until it awaits. What a replica is known to serve is
asked of the control plane each time.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Any, Final, Literal, NamedTuple

import anyio
from anyio import to_thread

from controlplane.bus.callers import PHASES
from controlplane.machine.adapters import NAMES_MAX, live_versions, needed_paths
from controlplane.machine.quorum import AWAY
from controlplane.plane import ControlPlane
from controlplane.tickets import Ticket
from controlplane.trainers.gateway import routes
from controlplane.trainers.gateway.adapters import FOLDER, adapter_of, copy_adapter, label_of
from schemas.commands import Checkpoint, EngineCommand, WeightSync, durable_source
from schemas.errors import BusError, CheckpointError, RolloutctlError, SyncInProgress
from schemas.formatting import format_outcome, format_replicas, is_trouble
from schemas.identity import InFlight, identity_of, replica_and_node
from schemas.logs import logger_of
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing
from schemas.reports import SyncReport
from schemas.safetensors.reading import file_states

logger = logger_of("gateway")

DELETE_S: Final = 2.0
"""Between two looks for copies of adapters that no replica needs."""
LOOK_AGAIN_S: Final = 0.2
"""Between two looks at whether all replicas are known."""
STRENGTH: Final[tuple[InFlight, ...]] = ("keep", "wait", "abort")
"""What pauses do to running requests, the strongest last."""
Answer = tuple[int, str]
"""A status and a message."""
in_thread = partial(to_thread.run_sync, abandon_on_cancel=True)
"""For calls of the disk, which may hang."""
IsDisconnected = Callable[[], Awaitable[bool]]


class Asked(NamedTuple):
    """The weights that a post asks for.

    Attributes:
        path: Empty if an adapter is to be dropped.
        adapter: Whose version they are; empty for base weights.
        files: Differs whenever the files at the path were written again.
    """

    path: str
    label: str
    adapter: str = ""
    files: str = ""

    def __str__(self) -> str:
        return f"{self.path or 'the end of an adapter'} ({self.label})" if self.label else self.path


class UpdateSet:
    """Posts that wait for the same sync, and then its report.

    Attributes:
        complete: All replicas were asked, or the set was refused.
        delivered: Replicas whose answer arrived.
        limits: Those of the newest post, if it had some of its own.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked, self.replicas = asked, set[int]()
        self.complete, self.begun = anyio.Event(), False
        self.ended, self.answer = anyio.Event(), (503, "the gateway ends")
        self.report: SyncReport | None = None
        self.delivered, self.limits = set[int](), dict[str, Any]()

    def end(self, answer: Answer) -> None:
        self.answer = answer
        self.complete.set()
        self.ended.set()


class Posts:
    """The posts of a trainer, from their meaning to their answer.

    Attributes:
        local: SkyRL's local checkpoint, once it is known.
    """

    def __init__(
        self, plane: ControlPlane, replicas: int, root: Path, moment_s: float, limits: Mapping[str, Any]
    ) -> None:
        self._plane, self._replicas, self._root = plane, range(replicas), root
        self._moment_s, self._limits, self._timeout_s = moment_s, limits, limits["timeout"]
        self._current: dict[str, UpdateSet] = {}  # by adapter
        self._ended: dict[str, UpdateSet] = {}  # the newest that has its report, likewise
        self._taken = set[str]()  # copies of adapters whose syncs have not ended
        self._paused: dict[int, InFlight] = {}  # replicas that the trainer paused since the last commit, and how
        self._synced = set[int]()  # replicas that were in a sync since the trainer last paused them
        self.local = ""
        self._label, self._labelled = "", -1  # of the weights named last, and their version
        self._digests: dict[tuple[int, int], str] = {}  # of what replicas loaded for the newest commit, a version
        self._snapshots: dict[int, str] = {}  # likewise, when the trainer last asked for a snapshot
        self._tasks: anyio.abc.TaskGroup

    async def serve(self) -> None:
        """Sync as posts ask for it, until cancelled. Updates that still wait are then answered 503."""
        try:
            async with anyio.create_task_group() as self._tasks:
                while True:
                    await anyio.sleep(DELETE_S)
                    await self._delete_copies()
        finally:
            for current in self._current.values():
                current.end(current.answer)

    async def answer(self, replica: int, meaning: routes.Meaning, is_disconnected: IsDisconnected) -> Answer:
        match meaning:
            case routes.PausePost(mode):
                self._paused[replica] = max(mode, self._paused.get(replica, mode), key=STRENGTH.index)
                self._synced.discard(replica)
                return 200, "the next sync pauses"
            case routes.Plain.RESUME:
                self._paused.pop(replica, None)
                if "" in self._current or replica in self._synced:
                    return 200, "the end of a sync resumes"
                return await self._command(replica, "resume")
            case routes.Plain.FLUSH:
                if "" in self._current or replica in self._paused:
                    return 200, "the next sync flushes"
                return await self._command(replica, "flush")
            case routes.Plain.PART:
                return 200, "a sync does this by itself"
            case routes.UpdatePost(path, label):
                return await self._update({replica}, await self._asked(path, label), is_disconnected)
            case routes.DeltaPost(label):
                return await self._delta(replica, label, is_disconnected)
            case routes.AdapterPost(label, path):
                name = adapter_of(label)
                if not path and label != name:
                    return self._unload_version(name, label)
                asked = await self._asked(path, label, name) if path else Asked(path, label, name)
                return await self._update({replica}, asked, is_disconnected)
            case routes.VersionPost() | routes.CheckPost():
                return self._of_proven(replica, meaning)
            case _:
                raise TypeError(f"{meaning} is not answered here")

    async def sync(self, post: routes.SyncPost, is_disconnected: IsDisconnected) -> tuple[Answer, SyncReport | None]:
        """Sync as if all replicas had been asked. Returns the report too, if it came to one."""
        asked = await self._asked(post.update.path, post.update.label)
        answer = await self._update({*self._replicas}, asked, is_disconnected, {"in_flight": post.mode, **post.limits})
        ended = self._ended.get("")
        return answer, ended.report if ended is not None and ended.answer is answer else None

    def label_of(self, replica: int) -> str:
        """Return the trainer's label of the weights that the replica serves; empty if they have none."""
        return self._label if self._plane.serving().get(replica) == self._labelled else ""

    def _of_proven(self, replica: int, meaning: routes.VersionPost | routes.CheckPost) -> Answer:
        view = self._plane.view()
        version = view.serving.get(replica)
        if version is None:
            return 503, f"replica {replica} is not proven to serve: {view.unfit(replica) or 'it is paused'}"
        if isinstance(meaning, routes.VersionPost):
            self._label, self._labelled = meaning.label, version
            return 200, f"{meaning.label} is v{version} of the run"
        if meaning.action == "reset_tensors":
            return 200, "nothing was reset: engines serve on, and each load is proven by what they hold afterwards"
        status = view.state.members[f"{replica}.0"].status
        launched = status.digest if status is not None and status.version == version else None
        digest = self._digests.get((replica, version)) or launched or ""
        if meaning.action == "snapshot":
            self._snapshots[replica] = digest
            return 200, f"replica {replica} holds v{version}"
        digests = [found.rpartition(":")[2][:12] for found in (digest, self._snapshots.get(replica, ""))]
        if not all(digests):
            return 409, f"the bytes that replica {replica} holds are not known: start its agent with --digests always"
        equal = digest == self._snapshots[replica]
        return 200 if equal else 409, f"replica {replica} holds {digests[0]}, and held {digests[1]} at the snapshot"

    # --- updates ------------------------------------------------------------------------------------------------------

    async def _asked(self, path: str, label: str, adapter: str = "") -> Asked:
        """Add what the disk knows of the files."""
        try:
            found = await in_thread(file_states, self._root / path)
        except CheckpointError:  # the sync says what is wrong
            return Asked(path, label, adapter)
        return Asked(path, label, adapter, str(found))

    async def _delta(self, replica: int, label: str, is_disconnected: IsDisconnected) -> Answer:
        local = self.local or self._committed_local()
        if not local:
            return 409, (
                "this gateway has not seen /init_weight_transfer_engine, which names the local checkpoint, and the log "
                "has no update from one: it was started after the trainer. Start the trainer again"
            )
        written = await in_thread((self._root / local).exists)
        if not written and not self._plane.view().has_committed:  # what was launched is what is wanted
            self._synced, self._label, self._labelled = set(self._replicas), label, 0
            self._paused.clear()
            return 200, "no weight has changed since the engines were launched"
        return await self._update({replica}, await self._asked(local, label), is_disconnected)

    def _committed_local(self) -> str:
        """SkyRL's local checkpoint, if the newest commit was from it."""
        committed = self._plane.view().state.default_desired.committed
        source = None if committed is None else durable_source(committed.source)
        return source.path if source is not None and source.path.endswith(f"/{routes.LOCAL_WEIGHTS}") else ""

    async def _update(
        self, replicas: set[int], asked: Asked, is_disconnected: IsDisconnected, limits: Mapping[str, object] = {}
    ) -> Answer:
        current, ended = self._current.get(asked.adapter), self._ended.get(asked.adapter)
        if current is None and ended is not None and ended.asked == asked and not replicas & ended.delivered:
            return await self._deliver(ended, replicas, is_disconnected)
        if current is None:
            current = self._current[asked.adapter] = UpdateSet(asked)
            self._tasks.start_soon(self._sync, current)
        elif current.asked != asked and (current.begun or current.asked[:2] != asked[:2]):
            return self._conflict(current, replicas, asked)
        current.asked = asked
        current.limits |= limits
        current.replicas |= replicas
        if len(current.replicas) == len(self._replicas):
            current.complete.set()
        await current.ended.wait()
        return await self._deliver(current, replicas, is_disconnected)

    async def _deliver(self, ended: UpdateSet, replicas: set[int], is_disconnected: IsDisconnected) -> Answer:
        if not await is_disconnected():
            ended.delivered |= replicas
        return ended.answer

    def _conflict(self, current: UpdateSet, replicas: set[int], asked: Asked) -> Answer:
        rewritten = ", which was written again since then" if asked.path == current.asked.path else ""
        message = (
            f"{format_replicas(replicas)} is asked for {asked.path or asked}{rewritten}, and "
            f"{format_replicas(current.replicas)} for {current.asked.path or current.asked}. The fleet moves together"
        )
        if current.begun:
            return 503, f"{message}: that sync goes on, ask again when it has ended"
        del self._current[asked.adapter]
        current.end((409, f"{message}: nothing was loaded"))
        return current.answer

    async def _sync(self, current: UpdateSet) -> None:
        """Sync the fleet once all posts of a set are there. The headers of the files are read in a thread."""
        with anyio.move_on_after(self._moment_s):
            await current.complete.wait()
        if current.ended.is_set():
            return
        asked, adapter = current.asked, current.asked.adapter
        current.begun = True
        self._ended.pop(adapter, None)
        logger.info("the trainer asks for %s", asked)
        try:
            await self._replicas_known()
            if asked.path:
                report = await (self._sync_adapter(asked) if adapter else self._sync_weights(current))
                current.report, answer = report, (status_of_sync(report), str(report))
            else:
                answer = 200, str(await self._plane.drop_adapter(adapter))
        except RolloutctlError as error:
            # As vLLM answers: prime-rl then tries again, since a shared disk may be late.
            late = adapter and isinstance(error.__cause__, FileNotFoundError)
            answer = 404 if late else status_of(error), str(error)
        (logger.info if answer[0] == 200 else logger.error)("%s: %s", asked, answer[1])
        del self._current[adapter]
        self._ended[adapter], self._synced = current, set(self._replicas)
        if len(self._ended) > NAMES_MAX:
            del self._ended[next(iter(self._ended))]
        if not adapter and answer[0] == 200:
            self._paused.clear()
        current.end(answer)

    async def _sync_weights(self, current: UpdateSet) -> SyncReport:
        asked, mode = current.asked, max(self._paused.values(), key=STRENGTH.index, default="abort")
        limits: dict[str, Any] = {"in_flight": mode, **self._limits, **current.limits}
        sync = partial(self._plane.sync_weights, None, Checkpoint(asked.path), **limits)
        report = await self._after_others(sync, asked)
        if report.status == "committed":
            self._labelled, self._label = report.version, asked.label
            self._digests = {
                (identity_of(line.agent).replica, acted.version): acted.digest
                for line in report.phases[-1].outcomes
                if isinstance(acted := line.conclusion, Acted) and acted.version and acted.digest
            }
        return report

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def _sync_adapter(self, asked: Asked) -> SyncReport:
        place = f"{FOLDER}/{self._plane.view().state.run}/{asked.label}.{token_hex(6)}"
        self._taken.add(place)
        try:
            await in_thread(copy_adapter, self._root, asked.path, place)
            sync = partial(self._plane.sync_adapter, asked.adapter, None, place, **self._limits)
            return await self._after_others(sync, asked)
        finally:
            self._taken.discard(place)

    def _unload_version(self, name: str, label: str) -> Answer:
        """Answer the unload of one version: which versions replicas hold is the run's to say."""
        live = live_versions(self._plane.view().state, name)
        if live and label_of(live[0].adapter) == label:
            return 409, f"{label} is the newest version of {name}. Unload {name} to drop the adapter"
        return 200, "replicas unload old versions by themselves, once no request runs on them"

    async def _delete_copies(self) -> None:
        """Delete copies of adapters that no replica needs. They are listed before it is asked what is needed."""
        with suppress(OSError, RolloutctlError):  # there is none yet, or the bus has ended
            folder = f"{FOLDER}/{self._plane.view().state.run}"
            for name in await in_thread(os.listdir, self._root / folder):
                if f"{folder}/{name}" not in needed_paths(self._plane.view().state) | self._taken:
                    await in_thread(partial(rmtree, ignore_errors=True), self._root / folder / name)

    # --- both ---------------------------------------------------------------------------------------------------------

    async def _after_others(self, sync: Callable[[], Ticket[SyncReport]], asked: Asked) -> SyncReport:
        """Sync. While that of an operator has not ended, wait for as long as one may take: a trainer would end."""
        until, said = anyio.current_time() + PHASES * self._timeout_s, False
        while True:
            try:
                return await (await to_thread.run_sync(sync))
            except SyncInProgress as error:
                if anyio.current_time() > until:
                    raise
                if not said:
                    logger.warning("%s waits, since another sync has not ended: %s", asked, error)
                said = True
                await anyio.sleep(LOOK_AGAIN_S)

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
        joined = {name for name, member in state.members.items() if member.joined} | state.retired.keys()
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
    return 503 if isinstance(error, SyncInProgress | BusError) else 409


def status_of_sync(report: SyncReport) -> int:
    """Return the status of a sync that has ended: 503 if all that kept it from a commit passes by itself."""
    if report.status == "committed":
        return 200
    conclusions = [line.conclusion for phase in report.phases for line in phase.outcomes]
    passes = report.status == "aborted" and all(map(_passes, filter(is_trouble, conclusions)))
    return 503 if passes else 409


def verdicts(report: SyncReport) -> dict[str, dict[str, str]]:
    """Return what became of each worker, and what it answered to each phase."""
    workers: dict[int, dict[str, str]] = {}
    for command, line in ((phase.command, line) for phase in report.phases for line in phase.outcomes):
        place = replica_and_node(line.agent)
        if place is not None and place[1] == 0 and isinstance(command, WeightSync):
            workers.setdefault(place[0], {})[command.phase] = format_outcome(line.conclusion)
    ends = {"committed": report.loaded}
    ends |= {"quarantined": report.quarantined, "unproven": report.unproven, "joining": report.joining}
    return {
        str(replica): {"verdict": next((end for end in ends if replica in ends[end]), "unchanged"), **phases}
        for replica, phases in sorted(workers.items())
    }


def _passes(trouble: Conclusion) -> bool:
    if isinstance(trouble, Missing):
        return trouble.reason in AWAY
    return isinstance(trouble, Failed) and trouble.error in (ErrorKind.ENGINE_NOT_READY, ErrorKind.ENGINE_BUSY)
