"""`rolloutctl engine probe`: what an engine server is, and which operations an agent can use."""

from pathlib import Path

import click

from controlplane.cli import interrupt
from controlplane.cli.command_line import Group, api_key_file, json_option
from controlplane.cli.tables import Screen, probe_table
from schemas.formatting import json_text


@click.group(cls=Group)
def engine() -> None:
    """Inspect an engine server."""


@engine.command(short_help="Show what a server is, and which operations it supports.")
@click.argument("url")
@api_key_file
@json_option
def probe(url: str, api_key_file: Path | None, as_json: bool) -> None:
    """Show the engine at URL: kind, version, node rank, tokenizer, and each operation, supported or why not.

    Nothing is changed. The exit code is 1 if an agent could not command it.
    """
    from workers.engines.api_key import api_key
    from workers.engines.probe import probe as probe_server

    found = interrupt.run(probe_server, url, api_key(api_key_file))
    if as_json:
        click.echo(json_text(found))
    else:
        Screen().show(probe_table(found))
    if found.tokenizer != "present":
        click.get_current_context().exit(1)
