"""What a reader of verl's configuration should know of it: a sentence for each thing that is not as it looks. Pure.

Two kinds: what is allowed and does not do what it looks like, and keys that nothing follows from.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from schemas.commands import ProfilePlan
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.interpolation import References
from schemas.profiler.sections import Section, is_list, meant, shown
from schemas.profiler.verl_keys import (
    GLOBAL_KEYS,
    MISPLACED,
    NEIGHBOURS,
    OUTDATED,
    PROFILER_KEYS,
    ROLES,
    ROLLOUT,
    SCHEDULE_KEYS,
    SECTIONS,
    STAGES,
    TOOL_KEYS,
    TOOLS,
)
from schemas.selection import ENGINE_TOOLS


class Asked(NamedTuple):
    """What one section asks for."""

    section: Section
    plan: ProfilePlan


def options_of(section: Section, tool: str) -> Section:
    """The section of a tool, and of that the keys that it has: nothing follows from the others."""
    said = section.section("tool_config").section(tool)
    return Section({key: value for key, value in said.values.items() if key in TOOL_KEYS[tool]}, said.path)


# --- what does not do what it looks like ------------------------------------------------------------------------------


def contradictions(config: ProfilerConfig, asked: list[Asked], top: Section, ref: Section) -> list[str]:
    """What is allowed, and does not do what it looks like."""
    remarks = []
    on = [one for one in asked if one.plan.enabled]
    discrete = [one.section.path for one in on if one.plan.discrete]
    if config.continuous and discrete:
        remarks.append(
            f"global_profiler.profile_continuous_steps is true and {', '.join(discrete)} is discrete, which "
            "verl's manual rules out: rollouts have one session over each run of steps, ranks a trace of each stage"
        )
    if config.plan.enabled and config.roles and not config.plan.discrete and config.plan.tool in ENGINE_TOOLS:
        remarks.append(
            f"{ROLLOUT} is switched on (by itself, or with the actor) and not discrete: verl does not profile its "
            f"engines then and says nothing; here each session is recorded as a whole. For none, write enable: false"
        )
    remarks += [
        f"{one.section.key('enable')} is true and {one.section.key('tool')} is null: nothing is profiled there"
        for one in asked
        if one.section.flag("enable") and not one.plan.enabled
    ]
    if on and not config.steps:
        remarks.append(f"global_profiler.steps is {shown(top.values.get('steps'))}: no step is profiled")
    if config.steps and not any(one.section.flag("enable") for one in asked):
        remarks.append("global_profiler.steps names steps and no section has enable: true: nothing is profiled")
    if "ref" in config.roles and config.roles["ref"] != config.roles.get("actor"):
        differs = (
            f"{ref.path} says other things than the actor's"
            if "actor" in config.roles
            else f"{ref.key('enable')} is true and the actor's is not"
        )
        remarks.append(
            f"{differs}: it counts only for a worker that has the reference model alone, and in a worker that has both "
            "the actor's section decides"
        )
    for one in on:
        remarks += _unused_ranks(one)
        remarks += _unused_options(one)
    remarks += [
        f"{one.section.key('relocate_results')} is true and the tool is nsys, whose reports are not ours to move: they "
        "lie where nsys was told to write; a finish_hook_cmd finds Ray's place for them in $VERL_PROFILE_RAY_NSIGHT_DIR"
        for one in on
        if one.section.path != ROLLOUT and one.plan.tool == "nsys" and one.plan.finish.relocate
    ]
    debugger = top.section("global_tool_config").section("precision_debugger")
    if any(one.plan.tool == "precision_debugger" for one in on) and debugger.values.get("steps") is not None:
        remarks.append(_STEPS_OF_ITS_OWN.format(debugger.key("steps")))
    if any(one.plan.tool == "nsys" for one in on):
        options = top.section("global_tool_config").section("nsys")
        remarks += [
            f"{options.key(key)} is not acted on: training processes are launched with such options, and not by us; "
            "give them to `nsys profile` there"
            for key in ("controller_nsight_options", "worker_nsight_options")
            if options.values.get(key)
        ]
    return remarks


_STEPS_OF_ITS_OWN = "{} is not acted on, by verl neither: write global_profiler.steps"


def _unused_ranks(one: Asked) -> Iterator[str]:
    """Of ranks that are named: what nothing follows from."""
    section, hooked = one.section, bool(one.section.text("finish_hook_cmd"))
    if section.path != ROLLOUT and one.plan.tool == "precision_debugger":
        if section.numbers("ranks"):
            yield f"{section.key('ranks')} is not acted on, by verl neither: msprobe picks the ranks, from its own file"
    elif section.flag("all_ranks") and section.numbers("ranks"):
        yield _outdone(section, "ranks", "all_ranks")
    if hooked and section.flag("finish_hook_all_ranks") and section.numbers("finish_hook_ranks"):
        yield _outdone(section, "finish_hook_ranks", "finish_hook_all_ranks")


def _outdone(section: Section, some: str, everybody: str) -> str:
    return (
        f"{section.key(some)} is {shown(section.values.get(some))} and {section.key(everybody)} is true, which counts, "
        f"as in verl: all are meant; for those alone write {everybody}: false"
    )


def _unused_options(one: Asked) -> list[str]:
    """Of the tool that is in use: what nothing follows from, unless it is what stands there by default."""
    tool = options_of(one.section, one.plan.tool)
    remarks = []
    if tool.whole("stack_depth", 1) not in (None, 32):
        remarks.append(
            f"{tool.key('stack_depth')} is not acted on: torch records whole stacks; narrow `stacks` instead"
        )
    if tool.values.get("kw_args"):
        remarks.append(f"{tool.key('kw_args')} is not acted on: write context, stacks and trace_alloc_max_entries")
    if one.plan.tool == "precision_debugger":
        if tool.values.get("steps") is not None:
            remarks.append(_STEPS_OF_ITS_OWN.format(tool.key("steps")))
        remarks += [
            f"{tool.key('stages')} holds {shown(stage)}, which is no stage of verl{meant(str(stage), STAGES)}"
            for stage in tool.items("stages", "stages") or []
            if stage not in STAGES
        ]
    return remarks


# --- keys that nothing follows from -----------------------------------------------------------------------------------


def strangers(tree: Mapping[str, object], references: References) -> list[str]:
    """A remark for each key below a profiler's section, or close to being one, that is not known there.

    Raises ConfigError where a section is no mapping of keys, or refers to nothing.
    """
    remarks = []
    if is_list(tree.get("defaults")):
        remarks.append(
            "defaults names files that Hydra would put together, and they are not read: hand over the configuration "
            "that it makes of them"
        )
    for path, advice in OUTDATED.items():
        if stands(tree, path):
            remarks.append(f"{path} is not read: {advice}")
    remarks += [
        f"{key} is one key with dots in it, and is not read: write each part of it as a key below the one before it"
        for key in tree
        if "." in key and key.lstrip("+~").partition(".")[0] in SECTIONS
    ]
    for path, wanted in NEIGHBOURS.items():
        remarks += [
            _remark(f"{path}.{key}" if path else key, meant(key, wanted))
            for key in below(tree, path)
            if key not in (*wanted, "profiler") and "." not in key and meant(key, wanted)
        ]
    top = Section(references.at("global_profiler"), "global_profiler")
    remarks += _unknown(top, GLOBAL_KEYS)
    remarks += _unknown_tools(top.section("global_tool_config"), ("nsys", "torch_memory", "precision_debugger"))
    for path in (ROLLOUT, *(one for one in ROLES if stands(tree, one))):
        section = Section(references.at(path), path)
        remarks += _unknown(section, PROFILER_KEYS)
        if section.values.get("global_tool_config"):
            remarks.append(_remark(section.key("global_tool_config"), "; write it in global_profiler"))
        remarks += _unknown_tools(section.section("tool_config"), TOOLS)
    return remarks


def _unknown_tools(section: Section, tools: tuple[str, ...]) -> list[str]:
    remarks = []
    for name in section.values:
        if name not in tools:
            advice = "; write it in tool_config of a role" if name in TOOLS else meant(name, tools)
            remarks.append(_remark(section.key(name), advice))
        else:
            tool = section.section(name)
            remarks += _unknown(tool, TOOL_KEYS[name], TOOL_KEYS)
            if "schedule" in TOOL_KEYS[name]:
                remarks += _unknown(tool.section("schedule"), SCHEDULE_KEYS)
    return remarks


def _unknown(
    section: Section, known: frozenset[str], elsewhere: Mapping[str, frozenset[str]] | None = None
) -> list[str]:
    """elsewhere: the keys of sections beside this one."""
    remarks = []
    for key in section.values:
        others = [name for name, keys in (elsewhere or {}).items() if key in keys]
        if others:
            advice = f"; it is a key of {' and '.join(filter(None, [', '.join(others[:-1]), others[-1]]))}"
        else:
            advice = f"; {MISPLACED[key]}" if key in MISPLACED else meant(key, sorted(known))
        if key not in known:
            remarks.append(_remark(section.key(key), advice))
    return remarks


def _remark(path: str, advice: str) -> str:
    return f"{path} is unknown there, and nothing follows from it{advice}"


def below(tree: Mapping[str, object], path: str) -> Mapping[str, object]:
    """The mapping that is written at a dotted path; an empty one for anything else."""
    node: object = tree
    for part in path.split(".") if path else ():
        node = node.get(part) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def stands(tree: Mapping[str, object], path: str) -> bool:
    """Whether anything is written there."""
    above, _, last = path.rpartition(".")
    return below(tree, above).get(last) is not None
