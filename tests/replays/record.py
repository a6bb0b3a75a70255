"""Makes the recorded runs of this folder anew: `python -m tests.replays.record`. For when decisions change on purpose.

trained.db      a short training run: two replicas of two nodes, a sync each step, two profiled steps
killed.db       the same, with one agent killed in the middle and started again
torn-fleet.db   a sync that one of two replicas could not load, and the sync that healed it
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio

from tests.engines.test_torn_fleet import fleet, spoil

HERE = Path(__file__).parent


def record_demo(folder: Path, *options: str) -> Path:
    """The log of a short demo."""
    command = [sys.executable, "-m", "controlplane.cli", "demo", "--out", str(folder), "--steps", "6", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "run.db"


async def record_torn_fleet(folder: Path) -> Path:
    """The log of a fleet that was torn and healed."""
    async with fleet(folder) as torn:
        spoil(torn, "cut off")
        assert (await torn.sync(2, quorum=1)).quarantined == (1,)
        torn.write(3, 0, 1)
        assert (await torn.sync(3)).quarantined == ()
    return folder / "run.db"


def main() -> None:
    """Record all of them."""
    with tempfile.TemporaryDirectory(prefix="rolloutctl-") as made:
        folder = Path(made)
        (folder / "torn").mkdir()
        logs = {
            "trained": record_demo(folder / "trained"),
            "killed": record_demo(folder / "killed", "--fault", "kill-agent"),
            "torn-fleet": anyio.run(record_torn_fleet, folder / "torn"),
        }
        for name, log in logs.items():
            shutil.copy(log, HERE / f"{name}.db")


if __name__ == "__main__":
    main()
