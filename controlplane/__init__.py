"""The trainer's side of the bus. Not importable where another `schemas` or `workers` would be taken for ours."""

from typing import TYPE_CHECKING

from controlplane.shadowing import refuse_foreign

if TYPE_CHECKING:
    from controlplane.plane import ControlPlane
    from schemas.reports import Report, SyncReport

__all__ = ["ControlPlane", "Report", "SyncReport"]

refuse_foreign()

_HOMES = {"ControlPlane": "controlplane.plane", "Report": "schemas.reports", "SyncReport": "schemas.reports"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            from importlib import import_module

            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
