"""Weights that a trainer's own data plane puts into real engines, while the bus carries the decisions alone.

A bus, two agents, two engines, and a trainer that writes tensors straight into the engines, as verl's data plane does.
"""

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from msgspec import Raw
from msgspec.structs import replace

from controlplane.bus.bus import Bus
from controlplane.machine.coordinator import CoordinatorState
from controlplane.record.entries import LogEntry
from controlplane.record.invariants import verify
from controlplane.record.log import RunLog
from schemas.commands import Pushed, Target
from schemas.config import AgentConfig, BusConfig
from schemas.errors import CommandFailed, EngineError
from schemas.events import Answer, EngineCall, EngineReturned, Load
from schemas.identity import Identity
from schemas.outcomes import Failed
from schemas.reports import SyncReport
from schemas.wire import encode
from workers.agent import Agent
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, digest, save, weights
from workers.engines.tiny.server import TinyClient, WeightsDescription

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=500)
PHASE_MS = 20_000


def trained(step: int) -> TinyModel:
    """Return the trainer's model after a step."""
    return TinyModel(TinyConfig(), seed=step)


class Fleet:
    """Replicas of one node each, and the trainer that pushes into their engines."""

    def __init__(self, folder: Path, bus: Bus) -> None:
        self.folder, self.bus = folder, bus
        self.engines: dict[int, TinyEngine] = {}
        self.agents: dict[int, Agent] = {}

    @asynccontextmanager
    async def replica(self, replica: int) -> AsyncIterator[Agent]:
        identity = Identity(replica=replica, node_rank=0)
        engine = self.engines[replica] = TinyEngine(
            identity, checkpoints=self.folder, traces=self.folder / "traces", serve=self._front(replica), seed=100
        )
        config = AgentConfig(hello_retry_ms=20, observe_ms=20)
        agent = Agent(
            bus=self.bus.address, identity=identity, engine=engine, state_dir=self.folder / "state", config=config
        )
        async with agent, anyio.create_task_group() as tasks:
            self.agents[replica] = agent
            tasks.start_soon(agent.run)
            yield agent
            tasks.cancel_scope.cancel()

    def _front(self, replica: int) -> str:
        return f"ipc://{self.folder}/engine-{replica}"

    def held(self, replica: int) -> WeightsDescription:
        return TinyClient(self._front(replica), timeout_s=10).weights()

    async def generates(self, replica: int, timeout_s: float = 10) -> bool:
        client = TinyClient(self._front(replica), timeout_s=timeout_s)
        try:
            await to_thread.run_sync(client.generate, [[1]], 4)
        except EngineError:
            return False
        return True

    async def push(self, step: int, *replicas: int) -> None:
        for replica in replicas:
            await self.engines[replica].push(f"step {step}", weights(trained(step)))

    async def sync(self, version: int, step: int, *pushed_to: int, path: str = "", fails: bool = False) -> SyncReport:
        """Sync a step's weights, and push them once the load phase begins. A push that `fails` ends the phase."""

        def loading(state: CoordinatorState) -> bool:
            return state.sync is not None and state.sync.phase == "load"

        source = Pushed(f"step {step}", path)
        ticket = self.bus.sync(
            version, source, None, in_flight="abort", quorum=None, target=Target(), timeout_ms=PHASE_MS
        )
        with anyio.fail_after(60):
            await self.bus.wait_until(loading)
            await self.push(step, *pushed_to)
            if fails:
                self.bus.note_sent(ticket, "the data plane lost a rank")
            return await ticket


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    """Two replicas that serve the pushed version 1."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(Bus("tcp://127.0.0.1:0", RunLog.open(folder / "run.db"), QUICK))
        made = Fleet(folder, bus)
        for replica in (0, 1):
            agent = await stack.enter_async_context(made.replica(replica))
            with anyio.fail_after(30):
                await agent.wait_ready()
        with anyio.fail_after(20):
            await bus.wait_until(lambda state: [member.state for member in state.members.values()] == ["live", "live"])
        (await made.sync(1, 1, 0, 1)).raise_for_failures()
        yield made
    assert list(verify(RunLog.read(folder / "run.db"))) == []


async def test_each_replica_serves_what_the_trainer_pushed_once_its_label_is_seen(tmp_path: Path) -> None:
    async with fleet(tmp_path) as pushed:
        report = await pushed.sync(2, 20, 0, 1)
        report.raise_for_failures()
        assert (report.status, report.loaded) == ("committed", (0, 1))
        for replica in (0, 1):
            held = pushed.held(replica)
            assert (held.label, held.digest) == ("step 20", digest(weights(trained(20))))
            assert pushed.agents[replica].state.engine.version == 2
            assert await pushed.generates(replica)


async def test_a_push_that_reaches_one_replica_leaves_it_out_of_service_and_the_other_as_it_was(tmp_path: Path) -> None:
    async with fleet(tmp_path) as pushed:
        report = await pushed.sync(2, 2, 0, fails=True)
        assert report.status == "aborted" and "the data plane lost a rank" in report.reason
        with anyio.fail_after(10):
            await pushed.agents[1].wait_ready()
            state = await pushed.agents[0].wait_until(lambda state: state.suppressed.quarantined > 0)
        outcome = state.answers[-1].outcome  # the agent may have seen the push arrive before the abort, or not
        assert isinstance(outcome, Failed) and re.search(
            r"holds (version 2|weights labelled 'step 2')", outcome.message
        )
        assert await pushed.generates(1) and pushed.held(1).label == "step 1"
        assert not await pushed.generates(0, timeout_s=0.3)
        with pytest.raises(CommandFailed):
            report.raise_for_failures()

        healed = await pushed.sync(3, 3, 0, 1)
        healed.raise_for_failures()
        assert healed.loaded == (0, 1) and await pushed.generates(0)


async def test_a_late_joiner_takes_the_checkpoint_beside_the_push(tmp_path: Path) -> None:
    async with fleet(tmp_path) as pushed:
        save(trained(2), tmp_path / "v2")
        (await pushed.sync(2, 2, 0, 1, path="v2")).raise_for_failures()
        async with pushed.replica(2) as late:
            with anyio.fail_after(30):
                await late.wait_ready()
            held = pushed.held(2)
            assert (held.label, held.digest) == ("step 2", digest(weights(trained(2))))
            (await pushed.sync(3, 3, 0, 1, 2)).raise_for_failures()


async def test_no_adapter_is_asked_to_load_what_is_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EngineCall] = []
    perform = TinyEngine.perform

    async def noted(self: TinyEngine, call: EngineCall, timeout_s: float) -> object:
        made.append(call)
        return await perform(self, call, timeout_s)

    monkeypatch.setattr(TinyEngine, "perform", noted)
    async with fleet(tmp_path):
        assert made and not any(isinstance(call, Load) for call in made)


async def test_a_log_shows_an_engine_that_is_left_on_weights_with_another_label(tmp_path: Path) -> None:
    async with fleet(tmp_path):
        pass
    entries = list(RunLog.read(tmp_path / "run.db"))
    (last,) = [entry for entry in entries if entry.agent == "0.0" and _served(entry)][-1:]
    event = last.typed_event()
    assert isinstance(event, EngineReturned) and event.observation is not None
    other = replace(event, observation=replace(event.observation, label="step 9"))
    changed = [replace(entry, event=Raw(encode(other))) if entry is last else entry for entry in entries]
    (violation,) = verify(changed)
    assert (violation.invariant, violation.agents) == ("I1", ("0.0",))
    assert violation.text == "generates on weights labelled 'step 9', and 'step 1' is committed"


def _served(entry: LogEntry) -> bool:
    """Whether this is the end of the commit."""
    answered = any(isinstance(effect, Answer) for effect in entry.typed_effects())
    event = entry.typed_event()
    seen = event.observation if isinstance(event, EngineReturned) else None
    return answered and seen is not None and bool(seen.generating)
