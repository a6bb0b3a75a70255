"""The profiler of one training rank, as the engine that its agent commands: sessions, and the stages in them."""

import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from anyio import CancelScope

from schemas.errors import EngineError, RefusedError, UnsupportedError
from schemas.events import CheckProfile, EngineCall, Observation, Returned, StartProfile, StopProfile
from schemas.identity import Identity, Operation
from schemas.logs import logger_of
from schemas.transport import background
from workers.profilers.recorder import Recorder, SessionFiles, reason
from workers.profilers.stages import Stage, add_listener, remove_listener
from workers.profilers.tools import make_recorder, require_supported, torch_version
from workers.traces.node import make_fresh

logger = logger_of("rank")

MAX_PROBLEMS: Final = 5
"""Most distinct problems of one session that an outcome lists."""

T = TypeVar("T")


class _ProfilingSession:
    """An open session. `owner` is the outermost stage under way, which is recorded while `recording` is true."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.problems = Counter[str]()
        self.owner: _EnteredStage | None = None
        self.recording = False
        self.closing = False

    @property
    def is_owned_here(self) -> bool:
        """The outermost stage was entered by this thread."""
        return self.owner is not None and self.owner.thread == threading.get_ident()

    def note(self, problem: str) -> None:
        """Count a problem: something that could not be recorded, and why."""
        if problem in self.problems or len(self.problems) < MAX_PROBLEMS:
            self.problems[problem] += 1


class _EnteredStage:
    """A stage that was entered while a session was open, with its span in what is recorded."""

    def __init__(self, session: _ProfilingSession) -> None:
        self.session, self.thread, self.span = session, threading.get_ident(), ExitStack()


class RankProfiler:
    """What an agent commands in a training rank: the profiler of the process that it runs in.

    A start *arms* the session. It is answered as soon as the tool is available, and recording begins at the next stage,
    because the thread that trains may be waiting for just this answer. The stop says what was recorded: the traces, or
    `ranks_without_trace` when no stage came, or why a stage could not be recorded. A stop between two stages takes
    effect at once. In the middle of a stage it takes effect where the training thread next enters or leaves a stage, or
    ends a mini-batch. If that is after the deadline of the stop, the outcome is `engine_timeout`, and the session is
    closed then.
    """

    def __init__(self, identity: Identity, *, traces: Path, world_size: int = 1) -> None:
        self.identity, self.role, self.world_size = identity, identity.role, world_size
        self._traces = traces.resolve()
        self._instance = secrets.token_hex(8)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._session: _ProfilingSession | None = None
        self._released = False

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
        """Check, arm or stop. Raises UnsupportedError, EngineError, and what a tool raises when it is opened."""
        match call:
            case CheckProfile(plan):
                await _in_daemon_thread(partial(require_supported, plan))
                return Returned()
            case StartProfile():
                return await _in_daemon_thread(partial(self._start, call))
            case StopProfile():
                return await _in_daemon_thread(self._stop)
            case _:
                raise UnsupportedError("a training rank has no engine: it is profiled, and nothing else.")

    async def close(self) -> None:
        """End an open session at once; what it recorded is written."""
        self.stop_waiting()
        await self.end()

    async def end(self) -> None:
        """End an open session as a stop does. Problems are logged, since no command waits for them."""
        if self._session is not None:
            try:
                await _in_daemon_thread(self._stop)
            except EngineError as error:
                logger.warning("%s: %s", self.identity.agent, error)

    def stop_waiting(self) -> None:
        """Stop waiting for stages, because this rank ends. What this thread records ends here."""
        with self._changed:
            self._released = True
            session = self._session
            if session is not None:
                session.closing = True
            self._changed.notify_all()
        if session is not None:
            self._end_if_closing(session)

    def _start(self, call: StartProfile) -> Returned:
        plan = call.session.plan
        require_supported(plan)
        if self._session is not None or self._released:
            raise RefusedError("the profile was not started: this rank has a session open, or is ending.")
        directory = (self._traces / call.directory).resolve()
        if not directory.is_relative_to(self._traces):
            raise RefusedError(f"the profile was not started: {call.directory} is outside of the traces root.")
        if plan.layout == "step":
            make_fresh(directory)
        else:
            directory.mkdir(parents=True, exist_ok=True)
        files = SessionFiles(self._traces, directory, self.identity, self.world_size, call.session)
        self._session = _ProfilingSession(make_recorder(plan, files))
        add_listener(self)
        return Returned()

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
        returned, failures = Returned(), []
        try:
            returned = session.recorder.close()
        except Exception as error:
            failures.append(reason(error))
        failures += session.recorder.failures[:MAX_PROBLEMS]
        failures += [text if times == 1 else f"{text} ({times} times)" for text, times in session.problems.items()]
        if failures:
            paths = ", ".join(trace.path for trace in returned.traces[:10])
            written = f" {len(returned.traces)} traces were written: {paths}." if paths else ""
            raise EngineError(f"{' '.join(failures)}{written} The session is closed.")
        return returned

    # --- the training code's side: nothing below raises ---------------------------------------------------------------

    def enter(self, stage: Stage) -> object:
        session = self._session
        if session is None:
            return None
        self._end_if_closing(session)
        entered = _EnteredStage(session)
        with self._changed:
            outermost = session.owner is None and not session.closing
            if outermost:
                session.owner, session.recording = entered, True
        recorder = session.recorder
        if outermost:
            begin = partial(recorder.begin, stage.name, stage.scheduled)
            if not self._guard(session, begin, f"stage {stage.name} is not recorded: "):
                self._set_ended(session)
        self._guard(session, lambda: entered.span.enter_context(recorder.mark(stage.name)))
        return entered

    def leave(self, entered: object) -> None:
        if not isinstance(entered, _EnteredStage) or self._pid != os.getpid():
            return
        session = entered.session
        self._guard(session, entered.span.close)
        if session.owner is not entered:
            self._end_if_closing(session)
        elif session.is_owned_here:
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
        if session.recording and session.is_owned_here:
            self._guard(session, session.recorder.mini_batch, "a mini-batch is not recorded: ")
        self._end_if_closing(session)  # afterwards, or the recording would lack this mini-batch

    def _end_if_closing(self, session: _ProfilingSession) -> None:
        """End what this thread records if the session is to close."""
        if session.closing and session.is_owned_here:
            self._end(session)

    def _end(self, session: _ProfilingSession) -> None:
        if session.recording:
            self._guard(session, session.recorder.end, "a recording is lost: ")
            self._set_ended(session)

    def _set_ended(self, session: _ProfilingSession) -> None:
        with self._changed:
            session.recording = False
            self._changed.notify_all()

    def _guard(self, session: _ProfilingSession, act: Callable[[], object], prefix: str = "") -> bool:
        """Call `act` and return whether it succeeded. The stop reports its error; the training code never sees it."""
        try:
            act()
        except Exception as error:
            problem = f"{prefix}{reason(error)}"
            logger.warning("%s: %s", self.identity.agent, problem)
            session.note(problem)
            return False
        return True


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work`, which may wait for the thread that trains, in a thread that the end of the process won't wait for."""
    call = background.begin(work, "rolloutctl-profiler", daemon=True)
    with CancelScope(shield=True):
        await background.done_within(call)
    return call.result()
