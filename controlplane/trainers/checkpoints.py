"""Weights to the fleet by checkpoint directories: written beside, renamed, synced, and deleted. Needs no trainer."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from controlplane.plane import ControlPlane
from schemas.errors import AgentsMissing, ConfigError
from schemas.identity import InFlight
from schemas.logs import logger_of
from schemas.reports import SyncReport

logger = logger_of("trainers")


class CheckpointSync:
    """Brings the fleet to weights that the trainer writes as files.

    Each version gets a directory of its own below the plane's `checkpoints`. After a commit all but the `keep` newest
    are deleted, unless somebody may still have to load one (`ControlPlane.oldest_version`). Directories of an earlier
    life of the trainer stay.

    Args:
        plane: The open control plane.
        keep: Newest checkpoints that are never deleted, at least 1.
        in_flight: What happens to running requests, see `ControlPlane.sync_weights`.
        quorum: Replicas that must load; None for more than half of those that the run knows.
        timeout: Seconds for each phase.

    Raises:
        ConfigError: The directory of checkpoints does not exist, or a value is out of bounds.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        keep: int = 2,
        in_flight: InFlight = "abort",
        quorum: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}: the checkpoint that the fleet serves can't be deleted, so at least 1")
        self._plane, self._keep, self._root = plane, keep, plane.checkpoints
        self._in_flight, self._quorum, self._timeout = in_flight, quorum, timeout
        self._written: dict[int, Path] = {}
        self._absent: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        if not self._root.is_dir():
            raise ConfigError(
                f"checkpoints {self._root}: no such directory. Make it where every agent can read it, and give it to "
                f"ControlPlane(checkpoints=…) and to each `rolloutctl agent --checkpoints`"
            )

    def require_replicas(self) -> None:
        """Raise AgentsMissing if no agent of a replica is there, before a step is trained for nobody."""
        replicas = self._plane.status().replicas.values()
        if not any(agent.state == "live" for replica in replicas for agent in replica.agents):
            raise AgentsMissing(
                f"no agent of a replica has joined the bus at {self._plane.address}: start `rolloutctl agent --bus "
                f"{self._plane.address}` beside each engine, and call plane.wait_for_agents before training"
            )

    def publish(self, name: str, write: Callable[[Path], object]) -> SyncReport:
        """Write a checkpoint, bring the fleet to it, and delete those that nobody needs.

        Args:
            name: Of its directory, which gets a number if that name is taken.
            write: Writes the files into the directory that it is given.

        Raises:
            CommandFailed: The sync was aborted; the fleet serves what it served before.
        """
        folder = self._write(name, write)
        report = self._plane.sync_weights(
            None, folder.name, in_flight=self._in_flight, quorum=self._quorum, timeout=self._timeout
        ).wait()
        self._written[report.version] = folder
        report.raise_unless_committed()
        absent = (report.quarantined, report.unproven)
        if absent != self._absent:
            logger.warning("%s", report.headline)
        self._absent = absent
        self._delete_unneeded()
        return report

    def _write(self, name: str, write: Callable[[Path], object]) -> Path:
        folder, number = self._root / name, 1
        while folder.exists():
            folder, number = self._root / f"{name}-{number}", number + 1
        partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        partial.mkdir()
        try:
            write(partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return folder

    def _delete_unneeded(self) -> None:
        needed = self._plane.oldest_version()
        for version in sorted(self._written)[: -self._keep]:
            if version < needed:
                shutil.rmtree(self._written.pop(version), ignore_errors=True)
