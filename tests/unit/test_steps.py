"""The steps of a trainer: what is published around them, what follows an answer, and what never delays them."""

import logging
import re
import threading
from collections.abc import Callable, Iterable

import pytest

from controlplane.steps import FINISH_MS, Profiling, Step
from controlplane.tickets import Ticket
from schemas.commands import Finish, ProfileCommand, ProfilePlan, Target, Window
from schemas.errors import BusFaulted, ConfigError
from schemas.identity import Identity
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing
from schemas.profiler.config import ProfilerConfig
from schemas.reports import AgentOutcome, Report

DONE = Acted(calls=("stop_profile",))
FLEET = (Identity(replica=0, node_rank=0, nnodes=2), Identity(replica=0, node_rank=1, nnodes=2))


class Bus:
    """Publishes commands and answers them; those that are `held` are answered when they are released."""

    def __init__(self, held: Iterable[str] = (), says: Callable[[str], Conclusion] = lambda _: DONE) -> None:
        self.published: list[str] = []
        self.times: dict[str, int] = {}
        self.held = frozenset(held)
        self.open: list[tuple[Ticket[Report], Report]] = []
        self._says = says

    def publish(self, command: ProfileCommand, target: Target, timeout_ms: int) -> Ticket[Report]:
        self.published.append(f"{command.action} {command.step}")
        self.times[command.action] = timeout_ms
        ticket: Ticket[Report] = Ticket(len(self.published))
        lines = tuple(AgentOutcome(agent=identity.agent, conclusion=self._says(command.action)) for identity in FLEET)
        report = Report(seq=ticket.number, origin=1, command=command, outcomes=lines)
        if command.action in self.held:
            self.open.append((ticket, report))
        else:
            ticket.resolve(report)
        return ticket

    def let_go(self) -> None:
        while self.open:
            ticket, report = self.open.pop()
            ticket.resolve(report)


def trained(config: ProfilerConfig, bus: Bus, steps: Iterable[int]) -> Profiling:
    profiling = Profiling(config, bus.publish, lambda: FLEET)
    for step in steps:
        with Step(profiling, step):
            pass
    return profiling


def test_the_whole_course_of_a_run() -> None:
    config = ProfilerConfig(steps=(2, 4), plan=ProfilePlan(finish=Finish(relocate=True)))
    bus = Bus()
    profiling = trained(config, bus, range(6))
    profiling.close()
    assert bus.published == ["check 2", "start 2", "stop 2", "collect 2", "start 4", "stop 4", "collect 4", "finish 4"]
    assert [report.command.action for report in profiling.reports][-1] == "finish"  # type: ignore[union-attr]


def test_nothing_is_published_when_nothing_is_profiled() -> None:
    bus = Bus()
    trained(ProfilerConfig(), bus, range(3)).close()
    assert bus.published == []


def test_no_step_waits_for_the_finish_but_the_end_of_the_run_does() -> None:
    config = ProfilerConfig(steps=(0,), timeout_ms=500, plan=ProfilePlan(finish=Finish(hook=True)))
    bus = Bus(held=["finish"])
    profiling = trained(config, bus, range(3))
    assert bus.published[-1] == "finish 0" and len(profiling.reports) == 4
    assert (bus.times["stop"], bus.times["finish"]) == (500, FINISH_MS)
    bus.let_go()
    profiling.close()
    assert len(profiling.reports) == 5 and bus.published.count("finish 0") == 1


def test_a_trainer_that_ends_early_finishes_what_it_profiled() -> None:
    plan, actor = ProfilePlan(layout="verl", finish=Finish(relocate=True)), ProfilePlan(discrete=True)
    config = ProfilerConfig(steps=(1, 2, 9), continuous=True, plan=plan, roles={"actor": actor})
    bus = Bus()
    profiling = Profiling(config, bus.publish, lambda: FLEET)
    with Step(profiling, 1):
        pass
    profiling.close()
    assert bus.published == ["check 1", "start 1", "stop 1", "collect 1", "finish 1"]
    commands = [report.command for report in profiling.reports if isinstance(report.command, ProfileCommand)]
    assert [command.plan for command in commands] == [plan] * 5, "the other nodes look for traces where the plan says"


@pytest.mark.parametrize(
    ("steps", "published"),
    [
        ((6, 7, 8), ["check 6", "start 6", "stop 6", "collect 6", "finish 6"]),  # it resumed in the middle of the run
        (
            (5, 6, 5, 6, 7, 8),
            [*("check 5", "start 5", "stop 5", "start 5", "collect 5"), *("stop 5", "collect 5"), "finish 5"],
        ),
    ],
)
def test_the_finish_comes_after_the_last_profiled_step_wherever_its_session_began(
    steps: tuple[int, ...], published: list[str]
) -> None:
    config = ProfilerConfig(steps=(5, 6, 7), continuous=True, plan=ProfilePlan(finish=Finish(relocate=True)))
    bus = Bus()
    trained(config, bus, steps)
    assert bus.published == published


def test_a_plan_that_cannot_be_recorded_is_reported_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    refused = Failed(ErrorKind.UNSUPPORTED, "sglang 0.5.23 can't record memory, and it runs on a CPU.")
    bus = Bus(says=lambda action: refused if action == "check" else DONE)
    with caplog.at_level(logging.WARNING):
        trained(ProfilerConfig(steps=(500,)), bus, [0])
    assert bus.published == ["check 500"]
    assert "profile check step 500 on agent 0.0" in caplog.text and "can't record memory" in caplog.text


def test_a_warning_at_the_first_step_names_absent_ranks(caplog: pytest.LogCaptureFixture) -> None:
    config = ProfilerConfig(steps=(5,), plan=ProfilePlan(ranks=frozenset({1, 8})))
    with caplog.at_level(logging.WARNING):
        trained(config, Bus(), [0, 1])
    assert caplog.text.count("ranks [8] are selected for profiling, and no agent has them") == 1


def test_a_warning_at_the_first_step_names_absent_roles(caplog: pytest.LogCaptureFixture) -> None:
    roles = {"critic": ProfilePlan(), "ref": ProfilePlan(enabled=False)}
    with caplog.at_level(logging.WARNING):
        trained(ProfilerConfig(steps=(5,), roles=roles), Bus(), [0, 1])
    assert [record.message for record in caplog.records] == [
        "role critic is selected for profiling, and no agent has it"
    ]


def test_a_warning_names_ranks_that_left_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    empty = Acted(calls=("stop_profile",), ranks_without_trace=(1,))
    bus = Bus(says=lambda action: empty if action == "collect" else DONE)
    with caplog.at_level(logging.WARNING):
        trained(ProfilerConfig(steps=(0,), plan=ProfilePlan(window=Window(0, 9))), bus, [0])
    assert "collect step 0 on agent 0.1: acted (stop_profile); no trace of ranks 1; the step goes on" in caplog.text


def test_a_bus_that_cannot_publish_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def publish(command: ProfileCommand, target: Target, timeout_ms: int) -> Ticket[Report]:
        raise BusFaulted("the disk is full")

    profiling = Profiling(ProfilerConfig(steps=(0,)), publish, lambda: FLEET)
    with caplog.at_level(logging.WARNING), Step(profiling, 0):
        pass
    profiling.close()
    assert caplog.text.count("the disk is full") == 3 and "the step goes on" in caplog.text


def test_an_error_in_the_step_propagates_and_the_session_is_closed() -> None:
    bus = Bus(says=lambda _: Missing("deadline"))
    profiling = Profiling(ProfilerConfig(steps=(0,)), bus.publish, lambda: FLEET)
    with pytest.raises(ZeroDivisionError), Step(profiling, 0):
        raise ZeroDivisionError
    assert bus.published == ["check 0", "start 0", "stop 0"]


def test_a_step_starts_when_all_agents_record_and_ends_when_all_have_written() -> None:
    """Whatever is generated in a profiled step is in its trace, and nothing of the next step is."""
    bus = Bus(held=["start", "stop"])
    course: list[str] = []
    published = threading.Semaphore(0)

    def trainer() -> None:
        with Step(profiling, 0):
            course.append("work")
        course.append("next")

    def publish(command: ProfileCommand, target: Target, timeout_ms: int) -> Ticket[Report]:
        ticket = bus.publish(command, target, timeout_ms)
        if command.action in bus.held:
            published.release()
        return ticket

    profiling = Profiling(ProfilerConfig(steps=(0,)), publish, lambda: FLEET)
    thread = threading.Thread(target=trainer)
    thread.start()
    published.acquire()
    course.append("recording")
    bus.let_go()
    published.acquire()
    course.append("written")
    bus.let_go()
    thread.join()
    assert course == ["recording", "work", "written", "next"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"steps": 3}, "Expected `array`, got `int` - at `$.steps`"),
        ({"steps": ["1"]}, "Expected `int`, got `str` - at `$.steps[0]`"),
        ({"timeout_ms": 0}, "Expected `int` >= 1 - at `$.timeout_ms`"),
        ({"plan": None}, "Expected `object`, got `null` - at `$.plan`"),
        ({"roles": {"Actor": ProfilePlan()}}, "Expected `str` matching regex"),
    ],
)
def test_a_wrong_configuration_is_refused_before_any_step(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"ProfilerConfig: {why}")):
        Profiling(ProfilerConfig(**wrong), Bus().publish, lambda: FLEET)  # type: ignore[arg-type]


def test_a_list_given_for_a_set_becomes_a_set() -> None:
    plan = ProfilePlan(ranks=[0, 8])  # type: ignore[arg-type]
    profiling = Profiling(ProfilerConfig(steps=[1], plan=plan), Bus().publish, lambda: FLEET)  # type: ignore[arg-type]
    assert profiling.config == ProfilerConfig(steps=(1,), plan=ProfilePlan(ranks=frozenset({0, 8})))


def test_steps_are_counted_from_0() -> None:
    with pytest.raises(ConfigError, match="global_step -1"):
        Step(Profiling(ProfilerConfig(), Bus().publish, lambda: FLEET), -1)
