"""verl's rollout servers (`SGLangHttpServer`, `vLLMHttpServer`), commanded through their Ray actors' methods.

Written against verl 0.9.1, and against nothing but the names of its methods and attributes. Which of them a server has
is looked at, its version never: `dir(handle)` names the methods, and one look into the actor (`__ray_call__`) reads how
it was configured. The methods themselves are thin, and say yes to much that they don't do. So what follows from reading
them is refused here, before the engine is touched:

- `sleep` and `release_kv_cache` do nothing with `free_cache_engine` off, and release other regions in each rollout
  mode; vLLM's drop the weights at sleep level 2, and no method brings them back. What can't be taken back as it was is
  never released, and an engine of which that holds for all regions has no operation `sleep`.
- `start_profile` takes tool, directory, window and contents from the server's own configuration, and does nothing when
  that leaves the replica out. A plan that asks for what would not be recorded is refused, and the reason told. Traces
  are brought (as links, if the disk allows it) from the server's directory to the session's: by node rank 0, so those
  of other nodes too if the disk is shared, and else not.
- `clear_kv_cache` drops the engine's answer, and an engine refuses while requests run: it is called when none does.
- `abort_all_requests` is a pause, of mode `abort` and no other. So there is no operation `abort`: between it and the
  `resume_generation` that would have to follow, an agent that dies leaves the engine paused.
- No method loads weights. verl's checkpoint manager does, and it pauses, resumes and labels these servers by itself
  meanwhile. So neither that nor the version is told to the machine, which would undo it: both stay what it commanded.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio
import msgspec
from anyio import CancelScope, to_thread
from msgspec import Struct

from schemas.commands import ProfilePlan
from schemas.desired import ALL_TAGS
from schemas.errors import EngineError, UnsupportedError
from schemas.events import (
    CheckProfile,
    EngineCall,
    Flush,
    Observation,
    Pause,
    Resume,
    Returned,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from schemas.identity import Identity, Operation, Tag
from schemas.safetensors.paths import resolve_below
from workers.traces.node import collect_traces, make_fresh, require_writable

if TYPE_CHECKING:
    from ray.actor import ActorHandle

LOOK_S: Final = 5.0
"""How long an actor may take to be looked into. One whose loop is held up is as good as launching."""
NAME_MAX: Final = 200
BUSY_S: Final = 0.1
"""Between two looks at an engine whose requests are waited for."""

CACHE: Final[frozenset[Tag]] = frozenset({"kv_cache"})
WEIGHTS: Final[frozenset[Tag]] = frozenset({"weights"})

METHODS: Final[Mapping[Operation, frozenset[str]]] = {
    Operation.PAUSE: frozenset({"abort_all_requests", "resume_generation"}),
    Operation.RESUME: frozenset({"abort_all_requests", "resume_generation"}),
    Operation.FLUSH: frozenset({"clear_kv_cache"}),
    Operation.PROFILE: frozenset({"start_profile", "stop_profile"}),
}
"""What a server must offer for an operation, but for sleep and wake: see `_releasable`."""

_RELEASE: Final[Mapping[frozenset[Tag], tuple[str, str]]] = {
    ALL_TAGS: ("sleep", "wake_up"),
    CACHE: ("release_kv_cache", "resume_kv_cache"),
}
_KEPT: Final[Mapping[tuple[str, str], tuple[frozenset[Tag], ...]]] = {
    ("tokenizer_manager", "hybrid"): (CACHE,),  # wake_up raises
    ("tokenizer_manager", "colocated"): (CACHE, ALL_TAGS),
    ("tokenizer_manager", "standalone"): (CACHE,),  # sleep releases no more than that
    ("engine", "hybrid"): (CACHE, ALL_TAGS),
    ("engine", "colocated"): (ALL_TAGS,),  # release_kv_cache does nothing
    ("engine", "standalone"): (CACHE,),  # sleep does nothing
}
"""By front end and rollout mode: the regions that verl's methods release, and take back as they were."""


class VerlProfiler(Struct, frozen=True, kw_only=True):
    """The profiler of one server, as verl configured it. start, end: its window, `profile_token_start` and `_end`."""

    enabled: bool
    selected: bool
    discrete: bool
    tool: str | None
    contents: tuple[str, ...]
    start: int | None
    end: int | None
    directory: str
    relocated: str | None


class ServerSnapshot(Struct, frozen=True, kw_only=True):
    """What one look into a server's actor reads; None for what it does not have.

    worker: Ray's id of the actor's process, which a restart changes.   front: the attribute that holds the engine's
    front end; None while the server launches.   serves: whether there is one in it.   running: requests in the engine.
    wake_up: the parameters of that method.   frees: `free_cache_engine`.   level: vLLM's sleep level.
    """

    worker: str
    kind: str
    front: Literal["tokenizer_manager", "engine"] | None
    serves: bool
    paused: bool | None
    running: int | None
    wake_up: tuple[str, ...]
    mode: str | None
    frees: bool | None
    level: int | None
    adapters: bool
    recorder: VerlProfiler | None


class VerlEngine:
    """One server actor, seen from one node of its replica.

    server: the handle of this node's actor; or its name, or what finds it, for one that is created later or again. A
    name is looked for in `namespace` (None: the process's own).   traces: root of the session directories, on a disk of
    the node that the server runs on.

    At a node rank above 0 the server has no front end, and is never called nor looked for.
    """

    def __init__(
        self,
        server: "ActorHandle | str | Callable[[], ActorHandle]",
        identity: Identity,
        *,
        traces: Path,
        namespace: str | None = None,
    ) -> None:
        self._identity, self._traces = identity, traces.resolve()
        self._find = _finder(server, namespace)
        self._handle: Any = None
        self._kind = "verl server"

    async def open(self) -> None:
        """See that this process can reach actors at all. Raises EngineError."""
        if self._identity.node_rank > 0:
            return
        try:
            import ray
        except ModuleNotFoundError as error:
            raise EngineError(
                "a server on Ray was to be commanded, and ray is not installed: pip install 'rolloutctl[ray]'"
            ) from error
        if not ray.is_initialized():
            raise EngineError(
                "a server on Ray was to be commanded, and this process is in no Ray cluster: call "
                "ray.init(address=...) before the agent is opened, or have workers.ray_placement start the agent."
            )

    async def observe(self) -> Observation:
        """Look into the actor. Launching, dead, or too busy to answer: unknown."""
        if self._identity.node_rank > 0:
            return Observation(engine=self._kind, tokenizer="absent")
        try:
            look = await self._look()
        except EngineError:
            return Observation(engine=self._kind, tokenizer="unknown", operations=self._operations(None))
        return Observation(
            engine=self._kind,
            instance=look.worker,
            tokenizer="unknown" if look.front is None else "present" if look.serves else "absent",
            operations=self._operations(look),
        )

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        """Make one call. Raises EngineError."""
        if self._identity.node_rank > 0:
            raise EngineError("the server of this node has no front end to call: its replica's node rank 0 has it.")
        with CancelScope(shield=True):
            returned = await self._perform(call, await self._look(), timeout_s)
        return returned

    async def close(self) -> None:
        """Let go of the actor; it goes on."""
        self._handle = None

    async def _perform(self, call: EngineCall, look: ServerSnapshot, timeout_s: float) -> Returned:
        match call:
            case Pause():
                await self._pause(call)
            case Resume():
                await self._resume()
            case Sleep():
                await self._sleep(call, look)
            case Wake():
                await self._wake(call, look)
            case Flush():
                await self._flush(look, timeout_s)
            case CheckProfile():
                require_recorded(call.plan, look.recorder)
                await to_thread.run_sync(require_writable, self._traces, self._kind)
            case StartProfile():
                await self._start_profile(call, look)
            case StopProfile():
                return await self._stop_profile(call, look)
            case _:
                asked = call.__struct_config__.tag
                raise EngineError(f"{self._kind} has no method for {asked}. It was not called.")
        return Returned()

    # --- requests and memory ------------------------------------------------------------------------------------------

    async def _pause(self, call: Pause) -> None:
        if call.mode != "abort":
            raise EngineError(
                f"{self._kind} was asked to pause with in_flight={call.mode!r}; its one method for that, "
                "abort_all_requests, aborts what is in flight. It was not called: pause with 'abort'."
            )
        answer = await self._call("abort_all_requests")
        if isinstance(answer, Mapping) and answer.get("error"):
            raise EngineError(f"{self._kind}.abort_all_requests failed: {answer['error']}")
        if (await self._look()).paused is False:
            raise EngineError(f"{self._kind} answered yes to abort_all_requests, but is not paused.")

    async def _resume(self) -> None:
        await self._call("resume_generation")
        if (await self._look()).paused:
            raise EngineError(f"{self._kind} answered yes to resume_generation, but is still paused.")

    async def _sleep(self, call: Sleep, look: ServerSnapshot) -> None:
        self._require_kept(call.tags, look, "release")
        if look.paused is False or look.running:
            raise EngineError(
                f"{self._kind} was asked to release memory, and generates: somebody has resumed it, or {look.running} "
                "requests run. The engine would die of it; it was not called. Pause it, then put it to sleep."
            )
        await self._call(_RELEASE[call.tags][0])

    async def _wake(self, call: Wake, look: ServerSnapshot) -> None:
        if call.tags == WEIGHTS and look.front == "engine" and look.mode == "hybrid" and "tags" in look.wake_up:
            await self._call("wake_up", tags=["weights"])
            return
        self._require_kept(call.tags, look, "take back")
        await self._call(_RELEASE[call.tags][1])

    def _require_kept(self, tags: frozenset[Tag], look: ServerSnapshot, what: str) -> None:
        kept = self._releasable(look)
        if tags in kept:
            return
        possible = " or ".join(" and ".join(sorted(one)) for one in kept) or "nothing"
        level = f", sleep level {look.level}" if look.level is not None else ""
        raise EngineError(
            f"{self._kind} was asked to {what} {' and '.join(sorted(tags))}. As it is configured (mode {look.mode}, "
            f"free_cache_engine {look.frees}{level}) its methods release, and take back as it was: {possible}. It was "
            "not called."
        )

    async def _flush(self, look: ServerSnapshot, timeout_s: float) -> None:
        until = anyio.current_time() + timeout_s
        while look.running and anyio.current_time() < until:
            await anyio.sleep(BUSY_S)
            look = await self._look()
        if look.running:
            raise EngineError(
                f"{self._kind} was asked to drop its cache while {look.running} requests run, which it refuses without "
                f"saying so; they ran for all of {timeout_s:.1f} s. The cache is as it was: pause first."
            )
        await self._call("clear_kv_cache")

    # --- profiles -----------------------------------------------------------------------------------------------------

    async def _start_profile(self, call: StartProfile, look: ServerSnapshot) -> None:
        plan = call.session.plan
        require_recorded(plan, look.recorder)
        directory = resolve_below(self._traces, call.directory)
        await to_thread.run_sync(make_fresh, directory)
        given = look.recorder is None and look.front == "tokenizer_manager"
        await self._call("start_profile", **(arguments(plan, directory) if given else {}))

    async def _stop_profile(self, call: StopProfile, look: ServerSnapshot) -> Returned:
        await self._call("stop_profile")
        if look.recorder is not None:
            await to_thread.run_sync(_bring, look.recorder, resolve_below(self._traces, call.directory))
        return await to_thread.run_sync(collect_traces, self._traces, call.directory, call.session.plan, self._identity)

    # --- the actor ----------------------------------------------------------------------------------------------------

    def _operations(self, look: ServerSnapshot | None) -> frozenset[Operation]:
        if self._handle is None:
            return frozenset()
        offered = frozenset(dir(self._handle))
        operations = {one for one, methods in METHODS.items() if methods <= offered}
        if self._releasable(look):
            operations |= {Operation.SLEEP, Operation.WAKE}
        return frozenset(operations)

    def _releasable(self, look: ServerSnapshot | None) -> tuple[frozenset[Tag], ...]:
        """The sets of regions that can be released, and taken back as they were."""
        kept: tuple[frozenset[Tag], ...] = (CACHE, ALL_TAGS)
        if look is not None and look.frees is False:
            kept = ()
        elif look is not None and look.front is not None and look.mode is not None:
            kept = _KEPT.get((look.front, look.mode), ())
            if look.mode != "colocated" and look.level == 2:
                kept = ()
            if look.adapters:
                kept = tuple(one for one in kept if one == CACHE)
        offered = frozenset(dir(self._handle))
        return tuple(one for one in kept if offered.issuperset(_RELEASE[one]))

    async def _look(self) -> ServerSnapshot:
        """Raises EngineError when the actor is not there, or does not answer."""
        raw = await to_thread.run_sync(self._ask, "__ray_call__", (_looking(),), {}, LOOK_S)
        try:
            look = msgspec.convert(raw, ServerSnapshot)
        except msgspec.ValidationError as error:
            raise EngineError(f"{self._kind} is not like verl's servers: {error}.") from error
        self._kind = f"verl {look.kind}"[:NAME_MAX]
        return look

    async def _call(self, method: str, **arguments: object) -> object:
        """Raises EngineError. However long it takes: a call that has begun is not given up."""
        if method not in dir(self._handle):
            raise EngineError(f"{self._kind} has no method {method}.")
        return await to_thread.run_sync(self._ask, method, (), arguments, None)

    def _ask(
        self, method: str, values: tuple[object, ...], named: dict[str, object], timeout_s: float | None
    ) -> object:
        """In a worker thread, so that it is the same under every loop. What a restart cut off is never sent again."""
        from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

        try:
            asked = getattr(self._attached(), method).options(max_task_retries=0).remote(*values, **named)
            answer: Future[object] = asked.future()
            return answer.result(timeout_s)
        except RayTaskError as error:
            cause = error.cause
            raise EngineError(f"{self._kind}.{method} raised {type(cause).__name__}: {cause}") from error
        except TimeoutError as error:
            raise EngineError(
                f"{self._kind} did not answer within {timeout_s} s: its event loop is held up."
            ) from error
        except ActorUnavailableError as error:
            raise EngineError(
                f"{self._kind} can't be reached, and whether {method} was carried out is not known: {_line(error)}"
            ) from error
        except RayActorError as error:
            self._handle = None  # there may be another under the same name by now
            raise EngineError(f"{self._kind} is dead, {method} was not answered: {_line(error)}") from error
        except RayError as error:
            raise EngineError(f"{self._kind}.{method} was not answered: {_line(error)}") from error

    def _attached(self) -> Any:
        import ray

        if not ray.is_initialized():
            raise EngineError(f"{self._kind} can't be reached: this process is in no Ray cluster any more.")
        if self._handle is None:
            try:
                self._handle = self._find()
            except Exception as error:  # other people's code, and Ray has no error of its own for it
                raise EngineError(f"the server's actor was not found: {_line(error)}") from error
        return self._handle


def _finder(server: "ActorHandle | str | Callable[[], ActorHandle]", namespace: str | None) -> "Callable[[], Any]":
    def named() -> Any:
        import ray

        return ray.get_actor(server, namespace)

    if isinstance(server, str):
        return named
    return server if callable(server) else lambda: server


def require_recorded(plan: ProfilePlan, recorder: VerlProfiler | None) -> None:
    """Raise UnsupportedError when a server would not record what the plan asks for; it may record more.

    recorder: None for a server that leaves all to the caller.
    """
    if why := _unrecorded(plan, recorder):
        raise UnsupportedError(f"{why}.")


def _unrecorded(plan: ProfilePlan, recorder: VerlProfiler | None) -> str | None:
    if plan.window is not None or plan.by_stage:
        return (
            "the plan has a window or asks for stages, and verl's servers take no window from a call. Profile from "
            "start to stop"
        )
    if not plan.activities:
        return "the plan names no activity: name at least one"
    if recorder is None:
        return None
    lacks = {
        "stack": (plan.with_stack or plan.with_modules) and not {"stack", "module"} & set(recorder.contents),
        "shapes": plan.record_shapes and "shapes" not in recorder.contents,
        "memory": "memory" in plan.activities and "memory" not in recorder.contents,
    }
    what: str | None = None
    if not recorder.enabled:
        what = "enable is off"
    elif not recorder.selected:
        what = "ranks and all_ranks leave this replica out"
    elif not recorder.discrete:
        what = "discrete is off, and verl's servers profile in discrete mode only"
    elif recorder.tool != plan.tool:
        what = f"its tool is {recorder.tool}, the plan's is {plan.tool}"
    elif recorder.start is not None or recorder.end is not None:
        what = "profile_token_start and _end are set, which would end the session before it is stopped"
    elif plan.merge:
        what = "it has nothing that merges traces"
    elif missing := [name for name, wanted in lacks.items() if wanted]:
        what = f"its contents lack {', '.join(missing)}"
    return f"the server records what its own rollout.profiler says, and there {what}" if what else None


def arguments(plan: ProfilePlan, directory: Path) -> dict[str, object]:
    """The plan in SGLang's words, for a server that hands them on."""
    names = {"cpu": "CPU", "cuda": "GPU", "memory": "MEM", "npu": "GPU"}
    return {
        "output_dir": str(directory),
        "activities": [names[one] for one in sorted(plan.activities)],
        "with_stack": plan.with_stack or plan.with_modules,  # stacks name the modules
        "record_shapes": plan.record_shapes,
        "merge_profiles": plan.merge,
    }


def _bring(recorder: VerlProfiler, directory: Path) -> None:
    """Bring what the server wrote since the session's directory was made. verl's own hooks find it where it was.

    The directory's own time tells that moment to whoever is asked again, so it is kept. Nothing is written over.
    """
    if not directory.is_dir():
        return  # the start was cut off before it came to that
    since = directory.stat().st_mtime_ns
    files = list(Path(recorder.directory).glob("*"))
    if recorder.relocated is not None:
        files += Path(recorder.directory).parent.glob(f"{recorder.relocated}[-_]*")
    for file in sorted(files):
        place = directory / file.name
        if place.exists() or not file.is_file() or file.stat().st_mtime_ns < since:
            continue
        try:
            _link(file, place)
            os.utime(directory, ns=(since, since))
        except OSError as error:
            raise EngineError(f"the trace {file} was not brought to {directory}: {error.strerror}.") from error


def _link(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # another disk, or one without links
        shutil.copy2(file, place)


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:500]


def _looking() -> Callable[[Any], dict[str, object]]:
    """The function that looks, made here so that Ray ships it by value: the actor needs nothing of ours installed."""

    def recorder(server: Any) -> dict[str, object] | None:
        controller = getattr(server, "profiler_controller", None)
        config = getattr(controller, "config", None)
        if controller is None or config is None:
            return None
        tool = getattr(controller, "tool_config", None)
        rank = server.replica_rank
        return {
            "enabled": bool(controller.check_enable()),
            "selected": bool(controller.check_this_rank()),
            "discrete": bool(controller.is_discrete_mode()),
            "tool": getattr(config, "tool", None),
            "contents": [str(one) for one in getattr(tool, "contents", None) or ()],
            "start": getattr(tool, "profile_token_start", None),
            "end": getattr(tool, "profile_token_end", None),
            "directory": f"{getattr(config, 'save_path', None)}/agent_loop_rollout_replica_{rank}",
            "relocated": f"rollout-replica{rank}" if getattr(config, "relocate_results", False) else None,
        }

    def look(server: Any) -> dict[str, object]:
        import inspect

        import ray

        front = next((one for one in ("tokenizer_manager", "engine") if hasattr(server, one)), None)
        engine = getattr(server, front) if front is not None else None
        paused = getattr(engine, "is_pause", getattr(server, "_submission_paused", None))
        requests = getattr(engine, "rid_to_state", None)
        if requests is None:
            requests = getattr(getattr(engine, "output_processor", None), "request_states", None)
        wake_up = getattr(server, "wake_up", None)
        level = getattr(server, "_resolve_sleep_level", None)
        mode = getattr(server, "rollout_mode", None)
        return {
            "worker": ray.get_runtime_context().get_worker_id(),
            "kind": type(server).__name__,
            "front": front,
            "serves": engine is not None,
            "paused": paused if isinstance(paused, bool) else None,
            "running": len(requests) if requests is not None else None,
            "wake_up": list(inspect.signature(wake_up).parameters) if wake_up is not None else [],
            "mode": getattr(mode, "value", None),
            "frees": getattr(getattr(server, "config", None), "free_cache_engine", None),
            "level": level() if level is not None else None,
            "adapters": bool(getattr(server, "lora_as_adapter", False)),
            "recorder": recorder(server),
        }

    return look
