"""Syncs with `in_flight="keep"` on real engines under requests that always run: what frozen and new requests get."""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from schemas.identity import InFlight
from schemas.outcomes import Acted
from tests.engines.reports import conclusions
from tests.engines.soak import ANSWER, FROZEN_PROMPT, PROBE, KeepFleet, Whole, wrong_answers

SYNCS = 3
TRACED: dict[InFlight, int] = {"abort": 1500, "wait": 200, "keep": 1500}
"""Tokens of a request that is still running when a sync begins, and with `keep` outlasts it."""


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


@pytest.mark.parametrize("in_flight", ["abort", "wait", "keep"])
def test_each_token_of_two_versions_in_flight_is_traced_to_the_one_that_made_it(
    fleet: KeepFleet, in_flight: InFlight
) -> None:
    """The spans of the engine's answer say so, and so do its logprobs: those of the weights that are named, alone."""
    old, new, before = fleet.held, other(fleet.held), fleet.version
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(fleet.whole, FROZEN_PROMPT, TRACED[in_flight], sent := threading.Event())
        assert sent.wait(60)
        beside = fleet.stream(FROZEN_PROMPT)
        beside.grows_to(20)  # by then the other, which is older, has some
        beside.close()
        fleet.sync(new, timeout=240, in_flight=in_flight).raise_unless_committed()
        first, later = asked.result(), fleet.whole(FROZEN_PROMPT, 2 * ANSWER)
    (sample,), (next_sample,) = (fleet.plane.provenance(answer.said, replica=0) for answer in (first, later))
    versions = [before, before + 1] if in_flight == "keep" else [before]
    assert [span.version for span in sample.spans] == versions and sample.tokens == len(first.tokens)
    assert (sample.proof, sample.staleness, sample.mixed) == ("proven", 1, in_flight == "keep")
    assert [(span.version, span.staleness, span.proof) for span in next_sample.spans] == [(before + 1, 0, "proven")]
    assert fleet.plane.accepts(sample, max_staleness=1) and not fleet.plane.accepts(sample, max_staleness=0)
    assert bool(fleet.plane.accepts(sample, mixed=False)) is (in_flight != "keep")
    turn = sample.spans[0].end if in_flight == "keep" else len(first.tokens)
    of_new = logprobs(fleet, first)
    fleet.sync(old).raise_unless_committed()
    of_old = logprobs(fleet, first)
    nearer = [abs(a - made) < abs(b - made) for a, b, made in zip(of_old, of_new, first.of_tokens, strict=True)]
    assert nearer == [place < turn for place in range(len(nearer))]


def logprobs(fleet: KeepFleet, made: Whole) -> list[float]:
    """Those that the weights that are held now give to the tokens of an answer."""
    return fleet.whole([*FROZEN_PROMPT, *made.tokens], 1).of_prompt[len(FROZEN_PROMPT) - 1 :]


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
