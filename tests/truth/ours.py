"""What we answer in a case, according to our own code. Nothing here knows the decision table.

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
from tests.truth.cases import Case, Command, Manager, Ranks, Step, Tool
from tests.unit.machines import after, agent, command, fold
from workers.machine.decide import AgentState

STEP = 3
WORLD = 4
"""GPUs of a replica: 2 nodes of 2. The replica asked is 1, with ranks 4 to 7, or 0."""
TTL_MS = 1000
NOT_ASKED = "not asked"


def ours(engine: str, case: Case) -> str:
    """Return the answer to the last command. `engine` is one of `cases.ENGINES`, or `rank` for a training rank."""
    history = commands(engine == "rank", case._replace(node="", manager=""))
    if not history:
        return NOT_ASKED
    state, answer = _joined(engine, case.node, case.manager, case.ranks), ""
    for seq, body in enumerate(history, 1):
        state, answer = _answered(state, body, seq, engine, case)
    return answer


@cache
def commands(rank: bool, case: Case) -> tuple[ProfileCommand, ...]:
    """Return the commands of the case, in order; none if the trainer sends nothing."""
    config = configured(rank, case)
    if case.step == Step.ANYWAY:  # of a plan that lists other steps
        config = replace(_with_steps(config, frozenset({9})), steps=(STEP - 1, STEP))
    start, stop = commands_before(config, None, STEP), commands_after(config, STEP, STEP)
    histories = {
        Command.START: start,
        Command.AGAIN: start + start,
        Command.NEXT: commands_before(config, None, STEP - 1) + start,  # it restarted, and does not know of the session
        Command.STRAY: stop,
    }
    return histories.get(case.command, start + stop) if start else ()


def configured(rank: bool, case: Case) -> ProfilerConfig:
    """Return the configuration, from verl's YAML. Others are always profiled, so that the command is sent."""
    tool = {Tool.UNKNOWN: "torch", Tool.NULL: None}.get(case.tool, case.tool)
    options: dict[str, object] = {"discrete": case.discrete == "yes"} if tool in ("torch", "npu", "nsys") else {}
    if case.command == Command.ENDED and tool in ("torch", "npu"):
        options |= {"profile_token_start": 1, "profile_token_end": 4}
    numbers = {Ranks.MINE: [1 if rank else WORLD], Ranks.THEIRS: [9 * WORLD]}
    section = {
        "tool": tool,
        "enable": case.enable == "yes",
        "all_ranks": case.ranks == Ranks.ALL,
        "ranks": numbers.get(case.ranks, []),
        "tool_config": {tool or "torch": options},
    }
    config = _sections(rank, json.dumps(section))
    if case.tool == Tool.UNKNOWN:  # the reader refuses it, but the agent must answer it
        config = _with_tool(config, rank, "perf")
    return replace(config, steps=_steps({Step.LISTED: (STEP - 1, STEP), Step.NONE: None}.get(case.step, (9,))))


@cache
def _sections(rank: bool, text: str) -> ProfilerConfig:
    section = json.loads(text)
    others = {"tool": "torch", "enable": True, "all_ranks": True, "ranks": []}
    profilers = {"rollout": others, "actor": section} if rank else {"rollout": section, "actor": others}
    tree = {"actor_rollout_ref": {role: {"profiler": profiler} for role, profiler in profilers.items()}}
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


def seen(engine: str, manager: str) -> Observation:
    """Return what the adapter of this engine observes. Neither SGLang nor vLLM reports whether it profiles.

    A router in the place of a tokenizer manager is observed as absent; `test_table.py` checks that with the adapter.
    """
    if manager in (Manager.ABSENT, Manager.ROUTER):
        return Observation(engine=engine, tokenizer="absent")
    if manager not in (Manager.PRESENT, Manager.UNABLE):
        return Observation(engine=engine, tokenizer="unknown")
    able = frozenset({Operation.PROFILE}) if engine == "rank" else frozenset(Operation)
    return Observation(
        engine=engine,
        instance="first",
        tokenizer="present",
        operations=able - {Operation.PROFILE} if manager == Manager.UNABLE else able,
        generating=None if engine == "rank" else True,
        profiling=False if engine in ("tiny", "rank") else None,
    )


@cache
def _joined(engine: str, node: str, manager: str, ranks: str) -> AgentState:
    replica = 0 if ranks == Ranks.NOBODY_FIRST else 1
    if engine == "rank":
        place = Identity(replica=replica, node_rank=0, role="actor")
    else:
        place = Identity(replica=replica, node_rank=int(node), nnodes=2, gpus_per_node=WORLD // 2)
    return agent(place, seen(engine, manager))


def _answered(state: AgentState, body: ProfileCommand, seq: int, engine: str, case: Case) -> tuple[AgentState, str]:
    """The state after one command, and its answer."""
    at_ms = seq * 10 * TTL_MS
    state, effects = fold(state, command(body, seq, at_ms=at_ms, ttl_ms=TTL_MS))
    state, answer = _performed(state, effects, seq, engine, case)
    if not answer:  # it waits while the engine launches
        later = (
            EngineObserved(at_ms=at_ms + 1, observation=seen(engine, Manager.PRESENT))
            if case.manager == Manager.SOON
            else Tick(at_ms=at_ms + TTL_MS)
        )
        state, effects = fold(state, later)
        state, answer = _performed(state, effects, seq, engine, case)
    return state, answer


def _performed(state: AgentState, effects: list[Effect], seq: int, engine: str, case: Case) -> tuple[AgentState, str]:
    """Have the engine do every call. Return the answer to the command of `seq`, "" if there is none yet."""
    todo = [effect for effect in effects if isinstance(effect, Perform)]
    while todo:
        perform = todo.pop(0)
        stopped = isinstance(perform.call, StopProfile)
        result = Returned(auto_stopped=stopped and case.command == Command.ENDED)
        observed = seen(engine, Manager.PRESENT)
        if observed.profiling is not None:
            observed = after(observed, perform.call)
        more = EngineReturned(at_ms=1, call_id=perform.call_id, result=result, observation=observed)
        state, decided = fold(state, more)
        effects = [*effects, *decided]
        todo += [effect for effect in decided if isinstance(effect, Perform)]
    answers = [effect for effect in effects if isinstance(effect, Answer) and effect.seq == seq]
    return state, formatted(answers[-1]) if answers else ""


def formatted(answer: Answer) -> str:
    """Return an outcome in the words of the table."""
    match answer.outcome:
        case Acted(auto_stopped=ended):
            return "acts, finds it ended" if ended else "acts"
        case Skipped(reason):
            return f"skips: {reason}"
        case Failed(error):
            return f"fails: {error}"
