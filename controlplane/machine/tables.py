"""Tables of a state, which is replaced and never changed, at a cost that hardly grows with the table. Pure.

A `Table` is two dicts that nobody changes: a large one that many tables share, and the few entries that differ from it.
To set an entry copies the few. When they might be more than `CHANGES_MAX`, or somebody goes through the table, they are
merged. Its order is that of a dict: the same events lead to the same order, whoever has looked at it meanwhile.

Any thread may go through a table at any time. Who merges writes the base before it empties the changes, and everybody
reads the changes before the base, so nobody misses an entry.
"""

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Final, Self, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

CHANGES_MAX: Final = 64


class Table(Mapping[K, V]):
    """A mapping that equals the dict with the same entries.

    Args:
        entries: If that is a dict, nobody may change it afterwards.
    """

    __slots__ = ("_base", "_changes", "_size")

    def __init__(self, entries: Mapping[K, V]) -> None:
        self._base: dict[K, V] = as_dict(entries)
        self._changes: dict[K, V] = {}
        self._size = len(self._base)

    def with_entries(self, entries: Mapping[K, V]) -> Self:
        """Return the table with some entries."""
        table = object.__new__(type(self))
        changes, base, size = self._changes, self._base, self._size
        if len(entries) + len(changes) > CHANGES_MAX:
            table._base, table._changes = {**base, **changes, **entries}, {}
            table._size = len(table._base)
            return table
        for key in entries:
            if key not in changes and key not in base:
                size += 1
        table._base, table._changes, table._size = base, {**changes, **entries}, size
        return table

    def without(self, key: K) -> Self:
        """Return the table without an entry, if it has it. That costs a copy of the whole."""
        if key not in self:
            return self
        return type(self)({other: value for other, value in self.items() if other != key})

    def as_dict(self) -> dict[K, V]:
        """Return the entries as a dict, which nobody may change."""
        changes, base = self._changes, self._base
        if changes:
            self._base = base = {**base, **changes}
            self._changes = {}
        return base

    def __getitem__(self, key: K) -> V:
        changes = self._changes
        return changes[key] if key in changes else self._base[key]

    @overload
    def get(self, key: K, /) -> V | None: ...
    @overload
    def get(self, key: K, /, default: V | D) -> V | D: ...
    def get(self, key: K, /, default: V | D | None = None) -> V | D | None:
        """Return the value of a key, or the default."""
        changes = self._changes
        return changes[key] if key in changes else self._base.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._changes or key in self._base

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        return iter(self.as_dict())

    def keys(self) -> KeysView[K]:
        """Return the keys, in order."""
        return self.as_dict().keys()

    def values(self) -> ValuesView[V]:
        """Return the values, in order."""
        return self.as_dict().values()

    def items(self) -> ItemsView[K, V]:
        """Return the entries, in order."""
        return self.as_dict().items()

    def __eq__(self, other: object) -> bool:
        return self.as_dict() == (other.as_dict() if isinstance(other, Table) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.as_dict())


def as_dict(table: Mapping[K, V]) -> dict[K, V]:
    """Return the entries as a dict, which nobody may change. `dict(table)` would ask for each key."""
    if type(table) is dict:
        return table
    return table.as_dict() if isinstance(table, Table) else dict(table)


def with_entries(table: Mapping[K, V], entries: Mapping[K, V]) -> Mapping[K, V]:
    """Return the table with some entries. A small one is a dict."""
    if type(table) is dict and len(table) + len(entries) <= CHANGES_MAX:
        return {**table, **entries}
    return (table if isinstance(table, Table) else Table(table)).with_entries(entries)


def without(table: Mapping[K, V], key: K) -> Mapping[K, V]:
    """Return the table without an entry, if it has it."""
    return Table(table).without(key) if key in table else table
