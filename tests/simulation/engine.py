"""A model of one inference engine, as unforgiving as the real ones: what kills them kills it.

It is not idempotent. A second profile start destroys the first session; releasing memory while requests run, waking
what was never released and loading into a running or sleeping engine kill it. All of these are faults of the machine
that asked for them, so they break promise P5 on the spot. What an engine may do by itself (fail a call, hang, die and
come back as it was launched, carry a call out and lose the answer) it does at random. It reports no more than the real
one of its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

from controlplane.simulate.modelled_engine import IDEMPOTENT, LAUNCH_LABEL, Kind, reported
from schemas import events
from schemas.commands import Broadcast, Checkpoint, Pushed, Source, WeightSync
from schemas.desired import Desired
from schemas.identity import Memory, Operation, Tag

if TYPE_CHECKING:
    from tests.simulation.adapters import Shelf
    from tests.simulation.agent import Process
    from tests.simulation.samples import Rollout

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
    "check_adapter": Operation.ADAPTERS,
    "load_adapter": Operation.ADAPTERS,
    "unload_adapter": Operation.ADAPTERS,
}


IDLES: Final = (events.Pause, events.Resume, events.Sleep, events.Wake, events.Load, events.StartProfile)
"""Calls that a broken engine says it has carried out, and has not."""
LOST: Final = "unanswered"
"""Kind of the fault of a call whose answer was lost."""
WINDOWS_END: Final = 0.4
"""Share of sessions with a window that the engine ends by itself."""
BROADCAST: Final = "broadcast"
"""How the names of weights begin that can't be read again."""
GROUP_MS: Final = 5000
"""How long an engine waits for a broadcast before its group gives up."""


def weights_of(source: Source) -> str:
    """Return the name of a source's weights. Those that are sent are the same as in the checkpoint beside them."""
    if isinstance(source, Broadcast):
        return source.path or f"{BROADCAST} {source.group}"
    return source.path or f"pushed {source.label}" if isinstance(source, Pushed) else source.path


def loaded_over(held: str, source: Source) -> str:
    """Return what an engine holds after a load: a delta makes its weights only of those that it was made from."""
    wrong = isinstance(source, Checkpoint) and source.delta not in ("", delta_of(held))
    return f"{source.delta} over {held}" if wrong else weights_of(source)  # type: ignore[union-attr]


def delta_of(weights: str) -> str:
    """Return the directory of a delta that was made from these weights."""
    return f"changed since {weights}"


def weights_to_serve(desired: Desired, held: str) -> str:
    """What a replica may serve: committed weights, else those of its launch, or the fallback if it has that."""
    if desired.committed is not None:
        return weights_of(desired.committed.source)
    return held if desired.fallback is not None and held == weights_of(desired.fallback.source) else LAUNCHED


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
    lost: bool = False  # its answer never arrives, whatever it did
    waits: bool = False  # for what the trainer broadcasts
    returned: bool = False

    @property
    def word(self) -> str:
        """The name of the call."""
        return _word(self.call)


@dataclass
class Temper:
    """How an engine misbehaves. Chances are per call."""

    fails: float = 0.0
    hangs: float = 0.0
    loses: float = 0.0  # answers, of calls that were carried out, or were not
    blind: float = 0.0  # observations that fail
    idle: float = 0.0  # calls that report success and have no effect
    failing: str = ""  # a call that fails more often than not
    lacks: frozenset[Operation] = frozenset()
    slow_ms: int = 40


@dataclass
class Engine:
    """The engine of one replica. `kill(text)` breaks a promise: the machine asked for what no engine survives.

    kind: whose observations it gives.   weights, version: what it really holds, and how it numbers that.   label: what
    it calls them; None if it reports none.   memory: who releases it.   interrupts: it generated when the trainer
    released its memory.   called: every call that was begun, in order.   closes_ms: when its session ends with its
    window.   recorded: steps of the sessions that ended so, and what its agent knows: the start that asked for each.
    asked: the one that asked for the open session.   doubtful: steps of which it is not known whether a session was
    opened.   stop_doubtful: it is not known whether the stop of its last session was made.
    forgotten: step of the open session that its agent can't know: it lost its journal, or another agent, which was cut
    off, opened it.
    launched_from: the directory of the weights of its launch, if it reports that.
    used: the version that an earlier run left in its first launch, which goes on; 0 if none did.
    traffic: requests run whenever it generates.   frozen: requests wait for the end of a pause that kept them.
    cached: the weights that have computed what is in its cache.
    unseen: a start of a session since the last observation: it is not known yet whether it is open.
    moved: the trainer released its memory, or took it back, since the last observation.
    unseen_by: those of its agents that have not looked since another one called it.
    caller: the agent that called it last.   loaded_by: which of two agents gave it other weights.
    resumed: asked before the engine generates again, so that what it holds can be judged.
    shelf: its LoRA adapters.   rollouts: requests whose answers name the labels that it had.
    idled: it did not carry out its last call, and said that it had.
    flips: chance that it loads other bytes than it was told to, and reports success.   flipped: it has.
    """

    rng: Random
    temper: Temper
    kill: Callable[[str], None]
    resumed: Callable[[], None]
    now: Callable[[], int] = lambda: 0
    kind: Kind = "tiny"
    instance: int = 0
    ready: bool = False
    paused: bool = False
    asleep: frozenset[Tag] = frozenset()
    session_step: int | None = None
    closes_ms: int | None = None
    recorded: dict[int, int] = field(default_factory=dict)
    asked: int = 0
    doubtful: set[int] = field(default_factory=set)
    forgotten: int | None = None
    stop_doubtful: bool = False
    launched_from: str | None = None
    traffic: bool = False
    recomputes: bool = False
    frozen: bool = False
    cached: set[str] = field(default_factory=set)
    version: int = 0
    weights: str = LAUNCHED
    label: str | None = None
    used: int = 0
    memory: Memory = "agent"
    losing: Random = field(default_factory=lambda: Random(0))
    closing: Random = field(default_factory=lambda: Random(0))
    interrupts: bool = False
    attempt: Attempt | None = None
    operations: frozenset[Operation] = frozenset()
    called: list[tuple[int, int, str]] = field(default_factory=list)
    torn: int = 0
    unseen: events.StartProfile | None = None
    moved: bool = False
    shelf: Shelf = field(init=False)
    unseen_by: set[int] = field(default_factory=set)
    caller: Process | None = None
    loaded_by: int | None = None
    rollouts: list[Rollout] = field(default_factory=list)
    idled: bool = False
    flips: float = 0.0
    flipping: Random = field(default_factory=lambda: Random(0))
    flipped: bool = False

    @property
    def is_torn(self) -> bool:
        """Whether a load was cut off or failed, or its weights were dropped."""
        return self.weights.startswith("torn")

    @property
    def before_run(self) -> str:
        """What an earlier run left in its first launch."""
        return f"{self.used} of another run"

    @property
    def generating(self) -> bool:
        """Whether it answers requests."""
        return not (self.paused or self.interrupts)

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
        self.rollouts.clear()
        self.shelf.launch()
        self.ready = False
        in_flight = self.attempt is not None and self.attempt.call == self.unseen
        if self.unseen and not in_flight:  # it is not known whether this launch has its session, or the one before
            self.doubt(self.unseen)
        self.paused, self.asleep = False, frozenset()
        self.session_step = self.closes_ms = self.forgotten = None
        self.recorded.clear()
        self.cached.clear()
        self.frozen = False
        self.interrupts = False
        self.version, self.weights, self.loaded_by, self.flipped = 0, LAUNCHED, None, False
        self.label = LAUNCH_LABEL if self.label is not None else None
        if self.used and self.instance == 1 and self.label is not None:
            self.version, self.label, self.weights = self.used, str(self.used), self.before_run
        self.attempt = None

    def observe(self) -> events.Observation:
        """Return what the backend can observe."""
        self.close_window()
        self._serve()
        if not self.ready:
            return events.Observation(engine="model", tokenizer="unknown")
        if self.temper.blind and self.losing.random() < self.temper.blind:
            return events.Observation(engine="model", tokenizer="unknown", trouble="model can't be read")
        seen = events.Observation(
            engine="model",
            instance=f"launch {self.instance}",
            tokenizer="present",
            operations=self.operations,
            remedies=events.Remedies(
                idempotent=IDEMPOTENT[self.kind] & self.operations, launched_from=self.launched_from
            ),
            recomputes=self.recomputes,
            generating=self.generating,
            asleep=self.asleep,
            profiling=self.session_step is not None,
            version=self._numbered(),
            label=self.label,
            digest=digest_of(self.weights),
            adapters=self.shelf.listing(),
            adapter_places=self.shelf.places,
        )
        return reported(self.kind, seen, stopped=self.paused or bool(self.asleep))

    def looked_at(self) -> events.Observation:
        """Return what is observed between two calls, at which moment it may evict an adapter."""
        self.shelf.evict()
        return self.observe()

    def shown(self, seen: events.Observation, agent: int) -> None:
        """Note that an agent of it takes in what was observed."""
        if seen.instance is not None:
            self.unseen, self.moved = None, False
            self.unseen_by.discard(agent)
            self.shelf.seen()

    def _numbered(self) -> int | None:
        """The version that its label names: none if the trainer chose it."""
        if self.label is None:
            return self.version if self.kind == "tiny" else None
        if self.label == LAUNCH_LABEL:
            return 0
        return int(self.label) if self.label.isdecimal() else None

    @property
    def hides(self) -> bool:
        """Whether it is in a state that no observation of it shows."""
        unnamed = self.weights != LAUNCHED and self.kind == "verl"
        return self.stale or self.frozen or unnamed or (self.paused and self.kind == "verl") or self.hides_for_good

    @property
    def hides_for_good(self) -> bool:
        """Whether it is in a state that it does not show, and that nothing brings to an end that does no harm."""
        if self.shelf.hides or (self.stale and (self.weights == LAUNCHED or not self.paused)):
            return True
        if self.kind == "tiny":
            return False
        unnamed = self.weights != LAUNCHED and self.label is None
        return bool(self.asleep) or unnamed or (self.paused and self.memory == "trainer")

    @property
    def stale(self) -> bool:
        """Whether its cache is of other weights than it holds."""
        return bool(self.cached - {self.weights})

    def close_window(self) -> None:
        """Close a session whose window has ended."""
        if self.session_step is not None and self.closes_ms is not None and self.now() >= self.closes_ms:
            if self.forgotten is None:
                self.recorded[self.session_step] = self.asked
            self.session_step = self.closes_ms = self.forgotten = None

    @property
    def keeps_memory(self) -> bool:
        """Whether no command releases its memory."""
        return Operation.SLEEP in self.temper.lacks or self.memory == "trainer"

    @property
    def hides_release(self) -> bool:
        """Whether it shows a pause alike, whether the trainer released its memory or another agent paused it."""
        return self.memory == "trainer" and self.kind != "tiny"

    def release(self) -> None:
        """The trainer's own data plane releases the memory, between the calls of the agent."""
        if self.memory == "trainer" and self.ready and self.attempt is None and not self.asleep and self.generating:
            self.shelf.advance()
            self.asleep, self.interrupts, self.moved = frozenset({"weights", "kv_cache"}), True, True
            self.cached.clear()

    def take_back(self) -> None:
        """It takes the memory back; the engine goes on, unless it was paused meanwhile. vLLM goes on in any case."""
        if self.interrupts:
            self.shelf.advance()
            self.asleep, self.interrupts, self.moved = frozenset(), False, True
            self.paused = self.paused and self.kind != "vllm"

    def push(self, source: Pushed, instance: int, weights: str) -> bool:
        """Take weights from the trainer's data plane, if this is still the launch that was prepared for it."""
        fit = self.ready and self.instance == instance and self.label is not None and self.attempt is None
        if not fit or self.generating or "weights" in self.asleep:
            return False
        self.weights, self.label = weights, source.label
        return True

    def begin(self, call: events.Call, call_id: int, known: bool = True) -> tuple[Attempt, int]:
        """Start a call. Returns it and its duration in ms. Of verl, an actor is called: if it is not the `known` one, a
        dead one, which answers nothing.
        """
        reached = self.ready and (known or self.kind != "verl")
        self.close_window()
        if self.attempt is not None:
            self.kill(f"{_word(call)} was called while {_word(self.attempt.call)} was under way")
        if OPERATIONS.get(_word(call)) in self.temper.lacks:
            self.kill(f"{_word(call)} was called on an engine that has no such operation")
        self.called.append((self.instance, call_id, _word(call)))
        self.unseen = call if isinstance(call, events.StartProfile) else self.unseen
        duration_ms = 1 + int(self.rng.expovariate(1.0 / self.temper.slow_ms))
        if self.rng.random() < self.temper.hangs:
            duration_ms += self.rng.randrange(2000, 12000)
        result: events.Returned | events.Fault = events.Returned()
        fails = 0.6 if _word(call) == self.temper.failing else self.temper.fails
        if not reached or self.rng.random() < fails:
            refused = isinstance(call, events.CheckSource | events.CheckAdapter) or (
                isinstance(call, events.Load) and self.rng.random() < 0.3
            )
            result = events.Fault("source_refused" if refused else "engine_error", "it went wrong.")
        self.attempt = Attempt(call, call_id, self.instance, result)
        self.attempt.applied = not reached  # nothing listens there yet, and nothing is touched
        self.attempt.lost = reached and self.temper.loses > 0 and self.losing.random() < self.temper.loses
        if isinstance(call, events.Load) and isinstance(call.source, Broadcast) and isinstance(result, events.Returned):
            if self.shelf.slot.identity.replica not in call.source.replicas:
                self.attempt.result = events.Fault("source_refused", "it is not in the group.")
                return self.attempt, duration_ms
            self.attempt.waits, self.attempt.result = True, events.Fault("engine_error", "the group gave up.")
            return self.attempt, GROUP_MS
        return self.attempt, duration_ms

    def awaiting(self, source: Broadcast) -> Attempt | None:
        """The call that waits for a broadcast; None if none does."""
        attempt = self.attempt
        if attempt is None or not attempt.waits or not isinstance(attempt.call, events.Load):
            return None
        return attempt if attempt.call.source == source else None

    def end(self, attempt: Attempt) -> events.Returned | events.Fault:
        """End a call: it takes effect if it has not yet, and returns its result."""
        if attempt is not self.attempt:
            return events.Fault("engine_error", "the engine went away during the call.")
        if attempt.lost:
            self.cut()
            return events.Fault(LOST, "the answer was lost.")
        if not attempt.applied:
            attempt.result = self._apply(attempt)
        self.attempt = None
        return attempt.result

    def cut(self) -> None:
        """Cut a call off, because its agent died or its connection broke: it takes effect or not, or in part, before
        the next observation.
        """
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        self.doubt(attempt.call)
        if isinstance(attempt.call, events.StopProfile):
            self.recorded.pop(attempt.call.session.step, None)
        if not attempt.applied and self.rng.random() < 0.5:
            self._apply(attempt)
        elif isinstance(attempt.call, events.Load | events.Restore) and not attempt.applied and self.rng.random() < 0.5:
            self._check_loadable()
            self._tear()

    def doubt(self, call: events.Call) -> None:
        """Note a call of which it is not known whether it was made, and that would leave a session or none."""
        if not isinstance(call, events.StartProfile | events.StopProfile):
            return
        if self.kind != "tiny" or call.session.plan.window is not None:
            self.doubtful.add(call.session.step)
            self.stop_doubtful = isinstance(call, events.StopProfile)

    def _apply(self, attempt: Attempt) -> events.Returned | events.Fault:
        attempt.applied = True
        if isinstance(attempt.result, events.Fault):
            return self._apply_fault(attempt.call, attempt.result)
        self.idled = self._idles(attempt.call)
        return attempt.result if self.idled else self._carry_out(attempt)

    def _carry_out(self, attempt: Attempt) -> events.Returned | events.Fault:
        match call := attempt.call:
            case events.CheckSource() | events.CheckProfile() | events.CollectTraces() | events.FinishProfile():
                pass
            case events.Flush():
                return self._flush()
            case events.Pause() | events.Abort():
                self._pause(call)
            case events.Resume():
                self._resume()
            case events.Sleep():
                self._sleep(call.tags, call.discard)
            case events.Wake():
                self._wake(call.tags)
            case events.Load() | events.Restore():
                return self._load(call)
            case events.CheckAdapter() | events.LoadAdapter() | events.UnloadAdapter():
                return self.shelf.apply(call)
            case events.StartProfile():
                return self._record(call)
            case events.StopProfile():
                auto = self.session_step is None
                self.session_step = self.forgotten = None
                return events.Returned(auto_stopped=auto)
        return attempt.result

    def _idles(self, call: events.Call) -> bool:
        """Whether it does nothing, and says that it did. It shows that, and is read after a call for a command."""
        shown = isinstance(call, IDLES) and self.kind == "tiny" and not self.temper.blind
        if isinstance(call, events.StartProfile):  # one with a window may have ended by itself
            shown = shown and call.session.plan.window is None
        commanded = self.caller is not None and self.caller.trigger is not None
        return shown and commanded and self.temper.idle > 0 and self.losing.random() < self.temper.idle

    def _apply_fault(self, call: events.Call, fault: events.Fault) -> events.Fault:
        if isinstance(call, events.Load | events.Restore) and fault.kind == "engine_error" and self.rng.random() < 0.7:
            self._check_loadable()
            self._tear()
        if isinstance(call, events.StartProfile | events.StopProfile):
            self.session_step = self.forgotten = None
            self.recorded.pop(call.session.step, None)
        return fault

    def _load(self, call: events.Load | events.Restore) -> events.Returned:
        self._check_loadable()
        if isinstance(call, events.Restore) and call.directory != self.launched_from:
            self.kill(f"the weights of its launch are in {self.launched_from}, and were loaded from {call.directory}")
        held = self.weights, self.version, self.label
        version, self.weights, label = 0, LAUNCHED, LAUNCH_LABEL
        if isinstance(call, events.Load):
            version, label = call.version, call.label or str(call.version)
            self.weights = loaded_over(held[0], call.source)
        self.version, self.label = version, label if self.label is not None else None
        if held != (self.weights, self.version, self.label):  # the same again shows nothing
            self.loaded_by = self.caller.slot.double if self.caller is not None else None
        self.shelf.read_again()
        return events.Returned(digest=self._digest(call))

    def _digest(self, call: events.Load | events.Restore) -> str | None:
        """The digest of what it has just loaded. Of loads that no sync asks for nothing is compared."""
        if self.kind == "tiny":
            return digest_of(self.weights)
        trigger = self.caller.trigger if self.caller is not None else None
        synced = trigger is not None and isinstance(trigger.command, WeightSync) and trigger.command.phase == "load"
        self.flipped = synced and self.flips > 0 and self.flipping.random() < self.flips
        bytes_ = f"others {self.flipping.random()}" if self.flipped else self.weights
        return f"{self.kind}:layout:{bytes_}" if self.kind != "verl" else None

    def _pause(self, call: events.Pause | events.Abort) -> None:
        self._serve()
        self.shelf.advance()
        if isinstance(call, events.Abort) or call.mode != "keep":
            self.shelf.requests.clear()
            for rollout in self.rollouts:
                rollout.left = 0
        if isinstance(call, events.Abort):
            self.frozen = False
            return
        self.frozen = call.mode == "keep" and (self.frozen or (self.traffic and self.generating))
        self.paused = True

    def _flush(self) -> events.Returned | events.Fault:
        """Requests that run use the cache, and so do frozen ones, unless they can be computed anew."""
        if (self.traffic and self.generating) or (self.frozen and not self.recomputes):
            return events.Fault("refused", "requests use the cache.")
        self.cached.clear()
        self._serve()
        return events.Returned()

    def _serve(self) -> None:
        """What is generated is cached."""
        if self.ready and self.generating:
            self.cached.add(self.weights)
            self.make_tokens()

    def make_tokens(self) -> None:
        """Let each request go on by a token, if it generates. Engines without labels have no requests that matter."""
        if self.ready and self.generating and self.label is not None:
            for rollout in self.rollouts:
                rollout.goes_on(self.label, self.weights)

    def _wake(self, tags: frozenset[Tag]) -> None:
        if not tags <= self.asleep and Operation.WAKE not in IDEMPOTENT[self.kind]:
            self.kill(f"woke {sorted(tags)} of an engine with only {sorted(self.asleep)} asleep")
        self.asleep -= tags

    def _record(self, call: events.StartProfile) -> events.Returned | events.Fault:
        if self.forgotten is not None:
            return events.Fault("refused", "it records a session already.")
        self._start_profile(call.session.step)
        if self.caller is not None and self.caller.slot.cut_off:
            self.forgotten = self.session_step
            self.caller.world.forgotten.add(self.caller.slot.name)
        window = call.session.plan.window is not None and self.closing.random() < WINDOWS_END
        self.closes_ms = self.now() + self.closing.randrange(1, 6000) if window else None
        return events.Returned()

    def _start_profile(self, step: int) -> None:
        if self.session_step is not None:
            self.kill(f"a second profile start destroyed the session of step {self.session_step}")
        self.session_step, self.stop_doubtful = step, False

    def _resume(self) -> None:
        if self.asleep:
            self.kill(f"resumed an engine with {sorted(self.asleep)} asleep")
            return  # by one of two agents that command it: it ends
        self.shelf.advance()
        self.paused = self.frozen = False
        self.resumed()
        self._serve()

    def _sleep(self, tags: frozenset[Tag], discard: bool) -> None:
        if self.generating:
            self.kill("memory was released while requests run")
        if tags & self.asleep and Operation.SLEEP not in IDEMPOTENT[self.kind]:
            self.kill(f"released {sorted(tags)} of an engine with {sorted(self.asleep)} asleep")
        self.asleep |= tags
        if "kv_cache" in tags:
            self.cached.clear()
        if discard:
            self._tear()
            self.shelf.discard()

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
