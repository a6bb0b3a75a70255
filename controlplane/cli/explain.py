"""`rolloutctl profile explain`: print a profiling configuration, and what follows from it. Contacts no bus."""

from collections.abc import Iterator
from pathlib import Path

import click

from controlplane.cli.command_line import Command, file_argument
from controlplane.machine.profiling import sessions
from schemas.commands import ProfilePlan
from schemas.formatting import format_list, one_line
from schemas.identity import ROLLOUT, Identity
from schemas.profiler.config import ConfigReading, ProfilerConfig, read_verl_config
from schemas.profiler.settings import Layout, RankUnit
from schemas.selection import ENGINE_TOOLS, trace_directory

STEP, UNIT = 987_654_321, 987_654_322
"""Stand for the step and the replica or rank, which the output shows as <N> and <R>."""


@click.command("explain", cls=Command, short_help="Print what a configuration will profile.")
@file_argument
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
def explain(file: Path, as_verl: bool, ranks: RankUnit | None, layout: Layout | None) -> None:
    """Print what FILE means as our own YAML, and in comments its sessions and trace directories.

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
    for note in notes(config):
        click.echo(one_line(f"# {note}"))
    for warning in warnings:
        click.echo(one_line(f"warning: {warning}"), err=True)


def notes(config: ProfilerConfig) -> Iterator[str]:
    """Yield what follows from a configuration."""
    opened = sessions(config)
    yield f"sessions: {len(opened)}, at steps {format_list(opened)}" if opened else "sessions: none"
    for role, plan in [(ROLLOUT, config.plan), *sorted(config.roles.items())]:
        if not plan.enabled:
            continue
        if role == ROLLOUT and plan.tool not in ENGINE_TOOLS:
            yield f"{role}: not recorded, since no engine runs {plan.tool}: agents answer skipped(tool_unsupported)"
            continue
        if plan.tool == "nsys":
            yield f"{role}: nsys writes its own report, which is not moved"
        else:
            yield f"{role}: traces in {_directory(role, plan, config.save_path)}"


def _directory(role: str, plan: ProfilePlan, root: str) -> str:
    place = trace_directory(STEP, plan, Identity(replica=UNIT, node_rank=0, role=role))
    place = place.replace(f"/.step_{STEP}", "").replace(str(STEP), "<N>").replace(str(UNIT), "<R>")
    below = root.rstrip("/") or "the traces' root of each agent"
    return f"{below}/" if place == "." else f"{below}/{place}/"
