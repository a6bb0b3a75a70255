"""What lies at a path: the type of its file system, since SQLite's write-ahead log needs a local one, and of a file."""

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from schemas.errors import LogError

_NETWORK: Final = re.compile(
    r"nfs\d?|cifs|smb\w*|lustre|gpfs|beegfs\w*|ceph|glusterfs|fuse(\..+)?|9p|afs|wekafs|panfs|pvfs2|orangefs|virtiofs"
)


def filesystem_type(path: str) -> str:
    """Return the type of the file system that holds an absolute path without links, or '' if unknown."""
    over = [(place, kind) for place, kind in mounts() if Path(path).is_relative_to(place)]
    return max(reversed(over), key=lambda mount: len(mount[0]), default=("", ""))[1]


def is_network(filesystem: str) -> bool:
    """Whether WAL must not be used on this type. Includes all of FUSE, since what is behind it is unknown."""
    return _NETWORK.fullmatch(filesystem) is not None


def network_type(path: Path) -> str:
    """Return the type of the file system that a path is on, or will be on, if it is a network's; else ''."""
    found = filesystem_type(os.path.realpath(path))
    return found if is_network(found) else ""


def mounts() -> list[tuple[str, str]]:
    """Return places and types of all mounts, the newest last; none where the system does not say."""
    import psutil

    with contextlib.suppress(OSError):
        return [(each.mountpoint, each.fstype) for each in psutil.disk_partitions(all=True)]
    return []


def check_regular(path: Path, kind: str) -> None:
    """Raise LogError for a pipe, a device or a folder in place of a `kind`: to open one could block, or change it."""
    if path.exists() and not path.is_file():
        raise LogError(f"{path}: not a regular file, and so no {kind} of rolloutctl")
