"""The embedded engine: a small torch language model that really samples, loads, pauses, sleeps and is profiled.

It runs in the agent's process, on a thread of its own, so no forward ever holds up the agent's loop. Node rank 0 has
the model and the front end; a node of a higher rank has neither, as with the real engines, and never imports torch.

It starts paused. An agent that launches its engine knows what is desired of it only some moments later, and nothing may
be generated before that.
"""

import secrets
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, assert_never

from anyio import CancelScope, to_thread
from msgspec.structs import replace

from schemas.commands import Checkpoint, Manifest, Source
from schemas.errors import CheckpointError, EngineError, RolloutctlError
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
from schemas.safetensors.format import TensorSpec, read_layout
from schemas.safetensors.manifest import check_directory, check_layout, content_differs, require_same_model
from schemas.safetensors.paths import resolve_below
from workers.traces.node import collect_traces, require_writable

if TYPE_CHECKING:
    from torch import Tensor

    from workers.engines.tiny.model import TinyConfig
    from workers.engines.tiny.scheduler import Scheduler

NAME: Final = "tiny 1"
"""Kind and version, as outcomes name it."""

T = TypeVar("T")


class TinyEngine:
    """An engine for one node. checkpoints, traces: roots of the paths that commands name.

    serve: where clients find its front end, `ipc://…` or `tcp://127.0.0.1:…`; None for none.   seed: of the weights it
    starts with.   config: the shape of the model; None for the default one.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        checkpoints: Path,
        traces: Path,
        serve: str | None = None,
        seed: int = 0,
        config: "TinyConfig | None" = None,
    ) -> None:
        self._identity = identity
        self._checkpoints, self._traces = checkpoints, traces
        self._serve, self._seed, self._config = serve, seed, config
        self._instance = ""
        self._layout: dict[str, TensorSpec] = {}
        self._scheduler: Scheduler | None = None
        self._open = ExitStack()

    async def open(self) -> None:
        """Build the model and open the front end. Raises BusAddressError, EngineError."""
        self._instance = secrets.token_hex(8)
        if self._identity.node_rank == 0:
            await to_thread.run_sync(self._launch)

    async def observe(self) -> Observation:
        """What it holds, between two things that it was told."""
        if self._scheduler is None:
            return Observation(engine=NAME, instance=self._instance, tokenizer="absent")
        holding = self._scheduler.holding
        return Observation(
            engine=NAME,
            instance=self._instance,
            tokenizer="present",
            operations=frozenset(Operation),
            generating=holding.generating,
            asleep=holding.asleep,
            profiling=holding.profiling,
            version=holding.version,
            digest=holding.digest,
        )

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        """Make one call. Raises CheckpointError (the weights are as they were) and EngineError."""
        with CancelScope(shield=True):
            returned = await to_thread.run_sync(self._perform, call)
        return returned

    async def close(self) -> None:
        """End what runs; a trace that is being recorded is written."""
        with CancelScope(shield=True):
            await to_thread.run_sync(self._open.close)
        self._scheduler = None

    # --- in a worker thread -------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        try:
            from workers.engines.tiny.model import TinyConfig, layout, weights
            from workers.engines.tiny.profile import prepare
            from workers.engines.tiny.scheduler import Scheduler
            from workers.engines.tiny.server import TinyServer
        except ModuleNotFoundError as error:
            raise EngineError(
                f"the tiny engine needs torch and safetensors, and {error.name} is not installed: pip install "
                "'rolloutctl[torch]'"
            ) from error

        prepare()
        with ExitStack() as stack:
            scheduler = Scheduler(self._config or TinyConfig(), self._seed)
            self._layout = layout(weights(scheduler.model))
            scheduler.start()
            stack.callback(scheduler.close)
            if self._serve is not None:
                server = TinyServer(scheduler)
                server.start(self._serve)
                stack.callback(server.close)
            self._scheduler = scheduler
            self._open = stack.pop_all()

    def _perform(self, call: EngineCall) -> Returned:
        scheduler = self._scheduler
        if scheduler is None:
            raise EngineError("this node has no engine to call: it is not node rank 0, or it was closed.")
        match call:
            case CheckSource():
                self._check(call.source, call.manifest)
            case Load():
                tensors = self._read(call.source, call.manifest)
                return Returned(digest=self._on_thread(lambda: scheduler.load(call.version, tensors)))
            case Pause():
                self._pause(scheduler, call)
            case Resume():
                self._on_thread(scheduler.resume)
            case Sleep():
                self._on_thread(lambda: scheduler.sleep(call.tags))
            case Wake():
                self._on_thread(lambda: scheduler.wake(call.tags))
            case Flush():
                self._on_thread(scheduler.flush)
            case Abort():
                self._on_thread(scheduler.abort)
            case CheckProfile():
                from workers.engines.tiny.profile import require_possible

                require_possible(call.plan)
                require_writable(self._traces, "The engine")
            case StartProfile():
                file = (
                    resolve_below(self._traces, call.directory)
                    / f"tiny-{self._instance}-step{call.session.step}.pt.trace.json"
                )
                self._on_thread(lambda: scheduler.start_profile(call.session.plan, file))
            case StopProfile():
                ended = self._on_thread(scheduler.stop_profile)
                plan = call.session.plan
                return replace(
                    collect_traces(self._traces.resolve(), call.directory, plan, self._identity), auto_stopped=ended
                )
            case _:
                assert_never(call)
        return Returned()

    def _pause(self, scheduler: "Scheduler", call: Pause) -> None:
        paused: Future[None] = Future()

        def done(error: RolloutctlError | None) -> None:
            if error is None:
                paused.set_result(None)
            else:
                paused.set_exception(error)

        self._on_thread(lambda: scheduler.pause(call.mode, done))
        paused.result()

    def _on_thread(self, action: Callable[[], T]) -> T:
        """Have the engine's thread do it between two forwards; wait for what it gives back."""
        done: Future[T] = Future()

        def act() -> None:
            try:
                done.set_result(action())
            except Exception as error:
                done.set_exception(error)

        assert self._scheduler is not None
        self._scheduler.do(act)
        return done.result()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _check(self, source: Source, manifest: Manifest | None) -> None:
        """Raise CheckpointError unless the model could take what lies there now, every byte of it."""
        if not isinstance(source, Checkpoint):
            raise CheckpointError("the tiny engine loads checkpoints, and receives no broadcast. Nothing was loaded.")
        directory = resolve_below(self._checkpoints, source.path)
        require_same_model(directory, self._layout, read_layout(directory))
        if manifest is not None:
            check_directory(directory, manifest)

    def _read(self, source: Source, manifest: Manifest | None) -> "dict[str, Tensor]":
        """What is loaded is what was checked: the files may have changed since, so the tensors themselves are."""
        from workers.engines.tiny.model import digest, layout, read

        directory = resolve_below(self._checkpoints, source.path)
        tensors = read(directory)
        held = layout(tensors)
        require_same_model(directory, self._layout, held)
        if manifest is not None:
            check_layout(directory, held, manifest)
            if manifest.content is not None and (seen := digest(tensors)) != manifest.content:
                raise content_differs(directory, seen, manifest)
        return tensors
