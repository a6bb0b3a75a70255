"""Where agents keep their journals by default: on this machine's disk, one folder for each bus.

    ~/.local/state/rolloutctl/<host>/<address of the bus>/agent-0.0.journal

Two jobs of one user have two buses, and so two folders. The host is in the path because several machines may share a
home, and `127.0.0.1` is another bus on each. Agents that find the journal of an earlier run of their bus put it aside.
"""

import os
import socket
import stat
from pathlib import Path
from typing import Final
from urllib.parse import quote

from schemas.errors import ConfigError
from schemas.logs import logger_of
from schemas.storage.filesystems import network_type
from schemas.transport.addresses import is_file

LOCAL: Final = Path("/var/tmp")
"""On the machine's own disk, and kept when it restarts."""

logger = logger_of("agent")


def state_folder(bus: str) -> Path:
    """Return the folder for what the agents of one bus remember on this machine, and create it.

    It is below `$XDG_STATE_HOME`, or `~/.local/state`. If that is on a network file system, it is below `/var/tmp`, and
    a line in the log says so. Raises ConfigError.
    """
    home = _state_home()
    if filesystem := network_type(home):
        mine = LOCAL / f"rolloutctl-{os.getuid()}"
        logger.warning(
            "%s is on a network file system (%s), and a journal must be on this machine's disk: it is below %s. "
            "--state-dir (state_dir=) names another folder",
            *(home, filesystem, mine),
        )
    else:
        mine = home / "rolloutctl"
    bus = os.path.abspath(bus) if is_file(bus) else bus
    folder = mine / socket.gethostname() / quote(bus.removeprefix("tcp://"), safe=":[]@*")
    try:
        mine.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_mine(mine)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the state folder {folder} can't be made ({error.strerror}): name one with --state-dir (state_dir=)"
        ) from error
    return folder


def warn_if_network(folder: Path) -> Path:
    """Return a folder that was chosen. If it is on a network file system, a line in the log says so."""
    if filesystem := network_type(folder):
        logger.warning(
            "the state folder %s is on a network file system (%s): if another machine writes there too, or its server "
            "goes away, the agent may lose what it wrote. Choose a folder on this machine's disk",
            *(folder, filesystem),
        )
    return folder


def _state_home() -> Path:
    """As the XDG base directory specification has it; a relative path is none."""
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:  # a user without a home
        return LOCAL / f"rolloutctl-{os.getuid()}"


def _require_mine(folder: Path) -> None:
    """Raise ConfigError if others made the folder, or may write into it: `/var/tmp` is open to all users."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{folder} is not a folder that only this user writes to: remove it, or name a state folder with "
            "--state-dir (state_dir=)"
        )
