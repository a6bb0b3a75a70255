"""The embedded engine: a small torch language model that really samples, loads, pauses, sleeps and is profiled.

It runs in the agent's process, on a thread of its own, so no forward ever blocks the agent's loop. Node rank 0 has the
model and the front end. As with the real engines, a higher node rank has neither, and it never imports torch.

It starts paused: the agent learns the desired state only some moments later, and nothing may be generated before that.
"""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

import anyio
from anyio import CancelScope, to_thread
from msgspec.structs import replace

from schemas import events
from schemas.commands import Checkpoint
from schemas.errors import CheckpointError, ExtraMissing, RefusedError
from schemas.identity import Digests, Identity, Operation
from schemas.safetensors.format import TensorSpec, find_tensors
from schemas.safetensors.manifest import content_differs
from schemas.safetensors.paths import resolve_below
from schemas.safetensors.reading import read_tensors
from workers.engines.adapter_files import checked_adapter
from workers.engines.checkpoint import SourceChecker, Taken
from workers.engines.observed import LoRALimits
from workers.engines.tiny import server
from workers.traces.node import collect_traces, require_writable

if TYPE_CHECKING:
    from torch import Tensor

    from workers.engines.tiny.model import TinyConfig
    from workers.engines.tiny.scheduler import Scheduler

POLL_S: Final = 0.001
NAME: Final = "tiny 1"
"""Kind and version, as outcomes name it."""


class TinyEngine:
    """An engine for one node.

    Args:
        identity: The node.
        checkpoints: Root of the paths in weight syncs.
        traces: Root of the directories of profiling sessions.
        serve: `ipc://PATH` at which clients find its front end; None for no front end.
        seed: Seed of the weights that it starts with.
        digests: After which loads the digest of its weights is computed; after those of syncs with one in any case.
        config: Shape of the model; None for a small one.
        device: Where its weights and forwards are, as torch names it.
        places: How many adapters it holds at most; None for no limit.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        checkpoints: Path,
        traces: Path,
        serve: str | None = None,
        seed: int = 0,
        digests: Digests = "announced",
        config: "TinyConfig | None" = None,
        device: str = "cpu",
        places: int | None = None,
    ) -> None:
        self._identity = identity
        self._checkpoints, self._traces, self._digests = checkpoints, traces, digests
        self._serve, self._seed, self._config, self._device = serve, seed, config, device
        self._places = places
        self._instance = ""
        self._layout: dict[str, TensorSpec] = {}
        self._sources = SourceChecker(checkpoints)
        self._scheduler: Scheduler | None = None
        self._resources = ExitStack()

    async def open(self) -> None:
        """Build the model and open the front end. Raises EngineError."""
        self._instance = secrets.token_hex(8)
        if self._identity.node_rank == 0:
            await to_thread.run_sync(self._launch)

    async def observe(self) -> events.Observation:
        """Return what the engine is between two commands."""
        if self._scheduler is None:
            return events.Observation(engine=NAME, instance=self._instance, tokenizer="absent")
        return self._scheduler.counted()

    async def perform(self, call: events.EngineCall, timeout_s: float) -> events.Returned:
        with CancelScope(shield=True):
            returned = await to_thread.run_sync(self._perform, call)
        return returned

    async def close(self) -> None:
        """End what runs; a trace that is being recorded is written."""
        with CancelScope(shield=True):
            await to_thread.run_sync(self._resources.close)
        self._scheduler = None

    async def generate(self, prompt: Sequence[int], max_tokens: int, model: str = "") -> AsyncIterator[int]:
        """Yield greedy tokens as they are made (`workers.conformance.engine_under_test.GenerationClient`).

        Args:
            prompt: Tokens.
            max_tokens: Tokens to add.
            model: The version of a LoRA adapter; empty for the base weights alone.
        """
        scheduler, made = self._require_scheduler(), 0
        message = server.Generate(prompts=[list(prompt)], max_tokens=max_tokens, temperature=0.0, model=model)
        request = await to_thread.run_sync(scheduler.begin, message)
        while True:
            over = request.answer.done()
            for token in request.made(made):
                made += 1
                yield token
            if over:
                return
            await anyio.sleep(POLL_S)

    async def memory_bytes(self) -> int:
        """Return the bytes that it holds and can release."""
        scheduler = self._require_scheduler()
        return await to_thread.run_sync(scheduler.run, scheduler.memory_bytes)

    # --- in a worker thread -------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        try:
            from workers.engines.tiny.model import TinyConfig, layout, weights
            from workers.engines.tiny.scheduler import Scheduler
        except ModuleNotFoundError as error:
            raise ExtraMissing(
                f"the tiny engine needs torch and safetensors, and {error.name} is not installed", "torch"
            ) from error

        launched = events.Observation(
            engine=NAME,
            instance=self._instance,
            tokenizer="present",
            operations=frozenset(Operation),
            generating=False,
            asleep=frozenset(),
            profiling=False,
            version=0,
            label="",
            remedies=events.Remedies(launched_from=f"seed {self._seed}"),
            recomputes=True,
            adapters={},
            adapter_places=self._places,
        )
        with ExitStack() as stack:
            scheduler = Scheduler(self._config or TinyConfig(), self._seed, launched, self._device)
            stack.callback(scheduler.close)
            self._layout = layout(weights(scheduler.model))
            self._sources = SourceChecker(self._checkpoints, self._layout)
            if self._serve is not None:
                stack.callback(server.TinyServer(self._serve, self._respond).close)
            self._scheduler = scheduler
            self._resources = stack.pop_all()

    def _respond(self, request: server.Request) -> server.Answer:
        """Answer a client of the front end, on a thread of its connection."""
        scheduler = self._require_scheduler()
        if isinstance(request, server.Generate):
            return server.Completions(scheduler.generate(request))
        held = scheduler.counted()
        return server.EngineDescription(replace(held, digest=held.digest or scheduler.run(scheduler.digest)))

    def _perform(self, call: events.EngineCall) -> events.Returned:
        scheduler = self._require_scheduler()
        match call:
            case events.CheckSource():
                self._directory(call)
            case events.Load():
                tensors, content, took = self._read(scheduler, call)
                scheduler.run(scheduler.load, call.version, tensors, call.label, content)
                return events.Returned(digest=content, took=took)
            case events.Restore():
                self._restore(scheduler)
            case events.Pause():
                scheduler.run(scheduler.pause, call.mode)
            case events.Resume():
                scheduler.run(scheduler.resume)
            case events.Sleep():
                scheduler.run(scheduler.sleep, call.tags)
            case events.Wake():
                scheduler.run(scheduler.wake, call.tags)
            case events.Flush():
                scheduler.run(scheduler.flush)
            case events.Abort():
                scheduler.run(scheduler.abort)
            case events.CheckProfile() | events.StartProfile() | events.StopProfile():
                return self._profile(scheduler, call)
            case events.CheckAdapter() | events.LoadAdapter() | events.UnloadAdapter():
                self._adapter(scheduler, call)
            case _:
                assert_never(call)
        return events.Returned()

    def _directory(self, call: events.CheckSource | events.Load) -> Taken:
        if not isinstance(call.source, Checkpoint):
            raise CheckpointError("the tiny engine loads checkpoints, and receives no broadcast. Nothing was loaded.")
        return self._sources.checked_directory(call.source, call.manifest, None)

    def _read(self, scheduler: "Scheduler", call: events.Load) -> "tuple[dict[str, Tensor], str | None, str]":
        """Read a checkpoint. Returns its tensors, their content digest if one is announced or always computed, and what
        was taken. A delta is read over a copy of the weights that are held, and the digest is of them all.

        Raises:
            CheckpointError: The model can't load every byte of it.
        """
        from workers.engines.tiny.model import digest, empty, memory_of

        taken, manifest = self._directory(call), call.manifest
        tensors = scheduler.run(scheduler.copied) if taken.delta is not None else empty(self._layout)
        memory = {name: memory_of(tensor) for name, tensor in tensors.items()}
        content = manifest.content if manifest is not None else None
        digested = content is not None or self._digests == "always"
        found = read_tensors(find_tensors(taken.directory), memory, content=digested and taken.delta is None)
        if taken.delta is not None and digested:
            found = digest(tensors)
        if manifest is not None and found is not None and content not in (None, found):
            raise content_differs(taken.directory, found, manifest)
        return tensors, found, taken.took

    def _adapter(
        self, scheduler: "Scheduler", call: events.CheckAdapter | events.LoadAdapter | events.UnloadAdapter
    ) -> None:
        from workers.engines.tiny.model import read_adapter

        if isinstance(call, events.UnloadAdapter):
            scheduler.run(scheduler.unload_adapter, call.model)
            return
        adapter, held = call.adapter, scheduler.observation.adapters or {}
        if self._places is not None and len(held.keys() - {adapter.model}) >= self._places:
            raise RefusedError(f"{NAME} holds {self._places} adapters at most: {adapter.model} was not loaded.")
        directory = checked_adapter(self._checkpoints, adapter, self._layout, LoRALimits())
        if isinstance(call, events.LoadAdapter):
            scheduler.run(scheduler.load_adapter, adapter.model, adapter.path, read_adapter(directory))

    def _restore(self, scheduler: "Scheduler") -> None:
        from workers.engines.tiny.model import TinyModel, digest, weights

        launched = weights(TinyModel(scheduler.model.config, self._seed))
        scheduler.run(scheduler.load, 0, launched, "", digest(launched))

    def _profile(self, scheduler: "Scheduler", call: events.ProfileCall) -> events.Returned:
        from workers.engines.tiny.profile import require_supported

        if isinstance(call, events.CheckProfile):
            require_supported(call.plan)
            require_writable(self._traces, "The engine")
            return events.Returned()
        plan = call.session.plan
        if isinstance(call, events.StartProfile):
            name = f"tiny-{self._instance}-step{call.session.step}.pt.trace.json"
            scheduler.run(scheduler.start_profile, plan, resolve_below(self._traces, call.directory) / name)
            return events.Returned()
        ended = scheduler.run(scheduler.stop_profile)
        traces = collect_traces(self._traces.resolve(), call.directory, plan, self._identity)
        return replace(traces, auto_stopped=ended)

    def _require_scheduler(self) -> "Scheduler":
        if self._scheduler is None:
            raise RefusedError("this node has no engine to call: it is not node rank 0, or it was closed.")
        return self._scheduler
