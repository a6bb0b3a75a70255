"""Weights: what identifies them, which ones an engine should hold, and whether it does.

A version alone identifies no weights, since an aborted version may be tried again from another source. What does is a
`Committed`: version, source and manifest.
"""

from msgspec.structs import replace

from schemas.commands import Checkpoint, Manifest, Pushed, Source, durable_source, without_delta
from schemas.desired import Committed, Desired, Syncing
from schemas.events import AwaitPush, CheckSource, Load
from schemas.identity import COLOCATED, Identity
from workers.machine.state import EngineState


def wanted_weights(desired: Desired, identity: Identity) -> Committed | Syncing | None:
    """Return the weights that the engine should hold now, or None if it should keep what it has."""
    if identity.mode is COLOCATED or desired.draining:
        return None
    if desired.sync is not None:  # also for a replica in quarantine: a sync is its way back
        return desired.sync if desired.sync.phase == "load" else None
    return desired.committed or desired.fallback if desired.quarantined == 0 else None


def as_committed(weights: Committed | Syncing | CheckSource | Load | AwaitPush) -> Committed:
    """Return what identifies weights: version, source and manifest."""
    if isinstance(weights, Committed):
        return weights
    if isinstance(weights, Load) and weights.label and isinstance(weights.source, Checkpoint):
        return Committed(weights.version, Pushed(weights.label, weights.source.path), weights.manifest)
    return Committed(weights.version, without_delta(weights.source), weights.manifest)


def source_to_take(sync: Committed | Syncing, desired: Desired, engine: EngineState) -> Source:
    """Return where this replica gets the weights of a sync: a delta fits only the committed weights that it was made
    from, which this launch of the engine must be known to hold since a load.
    """
    source, held, loaded = sync.source, desired.committed, engine.loaded
    if not isinstance(source, Checkpoint) or not source.delta:
        return source
    fits = held is not None and loaded is not None and held.version == loaded.version == source.base
    fits = fits and engine.instance is not None and not desired.quarantined and holds_committed(desired, engine)
    return source if fits else without_delta(source)


def label_of(weights: Committed) -> str | None:
    """Return the label that the trainer gave to weights that it pushes; None for others."""
    return weights.source.label if isinstance(weights.source, Pushed) else None


def durable(weights: Committed) -> Committed | None:
    """Return the same weights with a source that can be read at any time; None if there is none."""
    source = durable_source(weights.source)
    return Committed(weights.version, source, weights.manifest) if source is not None else None


def holds_weights(engine: EngineState, weights: Committed | Syncing) -> bool:
    """Whether the engine holds these weights, as far as is known.

    The number of a label proves a version only where agents set the labels. A trainer that pushes has its own.
    """
    if not _is_known(engine) or engine.version != weights.version:
        return False
    loaded, wanted = engine.loaded, as_committed(weights)
    if loaded is None or loaded.version != engine.version:
        return label_of(wanted) is None
    return loaded in (wanted, durable(wanted))


def holds_committed(desired: Desired, engine: EngineState) -> bool:
    """Whether the engine holds the committed weights; if nothing was committed, those of its launch or the fallback."""
    if desired.committed is not None:
        return holds_weights(engine, desired.committed)
    launched = engine.version == 0 and _is_known(engine)
    return launched or (desired.fallback is not None and holds_weights(engine, desired.fallback))


def _is_known(engine: EngineState) -> bool:
    """Whether the engine holds the weights of `version`."""
    return not (engine.torn or engine.maybe_pushed) and engine.label == engine.version_label


def distrusted(engine: EngineState, desired: Desired) -> EngineState:
    """Return `engine` without its trust in weights that were committed without this replica, if it holds that version.

    Their bytes are not those of the others, say. Once it may serve again, they are loaded again.
    """
    left_out = 0 < desired.quarantined == desired.version == engine.version
    return replace(engine, torn=True, version_label=engine.label) if left_out and not engine.torn else engine


def expect_push(engine: EngineState, before: Desired, desired: Desired) -> EngineState:
    """Return `engine`, whose weights may change while a sync is in progress in which the trainer pushes them, and may
    have changed by its end: under a label that it had before, which only a digest shows.
    """
    sync = before.sync if desired.sync is None and engine.digest is not None else desired.sync
    pushing = sync is not None and isinstance(sync.source, Pushed) and engine.label is not None
    return replace(engine, maybe_pushed=True) if pushing and not engine.maybe_pushed else engine


def adopt_pushed(engine: EngineState, desired: Desired, identity: Identity) -> EngineState:
    """Return `engine` with the version of the wanted weights if their label shows that the trainer pushed them."""
    if engine.label is None or (engine.torn and not engine.label_changed):
        return engine
    if engine.maybe_pushed and desired.sync is None:
        return engine
    wanted = wanted_weights(desired, identity)
    if wanted is None or label_of(pushed := as_committed(wanted)) != engine.label or engine.loaded == pushed:
        return engine
    if differs(engine.digest, pushed.manifest) or (desired.sync is None and _is_used_again(engine, pushed)):
        return engine
    launched = engine.launch_label if engine.launch_label != engine.label else None
    known = replace(engine, version=pushed.version, version_label=engine.label, launch_label=launched, loaded=pushed)
    return replace(known, torn=False, maybe_pushed=False)


def _is_used_again(engine: EngineState, pushed: Committed) -> bool:
    """Whether the engine has the label of these weights from others, which the trainer gave it before. The same weights
    may have been synced again under another version, but that can't be known here.
    """
    held = engine.loaded
    if held is None or engine.label_changed or (label_of(held) or str(held.version)) != engine.label:
        return False
    contents = [weights.manifest.content for weights in (held, pushed) if weights.manifest is not None]
    return len(contents) < 2 or contents[0] is None or contents[0] != contents[1]


def differs(digest: str | None, manifest: Manifest | None) -> bool:
    """Whether weights are not those that the manifest announced, where both digests are of the weights' bytes."""
    content = manifest.content if manifest is not None else None
    return content is not None and digest is not None and digest != content and ":" not in digest
