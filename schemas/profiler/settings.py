"""What is profiled, and how. `schemas.profiler.config` adds the constructors that read these settings from a file."""

from typing import Literal

from msgspec import Struct

from schemas.commands import ProfilePlan
from schemas.identity import Count, Milliseconds, Role

Layout = Literal["step", "verl_step", "verl"]
"""How trace directories are named (`schemas.selection.trace_directory`)."""
RankUnit = Literal["global", "replica"]
"""What the numbers in the `ranks` of verl's rollouts are: global GPU ranks, or replicas as in verl up to 0.9.0."""


class ProfilerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a `ProfilerConfig`.

    Attributes:
        plan: How rollouts are profiled.
        roles: How training ranks are profiled, by role.
        steps: Global training steps to profile; empty for none.
        continuous: One session for each run of consecutive steps, instead of one for each step.
        timeout_ms: Deadline of each profile command.
        save_path: Root of the trace directories on every agent and training rank that is given these settings.
        finish_hook_cmd: Command for `/bin/sh -c` after the last profiled step. `Finish` says which agents run it.
    """

    plan: ProfilePlan = ProfilePlan()
    roles: dict[Role, ProfilePlan] = {}
    steps: tuple[Count, ...] = ()
    continuous: bool = False
    timeout_ms: Milliseconds = 30_000
    save_path: str = ""
    finish_hook_cmd: str = ""
