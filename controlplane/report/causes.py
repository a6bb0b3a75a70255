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
        unanswered = self._others.pop(_unanswered(name, agent.heard_ns), None)
        if unanswered is not None:
            cause.absorb(unanswered)
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
        of_all = [cause for key, cause in self._others.items() if not key.whose]
        of_one = _merged(((key.reason, key.whose), cause) for key, cause in self._others.items() if key.whose)
        alike = ((cause.reason, cause.seq, cause.last_seq, cause.outcomes) for cause in of_one)
        together = _merged(zip(alike, of_one, strict=True))
        return sorted((*self._lost, *of_all, *together), key=lambda cause: cause.at_ns)

    def _cause(self, agent: str, conclusion: Conclusion, summary: CommandSummary) -> Cause:
        kind, reason = kind_and_reason(conclusion)
        if isinstance(conclusion, Failed):
            return self._other(_Key(kind, reason, without_numbers(conclusion.message)), summary, conclusion.message)
        if reason not in _OF_THE_AGENT:
            return self._other(_Key(kind, reason, str(self._fleet.now_ns)), summary)
        if reason != "engine_down" and agent in self._away:
            return self._away[agent]
        if reason != "deadline":
            return self._other(_Key(kind, reason, whose=agent), summary)
        return self._other(_unanswered(agent, self._fleet.heard_ns(agent)), summary)

    def _other(self, key: _Key, summary: CommandSummary, message: str = "") -> Cause:
        if key not in self._others:
            self._others[key] = _began(key, summary, message)
        return self._others[key]


def explain(causes: Iterable[Cause], replica: int, version: int) -> Cause | None:
    """Return the cause for which a replica did not follow a sync."""
    return next((cause for cause in causes if (replica, version) in cause.syncs), None)


def _unanswered(agent: str, heard_ns: int) -> _Key:
    """Of what an agent did not answer since it was last heard. If it is not heard again, that is because it died."""
    return _Key("missing", "deadline", str(heard_ns), agent)


def _merged(causes: Iterable[tuple[object, Cause]]) -> list[Cause]:
    """Those with the same key as one."""
    together: dict[object, Cause] = {}
    for key, cause in causes:
        if key in together:
            together[key].absorb(cause)
        else:
            together[key] = cause
    return list(together.values())


def _began(key: _Key, summary: CommandSummary, message: str = "") -> Cause:
    if len(message) > MAX_TEXT:
        message = f"{message[:MAX_TEXT]}… ({len(message)} characters)"
    cause = Cause(kind=key.kind, reason=key.reason, message=message, at_ns=summary.at_ns)
    if key.whose:
        cause.members.add(key.whose)
    return cause
