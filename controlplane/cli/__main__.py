"""The command line. Each command imports its code when it is called, so an agent never loads the trainer's side.

Exit codes: 0 done; 1 done, but something is wrong (an agent failed, a log differs); 2 bad usage or a bad value; 3 could
not be done (no bus answered, a file can't be used); 130 interrupted. Results go to stdout, errors to stderr.
"""

import logging
import os
import sys
from importlib import import_module

import click

from schemas.errors import ConfigError, RolloutctlError
from schemas.formatting import printable

COMMANDS = {
    "agent": "controlplane.cli.agent:agent",
    "conform": "controlplane.cli.conform:conform",
    "demo": "controlplane.cli.demo:demo",
    "engine": "controlplane.cli.engine:engine",
    "gateway": "controlplane.cli.gateway:gateway",
    "keys": "controlplane.cli.keys:keys",
    "log": "controlplane.cli.log:log",
    "observe": "controlplane.cli.observe:observe",
    "timeline": "controlplane.cli.timeline:timeline",
    "report": "controlplane.cli.report:report",
    **{
        name: f"controlplane.cli.operate:{name}"
        for name in ("status", "profile", "pause", "resume", "flush", "sleep", "wake", "abort", "retire")
    },
}
"""Module and attribute of each command."""


class Commands(click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="rolloutctl")
@click.option("-v", "--verbose", is_flag=True, help="Log everything, including skips.")
@click.option("-q", "--quiet", is_flag=True, help="Log warnings only.")
def cli(verbose: bool, quiet: bool) -> None:
    """The control plane between a reinforcement-learning trainer and its rollout engines."""
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("rolloutctl").setLevel(level)


def main() -> None:
    """Entry point of the script. Exits the process."""
    try:
        code = cli.main(standalone_mode=False)
    except click.Abort:
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except ConfigError as error:
        code = _fail(error, 2)
    except RolloutctlError as error:
        code = _fail(error, 3)
    except BrokenPipeError:  # for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: Exception, code: int) -> int:
    click.echo(printable(f"rolloutctl: {error}"), err=True)
    return code


if __name__ == "__main__":
    main()
