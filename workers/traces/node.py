"""The traces on this node's disk: which ranks they belong to, whether they are complete, and where they are moved.

The command to profile goes to node rank 0 only, yet every node of a replica profiles its own ranks and writes to its
own disk. So each agent collects the traces of its ranks. A torch trace names its rank in `distributedInfo`, other files
in their names. A file that names no rank belongs to rank 0, except that of vLLM's front end, which belongs to none.
"""

import gzip
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from anyio import to_thread

from schemas.commands import ProfilePlan
from schemas.errors import EngineError, RefusedError
from schemas.events import CollectTraces, DiskCall, FinishProfile, Returned
from schemas.identity import ROLLOUT, Identity
from schemas.logs import logger_of
from schemas.outcomes import Trace
from schemas.transport import background
from schemas.transport.keys import environment_of_children

logger = logger_of("agent")

SUFFIXES: Final = (".trace.json.gz", ".trace.json", ".pt.trace.json.gz", ".pickle", ".profiler_out.txt")
"""Suffixes of the files that engines write. `.pickle` is SGLang's memory snapshot: listed and hashed, never opened."""
MAX_LISTED: Final = 150
"""Traces that one outcome lists; more don't fit into a message."""
HEAD_BYTES: Final = 64 * 1024
"""Bytes of a decompressed trace that are searched for `distributedInfo`, which comes before the events."""
_RANK: Final = re.compile(rb'"distributedInfo":\s*\{[^{}]*?"rank":\s*(\d{1,18})\b')
_RANK_IN_NAME: Final = re.compile(r"(?:rank|-TP-)(\d+)[.-]")
_FRONT_END: Final = ".async_llm."
WAIT_S: Final = 10.0
"""How long an outcome waits for traces to be moved, and for the hook."""
QUOTED_BYTES: Final = 1000
"""Bytes of a failing hook's output that the error quotes."""
NSIGHT_DIR: Final = "/tmp/ray/session_latest/logs/nsight"
"""Where Ray has nsys write (verl 0.9.1, utils/profiler/nvtx_profile.py)."""
F = TypeVar("F")


class NodeTraces:
    """Collects the traces of one node after each session; relocates them and runs the finish hook after the last one.

    Args:
        root: Root of all traces.
        identity: The node.
        hook: Command for `/bin/sh -c`; empty for none.
    """

    def __init__(self, root: Path, identity: Identity, hook: str = "") -> None:
        self._root, self._identity = root.resolve(), identity
        self._hook = FinishHook(hook, identity, self._root)

    async def perform(self, call: DiskCall) -> Returned:
        """Carry out a call. Raises EngineError if files can't be read or moved, or the hook fails or is missing."""
        if isinstance(call, CollectTraces):
            plan = call.session.plan
            return await to_thread.run_sync(collect_traces, self._root, call.directory, plan, self._identity)
        return await self._finish(call)

    async def _finish(self, call: FinishProfile) -> Returned:
        traces: tuple[Trace, ...] = ()
        if call.plan.finish.relocate:
            work = partial(relocate_traces, self._root, call.directories, call.plan, self._identity)
            relocation = background.begin(work, "relocation", daemon=False)  # the end of the process waits for it
            if not await background.done_within(relocation, WAIT_S):
                relocation.add_done_callback(partial(self._finish_later, call))
                return Returned(still_running=True)
            traces = first_listed(relocation.result())
        if not runs_hook(call.plan, self._identity):
            return Returned(traces=traces)
        return Returned(traces=traces, still_running=await self._hook.run(call.plan.tool, call.steps))

    def _finish_later(self, call: FinishProfile, relocation: "Future[tuple[Trace, ...]]") -> None:
        """Log the end of a relocation that continued in the background, and start the hook."""
        try:
            logger.info("agent %s: %d traces moved", self._identity.agent, len(relocation.result()))
            if runs_hook(call.plan, self._identity):
                self._hook.begin(call.plan.tool, call.steps)
        except EngineError as error:
            logger.warning("agent %s: profiling was not finished: %s", self._identity.agent, error)


def first_listed(files: Sequence[F]) -> tuple[F, ...]:
    """Return as many files as one outcome lists."""
    if len(files) > MAX_LISTED:
        logger.warning("there are %d traces; the outcome lists %d", len(files), MAX_LISTED)
    return tuple(files[:MAX_LISTED])


def runs_hook(plan: ProfilePlan, identity: Identity) -> bool:
    """Return whether this agent runs the hook. By default each agent with a selected rank does."""
    finish = plan.finish
    if not finish.hook or finish.hook_all_ranks:
        return finish.hook
    ranks = finish.hook_ranks or selected_ranks(plan, identity)
    return not ranks.isdisjoint(identity.ranks_on_node)


def selected_ranks(plan: ProfilePlan, identity: Identity) -> frozenset[int]:
    """Return the global ranks on this node whose traces the plan asks for."""
    whole_replica = plan.replicas is not None and identity.replica in plan.replicas
    if whole_replica or (plan.ranks is None and plan.replicas is None):
        return frozenset(identity.ranks_on_node)
    return frozenset(identity.ranks_on_node) & (plan.ranks or frozenset())


class FinishHook:
    """The user's own command, run on a node after the last profiled step, for example to upload traces.

    It comes from the agent's own configuration, never over the bus. It runs in a session of its own, so it survives the
    agent. Training does not wait for it: after some seconds the outcome says that it is still running. Its output is in
    a log below the traces root.
    """

    def __init__(self, command: str, identity: Identity, root: Path) -> None:
        self._command, self._identity, self._root = command, identity, root
        self._log = root / f".finish_hook-{identity.agent}.log"

    async def run(self, tool: str, steps: tuple[int, ...]) -> bool:
        """Run the command and wait up to `WAIT_S`. Returns whether it is still running. Raises EngineError."""
        ended = await to_thread.run_sync(self.begin, tool, steps)
        if not await background.done_within(ended, WAIT_S):
            logger.info("agent %s: the finish hook is still running; its output: %s", self._identity.agent, self._log)
            return True
        if code := ended.result():
            output = await to_thread.run_sync(self._last_output)
            raise EngineError(
                f"the finish hook ended with exit code {code}: {output or 'it printed nothing'}. The traces are still "
                f"in {self._root}."
            )
        return False

    def begin(self, tool: str, steps: tuple[int, ...]) -> "Future[int]":
        """Start the command. Returns its exit code later, and logs it. Raises EngineError if it can't be started."""
        if not self._command:
            raise EngineError(
                "the finish hook was not run: this agent was started without one. Give it the same profiler "
                "configuration as the trainer, or its command (--finish-hook). The traces are where they were written."
            )
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with open(self._log, "wb") as output:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", self._command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**environment_of_children(), **self._variables(tool, steps)},
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"the finish hook was not started: {error.strerror}: {error.filename}.") from error
        return background.begin(partial(self._await_end, process), "finish-hook", daemon=True)

    def _await_end(self, process: "subprocess.Popen[bytes]") -> int:
        code = process.wait()
        level = logging.INFO if code == 0 else logging.WARNING
        logger.log(
            level, "agent %s: the finish hook ended with exit code %d: %s", self._identity.agent, code, self._log
        )
        return code

    def _last_output(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - QUOTED_BYTES))
                return log.read(QUOTED_BYTES).decode(errors="replace").strip()
        except OSError:  # the hook may have removed the whole directory
            return ""

    def _variables(self, tool: str, steps: tuple[int, ...]) -> dict[str, str]:
        """Return verl's environment variables for the hook, and ours."""
        identity, ranks, root = self._identity, self._identity.ranks_on_node, str(self._root)
        variables = {
            "VERL_PROFILE_SAVE_PATH": root,
            "VERL_PROFILE_TOOL": tool,
            "VERL_PROFILE_RANK": str(ranks.start),
            "VERL_PROFILE_PID": str(os.getpid()),
            "VERL_PROFILE_ROLE": identity.role,
            "ROLLOUTCTL_PROFILE_ROOT": root,
            "ROLLOUTCTL_PROFILE_TOOL": tool,
            "ROLLOUTCTL_PROFILE_ROLE": identity.role,
            "ROLLOUTCTL_PROFILE_AGENT": identity.agent,
            "ROLLOUTCTL_PROFILE_RANKS": ",".join(map(str, ranks)),
            "ROLLOUTCTL_PROFILE_STEPS": ",".join(map(str, steps)),
        }
        return variables | ({"VERL_PROFILE_RAY_NSIGHT_DIR": NSIGHT_DIR} if tool == "nsys" else {})


# --- before a session -------------------------------------------------------------------------------------------------


def require_writable(directory: Path, who: str) -> None:
    """Make a directory for traces, and check that this process can write to it. Raises RefusedError if it can't.

    Args:
        directory: Root of the traces.
        who: Who writes there, as the error should say.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # without a name, since several agents may check at once
            pass
    except OSError as error:
        raise RefusedError(
            f"{directory} can't be written: {error.strerror}. {who} needs it for traces: give another directory, on "
            "every node the same."
        ) from error


def make_fresh(directory: Path) -> None:
    """Make the directory of a session. Raises RefusedError if it can't be made, or holds files already."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if next(directory.iterdir(), None) is None:
            return
    except OSError as error:
        raise RefusedError(f"the profile was not started: {directory}: {error.strerror}.") from error
    raise RefusedError(
        f"the profile was not started: {directory} holds files already, and nothing is ever overwritten. Move them "
        "away, or use another traces root."
    )


# --- after a session --------------------------------------------------------------------------------------------------


def collect_traces(root: Path, directory: str, plan: ProfilePlan, identity: Identity) -> Returned:
    """Collect what a stopped session left on this node's disk, in a directory below the root of all traces.

    On a disk that the nodes share, each agent takes what its own ranks wrote. Traces of ranks that were not selected
    stay where they are, and are not listed.

    Args:
        root: Root of this node's session directories.
        directory: The session's, below the root.
        plan: What was recorded.
        identity: The place of this agent.

    Returns:
        The traces of the selected ranks, and the selected ranks without a trace.

    Raises:
        EngineError: A file can't be read, or is cut off.
    """
    folder, selected = root / directory, selected_ranks(plan, identity)
    try:
        own = _own_files(folder, identity)
        for file, rank in own:
            if _is_selected(rank, selected):
                require_complete(file)
        if plan.layout == "verl":
            own = [(move_trace(file, folder.parent), rank) for file, rank in own]
            _remove_if_empty(folder, root)
        traces = tuple(describe_trace(file, root, rank) for file, rank in own if _is_selected(rank, selected))
    except OSError as error:
        raise _unreadable(folder, error) from error
    found = {trace.rank for trace in traces if not trace.path.endswith(".txt")}
    return Returned(traces=traces, ranks_without_trace=tuple(sorted(selected - found)))


def relocate_traces(
    root: Path, directories: tuple[str, ...], plan: ProfilePlan, identity: Identity
) -> tuple[Trace, ...]:
    """Move this node's traces of the selected ranks up to the root, under names that say which rank they belong to.

    The names are those of verl 0.9.1 (utils/profiler/config.py). Of engines: `rollout-replica<R>_<name>`, with
    `-globalrank<G>` after the replica if it has several ranks. Of training ranks: `<role>-rank<G>_step_<N>_<name>`,
    since their names are the same in each session. Nothing in the root is overwritten. Raises EngineError; those before
    it have been moved.
    """
    selected = selected_ranks(plan, identity)
    traces: list[Trace] = []
    folders = [root / directory for directory in directories]
    if plan.layout == "verl" and identity.role == ROLLOUT:
        folders = [folder.parent for folder in folders]
    for folder in dict.fromkeys(folders):
        if folder.resolve() == root:
            continue
        step = "" if identity.role == ROLLOUT else f"{folder.relative_to(root).parts[0].removeprefix('global_')}_"
        try:
            for file, rank in _own_files(folder, identity):
                if _is_selected(rank, selected):
                    moved = move_trace(file, root, f"{_owner(rank, identity)}_{step}{file.name}")
                    traces.append(describe_trace(moved, root, rank))
        except OSError as error:
            raise _unreadable(folder, error) from error
        _remove_if_empty(folder, root)
    return tuple(traces)


def describe_trace(file: Path, root: Path, rank: int | None = None) -> Trace:
    """Return path below `root`, size, digest and global rank of one file. Raises OSError."""
    with open(file, "rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return Trace(str(file.relative_to(root)), file.stat().st_size, sha256, rank)


def move_trace(file: Path, directory: Path, name: str = "") -> Path:
    """Move a file to a directory, which is made; copy it if that is on another disk. Nothing is ever overwritten.

    Raises EngineError.

    Returns:
        Its new path: `name`, or its old name, in the directory.
    """
    target = directory / (name or file.name)
    if target.exists():
        raise EngineError(f"the trace {file} stays where it is: {target} exists already.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.move(file, target)
    except OSError as error:
        if file.exists():  # a part of it, on another disk that is full
            target.unlink(missing_ok=True)
        raise EngineError(f"the trace {file} was not moved to {directory}: {error.strerror}.") from error
    return target


def _remove_if_empty(directory: Path, root: Path) -> None:
    """Remove a directory and those above it, up to the root, as far as they are empty."""
    with suppress(OSError):  # another node has not taken its files yet
        while directory != root:
            directory.rmdir()
            directory = directory.parent


def _owner(rank: int | None, identity: Identity) -> str:
    if identity.role != ROLLOUT:
        return f"{identity.role}-rank{rank}"
    numbered = rank is not None and len(identity.global_ranks) > 1
    return f"rollout-replica{identity.replica}" + (f"-globalrank{rank}" if numbered else "")


def _unreadable(folder: Path, error: OSError) -> EngineError:
    return EngineError(f"the traces in {folder} can't be read: {error.strerror}: {error.filename}.")


# --- whose a trace is -------------------------------------------------------------------------------------------------


def _own_files(folder: Path, identity: Identity) -> list[tuple[Path, int | None]]:
    """Return the traces that this node's ranks wrote, by name, each with its global rank; None for a front end's.

    Files may vanish meanwhile: on a disk that the nodes share, each moves its own at the same time. Raises OSError.
    """
    if identity.role != ROLLOUT:
        return [(file, identity.replica) for file in _trace_files(folder)]  # the directory is this rank's alone
    first = identity.global_ranks.start
    own: list[tuple[Path, int | None]] = []
    for file in _trace_files(folder):
        with suppress(FileNotFoundError):
            local = _local_rank(file)
            # A front end runs beside the first rank of its replica.
            if first + (local or 0) in identity.ranks_on_node:
                own.append((file, None if local is None else first + local))
    return own


def _is_selected(rank: int | None, selected: frozenset[int]) -> bool:
    """Return whether a trace is listed. That of a front end is, if any rank of its node is selected."""
    return bool(selected) if rank is None else rank in selected


def _trace_files(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    files = (Path(parent, name) for parent, _, names in os.walk(folder, onerror=refuse) for name in names)
    return sorted(file for file in files if file.name.endswith(SUFFIXES) and file.is_file())


def _local_rank(file: Path) -> int | None:
    """Return the rank within the replica; None for a front end."""
    if _FRONT_END in file.name:
        return None
    if ".trace.json" in file.name:
        found = _RANK.search(_head(file))
        return int(found[1]) if found is not None else 0
    named = _RANK_IN_NAME.search(file.name)
    return int(named[1]) if named is not None else 0


def _head(file: Path) -> bytes:
    with open(file, "rb") as stream:
        raw = stream.read(HEAD_BYTES)
    if file.suffix != ".gz":
        return raw
    try:
        return zlib.decompressobj(wbits=31).decompress(raw, HEAD_BYTES)
    except zlib.error:
        return b""


def require_complete(file: Path) -> None:
    """Raise EngineError for a trace that lacks the end of its JSON, or of its compressed data.

    On a full disk torch 2.13 writes a compressed file that is complete, with nothing in it.
    """
    if ".trace.json" not in file.name:
        return
    last = b""
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
            while chunk := stream.read(1 << 20):
                last = chunk.rstrip()[-1:] or last
    except (EOFError, zlib.error, gzip.BadGzipFile, FileNotFoundError):  # torch may have removed it
        last = b""
    if last != b"}":
        raise EngineError(
            f"the trace {file} is cut off or damaged: its writer has not finished, or could not. Is its disk full, or "
            "the one that holds the temporary files?"
        )
