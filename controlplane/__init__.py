"""The trainer's side of the bus.

Import names from here: modules below may change between versions, these names do not without notice. They are loaded on
first use. The package refuses to be imported where another `schemas` or `workers` would be taken for ours.
"""

from typing import TYPE_CHECKING

from controlplane.shadowing import refuse_foreign

if TYPE_CHECKING:
    from controlplane.plane import ControlPlane
    from controlplane.tickets import Ticket
    from schemas.config import BusConfig
    from schemas.profiler.config import ProfilerConfig
    from schemas.reports import AgentLine, AgentOutcome, AgentStatus, FleetStatus, Report, SyncReport

__all__ = [
    "AgentLine",
    "AgentOutcome",
    "AgentStatus",
    "BusConfig",
    "ControlPlane",
    "FleetStatus",
    "ProfilerConfig",
    "Report",
    "SyncReport",
    "Ticket",
]

refuse_foreign()

if not TYPE_CHECKING:
    _MODULES = {"ControlPlane": "controlplane.plane", "Ticket": "controlplane.tickets"}

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_MODULES.get(name, "schemas")), name)
