"""The contract between trainer and agents: what is said, what is answered, and how it is written down."""

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
