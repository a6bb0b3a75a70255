"""Our own YAML for profiling: the keys of a file as Structs, and what they mean. Pure.

    steps: [1, "5-8"]                   # global training steps; a range includes both ends
    continuous: false                   # true: one session for each run of consecutive steps
    save_path: /data/profile
    rollout: {ranks: ["0-7"], window: [0, 4], contents: [cpu, cuda, stack], by_stage: false}
    roles:
      actor: {discrete: true, ranks: [0]}
      critic: {tool: torch_memory, options: {snapshot_steps: 2}}
    finish: {relocate: true, hook: "upload $VERL_PROFILE_SAVE_PATH", ranks: all}

Rule 1  The sections that a file has are profiled. A file without any profiles the rollouts.
Rule 2  `true` is an empty section, `false` one that is switched off.
Rule 3  `finish` and `layout` of the file apply to every section that has none of its own.
Rule 4  An unknown key is an error, and so is one that has no effect in its section.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from schemas.commands import (
    Finish,
    Npu,
    PrecisionDebugger,
    ProfileActivity,
    ProfilePlan,
    Schedule,
    ToolOptions,
    TorchMemory,
    Window,
)
from schemas.errors import ConfigError
from schemas.identity import NUMBER_MAX, ROLLOUT, Count, Milliseconds, Role
from schemas.profiler.conversion import convert, joined, shown, unknown_keys
from schemas.profiler.settings import Layout, ProfilerSettings

T = TypeVar("T", bound=Struct)
MOST_IN_RANGE: Final = 1_000_000
_NUMBER: Final = 'a whole number of at least 0 or a range such as "5-8"'
_NUMBERS: Final = 'a list of whole numbers of at least 0 and of ranges such as "5-8"'
_WINDOW: Final = "two whole numbers [start, end), the end larger than the start, such as [0, 4]; or [4, null]"

Item = Annotated[Count | Annotated[str, Meta(pattern=r"^\d{1,18}-\d{1,18}$(?!\n)")], Meta(description=_NUMBER)]
Numbers = Annotated[tuple[Item, ...], Meta(description=_NUMBERS)]
Selection = Annotated[tuple[Item, ...] | Literal["all"], Meta(description=f"all or {_NUMBERS}")]
Hook = Annotated[bool | str, Meta(description="true, false, or (in the file's own `finish`) a command")]
HookRanks = Annotated[tuple[Item, ...] | Literal["all", "profiled"], Meta(description=f"all, profiled or {_NUMBERS}")]
Content = Literal["cpu", "cuda", "npu", "memory", "stack", "modules", "shapes"]


class FinishSection(Struct, frozen=True, kw_only=True):
    """What happens after the last profiled step. None takes the file's own `finish`."""

    relocate: bool | None = None
    hook: Hook | None = None
    ranks: HookRanks | None = None


class PlanSection(Struct, frozen=True, kw_only=True):
    """Keys of `rollout`, and of each role. None: all of them, or the tool's or file's own default."""

    enabled: bool = True
    tool: Literal["torch", "npu", "nsys", "torch_memory", "precision_debugger"] = "torch"
    steps: Selection | None = None
    ranks: Selection | None = None
    replicas: Selection | None = None
    window: Annotated[tuple[int, int | None], Meta(description=_WINDOW)] | None = None
    contents: tuple[Content, ...] | None = None
    by_stage: bool = False
    merge: bool = False
    discrete: bool = False
    schedule: Schedule | None = None
    options: dict[str, object] | None = None
    layout: Layout | None = None
    finish: FinishSection = FinishSection()


class ProfileFile(Struct, frozen=True, kw_only=True):
    """Keys of a file. `rollout` and `roles` hold a `PlanSection`, true or false each."""

    steps: Numbers = ()
    continuous: bool = False
    timeout_ms: Milliseconds = 30_000
    save_path: str = ""
    layout: Layout = "step"
    rollout: object = None
    roles: dict[str, object] = {}
    finish: FinishSection = FinishSection()


_DETAILS: Final[Mapping[Content, str]] = {"stack": "with_stack", "modules": "with_modules", "shapes": "record_shapes"}
"""Contents that are not activities, and the field of a plan that each sets."""
_ACTIVITIES: Final[tuple[ProfileActivity, ...]] = ("cpu", "cuda", "memory", "npu")
_CONTENTS: Final[Mapping[str, tuple[Content, ...]]] = {"torch": ("cpu", "cuda"), "npu": ("cpu", "npu")}
"""Default contents of the tools that have any."""
_OPTIONS: Final[Mapping[str, type[ToolOptions]]] = {
    "torch_memory": TorchMemory,
    "npu": Npu,
    "precision_debugger": PrecisionDebugger,
}
_SHARED_FIELDS: Final = ("enabled", "tool", "by_stage", "merge", "discrete", "schedule")
"""Fields that a section and a plan have in common."""


# --- reading ----------------------------------------------------------------------------------------------------------


def parse(tree: Mapping[str, object]) -> ProfilerSettings:
    """Return the settings that a file's content stands for. Raises ConfigError."""
    if "global_profiler" in tree:
        raise ConfigError(
            "global_profiler is a key of verl: read the file with ProfilerConfig.from_verl, or with --verl"
        )
    file = _converted(tree, ProfileFile, "")
    if ROLLOUT in file.roles:
        raise ConfigError("roles.rollout is not a training role: write it as `rollout`, beside `roles`")
    for role in file.roles:
        try:
            msgspec.convert(role, Role)
        except msgspec.ValidationError:
            allowed = "allowed are 1 to 32 lower-case letters, digits, _ and -, a letter first"
            raise ConfigError(f"roles.{role} is not the name of a role: {allowed}") from None
    rollout = tree.get("rollout") if "rollout" in tree else not file.roles
    return ProfilerSettings(
        plan=_plan(rollout, ROLLOUT, file),
        roles={role: _plan(section, f"roles.{role}", file) for role, section in file.roles.items()},
        steps=tuple(sorted(_expanded(file.steps, "steps"))),
        continuous=file.continuous,
        timeout_ms=file.timeout_ms,
        save_path=file.save_path,
        finish_hook_cmd=file.finish.hook if isinstance(file.finish.hook, str) else "",
    )


def _converted(value: object, kind: type[T], path: str) -> T:
    for unknown in unknown_keys(value, kind, path):
        raise ConfigError(f"{unknown.path} is unknown{unknown.suggestion}; allowed are {', '.join(unknown.known)}")
    return convert(value, kind, path)


def _plan(value: object, path: str, file: ProfileFile) -> ProfilePlan:
    if value is not None and not isinstance(value, bool | Mapping):
        raise ConfigError(f"{path} is {shown(value)}: allowed is a mapping of keys, true or false")
    section = _converted(value if isinstance(value, Mapping) else {"enabled": value is not False}, PlanSection, path)
    _check_effects(section, path)
    contents = _CONTENTS.get(section.tool, ("cpu",)) if section.contents is None else section.contents
    return ProfilePlan(
        **{name: getattr(section, name) for name in _SHARED_FIELDS},
        steps=_selected(section.steps, joined(path, "steps")),
        ranks=_selected(section.ranks, joined(path, "ranks")),
        replicas=_selected(section.replicas, joined(path, "replicas")),
        window=_window(section.window, path),
        activities=frozenset(activity for activity in _ACTIVITIES if activity in contents),
        with_stack="stack" in contents,
        with_modules="modules" in contents,
        record_shapes="shapes" in contents,
        options=_options(section, path),
        layout=section.layout or file.layout,
        finish=_finish(section.finish, file.finish, path),
    )


def _check_effects(section: PlanSection, path: str) -> None:
    """Raise ConfigError for a key that has no effect there: engines have no mini-batches, ranks no forward steps."""
    role, tool = path != ROLLOUT, section.tool
    rules: tuple[tuple[bool, str, str], ...] = (
        (not role, "schedule", "it counts mini-batches, and rollouts have none; write a window of forward steps"),
        (role, "replicas", "a training rank belongs to none; write ranks"),
        (role, "window", "it counts forward steps of an engine; write a schedule, which counts mini-batches"),
        (role, "by_stage", "only an engine makes a trace of each stage; write discrete"),
        (role, "merge", "only an engine merges traces"),
        (role and tool != "torch", "schedule", f"only the tool torch has one, and this is {tool}"),
        (tool == "torch_memory", "discrete", "a snapshot covers whole sessions"),
        (tool not in _CONTENTS, "contents", f"{tool} has none"),
        (tool not in _OPTIONS, "options", f"{tool} has none"),
    )
    for applies, key, reason in rules:
        if applies and getattr(section, key) not in (None, False, "all", ()):
            raise ConfigError(f"{joined(path, key)} has no effect there: {reason}")


def _selected(items: tuple[int | str, ...] | str | None, path: str) -> frozenset[int] | None:
    """The numbers of a selection; None for all."""
    return _expanded(items, path) if isinstance(items, tuple) else None


def _expanded(items: Iterable[int | str], path: str) -> frozenset[int]:
    numbers: set[int] = set()
    left = MOST_IN_RANGE  # of all ranges together: they may overlap
    for item in items:
        if isinstance(item, int):
            numbers.add(item)
            continue
        first, last = map(int, item.split("-"))
        left -= last - first + 1
        if last < first or left < 0 or last > NUMBER_MAX:
            raise ConfigError(
                f'{path} has "{item}": allowed is an ascending range, and at most {MOST_IN_RANGE} numbers in all ranges'
            )
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def _window(bounds: tuple[int, int | None] | None, path: str) -> Window | None:
    if bounds is None:
        return None
    start, end = bounds
    if start < 0 or (end is not None and end <= start):
        raise ConfigError(f"{path}.window is {shown(list(bounds))}: allowed is {_WINDOW}")
    return Window(start, end)


def _options(section: PlanSection, path: str) -> ToolOptions | None:
    if section.options is None:
        return None
    return _converted(section.options, _OPTIONS[section.tool], joined(path, "options"))


def _finish(section: FinishSection, file: FinishSection, path: str) -> Finish:
    if isinstance(section.hook, str):
        raise ConfigError(
            f"{path}.finish.hook is {shown(section.hook)}: allowed is true or false; the command itself belongs in "
            "the file's own finish.hook"
        )
    relocate, hook, ranks = (
        getattr(file if getattr(section, key) is None else section, key) for key in ("relocate", "hook", "ranks")
    )
    return Finish(
        relocate=bool(relocate),
        hook=bool(hook),
        hook_all_ranks=ranks == "all",
        hook_ranks=_expanded(ranks, "finish.ranks") if isinstance(ranks, tuple) else frozenset(),
    )


# --- writing ----------------------------------------------------------------------------------------------------------


def content(settings: ProfilerSettings) -> dict[str, object]:
    """Return the content of a file that reads as these settings."""
    hook = settings.finish_hook_cmd
    file = ProfileFile(
        steps=ranges(settings.steps),
        continuous=settings.continuous,
        timeout_ms=settings.timeout_ms,
        save_path=settings.save_path,
        rollout=_written(_section(settings.plan, bool(hook))),
        roles={role: _written(_section(plan, bool(hook))) for role, plan in settings.roles.items()},
        finish=FinishSection(hook=hook or None),
    )
    return _written(file)


def _written(section: Struct) -> dict[str, object]:
    """The keys of a section whose values are not the defaults."""
    default = asdict(type(section)())
    changed = {key: value for key, value in asdict(section).items() if value != default[key]}
    return {
        key: _written(value) if isinstance(value, FinishSection) else msgspec.to_builtins(value)
        for key, value in changed.items()
    }


def _section(plan: ProfilePlan, hook: bool) -> PlanSection:
    """`hook` tells whether the file has a command, which applies to every section that does not say otherwise."""
    finish, ranks = plan.finish, None if plan.finish.hook_all_ranks else ranges(plan.finish.hook_ranks)
    contents = _contents_of(plan)
    return PlanSection(
        **{name: getattr(plan, name) for name in _SHARED_FIELDS},
        steps=None if plan.steps is None else ranges(plan.steps),
        ranks=None if plan.ranks is None else ranges(plan.ranks),
        replicas=None if plan.replicas is None else ranges(plan.replicas),
        window=None if plan.window is None else (plan.window.start, plan.window.end),
        contents=None if contents == _CONTENTS.get(plan.tool, ("cpu",)) else contents,
        options=None if plan.options is None else _keys(plan.options),
        layout=None if plan.layout == "step" else plan.layout,
        finish=FinishSection(
            relocate=finish.relocate or None,
            hook=None if finish.hook == hook else finish.hook,
            ranks="all" if ranks is None else ranks or None,
        ),
    )


def _keys(options: ToolOptions) -> dict[str, object]:
    keys: dict[str, object] = msgspec.to_builtins(options, order="deterministic")
    return {key: value for key, value in keys.items() if key != "type"}  # which the tool's name stands for


def _contents_of(plan: ProfilePlan) -> tuple[Content, ...]:
    details = (content for content, field in _DETAILS.items() if getattr(plan, field))
    return (*(activity for activity in _ACTIVITIES if activity in plan.activities), *details)


def ranges(numbers: Iterable[int]) -> tuple[int | str, ...]:
    """Return the numbers in order, three or more consecutive ones as a range: `(0, "5-8")`."""
    items: list[int | str] = []
    for _, pairs in groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        items += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else run
    return tuple(items)
