"""`rolloutctl sync`: an operator brings a fleet of real engines to a checkpoint, or is told why not."""

import json
import re
import threading
from pathlib import Path
from subprocess import CompletedProcess

import anyio
import pytest

from controlplane import ControlPlane
from controlplane.bus.key_folder import KeyFolder
from controlplane.bus.operator import sync as ask_sync
from controlplane.cli.replay_log import replay_log
from controlplane.record.log import RunLog
from schemas.errors import CommandError
from schemas.transport.keys import KeySource
from tests.engines.tiny_lora import lora
from tests.processes.test_agent_process import CALM, Node
from tests.running import typed
from workers.engines.tiny.model import TinyConfig, TinyModel, digest, save, save_adapter, weights
from workers.engines.tiny.server import TinyClient


def test_the_fleet_is_brought_to_a_checkpoint_by_hand(tmp_path: Path) -> None:
    models = {name: TinyModel(TinyConfig(), seed) for name, seed in (("first", 1), ("second", 2))}
    for name, model in models.items():
        save(model, tmp_path / name)
    (tmp_path / "empty").mkdir()
    folder, log = KeyFolder(tmp_path / "keys"), tmp_path / "run.db"
    folder.make_server()
    node, ops, eye = (folder.add(role, role, ()) for role in ("agent", "operator", "observer"))
    plane = ControlPlane("tcp://127.0.0.1:0", log=log, config=CALM, checkpoints=tmp_path, keys=folder.path)
    engine = f"ipc://{tmp_path}/e"

    def sync(*words: str) -> CompletedProcess[str]:
        return typed("sync", "--bus", plane.address, "--key", ops, *words)

    with plane:
        alone = sync("first", "--json")
        assert alone.returncode == 1 and json.loads(alone.stdout)["status"] == "aborted"
        assert alone.stderr.startswith("rolloutctl: no agent has joined this run")
        with Node(plane.address, tmp_path, 0, 0, "--key", str(node), "--serve", engine):
            plane.wait_for_agents(1, timeout=60).wait()
            before = plane.status().seq
            for path, key, says in (
                ("first", eye, "key observer is for observers, and may not sync weights"),
                ("empty", ops, "empty"),
                ("../first", ops, "holds `..`"),
                (str(tmp_path / "first"), ops, "is not relative"),
            ):
                with pytest.raises(CommandError, match=re.escape(says)):
                    anyio.run(ask_sync, plane.address, path, None, 60.0, KeySource.find(key))
            refused = sync("third")
            assert (refused.returncode, refused.stdout) == (3, "")
            assert refused.stderr.startswith(f"rolloutctl: the bus at {plane.address} refused: ")
            assert "third" in refused.stderr and len(refused.stderr.splitlines()) == 1
            assert plane.status().seq == before, "nothing was sent"
            done = sync("first")
            assert done.returncode == 0 and done.stdout.startswith("weights v2 committed on replica 0"), done
            held = TinyClient(engine).describe()
            assert (held.version, held.digest) == (2, digest(weights(models["first"])))
            sending, asked = threading.Event(), threading.Event()

            def send(_: tuple[int, ...]) -> None:
                sending.set()
                asked.wait(60)
                raise RuntimeError("no group")

            opened = plane.sync_weights(None, "second", send=send)
            assert sending.wait(20)
            busy = sync("first")
            assert busy.returncode == 3 and re.search("a sync to version 3 is in its (load|commit) phase", busy.stderr)
            asked.set()
            assert opened.wait().status == "aborted"
            counted = sync("--version", "9", "second", "--json")
            assert counted.returncode == 0 and json.loads(counted.stdout)["version"] == 9
            assert TinyClient(engine).describe().digest == digest(weights(models["second"]))
            stale = sync("--version", "8", "second")
            assert stale.returncode == 1 and stale.stdout.startswith("weights v8 stale")
            assert plane.sync_weights(None, "first").wait().version == 10, "the trainer goes on above it"
    assert "all are the same" in str(replay_log(RunLog.read(log)))
    shown = typed("log", "show", log).stdout
    assert "asked by an operator for a sync to the next version from first" in shown
    assert "asked for a sync to v10 from first" in shown


def test_an_adapter_is_synced_shown_and_dropped_by_hand(tmp_path: Path) -> None:
    for number in (1, 2):
        save_adapter(lora(number), 1.0, tmp_path / f"adapters/step_{number}")
    with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=CALM, checkpoints=tmp_path) as plane,
        Node(plane.address, tmp_path, 0, 0),
    ):

        def at_bus(*words: str) -> CompletedProcess[str]:
            return typed(words[0], "--bus", plane.address, *words[1:])

        plane.wait_for_agents(1, timeout=60).wait()
        for number in (1, 2):
            done = at_bus("sync", "--adapter", "policy", f"adapters/step_{number}")
            assert done.returncode == 0 and done.stdout.startswith(f"adapter policy v{number} committed on replica 0")
            assert f"adapter policy v{number} (policy-v{number}) on replica 0" in at_bus("status").stdout.splitlines()
        again = at_bus("sync", "--adapter", "policy", "adapters/step_1")
        assert again.returncode == 3 and "Write each version to a directory of its own" in again.stderr
        (served,) = json.loads(at_bus("status", "--json").stdout)["adapters"]
        assert (served["model"], served["path"], served["replicas"]) == ("policy-v2", "adapters/step_2", [0])
        assert at_bus("drop-adapter", "policy").returncode == 0
        assert "\nadapter " not in at_bus("status").stdout and plane.adapters() == {}
