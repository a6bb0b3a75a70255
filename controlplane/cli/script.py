"""The script `rolloutctl`."""

from controlplane.cli.__main__ import main as main
