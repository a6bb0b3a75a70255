"""Commands for a person at a running bus: look at the fleet, and drive it by hand."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import anyio
import click
import msgspec
from rich.console import Console

from controlplane.bus.operator import ask_status, submit
from controlplane.cli.explain import explain
from controlplane.cli.tables import fleet_table, report_table
from schemas.commands import EngineCommand, ProfileCommand, ProfilePlan, Target, Window
from schemas.errors import ConfigError
from schemas.identity import Tag
from schemas.profiler.config import ProfilerConfig
from schemas.reports import FleetStatus, Report

F = TypeVar("F", bound=Callable[..., Any])


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> frozenset[int] | None:
    """`0,2,5` as a set of numbers."""
    try:
        return frozenset(int(one) for one in value.split(",")) if value is not None else None
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers such as 0,2,5") from None


def _asks_bus(command: F) -> F:
    """Options of every command that talks to a bus."""
    bus = click.option("--bus", envvar="ROLLOUTCTL_BUS", required=True, help="Address of the bus, or ROLLOUTCTL_BUS.")
    return bus(click.option("--json", "as_json", is_flag=True, help="Print for machines.")(command))


def _publishes(command: F) -> F:
    """Options of every command that publishes one."""
    replicas = click.option(
        "--replicas", callback=_numbers, metavar="N,N…", help="Only these, e.g. 0,2.  [default: all]"
    )
    timeout = click.option("--timeout", type=click.FloatRange(0.01), default=30.0, show_default=True, help="Seconds.")
    return _asks_bus(replicas(timeout(command)))


@click.command(short_help="Who is there, in which state, and who waits for whom.")
@_asks_bus
@click.option("--timeout", type=click.FloatRange(0.01), default=5.0, show_default=True, help="Seconds to wait for it.")
def status(bus: str, as_json: bool, timeout: float) -> None:
    """Show the fleet of a running bus."""
    fleet: FleetStatus = _run(partial(ask_status, bus, timeout))
    if as_json:
        click.echo(msgspec.json.encode(fleet))
    else:
        fleet_table(Console(), fleet)


def _read_config(context: click.Context, option: click.Parameter, file: Path | None) -> ProfilerConfig | None:
    if file is None:
        return None
    from schemas.profiler.files import read

    config, remarks = read(file)
    for remark in remarks:
        click.echo(f"{file}: {remark}", err=True)
    return config


_config = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_read_config,
    help="Takes the plan from a profiler configuration, verl's or ours.",
)


@click.group(short_help="Open or close a profiling session by hand; explain a configuration.")
def profile() -> None:
    """Open or close a profiling session by hand, or explain what a configuration will profile."""


@profile.command("start")
@click.option("--step", type=click.IntRange(0), required=True, help="Global training step; names the directory.")
@click.option(
    "--ranks", callback=_numbers, metavar="N,N…", help="Global GPU ranks whose replicas take part.  [default: all]"
)
@click.option("--window", type=(click.IntRange(0), click.IntRange(1)), help="Forward steps to record: START END.")
@click.option("--activity", "activities", multiple=True, type=click.Choice(["cpu", "cuda", "memory"]))
@click.option("--with-stack", is_flag=True)
@click.option("--record-shapes", is_flag=True)
@_config
@_publishes
def profile_start(
    bus: str,
    as_json: bool,
    replicas: frozenset[int] | None,
    timeout: float,
    step: int,
    ranks: frozenset[int] | None,
    window: tuple[int, int] | None,
    activities: tuple[Any, ...],
    with_stack: bool,
    record_shapes: bool,
    config: ProfilerConfig | None,
) -> None:
    """Open a session on every replica and training rank, or on the replicas named."""
    if config is not None:
        if ranks is not None or window is not None or activities or with_stack or record_shapes:
            raise ConfigError("--config says all of the plan: leave the other options out, or --config.")
        command = ProfileCommand(action="start", step=step, plan=config.plan, roles=config.roles)
        _submit(bus, as_json, replicas, timeout, command)
        return
    try:
        plan = ProfilePlan(
            ranks=ranks,
            window=Window(*window) if window is not None else None,
            activities=frozenset(activities or ("cpu",)),
            with_stack=with_stack,
            record_shapes=record_shapes,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _submit(bus, as_json, replicas, timeout, ProfileCommand(action="start", step=step, plan=plan))


@profile.command("stop")
@click.option("--step", type=click.IntRange(0), required=True, help="The step that it was started for.")
@_publishes
def profile_stop(bus: str, as_json: bool, replicas: frozenset[int] | None, timeout: float, step: int) -> None:
    """Close the session; the answer names the traces of node rank 0."""
    _submit(bus, as_json, replicas, timeout, ProfileCommand(action="stop", step=step))


@profile.command("collect")
@click.option("--step", type=click.IntRange(0), required=True, help="The step whose session was stopped.")
@_publishes
def profile_collect(bus: str, as_json: bool, replicas: frozenset[int] | None, timeout: float, step: int) -> None:
    """After a stop: the answer names the traces that the other nodes wrote to their own disks."""
    _submit(bus, as_json, replicas, timeout, ProfileCommand(action="collect", step=step))


@profile.command("check")
@click.option("--step", type=click.IntRange(0), default=0, help="Any: steps are not asked about.")
@_config
@_publishes
def profile_check(
    bus: str,
    as_json: bool,
    replicas: frozenset[int] | None,
    timeout: float,
    step: int,
    config: ProfilerConfig | None,
) -> None:
    """Ask everybody whether it could record what the plan says. Nothing is started."""
    config = config or ProfilerConfig()
    command = ProfileCommand(action="check", step=step, plan=config.plan, roles=config.roles)
    _submit(bus, as_json, replicas, timeout, command)


profile.add_command(explain)


@click.command(short_help="Stop generating.")
@click.option("--in-flight", type=click.Choice(["abort", "wait", "keep"]), default="abort", show_default=True)
@_publishes
def pause(bus: str, as_json: bool, replicas: frozenset[int] | None, timeout: float, in_flight: Any) -> None:
    """Stop generating: running requests are aborted, awaited, or frozen."""
    _submit(bus, as_json, replicas, timeout, EngineCommand(operation="pause", mode=in_flight))


@click.command(short_help="Generate again.")
@_publishes
def resume(bus: str, as_json: bool, replicas: frozenset[int] | None, timeout: float) -> None:
    """Generate again."""
    _submit(bus, as_json, replicas, timeout, EngineCommand(operation="resume"))


@click.command(short_help="Forget cached prefixes.")
@_publishes
def flush(bus: str, as_json: bool, replicas: frozenset[int] | None, timeout: float) -> None:
    """Forget cached prefixes."""
    _submit(bus, as_json, replicas, timeout, EngineCommand(operation="flush"))


@click.command(short_help="End all running requests where they are.")
@_publishes
def abort(bus: str, as_json: bool, replicas: frozenset[int] | None, timeout: float) -> None:
    """End all running requests where they are."""
    _submit(bus, as_json, replicas, timeout, EngineCommand(operation="abort"))


_tags = click.option("--tag", "tags", multiple=True, type=click.Choice(["weights", "kv_cache"]), help="[default: both]")


@click.command(short_help="Free the engines' memory.")
@_tags
@click.option("--discard", is_flag=True, help="Drop the weights; what is committed is loaded again after the wake.")
@_publishes
def sleep(
    bus: str, as_json: bool, replicas: frozenset[int] | None, timeout: float, tags: tuple[Tag, ...], discard: bool
) -> None:
    """Free the engines' memory."""
    command = EngineCommand(operation="sleep", tags=frozenset(tags), discard=discard)
    _submit(bus, as_json, replicas, timeout, command)


@click.command(short_help="Take the engines' memory again.")
@_tags
@_publishes
def wake(bus: str, as_json: bool, replicas: frozenset[int] | None, timeout: float, tags: tuple[Tag, ...]) -> None:
    """Take the engines' memory again."""
    _submit(bus, as_json, replicas, timeout, EngineCommand(operation="wake", tags=frozenset(tags)))


def _submit(
    bus: str,
    as_json: bool,
    replicas: frozenset[int] | None,
    timeout_s: float,
    command: ProfileCommand | EngineCommand,
) -> None:
    report: Report = _run(partial(submit, bus, command, Target(replicas=replicas), timeout_s))
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        Console().print(report_table(report))
    if report.failed or report.missing:
        click.get_current_context().exit(1)


def _run(ask: Callable[[], Any]) -> Any:
    return anyio.run(ask, backend_options={"use_uvloop": find_spec("uvloop") is not None})
