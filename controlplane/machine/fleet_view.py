"""The fleet at one moment: what a trainer and its doors may read of it. Pure."""

from msgspec.structs import replace

from controlplane.machine.adapters import adapter_statuses, needed_paths
from controlplane.machine.coordinator_state import CoordinatorState
from controlplane.machine.engine_answers import labelled_tokens, model_of
from controlplane.machine.provenance import Provenance, provenance
from controlplane.machine.replicas import in_doubt, needed_weights, proven_replicas
from schemas.commands import durable_source
from schemas.identity import RolloutMode
from schemas.reports import AdapterStatus
from schemas.wire import PeerFound


class FleetView:
    """What is known of the fleet in one state of the coordinator."""

    def __init__(self, state: CoordinatorState) -> None:
        self.state = state
        self._proven = proven_replicas(state)

    @property
    def has_committed(self) -> bool:
        """Whether a weight sync of this run was ever committed for the whole fleet."""
        return self.state.default_desired.version > 0

    @property
    def serving(self) -> dict[int, int]:
        """The replicas that are proven to serve, each with its version."""
        return dict(self._proven.serving)

    @property
    def needed_checkpoints(self) -> frozenset[str]:
        """Directories of weights and adapters that a replica may still have to read."""
        return needed_weights(self.state) | needed_paths(self.state)

    @property
    def loaded_checkpoints(self) -> frozenset[str]:
        """Directories of the newest weights that engines may ever have loaded."""
        sources = (durable_source(known.weights.source) for known in self.state.loaded)
        return frozenset(source.path for source in sources if source is not None)

    @property
    def endpoints(self) -> dict[int, str]:
        """Where the servers of the replicas are that are proven to serve, of those that say it."""
        return {replica: url for replica in self._proven.serving if (url := self.endpoint(replica))}

    def endpoint(self, replica: int) -> str:
        """Return where the server of a replica is, as its newest agent said; empty if it did not."""
        member = self.state.members.get(f"{replica}.0")
        return member.hello.endpoint.rstrip("/") if member is not None else ""

    def peer_of(self, replica: int) -> PeerFound:
        """Return a server whose weights the engine of a replica may copy now.

        New replicas are spread over those that serve. While a sync runs there is none: it would wait for the copies.
        """
        peers = sorted(self.endpoints.keys() - {replica})
        if not peers or self.state.sync is not None:
            return PeerFound()
        peer = peers[replica % len(peers)]
        status = self.state.members[f"{peer}.0"].status
        weights = self.state.desired.get(peer, self.state.default_desired).committed
        found = PeerFound(url=self.endpoint(peer))
        if status is None or weights is None or weights.manifest is None or status.version != weights.version:
            return found
        return replace(found, content=weights.manifest.content or "", digest=status.digest or "")

    @property
    def adapters(self) -> dict[str, AdapterStatus]:
        """The LoRA adapters that are served, by name."""
        return adapter_statuses(self.state)

    def provenance(self, answer: object, *, replica: int | None = None, model: str = "") -> list[Provenance]:
        """Return what made each sequence of an engine's answer, as `ControlPlane.provenance` does."""
        model = model or model_of(answer)
        adapters = (used.adapter.model for known in self.state.adapters.values() for used in known.used)
        labelled = labelled_tokens(answer, model if model in adapters else "")
        return [provenance(self.state, sequence, replica) for sequence in labelled]

    def unfit(self, replica: int) -> str:
        """Return why a replica must not get requests; empty if it may: it is proven to serve what is committed.

        One that was told to pause, as in a sync, still gets them: its engine lets them wait.
        """
        state, name = self.state, f"{replica}.0"
        member = state.members.get(name)
        if name in state.retired:
            return "it was retired"
        if member is None or member.state != "live":
            return "no agent has joined there" if member is None else f"its agent is {member.state}"
        if replica in self._proven.serving:
            return ""
        if replica in state.draining:
            return "it leaves the fleet"
        status, desired = member.status, state.desired.get(replica, state.default_desired)
        reported = status.quarantined if status is not None and not member.sync_acked else 0
        if version := desired.quarantined or reported:
            return f"quarantined since v{version}, until a later update includes it"
        if member.hello.identity.mode is RolloutMode.COLOCATED:  # it never syncs
            return ""
        if status is None:
            return "no heartbeat yet"
        sync = state.sync
        obeys = sync is not None or desired.generation != "running" or desired.asleep
        loaded = sync is not None and replica in sync.members and status.version == sync.version
        works = status.tokenizer != "unknown" and not status.torn
        if obeys and works and (loaded or not in_doubt(member, desired)):
            return ""
        return f"it is not proven to serve v{desired.version}: {status.condition()}"
