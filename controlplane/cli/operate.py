"""Commands for a person at a running bus: inspect the fleet, and drive it by hand."""

import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, Literal

import click

from controlplane.bus.operator import ask_status, submit
from controlplane.bus.operator import retire as ask_retire
from controlplane.bus.operator import sync as ask_sync
from controlplane.cli import interrupt
from controlplane.cli.command_line import (
    BUS_HELP,
    FILE,
    Command,
    Group,
    json_option,
    note_problem,
    parse_numbers,
    read_numbers,
)
from controlplane.cli.explain import explain
from controlplane.cli.tables import Screen, fleet_table
from schemas.commands import (
    AdapterDrop,
    AdapterRequest,
    Drain,
    EngineCommand,
    ProfileCommand,
    ProfilePlan,
    Target,
    Window,
)
from schemas.config import TIMEOUT_MAX_S
from schemas.errors import CommandError, ConfigError
from schemas.formatting import format_agents, format_replicas, json_text, one_line
from schemas.identity import NUMBER_MAX, ROLLOUT, Tag, identity_of
from schemas.outcomes import Acted, Reason, Skipped
from schemas.profiler.config import ProfilerConfig, read_config
from schemas.profiler.conversion import did_you_mean
from schemas.reports import INSECURE, FleetStatus, Report, SyncReport
from schemas.transport.keys import KeySource

bus_option = click.option("--bus", envvar="ROLLOUTCTL_BUS", required=True, help=BUS_HELP)
keys_option = click.option(
    "--key",
    "keys",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="ROLLOUTCTL_KEY_FILE",
    callback=lambda context, option, path: KeySource.find(path),
    help="File with your key; an observer's may only read.",
)
_SECONDS = click.FloatRange(0.01, TIMEOUT_MAX_S)
_STEP = click.IntRange(0, NUMBER_MAX)
NO_AGENTS: Final = "no agent has joined this run: start one beside each node, with `rolloutctl agent --bus …`"
_wait = click.option("--timeout", type=_SECONDS, default=5.0, help="Seconds to wait for an answer.")


def _asking(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that asks a bus."""
    return bus_option(keys_option(json_option(command)))


def _publishes(build: Callable[..., ProfileCommand | EngineCommand | AdapterDrop]) -> Callable[..., None]:
    """Turn a function that builds a command into one that publishes it and prints its report."""

    @_asking
    @click.option("--replicas", callback=read_numbers, metavar="N,N-N…", help="Only these, e.g. 0,2-5.  [default: all]")
    @click.option("--timeout", type=_SECONDS, default=30.0, help="Seconds to wait for the answers.")
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
        _submit(bus, keys, as_json, build(**options), replicas, timeout, force, options.get("ranks"))

    return run


def _submit(
    bus: str,
    keys: KeySource | None,
    as_json: bool,
    command: ProfileCommand | EngineCommand | AdapterDrop | Drain,
    replicas: frozenset[int] | None,
    timeout: float,
    force: bool = False,
    ranks: frozenset[int] | None = None,
) -> None:
    report: Report = interrupt.run(partial(submit, bus, command, Target(replicas=replicas), timeout, keys, force=force))
    complaints = list(_complaints(report, replicas, ranks))
    if report.failed or report.missing or complaints:
        note_problem()
    _print(report, as_json)
    if not as_json:
        for outcome in report.outcomes:
            for trace in outcome.conclusion.traces if isinstance(outcome.conclusion, Acted) else ():
                click.echo(one_line(f"  {outcome.agent}: {trace.path}"))
    for complaint in complaints:
        click.echo(f"rolloutctl: {complaint}", err=True)


def _complaints(report: Report, replicas: frozenset[int] | None, ranks: frozenset[int] | None) -> Iterator[str]:
    """What the command was to reach, and the fleet does not have."""
    identities = [identity_of(outcome.agent) for outcome in report.outcomes]
    known = {identity.replica for identity in identities if identity.role == ROLLOUT}
    if not report.outcomes:
        yield NO_AGENTS
    elif unknown := (replicas or frozenset()) - known:
        has = f"it has {format_replicas(known)}" if known else "it has none"
        yield f"this run has no {format_replicas(unknown)}: {has}"
    elif report.matched_nothing:
        yield "the target matches no agent"
    reasons = [each.conclusion.reason if isinstance(each.conclusion, Skipped) else "" for each in report.outcomes]
    if ranks and Reason.RANK_NOT_SELECTED in reasons and all(reasons):
        yield f"--ranks {','.join(map(str, sorted(ranks)))} selected none of the agents"


def _print(report: Report | SyncReport, as_json: bool) -> None:
    if as_json:
        click.echo(json_text(report))
    else:
        Screen().print(report, soft_wrap=True, highlight=False)


@click.command(cls=Command, short_help="Show every agent, its state, and what it waits for.")
@_asking
@_wait
def status(bus: str, keys: KeySource | None, as_json: bool, timeout: float) -> None:
    """Show the fleet of a running bus."""
    fleet: FleetStatus = interrupt.run(partial(ask_status, bus, timeout, keys))
    if as_json:
        click.echo(json_text(fleet))
    else:
        _print_fleet(fleet)
    if not fleet.agents:
        click.echo(f"rolloutctl: {NO_AGENTS}", err=True)
        click.get_current_context().exit(1)


@click.command(cls=Command, short_help="Show what waits for which agents.")
@_asking
@_wait
def stall(bus: str, keys: KeySource | None, as_json: bool, timeout: float) -> None:
    """Show what waits for which agents, and what each of them is doing: `status` without agents that are well.

    Exits with 0 if nothing waits, with 1 if something does.
    """
    fleet: FleetStatus = interrupt.run(partial(ask_status, bus, timeout, keys))
    stalled = fleet.stalled
    waits = bool(stalled.agents or stalled.open or stalled.warnings)
    if waits or not fleet.agents:
        note_problem()
    if as_json:
        click.echo(json_text(stalled))
    elif waits:
        _print_fleet(stalled)
    elif fleet.agents:
        click.echo("nothing waits")
    if not fleet.agents:
        click.echo(f"rolloutctl: {NO_AGENTS}", err=True)


def _print_fleet(fleet: FleetStatus) -> None:
    console = Screen()
    if fleet.insecure:
        console.print(INSECURE, style="bold red", soft_wrap=True, highlight=False)
    console.print(one_line(fleet.headline), soft_wrap=True, highlight=False, markup=False)
    for line in fleet.warnings:
        console.print(one_line(line), style="red", soft_wrap=True, highlight=False, markup=False)
    console.show(fleet_table(fleet))
    for line in (*fleet.served_lines, *(f"open: {text}" for text in fleet.open_lines)):
        console.print(one_line(line), soft_wrap=True, highlight=False, markup=False)
    for failure in fleet.failures:
        console.print(one_line(failure.line), style="red", soft_wrap=True, highlight=False, markup=False)


@click.command(cls=Command, short_help="Let replicas end their requests, and retire them.")
@_asking
@click.option(
    "--grace",
    type=click.FloatRange(0, TIMEOUT_MAX_S / 2),
    default=30.0,
    help="Seconds that running requests may go on; those that are left are aborted.",
)
@click.argument("replicas", metavar="N,N-N…", callback=read_numbers)
def drain(bus: str, keys: KeySource | None, as_json: bool, grace: float, replicas: frozenset[int]) -> None:
    """Take replicas out of the fleet in good order, and retire them: their agents end, and so do the servers that these
    launched.

    No sync waits for them or names them, and no router or trainer sends them requests any more.
    """
    command = Drain(grace_ms=round(grace * 1000))
    _submit(bus, keys, as_json, command, replicas, command.timeout_ms / 1000)


@click.command(cls=Command, short_help="Take replicas or agents out of the run for good.")
@_asking
@click.argument("places", nargs=-1, required=True, metavar="REPLICA[-REPLICA][.NODE]…")
def retire(bus: str, keys: KeySource | None, as_json: bool, places: tuple[str, ...]) -> None:
    """Take replicas, or single agents, out of the run for good. Reports then no longer name them as absent.

    A running agent can't be retired: stop it first. An agent that is started at a retired place is told to give up.
    A place is a replica, a range of them, or one agent: 3, 4-7, 3.1, actor.0.
    """
    named = tuple(itertools.chain.from_iterable(map(_places, places)))
    try:
        fleet: FleetStatus = interrupt.run(partial(ask_retire, bus, named, keys=keys))
    except CommandError as error:
        fleet = interrupt.run(partial(ask_status, bus, keys=keys))
        raise CommandError(f"{error}{_known_places(named, fleet)}") from None
    if as_json:
        click.echo(json_text(fleet))
    else:
        Screen().print(fleet, soft_wrap=True, highlight=False)


def _places(place: str) -> list[str]:
    """A range of replicas as a list of them; anything else as it is."""
    if re.fullmatch(r"\d+-\d+", place) is None:
        return [place]
    return list(map(str, sorted(parse_numbers(place))))


def _known_places(places: tuple[str, ...], fleet: FleetStatus) -> str:
    """The place that may have been meant, or those that there are; empty if all are there."""
    known = [line.agent for line in fleet.agents] + [str(replica) for replica in fleet.replicas]
    unknown = [place for place in places if place not in known]
    if not unknown:
        return ""
    return did_you_mean(unknown[0], known) or f"; it has {format_agents(line.agent for line in fleet.agents)}"


# --- profiling --------------------------------------------------------------------------------------------------------


def _read_config(context: click.Context, option: click.Parameter, file: Path | None) -> ProfilerConfig | None:
    if file is None:
        return None
    config, warnings = read_config(file)
    for warning in warnings:
        click.echo(one_line(f"{file}: {warning}"), err=True)
    return config


_config = click.option(
    "--config", type=FILE, callback=_read_config, help="Take the plan from a profiler configuration, verl's or ours."
)


@click.group(cls=Group, short_help="Open or close a profiling session by hand; explain a configuration.")
def profile() -> None:
    """Open or close a profiling session by hand, or explain what a configuration will profile."""


@profile.command("start")
@click.option("--step", type=_STEP, required=True, help="Global training step; names the directory.")
@click.option(
    "--ranks",
    callback=read_numbers,
    metavar="N,N-N…",
    help="GPUs, by global rank, whose replicas take part.  [default: all]",
)
@click.option("--window", type=(_STEP, click.IntRange(1, NUMBER_MAX)), help="Forward steps to record: START END.")
@click.option(
    "--activity",
    "activities",
    multiple=True,
    type=click.Choice(["cpu", "cuda", "memory"]),
    help="What to record; repeatable.  [default: cpu]",
)
@click.option("--with-stack", is_flag=True, help="Record Python stacks.")
@click.option("--record-shapes", is_flag=True, help="Record the shapes of operator inputs.")
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
@_config
@_publishes
def profile_check(config: ProfilerConfig | None) -> ProfileCommand:
    """Ask every agent whether it could record the plan. Nothing is started."""
    config = config or ProfilerConfig()
    return ProfileCommand(action="check", step=0, plan=config.plan, roles=config.roles)


profile.add_command(explain)


# --- engines ----------------------------------------------------------------------------------------------------------

_tags = click.option(
    "--tag",
    "tags",
    multiple=True,
    type=click.Choice(["weights", "kv_cache"]),
    help="Part of the memory; again for the other.  [default: both]",
)


@click.command(cls=Command, short_help="Stop generating.")
@click.option(
    "--in-flight",
    type=click.Choice(["abort", "wait", "keep"]),
    default="abort",
    help="What happens to running requests: abort them, wait for them, or keep them frozen.",
)
@_publishes
def pause(in_flight: Any) -> EngineCommand:
    """Stop generating. Running requests are aborted, completed, or kept to be continued."""
    return EngineCommand(operation="pause", mode=in_flight)


def _operation(operation: Literal["resume", "flush", "abort"], text: str) -> click.Command:
    return click.command(operation, cls=Command, help=text)(_publishes(lambda: EngineCommand(operation=operation)))


resume = _operation("resume", "Resume generating.")
flush = _operation("flush", "Flush the prefix caches.")
abort = _operation("abort", "Abort all running requests.")


@click.command(cls=Command, short_help="Bring the fleet to a checkpoint by hand.")
@_asking
@click.option(
    "--version", type=click.IntRange(1, NUMBER_MAX), help="Version of the weights.  [default: the next of the run]"
)
@click.option("--timeout", type=_SECONDS, default=600.0, help="Seconds for each phase.")
@click.option("--adapter", metavar="NAME", help="PATH is a version of this LoRA adapter: nothing is paused.")
@click.option("--keep", type=click.IntRange(1, 64), help="Versions of the adapter to hold.  [default: 2]")
@click.argument("path")
def sync(
    bus: str,
    keys: KeySource | None,
    as_json: bool,
    version: int | None,
    timeout: float,
    adapter: str | None,
    keep: int | None,
    path: str,
) -> None:
    """Bring the fleet to a checkpoint, all replicas together or none. PATH is relative to the trainer's checkpoints.

    Refused while the trainer has a sync open. A trainer that numbers its versions itself must go on above this one.
    Exits with 1 unless the new weights were committed.
    """
    if keep is not None and adapter is None:
        raise ConfigError("--keep is about versions of an adapter: name it with --adapter.")
    asked = AdapterRequest(name=adapter, keep=keep or 2) if adapter is not None else None
    report: SyncReport = interrupt.run(partial(ask_sync, bus, path, version, timeout, keys, asked))
    if report.status != "committed":
        note_problem()
    _print(report, as_json)
    if report.status == "aborted" and not any(phase.outcomes for phase in report.phases):
        click.echo(f"rolloutctl: {NO_AGENTS}", err=True)


@click.command(cls=Command, short_help="Have replicas hold no version of a LoRA adapter.")
@click.argument("name")
@_publishes
def drop_adapter(name: str) -> AdapterDrop:
    """Have replicas hold no version of a LoRA adapter any more. Each is unloaded once no request runs on it."""
    return AdapterDrop(name=name)


@click.command(cls=Command)
@_tags
@click.option("--discard", is_flag=True, help="Drop the weights; the wake loads the committed ones again.")
@_publishes
def sleep(tags: tuple[Tag, ...], discard: bool) -> EngineCommand:
    """Release the engines' memory."""
    return EngineCommand(operation="sleep", tags=frozenset(tags), discard=discard)


@click.command(cls=Command)
@_tags
@_publishes
def wake(tags: tuple[Tag, ...]) -> EngineCommand:
    """Take the engines' memory back."""
    return EngineCommand(operation="wake", tags=frozenset(tags))
