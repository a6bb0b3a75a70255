"""`rolloutctl engine probe`: what an engine server is, and which operations an agent can use."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import asdict

from controlplane.cli import interrupt
from controlplane.cli.command_line import Group, api_key_file, json_option
from schemas.formatting import json_text, one_line

if TYPE_CHECKING:
    from workers.engines.probe import Probed


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
        for line in probe_lines(found):
            click.echo(line)
    if found.tokenizer != "present":
        click.get_current_context().exit(1)


def probe_lines(found: "Probed") -> list[str]:
    """Return an engine server's properties, then each operation: supported, or why not."""
    said = {name: value for name, value in asdict(found).items() if name not in ("has", "lacks")}
    said |= {**dict.fromkeys(found.has, "yes"), **{name: f"no: {why}" for name, why in found.lacks.items()}}
    return [one_line(f"{name:<20} {value}") for name, value in said.items() if value not in (None, "")]
