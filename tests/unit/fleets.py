"""A coordinator without a bus, which tests feed with the events of agents."""

from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine import events
from controlplane.machine.coordinator import CoordinatorState, decide
from schemas.agent_status import AgentStatus
from schemas.commands import AdapterRequest, Checkpoint, Command, Manifest, Source, Target
from schemas.desired import Desired
from schemas.identity import ROLLOUT, RolloutMode, identity_of
from schemas.outcomes import Acted, ErrorKind, Failed, Missing, Outcome, Reason, Skipped
from schemas.reports import Report, SyncReport
from schemas.wire import CommandRecord, Downward, Hello, PlaceAssigned, Rejoin, Replay, Snapshot, decode_command

SETTINGS = events.CoordinatorSettings(
    heartbeat_ms=1000, agent_timeout_ms=10_000, lease_ms=60_000, history=8, retransmit_ms=1000, publish_port=7000
)
SECOND_US = 1_000_000
DONE = Acted(calls=())
NO = Failed(ErrorKind.ENGINE_ERROR, "It burns.")
NOT_PRIMARY = Skipped(Reason.NOT_PRIMARY)

E = TypeVar("E", bound=Struct)


class Coordinator:
    """The machine of the trainer's side, fed one event at a time. `effects` are those of the last event."""

    def __init__(self, *agents: str, settings: events.CoordinatorSettings = SETTINGS) -> None:
        """An open bus on an empty log whose fleet is `agents`. No agent is in the fleet yet at its first command."""
        self.state = CoordinatorState()
        self.effects: tuple[events.CoordinatorEffect, ...] = ()
        self.history: list[events.CoordinatorEvent] = []
        self.tickets = 0
        self.settings = settings
        self.open()
        for agent in agents:
            self.arrive(agent)

    def feed(self, event: events.CoordinatorEvent) -> tuple[events.CoordinatorEffect, ...]:
        self.history.append(event)
        self.state, self.effects = decide(self.state, event)
        return self.effects

    # --- events -------------------------------------------------------------------------------------------------------

    def open(self, at_us: int = 0) -> None:
        self.feed(events.Opened(at_us=at_us, at_ns=0, run="run", settings=self.settings, logic=1))

    def close(self) -> None:
        self.feed(events.Closed(at_us=0, at_ns=0))

    def hello(
        self,
        agent: str,
        incarnation: str = "a",
        *,
        at_us: int = 0,
        recorded: int = 0,
        mode: RolloutMode = RolloutMode.HYBRID,
        nnodes: int = 2,
        gpus: int = 1,
        rejoin: bool = False,
    ) -> None:
        identity = identity_of(agent)
        if identity.role == ROLLOUT:
            identity = replace(identity, nnodes=nnodes, gpus_per_node=gpus, mode=mode)
        greeting = Hello(identity=identity, incarnation=incarnation, journal="j", host="node-1", pid=42, rejoin=rejoin)
        self.feed(
            events.HelloReceived(
                at_us=at_us, peer=f"{agent}/{incarnation}", hello=greeting, recorded_decisions=recorded
            )
        )

    def ask(self, token: str, at_us: int = 0) -> int | Rejoin:
        """Ask for a free replica; returns which one, or why there is none."""
        self.feed(events.PlaceRequested(at_us=at_us, at_ns=0, peer=f"auto/{token}/00", token=token))
        ((_, answer),) = self.sent
        assert isinstance(answer, PlaceAssigned | Rejoin)
        return answer.replica if isinstance(answer, PlaceAssigned) else answer

    def arrive(self, agent: str, incarnation: str = "a", mode: RolloutMode = RolloutMode.HYBRID) -> Desired:
        """Hello and join; returns the desired state that the agent is sent."""
        self.hello(agent, incarnation, mode=mode)
        self.join(agent, incarnation)
        return self.snapshot

    def join(self, agent: str, incarnation: str = "a") -> None:
        self.feed(events.JoinReceived(at_us=0, peer=f"{agent}/{incarnation}"))

    def status(self, agent: str, status: AgentStatus, seq: int = 0, incarnation: str = "a", at_us: int = 0) -> None:
        self.feed(events.StatusReceived(at_us=at_us, peer=f"{agent}/{incarnation}", seq=seq, status=status))

    def lose(self, agent: str, why: str = "silent", at_us: int = 0) -> None:
        self.feed(events.PeerLost(at_us=at_us, peer=f"{agent}/a", reason="left" if why == "left" else "silent"))

    def issue(
        self,
        body: Command,
        *,
        target: Target | None = None,
        timeout_ms: int = 30_000,
        at_us: int = 0,
        at_ns: int = 0,
        operator: bool = False,
        force: bool = False,
    ) -> int:
        """Publish a command; returns its ticket."""
        self.tickets += 1
        self.feed(
            events.Issued(
                at_us=at_us,
                at_ns=at_ns,
                ticket=self.tickets,
                command=body,
                target=target or Target(),
                timeout_ms=timeout_ms,
                operator=operator,
                force=force,
            )
        )
        return self.tickets

    def sync(
        self,
        version: int | None = 1,
        *,
        quorum: int | None = None,
        path: str | None = None,
        target: Target | None = None,
        on_unreachable: events.OnUnreachable = "skip",
        source: Source | None = None,
        manifest: Manifest | None = None,
        sends: bool = False,
        adapter: str | None = None,
        base: int | None = None,
        keep: int = 2,
    ) -> int:
        """Ask for a sync of weights, or of an `adapter`; returns its ticket."""
        self.tickets += 1
        self.feed(
            events.SyncRequested(
                at_us=0,
                at_ns=0,
                ticket=self.tickets,
                version=version,
                source=source or Checkpoint(path or f"v{version}"),
                manifest=manifest,
                in_flight="wait",
                quorum=quorum,
                target=target or Target(),
                timeout_ms=30_000,
                on_unreachable=on_unreachable,
                sends=sends,
                adapter=AdapterRequest(name=adapter, base=base, keep=keep) if adapter is not None else None,
            )
        )
        return self.tickets

    def retire(self, *places: str) -> int:
        """Ask to retire places; returns the ticket."""
        self.tickets += 1
        self.feed(events.RetireRequested(at_us=0, at_ns=0, ticket=self.tickets, places=places))
        return self.tickets

    def send_failed(self, ticket: int, reason: str = "RuntimeError: no group") -> None:
        """The trainer can't send the weights of a sync."""
        self.feed(events.SendFailed(at_us=0, at_ns=0, ticket=ticket, reason=reason))

    def send_returned(self, ticket: int, at_us: int = 0) -> None:
        """The trainer has sent the weights of a sync."""
        self.feed(events.SendReturned(at_us=at_us, at_ns=0, ticket=ticket))

    def answer(self, seq: int | None = None, *, at_us: int = 0, origin: int | None = None, **outcomes: Outcome) -> None:
        """One batch of answers to `seq`, the newest by default. Keywords: `a0_1` is agent 0.1, `actor_1` is actor.1."""
        batch = tuple(
            events.PeerAnswer(
                peer=f"{(agent if agent.startswith('actor') else agent[1:]).replace('_', '.')}/a",
                origin=origin or self.state.epoch,
                seq=seq or self.state.seq,
                outcome=outcome,
                rule=10,
            )
            for agent, outcome in outcomes.items()
        )
        self.feed(events.AnswersReceived(at_us=at_us, answers=batch))

    def request_resend(self, agent: str, first: int, credit: int = 64, at_us: int = 0) -> None:
        self.feed(events.ResendRequested(at_us=at_us, peer=f"{agent}/a", first=first, credit=credit))

    def time(self, at_us: int) -> None:
        self.feed(events.TimerFired(at_us=at_us))

    # --- what it decided ----------------------------------------------------------------------------------------------

    def of(self, kind: type[E]) -> list[E]:
        """The effects of this kind."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def sent(self) -> list[tuple[str, Downward]]:
        """Control messages of the last event, with their receiver."""
        return [(effect.peer, effect.message) for effect in self.of(events.Send)]

    @property
    def snapshot(self) -> Desired:
        """The desired state that the last event sent."""
        ((_, message),) = self.sent
        assert isinstance(message, Snapshot)
        return message.desired

    @property
    def replayed(self) -> tuple[CommandRecord, ...]:
        """The records that the last event sent."""
        ((_, message),) = self.sent
        assert isinstance(message, Replay)
        return message.records

    @property
    def published(self) -> list[object]:
        """Commands of the last event."""
        return [decode_command(effect.envelope.body) for effect in self.of(events.Publish)]

    @property
    def reports(self) -> list[Report]:
        """Reports of the commands that the last event ended."""
        return [effect.report for effect in self.of(events.Conclude) if isinstance(effect.report, Report)]

    @property
    def synced(self) -> list[SyncReport]:
        """Reports of the syncs that the last event ended."""
        return [effect.report for effect in self.of(events.Conclude) if isinstance(effect.report, SyncReport)]

    @property
    def refused(self) -> list[tuple[int, str, str]]:
        """Ticket, kind and reason of what was refused."""
        return [(effect.ticket, effect.kind, effect.reason) for effect in self.of(events.Refuse)]

    @property
    def pinged(self) -> list[str]:
        return [effect.peer for effect in self.of(events.Ping)]


def lines(report: Report) -> dict[str, object]:
    """What each agent concluded; a missing one by its reason."""
    return {
        outcome.agent: outcome.conclusion.reason if isinstance(outcome.conclusion, Missing) else outcome.conclusion
        for outcome in report.outcomes
    }
