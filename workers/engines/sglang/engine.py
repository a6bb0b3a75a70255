"""SGLang, over HTTP or in process. One adapter, which calls methods by `TokenizerManager`'s names either way.

Checked against the source of SGLang 0.5.6 to 0.5.23; run with 0.5.23. Versions differ in the parameters of their
methods, so the adapter looks up which ones a method takes.

Where SGLang differs from other engines:

- It dies where others return an error: on a release while requests run, on a resume of what was not released, on a
  load that flushes while requests run, on a profile by stage without a number of steps. The machine prevents most of
  this. Here, a release comes after a flush that succeeded, and a load never flushes.
- Health proves nothing: on node ranks above 0 it is 200, and every engine route is 404. `/server_info` is decisive.
- A second start of a profile is a 200 that discards the first, whoever started it. Only a start for a later forward
  step reveals whether a session is open. So before each start, the adapter sends one for a step that never comes.
- A stop of a session that ended by itself is a bare 500. So is a stop, by stage, of a session that has not begun; it
  would begin in a later step. The start that never comes replaces it.
- By stage, the first token ends the trace of the prompts. A prompt that arrives while tokens are recorded ends up in
  the trace of the tokens. One trace ends and the next begins inside an open span (from 0.5.14 on): torch 2.13 can crash
  on that; 2.14.1, which 0.5.23 requires, has not been seen to.
- Modules appear in stacks only, so a plan with modules records stacks. An NPU's level is SGLang's own (never run here).
- `update_weight_version` aborts every request unless told not to.
- A pause with `in_place` or `retract` can't be verified over HTTP: no route reports it.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, assert_never

import anyio
from anyio import CancelScope, to_thread
from msgspec.structs import replace

from schemas import events
from schemas.commands import Broadcast, Checkpoint, Manifest
from schemas.errors import CheckpointError, EngineError
from schemas.identity import GPUS_PER_NODE_MAX, InFlight
from schemas.safetensors.format import read_layout, safetensors_files
from workers.engines.attached import AttachedEngine
from workers.engines.checkpoint import buckets, group_ranks, torch_dtypes_and_shapes
from workers.engines.client import RETRY_S, CallRefused, EngineClient, retry_time_s
from workers.engines.sglang.launch import SGLANG, SGLangLaunch
from workers.engines.sglang.profile import NEVER, profile_arguments
from workers.traces.node import collect_traces, make_fresh, require_writable

FLUSH_WAIT_S: Final = 5.0
"""Most seconds that the server itself waits for a moment without requests, if its version can."""
STAGES: Final = 2

_PAUSE_MODES: Final[dict[InFlight, str]] = {"abort": "abort", "wait": "retract", "keep": "in_place"}


class SGLangEngine(AttachedEngine[SGLangLaunch]):
    """One SGLang engine, seen from one node of its replica. The client reaches this node's own server."""

    kind = SGLANG

    async def open(self) -> None:
        """Attach to the engine.

        Raises:
            EngineError: The traces' root is not writable; a scheduler that can't write a trace dies.
        """
        await super().open()
        await to_thread.run_sync(require_writable, self._traces, "An SGLang scheduler, which dies if it can't write,")

    async def perform(self, call: events.EngineCall, timeout_s: float) -> events.Returned:
        client, launch = await self._attached()
        match call:
            case events.CheckSource():
                await self._check_source(launch, call)
            case events.Pause():
                await self._pause(client, launch, call, timeout_s)
            case events.Resume():
                await client.call("continue_generation")
            case events.Sleep():
                await self._sleep(client, launch, call, timeout_s)
            case events.Wake():
                await client.call("resume_memory_occupation", tags=sorted(call.tags))
            case events.Load():
                await self._load(client, launch, call)
            case events.Flush():
                await self._flush(client, launch, timeout_s)
            case events.Abort():
                await client.call("abort_request", rid="", abort_all=True)
            case events.CheckProfile():
                profile_arguments(call.plan, "", self._traces, launch)
                await to_thread.run_sync(require_writable, self._traces, "sglang")
            case events.StartProfile():
                await self._start_profile(client, launch, call)
            case events.StopProfile():
                return await self._stop_profile(client, call)
            case _:
                assert_never(call)
        return events.Returned()

    # --- requests, memory and weights ---------------------------------------------------------------------------------

    async def _pause(self, client: EngineClient, launch: SGLangLaunch, call: events.Pause, timeout_s: float) -> None:
        if call.mode == "wait":
            await self._flush(client, launch, timeout_s)  # succeeds in a moment without requests
        await client.call("pause_generation", mode=_PAUSE_MODES[call.mode])

    async def _sleep(self, client: EngineClient, launch: SGLangLaunch, call: events.Sleep, timeout_s: float) -> None:
        if "weights" in call.tags and not call.discard and not launch.keeps_weights:
            raise EngineError(
                "sglang would lose the weights that it releases: launch it with --enable-weights-cpu-backup, or sleep "
                "with `discard` and load them again. Nothing was released."
            )
        await self._flush(client, launch, timeout_s)
        await client.call("release_memory_occupation", tags=sorted(call.tags))

    async def _check_source(self, launch: SGLangLaunch, call: events.CheckSource) -> None:
        if isinstance(call.source, Checkpoint) and call.source.as_tensors and self._identity.nnodes > 1:
            raise CheckpointError("tensors are handed over on one node only: use a broadcast for several.")
        await super()._check_source(launch, call)

    async def _load(self, client: EngineClient, launch: SGLangLaunch, call: events.Load) -> None:
        source = call.source
        if isinstance(source, Broadcast):
            await self._receive(client, launch, source, call.manifest)
        else:
            directory = await to_thread.run_sync(self._sources.checked_directory, source, call.manifest, launch.model)
            if source.as_tensors:
                await self._hand_over(client, launch, directory)
            else:  # without a format it may fall back to unpickling; its own flush kills versions up to 0.5.21
                await client.call(
                    "update_weights_from_disk", model_path=str(directory), load_format="safetensors", flush_cache=False
                )
        await client.call(
            "update_weight_version", new_version=call.label or str(call.version), abort_all_requests=False
        )

    async def _receive(
        self, client: EngineClient, launch: SGLangLaunch, source: Broadcast, manifest: Manifest | None
    ) -> None:
        layout = self._sources.checked_layout(source, manifest, launch.model, self._identity)
        if self._group != source.group:
            offset, world = group_ranks(source, self._identity)
            await client.call(
                "init_weights_update_group",
                master_address=source.host,
                master_port=source.port,
                rank_offset=offset,
                world_size=world,
                group_name=source.group,
                backend=source.backend,
            )
            self._group = source.group
        async with _weight_update(client, launch):
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

    async def _hand_over(self, client: EngineClient, launch: SGLangLaunch, directory: Path) -> None:
        """Pass tensors through SGLang's own serializer, which names shared memory instead of copying."""
        if not 0 < launch.tensor_parallel <= GPUS_PER_NODE_MAX:
            raise EngineError(f"sglang reports {launch.tensor_parallel} tensor-parallel ranks on one node.")
        layout = await to_thread.run_sync(read_layout, directory)
        async with _weight_update(client, launch):
            for names in buckets(layout):
                packed = await to_thread.run_sync(_packed, directory, names)
                each_rank = [packed] * launch.tensor_parallel
                await client.call("update_weights_from_tensor", serialized_named_tensors=each_rank, flush_cache=False)

    async def _flush(self, client: EngineClient, launch: SGLangLaunch, timeout_s: float) -> None:
        """Flush. It is refused while requests run: ask again until it succeeds or the time is up."""
        until = time.monotonic() + retry_time_s(timeout_s)
        waits = bool({"timeout_s", "timeout"} & launch.methods["flush_cache"])
        while True:
            left = until - time.monotonic()
            try:
                await client.call("flush_cache", **({"timeout_s": max(0.0, min(FLUSH_WAIT_S, left))} if waits else {}))
                return
            except CallRefused as error:
                if error.status not in (None, 400) or time.monotonic() + RETRY_S > until:
                    raise
            await anyio.sleep(RETRY_S)

    # --- profiling ----------------------------------------------------------------------------------------------------

    async def _start_profile(self, client: EngineClient, launch: SGLangLaunch, call: events.StartProfile) -> None:
        arguments = profile_arguments(call.session.plan, call.directory, self._traces, launch)
        await to_thread.run_sync(make_fresh, self._traces / call.directory)
        if not await _accepts(client, "start_profile", **NEVER):
            raise EngineError(
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


async def _accepts(client: EngineClient, method: str, **arguments: object) -> bool:
    """Call the method; False if the engine refuses it in its present state. Raises EngineError for other failures."""
    try:
        await client.call(method, **arguments)
    except CallRefused as error:
        if error.status not in (None, 500):
            raise
        return False
    return True


@asynccontextmanager
async def _weight_update(client: EngineClient, launch: SGLangLaunch) -> AsyncIterator[None]:
    """Begin and end a weight update, from 0.5.21 on. One that is left open blocks every later one."""
    if "begin_weight_update" not in launch.methods:
        yield
        return
    await client.call("begin_weight_update")
    try:
        yield
    except BaseException:
        with CancelScope(shield=True), suppress(EngineError):  # the first error is the one to report
            await client.call("end_weight_update")
        raise
    await client.call("end_weight_update")


def _packed(directory: Path, names: list[str]) -> str:
    """Pack named tensors in SGLang's format. Raises EngineError where SGLang is not installed."""
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
    # The other strategy crashes SGLang.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        packed: str = MultiprocessingSerializer.serialize(tensors, output_str=True)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
    return packed


def _files(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file()]
