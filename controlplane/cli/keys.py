"""`rolloutctl keys`: make, show, replace and revoke the keys of a bus. A running bus sees each change by itself."""

from pathlib import Path

import click
import msgspec

from controlplane.bus.key_folder import AllowedKey, KeyFolder, Place
from controlplane.cli.command_line import Group
from controlplane.machine.permissions import KeyRole
from schemas.errors import ConfigError
from schemas.formatting import json_text, one_line
from schemas.transport.keys import KeyName

_folder = click.option(
    "--keys",
    "folder",
    envvar="ROLLOUTCTL_KEYS",
    type=click.Path(file_okay=False, path_type=Path),
    default="keys",
    callback=lambda _, __, path: KeyFolder(path),
    help="Folder of the bus's keys, on the trainer's machine.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_finish = click.option("--finish", is_flag=True, help="End it: from now on only the new key is accepted.")


@click.group(cls=Group, short_help="Make, show, replace and revoke the keys of a bus.")
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
    "--role",
    type=click.Choice(["agent", "operator", "observer"]),
    default="agent",
    help="What the key may do.",
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
@_json
def list_keys(folder: KeyFolder, as_json: bool) -> None:
    """Show the bus's public key, the keys that may come in, and those that were revoked. Shows no secret."""
    servers = folder.servers()
    allowed, revoked = folder.keys()
    if as_json:
        click.echo(json_text({"servers": servers, "allowed": allowed, "revoked": revoked}))
        return
    click.echo(f"bus  {servers[0]}" + "".join(f"\nnext {server}" for server in servers[1:]))
    for key in allowed:
        click.echo(_line(key, "being replaced" if len(key.public) > 1 else ""))
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


@keys.command(short_help="Replace a key while the run goes on.")
@_folder
@click.argument("name", required=False)
@click.option("--server", is_flag=True, help="Replace the bus's own key.")
@_finish
def rotate(folder: KeyFolder, name: str | None, server: bool, finish: bool) -> None:
    """Replace a peer's key, or the bus's own, in two steps; no agent restarts.

    \b
    A peer's:  keys rotate NAME; put the new file in the place of the old one on its node; keys rotate NAME --finish
    The bus's: keys rotate --server; put the new files on all nodes; keys rotate --server --finish; restart the trainer

    A running agent sees that its file has changed, and connects again with the new key.
    """
    if (name is None) == (not server):
        raise ConfigError("name one key, or say --server")
    if name is not None and not finish:
        until = f"the old key is accepted until `keys rotate {name} --finish`"
        click.echo(one_line(f"{name}: {folder.rotate(name)}  ({until})"))
    elif name is not None:
        folder.finish(name)
        click.echo(f"{name}: only the new key is accepted")
    elif not finish:
        public, changed = folder.rotate_server()
        click.echo(f"bus: the next key is {public}")
        _print_changed(changed)
    else:
        _print_changed(folder.finish_server())
        click.echo("bus: the new key is used from the next start of the trainer on")


def _print_changed(files: list[Path]) -> None:
    for file in files:
        click.echo(one_line(f"changed {file}"))


def _line(key: AllowedKey, note: str) -> str:
    return f"{key.name:<20} {_what(key.role, key.places):<30} {note}".rstrip()


def _what(role: str, places: tuple[str, ...]) -> str:
    return f"{role} {', '.join(places) or 'at any place'}" if role == "agent" else role


def _check(value: str, kind: object, wanted: str) -> None:
    try:
        msgspec.convert(value, type=kind)
    except msgspec.ValidationError:
        raise ConfigError(f"{value!r} is not {wanted}") from None
