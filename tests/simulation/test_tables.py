"""Tables of a state: they equal dicts, are never changed, and make every state of a simulated run one that stays."""

from collections.abc import Callable
from random import Random
from typing import get_args

import pytest
from msgspec.structs import replace

from controlplane.machine.coordinator import CoordinatorState, decide
from controlplane.machine.events import StatusReceived
from controlplane.machine.fleet import plain
from controlplane.machine.folding import UNSEEN
from controlplane.machine.members import Members
from controlplane.machine.tables import CHANGES_MAX, Table, with_entries, without
from schemas.commands import Command, EngineCommand, ProfileCommand, ProfilePlan, Target, WeightSync
from schemas.desired import Desired, ProfileSession, changes_nothing, desired_after
from schemas.identity import RolloutMode
from schemas.reports import AgentStatus
from schemas.wire import encode
from tests.simulation.bus import event_decoder
from tests.simulation.cluster import simulate
from tests.unit.fleets import Coordinator


@pytest.mark.parametrize("seed", range(5))
def test_no_decision_changes_the_state_that_it_was_given(seed: int) -> None:
    """Nor does it matter who looks at a state, or that it was written down and read again."""
    rng, state = Random(seed), CoordinatorState()
    for event, effects in simulate(seed).log.records:
        before, was = state, repr(state)
        state, decided = decide(before, event_decoder.decode(event))
        assert encode(decided) == effects
        assert repr(before) == was
        assert (again := decide(plain(before), event_decoder.decode(event))[0]) == state
        assert list(again.members) == list(state.members) and list(again.desired) == list(state.desired)
        assert state.roster == Members(dict(state.members)).roster
        state = plain(state) if rng.random() < 0.05 else state


@pytest.mark.parametrize("seed", range(20))
def test_a_table_equals_the_dict_with_the_same_history(seed: int) -> None:
    rng, kept = Random(seed), list[tuple[Table[int, int], dict[int, int]]]()
    table, expected = Table[int, int]({}), dict[int, int]()
    for step in range(300):
        key, size = rng.randrange(100), rng.choice((1, 1, 3, CHANGES_MAX + 1))
        if rng.random() < 0.1:
            after, expected = without(table, key), {other: expected[other] for other in expected if other != key}
        else:
            entries = dict.fromkeys(range(key, key + size), step)
            after, expected = with_entries(table, entries), {**expected, **entries}
        assert isinstance(after, Table)
        table = after
        kept.append((table, expected))
        assert len(table) == len(expected) and (key in table) == (key in expected)
        assert table.get(key) == expected.get(key) and table.get(-1, 7) == 7
        if rng.random() < 0.1:
            assert list(table.items()) == list(expected.items())
    for table, expected in kept:
        assert table == expected and list(table) == list(expected) and repr(table) == repr(expected)
        assert [table[key] for key in expected] == list(table.values())
    with pytest.raises(KeyError):
        table[-1]


class Interrupted(Table[int, int]):
    """A table that another thread goes through right after its changes or its base were read for the nth time."""

    reads_left = 0

    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name in ("_base", "_changes"):
            Interrupted.reads_left -= 1
            if Interrupted.reads_left == 0:
                self.as_dict()
        return value


READS: dict[str, Callable[[Table[int, int]], object]] = {
    "go through it": lambda table: dict(table.items()),
    "ask for old": lambda table: table[1],
    "ask for new": lambda table: table.get(2),
    "has new": lambda table: 2 in table,
    "set one": lambda table: table.with_entries({3: 3}),
    "set many": lambda table: table.with_entries(dict.fromkeys(range(3, 3 + 2 * CHANGES_MAX), 3)),
    "remove": lambda table: table.without(1),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_another_thread_may_go_through_a_table_at_any_moment(
    read: Callable[[Table[int, int]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(Table({1: 1}).with_entries({2: 2}))
    for moment in range(1, 6):
        table = Interrupted({1: 1}).with_entries({2: 2})
        monkeypatch.setattr(Interrupted, "reads_left", moment)
        found = read(table)
        monkeypatch.setattr(Interrupted, "reads_left", 0)
        assert found == expected


def test_what_one_agent_causes_copies_no_table_of_the_fleet() -> None:
    bus = Coordinator(*(f"{replica}.0" for replica in range(300)))
    bus.issue(EngineCommand(operation="flush"))
    state, (command,) = bus.state, bus.state.open
    assert isinstance(state.members, Members)
    shared = state.members.as_dict()
    status = StatusReceived(at_us=1, peer="7.0/a", seq=1, status=AgentStatus(ready=True))
    after, _ = decide(state, status)
    assert isinstance(after.members, Members) and after.members._base is shared
    assert after.roster is state.roster and after.desired is state.desired and after.open == (command,)
    assert command.expected is state.roster.live


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


def test_replicas_in_one_state_are_folded_once_and_come_to_what_each_would_alone() -> None:
    bus = Coordinator("0.0", "1.0", "3.0", "actor.0", "actor.1")
    bus.arrive("2.0", mode=RolloutMode.COLOCATED)
    bus.arrive("4.0", mode=RolloutMode.OBSERVED)
    for body, target in COMMANDS:
        before, unseen = bus.state.desired, bus.state.default_desired
        identities = bus.state.roster.identities
        bus.issue(body, target=target)
        for unit, desired in bus.state.desired.items():
            alone = desired_after(before[unit], body, target.includes(identities[unit]), identities[unit])
            assert desired == alone, (unit, body)
        assert bus.state.default_desired == desired_after(unseen, body, target.replicas is None, UNSEEN)


def test_the_number_of_folds_does_not_grow_with_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    folds = list[Desired]()

    def counted(desired: Desired, *rest: object) -> Desired:
        folds.append(desired)
        return desired_after(desired, *rest)  # type: ignore[arg-type]

    bus = Coordinator(*(f"{replica}.0" for replica in range(100)), *(f"actor.{rank}" for rank in range(100)))
    monkeypatch.setattr("controlplane.machine.folding.desired_after", counted)
    bus.state = replace(plain(bus.state), desired={unit: Desired() for unit in bus.state.desired})
    bus.open()  # so that what was read shares its objects again
    folds.clear()
    bus.issue(EngineCommand(operation="pause"))
    assert len(folds) == 2 and {desired.generation for desired in bus.state.desired.values()} == {"paused", "running"}


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
