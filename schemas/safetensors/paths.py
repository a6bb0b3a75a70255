"""Paths in commands: which are allowed, and what they refer to."""

from pathlib import Path
from typing import Final

from schemas.errors import CheckpointError

PATH_BYTES_MAX: Final = 512


def resolve_below(root: Path, relative: str) -> Path:
    """Return the absolute path of `relative` below `root`. It need not exist yet.

    Args:
        root: The root that this side was configured with.
        relative: The path in a command.

    Raises:
        CheckpointError: The path is empty, absolute, longer than PATH_BYTES_MAX, holds `..` or a NUL, begins with `~`,
            or leads out of the root through a symbolic link.
    """
    if (problem := _problem(relative)) is not None:
        raise CheckpointError(
            f"path refused: {relative[:PATH_BYTES_MAX]!r} {problem}. Nothing was touched. Give a path relative to "
            f"{root}, the root configured on this side."
        )
    try:
        base = root.resolve()
        place = (base / relative).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise CheckpointError(f"path refused: {relative!r} below {root}: {error}. Nothing was touched.") from error
    if not place.is_relative_to(base):
        raise CheckpointError(
            f"path refused: {relative!r} leads to {place}, outside {base}, through a symbolic link. Nothing was "
            "touched. Put the files below the root, or configure another root."
        )
    return place


def _problem(relative: str) -> str | None:
    """What is wrong with the text of a path."""
    try:
        size = len(relative.encode())
    except UnicodeEncodeError:
        return "is not valid text"
    if size > PATH_BYTES_MAX:
        return f"has {size} bytes, and at most {PATH_BYTES_MAX} are allowed"
    if not relative.strip():
        return "is empty"
    if "\0" in relative:
        return "holds a NUL"
    if relative.startswith(("/", "~")):
        return "is not relative"
    return "holds `..`" if ".." in relative.split("/") else None
