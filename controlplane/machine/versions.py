"""Which version a weight sync may have, and what engines may have taken under it before. Pure.

A version stands for the same weights for ever. An agent that lost its journal knows what an engine without labels holds
by that number alone. So a version that entered a load phase, in which engines may have taken it, is never used for
others, and neither is the label of a push: not for a push of other bytes, nor as the number of a version that agents
load.
"""

from typing import Final

from msgspec.structs import replace

from controlplane.machine.coordinator_state import CoordinatorState, LoadedWeights, Sync
from controlplane.machine.replicas import syncing_replicas
from schemas.commands import Checkpoint, Pushed, Source, without_delta
from schemas.desired import Committed
from schemas.identity import NUMBER_MAX

VERSION_MAX: Final = NUMBER_MAX // 2
"""Largest version that may be asked for by its number. A run can still count on from it."""
LOADED_MAX: Final = 64
"""Weights that are remembered, those of the newest versions."""


def weights_of(sync: Sync) -> Committed:
    """Return the weights that a sync brings."""
    return Committed(sync.version, without_delta(sync.request.source), sync.request.manifest)


def with_loaded(loaded: tuple[LoadedWeights, ...], sync: Sync, *, committed: bool = False) -> tuple[LoadedWeights, ...]:
    """Return the weights that engines may have taken, with those of a sync that loads or commits them."""
    weights = weights_of(sync)
    known = next((known for known in loaded if known.weights == weights), LoadedWeights(weights))
    changed = replace(known, committed=known.committed or committed)
    others = (other for other in loaded if other is not known)
    return tuple(sorted((*others, changed), key=lambda known: known.weights.version))[-LOADED_MAX:]


def refused_number(sync: Sync) -> str:
    """Return why the version of a requested sync is too large a number, of weights or of an adapter; else empty."""
    largest = VERSION_MAX if sync.request.version is not None else NUMBER_MAX
    if sync.version <= largest:
        return ""
    return f"version {sync.version:,} is beyond the largest, {largest:,}. Nothing was published"


def refused_version(state: CoordinatorState, sync: Sync) -> str:
    """Return why the version of a requested sync can't be used; empty if it can."""
    version, loaded = sync.version, [known.weights for known in state.loaded]
    advice = "Take a newer one, or None to let the run count. Nothing was published"
    if reason := refused_number(sync) or _refused_label(state, weights_of(sync)):
        return reason
    known = next((weights for weights in loaded if weights.version == version), None)
    if known is None:
        forgotten = len(loaded) == LOADED_MAX and version < loaded[0].version
        behind = any(state.desired[replica].version < version for replica in _units(state, sync))
        if forgotten and behind:
            return f"version {version} may have been used before: it is older than the last {LOADED_MAX}. {advice}"
        return ""
    wanted = weights_of(sync)
    if known == wanted:
        return ""
    source = known.source
    differs = source.path if isinstance(source, Checkpoint) else f"another {type(source).__name__.lower()}"
    differs = differs if source != wanted.source else "another manifest"
    return f"version {version} was used before: engines may have loaded it from {differs}. {advice}"


def next_version(state: CoordinatorState, source: Source, above: int = 0) -> int:
    """Return the next version of the run, larger than `above`.

    Agents label what they load with its number, so it passes over labels of pushes.
    """
    version = max(state.newest_version, above) + 1
    taken = [known.weights.source.label for known in state.loaded if isinstance(known.weights.source, Pushed)]
    while not isinstance(source, Pushed) and str(version) in taken:
        version += 1
    return version


def _refused_label(state: CoordinatorState, weights: Committed) -> str:
    """Why engines that have the label of these weights could hold others; empty if nothing is known of that."""
    label = label_of(weights)
    for known in _pushed_as(state, label, weights.version):
        if isinstance(weights.source, Pushed) and _same_bytes(known, weights) is not False:
            continue  # the same weights may be synced again
        advice = "Take another " + ("label" if isinstance(weights.source, Pushed) else "version")
        return (
            f"engines may have the label {label!r} for other weights, which were pushed as version {known.version}. "
            f"{advice}. Nothing was published"
        )
    return ""


def doubted_label(state: CoordinatorState, weights: Committed) -> str:
    """Return what a commit of these weights leaves unproven, because their label was used before; empty if nothing."""
    if not isinstance(weights.source, Pushed):
        return ""
    used = _pushed_as(state, weights.source.label, weights.version)
    if all(_same_bytes(known, weights) for known in used):
        return ""
    return (
        f"label {weights.source.label!r} was pushed before, as version {used[-1].version}, and no digests tell whether "
        "the weights are the same: a replica that had this label already is not proven to have got them now"
    )


def label_of(weights: Committed) -> str:
    """Return the label that engines have with these weights: agents give those that they load the version's number."""
    return weights.source.label if isinstance(weights.source, Pushed) else str(weights.version)


def _pushed_as(state: CoordinatorState, label: str, version: int) -> list[Committed]:
    """What was pushed under this label as other versions."""
    loaded = (known.weights for known in state.loaded if known.weights.version != version)
    return [known for known in loaded if isinstance(known.source, Pushed) and label_of(known) == label]


def _same_bytes(one: Committed, other: Committed) -> bool | None:
    """Whether the digests of two sets of weights are the same; None if that is not known."""
    contents = [weights.manifest.content if weights.manifest else None for weights in (one, other)]
    return None if None in contents else contents[0] == contents[1]


def holding_replicas(state: CoordinatorState, sync: Sync) -> frozenset[int]:
    """Return replicas that have been told to serve just these weights already, and may."""
    weights = weights_of(sync)
    if not any(weights == known.weights for known in state.loaded):  # the usual case
        return frozenset()
    desired = state.desired
    return frozenset(
        unit for unit in _units(state, sync) if desired[unit].committed == weights and not desired[unit].quarantined
    )


def _units(state: CoordinatorState, sync: Sync) -> frozenset[int]:
    return syncing_replicas(state, sync.request.target) & state.desired.keys()
