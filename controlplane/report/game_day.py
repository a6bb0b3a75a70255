"""The faults of a game day in a recorded run: what each cost, and when the fleet was whole again. Pure.

A fault is followed until the next one on the same replica or training rank. Its cost is the time for which that was out
of service, gone, or behind the fleet, and the syncs that did not reach it meanwhile. Times are of the bus's wall clock,
by the best measurement that each agent has made of it.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from controlplane.report.fleet_history import ReplicaHistory
from schemas.agent_status import Clock
from schemas.events import FaultInjected
from schemas.identity import identity_of
from schemas.reports import SyncReport

SYNCS_NAMED: Final = 3
"""Syncs that are named for one fault."""
CLOCKS_NS: Final = 20_000_000
"""By how much a converted time may be wrong."""


class InjectedFault(Struct, kw_only=True):
    """One fault that happened.

    Attributes:
        at_ns: When; until the report is finished, when the bus recorded it.
        at_ms: When, on the agent's monotonic clock.
        out_ns: For how long its replica was out of service, gone or behind because of it.
        whole_ns: When its replica was back, and the last sync that had not reached it was followed by one that did;
            None if not by the end of the log.
    """

    name: str
    what: str
    agent: str
    at_ns: int
    at_ms: int
    out_ns: int = 0
    whole_ns: int | None = None
    syncs: list[str] = []
    syncs_count: int = 0

    @property
    def repaired_ns(self) -> int | None:
        """The time from the fault until all was well again; None if it was not."""
        return None if self.whole_ns is None else max(0, self.whole_ns - self.at_ns)


class GameDay:
    """Follows faults and syncs."""

    def __init__(self) -> None:
        self._faults: list[InjectedFault] = []
        self._syncs: list[tuple[int, SyncReport]] = []

    def injected(self, agent: str, event: FaultInjected, at_ns: int) -> None:
        """An agent has injected a fault, which the bus recorded at `at_ns`."""
        fault = InjectedFault(name=event.name, what=event.what, agent=agent, at_ns=at_ns, at_ms=event.at_ms)
        self._faults.append(fault)

    def concluded(self, report: SyncReport, now_ns: int) -> None:
        if self._faults:
            self._syncs.append((now_ns, report))

    def faults(
        self, units: Mapping[int | str, ReplicaHistory], clocks: Mapping[str, Clock], now_ns: int
    ) -> list[InjectedFault]:
        """Return the faults in order, with what they cost up to the end of the log.

        Args:
            units: Each replica and training rank over the run, with the conditions that hold at the end still open.
            clocks: Of the agents, as far as they are known.
            now_ns: The end of the log.
        """
        for fault in self._faults:
            if fault.agent in clocks:
                fault.at_ns = clocks[fault.agent].bus_ns(fault.at_ms)
        ordered = sorted(self._faults, key=lambda fault: fault.at_ns)
        next_ns: dict[int | str, int] = {}  # by replica or rank: its next fault
        for fault in reversed(ordered):
            unit = identity_of(fault.agent).unit
            self._cost(fault, unit, units.get(unit, ReplicaHistory()), next_ns.get(unit, now_ns + CLOCKS_NS))
            next_ns[unit] = fault.at_ns
        return ordered

    def _cost(self, fault: InjectedFault, unit: int | str, history: ReplicaHistory, until_ns: int) -> None:
        window = range(fault.at_ns - CLOCKS_NS, until_ns)
        spans = [(begin, end) for _, begin, end in history.spans if begin in window]
        lasting = [begin for name, begin in history.since_ns.items() if name != "paused" and begin in window]
        missed = [
            (end, report)
            for end, report in self._syncs
            if end in window and unit in (*report.quarantined, *report.unproven)
        ]
        fault.syncs = [report.headline for _, report in missed[:SYNCS_NAMED]]
        fault.syncs_count = len(missed)
        fault.out_ns = _covered_ns([*spans, *((begin, until_ns) for begin in lasting)])
        ends = [fault.at_ns, *(end for _, end in spans)]
        if missed:
            reached = [end for end, report in self._syncs if end > missed[-1][0] and unit in report.loaded]
            ends = [*ends, reached[0]] if reached else []
        fault.whole_ns = max(ends) if ends and not lasting else None


def _covered_ns(spans: list[tuple[int, int]]) -> int:
    """The length of what the spans cover together."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
