"""Metrics of bus and agent, as Prometheus reads them; the page, the dashboard and the alert rules that name them."""

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import yaml
import zmq
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from controlplane import ControlPlane
from controlplane.cli.agent import agent as agent_command
from controlplane.metrics import KINDS, PHASES, BusCollector
from schemas.agent_status import RequestCounts
from schemas.commands import (
    AdapterDrop,
    AdapterSync,
    AdapterVersion,
    Checkpoint,
    Command,
    Drain,
    EngineCommand,
    EpochStart,
    Manifest,
    ProfileCommand,
    WeightSync,
)
from schemas.errors import BusClosed, BusFaulted, CommandError, ConfigError, EngineError, ExtraMissing, LogError
from schemas.formatting import command_kind
from schemas.identity import Identity
from schemas.transport import exposition
from schemas.transport.exposition import serve_metrics
from schemas.transport.sockets import Context
from tests.pages import blocks
from tests.running import ROOT, python
from tests.unit.small_bus import FLUSH, PAUSE, PRIMARY, SECOND, Bus, Engine, Run, reaches
from tests.unit.test_plane import ADDRESS, QUICK, agents
from tests.waiting import wait_until
from workers.agent import Agent
from workers.exporter import AgentCollector

MANIFEST = Manifest(tensors=1, nbytes=8, layout="0" * 64)
DASHBOARD, ALERTS = ROOT / "docs/grafana/rolloutctl.json", ROOT / "docs/grafana/alerts.yml"
PAGE = (ROOT / "docs/metrics.md").read_text("utf-8")


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path) as opened:
        yield opened


class Scrape:
    """What one scrape of a collector shows, read by Prometheus' own parser."""

    def __init__(self, collector: Collector) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        text = generate_latest(registry).decode()
        self.values = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[name, *sorted(labels.items())]


# --- the bus ----------------------------------------------------------------------------------------------------------


def test_a_fleet_is_read_from_the_state_and_what_happens_is_counted(plane: ControlPlane, tmp_path: Path) -> None:
    engine, bus = Engine(), BusCollector(plane)
    with agents(plane.address, tmp_path, {PRIMARY: engine, SECOND: Engine()}):
        plane.wait_for_agents(2, timeout=20).wait()
        plane.flush().wait()
        engine.raises = EngineError("It burns.")
        plane.pause().wait()
        engine.raises = None
        plane.resume().wait()
        plane.sync_weights(3, Checkpoint("v3"), manifest=MANIFEST).wait(20).raise_unless_committed()
        wait_until(lambda: Scrape(bus)("rolloutctl_replica_version", replica="0") == 3)
        wait_until(lambda: Scrape(bus)("rolloutctl_sync_duration_seconds_count", status="committed") == 1)
        seen = Scrape(bus)
    assert seen("rolloutctl_bus_up") == seen("rolloutctl_bus_epoch") == 1
    assert seen("rolloutctl_agents", role="rollout", state="live") == 2
    assert seen("rolloutctl_agents", role="rollout", state="gone") == 0
    assert seen("rolloutctl_replicas_known") == seen("rolloutctl_replicas_serving") == 1
    assert seen("rolloutctl_replica_serving", replica="0") == 1
    assert seen("rolloutctl_committed_version") == 3
    assert seen("rolloutctl_replica_version_lag", replica="0") == seen("rolloutctl_replicas_unproven") == 0
    assert seen("rolloutctl_open_commands") == seen("rolloutctl_sync_in_progress") == 0
    assert 0 <= seen("rolloutctl_replica_silence_seconds", replica="0") < 20
    assert seen("rolloutctl_log_size_bytes") > 0 and seen("rolloutctl_bus_file_descriptors_left") > 0
    assert seen("rolloutctl_commands_total", command="flush", result="ok") == 1
    assert seen("rolloutctl_commands_total", command="pause", result="incomplete") == 1
    assert seen("rolloutctl_commands_total", command="wake", result="ok") == 0
    assert seen("rolloutctl_outcomes_total", command="flush", outcome="skipped", reason="not_primary") == 1
    assert seen("rolloutctl_outcomes_total", command="pause", outcome="failed", reason="engine_error") == 1
    assert seen("rolloutctl_command_duration_seconds_count", command="flush") == 1
    for phase in ("prepare", "load", "commit"):
        assert seen("rolloutctl_sync_phase_duration_seconds_count", phase=phase) == 1
        assert seen("rolloutctl_outcomes_total", command=f"weights_{phase}", outcome="acted", reason="") == 1
    assert seen("rolloutctl_sync_duration_seconds_count", status="committed") == 1
    phases = sum(seen("rolloutctl_sync_phase_duration_seconds_sum", phase=phase) for phase in PHASES)
    assert 0 < phases <= seen("rolloutctl_sync_duration_seconds_sum", status="committed") + 0.001
    wait_until(lambda: Scrape(bus)("rolloutctl_agents", role="rollout", state="left") == 2)
    assert Scrape(bus)("rolloutctl_agents_lost_total", reason="left") == 2


def test_a_replica_that_a_sync_left_out_is_quarantined_before_its_next_heartbeat(
    plane: ControlPlane, tmp_path: Path
) -> None:
    other, bus = Engine(), BusCollector(plane)
    with agents(
        plane.address, tmp_path, {Identity(replica=0, node_rank=0): Engine(), Identity(replica=1, node_rank=0): other}
    ):
        plane.wait_for_agents(2, timeout=20).wait()
        other.raises = EngineError("It burns.")
        report = plane.sync_weights(3, Checkpoint("v3"), manifest=MANIFEST, quorum=1).wait(20)
        seen = Scrape(bus)
        assert (report.loaded, report.unproven) == ((0,), (1,)), "it did not pause"
    assert seen("rolloutctl_replica_quarantined", replica="1") == 1
    assert seen("rolloutctl_replica_quarantined", replica="0") == 0


def test_requests_that_run_and_wait_are_those_that_the_engine_last_counted(plane: ControlPlane, tmp_path: Path) -> None:
    engine, bus = Engine(), BusCollector(plane)
    names = [(f"rolloutctl_replica_requests_{kind}", ("replica", "0")) for kind in ("running", "waiting")]
    with agents(plane.address, tmp_path, {PRIMARY: engine, SECOND: Engine()}):
        plane.wait_for_agents(2, timeout=20).wait()
        assert not set(names) & Scrape(bus).values.keys() and plane.status().agents[0].requests is None
        engine.running, engine.waiting = 2, 5
        wait_until(lambda: [Scrape(bus).values.get(name) for name in names] == [2, 5])
        lines = {line.agent: line.requests for line in plane.status().agents}
        assert lines == {"0.0": RequestCounts(running=2, waiting=5), "0.1": None}
        engine.running, engine.waiting = 0, None
        wait_until(lambda: [Scrape(bus).values.get(name) for name in names] == [0, None])
    wait_until(lambda: not set(names) & Scrape(bus).values.keys())
    assert plane.status().agents[0].requests is None


def test_a_replica_that_leaves_counts_as_draining_until_it_has_left(plane: ControlPlane, tmp_path: Path) -> None:
    leaving, bus = Engine(), BusCollector(plane)
    leaving.running = 1  # so it stays for as long as its grace

    def counts() -> list[float]:
        seen = Scrape(bus)
        return [seen(f"rolloutctl_replicas_{kind}") for kind in ("known", "serving", "draining")]

    with agents(plane.address, tmp_path, {PRIMARY: Engine(), Identity(replica=1, node_rank=0): leaving}):
        plane.wait_for_agents(2, timeout=20).wait()
        assert counts() == [2, 2, 0]
        drain = plane.drain(1, grace=600)
        wait_until(lambda: counts() == [1, 1, 1] and plane.status().draining == (1,))
        leaving.running = 0
        drain.wait(60)
        wait_until(lambda: counts() == [1, 1, 0])


def test_what_no_bus_could_read_is_counted(plane: ControlPlane, context: Context) -> None:
    with context.socket(zmq.DEALER) as stranger:
        stranger.connect(plane.address)
        stranger.send(b"no message")
        wait_until(lambda: Scrape(BusCollector(plane))("rolloutctl_malformed_messages_total") == 1)


def test_a_bus_that_cannot_write_its_log_and_one_that_has_closed_say_so(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = BusCollector(plane)

    def full(*_: object, **__: object) -> None:
        raise LogError("the disk is full")

    monkeypatch.setattr("controlplane.record.log.RunLog.commit", full)
    with pytest.raises(BusFaulted):
        plane.flush().wait()
    seen = Scrape(bus)
    assert (seen("rolloutctl_bus_up"), seen("rolloutctl_log_commit_failures_total")) == (0, 1)
    monkeypatch.undo()
    plane.close()
    assert Scrape(bus)("rolloutctl_bus_up") == 0


def test_a_refused_command_is_counted_and_a_listener_that_raises_stops_nothing(
    plane: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such metric")

    plane.bus.decisions.add(broken)
    plane.bus.orders.add(broken)
    bus = BusCollector(plane)
    with agents(plane.address, tmp_path, {PRIMARY: Engine()}):
        plane.wait_for_agents(1, timeout=20).wait()
        assert plane.flush().wait().acted == plane.flush().wait().acted == ("0.0",)
    with pytest.raises(CommandError, match="no agent 7"):
        plane.retire(7).wait()
    assert Scrape(bus)("rolloutctl_refused_total", kind="retire") == 1
    assert Scrape(bus)("rolloutctl_commands_total", command="flush", result="ok") == 2
    assert len([record for record in caplog.records if "metrics or spans are incomplete" in record.getMessage()]) == 2


def test_every_command_has_a_kind_that_begins_at_zero() -> None:
    actions, phases, operations = (
        get_args(get_type_hints(command)[field])
        for command, field in ((ProfileCommand, "action"), (WeightSync, "phase"), (EngineCommand, "operation"))
    )
    commands: list[Command] = [
        *(ProfileCommand(action=action, step=0) for action in actions),
        *(EngineCommand(operation=operation) for operation in operations),
        *(AdapterSync(phase=phase, adapter=AdapterVersion(name="policy", version=1, path="p")) for phase in phases),
        *(EpochStart(previous_epoch=0, logic=1), AdapterDrop(name="policy"), Drain(grace_ms=0)),
    ]
    kinds = [command_kind(command).replace(" ", "_") for command in commands]
    assert (sorted(kinds), phases) == (sorted(KINDS), PHASES)


# --- the agent --------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_an_agent_shows_its_state_its_outcomes_and_its_calls(bus: Bus, engine: Engine, run: Run) -> None:
    async with run() as agent:
        collector = AgentCollector(agent)
        assert Scrape(collector)("rolloutctl_agent_bus_connected") == 0
        await bus.admit()
        await reaches(agent, lambda state: state.joined and state.engine.tokenizer == "present")
        bus.publish(PAUSE)
        await bus.outcome(1)
        engine.raises = EngineError("It burns.")
        bus.publish(FLUSH)
        await bus.outcome(2)
        seen = Scrape(collector)
    place = {"agent": "0.0", "replica": "0", "node_rank": "0", "role": "rollout", "engine": "fake 1"}
    assert seen("rolloutctl_agent_info", **place) == 1
    assert seen("rolloutctl_agent_bus_connected") == seen("rolloutctl_agent_engine_up") == 1
    assert seen("rolloutctl_agent_generating") == seen("rolloutctl_agent_ready") == 0
    assert seen("rolloutctl_agent_outcomes_total", outcome="acted", reason="") == 1
    assert seen("rolloutctl_agent_outcomes_total", outcome="failed", reason="engine_error") == 1
    assert seen("rolloutctl_agent_engine_call_duration_seconds_count", call="pause", result="ok") == 1
    assert seen("rolloutctl_agent_engine_call_duration_seconds_count", call="flush", result="engine_error") == 1
    assert seen("rolloutctl_agent_engine_call_age_seconds") == 0


def test_metrics_are_served_where_nothing_else_listens(plane: ControlPlane) -> None:
    served, end = serve_metrics(BusCollector(plane), "0")
    try:
        with urllib.request.urlopen(served, timeout=20) as answer:
            assert b"rolloutctl_bus_up 1.0" in answer.read()
        taken = served.split(":")[2].removesuffix("/metrics")
        with pytest.raises(ConfigError, match=f"can't be served at 127.0.0.1:{taken}: Address already in use"):
            serve_metrics(BusCollector(plane), taken)
    finally:
        end()
    with pytest.raises(ConfigError, match=r"expected PORT or HOST:PORT"):
        serve_metrics(BusCollector(plane), "everywhere")


def test_connections_that_say_nothing_take_few_threads_and_hold_up_no_scrape(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exposition, "CONNECTION_S", 0.5)
    threads = threading.active_count()
    served, end = serve_metrics(BusCollector(plane), "0")
    address = ("127.0.0.1", int(served.split(":")[2].removesuffix("/metrics")))
    with ExitStack() as open_:
        open_.callback(end)
        idle = [open_.enter_context(socket.create_connection(address, timeout=30)) for _ in range(24)]
        for connection in idle[::2]:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nhost")
        with urllib.request.urlopen(served, timeout=20) as answer:
            assert b"rolloutctl_bus_up 1.0" in answer.read()
        wait_until(lambda: threading.active_count() - threads <= exposition.CONNECTIONS_MAX + 1)
        assert [connection.recv(1000) for connection in idle] == [b""] * 24  # each is cut off
        wait_until(lambda: threading.active_count() - threads <= 1)
    assert "Traceback" not in capfd.readouterr().err


def test_without_the_extra_nothing_is_loaded_and_the_option_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, controlplane.plane, controlplane.cli.agent; print(*sys.modules)"
    assert not {"prometheus_client", "opentelemetry"} & {*python("-c", code).stdout.split()}
    monkeypatch.setattr("controlplane.cli.command_line.find_spec", lambda name: None)
    with pytest.raises(ExtraMissing, match="extra `metrics`"):
        agent_command.main(["--metrics-port", "9401"], standalone_mode=False)


def test_a_plane_that_is_not_open_has_no_metrics(tmp_path: Path) -> None:
    with pytest.raises(BusClosed):
        BusCollector(ControlPlane(ADDRESS, log=tmp_path / "run.db"))


# --- names, and whoever uses them -------------------------------------------------------------------------------------


@contextmanager
def collectors(folder: Path) -> Iterator[list[Collector]]:
    with ControlPlane(ADDRESS, log=folder / "run.db") as plane:
        agent = Agent(bus=plane.address, identity=PRIMARY, engine=Engine(), state_dir=folder)
        yield [BusCollector(plane), AgentCollector(agent)]


@pytest.fixture
def families(tmp_path: Path) -> dict[str, Metric]:
    """All families, by the name that queries use, without the suffixes of a histogram."""
    with collectors(tmp_path) as found:
        described = [family for collector in found for family in collector.describe()]  # type: ignore[attr-defined]
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in described}


def test_the_page_has_each_metric(families: dict[str, Metric], tmp_path: Path) -> None:
    with collectors(tmp_path) as found:
        labels = {name: names for collector in found for name, names in label_names(collector).items()}
    expected = [
        f"| `{name}` | {family.type} | {' '.join(f'`{label}`' for label in labels[name])} | {family.documentation} |"
        for name, family in families.items()
    ]
    rows = [line for line in PAGE.splitlines() if line.startswith("| `rolloutctl_")]
    assert rows == [line.replace("|  |", "| |") for line in expected]


def label_names(collector: Collector) -> dict[str, tuple[str, ...]]:
    """The labels of each metric of a collector, by its name."""
    from controlplane import metrics
    from workers import exporter

    read = metrics.READ if isinstance(collector, BusCollector) else exporter.GAUGES
    counted = collector._counted  # type: ignore[attr-defined]
    names = {metric._name + ("_total" if metric._type == "counter" else ""): metric._labelnames for metric in counted}
    return {name: labels for name, (_, labels) in read.items()} | names


def expressions() -> dict[str, str]:
    """Every expression of the dashboard, of the alert rules and of the example for KEDA, by where it is."""
    board = json.loads(DASHBOARD.read_text("utf-8"))
    found = {
        f"panel {panel['title']}, {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }
    rules = yaml.safe_load(ALERTS.read_text("utf-8"))
    (found["KEDA"],) = re.findall(r"^ +query: (.+)", (ROOT / "docs/fleet.md").read_text("utf-8"), re.MULTILINE)
    return found | {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


def test_the_page_shows_a_trainer_that_has_an_endpoint_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in blocks("docs/metrics.md") if "metered_trainer.py" in block)
    block = block.replace("tcp://127.0.0.1:5555", ADDRESS).replace("9400", "0").replace("run.db", f"{tmp_path}/run.db")
    seen: list[bytes] = []
    learn = SimpleNamespace(learn=lambda step: seen.append(generate_latest(REGISTRY)))
    monkeypatch.setitem(sys.modules, "my_trainer", learn)
    names: dict[str, Any] = {}
    started: list[Any] = []
    serve = start_http_server
    monkeypatch.setattr("prometheus_client.start_http_server", lambda *where: started.append(serve(*where)))
    try:
        exec(block, names)
    finally:
        ((server, thread),) = started
        server.shutdown()
        server.server_close()
        thread.join()
        for collector in [found for found in REGISTRY._collector_to_names if isinstance(found, BusCollector)]:
            REGISTRY.unregister(collector)
    assert len(seen) == 3 and all(b"rolloutctl_bus_up 1.0" in text for text in seen)


def test_the_dashboard_and_the_alerts_name_metrics_and_labels_that_exist(tmp_path: Path) -> None:
    with collectors(tmp_path) as found:
        labels = {name: set(names) for collector in found for name, names in label_names(collector).items()}
        described = [family for collector in found for family in collector.describe()]  # type: ignore[attr-defined]
    for family in described:
        if family.type == "histogram":
            names = labels.pop(family.name)
            labels |= {f"{family.name}_{suffix}": names for suffix in ("count", "sum")}
            labels[f"{family.name}_bucket"] = names | {"le"}
    found_expressions = expressions()
    assert len(found_expressions) > 50
    used: set[str] = set()
    for where, text in found_expressions.items():
        names = set(re.findall(r"rolloutctl_\w+", text))
        assert names and names <= labels.keys(), (where, names - labels.keys())
        used |= names
        allowed = {"job", "instance"}.union(*(labels[name] for name in names))
        selected = re.findall(r"(\w+)\s*[=!]", " ".join(re.findall(r"\{([^}]*)\}", text)))
        grouped = re.findall(r"\w+", " ".join(re.findall(r"(?:by|on|group_left) \(([^)]*)\)", text)))
        assert {*selected, *grouped} <= allowed, (where, {*selected, *grouped} - allowed)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (Debian: prometheus)")
def test_promtool_accepts_the_rules_the_dashboard_and_the_metrics(tmp_path: Path) -> None:
    def check(what: str, *files: Path, text: bytes = b"") -> None:
        done = subprocess.run(["promtool", "check", what, *files], input=text, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    shown = [re.sub(r"\$__rate_interval", "5m", text) for text in expressions().values()]
    rules = [{"record": f"r:{number}", "expr": text} for number, text in enumerate(shown)]
    (tmp_path / "dashboard.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    check("rules", ALERTS, tmp_path / "dashboard.yml")
    with ControlPlane(ADDRESS, log=tmp_path / "run.db") as plane:
        registry = CollectorRegistry()
        registry.register(BusCollector(plane))
        check("metrics", text=generate_latest(registry))
