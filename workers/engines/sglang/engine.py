"""SGLang, over HTTP or in process. One backend, which calls methods by `TokenizerManager`'s names either way.

Checked against the source of SGLang 0.5.6 to 0.5.23; run with 0.5.23. Versions differ in the parameters of their
methods, so the backend looks up which ones a method takes.

Where SGLang differs from other engines:

- It dies where others return an error: on a release while requests run, on a resume of what was not released, on a
  load that flushes while requests run (up to 0.5.21), on a profile by stage without a number of steps. The machine
  prevents most of this. Here, a release comes after a flush that succeeded, and a load flushes on CPUs only, from
  0.5.22 on.
- Health proves nothing: on node ranks above 0 it is 200, and every engine route is 404. `/server_info` is decisive.
- A second start of a profile is a 200 that discards the first, whichever client started it. Only a start for a later
  forward step reveals whether a session is open. So before each start, the backend sends one for a step that never
  comes.
- A stop of a session that ended by itself is a bare 500. So is a stop, by stage, of a session that has not begun; it
  would begin in a later step. The start that never comes replaces it.
- By stage, the first token ends the trace of the prompts. A prompt that arrives while tokens are recorded ends up in
  the trace of the tokens. One trace ends and the next begins inside an open span (from 0.5.14 on): torch 2.13 can crash
  on that; 2.14.1, which 0.5.23 requires, has not been seen to.
- Modules appear in stacks only, so a plan with modules records stacks. An NPU's level is SGLang's own (never run here).
- `update_weight_version` aborts every request unless told not to.
- A pause with `in_place` or `retract` can't be verified over HTTP: no route reports it.
- `in_place` keeps the cache of frozen requests, and refuses a flush until they have ended. `retract` gives their cache
  up, so a flush succeeds (from 0.5.21 on), and they are computed anew: that is what `keep` needs when weights change.
- An adapter that does not fit the model is loaded with 200, and the scheduler dies at the first request for it. One too
  many silently unloads the least used. A request for an unloaded one loads it again (docs/lora.md).
"""

import os
import time
from pathlib import Path
from typing import Final, assert_never

import anyio
from anyio import to_thread
from msgspec.structs import replace

from schemas import events
from schemas.commands import Broadcast, Manifest
from schemas.errors import EngineError, RefusedError, UnansweredError, UnsupportedError
from schemas.events import Load, Restore
from schemas.logs import logger_of
from workers.engines.attached import AttachedEngine, label_after, weight_update
from workers.engines.checkpoint import Taken, buckets, group_ranks, torch_dtypes_and_shapes
from workers.engines.client import RETRY_S, CallRefused, EngineClient, begun, retry_time_s
from workers.engines.counters import requests_under_way
from workers.engines.sglang.launch import BESIDE, SGLANG, SGLangLaunch
from workers.engines.sglang.profile import NEVER, profile_arguments
from workers.traces.node import collect_traces, make_fresh, require_writable

logger = logger_of("agent")

FLUSH_WAIT_S: Final = 5.0
"""Most seconds that the server itself waits for a moment without requests, if its version can."""
STAGES: Final = 2

_IN_GROUP: Final = "group name has already been created"
"""torch's answer to a process that is in the group (`_new_process_group_helper`, 2.5 to 2.13)."""
_NOT_FLUSHED: Final = "Weights were updated, but the cache was not flushed"
_UPDATE: Final = ("begin_weight_update", "end_weight_update")  # from 0.5.21 on


class SGLangEngine(AttachedEngine[SGLangLaunch]):
    """One SGLang engine, seen from one node of its replica. The client reaches this node's own server."""

    kind, _fuses, _loaded_option = SGLANG, False, "--max-loaded-loras"
    _checksums = "check_weights", "allow_quant_error"  # which came one release after the checksums, in 0.5.15
    _flushed = False  # by the last call, which was a load: the engine is paused, so its cache is still empty

    async def open(self) -> None:
        """Attach to the engine.

        Raises EngineError if the traces' root is not writable: a scheduler that can't write a trace dies.
        """
        await super().open()
        await to_thread.run_sync(require_writable, self._traces, "An SGLang scheduler, which dies if it can't write,")

    async def perform(self, call: events.EngineCall, timeout_s: float) -> events.Returned:
        client, launch = await self._attached()
        flushed, self._flushed = self._flushed, False
        match call:
            case events.CheckSource():
                await self._check_source(client, launch, call, timeout_s)
            case events.Pause():
                await self._pause(client, launch, call, timeout_s)
            case events.Resume():
                await client.call("continue_generation")
            case events.Sleep():
                await self._sleep(client, launch, call, timeout_s)
            case events.Wake():
                await client.call("resume_memory_occupation", tags=sorted(call.tags))
            case Load() | Restore():
                return await self._load(client, launch, call)
            case events.Flush() if not flushed:
                await self._flush(client, launch, timeout_s)
            case events.Flush():
                pass
            case events.Abort():
                await client.call("abort_request", rid="", abort_all=True)
            case events.CheckProfile() | events.StartProfile() | events.StopProfile():
                return await self._profile(client, launch, call)
            case events.CheckAdapter() | events.LoadAdapter() | events.UnloadAdapter():
                await self._adapter(client, launch, call, timeout_s)
            case _:
                assert_never(call)
        return events.Returned()

    # --- requests, memory and weights ---------------------------------------------------------------------------------

    async def _pause(self, client: EngineClient, launch: SGLangLaunch, call: events.Pause, timeout_s: float) -> None:
        if call.mode == "wait":
            await self._flush(client, launch, timeout_s)  # succeeds in a moment without requests
        freezes = "in_place" if call.mode == "keep" and not launch.recomputes else "retract"
        await client.call("pause_generation", mode="abort" if call.mode == "abort" else freezes)

    async def _sleep(self, client: EngineClient, launch: SGLangLaunch, call: events.Sleep, timeout_s: float) -> None:
        if "weights" in call.tags and not call.discard and not launch.keeps_weights:
            raise UnsupportedError(
                "sglang would lose the weights that it releases: launch it with --enable-weights-cpu-backup, or sleep "
                "with `discard` and load them again. Nothing was released."
            )
        await self._flush(client, launch, timeout_s)
        await client.call("release_memory_occupation", tags=sorted(call.tags))

    async def _load(self, client: EngineClient, launch: SGLangLaunch, call: Load | Restore) -> events.Returned:
        took = ""
        if isinstance(call, Load) and isinstance(call.source, Broadcast):
            await self._receive(client, launch, call.source, call.manifest)
        elif isinstance(call, Load) and await self._holds_copy(client, launch, call):
            logger.info("version %d is held already: the launch copied it from %s", call.version, self._copied.url)
        else:
            taken = await to_thread.run_sync(self._directory, launch, call)
            path, took, flush = path_to_load(taken), taken.took, launch.flushes_in_load
            try:
                # Without a format it may fall back to unpickling.
                await client.call(
                    "update_weights_from_disk", model_path=path, load_format="safetensors", flush_cache=flush
                )
                self._flushed = flush
            except CallRefused as error:
                if _NOT_FLUSHED not in error.body:
                    raise
        with begun():
            await client.call("update_weight_version", new_version=label_after(call), abort_all_requests=False)
            return await self._loaded(client, launch, call, took)

    async def _receive(
        self, client: EngineClient, launch: SGLangLaunch, source: Broadcast, manifest: Manifest | None
    ) -> None:
        layout = self._sources.checked_layout(source, manifest, launch.model, self._identity)
        if self._joined != (launch.instance, source.group):
            offset, world = group_ranks(source, self._identity)
            try:
                await client.call(
                    "init_weights_update_group",
                    master_address=source.host,
                    master_port=source.port,
                    rank_offset=offset,
                    world_size=world,
                    group_name=source.group,
                    backend=source.backend,
                )
            except CallRefused as error:
                if _IN_GROUP not in error.body:  # it is in it since before its agent was restarted
                    raise
            self._joined = (launch.instance, source.group)
        async with weight_update(client, launch, *_UPDATE):
            for names in buckets(layout):
                dtypes, shapes = torch_dtypes_and_shapes(layout, names)
                await client.call(
                    "update_weights_from_distributed",
                    names=names,
                    dtypes=dtypes,
                    shapes=shapes,
                    group_name=source.group,
                    flush_cache=False,
                )

    async def _flush(self, client: EngineClient, launch: SGLangLaunch, timeout_s: float) -> None:
        """Flush. It is refused while requests run: ask again until it succeeds or the time is up.

        Raises RefusedError.
        """
        until = time.monotonic() + retry_time_s(timeout_s)
        waits = bool({"timeout_s", "timeout"} & launch.methods["flush_cache"])
        wait_s = 0.0  # at first: a server that waits does so for frozen requests too, which don't matter to a flush
        while True:
            try:
                await client.call("flush_cache", **({"timeout_s": wait_s} if waits else {}))
                return
            except CallRefused as error:
                if error.status not in (None, 400) or time.monotonic() + RETRY_S > until:
                    raise RefusedError(str(error)) from error
            except UnansweredError as error:
                raise RefusedError(str(error)) from error
            await anyio.sleep(RETRY_S)
            wait_s = max(0.0, min(FLUSH_WAIT_S, until - time.monotonic()))

    async def _in_use(self, client: EngineClient, launch: SGLangLaunch, model: str) -> bool | None:
        """Ask its metrics whether any request runs at all.

        An unload waits for the adapter's requests, while it holds up every other load and unload: under a pause for
        ever.
        """
        try:
            if "is_ready" in launch.methods:
                await client.read("is_ready")
        except CallRefused as error:
            reason = f"sglang is paused: to unload {model} would hold up every load until it continues."
            raise RefusedError(reason) from error
        try:
            under_way = requests_under_way(str(await client.read("get_metrics")))
        except (CallRefused, UnansweredError):
            return None
        return False if under_way == 0 else None

    # --- profiling ----------------------------------------------------------------------------------------------------

    async def _profile(self, client: EngineClient, launch: SGLangLaunch, call: events.ProfileCall) -> events.Returned:
        if isinstance(call, events.StopProfile):
            return await self._stop_profile(client, call)
        if isinstance(call, events.StartProfile):
            await self._start_profile(client, launch, call)
        else:
            profile_arguments(call.plan, "", self._traces, launch)
            await to_thread.run_sync(require_writable, self._traces, "sglang")
        return events.Returned()

    async def _start_profile(self, client: EngineClient, launch: SGLangLaunch, call: events.StartProfile) -> None:
        arguments = profile_arguments(call.session.plan, call.directory, self._traces, launch)
        await to_thread.run_sync(make_fresh, self._traces / call.directory)
        if not await _accepts(client, "start_profile", **NEVER):
            raise RefusedError(
                "sglang already records a session that this agent did not start, and a new start would discard it. It "
                "was left running: stop it where it was started (/stop_profile), then start again."
            )
        await client.call("start_profile", **arguments)

    async def _stop_profile(self, client: EngineClient, call: events.StopProfile) -> events.Returned:
        """Stop. A refusal means that no session was open: it ended by itself or, by stage, never began."""
        plan, directory = call.session.plan, self._traces / call.directory
        refused = not await _accepts(client, "stop_profile")
        if plan.by_stage:
            for _ in range(STAGES):  # each stage begins once, perhaps since the stop
                if await _accepts(client, "start_profile", **NEVER):
                    break
                await _accepts(client, "stop_profile")
        files = await to_thread.run_sync(_files, directory)
        if refused and not files and not plan.by_stage:
            raise EngineError(
                "sglang refused the stop, and the session left no trace: it was not recording. Its log says why."
            )
        if plan.merge and files and not any(name.startswith("merged-") for name in files):
            raise EngineError(f"sglang merged no traces; each rank's is in {directory}. Its log says why.")
        found = await to_thread.run_sync(collect_traces, self._traces, call.directory, plan, self._identity)
        return replace(found, auto_stopped=refused and bool(files))


def path_to_load(taken: Taken) -> str:
    """Return a path to what is to be loaded. Older versions report it as that of their model, so that of a delta begins
    with the whole checkpoint's, and goes on beside it.
    """
    if taken.delta is None:
        return str(taken.whole)
    return f"{taken.whole}{BESIDE}{os.path.relpath(taken.delta, taken.whole.parent)}"


async def _accepts(client: EngineClient, method: str, **arguments: object) -> bool:
    """Call the method; False if the engine refuses it in its present state. Raises EngineError for other failures."""
    try:
        await client.call(method, **arguments)
    except CallRefused as error:
        if error.status not in (None, 500):
            raise
        return False
    return True


def _files(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file()]
