"""`rolloutctl engine probe`: what an engine server is, and what an agent could ask of it."""

from pathlib import Path

import anyio
import click
import msgspec
from rich.console import Console

from controlplane.cli.tables import probe_table


@click.group(short_help="Look at an engine server.")
def engine() -> None:
    """Look at an engine server."""


@engine.command(short_help="Tell what it is and what it can do.")
@click.argument("url")
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="Holds its key; else ROLLOUTCTL_ENGINE_API_KEY[_FILE]."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def probe(url: str, api_key_file: Path | None, as_json: bool) -> None:
    """Tell what the engine at URL is: kind, version, node rank, tokenizer, and each operation, supported or why not.

    Nothing is changed. The exit code is 1 when it is no engine that an agent can command.
    """
    from workers.engines.http import api_key
    from workers.engines.probe import probe as look

    found = anyio.run(look, url, api_key(api_key_file))
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        Console().print(probe_table(found))
    if found.tokenizer != "present":
        click.get_current_context().exit(1)
