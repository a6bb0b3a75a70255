"""Where our answer and verl's differ, and why: a numbered explanation for each difference."""

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from tests.truth import gates
from tests.truth.cases import (
    ABSENT,
    AGAIN,
    ANYWAY,
    ENDED,
    LISTED,
    NEVER,
    NEXT,
    PRESENT,
    ROUTER,
    SOON,
    STOP,
    STRAY,
    UNABLE,
    Case,
)
from tests.truth.gates import IGNORED, NOTHING, WARNED
from tests.truth.ours import NOT_ASKED, ours

Place = Literal["sglang", "vllm", "rank"]
"""Who is asked: beside one of the two engines, or a training rank."""


def verl(place: Place, case: Case) -> str:
    """verl's answer."""
    return gates.rank(case) if place == "rank" else gates.server(place, case)


def same(our: str, theirs: str) -> bool:
    """Do both come to the same: something is done, or nothing is and nothing was to be? What fails is never the same,
    since with us it is told to the trainer, whose step goes on, and with verl it is not told, or ends the step."""
    if our.startswith("acts"):
        return theirs == gates.ACTS
    return (our == NOT_ASKED or our.startswith("skips")) and theirs in (NOTHING, IGNORED, WARNED, NOT_ASKED)


class Explanation(NamedTuple):
    """why: of every difference for which `of` holds."""

    reason: str
    of: Callable[[Place, Case], bool]


_OUT_OF_REACH: Final = (NEVER, ABSENT, ROUTER, UNABLE)


def _meant(case: Case) -> bool:
    """Does the configuration have the engine profiled?"""
    return case.enable == "yes" and case.tool in ("torch", "npu") and case.ranks in gates.HAS_RANK


def _unmeant(place: Place, case: Case) -> bool:
    return place != "rank" and case.front in _OUT_OF_REACH and not _meant(case)


def _out_of_reach(front: str) -> Callable[[Place, Case], bool]:
    return lambda place, case: place != "rank" and case.front == front and _meant(case)


def _continuous(place: Place, case: Case) -> bool:
    return place != "rank" and case.front not in _OUT_OF_REACH and case.discrete == "no"


def _held(place: Place, case: Case) -> bool:
    """With vLLM the first command raises; with SGLang it comes to nothing, and the next may raise."""
    if place == "rank" or case.front != SOON or case.discrete == "no":
        return False
    return place == "vllm" or case.step == LISTED or case.command in (STOP, ENDED)


def _not_listed(place: Place, case: Case) -> bool:
    reached = place == "rank" or case.front not in _OUT_OF_REACH
    return case.step == ANYWAY and case.command != STRAY and reached and not _held(place, case)


def _server(command: str) -> Callable[[Place, Case], bool]:
    """A server that acts, with an engine that can be commanded."""
    return lambda place, case: (
        place != "rank"
        and (case.front, case.discrete, case.command) == (PRESENT, "yes", command)
        and (case.step == LISTED or command == STRAY)
    )


def _rank(command: str) -> Callable[[Place, Case], bool]:
    return lambda place, case: place == "rank" and (case.step, case.command) == (LISTED, command)


def _switch(place: Place, case: Case) -> bool:
    repeated = case.command == STRAY or (case.command == AGAIN and case.step == LISTED)
    return place == "rank" and case.tool == "nsys" and repeated


EXPLANATIONS: tuple[Explanation, ...] = (
    Explanation(
        "Our node rank 0 asks whether its engine can be commanded (row 8 of the decision table) before it looks "
        "at the plan (row 10). So an engine that is not there, or that can't profile, is told by each replica, also by "
        "one that this plan leaves alone. verl looks at its configuration first, and such a server stays silent.",
        _unmeant,
    ),
    Explanation(
        "verl's servers profile in discrete mode only: with `discrete: false`, the default, they do nothing and say "
        "nothing. With us `discrete` is about the stages of a training rank. An engine has one session either way, so "
        "it is profiled.",
        _continuous,
    ),
    Explanation(
        "The engine still launches when the command's time is over: we fail `engine_not_ready`. On SGLang verl can't "
        "tell this from a node without a tokenizer manager, and does nothing; on vLLM the attribute `engine` does not "
        "exist yet.",
        _out_of_reach(NEVER),
    ),
    Explanation(
        "Node rank 0 was launched and there is nothing to command its engine through: a broken launch, so we fail "
        "`tokenizer_missing`. On SGLang verl takes it for a node with nothing to do; on vLLM the attribute `engine` "
        "does not exist.",
        _out_of_reach(ABSENT),
    ),
    Explanation(
        "With several tokenizer workers SGLang puts a router in the place of its tokenizer manager, which has no "
        "method for profiling. verl asks only whether something stands there, and calls it. Our adapter in the same "
        "process asks for the methods and reports no tokenizer manager; our adapter over HTTP can command such an "
        "engine, through any of its workers.",
        _out_of_reach(ROUTER),
    ),
    Explanation(
        "The engine has no profiler (of vLLM: it was launched without one): we fail `unsupported`, with what it lacks. "
        "verl calls it and hands on what it raises.",
        _out_of_reach(UNABLE),
    ),
    Explanation(
        "The engine comes up while the command's time runs: we hold the command until then. With verl a "
        "command that comes before is lost on SGLang, which is found when the stop raises; on vLLM it raises itself.",
        _held,
    ),
    Explanation(
        "The command comes for a step that the plan does not list: each of our agents looks at the steps itself, so "
        "nothing is opened, and a stop finds nothing to close. With verl only the trainer looks at them; whoever else "
        "sends a start is obeyed.",
        _not_listed,
    ),
    Explanation(
        "The window has ended the session. Our stop is sent always, takes SGLang's refusal for what it is, and answers "
        '`acted` with `auto_stopped`. verl\'s hands on the RuntimeError ("Profiling is not in progress"), which ends '
        "the training step.",
        _server(ENDED),
    ),
    Explanation(
        "A stop without a session: we skip it. verl calls SGLang, which refuses, and the RuntimeError ends the "
        "training step. vLLM's workers ignore it.",
        _server(STRAY),
    ),
    Explanation(
        "A start for the step whose session is open (it came twice): we skip it. verl calls SGLang again, which "
        "refuses if the session has a first forward step; without one its schedulers go on to start torch's profiler "
        "a second time. vLLM's workers ignore it up to 0.31; from 0.32 on vLLM refuses it.",
        _server(AGAIN),
    ),
    Explanation(
        "The session of an earlier step was never stopped (the trainer was started anew, or its step raised): we stop "
        "it and open the new one. With verl SGLang refuses until somebody stops the old one, and with vLLM (up to "
        "0.31) the old one goes on.",
        _server(NEXT),
    ),
    Explanation(
        "Likewise on a training rank: we end the old session and open one for this step. verl's start does nothing: "
        "the old trace goes on under its own step, or (discrete) the stages are recorded as they were, since those of "
        "this tool do not tell a step.",
        _rank(NEXT),
    ),
    Explanation(
        "In discrete mode, and with msprobe, verl opens and closes a tool around each stage, and at the stop nothing "
        "is left to do. With us a session is open around the stages in any mode; its stop waits for their traces and "
        "names them.",
        _rank(STOP),
    ),
    Explanation(
        "nsys has a switch and no session: verl flips it at each start and each stop, whatever holds already. We have "
        "a session with every tool, and skip what holds.",
        _switch,
    ),
)


def explained(place: Place, case: Case, our: str | None = None) -> int | None:
    """Number of the explanation, from 1; None where both come to the same.

    our: our answer, where it is known already. Raises LookupError when there is no explanation, or more than one.
    """
    our = our if our is not None else ours(place, case)
    theirs = verl(place, case)
    if same(our, theirs):
        return None
    numbers = [number for number, one in enumerate(EXPLANATIONS, 1) if one.of(place, case)]
    if len(numbers) != 1:
        what = f"explanations {numbers}" if numbers else "no explanation"
        raise LookupError(f"{what}: at {place} we say {our!r} and verl {theirs!r} in {case}")
    return numbers[0]
