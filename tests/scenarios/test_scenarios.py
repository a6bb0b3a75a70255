"""The corpus: each scenario breaks the invariant that it names under a chain of blocking calls, and none under ours."""

from pathlib import Path

import pytest

from controlplane.invariants import verify
from tests.scenarios.naive import NaiveTrainer
from tests.scenarios.ours import Stage
from tests.scenarios.stage import ScenarioError, parse, read
from tests.simulation.recorded import entries

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.scenario"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_ours_holds(path: Path) -> None:
    Stage(read(path)).play()


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_chain_of_blocking_calls_does_not(path: Path) -> None:
    scenario = read(path)
    broke = NaiveTrainer(scenario).run()
    assert scenario.attacks in broke, f"{scenario.attacks} was not broken: the scenario proves nothing. Broken: {broke}"


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_the_checker_of_recorded_logs_finds_nothing_in_ours(path: Path) -> None:
    stage = Stage(read(path))
    stage.play()
    assert [str(one) for one in verify(entries(stage))] == []


def test_every_invariant_that_a_run_can_show_is_attacked() -> None:
    attacked = {read(path).attacks for path in CORPUS}
    assert {"I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I10"} <= attacked


HEAD = "attacks I1\nseen somewhere\nfleet 1x1\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + "100 trainer explodes", "a.scenario, line 4: '100 trainer explodes' is no step. Steps are"),
        (HEAD + "later trainer pauses", "line 4"),
        (HEAD + "200 trainer pauses\n100 trainer resumes", "line 5: 100 ms comes after 200 ms"),
        ("attacks I1\nfleet 1x1\n", "its head lacks seen"),
        ("attacks I1\nseen somewhere\nfleet two\n", "fleet 'two' is not of the form 2x1"),
    ],
)
def test_a_scenario_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse("a", text, "a.scenario")
    assert says in str(caught.value)
