"""`rolloutctl profile explain`: print what a profiling configuration will do. Contacts no bus."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import click
from msgspec.structs import asdict, replace

from controlplane.machine.profiling import sessions
from schemas.commands import ProfilePlan, Schedule, ToolOptions, TorchMemory
from schemas.identity import ROLLOUT, Identity
from schemas.profiler.config import ConfigReading, ProfilerConfig, read_verl_config
from schemas.profiler.settings import Layout, RankUnit
from schemas.profiler.yaml_format import contents_of, ranges
from schemas.selection import ENGINE_TOOLS, trace_directory

STEP, UNIT = 987_654_321, 987_654_322
"""Stand for the step and the replica or rank, which the output shows as <N> and <R>."""

RECORDED = {
    "torch_memory": "the whole session, whatever the stages",
    "precision_debugger": "each annotated stage that is watched, in a directory of its own",
    "npu": "each annotated stage, in a trace of its own",
}
"""What these tools record on a training rank, whatever the plan says."""


@click.command("explain", short_help="Print what a configuration will profile.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--verl", "as_verl", is_flag=True, help="FILE is verl's: a trainer's configuration, or parts of it.")
@click.option(
    "--ranks",
    type=click.Choice(["global", "replica"]),
    help="With --verl: unit of the rollouts' ranks; replica for verl up to 0.9.0.  [default: global]",
)
@click.option(
    "--layout",
    type=click.Choice(["step", "verl_step", "verl"]),
    help="With --verl: how trace directories are named.  [default: step]",
)
@click.option("--gpus-per-replica", type=click.IntRange(1), metavar="N", help="Name the replicas that own the ranks.")
@click.option("--yaml", "as_yaml", is_flag=True, help="Print the configuration as our own YAML instead.")
def explain(
    file: Path,
    as_verl: bool,
    ranks: RankUnit | None,
    layout: Layout | None,
    gpus_per_replica: int | None,
    as_yaml: bool,
) -> None:
    """Print what FILE will profile: which steps, replicas and ranks, with which tool, and where the traces go.

    Warnings come last, on stderr. No bus is contacted, and nothing is profiled.
    """
    if not as_verl and (ranks or layout):
        raise click.UsageError("--ranks and --layout need --verl; our own YAML has keys for both.")
    if as_verl:
        config, warnings = read_verl_config(file, ranks=ranks or "global", layout=layout or "step")
    else:
        config, warnings = ConfigReading(ProfilerConfig.from_yaml(file), [])
    if as_yaml:
        from schemas.profiler.readers import yaml_text

        click.echo(yaml_text(config), nl=False)
    else:
        click.echo("\n".join(explanation(config, gpus_per_replica)))
        if as_verl and config.plan.enabled and config.plan.tool in ENGINE_TOOLS and not config.plan.discrete:
            click.echo("note: verl itself profiles rollouts only if their tool is discrete; here they are profiled")
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def explanation(config: ProfilerConfig, gpus_per_replica: int | None = None) -> Iterator[str]:
    """Yield what a configuration does, line by line.

    Args:
        config: What to explain.
        gpus_per_replica: To name the replicas that own the ranks; None if unknown.
    """
    yield _steps(config)
    for role, plan in [(ROLLOUT, config.plan), *sorted(config.roles.items())]:
        name = "rollouts" if role == ROLLOUT else role
        if not plan.enabled:
            yield f"{name}: not profiled"
            continue
        yield f"{name}: {_replicas(plan, gpus_per_replica) if role == ROLLOUT else _ranks(plan)}"
        for label, text in _rows(role, plan, config):
            yield f"  {label:<8} {text}"


def _steps(config: ProfilerConfig) -> str:
    if not config.steps:
        return "no step is profiled: no steps are given"
    opened = len(sessions(config))
    if not opened:
        return f"no step is profiled: steps {_listed(config.steps)} are given, and everything is switched off"
    how = "one for each run of consecutive steps" if config.continuous else "one for each step"
    return f"global {_counted('step', config.steps)}: {opened} session{'s' if opened > 1 else ''}, {how}"


def _rows(role: str, plan: ProfilePlan, config: ProfilerConfig) -> Iterator[tuple[str, str]]:
    """A label and a text for each thing there is to say about an enabled plan."""
    rollout = role == ROLLOUT
    yield "tool", f"{plan.tool}{_details(plan, rollout)}"
    if rollout and plan.tool not in ENGINE_TOOLS:
        yield "", f"no inference engine runs {plan.tool}: every agent answers skipped(tool_unsupported)"
        return
    if plan.steps is not None:
        yield "steps", f"of these, {_listed(plan.steps & set(config.steps))}"
    yield "records", _recorded_by_engine(plan) if rollout else _recorded_by_rank(plan)
    if left := _without_snapshot(plan, config):
        last = "session ends" if left == 1 else f"{left} sessions end"
        yield "", f"the last {last} before a snapshot is due: nothing is written"
    if plan.by_stage:
        yield "stages", "prefill and decode each have their own trace"
    if plan.merge:
        yield "merge", "the engine merges the traces of its ranks"
    if plan.tool == "nsys":
        yield "traces", "none from rolloutctl: the nsys that the rank runs under writes its own report"
    else:
        yield "traces", _directory(role, plan, config.save_path)
    if plan.finish.relocate and plan.tool == "nsys":
        yield "finish", "nothing is moved: nsys's reports stay where nsys writes them"
    elif plan.finish.relocate:
        yield "finish", "the traces of the selected ranks are moved to the root"
    if plan.finish.hook:
        command = config.finish_hook_cmd or "the command that each agent was started with"
        yield "hook", f"{command}: once, after the last step, {_hook_agents(plan)}"


def _details(plan: ProfilePlan, rollout: bool) -> str:
    details: list[str] = []
    if plan.tool in ENGINE_TOOLS:  # a rank always records the CPU, where the spans of its stages are
        details += contents_of(plan if rollout else replace(plan, activities=plan.activities | {"cpu"})) or ["nothing"]
    if plan.options is not None:
        details += _fields(plan.options)
    return f": {', '.join(details)}" if details else ""


def _fields(options: ToolOptions) -> list[str]:
    def shown(value: object) -> str:
        return "[" + ", ".join(sorted(map(str, value))) + "]" if isinstance(value, frozenset) else str(value).lower()

    return [f"{key} {shown(value)}" for key, value in asdict(options).items() if value not in (None, "")]


def _recorded_by_engine(plan: ProfilePlan) -> str:
    if plan.window is None:
        return "the whole session, from its start to its stop"
    start, end = plan.window.start, plan.window.end
    if end is None:
        return f"forward steps from {start} on, counted from the session's start, to its stop"
    number = "one forward step" if end - start == 1 else f"{end - start} forward steps"
    return f"forward steps [{start}, {end}) of each session, counted from its start: {number}"


def _recorded_by_rank(plan: ProfilePlan) -> str:
    if plan.tool in RECORDED:
        return RECORDED[plan.tool]
    if plan.tool == "nsys":
        return "each annotated stage" if plan.discrete else "the whole session, from its first annotated stage on"
    traces = "each annotated stage, in a trace of its own" if plan.discrete else "the whole session, in one trace"
    return traces if plan.schedule is None else f"{traces}; {_cycles(plan.schedule)}"


def _cycles(schedule: Schedule) -> str:
    times = {0: "until the stop", 1: "once"}.get(schedule.repeat, f"{schedule.repeat} times")
    return (
        f"of mini-batches: skip {schedule.skip_first}, then {times} wait {schedule.wait}, warm up {schedule.warmup}, "
        f"record {schedule.active}"
    )


def _without_snapshot(plan: ProfilePlan, config: ProfilerConfig) -> int:
    """Sessions at the end that no memory snapshot covers."""
    if not isinstance(plan.options, TorchMemory):
        return 0
    recorded = [step for step in sessions(config) if plan.steps is None or step in plan.steps]
    return len(recorded) % plan.options.snapshot_steps


def _replicas(plan: ProfilePlan, gpus: int | None) -> str:
    parts = []
    if plan.replicas is not None:
        parts.append(_counted("replica", plan.replicas))
    if plan.ranks and gpus is not None:
        owners = {rank // gpus for rank in plan.ranks}
        each = "one GPU" if gpus == 1 else f"{gpus} GPUs"
        parts.append(f"{_counted('replica', owners)}, for {_counted('global rank', plan.ranks)} with {each} a replica")
    elif plan.ranks is not None:
        own = f"the replicas that own {_counted('global rank', plan.ranks)} (--gpus-per-replica names them)"
        parts.append(own if plan.ranks else "none: the list of ranks is empty")
    return ", and ".join(parts) or "all replicas"


def _ranks(plan: ProfilePlan) -> str:
    if plan.ranks is None:
        return "all ranks"
    return _counted("rank", plan.ranks) if plan.ranks else "none: the list of ranks is empty"


def _directory(role: str, plan: ProfilePlan, root: str) -> str:
    place = trace_directory(STEP, plan, Identity(replica=UNIT, node_rank=0, role=role))
    place = place.replace(f"/.step_{STEP}", "").replace(str(STEP), "<N>").replace(f"rank_{UNIT}", "rank_<r>")
    below = root.rstrip("/") or "the traces' root of each agent"
    return f"{below}/" if place == "." else f"{below}/{place.replace(str(UNIT), '<R>')}/"


def _hook_agents(plan: ProfilePlan) -> str:
    if plan.finish.hook_all_ranks:
        return "by all agents"
    if plan.finish.hook_ranks:
        return f"by the agents of {_counted('global rank', plan.finish.hook_ranks)}"
    return "by the agents of profiled ranks"


def _listed(numbers: Iterable[int]) -> str:
    """`0, 4` or `1, 5-8`."""
    return ", ".join(map(str, ranges(numbers))) or "none"


def _counted(noun: str, numbers: Collection[int]) -> str:
    """`no replica`, `replica 3` or `replicas 0, 4`."""
    if not numbers:
        return f"no {noun}"
    return f"{noun}{'s' if len(set(numbers)) > 1 else ''} {_listed(numbers)}"
