"""Whose profiling session is open: a late failure and an operator's start leave the trainer's alone."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from controlplane import ControlPlane
from schemas.commands import EngineCommand, ProfilePlan, Target
from schemas.desired import ProfileSession
from schemas.events import Observation, StartProfile, StopProfile
from tests.running import typed
from tests.unit.fleets import DONE, NO, Coordinator
from tests.unit.machines import START, STOP
from tests.unit.small_bus import PRIMARY, Engine
from tests.unit.test_plane import QUICK, agents

LATER = replace(START, step=START.step + 1)


class ProfiledEngine(Engine):
    """One that shows whether a session is open."""

    async def observe(self) -> Observation:
        profiled = [call for call in self.calls if isinstance(call, StartProfile | StopProfile)]
        is_open = bool(profiled) and isinstance(profiled[-1], StartProfile)
        return replace(await super().observe(), profiling=is_open)


ONLY_1 = Target(replicas=frozenset({1}))


def test_the_late_failure_of_one_session_does_not_withdraw_the_next() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.issue(START)
    first = bus.state.seq
    bus.issue(LATER)
    bus.answer(first, a0_0=NO, a1_0=DONE)
    assert [desired.profile and desired.profile.step for desired in bus.state.desired.values()] == [LATER.step] * 2
    bus.answer(a0_0=NO, a1_0=DONE)
    assert bus.state.desired[0].profile is None and bus.state.desired[1].profile is not None


def test_the_late_failure_of_a_start_does_not_withdraw_what_a_newer_start_of_the_same_step_asks_for() -> None:
    for plan in (START.plan, replace(START.plan or ProfilePlan(), record_shapes=True)):
        bus = Coordinator("0.0")
        bus.issue(START)
        first = bus.state.seq
        bus.issue(replace(START, plan=plan))
        bus.answer(first, a0_0=NO)
        assert bus.state.desired[0].profile == ProfileSession(START.step, plan or ProfilePlan())
        bus.answer(a0_0=NO)
        assert bus.state.desired[0].profile is None


def test_an_operator_does_not_take_over_the_trainers_session() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.issue(START, target=ONLY_1)
    before = bus.state
    ticket = bus.issue(LATER, operator=True)
    ((refused, kind, reason),) = bus.refused
    assert (refused, kind) == (ticket, "command") and bus.state is before
    assert reason.startswith(f"the trainer's profiling session of step {START.step} is open on replica 1")


@pytest.mark.parametrize("case", ["forced", "elsewhere", "stopped", "failed", "another life", "a pause", "the trainer"])
def test_otherwise_a_start_is_published(case: str) -> None:
    bus = Coordinator("0.0", "1.0")
    bus.issue(START, target=ONLY_1)
    match case:
        case "forced":
            bus.issue(LATER, operator=True, force=True)
        case "elsewhere":
            bus.issue(LATER, operator=True, target=Target(replicas=frozenset({0})))
        case "stopped":
            bus.issue(STOP)
            bus.issue(LATER, operator=True)
        case "failed":
            bus.answer(a1_0=NO)
            bus.issue(LATER, operator=True)
        case "another life":
            bus.open()
            bus.issue(LATER, operator=True)
        case "a pause":
            bus.issue(EngineCommand(operation="pause"), operator=True)
        case _:
            bus.issue(LATER)
    assert bus.refused == [] and len(bus.published) == 1


def test_an_operators_own_session_may_be_replaced() -> None:
    bus = Coordinator("0.0")
    for start in (START, LATER):
        bus.issue(start, operator=True)
        assert bus.refused == []


def test_the_command_line_asks_for_force(tmp_path: Path) -> None:
    with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK) as plane,
        agents(plane.address, tmp_path, {PRIMARY: ProfiledEngine()}),
    ):
        plane.wait_for_agents(1, timeout=20).wait()
        plane.start_profile(3).wait()
        env = {"ROLLOUTCTL_BUS": plane.address}
        refused = typed("profile", "start", "--step", "4", env=env)
        assert refused.returncode != 0 and "session of step 3 is open on replica 0" in refused.stderr
        taken = typed("profile", "start", "--step", "4", "--force", env=env)
        assert taken.returncode == 0 and "profile start step 4" in taken.stdout
