"""A trainer that may go on on another machine. Beside its log it shares one folder with its agents.

    moving_trainer.py SHARED PORT LEASE_MS [hang]

It prints the agents that its log knows, a line once the fleet serves, and one for each sync. With `hang`, it has no log
yet, and stays in the middle of the last sync.
"""

import json
import sys
import threading
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from controlplane import BusConfig, ControlPlane
from schemas.storage import record_copy

# A killed writer of the log's copy is watched for a fifth of the time that users wait.
vars(record_copy).update(WATCH_S=2.0, TOUCH_S=0.4)
SHARED, PORT, LEASE_MS, HANGS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), "hang" in sys.argv
CONFIG = BusConfig(
    log_copy=str(SHARED / "log"),
    address_file=str(SHARED / "bus"),
    heartbeat_ms=500,
    agent_timeout_ms=4000,
    lease_ms=LEASE_MS,
)


def say(**what: object) -> None:
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


def hang(_: object) -> None:
    say(loading=True)
    threading.Event().wait()


address = f"tcp://0.0.0.0:{PORT}"
with ControlPlane(address, log="run.db", run="auto", config=CONFIG, checkpoints=SHARED, insecure=True) as plane:
    if not HANGS:
        say(known=[agent.agent for replica in plane.status().replicas.values() for agent in replica.agents])
    plane.wait_for_agents(2, timeout=90).wait()
    epoch, before = plane.bus.state.epoch, plane.serving()
    say(epoch=epoch, serving=before)
    for step in (1, 2):
        name = f"weights-{epoch}-{step}"
        (SHARED / name).mkdir()
        save_file({"w": numpy.full(4, 10.0 * epoch + step)}, SHARED / name / "model.safetensors")
        report = plane.sync_weights(None, name, send=hang if HANGS and step == 2 else None).wait()
        report.raise_for_failures()
        say(version=report.version, serving=plane.serving())
