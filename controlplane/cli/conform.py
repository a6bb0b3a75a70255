"""`rolloutctl conform`: an acceptance test of an engine's backend, or of a server, by what the engine then does."""

import inspect
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import click
from rich.table import Table

from controlplane.cli import interrupt
from controlplane.cli.command_line import FOLDER, Command, api_key_file
from controlplane.cli.tables import Screen, new_table
from schemas.errors import ConfigError, ExtraMissing
from schemas.formatting import markup
from schemas.identity import Identity
from workers.conformance.engine_under_test import GenerationClient, Setup, opened
from workers.conformance.kit import Kit, Row
from workers.engine import Engine
from workers.engines.factory import EngineOptions, make_engine

COLOURS = {"passed": "green", "failed": "red", "not offered": "yellow"}


@click.command(cls=Command, short_help="Test an engine's backend, or a server, by its effects.")
@click.option("--engine", "name", required=True, help="Name of a backend, as for `agent`, or MODULE:CLASS.")
@click.option("--url", help="Address of the engine's server.")
@api_key_file
@click.option("--checkpoints", type=FOLDER, default=".", help="Root of the checkpoints.")
@click.option(
    "--load",
    "paths",
    multiple=True,
    help="A checkpoint of its model, relative to --checkpoints. Give two, with different weights.",
)
@click.option("--traces", type=FOLDER, default="traces", help="Folder for traces.")
@click.option(
    "--up-within", type=click.FloatRange(0), default=10.0, help="Seconds that the engine may take to be ready."
)
@click.option(
    "--yes", is_flag=True, help="Confirm that the engine is not in use: it may be paused, loaded and put to sleep."
)
def conform(
    name: str,
    url: str | None,
    api_key_file: Path | None,
    checkpoints: Path,
    paths: tuple[str, ...],
    traces: Path,
    up_within: float,
    yes: bool,
) -> None:
    """Make every call that an agent makes, and judge each by what the engine does then.

    Requests of others are aborted and delayed, other weights are loaded, and memory is released: never run it beside a
    training run. Afterwards the engine runs, and holds the first checkpoint of --load.

    Exit codes: 0 all that is offered works; 1 something is wrong; 2 bad usage; 3 the engine can't be reached.

    \b
    A backend of your own, which has a method `generate` for this test:
      rolloutctl conform --engine mine:Engine --checkpoints ckpt --load a --load b --yes
    A server:
      rolloutctl conform --engine vllm --url http://127.0.0.1:8000 --checkpoints ckpt --load a --load b --yes
    """
    with ExitStack() as stack:
        if name == "tiny" and not paths:
            checkpoints, paths = _tiny_checkpoints(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        two = _two_checkpoints(paths)
        options = EngineOptions(
            identity=Identity(replica=0, node_rank=0),
            checkpoints=checkpoints,
            traces=traces,
            url=url,
            key_file=api_key_file,
        )
        engine = make_engine(name, options)
        client = _client(name, options, engine)
        setup = Setup(root=checkpoints, checkpoints=two, traces=traces, up_within_s=up_within)
        rows = interrupt.run(_run, engine, client, setup, yes or name == "tiny")
    Screen().show(_table(rows))
    if any(row.verdict == "failed" for row in rows):
        click.get_current_context().exit(1)


async def _run(engine: Engine, client: GenerationClient, setup: Setup, told: bool) -> list[Row]:
    async with opened(engine, setup.up_within_s) as observed:
        if not told:
            raise ConfigError(
                f"{observed.engine} may be in use, and this test pauses it, aborts its requests, loads other weights "
                "and releases its memory. Say --yes if it is not in use."
            )
        async with anyio.create_task_group() as tasks:
            rows = await Kit(engine, client, setup, tasks).run(
                lambda row: click.echo(f"{row.operation}: {row.verdict} ({row.seconds:.1f} s)", err=True)
            )
            tasks.cancel_scope.cancel()
    return rows


def _two_checkpoints(paths: tuple[str, ...]) -> tuple[str, str] | None:
    if not paths:
        return None
    if len(paths) != 2 or paths[0] == paths[1]:
        raise ConfigError(f"--load was given for {', '.join(paths)}: give two checkpoints with different weights.")
    return paths[0], paths[1]


def _tiny_checkpoints(folder: Path) -> tuple[Path, tuple[str, str]]:
    """Write two checkpoints of the tiny engine's model. Raises ExtraMissing without torch."""
    try:
        from workers.engines.tiny.model import TinyConfig, TinyModel, save
    except ModuleNotFoundError as error:
        raise ExtraMissing(f"the tiny engine needs {error.name}", "torch") from error
    for seed in (1, 2):
        save(TinyModel(TinyConfig(), seed), folder / str(seed))
    return folder, ("1", "2")


def _client(name: str, options: EngineOptions, engine: Any) -> GenerationClient:
    """The client of a server; for any other engine, its backend. Raises ConfigError if that brings no tokens along."""
    if name in ("vllm", "sglang"):
        from workers.conformance.server_client import ServerClient
        from workers.engines.api_key import api_key

        return ServerClient(name, options.url or "", api_key(options.key_file))
    if not inspect.isasyncgenfunction(getattr(engine, "generate", None)):
        raise ConfigError(
            f"--engine {name}: nothing can be judged without tokens. Give the backend an async generator "
            "`async def generate(self, prompt, max_tokens)` that yields greedy tokens. See docs/backends.md."
        )
    client: GenerationClient = engine
    return client


def _table(rows: list[Row]) -> Table:
    table = new_table(("operation", "verdict", "what was seen", "seconds"), ("seconds",))
    for row in rows:
        colour = COLOURS[row.verdict]
        table.add_row(row.operation, f"[{colour}]{row.verdict}[/{colour}]", markup(row.seen), f"{row.seconds:.1f}")
    return table
