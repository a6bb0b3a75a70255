"""Syncs with `in_flight="keep"` on real engines under requests that always run: what frozen and new requests get."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from schemas.outcomes import Acted
from tests.engines.reports import conclusions
from tests.engines.soak import ANSWER, FROZEN_PROMPT, PROBE, KeepFleet, wrong_answers

SYNCS = 3
TRACED = {"vllm": 4000, "sglang": 1500}
"""Tokens of a request that outlasts a sync, and is waited for."""


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


def goes_on(fleet: KeepFleet, made: Sequence[int], begin: int) -> bool:
    """Whether the weights that are held go on as the request did, from a token on.

    A few tokens at once: rounding differs with what else runs, and adds up.
    """
    stretch = list(made[begin : begin + ANSWER])
    return fleet.answer([*FROZEN_PROMPT, *made[:begin]], len(stretch)) == stretch


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
    fleet.answer(PROBE)  # by then all of the old weights have come
    ended = len(frozen.tokens)
    frozen.grows_to(ended + 2 * ANSWER)
    made = frozen.tokens[: ended + 2 * ANSWER]
    frozen.close()
    fleet.sync(old).raise_unless_committed()
    places = range(began - ANSWER, ended + ANSWER)
    last_alone = places[bisect_left(places, True, key=lambda at: not goes_on(fleet, made, at)) - 1]
    turn = last_alone + ANSWER
    assert began <= turn <= ended
    assert goes_on(fleet, made[:turn], 0) and goes_on(fleet, made[:turn], turn - ANSWER)
    fleet.sync(new).raise_unless_committed()
    assert goes_on(fleet, made, turn) and goes_on(fleet, made, ended)


def test_each_token_of_a_frozen_request_is_traced_to_the_version_that_made_it(fleet: KeepFleet) -> None:
    old, new, count = fleet.held, other(fleet.held), TRACED[fleet.kind]
    with ThreadPoolExecutor(1) as asking:
        answer = asking.submit(fleet.whole, FROZEN_PROMPT, count)
        beside = fleet.stream(FROZEN_PROMPT)
        beside.grows_to(20)  # by then the other, which is older, has some
        before = fleet.version
        fleet.sync(new).raise_unless_committed()
        beside.close()
        (sample,) = fleet.plane.provenance(answer.result(), replica=0)
    made = answer.result()["choices"][0]["token_ids"] if fleet.kind == "vllm" else answer.result()["output_ids"]
    first, last = sample.spans
    assert (first.version, last.version, sample.tokens, sample.mixed) == (before, before + 1, count, True)
    assert (first.proof, last.proof, sample.staleness) == ("proven", "proven", 1)
    assert not fleet.plane.accepts(sample, mixed=False) and fleet.plane.accepts(sample, max_staleness=1)
    turn = last.begin
    assert goes_on(fleet, made, turn), "made by the new weights"
    fleet.sync(old).raise_unless_committed()
    assert goes_on(fleet, made[:turn], max(0, turn - ANSWER)), "made by the old weights"


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
