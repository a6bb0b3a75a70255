"""The corpus: each scenario breaks the invariant that it names under a chain of blocking calls, and none under ours."""

from pathlib import Path

import pytest

from controlplane.analysis.invariants import verify
from tests.scenarios.naive import NaiveTrainer
from tests.scenarios.ours import Stage
from tests.scenarios.stage import ScenarioError, parse, read
from tests.simulation.recorded import entries

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.scenario"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_ours_holds_and_the_checker_of_recorded_logs_finds_nothing(path: Path) -> None:
    stage = Stage(read(path))
    stage.play()
    assert [str(violation) for violation in verify(entries(stage))] == []


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_chain_of_blocking_calls_does_not(path: Path) -> None:
    scenario = read(path)
    broke = NaiveTrainer(scenario).run()
    assert scenario.attacks in broke, f"{scenario.attacks} was not broken: the scenario proves nothing. Broken: {broke}"
    assert set(broke) == {scenario.attacks} | scenario.also, f"`also` is to name what else breaks. Broken: {broke}"


def test_every_invariant_that_a_run_can_show_is_attacked() -> None:
    attacked = {read(path).attacks for path in CORPUS}
    assert {"I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I10"} <= attacked


HEAD = "attacks I1\nseen somewhere\nfleet 1x1\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + "100 trainer explodes", "a.scenario, line 4: '100 trainer explodes' is no step. Steps are"),
        (HEAD + "200 trainer pauses\n100 trainer resumes", "line 5: 100 ms comes after 200 ms"),
        (HEAD + "100 expect 0.0 said banana", "a.scenario, line 4: '100 expect 0.0 said banana' is no step"),
        (
            HEAD + "100 engine 1 fails load",
            "a.scenario, line 4: 'engine 1 fails load' names a place outside of the fleet",
        ),
        (HEAD + "100 agent 0.1 dies", "line 4: 'agent 0.1 dies' names a place outside"),
        (HEAD, "a.scenario: a scenario is a head with attacks, also, seen, fleet, and steps below it"),
        ("attacks I1\nfleet 1x1\n100 trainer pauses\n", "a.scenario: a scenario is a head"),
        ("attacks I99\n", "a.scenario, line 1: attacks 'I99' is not of the form"),
        ("attacks I1\nseen somewhere\nfleet 0x1\n", "a.scenario, line 3: fleet '0x1' is not of the form"),
    ],
)
def test_a_scenario_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse("a", text, "a.scenario")
    assert says in str(caught.value)
