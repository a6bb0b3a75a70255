"""Which sessions a step opens and closes."""

import pytest

from controlplane.profiling import entering, leaving, session_after
from schemas.commands import ProfilePlan
from schemas.config import ProfilerConfig


def walk(config: ProfilerConfig, steps: list[int]) -> list[str]:
    """The commands of a trainer that goes through these steps."""
    session, said = None, []
    for step in steps:
        for commands in (entering, leaving):
            for command in commands(config, session, step):
                session = session_after(session, command)
                said.append(f"{command.action} {command.step} in {step}")
    return said


def test_a_discrete_session_is_one_step() -> None:
    assert walk(ProfilerConfig(steps=(1, 2)), [0, 1, 2, 3]) == [
        "start 1 in 1",
        "stop 1 in 1",
        "start 2 in 2",
        "stop 2 in 2",
    ]


def test_a_continuous_session_is_a_run_of_steps() -> None:
    config = ProfilerConfig(steps=(1, 2, 3, 5), continuous=True)
    assert walk(config, list(range(7))) == ["start 1 in 1", "stop 1 in 3", "start 5 in 5", "stop 5 in 5"]


def test_a_trainer_that_jumps_leaves_no_session_open() -> None:
    config = ProfilerConfig(steps=(1, 2, 3, 8, 9), continuous=True)
    assert walk(config, [1, 8, 9, 10]) == ["start 1 in 1", "stop 1 in 8", "start 8 in 8", "stop 8 in 9"]
    assert walk(config, [2, 7]) == ["start 2 in 2", "stop 2 in 7"]


def test_a_trainer_that_goes_back_begins_the_session_anew() -> None:
    config = ProfilerConfig(steps=(1, 2, 3), continuous=True)
    assert walk(config, [1, 2, 1, 2, 3]) == ["start 1 in 1", "stop 1 in 1", "start 1 in 1", "stop 1 in 3"]


@pytest.mark.parametrize("config", [ProfilerConfig(), ProfilerConfig(steps=(1,), plan=ProfilePlan(enabled=False))])
def test_nothing_is_profiled_unless_it_is_asked_for(config: ProfilerConfig) -> None:
    assert walk(config, [0, 1, 2]) == []
