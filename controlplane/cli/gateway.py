"""`rolloutctl gateway`: a bus for a trainer that posts to its engines, and the URLs that it posts to."""

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import click

from controlplane.cli import interrupt
from controlplane.cli.command_line import PATH, RUN_HELP, Command, api_key_file, metrics_port, serve_bus_metrics
from controlplane.plane import ControlPlane
from schemas.config import TIMEOUT_MAX_S, BusConfig
from schemas.errors import ConfigError, ExtraMissing
from schemas.identity import REPLICAS_MAX

TOKEN_VARIABLE = "ROLLOUTCTL_GATEWAY_TOKEN"


@click.command(
    cls=Command,
    short_help="Answer a trainer's posts to its engines, by commands on the bus.",
    context_settings={"auto_envvar_prefix": "ROLLOUTCTL_GATEWAY"},
)
@click.option("--address", default="tcp://127.0.0.1:5555", help="Where agents connect.")
@click.option("--log", type=PATH, default="run.db", help="File of the run's log.")
@click.option("--run", metavar="auto|new|resume|ID", help=RUN_HELP)
@click.option("--log-copy", type=PATH, help="Folder, shared with other machines, of a live copy of the log.")
@click.option("--address-file", type=PATH, help="File to write --address to, for agents that are given the file.")
@click.option("--keys", type=PATH, envvar="ROLLOUTCTL_KEYS", help="Folder of the bus's keys.")
@click.option(
    "--replicas", type=click.IntRange(1, REPLICAS_MAX), help="Number of replicas.  [default: that of --engine]"
)
@click.option(
    "--engine", multiple=True, metavar="URL", help="Server of replica 0; again for 1, 2 …  [default: as agents say]"
)
@api_key_file
@click.option("--checkpoints", type=PATH, default=".", help="Folder above all checkpoints that the trainer writes.")
@click.option("--listen", default="127.0.0.1:8400", metavar="HOST:PORT", help="Where the trainer posts.")
@click.option(
    "--ports", is_flag=True, help="Give each replica a port of its own, counting up from --listen, instead of a path."
)
@click.option(
    "--token-file", type=PATH, help=f"File with the token that clients must send.  [default: {TOKEN_VARIABLE}]"
)
@click.option("--insecure", is_flag=True, help="Allow a --listen that other machines can reach, without a token.")
@click.option("--insecure-bus", is_flag=True, help="Allow an --address that other machines can reach, without keys.")
@click.option(
    "--timeout",
    type=click.FloatRange(1, TIMEOUT_MAX_S),
    default=300.0,
    help="Seconds for each of the three phases of an update.",
)
@click.option(
    "--quorum",
    type=click.IntRange(1, REPLICAS_MAX),
    help="Replicas that must load an update.  [default: more than half of those that are there]",
)
@click.option(
    "--absent",
    type=click.Choice(["skip", "wait"]),
    default="skip",
    help="What an update does about engines that are known to be down, once the others meet the quorum.",
)
@metrics_port
def gateway(
    address: str, log: Path, run: str | None, keys: Path | None, listen: str, insecure_bus: bool, **options: Any
) -> None:
    """Stand between a trainer and its engines: prime-rl, SkyRL, slime, miles, AReaL.

    Each replica has a base URL here. The trainer's posts to all of them become one command on the bus: an update moves
    the whole fleet to the new checkpoint, or none of it. Requests for tokens are passed on. Agents run beside the
    engines as usual, and connect to --address.

    \b
      rolloutctl gateway --checkpoints /data/run --engine http://node0:8000 --engine http://node1:8000
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ExtraMissing("the gateway needs a web server", "gateway")
    from controlplane.trainers.gateway.service import Gateway
    from workers.engines.api_key import api_key

    count = options["replicas"] or len(options["engine"])
    if not count:
        raise ConfigError("name the server of each replica with --engine URL, or their number with --replicas.")
    host, _, port = listen.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"--listen is {listen!r}, and must be HOST:PORT, such as 127.0.0.1:8400.")
    checkpoints = options["checkpoints"]
    copy, file = (options[name] and str(options[name]) for name in ("log_copy", "address_file"))
    config = BusConfig(log_copy=copy, address_file=file)
    plane = ControlPlane(
        address, log=log, run=run, config=config, checkpoints=checkpoints, keys=keys, insecure=insecure_bus
    )
    with plane:
        served = Gateway(
            plane,
            replicas=count,
            checkpoints=checkpoints,
            engines=options["engine"],
            engine_key=api_key(options["api_key_file"]),
            host=host.strip("[]"),
            port=int(port),
            ports=options["ports"],
            token=api_key(options["token_file"], TOKEN_VARIABLE),
            insecure=options["insecure"],
            timeout_s=options["timeout"],
            quorum=options["quorum"],
            absent=options["absent"],
        )
        if options["metrics_port"] is not None:
            serve_bus_metrics(plane, options["metrics_port"])
        interrupt.run(_serve, served, plane.address, ends=(signal.SIGTERM,))


async def _serve(served: Any, address: str) -> None:
    async with anyio.create_task_group() as tasks:
        await tasks.start(served.serve)
        click.echo(f"agents connect to {address}")
        for replica, url in enumerate(served.base_urls()):
            click.echo(f"replica {replica}: {url}")
