"""Attacks on the gateway: clients that take what the bus needs, flood its log, or command engines from a browser."""

import logging
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.abc import SocketStream, TaskStatus
from click.testing import CliRunner

from controlplane.bus.operator import ask_status
from controlplane.cli.gateway import gateway as command
from controlplane.trainers.gateway import connections, service
from schemas.config import AgentConfig
from schemas.errors import RolloutctlError
from schemas.identity import Identity
from schemas.logs import MESSAGE_MAX
from tests.engines.http_servers import HttpServer
from tests.running import started
from tests.trainers.gateway_fleet import on_a_thread
from tests.trainers.posting_trainers import HTTP
from tests.trainers.test_gateway_http import echo, gateway
from tests.unit.small_bus import Engine
from tests.waiting import until, wait_until
from workers.agent import Agent

HEAD = b"POST /replica/0/tokenize HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
REQUEST = HEAD.replace(b"/tokenize", b"/generate") + b"content-length: 2\r\n\r\n{}"
JSON = {"content-type": "application/json"}
PAGE = {"origin": "http://evil.example"}


@pytest.fixture
def engine() -> Iterator[HttpServer]:
    with HttpServer(echo) as server:
        yield server


def dial(url: str, data: bytes) -> socket.socket:
    """A connection to the gateway that has sent this."""
    host, _, port = url.removeprefix("http://").partition("/")[0].rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(data)
    return connection


def status_of(connection: socket.socket) -> int:
    """Status of the answer; 0 if there is none."""
    with connection:
        answer = connection.recv(65536)
    return int(answer.split()[1]) if answer else 0


# --- descriptors and time ---------------------------------------------------------------------------------------------


class Holding:
    """An engine that answers when it is told to."""

    def __init__(self) -> None:
        self.url, self.held = "", 0
        self.answers = threading.Event()

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1", backlog=2048) as listener:
            self.url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
            task_status.started()
            await listener.serve(self._answer)

    async def _answer(self, stream: SocketStream) -> None:
        async with stream:
            try:
                while True:
                    await stream.receive()
                    self.held += 1
                    await until(self.answers.is_set)
                    await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass


@contextmanager
def agent_on(bus: str, replica: int, state: Path) -> Iterator[None]:
    """An agent on a thread of its own."""

    async def run(*, task_status: TaskStatus[None]) -> None:
        identity, config = Identity(replica=replica, node_rank=0), AgentConfig(hello_retry_ms=50, observe_ms=50)
        async with Agent(bus=bus, identity=identity, engine=Engine(), state_dir=state, config=config) as agent:
            task_status.started()
            await agent.run()

    with on_a_thread(run):
        yield


def live(bus: str) -> int:
    replicas = anyio.run(ask_status, bus).replicas.values()
    return sum(agent.state == "live" for replica in replicas for agent in replica.agents)


@pytest.mark.attacks
def test_agents_join_while_500_generations_would_take_every_descriptor(tmp_path: Path) -> None:
    holding = Holding()
    limited = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)); "
        "sys.argv = ['rolloutctl', *sys.argv[1:]]; runpy.run_module('controlplane.cli', run_name='__main__')"
    )
    words = ("gateway", "--address", "tcp://127.0.0.1:0", "--listen", "127.0.0.1:0", "--log", tmp_path / "run.db")
    with on_a_thread(holding.serve), (tmp_path / "log").open("wb") as log, ExitStack() as open_:
        replicas = ("--engine", holding.url, "--engine", holding.url)
        process = open_.enter_context(started("-c", limited, *words, *replicas, cwd=tmp_path, stderr=log.fileno()))
        assert process.stdout is not None
        bus = process.stdout.readline().removeprefix("agents connect to ").strip()
        url = process.stdout.readline().partition(": ")[2].strip()
        open_.enter_context(agent_on(bus, 0, tmp_path / "a"))
        workers = f"{url.partition('/replica')[0]}/workers"
        wait_until(lambda: len(HTTP.get(workers).json()["workers"]) == 1)
        asked = [dial(url, REQUEST) for _ in range(500)]
        wait_until(lambda: holding.held >= 200)
        open_.enter_context(agent_on(bus, 1, tmp_path / "b"))
        wait_until(lambda: live(bus) == 2)
        holding.answers.set()
        assert [status_of(connection) for connection in asked] == [200] * 500
    assert len((tmp_path / "log").read_text().splitlines()) < 60


def test_half_sent_requests_are_ended_and_those_of_others_answered(
    tmp_path: Path, engine: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "connections_within_limit", lambda _: 4)
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    monkeypatch.setattr(connections, "BODY_S", 0.5)
    with gateway(tmp_path, engine.url) as served, ExitStack() as open_:
        body = b"content-length: 9\r\n\r\n{"
        heads = [open_.enter_context(dial(served.url, head)) for head in [b""] * 3 + [HEAD] * 3]
        bodies = [open_.enter_context(dial(served.url, HEAD + body)) for _ in range(6)]
        posts = [open_.enter_context(dial(served.url, HEAD.replace(b"tokenize", b"resume") + body)) for _ in range(6)]
        again = open_.enter_context(httpx.Client())
        for _ in range(2):
            answer = again.post(f"{served.base_urls()[0]}/tokenize", json={}, timeout=30)
            assert answer.status_code == 200
        assert [status_of(connection) for connection in heads] == [0] * 3 + [408] * 3
        assert {status_of(connection) for connection in bodies + posts} <= {0, 408}


def test_an_answer_says_that_its_connection_ends_when_there_is_no_room_for_an_idle_one(
    tmp_path: Path, engine: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "connections_within_limit", lambda _: 2)
    with gateway(tmp_path, engine.url) as served, httpx.Client(timeout=20) as client:
        url = f"{served.base_urls()[0]}/tokenize"
        with dial(served.url, HEAD):  # takes the first of two places
            answers = [client.post(url, json={}) for _ in range(3)]
        assert {(answer.status_code, answer.headers.get("connection")) for answer in answers} == {(200, "close")}
        wait_until(lambda: "connection" not in client.post(url, json={}).headers)


def test_idle_connections_make_room_when_there_is_none(
    tmp_path: Path, engine: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "connections_within_limit", lambda _: 4)
    with gateway(tmp_path, engine.url) as served, ExitStack() as open_:
        clients = [open_.enter_context(httpx.Client(timeout=20)) for _ in range(12)]
        for client in (*clients, *clients):  # each keeps its connection, and opens another if that was closed
            assert client.post(f"{served.base_urls()[0]}/tokenize", json={}).status_code == 200


def test_a_limit_of_descriptors_leaves_half_of_them_to_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "raise_limit", lambda _: None)
    for limit, left, allowed in ((1024, 1000, 250), (65_536, 65_000, 16_384), (1024, 0, 1), (-1, -30, 16_384)):
        monkeypatch.setattr(connections, "limit_and_left", lambda found=(limit, left): found)
        assert connections.connections_within_limit(8192) == allowed
    assert resource.RLIM_INFINITY == -1


# --- what requests say ------------------------------------------------------------------------------------------------


@contextmanager
def lines() -> Iterator[list[str]]:
    """What the gateway logs meanwhile."""
    kept: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rolloutctl.gateway")
    logger.addHandler(handler)
    try:
        yield kept
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/pause", '{"mode": []}'),
        ("/pause", '{"mode": "LONG"}'),
        ("/collective_rpc", '{"method": {}}'),
        ("/update_weights", '{"weight_dir": "ROOT/\\udcff"}'),
        ("/update_weights", '{"weight_dir": "ROOT/\\u0000"}'),
        ("/update_weights", '{"weight_dir": "ROOT/LONG"}'),
        ("/update_weights", '{"update_info": {"target_version": HUGE}}'),
        ("/update_weights_from_disk", '{"model_path": "ROOT/a", "weight_version": "LONG"}'),
        ("/update_weights_from_disk", '{"model_path": "ROOT/a", "weight_version": "\\udcff"}'),
        ("/update_weights_from_disk", '{"model_path": "ROOT/a", "weight_version": {"LONG": 1}}'),
        ("/update_weights_from_disk", '{"model_path": "ROOT/a", "load_format": "LONG"}'),
    ],
)
def test_a_post_with_strange_values_is_refused_in_one_short_line(tmp_path: Path, route: str, body: str) -> None:
    for word, meant in (("ROOT", str(tmp_path)), ("LONG", "x" * 900_000), ("HUGE", "1" * 5_000)):
        body = body.replace(word, meant)
    with gateway(tmp_path) as served, lines() as logged:
        answer = HTTP.post(f"{served.base_urls()[0]}{route}", content=body, headers=JSON, timeout=30)
        assert answer.status_code in (400, 409), answer.text
        assert len(answer.json()["message"]) < 3000 and all(len(line) < 3000 for line in logged)


@pytest.mark.parametrize(
    "request_",
    [
        HEAD.replace(b"tokenize", b"resume") + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /replica/0/\xff\xfe HTTP/1.1\r\nhost: g\r\n\r\n",
        b"POST /replica/0/%ff%fe HTTP/1.1\r\nhost: g\r\n\r\n",
        b"POST /replica/0/resume?\xff=\xff HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
    ids=["both lengths", "both lengths, passed on", "raw path", "quoted path", "query", "no HTTP"],
)
def test_a_request_that_is_not_one_is_refused_and_no_traceback_is_logged(
    tmp_path: Path, engine: HttpServer, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with gateway(tmp_path, engine.url) as served:
        assert status_of(dial(served.url, request_)) == 400
    assert not [record for record in caplog.records if record.exc_info] and engine.requests == []


def test_a_flood_of_refused_requests_and_of_clients_that_go_is_a_few_lines(tmp_path: Path, engine: HttpServer) -> None:
    with gateway(tmp_path, engine.url) as served, lines() as logged:
        for number in range(60):
            HTTP.post(f"{served.base_urls()[0]}/shutdown", json={"number": number})
            dial(served.url, b"nonsense\r\n\r\n").close()
            dial(served.url, HEAD.replace(b"tokenize", b"resume") + b"content-length: 9\r\n\r\n{").close()
    assert 20 < len(logged) < 100


def test_a_long_message_is_cut_in_the_log() -> None:
    with lines() as logged:
        logging.getLogger("rolloutctl.gateway").warning("%s", "x" * 900_000)
    assert len(logged[0]) < MESSAGE_MAX + 100 and "900,000 characters" in logged[0]


# --- which clients may ask --------------------------------------------------------------------------------------------


def test_a_page_in_a_browser_commands_nothing(tmp_path: Path, engine: HttpServer) -> None:
    """Such a page needs no permission to post text, or nothing, to any port of the machine that shows it."""
    body = b'{"weight_dir": "/data/step_1"}'
    with gateway(tmp_path, engine.url) as served:
        url = served.base_urls()[0]
        for headers in (
            {**PAGE, "content-type": "text/plain"},
            {**PAGE, "content-type": "application/json"},
            {"sec-fetch-site": "cross-site", "content-type": "text/plain"},
        ):
            for path in ("update_weights", "tokenize", "resume"):
                assert HTTP.post(f"{url}/{path}", content=body, headers=headers).status_code == 403
        assert HTTP.options(f"{url}/update_weights", headers=PAGE).status_code == 403
        assert HTTP.get(f"{url}/flush_cache", headers={"sec-fetch-site": "same-site"}).status_code == 403
        untyped = HTTP.post(f"{url}/update_weights", content=body, headers={"content-type": "text/plain"})
        assert untyped.status_code == 400 and "application/json" in untyped.json()["message"]
        assert engine.requests == []


def test_an_insecure_gateway_says_so_and_opens_no_bus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gateway(tmp_path, host="0.0.0.0", insecure=True) as served:
        assert [
            record
            for record in caplog.records
            if f"INSECURE: every program that can reach {served.url}" in record.message
        ]
    words = ["--address", "tcp://0.0.0.0:0", "--log", str(tmp_path / "a.db"), "--replicas", "1", "--insecure"]
    error = CliRunner().invoke(command, [*words, "--listen", "0.0.0.0:0"]).exception
    assert isinstance(error, RolloutctlError) and "tcp://0.0.0.0" in str(error) and "keys" in str(error)


def test_a_file_whose_name_is_no_text_is_named_in_the_refusal(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / os.fsdecode(b"\xff.safetensors")).write_bytes(b"")
    with gateway(tmp_path) as served:
        url, body = served.base_urls()[0], {"weight_dir": str(tmp_path / "step_1")}
        answer = HTTP.post(f"{url}/update_weights", json=body, timeout=30)
        assert answer.status_code == 409 and "too short for a header" in answer.json()["message"]
