"""Read a profiling configuration from a file, YAML text or a mapping, in verl's format or ours.

Files are read with PyYAML, for both formats. Our own has the fields of `ProfilerConfig` as its keys, and no references.
Those in verl's configuration are resolved by OmegaConf, as in the trainer itself: with the trainer's own resolvers
where it registered any.

A configuration is small. Its text, its depth and the number of its values are bounded: a few lines can stand for a
billion values.
"""

import itertools
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml
from msgspec import Struct
from msgspec.structs import fields, replace

from schemas.commands import ProfilePlan
from schemas.errors import ConfigError, ExtraMissing
from schemas.profiler import verl_format, verl_warnings
from schemas.profiler.conversion import convert, unknown_keys
from schemas.profiler.settings import Layout, ProfilerSettings, RankUnit, problems
from schemas.profiler.verl_format import deep_merge

TEXT_MAX: Final = 256 * 1024
"""Characters of a file. A trainer's whole configuration has about 50,000."""
VALUES_MAX: Final = 20_000
"""Values of a configuration. A trainer's whole configuration has about 2,000."""
DEPTH_MAX: Final = 100

T = TypeVar("T", bound=Struct)


class ConfigWarning(UserWarning):
    """A setting does not have the effect that it seems to have."""


def read_verl(
    source: object, *, ranks: RankUnit = "global", layout: Layout = "step"
) -> tuple[ProfilerSettings, list[str]]:
    """Read verl's configuration; return the settings, and warnings about keys without the expected effect.

    `ProfilerConfig.from_verl` explains the arguments. Raises ConfigError.
    """
    if ranks not in ("global", "replica"):
        raise ConfigError(f"ranks is {ranks!r}: allowed are global and replica")
    if layout not in ("step", "verl_step", "verl"):
        raise ConfigError(f"layout is {layout!r}: allowed are step, verl_step and verl")
    tree = load(source)
    reading = verl_format.parse(tree, _resolver(source, tree), ranks=ranks, layout=layout)
    return reading.settings, verl_warnings.warnings(reading)


def read_yaml(source: object) -> ProfilerSettings:
    """Read our own YAML. Raises ConfigError."""
    tree = load(source)
    if "global_profiler" in tree:
        raise ConfigError(
            "global_profiler is a key of verl: read the file with ProfilerConfig.from_verl, or with --verl"
        )
    roles = tree.get("roles")
    plans: dict[str, ProfilePlan] = {}
    if isinstance(roles, Mapping):  # each by itself, so that an error names the role
        plans = {role: _converted(plan, ProfilePlan, f"roles.{role}") for role, plan in roles.items()}
        tree = {**tree, "roles": {}}
    settings = replace(_converted(tree, ProfilerSettings, ""), roles=plans)
    for problem in problems(settings):
        raise ConfigError(problem)
    return settings


def _converted(value: object, kind: type[T], path: str) -> T:
    for unknown in unknown_keys(value, kind, path):
        raise ConfigError(f"{unknown.path} is unknown{unknown.suggestion}; allowed are {', '.join(unknown.known)}")
    return convert({} if value is None else value, kind, path)


def issue(messages: list[str]) -> None:
    """Issue each as a ConfigWarning, on the line that called the caller of this function."""
    for message in messages:
        warnings.warn(message, ConfigWarning, stacklevel=3)


def yaml_text(settings: ProfilerSettings) -> str:
    """Write the settings as our own YAML, without what is as by default."""
    text: str = yaml.safe_dump(_changed(settings), sort_keys=False, default_flow_style=None, width=110)
    return text


def _changed(value: object) -> Any:
    """The value as YAML has it. Of a Struct, its tag and the fields that differ from their defaults."""
    if isinstance(value, dict):
        return {key: _changed(entry) for key, entry in value.items()}
    if not isinstance(value, Struct):
        return msgspec.to_builtins(value, order="deterministic")
    config = value.__struct_config__
    tag = {config.tag_field: config.tag} if config.tag_field else {}
    for field in fields(value):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if (found := getattr(value, field.name)) != default:
            tag[field.name] = _changed(found)
    return tag


# --- YAML -------------------------------------------------------------------------------------------------------------


def load(source: object) -> dict[str, object]:
    """Return the content of a mapping, a file or YAML text, its references as they are. Raises ConfigError."""
    if isinstance(source, Mapping):
        tree: dict[str, object] = _plain(source, "the mapping")
        return tree
    if isinstance(source, str) and ("\n" in source or ": " in source or "{" in source):
        return _parsed(source, "the text")
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"the source is {source!r}: allowed is a mapping, a file or YAML text")
    path = Path(source)
    try:
        with path.open(encoding="utf-8") as file:
            return _parsed(file.read(TEXT_MAX + 1), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None


def _parsed(text: str, name: str) -> dict[str, object]:
    try:
        tree = _plain(_content(text, name), name)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, LookupError) as error:  # ValueError and LookupError: `!!int x`, `!!bool x`
        raise ConfigError(f"{name} is not valid YAML: {error}") from None
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{name} holds a {type(tree).__name__}: allowed is a mapping of keys")
    return tree or {}


def _content(text: str, name: str) -> object:
    """Parse YAML. Raises ConfigError if it is too large, and YAMLError, ValueError or LookupError if it is wrong."""
    if len(text) > TEXT_MAX:
        raise ConfigError(f"{name} has more than {TEXT_MAX:,} characters: too large for a configuration")
    try:
        return _Loader(text).get_single_data()
    except RecursionError:
        raise _too_deep(name) from None


def _too_deep(name: str) -> ConfigError:
    return ConfigError(f"{name} is nested too deeply (more than {DEPTH_MAX} levels), or contains itself")


class _Loader(yaml.SafeLoader):
    """YAML without surprises.

    A key that occurs twice is an error, since one of the values would be lost. A date, 1:30 (90 in YAML 1.1) and 010
    (8 in YAML 1.1) stay text: directories are named like the first, and the others are mistakes.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping, as the base class does."""
        seen: set[object] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} occurs twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _number(loader: _Loader, node: yaml.ScalarNode) -> object:
    ambiguous = ":" in node.value or re.match(r"[-+]?0[0-7_]", node.value)
    return node.value if ambiguous else loader.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)


def _plain(source: object, name: str) -> Any:
    """Copy a trainer's mappings and sequences, of whatever types, into dicts and lists. References are kept.

    Raises ConfigError if it is too deep or too large, counting what occurs twice twice.
    """
    count = itertools.count(1)

    def copied(value: object, depth: int) -> Any:
        if hasattr(value, "_get_root"):  # a DictConfig or ListConfig
            from omegaconf import OmegaConf

            value = OmegaConf.to_container(value, resolve=False)
        if depth > DEPTH_MAX:
            raise _too_deep(name)
        if next(count) > VALUES_MAX:
            raise ConfigError(
                f"{name} stands for more than {VALUES_MAX:,} values, when its aliases are replaced by what they stand "
                "for: too large for a configuration"
            )
        if isinstance(value, Mapping):
            return {str(key): copied(entry, depth + 1) for key, entry in value.items()}
        if isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes):
            return [copied(item, depth + 1) for item in value]
        return value

    return copied(source, 0)


# --- references -------------------------------------------------------------------------------------------------------


def _resolver(source: object, tree: dict[str, object]) -> Callable[[str], object]:
    """Return a function that gives the content at a dotted path, its references resolved; None if there is none.

    Only what is asked for is resolved: the rest of a trainer's configuration may hold references that only the trainer
    can resolve. A section that was taken out of a DictConfig may refer to the rest of it.
    """
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError:
        raise ExtraMissing("verl's configuration is read with OmegaConf, which is not installed", "verl") from None

    nodes: list[Any] = [source] if OmegaConf.is_config(source) else []
    if isinstance(source, Mapping) and not nodes:
        nodes = [section for section in source.values() if OmegaConf.is_config(section)]
    whole = tree
    for root in {id(root): root for node in nodes if (root := node._get_root()) is not source}.values():
        whole = deep_merge(_plain(root, "the configuration"), whole)
    try:
        config = OmegaConf.create(whole, flags={"allow_objects": True})
    except OmegaConfBaseException as error:
        raise _reference_error(error) from None

    def resolve(path: str) -> object:
        try:
            found = OmegaConf.select(config, path)
            return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except OmegaConfBaseException as error:
            raise _reference_error(error) from None
        except RecursionError:
            raise _too_deep(path) from None

    return resolve


def _reference_error(error: Any) -> ConfigError:
    advice = "give it a value, hand over a configuration in which it is resolved, or write \\${ for plain text"
    problem = str(error).partition("\n")[0]
    return ConfigError(f"{error.full_key} has a reference that can't be resolved: {problem}; {advice}")
