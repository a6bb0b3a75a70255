"""States of the coordinator are never changed, and what a command makes of each replica is its own matter."""

from typing import get_args

import pytest

from controlplane.machine.coordinator import CoordinatorState, decide
from controlplane.machine.publishing import UNSEEN
from controlplane.machine.replicas import identities
from schemas.commands import Command, EngineCommand, ProfileCommand, ProfilePlan, Target, WeightSync
from schemas.desired import Desired, ProfileSession, changes_nothing, desired_after
from schemas.identity import RolloutMode
from schemas.wire import encode
from tests.simulation.bus import event_decoder
from tests.simulation.cluster import simulate
from tests.unit.fleets import Coordinator


@pytest.mark.parametrize("seed", range(5))
def test_no_decision_changes_the_state_that_it_was_given(seed: int) -> None:
    state = CoordinatorState()
    for event, effects in simulate(seed).log.records:
        before, was = state, repr(state)
        state, decided = decide(before, event_decoder.decode(event))
        assert encode(decided) == effects
        assert repr(before) == was


# --- the fold of a command --------------------------------------------------------------------------------------------

COMMANDS: list[tuple[Command, Target]] = [
    (EngineCommand(operation="pause"), Target(replicas=frozenset({0, 3, 9}))),
    (EngineCommand(operation="pause"), Target()),
    (ProfileCommand(action="start", step=3, plan=ProfilePlan(ranks=frozenset({2, 3}))), Target()),
    (ProfileCommand(action="start", step=4, roles={"actor": ProfilePlan()}), Target()),
    (ProfileCommand(action="stop", step=4), Target(replicas=frozenset({1}))),
    (WeightSync(phase="abort", version=1), Target()),
    (WeightSync(phase="load", version=2, quarantine=frozenset({1})), Target()),
    (EngineCommand(operation="resume"), Target()),
]


def test_a_command_leads_each_unit_to_what_it_would_come_to_alone() -> None:
    bus = Coordinator("0.0", "1.0", "3.0", "actor.0", "actor.1")
    bus.arrive("2.0", mode=RolloutMode.COLOCATED)
    bus.arrive("4.0", mode=RolloutMode.OBSERVED)
    for body, target in COMMANDS:
        before, unseen = bus.state.desired, bus.state.default_desired
        known = identities(bus.state)
        bus.issue(body, target=target)
        for unit, desired in bus.state.desired.items():
            alone = desired_after(before[unit], body, target.includes(known[unit]), known[unit])
            assert desired == alone, (unit, body)
        assert bus.state.default_desired == desired_after(unseen, body, target.replicas is None, UNSEEN)


@pytest.mark.parametrize(
    "command",
    [
        *(EngineCommand(operation=name) for name in get_args(EngineCommand.__annotations__["operation"])),
        *(ProfileCommand(action=name, step=3) for name in get_args(ProfileCommand.__annotations__["action"])),
    ],
    ids=str,
)
def test_a_command_that_changes_nothing_is_not_folded(command: Command) -> None:
    session = ProfileSession(3, ProfilePlan())
    states = [Desired(), Desired(generation="paused"), Desired(asleep=frozenset({"weights"})), Desired(profile=session)]
    changed = any(desired_after(desired, command, True, UNSEEN) != desired for desired in states)
    assert changes_nothing(command) is not changed
