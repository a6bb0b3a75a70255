"""vLLM, over HTTP or in process. One backend, which calls methods by `AsyncLLM`'s names either way.

Checked against the source of vLLM 0.13 to 0.33; docs/engines.md says which were run. Its server needs
VLLM_SERVER_DEV_MODE=1 for the control routes and, to be profiled, `--profiler-config`. Its control routes ask for no
key: keep the server on loopback.

Where vLLM differs from other engines:

- The traces' directory is fixed at launch. They are moved to the session's directory after the stop.
- The contents of a trace are fixed at launch too, and so is its window up to 0.31. A plan that asks for more is
  refused. Modules appear in stacks only. An NPU's levels are those of vllm-ascend (never run here).
- A `delay_iterations` of n > 0 skips n - 1 forward steps, and 0 skips none. A step that computes nothing, and only
  releases the last request, counts too.
- A profiler of its front end is started on one thread and stopped on another: with torch 2.13 it records nothing, and
  more often than not the server dies at the stop (0.32, run). So an engine that has it, as by default, is not profiled.
- A second start is a 409 from 0.32 on; before, it is silently accepted. There, a session that another program started
  can't be seen, and ends with ours. A second stop is silently accepted. The machine sends neither.
- Waking the last region of memory un-pauses the scheduler, so the backend pauses it again at once.
- A reload that raises in a worker ends the server, so a source is checked beforehand, and again just before the load.
- A failed `reset_prefix_cache` is HTTP 200 with `success: false`.
- An adapter that is loaded in place is read again at each forward step, and mixes two versions in one sequence. So none
  is. One that fits the model badly is loaded with 200 and served (docs/lora.md).
"""

import os
import time
from pathlib import Path
from typing import Final, assert_never

import anyio
from anyio import to_thread
from msgspec.structs import replace

from schemas import events
from schemas.commands import Broadcast
from schemas.errors import CheckpointError, EngineError, RefusedError, UnansweredError, UnsupportedError
from schemas.events import Load, Restore
from workers.engines.attached import AttachedEngine, label_after, weight_update
from workers.engines.checkpoint import buckets, group_ranks, torch_dtypes_and_shapes
from workers.engines.client import RETRY_S, CallRefused, EngineClient, begun, retry_time_s
from workers.engines.counters import adapters_in_use
from workers.engines.vllm.launch import VLLM, VLLMLaunch
from workers.engines.vllm.profile import profile_arguments
from workers.traces.node import collect_traces, make_fresh, move_trace, require_writable

PAUSE_MODES: Final = ("mode", "wait_for_inflight_requests")
"""Parameters of a pause that say what becomes of requests: up to 0.15 the second alone."""
BEFORE: Final = ".before"
"""File in a session's directory with the names of the files that were in the engine's before. An agent that is
restarted needs it to tell whose they are."""


class VLLMEngine(AttachedEngine[VLLMLaunch]):
    """One vLLM engine, seen from one node of its replica. A headless node (node rank above 0) has no client."""

    kind, _fuses, _loaded_option = VLLM, True, "--max-cpu-loras"
    _checksums = "compute_weight_checksums", "action"
    _proven: tuple[VLLMLaunch, frozenset[str]] | None = None  # what a pause of this launch was seen to read

    async def perform(self, call: events.EngineCall, timeout_s: float) -> events.Returned:
        client, launch = await self._attached()
        match call:
            case events.CheckSource():
                await self._check_source(client, launch, call, timeout_s)
            case events.Pause():
                await self._pause(client, launch, call)
            case events.Resume():
                await client.call("resume_generation")
            case events.Sleep():
                await self._sleep(client, launch, call)
            case events.Wake():
                await self._wake(client, launch, call)
            case Load() | Restore():
                return await self._load(client, launch, call)
            case events.Flush():
                await self._flush(client, launch, timeout_s)
            case events.Abort():
                await client.call("abort")
            case events.CheckProfile() | events.StartProfile() | events.StopProfile():
                return await self._profile(client, launch, call)
            case events.CheckAdapter() | events.LoadAdapter() | events.UnloadAdapter():
                await self._adapter(client, launch, call, timeout_s)
            case _:
                assert_never(call)
        return events.Returned()

    async def _pause(self, client: EngineClient, launch: VLLMLaunch, call: events.Pause) -> None:
        read = await self._read_by_pause(client, launch)
        await client.call("pause_generation", **pause_arguments(call, read, launch.version))

    async def _read_by_pause(self, client: EngineClient, launch: VLLMLaunch) -> frozenset[str]:
        """Return which parameters of a pause are read. A server with two routes at one path lists those of the other.

        Raises:
            EngineError: None are, and the engine was paused as that route does it.
        """
        if self._proven is None or self._proven[0] is not launch:
            read = await client.parameters("pause_generation", *PAUSE_MODES)
            if not read:
                raise EngineError(
                    f"vllm {launch.version} at {client.where} paused without regard to how: another route hides its "
                    "own /pause, and may have aborted requests. Take that route out of the server."
                )
            self._proven = launch, read
        return self._proven[1]

    # --- memory and weights -------------------------------------------------------------------------------------------

    async def _sleep(self, client: EngineClient, launch: VLLMLaunch, call: events.Sleep) -> None:
        if call.tags == {"kv_cache"}:
            if "release_kv_cache_memory" not in launch.methods:
                raise UnsupportedError(
                    f"vllm {launch.version} can't release the KV cache alone: sleep both, or use 0.31."
                )
            await client.call("release_kv_cache_memory")
            return
        if call.tags == {"weights"}:
            raise UnsupportedError("vllm releases its weights only together with the KV cache: sleep both.")
        # Up to 0.16 there is no mode, and it is ignored. From 0.17 on the default would abort frozen requests.
        mode = {"mode": "keep"} if "mode" in launch.methods["sleep"] else {}
        await client.call("sleep", level=2 if call.discard else 1, **mode)

    async def _wake(self, client: EngineClient, launch: VLLMLaunch, call: events.Wake) -> None:
        # Up to 0.23, the first region that wakes resumes the scheduler, which would then run without its cache. There,
        # the cache wakes together with the weights, so it is already awake when it is asked for.
        together = "release_kv_cache_memory" not in launch.methods
        if together and call.tags == {"kv_cache"}:
            return
        await client.call("wake_up", tags=["kv_cache", "weights"] if together else sorted(call.tags))
        with begun():
            if await client.read("is_paused") is False:
                freezes = "mode" in await self._read_by_pause(client, launch)
                await self._pause(client, launch, events.Pause("keep" if freezes else "wait"))

    async def _check_source(
        self, client: EngineClient, launch: VLLMLaunch, call: events.CheckSource, timeout_s: float
    ) -> None:
        if isinstance(call.source, Broadcast) and "update_weights" not in launch.methods:
            raise CheckpointError(f"vllm {launch.version} can't receive a broadcast: sync from a checkpoint.")
        await super()._check_source(client, launch, call, timeout_s)

    async def _load(self, client: EngineClient, launch: VLLMLaunch, call: Load | Restore) -> events.Returned:
        took = ""
        if isinstance(call, Load) and isinstance(call.source, Broadcast):
            await self._receive(client, launch, call.source, call)
        else:
            taken = await to_thread.run_sync(self._directory, launch, call)
            kwargs, took = {"weights_path": str(taken.directory)}, taken.took
            await client.call("collective_rpc", method="reload_weights", kwargs=kwargs)
        with begun():
            if "update_weight_version" in launch.methods:
                await client.call("update_weight_version", new_version=label_after(call))
            return await self._loaded(client, launch, call, took)

    async def _receive(self, client: EngineClient, launch: VLLMLaunch, source: Broadcast, call: Load) -> None:
        """Receive weights over NCCL (vllm/distributed/weight_transfer/nccl_engine.py). Needs GPUs."""
        layout = self._sources.checked_layout(source, call.manifest, launch.model, self._identity)
        if self._joined != (launch.instance, source.group):
            offset, world = group_ranks(source, self._identity)
            init = {"master_address": source.host, "master_port": source.port}
            init_info = {**init, "rank_offset": offset, "world_size": world}
            await client.call("init_weight_transfer_engine", init_info=init_info)
            self._joined = (launch.instance, source.group)
        async with weight_update(client, launch, "start_weight_update", "finish_weight_update"):
            for names in buckets(layout):
                dtypes, shapes = torch_dtypes_and_shapes(layout, names)
                info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
                await client.call("update_weights", update_info=info)

    async def _flush(self, client: EngineClient, launch: VLLMLaunch, timeout_s: float) -> None:
        """Flush. Requests that use the cache are computed anew, running or frozen. A version that can't do that does
        not drop the prefix of such a request: ask again until it can, or the time is up.
        """
        until = time.monotonic() + retry_time_s(timeout_s)
        arguments = {"reset_running_requests": True} if launch.recomputes else {}
        while await client.call("reset_prefix_cache", **arguments) is False:
            if time.monotonic() + RETRY_S > until:
                raise RefusedError("vllm did not drop its prefix cache by the deadline: requests still use it.")
            await anyio.sleep(RETRY_S)
        if "reset_encoder_cache" in launch.methods:
            await client.call("reset_encoder_cache")

    async def _in_use(self, client: EngineClient, launch: VLLMLaunch, model: str) -> bool | None:
        """Ask its metrics. An adapter whose requests run may have to be read again: the engine dies if it is gone."""
        try:
            in_use = adapters_in_use(str(await client.read("get_metrics")))
        except (CallRefused, UnansweredError):
            return None
        return None if in_use is None else model in in_use

    # --- profiling ----------------------------------------------------------------------------------------------------

    async def _profile(self, client: EngineClient, launch: VLLMLaunch, call: events.ProfileCall) -> events.Returned:
        if isinstance(call, events.StopProfile):
            return await self._stop_profile(client, launch, call)
        if isinstance(call, events.StartProfile):
            await self._start_profile(client, launch, call)
        else:
            profile_arguments(call.plan, "", launch)
            await to_thread.run_sync(require_writable, self._traces, "The agent")
            assert launch.profiles_to is not None
            await to_thread.run_sync(require_writable, launch.profiles_to, "vllm")
        return events.Returned()

    async def _start_profile(self, client: EngineClient, launch: VLLMLaunch, call: events.StartProfile) -> None:
        arguments = profile_arguments(call.session.plan, call.directory, launch)
        await to_thread.run_sync(make_fresh, self._traces / call.directory)
        before = "\0".join(await to_thread.run_sync(_files, launch.profiles_to))
        note = self._traces / call.directory / BEFORE
        await to_thread.run_sync(note.write_bytes, os.fsencode(before))
        try:
            await client.call("start_profile", **arguments)
        except CallRefused:
            await to_thread.run_sync(note.unlink)
            raise

    async def _stop_profile(
        self, client: EngineClient, launch: VLLMLaunch, call: events.StopProfile
    ) -> events.Returned:
        ended = bool(await to_thread.run_sync(self._left, launch.profiles_to, call))
        await client.call("stop_profile")
        found = await to_thread.run_sync(self._collect, launch.profiles_to, call)
        return replace(found, auto_stopped=ended and call.session.plan.window is not None)

    def _collect(self, profiles_to: Path | None, call: events.StopProfile) -> events.Returned:
        """Move what the session left in the engine's directory to the session's."""
        for file in self._left(profiles_to, call):
            move_trace(file, self._traces / call.directory)
        (self._traces / call.directory / BEFORE).unlink(missing_ok=True)
        return collect_traces(self._traces, call.directory, call.session.plan, self._identity)

    def _left(self, profiles_to: Path | None, call: events.StopProfile) -> list[Path]:
        """Return what the session has left in the engine's directory. Without a note of what was there, nothing has."""
        note = self._traces / call.directory / BEFORE
        if profiles_to is None or not note.is_file():
            return []
        before = os.fsdecode(note.read_bytes()).split("\0")
        return [profiles_to / name for name in sorted(_files(profiles_to)) if name not in before]


def pause_arguments(call: events.Pause, read: frozenset[str], version: str) -> dict[str, object]:
    """Return the arguments of a pause. They leave the cache alone: the machine flushes when weights have changed.

    Raises UnsupportedError.
    """
    if "mode" in read:
        return {"mode": call.mode, "clear_cache": False}
    if call.mode == "keep":
        raise UnsupportedError(f"vllm {version} can't freeze requests: pause with `abort` or `wait`.")
    return {"wait_for_inflight_requests": call.mode == "wait", "clear_cache": False}


def _files(directory: Path | None) -> frozenset[str]:
    if directory is None or not directory.is_dir():
        return frozenset()
    return frozenset(path.name for path in directory.iterdir() if path.is_file())
