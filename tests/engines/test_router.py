"""An agent's place in a router: what the real sglang-router does, and routers that fail. The rule: tests/unit.

The workers are small servers that answer as an engine's front does; the agents, the buses and the router are real.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import anyio
import anyio.lowlevel
import httpx
import msgspec
import pytest
from msgspec.structs import replace

from controlplane import ControlPlane
from schemas.carriers.sockets import Context
from schemas.commands import Checkpoint, WeightSync
from schemas.config import AgentConfig, BusConfig
from schemas.events import Observation
from schemas.identity import Identity
from tests.engines.environments import python
from tests.engines.servers import Process, free_port, wait_for
from tests.unit import machines
from tests.unit.small_bus import PAUSE, RESUME, SECOND, Bus, Engine, reaches, running
from workers import router as routers
from workers.agent import Agent
from workers.engines.client import CallRefused
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, save
from workers.router import Router, may_register

PATIENCE_S = 30


# --- servers ----------------------------------------------------------------------------------------------------------


class Server(ABC):
    """A small HTTP server on a thread of its own. `answer(verb, path)` gives the status and the JSON body.

    asked: every request as (verb, path, bearer token or None).
    """

    def __init__(self, port: int = 0) -> None:
        server = self
        self.asked: list[tuple[str, str, str | None]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                token = (self.headers.get("authorization") or "").removeprefix("Bearer ") or None
                server.asked.append((self.command, self.path, token))
                status, body = server.answer(self.command, self.path)
                data = body if isinstance(body, bytes) else msgspec.json.encode(body)
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                """It says nothing."""

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """Whoever asked has gone: the router does so when it tries gRPC."""

        self._server = Quiet(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @abstractmethod
    def answer(self, verb: str, path: str) -> tuple[int, object]:
        """Status and JSON body."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Worker(Server):
    """What a router wants of an engine: its health, and an answer. ranks: of its data parallelism."""

    healthy, ranks = True, 1

    def answer(self, verb: str, path: str) -> tuple[int, object]:
        if path == "/health":
            return (200 if self.healthy else 503), {}
        if path == "/server_info":
            return 200, {"dp_size": self.ranks}
        return (200, {"text": self.url}) if path == "/generate" else (404, {})


class RouterProcess(Process):
    """The real one."""

    def __init__(self, folder: Path, *options: str, key: str | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        ports = ["--port", str(self.port), "--prometheus-port", str(free_port()), "--host", "127.0.0.1"]
        start = ["-m", "sglang_router.launch_router", "--disable-retries", *ports, *options]
        start += ["--api-key", key] if key else []
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, trust_env=False)
        super().__init__([str(python("router")), *start], folder / f"router-{self.port}.log")

    def __enter__(self) -> Self:
        self.wait_up()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.client.close()

    def wait_up(self) -> None:
        def up() -> bool:
            assert self.process.poll() is None, self.said
            with suppress(httpx.TransportError):
                return self.client.get("/liveness").is_success
            return False

        wait_for("the router is up", up)

    def workers(self, worker: Server) -> dict[str, str]:
        """Ids of its entries for a worker, by URL."""
        listed = self.client.get("/workers").json()["workers"]
        return {one["url"]: one["id"] for one in listed if one["url"].startswith(worker.url)}

    async def until(self, worker: Server, there: bool = True) -> str:
        """Wait until it has the worker, or has it no more. Returns its id."""
        with anyio.fail_after(PATIENCE_S):
            while bool(ids := self.workers(worker)) != there:
                await anyio.lowlevel.checkpoint()
        return next(iter(ids.values()), "")

    def add(self, url: str) -> str:
        """As somebody else would do it, to the end of the job. Returns the id.

        The job of a worker that is there fails, and nothing is said of it before the router has taken it up.
        """
        there = any(one["url"] == url for one in self.client.get("/workers").json()["workers"])
        answer = self.client.post("/workers", json={"url": url})
        assert answer.status_code == 202
        its_id = str(answer.json()["worker_id"])

        def over() -> bool:
            known = self.client.get(f"/workers/{its_id}")
            status = (known.json().get("job_status") or {}).get("status")
            return status == "failed" if there else known.is_success and status not in ("pending", "processing")

        wait_for("the worker was added", over)
        return its_id

    def remove(self, its_id: str) -> None:
        assert self.client.delete(f"/workers/{its_id}").status_code == 202

    def generate(self) -> httpx.Response:
        return self.client.post("/generate", json={"text": "hello"})


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path_factory.mktemp("router")) as process:
        yield process


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(Worker()) as made:
        yield made


@pytest.fixture
async def bus(context: Context) -> AsyncIterator[Bus]:
    bus = Bus(context)
    yield bus
    bus.close()


@asynccontextmanager
async def following(
    place: Router, bus: Bus, context: Context, folder: Path, identity: Identity = machines.PRIMARY
) -> AsyncIterator[Agent]:
    """An agent that runs, and its place in a router, until the block ends. The bus has not admitted it yet."""
    async with running(bus, context, Engine(), folder, identity) as agent, anyio.create_task_group() as tasks:
        tasks.start_soon(place.follow, agent)
        yield agent
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def placed(router: RouterProcess, worker: Worker, **keys: str) -> AsyncIterator[Router]:
    place = Router(router.url, worker.url, **keys)  # type: ignore[arg-type]
    try:
        yield place
    finally:
        await place.close()


async def bring(place: Router, there: bool) -> None:
    """As `follow` does, for a state that does not change."""
    with anyio.fail_after(PATIENCE_S):
        while await place.step(lambda _: there) is None:
            await anyio.lowlevel.checkpoint()


async def until_asked(server: Server, more: int) -> None:
    enough = len(server.asked) + more
    with anyio.fail_after(PATIENCE_S):
        while len(server.asked) < enough:
            await anyio.lowlevel.checkpoint()


def told(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "rolloutctl.router" and one.levelno == level]


# --- the real router --------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.engine_sglang
async def test_traffic_goes_to_who_is_in(router: RouterProcess, worker: Worker) -> None:
    nobody = router.generate()
    assert nobody.status_code == 503, (nobody.text, router.said)
    async with placed(router, worker, worker_key="engine-key") as place:
        await bring(place, True)
        assert router.generate().json() == {"text": worker.url}
        assert ("POST", "/generate", "engine-key") in worker.asked
        assert ("GET", "/health", None) in worker.asked
        await bring(place, True)  # there already
        (its_id,) = router.workers(worker).values()
        assert router.add(worker.url) == its_id
        await bring(place, False)
        assert router.workers(worker) == {} and router.generate().status_code == 503
        await bring(place, False)
        await bring(place, True)
        assert router.workers(worker)[worker.url] != its_id
        await bring(place, False)


@pytest.mark.anyio
@pytest.mark.engine_sglang
async def test_worker_whose_url_was_given_with_a_slash_is_the_same(router: RouterProcess, worker: Worker) -> None:
    for url in (worker.url, worker.url + "/"):
        router.add(url)
    with anyio.fail_after(PATIENCE_S):
        while len(router.workers(worker)) < 2:
            await anyio.lowlevel.checkpoint()
    async with placed(router, worker) as place:
        await bring(place, False)
    assert router.workers(worker) == {}


@pytest.mark.anyio
@pytest.mark.engine_sglang
async def test_worker_is_taken_once_it_is_healthy_and_not_let_go_before(router: RouterProcess, worker: Worker) -> None:
    worker.healthy = False
    async with placed(router, worker) as place:
        assert await place.step(lambda there: True) is None
        await until_asked(worker, 1)
        assert await place.step(lambda there: True) is None
        assert await place.step(lambda there: False) is None  # a job under way can't be taken back
        assert router.workers(worker) == {}
        worker.healthy = True
        await bring(place, False)  # so it comes in, and is taken out
    assert ("GET", "/server_info", None) in worker.asked and router.workers(worker) == {}


@pytest.mark.anyio
@pytest.mark.engine_sglang
async def test_router_with_a_key_that_gives_up_on_a_worker(worker: Worker, tmp_path: Path) -> None:
    with RouterProcess(tmp_path, "--worker-startup-timeout-secs", "2", key="router-key") as guarded:
        async with placed(guarded, worker, key="another") as place:
            with pytest.raises(CallRefused, match="/workers answered 401"):
                await bring(place, True)
        async with placed(guarded, worker, key="router-key") as place:
            worker.healthy = False
            with pytest.raises(CallRefused, match="did not take http.*health checks failed.*503"):
                await bring(place, True)
            assert await place.step(lambda there: False) is False
            worker.healthy = True
            await bring(place, True)
            assert list(guarded.workers(worker)) == [worker.url]


@pytest.mark.anyio
@pytest.mark.engine_sglang
async def test_router_that_lists_data_parallel_ranks(worker: Worker, tmp_path: Path) -> None:
    worker.ranks = 2
    with RouterProcess(tmp_path, "--dp-aware") as ranked:
        async with placed(ranked, worker) as place:
            await bring(place, True)
        assert sorted(ranked.workers(worker)) == [f"{worker.url}@0", f"{worker.url}@1"]
        async with placed(ranked, worker) as place:  # another life, which was never told the id
            await bring(place, False)
        assert ranked.workers(worker) == {}


@pytest.mark.anyio
@pytest.mark.engine_sglang
async def test_agent_keeps_its_place(
    router: RouterProcess, worker: Worker, bus: Bus, context: Context, tmp_path: Path
) -> None:
    left = router.add(worker.url)  # by a life that was killed
    assert await router.until(worker) == left
    async with following(Router(router.url, worker.url, poll_s=0.05), bus, context, tmp_path) as agent:
        await bus.admit()
        await reaches(agent, may_register)
        for command in (PAUSE, RESUME):
            bus.publish(command)
            await bus.outcome(bus.seq)
        assert await router.until(worker) == left
        router.remove(left)
        await router.until(worker, there=False)
        anew = await router.until(worker)
        assert anew != left
        bus.publish(WeightSync(version=1, phase="prepare", source=Checkpoint("v1"), in_flight="keep"))
        await bus.outcome(bus.seq)
        assert await router.until(worker) == anew
        bus.publish(WeightSync(version=1, phase="load", quarantine=frozenset({0})))
        await router.until(worker, there=False)
        bus.publish(WeightSync(version=1, phase="abort"))
        await router.until(worker)
    assert router.workers(worker) == {}


@pytest.mark.anyio
@pytest.mark.engine_sglang
async def test_router_that_was_restarted_gets_its_worker_back(
    worker: Worker, bus: Bus, context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RouterProcess(tmp_path) as mortal:
        async with following(Router(mortal.url, worker.url, poll_s=0.05), bus, context, tmp_path):
            await bus.admit()
            await mortal.until(worker)
            mortal.kill()
            with anyio.fail_after(PATIENCE_S):
                while not told(caplog, logging.WARNING):
                    await anyio.lowlevel.checkpoint()
            mortal.start()
            mortal.wait_up()
            await mortal.until(worker)
    assert len(told(caplog, logging.WARNING)) == 1


@pytest.mark.anyio
@pytest.mark.engine_sglang
async def test_agent_that_ends_does_not_wait_for_a_worker_that_is_not_healthy(
    router: RouterProcess,
    worker: Worker,
    bus: Bus,
    context: Context,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routers, "LEAVE_S", 0.2)
    monkeypatch.setattr(routers, "SLOW_S", 0.0)
    worker.healthy = False
    async with following(Router(router.url, worker.url), bus, context, tmp_path):
        await bus.admit()
        with anyio.fail_after(PATIENCE_S):
            while not told(caplog, logging.WARNING):
                await anyio.lowlevel.checkpoint()
    slow, last = told(caplog, logging.WARNING)
    assert "has not taken" in slow and "Can it reach that URL?" in slow
    assert "did not remove" in last and "remove it by hand" in last
    worker.healthy = True
    await router.until(worker)
    async with placed(router, worker) as place:
        await bring(place, False)


@pytest.mark.anyio
@pytest.mark.engine_sglang
async def test_engine_is_in_the_router_whenever_it_can_serve(
    router: RouterProcess, worker: Worker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole run: a trainer's bus, an agent, an engine that loads, sleeps and wakes, and the router."""
    caplog.set_level(logging.INFO, "rolloutctl.router")
    save(TinyModel(TinyConfig(), seed=1), tmp_path / "v1")
    place = Identity(replica=0, node_rank=0)
    quick = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=200)
    async with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=quick, checkpoints=tmp_path) as plane:
        tiny = TinyEngine(place, checkpoints=tmp_path, traces=tmp_path / "traces")
        config = AgentConfig(hello_retry_ms=20, observe_ms=20)
        async with (
            Agent(bus=plane.address, identity=place, engine=tiny, state_dir=tmp_path / "state", config=config) as agent,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(agent.run)
            tasks.start_soon(Router(router.url, worker.url).follow, agent)
            await plane.wait_for_agents(1)
            first = await router.until(worker)
            (await plane.pause()).raise_for_failures()
            (await plane.resume()).raise_for_failures()
            (await plane.sync_weights(1, Checkpoint("v1"), content=True)).raise_for_failures()
            assert agent.state.engine.version == 1
            assert await router.until(worker) == first
            (await plane.sleep()).raise_for_failures()
            await router.until(worker, there=False)
            (await plane.wake()).raise_for_failures()
            assert await router.until(worker) != first
            tasks.cancel_scope.cancel()
    assert router.workers(worker) == {}
    asked = [f"router {router.url}: {verb} {worker.url}" for verb in ("add", "remove")]
    assert told(caplog, logging.INFO) == [*asked, *asked]


# --- routers that fail ------------------------------------------------------------------------------------------------


class FailingRouter(Server):
    """Answers every request with `reply`, until that is None. Then it takes whom it is given, at once."""

    def __init__(self, port: int = 0) -> None:
        self.reply: tuple[int, object] | None = None
        self.listed: list[dict[str, str]] = []
        self.hangs = threading.Event()
        self.hangs.set()
        super().__init__(port)

    def answer(self, verb: str, path: str) -> tuple[int, object]:
        self.hangs.wait()
        if self.reply is not None:
            return self.reply
        if verb == "POST":
            self.listed = [{"id": "one", "url": "http://engine:1"}]
            return 202, {"worker_id": "one"}
        if verb == "DELETE":
            self.listed = []
            return 202, {}
        return (200, {"workers": self.listed}) if path == "/workers" else (404, {})

    def close(self) -> None:
        self.hangs.set()
        super().close()


@pytest.fixture
def failing() -> Iterator[FailingRouter]:
    with closing(FailingRouter()) as made:
        yield made


async def until_taken(server: FailingRouter) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not server.listed:
            await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ((500, {"error": "out of order"}), 'answered 500: {"error":"out of order"}. Retrying'),
        ((401, b""), "/workers answered 401"),
        ((200, b"<html>a proxy</html>"), "answered no list of workers: is it an SGLang router"),
        ((200, {"workers": None}), "answered no list of workers"),
        ((200, b"\xff\xfe{["), "answered no list of workers"),
        ((302, b""), "answered 302"),
    ],
    ids=["500", "401", "html", "no list", "garbage", "302"],
)
async def test_router_that_fails_is_told_of_once_and_tried_again(
    reply: tuple[int, object],
    says: str,
    failing: FailingRouter,
    bus: Bus,
    context: Context,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing.reply = reply
    async with following(Router(failing.url, "http://engine:1", poll_s=0.01), bus, context, tmp_path) as agent:
        await bus.admit()
        await until_asked(failing, 5)
        (warning,) = told(caplog, logging.WARNING)
        assert says in warning
        bus.publish(PAUSE)  # the agent goes on
        await bus.outcome(1)
        bus.publish(RESUME)
        await reaches(agent, may_register)
        failing.reply = None
        await until_taken(failing)
    assert failing.listed == [] and len(told(caplog, logging.WARNING)) == 1


@pytest.mark.anyio
async def test_router_that_comes_late_and_goes_early(
    bus: Bus, context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    place = Router(f"http://127.0.0.1:{port}", "http://engine:1", poll_s=0.01)
    async with following(place, bus, context, tmp_path):
        await bus.admit()
        with anyio.fail_after(PATIENCE_S):
            while not told(caplog, logging.WARNING):
                await anyio.lowlevel.checkpoint()
        with closing(FailingRouter(port)) as late:
            await until_taken(late)
    down = told(caplog, logging.WARNING)
    assert "did not answer: ConnectError" in down[0] and "could not be removed from the router" in down[-1]


@pytest.mark.anyio
async def test_agent_that_ends_does_not_wait_for_a_router_that_hangs(
    failing: FailingRouter,
    bus: Bus,
    context: Context,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routers, "LEAVE_S", 0.2)
    async with following(Router(failing.url, "http://engine:1", poll_s=0.01), bus, context, tmp_path):
        await bus.admit()
        await until_taken(failing)
        failing.hangs.clear()
        await until_asked(failing, 1)
    (warning,) = told(caplog, logging.WARNING)
    assert "did not remove" in warning


@pytest.mark.anyio
async def test_router_is_left_alone_by_who_has_not_joined_and_by_other_nodes(
    failing: FailingRouter, bus: Bus, context: Context, tmp_path: Path
) -> None:
    async with running(bus, context, Engine(), tmp_path, SECOND) as agent:
        await bus.admit()
        await reaches(agent, lambda state: state.joined)
        await Router(failing.url, "http://engine:1").follow(agent)
    async with following(Router(failing.url, "http://engine:1"), bus, context, tmp_path) as agent:
        await reaches(agent, lambda state: state.engine.tokenizer == "present")
    assert failing.asked == []


@pytest.mark.anyio
async def test_engine_that_went_away_is_taken_out(
    failing: FailingRouter, bus: Bus, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone() -> Observation:
        return replace(machines.PRESENT, tokenizer="unknown")

    engine = Engine()
    async with running(bus, context, engine, tmp_path) as agent, anyio.create_task_group() as tasks:
        tasks.start_soon(Router(failing.url, "http://engine:1").follow, agent)
        await bus.admit()
        await until_taken(failing)
        monkeypatch.setattr(engine, "observe", gone)
        with anyio.fail_after(PATIENCE_S):
            while failing.listed:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
