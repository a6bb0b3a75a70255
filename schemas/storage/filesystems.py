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


def filesystem_type(path: str, mounts: str) -> str:
    """Return the type of the file system that holds a path, or '' if unknown.

    Args:
        path: Absolute, without symbolic links.
        mounts: Text of /proc/mounts. Of several mounts on one directory the last counts, since it hides the others.
    """
    found, depth = "", -1
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # The kernel writes a space in a name as \040, and so on.
        mount_point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[1]).rstrip("/")
        if (path == mount_point or path.startswith(mount_point + "/")) and len(mount_point) >= depth:
            found, depth = fields[2], len(mount_point)
    return found


def is_network(filesystem: str) -> bool:
    """Whether WAL must not be used on this type. Includes all of FUSE, since what is behind it is unknown."""
    return _NETWORK.fullmatch(filesystem) is not None


def network_type(path: Path) -> str:
    """Return the type of the file system that a path is on, or will be on, if it is a network's; else ''."""
    found = filesystem_type(os.path.realpath(path), read_mounts())
    return found if is_network(found) else ""


def read_mounts() -> str:
    """Return the text of /proc/mounts, or '' if there is none."""
    with contextlib.suppress(OSError):
        return Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    return ""


def check_regular(path: Path, kind: str) -> None:
    """Raise LogError for a pipe, a device or a folder in place of a `kind`: to open one could block, or change it."""
    if path.exists() and not path.is_file():
        raise LogError(f"{path}: not a regular file, and so no {kind} of rolloutctl")
