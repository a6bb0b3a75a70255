"""`rolloutctl keys`: make, show and revoke the keys of a bus. A running bus sees each change by itself."""

import click
import msgspec

from controlplane.bus.key_folder import AllowedKey, KeyFolder, Place
from controlplane.cli.command_line import FOLDER, Group, json_option
from controlplane.machine.permissions import KeyRole
from schemas.errors import ConfigError
from schemas.formatting import json_text, one_line
from schemas.transport.keys import KeyName

_folder = click.option(
    "--keys",
    "folder",
    envvar="ROLLOUTCTL_KEYS",
    type=FOLDER,
    default="keys",
    callback=lambda _, __, path: KeyFolder(path),
    help="Folder of the bus's keys, on the trainer's machine.",
)


@click.group(cls=Group, short_help="Make, show and revoke the keys of a bus.")
def keys() -> None:
    """Keep the keys of a bus, in a folder on the trainer's machine.

    \b
    A bus that other machines reach, and one node that may be replica 0:
      rolloutctl keys new node-a --place 0
      scp keys/issued/node-a.key node-a:          # then: rolloutctl agent --key node-a.key …
      ControlPlane("tcp://0.0.0.0:5555", keys="keys", …)
    """


@keys.command(short_help="Make keys; the first time, also the bus's own.")
@_folder
@click.argument("names", nargs=-1, required=True)
@click.option(
    "--role", type=click.Choice(["agent", "operator", "observer"]), default="agent", help="What the key may do."
)
@click.option("--place", "places", multiple=True, metavar="P", help="Agents that it may be: 0, 0.1, actor or actor.3.")
@click.option("--fleet", is_flag=True, help="An agent's key for any place: one key for the whole fleet.")
def new(folder: KeyFolder, names: tuple[str, ...], role: KeyRole, places: tuple[str, ...], fleet: bool) -> None:
    """Make a key for each NAME, which a running bus accepts at once. Carry its file to the peer, and remove it here.

    An agent joins the fleet. An operator reads the status and publishes commands. An observer only reads.
    """
    if role == "agent" and bool(places) == fleet:
        raise ConfigError("an agent's key needs --place, once or more, or --fleet for one that may be any agent")
    if role != "agent" and (places or fleet):
        raise ConfigError(f"--place and --fleet are for agents, and this is a key for an {role}")
    for name in names:
        _check(name, KeyName, "a name: letters, digits, '.', '_' and '-', at most 64")
    for place in places:
        _check(place, Place, "a place: 0, 0.1, actor or actor.3")
    if folder.make_server():
        click.echo(one_line(f"bus: made its key in {folder.path}"))
    for name in names:
        click.echo(one_line(f"{name}: {folder.add(name, role, places)}  ({_what(role, places)})"))


@keys.command("list", short_help="Show all keys.")
@_folder
@json_option
def list_keys(folder: KeyFolder, as_json: bool) -> None:
    """Show the bus's public key, the keys that may come in, and those that were revoked. Shows no secret."""
    server = folder.server_pair().public
    allowed, revoked = folder.keys()
    if as_json:
        click.echo(json_text({"server": server, "allowed": allowed, "revoked": revoked}))
        return
    click.echo(f"bus  {server}")
    for key in allowed:
        click.echo(_line(key, ""))
    for key in revoked:
        click.echo(_line(key, "revoked"))


@keys.command(short_help="Shut a key out.")
@_folder
@click.argument("names", nargs=-1, required=True)
def revoke(folder: KeyFolder, names: tuple[str, ...]) -> None:
    """Shut keys out: a running bus refuses their next message, and their next connection."""
    for name in names:
        folder.revoke(name)
        click.echo(f"{name}: revoked")


def _line(key: AllowedKey, note: str) -> str:
    return f"{key.name:<20} {_what(key.role, key.places):<30} {note}".rstrip()


def _what(role: str, places: tuple[str, ...]) -> str:
    return f"{role} {', '.join(places) or 'at any place'}" if role == "agent" else role


def _check(value: str, kind: object, wanted: str) -> None:
    try:
        msgspec.convert(value, type=kind)
    except msgspec.ValidationError:
        raise ConfigError(f"{value!r} is not {wanted}") from None
