"""`ProfilerConfig`: which steps are profiled, and how; written in Python or read from verl's YAML or ours."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from msgspec.structs import asdict

from schemas.config import within_bounds
from schemas.profiler.settings import Layout, ProfilerSettings, RankUnit

ConfigSource = Mapping[str, Any] | PurePath | str
"""A mapping, a file, or YAML text. A string with a line break, a brace or `: ` is text; any other is a file name."""


class ProfilerConfig(ProfilerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which global training steps are profiled, and how. `ProfilerSettings` describes the fields."""

    @classmethod
    def from_verl(
        cls, source: ConfigSource, *, ranks: RankUnit = "global", layout: Layout = "step"
    ) -> "ProfilerConfig":
        """Read verl's configuration. Needs the extra `verl` (OmegaConf), which every installation of verl has.

        Args:
            source: A trainer's whole configuration, or only its profiling sections. May be a DictConfig.
            ranks: Unit of the rollouts' `ranks`: global GPU ranks, or replica indices as in verl up to 0.9.0.
            layout: How trace directories are named; `verl_step` and `verl` are verl's own schemes.

        Raises:
            ConfigError: A value is wrong. The text names the key, the value and what is allowed.

        Warns:
            ConfigWarning (`schemas.profiler.readers`): A setting does not have the effect that it seems to have.
        """
        from schemas.profiler.readers import issue

        config, warnings = read_verl_config(source, ranks=ranks, layout=layout)
        issue(warnings)
        return config

    @classmethod
    def from_yaml(cls, source: ConfigSource) -> "ProfilerConfig":
        """Read our own YAML, whose keys are the fields of this class and of what is in them.

        Raises:
            ConfigError: A key is unknown or a value is wrong. The text names the key, the value and what is allowed.
        """
        from schemas.profiler.readers import read_yaml

        return within_bounds(cls(**asdict(read_yaml(source))))


class ConfigReading(NamedTuple):
    """A configuration that was read, and warnings about settings without the expected effect, a sentence each."""

    config: ProfilerConfig
    warnings: list[str]


def read_verl_config(source: ConfigSource, *, ranks: RankUnit = "global", layout: Layout = "step") -> ConfigReading:
    """As `ProfilerConfig.from_verl`, but return the warnings instead of issuing them."""
    from schemas.profiler.readers import read_verl

    settings, warnings = read_verl(source, ranks=ranks, layout=layout)
    return ConfigReading(within_bounds(ProfilerConfig(**asdict(settings))), warnings)


def read_config(source: ConfigSource) -> ConfigReading:
    """Read verl's configuration or ours. A file with a section that only verl has is verl's."""
    from schemas.profiler.readers import load

    tree = load(source)
    if tree.keys() & {"global_profiler", "actor_rollout_ref"}:
        return read_verl_config(tree)
    return ConfigReading(ProfilerConfig.from_yaml(tree), [])
