"""The control plane as a trainer uses it: with and without an event loop, in steps, and when things go wrong."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import zeros

from controlplane import ControlPlane
from schemas import errors
from schemas.commands import Broadcast, Checkpoint, WeightSync
from schemas.config import AgentConfig, BusConfig
from schemas.events import Call, Load, Returned
from schemas.identity import Identity
from schemas.profiler.config import ProfilerConfig
from schemas.safetensors.digest import layout_digest
from schemas.safetensors.format import TensorSpec
from schemas.safetensors.manifest import build_manifest, manifest_of
from tests.unit.small_bus import FLUSH, PRIMARY, SECOND, Engine
from tests.waiting import wait_until
from workers.agent import Agent
from workers.traces.node import NodeTraces

ADDRESS = "tcp://127.0.0.1:0"
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=100)


@contextmanager
def agents(address: str, folder: Path, places: dict[Identity, Engine]) -> Iterator[None]:
    """Agents on a thread and loop of their own, as they would be in other processes."""
    ended: list[anyio.CancelScope] = []
    begun = threading.Event()

    async def run_agent(place: Identity, engine: Engine) -> None:
        config, left = AgentConfig(hello_retry_ms=20, observe_ms=20), NodeTraces(folder / "traces", place)
        async with Agent(
            bus=address, identity=place, engine=engine, state_dir=folder, traces=left, config=config
        ) as agent:
            await agent.run()

    async def main() -> None:
        async with anyio.create_task_group() as tasks, anyio.from_thread.BlockingPortal() as portal:
            portals.append(portal)
            ended.append(tasks.cancel_scope)
            for place, engine in places.items():
                tasks.start_soon(run_agent, place, engine)
            begun.set()
            await anyio.sleep_forever()

    portals: list[anyio.from_thread.BlockingPortal] = []
    thread = threading.Thread(target=anyio.run, args=(main,))
    thread.start()
    try:
        begun.wait()
        yield
    finally:
        portals[0].call(ended[0].cancel)
        thread.join()


@contextmanager
def pair(folder: Path, engine: Engine) -> Iterator[ControlPlane]:
    """An open control plane, with the agents of a replica that has two nodes; the first has this engine."""
    with (
        ControlPlane(ADDRESS, log=folder / "run.db", config=QUICK) as plane,
        agents(plane.address, folder, {PRIMARY: engine, SECOND: Engine()}),
    ):
        plane.wait_for_agents(2, timeout=20).wait()
        yield plane


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    profiler = ProfilerConfig(steps=(1,))
    with ControlPlane(
        ADDRESS, log=tmp_path / "run.db", config=QUICK, profiler=profiler, checkpoints=tmp_path
    ) as opened:
        yield opened


def actions(plane: ControlPlane) -> list[str]:
    """The profile commands that were published, in order."""
    return [report.command.action for report in plane.profile_reports]  # type: ignore[union-attr]


def checkpoint(folder: Path) -> Checkpoint:
    folder.mkdir()
    save_file({"w": zeros(2)}, folder / "model.safetensors")
    return Checkpoint(folder.name)


def test_every_operation_in_ten_lines(plane: ControlPlane, tmp_path: Path) -> None:
    engine = Engine()
    with agents(plane.address, tmp_path, {PRIMARY: engine, SECOND: Engine()}):
        status = plane.wait_for_agents(2, timeout=20).wait()
        assert [line.agent for line in status.agents] == ["0.0", "0.1"]
        for operation in (plane.pause, plane.resume, plane.flush, plane.abort_requests):
            report = operation().wait()
            assert (report.acted, report.skipped) == (("0.0",), ("0.1",)), operation
            report.raise_for_failures()
        assert plane.flush(replicas=[7]).wait().acted == ()
    assert len(engine.calls) == 4


def test_an_agent_that_left_is_named_until_it_is_retired(plane: ControlPlane, tmp_path: Path) -> None:
    with agents(plane.address, tmp_path, {PRIMARY: Engine()}):
        plane.wait_for_agents(1, timeout=20).wait()
    wait_until(lambda: plane.status().agents[0].state == "left")
    with pytest.raises(errors.CommandFailed, match=r"0\.0: missing \(absent for 0 s\)"):
        plane.flush().wait().raise_for_failures()
    with pytest.raises(errors.CommandError, match="this run has no agent 5"):
        plane.retire(0, "5").wait()
    assert plane.retire(0).wait().agents == ()
    assert plane.flush().wait().outcomes == ()


@pytest.mark.parametrize("anyio_backend", [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})])
def test_an_async_trainer_awaits_the_same_tickets(tmp_path: Path, anyio_backend: tuple[str, dict[str, object]]) -> None:
    async def trainer() -> None:
        plane = ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK, profiler=ProfilerConfig(steps=(0,)))
        async with plane:
            with agents(plane.address, tmp_path, {PRIMARY: Engine(), SECOND: Engine()}):
                await plane.wait_for_agents(2, timeout=20)
                async with plane.step(0):
                    paused, resumed = plane.pause(), plane.resume()
                    assert (await resumed).acted == ("0.0",)
                    assert (await paused).acted == ("0.0",)
                assert actions(plane) == ["check", "start", "stop"]

    async def step() -> None:
        await anyio.lowlevel.checkpoint()

    name, options = anyio_backend
    anyio.run(trainer, backend=name, backend_options=options)


def test_a_step_opens_and_closes_profiling_and_never_fails_for_it(
    plane: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    with agents(plane.address, tmp_path, {PRIMARY: engine}), caplog.at_level(logging.WARNING):
        plane.wait_for_agents(1, timeout=20).wait()
        engine.raises = RuntimeError("no profiler in this build")
        for step in range(3):
            with plane.step(step):
                pass
    check, start, stop = plane.profile_reports
    assert (check.failed, start.failed, stop.skipped) == (("0.0",), ("0.0",), ("0.0",))
    assert "profile start step 1 on agent 0.0" in caplog.text and "the step goes on" in caplog.text


def test_closing_closes_an_open_session(tmp_path: Path) -> None:
    plane = ControlPlane(ADDRESS, log=tmp_path / "run.db", profiler=ProfilerConfig(steps=(1,)))
    plane.open()
    plane.step(1).__enter__()
    plane.close()
    assert actions(plane) == ["check", "start", "stop"]


def test_what_is_served_is_known_as_soon_as_it_is_answered(tmp_path: Path) -> None:
    """With heartbeats so rare that none is needed but the first. So silence for a timeout means nothing."""
    rare = BusConfig(head_interval_ms=50, heartbeat_ms=3_600_000, agent_timeout_ms=7_200_000, retransmit_ms=100)
    places = {PRIMARY: Engine(), SECOND: Engine()}
    plane = ControlPlane(ADDRESS, log=tmp_path / "run.db", config=rare, checkpoints=tmp_path)
    with plane, agents(plane.address, tmp_path, places):
        wait_until(lambda: plane.serving() == {0: 0})
        plane.sync_weights(1, checkpoint(tmp_path / "one")).wait(20).raise_unless_committed()
        assert plane.serving() == {0: 1}
        plane.pause().wait()
        assert plane.serving() == {}
        plane.resume().wait()
        assert plane.serving() == {0: 1}
        assert plane.status().replicas[0].serving == 1
    with pytest.raises(errors.BusClosed):
        plane.serving()


def test_a_notebook_shows_plane_status_and_reports(tmp_path: Path) -> None:
    plane = ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK)
    assert "is not open" in plane._repr_html_()
    with plane, agents(plane.address, tmp_path, {PRIMARY: Engine()}):
        plane.wait_for_agents(1, timeout=20).wait()
        for shown in (plane, plane.status(), plane.flush().wait()):
            page = shown._repr_html_()
            assert page.startswith("<pre>") and "0.0" in page, page


def test_absent_agents_are_named(plane: ControlPlane, tmp_path: Path) -> None:
    engine = Engine()
    engine.tokenizer = "unknown"
    with agents(plane.address, tmp_path, {PRIMARY: engine}):
        wait_until(lambda: bool(plane.status().agents))
        with pytest.raises(errors.AgentsMissing) as caught:
            plane.wait_for_agents(2, timeout=0.5).wait()
    assert "expected 2 agents, all of them serving, within 0.5 s" in str(caught.value)
    assert "0.0 lacks: " in str(caught.value) and "not ready" in str(caught.value)


def test_an_empty_fleet_is_named_too(plane: ControlPlane) -> None:
    with pytest.raises(errors.AgentsMissing, match="expected 1 agent that serves within.*\n.* 0 agents\n") as caught:
        plane.wait_for_agents(1, timeout=0.05).wait()
    assert f"must be started with --bus {plane.address}." in str(caught.value)


def test_agents_of_a_bus_that_listens_everywhere_are_told_a_name_of_its_machine(tmp_path: Path) -> None:
    with (
        ControlPlane("tcp://0.0.0.0:0", log=tmp_path / "everywhere.db", insecure=True) as plane,
        pytest.raises(errors.AgentsMissing, match=f"--bus tcp://{socket.gethostname()}:[1-9]"),
    ):
        plane.wait_for_agents(1, timeout=0.05).wait()


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_stands_for_a_checkpoint(plane: ControlPlane, tmp_path: Path, kind: type[str] | type[Path]) -> None:
    source = checkpoint(tmp_path / "one")
    report = plane.sync_weights(1, kind(source.path), timeout=1).wait()
    manifest = build_manifest(tmp_path / "one", content=False)
    assert report.phases[0].command == WeightSync(phase="prepare", version=1, source=source, manifest=manifest)


@pytest.mark.parametrize("path", ["nowhere", "/etc", Path("/etc"), "../up", ""])
def test_a_missing_or_forbidden_checkpoint_is_refused_before_anything_is_published(
    plane: ControlPlane, path: str | Path
) -> None:
    with pytest.raises(errors.CheckpointError):
        plane.sync_weights(1, path)
    assert plane.status().seq == 1


def test_a_delta_that_is_no_part_of_its_checkpoint_is_refused_before_anything_is_published(
    plane: ControlPlane, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "one")
    (tmp_path / "delta").mkdir()
    save_file({"w": zeros(3)}, tmp_path / "delta" / "model.safetensors")
    for delta in ("delta", "nowhere", "../up"):
        with pytest.raises(errors.CheckpointError):
            plane.sync_weights(2, Checkpoint("one", delta=delta, base=1))
    assert plane.status().seq == 1
    report = plane.sync_weights(2, source := Checkpoint("one", delta="one", base=1), timeout=1).wait()
    assert isinstance(report.phases[0].command, WeightSync) and report.phases[0].command.source == source


def test_a_delta_that_lacks_what_has_changed_is_refused_where_base_and_whole_are_digested(
    plane: ControlPlane, tmp_path: Path
) -> None:
    weights = {name: zeros(2) for name in "abc"}
    for folder, changed in (("one", "abc"), ("two", "bc"), ("both", "bc"), ("late", "c")):
        (tmp_path / folder).mkdir()
        held = {name: weights[name] + (name in changed and folder != "one") for name in weights}
        part = {name: held[name] for name in changed} if folder in ("both", "late") else held
        save_file(part, tmp_path / folder / "model.safetensors")
    with agents(plane.address, tmp_path, {PRIMARY: Engine()}):
        plane.wait_for_agents(1, timeout=20).wait()
        plane.sync_weights(1, "one", content=True, timeout=20).wait().raise_unless_committed()
        with pytest.raises(errors.CheckpointError, match="late lacks 1 of the tensors that differ from its base: b"):
            plane.sync_weights(2, Checkpoint("two", delta="late", base=1), content=True)
        done = plane.sync_weights(2, Checkpoint("two", delta="both", base=1), content=True, timeout=20).wait()
        done.raise_unless_committed()


def test_a_sync_that_no_replica_follows_is_aborted(plane: ControlPlane, tmp_path: Path) -> None:
    report = plane.sync_weights(1, checkpoint(tmp_path / "one"), timeout=1).wait()
    assert (report.status, report.loaded, report.quarantined) == ("aborted", (), ())
    with pytest.raises(errors.CommandFailed, match="weights v1 aborted"):
        report.raise_for_failures()


def test_a_broadcast_needs_a_manifest_and_one_can_be_made_of_names_and_shapes(plane: ControlPlane) -> None:
    source = Broadcast(host="127.0.0.1", port=1, group="g", replicas=(0,))
    with pytest.raises(errors.ConfigError, match="needs a manifest"):
        plane.sync_weights(1, source)
    layout = {"b": TensorSpec("BF16", (2, 3)), "a": TensorSpec("F32", ())}
    made = manifest_of(layout)
    assert (made.tensors, made.nbytes, made.layout) == (2, 16, layout_digest(dict(sorted(layout.items()))))


def test_nothing_is_sent_when_no_replica_prepared(plane: ControlPlane, tmp_path: Path) -> None:
    sent: list[tuple[int, ...]] = []
    report = plane.sync_weights(1, checkpoint(tmp_path / "one"), send=sent.append, timeout=1).wait()
    assert report.status == "aborted" and sent == []


class Receiver(Engine):
    """An engine whose load waits for a broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = threading.Event()

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        if isinstance(call, Load):
            await to_thread.run_sync(self.sent.wait)
        return await super().perform(call, timeout_s)


@pytest.mark.parametrize("error", [RuntimeError("no group"), SystemExit(3)])
def test_a_sender_that_raises_ends_the_sync_though_the_engines_go_on_waiting(
    plane: ControlPlane, tmp_path: Path, error: BaseException
) -> None:
    def send(replicas: tuple[int, ...]) -> None:
        assert replicas == (0,)
        raise error

    engine = Receiver()
    with agents(plane.address, tmp_path, {PRIMARY: engine}):
        plane.wait_for_agents(1, timeout=20).wait()
        report = plane.sync_weights(1, checkpoint(tmp_path / "one"), send=send, timeout=600).wait(20)
        assert report.status == "aborted" and not engine.sent.is_set()
        assert report.reason == f"the trainer could not send the weights: {type(error).__name__}: {error}"
        engine.sent.set()


def test_two_syncs_at_once_are_refused(tmp_path: Path) -> None:
    plane = ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path)
    source = checkpoint(tmp_path / "one")
    engine, refused = Engine(), threading.Event()
    engine.begun = lambda: refused.wait(20)  # the first sync stays in its first engine call
    plane.open()
    try:
        with agents(plane.address, tmp_path, {PRIMARY: engine}):
            plane.wait_for_agents(1, timeout=20).wait()
            first, second = plane.sync_weights(1, source, timeout=30), plane.sync_weights(2, source, timeout=30)
            with pytest.raises(errors.SyncInProgress, match="a sync to version 1 is in its prepare phase"):
                second.wait()
            with pytest.raises(TimeoutError):
                first.wait(timeout=0.01)
            refused.set()
            first.wait()
    finally:
        plane.close()


def test_a_sender_that_returns_without_having_sent_ends_the_phase_soon(tmp_path: Path) -> None:
    engine = Receiver()
    config = replace(QUICK, after_send_ms=200)
    plane = ControlPlane(ADDRESS, log=tmp_path / "run.db", config=config, checkpoints=tmp_path)
    with plane, agents(plane.address, tmp_path, {PRIMARY: engine}):
        plane.wait_for_agents(1, timeout=20).wait()
        report = plane.sync_weights(1, checkpoint(tmp_path / "one"), send=lambda _: None, timeout=600).wait(20)
        assert report.status == "aborted" and not engine.sent.is_set()
        engine.sent.set()


# --- misuse -----------------------------------------------------------------------------------------------------------


def test_a_plane_that_is_not_open_says_so(tmp_path: Path) -> None:
    plane = ControlPlane(ADDRESS, log=tmp_path / "run.db")
    with pytest.raises(errors.BusClosed, match="not open"):
        plane.pause()
    plane.open()
    with pytest.raises(errors.ConfigError, match="already open"):
        plane.open()
    plane.close()
    plane.close()
    with pytest.raises(errors.BusClosed):
        plane.address  # noqa: B018


def test_a_failed_open_names_the_cause_and_leaves_nothing_behind(plane: ControlPlane, tmp_path: Path) -> None:
    with pytest.raises(errors.LogLocked), ControlPlane(ADDRESS, log=tmp_path / "run.db"):
        pass
    with pytest.raises(errors.AddressInUse), ControlPlane(plane.address, log=tmp_path / "other.db"):
        pass
    with ControlPlane(ADDRESS, log=tmp_path / "other.db"):
        pass


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), 1e9])
def test_an_invalid_timeout_is_refused(plane: ControlPlane, timeout: float) -> None:
    with pytest.raises(errors.ConfigError, match="timeout"):
        plane.pause(timeout=timeout)


def test_an_invalid_command_is_refused(plane: ControlPlane) -> None:
    with pytest.raises(errors.CommandError):
        plane.publish("flush")  # type: ignore[arg-type]
    assert plane.publish(FLUSH).wait().outcomes == ()


def test_a_version_that_is_none_is_refused_and_not_counted_by_the_run(plane: ControlPlane, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "one")
    for version in (0, -1):
        with pytest.raises(errors.CommandError, match="version"):
            plane.sync_weights(version, source)
