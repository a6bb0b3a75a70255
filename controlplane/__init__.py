"""The trainer's side of the bus. Not importable where another `schemas` or `workers` would be taken for ours."""

from controlplane.shadowing import refuse_foreign

refuse_foreign()
