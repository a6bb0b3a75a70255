"""Which steps are profiled, and how: the settings, whatever file they were read from."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

import msgspec
from msgspec import Struct

from schemas.commands import ProfilePlan
from schemas.errors import ConfigError
from schemas.identity import Count, Positive, Role


class ProfilerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which global training steps are profiled, and how.

    plan: for rollouts.   roles: for training ranks, by role.
    steps: global training steps; empty profiles none.   continuous: one session over each run of consecutive steps,
    instead of one session per step.   timeout_ms: for each command.
    save_path: the traces' root; each agent and training rank that is started with this configuration uses it.
    finish_hook_cmd: for `/bin/sh -c`, after the last profiled step (`Finish.hook` says by whom).
    """

    plan: ProfilePlan = ProfilePlan()
    roles: dict[Role, ProfilePlan] = {}
    steps: tuple[Count, ...] = ()
    continuous: bool = False
    timeout_ms: Positive = 30_000
    save_path: str = ""
    finish_hook_cmd: str = ""

    @classmethod
    def from_verl(
        cls,
        source: Mapping[str, Any] | PurePath | str,
        *,
        ranks: Literal["global", "replica"] = "global",
        layout: Literal["step", "verl_step", "verl"] = "step",
    ) -> "ProfilerConfig":
        """From verl's configuration: the whole of a trainer's, or the sections that have to do with profiling.

        source: a mapping (a DictConfig, say), a file, or a text of YAML.
        ranks: what the rollouts' `ranks` are: global GPU ranks, or up to verl 0.9.0 indices of replicas.
        layout: of the directories of traces; verl's own two on request.
        Warns (`schemas.profiler.files.ConfigWarning`) of what nothing follows from. Raises ConfigError, with the key,
        the value and what is allowed. `schemas.profiler.verl` says what becomes of what.
        """
        from schemas.profiler.files import read_verl, warn

        config, remarks = read_verl(source, ranks, layout)
        warn(remarks)
        return config

    @classmethod
    def from_yaml(cls, source: Mapping[str, Any] | PurePath | str) -> "ProfilerConfig":
        """From our own YAML (`schemas.profiler.own_yaml` describes it): a file, a text, or a mapping of the same keys.

        Raises ConfigError, with the key, the value and what is allowed.
        """
        from schemas.profiler.files import read_yaml

        return read_yaml(source)


def checked(config: ProfilerConfig) -> ProfilerConfig:
    """The same, of the types that it is to have: nobody checks what is built in Python. Raises ConfigError."""
    try:
        return msgspec.convert(msgspec.to_builtins(config), ProfilerConfig)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ConfigError(f"not a configuration of profiling: {error}") from None
