"""What a server is seen to do, whatever its openapi.json lists; and servers that answer late, or are asked again."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from schemas.commands import Broadcast, ProfilePlan
from schemas.desired import ProfileSession
from schemas.errors import EngineError
from schemas.events import Load, Pause, Resume, StartProfile, StopProfile
from schemas.identity import Identity, InFlight
from schemas.safetensors.manifest import build_manifest
from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from tests.engines.releases import save_tensor
from tests.engines.servers import UP_S, Process, answers, free_port, wait_for
from tests.environments import python
from workers.engines import http, observed
from workers.engines.probe import probe
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.server import SGLangServer
from workers.engines.vllm.engine import VLLMEngine
from workers.engines.vllm.server import VLLMServer

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

PLACE = Identity(replica=0, node_rank=0)


def vllm(url: str, folder: Path) -> VLLMEngine:
    return VLLMEngine(PLACE, VLLMServer(url), checkpoints=folder, traces=folder / "sessions")


# --- two routes at one path -------------------------------------------------------------------------------------------

REFUSALS = {
    "mode": "{'type': 'literal_error', 'loc': 'query.mode', 'msg': \"Input should be 'abort', 'wait' or 'keep'\"}",
    "wait_for_inflight_requests": "{'type': 'bool_parsing', 'loc': 'query.wait_for_inflight_requests', 'msg': '…'}",
}


class PausingVLLM:
    """A vLLM whose openapi.json lists other parameters of `/pause` than the route that is reached reads.

    Args:
        lists: Parameters in openapi.json.
        reads: Those of the route that requests reach. It refuses a value that is none of theirs, and ignores others'.

    Attributes:
        pauses: What each pause got.
    """

    def __init__(self, lists: tuple[str, ...], reads: tuple[str, ...]) -> None:
        self.lists, self.reads = lists, reads
        self.pauses: list[dict[str, str]] = []

    def __call__(self, request: HttpRequest) -> Reply:
        parts = urlsplit(request.path)
        match parts.path:
            case "/openapi.json":
                listed = [{"name": name, "in": "query"} for name in self.lists]
                return 200, {"paths": {"/pause": {"post": {"parameters": listed}}, "/is_paused": {"get": {}}}}
            case "/version":
                return 200, {"version": "0.32.0"}
            case "/is_paused":
                return 200, {"is_paused": bool(self.pauses)}
            case "/pause":
                got = {name: value for name, value in parse_qsl(parts.query) if name in self.reads}
                wrong = [
                    REFUSALS[name] for name, value in got.items() if value not in ("abort", "wait", "keep", "true")
                ]
                if wrong:
                    return 400, {"error": {"message": f"{len(wrong)} validation errors: {'; '.join(wrong)}"}}
                self.pauses.append(got)
                return 200, {"status": "paused"}
        return 404, {}


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("lists", [(), ("mode",), ("wait_for_inflight_requests",)])
async def test_a_pause_does_what_the_route_that_is_reached_reads(
    tmp_path: Path, lists: tuple[str, ...], mode: InFlight
) -> None:
    server = PausingVLLM(lists, ("mode", "wait_for_inflight_requests"))
    with HttpServer(server) as listening:
        engine = vllm(listening.url, tmp_path)
        for _ in range(2):
            await engine.perform(Pause(mode), 5)
        assert server.pauses == [{"mode": mode}] * 2
        asked = [request for request in listening.requests if request.path.startswith("/pause")]
        assert len(asked) == 3, "it is proven once for each launch"
        await engine.close()


async def test_requests_are_never_frozen_by_a_route_that_can_only_abort_them(tmp_path: Path) -> None:
    server = PausingVLLM(("mode",), ("wait_for_inflight_requests",))
    with HttpServer(server) as listening:
        engine = vllm(listening.url, tmp_path)
        with pytest.raises(EngineError, match="can't freeze requests"):
            await engine.perform(Pause("keep"), 5)
        assert server.pauses == []
        await engine.perform(Pause("wait"), 5)
        assert server.pauses == [{"wait_for_inflight_requests": "true"}]
        await engine.close()


async def test_a_pause_by_a_route_that_reads_nothing_is_no_pause_as_it_was_asked_for(tmp_path: Path) -> None:
    server = PausingVLLM(("mode",), ())
    with HttpServer(server) as listening:
        engine = vllm(listening.url, tmp_path)
        with pytest.raises(EngineError, match="paused without regard to how: another route hides its own /pause"):
            await engine.perform(Pause("wait"), 5)
        assert len(server.pauses) == 1, "and it is not paused again"
        await engine.close()


def read(url: str) -> Any:
    return httpx.get(url, timeout=60).json()


@pytest.fixture
def shadowed(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    script = Path(__file__).with_name("shadowed_vllm.py")
    with Process([str(python("vllm")), str(script), str(port)], tmp_path / "server.log") as process:
        url = f"http://127.0.0.1:{port}"
        wait_for("the server answers", lambda: process.process.poll() is None and answers(f"{url}/version"), UP_S)
        yield url


@pytest.mark.engine_vllm
@pytest.mark.timeout(480)
@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_prime_rls_own_routes_hide_nothing_of_the_real_vllms(
    tmp_path: Path, shadowed: str, mode: InFlight
) -> None:
    listed = read(f"{shadowed}/openapi.json")["paths"]["/pause"]["post"]
    assert "parameters" not in listed, "as it is seen from outside"
    engine = vllm(shadowed, tmp_path)
    await engine.perform(Pause(mode), 5)
    assert read(f"{shadowed}/pauses") == [{"mode": mode, "clear_cache": False}]
    await engine.perform(Resume(), 5)
    assert read(f"{shadowed}/pauses")[1:] == [{"resumed": True}]
    await engine.close()


# --- late answers -----------------------------------------------------------------------------------------------------


async def test_a_probe_outlasts_the_first_answer_of_a_fresh_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled down: a reading may take 50 ms, the first answer takes 300."""
    monkeypatch.setattr(http, "READ_TIMEOUT_S", 0.05)
    paths: dict[str, object] = {"/v1/models": {"get": {}}, "/version": {"get": {}}}
    known = {"/openapi.json": {"paths": paths}, "/version": {"version": "0.32.0"}}

    def slowly(request: HttpRequest) -> Reply:
        if request.path.startswith("/server_info"):
            threading.Event().wait(0.3)
            return 200, {"vllm_config": {"model_config": {"model": "m"}}}
        return 200, known[request.path]

    with HttpServer(slowly) as server:
        found = await probe(server.url)
    assert (found.kind, found.version, found.model) == ("vllm", "0.32.0", "m")


async def test_a_probe_of_a_server_that_hangs_says_for_how_long_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LAUNCH_TIMEOUT_S", 0.1)
    ended = threading.Event()
    with HttpServer(lambda _: (ended.wait(30), None)[1]) as server:
        with pytest.raises(EngineError, match=r"/openapi.json did not answer: not within 0.1 s"):
            await probe(server.url)
        ended.set()


async def test_an_agent_starts_while_its_engine_does_not_answer_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(observed, "FIRST_ANSWER_S", 0.1)
    ended = threading.Event()
    with HttpServer(lambda _: (ended.wait(30), None)[1]) as server:
        engine = vllm(server.url, tmp_path)
        await engine.open()
        ended.set()
        await engine.close()


class Receiving:
    """An SGLang that is in broadcast groups: a second one of the same name is refused, as torch does it."""

    def __init__(self) -> None:
        self.groups: list[str] = []
        self.launched = 1
        self.hangs = threading.Event()

    def __call__(self, request: HttpRequest) -> Reply:
        posts: dict[str, object] = {
            path: {"post": {}}
            for path in ("/init_weights_update_group", "/update_weights_from_distributed", "/update_weight_version")
        }
        match request.path:
            case "/openapi.json":
                return 200, {"paths": {**posts, "/model_info": {"get": {}}}}
            case "/server_info":
                info = {"version": "0.5.23", "random_seed": self.launched}
                return 200, info | {"model_path": self.model}
            case "/model_info" if self.hangs.is_set():
                return None
            case "/model_info":
                return 200, {"weight_version": "default"}
            case "/init_weights_update_group":
                if "g" in self.groups:
                    return 400, {"message": "The specified group name has already been created, please use another"}
                self.groups.append("g")
        return 200, {"success": True}

    model = ""


async def test_neither_a_slow_reading_nor_a_restart_makes_a_broadcast_group_anew_and_a_relaunch_does(
    tmp_path: Path,
) -> None:
    server = Receiving()
    server.model = str(save_tensor(tmp_path / "m"))
    manifest = build_manifest(tmp_path / "m", content=False)
    source = Broadcast(host="h", port=1, group="g", replicas=(0,), backend="gloo")
    with HttpServer(server) as listening:
        engine = SGLangEngine(PLACE, SGLangServer(listening.url), checkpoints=tmp_path, traces=tmp_path)
        await engine.perform(Load(1, source, manifest), 5)
        server.hangs.set()
        assert (await engine.observe()).tokenizer == "unknown"
        server.hangs.clear()
        await engine.perform(Load(2, source, manifest), 5)
        assert server.groups == ["g"]
        restarted = SGLangEngine(PLACE, SGLangServer(listening.url), checkpoints=tmp_path, traces=tmp_path)
        await restarted.perform(Load(3, source, manifest), 5)
        await restarted.close()
        server.launched, server.groups = 2, []
        server.hangs.set()
        assert (await engine.observe()).tokenizer == "unknown"
        server.hangs.clear()
        await engine.perform(Load(4, source, manifest), 5)
        assert server.groups == ["g"]
        await engine.close()


# --- whose traces are in a folder -------------------------------------------------------------------------------------


class TracingVLLM:
    """A vLLM whose profiler writes into a folder that holds a user's own traces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refuses = False

    def __call__(self, request: HttpRequest) -> Reply:
        profiler = {"profiler": "torch", "torch_profiler_dir": str(self.folder), "ignore_frontend": True}
        match request.path:
            case "/openapi.json":
                return 200, {"paths": {"/start_profile": {"post": {}}, "/stop_profile": {"post": {}}}}
            case "/version":
                return 200, {"version": "0.32.0"}
            case "/server_info?config_format=json":
                return 200, {"vllm_config": {"profiler_config": profiler}}
            case "/start_profile" if self.refuses:
                return 409, {"error": "a profile is already running"}
            case "/stop_profile":
                (self.folder / "rank0.pt.trace.json").write_text('{"distributedInfo": {"rank": 0}, "traceEvents": []}')
        return 200, {}


async def test_a_session_that_is_stopped_by_a_restarted_agent_takes_no_trace_of_others(tmp_path: Path) -> None:
    raw, session = tmp_path / "raw", ProfileSession(3, ProfilePlan())
    raw.mkdir()
    mine = {"mine.pt.trace.json", os.fsdecode(b"\xff.json")}
    for name in mine:
        (raw / name).write_text("{}")
    place = "global_step_3/replica_0"
    with HttpServer(TracingVLLM(raw)) as server:
        first = vllm(server.url, tmp_path)
        await first.perform(StartProfile(session, place), 5)
        await first.close()
        second = vllm(server.url, tmp_path)
        stopped = await second.perform(StopProfile(session, place), 5)
        await second.close()
    assert [trace.path for trace in stopped.traces] == [f"{place}/rank0.pt.trace.json"]
    assert {file.name for file in raw.iterdir()} == mine
    assert [file.name for file in (tmp_path / "sessions" / place).iterdir()] == ["rank0.pt.trace.json"]


async def test_a_start_that_is_refused_leaves_room_for_the_next(tmp_path: Path) -> None:
    session, place = ProfileSession(3, ProfilePlan()), "global_step_3/replica_0"
    refusing = TracingVLLM(tmp_path / "raw")
    refusing.folder.mkdir()
    refusing.refuses = True
    with HttpServer(refusing) as server:
        engine = vllm(server.url, tmp_path)
        with pytest.raises(EngineError, match="409"):
            await engine.perform(StartProfile(session, place), 5)
        refusing.refuses = False
        await engine.perform(StartProfile(session, place), 5)
        await engine.close()
