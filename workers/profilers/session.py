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
from workers.profilers.places import Place
from workers.profilers.stages import Stage, listen, unlisten
from workers.profilers.tools import Recorder, recorder, require, torch_version
from workers.traces.node import make_fresh

logger = logging.getLogger("rolloutctl.rank")

MOST_COMPLAINTS: Final = 5
"""Different ones that an outcome tells of one session."""

T = TypeVar("T")


class _Session:
    """An open session. complaints: what could not be recorded, and why.   owner: the outermost stage under way."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.complaints: dict[str, int] = {}
        self.owner: _Entered | None = None
        self.recording = False
        self.closing = False

    def complain(self, what: str) -> None:
        if what in self.complaints or len(self.complaints) < MOST_COMPLAINTS:
            self.complaints[what] = self.complaints.get(what, 0) + 1


class _Entered:
    """A stage that was entered while a session was open."""

    __slots__ = ("mark", "session", "thread")

    def __init__(self, session: _Session) -> None:
        self.session, self.thread = session, threading.get_ident()
        self.mark: AbstractContextManager[object] | None = None

    def unmark(self) -> None:
        """End the span in what is recorded."""
        if self.mark is not None:
            self.mark.__exit__(None, None, None)


class RankProfiler:
    """What an agent commands in a training rank: the profiler of the process that it runs in.

    identity: with the rank's role.   traces: root of the directories that commands name.   world_size: of the role.
    model: what stages run that name no model of their own, for tools that watch one.

    A start *arms* the session: it is answered as soon as the tool is there and nothing stands against it, and records
    from the next stage on, since the thread that trains may be waiting for just this answer. What was in fact recorded
    is told by the stop: its traces, `ranks_without_trace` when no stage came, or why a stage could not be recorded. A
    stop between two stages is done at once. In the middle of one it takes effect where that thread next enters
    or leaves a stage, or ends a mini-batch; a stop that waits for that past its deadline is told as `engine_timeout`,
    and done then.
    """

    def __init__(self, identity: Identity, *, traces: Path, world_size: int = 1, model: object | None = None) -> None:
        self.identity, self.world_size, self.model = identity, world_size, model
        self._traces = traces.resolve()
        self._instance = secrets.token_hex(8)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._session: _Session | None = None
        self._released = False

    @property
    def role(self) -> str:
        return self.identity.role

    # --- the agent's side ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Nothing: the process is the engine."""

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
                return await _aside(lambda: self._check(call))
            case StartProfile():
                return await _aside(lambda: self._start(call))
            case StopProfile():
                return await _aside(self._stop)
            case _:
                raise UnsupportedError("a training rank has no engine: it is profiled, and nothing else.")

    async def close(self) -> None:
        """End an open session at once; what it recorded is written."""
        self.release()
        await self.end()

    async def end(self) -> None:
        """End an open session as a stop does; nobody asks what came of it."""
        if self._session is not None:
            try:
                await _aside(self._stop)
            except EngineError as error:
                logger.warning("%s: %s", self.identity.agent, error)

    def release(self) -> None:
        """This rank ends: wait for no stage any more. What this thread records ends here."""
        with self._changed:
            self._released = True
            session = self._session
            if session is not None:
                session.closing = True
            self._changed.notify_all()
        if session is not None:
            self._pass(session)

    def _check(self, call: CheckProfile) -> Returned:
        require(call.plan)
        return Returned()

    def _start(self, call: StartProfile) -> Returned:
        plan = call.session.plan
        require(plan)
        if self._session is not None or self._released:
            raise EngineError("the profile was not started: this rank has a session open, or is ending.")
        place = Place(
            root=self._traces,
            directory=self._directory(call),
            identity=self.identity,
            world_size=self.world_size,
            step=call.session.step,
            verl=plan.layout != "step",
        )
        session = _Session(recorder(plan, place))
        session.recorder.open()
        with self._changed:
            self._session = session
        listen(self)
        return Returned()

    def _directory(self, call: StartProfile) -> Path:
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
        unlisten(self)
        self._session = None
        if lost:
            session.complain("the rank ended while another thread was in a stage, which was not recorded.")
        complaints = session.complaints
        returned = Returned()
        try:
            returned = session.recorder.close()
        except EngineError as error:
            complaints = {str(error): 1, **complaints}
        if complaints:
            told = " ".join(what if times == 1 else f"{what} ({times} times)" for what, times in complaints.items())
            left = f" {len(returned.traces)} traces were written." if returned.traces else ""
            raise EngineError(f"{told}{left} The session is closed.")
        return returned

    # --- the training code's side: nothing below raises ---------------------------------------------------------------

    def enter(self, stage: Stage) -> object:
        session = self._session
        if session is None or self._pid != os.getpid():
            return None
        self._pass(session)
        entered = _Entered(session)
        with self._changed:
            outermost = session.owner is None and not session.closing
            if outermost:
                session.owner, session.recording = entered, True
        if outermost:
            self._begin(session, stage)
        self._quietly(session, lambda: self._mark(entered, stage.name))
        return entered

    def leave(self, entered: object) -> None:
        if not isinstance(entered, _Entered) or self._pid != os.getpid():
            return
        session = entered.session
        if entered.mark is not None:
            self._quietly(session, entered.unmark)
        if session.owner is not entered:
            self._pass(session)
        elif entered.thread == threading.get_ident():
            self._end(session)
            with self._changed:
                session.owner = None
        else:  # only the thread that began it can end it: where it passes next
            session.complain("a stage was left by another thread than had entered it.")
            session.closing = True

    def mini_batch(self) -> None:
        session = self._session
        if session is None or self._pid != os.getpid():
            return
        owner = session.owner
        if session.recording and owner is not None and owner.thread == threading.get_ident():
            self._quietly(session, session.recorder.mini_batch)
        self._pass(session)  # afterwards, or what it ends would lack this mini-batch

    def _pass(self, session: _Session) -> None:
        """This thread could act now: end what it records if the session is to close."""
        owner = session.owner
        if session.closing and session.recording and owner is not None and owner.thread == threading.get_ident():
            self._end(session)

    def _begin(self, session: _Session, stage: Stage) -> None:
        model = stage.model if stage.model is not None else self.model

        def begin() -> None:
            session.recorder.begin(stage.name, stage.scheduled, model)

        if not self._quietly(session, begin, f"stage {stage.name} is not recorded: "):
            self._recorded(session)

    def _end(self, session: _Session) -> None:
        if session.recording:
            self._quietly(session, session.recorder.end)
            self._recorded(session)

    def _recorded(self, session: _Session) -> None:
        with self._changed:
            session.recording = False
            self._changed.notify_all()

    def _mark(self, entered: _Entered, name: str) -> None:
        mark = entered.session.recorder.mark(name)
        mark.__enter__()
        entered.mark = mark

    def _quietly(self, session: _Session, act: Callable[[], None], where: str = "") -> bool:
        """Do it; what goes wrong is told by the stop, and never to the training code."""
        try:
            act()
        except Exception as error:
            what = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            logger.warning("%s: %s%s", self.identity.agent, where, what)
            session.complain(f"{where}{what}")
            return False
        return True


async def _aside(work: Callable[[], T]) -> T:
    """Do it in a thread that nobody waits for at the end of the process: it may wait for the thread that trains."""
    done: Future[T] = Future()
    with CancelScope(shield=True):
        async with BlockingPortal() as portal:
            over = Event()

            def run() -> None:
                try:
                    done.set_result(work())
                except BaseException as error:
                    done.set_exception(error)
                with suppress(RuntimeError):  # the loop may be gone by now
                    portal.start_task_soon(over.set)

            threading.Thread(target=run, name="rolloutctl-profiler", daemon=True).start()
            await over.wait()
    return done.result()
