"""Which weights made the tokens of an answer, and whether a replica was proven to hold them. Pure.

An engine says which label made which tokens. The state of the coordinator says which label stands for which weights of
the run, whether a sync committed them, and which replicas were ever proven to hold them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine.adapters import holds_version
from controlplane.machine.coordinator_state import CoordinatorState, LoadedWeights, UsedAdapter
from controlplane.machine.events import PROVEN, Proof, SamplesCounted
from controlplane.machine.replicas import holds_committed, is_primary
from controlplane.machine.versions import LOADED_MAX, label_of
from schemas.desired import Committed
from schemas.identity import LAUNCH_LABEL
from schemas.reports import SampleStatus


class LabelledTokens(NamedTuple):
    """Tokens of one sequence, from `begin` to before `end`, under one label of the engine, or one adapter's version."""

    label: str
    begin: int
    end: int


class TokenSpan(Struct, frozen=True):
    """Tokens of one sequence that one version of the weights made.

    Attributes:
        begin: The first of them, counted from the first token of the output.
        end: One past the last of them.
        label: As the engine said it.
        version: In this run; None for a label that the run does not know.
        staleness: The newest committed version of these base weights, or of this adapter, less `version`; None without.
        proof: "proven": the replica (where none was named, any) was proven to hold these weights. "launch": those of
            the launch, and none were committed since. "unproven": it was not proven to hold them. "aborted": no sync
            committed them. "unknown": the run knows no weights of this label, or has forgotten them.
    """

    begin: int
    end: int
    label: str
    version: int | None
    staleness: int | None
    proof: Proof


class Provenance(Struct, frozen=True):
    """Which weights made one sequence.

    Attributes:
        spans: In the order of the tokens, without gaps.
        adapter: The adapter that made it; empty if base weights alone did.
    """

    spans: tuple[TokenSpan, ...]
    adapter: str = ""

    @property
    def tokens(self) -> int:
        """How many tokens the sequence has."""
        return self.spans[-1].end if self.spans else 0

    @property
    def mixed(self) -> bool:
        """Whether more than one version made it, as in a request that was frozen during a sync."""
        return len({span.label for span in self.spans}) > 1

    @property
    def staleness(self) -> int | None:
        """Of its oldest token; None if a version is not known, or there is no token."""
        known = [span.staleness for span in self.spans]
        return None if None in known else max((value for value in known if value is not None), default=None)

    @property
    def proof(self) -> Proof:
        """The weakest proof of its tokens; "proven" if there is none."""
        order: Sequence[Proof] = ("unknown", "aborted", "unproven", "launch", "proven")
        return min((span.proof for span in self.spans), key=order.index, default="proven")


class Verdict(NamedTuple):
    """Whether a sequence may be trained on. True if it may.

    Attributes:
        reason: Why not; empty if it may.
    """

    reason: str

    def __bool__(self) -> bool:
        return not self.reason


def accepts(
    provenance: Provenance, *, max_staleness: int | None = None, mixed: bool = True, unproven: bool = False
) -> Verdict:
    """Return whether a sequence may be trained on, as `ControlPlane.accepts` does."""
    said = ", ".join(f"{span.begin}-{span.end} {span.label!r} ({span.proof})" for span in provenance.spans[:8])
    if provenance.proof == "aborted" or (not unproven and provenance.proof not in PROVEN):
        return Verdict(f"it has tokens of weights that were not proven: {said}")
    if not mixed and provenance.mixed:
        return Verdict(f"more than one version made it: {said}")
    staleness = provenance.staleness
    if max_staleness is not None and staleness is not None and staleness > max_staleness:
        return Verdict(f"it is {staleness} versions behind, of at most {max_staleness}: {said}")
    if max_staleness is not None and staleness is None and provenance.spans:
        return Verdict(f"its staleness is not known: {said}")
    return Verdict("")


def provenance(state: CoordinatorState, labelled: Iterable[LabelledTokens], replica: int | None) -> Provenance:
    """Return which weights made a sequence."""
    spans, names = list[TokenSpan](), set[str]()
    for label, begin, end in labelled:
        adapter, version, newest, proof = _known(state, label, replica)
        staleness = None if version is None else max(0, newest - version)
        spans.append(TokenSpan(begin, end, label, version, staleness, proof))
        names.add(adapter)
    return Provenance(tuple(spans), names.pop() if len(names) == 1 else "")


def _known(state: CoordinatorState, label: str, replica: int | None) -> tuple[str, int | None, int, Proof]:
    """The adapter that a label is of, its version, the newest committed one, and the proof."""
    for name, adapter in state.adapters.items():
        if label.startswith(name):
            used = next((used for used in adapter.used if used.adapter.model == label), None)
            if used is not None:
                open_ = name in state.syncs
                listed = replica is not None and holds_version(state, replica, used)  # from its load on, not its commit
                holders = (replica,) if replica is not None and listed else used.holders
                proof = _proof(committed=used.committed, holders=holders, open_=open_, replica=replica)
                return name, used.adapter.version, adapter.newest_committed, proof
    newest = max((known.weights.version for known in state.loaded if known.committed), default=0)
    if label == LAUNCH_LABEL:
        return "", 0, newest, "unproven" if newest else "launch"
    with_label = [known for known in state.loaded if label_of(known.weights) == label]
    if not with_label:
        return "", None, newest, "unknown"
    latest = max(with_label, key=lambda known: (known.committed, known.weights.version))
    version = latest.weights.version
    open_ = state.sync is not None and state.sync.version == version
    proof = _proof(committed=latest.committed, holders=latest.holders, open_=open_, replica=replica)
    return "", version, newest, proof


def _proof(*, committed: bool, holders: tuple[int, ...], open_: bool, replica: int | None) -> Proof:
    if not committed:
        return "unproven" if open_ else "aborted"
    held = bool(holders) if replica is None else _is_in(holders, replica)
    return "proven" if held else "unproven"


def mean_staleness(event: SamplesCounted) -> float | None:
    """Return by how many versions the tokens of a record were behind, on average; None if that is not known."""
    known = [(count.staleness, count.tokens) for count in event.counts if count.staleness is not None]
    tokens = sum(tokens for _, tokens in known)
    return sum(staleness * tokens for staleness, tokens in known) / tokens if tokens else None


def with_counted(samples: SampleStatus | None, event: SamplesCounted) -> SampleStatus:
    """Return what the trainer has judged in all."""
    before = samples or SampleStatus()
    accepted = sum(count.sequences for count in event.counts if count.accepted)
    refused = sum(count.sequences for count in event.counts if not count.accepted)
    return SampleStatus(before.accepted + accepted, before.refused + refused, mean_staleness(event))


# --- what replicas are proven to hold ---------------------------------------------------------------------------------


def with_holders(state: CoordinatorState, agents: Iterable[str]) -> CoordinatorState:
    """Return the run that remembers what the replicas of these agents are proven to hold now."""
    members = {
        member.hello.identity.replica: member
        for name in agents
        if is_primary(member := state.members[name]) and member.hello.identity.syncs
    }
    statuses = ((replica, member.status) for replica, member in members.items())
    shown = {replica: status.launch_label for replica, status in statuses if status and status.launch_label}
    before = {replica: state.launch_labels.get(replica, ()) for replica in shown}
    if new := {replica: (*before[replica], label) for replica, label in shown.items() if label not in before[replica]}:
        loaded = tuple(_without_holders(known, shown) for known in state.loaded)
        labels = {replica: told[-LOADED_MAX:] for replica, told in new.items()}
        state = replace(state, loaded=loaded, launch_labels={**state.launch_labels, **labels})
    holding: dict[int, list[tuple[int, Committed]]] = {}  # by version
    for replica, member in members.items():
        desired = state.desired.get(replica, state.default_desired)
        if desired.committed is None or label_of(desired.committed) in state.launch_labels.get(replica, ()):
            continue
        if holds_committed(member, desired):
            holding.setdefault(desired.version, []).append((replica, desired.committed))
    if holding:
        loaded = tuple(_with_base_holders(known, holding.get(known.weights.version, [])) for known in state.loaded)
        state = replace(state, loaded=loaded) if loaded != state.loaded else state
    changed = {
        name: replace(known, used=used)
        for name, known in state.adapters.items()
        if (used := tuple(_with_adapter_holders(state, entry, members) for entry in known.used)) != known.used
    }
    return replace(state, adapters={**state.adapters, **changed}) if changed else state


def _without_holders(known: LoadedWeights, shown: Mapping[int, str]) -> LoadedWeights:
    left = tuple(replica for replica in known.holders if shown.get(replica) != label_of(known.weights))
    return replace(known, holders=left) if left != known.holders else known


def _with_base_holders(known: LoadedWeights, holding: list[tuple[int, Committed]]) -> LoadedWeights:
    new = [replica for replica, weights in holding if weights == known.weights and not _is_in(known.holders, replica)]
    return replace(known, holders=tuple(sorted((*known.holders, *new)))) if new else known


def _with_adapter_holders(state: CoordinatorState, entry: UsedAdapter, members: Iterable[int]) -> UsedAdapter:
    if entry.dropped_seq:
        return entry
    new = [one for one in members if not _is_in(entry.holders, one) and holds_version(state, one, entry)]
    return replace(entry, holders=tuple(sorted((*entry.holders, *new)))) if new else entry


def _is_in(holders: tuple[int, ...], replica: int) -> bool:
    """Whether a replica is among those in order: a fleet has a thousand, and each status asks."""
    place = bisect_left(holders, replica)
    return place < len(holders) and holders[place] == replica
