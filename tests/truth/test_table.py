"""The truth table of profiling: that it is what the code says, of all cases, with every difference explained."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.identity import Identity
from schemas.outcomes import ErrorKind, Reason
from schemas.profiler.config import read_verl_config
from tests.truth import differences
from tests.truth.cases import (
    ANYWAY,
    ENGINES,
    LISTED,
    MINE,
    RANKS,
    ROLLOUTS,
    ROUTER,
    THEIRS,
    Case,
    Space,
    every,
    stands,
)
from tests.truth.condensed import condensed
from tests.truth.differences import EXPLANATIONS, Place, explained
from tests.truth.ours import ours, seen
from tests.truth.table import SECTIONS, Drawn, drawn, page
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.in_process import TokenizerManagerClient

pytestmark = pytest.mark.xdist_group("truth table")

PAGE = Path(__file__).parents[2] / "docs" / "truth-table.md"


@pytest.fixture(scope="module")
def tables() -> list[Drawn]:
    """Every section, with its cases and rows."""
    return drawn()


def test_the_page_is_what_the_code_says(tables: list[Drawn]) -> None:
    advice = "docs/truth-table.md is not what the code says: python -m tests.truth.table > docs/truth-table.md"
    assert PAGE.read_text("utf-8") == page(tables), advice


def test_the_sections_are_all_cases_each_once() -> None:
    told = Counter((section.places, case) for section in SECTIONS for case in every(section.space))
    wanted = {
        (places, case)
        for places, space in ((("sglang", "vllm"), ROLLOUTS), (("rank",), RANKS))
        for case in every(space)
    }
    assert set(told) == wanted and set(told.values()) == {1}


def test_the_rows_are_all_cases_and_each_says_what_holds(tables: list[Drawn]) -> None:
    for one in tables:
        told = set()
        for row in one.rows:
            for values in product(*row.values.values()):
                case = Case(*values)
                assert one.answers[case] == row.answer
                told.add(case)
        assert told == set(one.answers), one.section.title


# --- differences ------------------------------------------------------------------------------------------------------


def test_every_explanation_explains_something(tables: list[Drawn]) -> None:
    used = {number for one in tables for _, theirs in one.answers.values() for _, number in theirs}
    assert used - {None} == set(range(1, len(EXPLANATIONS) + 1))


@pytest.mark.parametrize("number", range(1, len(EXPLANATIONS) + 1))
def test_a_difference_without_its_explanation_is_an_error(
    tables: list[Drawn], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, case, our = next(one for one in _differences(tables) if explained(*one) == number)
    left = tuple(one for index, one in enumerate(EXPLANATIONS, 1) if index != number)
    monkeypatch.setattr(differences, "EXPLANATIONS", left)
    with pytest.raises(LookupError, match="no explanation"):
        explained(place, case, our)


def test_a_difference_with_two_explanations_is_an_error(tables: list[Drawn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "EXPLANATIONS", EXPLANATIONS * 2)
    with pytest.raises(LookupError, match="explanations"):
        explained(*next(_differences(tables)))


def _differences(tables: list[Drawn]) -> Iterator[tuple[Place, Case, str]]:
    """Where, in which case, and our answer."""
    for one in tables:
        for case, (our, theirs) in one.answers.items():
            for place, (_, number) in zip(one.section.places, theirs, strict=True):
                if number is not None:
                    yield place, case, our


# --- our answers ------------------------------------------------------------------------------------------------------


def test_every_reason_and_error_of_a_start_and_a_stop_is_in_the_table(tables: list[Drawn]) -> None:
    ours_all = {our for one in tables for our, _ in one.answers.values()}
    said = {word for our in ours_all for word in re.findall(r"(?:skips|fails): (\w+)", our)}
    assert said == {
        *(Reason.NOT_PRIMARY, Reason.DISABLED, Reason.STEP_NOT_SELECTED, Reason.RANK_NOT_SELECTED),
        *(Reason.TOOL_UNSUPPORTED, Reason.ALREADY_PROFILING, Reason.NOT_PROFILING),
        *(ErrorKind.ENGINE_NOT_READY, ErrorKind.TOKENIZER_MISSING, ErrorKind.UNSUPPORTED),
    }


FEWER: Space = {**ROLLOUTS, "step": (LISTED, ANYWAY), "tool": ("torch", "nsys"), "ranks": (MINE, THEIRS)}


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_our_answer_is_the_same_beside_every_engine(engine: str) -> None:
    wrong = [case for case in every(FEWER) if stands(engine, case) and ours(engine, case) != ours("sglang", case)]
    assert wrong == []


def test_the_reader_of_configurations_refuses_a_tool_that_nobody_knows() -> None:
    section = {"tool": "perf", "enable": True, "tool_config": {}}
    with pytest.raises(ConfigError, match="perf"):
        read_verl_config({"actor_rollout_ref": {"rollout": {"profiler": section}}})


class MultiTokenizerRouter:
    """What SGLang puts in the place of its tokenizer manager: it hands messages on, and can't be asked anything."""

    def __init__(self) -> None:
        self.server_args = object()


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_a_router_in_the_place_of_a_tokenizer_manager_is_seen_as_absent(tmp_path: Path) -> None:
    place = Identity(replica=1, node_rank=0)
    engine = SGLangEngine(place, TokenizerManagerClient(MultiTokenizerRouter()), checkpoints=tmp_path, traces=tmp_path)
    await engine.open()
    observed = await engine.observe()
    assert observed == seen("sglang", ROUTER)
    await engine.close()


# --- condensing -------------------------------------------------------------------------------------------------------

TWO: Space = dict.fromkeys(Case._fields, ("a", "b"))


@pytest.mark.parametrize(
    ("answer", "rows"),
    [
        (lambda case: 0, 1),
        (lambda case: case.step, 2),
        (lambda case: case.step == "a" or case.tool == "a", 3),
        (lambda case: (case.step == "a") != (case.tool == "a"), 4),
    ],
)
def test_a_function_is_told_in_as_few_rows_as_it_has_boxes(answer: object, rows: int) -> None:
    assert callable(answer)
    assert len(condensed(TWO, answer)) == rows
