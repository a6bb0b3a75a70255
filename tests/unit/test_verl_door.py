"""How rolloutctl gets into verl, without verl: the plugin, what it refuses, and its settings."""

import asyncio
import importlib
import logging
import re
import sys
import threading
import urllib.request
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from controlplane.tickets import Ticket
from controlplane.trainers.verl import register as plugin
from controlplane.trainers.verl import run as bus_of_a_run
from controlplane.trainers.verl import trainer as door
from controlplane.trainers.verl.run import Updated, VerlRun
from controlplane.trainers.verl.settings import read_settings
from schemas.errors import CommandError, ConfigError, ExtraMissing, SyncInProgress
from schemas.profiler.config import ProfilerConfig
from schemas.reports import SyncReport
from tests.running import python

V1 = """
REGISTRY = {}
class PPOTrainer:
    def __init__(self, config): self.config = config
    def _setup(self): ...
    def _rollout_server_managers(self): ...
    def _start_profiling(self): ...
    def _start_rollout_profiling(self): ...
    def _stop_rollout_profiling(self): ...
    def on_sample_end(self): ...
    def on_step_end(self): ...
    def fit(self, manager): ...
class PPOTrainerSync(PPOTrainer): ...
class PPOTrainerColocateAsync(PPOTrainer): ...
class PPOTrainerSeparateAsync(PPOTrainer): ...
def register_trainer(name):
    def register(cls):
        if REGISTRY.setdefault(name, cls) is not cls: raise ValueError(f"{name} is already registered")
        return cls
    return register
"""
"""As much of verl's V1 trainers as the plugin meets."""
CONFIG: dict[str, Any] = {
    "trainer": {"v1": {"trainer_mode": "rolloutctl_sync"}, "default_local_dir": "/runs/a"},
    "global_profiler": {
        "tool": "torch",
        "steps": [1, 2],
        "save_path": "/runs/a/traces",
        "profile_continuous_steps": True,
    },
    "actor_rollout_ref": {
        "rollout": {
            "profiler": {"tool": "torch", "enable": True, "ranks": [0], "tool_config": {"torch": {"discrete": False}}}
        }
    },
}
NAMES = ["rolloutctl_sync", "rolloutctl_colocate_async", "rolloutctl_separate_async"]


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """verl's package of trainers; `verl` itself has the version that was seen."""
    package = ModuleType("verl")
    package.__version__ = door.TESTED_VERSIONS[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl", package)
    trainers: dict[str, Any] = {}
    exec(V1, trainers)
    return SimpleNamespace(**trainers, package=package)


def config(**changed: Any) -> Any:
    return OmegaConf.merge(OmegaConf.create(CONFIG), changed)


def test_the_plugin_registers_when_verl_imports_its_trainers_and_imports_nothing_before(tmp_path: Path) -> None:
    inner = tmp_path / "verl" / "trainer" / "ppo" / "v1"
    inner.mkdir(parents=True)
    for package in (tmp_path / "verl", inner.parent, inner.parent.parent):
        (package / "__init__.py").write_text("")
    (inner / "__init__.py").write_text(V1)
    (tmp_path / "verl" / "__init__.py").write_text(
        "from controlplane.trainers.verl import register\n__version__ = '0'\n"
    )
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import verl
print(sorted({{"msgspec", "zmq", "anyio", "omegaconf", "torch", "ray"}} & set(sys.modules)), len(sys.meta_path))
from verl.trainer.ppo import v1
print(list(v1.REGISTRY), len(sys.meta_path))
"""
    done = python("-c", code)
    before, after = done.stdout.splitlines()
    assert before.startswith("[] ")
    assert after.startswith(str(NAMES))
    assert int(after.split()[-1]) == int(before.split()[-1]) - 1  # the hook is gone


def test_loaded_twice_it_registers_once(
    verl: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    plugin.install()
    hooks = len(sys.meta_path)
    plugin.install()
    assert len(sys.meta_path) == hooks
    plugin.register(verl)
    first = dict(verl.REGISTRY)
    plugin.register(verl)
    assert first == verl.REGISTRY and list(first) == NAMES
    assert not caplog.records


def test_a_name_that_is_taken_is_an_error_in_the_log(verl: Any, caplog: pytest.LogCaptureFixture) -> None:
    verl.REGISTRY["rolloutctl_sync"] = object
    plugin.register(verl)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "trainer_mode=rolloutctl_sync is another's" in record.getMessage()


def test_what_breaks_the_plugin_is_raised_when_its_trainer_is_asked_for(
    verl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'zmq'")

    monkeypatch.setattr(importlib, "import_module", broken)
    plugin.register(verl)
    with pytest.raises(RuntimeError, match=r"No module named 'zmq'\. trainer\.v1\.trainer_mode=sync is verl without"):
        verl.REGISTRY["rolloutctl_sync"](config())


def test_a_trainer_sees_verls_own_mode_and_the_servers_gate_is_open(
    verl: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.register(verl)
    trainer = verl.REGISTRY["rolloutctl_sync"](config())
    assert isinstance(trainer, verl.PPOTrainerSync)
    assert trainer.config.trainer.v1.trainer_mode == "sync"
    assert trainer.config.actor_rollout_ref.rollout.profiler.tool_config.torch.discrete is True
    assert trainer._profiler.steps == (1, 2) and not trainer._profiler.continuous and not trainer._profiler.roles
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("model", [{"lora_rank": 8}, {"lora": {"rank": 8}}, {"lora_adapter_path": "/a", "lora": None}])
def test_an_adapter_that_verl_never_sends_to_separate_replicas_is_refused(verl: Any, model: dict[str, Any]) -> None:
    """verl 0.9.1 sends them the base alone: a log of committed versions would say that they hold what is trained."""
    plugin.register(verl)
    rollout = OmegaConf.to_container(config().actor_rollout_ref.rollout)
    trained = config(actor_rollout_ref={"rollout": rollout, "model": model})
    with pytest.raises(ConfigError, match=r"never the adapter.*model\.lora\.merge=True, or .*rolloutctl_sync"):
        verl.REGISTRY["rolloutctl_separate_async"](trained)
    verl.REGISTRY["rolloutctl_sync"](OmegaConf.create(OmegaConf.to_container(trained)))
    merged = OmegaConf.merge(trained, {"actor_rollout_ref": {"model": {"lora": {"merge": True}}}})
    verl.REGISTRY["rolloutctl_separate_async"](merged)


def test_without_steps_nothing_is_profiled_and_the_configuration_is_as_it_was(verl: Any) -> None:
    plugin.register(verl)
    trainer = verl.REGISTRY["rolloutctl_separate_async"](config(global_profiler={"steps": None}))
    assert trainer._profiler.steps == ()
    assert trainer.config.actor_rollout_ref.rollout.profiler.tool_config.torch.discrete is False


def test_hooks_of_an_update_run_once_it_is_committed_and_not_if_it_failed(verl: Any) -> None:
    """`trainer.weight_update_hooks`, in no release yet: cf316dfc, verl/trainer/ppo/v1/trainer_sync.py, on_step_end.

    verl calls them after `checkpoint_manager.update_weights`, which is the bus's here.
    """
    happened: list[str] = []

    class Hooked(verl.PPOTrainerSync):  # type: ignore[misc]
        def on_step_end(self) -> None:
            self.checkpoint_manager.update_weights(7)
            happened.append("hooks")

    def fails(step: int) -> None:
        raise RuntimeError("verl's own update failed")

    trainer = type("Trainer", (door.RolloutctlTrainer, Hooked), {"mode": "sync"})(config())
    trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda step: happened.append(f"committed {step}"))
    trainer.on_step_end()
    trainer.checkpoint_manager = SimpleNamespace(update_weights=fails)
    with pytest.raises(RuntimeError, match="own update"):
        trainer.on_step_end()
    assert happened == ["committed 7", "hooks"]


def test_a_door_that_verl_does_not_have_is_named(verl: Any) -> None:
    del verl.PPOTrainer._start_rollout_profiling
    verl.package.__version__ = "0.12.0"
    plugin.register(verl)
    with pytest.raises(ConfigError, match=r"verl 0\.12\.0 has no _start_rollout_profiling.*trainer_mode=sync is verl"):
        verl.REGISTRY["rolloutctl_sync"](config())


def test_a_version_that_was_not_seen_is_a_warning(verl: Any, caplog: pytest.LogCaptureFixture) -> None:
    verl.package.__version__ = "0.12.0"
    plugin.register(verl)
    verl.REGISTRY["rolloutctl_sync"](config())
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "rolloutctl was run with verl 0.9.1, and not with 0.12.0"
    ]


def test_settings_are_complete_and_below_the_folder_of_verls_checkpoints() -> None:
    settings = read_settings({}, Path("/runs/a"), Path("/runs/a/traces"))
    assert (settings.log, settings.state) == ("/runs/a/rolloutctl/run.db", "")
    assert (settings.traces, settings.address, settings.quorum) == ("/runs/a/traces", "tcp://127.0.0.1:0", 1)
    moved = read_settings({"log": "/elsewhere/x.db", "timeout": 5}, Path("/runs/a"), Path("/t"))
    assert (moved.log, moved.state, moved.timeout) == ("/elsewhere/x.db", "", 5.0)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"adress": "tcp://127.0.0.1:1"},
            r"rolloutctl\.adress is unknown; did you mean address\?; allowed are log, run, address",
        ),
        ({"quorum": 0}, r"rolloutctl\.quorum is 0"),
        ({"timeout": "soon"}, r"rolloutctl\.timeout is 'soon'"),
        ({"log": 3}, r"rolloutctl\.log is 3"),
        ({"metrics_port": [9400]}, r"rolloutctl\.metrics_port is \[9400\]"),
    ],
)
def test_a_wrong_setting_is_one_line(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refusal:
        read_settings(section, Path("/runs/a"), Path("/runs/a/traces"))
    assert "\n" not in str(refusal.value)


# --- updates of the weights -------------------------------------------------------------------------------------------


class Plane:
    """Syncs of a bus, each ended as the test says: `committed`, `aborted`, or an error that is raised."""

    def __init__(self, *ends: str | Exception) -> None:
        self.ends, self.asked, self.happened = list(ends), list[tuple[str, list[int]]](), list[str]()
        self.sent: list[BaseException | None] = []

    def sync_weights(self, version: None, source: Any, *, send: Any = None, **options: Any) -> Ticket[SyncReport]:
        self.asked.append((source.label, sorted(options["replicas"])))
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        ticket: Ticket[SyncReport] = Ticket(1)
        threading.Thread(target=self._run, args=(ticket, end, send)).start()
        return ticket

    def _run(self, ticket: Ticket[SyncReport], end: Any, send: Any) -> None:
        self.happened.append("paused")
        try:
            if end == "another's":
                ticket.fail(SyncInProgress("a sync to version 7 is in its load phase"))
                return
            if send is not None and end != "refused":
                send((0, 1))
        except RuntimeError as error:
            self.sent.append(error)
        self.happened.append("resumed")
        status: Literal["committed", "aborted"] = "committed" if end == "committed" and not self.sent else "aborted"
        ticket.resolve(SyncReport(version=8, status=status, loaded=(0,), quarantined=(1,), phases=()))


class Updates:
    """A run on such a bus, and an update of verl's."""

    def __init__(self, *ends: str | Exception, fails: bool = False) -> None:
        self.plane, self.closed, self.fails = Plane(*ends), False, fails
        with ExitStack() as resources:
            resources.callback(self._note_closed)
            settings = read_settings({}, Path("/runs/a"), Path("/runs/a/traces"))
            self.run = VerlRun(self.plane, settings, resources.pop_all())  # type: ignore[arg-type]

    def _note_closed(self) -> None:
        self.closed = True

    async def push(self) -> dict[str, int]:
        self.plane.happened.append("pushed")
        if self.fails:
            raise OSError("the server is dead")
        return {"bytes": 3}

    def __call__(self, step: int | None) -> Updated:
        return asyncio.run(self.run.update(step, [0, 1], self.push))


def test_verls_update_comes_between_the_pause_and_the_commit_and_happens_once() -> None:
    updates = Updates("committed", "committed")
    assert updates(4) == Updated({"bytes": 3}, frozenset({1}), frozenset())
    assert updates.plane.happened == ["paused", "pushed", "resumed"]
    updates(5)
    assert updates.plane.asked == [("4", [0, 1]), ("5", [0, 1])]


@pytest.mark.parametrize("step", [4, None])
def test_the_same_weights_again_are_no_new_version(step: int | None) -> None:
    updates = Updates("committed")
    updates(4)
    updates.plane.happened.clear()
    assert updates(step).quarantined == frozenset()
    assert updates.plane.happened == ["pushed"] and len(updates.plane.asked) == 1


def test_weights_that_never_had_a_step_are_verls_alone() -> None:
    updates = Updates()
    updates(None)
    assert updates.plane.happened == ["pushed"]


def test_an_update_that_fails_ends_the_sync_and_is_raised_as_it_is() -> None:
    updates = Updates("committed", fails=True)
    with pytest.raises(OSError, match="the server is dead"):
        updates(4)
    assert updates.plane.happened == ["paused", "pushed", "resumed"]
    assert "verl's own update failed: OSError: the server is dead" in str(updates.plane.sent[0])


@pytest.mark.parametrize("first", [CommandError("too large"), "refused", "aborted"])
def test_without_a_commit_the_weights_that_the_servers_hold_get_another(first: Any) -> None:
    updates = Updates(first, "committed")
    assert updates(4).answer == {"bytes": 3}
    assert updates.plane.happened.count("pushed") == 1
    assert len(updates.plane.asked) == 2 and not updates.closed


def test_an_update_waits_for_the_sync_of_an_operator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("controlplane.trainers.verl.run.WAIT_S", 0.001)
    updates = Updates("another's", "another's", "committed")
    assert updates(4).answer == {"bytes": 3}
    assert updates.plane.happened == ["paused", "paused", "paused", "pushed", "resumed"] and not updates.closed
    assert "the weights of step 4 wait for the end of another sync" in caplog.text


def test_without_any_commit_the_run_is_left_to_verl(caplog: pytest.LogCaptureFixture) -> None:
    updates = Updates("aborted", "aborted")
    assert updates(4).unattended == {0, 1}
    assert updates.closed and "verl goes on without rolloutctl" in caplog.text
    assert updates(5) == Updated({"bytes": 3}, frozenset(), frozenset())
    assert len(updates.plane.asked) == 2
    updates.run.begin_step(6)
    updates.run.end_step()


# --- the checkpoint manager -------------------------------------------------------------------------------------------


class Replica:
    """One of verl's replicas."""

    def __init__(self, rank: int, happened: list[str]) -> None:
        self.replica_rank, self._happened = rank, happened

    async def resume_generation(self) -> None:
        self._happened.append(f"resumed {self.replica_rank}")


class CheckpointEngineManager:
    """verl's, with a backend that pauses and resumes by itself."""

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Replica]) -> None:
        self.config, self.actor_wg, self.replicas = config, actor_wg, replicas

    async def update_weights(self, global_steps: int | None = None) -> dict[str, int]:
        self.actor_wg.append(f"pushed {global_steps}")
        await self.resume_generation_replicas()
        return {"bytes": 3}

    async def resume_generation_replicas(self) -> None:
        for replica in self.replicas:
            await replica.resume_generation()


class Balancer:
    """verl's load balancer, as an actor's handle."""

    def __init__(self, servers: dict[str, str]) -> None:
        self.servers = dict(servers)
        self.add_servers = SimpleNamespace(remote=self._add)
        self.remove_servers = SimpleNamespace(remote=self._remove)

    async def _add(self, servers: dict[str, str]) -> None:
        self.servers |= servers

    async def _remove(self, names: list[str]) -> None:
        for name in names:
            del self.servers[name]


@pytest.fixture
def manager_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our manager, on that of verl."""

    def auto_await(function: Any) -> Any:
        return function

    for name, content in (
        ("verl", {}),
        ("verl.utils", {}),
        ("verl.checkpoint_engine", {"CheckpointEngineManager": CheckpointEngineManager}),
        ("verl.utils.ray_utils", {"auto_await": auto_await}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "controlplane.trainers.verl.checkpoints", raising=False)
    yield importlib.import_module("controlplane.trainers.verl.checkpoints").BusCheckpointManager
    del sys.modules["controlplane.trainers.verl.checkpoints"]


class Bus:
    """A run whose updates end as the test says."""

    def __init__(self, *ends: tuple[set[int], set[int]]) -> None:
        self.ends = list(ends)

    async def update(self, step: int | None, ranks: list[int], update: Any) -> Updated:
        quarantined, unattended = self.ends.pop(0)
        return Updated(await update(), frozenset(quarantined), frozenset(unattended))


def test_replicas_in_quarantine_get_no_requests_until_they_are_out(manager_class: Any) -> None:
    happened: list[str] = []
    replicas = [Replica(rank, happened) for rank in (2, 3)]
    balancer = Balancer({"a": "A", "b": "B"})
    servers = SimpleNamespace(
        rollout_replicas=replicas, server_addresses=["a", "b"], server_handles=["A", "B"], global_load_balancer=balancer
    )
    manager = manager_class(None, happened, replicas, Bus(({3}, set()), (set(), {2}), ({2}, set())), servers)
    assert asyncio.run(manager.update_weights(4)) == {"bytes": 3}
    assert balancer.servers == {"a": "A"} and happened == ["pushed 4"], "the commit resumes, and nothing else"
    asyncio.run(manager.update_weights(5))
    assert balancer.servers == {"a": "A", "b": "B"} and happened[1:] == ["pushed 5", "resumed 2"]
    asyncio.run(manager.update_weights(6))
    assert balancer.servers == {"b": "B"}
    asyncio.run(manager.resume_generation_replicas())
    assert happened[3:] == ["pushed 6", "resumed 2", "resumed 3"]


def test_a_trainer_that_names_the_manager_alone_must_name_the_log(manager_class: Any) -> None:
    config = SimpleNamespace(engine_kwargs={})
    with pytest.raises(ConfigError, match=r"checkpoint_engine\.engine_kwargs\.rolloutctl\.log is missing"):
        manager_class(config, [], [])


# --- places -----------------------------------------------------------------------------------------------------------


def launched(rank: int, *nodes: str, nnodes: int | None = None) -> SimpleNamespace:
    """A replica of verl's with a server on each of these nodes."""
    ask = [SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda _, node=node: node)) for node in nodes]
    mode = SimpleNamespace(value="hybrid")
    return SimpleNamespace(
        replica_rank=rank, servers=ask, nnodes=nnodes or len(nodes), gpus_per_replica_node=4, rollout_mode=mode
    )


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray, with this process on the node `here`."""
    context = SimpleNamespace(get_node_id=lambda: "here")
    fake = SimpleNamespace(get=lambda refs: refs, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", fake)


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        ([launched(0, "here"), launched(2, "here")], r"replicas are \[0, 2\]: rolloutctl needs 0, 1, 2"),
        ([], "needs 0, 1, 2"),
        ([launched(0, "here", "here", nnodes=1)], r"replica 0 has 2 servers on 1 nodes \(rollout\.disaggregation\?\)"),
        ([launched(0, "here", "there")], r"1 of the servers' nodes are other machines: set \+rolloutctl\.address="),
    ],
)
def test_servers_that_agents_can_not_be_placed_beside_end_the_run_at_its_start(
    one_node: None, tmp_path: Path, replicas: list[Any], says: str
) -> None:
    settings = read_settings({}, tmp_path, tmp_path / "traces")
    with pytest.raises(ConfigError, match=says) as refusal:
        VerlRun.start(settings, replicas, ProfilerConfig())
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir()), "something was started"


@pytest.mark.parametrize("port", [0, "127.0.0.1:0"])
def test_the_metrics_of_the_bus_are_served_where_the_settings_say(
    one_node: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, port: Any
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(bus_of_a_run, "place_agents", lambda **_: nullcontext())
    settings = read_settings({"metrics_port": port, "join_timeout": 1}, tmp_path, tmp_path / "traces")
    run = VerlRun.start(settings, [launched(0, "here")], ProfilerConfig())
    try:
        (served,) = re.findall(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", caplog.text)
        with urllib.request.urlopen(served, timeout=20) as answer:
            assert b"rolloutctl_bus_up 1.0" in answer.read()
    finally:
        run.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(served, timeout=20)


def test_metrics_that_can_not_be_served_end_the_run_at_its_start(
    one_node: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = [launched(0, "here")]
    wrong = read_settings({"metrics_port": "everywhere"}, tmp_path, tmp_path / "traces")
    with pytest.raises(ConfigError, match="expected PORT or HOST:PORT"):
        VerlRun.start(wrong, replicas, ProfilerConfig())
    monkeypatch.setitem(sys.modules, "controlplane.metrics", None)
    settings = read_settings({"metrics_port": 0}, tmp_path, tmp_path / "traces")
    with pytest.raises(ExtraMissing, match=r"rolloutctl\.metrics_port needs prometheus-client .* extra `metrics`"):
        VerlRun.start(settings, replicas, ProfilerConfig())


def test_agents_that_never_come_are_named_and_the_run_begins(caplog: pytest.LogCaptureFixture) -> None:
    line = SimpleNamespace(agent="0.0", state="live")
    plane = SimpleNamespace(status=lambda: SimpleNamespace(agents=[line]))
    settings = read_settings({"join_timeout": 1}, Path("/runs/a"), Path("/runs/a/traces"))
    VerlRun(plane, settings, ExitStack())._wait_for(frozenset({"0.0", "1.0"}))  # type: ignore[arg-type]
    assert "agents 1.0 did not join within 1 s; verl goes on" in caplog.text
