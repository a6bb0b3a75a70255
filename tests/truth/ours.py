"""What we answer in a case, as our own code says: nothing here knows the decision table.

One configuration of verl is read by `schemas.profiler`; `controlplane.machine.profiling` decides what the trainer
sends; and the agent's machine is folded over the events of the case, with an engine that does every call.
"""

import json
from functools import cache

from msgspec.structs import replace

from controlplane.machine.profiling import commands_after, commands_before
from schemas.commands import ProfileCommand, ProfilePlan
from schemas.events import (
    Answer,
    Effect,
    EngineObserved,
    EngineReturned,
    Observation,
    Perform,
    Returned,
    StopProfile,
    Tick,
)
from schemas.identity import Identity, Operation
from schemas.outcomes import Acted, Failed, Skipped
from schemas.profiler.config import ProfilerConfig, read_verl_config
from tests.truth.cases import (
    ABSENT,
    AGAIN,
    ALL,
    ANYWAY,
    ENDED,
    LISTED,
    MINE,
    NEXT,
    NOBODY_FIRST,
    NONE,
    NULL,
    PRESENT,
    ROUTER,
    SOON,
    START,
    STRAY,
    THEIRS,
    UNABLE,
    UNKNOWN,
    Case,
)
from tests.unit.machines import after, agent, command, fold
from workers.machine.decide import AgentState

STEP = 3
WORLD = 4
"""GPUs of a replica: 2 nodes of 2. Whoever is asked is replica 1, with ranks 4 to 7, or replica 0."""
TTL_MS = 1000
NOT_ASKED = "not asked"


def ours(engine: str, case: Case) -> str:
    """The answer to the last command. engine: one of `cases.ENGINES`, or `rank` for a training rank."""
    history = asked(engine == "rank", case._replace(node="", front=""))
    if not history:
        return NOT_ASKED
    state, said = _joined(engine, case.node, case.front, case.ranks), ""
    for seq, body in enumerate(history, 1):
        state, said = _told(state, body, seq, engine, case)
    return said


@cache
def asked(rank: bool, case: Case) -> tuple[ProfileCommand, ...]:
    """The commands that come, in order; none when the trainer's side has nothing to ask."""
    config = configured(rank, case)
    if case.step == ANYWAY:  # of a plan that lists other steps
        config = replace(_with_steps(config, frozenset({9})), steps=(STEP - 1, STEP))
    start, stop = commands_before(config, None, STEP), commands_after(config, STEP, STEP)
    histories = {
        START: start,
        AGAIN: start + start,
        NEXT: commands_before(config, None, STEP - 1) + start,  # it was started anew, and does not know of the session
        STRAY: stop,
    }
    return histories.get(case.command, start + stop) if start else ()


def configured(rank: bool, case: Case) -> ProfilerConfig:
    """From verl's YAML. Others are profiled in any case: it is the business of who is asked to find itself left out."""
    tool = {UNKNOWN: "torch", NULL: None}.get(case.tool, case.tool)
    options: dict[str, object] = {"discrete": case.discrete == "yes"} if tool in ("torch", "npu", "nsys") else {}
    if case.command == ENDED and tool in ("torch", "npu"):
        options |= {"profile_token_start": 1, "profile_token_end": 4}
    numbers = {MINE: [1 if rank else WORLD], THEIRS: [9 * WORLD]}
    section = {
        "tool": tool,
        "enable": case.enable == "yes",
        "all_ranks": case.ranks == ALL,
        "ranks": numbers.get(case.ranks, []),
        "tool_config": {tool or "torch": options},
    }
    config = _sections(rank, json.dumps(section))
    if case.tool == UNKNOWN:  # the reader refuses it; the agent would have to answer it all the same
        config = _with_tool(config, rank, "perf")
    return replace(config, steps=_steps({LISTED: (STEP - 1, STEP), NONE: None}.get(case.step, (9,))))


@cache
def _sections(rank: bool, text: str) -> ProfilerConfig:
    section = json.loads(text)
    others = {"tool": "torch", "enable": True, "all_ranks": True, "ranks": []}
    profilers = {"rollout": others, "actor": section} if rank else {"rollout": section, "actor": others}
    tree = {"actor_rollout_ref": {role: {"profiler": one} for role, one in profilers.items()}}
    return read_verl_config(tree).config


@cache
def _steps(steps: tuple[int, ...] | None) -> tuple[int, ...]:
    return read_verl_config({"global_profiler": {"steps": steps and list(steps)}}).config.steps


def _with_tool(config: ProfilerConfig, rank: bool, tool: str) -> ProfilerConfig:
    if not rank:
        return replace(config, plan=replace(config.plan, tool=tool))
    return replace(config, roles={role: replace(plan, tool=tool) for role, plan in config.roles.items()})


def _with_steps(config: ProfilerConfig, steps: frozenset[int]) -> ProfilerConfig:
    def listed(plan: ProfilePlan) -> ProfilePlan:
        return replace(plan, steps=steps)

    return replace(config, plan=listed(config.plan), roles={role: listed(plan) for role, plan in config.roles.items()})


# --- the agent and its engine -----------------------------------------------------------------------------------------


def seen(engine: str, front: str) -> Observation:
    """What the adapter of this engine observes. Neither SGLang nor vLLM tells whether it profiles.

    A router in the place of a tokenizer manager is seen as absent: `test_table.py` asks the adapter.
    """
    if front in (ABSENT, ROUTER):
        return Observation(engine=engine, tokenizer="absent")
    if front not in (PRESENT, UNABLE):
        return Observation(engine=engine, tokenizer="unknown")
    able = frozenset({Operation.PROFILE}) if engine == "rank" else frozenset(Operation)
    return Observation(
        engine=engine,
        instance="one",
        tokenizer="present",
        operations=able - {Operation.PROFILE} if front == UNABLE else able,
        generating=None if engine == "rank" else True,
        profiling=False if engine in ("tiny", "rank") else None,
    )


@cache
def _joined(engine: str, node: str, front: str, ranks: str) -> AgentState:
    replica = 0 if ranks == NOBODY_FIRST else 1
    if engine == "rank":
        place = Identity(replica=replica, node_rank=0, role="actor")
    else:
        place = Identity(replica=replica, node_rank=int(node), nnodes=2, gpus_per_node=WORLD // 2)
    return agent(place, seen(engine, front))


def _told(state: AgentState, body: ProfileCommand, seq: int, engine: str, case: Case) -> tuple[AgentState, str]:
    """One command, brought to its answer."""
    at_ms = seq * 10 * TTL_MS
    state, effects = fold(state, command(body, seq, at_ms=at_ms, ttl_ms=TTL_MS))
    state, said = _carried_out(state, effects, seq, engine, case)
    if not said:  # it is held while the engine launches
        later = (
            EngineObserved(at_ms=at_ms + 1, observation=seen(engine, PRESENT))
            if case.front == SOON
            else Tick(at_ms=at_ms + TTL_MS)
        )
        state, effects = fold(state, later)
        state, said = _carried_out(state, effects, seq, engine, case)
    return state, said


def _carried_out(state: AgentState, effects: list[Effect], seq: int, engine: str, case: Case) -> tuple[AgentState, str]:
    """The engine does every call. The answer to the command of `seq`, or nothing yet."""
    todo = [one for one in effects if isinstance(one, Perform)]
    while todo:
        perform = todo.pop(0)
        stopped = isinstance(perform.call, StopProfile)
        result = Returned(auto_stopped=stopped and case.command == ENDED)
        observed = seen(engine, PRESENT)
        if observed.profiling is not None:
            observed = after(observed, perform.call)
        more = EngineReturned(at_ms=1, call_id=perform.call_id, result=result, observation=observed)
        state, decided = fold(state, more)
        effects = [*effects, *decided]
        todo += [one for one in decided if isinstance(one, Perform)]
    answers = [one for one in effects if isinstance(one, Answer) and one.seq == seq]
    return state, words(answers[-1]) if answers else ""


def words(answer: Answer) -> str:
    """An outcome, as the table has it."""
    match answer.outcome:
        case Acted(auto_stopped=ended):
            return "acts, finds it ended" if ended else "acts"
        case Skipped(reason):
            return f"skips: {reason}"
        case Failed(error):
            return f"fails: {error}"
