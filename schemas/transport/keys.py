"""The keys of a peer: their format, where they come from, and how files that hold a secret are read and written.

A key is a CURVE key as 40 characters of Z85. A peer holds a pair of its own and the public key of the bus, all in one
file. A secret never appears in a `repr`, an error or a log line.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Annotated, Final, NamedTuple, Self, TypeVar

import msgspec
import zmq
from msgspec import Meta, Struct
from zmq.utils import z85

from schemas.errors import KeyFileError
from schemas.logs import logger_of
from schemas.storage.atomic_write import atomic_write

logger = logger_of("keys")

KEYS_VARIABLE: Final = "ROLLOUTCTL_KEYS"
"""Names the folder of a bus's keys; the others are for its peers."""
KEY_FILE_VARIABLE: Final = "ROLLOUTCTL_KEY_FILE"
KEY_VARIABLE: Final = "ROLLOUTCTL_KEY"
SERVER_KEY_VARIABLE: Final = "ROLLOUTCTL_SERVER_KEY"
FILE_BYTES_MAX: Final = 64 * 1024
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
"""Mode bits that a file with a secret must not have."""

Z85Key = Annotated[str, Meta(pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$(?!\n)")]
"""A CURVE key, public or secret."""
KeyName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)")]
"""The name of a key. It is also the name of a file."""

StrPath = str | os.PathLike[str]
T = TypeVar("T", bound=Struct)


class KeyPair(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A CURVE key pair. Its `repr` has the public key only."""

    public: Z85Key
    secret: Z85Key

    @classmethod
    def generate(cls) -> Self:
        public, secret = zmq.curve_keypair()
        return cls(public=public.decode(), secret=secret.decode())

    @classmethod
    def of_secret(cls, secret: str) -> Self:
        """Return the pair of a secret key. Raises KeyFileError."""
        return cls(public=_public_of(secret), secret=secret)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(public={self.public!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("public", self.public)]


class PeerKeys(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer of the bus holds, and the content of its key file.

    Attributes:
        name: Of the key, for messages to people.
        server: Public key of the bus.
    """

    name: KeyName
    pair: KeyPair
    server: Z85Key


class Credentials(NamedTuple):
    """What one connection is dialled with: a pair, and the public key that the bus must have."""

    pair: KeyPair
    server: str


class KeySource:
    """Where a peer's keys come from: a file, which is read again when it has changed, or what was given once.

    `keys` are the newest that could be read.
    """

    def __init__(self, path: Path | None, keys: PeerKeys) -> None:
        self._path, self.keys = path, keys
        self._seen = _signature(path) if path is not None else None

    @classmethod
    def find(cls, keys: "StrPath | PeerKeys | None" = None) -> Self | None:
        """Return the source of a peer's keys: what is given, or what the environment names, or None without either.

        The environment has `ROLLOUTCTL_KEY_FILE`, or `ROLLOUTCTL_KEY` (the secret key) beside `ROLLOUTCTL_SERVER_KEY`
        (the bus's public key).

        Raises:
            KeyFileError: There should be keys, and they can't be used.
        """
        if isinstance(keys, PeerKeys):
            return cls(None, keys)
        named = keys or os.environ.get(KEY_FILE_VARIABLE)
        if named:
            return cls(Path(named), read_peer_keys(Path(named)))
        if secret := os.environ.get(KEY_VARIABLE):
            return cls(None, _keys_of_environment(secret))
        return None

    def credentials(self) -> Credentials:
        return Credentials(self.keys.pair, self.keys.server)

    def refresh(self) -> bool:
        """Read the file again if it has changed; return whether there are new keys. Never raises."""
        if self._path is None or (found := _signature(self._path)) in (None, self._seen):
            return False
        self._seen = found
        try:
            keys = read_peer_keys(self._path)
        except KeyFileError as error:
            logger.error("the key file has changed and can't be used; the keys read before stay in use: %s", error)
            return False
        changed, self.keys = keys != self.keys, keys
        return changed


def environment_of_children() -> dict[str, str]:
    """Return this process's environment without its secret key, for programs that it starts."""
    return {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}


def read_peer_keys(path: Path) -> PeerKeys:
    """Read a peer's key file. Raises KeyFileError."""
    keys = read_struct(path, PeerKeys, secret=True)
    check_pair(path, keys.pair)
    if not is_key(keys.server):
        raise KeyFileError(f"{path}: the public key of the bus in it is damaged. Copy the file again")
    return keys


def check_pair(path: Path, pair: KeyPair) -> None:
    """Raise KeyFileError unless the two keys of a pair that was read belong together."""
    if _public_of(pair.secret, path) != pair.public:
        raise KeyFileError(f"{path}: the keys in it don't belong together. Copy the file again, or make a new key")


def is_key(text: str) -> bool:
    """Whether 40 characters of Z85 stand for the 32 bytes of a key: some stand for numbers that are too large."""
    try:
        return len(z85.decode(text.encode())) == 32
    except Exception:  # of struct, KeyError, …: pyzmq documents none
        return False


def read_struct(path: Path, kind: type[T], *, secret: bool) -> T:
    """Read a small JSON file; a `secret` one only if others can't. Raises KeyFileError, without any of the content."""
    try:
        # O_NONBLOCK: a pipe of that name must not stop the reader.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            _require_own(path, os.fstat(descriptor), secret=secret)
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise KeyFileError(f"the keys in {path} can't be read: {error.strerror}") from error
    try:
        if len(content) <= FILE_BYTES_MAX:
            return msgspec.json.decode(content, type=kind)
        reason = f"it is larger than {FILE_BYTES_MAX} bytes"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # The text of an error has the path of a field, and of an unknown field its name: nothing that was in a field.
        reason = str(error) if isinstance(error, msgspec.ValidationError) else "it is not JSON"
    raise KeyFileError(f"{path} is not a file of `rolloutctl keys`: {reason[:200]}")


def write_private(path: Path, value: Struct, *, replace: bool = False) -> None:
    """Write a JSON file that its owner alone can read, from its first byte, and that appears complete.

    Raises OSError.
    """
    make_private_folder(path.parent)
    with atomic_write(path, force=replace) as file:
        file.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def make_private_folder(folder: Path) -> None:
    """Make a folder for its owner alone, if it is not there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def require_own_folder(folder: Path) -> None:
    """Raise KeyFileError if another user could replace what is in a folder: take a key away, or bring one back."""
    try:
        found = folder.stat()
    except OSError as error:
        raise KeyFileError(f"the keys in {folder} can't be read: {error.strerror}") from error
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise KeyFileError(
            f"others can write the folder {folder} (mode {stat.S_IMODE(found.st_mode):04o}), and so change who may "
            f"come in: look at what it holds, then run `chmod 700 {folder}`"
        )
    _require_owner(folder, found)


def _require_own(path: Path, found: os.stat_result, *, secret: bool) -> None:
    """Raise KeyFileError unless it is a file that only this user or root can write and, with a secret, read."""
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"{path} is not a file")
    mode = stat.S_IMODE(found.st_mode)
    if secret and mode & OTHERS:
        raise KeyFileError(
            f"{path} holds a secret key, and others can use it (mode {mode:04o}). A user who read it may have the "
            f"key: run `chmod 600 {path}`, and make a new key if the machine has other users"
        )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KeyFileError(
            f"{path} says who may come in, and others can write it (mode {mode:04o}): make it yours alone"
        )
    _require_owner(path, found)


def _require_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise KeyFileError(
            f"{path} belongs to another user (uid {found.st_uid}): make a copy of your own, if it is right"
        )


def _keys_of_environment(secret: str) -> PeerKeys:
    server = os.environ.get(SERVER_KEY_VARIABLE, "").strip()
    if not is_key(server):
        raise KeyFileError(
            f"{KEY_VARIABLE} is set; {SERVER_KEY_VARIABLE} must have the public key of the bus beside it"
        )
    return PeerKeys(name="environment", pair=KeyPair.of_secret(secret.strip()), server=server)


def _public_of(secret: str, source: Path | str = KEY_VARIABLE) -> str:
    try:
        return zmq.curve_public(secret.encode()).decode()
    except (zmq.ZMQError, ValueError):
        raise KeyFileError(f"{source} has no secret key: 40 characters of Z85 are expected") from None


def _signature(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file's content, or None if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
