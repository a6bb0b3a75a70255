"""Each mechanism is needed: without it, the simulation finds a promise that breaks.

The seeds are those of `test_promises`, under which everything holds with all mechanisms in place. Without one
of them most runs still end well; the mechanism is there for the few that do not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from msgspec import MsgspecError
from msgspec.structs import replace

from controlplane.machine import coordinator
from controlplane.machine.coordinator import CoordinatorState
from controlplane.machine.coordinator_state import Member, with_sync
from controlplane.machine.events import (
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    HelloReceived,
    Opened,
    RetireRequested,
    SendReturned,
)
from schemas.commands import ProfileCommand
from schemas.events import (
    CommandReceived,
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    HeadSeen,
    LeaseExpired,
    LoadAdapter,
    Pause,
    Perform,
    SnapshotReceived,
    Started,
    Tick,
)
from schemas.formatting import kind_and_reason
from schemas.identity import RolloutMode
from schemas.reports import Report, SyncReport
from tests.simulation.cluster import BusDecide, Mechanisms, simulate
from tests.simulation.promises import Broken
from workers.machine import decide as machine
from workers.machine.state import AgentState

SEEDS = range(400)

Decided = tuple[AgentState, tuple[Effect, ...]]


def without_hole_check(state: AgentState, event: Event) -> Decided:
    """Take any newer command for the next one."""
    if isinstance(event, CommandReceived) and state.joined and not state.needs_snapshot and event.epoch >= state.epoch:
        free = len(state.queue) < state.settings.max_buffered
        state = replace(state, seq=event.seq - 1) if free and event.seq > state.seq + 1 else state
    return machine.decide(state, event)


def without_fence(state: AgentState, event: Event) -> Decided:
    """Take messages of an older epoch for messages of the newest one."""
    if isinstance(event, CommandReceived | HeadSeen | SnapshotReceived):
        event = replace(event, epoch=max(event.epoch, state.epoch))
    return machine.decide(state, event)


def with_one_epoch(state: AgentState, event: Event) -> Decided:
    """Fence by the origin epoch of a record, not by the epoch of its sender."""
    return machine.decide(state, replace(event, epoch=event.origin) if isinstance(event, CommandReceived) else event)


def without_history(state: AgentState, event: Event) -> Decided:
    """Take a position for good in every epoch, as if no log ever lost its tail."""
    if (
        isinstance(event, CommandReceived | HeadSeen | SnapshotReceived)
        and event.epoch > state.snapshot_epoch
        and state.joined
    ):
        state = replace(state, snapshot_epoch=event.epoch)
    return machine.decide(state, event)


def closing_any_session(state: AgentState, event: Event) -> Decided:
    """Take every stop for one of the open session."""
    match event:
        case CommandReceived(command=ProfileCommand(action="stop") as stop) if state.desired.profile is not None:
            event = replace(event, command=replace(stop, step=state.desired.profile.step))
    return machine.decide(state, event)


def giving_up_for_others(state: AgentState, event: Event) -> Decided:
    """Give up the own session at a start for others."""
    state, effects = machine.decide(state, event)
    match event:
        case CommandReceived(command=ProfileCommand(action="start")) if not event.target.includes(state.identity):
            state = replace(state, suppressed=replace(state.suppressed, session=True))
    return state, effects


def without_lease(state: AgentState, event: Event) -> Decided:
    """Wait for the bus for ever."""
    return (state, ()) if isinstance(event, LeaseExpired) else machine.decide(state, event)


def serving_without_a_bus(state: AgentState, event: Event) -> Decided:
    """Serve on when the bus is lost, whatever was chosen."""
    if isinstance(event, Started):
        event = replace(event, settings=replace(event.settings, on_lost_bus="serve"))
    return machine.decide(state, event)


def resuming_by_itself(state: AgentState, event: Event) -> Decided:
    """Take whatever was heard of a bus for a bus that is back."""
    state, effects = machine.decide(state, event)
    if isinstance(event, EngineObserved | EngineReturned | Tick) and state.activity is None:
        state = replace(state, bus_lost=False)
    return state, effects


def sharing_memory(state: AgentState, event: Event) -> Decided:
    """Bring the memory to what was commanded, whoever released it."""
    if isinstance(event, Started):
        event = replace(event, settings=replace(event.settings, memory="agent"))
    return machine.decide(state, event)


def believing_unread(state: AgentState, event: Event) -> Decided:
    """Believe that an engine holds what it held before a sync in which the trainer pushed weights."""
    state, effects = machine.decide(replace(state, engine=replace(state.engine, maybe_pushed=False)), event)
    return replace(state, engine=replace(state.engine, maybe_pushed=False)), effects


def undoing_others(state: AgentState, event: Event) -> Decided:
    """Undo what something else did to the engine, whether or not the bus is heard."""
    state, effects = machine.decide(state, event)
    noted = state.changed_by_others or state.relabelled
    return (replace(state, changed_by_others=False, relabelled=0) if noted else state), effects


def planning_unread(state: AgentState, event: Event) -> Decided:
    """Take an engine that could not be read for one that is there and has no operation."""
    if isinstance(event, EngineReturned) and event.observation is not None and event.observation.trouble:
        event = replace(event, observation=replace(event.observation, tokenizer="present"))
    return machine.decide(state, event)


def trusting_what_it_finds(state: AgentState, event: Event) -> Decided:
    """Take the cache of an engine that is found paused for one of the weights that it holds."""
    after, effects = machine.decide(state, event)
    found = state.engine.instance is None and after.engine.instance is not None
    return replace(after, engine=replace(after.engine, stale_cache=False)) if found else after, effects


def taking_silence_for_yes(state: AgentState, event: Event) -> Decided:
    """Take an engine that does not say whether it is paused for one that generates."""
    after, effects = machine.decide(state, event)
    found = state.engine.instance is None and after.engine.instance is not None
    if found and after.engine.generating is None:
        after = replace(after, engine=replace(after.engine, generating=True))
    return after, effects


def never_reading_back(state: AgentState, event: Event) -> Decided:
    """Believe that an engine holds the adapters that it was given, whatever it lists."""
    if isinstance(event, EngineObserved | EngineReturned) and event.observation is not None:
        event = replace(event, observation=replace(event.observation, adapters=None))
    return machine.decide(state, event)


def freezing_for_adapters(state: AgentState, event: Event) -> Decided:
    """Pause for an adapter, as a sync of weights does."""
    state, effects = machine.decide(state, event)
    return state, tuple(
        replace(effect, call=Pause("keep"))
        if isinstance(effect, Perform) and isinstance(effect.call, LoadAdapter)
        else effect
        for effect in effects
    )


def without(strip: Callable[[Report | SyncReport], Report | SyncReport]) -> BusDecide:
    """Tell less in each report."""

    def decide(
        state: CoordinatorState, event: CoordinatorEvent
    ) -> tuple[CoordinatorState, tuple[CoordinatorEffect, ...]]:
        state, effects = coordinator.decide(state, event)
        return state, tuple(
            replace(effect, report=strip(effect.report)) if isinstance(effect, Conclude) else effect
            for effect in effects
        )

    return decide


def without_absent(report: Report | SyncReport) -> Report | SyncReport:
    """Leave out agents that were away when the command was issued."""
    if isinstance(report, SyncReport):
        return report
    kept = (line for line in report.outcomes if kind_and_reason(line.conclusion) != ("missing", "absent"))
    return replace(report, outcomes=tuple(kept))


def comparing_nothing(
    state: CoordinatorState, event: CoordinatorEvent
) -> tuple[CoordinatorState, tuple[CoordinatorEffect, ...]]:
    """Commit to every replica that reports success, whatever bytes its engine holds."""
    with patch.object(coordinator, "with_digests_compared", lambda _, outcomes, served: outcomes):
        return coordinator.decide(state, event)


def without_unproven(report: Report | SyncReport) -> Report | SyncReport:
    """Call a sync committed, and nothing more."""
    return replace(report, unproven=()) if isinstance(report, SyncReport) else report


def forgetting_what_was_loaded(
    state: CoordinatorState, event: CoordinatorEvent
) -> tuple[CoordinatorState, tuple[CoordinatorEffect, ...]]:
    """Let a version be used again for other weights."""
    after, effects = coordinator.decide(state, event)
    return replace(after, loaded=()), effects


def holding_for_ever(state: CoordinatorState, event: CoordinatorEvent) -> tuple[Any, Any]:
    """Wait for a sender that does not return, however long."""
    after, effects = coordinator.decide(state, event)
    if after.sync is not None and after.sync.held_until_us is not None:
        after = with_sync(after, replace(after.sync, held_until_us=10**18))
    return after, effects


def trusting_the_sender(state: CoordinatorState, event: CoordinatorEvent) -> tuple[Any, Any]:
    """Wait for weights until the deadline of the load phase, though the sender has returned."""
    return (state, ()) if isinstance(event, SendReturned) else coordinator.decide(state, event)


def forgetting_who_left(state: CoordinatorState, event: CoordinatorEvent) -> tuple[Any, Any]:
    """Forget, in a new life of the bus, how a replica that left is deployed, and that one which returns as another kind
    begins anew.
    """
    after, effects = coordinator.decide(state, event)
    if isinstance(event, HelloReceived):
        after = replace(after, desired=state.desired)
    if isinstance(event, Opened):
        left = {name: member for name, member in after.members.items() if member.state == "left"}
        after = replace(after, members={**after.members, **{name: _hybrid(member) for name, member in left.items()}})
    return after, effects


def forgetting_the_retired(state: CoordinatorState, event: CoordinatorEvent) -> tuple[Any, Any]:
    """Forget in a new life of the bus which places were retired."""
    after, effects = coordinator.decide(state, event)
    return replace(after, retired={}) if isinstance(event, Opened) else after, effects


def _as_if_gone(state: CoordinatorState, event: CoordinatorEvent, among: Callable[[Member], bool]) -> tuple[Any, Any]:
    """Decide a hello as if some of the members had never been there."""
    hidden = {name: member for name, member in state.members.items() if among(member)}
    kept = {name: member for name, member in state.members.items() if name not in hidden}
    after, effects = coordinator.decide(replace(state, members=kept), event)
    return replace(after, members={**hidden, **after.members}), effects


def of_any_shape(state: CoordinatorState, event: CoordinatorEvent) -> tuple[Any, Any]:
    """Let in a node whatever the others of its replica are."""
    if not isinstance(event, HelloReceived):
        return coordinator.decide(state, event)
    place = event.hello.identity
    return _as_if_gone(
        state,
        event,
        lambda member: member.hello.identity.unit == place.unit and member.hello.identity.agent != place.agent,
    )


def letting_in_a_second(state: CoordinatorState, event: CoordinatorEvent) -> tuple[Any, Any]:
    """Let in whichever process says hello last."""
    if not isinstance(event, HelloReceived):
        return coordinator.decide(state, event)
    place = event.hello.identity
    return _as_if_gone(state, event, lambda member: member.hello.identity.agent == place.agent)


def taking_the_second_hello(state: CoordinatorState, event: CoordinatorEvent) -> tuple[Any, Any]:
    """Take an incarnation that has said hello before for one that has joined before."""
    after, effects = coordinator.decide(state, event)
    if not isinstance(event, HelloReceived):
        return after, effects
    name = event.hello.identity.agent
    holder, member = state.members.get(name), after.members.get(name)
    if holder is not None and member is not None and holder.hello.incarnation == member.hello.incarnation:
        after = replace(after, members={**after.members, name: replace(member, fresh=False)})
    return after, effects


def naming_the_retired(state: CoordinatorState, event: CoordinatorEvent) -> tuple[Any, Any]:
    """Let no agent in at a retired place, and go on to name it in every report."""
    after, effects = coordinator.decide(state, event)
    if isinstance(event, RetireRequested):
        after = replace(after, members=state.members)
    return after, effects


def _hybrid(member: Member) -> Member:
    identity = replace(member.hello.identity, mode=RolloutMode.HYBRID)
    return replace(member, hello=replace(member.hello, identity=identity))


class Ablation(NamedTuple):
    """mechanisms: without the mechanism.   breaks: the promise that is found broken.   first: the seed to try first."""

    mechanisms: Mechanisms
    breaks: str
    first: int = 0


ABLATIONS = {
    # A bus with nothing to say can't be told from a dead one, so the lease of a quiet fleet runs out. With a lease that
    # never ends, agents are still left behind: nothing shows that the last command or a resend request was lost.
    "head beacon": Ablation(Mechanisms(beacon=False), "convergence", first=8),
    # What was lost is never asked for, and what comes after it is applied without it.
    "hole check": Ablation(Mechanisms(agent=without_hole_check), "P2 no hole"),
    # An agent that starts again has forgotten which calls it made.
    "journal": Ablation(Mechanisms(journal=False), "P5 one effect", first=3),
    # A trainer that was replaced and does not know it is still obeyed.
    "fence": Ablation(Mechanisms(agent=without_fence), "P6 fencing", first=8),
    # The records of earlier lives, replayed by the living bus, are refused as old.
    "split of the epochs": Ablation(Mechanisms(agent=with_one_epoch), "P6 fencing", first=52),
    # A report has no line for an agent that is away when the command is issued, and nothing to raise for.
    "absent agents": Ablation(Mechanisms(bus=without(without_absent)), "P3 answer"),
    # A replica that is out of reach serves the old version, and the sync of the others is a success.
    "unproven replicas": Ablation(Mechanisms(bus=without(without_unproven)), "P11 true", first=2),
    # An agent that is ahead of a log that lost its tail waits for what will never come.
    "position per epoch": Ablation(Mechanisms(agent=without_history), "convergence", first=48),
    # What a trainer paused stays paused when it is gone.
    "lease": Ablation(Mechanisms(agent=without_lease), "P7 trainer first", first=117),
    # A stop closes whatever is open: what the trainer wants recorded ends with somebody else's session.
    "a stop names its session": Ablation(Mechanisms(agent=closing_any_session), "I7 sessions stay open", first=13),
    # A start that is not for this replica takes away the session that is.
    "a session of one's own": Ablation(Mechanisms(agent=giving_up_for_others), "I7 sessions stay open", first=8),
    # A judge that comes back to the next trainer is taken for a replica that syncs, and waits for a commit for ever.
    "who left": Ablation(Mechanisms(bus=forgetting_who_left), "P4 late joiner", first=64),
    # An agent comes back at a place that was taken out of the run for good.
    "retired places": Ablation(Mechanisms(bus=forgetting_the_retired), "P3 answer", first=1),
    # Every report goes on to name a place that was retired, as absent.
    "retired members": Ablation(Mechanisms(bus=naming_the_retired), "P3 answer", first=18),
    # A replica out of reach serves what is not committed any more, though it was told to pause.
    "pause on a lost bus": Ablation(Mechanisms(agent=serving_without_a_bus), "I1 no torn serving", first=10),
    # It pauses, and resumes before a bus has said what is committed.
    "resumed by a bus": Ablation(Mechanisms(agent=resuming_by_itself), "I1 no torn serving", first=9),
    # The trainer releases memory for its own work, and the agent wakes it.
    "memory of the trainer": Ablation(Mechanisms(agent=sharing_memory), "P5 one effect", first=28),
    # The trainer pushed weights, and the sync was aborted: the engine goes on with what was not committed.
    "weights read again": Ablation(Mechanisms(agent=believing_unread), "I1 no torn serving", first=380),
    # Engines load other bytes than they were told to, and report success.
    "digests compared": Ablation(Mechanisms(bus=comparing_nothing), "I2 proof", first=1493),
    # A push that did not arrive counts as a load.
    "a label proves": Ablation(Mechanisms(label_proves=False), "I2 proof", first=21),
    # An agent without its journal takes its engine's label for the weights that an aborted sync had under that version.
    "one version for the same weights": Ablation(Mechanisms(bus=forgetting_what_was_loaded), "I4 monotonic", first=2),
    # A trainer begins a sync, and forgets it: the engines stay paused.
    "a held commit expires": Ablation(Mechanisms(bus=holding_for_ever), "convergence", first=21),
    # A sender returned, and some weights have not arrived: the engines wait for as long as for a whole load.
    "a sender that returned": Ablation(Mechanisms(bus=trusting_the_sender), "P11 true", first=39),
    # Nodes of one replica disagree on its mode, and commands mean one thing to one and another to the other.
    "one shape": Ablation(Mechanisms(bus=of_any_shape), "P4 late joiner", first=3),
    # An agent is given a new key, and leaves the sync that it has prepared.
    "a new key waits": Ablation(Mechanisms(keys_wait=False), "P3 answer", first=3),
    # An engine can't be read, so it shows no operation: its session is closed as one that it can't have.
    "an engine that can't be read": Ablation(Mechanisms(agent=planning_unread), "I7 sessions stay open", first=64),
    # An agent that started again said hello twice, and stays in the quarantine that its restart was to end.
    "hello twice": Ablation(Mechanisms(bus=taking_the_second_hello, adapters=False), "I5 quarantine", first=3101),
    # An agent reaches one of two ports, joins nothing, and counts on a bus whose commands can't reach it.
    "a lease of members": Ablation(Mechanisms(lease_of_members=False), "P7 trainer first", first=24),
    # An agent that is cut off brings its engine back to what it remembers, and its successor to what is committed.
    "one commander": Ablation(Mechanisms(agent=undoing_others, adapters=False), "P6 fencing", first=961),
    # An agent without its journal finds an engine paused that was given other weights, and lets it go on.
    "a cache that is found": Ablation(Mechanisms(agent=trusting_what_it_finds), "I1 no torn serving", first=699),
    # An engine that an agent without its journal has found paused, and that does not say so, stays paused.
    "silence that is told": Ablation(Mechanisms(agent=taking_silence_for_yes), "P4 late joiner", first=395),
    # An engine evicts an adapter, and its replica goes on to be listed for it.
    "adapters read back": Ablation(Mechanisms(agent=never_reading_back), "P12 adapters", first=29),
    # A sync of a few megabytes stops the whole fleet.
    "adapters pause nothing": Ablation(Mechanisms(agent=freezing_for_adapters), "P12 adapters", first=4),
    # A trainer takes samples whatever the run knows of the weights that made them.
    "samples of proven weights": Ablation(Mechanisms(proven_samples=False), "I15 proven samples", first=0),
    # Two processes take turns at one place, each with an engine of its own.
    "one holder": Ablation(Mechanisms(bus=letting_in_a_second), "P3 answer", first=2),
    # A bus that was replaced goes on writing into the log, between the records of its successor.
    "lock of the log": Ablation(Mechanisms(storage_fence=False), "P1 order", first=2),
    # What was published or answered before it was on the disk is not there after a crash.
    "commit before effects": Ablation(Mechanisms(commit_first=False), "P9 recorded", first=73),
    # A timeout of ten billion seconds is published, and each agent drops the record, live and resent: a hole for ever.
    "bounds": Ablation(Mechanisms(bounds=False, drops_unreadable=True), "convergence", first=10),
    # A half-open control connection carries nothing, and neither side is told. The agent hears heads, and is gone.
    "control dialled anew": Ablation(Mechanisms(redial_control=False), "convergence", first=39),
    # A half-open subscription: commands come only while they are retransmitted, and nothing shows that the last one was
    # lost.
    "subscription dialled anew": Ablation(Mechanisms(redial_subscription=False), "convergence", first=745),
}


@pytest.mark.parametrize("mechanism", ABLATIONS)
def test_without_it_a_promise_breaks(mechanism: str) -> None:
    ablation = ABLATIONS[mechanism]
    found = set()
    for seed in (ablation.first, *SEEDS):
        try:
            simulate(seed, ablation.mechanisms)
        except Broken as broken:
            found.add(str(broken).partition(":")[0])
            if ablation.breaks in found:
                return
        except MsgspecError:
            found.add("a log that can't be read")
    pytest.fail(f"without the {mechanism}, {len(SEEDS)} seeds broke {found or 'nothing'}", pytrace=False)
