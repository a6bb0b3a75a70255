"""The truth table of profiling as a document: `python -m tests.truth.table > docs/truth-table.md`."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from textwrap import fill
from typing import Final, NamedTuple

from tests.truth.cases import (
    ABSENT,
    AGAIN,
    ALL,
    ANYWAY,
    ENDED,
    LISTED,
    MINE,
    NEVER,
    NEXT,
    NOBODY,
    NOBODY_FIRST,
    NONE,
    OTHERS,
    PRESENT,
    RANKS,
    ROLLOUTS,
    ROUTER,
    SOON,
    START,
    STOP,
    STRAY,
    THEIRS,
    UNABLE,
    Case,
    Space,
    every,
    stands,
)
from tests.truth.condensed import Row, condensed
from tests.truth.differences import EXPLANATIONS, Place, explained, verl
from tests.truth.gates import NOTHING, WARNED
from tests.truth.ours import NOT_ASKED, ours

Said = tuple[str, int | None]
"""An answer of verl, and the number of the explanation where ours comes to something else."""
Answers = tuple[str, tuple[Said, ...]]
"""Ours, and each of verl's."""


class Section(NamedTuple):
    """A part of the cases, under a title of its own. Together the sections are all cases, each once."""

    title: str
    space: Space
    places: tuple[Place, ...] = ("sglang", "vllm")


def _within(space: Space, **values: tuple[str, ...]) -> Space:
    return {**space, **values}


_STARTS, _STOPS = (START, AGAIN, NEXT), (STOP, ENDED, STRAY)
_SENT = (LISTED, ANYWAY)

SECTIONS: Final = (
    Section("Rollouts: a step that is not to be profiled", _within(ROLLOUTS, step=(OTHERS, NONE))),
    Section("Rollouts: the other nodes of a replica", _within(ROLLOUTS, step=_SENT, node=("1",))),
    Section(
        "Rollouts: a start, where the engine can be commanded",
        _within(ROLLOUTS, step=(LISTED,), node=("0",), front=(PRESENT,), command=_STARTS),
    ),
    Section(
        "Rollouts: a stop, where the engine can be commanded",
        _within(ROLLOUTS, step=(LISTED,), node=("0",), front=(PRESENT,), command=_STOPS),
    ),
    Section(
        "Rollouts: the engine launches, and is up in time",
        _within(ROLLOUTS, step=(LISTED,), node=("0",), front=(SOON,)),
    ),
    Section(
        "Rollouts: the engine can't be commanded",
        _within(ROLLOUTS, step=_SENT, node=("0",), front=(ROUTER, UNABLE, ABSENT, NEVER)),
    ),
    Section(
        "Rollouts: a step that is not listed, and somebody sends the command",
        _within(ROLLOUTS, step=(ANYWAY,), node=("0",), front=(PRESENT, SOON)),
    ),
    Section("Training ranks: a step that is not to be profiled", _within(RANKS, step=(OTHERS, NONE)), ("rank",)),
    Section("Training ranks: a start", _within(RANKS, step=(LISTED,), command=_STARTS), ("rank",)),
    Section("Training ranks: a stop", _within(RANKS, step=(LISTED,), command=(STOP, STRAY)), ("rank",)),
    Section(
        "Training ranks: a step that is not listed, and somebody sends the command",
        _within(RANKS, step=(ANYWAY,)),
        ("rank",),
    ),
)

COLUMNS: Final[Mapping[str, str]] = {
    "step": "step",
    "node": "node rank",
    "front": "tokenizer manager",
    "enable": "enabled",
    "tool": "tool",
    "ranks": "ranks",
    "discrete": "discrete",
    "command": "command",
}
VERL: Final[Mapping[Place, str]] = {"sglang": "verl, SGLang", "vllm": "verl, vLLM", "rank": "verl"}
GROUPS: Final[Mapping[frozenset[str], str]] = {
    frozenset({ALL, MINE, NOBODY_FIRST}): "its own",
    frozenset({THEIRS, NOBODY}): "not its own",
    frozenset(_STARTS): "start, in any case",
    frozenset(_STOPS): "stop, in any case",
    frozenset({STOP, STRAY}): "stop, in any case",
}
"""Sets of values that have a name of their own."""

OPENING: Final = """\
# The truth table of profiling

What becomes of a command in each case: what we do, and what verl 0.9.1 does. The page is generated; only the
explanations at its end are written by hand.

- *Ours* is our own code: one configuration of verl is read by `schemas/profiler/verl_format.py`, the trainer's side
  (`controlplane/machine/profiling.py`) says what is sent, and the agent's machine (`workers/machine/decide.py`) is
  folded over what happens (`tests/truth/ours.py`). It is the same beside SGLang, vLLM and the tiny engine.
- *verl* is `tests/truth/gates.py`, which states its gates. A test downloads verl 0.9.1 and runs verl's own code (its
  servers' methods, its trainer's lines, its `DistProfiler` with its tools) beside them in every case.
- There are {cases} cases. A row stands for all that it fits; `*` is any value. Rows may overlap, and then say the same.
- A number in brackets is that of the explanation below, for what does not come to the same. What is done on both sides
  is the same, and so is what is done on neither. A failure is never the same: ours is an outcome that the trainer is
  told while its step goes on.

Of {sglang_all} cases beside SGLang {sglang} come to the same, of {vllm_all} beside vLLM {vllm}, and of {ranks_all} of
training ranks {ranks}. Of the others {first} are those of explanation 1.

    python -m tests.truth.table > docs/truth-table.md               # make this page anew
    python -m pytest tests/truth                                    # the page, our answers, the explanations
    python -m pytest -m engine_wheels tests/truth/test_gates.py     # verl's own code beside the gates (2 MB)
    python -m pytest -m engine_wheels tests/truth                   # and what is said of the engines (600 MB)

## The words

| word | meaning |
| --- | --- |
| step: listed, not listed, none listed | in `global_profiler.steps`; not in it; the list is null |
| step: {anyway} | the plan lists other steps, and the command comes all the same, from whoever sends it |
| tokenizer manager: {present} | this node has what commands its engine: a `TokenizerManager`, or vLLM's `AsyncLLM` |
| {router} | SGLang's router in front of several tokenizer workers; vLLM has none (–) |
| {unable} | the engine was launched without what profiling needs |
| {absent} | it was launched, and there is none |
| {soon}; {never} | it is not there when the command comes; it comes in the command's time, or not |
| ranks: its own | all; or one of its ranks is named; or nobody is named and it has rank 0 |
| ranks: not its own | others are named; or nobody is named, and it has not rank 0 |
| tool: unknown; null | one that nobody knows (our reader of configurations refuses it; this is the agent); none |
| discrete | `tool_config.<tool>.discrete` |
| not asked | the trainer sends nothing |
| skips, fails | our outcome, with its reason or error: [the decision table](decision-table.md) |
| nothing | verl does nothing, and is silent: only a tool that its servers lack is warned of, at their launch |
| calls, and is ignored | verl calls the engine, and the engine leaves everything as it is |
| raises | an exception leaves verl's method and ends the training step, with whatever was to come in it |

A stop, where not said otherwise, comes after the start of the same step, whatever became of that.
"""


class Drawn(NamedTuple):
    """A section with what is said of each of its cases, and the rows that say it."""

    section: Section
    answers: dict[Case, Answers]
    rows: list[Row[Answers]]


def drawn() -> list[Drawn]:
    """All sections. Raises LookupError for a difference that nobody has explained."""
    tables = []
    for section in SECTIONS:
        answers = {case: _answers(section.places, case) for case in every(section.space)}
        tables.append(Drawn(section, answers, condensed(section.space, answers.__getitem__)))
    return tables


def page(tables: list[Drawn]) -> str:
    """The whole document."""
    same, of, first = Counter[Place](), Counter[Place](), 0
    for one in tables:
        for case, (_, theirs) in one.answers.items():
            for place, (_, number) in zip(one.section.places, theirs, strict=True):
                if place == "rank" or stands(place, case):
                    of[place] += 1
                    same[place] += number is None
                    first += number == 1
    numbers = {
        **{"cases": sum(len(one.answers) for one in tables), "first": first},
        **{"sglang": same["sglang"], "vllm": same["vllm"], "ranks": same["rank"]},
        **{"sglang_all": of["sglang"], "vllm_all": of["vllm"], "ranks_all": of["rank"]},
    }
    words = {"anyway": ANYWAY, "present": PRESENT, "router": ROUTER, "unable": UNABLE, "absent": ABSENT}
    counted = {name: f"{number:,}" for name, number in numbers.items()}
    opening = OPENING.format(**counted, **words, soon=SOON, never=NEVER)
    body = [line for one in tables for line in ("", f"## {one.section.title}", "", *_rows(one.section, one.rows))]
    why = [
        fill(f"{number}. {one.reason}", 120, subsequent_indent=" " * len(f"{number}. "))
        for number, one in enumerate(EXPLANATIONS, 1)
    ]
    return "\n".join([opening.rstrip(), *body, "", "## Where they differ", "", *why]) + "\n"


def _answers(places: tuple[Place, ...], case: Case) -> Answers:
    our = ours("rank" if "rank" in places else "sglang", case)
    return our, tuple(_verl(place, case, our) for place in places)


def _verl(place: Place, case: Case, our: str) -> Said:
    if place == "vllm" and case.front == ROUTER and case.node == "0" and our != NOT_ASKED:
        return "–", None
    theirs = verl(place, case)
    return NOTHING if theirs == WARNED else theirs, explained(place, case, our)


def _rows(section: Section, rows: list[Row[Answers]]) -> Iterator[str]:
    """A table. What is the same in all rows is said above it once, or not at all where it makes no difference."""
    fixed = [field for field in COLUMNS if len(section.space[field]) == 1 and len(ROLLOUTS[field]) > 1]
    fixed = [] if "rank" in section.places else fixed
    if fixed:
        yield "; ".join(f"{COLUMNS[field]}: {section.space[field][0]}" for field in fixed) + "."
        yield ""
    open_fields = [field for field in COLUMNS if any(row.values[field] != section.space[field] for row in rows)]
    heads = [*(COLUMNS[field] for field in open_fields), "ours", *(VERL[place] for place in section.places), ""]
    yield f"| {' | '.join(heads)} |"
    yield "| " + " | ".join("---" for _ in heads) + " |"
    for row in rows:
        our, theirs = row.answer
        values = [_value(row.values[field], section.space[field]) for field in open_fields]
        told = [f"{said} ({number})" if number is not None else said for said, number in theirs]
        verdict = "same" if all(number is None for _, number in theirs) else "different"
        yield f"| {' | '.join([*values, our, *told, verdict])} |"


def _value(values: tuple[str, ...], of: tuple[str, ...]) -> str:
    if values == of:
        return "*"
    if frozenset(values) in GROUPS:
        return GROUPS[frozenset(values)]
    others = tuple(one for one in of if one not in values)
    if len(others) < len(values) and len(of) > 3:
        return f"any but {'; '.join(others)}"
    return "; ".join(values)


if __name__ == "__main__":
    sys.stdout.write(page(drawn()))
