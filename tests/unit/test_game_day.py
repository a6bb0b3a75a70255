"""What a fault cost, from the history of its replica and the syncs meanwhile."""

from controlplane.analysis.findings import Violation
from controlplane.report.fleet_history import ReplicaHistory
from controlplane.report.game_day import GameDay, InjectedFault
from controlplane.report.model import RunReport
from controlplane.report.verdict import verdict
from schemas.agent_status import Clock
from schemas.events import FaultInjected
from schemas.fault_plan import parse_plan
from schemas.reports import SyncReport

S = 1_000_000_000
START = 1_000 * S
PLAN = parse_plan("[[fault]]\nname='dies'\nwhat='kill_agent'\n[[fault]]\nname='never'\nwhat='kill_agent'\nversion=99")


def sync(version: int, loaded: tuple[int, ...], unproven: tuple[int, ...] = ()) -> SyncReport:
    return SyncReport(version=version, status="committed", loaded=loaded, quarantined=(), unproven=unproven, phases=())


def faults(
    *at: tuple[str, float],
    spans: tuple[tuple[float, float], ...] = (),
    open_since: float | None = None,
    syncs: tuple[tuple[float, SyncReport], ...] = (),
) -> list[InjectedFault]:
    """The faults of a run of 100 s in which replica 1 was out of service as `spans` say."""
    day = GameDay()
    for agent, second in at:
        fault = FaultInjected(at_ms=int(second * 1000), name="dies", what="kill_agent")
        day.injected(agent, fault, START + 50 * S)  # an agent that was killed uploads it when it is back
    for second, report in syncs:
        day.concluded(report, START + int(second * S))
    history = ReplicaHistory(spans=[("gone", START + int(a * S), START + int(b * S)) for a, b in spans])
    if open_since is not None:
        history.since_ns["gone"] = START + int(open_since * S)
    clock = Clock(at_ms=60_000, wall_ns=START, offset_ns=60 * S, error_ns=0)
    return day.faults(
        {1: history, "actor.0": history}, dict.fromkeys(("0.0", "1.0", "actor.0"), clock), START + 100 * S
    )


def test_a_fault_that_harmed_nothing_costs_nothing() -> None:
    (fault,) = faults(("1.0", 10))
    assert (fault.out_ns, fault.repaired_ns, fault.syncs) == (0, 0, [])


def test_a_fault_costs_the_time_until_its_replica_is_back() -> None:
    (fault,) = faults(("1.0", 10), spans=((2, 5), (12, 20), (18, 25)))
    assert (fault.out_ns, fault.repaired_ns) == (13 * S, 15 * S)


def test_a_sync_that_missed_the_replica_counts_until_one_reaches_it() -> None:
    missed, reached = sync(3, (0,), unproven=(1,)), sync(4, (0, 1))
    (fault,) = faults(("1.0", 10), spans=((12, 20),), syncs=((15, missed), (40, reached)))
    assert (fault.repaired_ns, fault.syncs) == (30 * S, [missed.headline])
    (fault,) = faults(("1.0", 10), syncs=((15, missed),))
    assert fault.repaired_ns is None


def test_what_lasts_at_the_end_was_not_repaired() -> None:
    (fault,) = faults(("1.0", 10), open_since=12)
    assert fault.repaired_ns is None
    assert fault.out_ns >= 88 * S


def test_a_fault_is_followed_until_the_next_on_its_replica_and_not_on_others() -> None:
    first, other, second = faults(("1.0", 10), ("0.0", 15), ("1.0", 30), spans=((12, 20), (31, 33)))
    assert [first.out_ns, other.out_ns, second.out_ns] == [8 * S, 0, 2 * S]
    assert [first.repaired_ns, other.repaired_ns, second.repaired_ns] == [10 * S, 0, 3 * S]


def test_a_fault_of_a_training_rank_costs_the_time_for_which_that_was_gone_and_is_no_replicas() -> None:
    ours, other = faults(("actor.0", 10), ("0.0", 11), spans=((12, 20),), syncs=((15, sync(3, (1,), unproven=(0,))),))
    assert (ours.out_ns, ours.repaired_ns, ours.syncs) == (8 * S, 10 * S, [])
    assert (other.out_ns, other.repaired_ns, other.syncs_count) == (0, None, 1)


def test_a_replica_that_is_still_out_when_the_next_fault_strikes_is_whole_once_it_is_back() -> None:
    first, second = faults(("1.0", 10), ("1.0", 15), spans=((12, 20),))
    assert [first.repaired_ns, second.repaired_ns] == [10 * S, 0]
    missed, reached = sync(3, (0,), unproven=(1,)), sync(4, (0, 1))
    first, second = faults(("1.0", 10), ("1.0", 15), syncs=((12, missed), (40, reached)))
    assert first.repaired_ns == 30 * S


def test_the_verdict_names_what_happened_and_what_did_not() -> None:
    report = RunReport(faults=faults(("1.0", 10), spans=((12, 20),)))
    lines, good = verdict(PLAN, report)
    assert good
    assert "dies (kill_agent) on 1.0: out of service for 8 s; whole again after 10 s" in lines[0]
    assert lines[1:] == [
        "never: never happened, as far as the log has it",
        "time to repair: median 10 s, longest 10 s; out of service for 8 s in all",
        "1 fault: all promises held",
    ]
    report.violations.append(Violation("I3", 7, ("1.0",), "applied twice"))
    lines, good = verdict(PLAN, report)
    assert (good, lines[-2:]) == (False, ["I3 at record 7 (1.0): applied twice", "1 fault: 1 promise broke"])
