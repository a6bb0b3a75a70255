"""`GET /v1/rl/workers`, protocol version 1: each row has what Dynamo's clients read, and what smg's read. Pure.

Read in Dynamo (`lib/rl/src/lib.rs`, 836fe810), smg (`crates/protocols/src/rl.rs`, 0bbe7c59; its client, 1.13.0) and
prime-rl (`src/prime_rl/inference/dynamo.py`, 02e7f45f), which pins what it finds: a worker that changes ends its run.
So a replica keeps its row, whatever happens to it, until it is retired. `health` says whether it may get requests.
"""

from typing import Final, NamedTuple

from controlplane.machine.fleet_view import FleetView
from controlplane.machine.replicas import is_primary
from controlplane.trainers.gateway.routes import CONTROL
from schemas.identity import process_of

VERSION: Final = 1
NAMESPACE: Final = "rolloutctl"
ALIKE: Final[dict[str, object]] = {
    "namespace": NAMESPACE,
    "component": "backend",
    "endpoint": "rl",
    "routes": sorted(path.lstrip("/") for verb, path in CONTROL if verb == "POST"),
    "worker_type": "regular",
    "connection_mode": "http",
    **dict.fromkeys(("tp_size", "dp_size", "pp_size", "role")),
    "dp_ranks": 1,
    "labels": {},
    "capabilities": {
        "source": "static",
        "pause_modes": ["abort", "wait", "keep"],
        "update_from": ["disk"],
        **dict.fromkeys(("abort", "flush_cache", "reports_weight_version"), True),
        "sleep_wake": False,
    },
}
"""What all rows have in common."""


class Membership(NamedTuple):
    """Which processes may get requests, and a number that grows whenever that changes, over restarts of the bus too."""

    epoch: int = 0
    processes: frozenset[str] = frozenset()

    def now(self, view: FleetView) -> "Membership":
        primaries = filter(is_primary, view.state.members.values())
        processes = frozenset(
            process_of(member.peer) for member in primaries if not view.unfit(member.hello.identity.replica)
        )
        if self.epoch and processes == self.processes:
            return self
        return Membership(max(self.epoch, view.state.epoch << 32) + 1, processes)


def world_size(view: FleetView, replica: int) -> int | None:
    """Return how many GPUs a replica has; None if no agent of it has joined yet."""
    member = view.state.members.get(f"{replica}.0")
    return None if member is None else len(member.hello.identity.global_ranks)


def worker_row(view: FleetView, replica: int, url: str, model: str | None, version: str | None) -> dict[str, object]:
    """Return what is known of one replica. Without a version it may get no requests."""
    member = view.state.members.get(f"{replica}.0")
    status = member.status if member is not None else None
    engine, _, engine_version = (status.engine if status is not None else "unknown").partition(" ")
    row: dict[str, object] = {
        **ALIKE,
        **dict.fromkeys(("request_plane_url", "url", "base_url", "control_url"), url),
        "transport": {"http": url},
        "instance_id": replica,
        "id": str(replica),
        "model": model,
        "model_id": model or "unknown",
        "engine": engine,
        "engine_version": engine_version or None,
        "health": "not_ready" if version is None else "ready",
        "weight_version": version,
    }
    if member is None:  # as of Dynamo, whose clients then find nothing to post to
        return {**row, "routes": [], "error": view.unfit(replica)}
    return {**row, "admin_base_url": url, "world_size": world_size(view, replica)}
