"""The gateway's HTTP server: what streams through, who may come in, what is bounded, and profiling by hand."""

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from controlplane.cli.gateway import gateway as command
from controlplane.plane import ControlPlane
from controlplane.record.invariants import verify
from controlplane.record.log import RunLog
from controlplane.trainers.gateway.service import BODY_BYTES_MAX, Gateway
from schemas.errors import AddressInUse, ConfigError
from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from tests.running import started
from tests.trainers.gateway_fleet import GatewayFleet, digest_of, gateway_fleet, on_a_thread
from tests.trainers.posting_trainers import HTTP

BIG = b"x" * (BODY_BYTES_MAX + 1)


def echo(request: HttpRequest) -> Reply:
    return 200, request.body


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with HttpServer(echo) as server:
        yield server


@contextmanager
def gateway(folder: Path, engine: str = "", **options: Any) -> Iterator[Gateway]:
    """One for one replica, without agents."""
    with ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", checkpoints=folder) as plane:
        served = Gateway(plane, replicas=1, checkpoints=folder, engines=[engine] if engine else [], **options)
        with on_a_thread(served.serve):
            yield served


class Slow:
    """An engine that answers in two chunks, the second when a test says so, and that sees its client go."""

    def __init__(self) -> None:
        self.go_on, self.client_gone = threading.Event(), threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._listening.accept()
        with closing(self._listening), connection:
            while b"\r\n\r\n" not in connection.recv(65536):
                pass
            connection.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            connection.sendall(b"5\r\nfirst\r\n")
            connection.settimeout(0.01)
            while not self.go_on.is_set():
                try:
                    if connection.recv(1) == b"":
                        self.client_gone.set()
                        return
                except TimeoutError:
                    pass
            connection.sendall(b"4\r\nlast\r\n0\r\n\r\n")


def test_tokens_stream_through_as_they_come(tmp_path: Path) -> None:
    slow = Slow()
    with (
        gateway(tmp_path, slow.url) as served,
        HTTP.stream("POST", f"{served.base_urls()[0]}/generate", json={}, timeout=20) as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream"
        pieces = answer.iter_raw()
        assert next(pieces) == b"first"
        slow.go_on.set()
        assert b"".join(pieces) == b"last"


def test_a_request_whose_client_has_gone_is_given_up_at_the_engine(tmp_path: Path) -> None:
    slow = Slow()
    with gateway(tmp_path, slow.url) as served:
        with HTTP.stream("POST", f"{served.base_urls()[0]}/generate", json={}, timeout=20) as answer:
            assert next(answer.iter_raw()) == b"first"
        assert slow.client_gone.wait(20)


def test_what_is_passed_on_has_no_limit_and_keeps_its_query_and_status(tmp_path: Path, server: HttpServer) -> None:
    with gateway(tmp_path, server.url) as served:
        answer = HTTP.post(f"{served.base_urls()[0]}/generate?a=1&b=%20", content=BIG, timeout=20)
        assert (answer.status_code, answer.content) == (200, BIG)
        assert server.requests[0].path == "/generate?a=1&b=%20"
        assert HTTP.get(f"{served.base_urls()[0]}/server_info").status_code == 200


def test_a_post_that_is_answered_here_is_bounded_and_must_be_json(tmp_path: Path, server: HttpServer) -> None:
    with gateway(tmp_path, server.url) as served:
        url = served.base_urls()[0]
        assert HTTP.post(f"{url}/update_weights", content=BIG).status_code == 413
        for content in (b"{", b"[1]", b"\xff\xfe"):
            answer = HTTP.post(f"{url}/update_weights", content=content)
            assert answer.status_code == 400 and "JSON" in answer.json()["message"]
        assert server.requests == []


@pytest.mark.parametrize(
    "path", ["/shutdown", "/replica/0/shutdown", "/replica/7/pause", "/replica/-1/pause", "/pause"]
)
def test_an_unknown_route_or_replica_is_refused_and_not_passed_on(
    tmp_path: Path, server: HttpServer, path: str
) -> None:
    with gateway(tmp_path, server.url) as served:
        answer = HTTP.post(f"{served.url}{path}", json={})
        assert answer.status_code == 400 and "is refused" in answer.json()["message"]
        assert server.requests == []


def test_a_dead_engine_is_a_502_and_no_engine_at_all_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    (tmp_path / "a").mkdir()
    with gateway(tmp_path / "a", f"http://127.0.0.1:{port}") as served:
        answer = HTTP.post(f"{served.base_urls()[0]}/generate", json={})
        assert answer.status_code == 502 and f"127.0.0.1:{port}" in answer.json()["message"]
    (tmp_path / "b").mkdir()
    with gateway(tmp_path / "b") as served:
        answer = HTTP.get(f"{served.base_urls()[0]}/v1/models")
        assert answer.status_code == 400 and "--engine URL" in answer.json()["message"]


def test_a_fleet_without_agents_is_unhealthy_and_an_update_is_answered(tmp_path: Path, server: HttpServer) -> None:
    with gateway(tmp_path, server.url) as served:
        url = served.base_urls()[0]
        assert HTTP.get(f"{url}/health").status_code == 503
        missing = HTTP.post(f"{url}/update_weights", json={"weight_dir": str(tmp_path / "step_1")})
        assert missing.status_code == 409 and "step_1" in missing.json()["message"]
        assert HTTP.post(f"{url}/resume").status_code == 200
        assert HTTP.post(f"{url}/flush_cache").status_code == 503


def test_with_a_token_only_its_holders_come_in_and_the_engine_does_not_see_it(
    tmp_path: Path, server: HttpServer
) -> None:
    with gateway(tmp_path, server.url, host="0.0.0.0", token="letmein", engine_key="engines") as served:
        url = f"http://127.0.0.1:{served.url.rpartition(':')[2]}/replica/0"
        for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "letmein"}):
            assert HTTP.post(f"{url}/generate", json={}, headers=headers).status_code == 401
        assert server.requests == []
        good = {"authorization": "Bearer letmein"}
        assert HTTP.post(f"{url}/generate", json={}, headers=good).status_code == 200
        assert [request.token for request in server.requests] == ["engines"]
        workers = HTTP.get(f"{url.removesuffix('/replica/0')}/workers", headers=good).json()
        assert workers == {"workers": [{"url": url}]}


def test_an_address_that_others_can_reach_needs_a_token_and_a_used_port_is_named(tmp_path: Path) -> None:
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db") as plane:
        with pytest.raises(ConfigError, match="Give a token file"):
            Gateway(plane, replicas=1, checkpoints=tmp_path, host="0.0.0.0")
        with pytest.raises(ConfigError, match="name one for each"):
            Gateway(plane, replicas=2, checkpoints=tmp_path, engines=["http://127.0.0.1:1"])
        with socket.create_server(("127.0.0.1", 0)) as used:
            port = used.getsockname()[1]
            with pytest.raises(AddressInUse, match=str(port)):
                Gateway(plane, replicas=1, checkpoints=tmp_path, port=port)


# --- with agents ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[GatewayFleet]:
    with gateway_fleet(tmp_path, moment_s=0.05) as made:
        yield made


def test_a_trainer_that_asks_one_replica_moves_the_whole_fleet(fleet: GatewayFleet) -> None:
    body = {"model_path": str(fleet.write("v1", 1))}
    answer = HTTP.post(f"{fleet.urls[1]}/update_weights_from_disk", json=body, timeout=30)
    assert answer.status_code == 200 and "committed" in answer.json()["message"]
    assert fleet.digests() == [digest_of(1)] * 2
    late = HTTP.post(f"{fleet.urls[0]}/update_weights_from_disk", json=body, timeout=30)
    assert late.json() == answer.json() and len(fleet.syncs()) == 1


def test_a_fleet_is_profiled_by_hand_as_slime_does(fleet: GatewayFleet) -> None:
    """`tools/profile_rollout.py` of slime, 624b824a8: the workers of a router, then one after the other."""
    workers = HTTP.get(f"{fleet.gateway.url}/workers").json()["workers"]
    payload = {
        **{"output_dir": "/tmp/sglang_profile", "num_steps": 3, "activities": ["CPU"]},
        **{"profile_by_stage": False, "with_stack": False, "record_shapes": False},
    }
    for replica, worker in enumerate(workers):  # torch has one profiler in a process, and both engines are in this one
        answer = HTTP.post(f"{worker['url']}/start_profile", json=payload, timeout=30)
        answer.raise_for_status()
        assert f"/replica_{replica}" in answer.json()["message"]
        fleet.generates_on()
        HTTP.post(f"{worker['url']}/stop_profile", json={}, timeout=30).raise_for_status()
    (step,) = (fleet.folder / "traces").iterdir()
    assert sorted(path.parent.name for path in step.glob("*/*.json*")) == ["replica_0", "replica_1"]


def test_a_profile_that_the_engine_cannot_record_is_a_500_with_its_reason(fleet: GatewayFleet) -> None:
    answer = HTTP.post(f"{fleet.urls[0]}/start_profile", json={"activities": ["GPU"]}, timeout=30)
    assert answer.status_code == 500 and "cuda" in answer.json()["message"]
    assert HTTP.post(f"{fleet.urls[1]}/stop_profile", timeout=30).status_code == 400


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    words = ("-m", "controlplane.cli", "gateway", "--bus", "tcp://127.0.0.1:0", "--listen", "127.0.0.1:0", "--ports")
    with started(*words, "--replicas", "2", "--log", tmp_path / "run.db", cwd=tmp_path) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        urls = [line.partition(": ")[2].strip() for line in lines[1:]]
        assert "agents connect to tcp://127.0.0.1:" in lines[0] and len(set(urls)) == 2
        answer = HTTP.post(f"{urls[1]}/pause", json={})
        assert answer.status_code == 200 and answer.json()["success"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert list(verify(RunLog.read(tmp_path / "run.db"))) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--engine URL"),
        (("--replicas", "1", "--listen", "8400"), "HOST:PORT"),
        (("--replicas", "1", "--listen", "0.0.0.0:0"), "without a token"),
        (("--replicas", "2", "--engine", "http://127.0.0.1:1"), "name one for each"),
        (("--engine", "node0:8000"), "must begin with http://"),
    ],
)
def test_bad_options_are_one_clear_line(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    everywhere = ["--bus", "tcp://127.0.0.1:0", "--log", str(tmp_path / "run.db")]
    error = CliRunner().invoke(command, [*everywhere, *options]).exception
    assert isinstance(error, ConfigError) and says in str(error) and "\n" not in str(error)


def test_without_its_extra_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.cli.gateway.find_spec", lambda name: None)
    error = CliRunner().invoke(command, ["--replicas", "1", "--log", str(tmp_path / "run.db")]).exception
    assert isinstance(error, ConfigError) and "rolloutctl[gateway]" in str(error)
