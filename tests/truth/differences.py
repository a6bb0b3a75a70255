"""Where our answer and verl's differ, and why. docs/truth-table.md quotes the reasons."""

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from tests.truth import gates
from tests.truth.cases import Case, Command, Manager, Step
from tests.truth.gates import IGNORED, NOTHING, WARNED
from tests.truth.ours import NOT_ASKED, ours

Place = Literal["sglang", "vllm", "rank"]
"""Who is asked: an agent beside one of the two engines, or a training rank."""


def verl(place: Place, case: Case) -> str:
    """Return verl's answer."""
    return gates.rank(case) if place == "rank" else gates.server(place, case)


def same(our: str, of_verl: str) -> bool:
    """Return whether both act, or neither does.

    A failure is never the same: ours is reported to the trainer, whose step continues; verl's is silent or ends it.
    """
    if our.startswith("acts"):
        return of_verl == gates.ACTS
    return (our == NOT_ASKED or our.startswith("skips")) and of_verl in (NOTHING, IGNORED, WARNED, NOT_ASKED)


class Explanation(NamedTuple):
    """The reason for every difference in the cases to which it `applies`."""

    reason: str
    applies: Callable[[Place, Case], bool]


_UNUSABLE: Final = (Manager.NEVER, Manager.ABSENT, Manager.ROUTER, Manager.UNABLE)


def _selected(case: Case) -> bool:
    """Whether the configuration has the engine profiled."""
    return case.enable == "yes" and case.tool in ("torch", "npu") and case.ranks in gates.HAS_RANK


def _not_selected(place: Place, case: Case) -> bool:
    return place != "rank" and case.manager in _UNUSABLE and not _selected(case)


def _unusable(manager: str) -> Callable[[Place, Case], bool]:
    return lambda place, case: place != "rank" and case.manager == manager and _selected(case)


def _not_discrete(place: Place, case: Case) -> bool:
    return place != "rank" and case.manager not in _UNUSABLE and case.discrete == "no"


def _waits(place: Place, case: Case) -> bool:
    """With vLLM the first command raises; with SGLang it is lost, and the next may raise."""
    if place == "rank" or case.manager != Manager.SOON or case.discrete == "no":
        return False
    return place == "vllm" or case.step == Step.LISTED or case.command in (Command.STOP, Command.ENDED)


def _not_listed(place: Place, case: Case) -> bool:
    usable = place == "rank" or case.manager not in _UNUSABLE
    return case.step == Step.ANYWAY and case.command != Command.STRAY and usable and not _waits(place, case)


def _server(command: str) -> Callable[[Place, Case], bool]:
    """A server whose engine can be commanded, for a command that it acts on."""
    return lambda place, case: (
        place != "rank"
        and (case.manager, case.discrete, case.command) == (Manager.PRESENT, "yes", command)
        and (case.step == Step.LISTED or command == Command.STRAY)
    )


def _rank(command: str) -> Callable[[Place, Case], bool]:
    return lambda place, case: place == "rank" and (case.step, case.command) == (Step.LISTED, command)


def _switch(place: Place, case: Case) -> bool:
    repeated = case.command == Command.STRAY or (case.command == Command.AGAIN and case.step == Step.LISTED)
    return place == "rank" and case.tool == "nsys" and repeated


EXPLANATIONS: tuple[Explanation, ...] = (
    Explanation(
        "A node without a usable engine fails, whoever the plan selects (rule 8 of the decision table comes "
        "before rule 10). verl checks the plan first and stays silent.",
        _not_selected,
    ),
    Explanation(
        "With `discrete: false`, its default, verl's servers silently do nothing. Here `discrete` is about the "
        "stages of training ranks; an engine is recorded either way. Beside servers that verl launched, their gate is "
        "in the way: our trainer for verl opens it before the launch, and without that the plan is refused, and says "
        "why.",
        _not_discrete,
    ),
    Explanation(
        "The engine is still launching when the command expires: `engine_not_ready`. verl does nothing on SGLang; "
        "on vLLM the attribute `engine` does not exist yet, and it raises.",
        _unusable(Manager.NEVER),
    ),
    Explanation(
        "The engine was launched without a tokenizer manager: `tokenizer_missing`. verl does nothing on SGLang "
        "and raises on vLLM.",
        _unusable(Manager.ABSENT),
    ),
    Explanation(
        "SGLang's router for several tokenizer workers cannot profile: `tokenizer_missing`. verl calls it and "
        "raises. Our HTTP adapter can command such an engine.",
        _unusable(Manager.ROUTER),
    ),
    Explanation(
        "The engine has no profiler: `unsupported`, naming what is missing. verl passes on the engine's exception.",
        _unusable(Manager.UNABLE),
    ),
    Explanation(
        "The engine comes up before the command expires, so the command waits. verl loses it on SGLang, where the "
        "stop then raises, and raises on vLLM.",
        _waits,
    ),
    Explanation(
        "The plan does not list the step, and somebody sends the command: each agent checks the steps itself. In "
        "verl only the trainer does.",
        _not_listed,
    ),
    Explanation(
        "The window has ended the session: our stop answers `acted` with `auto_stopped`. verl raises SGLang's refusal.",
        _server(Command.ENDED),
    ),
    Explanation(
        "A stop without a session is skipped. verl calls the engine: SGLang refuses, which raises; vLLM ignores it.",
        _server(Command.STRAY),
    ),
    Explanation(
        "A second start of the open session is skipped. verl calls SGLang, which refuses (or, before the first "
        "forward step, starts torch's profiler twice); vLLM ignores it up to 0.31 and refuses it from 0.32 on.",
        _server(Command.AGAIN),
    ),
    Explanation(
        "An earlier step's session was never stopped: it is stopped, and the new one opened. With verl SGLang "
        "refuses, and vLLM (up to 0.31) continues the old one.",
        _server(Command.NEXT),
    ),
    Explanation(
        "The same on a training rank. verl's start does nothing: the old trace continues, or (discrete) stages "
        "are recorded as before, since with this tool they carry no step.",
        _rank(Command.NEXT),
    ),
    Explanation(
        "In discrete mode, and with msprobe, verl opens and closes a tool around each stage, so its stop does "
        "nothing. Our session lasts until the stop, which names the traces.",
        _rank(Command.STOP),
    ),
    Explanation(
        "nsys has a switch and no session: verl flips it at every start and stop. We keep a session with every tool.",
        _switch,
    ),
)


def explained(place: Place, case: Case, our: str | None = None) -> int | None:
    """Return the number of the explanation, from 1; None where both answers come to the same.

    Args:
        place: Who is asked.
        case: The case.
        our: Our answer, if it is known already.

    Raises:
        LookupError: There is no explanation, or more than one.
    """
    our = our if our is not None else ours(place, case)
    answer = verl(place, case)
    if same(our, answer):
        return None
    numbers = [number for number, explanation in enumerate(EXPLANATIONS, 1) if explanation.applies(place, case)]
    if len(numbers) != 1:
        found = f"explanations {numbers}" if numbers else "no explanation"
        raise LookupError(f"{found}: at {place} we answer {our!r} and verl {answer!r} in {case}")
    return numbers[0]
