"""`rolloutctl agent`: one agent beside one node of one replica, until it is told to end."""

import logging
import signal
from importlib.util import find_spec
from pathlib import Path

import anyio
import click
from anyio import CancelScope

from schemas.errors import ConfigError, RolloutctlError
from schemas.identity import Identity, RolloutMode
from workers.agent import Agent
from workers.engine import Engine

logger = logging.getLogger("rolloutctl.agent")

ENGINES = ("tiny",)
"""Engines that an agent can drive by itself."""


def _state_home() -> str:
    return str(Path(click.get_app_dir("rolloutctl", force_posix=False)) / "state")


@click.command(short_help="Run an agent beside an engine.")
@click.option("--bus", envvar="ROLLOUTCTL_BUS", required=True, help="Address of the trainer's bus, tcp://HOST:PORT.")
@click.option("--replica", type=click.IntRange(0), required=True, help="Index of the replica in the job.")
@click.option("--node-rank", type=click.IntRange(0), default=0, show_default=True, help="Index of this node in it.")
@click.option("--nnodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes of the replica.")
@click.option("--gpus-per-node", type=click.IntRange(1), default=1, show_default=True, help="For global ranks.")
@click.option("--mode", type=click.Choice([one.value for one in RolloutMode]), default="hybrid", show_default=True)
@click.option("--engine", "kind", type=click.Choice(ENGINES), required=True, help="What the agent commands.")
@click.option("--serve", help="tiny: where clients find its front end, e.g. ipc:///tmp/engine-0.")
@click.option("--seed", default=0, show_default=True, help="tiny: of the weights that it starts with.")
@click.option("--checkpoints", type=click.Path(path_type=Path), default=".", help="Root of paths in weight syncs.")
@click.option("--traces", type=click.Path(path_type=Path), default="traces", help="Root below which traces are put.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=_state_home,
    help="Where the journal lies, on a disk of this machine.  [default: the user's state folder]",
)
def agent(
    bus: str,
    replica: int,
    node_rank: int,
    nnodes: int,
    gpus_per_node: int,
    mode: str,
    kind: str,
    serve: str | None,
    seed: int,
    checkpoints: Path,
    traces: Path,
    state_dir: Path,
) -> None:
    """Run the agent of one node. It dials the bus, follows every command, and answers.

    It ends in good order on SIGTERM or Ctrl-C: the engine call under way is awaited and the bus is told. It may be
    killed and started again at any time: it reads its journal and its engine, and goes on.
    """
    try:
        place = Identity(
            replica=replica, node_rank=node_rank, nnodes=nnodes, gpus_per_node=gpus_per_node, mode=RolloutMode(mode)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    engine = _engine(kind, place, checkpoints, traces, serve, seed)
    uvloop = find_spec("uvloop") is not None
    interrupted = anyio.run(_serve, bus, place, engine, state_dir, backend_options={"use_uvloop": uvloop})
    if interrupted:
        raise click.Abort


async def _serve(bus: str, place: Identity, engine: Engine, state_dir: Path) -> bool:
    """Returns whether it was Ctrl-C that ended it."""
    signals: list[signal.Signals] = []
    failure: RolloutctlError | None = None
    async with anyio.create_task_group() as tasks:
        await tasks.start(_end_on_signal, tasks.cancel_scope, signals)
        try:
            async with Agent(bus=bus, identity=place, engine=engine, state_dir=state_dir) as running:
                logger.info("agent %s is up and dials %s", place.agent, bus)
                await running.run()
        except RolloutctlError as error:  # kept out of the group, which would wrap it
            failure = error
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return signal.SIGINT in signals


async def _end_on_signal(
    scope: CancelScope, seen: list[signal.Signals], *, task_status: anyio.abc.TaskStatus[None]
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for one in signals:
            seen.append(one)
            logger.info("%s: ending in good order", one.name)
            scope.cancel()


def _engine(kind: str, place: Identity, checkpoints: Path, traces: Path, serve: str | None, seed: int) -> Engine:
    assert kind == "tiny"
    from workers.engines.tiny import TinyEngine

    return TinyEngine(place, checkpoints=checkpoints, traces=traces, serve=serve, seed=seed)
