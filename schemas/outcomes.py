"""What one agent answers to one command: `acted`, `skipped(reason)` or `failed(error)`; the bus adds `missing`."""

from enum import StrEnum
from typing import Literal

from msgspec import Struct

from schemas.identity import Count, Name, Text


class Reason(StrEnum):
    """Why an agent did nothing, as it should. Each belongs to one row or rule of the decision table."""

    STALE_EPOCH = "stale_epoch"
    SUPERSEDED = "superseded"  # applied so long ago that the stored outcome is gone, or jumped over by a snapshot
    EXPIRED = "expired"
    NOT_TARGETED = "not_targeted"
    NOT_AN_ENGINE = "not_an_engine"  # a training rank, and the command is about engines
    NOT_PRIMARY = "not_primary"
    DISABLED = "disabled"
    STEP_NOT_SELECTED = "step_not_selected"
    RANK_NOT_SELECTED = "rank_not_selected"
    TOOL_UNSUPPORTED = "tool_unsupported"
    ALREADY_PROFILING = "already_profiling"
    NOT_PROFILING = "not_profiling"
    MODE_NEVER_SYNCS = "mode_never_syncs"
    STALE_VERSION = "stale_version"
    QUARANTINED = "quarantined"  # named in a commit's quarantine, and paused already
    ALREADY = "already"


class ErrorKind(StrEnum):
    """What went wrong, for programs. The message beside it is for people."""

    ENGINE_NOT_READY = "engine_not_ready"
    TOKENIZER_MISSING = "tokenizer_missing"
    UNSUPPORTED = "unsupported"
    ENGINE_ERROR = "engine_error"
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_BUSY = "engine_busy"
    SOURCE_REFUSED = "source_refused"
    DIGEST_MISMATCH = "digest_mismatch"
    NO_EFFECT = "no_effect"  # the engine said yes, and reading it back says no
    WEIGHTS_ASLEEP = "weights_asleep"
    SYNC_IN_PROGRESS = "sync_in_progress"
    NO_SUCH_SYNC = "no_such_sync"
    QUARANTINED = "quarantined"
    OVERLOADED = "overloaded"
    UNKNOWN = "unknown"  # cut off in the middle, and nothing can tell whether it happened


class Trace(Struct, frozen=True, omit_defaults=True):
    """One trace file that a session left on this agent's disk, relative to its traces' root.

    rank: the global rank that it is of, where the file tells.
    """

    path: Text
    nbytes: Count
    sha256: Name
    rank: Count | None = None


class Acted(Struct, frozen=True, kw_only=True, tag="acted", omit_defaults=True):
    """The engine was called, and what was to be brought about was seen to hold.

    calls: names of the engine calls made, in order.   version, digest: what the engine holds, after a load or commit.
    auto_stopped: the engine had ended the session by itself when its window closed.
    traces: of the ranks asked for, after a profile stop, collect or finish.   ranks_without_trace: left none.
    still_running: a finish takes long (traces are being moved, or the hook runs): it goes on, and the agent's own log
    tells how it ended.
    """

    calls: tuple[Name, ...]
    version: Count | None = None
    digest: Name | None = None
    auto_stopped: bool = False
    traces: tuple[Trace, ...] = ()
    ranks_without_trace: tuple[Count, ...] = ()
    still_running: bool = False


class Skipped(Struct, frozen=True, tag="skipped"):
    """Nothing was to be done here."""

    reason: Reason


class Failed(Struct, frozen=True, tag="failed"):
    """It was to be done here and could not be. The message says what the engine holds now."""

    error: ErrorKind
    message: Text


class Missing(Struct, frozen=True, tag="missing"):
    """No answer. Never sent: the bus concludes it.

    deadline: time was up.   gone: the agent fell silent.   restarted: another incarnation took its place.
    bus_restarted: the trainer died while the command was open.
    """

    reason: Literal["deadline", "gone", "restarted", "bus_restarted"]


Outcome = Acted | Skipped | Failed
Conclusion = Acted | Skipped | Failed | Missing
