"""Folds the failed and missing outcomes of a run into their causes: one dead agent leaves many commands open. Pure.

Rule 1  Agents that are lost for the same reason at about the same time are one cause. All that they did not answer,
        from the moment when they were last heard until they are back, belongs to it.
Rule 2  Agents that fail with the same message are one cause. Numbers in the message do not count.
Rule 3  Agents of the fleet that do not answer the same commands in time are one cause.
Rule 4  What the trainer left open, could not send or gave up is one cause for all agents.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from controlplane.report.fleet_history import AgentHistory, FleetHistory
from controlplane.report.model import Cause, CommandSummary
from schemas.formatting import command_kind, is_trouble, kind_and_reason, without_numbers
from schemas.outcomes import Conclusion, Failed
from schemas.reports import Report

LOST_TOGETHER_NS: Final = 5_000_000_000
"""Longest time between the losses of two agents that are taken for one."""
MAX_TEXT: Final = 1_200
"""Characters of a message."""
_OF_THE_AGENT: Final = ("deadline", "absent", "gone", "restarted", "engine_down")
"""Reasons for a missing outcome that lie with the agent; all others lie with the trainer."""


class _Key(NamedTuple):
    """What the outcomes of one cause have in common. `whose` is empty for all agents together."""

    kind: str
    reason: str
    message: str = ""
    whose: str = ""


class Causes:
    """Follows losses and reports."""

    def __init__(self, fleet: FleetHistory) -> None:
        self._fleet = fleet
        self._lost: list[Cause] = []
        self._away: dict[str, Cause] = {}  # by agent that is lost
        self._others: dict[_Key, Cause] = {}
        self._silent: dict[str, tuple[int, Cause]] = {}  # by agent: last heard, and what it did not answer since

    def lost(self, agent: AgentHistory, reason: str) -> None:
        """An agent is out of the fleet, and did not say goodbye."""
        name, now_ns = agent.agent, self._fleet.now_ns
        cause = self._lost[-1] if self._lost else None
        if (
            cause is None
            or (cause.kind, cause.reason) != ("lost", reason)
            or name in cause.members
            or now_ns - cause.until_ns > LOST_TOGETHER_NS
        ):
            cause = Cause(kind="lost", reason=reason, at_ns=now_ns)
            self._lost.append(cause)
        cause.until_ns = now_ns
        cause.members.add(name)
        cause.hosts.add(agent.member.hello.host)
        heard_ns, unanswered = self._silent.pop(name, (agent.heard_ns, None))
        if unanswered is not None and heard_ns == agent.heard_ns:
            cause.absorb(unanswered)
        elif unanswered is not None:
            self._settle(unanswered)
        self._away[name] = cause

    def returned(self, name: str) -> None:
        """An agent is in the fleet (again)."""
        cause = self._away.pop(name, None)
        if cause is not None:
            cause.returned_ns[name] = self._fleet.now_ns

    def concluded(self, report: Report, summary: CommandSummary) -> None:
        """Add what went wrong with a command."""
        kind = command_kind(report.command)
        for outcome in report.outcomes:
            if is_trouble(outcome.conclusion):
                cause = self._cause(outcome.agent, outcome.conclusion, summary)
                cause.add(outcome.agent, summary, kind, self._fleet.now_ns)

    def finish(self) -> list[Cause]:
        """Return the causes, in the order in which they began."""
        for _, unanswered in self._silent.values():
            self._settle(unanswered)
        together: dict[object, Cause] = {}
        for key, cause in self._others.items():
            same = (key.reason, cause.seq, cause.last_seq, cause.outcomes) if key.whose else key
            if same in together:
                together[same].absorb(cause)
            else:
                together[same] = cause
        return sorted((*self._lost, *together.values()), key=lambda cause: cause.at_ns)

    def _cause(self, agent: str, conclusion: Conclusion, summary: CommandSummary) -> Cause:
        """The cause of an outcome."""
        kind, reason = kind_and_reason(conclusion)
        if isinstance(conclusion, Failed):
            return self._other(_Key(kind, reason, without_numbers(conclusion.message)), summary, conclusion.message)
        if reason not in _OF_THE_AGENT:
            return self._other(_Key(kind, reason, str(self._fleet.now_ns)), summary)
        if reason != "engine_down" and agent in self._away:
            return self._away[agent]
        if reason != "deadline":
            return self._other(_Key(kind, reason, whose=agent), summary)
        heard_ns, (before_ns, unanswered) = self._fleet.heard_ns(agent), self._silent.get(agent, (0, None))
        if unanswered is None or before_ns != heard_ns:
            if unanswered is not None:
                self._settle(unanswered)
            unanswered = _began(_Key(kind, reason, whose=agent), summary)
            self._silent[agent] = heard_ns, unanswered
        return unanswered

    def _other(self, key: _Key, summary: CommandSummary, message: str = "") -> Cause:
        if key not in self._others:
            self._others[key] = _began(key, summary, message)
        return self._others[key]

    def _settle(self, unanswered: Cause) -> None:
        """An agent was heard again: what it did not answer before was not because it died."""
        (agent,) = unanswered.members
        key = _Key(unanswered.kind, unanswered.reason, whose=agent)
        if key in self._others:
            self._others[key].absorb(unanswered)
        else:
            self._others[key] = unanswered


def explain(causes: Iterable[Cause], replica: int, version: int) -> Cause | None:
    """Return the cause for which a replica did not follow a sync."""
    return next((cause for cause in causes if (replica, version) in cause.syncs), None)


def _began(key: _Key, summary: CommandSummary, message: str = "") -> Cause:
    if len(message) > MAX_TEXT:
        message = f"{message[:MAX_TEXT]}… ({len(message)} characters)"
    cause = Cause(kind=key.kind, reason=key.reason, message=message, at_ns=summary.at_ns)
    if key.whose:
        cause.members.add(key.whose)
    return cause
