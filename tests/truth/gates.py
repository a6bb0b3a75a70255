"""What verl 0.9.1 does in a case, stated as its gates. `test_gates.py` compares them with verl's own code.

An exception ends the trainer's step, and with it the rest of a history: the exception is the answer.
"""

from typing import Final, Literal

from tests.truth.cases import Case, Command, Manager, Ranks, Step, Tool

Engine = Literal["sglang", "vllm"]

ACTS, NOTHING, WARNED, NOT_ASKED = "acts", "nothing", "nothing, warned at launch", "not asked"
IGNORED = "calls, and is ignored"
NO_METHOD, REFUSED = "raises AttributeError", "raises RuntimeError"

HAS_RANK: Final = (Ranks.ALL, Ranks.MINE, Ranks.NOBODY_FIRST)


def server(engine: Engine, case: Case) -> str:
    """Return what the server of an inference engine does."""
    if case.step not in (Step.LISTED, Step.ANYWAY):  # only the trainer checks the steps
        return NOT_ASKED
    if case.tool not in ("torch", "npu"):
        return WARNED
    if engine == "vllm" and case.node != "0":
        return NOTHING
    if case.enable == "no" or case.ranks not in HAS_RANK or case.discrete == "no":
        return NOTHING
    return _sglang(case) if engine == "sglang" else _vllm(case)


def _sglang(case: Case) -> str:
    """It checks whether the attribute is None, which has three possible causes, and never the node's rank."""
    manager = Manager.ABSENT if case.node != "0" else case.manager
    if manager in (Manager.ABSENT, Manager.NEVER):
        return NOTHING
    if manager in (Manager.ROUTER, Manager.UNABLE):
        return NO_METHOD
    if manager == Manager.SOON:  # the first command finds nothing, the next one finds no session
        if case.command in (Command.STOP, Command.ENDED):
            return REFUSED
        return ACTS if case.command in (Command.AGAIN, Command.NEXT) else NOTHING
    return ACTS if case.command in (Command.START, Command.STOP) else REFUSED


def _vllm(case: Case) -> str:
    """Its workers treat a window that has ended as an open session."""
    if case.manager in (Manager.ABSENT, Manager.SOON, Manager.NEVER):
        return NO_METHOD
    if case.manager == Manager.UNABLE:
        return REFUSED
    return ACTS if case.command in (Command.START, Command.STOP, Command.ENDED) else IGNORED


def rank(case: Case) -> str:
    """Return what a training rank's `DistProfiler` does: it acts if the command changes what is recorded."""
    if case.step not in (Step.LISTED, Step.ANYWAY):
        return NOT_ASKED
    chosen = case.ranks in HAS_RANK or case.tool == "precision_debugger"  # msprobe picks the ranks itself
    if case.enable == "no" or not chosen:
        return NOTHING
    return ACTS if case.command in _DOES[case.tool, case.discrete] else NOTHING


_ONCE: Final = (Command.START, Command.STOP)
_STAGES: Final = (Command.START, Command.NEXT)
_ALWAYS: Final = (Command.START, Command.AGAIN, Command.NEXT, Command.STOP, Command.STRAY)
_DOES: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("torch", "no"): _ONCE,
    ("torch", "yes"): _STAGES,  # each stage opens and closes its own trace; a start names their step
    ("npu", "no"): _ONCE,
    ("npu", "yes"): (Command.START,),
    ("nsys", "no"): _ALWAYS,
    ("nsys", "yes"): (Command.START,),
    **dict.fromkeys((("torch_memory", "no"), ("torch_memory", "yes")), (Command.START, Command.NEXT, Command.STOP)),
    **dict.fromkeys((("precision_debugger", "no"), ("precision_debugger", "yes")), _STAGES),
    **{(tool, discrete): () for tool in (Tool.UNKNOWN, Tool.NULL) for discrete in ("no", "yes")},
}
