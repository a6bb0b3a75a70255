"""What one agent answers to one command: `acted`, `skipped(reason)` or `failed(error)`. The bus adds `missing`."""

from enum import StrEnum
from typing import Final, Literal

from msgspec import Struct

from schemas.identity import Count, Name, Text


class Reason(StrEnum):
    """Why an agent rightly did nothing. Each reason but `joining` belongs to one rule of the decision table."""

    STALE_EPOCH = "stale_epoch"
    SUPERSEDED = "superseded"  # too old: the stored outcome is gone, or a snapshot replaced the command
    EXPIRED = "expired"
    NOT_TARGETED = "not_targeted"
    NOT_AN_ENGINE = "not_an_engine"  # a training rank, and the command is for engines
    OBSERVING = "observing"  # the agent only observes an engine that another program commands
    NOT_PRIMARY = "not_primary"
    DISABLED = "disabled"
    STEP_NOT_SELECTED = "step_not_selected"
    RANK_NOT_SELECTED = "rank_not_selected"
    TOOL_UNSUPPORTED = "tool_unsupported"
    ALREADY_PROFILING = "already_profiling"
    NOT_PROFILING = "not_profiling"
    MODE_NEVER_SYNCS = "mode_never_syncs"
    STALE_VERSION = "stale_version"
    QUARANTINED = "quarantined"  # the commit quarantines this replica, or the abort leaves it so; it is paused already
    ALREADY = "already"
    JOINING = "joining"  # never sent: a sync went on without this replica, which is new, and loads after it


class ErrorKind(StrEnum):
    """What went wrong, for programs. The message beside it is for people."""

    ENGINE_NOT_READY = "engine_not_ready"
    TOKENIZER_MISSING = "tokenizer_missing"
    UNSUPPORTED = "unsupported"
    REFUSED = "refused"  # by the engine or its backend, in the present state; nothing was touched
    ENGINE_ERROR = "engine_error"
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_BUSY = "engine_busy"
    SOURCE_REFUSED = "source_refused"
    DIGEST_MISMATCH = "digest_mismatch"
    NO_EFFECT = "no_effect"  # the engine reported success, but its state did not change
    WEIGHTS_ASLEEP = "weights_asleep"
    SYNC_IN_PROGRESS = "sync_in_progress"
    NO_SUCH_SYNC = "no_such_sync"
    QUARANTINED = "quarantined"
    UNKNOWN = "unknown"  # a call was cut off or not answered, and the engine can't tell whether it was carried out


class Trace(Struct, frozen=True, omit_defaults=True):
    """A trace file that a session left on this agent's disk.

    Attributes:
        path: Relative to the agent's traces root.
        nbytes: Size of the file.
        sha256: Digest of the file, in hex.
        rank: Global rank that wrote it; None if the file does not say.
    """

    path: Text
    nbytes: Count
    sha256: Name
    rank: Count | None = None


BY_DELTA: Final = "delta"
"""What an engine took that loaded only the tensors that have changed."""


class Acted(Struct, frozen=True, gc=False, kw_only=True, tag="acted", omit_defaults=True):
    """The engine was called, and its state was read back and shows the effect.

    Attributes:
        calls: Names of the engine calls made, in order.
        version: Weights that the engine holds after a load or commit.
        digest: Digest of those weights, where the engine can compute one.
        took: Of a load for which there is a delta: `delta`, or `whole` and why; empty for other loads.
        auto_stopped: The engine had closed the session itself, because its window ended.
        traces: Traces of the selected ranks, after a profile stop, collect or finish.
        ranks_without_trace: Selected global ranks that left no trace.
        still_running: The finish goes on in the background, because moving the traces or running the hook takes long.
            The agent's own log says how it ended.
    """

    calls: tuple[Name, ...]
    version: Count | None = None
    digest: Name | None = None
    took: Text = ""
    auto_stopped: bool = False
    traces: tuple[Trace, ...] = ()
    ranks_without_trace: tuple[Count, ...] = ()
    still_running: bool = False


class Skipped(Struct, frozen=True, gc=False, tag="skipped"):
    """There was nothing to do on this agent.

    Attributes:
        reason: Why nothing was done.
    """

    reason: Reason


class Failed(Struct, frozen=True, gc=False, tag="failed"):
    """The agent should have acted and could not. The message says what the engine holds now.

    Attributes:
        error: The kind of failure.
        message: What happened, and what the engine holds now.
    """

    error: ErrorKind
    message: Text


class Missing(Struct, frozen=True, gc=False, tag="missing", omit_defaults=True):
    """The agent did not answer. Never sent: the bus concludes it.

    Attributes:
        reason: `deadline` when time was up; `absent` when the agent was away already when the command was issued;
            `gone` when it fell silent since; `restarted` when another incarnation took its place; `engine_down` when a
            sync went on without its engine; `not_sent` when the trainer could not send the weights; `aborted` when it
            gave the sync up; `bus_restarted` when it died while the command was open.
        away_ms: How long an absent agent had been away.
    """

    reason: Literal["deadline", "absent", "gone", "restarted", "engine_down", "not_sent", "aborted", "bus_restarted"]
    away_ms: Count = 0


Outcome = Acted | Skipped | Failed
Conclusion = Acted | Skipped | Failed | Missing
