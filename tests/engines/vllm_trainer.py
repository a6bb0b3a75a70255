"""A trainer that broadcasts to a vLLM server by `VLLMSender`: `python -m tests.engines.vllm_trainer FOLDER URL BUS`.

It runs in the environment that has vLLM. What it saw goes to FOLDER/report.json (`test_vllm_broadcast.py`).
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from controlplane import ControlPlane
from controlplane.trainers.vllm_sender import VLLMSender
from schemas.commands import Broadcast
from schemas.reports import SyncReport
from schemas.safetensors.manifest import build_manifest
from tests.engines.gloo_transfer import GlooTrainerInitInfo
from tests.engines.models import weights
from tests.engines.reports import BUS
from tests.engines.servers import complete, free_port, wait_for

SEEDS = {"a": 1, "b": 2, "c": 3}


class Trainer:
    """The trainer's end, and a look at the server beside it."""

    def __init__(self, folder: Path, url: str, plane: ControlPlane) -> None:
        self.folder, self.url, self.plane, self.groups = folder, url, plane, 0

    def group(self, path: str = "") -> Broadcast:
        self.groups += 1
        place = {"host": "127.0.0.1", "port": free_port(), "group": f"weights-{self.groups}"}
        return Broadcast(**place, replicas=(0,), backend="gloo", path=path)  # type: ignore[arg-type]

    def sender(self, source: Broadcast, name: str, breaks_after: int = 0) -> VLLMSender:
        init = partial(GlooTrainerInitInfo, breaks_after=breaks_after)
        return VLLMSender(source, lambda: weights(SEEDS[name]), init_info=init)

    def sync(self, name: str, source: Broadcast, sender: VLLMSender) -> SyncReport:
        manifest = build_manifest(self.folder / name, content=False)
        return self.plane.sync_weights(None, source, manifest=manifest, send=sender, timeout=60).wait()

    def tokens(self) -> list[int]:
        return complete("vllm", self.url, "hello", 8, str(self.folder / "a"))

    def seen(self) -> dict[str, Any]:
        """What the server says of itself, without a request for tokens."""
        checked = httpx.post(f"{self.url}/weight_checker", json={"action": "checksum"}, timeout=60)
        paused = httpx.get(f"{self.url}/is_paused", timeout=60).json()["is_paused"]
        health = httpx.get(f"{self.url}/health", timeout=60).status_code
        label = httpx.get(f"{self.url}/weight_info", timeout=60).json()["weight_version"]
        return {"checker": checked.status_code, "paused": paused, "health": health, "label": label}

    def idle(self) -> None:
        """Wait until the agent has ended what it does."""

        def done() -> bool:
            (line,) = self.plane.status().agents
            return line.status is not None and line.status.activity is None and not line.status.queued

        wait_for("the agent is done", done)


def main(folder: Path, url: str, bus: str) -> None:
    found: dict[str, Any] = {}
    with ControlPlane(bus, log=folder / "run.db", config=BUS, checkpoints=folder) as plane:
        plane.wait_for_agents(1, timeout=300).wait()
        trainer = Trainer(folder, url, plane)
        found["launched"] = trainer.tokens()

        first = trainer.group()
        sender = trainer.sender(first, "b")
        found["sent"] = trainer.sync("b", first, sender).status, trainer.tokens(), trainer.seen()
        found["again"] = trainer.sync("b", first, sender).status, trainer.tokens(), trainer.seen()

        torn = trainer.group()
        report = trainer.sync("c", torn, trainer.sender(torn, "c", breaks_after=30))
        trainer.idle()
        found["torn"] = report.status, report.reason, trainer.seen()

        whole = trainer.group(path="c")
        found["healed"] = trainer.sync("c", whole, trainer.sender(whole, "c")).status, trainer.tokens(), trainer.seen()

        torn = trainer.group()
        report = trainer.sync("a", torn, trainer.sender(torn, "a", breaks_after=30))
        plane.wait_for_agents(1, timeout=60).wait()
        found["back"] = report.status, trainer.tokens(), trainer.seen()
    (folder / "report.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
