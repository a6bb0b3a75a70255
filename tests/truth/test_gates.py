"""verl's gates as we state them agree with verl's own code in every case."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.truth import gates
from tests.truth.cases import RANKS, ROLLOUTS, every, is_possible
from tests.truth.verl_code import imported, source
from tests.truth.verl_runs import Runs

pytestmark = [pytest.mark.engine_wheels, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Give access to verl's code, and a directory for what its tools write."""
    logging.getLogger("verl").setLevel(logging.ERROR)
    with imported(source()) as verl:
        yield Runs(verl, Path(tmp_path_factory.mktemp("profile")))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_of_verl_does_what_its_gates_state(runs: Runs, engine: gates.Engine) -> None:
    wrong = [
        f"{case}: stated {stated!r}, actual {actual!r}"
        for case in every(ROLLOUTS)
        if is_possible(engine, case) and (stated := gates.server(engine, case)) != (actual := runs.server(engine, case))
    ]
    assert not wrong, f"{len(wrong)} cases\n" + "\n".join(wrong[:20])


def test_a_training_rank_of_verl_does_what_its_gates_state(runs: Runs) -> None:
    wrong = [
        f"{case}: stated {stated!r}, actual {actual!r}"
        for case in every(RANKS)
        if (stated := gates.rank(case)) != (actual := runs.rank(case))
    ]
    assert not wrong, f"{len(wrong)} cases\n" + "\n".join(wrong[:20])
