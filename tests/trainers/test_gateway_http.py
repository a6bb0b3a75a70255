"""The gateway's HTTP server: what streams through, which clients come in, what is bounded, and what it waits for."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from controlplane.analysis.invariants import verify
from controlplane.cli.gateway import gateway as command
from controlplane.machine.events import OnUnreachable, SyncRequested
from controlplane.plane import ControlPlane
from controlplane.record.log import RunLog
from controlplane.trainers.gateway import service
from controlplane.trainers.gateway.service import BODY_BYTES_MAX, Gateway
from schemas.errors import AddressInUse, ConfigError, ExtraMissing
from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from tests.pages import blocks
from tests.running import environment, started
from tests.trainers.gateway_fleet import GatewayFleet, digest_of, gateway_fleet, on_a_thread
from tests.trainers.posting_trainers import HTTP
from tests.waiting import wait_until

BIG = b"x" * (BODY_BYTES_MAX + 1)


def echo(request: HttpRequest) -> Reply:
    return 200, request.body


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with HttpServer(echo) as server:
        yield server


@contextmanager
def gateway(folder: Path, engine: str = "", **options: Any) -> Iterator[Gateway]:
    """One for one replica, without agents: it waits for them for a moment only."""
    with ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", checkpoints=folder) as plane:
        served = Gateway(
            plane, replicas=1, checkpoints=folder, engines=[engine] if engine else [], timeout_s=0.2, **options
        )
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
        HTTP.stream("POST", f"{served.base_urls()[0]}/tokenize", json={}, timeout=20) as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream"
        pieces = answer.iter_raw()
        assert next(pieces) == b"first"
        slow.go_on.set()
        assert b"".join(pieces) == b"last"


def test_a_request_whose_client_has_gone_is_given_up_at_the_engine(tmp_path: Path) -> None:
    slow = Slow()
    with gateway(tmp_path, slow.url) as served:
        with HTTP.stream("POST", f"{served.base_urls()[0]}/tokenize", json={}, timeout=20) as answer:
            assert next(answer.iter_raw()) == b"first"
        assert slow.client_gone.wait(20)


def test_what_is_passed_on_has_no_limit_and_keeps_its_query_and_status(tmp_path: Path, server: HttpServer) -> None:
    with gateway(tmp_path, server.url) as served:
        answer = HTTP.post(f"{served.base_urls()[0]}/tokenize?a=1&b=%20", content=BIG, timeout=20)
        assert (answer.status_code, answer.content) == (200, BIG)
        assert server.requests[0].path == "/tokenize?a=1&b=%20"
        assert HTTP.get(f"{served.base_urls()[0]}/version").status_code == 200


def test_what_a_server_says_of_itself_has_the_address_of_the_gateway_and_the_query_and_key_of_the_client(
    tmp_path: Path,
) -> None:
    info = {"host": "0.0.0.0", "port": 30000, "tp_size": 2}
    with HttpServer(lambda _: (200, info)) as engine, gateway(tmp_path, engine.url) as served:
        url = f"{served.base_urls()[0]}/server_info?config_format=json"
        answer = HTTP.get(url, headers={"authorization": "Bearer of-the-engine"}).json()
        assert answer == {"host": "127.0.0.1", "port": int(served.url.rpartition(":")[2]), "tp_size": 2}
        (request,) = engine.requests
        assert (request.path, request.token) == ("/server_info?config_format=json", "of-the-engine")


def test_a_server_is_asked_for_its_model_once_and_with_the_key_of_the_client(tmp_path: Path) -> None:
    with (
        HttpServer(lambda _: (200, {"data": [{"id": "m"}, {"id": "adapter"}]})) as engine,
        gateway(tmp_path, engine.url) as served,
    ):
        for _ in range(2):
            headers = {"authorization": "Bearer of-the-engine"}
            (row,) = HTTP.get(f"{served.url}/v1/rl/workers", headers=headers).json()["workers"]
            assert (row["model"], row["health"], row["error"]) == ("m", "not_ready", "no agent has joined there")
            assert row["routes"] == [] and not row.keys() & {"admin_base_url", "world_size"}  # as in a Dynamo
        (request,) = engine.requests
        assert (request.path, request.token) == ("/v1/models", "of-the-engine")


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
        answer = HTTP.post(f"{served.base_urls()[0]}/tokenize", json={})
        assert answer.status_code == 502 and f"127.0.0.1:{port}" in answer.json()["message"]
    (tmp_path / "b").mkdir()
    with gateway(tmp_path / "b") as served:
        answer = HTTP.get(f"{served.base_urls()[0]}/v1/models")
        assert answer.status_code == 400 and "--engine URL" in answer.json()["message"]


def test_a_fleet_without_agents_is_unhealthy_and_an_update_is_answered(tmp_path: Path, server: HttpServer) -> None:
    with gateway(tmp_path, server.url) as served:
        url = served.base_urls()[0]
        assert HTTP.get(f"{url}/health").status_code == 503
        assert HTTP.post(f"{url}/generate", json={}).status_code == 503 and server.requests == []
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
            assert HTTP.post(f"{url}/tokenize", json={}, headers=headers).status_code == 401
        assert server.requests == []
        good = {"authorization": "Bearer letmein"}
        assert HTTP.post(f"{url}/tokenize", json={}, headers=good).status_code == 200
        assert [request.token for request in server.requests] == ["engines"]
        workers = HTTP.get(f"{url.removesuffix('/replica/0')}/workers", headers=good).json()
        assert workers == {"workers": []}


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


def test_a_replica_whose_server_fails_request_after_request_gets_none_until_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent reaches the engine, and the gateway does not."""
    monkeypatch.setattr(service, "SUSPECT_S", 3600.0)
    down = threading.Event()
    with (
        HttpServer(lambda request: None if down.is_set() else (200, request.body)) as server,
        gateway_fleet(tmp_path, engines=[server.url, server.url]) as fleet,
    ):

        def ask() -> tuple[int, str]:
            answer = HTTP.post(f"{fleet.urls[0]}/generate", json={})
            return answer.status_code, answer.headers.get("retry-after", "")

        def listed() -> list[str]:
            return [worker["url"] for worker in HTTP.get(f"{fleet.gateway.url}/workers").json()["workers"]]

        down.set()
        assert [ask() for _ in range(4)] == [(502, "")] * 3 + [(503, "5")]
        assert listed() == [fleet.urls[1]] and HTTP.get(f"{fleet.urls[0]}/health").status_code == 503
        (row, _) = HTTP.get(f"{fleet.gateway.url}/v1/rl/workers").json()["workers"]
        assert row["health"] == "not_ready"
        monkeypatch.setattr(service, "SUSPECT_S", 0.0)  # the time is over: it is tried again
        assert ask() == (502, "")
        monkeypatch.setattr(service, "SUSPECT_S", 3600.0)
        assert ask() == (503, "5")
        monkeypatch.setattr(service, "SUSPECT_S", 0.0)
        down.clear()
        assert ask() == (200, "")
        monkeypatch.setattr(service, "SUSPECT_S", 3600.0)
        assert ask() == (200, "") and listed() == fleet.urls


def test_clients_that_go_in_the_middle_of_a_request_make_no_replica_suspect(
    fleet: GatewayFleet, server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.gateway = Gateway(fleet.plane, replicas=2, checkpoints=fleet.folder, engines=[server.url] * 2)
    with on_a_thread(fleet.gateway.serve):
        address = ("127.0.0.1", int(fleet.gateway.url.rpartition(":")[2]))
        head = b"POST /replica/0/generate HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{"
        for gone in range(1, 5):
            with socket.create_connection(address) as client:
                client.sendall(head)
            wait_until(lambda: caplog.text.count("the client has gone") == gone)  # noqa: B023
        assert HTTP.post(f"{fleet.urls[0]}/generate", json={}).status_code == 200


def test_an_update_waits_for_replicas_that_never_joined(tmp_path: Path) -> None:
    with gateway_fleet(tmp_path, joined=1, moment_s=0.05) as fleet, ThreadPoolExecutor() as pool:
        body = {"model_path": str(fleet.write("v1", 1))}
        asked = pool.submit(HTTP.post, f"{fleet.urls[0]}/update_weights_from_disk", json=body, timeout=30)
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.5)
        fleet.start_agent(1)
        assert asked.result().status_code == 200, asked.result().text
        assert fleet.digests() == [digest_of(1)] * 2


def test_an_update_waits_for_the_sync_of_an_operator_and_says_so(
    fleet: GatewayFleet, caplog: pytest.LogCaptureFixture
) -> None:
    sent = threading.Event()
    body = {"model_path": str(fleet.write("v1", 1))}
    fleet.write("v2", 2)
    operators = fleet.plane.sync_weights(None, "v2", send=lambda _: sent.wait(60))
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(HTTP.post, f"{fleet.urls[0]}/update_weights_from_disk", json=body, timeout=60)
        wait_until(lambda: "v1 waits, since another sync has not ended" in caplog.text)
        sent.set()
        operators.wait().raise_unless_committed()
        assert asked.result().status_code == 200, asked.result().text
    assert fleet.digests() == [digest_of(1)] * 2


@pytest.mark.parametrize("absent", ["skip", "wait"])
def test_whether_an_update_waits_for_engines_that_are_down_is_an_option_of_the_gateway(
    tmp_path: Path, absent: OnUnreachable
) -> None:
    with gateway_fleet(tmp_path, moment_s=0.05, quorum=1, absent=absent) as fleet:
        body = {"model_path": str(fleet.write("v1", 1))}
        assert HTTP.post(f"{fleet.urls[0]}/update_weights_from_disk", json=body, timeout=30).status_code == 200
    entries = [entry for entry in RunLog.read(tmp_path / "run.db") if not entry.agent]
    events = [entry.typed_event() for entry in entries]
    assert [event.on_unreachable for event in events if isinstance(event, SyncRequested)] == [absent]


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    places = ("--address", "tcp://127.0.0.1:0", "--listen", "127.0.0.1:0", "--ports")
    words = ("-m", "controlplane.cli", "gateway", *places)
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


def test_the_block_of_the_page_brings_a_tiny_engine_to_a_checkpoint(tmp_path: Path) -> None:
    (block,) = blocks("docs/trainers/gateway.md", "sh")
    ports = {}
    for port in ("5555", "8400"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports[port] = free.getsockname()[1]
    places = f"--address tcp://127.0.0.1:{ports['5555']} --listen 127.0.0.1:{ports['8400']}"
    for written, here in (
        *((port, str(free)) for port, free in ports.items()),
        ("--replicas 1", f"--replicas 1 {places}"),
        ("--engine tiny", "--engine tiny --state-dir state"),
        ("rolloutctl", f"{sys.executable} -m controlplane.cli"),
        ("python -c", f"{sys.executable} -c"),
    ):
        block = block.replace(written, here)
    shell = ["bash", "-c", f"set -m\n{block}wait"]
    done = subprocess.run(shell, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100)
    assert "weights v1 committed on replica 0" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--engine URL"),
        (("--replicas", "1", "--listen", "8400"), "HOST:PORT"),
        (("--replicas", "1", "--listen", "0.0.0.0:0"), "without a token"),
        (("--replicas", "2", "--engine", "http://127.0.0.1:1"), "name one for each"),
        (("--replicas", "2", "--quorum", "3"), "quorum is 3, and there are 2 replicas"),
        (("--engine", "node0:8000"), "must begin with http://"),
    ],
)
def test_bad_options_are_one_clear_line(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    everywhere = ["--address", "tcp://127.0.0.1:0", "--log", str(tmp_path / "run.db")]
    error = CliRunner().invoke(command, [*everywhere, *options]).exception
    assert isinstance(error, ConfigError) and says in str(error) and "\n" not in str(error)


def test_without_its_extra_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.cli.gateway.find_spec", lambda name: None)
    error = CliRunner().invoke(command, ["--replicas", "1", "--log", str(tmp_path / "run.db")]).exception
    assert isinstance(error, ExtraMissing) and "its extra `gateway`" in str(error)
