"""`rolloutctl observe`: the bus of a run that another trainer drives. It records what observing agents see."""

import signal
from pathlib import Path

import anyio
import click

from controlplane.cli import interrupt
from controlplane.cli.command_line import PATH, RUN_HELP, Command, metrics_port, serve_bus_metrics
from controlplane.plane import ControlPlane
from schemas.config import TIMEOUT_MAX_S, BusConfig, ObservePolicy, milliseconds

_SECONDS = click.FloatRange(0.001, TIMEOUT_MAX_S)
_DEFAULT = ObservePolicy()


@click.command(
    cls=Command,
    short_help="Record a run that another trainer drives, and change nothing.",
    context_settings={"auto_envvar_prefix": "ROLLOUTCTL_OBSERVE"},
)
@click.option("--address", required=True, help="Where observing agents connect, tcp://HOST:PORT.")
@click.option("--log", type=PATH, required=True, help="File of the log; created, or continued.")
@click.option("--run", metavar="auto|new|resume|ID", help=RUN_HELP)
@click.option("--keys", type=PATH, envvar="ROLLOUTCTL_KEYS", help="Folder of the bus's keys.")
@click.option("--insecure", is_flag=True, help="Allow an address that other machines can reach, without keys.")
@click.option(
    "--torn-after",
    type=_SECONDS,
    default=_DEFAULT.torn_ms / 1000,
    help="Seconds for which replicas may serve different weights.",
)
@click.option(
    "--paused-after",
    type=_SECONDS,
    default=_DEFAULT.paused_ms / 1000,
    help="Seconds for which a replica may stand paused.",
)
@click.option(
    "--profiling-after",
    type=_SECONDS,
    default=_DEFAULT.profiling_ms / 1000,
    help="Seconds for which a profiling session may be open.",
)
@metrics_port
def observe(
    address: str,
    log: Path,
    run: str | None,
    keys: Path | None,
    insecure: bool,
    torn_after: float,
    paused_after: float,
    profiling_after: float,
    metrics_port: str | None,
) -> None:
    """Record what the engines of a run do that another trainer drives. Agents join with `rolloutctl agent --observe`.

    Nothing is ever asked of an engine but what it is: an agent that would command its engine is turned away. What went
    wrong is found by `rolloutctl log verify` and shown by `rolloutctl report`, also while this runs. It ends on SIGTERM
    or Ctrl-C.
    """
    policy = ObservePolicy(
        torn_ms=milliseconds(torn_after),
        paused_ms=milliseconds(paused_after),
        profiling_ms=milliseconds(profiling_after),
    )
    plane = ControlPlane(address, log=log, run=run, config=BusConfig(observe=policy), keys=keys, insecure=insecure)
    with plane:
        if metrics_port is not None:
            serve_bus_metrics(plane, metrics_port)
        interrupt.run(_say, f"observing at {plane.address}, into {log}", ends=(signal.SIGTERM,))


async def _say(text: str) -> None:
    click.echo(text)
    await anyio.sleep_forever()
