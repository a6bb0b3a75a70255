"""The composition roots: the only code that sees both the trainer's side and the nodes'."""

from controlplane.shadowing import refuse_foreign

refuse_foreign()
