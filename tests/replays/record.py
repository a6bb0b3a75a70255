"""Makes the recorded runs of this folder anew: `python -m tests.replays.record`. For when decisions change on purpose.

trained.db      a short training run: two replicas of two nodes, a sync each step, two profiled steps
killed.db       the same, with one agent killed in the middle and started again
torn-fleet.db   a sync that one of two replicas could not load, and the sync that healed it
all-must.db     twelve syncs of three replicas that must all load, with slow and failing loads
one-must.db     the same, where one replica is enough
died.db         twelve syncs; an agent dies in the load of the fourth, with its engine
stood-still.db  twelve syncs; an agent stands still in the load of the fourth, and is given up
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio

from controlplane import BusConfig, ControlPlane
from controlplane.staging import StagingFleet
from tests.engines.test_torn_fleet import fleet, spoil
from workers.engines.tiny.model import TinyConfig, TinyModel, save

HERE = Path(__file__).parent
STEPS = 12
QUICK = BusConfig(head_interval_ms=100, heartbeat_ms=200, agent_timeout_ms=2_000)
SLOW = """
[[fault]]
name = "slow loads"
what = "slow"
call = "load"
seconds = 0.4
times = 0
"""
FAILING = """
seed = 5

[[fault]]
name = "slow loads"
what = "slow"
call = "load"
seconds = 0.4
rate = 0.5
times = 0

[[fault]]
name = "slow pauses of one replica"
what = "slow"
call = "pause"
seconds = 0.2
replicas = [1]
rate = 0.5
times = 0

[[fault]]
name = "loads that fail"
what = "refuse"
call = "load"
replicas = [2]
rate = 0.3
times = 0
"""
DEATH = """
[[fault]]
name = "dies, with its engine"
what = "kill_agent"
replicas = [1]
version = 4
phase = "load"
after_s = 0.2
"""
STOP = """
[[fault]]
name = "stands still"
what = "stop_agent"
replicas = [1]
version = 4
phase = "load"
after_s = 0.2
seconds = 4.0
"""


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


def record_syncs(folder: Path, faults: str, quorum: int, config: BusConfig | None = None) -> Path:
    """The log of three replicas that are synced on a game day. After the fifth sync the trainer waits for all."""
    folder.mkdir()
    save(TinyModel(TinyConfig()), folder / "weights")
    with (
        StagingFleet(folder, 3, faults, folder) as fleet,
        ControlPlane(fleet.bus, log=folder / "run.db", checkpoints=folder, config=config) as plane,
    ):
        plane.wait_for_agents(3, timeout=100).wait()
        for _ in range(STEPS):
            if plane.sync_weights(None, "weights", quorum=quorum).wait().version == 5:
                plane.wait_for_agents(3, timeout=100).wait()
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
            "all-must": record_syncs(folder / "all", FAILING, 3),
            "one-must": record_syncs(folder / "one", FAILING, 1),
            "died": record_syncs(folder / "died", SLOW + DEATH, 1),
            "stood-still": record_syncs(folder / "still", SLOW + STOP, 1, QUICK),
        }
        for name, log in logs.items():
            shutil.copy(log, HERE / f"{name}.db")


if __name__ == "__main__":
    main()
