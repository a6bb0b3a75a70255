"""The keys of a bus, as a folder: its own key, the keys that it accepts, and those that were revoked.

    server.key           the bus's own pair
    allowed/NAME.json    one accepted key: its public half, role and places
    revoked/NAME.N.json  one that was revoked
    issued/NAME.key      the keys of a peer, to be copied to it

Every change is one file that appears or goes, and none is replaced: a bus that watches the folder never sees half of
one. None of these folders may be one that other users can write.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from controlplane.machine.permissions import Grant, KeyRole
from schemas.errors import KeyFileError
from schemas.logs import logger_of
from schemas.transport.keys import (
    KeyName,
    KeyPair,
    PeerKeys,
    Z85Key,
    check_pair,
    make_private_folder,
    read_struct,
    require_own_folder,
    write_private,
)

logger = logger_of("keys")

Place = Annotated[str, Meta(pattern=r"^([0-9]{1,9}(\.[0-9]{1,9})?|[a-z][a-z0-9_-]{0,31}(\.[0-9]{1,9})?)$(?!\n)")]
"""`0`, `0.1`, `actor` or `actor.3`."""


class AllowedKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accepted key.

    Attributes:
        places: Agents that it may be; empty for any.
    """

    name: KeyName
    role: KeyRole
    public: Z85Key
    places: Annotated[tuple[Place, ...], Meta(max_length=1024)] = ()


class AccessList(NamedTuple):
    """Accepted and revoked keys, by public key."""

    grants: dict[str, Grant]
    revoked: dict[str, str]


class KeyFolder:
    """Reads and changes the keys of a bus.

    Raises, in every method:
        KeyFileError: A file can't be used, or what was asked can't be done. Nothing was changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._server = path / "server.key"
        self._allowed, self._revoked, self._issued = path / "allowed", path / "revoked", path / "issued"

    # --- what a bus reads ---------------------------------------------------------------------------------------------

    def server_pair(self) -> KeyPair:
        """Return the bus's own pair."""
        if not self._server.exists():
            raise KeyFileError(f"{self.path} holds no key of a bus: `rolloutctl keys new NAME` makes one")
        pair = read_struct(self._server, KeyPair, secret=True)
        check_pair(self._server, pair)
        return pair

    def require_own(self) -> None:
        """Raise KeyFileError if another user could change the keys."""
        for folder in (self.path, self._allowed, self._revoked, self._issued):
            if folder.exists():
                require_own_folder(folder)

    def signature(self) -> tuple[object, ...]:
        """Return what changes whenever a key is allowed or revoked, or others may do it."""
        return tuple(_signature(folder) for folder in (self.path, self._allowed, self._revoked))

    def access_list(self) -> AccessList:
        """Return the keys that are accepted. A file that can't be used admits no peer, and is logged."""
        self.require_own()
        revoked = {key.public: key.name for _, key in _read_all(self._revoked)}
        grants: dict[str, Grant] = {}
        for path, key in _read_all(self._allowed):
            if key.public in grants:
                logger.error("%s: its key is that of %s, and counts as that one only", path, grants[key.public].name)
            elif key.public not in revoked:
                grants[key.public] = Grant(name=key.name, role=key.role, places=key.places)
        return AccessList(grants, revoked)

    # --- what `rolloutctl keys` does ----------------------------------------------------------------------------------

    def make_server(self) -> bool:
        """Make the bus's own pair if there is none; return whether it was made."""
        self.require_own()
        make_private_folder(self.path)
        for folder in (self._allowed, self._revoked, self._issued):
            make_private_folder(folder)
        if self._server.exists():
            return False
        _write(self._server, KeyPair.generate())
        return True

    def add(self, name: str, role: KeyRole, places: tuple[str, ...]) -> Path:
        """Make a key and accept it; return the file for the peer."""
        self.require_own()
        issued = self._issued / f"{name}.key"
        if (self._allowed / f"{name}.json").exists() or issued.exists():
            raise KeyFileError(f"{self.path} has a key {name} already: choose another name, or revoke it")
        pair = KeyPair.generate()
        _write(issued, PeerKeys(name=name, pair=pair, server=self.server_pair().public))
        _write(self._allowed / f"{name}.json", AllowedKey(name=name, role=role, public=pair.public, places=places))
        return issued

    def revoke(self, name: str) -> None:
        self.require_own()
        key = self.allowed(name)
        number = 1 + sum(revoked.name == name for _, revoked in _read_all(self._revoked))
        _write(self._revoked / f"{name}.{number}.json", key)
        (self._allowed / f"{name}.json").unlink()
        (self._issued / f"{name}.key").unlink(missing_ok=True)

    def allowed(self, name: str) -> AllowedKey:
        path = self._allowed / f"{name}.json"
        if not path.exists():
            raise KeyFileError(f"{self.path} has no key {name}: `rolloutctl keys list` shows those it has")
        return read_struct(path, AllowedKey, secret=False)

    def keys(self) -> tuple[list[AllowedKey], list[AllowedKey]]:
        """Return the accepted keys and the revoked ones, by name."""
        allowed, revoked = ([key for _, key in _read_all(folder)] for folder in (self._allowed, self._revoked))
        return allowed, revoked


def _signature(folder: Path) -> tuple[object, ...]:
    """The names show what the time does not: a clock of files ticks in milliseconds."""
    try:
        found = folder.stat()
        return found.st_dev, found.st_ino, found.st_mode, found.st_mtime_ns, sorted(os.listdir(folder))
    except OSError:
        return ()


def _read_all(folder: Path) -> Iterator[tuple[Path, AllowedKey]]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith("."))
    except FileNotFoundError:
        return
    except OSError as error:
        raise KeyFileError(f"{folder} can't be read: {error.strerror}") from error
    for name in names:
        try:
            yield folder / name, read_struct(folder / name, AllowedKey, secret=False)
        except KeyFileError as error:
            logger.error("%s; it admits no peer", error)


def _write(path: Path, value: Struct) -> None:
    try:
        write_private(path, value)
    except OSError as error:
        raise KeyFileError(f"{path} can't be written: {error.strerror}") from error
