"""verl's configuration of profiling, as ours. Pure.

Rule 1  What the user wrote is what is recorded. No window is widened or cut; one that can't be is an error.
Rule 2  Where the file says nothing, verl's own defaults and inheritance hold (`schemas.profiler.verl_keys.DEFAULTS`).
Rule 3  A wrong value is an error, in a section that is switched off too: it is switched on one day.
Rule 4  What nothing follows from, an unknown key or one that is not acted on, is a remark.

Roles  An agent beside a training rank is started with the name of a role: `actor`, `ref`, `critic` or `reward`. As a
rule verl runs the reference model inside the actor's worker. That process has one profiler, which verl starts and stops
as the actor's section says. So its agent is `actor`; the plan of `ref` is for a worker of the reference model alone.

Activities  verl's torch profiler takes CPU and CUDA when `contents` is empty. On training ranks it takes the CPU in any
case, and once anything is named, CUDA only if it is too. Engines take both unless one of the two is named. So do we.
On an NPU an empty list takes the CPU alone, and `contents: null` takes everything.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, cast

from msgspec.structs import replace

from schemas.commands import (
    Activity,
    Finish,
    Npu,
    PrecisionDebugger,
    ProfilePlan,
    Schedule,
    ToolOptions,
    TorchMemory,
    Window,
)
from schemas.errors import ConfigError
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.interpolation import ABSENT, References, overlay
from schemas.profiler.sections import Section, is_whole, shown
from schemas.profiler.verl_keys import (
    ACTOR,
    CONTENTS,
    DEFAULTS,
    LEVELS,
    NEIGHBOURS,
    REF,
    REWARD,
    REWARD_MODEL,
    ROLES,
    ROLLOUT,
    SECTIONS,
    STAGES,
    TOOLS,
)
from schemas.profiler.verl_remarks import Asked, below, contradictions, options_of, stands, strangers

RankUnit = Literal["global", "replica"]
Layout = Literal["step", "verl_step", "verl"]


class Reading(NamedTuple):
    """A configuration that was read. remarks: what the reader should know of it, a sentence each."""

    config: ProfilerConfig
    remarks: list[str]


def read(
    tree: Mapping[str, object],
    environment: Mapping[str, str],
    *,
    ranks: RankUnit = "global",
    layout: Layout = "step",
) -> Reading:
    """From the whole configuration of a trainer, or the parts that have to do with profiling.

    ranks: what the numbers in the rollouts' `ranks` are: global GPU ranks, as in verl from its pull request 7408 on, or
    indices of replicas, as before.   layout: of the directories of traces.
    Raises ConfigError: it names the key, the value and what is allowed.
    """
    _is_verl_s(tree)
    references = References(overlay(DEFAULTS, tree), environment)
    remarks = list(strangers(tree, references))
    top = Section(references.at("global_profiler"), "global_profiler")
    _tool(top)
    steps, continuous, root = top.numbers("steps") or (), top.flag("profile_continuous_steps"), top.text("save_path")
    engine = Section(references.at(ROLLOUT), ROLLOUT)
    older = "_target_" in below(tree, ROLLOUT) and not any(
        "relocate_results" in below(tree, path) for path in ("global_profiler", ACTOR, ROLLOUT)
    )  # it came together with global ranks
    asked = [Asked(engine, _rollout_plan(engine, ranks, layout, older, remarks))]
    roles: dict[str, ProfilePlan] = {}
    if stands(tree, REWARD) and stands(tree, REWARD_MODEL):
        raise ConfigError(f"{REWARD} and {REWARD_MODEL} stand for the same: allowed is one of them")
    for path, role in ROLES.items():
        if stands(tree, path):
            section = Section(references.at(path), path)
            plan = _rank_plan(section, layout, remarks)
            asked.append(Asked(section, plan))
            if plan.enabled:
                roles[role] = plan
    plan = asked[0].plan
    if any(one.finish.hook for one in roles.values()):
        # As in verl: the hook is the training ranks', and with engines on their nodes would run there twice.
        heir_of = Section(references.at(ACTOR), ACTOR)
        remarks += [
            f"{engine.key(key)} is not acted on, by verl neither: training ranks run the command, and those that their "
            "sections name"
            for key in ("finish_hook_all_ranks", "finish_hook_ranks")
            if plan.enabled and engine.values.get(key) and engine.values.get(key) != heir_of.values.get(key)
        ]
        plan = replace(plan, finish=Finish(relocate=plan.finish.relocate))
    config = ProfilerConfig(
        plan=plan,
        roles=roles,
        steps=tuple(sorted(steps)),
        continuous=continuous,
        save_path=_for_all(asked, "save_path", remarks) or root,
        finish_hook_cmd=_for_all(asked, "finish_hook_cmd", remarks),
    )
    remarks += contradictions(config, asked, top, Section(references.at(REF), REF))
    if tree and not remarks and not tree.keys() & SECTIONS:
        remarks.append(
            f"no section of verl's is there, such as global_profiler, but {shown(tree)}: nothing is profiled; hand "
            "over the whole configuration of the trainer"
        )
    return Reading(config, list(dict.fromkeys(remarks)))


def _is_verl_s(tree: Mapping[str, object]) -> None:
    """Raise ConfigError for a file of our own, and where verl has a section and the file has none."""
    ours = sorted(tree.keys() & {"steps", "rollout", "roles"})
    if ours and not tree.keys() & SECTIONS:
        raise ConfigError(
            f"{ours[0]} is a key of our own YAML, and no section of verl's is there: read the file with "
            "ProfilerConfig.from_yaml, or without --verl"
        )
    for path in filter(None, NEIGHBOURS):
        above, _, last = path.rpartition(".")
        said = below(tree, above).get(last)
        if not (isinstance(said, str) and ("${" in said or said == ABSENT)):
            Section(said, path)


# --- a section as a plan ----------------------------------------------------------------------------------------------


def _rollout_plan(section: Section, ranks: RankUnit, layout: Layout, older: bool, remarks: list[str]) -> ProfilePlan:
    """older: whether a verl wrote the section in which `ranks` were replicas."""
    plan, tool = _plan(section, layout)
    if _schedule(tool) is not None:
        remarks.append(
            f"{tool.key('schedule')} is not acted on: it counts mini-batches of a training rank; for the forward "
            "steps of a rollout write step_start and step_end"
        )
    window = _window(tool)
    if plan.by_stage and window is None:
        remarks.append(
            f"{tool.key('contents')} asks for a trace of each stage and there is no window: SGLang makes those only "
            "of a given number of forward steps, so its agents answer unsupported; write step_start and step_end"
        )
    if plan.enabled and "cuda" in plan.activities and "cpu" not in plan.activities:
        remarks.append(
            f"{tool.key('contents')} names cuda and not cpu: engines record CUDA alone, where verl 0.9 has them "
            "record the CPU too; name both for that"
        )
    if ranks == "global" and plan.enabled and older and (plan.ranks or frozenset()) - {0}:
        remarks.append(
            f"{section.key('ranks')} is {shown(section.values.get('ranks'))}, read as global ranks, and the file is of "
            "a verl up to 0.9.0 (its sections have no relocate_results), which took them for replicas: for those, "
            'read it with ranks="replica" (--ranks replica)'
        )
    everybody = section.flag("all_ranks")
    if not everybody and (ranks == "replica" or not section.numbers("ranks")):
        # Where nobody is named, replica 0 is: the one of rank 0, with the traces of all its ranks.
        plan = replace(plan, ranks=None, replicas=plan.ranks)
    return replace(plan, window=window)


def _rank_plan(section: Section, layout: Layout, remarks: list[str]) -> ProfilePlan:
    plan, tool = _plan(section, layout)
    if _window(tool) is not None:
        remarks.append(
            f"{tool.path} has a window that is not acted on: it counts forward steps of an engine; write it in "
            f"{ROLLOUT}.tool_config.{plan.tool}, and of a training rank's mini-batches write a schedule"
        )
    if plan.by_stage or plan.merge:
        remarks.append(
            f"{tool.path} asks for {'a trace of each stage' if plan.by_stage else 'merged traces'}, which is not acted "
            f"on: only an engine makes those; write it in {ROLLOUT}.tool_config.{plan.tool}"
        )
        plan = replace(plan, by_stage=False, merge=False)
    if _schedule(tool) is None and any(tool.section("schedule").whole(key) for key in _WITHOUT_ACTIVE):
        remarks.append(
            f"{tool.key('schedule')} is not acted on: active is not set, or 0, which is no schedule; write how many "
            "mini-batches are recorded"
        )
    if plan.tool == "torch":
        plan = replace(plan, activities=_rank_activities(plan.activities, tool))
    if plan.tool == "precision_debugger":
        plan = replace(plan, ranks=None)  # msprobe picks the ranks, from its own file
    schedule = _schedule(tool)
    if schedule is not None and not plan.discrete:
        schedule = replace(schedule, repeat=schedule.repeat or 1)  # as verl has it: one window for each session
        if plan.enabled and not (schedule.skip_first or schedule.wait or schedule.warmup):
            remarks.append(
                f"{tool.key('schedule')} is set and {tool.key('discrete')} is not: only mini-batches are recorded, "
                "where verl keeps the stages before them too; with discrete: true each stage has its trace"
            )
    return replace(plan, schedule=schedule)


def _plan(section: Section, layout: Layout) -> tuple[ProfilePlan, Section]:
    """What rollouts and training ranks have in common, and the section of the tool."""
    name = _tool(section)
    tool = options_of(section, name or "torch")
    contents = _contents(tool, name)
    everybody, some = section.flag("finish_hook_all_ranks"), section.numbers("finish_hook_ranks")
    plan = ProfilePlan(
        enabled=section.flag("enable") and name is not None,
        tool=name or "torch",
        ranks=None if section.flag("all_ranks") else section.numbers("ranks") or frozenset({0}),
        activities=_activities(contents, name),
        with_stack="stack" in contents,
        with_modules="module" in contents,
        record_shapes="shapes" in contents,
        by_stage=tool.flag("profile_by_stage", bool(contents & {"profile-by-stage", "profile_by_stage"})),
        merge=tool.flag("merge_profiles", bool(contents & {"merge-profiles", "merge_profiles"})),
        discrete=tool.flag("discrete"),
        options=_options(tool, name),
        layout=layout,
        finish=Finish(
            relocate=section.flag("relocate_results"),
            hook=bool(section.text("finish_hook_cmd")),
            hook_all_ranks=everybody,
            hook_ranks=frozenset() if everybody else some or frozenset(),
        ),
    )
    return plan, tool


def _tool(section: Section) -> str | None:
    nothing = section.values.get("tool") in (None, "None", "none")  # Hydra takes the None of a command line for a text
    return None if nothing else section.choice("tool", TOOLS, "torch")


def _contents(tool: Section, name: str | None) -> frozenset[str]:
    allowed = CONTENTS.get(name or "")
    if allowed is None:
        return frozenset()
    if name == "npu" and tool.values.get("contents") is None:
        return frozenset({"npu", "cpu", "memory", "shapes", "module", "stack"})
    return tool.words("contents", allowed)


def _activities(contents: frozenset[str], name: str | None) -> frozenset[Activity]:
    """As an engine takes them."""
    memory: frozenset[Activity] = frozenset({"memory"} if contents & {"memory", "MEM"} else ())
    if name == "npu":
        return memory | ({"cpu", "npu"} if "npu" in contents else {"cpu"})
    if name != "torch":
        return ProfilePlan().activities
    cpu: frozenset[Activity] = frozenset({"cpu"} if "cpu" in contents else ())
    cuda: frozenset[Activity] = frozenset({"cuda"} if contents & {"cuda", "gpu"} else ())
    return memory | (cpu | cuda or frozenset[Activity]({"cpu", "cuda"}))


def _rank_activities(activities: frozenset[Activity], tool: Section) -> frozenset[Activity]:
    """As a training rank takes them."""
    contents = _contents(tool, "torch")
    cuda = not contents or bool(contents & {"cuda", "gpu"})
    return (activities - {"cuda"}) | ({"cpu", "cuda"} if cuda else {"cpu"})


def _window(tool: Section) -> Window | None:
    """The forward steps that are asked for, whichever generation of keys says it; None for the whole session."""
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for first, last, unset in (("step_start", "step_end", -1), ("profile_token_start", "profile_token_end", None)):
        starts |= _bound(tool, first, last, unset)
        ends |= _bound(tool, last, first, unset)
    asked = ", ".join(f"{key} is {value}" for key, value in {**starts, **ends}.items())
    for bounds in (starts, ends):
        if len(set(bounds.values())) > 1:
            raise ConfigError(f"{tool.path} says two things: {asked}; allowed is one of the two, or equal values")
    start, end = next(iter(starts.values()), None), next(iter(ends.values()), None)
    number = tool.whole("num_steps", 1)
    if number is not None:
        if end is not None and end - (start or 0) != number:
            raise ConfigError(
                f"{tool.path} says two things: {asked}, num_steps is {number}; allowed is an end or a number"
            )
        end = (start or 0) + number
    if end is None:
        return Window(start) if start else None
    if end <= (start or 0):
        beside = f"{next(iter(starts))} is {start}" if starts else "the start is not set, which is 0"
        raise ConfigError(
            f"{tool.key(next(iter(ends)))} is {end} and {beside}: allowed is an end larger than the start, or else "
            "the window [start, end) holds no forward step"
        )
    return Window(start or 0, end)


def _bound(tool: Section, key: str, other: str, unset: int | None) -> dict[str, int]:
    """The key and its number, if it is set. unset: the number that stands for nothing, as null does."""
    least = 0 if unset is None else unset
    value = tool.values.get(key)
    if is_whole(value) and value < least:
        beside = f"{other} is {shown(tool.values.get(other))}"
        raise ConfigError(f"{tool.key(key)} is {value} ({beside}): allowed is a whole number of at least {least}")
    number = tool.whole(key, least)
    return {} if number is None or number == unset else {key: number}


_WITHOUT_ACTIVE = ("skip_first", "wait", "warmup", "repeat")


def _schedule(tool: Section) -> Schedule | None:
    section = tool.section("schedule")
    wait, warmup = section.whole("wait") or 0, section.whole("warmup") or 0
    repeat, skip_first = section.whole("repeat") or 0, section.whole("skip_first") or 0
    active = section.whole("active")
    if not active:
        return None
    return Schedule(active=active, wait=wait, warmup=warmup, repeat=repeat, skip_first=skip_first)


def _options(tool: Section, name: str | None) -> ToolOptions | None:
    match name:
        case "npu":
            level = cast(Literal["level0"], tool.choice("level", LEVELS, "level0"))
            return Npu(level=level, analysis=tool.flag("analysis"))
        case "torch_memory":
            contexts: dict[str, Literal["state", "alloc", "all"] | None]
            contexts = {"null": None, "state": "state", "alloc": "alloc", "all": "all"}
            context = (
                "null" if tool.values.get("context", "all") is None else tool.choice("context", [*contexts], "all")
            )
            stacks: dict[str, Literal["python", "all"]] = {"python": "python", "all": "all"}
            return TorchMemory(
                max_entries=tool.whole("trace_alloc_max_entries", 1) or 100_000,
                context=contexts[context],
                stacks=stacks[tool.choice("stacks", [*stacks], "all")],
                snapshot_steps=tool.whole("memory_snapshot_num_steps", 1) or 1,
            )
        case "precision_debugger":
            stages = tool.items("stages", f"stages: {', '.join(STAGES)}")
            strict = tool.flag("strict")
            if strict and stages is not None:
                tool.words("stages", STAGES)
            for stage in stages or ():
                if not isinstance(stage, str) or not 0 < len(stage) <= 200:
                    raise ConfigError(
                        f"{tool.key('stages')} holds {shown(stage)}: allowed are names of 1 to 200 characters"
                    )
            return PrecisionDebugger(
                config_path=tool.text("config_path", most=512),
                stages=None if stages is None else frozenset(str(stage) for stage in stages),
                strict=strict,
            )
        case _:
            return None


# --- across sections --------------------------------------------------------------------------------------------------


def _for_all(asked: list[Asked], key: str, remarks: list[str]) -> str:
    """The text that all sections which are switched on have there; the first of several; "" when none has one."""
    texts = {one.section.key(key): one.section.text(key) for one in asked}
    used = {path: texts[path] for one in asked if one.plan.enabled and texts[path := one.section.key(key)]}
    path, text = next(iter(used.items()), ("", ""))
    remarks += [
        f"{other} is {shown(said)} and {path} is {shown(text)}, and a run has one, which is the latter: start the "
        "agents of the former with their own"
        for other, said in used.items()
        if said != text
    ]
    return text
