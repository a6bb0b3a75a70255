"""Weights that a trainer's own data plane puts into real engines, while the bus carries the decisions alone.

A bus, two agents, two engines, and a trainer that writes tensors straight into the engines, as verl's data plane does.
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from msgspec import Raw
from msgspec.structs import replace

from controlplane.analysis.invariants import verify
from controlplane.machine.coordinator import CoordinatorState
from controlplane.machine.events import SyncRequested
from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from schemas.commands import Pushed
from schemas.errors import CommandFailed
from schemas.events import Answer, EngineReturned
from schemas.outcomes import Failed
from schemas.reports import SyncReport
from schemas.wire import encode
from tests.engines.tiny_fleet import TinyFleet, model, push
from workers.engines.tiny.model import digest, save, weights

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

PHASE_MS = 20_000


class Fleet(TinyFleet):
    """Its trainer pushes into the engines."""

    async def push(self, step: int, *replicas: int) -> None:
        for replica in replicas:
            await to_thread.run_sync(push, self.engines[replica], f"step {step}", weights(model(step)))

    async def sync(self, version: int, step: int, *pushed_to: int, path: str = "", fails: bool = False) -> SyncReport:
        """Sync a step's weights, and push them once the load phase begins. A push that `fails` ends the phase."""

        def loading(state: CoordinatorState) -> bool:
            return state.sync is not None and state.sync.phase == "load"

        source = Pushed(f"step {step}", path)
        ticket = self.bus.sync(SyncRequested(version=version, source=source, manifest=None, timeout_ms=PHASE_MS))
        with anyio.fail_after(60):
            await self.bus.wait_until(loading)
            await self.push(step, *pushed_to)
            if fails:
                self.bus.note_sent(ticket, "the data plane lost a rank")
            return await ticket


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    """Two replicas that serve the pushed version 1."""
    async with Fleet.of_two(folder) as made:
        (await made.sync(1, 1, 0, 1)).raise_for_failures()
        yield made
    assert list(verify(RunLog.read(folder / "run.db"))) == []


async def test_weights_that_are_still_written_are_not_committed_though_the_label_is_seen(tmp_path: Path) -> None:
    """The trainer's data plane sets the label with each bucket, and the last bucket fails."""
    async with fleet(tmp_path) as pushed:
        ticket = pushed.bus.sync(
            SyncRequested(version=2, source=Pushed("step 2"), manifest=None, timeout_ms=PHASE_MS, sends=True)
        )
        with anyio.fail_after(60):
            await pushed.bus.wait_until(lambda state: state.sync is not None and state.sync.phase == "load")
            await pushed.push(2, 0, 1)
            state = await pushed.bus.wait_until(
                lambda state: state.sync is not None and state.sync.held_until_us is not None
            )
            assert state.sync is not None and state.sync.phase == "commit" and not ticket.done
            pushed.bus.note_sent(ticket, "bucket 5 of 5 failed")
            report = await ticket
        assert report.status == "aborted" and "bucket 5 of 5 failed" in report.reason
        assert pushed.bus.state.default_desired.version == 1
        (await pushed.sync(3, 3, 0, 1)).raise_for_failures()


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
        assert await pushed.generates_on(1) is not None and pushed.held(1).label == "step 1"
        assert await pushed.generates_on(0, 0.3) is None
        with pytest.raises(CommandFailed):
            report.raise_for_failures()

        healed = await pushed.sync(3, 3, 0, 1)
        healed.raise_for_failures()
        assert healed.loaded == (0, 1) and await pushed.generates_on(0) is not None


async def test_a_late_joiner_takes_the_checkpoint_beside_the_push(tmp_path: Path) -> None:
    async with fleet(tmp_path) as pushed:
        save(model(2), tmp_path / "v2")
        (await pushed.sync(2, 2, 0, 1, path="v2")).raise_for_failures()
        async with pushed.replica(2) as late:
            with anyio.fail_after(30):
                await late.wait_ready()
            held = pushed.held(2)
            assert (held.label, held.digest) == ("step 2", digest(weights(model(2))))
            (await pushed.sync(3, 3, 0, 1, 2)).raise_for_failures()


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
