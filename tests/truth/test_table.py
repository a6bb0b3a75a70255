"""The truth table of profiling holds what the code does in every case, and every difference has one explanation."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.errors import ConfigError
from schemas.identity import Identity
from schemas.outcomes import ErrorKind, Reason
from schemas.profiler.config import read_verl_config
from tests.truth import differences
from tests.truth.cases import ENGINES, ROLLOUTS, Case, Manager, Ranks, Space, Step, every, is_possible
from tests.truth.differences import EXPLANATIONS, Place, explained
from tests.truth.ours import ours, seen
from tests.truth.table import Table, condensed, counts, csv_text, tables
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.in_process import TokenizerManagerClient

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "truth-table.md").read_text("utf-8")


@pytest.fixture(scope="module")
def halves() -> list[Table]:
    """Give both halves of the table, with their cases and rows."""
    return tables()


def test_the_data_file_is_what_the_code_does(halves: list[Table]) -> None:
    advice = "run: python -m tests.truth.table > docs/truth-table.csv"
    assert (DOCS / "truth-table.csv").read_text("utf-8") == csv_text(halves), advice


def test_the_page_has_the_counts(halves: list[Table]) -> None:
    quoted = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    names = {"sglang": "rollouts on SGLang", "vllm": "rollouts on vLLM", "rank": "training ranks"}
    assert quoted == [(names[place], f"{cases:,}", f"{same:,}") for place, cases, same in counts(halves)]


def test_the_page_has_the_explanations() -> None:
    quoted = re.findall(r"^(\d+)\. (.+?)(?=^\d+\.|\Z)", PAGE.partition("## Differences")[2], re.MULTILINE | re.DOTALL)
    reasons = [(int(number), " ".join(text.split())) for number, text in quoted]
    assert reasons == [(number, explanation.reason) for number, explanation in enumerate(EXPLANATIONS, 1)]


def test_each_case_matches_one_row_which_states_what_holds(halves: list[Table]) -> None:
    for half in halves:
        stated = [(Case(*values), row.answer) for row in half.rows for values in product(*row.values)]
        assert len(stated) == len(half.answers)
        assert dict(stated) == half.answers, half.name


# --- differences ------------------------------------------------------------------------------------------------------


def test_every_explanation_is_used(halves: list[Table]) -> None:
    used = {number for half in halves for _, of_verl in half.answers.values() for _, number in of_verl}
    assert used - {None} == set(range(1, len(EXPLANATIONS) + 1))


@pytest.mark.parametrize("number", range(1, len(EXPLANATIONS) + 1))
def test_a_difference_without_its_explanation_is_an_error(
    halves: list[Table], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, case, our = next(difference for difference in _differences(halves) if explained(*difference) == number)
    others = tuple(explanation for index, explanation in enumerate(EXPLANATIONS, 1) if index != number)
    monkeypatch.setattr(differences, "EXPLANATIONS", others)
    with pytest.raises(LookupError, match="no explanation"):
        explained(place, case, our)


def test_a_difference_with_two_explanations_is_an_error(halves: list[Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "EXPLANATIONS", EXPLANATIONS * 2)
    with pytest.raises(LookupError, match="explanations"):
        explained(*next(_differences(halves)))


def _differences(halves: list[Table]) -> Iterator[tuple[Place, Case, str]]:
    """The place and the case of each difference, and our answer."""
    for half in halves:
        for case, (our, of_verl) in half.answers.items():
            for place, (_, number) in zip(half.places, of_verl, strict=True):
                if number is not None:
                    yield place, case, our


# --- our answers ------------------------------------------------------------------------------------------------------


def test_the_table_has_every_reason_and_error_of_a_start_and_a_stop(halves: list[Table]) -> None:
    answers = Counter(our for half in halves for our, _ in half.answers.values())
    kinds = {kind for our in answers for kind in re.findall(r"(?:skips|fails): (\w+)", our)}
    assert kinds == {
        *(Reason.NOT_PRIMARY, Reason.DISABLED, Reason.STEP_NOT_SELECTED, Reason.RANK_NOT_SELECTED),
        *(Reason.TOOL_UNSUPPORTED, Reason.ALREADY_PROFILING, Reason.NOT_PROFILING),
        *(ErrorKind.ENGINE_NOT_READY, ErrorKind.TOKENIZER_MISSING, ErrorKind.UNSUPPORTED),
    }


FEWER: Space = {
    **ROLLOUTS,
    "step": (Step.LISTED, Step.ANYWAY),
    "tool": ("torch", "nsys"),
    "ranks": (Ranks.MINE, Ranks.THEIRS),
}


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_our_answer_is_the_same_beside_every_engine(engine: str) -> None:
    wrong = [case for case in every(FEWER) if is_possible(engine, case) and ours(engine, case) != ours("sglang", case)]
    assert wrong == []


def test_the_reader_of_configurations_refuses_an_unknown_tool() -> None:
    section = {"tool": "perf", "enable": True, "tool_config": {}}
    with pytest.raises(ConfigError, match="perf"):
        read_verl_config({"actor_rollout_ref": {"rollout": {"profiler": section}}})


class MultiTokenizerRouter:
    """Stands in for what SGLang has in front of several tokenizer managers. It cannot be asked anything."""

    def __init__(self) -> None:
        self.server_args = object()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_router_in_the_place_of_a_tokenizer_manager_is_observed_as_absent(tmp_path: Path) -> None:
    place = Identity(replica=1, node_rank=0)
    engine = SGLangEngine(place, TokenizerManagerClient(MultiTokenizerRouter()), checkpoints=tmp_path, traces=tmp_path)
    await engine.open()
    observed = await engine.observe()
    assert replace(observed, trouble=None) == seen("sglang", Manager.ROUTER)
    assert "no front end of sglang" in str(observed.trouble)
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
def test_a_function_is_condensed_to_few_rows(answer: object, rows: int) -> None:
    assert callable(answer)
    assert len(condensed(TWO, answer)) == rows
