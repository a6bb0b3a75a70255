"""Two real SGLang servers on the CPU, driven by posts as trainers drive them, with agents that only observe.

The driver pauses both, updates one, fails, and resumes both. Nothing of ours has anything to do with that.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from controlplane import ControlPlane
from controlplane.analysis.invariants import verify
from controlplane.record.log import RunLog
from schemas.agent_status import Observed
from schemas.config import BusConfig, ObservePolicy
from tests.engines.models import save_model, save_weights, weights
from tests.engines.servers import EngineServer, Process, begin, wait_for

pytestmark = [pytest.mark.engine_sglang, pytest.mark.timeout(480)]

COUNTED = re.compile(
    r"^(sglang:(?:num_requests|num_aborted_requests|(?:prompt|generation)_tokens)_total\S*) (\S+)$", re.M
)
"""What the engine counts of requests and their tokens."""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[EngineServer]]:
    model = save_model(tmp_path / "a", 1)
    save_weights(tmp_path / "b", weights(2))
    with ExitStack() as open_:
        both = [open_.enter_context(EngineServer("sglang", model, tmp_path, "--enable-metrics")) for _ in range(2)]
        for server in both:
            server.wait_up("/ready")
        yield both


class Onlooker(Process):
    """`rolloutctl agent --observe` beside one server."""

    def __init__(self, bus: str, folder: Path, replica: int, url: str) -> None:
        words = ["--bus", bus, "--replica", str(replica), "--engine", "sglang", "--url", url]
        words += ["--state-dir", str(folder / "state")]
        command = [sys.executable, "-m", "controlplane.cli", "agent", "--observe", *words]
        super().__init__(command, folder / f"agent-{replica}.log", {"PYTHONPATH": str(Path(__file__).parents[2])})


def post(server: EngineServer, path: str, **body: object) -> None:
    httpx.post(server.url + path, json=body, timeout=120).raise_for_status()


def held(server: EngineServer) -> tuple[object, ...]:
    """What the server says of itself, and what it has counted."""
    info, model = (httpx.get(server.url + path, timeout=30).json() for path in ("/server_info", "/model_info"))
    info.pop("internal_states")  # holds the load of this moment
    metrics = httpx.get(f"{server.url}/metrics/", follow_redirects=True, timeout=30).text
    return info, model, COUNTED.findall(metrics), httpx.get(f"{server.url}/ready", timeout=60).status_code


def test_a_torn_fleet_and_an_endless_pause_are_found_and_the_engines_are_as_they_were(
    servers: list[EngineServer], tmp_path: Path
) -> None:
    first, second = servers
    for server in servers:
        server.complete(tokens=4)  # so that there is something to count
    before = [held(server) for server in servers]
    policy = BusConfig(observe=ObservePolicy(torn_ms=1, paused_ms=1))
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=policy) as plane, ExitStack() as open_:

        def sees(*wanted: Observed) -> None:
            def statuses() -> dict[str, Observed | None]:
                lines = plane.status().agents
                return {line.agent: line.status.observed for line in lines if line.status is not None}

            expected = {f"{replica}.0": seen for replica, seen in enumerate(wanted)}
            wait_for(f"the agents see {expected}", lambda: statuses() == expected, 60)

        launched = Observed(label="default", generating=True)
        lookers = [
            open_.enter_context(Onlooker(plane.address, tmp_path, replica, server.url))
            for replica, server in enumerate(servers)
        ]
        sees(launched, launched)
        lookers[0].kill()
        assert [held(server) for server in servers] == before
        lookers[0].start()

        def under_way() -> tuple[int, int]:
            (counts,) = (line.requests for line in plane.status().agents if line.agent == "0.0")
            return ((counts.running or 0), (counts.waiting or 0)) if counts is not None else (-1, -1)

        begun = [begin("sglang", first.url, f"{number}", 600, None) for number in range(10)]
        wait_for("8 run at most, and the rest waits", lambda: sum(under_way()) == 10 and 0 < under_way()[0] <= 8, 60)
        for request in begun:
            request.end()
        wait_for("none is left", lambda: under_way() == (0, 0), 60)

        for server in servers:
            post(server, "/pause_generation", mode="abort")
        sees(Observed(label="default", generating=False), Observed(label="default", generating=False))
        post(first, "/update_weights_from_disk", model_path=str(tmp_path / "b"), weight_version="step-1")
        with pytest.raises(httpx.HTTPStatusError):
            post(second, "/update_weights_from_disk", model_path=str(tmp_path / "none"), weight_version="step-1")
        for server in servers:
            post(server, "/continue_generation")
        sees(Observed(label="step-1", generating=True), launched)
        assert first.complete() != second.complete()  # torn indeed
        post(second, "/pause_generation", mode="abort")
        sees(Observed(label="step-1", generating=True), Observed(label="default", generating=False))
        for looker in lookers:
            looker.process.terminate()
            looker.process.wait(60)
    found = {finding.invariant: finding for finding in verify(RunLog.walk(tmp_path / "run.db"))}
    assert found.keys() == {"O1", "O2"}
    assert "weights step-1 on replica 0; weights default on replica 1" in found["O1"].text
    assert found["O2"].agents == ("1.0",)
