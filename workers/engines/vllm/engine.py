"""vLLM, over HTTP or in process. One adapter; `AsyncLLM`'s names for methods, whichever way they are reached.

What was read and run: vLLM 0.13 to 0.33. Its server needs VLLM_SERVER_DEV_MODE=1 (control routes) and, to be profiled,
`--profiler-config`. Its control routes ask for no key: keep the server on loopback.

What it does in its own way
- The traces' directory is fixed at launch. They are moved to the session's after the stop.
- What a trace holds is fixed at launch too, up to 0.31 its window as well. A plan that asks for more is refused. Stacks
  name the modules, so they answer for both. An NPU's levels are those of vllm-ascend (never run here).
- `delay_iterations` of n, n > 0, passes over n - 1 forwards, and 0 over none. A step that computes nothing, to let go
  of the last request that ran, is counted too.
- A profiler of its front end is started on one thread and stopped on another: with torch 2.13 it records nothing, and
  more often than not the server dies at the stop (0.32, run). So one that has it, as by default, is not profiled.
- A second start is a 409 from 0.32 on, and silence before: there a session of somebody else's can't be seen, and ends
  with ours. A second stop is silence. The machine sends neither.
- Waking the last region of memory un-pauses the scheduler, so it is paused again at once.
- A reload that raises in a worker ends the server, so a source is checked before, and again just before the load.
- A failed `reset_prefix_cache` is HTTP 200 with `success: false`.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, assert_never

import anyio
from anyio import to_thread
from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import Broadcast, ProfilePlan, Window
from schemas.errors import CheckpointError, EngineError, UnsupportedError
from schemas.events import (
    Abort,
    CheckProfile,
    CheckSource,
    EngineCall,
    Flush,
    Load,
    Observation,
    Pause,
    Resume,
    Returned,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from schemas.identity import Identity, Operation
from workers.engines.checkpoint import Weights, buckets, in_torchs_words, ranks
from workers.engines.client import RETRY_S, EngineClient, Methods, number, part, patience_s, text, version_of
from workers.engines.http import HttpClient, Route
from workers.traces.node import collect_traces, make_fresh, move_trace, require_writable

ROUTES: Final[Mapping[str, Route]] = {
    "start_profile": Route("POST", "/start_profile"),
    "stop_profile": Route("POST", "/stop_profile"),
    "pause_generation": Route("POST", "/pause", query=True, repeatable=True),
    "resume_generation": Route("POST", "/resume", repeatable=True),
    "is_paused": Route("GET", "/is_paused", answer="is_paused"),
    "sleep": Route("POST", "/sleep", query=True, undeclared=frozenset({"level", "mode"})),
    "wake_up": Route("POST", "/wake_up", query=True),
    "is_sleeping": Route("GET", "/is_sleeping", answer="is_sleeping"),
    "release_kv_cache_memory": Route("POST", "/release_kv_cache_memory"),
    "reset_prefix_cache": Route("POST", "/reset_prefix_cache", query=True, answer="success", repeatable=True),
    "reset_encoder_cache": Route("POST", "/reset_encoder_cache", repeatable=True),
    "abort": Route("POST", "/abort_requests", repeatable=True),
    "collective_rpc": Route("POST", "/collective_rpc", answer="results"),
    "init_weight_transfer_engine": Route("POST", "/init_weight_transfer_engine"),
    "start_weight_update": Route("POST", "/start_weight_update"),
    "update_weights": Route("POST", "/update_weights"),
    "finish_weight_update": Route("POST", "/finish_weight_update"),
    "update_weight_version": Route("POST", "/update_weight_version", repeatable=True),
    "get_weight_version": Route("GET", "/weight_info", answer="weight_version"),
    "compute_weight_checksums": Route("POST", "/weight_checker", answer="checksums"),
}
"""The server's routes, by the names of `AsyncLLM`'s methods (vllm/entrypoints/**/api_router.py, 0.13 to 0.33)."""

_KEYS: Final = {
    "stack": "torch_profiler_with_stack",
    "shapes": "torch_profiler_record_shapes",
    "memory": "torch_profiler_with_memory",
}
NEEDS_DEV_MODE: Final = "launch the server with VLLM_SERVER_DEV_MODE=1"


class Launch(Struct, frozen=True):
    """How the engine was launched, as far as it tells.

    profiles_to: where torch traces are written; None when it was launched without a profiler.   records: its
    profiler's configuration.   frees: sleep frees memory, or there is none to free.
    """

    version: str
    instance: str | None
    model: str | None
    device: str | None
    profiles_to: Path | None
    records: Mapping[str, object]
    frees: bool
    methods: Methods


class VllmServer(HttpClient):
    """The front of a vLLM server. Raises ConfigError."""

    def __init__(self, url: str, key: str | None = None) -> None:
        super().__init__(url, ROUTES, info_path="/server_info?config_format=json", key=key)

    async def info(self) -> Mapping[str, object]:
        """How it was launched. Without the control routes it tells its version only."""
        return {**(await super().info() or {}), **await self.get("/version")}


class VllmEngine:
    """One vLLM engine, seen from one node of its replica.

    front: None on a headless node (node rank above 0), which has no front end.   checkpoints, traces: roots of the
    paths that commands name; the server must see them under the same absolute path.
    """

    def __init__(self, identity: Identity, front: EngineClient | None, *, checkpoints: Path, traces: Path) -> None:
        self._identity, self._front = identity, front
        self._traces = traces.resolve()
        self._weights = Weights(checkpoints)
        self._group: str | None = None
        self._launch: Launch | None = None
        self._before: frozenset[str] = frozenset()

    async def open(self) -> None:
        """Attach. An engine that is not up yet is waited for by observing it. Raises EngineError."""
        if self._front is not None:
            await self._front.open()

    async def observe(self) -> Observation:
        """Read what it is now."""
        if self._front is None:
            return Observation(engine="vllm", tokenizer="absent")
        try:
            launch = await self._found(self._front)
            if launch is None:
                return Observation(engine="vllm", tokenizer="unknown")
            paused = await self._read(launch, "is_paused")
            sleeping = await self._read(launch, "is_sleeping")
            label = await self._read(launch, "get_weight_version")
        except EngineError:
            self._launch = self._group = None  # whoever answers next may be another
            return Observation(engine="vllm", tokenizer="unknown")
        return Observation(
            engine=f"vllm {launch.version}",
            instance=launch.instance,
            tokenizer="present",
            operations=operations(launch),
            generating=not paused if isinstance(paused, bool) else None,
            asleep=frozenset() if sleeping is False else None,
            version=version_of(label),
        )

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        """Make one call. Raises CheckpointError (the weights are as they were) and EngineError."""
        front = self._front
        launch = await self._found(front) if front is not None else None
        if front is None or launch is None:
            raise EngineError("vllm was not called: there is no front end on this node, or it is not up.")
        match call:
            case CheckSource():
                if isinstance(call.source, Broadcast) and "update_weights" not in launch.methods:
                    raise CheckpointError(f"vllm {launch.version} receives no broadcast: sync from a checkpoint.")
                where = (call.source, call.manifest, launch.model, self._identity)
                await to_thread.run_sync(self._weights.check, *where)
            case Pause():
                await front.call("pause_generation", **pause_arguments(call, launch))
            case Resume():
                await front.call("resume_generation")
            case Sleep():
                await self._sleep(front, launch, call)
            case Wake():
                await self._wake(front, launch, call)
            case Load():
                return await self._load(front, launch, call)
            case Flush():
                await self._flush(front, launch, timeout_s)
            case Abort():
                await front.call("abort")
            case CheckProfile():
                await self._check_profile(launch, call.plan)
            case StartProfile():
                await self._start_profile(front, launch, call)
            case StopProfile():
                return await self._stop_profile(front, launch, call)
            case _:
                assert_never(call)
        return Returned()

    async def close(self) -> None:
        """Let go of it; it goes on."""
        if self._front is not None:
            await self._front.close()

    # --- what it is ---------------------------------------------------------------------------------------------------

    async def _found(self, front: EngineClient) -> Launch | None:
        if self._launch is None:
            methods = await front.methods()
            if methods is None:
                return None
            info = await front.info()
            self._launch = launched(info or {}, methods)
        return self._launch

    async def _read(self, launch: Launch, method: str) -> object:
        assert self._front is not None
        return await self._front.read(method) if method in launch.methods else None

    # --- memory and weights -------------------------------------------------------------------------------------------

    async def _sleep(self, front: EngineClient, launch: Launch, call: Sleep) -> None:
        if call.tags == {"kv_cache"}:
            if "release_kv_cache_memory" not in launch.methods:
                raise EngineError(f"vllm {launch.version} can't release the KV cache alone: sleep both, or use 0.31.")
            await front.call("release_kv_cache_memory")
            return
        if call.tags == {"weights"}:
            raise EngineError("vllm releases its weights only together with the KV cache: sleep both.")
        # Up to 0.16 there is no mode, and it is ignored; from 0.17 on the default would abort what was frozen.
        mode = {"mode": "keep"} if "mode" in launch.methods["sleep"] else {}
        await front.call("sleep", level=2 if call.discard else 1, **mode)

    async def _wake(self, front: EngineClient, launch: Launch, call: Wake) -> None:
        # Up to 0.23 a scheduler is resumed by the first region that wakes, and would run without its cache: there
        # the cache wakes with the weights, and is awake when it is asked for.
        whole = "release_kv_cache_memory" not in launch.methods
        if whole and call.tags == {"kv_cache"}:
            return
        await front.call("wake_up", tags=["kv_cache", "weights"] if whole else sorted(call.tags))
        if await front.read("is_paused") is False:
            freezes = "mode" in launch.methods["pause_generation"]
            await front.call("pause_generation", **pause_arguments(Pause("keep" if freezes else "wait"), launch))

    async def _load(self, front: EngineClient, launch: Launch, call: Load) -> Returned:
        source = call.source
        if isinstance(source, Broadcast):
            await self._receive(front, launch, source, call)
        else:
            directory = await to_thread.run_sync(self._weights.directory, source, call.manifest, launch.model)
            await front.call("collective_rpc", method="reload_weights", kwargs={"weights_path": str(directory)})
        if "update_weight_version" in launch.methods:
            await front.call("update_weight_version", new_version=str(call.version))
        proof = call.manifest is not None and call.manifest.content is not None
        if not proof or "compute_weight_checksums" not in launch.methods:
            return Returned()
        return Returned(digest=fingerprint(await front.call("compute_weight_checksums", action="checksum")))

    async def _receive(self, front: EngineClient, launch: Launch, source: Broadcast, call: Load) -> None:
        """vLLM's weight transfer over NCCL (vllm/distributed/weight_transfer/nccl_engine.py). Needs GPUs."""
        layout = self._weights.announced(source, call.manifest, launch.model, self._identity)
        if self._group != source.group:
            offset, world = ranks(source, self._identity)
            init = {"master_address": source.host, "master_port": source.port}
            init_info = {**init, "rank_offset": offset, "world_size": world}
            await front.call("init_weight_transfer_engine", init_info=init_info)
            self._group = source.group
        if "start_weight_update" in launch.methods:
            await front.call("start_weight_update")
        for names in buckets(layout):
            dtypes, shapes = in_torchs_words(layout, names)
            await front.call("update_weights", update_info={"names": names, "dtype_names": dtypes, "shapes": shapes})
        if "finish_weight_update" in launch.methods:
            await front.call("finish_weight_update")

    async def _flush(self, front: EngineClient, launch: Launch, timeout_s: float) -> None:
        """A prefix that a request still uses can't be dropped: asked again until it can, or the time is over."""
        until = time.monotonic() + patience_s(timeout_s)
        while await front.call("reset_prefix_cache") is False:
            if time.monotonic() + RETRY_S > until:
                raise EngineError("vllm did not drop its prefix cache by the deadline: requests still use it.")
            await anyio.sleep(RETRY_S)
        if "reset_encoder_cache" in launch.methods:
            await front.call("reset_encoder_cache")

    # --- profiling ----------------------------------------------------------------------------------------------------

    async def _check_profile(self, launch: Launch, plan: ProfilePlan) -> None:
        profile_arguments(plan, "", launch)
        await to_thread.run_sync(require_writable, self._traces, "The agent")
        assert launch.profiles_to is not None
        await to_thread.run_sync(require_writable, launch.profiles_to, "vllm")

    async def _start_profile(self, front: EngineClient, launch: Launch, call: StartProfile) -> None:
        plan = call.session.plan
        arguments = profile_arguments(plan, call.directory, launch)
        await to_thread.run_sync(make_fresh, self._traces / call.directory)
        self._before = await to_thread.run_sync(_names, launch.profiles_to)
        await front.call("start_profile", **arguments)

    async def _stop_profile(self, front: EngineClient, launch: Launch, call: StopProfile) -> Returned:
        ended = bool(await to_thread.run_sync(_names, launch.profiles_to) - self._before)
        await front.call("stop_profile")
        found = await to_thread.run_sync(self._gather, launch.profiles_to, call)
        return replace(found, auto_stopped=ended and call.session.plan.window is not None)

    def _gather(self, profiles_to: Path | None, call: StopProfile) -> Returned:
        """What the session left where the engine writes, brought to where it belongs."""
        if profiles_to is not None:
            for name in sorted(_names(profiles_to) - self._before):
                move_trace(profiles_to / name, self._traces / call.directory)
        return collect_traces(self._traces, call.directory, call.session.plan, self._identity)


# --- decided from what it tells: pure ---------------------------------------------------------------------------------


def launched(info: Mapping[str, object], methods: Methods) -> Launch:
    """From `/server_info?config_format=json`, or the same shape made in process."""
    config = part(info, "vllm_config")
    profiler, model = part(config, "profiler_config"), part(config, "model_config")
    directory = text(profiler, "torch_profiler_dir")
    # Of a CPU there is no memory to free; the scheduler half of sleep works there all the same.
    frees = model.get("enable_sleep_mode") is True or text(part(config, "device_config"), "device") == "cpu"
    return Launch(
        version=text(info, "version") or "of unknown version",
        instance=text(config, "instance_id"),
        model=text(model, "model"),
        device=text(part(config, "device_config"), "device"),
        profiles_to=Path(directory) if text(profiler, "profiler") == "torch" and directory else None,
        records=profiler,
        frees=frees,
        methods=methods,
    )


def operations(launch: Launch) -> frozenset[Operation]:
    """What it can do; the rest is in `lacks`."""
    return frozenset(Operation) - lacks(launch).keys()


def lacks(launch: Launch) -> dict[Operation, str]:
    """What it can't do, each with the reason and what to do about it."""
    needed = {
        Operation.PROFILE: ("start_profile", "stop_profile"),
        Operation.PAUSE: ("pause_generation",),
        Operation.RESUME: ("resume_generation",),
        Operation.SLEEP: ("sleep",),
        Operation.WAKE: ("wake_up",),
        Operation.FLUSH: ("reset_prefix_cache",),
        Operation.ABORT: ("abort",),
        Operation.LOAD: ("collective_rpc",),
    }
    missing = {
        operation: f"it has no {method}: {NEEDS_DEV_MODE}, or use a newer vLLM"
        for operation, methods in needed.items()
        for method in methods
        if method not in launch.methods
    }
    if "collective_rpc" in launch.methods and "init_weight_transfer_engine" not in launch.methods:
        # What a worker's `reload_weights` takes can't be seen from here; both came with the same release.
        missing[Operation.LOAD] = "its workers load from no other path than at launch: use vLLM 0.16 or newer"
    if launch.profiles_to is None:
        missing[Operation.PROFILE] = (
            'it was launched without a torch profiler: add --profiler-config \'{"profiler":"torch",'
            '"torch_profiler_dir":"/DIR","ignore_frontend":true}\''
        )
    if not launch.frees:
        for operation in (Operation.SLEEP, Operation.WAKE):
            missing[operation] = "it would free nothing: launch it with --enable-sleep-mode"
    return missing


def pause_arguments(call: Pause, launch: Launch) -> dict[str, object]:
    """The cache is the machine's business: it flushes when weights changed. Raises EngineError."""
    if "mode" in launch.methods["pause_generation"]:
        return {"mode": call.mode, "clear_cache": False}
    if call.mode == "keep":
        raise EngineError(f"vllm {launch.version} can't freeze requests: pause with `abort` or `wait`.")
    return {"wait_for_inflight_requests": call.mode == "wait", "clear_cache": False}


def profile_arguments(plan: ProfilePlan, directory: str, launch: Launch) -> dict[str, object]:
    """Of a start. Raises UnsupportedError for what this engine can't record, naming what to launch it with."""
    if why := lacks(launch).get(Operation.PROFILE):
        raise UnsupportedError(f"vllm {launch.version} can't be profiled: {why}.")
    if what := _unrecorded(plan, launch):
        raise UnsupportedError(f"vllm {launch.version} can't record {what}.")
    takes, arguments = launch.methods["start_profile"], dict[str, object]()
    if "profile_prefix" in takes and directory:
        arguments["profile_prefix"] = directory.replace("/", ".")
    if _bounded(takes):  # also without a window: there may be one that it was launched with
        arguments["delay_iterations"], arguments["max_iterations"] = bounds(plan.window)
    return arguments


def bounds(window: Window | None) -> tuple[int, int]:
    """A window as delay and number of iterations; 0 iterations stands for no end."""
    if window is None:
        return 0, 0
    return (window.start + 1 if window.start else 0), (window.end - window.start if window.end is not None else 0)


def _bounded(takes: frozenset[str]) -> bool:
    return {"delay_iterations", "max_iterations"} <= takes


def _unrecorded(plan: ProfilePlan, launch: Launch) -> str | None:
    """What the plan asks for and this engine, as it was launched, would not record."""
    records, device = launch.records, launch.device
    if plan.by_stage or plan.merge:
        return "traces by stage, or merged, which vLLM does not write: change the plan"
    if device is not None and "npu" in (plan.tool, *plan.activities) and device != "npu":
        return f"what an NPU does: it runs on a {device}. Change the plan"
    if device == "cpu" and "cuda" in plan.activities:
        return "cuda: it runs on a CPU. Change the plan"
    activities = records.get("torch_profiler_activities")
    for one in sorted(plan.activities & {"cpu", "cuda"}):
        if isinstance(activities, list) and one.upper() not in activities:
            return f"{one}: launch it with torch_profiler_activities that have {one.upper()}"
    contents = {
        "stack": plan.with_stack,
        "stack (it names the modules)": plan.with_modules,
        "shapes": plan.record_shapes,
        "memory": "memory" in plan.activities,
    }
    for what, wanted in contents.items():
        key = _KEYS[what.partition(" ")[0]]
        if wanted and records.get(key) is False:
            return f"{what}: launch it with {key}"
    if records.get("ignore_frontend") is False:
        return (
            "its front end: that is started on one thread and stopped on another, of which the server can die. Launch "
            "it with ignore_frontend"
        )
    if any(number(records, key) for key in ("wait_iterations", "warmup_iterations")):
        return "all forward steps: launch it without wait_iterations and warmup_iterations"
    held = tuple(number(records, key) or 0 for key in ("delay_iterations", "max_iterations"))
    if (asked := bounds(plan.window)) != held and not _bounded(launch.methods["start_profile"]):
        window = "start to stop" if plan.window is None else f"a window of {plan.window}"
        return (
            f"{window}, and before 0.32 the bounds are fixed at launch: launch it with delay_iterations={asked[0]} and "
            f"max_iterations={asked[1]}, or use 0.32"
        )
    return None


def fingerprint(checksums: object) -> str:
    """One word for the checksums that the engine computed of its own tensors.

    It names what an engine of this kind and layout holds, which is not what the file holds: vLLM fuses and prepacks.
    Equal for two replicas means that they hold the same.
    """
    told = json.dumps(checksums, sort_keys=True).encode()
    return f"vllm:{hashlib.sha256(told).hexdigest()}"


def _names(directory: Path | None) -> frozenset[str]:
    if directory is None or not directory.is_dir():
        return frozenset()
    return frozenset(one.name for one in directory.iterdir() if one.is_file())
