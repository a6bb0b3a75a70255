"""References in a configuration: `${a.b}`, `${.sibling}`, `${oc.select:a.b,default}`, `${oc.env:NAME,default}`,
`${oc.decode:text}`. Pure.

They mean what they mean to OmegaConf, which trainers keep their configuration with. Only what is asked for is resolved:
the rest of a trainer's file may refer to things that are known nowhere but in the trainer.
"""

import re
from collections.abc import Mapping
from typing import Final

from schemas.errors import ConfigError
from schemas.profiler.sections import EnvironmentText, is_list, is_quoted, literal, meant, shown, split

RESOLVERS: Final = ("oc.select", "oc.env", "oc.decode")
ABSENT: Final = "???"
"""What OmegaConf writes for a value that is still to be given."""
_MISSING: Final = object()
Path = tuple[str, ...]


class References:
    """The references of one configuration.

    root: the whole of it.   environment: variables that `${oc.env:...}` may name.
    """

    def __init__(self, root: Mapping[str, object], environment: Mapping[str, str]) -> None:
        self._root, self._environment = root, environment
        self._open: list[str] = []

    def at(self, path: str) -> object:
        """What stands at this dotted path, with every reference in it resolved; None when nothing does.

        Raises ConfigError for a reference that can't be resolved.
        """
        found = self._find(tuple(path.split(".")))
        return None if found is _MISSING else found

    def _find(self, path: Path) -> object:
        node: object = self._root
        for depth, part in enumerate(path):
            if isinstance(node, str):  # a reference to a mapping, and the path goes on below it
                node = self._resolved(node, path[:depth])
            if isinstance(node, Mapping):
                node = node.get(part, _MISSING)
            elif is_list(node) and part.isdecimal() and int(part) < len(node):
                node = list(node)[int(part)]
            else:
                return _MISSING
        return _MISSING if node is _MISSING or _absent(node) else self._resolved(node, path)

    def _resolved(self, value: object, path: Path) -> object:
        if isinstance(value, Mapping):
            return {str(key): self._resolved(one, (*path, str(key))) for key, one in value.items() if not _absent(one)}
        if isinstance(value, str):
            return self._text(value, path) if "${" in value else value
        if is_list(value):
            return [self._resolved(one, (*path, str(index))) for index, one in enumerate(value)]
        return value

    def _text(self, text: str, path: Path) -> object:
        """A text with references: what the reference stands for if it is nothing else, or all of them put into it."""
        here = ".".join(path)
        if here in self._open:
            raise ConfigError(f"{here} refers to itself: {' -> '.join([*self._open[self._open.index(here) :], here])}")
        self._open.append(here)
        try:
            return self._filled(text, path)
        finally:
            self._open.pop()

    def _filled(self, text: str, path: Path) -> object:
        filled, rest = "", text
        while (start := rest.find("${")) >= 0:
            if rest[:start].endswith("\\"):
                filled, rest = filled + rest[: start - 1] + "${", rest[start + 2 :]
                continue
            end = self._closing(rest, start, path)
            value = self._reference(rest[start + 2 : end - 1], path)
            if not filled and start == 0 and end == len(rest):
                return value
            if value is None or isinstance(value, Mapping) or is_list(value):
                raise ConfigError(
                    f"{'.'.join(path)} is {shown(text)}, where {rest[start:end]} is {shown(value)}: within a text "
                    "allowed is a text, a number, true or false"
                )
            filled, rest = filled + rest[:start] + str(value), rest[end:]
        return filled + rest

    def _closing(self, text: str, start: int, path: Path) -> int:
        depth = 0
        for index in range(start, len(text)):
            depth += (text[index] == "{") - (text[index] == "}")
            if text[index] == "}" and depth == 0:
                return index + 1
        raise ConfigError(f"{'.'.join(path)} is {shown(text)}: a reference is not closed, }} is missing")

    def _reference(self, inner: str, path: Path) -> object:
        here = ".".join(path)
        resolver, colon, arguments = _called(inner)
        if not colon:
            inner = str(self._filled(inner, path))
            found = self._find(self._absolute(inner, path))
            if found is _MISSING:
                raise ConfigError(
                    f"{here} refers to {inner.strip()}, and nothing stands there: give it a value, or write "
                    "\\${ where no reference is meant"
                )
            return found
        if resolver not in RESOLVERS:
            raise ConfigError(
                f"{here} is resolved by {resolver!r}, which only the trainer knows: allowed are "
                f"{', '.join(RESOLVERS)} and plain references, or a configuration that is resolved already"
                f"{meant(resolver, RESOLVERS)}"
            )
        if not arguments.strip():
            raise ConfigError(f"{here} refers by {resolver} to nothing: write ${{{resolver}:what is meant}}")
        name, *default = split(arguments, most=1)
        if resolver == "oc.env":
            return self._variable(name, default, path)
        if resolver == "oc.decode":
            text = self._argument(arguments, path)
            return literal(text) if isinstance(text, str) else text
        found = self._find(self._absolute(str(self._argument(name, path)), path))
        if found is _MISSING:
            return self._argument(default[0], path) if default else None
        return found

    def _variable(self, name: str, default: list[str], path: Path) -> object:
        name = str(self._argument(name, path))
        if name in self._environment:
            return EnvironmentText(self._environment[name])
        if not default:
            raise ConfigError(f"{'.'.join(path)} needs the environment variable {name}, which is not set")
        given = self._argument(default[0], path)
        return None if given is None else EnvironmentText(given)  # a text, as it would be out of the environment

    def _argument(self, text: str, path: Path) -> object:
        if "${" not in text:
            return literal(text)
        if text.startswith("[") and text.endswith("]"):
            return [self._argument(part, path) for part in split(text[1:-1])]
        return self._filled(text[1:-1] if is_quoted(text) else text, path)

    def _absolute(self, reference: str, path: Path) -> Path:
        """The path that is meant: `.a` is beside the key, `..a` one level above it; a[b] is another way to say a.b."""
        spelled = re.sub(r"\[([^\]]*)\]", r".\1", reference.strip())
        dots = len(spelled) - len(spelled.lstrip("."))
        parts = tuple(part for part in spelled.split(".") if part)
        return (*path[: len(path) - dots], *parts) if dots else parts


def _called(inner: str) -> tuple[str, str, str]:
    """A resolver, a colon and its arguments; no colon for a plain reference, in which others may have theirs."""
    head, _, _ = inner.partition("${")
    resolver, colon, _ = head.partition(":")
    return (resolver.strip(), colon, inner[len(resolver) + 1 :]) if colon else (inner, "", "")


def _absent(value: object) -> bool:
    """Only a text is compared: what else a trainer keeps, an array say, may not compare as a yes or no."""
    return isinstance(value, str) and value == ABSENT


def overlay(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Both, with what stands above where both say something. Nothing above a mapping leaves that mapping."""
    both = dict(below)
    for key, value in above.items():
        under = both.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            both[key] = overlay(under, value)
        elif not _absent(value) and not (isinstance(under, Mapping) and value is None):
            both[key] = value
    return both
