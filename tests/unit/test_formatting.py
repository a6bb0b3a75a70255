"""How reports and the fleet's status print."""

from io import StringIO

import pytest
from msgspec.structs import replace
from rich.console import Console

from schemas.agent_status import AgentStatus
from schemas.commands import EngineCommand, WeightSync
from schemas.formatting import MAX_LINES, Printable, format_agents, format_replicas
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing, Reason, Skipped, Trace
from schemas.reports import AgentLine, AgentOutcome, FleetStatus, Report, SyncReport

PAUSED = Acted(calls=("pause",))
BROKEN = Failed(ErrorKind.ENGINE_ERROR, "it said [red] & <b>\nthen \x1b[31mthis")


def report(outcomes: dict[str, Conclusion]) -> Report:
    lines = tuple(AgentOutcome(agent=agent, conclusion=outcome, latency_us=1260) for agent, outcome in outcomes.items())
    return Report(seq=12, origin=1, command=EngineCommand(operation="pause"), outcomes=lines)


def terminal(printed: Printable) -> str:
    out = StringIO()
    Console(file=out, width=200).print(printed)
    return out.getvalue()


def test_a_report_shows_failures_first_and_groups_equal_outcomes() -> None:
    agents: dict[str, Conclusion] = {f"{replica}.0": PAUSED for replica in range(5)}
    agents |= {f"{replica}.1": Skipped(Reason.NOT_PRIMARY) for replica in range(2)}
    shown = str(report({**agents, "9.0": Missing("gone"), "actor.1": Failed(ErrorKind.ENGINE_BUSY, "busy")}))
    assert shown.splitlines() == [
        "pause (seq 12): 1 failed, 1 missing, 5 acted, 2 skipped; slowest 1.2 ms",
        "  actor.1: failed engine_busy: busy",
        "  9.0: missing (gone)",
        "  0.0 … 4.0: acted (pause)",
        "  0.1, 1.1: skipped not_primary",
    ]


def test_a_report_of_no_agent_says_so() -> None:
    assert str(report({})) == "pause (seq 12): no agents"


def test_what_a_stop_left_is_counted() -> None:
    trace = Trace("a", 1, "0")
    acted = Acted(calls=("stop",), auto_stopped=True, traces=(trace, trace), ranks_without_trace=(1,), version=3)
    text = "acted (stop); version 3; the engine had stopped by itself; 2 traces; no trace of ranks 1"
    assert str(report({"0.0": acted})).splitlines()[1] == f"  0.0: {text}"


def test_a_large_fleet_in_trouble_still_fits_a_screen() -> None:
    shown = str(report({f"{replica}.0": Failed(ErrorKind.ENGINE_ERROR, f"{replica}" * 900) for replica in range(64)}))
    lines = shown.splitlines()
    assert len(lines) == MAX_LINES and lines[-1] == "  … 46 more lines"
    assert max(map(len, lines)) < 500


def test_words_of_an_engine_are_escaped_wherever_a_report_is_shown() -> None:
    broken = report({"0.0": BROKEN})
    assert str(broken).splitlines()[1] == "  0.0: failed engine_error: it said [red] & <b> then  [31mthis"
    assert terminal(broken) == str(broken) + "\n"
    assert "[red] &amp; &lt;b&gt; then" in broken._repr_html_() and "<b>" not in broken._repr_html_()


def test_the_representation_is_still_the_data() -> None:
    assert repr(report({})).startswith("Report(seq=12, origin=1, command=EngineCommand(")


def test_a_sync_report_shows_what_each_replica_serves_and_which_phase_failed() -> None:
    def phase(name: str, **conclusions: Conclusion) -> Report:
        command = WeightSync(phase=name, version=7)  # type: ignore[arg-type]
        return Report(seq=3, origin=1, command=command, outcomes=report({"0.0": PAUSED, **conclusions}).outcomes)

    phases = phase("load", **{"2.0": Failed(ErrorKind.ENGINE_ERROR, "cut off")}), phase("load")
    sync = SyncReport(version=7, status="committed", loaded=(0, 1, 3), quarantined=(2,), phases=phases)
    assert str(sync).splitlines() == [
        "weights v7 committed on replicas 0, 1, 3; quarantined: replica 2",
        "  weights load v7: 2.0: failed engine_error: cut off",
        "  weights load v7 (seq 3): 1 failed, 1 acted; slowest 1.2 ms",
        "  weights load v7 (seq 3): 1 acted; slowest 1.2 ms",
    ]


def agent(name: str, state: str = "live", status: AgentStatus | None = None) -> AgentLine:
    return AgentLine(agent=name, incarnation="a", host="vm", state=state, silent_ms=3, seq=7, status=status)


SERVING = AgentStatus(ready=True, tokenizer="present", generating=True, version=3)
FOLLOWER = AgentStatus(ready=True, tokenizer="absent")


def test_a_fleet_shows_agents_in_trouble_first_and_groups_the_others() -> None:
    agents = (
        *(agent(f"{replica}.0", status=SERVING) for replica in range(3)),
        agent("0.1", status=FOLLOWER),
        agent("1.1", "gone", FOLLOWER),
        agent("actor.0", status=AgentStatus(ready=True, profiling_step=4)),
    )
    fleet = FleetStatus(
        run="r", epoch=1, seq=7, version=3, log="run.db", agents=agents, open=("pause (seq 7) waits for 0.0",)
    )
    assert str(fleet).splitlines() == [
        "run r, epoch 1, seq 7, weights v3, log run.db, 6 agents",
        "  1.1: gone (was a healthy follower, node rank 1) on vm",
        "  0.0 … 2.0: v3, generating",
        "  0.1: follower",
        "  actor.0: training, profiling step 4",
        "  open: pause (seq 7) waits for 0.0",
    ]
    assert terminal(fleet) == str(fleet) + "\n"


def test_agents_in_the_same_call_share_a_line_with_the_longest_time() -> None:
    loading = replace(SERVING, activity="load")
    calls = {0: 41_000, 1: None, 2: 42_900}
    lines = [replace(agent(f"{replica}.0", status=loading), call_ms=call_ms) for replica, call_ms in calls.items()]
    fleet = FleetStatus(run="r", epoch=1, seq=7, version=3, log="run.db", agents=tuple(lines))
    assert str(fleet).splitlines()[1:] == ["  0.0 … 2.0: v3, generating, busy: load; in load for 42 s"]
    assert [line.in_flight for line in lines] == ["; in load for 41 s", "", "; in load for 42 s"]


@pytest.mark.parametrize(
    ("line", "condition", "in_trouble"),
    [
        (agent("0.0"), "no heartbeat yet", False),
        (agent("0.0", "left", SERVING), "left", False),
        (agent("0.0", "gone"), "gone", True),
        (agent("0.0", status=AgentStatus(ready=False, asleep=("kv_cache",))), "asleep kv_cache", True),
        (agent("0.0", status=AgentStatus(ready=False, quarantined=2)), "quarantined since v2", True),
        (agent("0.0", status=AgentStatus(ready=True, torn=True, activity="load")), "torn weights", True),
    ],
)
def test_the_condition_of_an_agent_is_named(line: AgentLine, condition: str, in_trouble: bool) -> None:
    assert condition in line.condition and line.in_trouble is in_trouble


def test_agents_and_replicas_in_a_row_are_shortened() -> None:
    assert format_agents(["10.0", "2.0", "1.0", "0.0", "critic.1", "0.1"]) == "0.0 … 2.0, 10.0, 0.1, critic.1"
    assert format_agents([f"{2 * number}.0" for number in range(10)]).endswith("14.0 and 2 more")
    assert format_replicas([3, 1, 0, "actor.1"]) == "replicas 0, 1, 3 and actor.1"
    assert (format_replicas([4]), format_replicas([])) == ("replica 4", "")
