"""`msgspec.convert` for files that people write: every error names the key, its value and what is allowed. Pure."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from schemas.errors import ConfigError
from schemas.identity import NUMBER_MAX

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")


class UnknownKey(NamedTuple):
    """A key that its section does not have. `known` are the section's keys."""

    path: str
    value: object
    known: tuple[str, ...]

    @property
    def suggestion(self) -> str:
        """`; did you mean x?` when a known key is spelled similarly."""
        return did_you_mean(self.path.rpartition(".")[2], self.known)


def convert(value: object, kind: type[T], path: str = "") -> T:
    """Return `value` as a `kind`, strictly. Null counts as absent where a field does not allow null.

    Raises ConfigError, which names the key, its value and what is allowed.

    Args:
        value: Dicts, lists and scalars, as a YAML file has them.
        kind: A Struct whose fields hold scalars, lists and Structs.
        path: Dotted path of `value` in its file, "" for the file itself.
    """
    described = inspect.type_info(kind)
    value = _without_nulls(value, described, path)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), value, described, path) from None


def read_toml(text: str, file: str) -> dict[str, object]:
    """Parse TOML. Raises ConfigError, which names the file."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def convert_known(value: object, kind: type[S], path: str = "") -> S:
    """As `convert`; a key that `kind` does not have is an error, too."""
    for key in unknown_keys(value, kind, path):
        raise ConfigError(f"{key.path} is unknown{key.suggestion}; allowed are {', '.join(key.known)}")
    return convert(value, kind, path)


def convert_file(tree: object, kind: type[S], file: str) -> S:
    """As `convert_known`; errors name the file."""
    try:
        return convert_known(tree, kind)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def unknown_keys(value: object, kind: type[msgspec.Struct], path: str = "") -> list[UnknownKey]:
    """Return the keys of `value`, and of the sections in it, that are not fields of `kind`."""
    return list(_unknown(value, inspect.type_info(kind), path))


def shown(value: object) -> str:
    """Format a value as its file would have it, cut to 80 characters."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"  # Python refuses to write out the largest
    text = repr(list(value) if isinstance(value, tuple) else value)
    text = {"None": "null", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 80 else f"{text[:77]}…"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return `; did you mean x?` when one of the names is spelled similarly, else ""."""
    close = get_close_matches(word, list(names), n=1, cutoff=7 / 10)
    return f"; did you mean {close[0]}?" if close else ""


def join_path(path: str, key: object) -> str:
    """Return the path of a key below `path`."""
    return f"{path}.{key}" if path else str(key)


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    """The alternatives of a union, or the type itself, without annotations."""
    if isinstance(kind, inspect.Metadata):
        return _members(kind.type)
    if isinstance(kind, inspect.UnionType):
        return tuple(member for part in kind.types for member in _members(part))
    return (kind,)


def _fields(kind: inspect.Type) -> dict[str, inspect.Type]:
    """The keys of a section and their types; empty for a type that is not a section."""
    structs = [member for member in _members(kind) if isinstance(member, inspect.StructType)]
    tags = tuple(str(struct.tag) for struct in structs if struct.tag_field is not None)
    tagged = {struct.tag_field: inspect.LiteralType(tags) for struct in structs if struct.tag_field is not None}
    return tagged | {field.encode_name: field.type for struct in structs for field in struct.fields}


def _item(kind: inspect.Type, index: int) -> inspect.Type:
    for member in _members(kind):
        if isinstance(member, inspect.TupleType) and index < len(member.item_types):
            return member.item_types[index]
        if isinstance(member, inspect.VarTupleType | inspect.FrozenSetType):
            return member.item_type
    return kind


def _without_nulls(value: object, kind: inspect.Type, path: str) -> object:
    if isinstance(value, int) and abs(value) > NUMBER_MAX:
        raise ConfigError(f"{path} is {shown(value)}: allowed is a whole number of at most 2^53")
    if isinstance(value, list):
        return [_without_nulls(item, _item(kind, index), f"{path}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    fields, kept = _fields(kind), dict[str, object]()
    for key, entry in value.items():
        field = fields.get(key, inspect.NoneType())
        if entry is not None or inspect.NoneType() in _members(field):
            kept[key] = _without_nulls(entry, field, join_path(path, key))
    return kept


def _unknown(value: object, kind: inspect.Type, path: str) -> Iterator[UnknownKey]:
    for index, item in enumerate(value if isinstance(value, list) else ()):
        yield from _unknown(item, _item(kind, index), f"{path}[{index}]")
    fields = _fields(kind)
    for key, entry in value.items() if fields and isinstance(value, Mapping) else ():
        if key in fields:
            yield from _unknown(entry, fields[key], join_path(path, key))
        else:
            yield UnknownKey(join_path(path, key), entry, tuple(fields))


def _explained(text: str, value: object, kind: inspect.Type, path: str) -> ConfigError:
    """Turn msgspec's message, such as ``Expected `int`, got `str` - at `$.ranks[1]` ``, into one for a person."""
    problem, _, place = text.partition(" - at `$")
    for key, index in re.findall(r"\.([^.\[`]+)|\[(\d+)\]", place):
        if isinstance(value, Mapping):
            kind, value, path = _fields(kind).get(key, kind), value.get(key), join_path(path, key)
        elif isinstance(value, list):
            kind, value, path = _item(kind, int(index)), value[int(index)], f"{path}[{index}]"
    if missing := _MISSING.fullmatch(problem):
        key = missing[1]
        return ConfigError(f"{join_path(path, key)} is missing: allowed is {_allowed(_fields(kind)[key])}")
    if not problem.startswith(("Expected", "Invalid")):  # a check of the Struct's own
        return ConfigError(f"{path} is {shown(value)}: {problem}")
    choices = [name for member in _members(kind) if isinstance(member, inspect.LiteralType) for name in member.values]
    suggestion = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
    return ConfigError(f"{path or 'the file'} is {shown(value)}: allowed is {_allowed(kind)}{suggestion}")


def _allowed(kind: inspect.Type) -> str:
    """Describe the values of a type: by the description in its `Meta`, or else by its bounds."""
    match kind:
        case inspect.Metadata(extra_json_schema={"description": str(description)}):
            return description
        case inspect.Metadata(type=inner):
            return _allowed(inner)
        case inspect.UnionType(types=types):
            return " or ".join(_allowed(member) for member in types if not isinstance(member, inspect.NoneType))
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(sorted(map(str, values)))}"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=least, le=most):
            bounds = [f"at least {least}"] if least is not None else []
            bounds += [f"at most {most}"] if most is not None and most < NUMBER_MAX else []
            return f"a whole number of {' and '.join(bounds)}" if bounds else "a whole number"
        case inspect.StrType(min_length=least, max_length=most):
            return "a text" if most is None else f"a text of {least or 0} to {most} characters"
        case inspect.VarTupleType() | inspect.TupleType() | inspect.FrozenSetType():
            return "a list"
        case _:
            return "a mapping of keys"
