"""What verl 0.9.1 does in a case, stated as its gates. `test_gates.py` runs verl's own code beside it.

An exception leaves the trainer's step, so the rest of a history does not come: the exception is the answer.
"""

from typing import Final, Literal

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
    NOBODY_FIRST,
    NULL,
    ROUTER,
    SOON,
    START,
    STOP,
    STRAY,
    UNABLE,
    UNKNOWN,
    Case,
)

Engine = Literal["sglang", "vllm"]

ACTS, NOTHING, WARNED, NOT_ASKED = "acts", "nothing", "nothing, warned at launch", "not asked"
IGNORED = "calls, and is ignored"
NO_METHOD, REFUSED = "raises AttributeError", "raises RuntimeError"

HAS_RANK: Final = (ALL, MINE, NOBODY_FIRST)


def server(engine: Engine, case: Case) -> str:
    """Of the server beside an inference engine."""
    if case.step not in (LISTED, ANYWAY):  # the trainer looks at the steps, a server never does
        return NOT_ASKED
    if case.tool not in ("torch", "npu"):
        return WARNED
    if engine == "vllm" and case.node != "0":
        return NOTHING
    if case.enable == "no" or case.ranks not in HAS_RANK or case.discrete == "no":
        return NOTHING
    return _sglang(case) if engine == "sglang" else _vllm(case)


def _sglang(case: Case) -> str:
    """It asks whether the attribute is None, which stands for three things; it never asks for the node's rank."""
    front = ABSENT if case.node != "0" else case.front
    if front in (ABSENT, NEVER):
        return NOTHING
    if front in (ROUTER, UNABLE):
        return NO_METHOD
    if front == SOON:  # the first command finds nothing, the next one finds no session
        return {AGAIN: ACTS, NEXT: ACTS, STOP: REFUSED, ENDED: REFUSED}.get(case.command, NOTHING)
    return ACTS if case.command in (START, STOP) else REFUSED


def _vllm(case: Case) -> str:
    """Its workers take a window that has ended for an open session."""
    if case.front in (ABSENT, SOON, NEVER):
        return NO_METHOD
    if case.front == UNABLE:
        return REFUSED
    return ACTS if case.command in (START, STOP, ENDED) else IGNORED


def rank(case: Case) -> str:
    """Of a training rank's `DistProfiler`. It acts when the step is recorded otherwise for the command."""
    if case.step not in (LISTED, ANYWAY):
        return NOT_ASKED
    chosen = case.ranks in HAS_RANK or case.tool == "precision_debugger"  # msprobe picks the ranks itself
    if case.enable == "no" or not chosen:
        return NOTHING
    return ACTS if case.command in _DOES[case.tool, case.discrete] else NOTHING


_ONCE: Final = (START, STOP)
_STAGES: Final = (START, NEXT)
_ALWAYS: Final = (START, AGAIN, NEXT, STOP, STRAY)
_DOES: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("torch", "no"): _ONCE,
    ("torch", "yes"): _STAGES,  # each stage opens and closes its own trace; a start names their step
    ("npu", "no"): _ONCE,
    ("npu", "yes"): (START,),
    ("nsys", "no"): _ALWAYS,
    ("nsys", "yes"): (START,),
    **dict.fromkeys((("torch_memory", "no"), ("torch_memory", "yes")), (START, NEXT, STOP)),
    **dict.fromkeys((("precision_debugger", "no"), ("precision_debugger", "yes")), _STAGES),
    **{(tool, discrete): () for tool in (UNKNOWN, NULL) for discrete in ("no", "yes")},
}
