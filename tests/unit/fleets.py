"""A coordinator without a bus, and the agents' words that tests put into its ear."""

from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine.coordinator import CoordinatorState, decide
from controlplane.machine.events import (
    AnswersReceived,
    Closed,
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    CoordinatorSettings,
    HelloReceived,
    Issued,
    JoinReceived,
    Opened,
    PeerAnswer,
    PeerLost,
    Ping,
    Publish,
    Refuse,
    ResendRequested,
    Send,
    StatusReceived,
    SyncRequested,
    TimerFired,
)
from schemas.commands import Checkpoint, Command, Target
from schemas.identity import ROLLOUT, RolloutMode, identity_of
from schemas.outcomes import Acted, ErrorKind, Failed, Missing, Outcome, Reason, Skipped
from schemas.reports import AgentStatus, Report, SyncReport
from schemas.wire import Downward, Hello, decode_command

SETTINGS = CoordinatorSettings(
    heartbeat_ms=1000, agent_timeout_ms=10_000, lease_ms=60_000, history=8, retransmit_ms=1000, publish_port=7000
)
SECOND_US = 1_000_000
DONE = Acted(calls=())
NO = Failed(ErrorKind.ENGINE_ERROR, "It burns.")
NOT_PRIMARY = Skipped(Reason.NOT_PRIMARY)

E = TypeVar("E", bound=Struct)


class Coordinator:
    """The machine of the trainer's side, fed one event at a time. `effects` are those of the last event."""

    def __init__(self, *agents: str, settings: CoordinatorSettings = SETTINGS) -> None:
        """An open bus on an empty log whose fleet is `agents`. Nobody is in the fleet yet at its first command."""
        self.state = CoordinatorState()
        self.effects: tuple[CoordinatorEffect, ...] = ()
        self.history: list[CoordinatorEvent] = []
        self.tickets = 0
        self.settings = settings
        self.open()
        for agent in agents:
            self.hello(agent)
            self.join(agent)

    def feed(self, event: CoordinatorEvent) -> tuple[CoordinatorEffect, ...]:
        self.history.append(event)
        self.state, self.effects = decide(self.state, event)
        return self.effects

    # --- events -------------------------------------------------------------------------------------------------------

    def open(self, at_us: int = 0) -> None:
        self.feed(Opened(at_us=at_us, at_ns=0, run="run", settings=self.settings, logic=1))

    def close(self) -> None:
        self.feed(Closed(at_us=0, at_ns=0))

    def hello(
        self,
        agent: str,
        incarnation: str = "a",
        *,
        at_us: int = 0,
        recorded: int = 0,
        mode: RolloutMode = RolloutMode.HYBRID,
    ) -> None:
        identity = identity_of(agent)
        if identity.role == ROLLOUT:
            identity = replace(identity, nnodes=2, mode=mode)
        greeting = Hello(identity=identity, incarnation=incarnation, journal="j", host="node-1", pid=42)
        self.feed(
            HelloReceived(at_us=at_us, peer=f"{agent}/{incarnation}", hello=greeting, recorded_decisions=recorded)
        )

    def join(self, agent: str, incarnation: str = "a") -> None:
        self.feed(JoinReceived(at_us=0, peer=f"{agent}/{incarnation}"))

    def say(self, agent: str, status: AgentStatus, seq: int = 0, incarnation: str = "a") -> None:
        self.feed(StatusReceived(at_us=0, peer=f"{agent}/{incarnation}", seq=seq, status=status))

    def lose(self, agent: str, why: str = "silent", at_us: int = 0) -> None:
        left = PeerLost(at_us=at_us, peer=f"{agent}/a", reason="left" if why == "left" else "silent")
        self.feed(left)

    def issue(self, body: Command, *, target: Target | None = None, timeout_ms: int = 30_000, at_us: int = 0) -> int:
        """Publish a command; returns its ticket."""
        self.tickets += 1
        self.feed(
            Issued(
                at_us=at_us,
                at_ns=0,
                ticket=self.tickets,
                command=body,
                target=target or Target(),
                timeout_ms=timeout_ms,
            )
        )
        return self.tickets

    def sync(
        self, version: int = 1, *, quorum: int | None = None, path: str | None = None, target: Target | None = None
    ) -> int:
        """Ask for a weight sync; returns its ticket."""
        self.tickets += 1
        self.feed(
            SyncRequested(
                at_us=0,
                at_ns=0,
                ticket=self.tickets,
                version=version,
                source=Checkpoint(path or f"v{version}"),
                manifest=None,
                in_flight="wait",
                quorum=quorum,
                target=target or Target(),
                timeout_ms=30_000,
            )
        )
        return self.tickets

    def answer(self, seq: int | None = None, *, at_us: int = 0, origin: int | None = None, **said: Outcome) -> None:
        """One batch of answers to `seq`, the newest if None. Agents are keywords: `a0_1` is agent 0.1, `actor_1` too is
        what it looks like.
        """
        batch = tuple(
            PeerAnswer(
                peer=f"{(agent if agent.startswith('actor') else agent[1:]).replace('_', '.')}/a",
                origin=origin or self.state.epoch,
                seq=seq or self.state.seq,
                outcome=outcome,
                rule=10,
            )
            for agent, outcome in said.items()
        )
        self.feed(AnswersReceived(at_us=at_us, answers=batch))

    def need(self, agent: str, first: int, credit: int = 64, at_us: int = 0) -> None:
        self.feed(ResendRequested(at_us=at_us, peer=f"{agent}/a", first=first, credit=credit))

    def time(self, at_us: int) -> None:
        self.feed(TimerFired(at_us=at_us))

    # --- what it decided ----------------------------------------------------------------------------------------------

    def of(self, kind: type[E]) -> list[E]:
        """The effects of this kind."""
        return [one for one in self.effects if isinstance(one, kind)]

    @property
    def sent(self) -> list[tuple[str, Downward]]:
        """Control messages of the last event, with their receiver."""
        return [(one.peer, one.message) for one in self.of(Send)]

    @property
    def published(self) -> list[object]:
        """Commands of the last event."""
        return [decode_command(one.envelope.body) for one in self.of(Publish)]

    @property
    def reports(self) -> list[Report]:
        """Commands that the last event ended."""
        return [one.report for one in self.of(Conclude) if isinstance(one.report, Report)]

    @property
    def synced(self) -> list[SyncReport]:
        """Syncs that the last event ended."""
        return [one.report for one in self.of(Conclude) if isinstance(one.report, SyncReport)]

    @property
    def refused(self) -> list[tuple[int, str, str]]:
        """Ticket, kind and reason of what was refused."""
        return [(one.ticket, one.kind, one.reason) for one in self.of(Refuse)]

    @property
    def probed(self) -> list[str]:
        return [one.peer for one in self.of(Ping)]


def lines(report: Report) -> dict[str, object]:
    """What each agent concluded; a missing one by its reason."""
    return {
        one.agent: one.conclusion.reason if isinstance(one.conclusion, Missing) else one.conclusion
        for one in report.outcomes
    }
