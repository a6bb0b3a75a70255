"""The trace files of sessions, on this node's disk: where they go, which are whole, whose they are, where they end up.

Every node of a replica profiles its own ranks and writes to its own disk, though only node rank 0 was told to. So each
agent collects what its ranks left. A torch trace names its rank in `distributedInfo`, other files in their names; one
that says nothing belongs to rank 0, but for that of vLLM's front end, which belongs to none.
"""

import errno
import hashlib
import logging
import os
import re
import shutil
import tempfile
import zlib
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Final

import anyio
from anyio import to_thread

from schemas.carriers.wakeup import Wakeup
from schemas.commands import ProfilePlan
from schemas.errors import EngineError
from schemas.events import CollectTraces, DiskCall, FinishProfile, Returned
from schemas.identity import ROLLOUT, Identity
from schemas.outcomes import Trace
from workers.traces import finish_hook
from workers.traces.finish_hook import FinishHook

logger = logging.getLogger("rolloutctl.agent")

SUFFIXES: Final = (".trace.json.gz", ".trace.json", ".pt.trace.json.gz", ".pickle", ".profiler_out.txt")
"""What engines leave. `.pickle` is SGLang's memory snapshot: listed and hashed, never opened."""
LISTED: Final = 150
"""Traces that the outcome of a finish names; more have no room in a message."""
HEAD_BYTES: Final = 64 * 1024
"""Of a trace, decompressed: `distributedInfo` stands before the events."""
_RANK: Final = re.compile(rb'"distributedInfo":\s*\{[^{}]*?"rank":\s*(\d+)')
_NAMED: Final = re.compile(r"(?:rank|-TP-)(\d+)[.-]")
_FRONT_END: Final = ".async_llm."


class NodeTraces:
    """What profiling leaves on one node: collected after a session, relocated and handed to the hook after the last.

    root: the directory that all traces lie below.   hook: a command for `/bin/sh -c`, "" for none.
    """

    def __init__(self, root: Path, identity: Identity, hook: str = "") -> None:
        self._root, self._identity = root.resolve(), identity
        self._hook = FinishHook(hook, identity, self._root) if hook else None

    async def perform(self, call: DiskCall) -> Returned:
        """Raises EngineError for files that can't be read or moved, and for a hook that failed or is not there."""
        if isinstance(call, CollectTraces):
            session = call.session
            return await to_thread.run_sync(collect_traces, self._root, call.directory, session.plan, self._identity)
        return await self._finish(call)

    async def _finish(self, call: FinishProfile) -> Returned:
        traces: tuple[Trace, ...] = ()
        if call.plan.finish.relocate:
            moving = self._moving(call)
            if not await _done(moving, finish_hook.PATIENCE_S):
                moving.add_done_callback(partial(self._go_on, call))
                return Returned(still_running=True)
            traces = moving.result()
            if len(traces) > LISTED:
                logger.warning("agent %s: %d traces moved; %d named", self._identity.agent, len(traces), LISTED)
                traces = traces[:LISTED]
        if not runs_hook(call.plan, self._identity):
            return Returned(traces=traces)
        return Returned(traces=traces, still_running=await self._require_hook().run(call.plan.tool, call.steps))

    def _moving(self, call: FinishProfile) -> "Future[tuple[Trace, ...]]":
        """Relocate on a thread, which the end of the process waits for."""
        moving: Future[tuple[Trace, ...]] = Future()

        def run() -> None:
            try:
                moving.set_result(relocate_traces(self._root, call.directories, call.plan, self._identity))
            except BaseException as error:
                moving.set_exception(error)

        Thread(target=run, name="relocation").start()
        return moving

    def _go_on(self, call: FinishProfile, moving: "Future[tuple[Trace, ...]]") -> None:
        """What is left to be done when a relocation ends that nobody waits for any more."""
        try:
            logger.info("agent %s: %d traces moved", self._identity.agent, len(moving.result()))
            if runs_hook(call.plan, self._identity):
                self._require_hook().begin(call.plan.tool, call.steps)
        except EngineError as error:
            logger.warning("agent %s: profiling was not finished: %s", self._identity.agent, error)

    def _require_hook(self) -> FinishHook:
        if self._hook is None:
            raise EngineError(
                "the finish hook was not run: this agent was started without one. Give it the same profiler "
                "configuration as the trainer, or its command (--finish-hook). The traces are where they were written."
            )
        return self._hook


async def _done(work: "Future[tuple[Trace, ...]]", timeout_s: float) -> bool:
    """Wait, but not for long: an agent that waits here does nothing else, whatever the next step asks of it."""
    wakeup = Wakeup()
    try:
        work.add_done_callback(lambda _: wakeup.notify())
        with anyio.move_on_after(timeout_s):
            await wakeup.wait()
    finally:
        wakeup.close()
    return work.done()


def runs_hook(plan: ProfilePlan, identity: Identity) -> bool:
    """Is it this agent that runs the hook? By default whoever has a rank that was asked for."""
    finish = plan.finish
    if not finish.hook or finish.hook_all_ranks:
        return finish.hook
    chosen = finish.hook_ranks or selected_ranks(plan, identity)
    return not chosen.isdisjoint(identity.ranks_on_node)


def require_writable(directory: Path, who: str) -> None:
    """Raise EngineError unless this process can write there; it is made.   who: is to write there, for the message."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # several agents may look at once
            pass
    except OSError as error:
        raise EngineError(
            f"{directory} can't be written: {error.strerror}. {who} needs it for traces: give another directory, on "
            "every node the same."
        ) from error


def make_fresh(directory: Path) -> None:
    """Make the directory of a session. Raises EngineError if it can't be made, or holds files already."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if next(directory.iterdir(), None) is None:
            return
    except OSError as error:
        raise EngineError(f"the profile was not started: {directory}: {error.strerror}.") from error
    raise EngineError(
        f"the profile was not started: {directory} holds files already, and nothing is ever written over. Move them "
        "away, or use another traces root."
    )


def describe_trace(file: Path, root: Path, rank: int | None = None) -> Trace:
    """Path below `root`, size and digest of one file. rank: global. Raises OSError."""
    with open(file, "rb") as written:
        sha256 = hashlib.file_digest(written, "sha256").hexdigest()
    return Trace(str(file.relative_to(root)), file.stat().st_size, sha256, rank)


def collect_traces(root: Path, directory: str, plan: ProfilePlan, identity: Identity) -> Returned:
    """What a session that was stopped left on this node's disk: the whole traces of the ranks asked for.

    On a disk that the nodes share, each takes what its own ranks wrote. What other ranks of the replica wrote stays
    where it is, untold. Raises EngineError for a file that can't be read or is cut off.
    """
    place, asked = root / directory, selected_ranks(plan, identity)
    try:
        mine = [
            (one, rank) for one, rank in _by_rank(place, identity) if _whose(rank, identity) in identity.ranks_on_node
        ]
        for one, rank in mine:
            if _is_asked(rank, asked):
                _require_whole(one)
        if plan.layout == "verl":
            mine = [(move_trace(one, place.parent), rank) for one, rank in mine]
            _remove_if_empty(place, root)
        told = tuple(describe_trace(one, root, rank) for one, rank in mine if _is_asked(rank, asked))
    except OSError as error:
        raise _unreadable(place, error) from error
    left = {one.rank for one in told if not one.path.endswith(".txt")}
    return Returned(traces=told, ranks_without_trace=tuple(sorted(asked - left)))


def relocate_traces(
    root: Path, directories: tuple[str, ...], plan: ProfilePlan, identity: Identity
) -> tuple[Trace, ...]:
    """Move this node's traces of the ranks asked for up to the root, where their names tell whose they are.

    As verl 0.9.1 names them (utils/profiler/config.py): rollout-replica<R>_<name>, with -globalrank<G> after the
    replica where it has several ranks; and <role>-rank<G>_<name>, with step_<N> before the name, which is the same in
    each of a training rank's sessions. What is in the root already stays as it is. Raises EngineError for a file that
    can't be read or moved; those before it have been.
    """
    asked, told = selected_ranks(plan, identity), []
    places = [root / one for one in directories]
    if plan.layout == "verl" and identity.role == ROLLOUT:
        places = [one.parent for one in places]
    for place in dict.fromkeys(places):
        if place.resolve() == root:
            continue
        step = "" if identity.role == ROLLOUT else f"{place.relative_to(root).parts[0].removeprefix('global_')}_"
        try:
            for file, rank in _by_rank(place, identity):
                if _whose(rank, identity) in identity.ranks_on_node and _is_asked(rank, asked):
                    there = move_trace(file, root, f"{_owner(rank, identity)}_{step}{file.name}")
                    told.append(describe_trace(there, root, rank))
        except OSError as error:
            raise _unreadable(place, error) from error
        _remove_if_empty(place, root)
    return tuple(told)


def _owner(rank: int | None, identity: Identity) -> str:
    if identity.role != ROLLOUT:
        return f"{identity.role}-rank{rank}"
    numbered = rank is not None and len(identity.global_ranks) > 1
    return f"rollout-replica{identity.replica}" + (f"-globalrank{rank}" if numbered else "")


def _unreadable(place: Path, error: OSError) -> EngineError:
    return EngineError(f"the traces in {place} can't be read: {error.strerror}: {error.filename}.")


def selected_ranks(plan: ProfilePlan, identity: Identity) -> frozenset[int]:
    """The global ranks on this node whose traces are wanted."""
    chosen = plan.replicas is not None and identity.replica in plan.replicas
    if chosen or (plan.ranks is None and plan.replicas is None):
        return frozenset(identity.ranks_on_node)
    return frozenset(identity.ranks_on_node) & (plan.ranks or frozenset())


def _by_rank(place: Path, identity: Identity) -> list[tuple[Path, int | None]]:
    """The traces in a directory, by name, each with its global rank; None for a front end's. Raises OSError.

    What vanishes meanwhile is another node's: on a disk that they share, each moves its own, at the same time.
    """
    if identity.role != ROLLOUT:
        return [(one, identity.replica) for one in _files(place)]  # its directory is its own
    found: list[tuple[Path, int | None]] = []
    for one in _files(place):
        with suppress(FileNotFoundError):
            rank = _rank(one)
            found.append((one, None if rank is None else identity.global_ranks.start + rank))
    return found


def _files(place: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    below = (Path(folder, name) for folder, _, names in os.walk(place, onerror=refuse) for name in names)
    return sorted(one for one in below if one.name.endswith(SUFFIXES) and one.is_file())


def _whose(rank: int | None, identity: Identity) -> int:
    """The rank whose node has it on its disk: a front end runs beside the first."""
    return identity.global_ranks.start if rank is None else rank


def _is_asked(rank: int | None, asked: frozenset[int]) -> bool:
    """Is a trace of this rank told? A front end's is, with whichever rank of its node."""
    return bool(asked) if rank is None else rank in asked


def move_trace(file: Path, directory: Path, name: str = "") -> Path:
    """Bring a file to a directory, which is made; return its new path. name: a new one. Raises EngineError.

    Copied when the two lie on different disks. What is there already is never written over.
    """
    place = directory / (name or file.name)
    if place.exists():
        raise EngineError(f"the trace {file} stays where it is: {place} is there already.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            file.rename(place)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copied(file, place)
            file.unlink()
    except OSError as error:
        raise EngineError(f"the trace {file} was not moved to {directory}: {error.strerror}.") from error
    return place


def _copied(file: Path, place: Path) -> None:
    """Under its name it is whole, or not there: a disk may fill in the middle. Raises OSError."""
    part = place.with_name(f".{place.name}.part")
    try:
        shutil.copy2(file, part)
        part.rename(place)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _remove_if_empty(directory: Path, root: Path) -> None:
    """And the directories above it, up to the root."""
    with suppress(OSError):  # somebody else has not taken its own yet
        while directory != root:
            directory.rmdir()
            directory = directory.parent


def _rank(file: Path) -> int | None:
    if _FRONT_END in file.name:
        return None
    found = _RANK.search(_head(file)) if ".trace.json" in file.name else None
    if found is not None:
        return int(found.group(1))
    named = _NAMED.search(file.name) if ".trace.json" not in file.name else None
    return int(named.group(1)) if named is not None else 0


def _head(file: Path) -> bytes:
    with open(file, "rb") as stream:
        raw = stream.read(HEAD_BYTES)
    if file.suffix != ".gz":
        return raw
    try:
        return zlib.decompressobj(wbits=31).decompress(raw, HEAD_BYTES)
    except zlib.error:
        return b""


def _require_whole(file: Path) -> None:
    """Raise EngineError for a trace that does not reach to its end: the end of its JSON, and of what it is packed in.

    On a disk that is full, torch 2.13 leaves a compressed trace that is whole and has nothing in it.
    """
    if ".trace.json" not in file.name:
        return
    packed = file.suffix == ".gz"
    inflate, last, ended = zlib.decompressobj(wbits=31), b"", not packed
    try:
        with open(file, "rb") as stream:
            while not (packed and ended) and (raw := stream.read(1 << 20)):
                last = ((inflate.decompress(raw) if packed else raw).rstrip() or last)[-1:]
                ended = ended or inflate.eof
    except zlib.error as error:
        raise EngineError(f"the trace {file} is damaged: {error}.") from error
    if not ended or last != b"}":
        raise EngineError(
            f"the trace {file} is cut off: its writer has not finished, or could not. Is its disk full, or the one "
            "that holds the temporary files?"
        )
