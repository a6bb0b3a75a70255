"""Our own YAML for profiling. Pure.

    steps: [1, "5-8"]                   # global training steps; a range has both ends
    continuous: false                   # true: one session over each run of consecutive steps
    save_path: /data/profile
    rollout: {ranks: ["0-7"], window: [0, 4], contents: [cpu, cuda, stack], by_stage: false}
    roles:
      actor: {discrete: true, ranks: [0]}
      critic: {tool: torch_memory, options: {snapshot_steps: 2}}
    finish: {relocate: true, hook: "upload $VERL_PROFILE_SAVE_PATH", ranks: all}

Who is named is profiled; a file that names nobody profiles the rollouts. `true` stands for a section in which nothing
is said, `false` for one that is switched off. `finish` and `layout` hold for all sections; one that says something
itself has that instead. A key that is unknown is an error.
"""

from collections.abc import Mapping
from typing import Final, Literal, cast

import msgspec

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
from schemas.identity import ROLLOUT, Role
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.interpolation import References
from schemas.profiler.sections import COUNTS, Section, is_list, is_whole, shown
from schemas.selection import RANK_TOOLS

LAYOUTS: Final = ("step", "verl_step", "verl")
ACTIVITIES: Final[Mapping[str, Activity]] = {"cpu": "cpu", "cuda": "cuda", "memory": "memory", "npu": "npu"}
DETAILS: Final = {"stack": "with_stack", "modules": "with_modules", "shapes": "record_shapes"}
"""Contents that are no activity, and the field of a plan that each sets."""
_DEFAULT_CONTENTS: Final[Mapping[str, frozenset[str]]] = {
    "torch": frozenset({"cpu", "cuda"}),
    "npu": frozenset({"cpu", "npu"}),
}
_OPTIONS: Final = {"torch_memory": TorchMemory, "npu": Npu, "precision_debugger": PrecisionDebugger}
_TOP: Final = ("steps", "continuous", "timeout_ms", "save_path", "layout", "rollout", "roles", "finish")
_PLAN: Final = (
    *("enabled", "tool", "steps", "ranks", "replicas", "window", "contents", "by_stage", "merge", "discrete"),
    *("schedule", "options", "layout", "finish"),
)
_FINISH: Final = ("relocate", "hook", "ranks")


def read(tree: Mapping[str, object], environment: Mapping[str, str]) -> ProfilerConfig:
    """From the content of a file. Raises ConfigError: it names the key, the value and what is allowed."""
    if "global_profiler" in tree:
        raise ConfigError(
            "global_profiler is a key of verl: read the file with ProfilerConfig.from_verl, or with --verl"
        )
    references = References(tree, environment)
    top = Section({key: references.at(str(key)) for key in tree})
    _all_known(top, _TOP)
    finish, command = _finish(top, Finish())
    layout = top.choice("layout", LAYOUTS, "step")
    roles = top.section("roles")
    for role in roles.values:
        if role == ROLLOUT:
            raise ConfigError(f"{roles.key(role)} is no training role: write it as `rollout`, beside `roles`")
        try:
            msgspec.convert(role, Role)
        except msgspec.ValidationError:
            raise ConfigError(
                f"{roles.key(role)} names a role: allowed are 1 to 32 small letters, digits, _ and -, a letter first"
            ) from None
    rollout = top.value("rollout")
    if "rollout" not in top.values:
        rollout = not roles.values
    return ProfilerConfig(
        plan=_plan(rollout, "rollout", finish, layout),
        roles={role: _plan(roles.value(role), roles.key(role), finish, layout) for role in roles.values},
        steps=tuple(sorted(top.numbers("steps", ranges=True) or ())),
        continuous=top.flag("continuous"),
        timeout_ms=top.whole("timeout_ms", 1) or ProfilerConfig().timeout_ms,
        save_path=top.text("save_path"),
        finish_hook_cmd=command,
    )


def _plan(said: object, path: str, finish: Finish, layout: str) -> ProfilePlan:
    if said is not None and not isinstance(said, bool | Mapping):
        raise ConfigError(f"{path} is {shown(said)}: allowed is a mapping of keys, true or false")
    section = Section(said if isinstance(said, Mapping) else None, path)
    _all_known(section, _PLAN)
    tool = section.choice("tool", sorted(RANK_TOOLS), "torch")
    contents = section.words("contents", {*ACTIVITIES, *DETAILS})
    if section.values.get("contents") is None:
        contents = _default_contents(tool)
    schedule = section.section("schedule")
    own, _ = _finish(section, finish)
    plan = ProfilePlan(
        enabled=section.flag("enabled", said is not False),
        tool=tool,
        steps=_some(section, "steps"),
        ranks=_some(section, "ranks"),
        replicas=_some(section, "replicas"),
        window=_window(section),
        activities=frozenset(ACTIVITIES[one] for one in contents if one in ACTIVITIES),
        with_stack="stack" in contents,
        with_modules="modules" in contents,
        record_shapes="shapes" in contents,
        by_stage=section.flag("by_stage"),
        merge=section.flag("merge"),
        discrete=section.flag("discrete"),
        schedule=_schedule(schedule) if section.values.get("schedule") is not None else None,
        options=_options(section, tool),
        layout=cast(Literal["step"], section.choice("layout", LAYOUTS, layout)),
        finish=own,
    )
    _fits(plan, section)
    return plan


def _fits(plan: ProfilePlan, section: Section) -> None:
    """Raise ConfigError for what counts nothing there: engines have no mini-batches, and ranks no forward steps."""
    if section.path == ROLLOUT:
        others = {"schedule": "it counts mini-batches, and rollouts have none; write a window of forward steps"}
    else:
        others = {
            "replicas": "a training rank belongs to none; write ranks",
            "window": "it counts forward steps of an engine; write a schedule, which counts mini-batches",
            "by_stage": "only an engine makes a trace of each stage; write discrete",
            "merge": "only an engine merges traces",
        }
        if plan.tool != "torch":
            others["schedule"] = f"only the tool torch has one, and this is {plan.tool}"
    if plan.tool == "torch_memory":
        others["discrete"] = "a snapshot is of whole sessions"
    if plan.tool not in _DEFAULT_CONTENTS and section.items("contents", ""):
        said = shown(section.values.get("contents"))
        raise ConfigError(f"{section.key('contents')} is {said}, and has no meaning there: {plan.tool} has none")
    for key, advice in others.items():
        if getattr(plan, key) not in (None, False):
            said = shown(section.values.get(key))
            raise ConfigError(f"{section.key(key)} is {said}, and has no meaning there: {advice}")


def _default_contents(tool: str) -> frozenset[str]:
    """CPU and device for the tools that have a choice; what a plan has anyhow for the others."""
    return _DEFAULT_CONTENTS.get(tool, frozenset(ProfilePlan().activities))


def _all_known(section: Section, known: tuple[str, ...]) -> None:
    unknown = section.unknown(known)
    if unknown:
        raise ConfigError(f"{unknown[0]}; allowed are {', '.join(known)}")


def _some(section: Section, name: str) -> frozenset[int] | None:
    """A set of numbers; None for `all`, which is also what no word of it means."""
    if section.value(name) == "all":
        return None
    if isinstance(section.value(name), str):
        raise section.wrong(name, f'all, or a list of {COUNTS} and of ranges such as "5-8"')
    return section.numbers(name, ranges=True)


def _window(section: Section) -> Window | None:
    allowed = "two whole numbers [start, end) of which the end is larger, such as [0, 4], or [4, null] without an end"
    bounds = section.items("window", allowed)
    if bounds is None:
        return None
    if len(bounds) == 2:
        start, end = bounds
        if is_whole(start) and start >= 0 and (end is None or (is_whole(end) and start < end)):
            return Window(start, end)
    raise section.wrong("window", allowed)


def _schedule(section: Section) -> Schedule:
    _all_known(section, ("active", "wait", "warmup", "repeat", "skip_first"))
    active = section.whole("active", 1)
    if active is None:
        raise section.wrong("active", "a whole number of at least 1: mini-batches to record")
    return Schedule(
        active=active,
        wait=section.whole("wait") or 0,
        warmup=section.whole("warmup") or 0,
        repeat=section.whole("repeat") or 0,
        skip_first=section.whole("skip_first") or 0,
    )


def _options(plan: Section, tool: str) -> ToolOptions | None:
    if plan.values.get("options") is None:
        return None
    section = plan.section("options")
    kind = _OPTIONS.get(tool)
    if kind is None:
        raise ConfigError(f"{section.path} is given and the tool is {tool}, which has none: leave them out")
    _all_known(section, kind.__struct_fields__)
    if kind is Npu:
        level = section.choice("level", ("level_none", "level0", "level1", "level2"), "level0")
        return Npu(level=cast(Literal["level0"], level), analysis=section.flag("analysis"))
    if kind is PrecisionDebugger:
        stages = section.items("stages", "names")
        if not all(isinstance(one, str) and 0 < len(one) <= 200 for one in stages or ()):
            raise section.wrong("stages", "a list of names of 1 to 200 characters")
        return PrecisionDebugger(
            config_path=section.text("config_path", most=512),
            stages=None if stages is None else frozenset(map(str, stages)),
            strict=section.flag("strict"),
        )
    none = section.values.get("context", "all") is None
    context = section.choice("context", ("state", "alloc", "all"), "all")
    return TorchMemory(
        max_entries=section.whole("max_entries", 1) or 100_000,
        context=None if none else cast(Literal["all"], context),
        stacks=cast(Literal["all"], section.choice("stacks", ("python", "all"), "all")),
        snapshot_steps=section.whole("snapshot_steps", 1) or 1,
    )


def _finish(above: Section, otherwise: Finish) -> tuple[Finish, str]:
    """What a section says of the end, and what holds `otherwise` where it says nothing; and the hook's command."""
    section = above.section("finish")
    _all_known(section, _FINISH)
    hook, ranks, top = section.values.get("hook"), section.value("ranks"), not above.path
    if isinstance(hook, str) and not top:
        raise section.wrong("hook", "true or false; the command itself is for finish.hook of the file")
    if hook is not None and not isinstance(hook, str | bool):
        raise section.wrong("hook", "a command, true or false" if top else "true or false")
    named = not (ranks is None or ranks == "all" or ranks == "profiled")
    if named and not is_list(ranks):
        raise section.wrong("ranks", f'all, profiled, or a list of {COUNTS} and of ranges such as "5-8"')
    numbers = section.numbers("ranks", ranges=True) or frozenset() if named else frozenset()
    return Finish(
        relocate=section.flag("relocate", otherwise.relocate),
        hook=otherwise.hook if hook is None else bool(hook),
        hook_all_ranks=otherwise.hook_all_ranks if ranks is None else ranks == "all",
        hook_ranks=otherwise.hook_ranks if ranks is None else numbers,
    ), str(hook) if isinstance(hook, str) else ""


# --- and back ---------------------------------------------------------------------------------------------------------


def written(config: ProfilerConfig) -> dict[str, object]:
    """The content of a file that reads as this configuration."""
    top = ProfilerConfig()
    said: dict[str, object] = {"steps": _spelled(config.steps)}
    if config.continuous:
        said["continuous"] = True
    if config.timeout_ms != top.timeout_ms:
        said["timeout_ms"] = config.timeout_ms
    if config.save_path:
        said["save_path"] = _escaped(config.save_path)
    said["rollout"] = _plan_written(config.plan, bool(config.finish_hook_cmd))
    if config.roles:
        said["roles"] = {role: _plan_written(plan, bool(config.finish_hook_cmd)) for role, plan in config.roles.items()}
    if config.finish_hook_cmd:
        said["finish"] = {"hook": _escaped(config.finish_hook_cmd)}
    return said


def _plan_written(plan: ProfilePlan, hooked: bool) -> dict[str, object]:
    """hooked: whether the file has a command, which is for every section that does not say otherwise."""
    said: dict[str, object] = {} if plan.enabled else {"enabled": False}
    said["tool"] = plan.tool
    for name, numbers in (("steps", plan.steps), ("ranks", plan.ranks), ("replicas", plan.replicas)):
        if numbers is not None:
            said[name] = _spelled(numbers)
    if plan.window is not None:
        said["window"] = [plan.window.start, plan.window.end]
    contents = [
        *(one for one in ACTIVITIES if one in plan.activities),
        *(one for one, field in DETAILS.items() if getattr(plan, field)),
    ]
    if frozenset(contents) != _default_contents(plan.tool):
        said["contents"] = contents
    said |= {name: True for name in ("by_stage", "merge", "discrete") if getattr(plan, name)}
    if plan.schedule is not None:
        said["schedule"] = msgspec.to_builtins(plan.schedule)
    if plan.options is not None:
        fields = msgspec.structs.asdict(plan.options)
        said["options"] = {key: _escaped(value) for key, value in fields.items()}
    if plan.layout != "step":
        said["layout"] = plan.layout
    finish: dict[str, object] = {"relocate": True} if plan.finish.relocate else {}
    if plan.finish.hook != hooked:
        finish["hook"] = plan.finish.hook
    if plan.finish.hook_all_ranks or plan.finish.hook_ranks:
        finish["ranks"] = "all" if plan.finish.hook_all_ranks else _spelled(plan.finish.hook_ranks)
    return said | ({"finish": finish} if finish else {})


def _escaped(value: object) -> object:
    """The value, no text of which is taken for a reference."""
    if isinstance(value, frozenset):
        return sorted(str(_escaped(one)) for one in value)
    return value.replace("${", r"\${") if isinstance(value, str) else value


def runs(numbers: "frozenset[int] | tuple[int, ...]") -> list[tuple[int, int]]:
    """Consecutive numbers together, as first and last of each run, in order."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        elif not found or number != found[-1][1]:
            found.append((number, number))
    return found


def _spelled(numbers: "frozenset[int] | tuple[int, ...]") -> list[object]:
    spelled: list[object] = []
    for first, last in runs(numbers):
        spelled += [f"{first}-{last}"] if last - first > 1 else range(first, last + 1)
    return spelled
