"""Turn verl's profiling configuration into ours. Pure: references are resolved by the caller.

Rule 1  What the user wrote is what is recorded. No window is widened or cut; an impossible one is an error.
Rule 2  Where the file has no value, verl's own defaults and inheritance apply.
Rule 3  A wrong value is an error even in a section that is switched off, because one day it is switched on.
Rule 4  A key without effect is a warning (`schemas.profiler.verl_warnings`).

Roles: An agent beside a training rank is started with a role: `actor`, `ref`, `critic` or `reward`. verl usually runs
the reference model inside the actor's worker. That process has one profiler, which verl starts and stops according to
the actor's section, so its agent is `actor`. The plan of `ref` is for a worker that has only the reference model.

Activities: verl's torch profiler records CPU and CUDA when `contents` is empty. Training ranks always record the CPU
and, once anything is listed, CUDA only if it is listed too. Engines record both unless one of the two is listed. We do
the same. On an NPU an empty list records only the CPU, and `contents: null` everything.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple

from msgspec.structs import asdict, replace

from schemas.commands import (
    Finish,
    Npu,
    ProfileActivity,
    ProfilePlan,
    Schedule,
    ToolOptions,
    TorchMemory,
    Window,
)
from schemas.errors import ConfigError
from schemas.profiler.conversion import convert, shown
from schemas.profiler.settings import TOOLS, Layout, ProfilerSettings, RankUnit
from schemas.profiler.verl_keys import (
    ACTOR,
    PARENTS,
    REWARD,
    REWARD_MODEL,
    ROLES,
    ROLLOUT,
    SECTIONS,
    VerlFinish,
    VerlGlobal,
    VerlGlobalTools,
    VerlNpu,
    VerlProfiler,
    VerlTorch,
    VerlWindow,
)

_ACTIVITIES: Final[Mapping[str, ProfileActivity]] = {
    "cpu": "cpu",
    "cuda": "cuda",
    "gpu": "cuda",
    "npu": "npu",
    "memory": "memory",
    "MEM": "memory",
}
"""Contents that are activities."""

_FROM_ACTOR: Final = (
    *("enable", "all_ranks", "ranks"),
    *("relocate_results", "finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks"),
)
_TOOLS_FROM_ACTOR: Final[Mapping[str, tuple[str, ...]]] = {
    "torch": ("contents", "discrete"),
    "npu": ("contents", "discrete", "level", "analysis"),
    "nsys": ("discrete",),
}
"""Keys that the rollouts inherit from the actor."""


class VerlSection(NamedTuple):
    """One profiler section: as the file has it, with types and what it inherits, and what is profiled."""

    path: str
    content: Mapping[str, object]
    profiler: VerlProfiler
    window: Window | None
    plan: ProfilePlan


class VerlFile(NamedTuple):
    """A configuration of verl's that was read.

    Attributes:
        tree: The content of the file, with its references.
        content: The content of `global_profiler`, with its references resolved.
        sections: The rollouts' section, and those of the training roles that the file has.
    """

    tree: Mapping[str, object]
    content: Mapping[str, object]
    sections: tuple[VerlSection, ...]
    settings: ProfilerSettings

    @property
    def enabled(self) -> tuple[VerlSection, ...]:
        return tuple(section for section in self.sections if section.plan.enabled)


def parse(
    tree: Mapping[str, object], resolve: Callable[[str], object], *, ranks: RankUnit = "global", layout: Layout = "step"
) -> VerlFile:
    """Read a trainer's whole configuration, or its profiling sections.

    Args:
        tree: The content of the file.
        resolve: Gives the content at a dotted path of `tree`, its references resolved; None if there is none.
        ranks: Unit of the rollouts' `ranks`: global GPU ranks from verl's pull request 7408 on, replicas before.
        layout: How trace directories are named.

    Raises:
        ConfigError: The text names the key, the value and what is allowed.
    """
    _check_sections(tree)
    top = deep_merge({"save_path": "outputs/profile"}, _content(resolve, "global_profiler"))
    shared = convert(top, VerlGlobal, "global_profiler")
    for_rank = _inherited_by_rank(top)
    for_engine = _inherited_by_engine(top, deep_merge(for_rank, _content(resolve, ACTOR)))

    def section(path: str) -> VerlSection:
        content = _content(resolve, path)
        profiler = convert(deep_merge(for_engine if path == ROLLOUT else for_rank, content), VerlProfiler, path)
        tool = _windowed(profiler)
        window = _window(tool, tool_path(profiler, path)) if tool is not None else None
        plan = replace(_plan(profiler), layout=layout)
        plan = _for_rollouts(plan, profiler, ranks, window) if path == ROLLOUT else _for_rank(plan, profiler)
        return VerlSection(path, content, profiler, window, plan)

    roles = tuple(section(path) for path in ROLES if value_at(tree, path) is not None)
    rollout = section(ROLLOUT)
    if any(role.plan.enabled and role.plan.finish.hook for role in roles):
        # As in verl: training ranks run the hook; with agents of engines on the same nodes it would run twice.
        rollout = rollout._replace(plan=replace(rollout.plan, finish=Finish(relocate=rollout.plan.finish.relocate)))
    sections = (rollout, *roles)
    enabled = [section.profiler for section in sections if section.plan.enabled]
    settings = ProfilerSettings(
        plan=rollout.plan,
        roles={ROLES[role.path]: role.plan for role in roles if role.plan.enabled},
        steps=tuple(sorted(set(shared.steps or ()))),
        continuous=shared.profile_continuous_steps,
        save_path=next(filter(None, (profiler.save_path for profiler in enabled)), shared.save_path),
        finish_hook_cmd=next(filter(None, (profiler.finish_hook_cmd for profiler in enabled)), ""),
    )
    return VerlFile(tree, top, sections, settings)


def value_at(tree: Mapping[str, object], path: str) -> object:
    """Return the value at a dotted path; None if there is none."""
    node: object = tree
    for part in path.split(".") if path else ():
        node = node.get(part) if isinstance(node, Mapping) else None
    return None if _is_missing(node) else node


def _is_missing(value: object) -> bool:
    """Whether this is OmegaConf's marker for a missing value."""
    return isinstance(value, str) and value == "???"  # other objects of a trainer, such as arrays, may not compare


def _check_sections(tree: Mapping[str, object]) -> None:
    """Raise ConfigError for a file of ours, and for anything else in the place of one of verl's sections."""
    ours = sorted(tree.keys() & {"steps", "plan", "roles"})
    if ours and not tree.keys() & set(SECTIONS):
        raise ConfigError(
            f"{ours[0]} is a key of our own YAML, and none of verl's sections is there: read the file with "
            "ProfilerConfig.from_yaml, or without --verl"
        )
    for path in filter(None, PARENTS):
        value = value_at(tree, path)
        if not (value is None or isinstance(value, Mapping) or (isinstance(value, str) and "${" in value)):
            raise ConfigError(f"{path} is {shown(value)}: allowed is a mapping of keys")
    if value_at(tree, REWARD) is not None and value_at(tree, REWARD_MODEL) is not None:
        raise ConfigError(f"{REWARD} and {REWARD_MODEL} are two names of one section: allowed is one of them")


def _content(resolve: Callable[[str], object], path: str) -> Mapping[str, object]:
    content = resolve(path)
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} is {shown(content)}: allowed is a mapping of keys")
    if content.get("tool") in ("None", "none"):  # Hydra passes on `tool=None` from a command line as a text
        return {**content, "tool": None}
    return content


# --- inheritance ------------------------------------------------------------------------------------------------------


def deep_merge(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Merge `above` over `below`. A ??? in `above`, or a null in place of a section, keeps the value of `below`."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = deep_merge(under if isinstance(under, Mapping) else {}, value)
        elif not _is_missing(value) and not (isinstance(under, Mapping) and value is None):
            merged[key] = value
    return merged


def _inherited_by_rank(top: Mapping[str, object]) -> dict[str, object]:
    """What a role takes from `global_profiler`, as verl's files do with `${oc.select:...}`."""
    tools = _picked(top.get("global_tool_config"), VerlGlobalTools.__struct_fields__)
    return {**_picked(top, VerlFinish.__struct_fields__), "tool_config": {"npu": {"analysis": True}, **tools}}


def _inherited_by_engine(top: Mapping[str, object], actor: Mapping[str, object]) -> dict[str, object]:
    """What the rollouts take from `global_profiler` and the actor's section. A window is not inherited."""
    tools = actor.get("tool_config")
    of_actor = tools if isinstance(tools, Mapping) else {}
    inherited = {tool: _picked(of_actor.get(tool), keys) for tool, keys in _TOOLS_FROM_ACTOR.items()}
    return {**_picked(top, ("tool", "save_path")), **_picked(actor, _FROM_ACTOR), "tool_config": inherited}


def _picked(section: object, keys: Iterable[str]) -> dict[str, object]:
    return {key: section[key] for key in keys if key in section} if isinstance(section, Mapping) else {}


# --- plans ------------------------------------------------------------------------------------------------------------


def _for_rollouts(plan: ProfilePlan, profiler: VerlProfiler, unit: RankUnit, window: Window | None) -> ProfilePlan:
    if not profiler.all_ranks and (unit == "replica" or not profiler.ranks):
        # Without ranks, replica 0 is profiled, which has rank 0, with the traces of all of its ranks.
        plan = replace(plan, ranks=None, replicas=plan.ranks)
    return replace(plan, window=window)


def _for_rank(plan: ProfilePlan, profiler: VerlProfiler) -> ProfilePlan:
    plan = replace(plan, by_stage=False, merge=False)
    if profiler.tool != "torch":
        return plan
    torch, keys = profiler.tool_config.torch, profiler.tool_config.torch.schedule
    cuda = not torch.contents or {"cuda", "gpu"} & set(torch.contents)
    activities: frozenset[ProfileActivity] = frozenset({"cpu", "cuda"} if cuda else {"cpu"})
    repeat = keys.repeat or (0 if torch.discrete else 1)  # as in verl: one window for each session
    schedule = Schedule(**{**asdict(keys), "repeat": repeat}) if keys.active else None
    return replace(plan, activities=activities | (plan.activities & {"memory"}), schedule=schedule)


def _plan(profiler: VerlProfiler) -> ProfilePlan:
    """What rollouts and training ranks have in common."""
    contents, tool = _contents(profiler), _windowed(profiler)
    recorded = profiler.tool if profiler.tool in TOOLS else None
    return ProfilePlan(
        enabled=profiler.enable and recorded is not None,
        tool=recorded or "torch",
        ranks=None if profiler.all_ranks else frozenset(profiler.ranks or (0,)),
        activities=_activities(contents, profiler.tool),
        with_stack="stack" in contents,
        with_modules="module" in contents,
        record_shapes="shapes" in contents,
        by_stage=_asks_for(profiler, "profile_by_stage"),
        merge=_asks_for(profiler, "merge_profiles"),
        discrete=tool.discrete if tool else profiler.tool == "nsys" and profiler.tool_config.nsys.discrete,
        options=_options(profiler),
        finish=Finish(
            relocate=profiler.relocate_results,
            hook=bool(profiler.finish_hook_cmd),
            hook_all_ranks=profiler.finish_hook_all_ranks,
            hook_ranks=frozenset(() if profiler.finish_hook_all_ranks else profiler.finish_hook_ranks),
        ),
    )


def _windowed(profiler: VerlProfiler) -> VerlTorch | VerlNpu | None:
    """The keys of the tool in use, if it is one that engines run."""
    if profiler.tool == "torch":
        return profiler.tool_config.torch
    return profiler.tool_config.npu if profiler.tool == "npu" else None


def tool_path(profiler: VerlProfiler, path: str) -> str:
    """Return the path of the keys of the tool in use."""
    return f"{path}.tool_config.{profiler.tool or 'torch'}"


def _contents(profiler: VerlProfiler) -> frozenset[str]:
    tool = _windowed(profiler)
    if tool is None:
        return frozenset()
    everything = ("npu", "cpu", "memory", "shapes", "module", "stack")
    return frozenset(everything if tool.contents is None else tool.contents)


def _asks_for(profiler: VerlProfiler, name: Literal["profile_by_stage", "merge_profiles"]) -> bool:
    """Whether stages or merged traces are asked for: by a key of the tool, or else by a content."""
    key: bool | None = getattr(_windowed(profiler), name, None)
    return key if key is not None else bool(_contents(profiler) & {name, name.replace("_", "-")})


def _activities(contents: frozenset[str], tool: str | None) -> frozenset[ProfileActivity]:
    """The activities of an engine."""
    listed = frozenset(_ACTIVITIES[content] for content in contents & _ACTIVITIES.keys())
    match tool:
        case "npu":
            return listed | {"cpu"}
        case "torch":
            return listed if listed - {"memory"} else listed | {"cpu", "cuda"}
        case _:
            return ProfilePlan().activities


def _options(profiler: VerlProfiler) -> ToolOptions | None:
    tools = profiler.tool_config
    match profiler.tool:
        case "npu":
            return Npu(level=tools.npu.level, analysis=tools.npu.analysis)
        case "torch_memory":
            memory = tools.torch_memory
            return TorchMemory(
                max_entries=memory.trace_alloc_max_entries,
                context=memory.context,
                stacks=memory.stacks,
                snapshot_steps=memory.memory_snapshot_num_steps,
            )
        case _:
            return None


# --- windows ----------------------------------------------------------------------------------------------------------


def _window(keys: VerlWindow, path: str) -> Window | None:
    """Return the forward steps to record, from whichever generation of keys is set; None for the whole session.

    Raises ConfigError.
    """
    starts = _set(keys, "step_start", "profile_token_start")
    ends = _set(keys, "step_end", "profile_token_end")
    length = _set(keys, "num_steps")
    start = next(iter(starts.values()), 0)
    bounds = {*ends.values(), *(start + number for number in length.values())}
    if len(set(starts.values())) > 1 or len(bounds) > 1:
        found = ", ".join(f"{key} is {value}" for key, value in {**starts, **ends, **length}.items())
        raise ConfigError(f"{path} contradicts itself: {found}; allowed is one start and one end, or equal values")
    if not bounds:
        return Window(start) if start else None
    (end,) = bounds
    if end <= start:
        raise ConfigError(
            f"{path}.{next(iter(ends))} is {end} and {next(iter(starts), 'the start')} is {start}: allowed is an end "
            "larger than the start; the window [start, end) would be empty"
        )
    return Window(start, end)


def _set(keys: VerlWindow, *names: str) -> dict[str, int]:
    """The keys that are set: null and -1 are not."""
    return {name: getattr(keys, name) for name in names if getattr(keys, name) not in (None, -1)}
