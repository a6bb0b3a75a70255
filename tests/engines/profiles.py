"""Plans for sessions, as verl's configuration expresses them, and readers of the traces that result.

A forward pass is identified by what it computed: `P5` read a prompt of 5 tokens, `D` generated one token. `WORK` is the
load of a session: requests one after the other, each with a prompt of a different length, so that a window that is off
by one holds different passes.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from schemas.commands import ProfilePlan
from schemas.outcomes import Acted, Trace
from schemas.profiler.config import read_verl_config
from workers.engines.tiny.profile import FORWARD

Events = list[dict[str, object]]
Generate = Callable[[list[int], int], object]
"""Has an engine read a prompt and generate that many tokens."""

WORK: Final = (5, 6, 7)
"""Lengths of the prompts; two tokens are generated for each."""
PASSES: Final = ["P5", "D", "P6", "D", "P7", "D"]
VLLM_PASSES: Final = ["P5", "D", "-", "P6", "D", "-", "P7", "D", "-"]
"""vLLM makes and counts one more step, which computes nothing, to release the last request that ran."""

_NAMES: Final = (
    re.compile(r"execute_context_(?P<prompts>\d+)\((?P<tokens>\d+)\)_generation_(?P<going_on>\d+)\(\d+\)"),
    re.compile(r"step\[(?P<prompts>EXTEND|DECODE) bs=\d+(?: toks=(?P<tokens>\d+))?.*\]"),
)
_fresh = count(1)


class Found(NamedTuple):
    """What is in one trace."""

    passes: list[str]
    stacks: bool
    modules: bool
    shapes: bool
    memory: bool

    @property
    def contents(self) -> frozenset[str]:
        """The contents as a configuration names them; modules come with stacks."""
        assert self.stacks == self.modules
        held = {"stack": self.stacks, "shapes": self.shapes, "memory": self.memory}
        return frozenset(content for content, is_there in held.items() if is_there)


def torch_plan(*contents: str, window: tuple[int, int] | None = None, ranks: tuple[int, ...] = ()) -> ProfilePlan:
    """Return the plan that verl's configuration expresses. Without `ranks` it selects all of them."""
    tool: dict[str, object] = {"contents": list(contents), "discrete": True}
    if window is not None:
        tool |= {"step_start": window[0], "step_end": window[1]}
    whose = {"all_ranks": not ranks, "ranks": list(ranks)}
    profiler = {"enable": True, "tool": "torch", **whose, "tool_config": {"torch": tool}}
    return read_verl_config({"actor_rollout_ref": {"rollout": {"profiler": profiler}}}).config.plan


def work(generate: Generate) -> None:
    """Do `WORK`. No prompt begins as another did, so that no cache shortens it."""
    for length in WORK:
        generate([next(_fresh) % 250 + 1] * length, 2)


def of_rank(outcome: Acted, rank: int | None, kind: str = ".trace.json") -> list[Trace]:
    """Return an outcome's traces of one rank; None for those of a front end."""
    return [
        trace for trace in outcome.traces if trace.rank == rank and kind in trace.path and "merged-" not in trace.path
    ]


def look(root: Path, trace: Trace) -> Found:
    """Return what is in a trace, whose path is relative to `root`."""
    return look_into(root / trace.path)


def look_into(file: Path) -> Found:
    """Return what is in the file of a trace."""
    events = sorted(read_events(file), key=lambda event: float(str(event.get("ts", 0))))
    arguments = [event["args"] for event in events if isinstance(event.get("args"), dict)]
    return Found(
        passes=_passes(events),
        stacks=any(event.get("cat") == "python_function" for event in events),
        modules=any(str(event.get("name")).startswith("nn.Module: ") for event in events),
        shapes=any(isinstance(argument, dict) and argument.get("Input Dims") for argument in arguments),
        memory=any(event.get("name") == "[memory]" for event in events),
    )


def read_events(file: Path) -> Events:
    """Read the events of a trace, compressed or not."""
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    found: Events = json.loads(raw)["traceEvents"]
    return found


def _passes(events: Iterable[dict[str, object]]) -> list[str]:
    events = [event for event in events if event.get("ph") == "X"]
    forwards = [event for event in events if event.get("name") == FORWARD]
    if forwards:
        return [_tiny_pass(forward, events) for forward in forwards]
    found = (pattern.fullmatch(str(event.get("name"))) for event in events for pattern in _NAMES)
    return [_pass(match.groupdict()) for match in found if match]


def _pass(step: dict[str, str]) -> str:
    if step["prompts"] not in ("0", "DECODE"):
        return f"P{step['tokens']}"
    return "-" if step.get("going_on") == "0" else "D"


def _tiny_pass(forward: dict[str, object], events: Events) -> str:
    """By the shape of what is embedded in it; `?` where shapes were not recorded."""
    start, lasts = float(str(forward["ts"])), float(str(forward["dur"]))
    for event in events:
        if event.get("name") == "aten::embedding" and start <= float(str(event["ts"])) <= start + lasts:
            arguments = event.get("args")
            dims = arguments.get("Input Dims") if isinstance(arguments, dict) else None
            if dims:
                tokens = dims[1][1]
                return f"P{tokens}" if tokens > 1 else "D"
            break
    return "?"


# --- the tables -------------------------------------------------------------------------------------------------------


def within(passes: list[str], window: tuple[int, int] | None) -> list[str]:
    """Those that a window holds."""
    return passes if window is None else passes[slice(*window)]


class Row(NamedTuple):
    """One row of a table. `refused` has the message of each engine that can't do it."""

    window: tuple[int, int] | None
    contents: tuple[str, ...]
    refused: dict[str, str]

    @property
    def plan(self) -> ProfilePlan:
        return torch_plan(*self.contents, window=self.window)

    @property
    def wanted(self) -> frozenset[str]:
        """What the trace holds besides its passes."""
        return frozenset(self.contents) & {"stack", "shapes", "memory"}

    @property
    def passes(self) -> list[str]:
        return within(PASSES, self.window)


_BY_STAGE = {"tiny": "by stage", "vllm": "by stage, or merged"}
_LATER = {"sglang": "Begin the window at 0"}

ORTHOGONAL: Final = {
    "whole session": Row(None, ("cpu",), {}),
    "first pass, stacks, shapes": Row((0, 1), ("cpu", "stack", "shapes"), {}),
    "by stage, shapes": Row((0, 2), ("cpu", "shapes", "profile-by-stage"), _BY_STAGE),
    "merged, stacks": Row((0, 2), ("cpu", "stack", "merge-profiles"), {"tiny": "merged", "vllm": "merged"}),
    "by stage, merged": Row((0, 3), ("cpu", "profile_by_stage", "merge_profiles"), _BY_STAGE),
    "second pass, shapes": Row((1, 2), ("cpu", "shapes"), _LATER),
    "later passes, stacks, shapes, memory": Row(
        (2, 4), ("cpu", "stack", "shapes", "memory"), {"sglang": "memory: its device is cpu"}
    ),
    "cuda": Row(
        (0, 2), ("cpu", "cuda"), {"tiny": "torch sees no GPU", "vllm": "device is cpu", "sglang": "device is cpu"}
    ),
    "by stage without a window": Row(
        None, ("cpu", "stack", "profile-by-stage"), _BY_STAGE | {"sglang": "by stage without a window"}
    ),
}
"""The factors of verl's pull request 5025: first and last step, by stage, merge, stack, shapes, activities."""

CONTENTS: Final = {"plain": ("cpu",), "detailed": ("cpu", "stack", "shapes")}
MATRIX: Final = [("plain", ()), ("detailed", (1,))]
"""Contents and ranks of verl's pull request 4320, of an engine on a CPU; the step that is profiled is 2."""
FEW: Final = (0, 2)
WITHIN: Final = (1, 2)
"""Windows of detailed sessions of real engines: SGLang, and vLLM, which records what went before the first pass. They
spin while they idle, and stacks of that take minutes to write."""
