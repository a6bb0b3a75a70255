"""SGLang, over HTTP or in process. One adapter; `TokenizerManager`'s names for methods, whichever way they are reached.

What was read: SGLang 0.5.6 to 0.5.23; run: 0.5.23. It differs between versions in what it takes, and is asked for that.

What it does in its own way
- It dies where others answer an error: of a release while requests run, of a resume of what was not released, of a
  load that flushes while requests run, of a profile by stage without a number of steps. The machine keeps most of it
  away; here a release comes after a flush that succeeded, and a load never flushes.
- Health says nothing: on a node rank above 0 it is 200 and every engine route is 404. `/server_info` tells.
- A second start of a profile is a 200 that loses the first, whosesoever it is. A start that is armed for later is the
  one that says whether a session is open; so before each start one is armed that never comes.
- A stop of a session that ended by itself is a bare 500, and so is one of a session that has not begun, by stage: that
  would begin in a later step. The same start that never comes takes its place.
- By stage, the first token ends the trace of the prompts; a prompt that comes while tokens are recorded is in theirs.
  One trace ends and the next begins within a span that is open (0.5.14 on): torch 2.13 can die of it, and 2.14.1, which
  0.5.23 asks for, was not seen to.
- Stacks name the modules, so they answer for both. An NPU's level is SGLang's own (never run here).
- `update_weight_version` aborts every request unless it is told not to.
- A pause with `in_place` or `retract` is believed, not seen: nothing over HTTP tells whether it is paused.
"""

import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, assert_never

import anyio
from anyio import CancelScope, to_thread
from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import Activity, Broadcast, Checkpoint, Manifest, ProfilePlan
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
from schemas.identity import Identity, InFlight, Operation
from schemas.safetensors.format import read_layout, safetensors_files
from workers.engines.checkpoint import Weights, buckets, in_torchs_words, ranks
from workers.engines.client import RETRY_S, CallRefused, EngineClient, Methods, number, patience_s, text, version_of
from workers.engines.http import HttpClient, Route
from workers.traces.node import collect_traces, make_fresh, require_writable

FLUSH_WAIT_S: Final = 5.0
"""How long the server itself waits for a moment without requests, where it can."""

ROUTES: Final[Mapping[str, Route]] = {
    "start_profile": Route("POST", "/start_profile"),
    "stop_profile": Route("POST", "/stop_profile"),
    "pause_generation": Route("POST", "/pause_generation", repeatable=True),
    "continue_generation": Route("POST", "/continue_generation", repeatable=True),
    "abort_request": Route("POST", "/abort_request", repeatable=True),
    "flush_cache": Route("POST", "/flush_cache", query=True, renamed={"timeout_s": "timeout"}, repeatable=True),
    "release_memory_occupation": Route("POST", "/release_memory_occupation"),
    "resume_memory_occupation": Route("POST", "/resume_memory_occupation"),
    "update_weights_from_disk": Route("POST", "/update_weights_from_disk"),
    "update_weights_from_tensor": Route("POST", "/update_weights_from_tensor"),
    "update_weights_from_distributed": Route("POST", "/update_weights_from_distributed"),
    "begin_weight_update": Route("POST", "/begin_weight_update"),
    "end_weight_update": Route("POST", "/end_weight_update"),
    "init_weights_update_group": Route("POST", "/init_weights_update_group"),
    "destroy_weights_update_group": Route("POST", "/destroy_weights_update_group"),
    "update_weight_version": Route("POST", "/update_weight_version", repeatable=True),
    "check_weights": Route("POST", "/weights_checker"),
    "get_weight_version": Route("GET", "/model_info", answer="weight_version"),
    "is_ready": Route("GET", "/ready"),
}
"""The server's routes, by the names of `TokenizerManager`'s methods (sglang/srt/entrypoints/http_server.py)."""

PAUSES: Final[Mapping[InFlight, str]] = {"abort": "abort", "wait": "retract", "keep": "in_place"}
ACTIVITIES: Final = {"cpu": "CPU", "cuda": "GPU", "memory": "MEM", "npu": "GPU"}
"""In SGLang's words; on an NPU its `GPU` is what torch_npu records (never run here)."""

RECORDED: Final[Mapping[str, frozenset[Activity]]] = {
    "cpu": frozenset({"cpu"}),
    "cuda": frozenset({"cpu", "cuda", "memory"}),
    "npu": frozenset({"cpu", "npu"}),
}
"""By device. A scheduler that is told to record CUDA's memory where there is none dies (0.5.6 to 0.5.23)."""
NEVER: Final[Mapping[str, object]] = {"start_step": 1 << 60, "activities": []}
"""A start at a forward that never comes, of nothing. CallRefused, with nothing changed, while a session is open."""
STAGES: Final = 2

ONE_FORWARD_SHORT: Final = (0, 5, 16)
"""Below this version `num_steps` records one forward fewer. The only place where a version is compared: nothing else
that can be seen from outside tells the two behaviours apart."""


class Launch(Struct, frozen=True):
    """How the engine was launched, as far as it tells. saves: memory can be released, or there is none to free.

    keeps_weights: released weights come back as they were.
    """

    version: str
    instance: str | None
    node_rank: int | None
    model: str | None
    device: str | None
    saves: bool
    keeps_weights: bool
    tensor_parallel: int
    methods: Methods


class SGLangServer(HttpClient):
    """The front of an SGLang server. key: its admin key, or its key when it has no other. Raises ConfigError."""

    def __init__(self, url: str, key: str | None = None) -> None:
        super().__init__(url, ROUTES, info_path="/server_info", key=key)


class SGLangEngine:
    """One SGLang engine, seen from one node of its replica.

    front: of this node's own server, whatever its node rank; None where there is none.   checkpoints, traces: roots
    of the paths that commands name; the server must see them under the same absolute path.
    """

    def __init__(self, identity: Identity, front: EngineClient | None, *, checkpoints: Path, traces: Path) -> None:
        self._identity, self._front = identity, front
        self._traces = traces.resolve()
        self._weights = Weights(checkpoints)
        self._launch: Launch | None = None
        self._group: str | None = None

    async def open(self) -> None:
        """Attach. Raises EngineError when the traces' root can't be written: a scheduler that can't, dies."""
        if self._front is not None:
            await self._front.open()
        await to_thread.run_sync(require_writable, self._traces, "An SGLang scheduler, which dies if it can't write,")

    async def observe(self) -> Observation:
        """Read what it is now."""
        absent = Observation(engine="sglang", tokenizer="absent")
        if self._front is None:
            return absent
        try:
            launch = await self._found(self._front)
            if launch is None:
                return absent if await self._front.methods() is not None else _unknown()
            label = await self._read(launch, "get_weight_version")
            generating = await self._generating(launch)
        except EngineError:
            self._launch = self._group = None  # whoever answers next may be another
            return _unknown()
        return Observation(
            engine=f"sglang {launch.version}",
            instance=launch.instance,
            tokenizer="present",
            operations=operations(launch),
            generating=generating,
            version=version_of(label),
        )

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        """Make one call. Raises CheckpointError (the weights are as they were) and EngineError."""
        front = self._front
        launch = await self._found(front) if front is not None else None
        if front is None or launch is None:
            raise EngineError("sglang was not called: there is no tokenizer manager on this node, or it is not up.")
        match call:
            case CheckSource():
                if isinstance(call.source, Checkpoint) and call.source.as_tensors and self._identity.nnodes > 1:
                    raise CheckpointError("tensors are handed over on one node only: broadcast them to several.")
                where = (call.source, call.manifest, launch.model, self._identity)
                await to_thread.run_sync(self._weights.check, *where)
            case Pause():
                if call.mode == "wait":
                    await self._flush(front, launch, timeout_s)  # it succeeds in a moment without requests
                await front.call("pause_generation", mode=PAUSES[call.mode])
            case Resume():
                await front.call("continue_generation")
            case Sleep():
                await self._sleep(front, launch, call, timeout_s)
            case Wake():
                await front.call("resume_memory_occupation", tags=sorted(call.tags))
            case Load():
                return await self._load(front, launch, call)
            case Flush():
                await self._flush(front, launch, timeout_s)
            case Abort():
                await front.call("abort_request", rid="", abort_all=True)
            case CheckProfile():
                profile_arguments(call.plan, "", self._traces, launch)
                await to_thread.run_sync(require_writable, self._traces, "sglang")
            case StartProfile():
                await self._start_profile(front, launch, call)
            case StopProfile():
                return await self._stop_profile(front, call)
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
            info = await front.info() if methods is not None else None
            if methods is None or info is None:
                return None
            self._launch = launched(info, methods)
        return self._launch

    async def _read(self, launch: Launch, method: str) -> object:
        assert self._front is not None
        return await self._front.read(method) if method in launch.methods else None

    async def _generating(self, launch: Launch) -> bool | None:
        """In process it can be seen. A server that is ready generates; one that is not may be paused, or unwell."""
        if "is_paused" in launch.methods:
            return not await self._read(launch, "is_paused")
        try:
            return True if await self._read(launch, "is_ready") is not None else None
        except CallRefused:
            return None

    # --- memory and weights -------------------------------------------------------------------------------------------

    async def _sleep(self, front: EngineClient, launch: Launch, call: Sleep, timeout_s: float) -> None:
        if "weights" in call.tags and not call.discard and not launch.keeps_weights:
            raise EngineError(
                "sglang would lose the weights that it releases: launch it with --enable-weights-cpu-backup, or sleep "
                "with `discard` and load them again. Nothing was released."
            )
        await self._flush(front, launch, timeout_s)
        await front.call("release_memory_occupation", tags=sorted(call.tags))

    async def _load(self, front: EngineClient, launch: Launch, call: Load) -> Returned:
        source = call.source
        if isinstance(source, Broadcast):
            await self._receive(front, launch, source, call.manifest)
        else:
            directory = await to_thread.run_sync(self._weights.directory, source, call.manifest, launch.model)
            if source.as_tensors:
                await self._hand_over(front, launch, directory)
            else:  # by format, so that it never falls back to unpickling; its own flush kills versions up to 0.5.21
                await front.call(
                    "update_weights_from_disk", model_path=str(directory), load_format="safetensors", flush_cache=False
                )
        await front.call("update_weight_version", new_version=str(call.version), abort_all_requests=False)
        return Returned()

    async def _receive(self, front: EngineClient, launch: Launch, source: Broadcast, manifest: Manifest | None) -> None:
        layout = self._weights.announced(source, manifest, launch.model, self._identity)
        if self._group != source.group:
            offset, world = ranks(source, self._identity)
            await front.call(
                "init_weights_update_group",
                master_address=source.host,
                master_port=source.port,
                rank_offset=offset,
                world_size=world,
                group_name=source.group,
                backend=source.backend,
            )
            self._group = source.group
        async with _session(front, launch):
            for names in buckets(layout):
                dtypes, shapes = in_torchs_words(layout, names)
                await front.call(
                    "update_weights_from_distributed",
                    names=names,
                    dtypes=dtypes,
                    shapes=shapes,
                    group_name=source.group,
                    flush_cache=False,
                )

    async def _hand_over(self, front: EngineClient, launch: Launch, directory: Path) -> None:
        """Through SGLang's own serializer, which names shared memory instead of copying; it must be installed here."""
        layout = await to_thread.run_sync(read_layout, directory)
        async with _session(front, launch):
            for names in buckets(layout):
                packed = await to_thread.run_sync(_packed, directory, names)
                each_rank = [packed] * launch.tensor_parallel
                await front.call("update_weights_from_tensor", serialized_named_tensors=each_rank, flush_cache=False)

    async def _flush(self, front: EngineClient, launch: Launch, timeout_s: float) -> None:
        """CallRefused while requests run: asked again until it succeeds, or the time is over."""
        until = time.monotonic() + patience_s(timeout_s)
        waits = "timeout_s" in launch.methods["flush_cache"] or "timeout" in launch.methods["flush_cache"]
        while True:
            left = until - time.monotonic()
            try:
                await front.call("flush_cache", **({"timeout_s": max(0.0, min(FLUSH_WAIT_S, left))} if waits else {}))
                return
            except CallRefused as error:
                if error.status not in (None, 400) or time.monotonic() + RETRY_S > until:
                    raise
            await anyio.sleep(RETRY_S)

    # --- profiling ----------------------------------------------------------------------------------------------------

    async def _start_profile(self, front: EngineClient, launch: Launch, call: StartProfile) -> None:
        arguments = profile_arguments(call.session.plan, call.directory, self._traces, launch)
        await to_thread.run_sync(make_fresh, self._traces / call.directory)
        if not await self._disarmed(front):
            raise EngineError(
                "sglang records a session already that this agent did not start, and a start would lose it. It goes "
                "on: stop it where it was started (/stop_profile), then start again."
            )
        await front.call("start_profile", **arguments)

    async def _stop_profile(self, front: EngineClient, call: StopProfile) -> Returned:
        """A refusal means that no session was open: it had ended by itself, or, by stage, had not begun."""
        plan, place = call.session.plan, self._traces / call.directory
        refused = not await self._stopped(front)
        if plan.by_stage:
            for _ in range(STAGES):  # each begins once, and might have done so since
                if await self._disarmed(front):
                    break
                await self._stopped(front)
        files = await to_thread.run_sync(_files, place)
        if refused and not files and not plan.by_stage:
            raise EngineError(
                "sglang refused the stop, and the session left no trace: it was not recording. Its log says why."
            )
        if plan.merge and files and not any(one.startswith("merged-") for one in files):
            raise EngineError(f"sglang merged no traces; each rank's is in {place}. Its log says why.")
        found = await to_thread.run_sync(collect_traces, self._traces, call.directory, plan, self._identity)
        return replace(found, auto_stopped=refused and bool(files))

    async def _stopped(self, front: EngineClient) -> bool:
        """Was a session open that is closed now? Raises EngineError."""
        return await self._obeyed(front, "stop_profile")

    async def _disarmed(self, front: EngineClient) -> bool:
        """Is none open, and none armed any more? Raises EngineError."""
        return await self._obeyed(front, "start_profile", **NEVER)

    async def _obeyed(self, front: EngineClient, method: str, **arguments: object) -> bool:
        try:
            await front.call(method, **arguments)
        except CallRefused as error:
            if error.status not in (None, 500):
                raise
            return False
        return True


# --- decided from what it tells: pure ---------------------------------------------------------------------------------


def launched(info: Mapping[str, object], methods: Methods) -> Launch:
    """From `/server_info`, or the same names read in process."""
    rank, cpu = info.get("node_rank"), info.get("device") == "cpu"
    # Two launches differ in the seed that they draw, and in how long each took to start (from 0.5.17 on).
    marks = json.dumps([info.get("random_seed"), info.get("startup_time"), info.get("launched_at")], sort_keys=True)
    return Launch(
        version=text(info, "version") or "of unknown version",
        instance=hashlib.sha256(marks.encode()).hexdigest()[:16],
        node_rank=rank if isinstance(rank, int) else None,
        model=text(info, "model_path"),
        device=text(info, "device"),
        saves=info.get("enable_memory_saver") is True or cpu,
        keeps_weights=info.get("enable_weights_cpu_backup") is True or cpu,
        tensor_parallel=number(info, "tp_size") or 1,
        methods=methods,
    )


def operations(launch: Launch) -> frozenset[Operation]:
    """What it can do; the rest is in `lacks`."""
    return frozenset(Operation) - lacks(launch).keys()


def lacks(launch: Launch) -> dict[Operation, str]:
    """What it can't do, each with the reason and what to do about it."""
    needed = {
        Operation.PROFILE: "start_profile",
        Operation.PAUSE: "pause_generation",
        Operation.RESUME: "continue_generation",
        Operation.SLEEP: "release_memory_occupation",
        Operation.WAKE: "resume_memory_occupation",
        Operation.FLUSH: "flush_cache",
        Operation.ABORT: "abort_request",
        Operation.LOAD: "update_weights_from_disk",
    }
    missing = {
        operation: f"it has no {method}: use SGLang 0.5.6 or newer"
        for operation, method in needed.items()
        if method not in launch.methods
    }
    if not launch.saves:
        for operation in (Operation.SLEEP, Operation.WAKE):
            missing[operation] = "it would free nothing: launch it with --enable-memory-saver"
    return missing


def profile_arguments(plan: ProfilePlan, directory: str, traces: Path, launch: Launch) -> dict[str, object]:
    """Of a start. Raises UnsupportedError for what this engine can't record."""
    if "start_profile" not in launch.methods:
        raise UnsupportedError(f"sglang {launch.version} can't be profiled: {lacks(launch)[Operation.PROFILE]}.")
    takes, window = launch.methods["start_profile"], plan.window
    lacking = plan.activities - RECORDED.get(launch.device or "", plan.activities)
    what: str | None = None
    if not plan.activities:
        what = "nothing: name at least one activity in the plan"
    elif lacking or (plan.tool == "npu" and launch.device not in (None, "npu")):
        asked = ", ".join(sorted(lacking)) or "with tool npu"
        what = f"{asked}: it runs on a {(launch.device or '').upper()}. Change the plan"
    elif plan.by_stage and (window is None or window.end is None):
        what = "by stage without a window: give the number of forward steps of each stage"
    elif window is not None and window.start > 0:
        what = (
            f"a window from forward step {window.start}: its start_step counts from its launch, nothing tells where it "
            "is, and one that was armed can't be disarmed. Begin the window at 0"
        )
    elif plan.merge and "merge_profiles" not in takes:
        what = "a merged trace"
    if what is not None:
        raise UnsupportedError(f"sglang {launch.version} can't record {what}.")
    arguments: dict[str, object] = {
        "output_dir": str(traces / directory),
        "activities": [ACTIVITIES[one] for one in sorted(plan.activities)],
        "with_stack": plan.with_stack or plan.with_modules,
        "record_shapes": plan.record_shapes,
    }
    if window is not None and window.end is not None:
        arguments["num_steps"] = window.end + (1 if one_short(launch.version) and not plan.by_stage else 0)
    if plan.by_stage:
        arguments["profile_by_stage"] = True
    if plan.merge:
        arguments["merge_profiles"] = True
    name = directory.replace("/", ".")
    if "profile_id" in takes:
        arguments["profile_id"] = name
    elif "profile_prefix" in takes and not plan.merge:  # it looks for what it merges without the prefix
        arguments["profile_prefix"] = name
    return arguments


def one_short(version: str) -> bool:
    """Is it of the versions that record one forward fewer than `num_steps` says?"""
    digits = [int(part) for part in version.split(".")[:3] if part.isdigit()]
    return len(digits) == 3 and tuple(digits) < ONE_FORWARD_SHORT


@asynccontextmanager
async def _session(front: EngineClient, launch: Launch) -> AsyncIterator[None]:
    """A weight update has a begin and an end from 0.5.21 on. One that is left open blocks every later one."""
    if "begin_weight_update" not in launch.methods:
        yield
        return
    await front.call("begin_weight_update")
    try:
        yield
    except BaseException:
        with CancelScope(shield=True), suppress(EngineError):  # what went wrong first is what is told
            await front.call("end_weight_update")
        raise
    await front.call("end_weight_update")


def _packed(directory: Path, names: list[str]) -> str:
    """Named tensors as SGLang takes them. Raises EngineError where SGLang is not installed."""
    try:
        import safetensors
        import torch
        from sglang.srt.utils import MultiprocessingSerializer
    except ImportError as error:
        raise EngineError(
            f"tensors can't be handed over: {error.name} is not installed beside this agent. Run the agent from the "
            "environment of its engine, or sync without `as_tensors`."
        ) from error
    wanted, tensors = set(names), []
    for file in safetensors_files(directory):
        with safetensors.safe_open(file, framework="pt") as opened:
            tensors += [(name, opened.get_tensor(name)) for name in opened.keys() if name in wanted]  # noqa: SIM118
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]  # of another it dies
    try:
        packed: str = MultiprocessingSerializer.serialize(tensors, output_str=True)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
    return packed


def _files(directory: Path) -> list[str]:
    return [one.name for one in directory.rglob("*") if one.is_file()]


def _unknown() -> Observation:
    return Observation(engine="sglang", tokenizer="unknown")
