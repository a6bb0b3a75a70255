"""Agents' machines in the states that tests begin with, and the events that tests feed them."""

from msgspec.structs import replace

from schemas.commands import Checkpoint, Command, Manifest, ProfileCommand, Target, UnknownCommand, WeightSync
from schemas.desired import Desired
from schemas.events import (
    Answer,
    Call,
    CommandReceived,
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    Fault,
    Observation,
    Perform,
    Returned,
    Settings,
    SnapshotReceived,
    Started,
)
from schemas.identity import Identity, Operation
from workers.machine.decide import AgentState, decide

PRIMARY = Identity(replica=0, node_rank=0, nnodes=2)
SECOND = Identity(replica=0, node_rank=1, nnodes=2)
PRESENT = Observation(
    engine="tiny 1",
    instance="one",
    tokenizer="present",
    operations=frozenset(Operation),
    generating=True,
    asleep=frozenset(),
    profiling=False,
    version=0,
)
START = ProfileCommand(action="start", step=3)
STOP = ProfileCommand(action="stop", step=3)


def fold(state: AgentState, *events: Event) -> tuple[AgentState, list[Effect]]:
    """The state after the events, and all their effects."""
    effects: list[Effect] = []
    for event in events:
        state, decided = decide(state, event)
        effects.extend(decided)
    return state, effects


def agent(
    identity: Identity = PRIMARY,
    seen: Observation = PRESENT,
    desired: Desired | None = None,
    epoch: int = 1,
    seq: int = 0,
) -> AgentState:
    """An agent that has read its engine and was told what is desired as of `seq`."""
    state, _ = fold(
        AgentState(),
        Started(at_ms=0, identity=identity, incarnation="a", settings=Settings(max_buffered=4)),
        EngineObserved(at_ms=0, observation=seen),
        SnapshotReceived(at_ms=0, epoch=epoch, seq=seq, desired=desired or Desired()),
    )
    return state


def command(
    body: Command | UnknownCommand,
    seq: int = 1,
    *,
    at_ms: int = 0,
    ttl_ms: int = 1000,
    epoch: int = 1,
    origin: int | None = None,
    target: Target | None = None,
) -> CommandReceived:
    """A command as it is received. origin: epoch of the record; None for that of the sender."""
    return CommandReceived(
        at_ms=at_ms,
        epoch=epoch,
        origin=origin or epoch,
        seq=seq,
        ttl_ms=ttl_ms,
        command=body,
        target=target or Target(),
    )


def carry_out(
    state: AgentState, effects: list[Effect], seen: Observation = PRESENT
) -> tuple[AgentState, list[Call], Observation]:
    """Answer every call with yes, as an engine that does what it is told; returns the calls and what it is then."""
    calls: list[Call] = []
    todo = [one for one in effects if isinstance(one, Perform)]
    while todo:
        perform = todo.pop(0)
        calls.append(perform.call)
        seen = after(seen, perform.call)
        returned = EngineReturned(at_ms=1, call_id=perform.call_id, result=Returned(), observation=seen)
        state, more = decide(state, returned)
        effects.extend(more)
        todo.extend(one for one in more if isinstance(one, Perform))
    return state, calls, seen


def after(seen: Observation, call: Call) -> Observation:
    """What the engine is after a call that it carried out."""
    match str(call.__struct_config__.tag):
        case "pause":
            return replace(seen, generating=False)
        case "resume":
            return replace(seen, generating=True)
        case "sleep":
            return replace(seen, asleep=(seen.asleep or frozenset()) | call.tags)  # type: ignore[union-attr]
        case "wake":
            return replace(seen, asleep=(seen.asleep or frozenset()) - call.tags)  # type: ignore[union-attr]
        case "load":
            return replace(seen, version=call.version)  # type: ignore[union-attr]
        case "start_profile":
            return replace(seen, profiling=True)
        case "stop_profile":
            return replace(seen, profiling=False)
        case _:
            return seen


def fault(state: AgentState, text: str = "no", seen: Observation | None = None) -> tuple[AgentState, list[Effect]]:
    """The call under way fails."""
    assert state.activity is not None
    failed = EngineReturned(
        at_ms=1, call_id=state.activity.call_id, result=Fault("engine_error", text), observation=seen
    )
    return fold(state, failed)


def answers(effects: list[Effect]) -> list[Answer]:
    """The outcomes among the effects."""
    return [one for one in effects if isinstance(one, Answer)]


def manifest(version: int, content: str | None = None) -> Manifest:
    """Of a version's checkpoint."""
    return Manifest(tensors=1, nbytes=8, layout=f"layout {version}", content=content)


def sync(
    phase: str, version: int = 1, quarantine: frozenset[int] = frozenset(), content: str | None = None
) -> WeightSync:
    """One phase of a sync, as the coordinator issues it."""
    if phase in ("prepare", "commit"):
        return WeightSync(
            phase="prepare" if phase == "prepare" else "commit",
            version=version,
            source=Checkpoint(f"v{version}"),
            manifest=manifest(version, content),
            quarantine=quarantine,
        )
    return WeightSync(phase="load" if phase == "load" else "abort", version=version, quarantine=quarantine)
