"""Replays a log with the machines of both sides. They meet nowhere else."""

from collections.abc import Iterable
from pathlib import Path

from msgspec.msgpack import Decoder

from controlplane.record.entries import LogEntry, LogItem, LogMark
from controlplane.record.log import RunLog
from controlplane.replay.replayer import Replayed, Replayer
from schemas.wire import DECODE_ERRORS
from workers.machine.decide import decide
from workers.machine.state import AgentState


def replay_log(entries: Iterable[LogItem]) -> Replayed:
    """Make every decision again, from the first record on. Raises ReplayDiffers or LogCorrupt."""
    replayer = new_replayer()
    for entry in entries:
        if isinstance(entry, LogEntry):
            replayer.feed(entry)
        elif isinstance(entry, LogMark):
            replayer.check_mark(entry)
        else:
            replayer.check_agent(entry)
    return replayer.result()


def replay_file(path: Path) -> Replayed:
    """Make every decision of a log's file again.

    Raises:
        LogError: Another version of the decision logic wrote the file; it would differ for that reason alone.
        ReplayDiffers: A decision is different today.
        LogCorrupt: The file is damaged.
    """
    RunLog.check_logic(path)
    return replay_log(RunLog.walk(path))


def new_replayer() -> Replayer[AgentState]:
    """Return a replayer that the caller feeds, to inspect the states at any position."""
    return Replayer(decide, AgentState(), _decode_state)


_state_decoder = Decoder(AgentState)


def _decode_state(state: bytes) -> AgentState | None:
    try:
        return _state_decoder.decode(state)
    except DECODE_ERRORS:
        return None
