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
    rows = []
    for said, area in answers.items():
        for box, _ in _cover(area, [list(one.values()) for one in having]):
            values = {
                field: tuple(value for place, value in enumerate(space[field]) if box[number] >> place & 1)
                for number, field in enumerate(Case._fields)
            }
            rows.append((box, Row(values, said)))
    order = {field: {value: place for place, value in enumerate(space[field])} for field in Case._fields}
    return sorted(
        (row for _, row in rows), key=lambda row: [[order[one][value] for value in row.values[one]] for one in order]
    )


def _cover(area: int, having: list[list[int]]) -> Iterable[tuple[Box, int]]:
    """Boxes within the area that together are all of it: the largest of those that hold the first case not covered."""
    left, chosen = area, []
    while left:
        seed = left & -left
        grown = [_grown(seed, area, having, order) for order in _orders(len(having))]
        best = max(grown, key=lambda one: ((one[1] & left).bit_count(), one[1].bit_count()))
        chosen.append(best)
        left &= ~best[1]
    return [
        (box, cells)
        for number, (box, cells) in enumerate(chosen)
        if cells & ~_union(other for place, (_, other) in enumerate(chosen) if place != number)
    ]


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
        rest = area
        for other, mask in enumerate(masks):
            if other != field:
                rest &= mask
        others = _union(having[field])
        for other, mask in enumerate(masks):
            if other != field:
                others &= mask
        for place, value in enumerate(having[field]):
            if others & value == rest & value:
                masks[field] |= value
                box[field] |= 1 << place
    cells = masks[0]
    for mask in masks[1:]:
        cells &= mask
    return tuple(box), cells
