"""The truth table of profiling as data: `python -m tests.truth.table > docs/truth-table.csv`."""

import csv
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from io import StringIO
from typing import Final, Generic, NamedTuple, TypeVar

from tests.truth.cases import RANKS, ROLLOUTS, Case, Command, Manager, Ranks, Space, every, is_possible
from tests.truth.differences import Place, explained, verl
from tests.truth.gates import NOTHING, WARNED
from tests.truth.ours import NOT_ASKED, ours

VerlAnswer = tuple[str, int | None]
"""verl's answer, and the number of the explanation where ours differs."""
Answers = tuple[str, tuple[VerlAnswer, ...]]
"""Our answer, and verl's at each place."""

COLUMNS: Final[Mapping[str, str]] = {
    "step": "step",
    "node": "node rank",
    "manager": "tokenizer manager",
    "enable": "enabled",
    "tool": "tool",
    "ranks": "ranks",
    "discrete": "discrete",
    "command": "command",
}
VERL: Final[Mapping[Place, str]] = {
    "sglang": "verl on SGLang",
    "vllm": "verl on vLLM",
    "rank": "verl on a training rank",
}
GROUPS: Final[Mapping[frozenset[str], str]] = {
    frozenset({Ranks.ALL, Ranks.MINE, Ranks.NOBODY_FIRST}): "its own",
    frozenset({Ranks.THEIRS, Ranks.NOBODY}): "not its own",
    frozenset({Command.START, Command.AGAIN, Command.NEXT}): "any start",
    frozenset({Command.STOP, Command.ENDED, Command.STRAY}): "any stop",
    frozenset({Command.STOP, Command.STRAY}): "any stop",
}
"""Sets of values that have a name of their own."""


Answer = TypeVar("Answer", bound=Hashable)
Values = tuple[tuple[str, ...], ...]
"""Of each field of a case, in order."""


class Row(NamedTuple, Generic[Answer]):
    """The answer to all cases with these values."""

    values: Values
    answer: Answer


class Table(NamedTuple):
    """One half of the truth table: the answers in each of its cases, and the rows that they condense to."""

    name: str
    space: Space
    places: tuple[Place, ...]
    answers: dict[Case, Answers]
    rows: list[Row[Answers]]


def tables() -> list[Table]:
    """Work out both halves. Raises LookupError for a difference that nobody has explained."""
    return [_table("rollouts", ROLLOUTS, ("sglang", "vllm")), _table("training ranks", RANKS, ("rank",))]


def csv_text(halves: list[Table]) -> str:
    """Format the rows as CSV."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["asked", *COLUMNS.values(), "rolloutctl", *VERL.values()])
    for half in halves:
        for row in half.rows:
            our, of_verl = row.answer
            values = [_value(chosen, half.space[field]) for chosen, field in zip(row.values, COLUMNS, strict=True)]
            answers = {place: _formatted(answer) for place, answer in zip(half.places, of_verl, strict=True)}
            writer.writerow([half.name, *values, our, *(answers.get(place, "") for place in VERL)])
    return text.getvalue()


def counts(halves: list[Table]) -> Iterator[tuple[str, int, int]]:
    """Yield each place, the number of its cases, and in how many of them verl's answer comes to the same as ours."""
    for half in halves:
        for index, place in enumerate(half.places):
            answers = [of_verl[index] for case, (_, of_verl) in half.answers.items() if is_possible(place, case)]
            yield place, len(answers), sum(number is None for _, number in answers)


def _table(name: str, space: Space, places: tuple[Place, ...]) -> Table:
    answers = {case: _answers(places, case) for case in every(space)}
    return Table(name, space, places, answers, condensed(space, answers.__getitem__))


def condensed(space: Space, answer: Callable[[Case], Answer]) -> list[Row[Answer]]:
    """Return rows of which each case matches one. Rows that differ in a single field are merged, field by field."""
    rows = [Row(tuple((value,) for value in case), answer(case)) for case in every(space)]
    for field in range(len(Case._fields)):
        merged: dict[tuple[Values, Values, Answer], list[str]] = {}
        for values, result in rows:
            merged.setdefault((values[:field], values[field + 1 :], result), []).extend(values[field])
        rows = [Row((*before, tuple(values), *behind), result) for (before, behind, result), values in merged.items()]
    return rows


def _answers(places: tuple[Place, ...], case: Case) -> Answers:
    our = ours("rank" if "rank" in places else "sglang", case)
    return our, tuple(_verl(place, case, our) for place in places)


def _verl(place: Place, case: Case, our: str) -> VerlAnswer:
    if place == "vllm" and case.manager == Manager.ROUTER and case.node == "0" and our != NOT_ASKED:
        return "impossible", None
    answer = verl(place, case)
    return NOTHING if answer == WARNED else answer, explained(place, case, our)


def _formatted(answer: VerlAnswer) -> str:
    text, number = answer
    return text if number is None else f"{text} ({number})"


def _value(values: tuple[str, ...], of: tuple[str, ...]) -> str:
    if values == of:
        return of[0] if len(of) == 1 else "any"
    if frozenset(values) in GROUPS:
        return GROUPS[frozenset(values)]
    others = tuple(value for value in of if value not in values)
    if len(others) < len(values) and len(of) > 3:
        return f"any but {'; '.join(others)}"
    return "; ".join(values)


if __name__ == "__main__":
    sys.stdout.write(csv_text(tables()))
