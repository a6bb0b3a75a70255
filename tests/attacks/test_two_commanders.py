"""Two agents for one engine: the first was cut off from the bus, and its successor commands the engine.

The suite has the decisions (tests/unit/test_commanders.py), and real shells under a virtual clock (tests/simulation).
"""

import re
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from controlplane import ControlPlane
from controlplane.analysis.invariants import verify
from controlplane.record.log import RunLog
from schemas.commands import Checkpoint
from schemas.config import BusConfig
from tests.attacks.proxy import HOST, proxied
from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from tests.engines.releases import save_tensor
from tests.engines.servers import AgentProcess
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.attacks]


class VLLM:
    """The control routes of a vLLM 0.32 in dev mode. It counts what it is asked to do, and by which connections.

    Attributes:
        made: Names of the calls that changed it, in order; loads with their folder.
        seen: Times that its label was read.
        broken: What no engine survives.
    """

    POSTS = ("pause", "resume", "abort_requests", "reset_prefix_cache", "collective_rpc", "update_weight_version")

    def __init__(self, model: Path) -> None:
        self.model, self.label, self.paused = model, "default", False
        self.made: list[str] = []
        self.seen = 0
        self.broken: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, request: HttpRequest) -> Reply:
        with self._lock:
            return self._answer(urlsplit(request.path).path, request)

    def _answer(self, path: str, request: HttpRequest) -> Reply:
        mode = parse_qs(urlsplit(request.path).query).get("mode", ["abort"])[0]
        match path:
            case "/openapi.json":
                posts: dict[str, Any] = {
                    f"/{name}": {"post": {}} for name in (*self.POSTS, "init_weight_transfer_engine")
                }
                posts["/pause"] = {"post": {"parameters": [{"name": "mode", "in": "query"}]}}
                return 200, {"paths": {**posts, "/is_paused": {"get": {}}, "/weight_info": {"get": {}}}}
            case "/version":
                return 200, {"version": "0.32.0"}
            case "/server_info":
                config = {"instance_id": "one", "model_config": {"model": str(self.model)}}
                return 200, {"vllm_config": config | {"parallel_config": {"world_size": 1, "data_parallel_size": 1}}}
            case "/is_paused":
                return 200, {"is_paused": self.paused}
            case "/weight_info":
                self.seen += 1
                return 200, {"weight_version": self.label}
            case "/pause" if mode not in ("abort", "wait", "keep"):
                return 400, {"error": {"message": "{'type': 'literal_error', 'loc': 'query.mode'}"}}
            case "/pause" | "/resume":
                self.paused = path == "/pause"
                self.made.append(path[1:])
                return 200, {"status": path[1:]}
            case "/collective_rpc":
                folder = Path(msgspec.json.decode(request.body)["kwargs"]["weights_path"]).name
                self.made.append(f"load {folder}")
                if not self.paused:
                    self.broken.append(f"{folder} was loaded while it generates")
                return 200, {"results": [None]}
            case "/update_weight_version":
                self.label = msgspec.json.decode(request.body)["new_version"]
                return 200, {}
            case "/reset_prefix_cache":
                return 200, {"success": True}
        return 404, {}


@pytest.mark.parametrize(
    ("on_lost_bus", "lease_ms"),
    [("serve", 3_000), ("serve", 9_000), ("pause", 9_000)],  # a lease of 9 s ends after the sync
)
@pytest.mark.timeout(180)
async def test_an_agent_that_is_cut_off_leaves_its_engine_to_its_successor(
    tmp_path: Path, on_lost_bus: str, lease_ms: int
) -> None:
    config = BusConfig(
        head_interval_ms=50, heartbeat_ms=100, agent_timeout_ms=2_000, retransmit_ms=200, lease_ms=lease_ms
    )
    engine = VLLM(save_tensor(tmp_path / "model"))
    for version in (1, 2, 3):
        save_tensor(tmp_path / f"v{version}")
    with HttpServer(engine) as server:
        async with ControlPlane(
            "tcp://127.0.0.1:0", log=tmp_path / "run.db", config=config, checkpoints=tmp_path
        ) as plane:
            control, publish = int(plane.address.rpartition(":")[2]), plane.bus.state.settings.publish_port
            assert publish is not None
            options = ("--engine", "vllm", "--url", server.url, "--checkpoints", str(tmp_path))
            far = f"tcp://{HOST}:{control}"
            async with proxied(control, publish) as proxy:
                (tmp_path / "old").mkdir()
                (tmp_path / "new").mkdir()
                with AgentProcess(far, tmp_path / "old", "0.0", 1, *options, "--on-lost-bus", on_lost_bus) as old:
                    await plane.wait_for_agents(1, timeout=60)
                    (await plane.sync_weights(1, Checkpoint("v1"), timeout=20)).raise_for_failures()
                    proxy.silent |= {control, publish}
                    await until(lambda: plane.status().agents[0].state == "gone")
                    with AgentProcess(plane.address, tmp_path / "new", "0.0", 1, *options):
                        await plane.wait_for_agents(1, timeout=60)
                        (await plane.sync_weights(2, Checkpoint("v2"), timeout=20)).raise_for_failures()
                        await until(lambda: "commands its engine no more" in old.output)
                        assert re.search(  # it may have looked in the middle of its successor's sync
                            r"agent 0\.0 commands its engine no more: something else has changed it since the bus was "
                            r"last heard\. .* The engine (holds weights labelled '2', which are not those of version 1 "
                            r"and is running|.*is paused)\.",
                            old.output,
                        ), old.output
                        made, looked = list(engine.made), engine.seen
                        await until(lambda: engine.seen > looked + 6)  # three observations of each
                        assert (engine.label, engine.paused, engine.made) == ("2", False, made)
                        (await plane.sync_weights(3, Checkpoint("v3"), timeout=20)).raise_for_failures()
                        looked = engine.seen
                        await until(lambda: engine.seen > looked + 6)
                        assert (engine.label, engine.paused) == ("3", False)
                        loads = [call for call in engine.made if "load" in call]
                        assert loads[0] == loads[1], "a successor without a journal takes no label for a version"
                        assert loads[1:] == ["load v1", "load v2", "load v3"]
                        assert engine.broken == []
                        proxy.silent.clear()
                        proxy.cut(control)
                        await until(lambda: old.process.poll() is not None)
                        assert "is running as incarnation" in old.output.splitlines()[-1]
    assert list(verify(RunLog.read(tmp_path / "run.db"))) == []
