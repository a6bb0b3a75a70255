"""One mapping of a configuration file, read key by key. Pure.

Every error names the key by its full path, the value that stands there, and what is allowed. Texts that came out of the
environment are read as what they spell, because the environment has nothing but texts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from typing import Final, TypeGuard

from schemas.errors import ConfigError

COUNTS: Final = "whole numbers of at least 0"
MOST_IN_RANGE: Final = 1_000_000
_CLOSE_PER_MILLE: Final = 700
_RANGE: Final = re.compile(r"(\d+)-(\d+)")
_WORDS: Final = {"null": None, "none": None, "~": None, "": None, "true": True, "false": False}


class EnvironmentText(str):
    """A text that was taken out of the environment."""


class Section:
    """A mapping, and the path at which it stands in its file. Nothing at all reads as an empty one.

    path: dotted, "" for the file itself.
    """

    def __init__(self, values: object, path: str = "") -> None:
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"{path or 'the file'} is {shown(values)}: allowed is a mapping of keys")
        self.path = path
        self.values: dict[str, object] = {str(key): value for key, value in (values or {}).items()}

    def key(self, name: str) -> str:
        """The full path of one of its keys."""
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, name: str, allowed: str) -> ConfigError:
        """What is raised for a key whose value is not allowed."""
        return ConfigError(f"{self.key(name)} is {shown(self.values.get(name))}: allowed is {allowed}")

    def unknown(self, known: Iterable[str]) -> list[str]:
        """Its keys that are none of these, each with what was probably meant, as the head of a sentence."""
        names = sorted(known)
        return [f"{self.key(key)} is unknown{meant(key, names)}" for key in self.values if key not in names]

    def section(self, name: str) -> "Section":
        """The mapping below a key; an empty one when there is none."""
        return Section(self.values.get(name), self.key(name))

    def flag(self, name: str, default: bool = False) -> bool:
        """Yes or no."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def whole(self, name: str, least: int = 0) -> int | None:
        """A whole number, or None when nothing stands there."""
        value = self.value(name)
        if value is None:
            return None
        if not is_whole(value) or value < least:
            raise self.wrong(name, f"a whole number of at least {least}{_largest(value)}")
        return value

    def text(self, name: str, default: str = "", most: int | None = None) -> str:
        """A text. most: characters that it may have."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or (most is not None and len(value) > most):
            raise self.wrong(name, "a text" if most is None else f"a text of at most {most} characters")
        return str(value)

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        """One of a few words."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in allowed:
            close = meant(value, allowed) if isinstance(value, str) else ""
            raise self.wrong(name, f"one of {', '.join(allowed)}{close}")
        return str(value)

    def items(self, name: str, allowed: str) -> list[object] | None:
        """The elements of a list, or None when nothing stands there. allowed: of what, for the error."""
        value = self.value(name)
        if value is None:
            return None
        if not is_list(value):
            raise self.wrong(name, f"a list of {allowed}")
        return [literal(one) if isinstance(one, EnvironmentText) else one for one in value]

    def words(self, name: str, allowed: Iterable[str]) -> frozenset[str]:
        """A list of some of a few words."""
        names = sorted(allowed)
        for item in self.items(name, ", ".join(names)) or []:
            if item not in names:
                raise ConfigError(
                    f"{self.key(name)} holds {shown(item)}: allowed are {', '.join(names)}{meant(str(item), names)}"
                )
        return frozenset(str(item) for item in self.items(name, "") or [])

    def numbers(self, name: str, ranges: bool = False) -> frozenset[int] | None:
        """A list of numbers, or None when nothing stands there. ranges: texts such as "5-8" stand for 5, 6, 7 and 8."""
        allowed = f'{COUNTS} and of ranges such as "5-8"' if ranges else COUNTS
        items = self.items(name, allowed)
        if items is None:
            return None
        found: set[int] = set()
        for item in items:
            spelled = _RANGE.fullmatch(item) if ranges and isinstance(item, str) else None
            if spelled is not None:
                first, last = int(spelled[1]), int(spelled[2])
                if first > last:
                    raise ConfigError(f'{self.key(name)} holds "{item}": allowed is a range upwards, "{last}-{first}"')
                if last - first >= MOST_IN_RANGE:
                    raise ConfigError(
                        f'{self.key(name)} holds "{item}": allowed is a range of at most {MOST_IN_RANGE} numbers'
                    )
                found.update(range(first, last + 1))
            elif is_whole(item) and item >= 0:
                found.add(item)
            else:
                raise ConfigError(f"{self.key(name)} holds {shown(item)}: allowed are {allowed}{_largest(item)}")
        return frozenset(found)

    def value(self, name: str) -> object:
        """Whatever stands there, and None when nothing does; of a text out of the environment, what it spells."""
        value = self.values.get(name)
        return literal(value) if isinstance(value, EnvironmentText) else value


def is_whole(value: object) -> TypeGuard[int]:
    """True and false are no numbers here, and neither is what does not fit into 64 bits on the wire."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _largest(value: object) -> str:
    """What is wrong with a number that is one, and is none here."""
    return ", below 2^63" if isinstance(value, int) and value >= 2**63 else ""


def is_list(value: object) -> TypeGuard[Sequence[object] | AbstractSet[object]]:
    """Whatever has elements one after another; a text is no list."""
    return isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes)


def literal(text: str) -> object:
    """What a text spells: null, true, false, a number, a list `[a, b]`, an empty `{}`, a quoted text, or itself."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if re.fullmatch(r"[-+]?\d+(_\d+)*", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", text):
        return float(text)
    if text == "{}":
        return {}
    if text.startswith("[") and text.endswith("]"):
        return [literal(part) for part in split(text[1:-1])]
    return text[1:-1] if is_quoted(text) else text


def is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in "'\""


def split(text: str, most: int = -1) -> list[str]:
    """At the commas outside brackets, braces and quotes. most: splits, -1 for all of them."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        if char == "," and not quote and depth == 0 and len(parts) != most + 1:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts] if text.strip() else []


def shown(value: object) -> str:
    """A value as its file would have it, cut short."""
    match value:
        case None | bool():
            text = {None: "null", True: "true", False: "false"}[value]
        case str():
            text = f"'{value}'"
        case Mapping():
            text = f"a mapping with {', '.join(map(str, value)) or 'no keys'}"
        case _:
            text = str(list(value)) if is_list(value) else repr(value)  # which tells a number from one of NumPy's
    return text if len(text) <= 80 else f"{text[:77]}…"


def meant(word: str, names: Iterable[str]) -> str:
    """`; did you mean x?` when one of the names is close."""
    close = get_close_matches(word, list(names), n=1, cutoff=_CLOSE_PER_MILLE / 1000)
    return f"; did you mean {close[0]}?" if close else ""
