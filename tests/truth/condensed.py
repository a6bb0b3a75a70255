"""A function of cases, in as few rows as it has boxes: sets of values for each field, on which it is constant."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from tests.truth.cases import Case, Space, every

Answer = TypeVar("Answer", bound=Hashable)
Box = tuple[int, ...]
"""For each field the values it may have, as bits in the order of the space."""


class Row(NamedTuple, Generic[Answer]):
    """`answer` holds for every combination of these values."""

    values: dict[str, tuple[str, ...]]
    answer: Answer


def condensed(space: Space, answer: Callable[[Case], Answer]) -> list[Row[Answer]]:
    """Rows that cover the space. They may overlap, and give the same answer where they do.

    Every set of cases is one number, a bit for each case; so a box is a union for each field, and their intersection.
    """
    cases = list(every(space))
    having = [dict.fromkeys(space[field], 0) for field in Case._fields]
    answers: dict[Answer, int] = defaultdict(int)
    for number, case in enumerate(cases):
        bit = 1 << number
        answers[answer(case)] |= bit
        for one, value in zip(having, case, strict=True):
            one[value] |= bit
    rows: list[Row[Answer]] = []
    for said, area in answers.items():
        for box, _ in _cover(area, [list(one.values()) for one in having]):
            values = {
                field: tuple(value for place, value in enumerate(space[field]) if box[number] >> place & 1)
                for number, field in enumerate(Case._fields)
            }
            rows.append(Row(values, said))
    return sorted(
        rows, key=lambda row: [[space[field].index(one) for one in row.values[field]] for field in row.values]
    )


def _cover(area: int, having: list[list[int]]) -> list[tuple[Box, int]]:
    """Boxes within the area that together are all of it: each the largest of those around a case not covered yet."""
    left = area
    chosen: list[tuple[Box, int]] = []
    while left:
        grown = [_grown(left & -left, area, having, order) for order in _orders(len(having))]
        chosen.append(max(grown, key=lambda one: ((one[1] & left).bit_count(), one[1].bit_count())))
        left &= ~chosen[-1][1]
    for box in chosen[::-1]:
        rest = [other for other in chosen if other is not box]
        if not box[1] & ~_union(cells for _, cells in rest):
            chosen = rest
    return chosen


def _union(areas: Iterable[int]) -> int:
    total = 0
    for one in areas:
        total |= one
    return total


def _orders(fields: int) -> Iterable[tuple[int, ...]]:
    """In which order fields are widened: each way round, beginning with each of them."""
    there = tuple(range(fields))
    return chain.from_iterable((way[place:] + way[:place] for place in there) for way in (there, there[::-1]))


def _grown(seed: int, area: int, having: list[list[int]], order: tuple[int, ...]) -> tuple[Box, int]:
    """The box around one case, widened field by field as far as the area goes; and its cells."""
    masks = [next(one for one in values if one & seed) for values in having]
    box = [1 << next(place for place, one in enumerate(values) if one & seed) for values in having]
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
