"""A model of one inference engine, as unforgiving as the real ones: what kills them kills it.

It is not idempotent. A second profile start destroys the first session; releasing memory while requests run, waking
what was never released and loading into a running or sleeping engine kill it. All of these are faults of the machine
that asked for them, so they break promise P5 on the spot. What an engine may do by itself (fail a call, hang, die and
come back as it was launched) it does at random.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from schemas import events
from schemas.commands import Pushed, Source
from schemas.identity import Memory, Operation, Tag

LAUNCHED = "as launched"
"""What a fresh engine holds; also the name of version 0."""

OPERATIONS = {
    "check_source": Operation.LOAD,
    "load": Operation.LOAD,
    "pause": Operation.PAUSE,
    "resume": Operation.RESUME,
    "sleep": Operation.SLEEP,
    "wake": Operation.WAKE,
    "flush": Operation.FLUSH,
    "abort": Operation.ABORT,
    "start_profile": Operation.PROFILE,
    "stop_profile": Operation.PROFILE,
}


LAUNCH_LABEL = "default"
"""The label of what a fresh engine holds."""


def weights_of(source: Source) -> str:
    """Return the name of a source's weights. Those that are pushed are the same as in the checkpoint beside them."""
    return source.path or f"pushed {source.label}" if isinstance(source, Pushed) else source.path


def digest_of(weights: str) -> str:
    """Return the digest of a checkpoint, which depends on its name only in this world."""
    return f"sha256 of {weights}"


@dataclass
class Attempt:
    """One call in progress. Its `result` is decided at the start; `applied` says whether it has taken effect."""

    call: events.Call
    call_id: int
    instance: int
    result: events.Returned | events.Fault
    applied: bool = False


@dataclass
class Temper:
    """How an engine misbehaves. Chances are per call."""

    fails: float = 0.0
    hangs: float = 0.0
    lacks: frozenset[Operation] = frozenset()
    slow_ms: int = 40


@dataclass
class Engine:
    """The engine of one replica. `kill(text)` breaks a promise: the machine asked for what no engine survives.

    weights, version: what it really holds, and how it numbers that.   label: what it calls them; None if it reports
    none.   memory: who releases it.   interrupts: it generated when the trainer released its memory.   called: every
    call that was begun, in order.
    resumed: asked before the engine generates again, so that what it holds can be judged.
    """

    rng: Random
    temper: Temper
    kill: Callable[[str], None]
    resumed: Callable[[], None]
    instance: int = 0
    ready: bool = False
    generating: bool = True
    asleep: frozenset[Tag] = frozenset()
    session_step: int | None = None
    version: int = 0
    weights: str = LAUNCHED
    label: str | None = None
    memory: Memory = "agent"
    interrupts: bool = False
    attempt: Attempt | None = None
    operations: frozenset[Operation] = frozenset()
    called: list[tuple[int, int, str]] = field(default_factory=list)
    torn: int = 0

    @property
    def unable(self) -> bool:
        """Whether it can never follow a sync."""
        return bool(self.temper.lacks & {Operation.LOAD, Operation.PAUSE})

    @property
    def pausable(self) -> bool:
        """Whether it can be paused, and will not be left so."""
        return not self.temper.lacks & {Operation.PAUSE, Operation.RESUME}

    def __post_init__(self) -> None:
        self.operations = frozenset(Operation) - self.temper.lacks

    def launch(self) -> None:
        """Begin a new instance, which knows nothing. A call to the old one never takes effect."""
        self.instance += 1
        self.ready = False
        self.generating, self.asleep = True, frozenset()
        self.session_step = None
        self.interrupts = False
        self.version, self.weights = 0, LAUNCHED
        self.label = LAUNCH_LABEL if self.label is not None else None
        self.attempt = None

    def observe(self) -> events.Observation:
        """Return what the adapter can observe."""
        if not self.ready:
            return events.Observation(engine="model", tokenizer="unknown")
        return events.Observation(
            engine="model",
            instance=f"launch {self.instance}",
            tokenizer="present",
            operations=self.operations,
            generating=self.generating,
            asleep=self.asleep,
            profiling=self.session_step is not None,
            version=self._numbered(),
            label=self.label,
            digest=digest_of(self.weights),
        )

    def _numbered(self) -> int | None:
        """The version that its label names: none if the trainer chose it."""
        if self.label is None or self.label == LAUNCH_LABEL:
            return self.version
        return int(self.label) if self.label.isdecimal() else None

    @property
    def keeps_memory(self) -> bool:
        """Whether no command releases its memory."""
        return Operation.SLEEP in self.temper.lacks or self.memory == "trainer"

    def release(self) -> None:
        """The trainer's own data plane releases the memory, between the calls of the agent."""
        if self.memory == "trainer" and self.ready and self.attempt is None and not self.asleep and self.generating:
            self.asleep, self.generating, self.interrupts = frozenset({"weights", "kv_cache"}), False, True

    def take_back(self) -> None:
        """It takes the memory back; the engine goes on."""
        if self.interrupts:
            self.asleep, self.generating, self.interrupts = frozenset(), True, False

    def push(self, source: Pushed, instance: int) -> bool:
        """Take weights from the trainer's data plane, if this is still the launch that was prepared for it."""
        fit = self.ready and self.instance == instance and self.label is not None and self.attempt is None
        if not fit or self.generating or "weights" in self.asleep:
            return False
        self.weights, self.label = weights_of(source), source.label
        return True

    def begin(self, call: events.Call, call_id: int) -> tuple[Attempt, int]:
        """Start a call. Returns it and its duration in ms."""
        if self.attempt is not None:
            self.kill(f"{_word(call)} was called while {_word(self.attempt.call)} was under way")
        if OPERATIONS.get(_word(call)) in self.temper.lacks:
            self.kill(f"{_word(call)} was called on an engine that has no such operation")
        self.called.append((self.instance, call_id, _word(call)))
        duration_ms = 1 + int(self.rng.expovariate(1.0 / self.temper.slow_ms))
        if self.rng.random() < self.temper.hangs:
            duration_ms += self.rng.randrange(2000, 12000)
        result: events.Returned | events.Fault = events.Returned()
        if not self.ready or self.rng.random() < self.temper.fails:
            refused = isinstance(call, events.CheckSource) or (
                isinstance(call, events.Load) and self.rng.random() < 0.3
            )
            result = events.Fault("source_refused" if refused else "engine_error", "it went wrong.")
        self.attempt = Attempt(call, call_id, self.instance, result)
        self.attempt.applied = not self.ready  # nothing listens there yet, and nothing is touched
        return self.attempt, duration_ms

    def end(self, attempt: Attempt) -> events.Returned | events.Fault:
        """End a call: it takes effect if it has not yet, and returns its result."""
        if attempt is not self.attempt:
            return events.Fault("engine_error", "the engine went away during the call.")
        if not attempt.applied:
            attempt.result = self._apply(attempt)
        self.attempt = None
        return attempt.result

    def cut(self) -> None:
        """Cut a call off, because its agent died: it takes effect or not, before the next observation."""
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        if not attempt.applied and self.rng.random() < 0.5:
            self._apply(attempt)
        elif isinstance(attempt.call, events.Load) and not attempt.applied and self.rng.random() < 0.5:
            self._check_loadable()
            self._tear()

    def _apply(self, attempt: Attempt) -> events.Returned | events.Fault:
        attempt.applied = True
        if isinstance(attempt.result, events.Fault):
            return self._apply_fault(attempt.call, attempt.result)
        match call := attempt.call:
            case (
                events.CheckSource()
                | events.CheckProfile()
                | events.Abort()
                | events.Flush()
                | events.CollectTraces()
                | events.FinishProfile()
            ):
                pass
            case events.Pause():
                self.generating = False
            case events.Resume():
                self._resume()
            case events.Sleep():
                self._sleep(call.tags, call.discard)
            case events.Wake():
                self._wake(call.tags)
            case events.Load():
                self._check_loadable()
                self.version, self.weights = call.version, weights_of(call.source)
                self.label = (call.label or str(call.version)) if self.label is not None else None
                return events.Returned(digest=digest_of(self.weights))
            case events.StartProfile():
                self._start_profile(call.session.step)
            case events.StopProfile():
                auto = self.session_step is None
                self.session_step = None
                return events.Returned(auto_stopped=auto)
        return attempt.result

    def _apply_fault(self, call: events.Call, fault: events.Fault) -> events.Fault:
        if isinstance(call, events.Load) and fault.kind == "engine_error" and self.rng.random() < 0.7:
            self._check_loadable()
            self._tear()
        if isinstance(call, events.StartProfile | events.StopProfile):
            self.session_step = None
        return fault

    def _wake(self, tags: frozenset[Tag]) -> None:
        if not tags <= self.asleep:
            self.kill(f"woke {sorted(tags)} of an engine with only {sorted(self.asleep)} asleep")
        self.asleep -= tags

    def _start_profile(self, step: int) -> None:
        if self.session_step is not None:
            self.kill(f"a second profile start destroyed the session of step {self.session_step}")
        self.session_step = step

    def _resume(self) -> None:
        if self.asleep:
            self.kill(f"resumed an engine with {sorted(self.asleep)} asleep")
        self.generating = True
        self.resumed()

    def _sleep(self, tags: frozenset[Tag], discard: bool) -> None:
        if self.generating:
            self.kill("memory was released while requests run")
        self.asleep |= tags
        if discard:
            self._tear()

    def _check_loadable(self) -> None:
        if self.generating:
            self.kill("weights were loaded into a running engine")
        if "weights" in self.asleep:
            self.kill("weights were loaded into memory that is asleep")

    def _tear(self) -> None:
        self.torn += 1
        self.weights = f"torn {self.torn}"


def _word(call: events.Call) -> str:
    return str(call.__struct_config__.tag)
