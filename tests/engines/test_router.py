"""An agent's registration in a router: what the real sglang-router does, and routers that fail.

The workers are small servers that answer as an engine server does; the agents, the buses and the router are real. The
rule for which servers are registered has its tests in tests/unit/test_routable.py.
"""

import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Self

import anyio
import anyio.lowlevel
import httpx
import pytest
from msgspec.structs import replace

from schemas.commands import Checkpoint, WeightSync
from schemas.events import Observation
from schemas.identity import Identity
from schemas.transport.sockets import Context
from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from tests.engines.servers import Process, free_port, wait_for
from tests.environments import python
from tests.trainers.gateway_fleet import gateway_fleet
from tests.trainers.posting_trainers import HTTP, Slime
from tests.unit import machines
from tests.unit.small_bus import PAUSE, RESUME, SECOND, Bus, Engine, reaches, running
from tests.waiting import until, wait_until
from workers import router as routers
from workers.agent import Agent
from workers.engines.client import CallRefused
from workers.engines.tiny.model import TinyConfig, TinyModel, save
from workers.router import RouterRegistration, may_register

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

PATIENCE_S = 30


# --- servers ----------------------------------------------------------------------------------------------------------


class Worker(HttpServer):
    """What a router needs of an engine: its health, and an answer.

    Attributes:
        ranks: Data-parallel ranks.
    """

    healthy, ranks = True, 1

    def __init__(self) -> None:
        super().__init__(self.answer)

    def answer(self, request: HttpRequest) -> Reply:
        if request.path in ("/health", "/health_generate"):
            return (200 if self.healthy else 503), {}
        if request.path == "/server_info":
            return 200, {"dp_size": self.ranks}
        return (200, {"text": self.url}) if request.path == "/generate" else (404, {})


class RouterProcess(Process):
    """A real sglang-router."""

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
            assert self.process.poll() is None, self.output
            with suppress(httpx.TransportError):
                return self.client.get("/liveness").is_success
            return False

        wait_for("the router is up", up)

    def workers(self, worker: HttpServer) -> dict[str, str]:
        """Ids of the entries of a worker, by URL."""
        listed = self.client.get("/workers").json()["workers"]
        return {entry["url"]: entry["id"] for entry in listed if entry["url"].startswith(worker.url)}

    async def until(self, worker: HttpServer, there: bool = True) -> str:
        """Wait until the worker is listed, or no longer listed. Returns its id."""
        await until(lambda: bool(self.workers(worker)) == there)
        return next(iter(self.workers(worker).values()), "")

    def add(self, url: str) -> str:
        """Add a worker as another program would, and wait for the job's end. Returns the id.

        The job of a worker that is listed already fails, and is not reported before the router has taken it up.
        """
        there = any(entry["url"] == url for entry in self.client.get("/workers").json()["workers"])
        answer = self.client.post("/workers", json={"url": url})
        assert answer.status_code == 202
        worker_id = str(answer.json()["worker_id"])

        def over() -> bool:
            known = self.client.get(f"/workers/{worker_id}")
            status = (known.json().get("job_status") or {}).get("status")
            return status == "failed" if there else known.is_success and status not in ("pending", "processing")

        wait_for("the worker was added", over)
        return worker_id

    def remove(self, worker_id: str) -> None:
        assert self.client.delete(f"/workers/{worker_id}").status_code == 202

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
    place: RouterRegistration, bus: Bus, context: Context, folder: Path, identity: Identity = machines.PRIMARY
) -> AsyncIterator[Agent]:
    """A running agent and its registration in a router, until the block ends. The bus has not admitted it yet."""
    async with running(bus, context, Engine(), folder, identity) as agent, anyio.create_task_group() as tasks:
        tasks.start_soon(place.follow, agent)
        yield agent
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def placed(router: RouterProcess, worker: Worker, **keys: str) -> AsyncIterator[RouterRegistration]:
    place = RouterRegistration(router.url, worker.url, **keys)  # type: ignore[arg-type]
    try:
        yield place
    finally:
        await place.close()


async def bring(place: RouterRegistration, there: bool) -> None:
    """Do what `follow` does for a state that does not change."""
    with anyio.fail_after(PATIENCE_S):
        while await place.step(lambda _: there) is None:
            await anyio.lowlevel.checkpoint()


def received(server: HttpServer) -> list[tuple[str, str, str | None]]:
    return [(request.verb, request.path, request.token) for request in server.requests]


async def until_received(server: HttpServer, more: int) -> None:
    enough = len(server.requests) + more
    await until(lambda: len(server.requests) >= enough)


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [line.getMessage() for line in caplog.records if line.name == "rolloutctl.router" and line.levelno == level]


# --- the real router --------------------------------------------------------------------------------------------------


@pytest.mark.engine_sglang
async def test_requests_go_to_registered_workers(router: RouterProcess, worker: Worker) -> None:
    unserved = router.generate()
    assert unserved.status_code == 503, (unserved.text, router.output)
    async with placed(router, worker, worker_key="engine-key") as place:
        await bring(place, True)
        # The router lists a worker a moment before it sends it requests.
        await until(lambda: router.generate().status_code != 503)
        assert router.generate().json() == {"text": worker.url}
        assert ("POST", "/generate", "engine-key") in received(worker)
        assert ("GET", "/health", None) in received(worker)
        await bring(place, True)  # there already
        (worker_id,) = router.workers(worker).values()
        assert router.add(worker.url) == worker_id
        await bring(place, False)
        assert router.workers(worker) == {}
        await until(lambda: router.generate().status_code == 503)
        await bring(place, False)
        await bring(place, True)
        assert router.workers(worker)[worker.url] != worker_id
        await bring(place, False)


@pytest.mark.engine_sglang
async def test_a_worker_url_with_a_trailing_slash_is_the_same_worker(router: RouterProcess, worker: Worker) -> None:
    for url in (worker.url, worker.url + "/"):
        router.add(url)
    await until(lambda: len(router.workers(worker)) == 2)
    async with placed(router, worker) as place:
        await bring(place, False)
    assert router.workers(worker) == {}


@pytest.mark.engine_sglang
async def test_a_worker_is_added_only_once_it_is_healthy(router: RouterProcess, worker: Worker) -> None:
    worker.healthy = False
    async with placed(router, worker) as place:
        assert await place.step(lambda there: True) is None
        await until_received(worker, 1)
        assert await place.step(lambda there: True) is None
        assert await place.step(lambda there: False) is None  # a running job can't be cancelled
        assert router.workers(worker) == {}
        worker.healthy = True
        await bring(place, False)  # so it is added, and then removed
    assert ("GET", "/server_info", None) in received(worker) and router.workers(worker) == {}


@pytest.mark.engine_sglang
async def test_a_router_with_a_key_that_gives_up_on_a_worker(worker: Worker, tmp_path: Path) -> None:
    with RouterProcess(tmp_path, "--worker-startup-timeout-secs", "6", key="router-key") as guarded:
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


@pytest.mark.engine_sglang
async def test_a_worker_that_is_listed_by_data_parallel_ranks_is_removed_as_one(worker: Worker, tmp_path: Path) -> None:
    worker.ranks = 2
    with RouterProcess(tmp_path, "--dp-aware") as ranked:
        async with placed(ranked, worker) as place:
            await bring(place, True)
        assert sorted(ranked.workers(worker)) == [f"{worker.url}@0", f"{worker.url}@1"]
        async with placed(ranked, worker) as place:  # a later life, which does not know the id
            await bring(place, False)
        assert ranked.workers(worker) == {}


@pytest.mark.engine_sglang
async def test_an_agent_stays_registered_through_pauses_and_syncs(
    router: RouterProcess, worker: Worker, bus: Bus, context: Context, tmp_path: Path
) -> None:
    left = router.add(worker.url)  # by an earlier life of the agent, which was killed
    assert await router.until(worker) == left
    async with following(RouterRegistration(router.url, worker.url, poll_s=0.05), bus, context, tmp_path) as agent:
        await bus.admit()
        await reaches(agent, may_register)
        for command in (PAUSE, RESUME):
            bus.publish(command)
            await bus.outcome(bus.seq)
        assert await router.until(worker) == left
        router.remove(left)
        await router.until(worker, there=False)
        second = await router.until(worker)
        assert second != left
        bus.publish(WeightSync(version=1, phase="prepare", source=Checkpoint("v1"), in_flight="keep"))
        await bus.outcome(bus.seq)
        assert await router.until(worker) == second
        bus.publish(WeightSync(version=1, phase="load", quarantine=frozenset({0})))
        await router.until(worker, there=False)
        bus.publish(WeightSync(version=1, phase="abort"))
        await router.until(worker)
    assert router.workers(worker) == {}


@pytest.mark.engine_sglang
async def test_a_restarted_router_gets_its_worker_back(
    worker: Worker, bus: Bus, context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RouterProcess(tmp_path) as mortal:
        async with following(RouterRegistration(mortal.url, worker.url, poll_s=0.05), bus, context, tmp_path):
            await bus.admit()
            await mortal.until(worker)
            mortal.kill()
            await until(lambda: bool(logged(caplog, logging.WARNING)))
            mortal.start()
            mortal.wait_up()
            await mortal.until(worker)
    assert len(logged(caplog, logging.WARNING)) == 1


@pytest.mark.engine_sglang
async def test_an_agent_that_ends_does_not_wait_for_an_unhealthy_worker(
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
    async with following(RouterRegistration(router.url, worker.url), bus, context, tmp_path):
        await bus.admit()
        await until(lambda: bool(logged(caplog, logging.WARNING)))
    slow, last = logged(caplog, logging.WARNING)
    assert "has not taken" in slow and "Can it reach that URL?" in slow
    assert "did not remove" in last and "remove it by hand" in last
    worker.healthy = True
    await router.until(worker)
    async with placed(router, worker) as place:
        await bring(place, False)


# --- routers that fail ------------------------------------------------------------------------------------------------


class FailingRouter(HttpServer):
    """Answers every request with `reply`, until that is None. Then it accepts every worker at once."""

    def __init__(self, port: int = 0) -> None:
        self.reply: Reply = None
        self.listed: list[dict[str, str]] = []
        self.hangs = threading.Event()
        self.hangs.set()
        super().__init__(self.answer, port)

    def answer(self, request: HttpRequest) -> Reply:
        self.hangs.wait()
        if self.reply is not None:
            return self.reply
        if request.verb == "POST":
            self.listed = [{"id": "one", "url": "http://engine:1"}]
            return 202, {"worker_id": "one"}
        if request.verb == "DELETE":
            self.listed = []
            return 202, {}
        return (200, {"workers": self.listed}) if request.path == "/workers" else (404, {})

    def close(self) -> None:
        self.hangs.set()
        super().close()


@pytest.fixture
def failing() -> Iterator[FailingRouter]:
    with closing(FailingRouter()) as made:
        yield made


async def until_taken(server: FailingRouter) -> None:
    await until(lambda: bool(server.listed))


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
async def test_a_failing_router_is_logged_once_and_retried(
    reply: tuple[int, object],
    says: str,
    failing: FailingRouter,
    bus: Bus,
    context: Context,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing.reply = reply
    async with following(
        RouterRegistration(failing.url, "http://engine:1", poll_s=0.01), bus, context, tmp_path
    ) as agent:
        await bus.admit()
        await until_received(failing, 5)
        (warning,) = logged(caplog, logging.WARNING)
        assert says in warning
        bus.publish(PAUSE)  # the agent carries on
        await bus.outcome(1)
        bus.publish(RESUME)
        await reaches(agent, may_register)
        failing.reply = None
        await until_taken(failing)
    assert failing.listed == [] and len(logged(caplog, logging.WARNING)) == 1


@pytest.mark.every_loop
async def test_a_router_that_starts_late_and_ends_early(
    bus: Bus, context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    place = RouterRegistration(f"http://127.0.0.1:{port}", "http://engine:1", poll_s=0.01)
    async with following(place, bus, context, tmp_path):
        await bus.admit()
        await until(lambda: bool(logged(caplog, logging.WARNING)))
        with closing(FailingRouter(port)) as late:
            await until_taken(late)
    down = logged(caplog, logging.WARNING)
    assert "did not answer: ConnectError" in down[0] and "could not be removed from the router" in down[-1]


async def test_an_agent_that_ends_does_not_wait_for_a_hanging_router(
    failing: FailingRouter,
    bus: Bus,
    context: Context,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routers, "LEAVE_S", 0.2)
    async with following(RouterRegistration(failing.url, "http://engine:1", poll_s=0.01), bus, context, tmp_path):
        await bus.admit()
        await until_taken(failing)
        failing.hangs.clear()
        await until_received(failing, 1)
    (warning,) = logged(caplog, logging.WARNING)
    assert "did not remove" in warning


async def test_agents_that_have_not_joined_and_other_nodes_leave_the_router_alone(
    failing: FailingRouter, bus: Bus, context: Context, tmp_path: Path
) -> None:
    async with running(bus, context, Engine(), tmp_path, SECOND) as agent:
        await bus.admit()
        await reaches(agent, lambda state: state.joined)
        await RouterRegistration(failing.url, "http://engine:1").follow(agent)
    async with following(RouterRegistration(failing.url, "http://engine:1"), bus, context, tmp_path) as agent:
        await reaches(agent, lambda state: state.engine.tokenizer == "present")
    assert failing.requests == []


async def test_an_engine_that_went_away_is_removed(
    failing: FailingRouter, bus: Bus, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone() -> Observation:
        return replace(machines.PRESENT, tokenizer="unknown")

    engine = Engine()
    async with running(bus, context, engine, tmp_path) as agent, anyio.create_task_group() as tasks:
        tasks.start_soon(RouterRegistration(failing.url, "http://engine:1").follow, agent)
        await bus.admit()
        await until_taken(failing)
        monkeypatch.setattr(engine, "observe", gone)
        await until(lambda: not failing.listed)
        tasks.cancel_scope.cancel()


# --- behind the gateway -----------------------------------------------------------------------------------------------


def live_router_workers(router: RouterProcess) -> list[str]:
    """What slime does before it drains requests (15b8e507, `sglang_utils/server_control.py`).

    `get_live_router_workers` removes a worker that is not healthy, and no one of slime ever adds it again.
    """
    live = []
    for worker in router.client.get("/workers").json()["workers"]:
        if HTTP.get(f"{worker['url']}/health_generate").is_success:
            live.append(worker["url"])
        else:
            router.client.delete(f"/workers/{worker['id']}")
    return live


def test_a_recovered_replica_of_slime_gets_its_traffic_back_by_its_agent(
    router: RouterProcess, worker: Worker, tmp_path: Path
) -> None:
    """slime registers the URLs of the gateway. An agent with --router and that URL keeps its replica there."""
    roots = [tmp_path / "run", tmp_path / "run", tmp_path / "elsewhere"]
    with gateway_fleet(tmp_path, replicas=3, ports=True, engines=[worker.url] * 3, roots=roots) as fleet:
        for replica in range(3):
            router.add(fleet.urls[replica])
            fleet.stop_agent(replica)
            fleet.router = router.url
            fleet.start_agent(replica)
        wait_until(lambda: len(fleet.plane.serving()) == 3)
        assert sorted(live_router_workers(router)) == sorted(fleet.urls)
        trainer = Slime(fleet.addresses)
        trainer.reload(fleet.write("v1", 1), "1")
        wait_until(lambda: sorted(live_router_workers(router)) == sorted(fleet.urls[:2]))
        save(TinyModel(TinyConfig(), seed=2), roots[2] / "v2")
        trainer.reload(fleet.write("v2", 2), "2")
        wait_until(lambda: sorted(live_router_workers(router)) == sorted(fleet.urls))
        assert router.generate().is_success
    wait_until(lambda: live_router_workers(router) == [])
