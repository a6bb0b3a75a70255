"""Observing agents beside engines that another program drives: what they find, and that they change nothing.

The driver posts to its engines itself, as today's trainers do, and gets it wrong. The bus and the agents only look on.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from io import StringIO
from pathlib import Path

import anyio
import pytest

from controlplane.analysis.invariants import Violation, verify
from controlplane.bus.bus import Bus
from controlplane.cli.replay_log import replay_log
from controlplane.record.log import RunLog
from controlplane.report.collect import collect
from controlplane.report.page import write_page
from schemas import events
from schemas.commands import Checkpoint, ProfilePlan
from schemas.config import AgentConfig, BusConfig, ObservePolicy
from schemas.desired import ProfileSession
from schemas.errors import ConfigError
from schemas.events import Observation
from schemas.identity import Identity, RolloutMode
from tests.engines.http_servers import HttpServer
from tests.engines.observed_tiny import ObservedTiny
from tests.running import typed
from tests.waiting import until
from workers.agent import Agent
from workers.engine import EngineView
from workers.engines.observed import ObservedEngine
from workers.engines.sglang.launch import SGLANG
from workers.engines.sglang.server import ROUTES as SGLANG_ROUTES
from workers.engines.sglang.server import SGLangReader
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, save
from workers.engines.vllm.launch import VLLM
from workers.engines.vllm.server import ROUTES as VLLM_ROUTES
from workers.engines.vllm.server import VLLMReader

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

AT_ONCE = ObservePolicy(torn_ms=1, paused_ms=1, profiling_ms=1)
REPLICAS = (0, 1)


def observer(replica: int) -> Identity:
    return Identity(replica=replica, node_rank=0, mode=RolloutMode.OBSERVED)


class CountedTiny(ObservedTiny):
    """Counts how often it was looked at."""

    looks = 0

    async def observe(self) -> Observation:
        self.looks += 1
        return await super().observe()


class Driver:
    """A trainer that posts to its engines itself."""

    def __init__(self, folder: Path, engines: list[TinyEngine], views: list[CountedTiny], agents: list[Agent]) -> None:
        self.engines, self._views, self.agents = engines, views, agents
        for version in (1, 2):
            save(TinyModel(TinyConfig(), seed=version), folder / f"v{version}")

    async def post(self, replica: int, *calls: events.EngineCall) -> None:
        for call in calls:
            await self.engines[replica].perform(call, 10.0)

    async def update(self, version: int, *replicas: int) -> None:
        """Pause all, load into these, resume all: what trainers do, without asking whether all have loaded."""
        for replica in REPLICAS:
            await self.post(replica, events.Pause("abort"))
        for replica in replicas:
            await self.post(replica, events.Load(version, Checkpoint(f"v{version}"), None), events.Flush())
        for replica in REPLICAS:
            await self.post(replica, events.Resume())

    async def go_on(self) -> None:
        """Let the agents look at their engines a few times more, so that time passes."""
        wanted = [view.looks + 3 for view in self._views]
        await until(lambda: all(view.looks > looks for view, looks in zip(self._views, wanted, strict=True)))

    async def observed(self, replica: int, **what: object) -> None:
        """Wait until the agent has seen this."""

        def sees(seen: Observation | None) -> bool:
            return seen is not None and all(getattr(seen, name) == value for name, value in what.items())

        with anyio.fail_after(20):
            await self.agents[replica].wait_until(lambda state: sees(state.engine.seen))


@asynccontextmanager
async def driven(folder: Path, policy: ObservePolicy) -> AsyncIterator[Driver]:
    """Two engines that a trainer drives, and agents that look on. They serve v1 at first."""
    async with AsyncExitStack() as stack:
        quick = BusConfig(head_interval_ms=50, heartbeat_ms=40, observe=policy)
        bus = await stack.enter_async_context(Bus("tcp://127.0.0.1:0", RunLog.open(folder / "run.db"), quick))
        engines, views, agents = [], [], []
        for replica in REPLICAS:
            place, front = Identity(replica=replica, node_rank=0), f"ipc://{folder}/engine-{replica}"
            engine = TinyEngine(place, checkpoints=folder, traces=folder / "traces", serve=front)
            await engine.open()
            stack.push_async_callback(engine.close)
            engines.append(engine)
            views.append(CountedTiny(front))
            agents.append(await stack.enter_async_context(observing(bus.address, folder, replica, views[-1])))
        driver = Driver(folder, engines, views, agents)
        await driver.update(1, *REPLICAS)
        for replica in REPLICAS:
            await driver.observed(replica, version=1, generating=True)
        yield driver
        await driver.go_on()


@asynccontextmanager
async def observing(bus: str, folder: Path, replica: int, engine: EngineView) -> AsyncIterator[Agent]:
    config = AgentConfig(hello_retry_ms=20, observe_ms=20)
    agent = Agent(bus=bus, identity=observer(replica), engine=engine, state_dir=folder / "state", config=config)
    async with agent, anyio.create_task_group() as tasks:
        tasks.start_soon(agent.run)
        with anyio.fail_after(20):
            await agent.wait_until(lambda state: state.joined and state.engine.seen is not None)
        yield agent
        tasks.cancel_scope.cancel()


def page(folder: Path) -> str:
    """The report of the run."""
    text = StringIO()
    write_page(text, collect(RunLog.walk(folder / "run.db")), "run", "run.db")
    return text.getvalue()


def found(folder: Path) -> list[Violation]:
    return list(verify(RunLog.walk(folder / "run.db")))


async def test_a_run_that_goes_well_has_no_findings(tmp_path: Path) -> None:
    async with driven(tmp_path, ObservePolicy()) as driver:
        await driver.update(2, *REPLICAS)
        for replica in REPLICAS:
            await driver.observed(replica, version=2, generating=True)
    assert found(tmp_path) == []
    report = collect(RunLog.walk(tmp_path / "run.db"))
    assert report.tone == "ok", report.verdict
    assert replay_log(RunLog.walk(tmp_path / "run.db")).agents == ("0.0", "1.0")


async def test_what_its_driver_gets_wrong_is_found_and_left_as_it_is(tmp_path: Path) -> None:
    async with driven(tmp_path, AT_ONCE) as driver:
        await driver.update(2, 0)  # the load into replica 1 failed, and all are resumed
        await driver.observed(0, version=2, generating=True)
        await driver.go_on()
        await driver.post(1, events.Pause("abort"))
        await driver.observed(1, generating=False)
        await driver.post(0, events.StartProfile(ProfileSession(3, ProfilePlan()), "s3"))
        await driver.observed(0, profiling=True)
        assert (await driver.engines[0].observe()).profiling
    (torn,), (pause,), (leak,) = (
        [finding for finding in found(tmp_path) if finding.invariant == name] for name in ("O1", "O2", "O3")
    )
    assert "weights 2 on replica 0; weights 1 on replica 1" in torn.text
    assert pause.agents == ("1.0",) and pause.text.startswith("paused since ")
    assert pause.text.endswith("and never seen to resume")
    assert leak.agents == ("0.0",) and leak.text.endswith("and never seen to stop")
    verified = typed("log", "verify", tmp_path / "run.db")
    assert verified.returncode == 1 and "replicas served different weights for " in verified.stdout
    replica = collect(RunLog.walk(tmp_path / "run.db")).observed[1]
    assert replica.paused_ns > 0 and replica.pauses.current is not None
    held = replica.weights.current
    assert held is not None and held.what == "1"
    written = page(tmp_path)
    assert written.index("The run that was observed went wrong") < written.index("Torn fleet") < written.index("<nav")
    assert written.index("h-failures") < written.index("h-observed") < written.index("h-fleet")


# --- what they touch --------------------------------------------------------------------------------------------------


def view(kind: str, url: str) -> EngineView:
    if kind == "sglang":
        return ObservedEngine(SGLANG, observer(0), SGLangReader(url))
    return ObservedEngine(VLLM, observer(0), VLLMReader(url))


@pytest.mark.parametrize(("reader", "routes"), [(SGLangReader, SGLANG_ROUTES), (VLLMReader, VLLM_ROUTES)])
async def test_a_reader_has_no_way_to_call(reader: type[SGLangReader | VLLMReader], routes: dict[str, object]) -> None:
    with HttpServer(lambda _: (200, {})) as server:
        reads = reader(server.url)
        public = {name for name in dir(reads) if not name.startswith("_")}
        assert public == {"close", "get", "info", "methods", "open", "read", "where"}
        for method in routes:
            if routes[method].verb != "GET":  # type: ignore[attr-defined]
                with pytest.raises(KeyError):
                    await reads.read(method)
        assert server.requests == []
        await reads.close()


def test_a_view_offers_nothing_but_to_look(tmp_path: Path) -> None:
    for engine in (view("vllm", "http://h:1"), view("sglang", "http://h:1")):
        assert {name for name in dir(engine) if not name.startswith("_")} - {"current_launch"} == {
            *("open", "observe", "close")
        }
        with pytest.raises(ConfigError, match="can only be observed"):
            Agent(bus="tcp://127.0.0.1:1", identity=Identity(replica=0, node_rank=0), engine=engine, state_dir=tmp_path)
