"""The profiler of one training rank, as the engine that its agent commands: sessions, and the stages in them."""

import logging
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final, TypeVar

from anyio import CancelScope, Event
from anyio.from_thread import BlockingPortal

from schemas.errors import EngineError, UnsupportedError
from schemas.events import CheckProfile, EngineCall, Observation, Returned, StartProfile, StopProfile
from schemas.identity import Identity, Operation
from workers.profilers.recorder import Recorder
from workers.profilers.session_files import SessionFiles
from workers.profilers.stages import Stage, add_listener, remove_listener
from workers.profilers.tools import make_recorder, require_supported, torch_version
from workers.traces.node import make_fresh

logger = logging.getLogger("rolloutctl.rank")

MAX_PROBLEMS: Final = 5
"""Different problems of one session that an outcome lists."""

T = TypeVar("T")


class _ProfilingSession:
    """An open session. `owner` is the outermost stage under way, which is recorded while `recording` is true."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.problems: dict[str, int] = {}
        self.owner: _EnteredStage | None = None
        self.recording = False
        self.closing = False

    def note(self, problem: str) -> None:
        """Count a problem: something that could not be recorded, and why."""
        if problem in self.problems or len(self.problems) < MAX_PROBLEMS:
            self.problems[problem] = self.problems.get(problem, 0) + 1


class _EnteredStage:
    """A stage that was entered while a session was open, with its span in what is recorded."""

    __slots__ = ("session", "span", "thread")

    def __init__(self, session: _ProfilingSession) -> None:
        self.session, self.thread = session, threading.get_ident()
        self.span: AbstractContextManager[object] | None = None

    @property
    def is_of_this_thread(self) -> bool:
        return self.thread == threading.get_ident()

    def mark(self, name: str) -> None:
        span = self.session.recorder.mark(name)
        span.__enter__()
        self.span = span

    def unmark(self) -> None:
        if self.span is not None:
            self.span.__exit__(None, None, None)


class RankProfiler:
    """What an agent commands in a training rank: the profiler of the process that it runs in.

    A start *arms* the session. It is answered as soon as the tool is available, and recording begins at the next stage,
    because the thread that trains may be waiting for just this answer. The stop says what was recorded: the traces, or
    `ranks_without_trace` when no stage came, or why a stage could not be recorded. A stop between two stages takes
    effect at once. In the middle of a stage it takes effect where the training thread next enters or leaves a stage, or
    ends a mini-batch. If that is after the deadline of the stop, the outcome is `engine_timeout`, and the session is
    closed then.

    Args:
        identity: With the rank's role.
        traces: Root of the directories that commands name.
        world_size: Of the role.
        model: For tools that watch a model, in stages that name none of their own.
    """

    def __init__(self, identity: Identity, *, traces: Path, world_size: int = 1, model: object | None = None) -> None:
        self.identity, self.world_size, self.model = identity, world_size, model
        self._traces = traces.resolve()
        self._instance = secrets.token_hex(8)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._session: _ProfilingSession | None = None
        self._released = False

    @property
    def role(self) -> str:
        return self.identity.role

    # --- the agent's side ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Do nothing: the process is the engine."""

    async def observe(self) -> Observation:
        return Observation(
            engine=f"torch {torch_version()} profiler",
            instance=self._instance,
            tokenizer="present",
            operations=frozenset({Operation.PROFILE}),
            profiling=self._session is not None,
        )

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        """Check, arm or stop. Raises UnsupportedError and EngineError."""
        match call:
            case CheckProfile():
                return await _in_daemon_thread(lambda: self._check(call))
            case StartProfile():
                return await _in_daemon_thread(lambda: self._start(call))
            case StopProfile():
                return await _in_daemon_thread(self._stop)
            case _:
                raise UnsupportedError("a training rank has no engine: it is profiled, and nothing else.")

    async def close(self) -> None:
        """End an open session at once; what it recorded is written."""
        self.release()
        await self.end()

    async def end(self) -> None:
        """End an open session as a stop does. Problems are logged, since nobody waits for an outcome."""
        if self._session is not None:
            try:
                await _in_daemon_thread(self._stop)
            except EngineError as error:
                logger.warning("%s: %s", self.identity.agent, error)

    def release(self) -> None:
        """Wait for no stage any more, because this rank ends. What this thread records ends here."""
        with self._changed:
            self._released = True
            session = self._session
            if session is not None:
                session.closing = True
            self._changed.notify_all()
        if session is not None:
            self._end_if_closing(session)

    def _check(self, call: CheckProfile) -> Returned:
        require_supported(call.plan)
        return Returned()

    def _start(self, call: StartProfile) -> Returned:
        plan = call.session.plan
        require_supported(plan)
        if self._session is not None or self._released:
            raise EngineError("the profile was not started: this rank has a session open, or is ending.")
        files = SessionFiles(
            root=self._traces,
            directory=self._make_directory(call),
            identity=self.identity,
            world_size=self.world_size,
            step=call.session.step,
            verl=plan.layout != "step",
        )
        session = _ProfilingSession(make_recorder(plan, files))
        session.recorder.open()
        with self._changed:
            self._session = session
        add_listener(self)
        return Returned()

    def _make_directory(self, call: StartProfile) -> Path:
        directory = (self._traces / call.directory).resolve()
        if not directory.is_relative_to(self._traces):
            raise EngineError(f"the profile was not started: {call.directory} is outside of the traces root.")
        if call.session.plan.layout == "step":
            make_fresh(directory)
            return directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"the profile was not started: {directory}: {error.strerror}.") from error
        return directory

    def _stop(self) -> Returned:
        session = self._session
        if session is None:
            raise EngineError("there is no session to stop.")
        with self._changed:
            session.closing = True
            self._changed.wait_for(lambda: not session.recording or self._released)
            lost = session.recording
        remove_listener(self)
        self._session = None
        if lost:
            session.note("the rank ended while another thread was in a stage, which was not recorded.")
        problems = session.problems
        returned = Returned()
        try:
            returned = session.recorder.close()
        except EngineError as error:
            problems = {str(error): 1, **problems}
        if problems:
            listed = " ".join(text if times == 1 else f"{text} ({times} times)" for text, times in problems.items())
            written = f" {len(returned.traces)} traces were written." if returned.traces else ""
            raise EngineError(f"{listed}{written} The session is closed.")
        return returned

    # --- the training code's side: nothing below raises ---------------------------------------------------------------

    def enter(self, stage: Stage) -> object:
        session = self._session
        if session is None or self._pid != os.getpid():
            return None
        self._end_if_closing(session)
        entered = _EnteredStage(session)
        with self._changed:
            outermost = session.owner is None and not session.closing
            if outermost:
                session.owner, session.recording = entered, True
        if outermost:
            self._begin(session, stage)
        self._guard(session, lambda: entered.mark(stage.name))
        return entered

    def leave(self, entered: object) -> None:
        if not isinstance(entered, _EnteredStage) or self._pid != os.getpid():
            return
        session = entered.session
        if entered.span is not None:
            self._guard(session, entered.unmark)
        if session.owner is not entered:
            self._end_if_closing(session)
        elif entered.is_of_this_thread:
            self._end(session)
            with self._changed:
                session.owner = None
        else:  # only the thread that began it can end it, at its next stage
            session.note("a stage was left by another thread than had entered it.")
            session.closing = True

    def mini_batch(self) -> None:
        session = self._session
        if session is None or self._pid != os.getpid():
            return
        if session.recording and session.owner is not None and session.owner.is_of_this_thread:
            self._guard(session, session.recorder.mini_batch)
        self._end_if_closing(session)  # afterwards, or the recording would lack this mini-batch

    def _end_if_closing(self, session: _ProfilingSession) -> None:
        """End what this thread records if the session is to close."""
        if session.closing and session.owner is not None and session.owner.is_of_this_thread:
            self._end(session)

    def _begin(self, session: _ProfilingSession, stage: Stage) -> None:
        model = stage.model if stage.model is not None else self.model

        def begin() -> None:
            session.recorder.begin(stage.name, stage.scheduled, model)

        if not self._guard(session, begin, f"stage {stage.name} is not recorded: "):
            self._set_ended(session)

    def _end(self, session: _ProfilingSession) -> None:
        if session.recording:
            self._guard(session, session.recorder.end)
            self._set_ended(session)

    def _set_ended(self, session: _ProfilingSession) -> None:
        with self._changed:
            session.recording = False
            self._changed.notify_all()

    def _guard(self, session: _ProfilingSession, act: Callable[[], None], prefix: str = "") -> bool:
        """Call `act`. The stop reports its errors, and the training code never sees them. Returns whether it worked."""
        try:
            act()
        except Exception as error:
            text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            logger.warning("%s: %s%s", self.identity.agent, prefix, text)
            session.note(f"{prefix}{text}")
            return False
        return True


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work`, which may wait for the thread that trains, in a thread that the end of the process won't wait for."""
    result: Future[T] = Future()
    with CancelScope(shield=True):
        async with BlockingPortal() as portal:
            done = Event()

            def run() -> None:
                try:
                    result.set_result(work())
                except BaseException as error:
                    result.set_exception(error)
                with suppress(RuntimeError):  # the loop may be gone by now
                    portal.start_task_soon(done.set)

            threading.Thread(target=run, name="rolloutctl-profiler", daemon=True).start()
            await done.wait()
    return result.result()
