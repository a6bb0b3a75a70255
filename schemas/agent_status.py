"""The heartbeat: what an agent reports of itself and its engine."""

from msgspec import Struct

from schemas.identity import ROLLOUT, Count, Label, Moment, Name, Nanoseconds, Text


class Clock(Struct, frozen=True, kw_only=True):
    """An agent's clocks, measured against the bus's. For timelines; no decision depends on it.

    Attributes:
        offset_ns: What to add to the node's wall clock to get the bus's.
        error_ns: By how much `offset_ns` may have been wrong at that moment.
    """

    at_ms: Moment
    wall_ns: Nanoseconds
    offset_ns: Nanoseconds
    error_ns: Nanoseconds

    def bus_ns(self, at_ms: int) -> int:
        """Return a moment of the agent's monotonic clock on the bus's wall clock."""
        return self.wall_ns + self.offset_ns + (at_ms - self.at_ms) * 1_000_000

    def grown_error_ns(self, at_ms: int) -> int:
        """Return the error at another moment: clocks drift apart by 15 ppm, as NTP assumes (RFC 5905, PHI)."""
        return self.error_ns + 15 * abs(at_ms - self.at_ms)


class Observed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent that only observes last saw of its engine; None where the engine can't tell."""

    label: Label | None = None
    generating: bool | None = None
    profiling: bool | None = None

    def condition(self) -> str:
        weights = f"weights {self.label}" if self.label else "weights unknown"
        generating = {True: "generating", False: "paused", None: "unknown whether paused"}[self.generating]
        return ", ".join(["observed", weights, generating, *(["profiling"] if self.profiling else [])])


class RequestCounts(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, tag="request_counts"):
    """Requests of the engine, by its own counters. Sent with some heartbeats, if it has changed. No decision depends on
    it, so it is not recorded.

    Attributes:
        running: Those that are being generated; None if the engine does not say.
        waiting: Those that wait until they are; None likewise.
    """

    running: Count | None = None
    waiting: Count | None = None


class AgentStatus(Struct, frozen=True, gc=False, kw_only=True, tag="status", omit_defaults=True):
    """The heartbeat: what an agent and its engine are doing. The header's seq is the last command applied.

    Attributes:
        ready: The engine is as desired, and serves. One that is paused, asleep or in quarantine is not ready.
        tokenizer: `present`, `absent`, or `unknown` while the engine is launching.
        engine: Name and version.
        generating: False when paused.
        asleep: Parts of the memory that are released.
        profiling_step: Step of the open session; None if there is none.
        version: Of the weights that the engine holds.
        digest: sha256 of these weights, if the engine can tell.
        quarantined: Version that this replica could not follow; 0 if none.
        torn: A load failed or was cut off, or another program replaced the weights: what the engine holds is unknown.
        activity: The engine call in flight.
        queued: Commands that wait for the engine.
        buffered: Commands that arrived out of order, and wait for those before them.
        clock: The newest estimate of the agent's clocks; None before the first.
        wedged: Its engine runs requests and has generated nothing for too long.
        trouble: What keeps the replica from serving, and what it waits for; empty if nothing but a command does.
        observed: What an agent that only observes saw; None for one that commands. Of such an agent, `generating` and
            `version` mean nothing where this has None.
        since_ms: When that call began, on the clock of `Clock.at_ms`; None if none is in flight.
        adapters_missing: Versions of LoRA adapters that are committed or being loaded, and that the engine does not
            hold, by the names that it would have for them.
        adapters_left: Versions whose files are still needed, though they may no longer be wanted: it holds them, or is
            loading them.
        launch_label: What the engine called its weights when it was launched; None for the label that launches have.
        faults: How many faults the agent has injected on purpose; None for one that was started without a plan of them.
    """

    ready: bool
    tokenizer: Name = "unknown"
    engine: Text = "unknown"
    generating: bool = False
    asleep: tuple[Name, ...] = ()
    profiling_step: Count | None = None
    version: Count = 0
    digest: Name | None = None
    quarantined: Count = 0
    torn: bool = False
    activity: Text | None = None
    queued: Count = 0
    buffered: Count = 0
    clock: Clock | None = None
    wedged: bool = False
    trouble: Text = ""
    observed: Observed | None = None
    since_ms: Moment | None = None
    adapters_missing: tuple[Name, ...] = ()
    adapters_left: tuple[Name, ...] = ()
    launch_label: Label | None = None
    faults: Count | None = None

    @property
    def held(self) -> bool:
        """Whether the replica is paused or asleep because it was told to be."""
        return not (self.ready or self.trouble or self.generating) and self.tokenizer == "present"

    def condition(self, role: str = ROLLOUT) -> str:
        """Return the status in a few words.

        Args:
            role: Of the agent. A training rank has no weights, and never generates.
        """
        parts = [] if self.ready or self.held else ["not ready"]
        parts += [f"quarantined since v{self.quarantined}"] if self.quarantined else []
        parts += ["torn weights"] if self.torn else []
        if role != ROLLOUT:
            parts += ["training"]
        elif self.tokenizer == "absent":
            parts += ["follower"]
        elif self.observed is not None:
            parts += [self.observed.condition()]
        else:
            parts += [f"v{self.version}", "generating" if self.generating else "paused"]
        parts += [f"asleep {' '.join(self.asleep)}"] if self.asleep else []
        parts += [f"profiling step {self.profiling_step}"] if self.profiling_step is not None else []
        parts += [f"without adapter {', '.join(self.adapters_missing[:3])}"] if self.adapters_missing else []
        parts += [f"busy: {self.activity}"] if self.activity else []
        parts += [self.trouble] if self.trouble else []
        return ", ".join(parts)
