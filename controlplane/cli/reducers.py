"""Replay of a log with the machines of both sides. Only here do the two meet."""

from collections.abc import Iterable
from pathlib import Path

from controlplane.machine import coordinator
from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from controlplane.record.replay import AgentLaw, Fold, Replayed, replay
from workers.machine import decide as machine
from workers.machine.decide import AgentState


def replay_log(entries: Iterable[LogEntry]) -> Replayed:
    """Make every decision again. Raises ReplayDiffers or LogCorrupt."""
    return replay(entries, coordinator.decide, _agent_law())


def replay_file(path: Path) -> Replayed:
    """Make every decision of a log's file again.

    Raises:
        LogError: Another version of the decision logic wrote the log; it would differ for that reason alone.
        ReplayDiffers: A decision is different today.
        LogCorrupt: The log is damaged.
    """
    RunLog.check_logic(path)
    return replay_log(RunLog.read(path))


def fold_log() -> Fold[AgentState]:
    """Return a fold that the caller feeds, to inspect the state at any position."""
    return Fold(coordinator.decide, _agent_law())


def _agent_law() -> AgentLaw[AgentState]:
    return AgentLaw(machine.decide, AgentState())
