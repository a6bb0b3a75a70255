"""Which replicas there are, which of them are proven to serve, and what keeps the others from it. Pure.

Two things prove what a replica serves: its heartbeat, and its answer to a command that lets it serve or not. The newer
one counts. So a replica that has just committed is known to serve before its next heartbeat, and one that was told to
resume and has not answered yet is not.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from msgspec.structs import replace

from controlplane.machine.coordinator_state import CoordinatorState, Member
from controlplane.machine.stops import stopped_replicas
from schemas.commands import AdapterSync, Checkpoint, Command, EngineCommand, Target, WeightSync, durable_source
from schemas.desired import Desired
from schemas.formatting import agent_order, format_duration
from schemas.identity import ROLLOUT, Identity
from schemas.outcomes import Acted, Conclusion, Missing, Reason, Skipped
from schemas.reports import AgentOutcome

_ALREADY: Final = Skipped(Reason.ALREADY)
_NOTHING_YET: Final = "nothing is committed yet: it serves after the first sync"
_SAYS_NOTHING: Final = tuple(
    map(Skipped, (Reason.NOT_TARGETED, Reason.MODE_NEVER_SYNCS, Reason.OBSERVING, Reason.STALE_VERSION))
)


def identities(state: CoordinatorState) -> dict[int | str, Identity]:
    """Return the identity of the first known node of each replica, and of each training rank.

    All nodes that are live agree with it on what counts.
    """
    known: dict[int | str, Identity] = {}
    for member in state.members.values():
        identity = member.hello.identity
        first = known.get(identity.unit)
        if first is None or identity.node_rank < first.node_rank:
            known[identity.unit] = identity
    return known


def syncing_replicas(state: CoordinatorState, target: Target) -> frozenset[int]:
    """Return the known replicas that a sync with this target is for."""
    joined = {member.hello.identity.unit for member in state.members.values() if member.joined} - state.draining
    return frozenset(
        identity.replica
        for unit, identity in identities(state).items()
        if identity.syncs and unit in joined and target.includes(identity)
    )


def whole_target(state: CoordinatorState, target: Target) -> Target:
    """Return the target of a sync. One that names every known replica means the same as one that names none."""
    every = syncing_replicas(state, Target())
    return Target() if target.replicas is not None and every and every <= target.replicas else target


def is_primary(member: Member) -> bool:
    """Return whether the agent speaks for a replica."""
    identity = member.hello.identity
    return identity.node_rank == 0 and identity.role == ROLLOUT


def is_engine_down(member: Member) -> bool:
    """Return whether this is a primary whose engine is known to be down."""
    status = member.status
    return member.state == "live" and is_primary(member) and status is not None and status.tokenizer == "unknown"


def is_settled(state: CoordinatorState, member: Member) -> bool:
    """Return whether the engine has been up at this place with the weights that it should have, or is now."""
    return member.settled or not (is_engine_down(member) or in_doubt(member, _desired(state, member)))


def joining_replicas(state: CoordinatorState, replicas: frozenset[int]) -> frozenset[int]:
    """Return those of these replicas that are new in a fleet that has others: they have not settled yet."""
    primaries = (state.members.get(f"{replica}.0") for replica in replicas)
    settled = {one.hello.identity.replica for one in primaries if one is not None and is_settled(state, one)}
    return replicas - settled if settled else frozenset()


def live_agents(state: CoordinatorState) -> frozenset[str]:
    """Return the agents that owe an answer to each command: those that are live, and whose replicas don't leave."""
    draining = state.draining
    return frozenset(
        name
        for name, member in state.members.items()
        if member.state == "live" and member.hello.identity.unit not in draining
    )


def note_outcomes(state: CoordinatorState, command: Command, outcomes: Iterable[AgentOutcome]) -> CoordinatorState:
    """Record which replicas these outcomes prove to be serving, or not to be, until their next heartbeats.

    Those of agents that are not live prove nothing: later commands do not wait for them, so when they have joined they
    may have missed some.
    """
    if isinstance(command, AdapterSync):
        return _note_adapter(state, command, outcomes) if command.phase in ("load", "commit") else state
    if not _lets_serve(command):
        return state
    aborts = isinstance(command, WeightSync) and command.phase == "abort"
    changed: dict[str, Member] = {}
    for outcome, member in _telling(state, outcomes):
        acked, sync_acked = _carried_out(outcome.conclusion), member.sync_acked
        if isinstance(command, WeightSync):
            sync_acked = acked and not _is_out_after(command, member, _desired(state, member))
        if acked and (aborts or (isinstance(command, EngineCommand) and command.operation in ("resume", "wake"))):
            acked = _runs_after(outcome.conclusion, member)
        settled = member.settled or sync_acked is True
        changed[outcome.agent] = replace(member, command_acked=acked, sync_acked=sync_acked, settled=settled)
    return replace(state, members={**state.members, **changed}) if changed else state


def note_shown(state: CoordinatorState, outcomes: Iterable[AgentOutcome]) -> CoordinatorState:
    """Correct statuses that are older than these answers: a primary acts only where it has found its engine, and in a
    sync it says which weights that holds.
    """
    changed: dict[str, Member] = {}
    for outcome in outcomes:
        acted, member = outcome.conclusion, state.members.get(outcome.agent)
        if type(acted) is not Acted or member is None or member.status is None or member.state != "live":
            continue
        status, calls = member.status, acted.calls
        if acted.version is not None:
            torn = status.torn and not {"load", "restore"}.intersection(calls)
            status = replace(status, version=acted.version, digest=acted.digest, torn=torn)
            paused = "pause" in calls and "resume" not in calls
            member = replace(member, command_acked=False if paused else member.command_acked)
        if is_engine_down(member):
            status = replace(status, tokenizer="present")
        if status is not member.status:
            changed[outcome.agent] = replace(member, status=status)
    return replace(state, members={**state.members, **changed}) if changed else state


def _note_adapter(state: CoordinatorState, command: AdapterSync, outcomes: Iterable[AgentOutcome]) -> CoordinatorState:
    """Record which replicas these outcomes of a load or a commit prove to hold the version, or not to."""
    changed: dict[str, Member] = {}
    known = state.adapters.get(command.adapter.name)
    used = known.used if known is not None else ()
    loaded_seq = max((entry.loaded_seq for entry in used if entry.adapter == command.adapter), default=0)
    for outcome, member in _telling(state, outcomes) if loaded_seq > state.discarded_seq else ():
        acked = {**member.adapters_acked, command.adapter.model: _carried_out(outcome.conclusion)}
        changed[outcome.agent] = replace(member, adapters_acked=acked)
    return replace(state, members={**state.members, **changed}) if changed else state


def _lets_serve(command: Command) -> bool:
    """Whether a replica may serve afterwards and did not before, or the other way round."""
    if isinstance(command, WeightSync):
        return command.phase in ("commit", "abort")
    return isinstance(command, EngineCommand) and command.operation not in ("flush", "abort")


def _telling(state: CoordinatorState, outcomes: Iterable[AgentOutcome]) -> Iterator[tuple[AgentOutcome, Member]]:
    """Those of live primaries that say something about their replicas."""
    for outcome in outcomes:
        member, conclusion = state.members.get(outcome.agent), outcome.conclusion
        silent = conclusion in _SAYS_NOTHING or (isinstance(conclusion, Missing) and conclusion.reason == "absent")
        if member is not None and member.state == "live" and is_primary(member) and not silent:
            yield outcome, member


def _carried_out(conclusion: Conclusion) -> bool:
    return isinstance(conclusion, Acted) or conclusion == _ALREADY


def _runs_after(conclusion: Conclusion, member: Member) -> bool:
    """Whether a resume, a wake or an abort that was carried out shows that the engine generates. It may have had to
    pause for want of weights; and a wake that resumes nothing leaves it paused, as engines are while they sleep. One
    that has nothing to resume changes nothing: its memory may be asleep, since a wake failed.
    """
    calls = conclusion.calls if isinstance(conclusion, Acted) else ()
    if {"resume", "pause", "wake", "sleep"}.intersection(calls):
        return "resume" in calls
    return _generates(member)


def _is_out_after(command: WeightSync, member: Member, desired: Desired) -> bool:
    """Whether a replica that carried out this end of a sync is in quarantine nevertheless, or has torn weights. These,
    and the quarantine of another sync, an abort leaves as they were; the next heartbeat may say otherwise.
    """
    if desired.quarantined or member.hello.identity.replica in command.quarantine:
        return True
    status = member.status
    out = status is not None and (status.torn or status.quarantined not in (0, command.version))
    return command.phase == "abort" and (out or member.sync_acked is False)


def quarantined_replicas(state: CoordinatorState) -> frozenset[int]:
    """Return the replicas that are in quarantine: because a sync left them out, or because they reported it."""
    named = {unit for unit, desired in state.desired.items() if desired.quarantined and isinstance(unit, int)}
    for member in state.members.values():
        status = member.status
        if status is not None and status.quarantined and not member.sync_acked and is_primary(member):
            named.add(member.hello.identity.replica)
    return frozenset(named)


def served_digests(state: CoordinatorState) -> frozenset[str]:
    """Return what replicas hold of the weights that an open sync brings to others, by their heartbeats."""
    version, holding = (state.sync.version, state.sync.holding) if state.sync is not None else (0, frozenset[int]())
    members = (state.members.get(f"{replica}.0") for replica in holding)
    held = (member.status for member in members if member is not None and member.status is not None)
    return frozenset(
        status.digest for status in held if status.digest and status.version == version and not status.torn
    )


class ProvenReplicas(NamedTuple):
    """What is proven of the replicas.

    Attributes:
        serving: Those that are proven to serve, each with its version. One that never syncs has none.
        unproven: Known replicas that are not proven to hold their committed weights, since there are some.
    """

    serving: dict[int, int]
    unproven: frozenset[int]


def proven_replicas(state: CoordinatorState) -> ProvenReplicas:
    """Return what is proven of all replicas."""
    waiting = _awaited(state)
    serving: dict[int, int] = {}
    holding: list[int] = []
    for replica, member, desired in _live_primaries(state):
        if in_doubt(member, desired):
            continue
        holding.append(replica)
        identity = member.hello.identity
        if desired.serving and _generates(member) and identity.syncs and not (waiting and identity.agent in waiting):
            shown = member.status if desired.fallback is not None else desired
            serving |= {replica: shown.version} if shown is not None else {}
    committed = (unit for unit, desired in state.desired.items() if desired.committed)
    unproven = syncing_replicas(state, Target()).intersection(committed).difference(holding)
    return ProvenReplicas(dict(sorted(serving.items())), unproven)


def _awaited(state: CoordinatorState) -> frozenset[str]:
    """Agents that have not answered a command that lets their replicas serve, or not."""
    awaited = frozenset[str]()
    for command in state.open:
        if _lets_serve(command.command):
            replicas, waiting = command.record.envelope.target.replicas, command.waiting
            if replicas is not None:  # others answer too, and go on serving meanwhile
                waiting = frozenset(name for name in waiting if state.members[name].hello.identity.unit in replicas)
            awaited |= waiting
    return awaited


def _live_primaries(state: CoordinatorState) -> Iterator[tuple[int, Member, Desired]]:
    """The live agents that speak for a replica, each with its index and what is desired of it."""
    for member in state.members.values():
        identity = member.hello.identity
        if member.state == "live" and is_primary(member):
            yield identity.replica, member, state.desired.get(identity.replica, state.default_desired)


def _generates(member: Member) -> bool:
    """Whether a replica that should generate is proven to."""
    status = member.status
    if member.command_acked is not None:
        return member.command_acked and not (status is not None and status.wedged)
    return status is not None and status.ready and status.generating


def in_doubt(member: Member, desired: Desired) -> bool:
    """Return whether the replica is not proven to hold its committed weights, or those of its launch."""
    return not member.sync_acked if member.sync_acked is not None else bool(_wrong_weights(member, desired))


def holds_committed(member: Member, desired: Desired) -> bool:
    """Return whether the replica is proven to hold its newest committed weights."""
    return desired.committed is not None and not in_doubt(member, desired)


def needed_weights(state: CoordinatorState) -> frozenset[str]:
    """Return the checkpoints that a known replica, or one that is new, may still have to load, and those of syncs."""
    replicas = syncing_replicas(state, Target()) & state.desired.keys()
    committed = [desired.committed for desired in (state.default_desired, *map(state.desired.__getitem__, replicas))]
    sources = [weights.source for weights in committed if weights is not None]
    asked = [sync.request.source for sync in state.syncs.values()]
    durable = map(durable_source, (*sources, *asked))
    deltas = frozenset(source.delta for source in asked if isinstance(source, Checkpoint) and source.delta)
    return frozenset(source.path for source in durable if source is not None) | deltas


def all_serve(state: CoordinatorState, count: int, since_us: int) -> bool:
    """Return whether `count` agents are live, and none that is live lacks anything."""
    live = [state.members[name] for name in live_agents(state)]
    return len(live) >= count and all(not _lacks(state, member, since_us) for member in live)


def not_ready_reasons(state: CoordinatorState, since_us: int) -> dict[str, str]:
    """Return what keeps each known agent from serving; only what it reported after `since_us` counts."""
    draining = state.draining
    staying = {name: member for name, member in state.members.items() if member.hello.identity.unit not in draining}
    lacking = {name: _lacks(state, member, since_us) for name, member in staying.items()}
    return {name: lacking[name] for name in sorted(lacking, key=agent_order) if lacking[name]}


def _lacks(state: CoordinatorState, member: Member, since_us: int) -> str:
    status = member.status
    if member.state != "live":
        return f"its agent is {member.state} (away for {format_duration(away_ms(member, since_us))} at the call)"
    if status is None or member.status_us <= since_us:
        return "no heartbeat since the call"
    if not is_primary(member):
        return ""
    if wrong := _wrong_weights(member, _desired(state, member)):
        return wrong
    if status.ready and status.generating:
        return ""
    stopped = stopped_replicas(state, [member.hello.identity.replica])
    return f"it does not serve: {status.condition()}" + "".join(f"; {stop.text}" for stop in stopped)


def _wrong_weights(member: Member, desired: Desired) -> str:
    status = member.status
    if status is None:
        return "no heartbeat yet"
    if status.quarantined:
        return f"quarantined since v{status.quarantined}"
    if status.torn:
        return "its weights are torn"
    allowed = {desired.version, desired.fallback.version} if desired.fallback is not None else {desired.version}
    if member.hello.identity.syncs and status.version not in allowed:
        committed = f"v{desired.version} is committed" if desired.version else _NOTHING_YET
        return f"it holds v{status.version}, and {committed}"
    return ""


def _desired(state: CoordinatorState, member: Member) -> Desired:
    return state.desired.get(member.hello.identity.unit, state.default_desired)


def away_ms(member: Member, now_us: int) -> int:
    """Return how long the agent has been away; 0 if it is live."""
    return max(0, now_us - member.away_us) // 1000 if member.state != "live" else 0
