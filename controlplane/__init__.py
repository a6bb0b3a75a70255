"""The trainer's side of the bus.

Import names from here: modules below may change between versions, these names do not without notice. They are loaded on
first use, which is refused where a foreign `schemas` would be taken for ours.
"""

from pkgutil import extend_path
from typing import TYPE_CHECKING

from controlplane.shadowing import refuse_foreign

__path__ = extend_path(__path__, __name__)  # a folder of this name without an `__init__.py`, in a user's repository

if TYPE_CHECKING:
    from controlplane.machine.provenance import Provenance as Provenance
    from controlplane.machine.provenance import TokenSpan as TokenSpan
    from controlplane.machine.provenance import Verdict as Verdict
    from controlplane.metrics import BusCollector as BusCollector
    from controlplane.plane import ControlPlane as ControlPlane
    from controlplane.replay.recorded_run import RecordedRun as RecordedRun
    from controlplane.spans import trace_commands as trace_commands
    from controlplane.tickets import Ticket as Ticket
    from controlplane.trainers.checkpoints import CheckpointSync as CheckpointSync
    from schemas import AgentLine as AgentLine
    from schemas import AgentOutcome as AgentOutcome
    from schemas import AgentStatus as AgentStatus
    from schemas import BusConfig as BusConfig
    from schemas import FleetStatus as FleetStatus
    from schemas import ProfilerConfig as ProfilerConfig
    from schemas import Report as Report
    from schemas import SyncReport as SyncReport

if not TYPE_CHECKING:
    _MODULES = {
        "BusCollector": "controlplane.metrics",
        "CheckpointSync": "controlplane.trainers.checkpoints",
        "ControlPlane": "controlplane.plane",
        "Provenance": "controlplane.machine.provenance",
        "RecordedRun": "controlplane.replay.recorded_run",
        "Ticket": "controlplane.tickets",
        "TokenSpan": "controlplane.machine.provenance",
        "Verdict": "controlplane.machine.provenance",
        "trace_commands": "controlplane.spans",
    }

    _OF_SCHEMAS = (
        *("AgentLine", "AgentOutcome", "AgentStatus", "BusConfig"),
        *("FleetStatus", "ProfilerConfig", "Report", "SyncReport"),
    )
    __all__ = [*_MODULES, *_OF_SCHEMAS]

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        refuse_foreign(("schemas",))
        from importlib import import_module

        return getattr(import_module(_MODULES.get(name, "schemas")), name)
