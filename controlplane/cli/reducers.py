"""The machines of both sides, for those who fold a log: the one place where they meet."""

from collections.abc import Iterable
from pathlib import Path

from controlplane.machine import coordinator
from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from controlplane.record.replay import AgentLaw, Fold, Replayed, replay
from workers.machine import decide as machine
from workers.machine.decide import AgentState


def replay_log(entries: Iterable[LogEntry]) -> Replayed:
    """Decide everything again. Raises ReplayDiffers, LogCorrupt."""
    return replay(entries, coordinator.decide, _agent_law())


def replay_file(path: Path) -> Replayed:
    """Decide everything in a log's file again.

    Raises LogError for a log of other logic, which would differ for that reason alone; ReplayDiffers, LogCorrupt.
    """
    RunLog.check_logic(path)
    return replay_log(RunLog.read(path))


def fold_log() -> Fold[AgentState]:
    """A fold to be fed by hand, for a look at any position."""
    return Fold(coordinator.decide, _agent_law())


def _agent_law() -> AgentLaw[AgentState]:
    return AgentLaw(machine.decide, AgentState())
