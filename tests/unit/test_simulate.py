"""What `rolloutctl simulate` says: costs that can be reckoned by hand, what each part of a policy does, and errors."""

import json
from pathlib import Path
from random import Random
from typing import get_args

import pytest
from click.testing import CliRunner
from msgspec.structs import asdict, replace

from controlplane.cli.__main__ import cli, run
from controlplane.machine.events import HelloReceived, PeerLost, Send
from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from controlplane.simulate.costs import RunCosts
from controlplane.simulate.fit import fit
from controlplane.simulate.fleet_model import FleetModel, Tree, checked, merged, varied
from controlplane.simulate.modelled_engine import Kind, ModelledEngine, launched
from controlplane.simulate.simulator import Simulation, simulate
from schemas.errors import ConfigError
from schemas.events import EngineObserved
from schemas.profiler.conversion import read_toml
from schemas.wire import Rejoin, encode
from tests.pages import blocks
from tests.running import ROOT

CALLS: Tree = {"check_source": 0.2, "pause": 0.1, "load": 10.0, "flush": 0.05, "resume": 0.02}
PLAIN: Tree = {"steps": 10, "step": 30.0, "calls": CALLS, "fleet": {"replicas": 3, "gpus": 2}}
FAILING: Tree = {
    "engine_per_hour": 6.0,
    "engine_s": 40.0,
    "agent_per_hour": 10.0,
    "cut_per_hour": 10.0,
    "cut_s": 20.0,
    "trainer_per_hour": 6.0,
    "trainer_s": 20.0,
    "calls": {"load": 0.05, "pause": 0.02, "resume": 0.02, "flush": 0.02},
    "refused": {"check_source": 0.02},
}
KILLED = ROOT / "tests" / "replays" / "killed.db"
MODEL, *_ = blocks("docs/simulate.md", "toml")


def costs(*trees: Tree) -> RunCosts:
    tree = PLAIN
    for other in trees:
        tree = merged(tree, other)
    return simulate(checked(tree, "fleet.toml"))


def test_what_a_sync_costs_is_what_its_calls_take() -> None:
    found = costs({"network": 0.001})
    assert (found.syncs, found.aborted, found.left_out, found.behind) == (10, 0, 0.0, 0.0)
    assert found.sync_p50 == pytest.approx(0.2 + 0.1 + 10.0 + 0.05 + 0.02 + 6 * 0.001, abs=0.002)
    assert found.sync_p99 == found.sync_p50
    assert found.hours * 3600 == pytest.approx(10 * found.sync_p50 + 9 * 30.0, rel=1e-6)
    assert found.gpu_hours == pytest.approx(6 * found.hours, rel=1e-3)
    assert found.paused * 3600 == pytest.approx(10 * 6 * (0.1 + 10.0 + 0.05 + 0.02), rel=1e-3)
    assert found.lost == found.paused


def test_the_same_seed_is_the_same_run_and_another_one_is_another() -> None:
    spread: Tree = {"calls": {"load": {"median": 10.0, "p99": 20.0}}, "failures": FAILING}
    assert costs(spread) == costs(spread)
    assert costs(spread) != costs(spread, {"seed": 1})


def test_a_quorum_of_all_aborts_where_one_replica_fails_and_a_smaller_one_goes_on_without_it() -> None:
    failing: Tree = {"failures": {"calls": {"load": [[1.0], [0.0], [0.0]]}}}
    all_must, two_must = costs(failing, {"policy": {"quorum": "all"}}), costs(failing, {"policy": {"quorum": 2}})
    assert (all_must.aborted, all_must.left_out, all_must.behind) == (10, 0.0, 5.5)
    assert (two_must.aborted, two_must.left_out, two_must.behind) == (0, 1.0, 0.0)
    assert two_must.quarantined > 9 * 2 * 30.0 / 3600
    from_the_second_on: Tree = {"failures": {"refused": {"load": [[0.0, *[1.0] * 20], [0.0], [0.0]]}}}
    refused = costs(from_the_second_on, {"policy": {"quorum": "all"}})
    assert refused.aborted == 9
    assert refused.quarantined == pytest.approx(0.0, abs=0.001)


def test_wait_waits_for_an_engine_that_is_down_and_skip_does_not() -> None:
    engines: Tree = {"engine_per_hour": 4.0, "engine_s": 100.0}
    dying: Tree = {"steps": 60, "failures": engines, "policy": {"quorum": 1}}
    skip, wait = costs(dying), costs(dying, {"policy": {"absent": "wait"}})
    assert skip.sync_p99 < 20 < 80 < wait.sync_p99  # an engine that is back loads first
    assert skip.paused < wait.paused
    assert skip.down > 0


def test_a_sync_that_waits_for_requests_takes_longer() -> None:
    waiting: Tree = {"requests": 20.0, "policy": {"in_flight": "wait"}}
    assert costs(waiting).sync_p50 == pytest.approx(costs().sync_p50 + 20.0, abs=0.01)
    assert costs(waiting, {"policy": {"in_flight": "abort"}}) == costs()


def test_a_phase_that_takes_longer_than_its_timeout_fails() -> None:
    assert (costs({"policy": {"timeout": 9.0}}).aborted, costs({"policy": {"timeout": 12.0}}).aborted) == (10, 0)


def test_a_modelled_engine_shows_no_more_than_the_real_one() -> None:
    hidden = {
        kind: {name for name, value in asdict(ModelledEngine(launched(kind)).observe()).items() if value is None}
        for kind in get_args(Kind)
    }
    assert hidden["sglang"] - hidden["tiny"] == {"asleep", "profiling"}
    assert hidden["vllm"] - hidden["tiny"] == {"profiling"}  # asleep as well, while it is paused
    assert hidden["verl"] - hidden["tiny"] == {"asleep", "profiling", "generating", "version"}


def test_after_a_trainer_that_dies_in_a_sync_the_fleet_is_paused_for_its_lease() -> None:
    dying: Tree = {"steps": 100, "step": 5.0, "failures": {"trainer_per_hour": 10.0, "trainer_s": 300.0}}
    short, long = costs(dying, {"bus": {"lease_ms": 5_000}}), costs(dying, {"bus": {"lease_ms": 200_000}})
    assert short.paused < 0.8 * long.paused
    assert (short.syncs, long.syncs) == (100, 100)


def test_an_adapter_is_loaded_beside_what_serves() -> None:
    found = costs({"calls": {"check_adapter": 0.5, "load_adapter": 2.0}, "policy": {"sync": "adapter"}})
    assert found.sync_p50 == pytest.approx(2.5, abs=0.01)
    assert found.lost == 0.0


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("what", ["weights", "adapter"])
def test_a_fleet_of_each_kind_of_engine_comes_through_all_failures(kind: Kind, what: str) -> None:
    adapters: Tree = {"check_adapter": 0.1, "load_adapter": 2.0, "unload_adapter": 0.1}
    fleet: Tree = {"replicas": 3, "nodes": 2, "engine": kind}
    found = costs({"steps": 40, "failures": FAILING, "fleet": fleet, "calls": adapters, "policy": {"sync": what}})
    assert found.syncs == 40
    assert found.aborted < 20
    assert found.down > 0
    assert found.lost < found.gpu_hours


def drawn(seed: int) -> FleetModel:
    """A fleet, its failures and its policy, drawn from a seed."""
    luck = Random(seed)

    def rates(names: tuple[str, ...], most: float) -> Tree:
        return {name: luck.choice([0.0, most / 10, most]) for name in names}

    def time(most: float) -> object:
        series = [[luck.uniform(0, most) for _ in range(luck.randint(1, 4))] for _ in range(2)]
        return luck.choice([0.0, most, {"median": most, "p99": most * luck.uniform(1, 5)}, series])

    weights, adapters = ("check_source", "pause", "load", "restore", "flush", "resume", "read"), ("load_adapter",)
    failing = "engine", "agent", "cut", "trainer"
    tree: Tree = {
        "seed": seed,
        "steps": 40,
        "step": luck.choice([1.0, 30.0, {"median": 30.0, "p99": 90.0}]),
        "network": time(0.05),
        "requests": time(10.0),
        "fleet": {"replicas": luck.randint(1, 6), "engine": luck.choice(get_args(Kind))},
        "calls": {call: time(luck.choice([0.1, 5.0])) for call in weights + adapters},
        "failures": {
            **rates(tuple(f"{what}_per_hour" for what in failing), 6.0),
            **{f"{what}_s": time(60.0) for what in failing},
            **{kind: rates(("load", "resume", "load_adapter"), 0.1) for kind in ("calls", "refused")},
        },
        "policy": {
            "sync": luck.choice(["weights", "weights", "adapter"]),
            "quorum": luck.choice(["all", "majority", 1]),
            "absent": luck.choice(["skip", "wait"]),
            "staging": luck.choice([True, False]),
            "in_flight": luck.choice(["abort", "wait"]),
            "timeout": luck.choice([12.0, 600.0]),
        },
    }
    return checked(tree, "drawn")


@pytest.mark.parametrize("seed", range(24))
def test_agents_that_decide_alike_cost_to_the_last_digit_what_they_do_if_each_decides_by_itself(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike, alone = Simulation(drawn(seed)), Simulation(drawn(seed))
    costs_alike = alike.run()
    monkeypatch.setattr(alone, "gather", lambda: [])
    assert costs_alike == alone.run()


@pytest.mark.parametrize(
    ("failures", "share"),
    [({}, 0.1), ({"failures": {"engine_per_hour": 2.0, "calls": {"load": 0.01}}}, 0.4)],
    ids=["quiet", "failing"],
)
def test_what_happens_the_same_everywhere_is_decided_once(
    failures: Tree, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a fleet so large that something fails in nearly every sync."""
    fleet: Tree = {"steps": 20, "fleet": {"replicas": 60}, "calls": {"load": {"median": 10.0, "p99": 20.0}}}
    model = checked(merged(merged(PLAIN, fleet), failures), "fleet.toml")
    alike, alone = Simulation(model), Simulation(model)
    costs_alike = alike.run()
    monkeypatch.setattr(alone, "gather", lambda: [])
    assert costs_alike == alone.run()
    assert alike.clock.acts < share * alone.clock.acts


def test_what_is_staged_is_read_before_the_pause() -> None:
    reading: Tree = {"calls": {"read": 6.0}}
    staged, not_staged = costs(reading), costs(reading, {"policy": {"staging": False}})
    assert staged.sync_p50 == not_staged.sync_p50 == pytest.approx(costs().sync_p50 + 6.0, abs=0.001)
    assert staged.paused == pytest.approx(costs().paused, rel=0.001)
    assert not_staged.paused * 3600 == pytest.approx(staged.paused * 3600 + 10 * 6 * 6.0, rel=0.001)


@pytest.mark.parametrize(
    ("what", "agent", "phase", "lasts", "longest", "left_out", "seconds"),
    [
        ("engine", "1.0", "load", 50.0, 20.31, 0.1, 383.7),  # back in the next sync, which it has to load twice for
        ("engine", "1.0", "abort", 20.0, 10.58, 0.0, 373.9),  # no sync is aborted: at its end
        ("agent", "0.0", "load", 5.0, 15.38, 0.0, 378.7),  # what it was loading, it loads again
        ("agent", "0.0", "step", 35.0, 15.38, 0.0, 378.7),  # back in the next sync
        ("cut", "2.0", "prepare", 35.0, 14.21, 0.1, 378.3),
        ("silence", "2.0", "commit", 35.0, 21.25, 0.1, 384.6),  # given up with a head after 10 s, not at a message
        ("trainer", "", "commit", 900.0, 10.37, 0.0, 1314.0),
        ("agent", "7.0", "load", 900.0, 10.37, 0.0, 373.7),  # of a larger fleet
    ],
)
def test_a_recorded_failure_happens_in_its_part_of_its_sync(
    what: str, agent: str, phase: str, lasts: float, longest: float, left_out: float, seconds: float
) -> None:
    recorded = {"what": what, "agent": agent, "sync": 3, "phase": phase, "after": 0.005, "lasts": lasts}
    found = costs({"failures": {"recorded": [recorded]}})
    assert found.sync_p99 == pytest.approx(longest, abs=0.01)
    assert (found.left_out, found.aborted) == (left_out, 0)
    assert found.hours * 3600 == pytest.approx(seconds, abs=0.1)


def test_an_agent_that_is_turned_away_twice_on_a_connection_makes_one_other() -> None:
    run = Simulation(checked(PLAIN, "fleet.toml"))
    agent = run.agents["0.0"]
    run.bus.open()
    agent.begin()
    run.clock.run(1_000_000)
    first = agent.peer
    for _ in range(2):
        agent.send(Send(peer=first, epoch=1, seq=0, message=Rejoin(reason="another agent has its place")))
    run.clock.run(5_000_000)
    assert (first, agent.peer) == ("0.0/life 1/1", "0.0/life 1/2")


def test_a_fleet_that_fails_too_often_to_sync_is_an_error() -> None:
    with pytest.raises(ConfigError, match="less than one a week"):
        costs({"step": 3000.0, "failures": {"trainer_per_hour": 60.0, "trainer_s": 2000.0}})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("qourum", "1", "policy.qourum is unknown; did you mean quorum?; allowed are sync, quorum, absent"),
        ("quorum", "9", "policy.quorum is 9: allowed is at most fleet.replicas, 8"),
        ("quorum", "some", "policy.quorum is 'some': allowed is a whole number of at least 1 or one of all, majority"),
        ("calls.laod", "1", "calls.laod is unknown; did you mean load?"),
        ("calls.load", "x", "calls.load is 'x': allowed is a number of seconds, { median = …, p99 = … }, or a list"),
        ("calls.load", "[]", "calls.load is []: allowed is"),
        ("calls.load.p99", "1.0", "p99 1 is below the median 10"),
        ("failures.calls.load", "2", "failures.calls.load is 2: allowed is a number from 0 to 1"),
        ("bus.lease_ms", "0", "bus.lease_ms is 0: allowed is"),
        ("steps", "0", "steps is 0: allowed is"),
    ],
)
def test_an_error_names_what_was_wrong_and_what_is_allowed(key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        checked(varied(read_toml(MODEL, "fleet.toml"), key, value), "fleet.toml")
    assert says in str(error.value)
    assert str(error.value).startswith("fleet.toml: ")


def test_the_command_line_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "fleet.toml"
    model.write_text("steps = ")
    assert run(["simulate"]) == 2
    assert run(["simulate", str(model)]) == 2
    model.write_text("steps = 1")
    assert run(["simulate", str(model), "--vary", "quorum"]) == 2
    assert run(["simulate", str(model), "--plot", str(tmp_path / "none" / "lost.svg")]) == 2
    said = capsys.readouterr().err
    assert "the picture can't be written to" in said
    assert "name a MODEL, or a recorded run by --from" in said
    assert "fleet.toml is not TOML" in said
    assert "expected KEY=A,B,… such as quorum=all,3,1" in said


def test_the_example_of_the_page_prints_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/simulate.md, and its picture."""
    monkeypatch.chdir(tmp_path)
    Path("fleet.toml").write_text(MODEL)
    (session,) = blocks("docs/simulate.md", "console")
    command, table = session.split("\n", 1)
    done = CliRunner().invoke(cli, command.removeprefix("$ rolloutctl ").split())
    assert done.output == table, done.output
    assert Path("lost.svg").read_text() == (ROOT / "docs" / "simulate.svg").read_text()


def test_costs_are_printed_as_json_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fleet.toml").write_text("steps = 2\nstep = 1.0\n[calls]\npause = 1.0")
    done = CliRunner().invoke(cli, ["simulate", "fleet.toml", "--json", "--plot", "lost.svg"])
    (row,) = json.loads(done.output)
    assert row["run"] == "simulated"
    assert row["costs"]["syncs"] == 2
    picture = Path("lost.svg").read_text()
    assert picture.startswith("<svg ")
    assert "simulated" in picture
    assert f"{row['costs']['paused'] / row['costs']['gpu_hours']:.1%}" in picture


def test_deaths_of_a_recorded_run_happen_again_where_they_did_also_with_another_policy() -> None:
    tree, recorded = fit(RunLog.walk(KILLED))
    model = checked(tree, "killed.db")
    assert (model.fleet.replicas, model.fleet.nodes, model.fleet.engine) == (2, 2, "tiny")
    died = [(failure.what, failure.agent, failure.sync, failure.phase) for failure in model.failures.recorded]
    assert died == [(what, "1.0", 4, "step") for what in ("agent", "cut", "engine")]
    assert model.bus.lease_ms > 0
    again = simulate(model)
    assert (again.syncs, again.aborted, again.left_out) == (recorded.syncs, recorded.aborted, recorded.left_out)
    for name in ("hours", "gpu_hours", "sync_p99", "down", "lost"):  # the stated error
        assert getattr(again, name) == pytest.approx(getattr(recorded, name), rel=0.1), name
    for seed in "12":
        assert simulate(checked(varied(tree, "seed", seed), "killed.db")).down == pytest.approx(recorded.down, rel=0.1)
    all_must = simulate(checked(varied(tree, "quorum", "all"), "killed.db"))
    assert all_must.aborted == 1
    assert all_must.down == pytest.approx(recorded.down, rel=0.1)
    assert simulate(checked(varied(tree, "failures.recorded", "[]"), "killed.db")).down == 0
    done = CliRunner().invoke(cli, ["simulate", "--from", str(KILLED), "--vary", "quorum=1", "--json"])
    rows = json.loads(done.output)
    assert [(row["run"], row["costs"]["syncs"]) for row in rows] == [("recorded", 7), ("quorum=1", 7)]


def test_an_engine_is_down_until_it_answers_whatever_it_calls_itself_while_it_launches() -> None:
    entries = [entry for entry in RunLog.walk(KILLED) if isinstance(entry, LogEntry)]
    tree, _ = fit(entries)
    up = max(place for place, entry in enumerate(entries) if entry.agent == "1.0" and entry.kind == "observed")
    event = entries[up].typed_event()
    assert isinstance(event, EngineObserved)
    launching = replace(event.observation, instance="launching", tokenizer="unknown")
    entries.insert(up, replace(entries[up], event=encode(replace(event, observation=launching))))
    assert fit(entries)[0]["failures"] == tree["failures"]


def test_an_agent_that_is_not_back_by_the_end_of_a_log_is_away_to_the_end() -> None:
    entries = [entry for entry in RunLog.walk(KILLED) if isinstance(entry, LogEntry)]
    events = [None if entry.agent else entry.typed_event() for entry in entries]
    lost = next(place for place, event in enumerate(events) if isinstance(event, PeerLost))
    back = next(place for place, event in enumerate(events) if place > lost and isinstance(event, HelloReceived))
    tree, recorded = fit(entries[:back])
    model = checked(tree, "killed.db")
    assert [(failure.what, failure.agent) for failure in model.failures.recorded] == [("agent", "1.0")]
    assert simulate(model).left_out == recorded.left_out == 0.2


def test_a_log_without_a_sync_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no sync that has ended"):
        fit(())
