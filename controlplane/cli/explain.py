"""`rolloutctl profile explain`: what a configuration of profiling will do, in words. No bus is asked."""

from collections.abc import Iterator
from pathlib import Path

import click

from controlplane.machine.profiling import sessions
from schemas.commands import Npu, PrecisionDebugger, ProfilePlan, TorchMemory
from schemas.identity import Identity
from schemas.profiler import files, verl
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.own_yaml import runs
from schemas.selection import ENGINE_TOOLS, trace_directory

CONTENTS = {"with_stack": "stacks", "with_modules": "modules", "record_shapes": "shapes"}
ACTIVITIES = {"cpu": "CPU", "cuda": "CUDA", "npu": "NPU", "memory": "memory"}
SOMEBODY = 987_654_321
"""Stands for a number that the reader knows as a letter."""


@click.command("explain", short_help="Say in words what a configuration will profile.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--verl", "as_verl", is_flag=True, help="It is verl's: the trainer's whole configuration, or parts of it."
)
@click.option(
    "--ranks",
    type=click.Choice(["global", "replica"]),
    help="With --verl: what the rollouts' ranks are; indices of replicas up to verl 0.9.0.  [default: global]",
)
@click.option(
    "--layout",
    type=click.Choice(["step", "verl_step", "verl"]),
    help="With --verl: of the directories.  [default: step]",
)
@click.option("--gpus-per-replica", type=click.IntRange(1), metavar="N", help="To tell which replicas own the ranks.")
@click.option("--yaml", "as_yaml", is_flag=True, help="Print it as our own YAML instead.")
def explain(
    file: Path,
    as_verl: bool,
    ranks: verl.RankUnit | None,
    layout: verl.Layout | None,
    gpus_per_replica: int | None,
    as_yaml: bool,
) -> None:
    """Say in words what FILE will profile: which steps, replicas and ranks, with which tool, and where traces go.

    Warnings come last, on stderr. Nothing is asked of a bus, and nothing is profiled.
    """
    if not as_verl and (ranks or layout):
        raise click.UsageError("--ranks and --layout go with --verl; our own YAML says both itself.")
    if as_verl:
        config, remarks = files.read_verl(file, ranks or "global", layout or "step")
    else:
        config, remarks = files.read_yaml(file), []
    if as_yaml:
        click.echo(files.yaml_text(config), nl=False)
    else:
        click.echo("\n".join(told(config, gpus_per_replica)))
        if as_verl and config.plan.enabled and config.plan.tool in ENGINE_TOOLS and not config.plan.discrete:
            click.echo(
                "note: verl itself profiles no rollouts unless their tool is discrete; here they have their session"
            )
    for remark in remarks:
        click.echo(f"warning: {remark}", err=True)


def told(config: ProfilerConfig, gpus_per_replica: int | None = None) -> Iterator[str]:
    """The configuration in words, line by line. Pure.

    gpus_per_replica: to tell which replicas own the ranks; None when that is not known.
    """
    yield _steps(config)
    yield from _about("rollouts", config.plan, _replicas(config.plan, gpus_per_replica), config)
    for role, plan in sorted(config.roles.items()):
        yield from _about(role, plan, _ranks(plan), config)


def _steps(config: ProfilerConfig) -> str:
    opened = sessions(config)
    if not config.steps:
        return "no step is profiled: no steps are given"
    if not opened:
        return f"no step is profiled: steps {_spelled(config.steps)} are given, and everything is switched off"
    number = "one session" if len(opened) == 1 else f"{len(opened)} sessions"
    how = "one over each run of consecutive steps" if config.continuous else "one for each step"
    return f"global {'step' if len(config.steps) == 1 else 'steps'} {_spelled(config.steps)}: {number}, {how}"


def _about(name: str, plan: ProfilePlan, who: str, config: ProfilerConfig) -> Iterator[str]:
    if not plan.enabled:
        yield f"{name}: not profiled"
        return
    rollout = name == "rollouts"
    yield f"{name}: {who}"
    yield f"  tool     {plan.tool}{_details(plan, rollout)}"
    if rollout and plan.tool not in ENGINE_TOOLS:
        yield f"           no inference engine runs {plan.tool}: every agent answers skipped(tool_unsupported)"
        return
    if plan.steps is not None:
        both = frozenset(config.steps) & plan.steps
        yield f"  steps    {_spelled(both)} of them" if both else "  steps    none of them"
    yield f"  records  {_recorded(plan, rollout)}"
    yield from _undumped(plan, config)
    if plan.by_stage:
        yield "  stages   prefill and decode each in a trace of its own"
    if plan.merge:
        yield "  merge    the engine merges the traces of its ranks"
    if plan.tool == "nsys":
        yield "  traces   none of ours: the report is of the nsys that the rank runs under, wherever that writes it"
    else:
        yield f"  traces   {_directory(name, plan, config.save_path)}"
    yield from _end(plan, config.finish_hook_cmd)


def _undumped(plan: ProfilePlan, config: ProfilerConfig) -> Iterator[str]:
    if plan.tool == "torch_memory" and isinstance(plan.options, TorchMemory):
        taken = sum(1 for step in sessions(config) if plan.steps is None or step in plan.steps)
        if left := taken % plan.options.snapshot_steps:
            last, them = ("session ends", "it") if left == 1 else (f"{left} sessions end", "them")
            yield f"           the last {last} before a snapshot is due: nothing is written of {them}"


def _details(plan: ProfilePlan, rollout: bool) -> str:
    if plan.tool in ENGINE_TOOLS:
        recorded = plan.activities if rollout else plan.activities | {"cpu"}  # the spans of a rank's stages are of it
        taken = [word for one, word in ACTIVITIES.items() if one in recorded]
        extras = [word for field, word in CONTENTS.items() if getattr(plan, field)]
        options = (
            f"{plan.options.level}, analysis {_yes(plan.options.analysis)}" if isinstance(plan.options, Npu) else ""
        )
        return f": {', '.join([*taken, *extras, *([options] if options else [])]) or 'nothing'}"
    match plan.options:
        case TorchMemory(max_entries=entries, snapshot_steps=number):
            each = "each profiled step" if number == 1 else f"{number} profiled steps"
            return f": {entries} allocations, a snapshot of {each}"
        case PrecisionDebugger(stages=stages):
            return f": {'all stages' if stages is None else ', '.join(sorted(stages)) or 'no stage'}"
        case _:
            return ""


def _recorded(plan: ProfilePlan, rollout: bool) -> str:
    if rollout:
        if plan.window is None:
            return "the whole session, from its start to its stop"
        start, end = plan.window.start, plan.window.end
        if end is None:
            return f"forward steps from {start} on, counted from the session's start, to its stop"
        many = "one forward step" if end - start == 1 else f"{end - start} forward steps"
        return f"forward steps [{start}, {end}) of each session, counted from its start: {many}"
    match plan.tool:
        case "torch_memory":
            return "the whole session, whatever the stages"
        case "nsys":
            return "each annotated stage" if plan.discrete else "the whole session, from its first annotated stage on"
        case "precision_debugger":
            return "each annotated stage that is watched, in a directory of its own"
        case "npu":
            return "each annotated stage, in a trace of its own"
    whole = "each annotated stage, in a trace of its own" if plan.discrete else "the whole session, in one trace"
    if plan.schedule is None:
        return whole
    one = plan.schedule
    cycles = {0: "until the stop", 1: "once"}.get(one.repeat, f"{one.repeat} times")
    return (
        f"{whole}; of mini-batches: skip {one.skip_first}, then {cycles} wait {one.wait}, warm up {one.warmup}, "
        f"record {one.active}"
    )


def _replicas(plan: ProfilePlan, gpus: int | None) -> str:
    if plan.ranks is None and plan.replicas is None:
        return "all replicas"
    parts = []
    if plan.replicas is not None:
        parts.append(
            f"{_number('replica', plan.replicas)} {_spelled(plan.replicas)}" if plan.replicas else "no replica by index"
        )
    if plan.ranks is not None:
        parts.append(_owners(plan.ranks, gpus))
    return ", and ".join(parts)


def _owners(ranks: frozenset[int], gpus: int | None) -> str:
    if not ranks:
        return "nobody: no rank is given"
    if gpus is None:
        owned = f"{_number('global rank', ranks)} {_spelled(ranks)}"
        return f"the replicas that own {owned} (--gpus-per-replica tells which)"
    owners = frozenset(rank // gpus for rank in ranks)
    each = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return (
        f"{_number('replica', owners)} {_spelled(owners)}, for {_number('global rank', ranks)} {_spelled(ranks)} "
        f"with {each} a replica"
    )


def _ranks(plan: ProfilePlan) -> str:
    if plan.ranks is None:
        return "all ranks"
    if not plan.ranks:
        return "nobody: no rank is given"
    return f"{_number('rank', plan.ranks)} {_spelled(plan.ranks)}"


def _directory(name: str, plan: ProfilePlan, root: str) -> str:
    role = "rollout" if name == "rollouts" else name
    place = trace_directory(SOMEBODY, plan, Identity(replica=SOMEBODY + 1, node_rank=0, role=role))
    place = place.replace(f"/.step_{SOMEBODY}", "").replace(str(SOMEBODY + 1), "<R>").replace(str(SOMEBODY), "<N>")
    place = place.replace("rank_<R>", "rank_<r>")
    below = root.rstrip("/") or "the traces' root of each agent"
    return f"{below}/" if place == "." else f"{below}/{place}/"


def _end(plan: ProfilePlan, command: str) -> Iterator[str]:
    finish = plan.finish
    if finish.relocate and plan.tool == "nsys":
        yield "  finish   nothing is moved: nsys's reports stay where it was told to write"
    elif finish.relocate:
        yield "  finish   the traces of the ranks asked for are moved to the root"
    if finish.hook:
        whom = (
            "by all agents"
            if finish.hook_all_ranks
            else f"by the agents of {_number('global rank', finish.hook_ranks)} {_spelled(finish.hook_ranks)}"
        )
        if not finish.hook_all_ranks and not finish.hook_ranks:
            whom = "by the agents of profiled ranks"
        yield f"  hook     {command or 'what each agent was started with'}: once, after the last step, {whom}"


def _spelled(numbers: frozenset[int] | tuple[int, ...]) -> str:
    """`0 and 4`; `1, 3 and 5-8`."""
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs(numbers)]
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]])) if parts else "none"


def _number(noun: str, numbers: frozenset[int]) -> str:
    return noun if len(numbers) == 1 else f"{noun}s"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
