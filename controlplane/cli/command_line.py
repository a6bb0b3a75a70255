"""What every command has in common: the options for the log, where options may stand, and what a typing error gets.

Every option can also be set in the environment. The help of a command names its variables.
"""

import logging
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from schemas.errors import ConfigError
from schemas.identity import NUMBER_MAX, REPLICAS_MAX
from schemas.logs import LogFormat, log_to_stderr
from schemas.profiler.conversion import did_you_mean

if TYPE_CHECKING:
    from controlplane.plane import ControlPlane

RUN_HELP: Final = (
    "Begin a run, and keep an earlier log beside it; continue the one in the log; or its id.  [default: either]"
)
api_key_file = click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    envvar="ROLLOUTCTL_ENGINE_API_KEY_FILE",
    help="File with the engines' API key.  [default: ROLLOUTCTL_ENGINE_API_KEY]",
)


def _with_extra(_context: click.Context, _option: click.Parameter, address: str | None) -> str | None:
    if address is not None and find_spec("prometheus_client") is None:
        raise ConfigError("metrics need prometheus-client: pip install 'rolloutctl[metrics]'")
    return address


metrics_port = click.option(
    "--metrics-port",
    metavar="[HOST:]PORT",
    callback=_with_extra,
    help="Serve metrics to Prometheus; without HOST, to this machine only.",
)
PROBLEM: Final = "rolloutctl problem"
"""Key in a context's meta: the command has found a problem."""
_META: Final = "rolloutctl."
"""Prefix of the values of `_log_options` in a context's meta, which a command shares with its groups."""


def _note(context: click.Context, option: click.Parameter, value: object) -> None:
    filed = context.get_parameter_source(option.name or "") is ParameterSource.DEFAULT_MAP
    if value and not (filed and noted(context, option.name)):  # a group's option stays in force unless this one is set
        context.meta[f"{_META}{option.name}"] = value


def _log_options() -> list[click.Parameter]:
    """The options for the log, which stand before and after a command's name alike."""
    shared: dict[str, Any] = {"expose_value": False, "callback": _note}
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
            help="Of the log on stderr.  [default: text]",
            **shared,
        ),
    ]


class Command(click.Command):
    """A command with the options for the log, which shows the environment variables of its options.

    Attributes:
        within: The group that it was added to; None at the top.
    """

    within: "Group | None" = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _log_options()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All parameters; each option knows its variable."""
        return _with_variables(super().get_params(ctx), self)

    def invoke(self, ctx: click.Context) -> Any:
        """Set up the log, then run."""
        level = logging.DEBUG if noted(ctx, "verbose") else logging.WARNING if noted(ctx, "quiet") else logging.INFO
        kind: LogFormat = "json" if noted(ctx, "log_format") == "json" else "text"
        log_to_stderr(level, kind)
        return super().invoke(ctx)


class Group(click.Group):
    """A group whose commands' options may also stand before the name of the command."""

    command_class = Command
    within: "Group | None" = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _log_options()

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command, which is then of this group."""
        super().add_command(cmd, name)
        if isinstance(cmd, Command | Group):
            cmd.within = self

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All parameters; each option knows its variable."""
        return _with_variables(super().get_params(ctx), self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move what this group does not know behind the name of the command, which may know it.

        `help X` is `X --help`.
        """
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        names = set(self.list_commands(ctx))
        position = next((index for index, word in enumerate(args) if word in names), None)
        leading = args[:position]
        if position is not None and "--" not in leading:
            own, others = _divided(leading, self.get_params(ctx))
            if not others or others[0].startswith("-"):  # else that word is meant as the command
                args = [*own, args[position], *others, *args[position + 1 :]]
        return super().parse_args(ctx, args)

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
    """Let the command exit with 1, also if nobody reads its output to the end. Call it before anything is printed."""
    click.get_current_context().meta[PROBLEM] = True


def serve_bus_metrics(plane: "ControlPlane", address: str) -> None:
    """Serve the metrics of a bus, in a thread that ends with the process, and say where."""
    from controlplane.metrics import BusCollector
    from schemas.carriers.exposition import serve_metrics

    served, _ = serve_metrics(BusCollector(plane), address)
    click.echo(f"metrics at {served}")


def noted(context: click.Context, name: str | None) -> object:
    """Return the value of an option for the log, wherever it stood; None without one."""
    return context.meta.get(f"{_META}{name}")


def _with_variables(parameters: list[click.Parameter], command: Command | Group) -> list[click.Parameter]:
    """Name the variable of each option by what people write: ROLLOUTCTL_LOG_SHOW_FROM for `log show --from`.

    By the command alone: an option keeps its variable, and some contexts know nothing of the groups above.
    """
    prefix = _prefix(command)
    for option in parameters:
        if isinstance(option, click.Option) and "--help" in option.opts:
            option.allow_from_autoenv = False
        elif isinstance(option, click.Option) and option.allow_from_autoenv:
            written = max(option.opts, key=len).lstrip("-").replace("-", "_").upper()
            option.envvar = option.envvar or f"{prefix}_{written}"
            option.show_envvar = True
    return parameters


def _prefix(command: Command | Group) -> str:
    """What the variables of a command begin with."""
    above = "ROLLOUTCTL" if command.within is None else _prefix(command.within)
    return f"{above}_{command.name}".replace("-", "_").upper()


def _divided(words: list[str], options: Iterable[click.Parameter]) -> tuple[list[str], list[str]]:
    """Divide the words before a command's name into those of these options, and the others."""
    flags = {name: option.is_flag for option in options if isinstance(option, click.Option) for name in option.opts}
    own: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        name = word.partition("=")[0]
        mine = name in flags or re.fullmatch("-[vqh]+", word) is not None
        (own if mine else others).append(word)
        if mine and name == word and not flags.get(name, True):
            own += [value for value in (next(rest, None),) if value is not None]
    return own, others


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
