"""The script `rolloutctl`. Ctrl-C ends it also while the command line is imported, when nothing is open yet."""

import os
import signal
from typing import Final

_INTERRUPTED: Final = 130
"""Exit code, as `interrupt` has it, which is not imported yet."""


def main() -> None:
    """Entry point. Exits the process."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from controlplane.cli.__main__ import main as run_command_line

    run_command_line()
