"""The command line. Each command imports its code when it is called, so an agent never loads the trainer's side.

Exit codes: 0 done; 1 done, but something is wrong (an agent failed, a log differs); 2 bad usage or a bad value; 3 could
not be done (no bus answered, a file can't be used); 130 interrupted. Results go to stdout, errors to stderr.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

from controlplane.cli import interrupt
from controlplane.cli.command_line import PROBLEM, Group
from schemas.errors import ConfigError, RolloutctlError
from schemas.formatting import printable

COMMANDS = {
    **{
        name: f"controlplane.cli.{name}:{name}"
        for name in (
            *("agent", "chaos", "conform", "demo", "engine", "gateway", "keys", "log", "observe", "report"),
            *("simulate", "timeline", "top"),
        )
    },
    **{
        name: f"controlplane.cli.operate:{name.replace('-', '_')}"
        for name in (
            *("status", "stall", "profile", "pause", "resume", "flush", "drop-adapter"),
            *("sleep", "wake", "abort", "drain", "retire", "sync"),
        )
    },
}
"""Module and attribute of each command."""


class Commands(Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A reader of its output may stop early, as in `| head`: that is no error."""
        try:
            super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(PROBLEM in ctx.meta)


@click.command(
    "rolloutctl",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="rolloutctl")
def cli() -> None:
    """The control plane between a reinforcement-learning trainer and its rollout engines.

    The options for the log may also stand before the name of a command. Options of `agent`, `gateway` and `observe` can
    be set in the environment: ROLLOUTCTL_AGENT_REPLICA is `agent --replica`.
    """


def run(words: Sequence[str] | None = None) -> int:
    """Run one command line, by default that of this process, and return its exit code."""
    try:
        code = cli.main(words, prog_name="rolloutctl", standalone_mode=False)
    except click.Abort:
        return interrupt.CODE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ConfigError as error:
        return _fail(error, 2)
    except RolloutctlError as error:
        return _fail(error, 3)
    except Exception as error:
        if not interrupt.is_behind(error):
            raise
        return interrupt.CODE
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the script. Exits the process."""
    if (code := run()) == interrupt.CODE:
        with suppress(OSError):
            sys.stdout.flush()
        interrupt.end()
    sys.exit(code)


def _fail(error: Exception, code: int) -> int:
    click.echo(printable(f"rolloutctl: {error}"), err=True)
    return code


if __name__ == "__main__":
    main()
