"""What every command has in common: the options for the log, the order of its help, and what a typing error gets."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from schemas.errors import ExtraMissing
from schemas.identity import NUMBER_MAX, REPLICAS_MAX
from schemas.logs import LogFormat, log_to_stderr
from schemas.profiler.conversion import did_you_mean

if TYPE_CHECKING:
    from controlplane.plane import ControlPlane

BUS_HELP: Final = "Address of the trainer's bus, tcp://HOST:PORT, or the path of a file that names it."
RUN_HELP: Final = (
    "auto: continue the run in the log if there is one, else begin one; new: begin one, and keep an earlier log beside "
    "it; resume: continue one; or the id of either.  [default: auto, with a warning]"
)
PATH: Final = click.Path(path_type=Path)
FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER: Final = click.Path(file_okay=False, path_type=Path)
file_argument = click.argument("file", type=FILE)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
force_option = click.option("--force", is_flag=True, help="Replace an existing file.")
api_key_file = click.option(
    "--api-key-file",
    type=PATH,
    envvar="ROLLOUTCTL_ENGINE_API_KEY_FILE",
    help="File with the engines' API key.  [default: ROLLOUTCTL_ENGINE_API_KEY]",
)


def _with_extra(_context: click.Context, _option: click.Parameter, address: str | None) -> str | None:
    if address is not None and find_spec("prometheus_client") is None:
        raise ExtraMissing("metrics need prometheus-client", "metrics")
    return address


metrics_port = click.option(
    "--metrics-port",
    metavar="[HOST:]PORT",
    callback=_with_extra,
    help="Serve metrics to Prometheus; without HOST, to this machine only.",
)
PROBLEM: Final = "rolloutctl problem"
"""Key in a context's meta: the command has found a problem."""
_ALL: Final = "rolloutctl help-all"
_META: Final = "rolloutctl."
"""Prefix of the values of `_log_options` in a context's meta, which a command shares with its groups."""


def _note(context: click.Context, option: click.Parameter, value: object) -> None:
    if value:  # a group's option stays in force unless this one is set
        context.meta[f"{_META}{option.name}"] = value


def _log_options(*, hidden: bool) -> list[click.Parameter]:
    """The options for the log, which stand before and after a command's name alike. The help at the top shows them."""
    shared: dict[str, Any] = {"expose_value": False, "callback": _note, "hidden": hidden}
    return [
        click.Option(
            ["-v", "--verbose"],
            is_flag=True,
            envvar="ROLLOUTCTL_VERBOSE",
            help="Log everything, including skips.",
            **shared,
        ),
        click.Option(["-q", "--quiet"], is_flag=True, envvar="ROLLOUTCTL_QUIET", help="Log warnings only.", **shared),
        click.Option(
            ["--log-format"],
            type=click.Choice(["text", "json"]),
            envvar="ROLLOUTCTL_LOG_FORMAT",
            help="Format of the log on stderr.  [default: text]",
            **shared,
        ),
    ]


def _help_all(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


class Command(click.Command):
    """A command with the options for the log.

    Args:
        sections: Options by the headings under which the help shows them, by parameter; the others come last.
        rare: Those of them that only `--help-all` shows.
    """

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Sequence[str]] | None = None,
        rare: Collection[str] = (),
        **settings: Any,
    ) -> None:
        settings["context_settings"] = {"show_default": True, **settings.get("context_settings", {})}
        super().__init__(*args, **settings)
        self.params += _log_options(hidden=True)
        self._sections, self._rare = sections or {}, rare
        if rare:
            shown = click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help_all)
            shown.help = "Show all options."
            self.params.append(shown)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        left_out = () if _ALL in ctx.meta else self._rare
        records = {option.name: option.get_help_record(ctx) for option in options if option.name not in left_out}
        named = {name for names in self._sections.values() for name in names}
        sections = {**self._sections, "Options": [name for name in records if name not in named]}
        for heading, names in sections.items():
            if rows := [record for name in names if (record := records.get(name)) is not None]:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Set up the log, then run."""
        level = logging.DEBUG if noted(ctx, "verbose") else logging.WARNING if noted(ctx, "quiet") else logging.INFO
        kind: LogFormat = "json" if noted(ctx, "log_format") == "json" else "text"
        log_to_stderr(level, kind)
        return super().invoke(ctx)


class Group(click.Group):
    """A group of commands. The options for the log may also stand before the name of the command."""

    command_class = Command

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _log_options(hidden=settings.get("name") != "rolloutctl")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take `help X` for `X --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the nearest."""
        word, names = args[0], self.list_commands(ctx)
        if word not in names and not word.startswith("-") and not ctx.resilient_parsing:
            advice = did_you_mean(word, names) or f"; there are {', '.join(names)}"
            raise click.UsageError(f"No such command {word!r}{advice}", ctx)
        return super().resolve_command(ctx, args)


def note_problem() -> None:
    """Let the command exit with 1, also if its output is not read to the end. Call it before anything is printed."""
    click.get_current_context().meta[PROBLEM] = True


def serve_bus_metrics(plane: "ControlPlane", address: str) -> None:
    """Serve the metrics of a bus, in a thread that ends with the process, and say where."""
    from controlplane.metrics import BusCollector
    from schemas.transport.exposition import serve_metrics

    served, _ = serve_metrics(BusCollector(plane), address)
    click.echo(f"metrics at {served}")


def noted(context: click.Context, name: str | None) -> object:
    """Return the value of an option for the log, wherever it stood; None without one."""
    return context.meta.get(f"{_META}{name}")


# --- values -----------------------------------------------------------------------------------------------------------


def parse_numbers(text: str) -> frozenset[int]:
    """Return the numbers of `0-3,7`. Raises BadParameter."""
    found: set[int] = set()
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if span is None:
            raise click.BadParameter(f"{text!r} is not a list of numbers such as 0,2,5-7")
        first, last = int(span[1]), int(span[2] or span[1])
        if last < first:
            raise click.BadParameter(f"{part.strip()!r} ends before it begins")
        if last > NUMBER_MAX or last - first >= REPLICAS_MAX:
            raise click.BadParameter(f"{part.strip()!r} is out of bounds")
        found.update(range(first, last + 1))
    return frozenset(found)


def read_numbers(_: click.Context, __: click.Parameter, value: str | None) -> frozenset[int] | None:
    """Parse the value of an option: its callback."""
    return None if value is None else parse_numbers(value)
