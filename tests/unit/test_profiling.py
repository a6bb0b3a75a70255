"""Which sessions a step opens and closes."""

import pytest

from controlplane.machine.profiling import (
    check_command,
    collect_command,
    commands_after,
    commands_before,
    finish_command,
    ranks_absent,
    roles_absent,
    session_after,
    sessions,
)
from schemas.commands import Finish, ProfileCommand, ProfilePlan, Target
from schemas.identity import Identity
from schemas.outcomes import Acted, Conclusion, Reason, Skipped
from schemas.profiler.config import ProfilerConfig
from schemas.reports import AgentOutcome, Report


def walk(config: ProfilerConfig, steps: list[int]) -> list[str]:
    """The commands of a trainer that goes through these steps."""
    session, commands = None, []
    for step in steps:
        for decide in (commands_before, commands_after):
            for command in decide(config, session, step):
                session = session_after(session, command)
                commands.append(f"{command.action} {command.step} in {step}")
    return commands


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
    assert walk(config, [1, 9]) == ["start 1 in 1", "stop 1 in 9", "start 9 in 9", "stop 9 in 9"], "another run"
    assert walk(config, [2, 7]) == ["start 2 in 2", "stop 2 in 7"]


def test_steps_of_a_single_plan_are_separate_sessions() -> None:
    """The step that a session is named after decides which plans take part in it."""
    actor = ProfilePlan(steps=frozenset({3, 4, 9}))
    config = ProfilerConfig(steps=(1, 2, 3, 4, 5), continuous=True, roles={"actor": actor})
    assert walk(config, [1, 2, 3, 4, 5]) == [
        *("start 1 in 1", "stop 1 in 2", "start 3 in 3", "stop 3 in 4", "start 5 in 5", "stop 5 in 5")
    ]
    assert sessions(config) == (1, 3, 5)


def test_a_trainer_that_goes_back_opens_the_session_again() -> None:
    config = ProfilerConfig(steps=(1, 2, 3), continuous=True)
    assert walk(config, [1, 2, 1, 2, 3]) == ["start 1 in 1", "stop 1 in 1", "start 1 in 1", "stop 1 in 3"]


@pytest.mark.parametrize("config", [ProfilerConfig(), ProfilerConfig(steps=(1,), plan=ProfilePlan(enabled=False))])
def test_nothing_is_profiled_unless_it_is_asked_for(config: ProfilerConfig) -> None:
    assert walk(config, [0, 1, 2]) == []


@pytest.mark.parametrize(
    ("steps", "continuous", "firsts"),
    [((3, 1, 2, 7), False, (1, 2, 3, 7)), ((3, 1, 2, 7), True, (1, 7)), ((), True, ()), ((5, 5), False, (5,))],
)
def test_sessions_are_named_by_their_first_steps(
    steps: tuple[int, ...], continuous: bool, firsts: tuple[int, ...]
) -> None:
    assert sessions(ProfilerConfig(steps=steps, continuous=continuous)) == firsts


def test_training_ranks_alone_are_reason_enough() -> None:
    off = ProfilePlan(enabled=False)
    config = ProfilerConfig(steps=(1,), plan=off, roles={"actor": ProfilePlan()})
    assert walk(config, [0, 1, 2]) == ["start 1 in 1", "stop 1 in 1"]
    (start,) = commands_before(config, None, 1)
    assert (start.plan, start.roles) == (off, {"actor": ProfilePlan()})


# --- before the first and after the last ------------------------------------------------------------------------------


def test_the_check_names_the_next_profiled_step() -> None:
    plan = ProfilePlan(with_stack=True)
    config = ProfilerConfig(steps=(7, 4), plan=plan)
    assert check_command(config, 0) == check_command(config, 4) == ProfileCommand(action="check", step=4, plan=plan)
    assert check_command(config, 5) == ProfileCommand(action="check", step=7, plan=plan)
    assert check_command(config, 8) is None and check_command(ProfilerConfig(), 0) is None


def test_the_finish_names_all_sessions_so_far_including_an_earlier_trainers() -> None:
    config = ProfilerConfig(steps=(1, 2, 5, 9), plan=ProfilePlan(finish=Finish(relocate=True)))
    finish = finish_command(config, {5})
    assert finish is not None and (finish.action, finish.step, finish.profiled_steps) == ("finish", 5, (1, 2, 5))
    assert finish_command(config, set()) is None


def test_nothing_is_finished_unless_it_is_asked_for() -> None:
    assert finish_command(ProfilerConfig(steps=(1,)), {1}) is None
    off = ProfilePlan(enabled=False, finish=Finish(hook=True))
    assert finish_command(ProfilerConfig(steps=(1,), roles={"actor": off}), {1}) is None


def test_absent_ranks_are_named() -> None:
    fleet = [Identity(replica=number, node_rank=0, gpus_per_node=2) for number in range(4)]
    actors = [Identity(replica=number, node_rank=0, role="actor") for number in range(2)]
    config = ProfilerConfig(
        plan=ProfilePlan(ranks=frozenset({7, 8})), roles={"actor": ProfilePlan(ranks=frozenset({1, 2}))}
    )
    assert ranks_absent(config, fleet + actors) == {2, 8}
    assert ranks_absent(config, actors) == {2}, "no replica is here yet"
    assert ranks_absent(ProfilerConfig(plan=ProfilePlan(replicas=frozenset({3, 4}))), fleet) == {4}
    assert ranks_absent(ProfilerConfig(plan=ProfilePlan(enabled=False, ranks=frozenset({99}))), fleet) == frozenset()


def test_absent_roles_are_named() -> None:
    actors = [Identity(replica=0, node_rank=0, role="actor")]
    config = ProfilerConfig(roles={"actor": ProfilePlan(), "critic": ProfilePlan()})
    assert roles_absent(config, actors) == ["rollout", "critic"]
    on_ranks_alone = ProfilerConfig(plan=ProfilePlan(tool="nsys"), roles={"actor": ProfilePlan()})
    assert roles_absent(on_ranks_alone, actors) == [], "no engine would run it"


def report(action: str, **conclusions: Conclusion) -> Report:
    command = ProfileCommand(action=action, step=3)  # type: ignore[arg-type]
    names = {name: name.replace("_", ".").removeprefix("a") for name in conclusions}
    lines = tuple(
        AgentOutcome(agent="actor.0" if name == "actor_0" else names[name], conclusion=conclusion)
        for name, conclusion in conclusions.items()
    )
    return Report(seq=1, origin=1, command=command, outcomes=lines)


def test_only_replicas_of_several_nodes_whose_primary_stopped_collect() -> None:
    acted, not_primary = Acted(calls=("stop_profile",)), Skipped(Reason.NOT_PRIMARY)
    stopped = report("stop", a0_0=acted, a0_1=not_primary, a1_0=acted, actor_0=acted)
    assert collect_command(stopped) == (ProfileCommand(action="collect", step=3), Target(replicas=frozenset({0})))
    assert collect_command(report("stop", a0_0=Skipped(Reason.NOT_PROFILING), a0_1=not_primary)) is None
    assert collect_command(report("collect", a0_0=acted, a0_1=acted)) is None
