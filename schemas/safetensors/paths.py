"""Which paths a command may name, and where they lead."""

from pathlib import Path
from typing import Final

from schemas.errors import CheckpointError

PATH_BYTES_MAX: Final = 512


def resolve_below(root: Path, relative: str) -> Path:
    """The place below `root` that a path in a command means. It need not exist yet.

    Raises CheckpointError for a path that is empty, absolute, holds `..` or a NUL, begins with `~`, is longer than
    PATH_BYTES_MAX or leads out of the root through a symbolic link.
    """
    why: str | None = None
    try:
        size = len(relative.encode())
    except UnicodeEncodeError:
        size, why = 0, "is not valid text"
    if size > PATH_BYTES_MAX:
        why = f"has {size} bytes, and at most {PATH_BYTES_MAX} are allowed"
    elif not relative.strip():
        why = "is empty"
    elif "\0" in relative:
        why = "holds a NUL"
    elif relative.startswith(("/", "~")):
        why = "is not relative"
    elif ".." in relative.split("/"):
        why = "holds `..`"
    if why is not None:
        raise CheckpointError(
            f"path refused: {relative[:PATH_BYTES_MAX]!r} {why}. Nothing was touched. Give a path relative to {root}, "
            "the root that is configured on this side."
        )
    try:
        base = root.resolve()
        place = (base / relative).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise CheckpointError(f"path refused: {relative!r} below {root}: {error}. Nothing was touched.") from error
    if not place.is_relative_to(base):
        raise CheckpointError(
            f"path refused: {relative!r} leads to {place}, outside {base}, through a symbolic link. Nothing was "
            "touched. Put the files below the root, or configure the root where they are."
        )
    return place
