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
MARK: Final = ".rolloutctl"
"""File in each directory that is published, with the name of its adapter, or empty."""
PARTIAL: Final = ".partial"


class CheckpointSync:
    """Brings the fleet to weights that the trainer writes as files.

    Each version gets a directory of its own below the plane's `checkpoints`, with a mark (`.rolloutctl`) in it. All but
    the `keep` newest are deleted, those of earlier lives of the trainer too, unless a replica may still have to read
    one (`ControlPlane.needed_checkpoints`). What was written without this class stays. Only one object at a time may
    publish weights below a directory, and one each adapter.

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
        if not self._root.is_dir():
            raise ConfigError(
                f"checkpoints {self._root}: no such directory. Make it where every agent can read it, and give it to "
                f"ControlPlane(checkpoints=…) and to each `rolloutctl agent --checkpoints`"
            )
        found = [mark.parent for mark in self._root.glob(f"*/{MARK}") if mark.read_text("utf-8") == adapter]
        for unfinished in (folder for folder in found if folder.suffix == PARTIAL):
            shutil.rmtree(unfinished, ignore_errors=True)  # its trainer was killed
        whole = sorted(
            (folder for folder in found if folder.suffix != PARTIAL), key=lambda each: each.stat().st_mtime_ns
        )
        # The oldest first; with the ticket of its sync, if it is of this life.
        self._written: dict[Path, Ticket[SyncReport] | None] = dict.fromkeys(whole)

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
            name: Of its directory, which gets a number if that name is taken, or was, also in an earlier life of the
                trainer. That of an adapter gets more: engines may read again what was there before.
            write: Writes the files into the directory that it is given.

        While an operator's sync has not ended, this one waits for as long as one may take.

        Raises:
            CommandFailed: The sync was aborted; the fleet serves what it served before.
            SyncInProgress: Another sync did not end in that time.
        """
        folder = self._write(name, write)
        until, said = time.monotonic() + PHASES * self._timeout, False
        while True:
            try:
                report = self._begin(folder).wait()
                break
            except SyncInProgress as error:
                if time.monotonic() > until:
                    raise
                if not said:
                    logger.warning("%s is not published yet, since another sync has not ended: %s", folder.name, error)
                said = True
            threading.Event().wait(TRY_AGAIN_S)
        report.raise_unless_committed()
        self._delete_unneeded()
        return report

    def begin(self, name: str, write: Callable[[Path], object]) -> Ticket[SyncReport]:
        """Write a checkpoint, and begin to bring the fleet to it, without waiting for that.

        Args:
            name: As for `publish`.
            write: As for `publish`.

        Returns:
            The ticket of the sync, with its `version`. Waiting raises SyncInProgress if the one before has not ended.
        """
        ticket = self._begin(self._write(name, write))
        self._delete_unneeded()
        return ticket

    def _begin(self, folder: Path) -> Ticket[SyncReport]:
        limits: dict[str, Any] = {"quorum": self._quorum, "timeout": self._timeout}
        if self.adapter:
            ticket = self._plane.sync_adapter(self.adapter, None, folder.name, keep=self._keep, **limits)
        else:
            ticket = self._plane.sync_weights(None, folder.name, in_flight=self._in_flight, **limits)
        self._written[folder] = ticket
        return ticket

    def _write(self, name: str, write: Callable[[Path], object]) -> Path:
        if self.adapter:
            name = f"{self.adapter}-{name}-{secrets.token_hex(4)}"
        folder, number = self._root / name, 1
        used = self._plane.view().loaded_checkpoints  # an agent that is away may still read what was there under a name
        while folder.exists() or folder.name in used:
            folder, number = self._root / f"{name}-{number}", number + 1
        partial = folder.with_name(f".{folder.name}.{os.getpid()}{PARTIAL}")
        partial.mkdir()
        try:
            (partial / MARK).write_text(self.adapter, "utf-8")
            write(partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._written[folder] = None
        return folder

    def _delete_unneeded(self) -> None:
        older = list(self._written.items())[: -self._keep]
        ended = [folder for folder, ticket in older if ticket is None or ticket.done]
        needed = {self._root / path for path in self._plane.needed_checkpoints()}  # after all those have ended
        for folder in ended:
            if folder not in needed:
                shutil.rmtree(folder, ignore_errors=True)
                del self._written[folder]
