"""Warnings about verl's configuration: unknown keys, and settings that record nothing or have no effect. Pure."""

from collections.abc import Iterator, Mapping
from typing import Final

from schemas.profiler.conversion import did_you_mean, join_path, shown, unknown_keys
from schemas.profiler.settings import TOOLS
from schemas.profiler.verl_format import VerlFile, VerlSection, tool_path, value_at
from schemas.profiler.verl_keys import ACTOR, PARENTS, ROLLOUT, SECTIONS, VerlGlobal, VerlProfiler

IN_EVERY_SECTION: Final = frozenset({"_target_", "name"})
"""Keys of verl's own files, for Hydra."""


def warnings(file: VerlFile) -> list[str]:
    """Return a sentence for each thing in a configuration that does not have the expected effect."""
    found = [*_misplaced(file.tree), *_unknown(file), *_selection(file)]
    for section in file.enabled:
        found += _without_effect(section)
    if file.tree and not found and not file.tree.keys() & set(SECTIONS):
        found.append(
            f"none of verl's sections, such as global_profiler, is in {shown(list(file.tree))}: nothing is profiled; "
            "hand over the trainer's whole configuration"
        )
    return list(dict.fromkeys(found))


# --- keys -------------------------------------------------------------------------------------------------------------


def _misplaced(tree: Mapping[str, object]) -> Iterator[str]:
    for path, known in PARENTS.items():
        section = value_at(tree, path)
        for key in section if isinstance(section, Mapping) else ():
            if key not in (*known, "profiler") and (suggestion := did_you_mean(key, known)):
                yield f"{join_path(path, key)} is unknown and has no effect{suggestion}"


def _unknown(file: VerlFile) -> Iterator[str]:
    keys = unknown_keys(file.content, VerlGlobal, "global_profiler")
    for section in file.sections:
        keys += unknown_keys(section.content, VerlProfiler, section.path)
    for key in keys:
        if key.path.rpartition(".")[2] not in IN_EVERY_SECTION and key.value is not None:
            yield f"{key.path} is unknown and has no effect{key.suggestion}"


# --- what is selected -------------------------------------------------------------------------------------------------


def _selection(file: VerlFile) -> Iterator[str]:
    switched_on = [section for section in file.sections if section.profiler.enable]
    for section in switched_on:
        if (tool := section.profiler.tool) not in TOOLS:
            yield f"{section.path}.enable is true and {section.path}.tool is {shown(tool)}: nothing is profiled there"
    if file.enabled and not file.settings.steps:
        yield f"global_profiler.steps is {shown(file.content.get('steps'))}: no step is profiled"
    if file.settings.steps and not switched_on:
        yield "global_profiler.steps lists steps and no section has enable: true: nothing is profiled"
    plan = file.settings.plan
    if plan.enabled and plan.ranks and plan.ranks != {0} and _replica_ranks(file.tree):
        yield (
            f"{ROLLOUT}.ranks is {sorted(plan.ranks)}, read as global ranks, and the file is from a verl up to 0.9.0 "
            "(its sections have no relocate_results), where they were replicas: to read them as replicas, pass "
            'ranks="replica" (--ranks replica)'
        )


def _replica_ranks(tree: Mapping[str, object]) -> bool:
    """Whether Hydra composed the file, so that all keys are there, in a verl that had no relocate_results yet."""
    sections = [value_at(tree, path) for path in (ROLLOUT, ACTOR, "global_profiler")]
    keys = [set(section) if isinstance(section, Mapping) else set() for section in sections]
    return "_target_" in keys[0] and "relocate_results" not in set().union(*keys)


# --- what is recorded -------------------------------------------------------------------------------------------------


def _without_effect(section: VerlSection) -> Iterator[str]:
    plan, path = section.plan, tool_path(section.profiler, section.path)
    if section.path != ROLLOUT and section.window is not None:
        yield (
            f"{path} has a window, which has no effect: it counts forward steps of an engine; write it in "
            f"{ROLLOUT}.tool_config.{plan.tool}, and for mini-batches of a training rank write a schedule"
        )
    if section.path == ROLLOUT and plan.tool == "torch" and section.profiler.tool_config.torch.schedule.active:
        yield (
            f"{path}.schedule has no effect: it counts mini-batches of a training rank; for forward steps of a rollout "
            "write step_start and step_end"
        )
