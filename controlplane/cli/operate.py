"""Commands for a person at a running bus: inspect the fleet, and drive it by hand."""

from collections.abc import Callable
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import anyio
import click
import msgspec
from rich.console import Console

from controlplane.bus.operator import ask_status, submit
from controlplane.bus.operator import retire as ask_retire
from controlplane.cli.explain import explain
from controlplane.cli.tables import fleet_table
from schemas.carriers.keys import KeySource
from schemas.commands import EngineCommand, ProfileCommand, ProfilePlan, Target, Window
from schemas.config import TIMEOUT_MAX_S
from schemas.errors import ConfigError
from schemas.formatting import one_line
from schemas.identity import NUMBER_MAX, Tag
from schemas.outcomes import Acted
from schemas.profiler.config import ProfilerConfig, read_config
from schemas.reports import INSECURE, FleetStatus, Report

_bus = click.option("--bus", envvar="ROLLOUTCTL_BUS", required=True, help="Address of the bus; or ROLLOUTCTL_BUS.")
_keys = click.option(
    "--key",
    "keys",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=lambda context, option, path: KeySource.find(path),
    help="File with an operator's key, or an observer's for `status`.  [default: ROLLOUTCTL_KEY_FILE]",
)
_SECONDS = click.FloatRange(0.01, TIMEOUT_MAX_S)
_STEP = click.IntRange(0, NUMBER_MAX)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> frozenset[int] | None:
    """Parse `0,2,5`."""
    try:
        return frozenset(int(number) for number in value.split(",")) if value is not None else None
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 0,2,5") from None


def _publishes(build: Callable[..., ProfileCommand | EngineCommand]) -> Callable[..., None]:
    """Turn a function that builds a command into one that publishes it and prints its report."""

    @_bus
    @_keys
    @_json
    @click.option("--replicas", callback=_numbers, metavar="N,N…", help="Only these, e.g. 0,2.  [default: all]")
    @click.option("--timeout", type=_SECONDS, default=30.0, show_default=True, help="Seconds.")
    @wraps(build)
    def run(
        bus: str,
        keys: KeySource | None,
        as_json: bool,
        replicas: frozenset[int] | None,
        timeout: float,
        force: bool = False,
        **options: Any,
    ) -> None:
        command = build(**options)
        report: Report = _run(partial(submit, bus, command, Target(replicas=replicas), timeout, keys, force=force))
        _print(report, as_json)
        if not as_json:
            for outcome in report.outcomes:
                for trace in outcome.conclusion.traces if isinstance(outcome.conclusion, Acted) else ():
                    click.echo(one_line(f"  {outcome.agent}: {trace.path}"))
        if report.failed or report.missing or report.about_nobody:
            click.get_current_context().exit(1)

    return run


def _run(ask: Callable[[], Any]) -> Any:
    return anyio.run(ask, backend_options={"use_uvloop": find_spec("uvloop") is not None})


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        Console().print(report, soft_wrap=True, highlight=False)


@click.command(short_help="Show every agent, its state, and what it waits for.")
@_bus
@_keys
@_json
@click.option("--timeout", type=_SECONDS, default=5.0, show_default=True, help="Seconds to wait.")
def status(bus: str, keys: KeySource | None, as_json: bool, timeout: float) -> None:
    """Show the fleet of a running bus."""
    fleet: FleetStatus = _run(partial(ask_status, bus, timeout, keys))
    if as_json:
        click.echo(msgspec.json.encode(fleet))
        return
    console = Console()
    if fleet.insecure:
        console.print(INSECURE, style="bold red", soft_wrap=True, highlight=False)
    console.print(one_line(fleet.headline), soft_wrap=True, highlight=False, markup=False)
    for line in fleet.warnings:
        console.print(one_line(line), style="red", soft_wrap=True, highlight=False, markup=False)
    console.print(fleet_table(fleet))
    for line in fleet.open:
        console.print(one_line(f"open: {line}"), soft_wrap=True, highlight=False, markup=False)


@click.command(short_help="Take replicas or agents out of the run for good.")
@_bus
@_keys
@_json
@click.argument("places", nargs=-1, required=True, metavar="REPLICA[.NODE]…")
def retire(bus: str, keys: KeySource | None, as_json: bool, places: tuple[str, ...]) -> None:
    """Take replicas, or single agents, out of the run for good. Reports then no longer name them as absent.

    A running agent can't be retired: stop it first. An agent that is started at a retired place is told to give up.
    """
    fleet: FleetStatus = _run(partial(ask_retire, bus, places, keys=keys))
    if as_json:
        click.echo(msgspec.json.encode(fleet))
    else:
        Console().print(fleet, soft_wrap=True, highlight=False)


# --- profiling --------------------------------------------------------------------------------------------------------


def _read_config(context: click.Context, option: click.Parameter, file: Path | None) -> ProfilerConfig | None:
    if file is None:
        return None
    config, warnings = read_config(file)
    for warning in warnings:
        click.echo(one_line(f"{file}: {warning}"), err=True)
    return config


_config = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_read_config,
    help="Take the plan from a profiler configuration, verl's or ours.",
)


@click.group(short_help="Open or close a profiling session by hand; explain a configuration.")
def profile() -> None:
    """Open or close a profiling session by hand, or explain what a configuration will profile."""


@profile.command("start")
@click.option("--step", type=_STEP, required=True, help="Global training step; names the directory.")
@click.option(
    "--ranks", callback=_numbers, metavar="N,N…", help="Global GPU ranks whose replicas take part.  [default: all]"
)
@click.option("--window", type=(_STEP, click.IntRange(1, NUMBER_MAX)), help="Forward steps to record: START END.")
@click.option("--activity", "activities", multiple=True, type=click.Choice(["cpu", "cuda", "memory"]))
@click.option("--with-stack", is_flag=True)
@click.option("--record-shapes", is_flag=True)
@click.option("--force", is_flag=True, help="Take over a session that the trainer has open.")
@_config
@_publishes
def profile_start(
    step: int,
    ranks: frozenset[int] | None,
    window: tuple[int, int] | None,
    activities: tuple[Any, ...],
    with_stack: bool,
    record_shapes: bool,
    config: ProfilerConfig | None,
) -> ProfileCommand:
    """Open a session on every replica and training rank, or on the replicas named."""
    if config is not None:
        if ranks is not None or window is not None or activities or with_stack or record_shapes:
            raise ConfigError("--config contains the whole plan: give either --config or the other options.")
        return ProfileCommand(action="start", step=step, plan=config.plan, roles=config.roles)
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
    return ProfileCommand(action="start", step=step, plan=plan)


@profile.command("stop")
@click.option("--step", type=_STEP, required=True, help="The step that the session was started for.")
@_publishes
def profile_stop(step: int) -> ProfileCommand:
    """Close the session. The report names the traces of node rank 0."""
    return ProfileCommand(action="stop", step=step)


@profile.command("collect")
@click.option("--step", type=_STEP, required=True, help="The step whose session was stopped.")
@_publishes
def profile_collect(step: int) -> ProfileCommand:
    """After a stop, report the traces that the other nodes wrote to their own disks."""
    return ProfileCommand(action="collect", step=step)


@profile.command("check")
@click.option("--step", type=_STEP, default=0, help="Has no effect: the check ignores the steps.")
@_config
@_publishes
def profile_check(step: int, config: ProfilerConfig | None) -> ProfileCommand:
    """Ask every agent whether it could record the plan. Nothing is started."""
    config = config or ProfilerConfig()
    return ProfileCommand(action="check", step=step, plan=config.plan, roles=config.roles)


profile.add_command(explain)


# --- engines ----------------------------------------------------------------------------------------------------------

_tags = click.option("--tag", "tags", multiple=True, type=click.Choice(["weights", "kv_cache"]), help="[default: both]")


@click.command(short_help="Stop generating.")
@click.option("--in-flight", type=click.Choice(["abort", "wait", "keep"]), default="abort", show_default=True)
@_publishes
def pause(in_flight: Any) -> EngineCommand:
    """Stop generating. Running requests are aborted, completed, or kept to be continued."""
    return EngineCommand(operation="pause", mode=in_flight)


def _operation(operation: Literal["resume", "flush", "abort"], text: str) -> click.Command:
    return click.command(operation, help=text)(_publishes(lambda: EngineCommand(operation=operation)))


resume = _operation("resume", "Resume generating.")
flush = _operation("flush", "Flush the prefix caches.")
abort = _operation("abort", "Abort all running requests.")


@click.command()
@_tags
@click.option("--discard", is_flag=True, help="Drop the weights; the wake loads the committed ones again.")
@_publishes
def sleep(tags: tuple[Tag, ...], discard: bool) -> EngineCommand:
    """Release the engines' memory."""
    return EngineCommand(operation="sleep", tags=frozenset(tags), discard=discard)


@click.command()
@_tags
@_publishes
def wake(tags: tuple[Tag, ...]) -> EngineCommand:
    """Take the engines' memory back."""
    return EngineCommand(operation="wake", tags=frozenset(tags))
