"""The contract between trainer and agents: commands, outcomes, messages, and the files that record them."""

from schemas.commands import Broadcast, Checkpoint, EngineCommand, Manifest, ProfileCommand, ProfilePlan, Window
from schemas.config import AgentConfig, BusConfig
from schemas.errors import RolloutctlError
from schemas.identity import Identity
from schemas.profiler.config import ProfilerConfig

__all__ = [
    "AgentConfig",
    "Broadcast",
    "BusConfig",
    "Checkpoint",
    "EngineCommand",
    "Identity",
    "Manifest",
    "ProfileCommand",
    "ProfilePlan",
    "ProfilerConfig",
    "RolloutctlError",
    "Window",
]
