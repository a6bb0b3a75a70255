"""Read a profiling configuration from a file, YAML text or a mapping, in verl's format or ours.

Files are read with PyYAML, for both formats. References in verl's configuration are resolved by OmegaConf, as in the
trainer itself: with the trainer's own resolvers where it registered any. Our own YAML knows one reference,
`${oc.env:NAME}` or `${oc.env:NAME,default}`; a backslash before `${` makes it plain text.

A configuration is small. Its text, its depth and the number of its values are bounded, counted after every alias and
every reference in it has been replaced by what it stands for: a few lines of either can stand for a billion values.
"""

import itertools
import os
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import yaml

from schemas.errors import ConfigError
from schemas.profiler import verl_format, verl_warnings, yaml_format
from schemas.profiler.conversion import joined
from schemas.profiler.settings import Layout, ProfilerSettings, RankUnit
from schemas.profiler.verl_format import overlaid

TEXT_MAX: Final = 256 * 1024
"""Characters of a file. A trainer's whole configuration has about 50,000."""
VALUES_MAX: Final = 20_000
"""Values of a configuration. A trainer's whole configuration has about 2,000."""
DEPTH_MAX: Final = 100

K = TypeVar("K", bound=Hashable)

_REFERENCE: Final = re.compile(r"\\\$\{|\$\{(?:\s*oc\.env\s*:\s*(\w+)\s*(?:,([^{}]*))?\})?")

_NAMED: Final = re.compile(r"[\w.\[\]-]+")
"""Whatever in a text with references may name a place: in `${oc.select:a.b,c}`, `oc.select`, `a.b` and `c`."""


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
    return yaml_format.parse(_plain(load(source), _substituted))


def issue(messages: list[str]) -> None:
    """Issue each as a ConfigWarning, on the line that called the caller of this function."""
    for message in messages:
        warnings.warn(message, ConfigWarning, stacklevel=3)


def yaml_text(settings: ProfilerSettings) -> str:
    """Write the settings as our own YAML."""
    content = _plain(yaml_format.content(settings), lambda text, _: text.replace("${", r"\${"))
    text: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110)
    return text


# --- YAML -------------------------------------------------------------------------------------------------------------


def load(source: object) -> dict[str, object]:
    """Return the content of a mapping, a file or YAML text, its references as they are. Raises ConfigError."""
    if isinstance(source, Mapping):
        _require_small(_Same(source), _Same.parts, "the mapping")
        tree: dict[str, object] = _plain(source)
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
        tree = _plain(_content(text, name))
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
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _require_small(node, _parts_of_node, name)
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise _too_deep(name) from None


def _parts_of_node(node: yaml.Node | None) -> Iterator[yaml.Node]:
    match node:
        case yaml.MappingNode():
            yield from itertools.chain.from_iterable(node.value)
        case yaml.SequenceNode():
            yield from node.value


class _Same(NamedTuple):
    """A value of a trainer's mapping, compared by identity."""

    value: object

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def parts(self) -> Iterable["_Same"]:
        if hasattr(self.value, "_get_root"):  # OmegaConf would resolve its references; `resolve` measures them
            return ()
        if isinstance(self.value, Mapping):
            return map(_Same, self.value.values())
        return map(_Same, self.value) if isinstance(self.value, list | tuple) else ()


def _require_small(
    root: K, parts: Callable[[K], Iterable[K]], name: str, cyclic: Callable[[K], ConfigError] | None = None
) -> None:
    """Raise ConfigError if the tree below `root` is too deep or too large, counting what occurs twice twice.

    Args:
        cyclic: Makes the error for a node that contains itself.
    """
    measured: dict[K, tuple[int, int]] = {}  # values and depth; (0, 0) while it is being measured

    def measure(node: K, depth: int) -> tuple[int, int]:
        if (known := measured.get(node)) is None:
            if depth > DEPTH_MAX:
                raise _too_deep(name)
            measured[node] = (0, 0)
            inner = [measure(part, depth + 1) for part in parts(node)]
            known = measured[node] = (
                1 + sum(size for size, _ in inner),
                1 + max((height for _, height in inner), default=0),
            )
        if known == (0, 0):
            raise cyclic(node) if cyclic else _too_deep(name)
        if depth + known[1] > DEPTH_MAX:
            raise _too_deep(name)
        if known[0] > VALUES_MAX:
            raise ConfigError(
                f"{name} stands for more than {VALUES_MAX:,} values, when its aliases and references are replaced by "
                "what they stand for: too large for a configuration"
            )
        return known

    measure(root, 0)


def _too_deep(name: str) -> ConfigError:
    return ConfigError(f"{name} is nested too deeply (more than {DEPTH_MAX} levels), or contains itself")


class _Loader(yaml.SafeLoader):
    """YAML without surprises.

    A key that occurs twice is an error, since one of the values would be lost. A date, 1:30 (90 in YAML 1.1) and 010
    (8 in YAML 1.1) stay text: directories are named like the first, and the others are mistakes.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Compose a node, as the base class does, but raise RecursionError sooner: deep nesting is slow there."""
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise RecursionError
        node: yaml.Node | None = super().compose_node(parent, index)  # type: ignore[arg-type]
        self.depth -= 1
        return node

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


def _plain(value: object, change: Callable[[str, str], object] | None = None, path: str = "") -> Any:
    """Copy a trainer's mappings and sequences, of whatever types, into dicts and lists. References are kept.

    Args:
        change: Is given each text and its path, and returns what to put in its place.
    """
    if hasattr(value, "_get_root"):  # a DictConfig or ListConfig
        from omegaconf import OmegaConf

        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, change, joined(path, key)) for key, entry in value.items()}
    if isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes):
        return [_plain(item, change, f"{path}[{index}]") for index, item in enumerate(value)]
    return change(value, path) if change and isinstance(value, str) else value


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
        raise ConfigError(
            "verl's configuration is read with OmegaConf, which is not installed: pip install 'rolloutctl[verl]'"
        ) from None

    nodes: list[Any] = [source] if OmegaConf.is_config(source) else []
    if isinstance(source, Mapping) and not nodes:
        nodes = [section for section in source.values() if OmegaConf.is_config(section)]
    whole = tree
    for root in {id(root): root for node in nodes if (root := node._get_root()) is not source}.values():
        whole = overlaid(_plain(root), whole)
    try:
        config = OmegaConf.create(whole, flags={"allow_objects": True})
    except OmegaConfBaseException as error:
        raise _reference_error(error) from None

    def resolve(path: str) -> object:
        _require_small(_Place(tuple(path.split("."))), partial(_parts_at, whole), path, _recursive)
        try:
            found = OmegaConf.select(config, path)
            return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except OmegaConfBaseException as error:
            raise _reference_error(error) from None
        except RecursionError:
            raise _too_deep(path) from None

    return resolve


class _Place(NamedTuple):
    """A place in a configuration, by its keys and indices."""

    keys: tuple[str, ...]


def _parts_at(tree: object, place: _Place) -> Iterator[_Place]:
    """What OmegaConf replaces the value at a place by: the values in it, or those that its references name."""
    value = _at(tree, place.keys)
    if isinstance(value, Mapping):
        yield from (_Place((*place.keys, key)) for key in value)
    elif isinstance(value, list):
        yield from (_Place((*place.keys, str(index))) for index in range(len(value)))
    elif isinstance(value, str) and "${" in value:
        for name in _NAMED.findall(value):
            path = name.lstrip(".")
            up = len(name) - len(path)  # one dot is the section of the reference, two the section around it
            above = place.keys[: len(place.keys) - up] if up else ()
            keys = (*above, *filter(None, re.split(r"[.\[\]]", path)))
            if keys and _at(tree, keys) is not None:
                yield _Place(keys)


def _at(tree: object, keys: Iterable[str]) -> object:
    for key in keys:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, list) and key.isdecimal() and int(key) < len(tree):
            tree = tree[int(key)]
        else:
            return None
    return tree


def _reference_error(error: Any) -> ConfigError:
    return _unresolved(error.full_key, str(error).partition("\n")[0])


def _recursive(place: _Place) -> ConfigError:
    return _unresolved(".".join(place.keys), "Recursive interpolation detected")


def _unresolved(key: str, problem: str) -> ConfigError:
    advice = "give it a value, hand over a configuration in which it is resolved, or write \\${ for plain text"
    return ConfigError(f"{key} has a reference that can't be resolved: {problem}; {advice}")


def _substituted(text: str, path: str) -> object:
    """Put environment variables into a text of our own YAML. A text that is one reference is read as YAML."""

    def replacement(match: re.Match[str]) -> str:
        name, default = match.groups()
        if match[0].startswith("\\"):
            return "${"
        if name is None:
            raise ConfigError(f"{path} is '{text}': allowed is ${{oc.env:NAME}}, or \\${{ for plain text")
        value = os.environ.get(name, default)
        if value is None:
            raise ConfigError(f"{path} needs the environment variable {name}, which is not set")
        return value

    whole = _REFERENCE.fullmatch(text)
    filled = _REFERENCE.sub(replacement, text)
    if not (whole and whole[1]):
        return filled
    try:
        return _content(filled, path)
    except (yaml.YAMLError, ValueError, LookupError):  # ConfigError is a ValueError
        return filled
