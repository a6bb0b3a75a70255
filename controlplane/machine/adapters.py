"""LoRA adapters of the run: which versions there are, which replicas are proven to hold them, which files may go. Pure.

A version stands for the same bytes for ever, and no two versions have one path: engines may read the files again.
"""

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from controlplane.machine.coordinator_state import CoordinatorState, KnownAdapter, Member, Sync, UsedAdapter
from controlplane.machine.replicas import is_primary, proven_replicas
from schemas.commands import AdapterDrop, AdapterSync, AdapterVersion, Checkpoint, Command, EngineCommand
from schemas.reports import AdapterStatus
from schemas.wire import encode

USED_MAX: Final = 64
"""Versions of each adapter that are remembered, beside those whose files are still needed."""
NAMES_MAX: Final = 256
"""Adapters of one run, those that were dropped included."""
LIVE_BYTES_MAX: Final = 160 * 1024
"""Encoded versions that replicas hold, all together: a replica that joins is sent them in one message. About 500."""
_NONE: Final = KnownAdapter()


def adapter_of(sync: Sync) -> AdapterVersion | None:
    """Return the version of an adapter that a sync brings; None if it brings base weights."""
    request = sync.request
    asked, source = request.adapter, request.source
    if asked is None or not isinstance(source, Checkpoint):
        return None
    return AdapterVersion(
        name=asked.name,
        version=sync.version,
        path=source.path,
        manifest=request.manifest,
        config=asked.config,
        base=asked.base,
    )


def keep_of(sync: Sync) -> int:
    """Return how many versions of its adapter replicas hold after the commit of a sync."""
    return sync.request.adapter.keep if sync.request.adapter is not None else 1


def next_adapter_version(state: CoordinatorState, name: str, above: int = 0) -> int:
    """Return the next version of an adapter, larger than `above`."""
    return max(state.adapters.get(name, _NONE).requested, above) + 1


def refused_adapter(state: CoordinatorState, adapter: AdapterVersion) -> str:
    """Return why a sync can't bring this version; empty if it can."""
    known = state.adapters.get(adapter.name, _NONE)
    if any(sync.key and sync.request.source == Checkpoint(adapter.path) for sync in state.syncs.values()):
        return f"a sync of {adapter.path} as another adapter is in progress. Nothing was published"
    if adapter.name not in state.adapters and len(state.adapters) >= NAMES_MAX:
        return f"a run has at most {NAMES_MAX:,} adapters. Nothing was published"
    for name, other in state.adapters.items():
        for used in other.used:
            same = used.adapter == adapter
            if used.adapter.path == adapter.path and not same:
                return (
                    f"engines may have loaded {adapter.path} as {name} v{used.adapter.version}, and read files again. "
                    "Write each version to a directory of its own. Nothing was published"
                )
            if name == adapter.name and used.adapter.version == adapter.version and not same:
                return (
                    f"{name} v{adapter.version} was used before, for {used.adapter.path}. Take a newer one, or None to "
                    "let the run count. Nothing was published"
                )
    if adapter.version < (newest := known.newest_committed):
        return f"{adapter.name} v{newest} is committed, which is newer than v{adapter.version}. Nothing was published"
    live = [used.adapter for other in state.adapters.values() for used in other.used if not used.dropped_seq]
    size = sum(len(encode(version)) for version in {version.model: version for version in (*live, adapter)}.values())
    if size > LIVE_BYTES_MAX:
        return (
            f"the {len(live)} versions that replicas hold and this one take {size:,} bytes, of at most "
            f"{LIVE_BYTES_MAX:,}. Keep fewer versions, or drop an adapter. Nothing was published"
        )
    committed = state.default_desired.version
    if adapter.base is not None and (adapter.base != committed or state.sync is not None):
        syncing = f", and a sync to v{state.sync.version} is in progress" if state.sync is not None else ""
        return f"it belongs to base v{adapter.base}; the fleet serves v{committed}{syncing}. Nothing was published"
    return ""


def adapters_of_other_base(state: CoordinatorState, version: int) -> str:
    """Return why base weights can't be replaced: adapters belong to them. Empty if none does."""
    wanted = [used.adapter for known in state.adapters.values() for used in known.used if not used.dropped_seq]
    wanted += [adapter for sync in state.syncs.values() if (adapter := adapter_of(sync)) is not None]
    bound = [adapter for adapter in wanted if adapter.base not in (None, version)]
    if not bound:
        return ""
    names = ", ".join(dict.fromkeys(f"{adapter.name} (base v{adapter.base})" for adapter in bound[:5]))
    return f"adapters belong to other base weights: {names}. Drop them first. Nothing was published"


def refused_drop(state: CoordinatorState, command: Command) -> str:
    """Return why an adapter can't be dropped now; empty if it can, or if the command drops none."""
    if not isinstance(command, AdapterDrop):
        return ""
    if (sync := state.syncs.get(command.name)) is not None:
        return f"a sync of {command.name} to v{sync.version} is in its {sync.phase} phase. Wait for its report"
    if command.name in state.adapters:
        return ""
    return f"this run has no adapter {command.name!r}; it has: {', '.join(sorted(state.adapters)[:20]) or 'none'}"


# --- what a sync or a drop changes ------------------------------------------------------------------------------------


def with_requested(state: CoordinatorState, adapter: AdapterVersion) -> CoordinatorState:
    """Return the run after a sync of this version was begun."""
    known = state.adapters.get(adapter.name, _NONE)
    return _with(state, adapter.name, replace(known, requested=max(known.requested, adapter.version)))


def with_loading(state: CoordinatorState, adapter: AdapterVersion) -> CoordinatorState:
    """Return the run in which engines may have loaded this version from the next command on."""
    known = state.adapters.get(adapter.name, _NONE)
    others = tuple(used for used in known.used if used.adapter != adapter)
    earlier = next((used for used in known.used if used.adapter == adapter), UsedAdapter(adapter))
    committed = earlier.committed and not earlier.dropped_seq  # one that was dropped may come back
    loading = UsedAdapter(adapter, loaded_seq=state.seq + 1, committed=committed)
    return _with(state, adapter.name, replace(known, used=(*others, loading)))


def with_committed(state: CoordinatorState, adapter: AdapterVersion) -> CoordinatorState:
    """Return the run in which requests may name this version from the next command on, which commits it.

    Replicas that loaded it hold it, whatever they answer to the commit, and may unload an older one at once.
    """
    known = state.adapters.get(adapter.name, _NONE)
    used = (replace(entry, committed=True) if entry.adapter == adapter else entry for entry in known.used)
    newest = max(known.newest_committed, adapter.version)
    return _with(state, adapter.name, replace(known, used=tuple(used), newest_committed=newest))


def with_wanted(state: CoordinatorState, before: CoordinatorState, command: Command) -> CoordinatorState:
    """Return the run after the newest command: versions of an adapter that no replica should hold any more are dropped,
    and what was discarded proves nothing any more. Until its wake an engine may discard what it loaded since the sleep.
    """
    discards = any(desired.discard for desired in before.desired.values())
    match command:
        case EngineCommand(operation="sleep" | "wake") if command.discard or discards:
            members = {name: replace(member, adapters_acked={}) for name, member in state.members.items()}
            return replace(state, discarded_seq=state.seq, members=members)
        case AdapterSync(phase="commit" | "abort"):
            return _without_unwanted(state, command.adapter.name)
        case AdapterDrop():
            return _without_unwanted(state, command.name)
        case _:
            return state


def _without_unwanted(state: CoordinatorState, name: str) -> CoordinatorState:
    known = state.adapters.get(name, _NONE)
    adapters = [desired.adapters.get(name) for desired in (*state.desired.values(), state.default_desired)]
    wanted = {version for adapter in adapters if adapter for version in (*adapter.versions, adapter.loading)}
    used = [
        replace(entry, dropped_seq=0 if entry.adapter in wanted else entry.dropped_seq or state.seq)
        for entry in known.used
    ]
    return _with(state, name, replace(known, used=_pruned(state, used)))


def in_a_new_life(adapters: Mapping[str, KnownAdapter], seq: int) -> Mapping[str, KnownAdapter]:
    """Return the adapters when a life of the bus begins: syncs that its trainer left open have ended."""
    return {
        name: replace(
            known,
            used=tuple(
                entry if entry.committed or entry.dropped_seq else replace(entry, dropped_seq=seq)
                for entry in known.used
            ),
        )
        for name, known in adapters.items()
    }


def _with(state: CoordinatorState, name: str, known: KnownAdapter) -> CoordinatorState:
    return replace(state, adapters={**state.adapters, name: known})


def _pruned(state: CoordinatorState, used: list[UsedAdapter]) -> tuple[UsedAdapter, ...]:
    """The newest of them, and older ones that are still needed."""
    older, newest = used[:-USED_MAX], used[-USED_MAX:]
    return (*(entry for entry in older if _may_be_read(state, entry)), *newest)


# --- what is proven ---------------------------------------------------------------------------------------------------


def adapter_statuses(state: CoordinatorState) -> dict[str, AdapterStatus]:
    """Return the adapters that are served, by name: the newest committed version of each, and where it is held."""
    served = {name: live[0] for name in state.adapters if (live := live_versions(state, name))}
    if not served:
        return {}
    serving = proven_replicas(state).serving
    return {
        name: AdapterStatus(
            name=name,
            version=entry.adapter.version,
            model=entry.adapter.model,
            path=entry.adapter.path,
            replicas=tuple(replica for replica in serving if holds_version(state, replica, entry)),
            oldest=oldest_adapter(state, name),
        )
        for name, entry in sorted(served.items())
    }


def live_versions(state: CoordinatorState, name: str) -> list[UsedAdapter]:
    """Return the versions of an adapter that requests may name, the newest first."""
    live = [entry for entry in state.adapters.get(name, _NONE).used if entry.committed and not entry.dropped_seq]
    return sorted(live, key=lambda entry: entry.adapter.version, reverse=True)


def holds_version(state: CoordinatorState, replica: int, entry: UsedAdapter) -> bool:
    """Return whether a replica is proven to hold a version: by its answer to the sync, or its newest status."""
    adapter, member = entry.adapter, state.members.get(f"{replica}.0")
    wanted = state.desired.get(replica, state.default_desired).adapters.get(adapter.name)
    if member is None or wanted is None or adapter not in wanted.versions:
        return False
    if adapter.model in member.adapters_acked:
        return member.adapters_acked[adapter.model]
    proves = _decided(member) >= max(entry.loaded_seq, state.discarded_seq)
    return member.status is not None and proves and adapter.model not in member.status.adapters_missing


def needed_paths(state: CoordinatorState) -> frozenset[str]:
    """Return the directories of adapters whose files a replica may still read."""
    used = (entry for known in state.adapters.values() for entry in known.used)
    return frozenset(entry.adapter.path for entry in used if _may_be_read(state, entry))


def oldest_adapter(state: CoordinatorState, name: str) -> int:
    """Return the oldest version of an adapter whose files a replica may still read; 0 if none is needed.

    A replica that is away may still have versions that were dropped meanwhile.
    """
    used = state.adapters.get(name, _NONE).used
    return min((entry.adapter.version for entry in used if _may_be_read(state, entry)), default=0)


def _decided(member: Member) -> int:
    """The last command that an agent has decided, by its newest status: those in its queue come after it."""
    return member.seq - member.status.queued if member.status is not None else 0


def _may_be_read(state: CoordinatorState, entry: UsedAdapter) -> bool:
    """Also by replicas that leave, until they are retired."""
    if not entry.dropped_seq:
        return True
    primaries = (member for member in state.members.values() if is_primary(member) and member.joined)
    return any(member.hello.identity.syncs and not _has_unloaded(member, entry) for member in primaries)


def _has_unloaded(member: Member, entry: UsedAdapter) -> bool:
    status = member.status
    if status is None or status.tokenizer == "unknown":
        return False
    return _decided(member) >= entry.dropped_seq and entry.adapter.model not in status.adapters_left
