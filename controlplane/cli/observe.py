"""`rolloutctl observe`: the bus of a run that somebody else drives. It records what observing agents see."""

import signal
from pathlib import Path

import anyio
import click

from controlplane.plane import ControlPlane
from schemas.config import TIMEOUT_MAX_S, BusConfig, ObservePolicy, milliseconds
from schemas.logs import logger_of

logger = logger_of("bus")

_PATH = click.Path(path_type=Path)
_SECONDS = click.FloatRange(0.001, TIMEOUT_MAX_S)
_DEFAULT = ObservePolicy()


@click.command(short_help="Record a run that somebody else drives, and change nothing.")
@click.option("--address", required=True, help="Where observing agents connect, tcp://HOST:PORT.")
@click.option("--log", type=_PATH, required=True, help="File of the log; created, or continued.")
@click.option("--run", help="Id of a new run.  [default: a random one]")
@click.option("--keys", type=_PATH, help="Folder made by `rolloutctl keys`.  [default: ROLLOUTCTL_KEYS]")
@click.option("--insecure", is_flag=True, help="Allow an address that other machines can reach, without keys.")
@click.option(
    "--torn-after",
    type=_SECONDS,
    default=_DEFAULT.torn_ms / 1000,
    show_default=True,
    help="Seconds for which replicas may serve different weights.",
)
@click.option(
    "--paused-after",
    type=_SECONDS,
    default=_DEFAULT.paused_ms / 1000,
    show_default=True,
    help="Seconds for which a replica may stand paused.",
)
@click.option(
    "--profiling-after",
    type=_SECONDS,
    default=_DEFAULT.profiling_ms / 1000,
    show_default=True,
    help="Seconds for which a profiling session may be open.",
)
def observe(
    address: str,
    log: Path,
    run: str | None,
    keys: Path | None,
    insecure: bool,
    torn_after: float,
    paused_after: float,
    profiling_after: float,
) -> None:
    """Record what the engines of a run do that somebody else drives. Agents join with `rolloutctl agent --observe`.

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
        click.echo(f"observing at {plane.address}, into {log}")
        ended_by = anyio.run(_until_signal)
    if ended_by is signal.SIGINT:
        raise click.Abort


async def _until_signal() -> signal.Signals:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for received in signals:
            logger.info("%s: shutting down", received.name)
            return received
    raise AssertionError("the receiver of signals never ends by itself")
