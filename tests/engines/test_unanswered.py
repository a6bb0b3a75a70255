"""What becomes of a call that a real server's shape carries out and does not answer, or turns away untouched."""

from pathlib import Path
from typing import Final

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketListener

from schemas.commands import Checkpoint
from schemas.desired import ALL_TAGS
from schemas.errors import RefusedError, UnansweredError
from schemas.events import EngineCall, Flush, Load, Pause, Restore, Resume, Sleep, Wake
from schemas.identity import Identity, Operation
from schemas.safetensors.manifest import build_manifest
from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from tests.engines.releases import save_tensor
from workers.driver import fault_of
from workers.engines.client import CallRefused
from workers.engines.http import HttpClient, Route
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.server import ROUTES as SGLANG_ROUTES
from workers.engines.sglang.server import SGLangServer
from workers.engines.vllm.engine import VLLMEngine
from workers.engines.vllm.server import ROUTES as VLLM_ROUTES
from workers.engines.vllm.server import VLLMServer

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

PLACE: Final = Identity(replica=0, node_rank=0)
ROUTES: Final = {"once": Route("POST", "/once"), "again": Route("POST", "/again", repeatable=True)}


async def ask(url: str, method: str) -> object:
    client = HttpClient(url, ROUTES, info_path="/info")
    try:
        return await client.call(method)
    finally:
        await client.close()


# --- the client -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["once", "again"])
async def test_a_server_that_performs_a_call_and_hangs_up_has_not_answered(method: str) -> None:
    performed: list[str] = []

    def perform(request: HttpRequest) -> Reply:
        performed.append(request.path)
        return None

    with HttpServer(perform) as server, pytest.raises(UnansweredError) as lost:
        await ask(server.url, method)
    assert performed and fault_of(lost.value).kind == "unanswered"


async def test_a_call_that_could_not_be_sent_is_refused() -> None:
    with HttpServer(lambda _: None) as server:
        pass
    with pytest.raises(RefusedError) as refused:
        await ask(server.url, "once")
    assert fault_of(refused.value).kind == "refused"


async def test_a_repeated_call_whose_first_attempt_was_sent_is_not_refused() -> None:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")

    first = listener.listeners[0]
    assert isinstance(first, SocketListener)

    async def perform() -> None:
        async with await first.accept() as stream:
            await stream.receive()
        await listener.aclose()

    async with anyio.create_task_group() as group:
        group.start_soon(perform)
        url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        with pytest.raises(UnansweredError, match="ConnectError"):
            await ask(url, "again")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "refused"),
        (404, "refused"),
        (409, "refused"),
        (422, "refused"),
        (400, "engine_error"),
        (500, "engine_error"),
    ],
)
async def test_the_status_says_whether_the_call_was_begun(status: int, kind: str) -> None:
    with HttpServer(lambda _: (status, "no")) as server, pytest.raises(CallRefused) as refused:
        await ask(server.url, "once")
    assert refused.value.status == status and fault_of(refused.value).kind == kind


# --- the backends -----------------------------------------------------------------------------------------------------


class Fake:
    """A server with all routes of its kind. `answers` replaces what a path answers; None hangs up."""

    def __init__(self, kind: str, tmp_path: Path) -> None:
        self.kind, self.root = kind, tmp_path
        self.answers: dict[str, Reply] = {}
        self.posted: list[str] = []
        routes = SGLANG_ROUTES if kind == "sglang" else VLLM_ROUTES
        self._paths: dict[str, object] = {route.path: {route.verb.lower(): {}} for route in routes.values()}

    def answer(self, request: HttpRequest) -> Reply:
        path = request.path.partition("?")[0]
        if request.verb == "POST":
            self.posted.append(path)
        if path in self.answers:
            return self.answers[path]
        if path == "/openapi.json":
            return 200, {"paths": self._paths}
        if path == "/server_info" and self.kind == "vllm":
            config = {"instance_id": "one", "model_config": {"enable_sleep_mode": True, "model": str(self.root)}}
            return 200, {"vllm_config": config}
        if path == "/server_info":
            told = {"version": "0.5.23", "random_seed": 1, "enable_memory_saver": True, "tp_size": 1}
            return 200, {**told, "model_path": str(self.root), "load_format": "auto"}
        return 200, {"version": "0.32.0", "success": True, "is_paused": True}

    def engine(self, url: str) -> SGLangEngine | VLLMEngine:
        """Return the backend of this kind."""
        if self.kind == "sglang":
            return SGLangEngine(PLACE, SGLangServer(url), checkpoints=self.root, traces=self.root)
        return VLLMEngine(PLACE, VLLMServer(url), checkpoints=self.root, traces=self.root)

    async def performs(self, *calls: EngineCall) -> None:
        """Make calls of one backend, none of which may fail."""
        with HttpServer(self.answer) as server:
            engine = self.engine(server.url)
            for call in calls:
                await engine.perform(call, 10.0)
            await engine.close()

    async def kind_of_fault(self, call: EngineCall) -> str:
        """Make a call that fails, and return the kind of its fault."""
        with HttpServer(self.answer) as server:
            engine = self.engine(server.url)
            try:
                await engine.perform(call, 0.1)
            except Exception as error:
                return fault_of(error).kind
            finally:
                await engine.close()
        return "none"


LOST: dict[str, tuple[str, EngineCall, dict[str, Reply], str]] = {
    "a release": ("sglang", Sleep(ALL_TAGS, discard=True), {"/release_memory_occupation": None}, "unanswered"),
    "the flush before a release": ("sglang", Sleep(ALL_TAGS, discard=True), {"/flush_cache": None}, "refused"),
    "a flush that is refused": ("sglang", Sleep(ALL_TAGS, discard=True), {"/flush_cache": (400, "busy")}, "refused"),
    "weights that would be lost": ("sglang", Sleep(ALL_TAGS), {}, "unsupported"),
    "a wake": ("sglang", Wake(ALL_TAGS), {"/resume_memory_occupation": None}, "unanswered"),
    "a pause": ("sglang", Pause("abort"), {"/pause_generation": None}, "unanswered"),
    "a resume": ("vllm", Resume(), {"/resume": None}, "unanswered"),
    "a sleep": ("vllm", Sleep(ALL_TAGS), {"/sleep": None}, "unanswered"),
    "a sleep that vLLM has not": ("vllm", Sleep(frozenset({"weights"}), discard=True), {}, "unsupported"),
    "what a wake reads afterwards": ("vllm", Wake(ALL_TAGS), {"/is_paused": None}, "unanswered"),
    "the pause after a wake": (
        "vllm",
        Wake(ALL_TAGS),
        {"/is_paused": (200, {"is_paused": False}), "/pause": (404, "")},
        "engine_error",
    ),
    "a cache that is in use": ("vllm", Flush(), {"/reset_prefix_cache": (200, {"success": False})}, "refused"),
}


@pytest.mark.parametrize("case", LOST)
async def test_a_backend_says_whether_the_engine_was_touched(case: str, tmp_path: Path) -> None:
    kind, call, answers, expected = LOST[case]
    fake = Fake(kind, tmp_path)
    fake.answers = answers
    assert await fake.kind_of_fault(call) == expected


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_an_engine_whose_launch_can_not_be_read_was_not_called(kind: str, tmp_path: Path) -> None:
    fake = Fake(kind, tmp_path)
    fake.answers = {"/server_info": None}
    assert await fake.kind_of_fault(Pause("abort")) == "refused"
    assert fake.posted == []


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_backend_declares_what_may_be_asked_for_again(kind: str, tmp_path: Path) -> None:
    fake = Fake(kind, tmp_path)
    with HttpServer(fake.answer) as server:
        engine = fake.engine(server.url)
        seen = await engine.observe()
        await engine.close()
    pauses = {Operation.PAUSE, Operation.RESUME}
    assert seen.remedies is not None
    assert seen.remedies.idempotent == (pauses if kind == "sglang" else pauses | {Operation.SLEEP, Operation.WAKE})
    assert seen.profiling is None and (kind == "vllm" or seen.asleep is None)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_an_engine_is_given_the_weights_of_its_launch_again(kind: str, tmp_path: Path) -> None:
    launched = save_tensor(tmp_path / "policy")
    fake = Fake(kind, tmp_path)
    fake.root = launched
    with HttpServer(fake.answer) as server:
        engine = fake.engine(server.url)
        seen = await engine.observe()
        assert seen.remedies is not None and seen.remedies.launched_from == str(launched)
        await engine.perform(Restore(str(launched)), 1.0)
        await engine.close()
    bodies = [request.body.decode() for request in server.requests if request.verb == "POST"]
    assert str(launched) in bodies[0] and '"new_version":"default"' in bodies[1]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_weights_of_a_launch_that_can_not_be_read_again_are_not_offered(kind: str, tmp_path: Path) -> None:
    fake = Fake(kind, tmp_path)  # whose directory holds no safetensors file
    with HttpServer(fake.answer) as server:
        engine = fake.engine(server.url)
        seen = await engine.observe()
        await engine.close()
    assert seen.remedies is not None and seen.remedies.launched_from is None
    assert await fake.kind_of_fault(Restore(str(tmp_path))) == "source_refused" and not fake.posted


async def test_a_load_whose_label_is_not_set_has_touched_the_engine(tmp_path: Path) -> None:
    manifest = build_manifest(save_tensor(tmp_path / "v7"), content=False)
    fake = Fake("sglang", tmp_path)
    fake.answers = {"/update_weight_version": (404, "no")}
    assert await fake.kind_of_fault(Load(7, Checkpoint("v7"), manifest)) == "engine_error"
    assert fake.posted[0] == "/update_weights_from_disk"
