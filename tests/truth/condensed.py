"""Condense a function of cases to few rows: sets of values, one for each field, on which it is constant."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from tests.truth.cases import Case, Space, every

Answer = TypeVar("Answer", bound=Hashable)
Box = tuple[int, ...]
"""The values that each field may have, as bits in the order of the space."""


class Row(NamedTuple, Generic[Answer]):
    """`answer` is the function's value for every combination of these values."""

    values: dict[str, tuple[str, ...]]
    answer: Answer


def condensed(space: Space, answer: Callable[[Case], Answer]) -> list[Row[Answer]]:
    """Return rows that cover the space. Rows may overlap, and then have the same answer.

    A set of cases is one integer with a bit for each case. A box is the intersection of one union for each field.
    """
    cases = list(every(space))
    having = [dict.fromkeys(space[field], 0) for field in Case._fields]
    answers: dict[Answer, int] = defaultdict(int)
    for number, case in enumerate(cases):
        bit = 1 << number
        answers[answer(case)] |= bit
        for cells, value in zip(having, case, strict=True):
            cells[value] |= bit
    rows: list[Row[Answer]] = []
    for result, area in answers.items():
        for box, _ in _cover(area, [list(cells.values()) for cells in having]):
            values = {
                field: tuple(name for place, name in enumerate(space[field]) if box[number] >> place & 1)
                for number, field in enumerate(Case._fields)
            }
            rows.append(Row(values, result))
    return sorted(
        rows, key=lambda row: [[space[field].index(name) for name in row.values[field]] for field in row.values]
    )


def _cover(area: int, having: list[list[int]]) -> list[tuple[Box, int]]:
    """Boxes that together are the area, each the largest of those around a case that is not covered yet."""
    left = area
    chosen: list[tuple[Box, int]] = []
    while left:
        grown = [_grown(left & -left, area, having, order) for order in _orders(len(having))]
        chosen.append(max(grown, key=lambda box: ((box[1] & left).bit_count(), box[1].bit_count())))
        left &= ~chosen[-1][1]
    for box in chosen[::-1]:
        rest = [other for other in chosen if other is not box]
        if not box[1] & ~_union(cells for _, cells in rest):
            chosen = rest
    return chosen


def _union(areas: Iterable[int]) -> int:
    total = 0
    for area in areas:
        total |= area
    return total


def _orders(fields: int) -> Iterable[tuple[int, ...]]:
    """The orders in which fields are widened: forwards and backwards, beginning with each field."""
    order = tuple(range(fields))
    return chain.from_iterable((way[place:] + way[:place] for place in order) for way in (order, order[::-1]))


def _grown(seed: int, area: int, having: list[list[int]], order: tuple[int, ...]) -> tuple[Box, int]:
    """The box around one case, widened field by field within the area; and its cells."""
    masks = [next(cells for cells in values if cells & seed) for values in having]
    box = [1 << next(place for place, cells in enumerate(values) if cells & seed) for values in having]
    for field in order:
        line = _union(having[field])
        for other, mask in enumerate(masks):
            if other != field:
                line &= mask
        for place, value in enumerate(having[field]):
            if not line & value & ~area:
                masks[field] |= value
                box[field] |= 1 << place
    cells = masks[0]
    for mask in masks[1:]:
        cells &= mask
    return tuple(box), cells
