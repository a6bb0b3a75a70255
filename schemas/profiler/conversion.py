"""`msgspec.convert` for files that people write: every error names the key, its value and what is allowed. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from schemas.errors import ConfigError

T = TypeVar("T")
_CLOSE_PER_MILLE: Final = 700
_LARGEST: Final = 2**63 - 1
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")


class UnknownKey(NamedTuple):
    """A key that its section does not have. `known` are the section's keys."""

    path: str
    value: object
    known: tuple[str, ...]

    @property
    def suggestion(self) -> str:
        """`; did you mean x?` when a known key is spelled alike."""
        return did_you_mean(self.path.rpartition(".")[2], self.known)


def convert(value: object, kind: type[T], path: str = "") -> T:
    """Return `value` as a `kind`, strictly. Null counts as absent where a field does not allow null.

    Args:
        value: Mappings, lists and scalars, as a YAML file has them.
        kind: A Struct whose fields hold scalars, lists and Structs.
        path: Dotted path of `value` in its file, "" for the file itself.

    Raises:
        ConfigError: The text names the key, its value and what is allowed.
    """
    value = _without_nulls(value, inspect.type_info(kind), path)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), value, inspect.type_info(kind), path) from None


def unknown_keys(value: object, kind: type[msgspec.Struct], path: str = "") -> list[UnknownKey]:
    """Return the keys of `value`, and of the sections in it, that no field of `kind` stands for."""
    return list(_unknown(value, inspect.type_info(kind), path))


def shown(value: object) -> str:
    """Format a value as its file would have it, cut to 80 characters."""
    match value:
        case None | bool():
            text = {None: "null", True: "true", False: "false"}[value]
        case str():
            text = f"'{value}'"
        case Mapping():
            text = f"a mapping with {', '.join(map(str, value)) or 'no keys'}"
        case tuple():
            text = str(list(value))
        case _:
            text = repr(value)  # which tells a number from one of NumPy's
    return text if len(text) <= 80 else f"{text[:77]}…"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return `; did you mean x?` when one of the names is spelled alike, else ""."""
    close = get_close_matches(word, list(names), n=1, cutoff=_CLOSE_PER_MILLE / 1000)
    return f"; did you mean {close[0]}?" if close else ""


def joined(path: str, key: object) -> str:
    """Return the path of a key below `path`."""
    return f"{path}.{key}" if path else str(key)


# --- types ------------------------------------------------------------------------------------------------------------


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    """The alternatives of a union, without annotations; a tuple of one for any other type."""
    if isinstance(kind, inspect.Metadata):
        return _members(kind.type)
    if isinstance(kind, inspect.UnionType):
        return tuple(member for part in kind.types for member in _members(part))
    return (kind,)


def _parts(kind: inspect.Type) -> list[inspect.Type]:
    """The alternatives of a union, with their annotations, null left out."""
    parts = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [part for part in parts if not isinstance(part, inspect.NoneType)]


def _fields(kind: inspect.Type) -> dict[str, inspect.Type]:
    """The keys of a section and their types; empty for a type that is not a section."""
    for member in _members(kind):
        if isinstance(member, inspect.StructType):
            return {field.encode_name: field.type for field in member.fields}
    return {}


def _item(kind: inspect.Type, index: int) -> inspect.Type:
    for member in _members(kind):
        if isinstance(member, inspect.TupleType) and index < len(member.item_types):
            return member.item_types[index]
        if isinstance(member, inspect.VarTupleType | inspect.FrozenSetType):
            return member.item_type
    return kind


def _without_nulls(value: object, kind: inspect.Type, path: str) -> object:
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ConfigError(f"{path} is {shown(value)}: allowed is a whole number below 2^63")
    if isinstance(value, list):
        return [_without_nulls(item, _item(kind, index), f"{path}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    fields = _fields(kind)
    kept: dict[str, object] = {}
    for key, entry in value.items():
        field = fields.get(key, inspect.NoneType())
        if entry is not None or any(isinstance(member, inspect.NoneType) for member in _members(field)):
            kept[key] = _without_nulls(entry, field, joined(path, key))
    return kept


def _unknown(value: object, kind: inspect.Type, path: str) -> Iterator[UnknownKey]:
    fields = _fields(kind)
    if not fields or not isinstance(value, Mapping):
        return
    for key, entry in value.items():
        if key in fields:
            yield from _unknown(entry, fields[key], joined(path, key))
        else:
            yield UnknownKey(joined(path, key), entry, tuple(fields))


# --- errors -----------------------------------------------------------------------------------------------------------


def _explained(text: str, value: object, kind: inspect.Type, path: str) -> ConfigError:
    """Turn msgspec's message, such as ``Expected `int`, got `str` - at `$.ranks[1]` ``, into one for a person."""
    problem, _, place = text.rpartition(" - at `$") if " - at `$" in text else (text, "", "")
    for key, index in re.findall(r"\.([^.\[`]+)|\[(\d+)\]", place):
        if isinstance(value, Mapping):
            kind, value, path = _fields(kind).get(key, kind), value.get(key), joined(path, key)
        elif isinstance(value, list):
            kind, value, path = _item(kind, int(index)), value[int(index)], f"{path}[{index}]"
    if missing := _MISSING.fullmatch(problem):
        key = missing[1]
        return ConfigError(f"{joined(path, key)} is missing: allowed is {_allowed(_fields(kind)[key])}")
    suggestion = did_you_mean(value, _choices(kind)) if isinstance(value, str) else ""
    return ConfigError(f"{path or 'the file'} is {shown(value)}: allowed is {_allowed(kind)}{suggestion}")


def _choices(kind: inspect.Type) -> list[str]:
    return [
        str(value) for member in _members(kind) if isinstance(member, inspect.LiteralType) for value in member.values
    ]


def _allowed(kind: inspect.Type) -> str:
    """Describe the values of a type: by the description in its `Meta`, or else by its bounds."""
    match kind:
        case inspect.Metadata(extra_json_schema={"description": str(description)}):
            return description
        case inspect.Metadata(type=inner):
            return _allowed(inner)
        case inspect.LiteralType() | inspect.UnionType() if choices := sorted(_choices(kind)):
            others = [member for member in _parts(kind) if not isinstance(member, inspect.LiteralType)]
            described = [_allowed(member) for member in others]
            return " or ".join([", ".join(choices), *described]) if described else f"one of {', '.join(choices)}"
        case inspect.UnionType():
            return " or ".join(_allowed(member) for member in _parts(kind))
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=least):
            return "a whole number" if least is None else f"a whole number of at least {least}"
        case inspect.StrType(min_length=least, max_length=most):
            bounds = f" of {least or 0} to {most} characters" if most is not None else ""
            return f"a text{bounds}"
        case inspect.VarTupleType() | inspect.TupleType() | inspect.FrozenSetType():
            return "a list"
        case _:
            return "a mapping of keys"
