"""Where a configuration of profiling comes from: a file, a text of YAML, or the mapping that a trainer holds."""

import os
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import yaml

from schemas.errors import ConfigError
from schemas.profiler import own_yaml, verl
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.sections import EnvironmentText, is_list

VERLS = frozenset({"global_profiler", "actor_rollout_ref"})
"""Sections that only a configuration of verl has."""

Source = Mapping[str, Any] | PurePath | str
"""A mapping, a file, or a text: YAML if it has a line break, a brace or a colon with a blank, else a file's name."""


class ConfigWarning(UserWarning):
    """Something in a configuration does not do what it looks like."""


def read_verl(source: Source, ranks: verl.RankUnit = "global", layout: verl.Layout = "step") -> verl.Reading:
    """See `verl.read`. Variables of `${oc.env:...}` are those of this process."""
    if ranks not in ("global", "replica"):
        raise ConfigError(f"ranks is {ranks!r}: allowed are global and replica")
    if layout not in ("step", "verl_step", "verl"):
        raise ConfigError(f"layout is {layout!r}: allowed are step, verl_step and verl")
    return verl.read(_tree(source), os.environ, ranks=ranks, layout=layout)


def read_yaml(source: Source) -> ProfilerConfig:
    """See `own_yaml.read`."""
    return own_yaml.read(_tree(source), os.environ)


def read(source: Source) -> verl.Reading:
    """From either: verl's has a section of verl's at its top, ours has none. Raises ConfigError."""
    tree = _tree(source)
    if tree.keys() & VERLS:
        return verl.read(tree, os.environ)
    return verl.Reading(own_yaml.read(tree, os.environ), [])


def warn(remarks: list[str]) -> None:
    """Each as a warning, on the line that called the one who calls this."""
    for remark in remarks:
        warnings.warn(remark, ConfigWarning, stacklevel=3)


def yaml_text(config: ProfilerConfig) -> str:
    """The configuration as our own YAML."""
    text: str = yaml.safe_dump(own_yaml.written(config), sort_keys=False, default_flow_style=None, width=110)
    return text


def _tree(source: object) -> dict[str, object]:
    if isinstance(source, Mapping):
        return _plain(source)
    if isinstance(source, str) and ("\n" in source or ": " in source or "{" in source):
        return _parsed(source, "the text")
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"the source is {source!r}: allowed is a mapping, a file or a text of YAML")
    path = Path(source)
    try:
        return _parsed(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None


def _parsed(text: str, name: str) -> dict[str, object]:
    try:
        tree = _Loader(text).get_single_data()
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError) as error:  # the others of `!!int x` and `!!bool x`, say
        raise ConfigError(f"{name} is no YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{name} holds {type(tree).__name__}: allowed is a mapping of keys")
    try:
        return _plain(tree)
    except RecursionError:
        raise ConfigError(f"{name} has an anchor that stands within itself: allowed is one beside it") from None


class _Loader(yaml.SafeLoader):
    """YAML in which no key stands twice: of two values, one would be lost in silence.

    A date stays the text that it is, as OmegaConf has it: directories are named so. So does 1:30, which YAML 1.1 takes
    for 90 and whoever writes it for a range.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping, as the class above makes it."""
        seen: set[object] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key is a list or a mapping, where a text is allowed; put a value with braces in quotes",
                    problem_mark=key.start_mark,
                )
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark)
            if key.tag != "tag:yaml.org,2002:merge":
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> object:
    """A number, unless it is one to the base of 60, or of 8, as YAML 1.1 has 010: whoever writes that means ten."""
    ambiguous = ":" in node.value or re.match(r"[-+]?0[0-7_]", node.value)
    return node.value if ambiguous else loader.construct_yaml_int(node)


def _text(_: _Loader, node: yaml.ScalarNode) -> object:
    return node.value


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _text)


_FOREIGN = re.compile(r"(?<!\\)\$\{\s*(?!oc\.(?:select|env|decode)\s*:)[\w.]+\s*:")
"""A reference by a resolver that only OmegaConf may know."""


def _plain(mapping: Mapping[Any, Any], whole: bool = False) -> dict[str, object]:
    """Dictionaries and lists in place of whatever mappings and sequences a trainer uses.

    whole: it is within a configuration of OmegaConf's that is here as a whole.
    """
    omegaconf = sys.modules.get("omegaconf")  # loaded by whoever hands over one of its mappings
    if omegaconf is not None and isinstance(mapping, omegaconf.DictConfig):
        whole = whole or mapping._get_parent() is None
        mapping = _part(omegaconf, mapping, whole)
    return {str(key): _plain_value(value, whole) for key, value in mapping.items()}


def _part(omegaconf: ModuleType, part: Any, whole: bool) -> dict[Any, object]:
    """A mapping of OmegaConf's, with what only OmegaConf knows: the rest of the configuration that a section was taken
    out of, which that section may refer to, and resolvers that are registered with it.

    A reference that OmegaConf can't resolve stays one.
    """
    settled: dict[Any, object] = {}
    for key, written in omegaconf.OmegaConf.to_container(part, resolve=False).items():
        if whole and not _FOREIGN.search(str(written)):
            settled[key] = written
            continue
        try:
            value = written if omegaconf.OmegaConf.is_missing(part, key) else part[key]
            if isinstance(value, str):
                value = value.replace("${", r"\${")  # it is none any more
            if isinstance(value, omegaconf.ListConfig):
                value = omegaconf.OmegaConf.to_container(value, resolve=True)
        except omegaconf.errors.OmegaConfBaseException:
            value = written
        of_environment = isinstance(value, str) and isinstance(written, str) and "${oc.env:" in written
        settled[key] = EnvironmentText(value) if of_environment else value
    return settled


def _plain_value(value: object, whole: bool) -> object:
    if isinstance(value, Mapping):
        return _plain(value, whole)
    return [_plain_value(one, whole) for one in value] if is_list(value) else value
