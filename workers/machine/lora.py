"""LoRA adapters: which versions an engine should hold, and the calls that bring it there. Nothing here pauses it.

A version has a name and a path of its own in an engine: to hold it is to list that name, from that path. One that is
wanted and not held is checked and loaded; one that is held and no longer wanted is unloaded once no request runs on it.
That is the same after a sync, a late join, a relaunch and an eviction.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from schemas.commands import AdapterVersion, split_model
from schemas.desired import Desired
from schemas.events import Call, CheckAdapter, LoadAdapter, Sleep, UnloadAdapter
from schemas.identity import Operation
from workers.machine.state import AgentState, EngineState, Unload

UNLOAD_AGAIN_MS: Final = 5_000
"""Time after which an engine that did not unload a version, because requests ran on it, is asked again."""
PLACE_AGAIN_MS: Final = 500
"""The same while a sync waits for the place of that version."""
NO_PAUSE = CheckAdapter | LoadAdapter | UnloadAdapter
"""Calls during which a replica serves on."""

Unloads = Mapping[str, Unload]
"""When to unload each version that is left."""


def is_held(engine: EngineState, adapter: AdapterVersion) -> bool:
    """Return whether the engine holds this version, as far as is known."""
    return engine.adapters.get(adapter.model) in (adapter.path, "") and adapter.model not in engine.stale_adapters


def can_load(engine: EngineState) -> bool:
    """Return whether adapters can be loaded now: an engine whose memory is released has no place for them."""
    memory = engine.asleep or engine.unknown or engine.asleep_by_trainer
    return engine.tokenizer == "present" and Operation.ADAPTERS in engine.operations and not memory


def has_place(engine: EngineState, adapter: AdapterVersion | None = None) -> bool:
    """Return whether the engine can hold this version, or one more, beside those that it lists."""
    others = engine.adapters.keys() - {adapter.model} if adapter is not None else engine.adapters
    return engine.adapter_places is None or len(others) < engine.adapter_places


def has_place_again(before: EngineState, engine: EngineState) -> bool:
    """Return whether the engine can hold one more version, and could not before."""
    return engine.adapter_places is not None and has_place(engine) and not has_place(before)


def missing(desired: Desired, engine: EngineState) -> tuple[AdapterVersion, ...]:
    """Return the committed versions that the engine should hold and does not."""
    if not desired.adapters:  # the usual case
        return ()
    versions = (version for _, adapter in sorted(desired.adapters.items()) for version in adapter.versions)
    return tuple(version for version in versions if not is_held(engine, version))


def still_read(state: AgentState) -> tuple[str, ...]:
    """Return unwanted versions whose files may still be read: those left, and what is loaded."""
    leftover, activity = left(_pursued(state), state.engine), state.activity
    if activity is None or not isinstance(activity.calls[0], CheckAdapter | LoadAdapter):
        return leftover
    return tuple(sorted({*leftover, activity.calls[0].adapter.model}))


def lacked(state: AgentState) -> tuple[str, ...]:
    """Return those that the engine does not hold, of the versions that are committed or being loaded, by name."""
    desired = _pursued(state)
    if not desired.adapters:
        return ()
    engine, calls = state.engine, state.activity.calls if state.activity is not None else ()
    discarding = any(isinstance(call, Sleep) and call.discard for call in calls)
    wanted = _wanted(desired)
    return tuple(sorted(version.model for version in wanted if discarding or not is_held(engine, version)))


def _pursued(state: AgentState) -> Desired:
    """What was desired at the agent's position: until a snapshot comes, that of its last incarnation."""
    return state.desired if state.joined or state.remembered is None else state.remembered.desired


def left(desired: Desired, engine: EngineState) -> tuple[str, ...]:
    """Return versions that the engine holds and need not. Names that no adapter of the run can have are not ours."""
    if not engine.adapters or not desired.adapters:
        return ()
    wanted = {version.model for version in _wanted(desired)}
    unwanted = engine.adapters.keys() - wanted
    return tuple(sorted(model for model in unwanted if split_model(model)[0] in desired.adapters))


def plan_adapters(desired: Desired, engine: EngineState, given_up: frozenset[str]) -> tuple[Call, ...]:
    """Return the calls after which an engine that is otherwise as desired holds one more version that it lacks."""
    if not desired.adapters or not can_load(engine):
        return ()
    lacking = (version for version in missing(desired, engine) if version.model not in given_up)
    first = next(lacking, None)
    return plan_load(first, engine) if first is not None else ()


def plan_load(adapter: AdapterVersion, engine: EngineState) -> tuple[Call, ...]:
    """Return the calls after which the engine holds this version; none if it does already."""
    if is_held(engine, adapter):
        return ()
    check = () if engine.checked_adapter == adapter else (CheckAdapter(adapter),)
    lost = adapter.model in engine.stale_adapters  # nothing worth waiting for runs on what was discarded
    other = (UnloadAdapter(adapter.model, waited=lost),) if adapter.model in engine.adapters else ()
    return (*check, *other, LoadAdapter(adapter))


def with_unloads(unloads: Unloads, leftover: tuple[str, ...], now_ms: int, grace_ms: int) -> Unloads:
    """Return when to unload each version that is left: after a grace where the engine can't tell who runs on it."""
    return {model: unloads.get(model) or Unload(now_ms, now_ms + grace_ms) for model in leftover}


def frozen(unloads: Unloads, now_ms: int, grace_ms: int) -> Unloads:
    """Return the same for an engine that is paused: the requests that it froze have all of their time yet."""
    return {
        model: Unload(max(unload.ask_ms, now_ms + UNLOAD_AGAIN_MS), now_ms + UNLOAD_AGAIN_MS + grace_ms)
        for model, unload in unloads.items()
    }


def postponed(unloads: Unloads, models: Iterable[str], now_ms: int) -> Unloads:
    """Return the same, with these versions not due for a while."""
    later = {model: replace(unloads[model], ask_ms=now_ms + UNLOAD_AGAIN_MS) for model in models if model in unloads}
    return {**unloads, **later}


def hurried(unloads: Unloads, now_ms: int) -> Unloads:
    """Return the same, each due soon, since a sync waits for a place."""
    soon_ms = now_ms + PLACE_AGAIN_MS
    return {model: replace(unload, ask_ms=min(unload.ask_ms, soon_ms)) for model, unload in unloads.items()}


def due(unloads: Unloads, now_ms: int) -> tuple[UnloadAdapter, ...]:
    """Return the calls for the versions that it is time to unload."""
    return tuple(
        UnloadAdapter(model, waited=now_ms >= unload.until_ms)
        for model, unload in unloads.items()
        if now_ms >= unload.ask_ms
    )


def after_adapter_call(engine: EngineState, call: CheckAdapter | LoadAdapter | UnloadAdapter) -> EngineState:
    """Return the engine after a call that was made."""
    if isinstance(call, CheckAdapter):
        return replace(engine, checked_adapter=call.adapter)
    model = call.adapter.model if isinstance(call, LoadAdapter) else call.model
    adapters = {other: path for other, path in engine.adapters.items() if other != model}
    if isinstance(call, LoadAdapter):
        adapters[model] = call.adapter.path
    return replace(engine, adapters=adapters, stale_adapters=engine.stale_adapters - {model})


def with_listed(engine: EngineState, listed: Mapping[str, str] | None) -> EngineState:
    """Return the engine with the adapters that it lists; as before if it lists none."""
    if listed is None or (listed == engine.adapters and not engine.stale_adapters):
        return engine
    adapters = {model: path or engine.adapters.get(model, "") for model, path in listed.items()}
    return replace(engine, adapters=adapters, stale_adapters=engine.stale_adapters.intersection(adapters))


def in_doubt(engine: EngineState, call: LoadAdapter | UnloadAdapter) -> EngineState:
    """Return an engine that can't list its adapters, after a load or unload that was cut off: it may have the version,
    so it is unloaded before it is loaded again.
    """
    model = call.adapter.model if isinstance(call, LoadAdapter) else call.model
    adapters = {**engine.adapters, model: engine.adapters.get(model, "")}
    return replace(engine, adapters=adapters, stale_adapters=engine.stale_adapters | {model})


def not_shown(call: LoadAdapter | UnloadAdapter, listed: Mapping[str, str]) -> str | None:
    """Return what an engine that reported success for a call shows instead; None if it shows the effect of the call."""
    if isinstance(call, UnloadAdapter):
        return f"it still lists {call.model}" if call.model in listed else None
    found = listed.get(call.adapter.model)
    if found is None:
        return f"it does not list {call.adapter.model}"
    return f"it lists {call.adapter.model} from {found}" if found not in (call.adapter.path, "") else None


def _wanted(desired: Desired) -> Iterator[AdapterVersion]:
    for adapter in desired.adapters.values():
        yield from adapter.versions
        if adapter.loading is not None:
            yield adapter.loading
