"""Where our answer and verl's differ, and why: a numbered explanation for each difference."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from tests.truth import gates
from tests.truth.cases import (
    ABSENT,
    AGAIN,
    ANYWAY,
    ENDED,
    NEVER,
    NEXT,
    ROUTER,
    SOON,
    STOP,
    STRAY,
    UNABLE,
    Case,
)
from tests.truth.gates import NOTHING, WARNED
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
    return (our == NOT_ASKED or our.startswith("skips")) and theirs in (NOTHING, WARNED, NOT_ASKED)


class Explanation(NamedTuple):
    """why: of every difference for which `of` holds, unless one before it does."""

    why: str
    of: Callable[[Place, Case], bool]


def _rollout(of: Callable[[Case], bool]) -> Callable[[Place, Case], bool]:
    return lambda place, case: place != "rank" and of(case)


def _rank(of: Callable[[Case], bool]) -> Callable[[Place, Case], bool]:
    return lambda place, case: place == "rank" and of(case)


def _unconcerned(place: Place, case: Case) -> bool:
    """The engine can't be commanded, and the plan would not have it profiled."""
    meant = case.enable == "yes" and case.tool in ("torch", "npu") and case.ranks in gates.HAS_RANK
    return place != "rank" and case.front in (NEVER, ABSENT, ROUTER, UNABLE) and not meant


EXPLANATIONS: tuple[Explanation, ...] = (
    Explanation(
        "Our node rank 0 asks whether its engine can be commanded (rows 7 to 9 of the decision table) before it looks "
        "at the plan (row 10). So an engine that is not there, or that can't profile, is told by each replica, also by "
        "one that this plan leaves alone. verl looks at its configuration first, and such a server stays silent.",
        _unconcerned,
    ),
    Explanation(
        "verl's servers profile in discrete mode only: with `discrete: false`, the default, they do nothing and say "
        "nothing. With us `discrete` is about the stages of a training rank. An engine has one session either way, so "
        "it is profiled.",
        _rollout(lambda case: case.discrete == "no" and case.front not in (NEVER, ABSENT, ROUTER, UNABLE)),
    ),
    Explanation(
        "The engine still launches when the command's time is over: we fail `engine_not_ready`. On SGLang verl can't "
        "tell this from a node without a tokenizer manager, and does nothing; on vLLM the attribute `engine` does not "
        "exist yet.",
        _rollout(lambda case: case.front == NEVER),
    ),
    Explanation(
        "Node rank 0 was launched and there is nothing to command its engine through: a broken launch, so we fail "
        "`tokenizer_missing`. On SGLang verl takes it for a node with nothing to do; on vLLM the attribute `engine` "
        "does not exist.",
        _rollout(lambda case: case.front == ABSENT),
    ),
    Explanation(
        "With several tokenizer workers SGLang puts a router in the place of its tokenizer manager, which has no "
        "method for profiling. verl asks only whether something stands there, and calls it. Our adapter in the same "
        "process asks for the methods and reports no tokenizer manager; our adapter over HTTP can command such an "
        "engine, through any of its workers.",
        _rollout(lambda case: case.front == ROUTER),
    ),
    Explanation(
        "The engine has no profiler (of vLLM: it was launched without one): we fail `unsupported`, with what it lacks. "
        "verl calls it and hands on what it raises.",
        _rollout(lambda case: case.front == UNABLE),
    ),
    Explanation(
        "The engine comes up while the command's time runs: we hold the command until then. With verl a start that "
        "comes before is lost on SGLang, which is found when the stop raises; on vLLM it raises itself.",
        _rollout(lambda case: case.front == SOON and case.step != ANYWAY),
    ),
    Explanation(
        "The command comes for a step that the plan does not list: each of our agents looks at the steps itself, so "
        "nothing is opened, and a stop finds nothing to close. With verl only the trainer looks at them; whoever else "
        "sends a start is obeyed.",
        lambda place, case: case.step == ANYWAY and case.command != STRAY,
    ),
    Explanation(
        "The window has ended the session. Our stop is sent always, takes SGLang's refusal for what it is, and answers "
        '`acted` with `auto_stopped`. verl\'s hands on the RuntimeError ("Profiling is not in progress"), which ends '
        "the training step.",
        _rollout(lambda case: case.command == ENDED),
    ),
    Explanation(
        "A stop without a session: we skip it. verl calls the engine; SGLang refuses, by a RuntimeError that ends the "
        "training step, and vLLM's workers ignore it.",
        _rollout(lambda case: case.command == STRAY),
    ),
    Explanation(
        "A start for the step whose session is open (it came twice): we skip it. verl calls the engine again. SGLang "
        "refuses when the session has a first forward step; without one its schedulers go on to start torch's profiler "
        "a second time. vLLM ignores it up to 0.31 and refuses it from 0.32 on.",
        _rollout(lambda case: case.command == AGAIN),
    ),
    Explanation(
        "The session of an earlier step was never stopped (the trainer was started anew, or its step raised): we stop "
        "it, and open the new one. verl calls the engine, and SGLang refuses until somebody stops the old one.",
        _rollout(lambda case: case.command == NEXT),
    ),
    Explanation(
        "Likewise on a training rank: we end the old session and open one for this step. With verl what is open goes "
        "on as if it had been started now: one trace, under the old step, or stages that carry no step anyway.",
        _rank(lambda case: case.command == NEXT),
    ),
    Explanation(
        "In discrete mode, and with msprobe, verl opens and closes a tool around each stage, and at the stop nothing "
        "is left to do. With us a session is open around the stages in any mode; its stop waits for their traces and "
        "names them.",
        _rank(lambda case: case.command == STOP),
    ),
    Explanation(
        "nsys has a switch and no session: verl flips it at each start and each stop, whatever holds already. We have "
        "a session with every tool, and skip what holds.",
        _rank(lambda case: case.tool == "nsys" and case.command in (AGAIN, STRAY)),
    ),
)


def explained(place: Place, case: Case, our: str | None = None) -> int | None:
    """Number of the explanation, from 1; None where both come to the same. Raises LookupError when there is none.

    our: our answer, where it is known already.
    """
    our = our if our is not None else ours(place, case)
    theirs = verl(place, case)
    if same(our, theirs):
        return None
    for number, explanation in enumerate(EXPLANATIONS, 1):
        if explanation.of(place, case):
            return number
    raise LookupError(f"no explanation: at {place} we say {our!r} and verl {theirs!r} in {case}")
