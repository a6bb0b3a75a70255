"""Syncs with `in_flight="keep"` on real engines under requests that always run: what frozen and new requests get."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from schemas.outcomes import Acted
from tests.engines.reports import conclusions
from tests.engines.soak import ANSWER, FROZEN_PROMPT, PROBE, KeepFleet, wrong_answers

SYNCS = 3


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("vllm", marks=[pytest.mark.engine_vllm, pytest.mark.timeout(480)]),
        pytest.param("sglang", marks=[pytest.mark.engine_sglang, pytest.mark.timeout(480)]),
    ],
)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeepFleet]:
    kind: str = request.param
    with ExitStack() as open_:
        yield KeepFleet(kind, tmp_path_factory.mktemp(kind), open_)


def other(name: str) -> str:
    return "b" if name == "a" else "a"


def test_syncs_in_a_row_are_committed_under_requests_that_always_run(fleet: KeepFleet) -> None:
    for _ in range(SYNCS):
        frozen = fleet.stream(FROZEN_PROMPT)
        frozen.grows_to(2)
        report = fleet.sync(other(fleet.held))
        assert report.status == "committed" and report.loaded == (0,), report
        committed = conclusions(report.phases[2])["0.0"]
        assert isinstance(committed, Acted) and committed.calls == ("flush", "resume"), report
        assert not wrong_answers(fleet, frozen)
        assert fleet.plane.status().replicas[0].serving == fleet.version


def test_a_frozen_request_is_of_the_old_weights_up_to_one_token_and_of_the_new_ones_from_there_on(
    fleet: KeepFleet,
) -> None:
    old, new = fleet.held, other(fleet.held)
    frozen = fleet.stream(FROZEN_PROMPT)
    frozen.grows_to(20)
    began = len(frozen.tokens)
    fleet.sync(new).raise_unless_committed()
    ended = len(frozen.tokens)
    frozen.grows_to(ended + 2 * ANSWER)
    made = frozen.tokens[: ended + 2 * ANSWER]
    frozen.end()
    fleet.sync(old).raise_unless_committed()
    alone = fleet.answer(FROZEN_PROMPT, len(made))
    turn = next(place for place, (seen, by_old) in enumerate(zip(made, alone, strict=True)) if seen != by_old)
    assert turn >= began
    fleet.sync(new).raise_unless_committed()
    assert fleet.answer([*FROZEN_PROMPT, *made[:turn]], len(made) - turn) == made[turn:]


def test_a_cached_prompt_is_answered_by_the_weights_that_are_loaded_after_a_pause_by_hand(fleet: KeepFleet) -> None:
    """The pause and the load belong to two commands, and the flush to the load."""
    wanted = other(fleet.held)
    fleet.answer(PROBE)
    frozen = fleet.stream(FROZEN_PROMPT)
    frozen.grows_to(2)
    fleet.plane.pause("keep").wait()
    fleet.sync(wanted).raise_unless_committed()
    fleet.plane.resume().wait()
    assert not wrong_answers(fleet, frozen)
