"""Every case of the truth table as data: which command, to whom, and with which configuration.

A case has one of a few named values for each field; the names are those of the table. There are two spaces of cases:
`ROLLOUTS`, for agents beside an inference engine, and `RANKS`, for training ranks.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Final, NamedTuple


class Case(NamedTuple):
    """One case. The fields are in the order of the table's columns.

    Attributes:
        step: Whether the step is listed; `asked anyway`: it is not, and the command is sent all the same.
        node: Rank of the node in its replica.
        manager: What this node has for commanding its engine.
        enable: `enable` of the profiler section.
        tool: `tool` of the profiler section.
        ranks: Who is to be profiled, seen from the agent that is asked.
        discrete: `tool_config.<tool>.discrete`.
        command: The last command of a short history, and what came before it.
    """

    step: str
    node: str
    manager: str
    enable: str
    tool: str
    ranks: str
    discrete: str
    command: str


class Step:
    """Values of `step`."""

    LISTED, OTHERS, NONE, ANYWAY = "listed", "not listed", "none listed", "not listed, asked anyway"


class Manager:
    """Values of `manager`."""

    PRESENT, ROUTER, UNABLE = "present", "a router in its place", "present, no profiler"
    ABSENT, SOON, NEVER = "absent", "launching, up in time", "launching for too long"


class Tool:
    """Values of `tool` that are not tools."""

    NULL, UNKNOWN = "null", "unknown"


class Ranks:
    """Values of `ranks`."""

    ALL, MINE, THEIRS = "all", "one of it", "of others"
    NOBODY_FIRST, NOBODY = "nobody named, it has rank 0", "nobody named, it has not"


class Command:
    """Values of `command`."""

    START, AGAIN, NEXT = "start", "start, twice", "start, an earlier step's session is open"
    STOP, ENDED, STRAY = "stop", "stop, the window has ended it", "stop, nothing was started"


Space = Mapping[str, tuple[str, ...]]
"""Values of each field of a case."""

_CONFIGURED: Final[Space] = {
    "step": (Step.LISTED, Step.OTHERS, Step.NONE, Step.ANYWAY),
    "enable": ("yes", "no"),
    "tool": ("torch", "npu", "nsys", "torch_memory", "precision_debugger", Tool.UNKNOWN, Tool.NULL),
    "ranks": (Ranks.ALL, Ranks.MINE, Ranks.NOBODY_FIRST, Ranks.THEIRS, Ranks.NOBODY),
    "discrete": ("yes", "no"),
}
ROLLOUTS: Final[Space] = {
    **_CONFIGURED,
    "node": ("0", "1"),
    "manager": (Manager.PRESENT, Manager.ROUTER, Manager.UNABLE, Manager.ABSENT, Manager.SOON, Manager.NEVER),
    "command": (Command.START, Command.AGAIN, Command.NEXT, Command.STOP, Command.ENDED, Command.STRAY),
}
RANKS: Final[Space] = {
    **_CONFIGURED,
    "node": ("0",),
    "manager": (Manager.PRESENT,),
    "command": (Command.START, Command.AGAIN, Command.NEXT, Command.STOP, Command.STRAY),
}

ENGINES: Final = ("sglang", "vllm", "tiny")


def every(space: Space) -> Iterator[Case]:
    """Yield all cases of a space."""
    for values in product(*(space[field] for field in Case._fields)):
        yield Case(*values)


def is_possible(engine: str, case: Case) -> bool:
    """Return whether the case exists with this engine: only SGLang has a router for several tokenizer managers."""
    return case.manager != Manager.ROUTER or engine == "sglang"
