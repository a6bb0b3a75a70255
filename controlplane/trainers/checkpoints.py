"""Weights to the fleet by checkpoint directories: written beside, renamed, synced, and deleted. Needs no trainer."""

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from controlplane.bus.callers import PHASES
from controlplane.plane import ControlPlane
from controlplane.tickets import Ticket
from schemas.errors import AgentsMissing, ConfigError, SyncInProgress
from schemas.identity import InFlight
from schemas.logs import logger_of
from schemas.reports import SyncReport

logger = logger_of("trainers")

TRY_AGAIN_S: Final = 0.2
"""Between two tries, while another sync has not ended."""


class CheckpointSync:
    """Brings the fleet to weights that the trainer writes as files.

    Each version gets a directory of its own below the plane's `checkpoints`. After a commit all but the `keep` newest
    are deleted, unless a replica may still have to load one (`ControlPlane.oldest_version`, `oldest_adapter`).
    Directories of an earlier life of the trainer stay.

    Args:
        plane: The open control plane.
        keep: Newest checkpoints that are never deleted, at least 1. Of an adapter, replicas hold as many versions.
        in_flight: What happens to running requests, see `ControlPlane.sync_weights`.
        quorum: As for `ControlPlane.sync_weights`.
        timeout: Seconds for each phase.
        adapter: Name of a LoRA adapter whose versions the directories are; empty for weights.

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
        adapter: str = "",
    ) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}: the checkpoint that the fleet serves can't be deleted, so at least 1")
        self._plane, self._keep, self._root = plane, keep, plane.checkpoints
        self._in_flight, self._quorum, self._timeout = in_flight, quorum, timeout
        self.adapter = adapter
        self._written: list[tuple[Path, int | None]] = []  # the oldest first; with its version, once that is known
        if not self._root.is_dir():
            raise ConfigError(
                f"checkpoints {self._root}: no such directory. Make it where every agent can read it, and give it to "
                f"ControlPlane(checkpoints=…) and to each `rolloutctl agent --checkpoints`"
            )

    def require_replicas(self) -> None:
        """Raise AgentsMissing if no agent of a replica is there, before a step is trained in vain."""
        replicas = self._plane.status().replicas.values()
        if not any(agent.state == "live" for replica in replicas for agent in replica.agents):
            raise AgentsMissing(
                f"no agent of a replica has joined the bus at {self._plane.address}: start `rolloutctl agent --bus "
                f"{self._plane.address}` beside each engine, and call plane.wait_for_agents before training"
            )

    def publish(self, name: str, write: Callable[[Path], object]) -> SyncReport:
        """Write a checkpoint, bring the fleet to it, and delete those that are not needed any more.

        Args:
            name: Of its directory, which gets a number if that name is taken. That of an adapter gets more: engines
                may read again what was there before, in an earlier life of the trainer.
            write: Writes the files into the directory that it is given.

        While an operator's sync has not ended, this one waits for as long as one may take.

        Raises:
            CommandFailed: The sync was aborted; the fleet serves what it served before.
            SyncInProgress: Another sync did not end in that time.
        """
        folder = self._write(f"{self.adapter}-{name}-{secrets.token_hex(4)}" if self.adapter else name, write)
        self._written.append((folder, None))  # from now on an agent may need it, however this ends
        report = self._sync(folder.name)
        self._note_version(report.version)
        report.raise_unless_committed()
        self._delete_unneeded()
        return report

    def _sync(self, name: str) -> SyncReport:
        until, said = time.monotonic() + PHASES * self._timeout, False
        while True:
            try:
                return self._begin(name).wait()
            except SyncInProgress as error:
                if time.monotonic() > until:
                    raise
                if not said:
                    logger.warning("%s is not published yet, since another sync has not ended: %s", name, error)
                said = True
            threading.Event().wait(TRY_AGAIN_S)

    def _begin(self, name: str) -> Ticket[SyncReport]:
        limits: dict[str, Any] = {"quorum": self._quorum, "timeout": self._timeout}
        if self.adapter:
            return self._plane.sync_adapter(self.adapter, None, name, keep=self._keep, **limits)
        return self._plane.sync_weights(None, name, in_flight=self._in_flight, **limits)

    def _note_version(self, version: int) -> None:
        """The newest is of this version. Those whose syncs had no report are of older ones, whichever."""
        *older, (newest, _) = self._written
        self._written = [(folder, known if known is not None else version - 1) for folder, known in older]
        self._written.append((newest, version))

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
        plane, kept = self._plane, self._written[-self._keep :]
        needed = plane.oldest_adapter(self.adapter) if self.adapter else plane.oldest_version()
        for folder, version in self._written[: -self._keep]:
            if version is not None and version < needed:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                kept.insert(len(kept) - self._keep, (folder, version))
        self._written = kept
