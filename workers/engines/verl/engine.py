"""verl's rollout servers (`SGLangHttpServer`, `vLLMHttpServer`), called through their Ray actors' methods.

Written against verl 0.9.1, using only the names of its methods and attributes. What a server has is inspected, never
inferred from a version: `dir(handle)` lists the methods, and one inspection of the actor (`__ray_call__`) reads how it
was configured. The methods are thin, and report success for much that they don't do. So what they can't do is refused
here, before the engine is touched. From reading them:

- `sleep` and `release_kv_cache` do nothing with `free_cache_engine` off, and release different regions in each rollout
  mode; vLLM's drop the weights at sleep level 2, and no method restores them. Memory that can't be restored unchanged
  is never released, and an engine for which that holds for all regions has no operation `sleep`.
- `start_profile` takes tool, directory, window and contents from the server's own configuration, and does nothing if
  that leaves the replica out. A plan that would not be recorded as asked is refused, with the reason; a window, unless
  it is the server's own and the engine counts it from the start of the session, as vLLM does. Node rank 0 moves
  the traces (by hard links, if the disk allows it) from the server's directory to the session's. That includes the
  other nodes' traces only if the disk is shared.
- `clear_kv_cache` discards the engine's answer, and an engine refuses while requests run: it is called when none does.
- `abort_all_requests` is a pause of mode `abort`; there is no other mode. There is no operation `abort` either: an
  agent that died between it and the `resume_generation` that must follow would leave the engine paused.
- No method loads weights. verl's checkpoint manager does (`Pushed`), and labels them last, in `global_steps`.
  Meanwhile it may pause and resume these servers by itself. That is not reported to the machine, which would undo it,
  unless the agent only observes.
"""

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from anyio import CancelScope, to_thread

from schemas import events
from schemas.desired import ALL_TAGS
from schemas.errors import ConfigError, EngineError, ExtraMissing, RefusedError, UnansweredError, UnsupportedError
from schemas.identity import Identity, Operation, RolloutMode, Tag
from schemas.safetensors.paths import resolve_below
from workers.engines.client import begun, version_of
from workers.engines.observed import require_configured
from workers.engines.sglang.profile import trace_contents
from workers.engines.verl.snapshot import (
    CACHE,
    WEIGHTS,
    ServerProfiler,
    ServerSnapshot,
    inspector,
    profile_limits,
    restorable,
)
from workers.limits import require_recordable
from workers.traces.node import collect_traces, make_fresh, require_writable

if TYPE_CHECKING:
    from ray.actor import ActorHandle

INSPECT_TIMEOUT_S: Final = 5.0
"""Seconds that an inspection of an actor may take. One whose event loop is blocked counts as launching."""
NAME_MAX: Final = 200
POLL_S: Final = 0.1
"""Seconds between two inspections while the engine's requests are awaited."""

METHODS: Final[Mapping[Operation, frozenset[str]]] = {
    Operation.PAUSE: frozenset({"abort_all_requests", "resume_generation"}),
    Operation.RESUME: frozenset({"abort_all_requests", "resume_generation"}),
    Operation.FLUSH: frozenset({"clear_kv_cache"}),
    Operation.PROFILE: frozenset({"start_profile", "stop_profile"}),
    Operation.LOAD: frozenset({"set_global_steps"}),  # of weights that verl pushes, which get their label by it
}
"""Methods that a server needs for an operation. For sleep and wake see `_restorable`."""

_REMEDIES: Final = events.Remedies(idempotent=frozenset({Operation.PAUSE, Operation.RESUME}))
_MEMORY_METHODS: Final[Mapping[frozenset[Tag], tuple[str, str]]] = {
    ALL_TAGS: ("sleep", "wake_up"),
    CACHE: ("release_kv_cache", "resume_kv_cache"),
}


class VerlEngine:
    """One server actor, seen from one node of its replica.

    On node ranks above 0 the server has no front end, and is never looked up or called.

    Args:
        server: The handle of this node's actor, or the name of one that is created later, or more than once.
        identity: This node's place.
        traces: Root of the session directories, on a disk of the server's node.
    """

    def __init__(self, server: "ActorHandle | str", identity: Identity, *, traces: Path) -> None:
        self._server, self._identity, self._traces = server, identity, traces.resolve()
        self._handle: Any = None
        self._kind = "verl server"

    async def open(self) -> None:
        """Check that this process can reach actors, and that the server is what was configured, if it is up.

        Raises:
            EngineError: No actor can be reached.
            ConfigError: The server has other numbers than this node was given.
        """
        if self._identity.node_rank > 0:
            return
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ExtraMissing("a server on Ray needs ray, and it is missing", "ray") from error
        if not ray.is_initialized():
            raise EngineError(
                "a server on Ray can't be reached: this process is in no Ray cluster. Call ray.init(address=...) "
                "before the agent is opened, or have workers.ray_placement start the agent."
            )
        with suppress(EngineError):
            await self.inspect()

    async def observe(self) -> events.Observation:
        """Inspect the actor. One that launches, is dead, or is too busy to answer is unknown."""
        if self._identity.node_rank > 0:
            return events.Observation(engine=self._kind, tokenizer="absent")
        try:
            snapshot = await self.inspect()
        except ConfigError as error:
            return events.Observation(engine=self._kind, tokenizer="unknown", trouble=str(error))
        except EngineError:
            return events.Observation(engine=self._kind, tokenizer="unknown", operations=self._operations(None))
        observes = self._identity.mode is RolloutMode.OBSERVED
        return events.Observation(
            engine=self._kind,
            instance=snapshot.worker,
            tokenizer="unknown" if snapshot.front_end is None else "present" if snapshot.serves else "absent",
            operations=self._operations(snapshot),
            generating=None if not observes or snapshot.paused is None else not snapshot.paused,
            version=version_of(snapshot.label) if observes else None,
            remedies=_REMEDIES,
            label=snapshot.label,
        )

    async def perform(self, call: events.EngineCall, timeout_s: float) -> events.Returned:
        if self._identity.node_rank > 0:
            raise RefusedError("this node's server has no front end to call: node rank 0 of its replica has it.")
        with CancelScope(shield=True):
            try:
                snapshot = await self.inspect()
            except (EngineError, ConfigError) as error:
                raise RefusedError(f"it was not called: {error}") from error
            returned = await self._perform(call, snapshot, timeout_s)
        return returned

    async def close(self) -> None:
        self._handle = None

    async def _perform(self, call: events.EngineCall, snapshot: ServerSnapshot, timeout_s: float) -> events.Returned:
        match call:
            case events.Pause():
                await self._pause(call)
            case events.Resume():
                await self._resume()
            case events.Sleep():
                await self._sleep(call, snapshot)
            case events.Wake():
                await self._wake(call, snapshot)
            case events.Flush():
                await self._flush(snapshot, timeout_s)
            case events.CheckProfile():
                require_recordable(self._kind, profile_limits(call.plan, snapshot))
                await to_thread.run_sync(require_writable, self._traces, self._kind)
            case events.StartProfile():
                await self._start_profile(call, snapshot)
            case events.StopProfile():
                return await self._stop_profile(call, snapshot)
            case events.CheckSource() | events.Load():
                raise UnsupportedError(
                    f"{self._kind} has no method that loads weights: verl's checkpoint manager pushes them. Sync with "
                    "Pushed."
                )
            case _:
                raise UnsupportedError(
                    f"{self._kind} has no method for {call.__struct_config__.tag}. It was not called."
                )
        return events.Returned()

    # --- requests and memory ------------------------------------------------------------------------------------------

    async def _pause(self, call: events.Pause) -> None:
        if call.mode != "abort":
            raise UnsupportedError(
                f"{self._kind} can't pause with in_flight={call.mode!r}: its only method for that, "
                "abort_all_requests, aborts what is in flight. It was not called: pause with 'abort'."
            )
        answer = await self._call("abort_all_requests")
        if isinstance(answer, Mapping) and answer.get("error"):
            raise EngineError(f"{self._kind}.abort_all_requests failed: {answer['error']}")
        with begun():
            paused = (await self.inspect()).paused
        if paused is False:
            raise EngineError(f"{self._kind} accepted abort_all_requests, but is not paused.")

    async def _resume(self) -> None:
        await self._call("resume_generation")
        with begun():
            paused = (await self.inspect()).paused
        if paused:
            raise EngineError(f"{self._kind} accepted resume_generation, but is still paused.")

    async def _sleep(self, call: events.Sleep, snapshot: ServerSnapshot) -> None:
        self._require_restorable(call.tags, snapshot, "release")
        if snapshot.paused is False or snapshot.running:
            raise RefusedError(
                f"{self._kind} can't release memory while it generates: it was resumed by another program, or "
                f"{snapshot.running} requests run. That would kill the engine, so it was not called. Pause it first."
            )
        await self._call(_MEMORY_METHODS[call.tags][0])

    async def _wake(self, call: events.Wake, snapshot: ServerSnapshot) -> None:
        takes_tags = snapshot.front_end == "engine" and snapshot.mode == "hybrid" and "tags" in snapshot.wake_up
        if call.tags == WEIGHTS and takes_tags:
            await self._call("wake_up", tags=["weights"])
            return
        self._require_restorable(call.tags, snapshot, "restore")
        await self._call(_MEMORY_METHODS[call.tags][1])

    def _require_restorable(self, tags: frozenset[Tag], snapshot: ServerSnapshot, verb: str) -> None:
        possible = self._restorable(snapshot)
        if tags in possible:
            return
        listed = " or ".join(" and ".join(sorted(regions)) for regions in possible) or "nothing"
        level = f", sleep level {snapshot.level}" if snapshot.level is not None else ""
        raise UnsupportedError(
            f"{self._kind} can't {verb} {' and '.join(sorted(tags))}. As configured (mode {snapshot.mode}, "
            f"free_cache_engine {snapshot.frees}{level}), its methods release and restore unchanged: {listed}. It was "
            "not called."
        )

    async def _flush(self, snapshot: ServerSnapshot, timeout_s: float) -> None:
        until = anyio.current_time() + timeout_s
        while snapshot.running and anyio.current_time() < until:
            await anyio.sleep(POLL_S)
            snapshot = await self.inspect()
        if snapshot.running:
            raise RefusedError(
                f"{self._kind} would silently refuse to drop its cache while {snapshot.running} requests run, and they "
                f"ran for all of {timeout_s:.1f} s. The cache is unchanged: pause first."
            )
        await self._call("clear_kv_cache")

    # --- profiles -----------------------------------------------------------------------------------------------------

    async def _start_profile(self, call: events.StartProfile, snapshot: ServerSnapshot) -> None:
        plan = call.session.plan
        require_recordable(self._kind, profile_limits(plan, snapshot))
        directory = resolve_below(self._traces, call.directory)
        await to_thread.run_sync(make_fresh, directory)
        arguments: dict[str, object] = {}
        if snapshot.profiler is None and snapshot.front_end == "tokenizer_manager":  # it passes them on to SGLang
            arguments = {"output_dir": str(directory), **trace_contents(plan), "merge_profiles": plan.merge}
        await self._call("start_profile", **arguments)

    async def _stop_profile(self, call: events.StopProfile, snapshot: ServerSnapshot) -> events.Returned:
        await self._call("stop_profile")
        if snapshot.profiler is not None:
            await to_thread.run_sync(_bring_traces, snapshot.profiler, resolve_below(self._traces, call.directory))
        plan = call.session.plan
        return await to_thread.run_sync(collect_traces, self._traces, call.directory, plan, self._identity)

    # --- the actor ----------------------------------------------------------------------------------------------------

    def _operations(self, snapshot: ServerSnapshot | None) -> frozenset[Operation]:
        if self._handle is None:
            return frozenset()
        offered = frozenset(dir(self._handle))
        operations = {operation for operation, methods in METHODS.items() if methods <= offered}
        memory = {Operation.SLEEP, Operation.WAKE} if self._restorable(snapshot) else set()
        return frozenset(operations | memory)

    def _restorable(self, snapshot: ServerSnapshot | None) -> tuple[frozenset[Tag], ...]:
        offered = frozenset(dir(self._handle))
        return tuple(tags for tags in restorable(snapshot) if offered.issuperset(_MEMORY_METHODS[tags]))

    async def inspect(self) -> ServerSnapshot:
        """Inspect the actor.

        Raises:
            EngineError: It is not there, or does not answer.
            ConfigError: It has other numbers than this node was given.
        """
        answer = await to_thread.run_sync(self._ask, "__ray_call__", (inspector(),), {}, INSPECT_TIMEOUT_S)
        try:
            snapshot = msgspec.convert(answer, ServerSnapshot)
        except msgspec.ValidationError as error:
            raise EngineError(f"{self._kind} is not like verl's servers: {error}.") from error
        self._kind = f"verl {snapshot.kind}"[:NAME_MAX]
        require_configured(self._kind, self._identity, snapshot.world, snapshot.nnodes, snapshot.node_rank)
        return snapshot

    async def _call(self, method: str, **arguments: object) -> object:
        """Call a method. Raises EngineError. A call that has begun is never abandoned, however long it takes."""
        if method not in dir(self._handle):
            raise UnsupportedError(f"{self._kind} has no method {method}.")
        return await to_thread.run_sync(self._ask, method, (), arguments, None)

    def _ask(
        self, method: str, values: tuple[object, ...], named: dict[str, object], timeout_s: float | None
    ) -> object:
        """Call the actor in a worker thread, so that any event loop can wait. A restart of it repeats no call."""
        from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

        try:
            called = getattr(self._attached(), method).options(max_task_retries=0).remote(*values, **named)
            answer: Future[object] = called.future()
            return answer.result(timeout_s)
        except RayTaskError as error:
            cause = error.cause
            raise EngineError(f"{self._kind}.{method} raised {type(cause).__name__}: {cause}") from error
        except TimeoutError as error:
            raise UnansweredError(f"{self._kind} did not answer within {timeout_s} s: its loop is blocked.") from error
        except RayError as error:
            dead = isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
            if dead:
                self._handle = None  # there may be another under the same name by now
            seen = "is dead" if dead else "can't be reached"
            raise UnansweredError(
                f"{self._kind} {seen}, and whether {method} was carried out is not known: {_line(error)}"
            ) from error

    def _attached(self) -> Any:
        import ray

        if not ray.is_initialized():
            raise RefusedError(f"{self._kind} can't be reached: this process has left its Ray cluster.")
        if self._handle is None:
            try:
                self._handle = ray.get_actor(self._server) if isinstance(self._server, str) else self._server
            except Exception as error:  # Ray has no error class of its own for this
                raise RefusedError(f"the server's actor was not found: {_line(error)}") from error
        return self._handle


def _bring_traces(profiler: ServerProfiler, directory: Path) -> None:
    """Link what the server wrote since the session's directory was made, so that verl's own hooks still find it.

    The directory's modification time marks that moment, and is preserved for a repeated stop. Nothing is overwritten.
    """
    if not directory.is_dir():
        return  # the start was cut off before this was made
    since = directory.stat().st_mtime_ns
    files = list(Path(profiler.directory).glob("*"))
    if profiler.relocated is not None:
        files += Path(profiler.directory).parent.glob(f"{profiler.relocated}[-_]*")
    for file in sorted(files):
        target = directory / file.name
        if target.exists() or not file.is_file() or file.stat().st_mtime_ns < since:
            continue
        try:
            _link_or_copy(file, target)
            os.utime(directory, ns=(since, since))
        except OSError as error:
            raise EngineError(f"the trace {file} was not brought to {directory}: {error.strerror}.") from error


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(file, target)


def _line(error: Exception) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())[:500]
