"""What an agent that launches an SGLang asks: the bus for a server whose weights can be copied, then that server."""

from pathlib import Path

import anyio
import pytest

from controlplane import ControlPlane
from controlplane.cli.agent import _with_peer
from schemas.identity import Identity
from tests.engines.http_servers import HttpServer
from tests.processes.test_agent_process import CALM, Node

COMMAND = ("serve", "--load-format", "remote_instance")


def test_a_launch_has_the_address_of_a_server_that_serves_and_is_alike_and_none_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info, status = {"version": "0.5.23", "tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1}, 200

    def added() -> tuple[str, ...]:
        """What is added to the command of replica 1."""
        caplog.clear()
        full, found = anyio.run(_with_peer, COMMAND, Identity(replica=1, node_rank=0), bus, None)
        assert full[: len(COMMAND)] == COMMAND and bool(found.url) == (full != COMMAND)
        return full[len(COMMAND) :]

    light = ("--engine", "tests.unit.small_bus:Engine")
    with (
        HttpServer(lambda request: (status, info)) as server,
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=CALM) as plane,
    ):
        bus = plane.address
        caplog.set_level("INFO", "rolloutctl.agent")
        assert added() == () and "reads a checkpoint, since none can be copied now" in caplog.text
        with Node(plane.address, tmp_path, "0", 0, "--nnodes", "1", *light, "--worker-url", server.url):
            plane.wait_for_agents(1, timeout=120).wait()
            assert server.url.rpartition(":")[2] in added() and not caplog.text
            assert server.requests[-1].path == "/server_info" and server.requests[-1].token is None
            info["tp_size"] = 2
            assert added() == () and "reads a checkpoint: weights are copied over http" in caplog.text
            status = 401
            assert added() == () and "reads a checkpoint: " in caplog.text and "401" in caplog.text
    bus = "tcp://127.0.0.1:1"
    assert added() == () and "reads a checkpoint: nothing listens at" in caplog.text
