"""The judges of the simulation themselves: each lets pass what is right, and still catches what it is there for."""

import pytest
from msgspec.structs import replace

from controlplane.simulate.modelled_engine import Kind
from schemas.commands import (
    AdapterSync,
    AdapterVersion,
    Broadcast,
    Checkpoint,
    Command,
    EngineCommand,
    Manifest,
    ProfilePlan,
    Target,
    WeightSync,
)
from schemas.desired import Committed, Desired, ProfileSession
from schemas.events import Call, Effect, EngineObserved, Event, Load, Pause, Started, StartProfile
from schemas.identity import Operation
from schemas.reports import Report, SyncReport
from schemas.wire import Snapshot
from tests.simulation import serving
from tests.simulation.agent import Process
from tests.simulation.answers import open_sync
from tests.simulation.bus import Bus
from tests.simulation.cluster import World
from tests.simulation.endings import relaunch_lost
from tests.simulation.engine import Engine, digest_of, weights_of
from tests.simulation.promises import Broken, Published
from tests.simulation.verdicts import CALLS_ALONE_MAX, LEASE_LATE_MS, alone, leased, report
from tests.simulation.weather import Weather
from workers.machine.decide import decide
from workers.machine.state import Activity, AgentState


def lonely(epoch: int) -> Process:
    """Return an agent that has seen this epoch, and whose bus is gone since 0 ms."""
    world = World(0)
    world.weather = Weather()
    process = Process(world.slots[0])
    process.slot.process, process.state = process, replace(AgentState(), epoch=epoch)
    return process


def judged_at(process: Process, ms: int) -> str:
    process.world.now = ms
    return leased(process)


def test_a_lease_counts_from_the_last_snapshot_though_its_bus_is_gone_by_now() -> None:
    process = lonely(epoch=1)
    lease_ms = process.world.settings.lease_ms
    process.world.now = lease_ms
    process.on_control(1, 0, Snapshot(desired=Desired()))
    assert judged_at(process, 2 * lease_ms + LEASE_LATE_MS) == ""
    assert "its lease goes on" in judged_at(process, 2 * lease_ms + LEASE_LATE_MS + 1)


def test_a_snapshot_of_a_bus_that_was_replaced_prolongs_no_lease() -> None:
    process = lonely(epoch=2)
    lease_ms = process.world.settings.lease_ms
    process.world.now = lease_ms
    process.on_control(1, 0, Snapshot(desired=Desired()))
    assert "its lease goes on" in judged_at(process, lease_ms + LEASE_LATE_MS + 1)


def test_an_agent_whose_lease_is_over_is_let_be() -> None:
    process = lonely(epoch=1)
    process.lease_over = True
    assert judged_at(process, 100_000) == ""


def beside_its_engine() -> tuple[Process, Engine]:
    """Return an agent that follows its bus, and its engine, which serves as it was launched and shows all it does."""
    process = lonely(epoch=1)
    engine = process.slot.engine
    assert engine is not None
    engine.launch()
    engine.ready, engine.kind, engine.launched_from, engine.operations = True, "tiny", None, frozenset(Operation)
    process.slot.ledger.oracle = Desired()
    process.state = replace(AgentState(), epoch=1, snapshot_epoch=1)
    look(process, engine)
    return process, engine


def look(process: Process, engine: Engine) -> tuple[Effect, ...]:
    """Let the agent observe its engine, and judge what it decides."""
    before, seen = process.state, engine.observe()
    event: Event = EngineObserved(at_ms=0, observation=seen)
    engine.shown(seen, process.slot.double)
    process.state, effects = decide(before, event)
    process.world.promises.after_agent(process, before, event, effects)
    return effects


def opens_a_session(process: Process, engine: Engine) -> None:
    make(process, engine, StartProfile(ProfileSession(step=2, plan=ProfilePlan()), directory="traces"))


def make(process: Process, engine: Engine, call: Call) -> None:
    """Make a call, which succeeds."""
    engine.caller, engine.temper.fails = process, 0.0
    attempt, _ = engine.begin(call, call_id=1)
    engine.end(attempt)


def succeeded() -> tuple[Process, Process, Engine]:
    """Return an agent that was cut off, its successor, and the engine that both command."""
    process, engine = beside_its_engine()
    assert process.slot.be_succeeded(1) is not None
    successor = Process(process.world.slots[0])
    successor.slot.process, successor.state, successor.slot.ledger.oracle = successor, process.state, Desired()
    return process, successor, engine


def test_an_agent_may_leave_the_session_open_that_its_predecessor_opened_after_it_was_cut_off() -> None:
    process, successor, engine = succeeded()
    opens_a_session(process, engine)
    assert look(successor, engine) == ()
    assert engine.session_step == 2


def test_an_agent_that_leaves_its_own_session_open_is_caught() -> None:
    process, engine = beside_its_engine()
    opens_a_session(process, engine)
    with pytest.raises(Broken, match="session 2 is open, desired is None"):
        look(process, engine)


def cut_off_in_a_load(weights: str) -> tuple[Process, Engine]:
    """Return an agent that was killed in the run's first load, while its engine held these weights, and the engine,
    which was launched again since.
    """
    process, engine = beside_its_engine()
    source = Broadcast(host="h", port=1, group="g", replicas=(0,))
    process.slot.ledger.oracle = desired = Desired(uncommitted=Committed(3, source, None))
    load = Activity(trigger=None, calls=(Load(3, source, None),), call_id=1, deadline_ms=0)
    held = replace(process.state.engine, digest=digest_of(weights), generating=False)
    process.state = replace(process.state, desired=desired, engine=held, interrupted=load)
    engine.launch()
    engine.ready = engine.paused = True
    return process, engine


def test_an_engine_that_perhaps_was_given_a_load_stays_paused_though_it_shows_its_digest() -> None:
    process, engine = cut_off_in_a_load("v1")
    assert look(process, engine) == ()
    assert process.state.engine.torn


def left_paused(state: AgentState) -> AgentState:
    """Return the state of a machine that holds its engine's weights for torn."""
    return replace(state, activity=None, engine=replace(state.engine, torn=True, generating=False))


def test_an_agent_that_leaves_the_weights_of_a_launch_unused_is_caught_where_their_digest_has_not_changed() -> None:
    process, engine = cut_off_in_a_load("as launched")
    assert look(process, engine) != ()  # it resumes
    process.state = left_paused(process.state)
    with pytest.raises(Broken, match="says it serves, and is paused"):
        look(process, engine)


def test_an_agent_that_leaves_a_later_launch_unused_is_caught() -> None:
    process, engine = cut_off_in_a_load("v1")
    look(process, engine)
    engine.launch()
    engine.ready = engine.paused = True
    assert look(process, engine) != ()  # it resumes: this launch was given nothing
    process.state = left_paused(process.state)
    with pytest.raises(Broken, match="says it serves, and is paused"):
        look(process, engine)


@pytest.mark.parametrize(
    ("kind", "torn", "content", "loaded", "stays"),
    [
        ("verl", True, None, True, True),
        ("verl", False, None, True, False),
        ("tiny", True, None, True, False),  # a later load failed, and the digest is as it was
        ("tiny", True, "announced", False, False),
        ("tiny", True, None, False, True),
    ],
)
def test_weights_that_were_broadcast_are_given_up_after_a_failed_load_only_where_no_digest_proves_them(
    kind: Kind, torn: bool, content: str | None, loaded: bool, stays: bool
) -> None:
    process, engine = beside_its_engine()
    source = Broadcast(host="h", port=1, group="g", replicas=(0,))
    wanted = Committed(1, source, Manifest(tensors=1, nbytes=1, layout="l", content=content))
    engine.kind, engine.weights = kind, weights_of(source)
    known = replace(process.state.engine, torn=torn, loaded=wanted if loaded else None)
    process.state = replace(process.state, engine=known)
    assert serving.stranded(process, Desired(committed=wanted)) is stays


@pytest.mark.parametrize(("recorded", "label"), [(True, "push 1"), (False, "default")])
def test_a_launch_has_the_label_of_a_push_only_beside_an_agent_that_has_seen_one_before(
    recorded: bool, label: str
) -> None:
    process, engine = beside_its_engine()
    engine.launch()
    engine.label = "push 1"
    before = process.state if recorded else AgentState()
    started = Started(at_ms=0, identity=process.slot.identity, incarnation="i2")
    process.state, effects = decide(before, started)
    process.world.promises.after_agent(process, before, started, effects)
    assert engine.label == label


@pytest.mark.parametrize(("path", "wrong"), [("v1", ""), ("v2", "after its successor has loaded v2")])
def test_an_agent_without_a_bus_need_not_see_that_its_successor_loaded_the_same_weights_again(
    path: str, wrong: str
) -> None:
    process, successor, engine = succeeded()
    engine.paused, engine.version, engine.weights, engine.label = True, 1, "v1", "1"
    process.lease_over = True
    make(successor, engine, Load(int(path[1:]), Checkpoint(path), None))
    found = alone(process, Pause("abort"))
    assert wrong in found
    assert bool(found) is bool(wrong)


def test_an_agent_without_a_bus_brings_each_launch_of_its_engine_back_and_is_caught_when_it_goes_on() -> None:
    process, _, engine = succeeded()
    process.lease_over = True
    assert [alone(process, Pause("abort")) for _ in range(CALLS_ALONE_MAX)] == [""] * CALLS_ALONE_MAX
    engine.launch()
    assert [alone(process, Pause("abort")) for _ in range(CALLS_ALONE_MAX)] == [""] * CALLS_ALONE_MAX
    assert "goes on to command its engine" in alone(process, Pause("abort"))


@pytest.mark.parametrize(("lost", "launches"), [(False, 1), (True, 3)])
def test_an_engine_of_which_it_is_not_known_what_it_does_is_launched_again_twice_at_most(
    lost: bool, launches: int
) -> None:
    process, engine = beside_its_engine()
    engine.kind = "verl"
    state = replace(process.state.engine, generating=None, idempotent=frozenset())
    process.state = replace(process.state, engine=state) if lost else process.state
    relaunch_lost(process.world)
    assert engine.instance == launches


def published(command: Command) -> Published:
    return Published(1, command, Target(), frozenset(), frozenset(), 1, 0, 0, 0, 1)


V6 = Checkpoint("v6")


@pytest.mark.parametrize(
    ("restarted", "next_command", "version"),
    [
        (None, EngineCommand(operation="flush"), 0),
        (1, EngineCommand(operation="flush"), 0),
        (2, EngineCommand(operation="flush"), 6),
        (2, WeightSync(phase="abort", version=6), 0),
        (2, WeightSync(phase="commit", version=6, source=V6), 0),
    ],
)
def test_a_sync_that_left_a_replica_out_is_open_for_it_again_from_a_restart_of_its_agent_until_the_end(
    restarted: int | None, next_command: Command, version: int
) -> None:
    world = World(0)
    promises, place = world.promises, world.slots[0].identity
    left_out = frozenset({place.replica})
    promises.log[1] = published(WeightSync(phase="prepare", version=6, source=V6))
    promises.log[2] = published(WeightSync(phase="load", version=6, quarantine=left_out))
    promises.log[3] = published(next_command)
    if restarted is not None:
        promises.restarts[place.unit] = [restarted]
    assert open_sync(promises, place, 4) == version


@pytest.mark.parametrize(("arrived", "verdict"), [(4, "calls {1} joining"), (5, ""), (6, "")])
def test_a_sync_may_call_a_replica_joining_that_followed_another_only_if_it_joined_after_the_beginning(
    arrived: int, verdict: str
) -> None:
    world = World(0)
    promises = world.promises
    command = AdapterSync(phase="abort", adapter=AdapterVersion(name="judge", version=1, path="judge/1"))
    promises.log[6] = published(command)
    promises.newcomers.arrived["1.0"] = arrived
    promises.newcomers.followed.add(1)
    phases = tuple(Report(seq=seq, origin=1, command=command, outcomes=()) for seq in (5, 6))
    told = SyncReport(version=1, status="aborted", loaded=(), quarantined=(), phases=phases, joining=(1,))
    said = report(promises, Bus(world, life=1), told)
    assert verdict in said and bool(verdict) == bool(said)
