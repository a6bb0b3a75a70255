"""Writes a file that appears under its name in one step, complete, and never replaces one that is still needed."""

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from schemas.errors import ConfigError


def check_destination(out: Path, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Raise ConfigError unless `out` may be written: it is new, or `force` is set, and it is none of the inputs."""
    if os.path.lexists(out) and not force:
        raise ConfigError(f"{out} already exists; nothing was written. Name another file, or use --force")
    if out.exists() and not out.is_file():  # a rename would replace a pipe or a device instead of writing to it
        raise ConfigError(f"{out} is not a regular file; nothing was written. Name a file")
    for path in inputs:
        if out.exists() and path.exists() and out.samefile(path):
            raise ConfigError(f"{out} is an input of this command; nothing was written. Name another file")


@contextmanager
def atomic_write(out: Path, force: bool) -> Iterator[IO[bytes]]:
    """Yield a file that is at `out` if the block ends normally, and not at all otherwise.

    Its mode is 0600, as that of the log that it was made from. Raises OSError.
    """
    draft = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        with open(draft, "xb", opener=private) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if force:
            draft.replace(out)
        else:
            _link_or_rename(draft, out)
    finally:
        draft.unlink(missing_ok=True)


def private(path: str, flags: int) -> int:
    """Open a file that, if it is new, is its owner's alone. The `opener` of `open`."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _link_or_rename(draft: Path, out: Path) -> None:
    try:
        os.link(draft, out)  # unlike a rename, it never replaces a file that has appeared meanwhile
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, such as those in front of object stores
        if os.path.lexists(out):
            raise
        draft.replace(out)
