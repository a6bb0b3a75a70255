"""Machines of agents in the states that tests begin with, and the events that tests feed them."""

from collections.abc import Sequence

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
    Load,
    LoadAdapter,
    MachineSettings,
    Observation,
    Observe,
    Pause,
    Perform,
    Restore,
    Resume,
    Returned,
    Sleep,
    SnapshotReceived,
    Started,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    Wake,
)
from schemas.identity import Identity, Operation
from workers.machine.decide import decide
from workers.machine.state import AgentState, call_name

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
    """Return the state after the events, and all their effects."""
    effects: list[Effect] = []
    for event in events:
        state, decided = decide(state, event)
        effects.extend(decided)
    return state, effects


def performed(effects: Sequence[Effect]) -> list[Call]:
    """Return the calls among the effects."""
    return [effect.call for effect in effects if isinstance(effect, Perform)]


def called(effects: Sequence[Effect]) -> list[str]:
    """Return the names of the calls among the effects."""
    return [call_name(call) for call in performed(effects)]


def observed(seen: Observation = PRESENT) -> EngineObserved:
    """Return the event that an engine was observed."""
    return EngineObserved(at_ms=0, observation=seen)


def agent(
    identity: Identity = PRIMARY,
    seen: Observation = PRESENT,
    desired: Desired | None = None,
    epoch: int = 1,
    seq: int = 0,
) -> AgentState:
    """Return an agent that has observed its engine and has a snapshot of the desired state as of `seq`."""
    state, _ = fold(
        AgentState(),
        Started(at_ms=0, identity=identity, incarnation="a", settings=MachineSettings(max_buffered=4)),
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
    """Return a command as it is received. `origin` is the epoch of the record; None for that of the sender."""
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
    """Let every call succeed. Returns the state, the calls, and what the engine is then."""
    calls: list[Call] = []
    todo = [effect for effect in effects if isinstance(effect, Perform)]
    while todo:
        perform = todo.pop(0)
        calls.append(perform.call)
        seen = after(seen, perform.call)
        returned = EngineReturned(at_ms=1, call_id=perform.call_id, result=Returned(), observation=seen)
        state, more = decide(state, returned)
        effects.extend(more)
        todo.extend(effect for effect in more if isinstance(effect, Perform))
    return state, calls, seen


def after(seen: Observation, call: Call) -> Observation:
    """Return what the engine is after a call that it carried out."""
    asleep = seen.asleep or frozenset()
    match call:
        case Pause() | Resume():
            return replace(seen, generating=isinstance(call, Resume))
        case Sleep():
            return replace(seen, asleep=asleep | call.tags)
        case Wake():
            return replace(seen, asleep=asleep - call.tags)
        case Load():
            return replace(seen, version=call.version)
        case Restore():
            return replace(seen, version=0)
        case StartProfile() | StopProfile():
            return replace(seen, profiling=isinstance(call, StartProfile))
        case LoadAdapter() if seen.adapters is not None:
            return replace(seen, adapters={**seen.adapters, call.adapter.model: call.adapter.path})
        case UnloadAdapter() if seen.adapters is not None:
            others = {model: path for model, path in seen.adapters.items() if model != call.model}
            return replace(seen, adapters=others)
        case _:
            return seen


def fault(state: AgentState, text: str = "no", seen: Observation | None = None) -> tuple[AgentState, list[Effect]]:
    """Fail the call in flight."""
    assert state.activity is not None
    failed = EngineReturned(
        at_ms=1, call_id=state.activity.call_id, result=Fault("engine_error", text), observation=seen
    )
    return fold(state, failed)


def looked(state: AgentState, effects: list[Effect], seen: Observation) -> tuple[AgentState, list[Effect]]:
    """Let an agent look at its engine, as it does before it acts without its bus. Returns what it does then."""
    assert state.activity is not None and effects[-1] == Perform(call_id=state.activity.call_id, call=Observe())
    done = EngineReturned(at_ms=1, call_id=state.activity.call_id, result=Returned(), observation=seen)
    return fold(state, done)


def answers(effects: list[Effect]) -> list[Answer]:
    """Return the answers among the effects."""
    return [effect for effect in effects if isinstance(effect, Answer)]


def manifest(version: int, content: str | None = None) -> Manifest:
    """Return the manifest of a version's checkpoint."""
    return Manifest(tensors=1, nbytes=8, layout=f"layout {version}", content=content)


def sync(
    phase: str, version: int = 1, quarantine: frozenset[int] = frozenset(), content: str | None = None
) -> WeightSync:
    """Return one phase of a sync, as the coordinator issues it."""
    if phase in ("prepare", "commit"):
        return WeightSync(
            phase="prepare" if phase == "prepare" else "commit",
            version=version,
            source=Checkpoint(f"v{version}"),
            manifest=manifest(version, content),
            quarantine=quarantine,
        )
    return WeightSync(phase="load" if phase == "load" else "abort", version=version, quarantine=quarantine)
