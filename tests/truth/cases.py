"""Every case of the truth table, as data: what is asked, of whom, and how it was configured.

A case is a point in a space of a few named values for each question. The values are the words of the table. Two spaces:
`ROLLOUTS`, for what stands beside an inference engine, and `RANKS`, for training ranks.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Final, NamedTuple


class Case(NamedTuple):
    """One question. The fields are in the order in which the table asks for them.

    step: of `asked anyway` the plan or configuration lists other steps, and somebody sends the command all the same.
    node: rank of the node in its replica.   front: what stands at this node for the engine to be commanded through.
    ranks: who is to be profiled, seen from who is asked.   command: the last of a short history, and what came before.
    """

    step: str
    node: str
    front: str
    enable: str
    tool: str
    ranks: str
    discrete: str
    command: str


START, AGAIN, NEXT = "start", "start, twice", "start, an earlier step's session is open"
STOP, ENDED, STRAY = "stop", "stop, the window has ended it", "stop, nothing was started"
LISTED, OTHERS, NONE, ANYWAY = "listed", "not listed", "none listed", "not listed, asked anyway"
PRESENT, ROUTER, UNABLE = "present", "a router in its place", "present, no profiler"
ABSENT, SOON, NEVER = "absent", "launching, up in time", "launching for too long"
ALL, MINE, THEIRS = "all", "one of it", "of others"
NOBODY_FIRST, NOBODY = "nobody named, it has rank 0", "nobody named, it has not"
NULL, UNKNOWN = "null", "unknown"

Space = Mapping[str, tuple[str, ...]]
"""Values of each field of a case."""

_CONFIGURED: Final[Space] = {
    "step": (LISTED, OTHERS, NONE, ANYWAY),
    "enable": ("yes", "no"),
    "tool": ("torch", "npu", "nsys", "torch_memory", "precision_debugger", UNKNOWN, NULL),
    "ranks": (ALL, MINE, NOBODY_FIRST, THEIRS, NOBODY),
    "discrete": ("yes", "no"),
}
ROLLOUTS: Final[Space] = {
    **_CONFIGURED,
    "node": ("0", "1"),
    "front": (PRESENT, ROUTER, UNABLE, ABSENT, SOON, NEVER),
    "command": (START, AGAIN, NEXT, STOP, ENDED, STRAY),
}
RANKS: Final[Space] = {
    **_CONFIGURED,
    "node": ("0",),
    "front": (PRESENT,),
    "command": (START, AGAIN, NEXT, STOP, STRAY),
}

ENGINES: Final = ("sglang", "vllm", "tiny")


def every(space: Space) -> Iterator[Case]:
    """All cases of a space."""
    for values in product(*(space[field] for field in Case._fields)):
        yield Case(*values)


def stands(engine: str, case: Case) -> bool:
    """Whether the case can be with this engine: only SGLang has a router in front of several tokenizer managers."""
    return case.front != ROUTER or engine == "sglang"
