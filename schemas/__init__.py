"""The contract between trainer and agents: commands, outcomes, messages, reports, settings and errors.

Import names from here: modules below may change between versions, these names do not without notice.
"""

from schemas.commands import (
    Broadcast,
    Checkpoint,
    EngineCommand,
    Manifest,
    ProfileCommand,
    ProfilePlan,
    Pushed,
    Source,
    Target,
    Window,
)
from schemas.config import AgentConfig, BusConfig
from schemas.errors import (
    AgentError,
    AgentsMissing,
    BusClosed,
    BusError,
    BusFaulted,
    BusOverloaded,
    BusUnreachable,
    CheckpointError,
    CommandError,
    CommandFailed,
    ConfigError,
    LogError,
    RolloutctlError,
    SyncInProgress,
)
from schemas.identity import Identity, RolloutMode
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing, Outcome, Reason, Skipped, Trace
from schemas.profiler.config import ProfilerConfig
from schemas.reports import AgentLine, AgentOutcome, AgentStatus, FleetStatus, Report, SyncReport

__all__ = [
    "Acted",
    "AgentConfig",
    "AgentError",
    "AgentLine",
    "AgentOutcome",
    "AgentStatus",
    "AgentsMissing",
    "Broadcast",
    "BusClosed",
    "BusConfig",
    "BusError",
    "BusFaulted",
    "BusOverloaded",
    "BusUnreachable",
    "Checkpoint",
    "CheckpointError",
    "CommandError",
    "CommandFailed",
    "Conclusion",
    "ConfigError",
    "EngineCommand",
    "ErrorKind",
    "Failed",
    "FleetStatus",
    "Identity",
    "LogError",
    "Manifest",
    "Missing",
    "Outcome",
    "ProfileCommand",
    "ProfilePlan",
    "ProfilerConfig",
    "Pushed",
    "Reason",
    "Report",
    "RolloutMode",
    "RolloutctlError",
    "Skipped",
    "Source",
    "SyncInProgress",
    "SyncReport",
    "Target",
    "Trace",
    "Window",
]
