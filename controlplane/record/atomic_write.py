"""A file that appears under its name when it is whole, in one step, and never takes the place of what is needed."""

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from schemas.errors import ConfigError


def check_destination(out: Path, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse a place that must not be written to. force: something of ours may be there already.

    inputs: files that the result is made from. Raises ConfigError.
    """
    if os.path.lexists(out) and not force:
        raise ConfigError(f"{out} exists already, and nothing was written: name another file, or say --force")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder, and nothing was written: name a file")
    if out.exists() and not out.is_file():  # it would not be written to, but replaced
        raise ConfigError(f"{out} is a pipe or a device, and nothing was written: name a file")
    for one in inputs:
        if out.exists() and one.exists() and out.samefile(one):
            raise ConfigError(f"{out} is what the result is made from, and nothing was written: name another file")


@contextmanager
def atomic_write(out: Path, force: bool) -> Iterator[IO[bytes]]:
    """A file that is at `out` when the block has ended well, and not at all otherwise. force: whatever is there goes.

    Raises OSError; FileExistsError when something came to be there meanwhile.
    """
    draft = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if force:
            draft.replace(out)
        else:
            _put(draft, out)
    finally:
        draft.unlink(missing_ok=True)


def _put(draft: Path, out: Path) -> None:
    """Give the draft its name, unless that is taken."""
    try:
        os.link(draft, out)  # unlike a rename, never over a file that came to be meanwhile
    except FileExistsError:
        raise
    except OSError:  # a file system without links, as those in front of object stores
        if os.path.lexists(out):
            raise
        draft.replace(out)
