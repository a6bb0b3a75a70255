"""Spans of syncs and profiling sessions, beside those of a trainer; and the page's hook for TensorBoard and wandb."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from controlplane import ControlPlane
from controlplane.spans import trace_commands
from schemas.commands import Checkpoint, Manifest
from schemas.errors import CheckpointError, SyncInProgress
from schemas.profiler.config import ProfilerConfig
from tests.pages import blocks
from tests.unit.small_bus import PRIMARY, Engine
from tests.unit.test_plane import ADDRESS, QUICK, agents

MANIFEST = Manifest(tensors=1, nbytes=8, layout="0" * 64)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    profiler = ProfilerConfig(steps=(1,))
    with ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK, profiler=profiler) as opened:
        yield opened


class Spans:
    """The spans that a trainer's SDK was given."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("trainer")

    def __iter__(self) -> Iterator[ReadableSpan]:
        return iter(self._exporter.get_finished_spans())

    def __getitem__(self, name: str) -> ReadableSpan:
        (span,) = (span for span in self if span.name == name)
        return span

    def parent(self, name: str) -> str:
        """The name of a span's parent; empty if it has none."""
        parent = self[name].parent
        return next((span.name for span in self if parent and span.context.span_id == parent.span_id), "")


def test_a_sync_is_a_span_with_its_phases_within_the_trainers_own(plane: ControlPlane, tmp_path: Path) -> None:
    spans = Spans()
    trace_commands(plane, spans.provider)
    with agents(plane.address, tmp_path, {PRIMARY: Engine()}):
        plane.wait_for_agents(1, timeout=20).wait()
        with spans.tracer.start_as_current_span("step 4"):
            report = plane.sync_weights(7, Checkpoint("v7"), manifest=MANIFEST).wait(20)
        plane.flush().wait()
    report.raise_unless_committed()
    sync = spans["rolloutctl.sync_weights"]
    assert spans.parent("rolloutctl.sync_weights") == "step 4"
    assert sync.attributes is not None and sync.start_time is not None and sync.end_time is not None
    assert (sync.attributes["rolloutctl.version"], sync.attributes["rolloutctl.sync.status"]) == (7, "committed")
    last = sync.start_time
    for phase in ("prepare", "load", "commit"):
        span = spans[f"rolloutctl.sync_weights {phase}"]
        assert spans.parent(span.name) == "rolloutctl.sync_weights" and span.status.status_code is StatusCode.UNSET
        assert span.start_time is not None and span.end_time is not None
        assert last <= span.start_time <= span.end_time <= sync.end_time
        last = span.start_time
    assert len(list(spans)) == 5  # a flush has none


def test_an_aborted_sync_is_an_error_and_a_refused_one_has_no_span(plane: ControlPlane, tmp_path: Path) -> None:
    spans, engine = Spans(), Engine()
    trace_commands(plane, spans.provider)
    engine.raises = CheckpointError("There is no such checkpoint.")
    with agents(plane.address, tmp_path, {PRIMARY: engine}):
        plane.wait_for_agents(1, timeout=20).wait()
        first = plane.sync_weights(1, Checkpoint("v1"), manifest=MANIFEST)
        second = plane.sync_weights(2, Checkpoint("v2"), manifest=MANIFEST)
        assert first.wait(20).status == "aborted"
        with pytest.raises(SyncInProgress):
            second.wait(20)
    sync = spans["rolloutctl.sync_weights"]
    assert sync.status.status_code is StatusCode.ERROR and spans.parent(sync.name) == ""
    assert spans.parent("rolloutctl.sync_weights abort") == sync.name


def test_a_profiling_session_is_a_span_from_its_start_to_its_stop(plane: ControlPlane, tmp_path: Path) -> None:
    spans = Spans()
    trace_commands(plane, spans.provider)
    with agents(plane.address, tmp_path, {PRIMARY: Engine()}):
        plane.wait_for_agents(1, timeout=20).wait()
        for step in range(3):
            with spans.tracer.start_as_current_span(f"step {step}"), plane.step(step):
                pass
    assert spans.parent("rolloutctl.profile step 1") == "step 1"
    assert spans.parent("rolloutctl.profile start") == spans.parent("rolloutctl.profile stop")
    assert spans.parent("rolloutctl.profile stop") == "rolloutctl.profile step 1"
    assert spans.parent("rolloutctl.profile check") == "step 0"


def test_a_session_and_a_sync_that_are_open_end_with_the_bus(tmp_path: Path) -> None:
    spans = Spans()
    with ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK) as plane:
        trace_commands(plane, spans.provider)
        plane.start_profile(1).wait()
        with agents(plane.address, tmp_path, {PRIMARY: Engine()}):
            plane.wait_for_agents(1, timeout=20).wait()
            sending, closed = threading.Event(), threading.Event()

            def send(_: tuple[int, ...]) -> None:
                sending.set()
                closed.wait(20)

            plane.sync_weights(1, Checkpoint("v1"), manifest=MANIFEST, send=send)
            assert sending.wait(20)
            plane.close()
            closed.set()
    assert spans["rolloutctl.profile step 1"].end_time is not None
    assert spans["rolloutctl.sync_weights"].status.status_code is StatusCode.ERROR


def test_without_an_sdk_nothing_is_kept(plane: ControlPlane) -> None:
    trace_commands(plane)
    report = plane.sync_weights(1, Checkpoint("v1"), manifest=MANIFEST).wait(20)
    assert report.status == "aborted"


def test_the_page_shows_a_trainer_with_spans_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in blocks("docs/metrics.md") if "traced_trainer.py" in block)
    steps: list[int] = []
    monkeypatch.setitem(sys.modules, "my_trainer", SimpleNamespace(learn=steps.append))
    exec(block.replace("tcp://127.0.0.1:5555", ADDRESS).replace("run.db", f"{tmp_path}/run.db"), {})
    assert steps == [0, 1, 2]


# --- the page's hook --------------------------------------------------------------------------------------------------


def figures_of(plane: ControlPlane, tmp_path: Path) -> dict[str, float]:
    """What the hook on the page makes of a sync."""
    (hook,) = (block for block in blocks("docs/metrics.md") if "def figures(" in block)
    names: dict[str, object] = {}
    exec(hook, names)
    with agents(plane.address, tmp_path, {PRIMARY: Engine()}):
        plane.wait_for_agents(1, timeout=20).wait()
        report = plane.sync_weights(3, Checkpoint("v3"), manifest=MANIFEST).wait(20)
    found: dict[str, float] = names["figures"](report)  # type: ignore[operator]
    return found


def test_the_hook_on_the_page_makes_figures_of_a_report(plane: ControlPlane, tmp_path: Path) -> None:
    figures = figures_of(plane, tmp_path)
    assert (figures["rolloutctl/version"], figures["rolloutctl/committed"], figures["rolloutctl/loaded"]) == (3, 1, 1)
    assert figures["rolloutctl/sync_s"] == pytest.approx(
        sum(figures[f"rolloutctl/{phase}_s"] for phase in ("prepare", "load", "commit"))
    )
