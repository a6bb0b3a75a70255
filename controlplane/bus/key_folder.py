"""The keys of a bus, as a folder: its own key, the keys that it accepts, and those that were revoked.

    server.key           the bus's own pair
    server-next.key      the pair that replaces it, while it is being replaced
    allowed/NAME.json    one accepted key: its public half, role and places
    revoked/NAME.N.json  one that was revoked
    issued/NAME.key      the keys of a peer, to be copied to it

Every change is one file that appears, is replaced or goes: a bus that watches the folder never sees half of one. Who
changes something holds a lock on the folder. None of these folders may be one that other users can write.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Annotated, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from controlplane.machine.permissions import Grant, KeyAge, KeyRole
from schemas.errors import KeyFileError
from schemas.logs import logger_of
from schemas.transport.keys import (
    KeyName,
    KeyPair,
    PeerKeys,
    Z85Key,
    check_pair,
    make_private_folder,
    read_peer_keys,
    read_struct,
    require_own_folder,
    write_private,
)

logger = logger_of("keys")

Place = Annotated[str, Meta(pattern=r"^([0-9]{1,9}(\.[0-9]{1,9})?|[a-z][a-z0-9_-]{0,31}(\.[0-9]{1,9})?)$(?!\n)")]
"""`0`, `0.1`, `actor` or `actor.3`."""
SETTLED_NS: Final = 2_000_000_000
"""A folder that changed more recently than this may change again and keep its modification time."""


class AllowedKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accepted key.

    Attributes:
        public: Its public half. Two while it is being replaced, the new one first.
        places: Agents that it may be; empty for any.
    """

    name: KeyName
    role: KeyRole
    public: Annotated[tuple[Z85Key, ...], Meta(min_length=1, max_length=2)]
    places: Annotated[tuple[Place, ...], Meta(max_length=1024)] = ()


class AccessList(NamedTuple):
    """Accepted and revoked keys, by public key."""

    grants: dict[str, Grant]
    revoked: dict[str, str]


P = ParamSpec("P")
R = TypeVar("R")


def _alone(change: "Callable[Concatenate[KeyFolder, P], R]") -> "Callable[Concatenate[KeyFolder, P], R]":
    """Let no other process change the folder meanwhile: most changes depend on what is there."""

    @wraps(change)
    def changed(folder: "KeyFolder", /, *args: P.args, **options: P.kwargs) -> R:
        folder.require_own()
        try:
            descriptor = os.open(folder.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return change(folder, *args, **options)  # and that says what is missing
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return change(folder, *args, **options)
        finally:
            os.close(descriptor)

    return changed


class KeyFolder:
    """Reads and changes the keys of a bus.

    Raises, in every method:
        KeyFileError: A file can't be used, or what was asked can't be done. Nothing was changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._server, self._next = path / "server.key", path / "server-next.key"
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

    def signature(self) -> tuple[tuple[int, int, int, int], ...]:
        """Return what changes whenever a key is allowed or revoked, or others may do it."""
        return tuple(_signature(folder) for folder in (self.path, self._allowed, self._revoked))

    def access_list(self) -> AccessList:
        """Return the keys that are accepted. A file that can't be used admits no peer, and is logged."""
        self.require_own()
        revoked = {public: key.name for _, key in _read_all(self._revoked) for public in key.public}
        grants: dict[str, Grant] = {}
        for path, key in _read_all(self._allowed):
            ages: tuple[KeyAge, ...] = ("new", "old") if len(key.public) > 1 else ("only",)
            for public, age in zip(key.public, ages, strict=True):
                if public in grants:
                    logger.error("%s: its key is that of %s, and counts as that one only", path, grants[public].name)
                elif public not in revoked:
                    grants[public] = Grant(name=key.name, role=key.role, places=key.places, age=age)
        return AccessList(grants, revoked)

    # --- what `rolloutctl keys` does ----------------------------------------------------------------------------------

    @_alone
    def make_server(self) -> bool:
        """Make the bus's own pair if there is none; return whether it was made."""
        make_private_folder(self.path)
        for folder in (self._allowed, self._revoked, self._issued):
            make_private_folder(folder)
        if self._server.exists():
            return False
        _write(self._server, KeyPair.generate())
        return True

    @_alone
    def add(self, name: str, role: KeyRole, places: tuple[str, ...]) -> Path:
        """Make a key and accept it; return the file for the peer."""
        issued = self._issued / f"{name}.key"
        if (self._allowed / f"{name}.json").exists() or issued.exists():
            raise KeyFileError(f"{self.path} has a key {name} already: choose another name, rotate it, or revoke it")
        pair = KeyPair.generate()
        _write(issued, PeerKeys(name=name, pair=pair, servers=self.servers()))
        _write(self._allowed / f"{name}.json", AllowedKey(name=name, role=role, public=(pair.public,), places=places))
        return issued

    @_alone
    def rotate(self, name: str) -> Path:
        """Make a new pair for a key, beside the one in use; return the new file for the peer."""
        key = self.allowed(name)
        if len(key.public) > 1:
            raise KeyFileError(f"key {name} is being replaced already: end that first, with --finish")
        pair, issued = KeyPair.generate(), self._issued / f"{name}.key"
        _write(issued, PeerKeys(name=name, pair=pair, servers=self.servers()), overwrite=True)
        _write(self._allowed / f"{name}.json", replace(key, public=(pair.public, *key.public)), overwrite=True)
        return issued

    @_alone
    def finish(self, name: str) -> None:
        """Revoke the older pair of a key that is being replaced."""
        key = self.allowed(name)
        if len(key.public) < 2:
            raise KeyFileError(f"key {name} is not being replaced")
        self._note_revoked(replace(key, public=key.public[1:]))
        _write(self._allowed / f"{name}.json", replace(key, public=key.public[:1]), overwrite=True)

    @_alone
    def revoke(self, name: str) -> None:
        """Revoke a key."""
        self._note_revoked(self.allowed(name))
        (self._allowed / f"{name}.json").unlink()
        (self._issued / f"{name}.key").unlink(missing_ok=True)

    @_alone
    def rotate_server(self) -> tuple[str, list[Path]]:
        """Make the bus's next pair; return its public key, and the files of peers that now have it too."""
        if self._next.exists():
            raise KeyFileError("the key of the bus is being replaced already: end that first, with --finish")
        pair = KeyPair.generate()
        _write(self._next, pair)
        return pair.public, self._reissue()

    @_alone
    def finish_server(self) -> list[Path]:
        """Put the bus's next pair in the place of the one in use; return the files of peers that changed."""
        if not self._next.exists():
            raise KeyFileError("the key of the bus is not being replaced")
        self._next.replace(self._server)
        return self._reissue()

    def servers(self) -> tuple[str, ...]:
        """Return the public keys of the bus, the one in use first."""
        pairs = [self.server_pair()]
        if self._next.exists():
            pairs.append(read_struct(self._next, KeyPair, secret=True))
        return tuple(pair.public for pair in pairs)

    def allowed(self, name: str) -> AllowedKey:
        """Return the key of that name."""
        path = self._allowed / f"{name}.json"
        if not path.exists():
            raise KeyFileError(f"{self.path} has no key {name}: `rolloutctl keys list` shows those it has")
        return read_struct(path, AllowedKey, secret=False)

    def keys(self) -> tuple[list[AllowedKey], list[AllowedKey]]:
        """Return the accepted keys and the revoked ones, by name."""
        allowed, revoked = ([key for _, key in _read_all(folder)] for folder in (self._allowed, self._revoked))
        return allowed, revoked

    def _note_revoked(self, key: AllowedKey) -> None:
        number = 1 + sum(revoked.name == key.name for _, revoked in _read_all(self._revoked))
        _write(self._revoked / f"{key.name}.{number}.json", key)

    def _reissue(self) -> list[Path]:
        """Write the bus's public keys into the files for peers that are still here."""
        servers, changed = self.servers(), []
        for path in sorted(self._issued.glob("*.key")):
            _write(path, replace(read_peer_keys(path), servers=servers), overwrite=True)
            changed.append(path)
        return changed


def is_settled(signature: tuple[tuple[int, int, int, int], ...]) -> bool:
    """Whether a change after now is sure to change the signature: a clock of files ticks in milliseconds."""
    return all(time.time_ns() - changed_ns > SETTLED_NS for *_, changed_ns in signature)


def _signature(folder: Path) -> tuple[int, int, int, int]:
    try:
        found = folder.stat()
    except OSError:
        return 0, 0, 0, 0
    return found.st_dev, found.st_ino, found.st_mode, found.st_mtime_ns


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


def _write(path: Path, value: Struct, *, overwrite: bool = False) -> None:
    try:
        write_private(path, value, replace=overwrite)
    except OSError as error:
        raise KeyFileError(f"{path} can't be written: {error.strerror}") from error
