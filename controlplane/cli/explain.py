"""`rolloutctl profile explain`: print a profiling configuration, and what follows from it. Contacts no bus."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import click

from controlplane.cli.command_line import Command
from controlplane.machine.profiling import sessions
from schemas.commands import ProfilePlan, TorchMemory
from schemas.formatting import one_line
from schemas.identity import GPUS_PER_NODE_MAX, NODES_MAX, ROLLOUT, Identity
from schemas.profiler.config import ConfigReading, ProfilerConfig, read_verl_config
from schemas.profiler.settings import Layout, RankUnit
from schemas.selection import ENGINE_TOOLS, trace_directory

STEP, UNIT = 987_654_321, 987_654_322
"""Stand for the step and the replica or rank, which the output shows as <N> and <R>."""


@click.command("explain", cls=Command, short_help="Print what a configuration will profile.")
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
@click.option(
    "--gpus-per-replica",
    type=click.IntRange(1, NODES_MAX * GPUS_PER_NODE_MAX),
    metavar="N",
    help="Name the replicas that own the ranks.",
)
def explain(
    file: Path, as_verl: bool, ranks: RankUnit | None, layout: Layout | None, gpus_per_replica: int | None
) -> None:
    """Print what FILE means as our own YAML, and in comments its sessions, replicas and trace directories.

    The output is a configuration itself. Warnings come last, on stderr. No bus is contacted, and nothing is profiled.
    """
    from schemas.profiler.readers import yaml_text

    if not as_verl and (ranks or layout):
        raise click.UsageError("--ranks and --layout need --verl; our own YAML has keys for both.")
    if as_verl:
        config, warnings = read_verl_config(file, ranks=ranks or "global", layout=layout or "step")
    else:
        config, warnings = ConfigReading(ProfilerConfig.from_yaml(file), [])
    click.echo(yaml_text(config), nl=False)
    for note in notes(config, gpus_per_replica):
        click.echo(one_line(f"# {note}"))
    for warning in warnings:
        click.echo(one_line(f"warning: {warning}"), err=True)


def notes(config: ProfilerConfig, gpus_per_replica: int | None = None) -> Iterator[str]:
    """Yield what follows from a configuration. `gpus_per_replica` is None if unknown."""
    opened = sessions(config)
    yield f"sessions: {len(opened)}, at steps {_listed(opened)}" if opened else "sessions: none"
    for role, plan in [(ROLLOUT, config.plan), *sorted(config.roles.items())]:
        if not plan.enabled:
            continue
        if role == ROLLOUT and plan.tool not in ENGINE_TOOLS:
            yield f"{role}: not recorded, since no engine runs {plan.tool}: agents answer skipped(tool_unsupported)"
            continue
        if role == ROLLOUT and plan.ranks and gpus_per_replica:
            owners = {rank // gpus_per_replica for rank in plan.ranks}
            yield f"{role}: replicas {_listed(owners | (plan.replicas or frozenset()))}"
        if plan.tool == "nsys":
            yield f"{role}: nsys writes its own report, which is not moved"
        else:
            yield f"{role}: traces in {_directory(role, plan, config.save_path)}"
        if isinstance(plan.options, TorchMemory):
            recorded = [step for step in opened if plan.steps is None or step in plan.steps]
            if left := len(recorded) % plan.options.snapshot_steps:
                yield f"{role}: sessions at the end without a snapshot: {left}"


def _directory(role: str, plan: ProfilePlan, root: str) -> str:
    place = trace_directory(STEP, plan, Identity(replica=UNIT, node_rank=0, role=role))
    place = place.replace(f"/.step_{STEP}", "").replace(str(STEP), "<N>").replace(str(UNIT), "<R>")
    below = root.rstrip("/") or "the traces' root of each agent"
    return f"{below}/" if place == "." else f"{below}/{place}/"


def _listed(numbers: Iterable[int]) -> str:
    """`0, 4` or `1, 5-8`."""
    items: list[str] = []
    for _, pairs in groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        items += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(items)
