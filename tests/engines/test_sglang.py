"""A real SGLang on the CPU under real agents: one replica over two nodes.

What a pause or an abort does to requests is judged by `rolloutctl conform` (test_conformance_servers.py).
"""

import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from controlplane.analysis.invariants import verify
from controlplane.cli.replay_log import replay_log
from controlplane.record.log import RunLog
from schemas.commands import Broadcast, Checkpoint, ProfilePlan
from schemas.errors import CommandError
from schemas.identity import Operation
from schemas.outcomes import Acted, ErrorKind, Missing, Reason, Skipped
from schemas.safetensors.manifest import build_manifest
from tests.engines.deltas import CLOSED, SPLIT, Deltas, save_changed, took
from tests.engines.groups import sender
from tests.engines.models import save_weights, weights
from tests.engines.profiles import look
from tests.engines.reports import acted, conclusions, failed
from tests.engines.servers import answers, free_port, probed, wait_for
from tests.engines.sglang_fleet import SGLangFleet
from workers.engines.sglang.launch import read_launch

pytestmark = [pytest.mark.engine_sglang, pytest.mark.timeout(480)]

RECORDED_S = 8.0
"""Of forwards, with stacks. On a fast machine too, SGLang writes them for longer than a stop may take."""


@pytest.fixture
def fleet(sglang_fleet: SGLangFleet, request: pytest.FixtureRequest) -> Iterator[SGLangFleet]:
    """At rest before and after."""
    yield sglang_fleet
    if "blocks_it" not in request.fixturenames:
        sglang_fleet.rest()


@pytest.fixture
def blocks_it() -> None:
    """Marks the test after which the scheduler is busy for a minute."""


# --- which agents act -------------------------------------------------------------------------------------------------


def test_health_proves_nothing_and_server_info_shows_which_node_has_the_tokenizer(fleet: SGLangFleet) -> None:
    wait_for("both are healthy", lambda: all(answers(f"{url}/health") for url in fleet.urls))
    assert [answers(f"{url}/server_info") for url in fleet.urls] == [True, False]
    wanted = {"0.0": "present", "0.1": "absent", "1.0": "present"}
    wait_for(f"the agents say {wanted}", lambda: fleet.tokenizers() == wanted)


def test_probe_says_what_each_node_is(fleet: SGLangFleet) -> None:
    code, found = probed(fleet.urls[0])
    assert code == 0 and (found["kind"], found["version"]) == ("sglang", "0.5.23")
    assert (found["node_rank"], found["nnodes"], found["world"], found["tokenizer"]) == (0, 2, 2, "present")
    assert set(found["has"]) == set(Operation) - {Operation.ADAPTERS}
    assert [*found["lacks"]] == ["adapters"] and "launch it with --enable-lora" in found["lacks"]["adapters"]
    code, found = probed(fleet.urls[1])
    assert code == 1 and found["tokenizer"] == "absent" and "node rank 0" in found["note"]


def test_profile_broadcast_to_both_nodes_is_one_call_and_two_traces(fleet: SGLangFleet) -> None:
    started = fleet.plane.start_profile(1, replicas=[0]).wait()
    assert acted(started).calls == ("start_profile",)
    assert conclusions(started)["0.1"] == Skipped(Reason.NOT_PRIMARY)
    again = fleet.plane.start_profile(1, replicas=[0]).wait()  # a second start would lose what was recorded
    assert conclusions(again)["0.0"] == Skipped(Reason.ALREADY_PROFILING)
    fleet.tokens(6)
    stopped = fleet.plane.stop_profile(1, replicas=[0], timeout=60).wait()
    assert conclusions(stopped)["0.1"] == Skipped(Reason.NOT_PRIMARY)
    (first,) = acted(stopped).traces
    collected = fleet.plane.collect_traces(1, replicas=[0]).wait()
    assert conclusions(collected)["0.0"] == Skipped(Reason.ALREADY)
    (second,) = acted(collected, "0.1").traces
    assert first.path == "global_step_1/replica_0/global_step_1.replica_0-TP-0.trace.json.gz"
    assert second.path == "global_step_1/replica_0/global_step_1.replica_0-TP-1.trace.json.gz"
    for trace in (first, second):
        assert Counter(name[0] for name in look(fleet.folder / "traces", trace).passes) == Counter(P=1, D=5)
    stopped_twice = fleet.plane.stop_profile(1, replicas=[0]).wait()
    assert conclusions(stopped_twice)["0.0"] == Skipped(Reason.NOT_PROFILING)


def test_step_of_a_trainer_collects_by_itself(fleet: SGLangFleet) -> None:
    with fleet.plane.step(40):
        fleet.tokens(4)
    *_, collected = fleet.plane.profile_reports
    (trace,) = acted(collected, "0.1").traces
    assert trace.path.startswith("global_step_40/replica_0/") and trace.path.endswith("-TP-1.trace.json.gz")


def test_an_activity_that_sglang_would_silently_accept_is_never_sent(fleet: SGLangFleet) -> None:
    bogus = ProfilePlan(activities=frozenset({"BOGUS"}))  # type: ignore[arg-type]
    with pytest.raises(CommandError, match="BOGUS"):
        fleet.plane.start_profile(10, bogus).wait()


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_from_disk_change_what_both_ranks_generate(fleet: SGLangFleet) -> None:
    launched = fleet.tokens()
    report = fleet.plane.sync_weights(None, Checkpoint("b"), timeout=60).wait()
    assert report.loaded == (0,)
    assert conclusions(report.phases[1])["0.1"] == Skipped(Reason.NOT_PRIMARY)
    assert conclusions(report.phases[1])["1.0"] == Skipped(Reason.MODE_NEVER_SYNCS)
    assert fleet.tokens() != launched and fleet.label() == str(report.version)
    report = fleet.plane.sync_weights(None, Checkpoint("a"), timeout=60).wait()
    assert report.loaded == (0,)
    assert fleet.tokens() == launched and fleet.label() == str(report.version)


@pytest.mark.parametrize("names", [CLOSED, SPLIT], ids=["closed", "split"])
def test_a_delta_brings_the_weights_that_the_whole_checkpoint_does(
    fleet: SGLangFleet, names: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    deltas, name = Deltas(fleet.plane), f"changed-{request.node.callspec.id}"
    save_changed(fleet.folder, name, 1, names)
    base = deltas.sync("a").version
    launched = fleet.tokens()
    report = deltas.sync(name, base)
    assert report.by_delta == report.loaded == (0,) and took(report) == {"0.0": "delta"}
    generated = fleet.tokens()
    reported = httpx.get(f"{fleet.urls[0]}/model_info", timeout=60).json()  # as older versions do in /server_info
    assert read_launch(reported, {}).model == str(fleet.folder / name) != reported["model_path"]
    assert deltas.sync(name).by_delta == () and fleet.tokens() == generated != launched
    report = deltas.same_as_whole(name, base, fleet.tokens)
    assert took(report) == {"0.0": f"whole: it takes no delta, or was not known to hold version {base}"}


def test_weights_come_through_a_group_of_the_trainer_and_both_ranks(fleet: SGLangFleet) -> None:
    assert fleet.plane.sync_weights(None, Checkpoint("c"), timeout=60).wait().loaded == (0,)
    from_disk = fleet.tokens()
    assert fleet.plane.sync_weights(None, Checkpoint("b"), timeout=60).wait().loaded == (0,)
    assert fleet.tokens() != from_disk
    source = Broadcast(host="127.0.0.1", port=free_port(), group="weights-1", replicas=(0,), backend="gloo")
    manifest = build_manifest(fleet.folder / "c", content=False)
    send = sender(source, 2, weights(3))
    report = fleet.plane.sync_weights(None, source, manifest=manifest, send=send, timeout=60).wait()
    assert report.loaded == (0,), report
    assert fleet.tokens() == from_disk and fleet.label() == str(report.version)


def test_broadcast_that_is_not_for_it_or_of_another_model_is_refused(fleet: SGLangFleet) -> None:
    others = Broadcast(host="127.0.0.1", port=1, group="others", replicas=(3,), backend="gloo")
    manifest = build_manifest(fleet.folder / "c", content=False)
    report = fleet.plane.sync_weights(None, others, manifest=manifest, timeout=30).wait()
    assert "is not in group" in failed(report.phases[0]).message
    small = weights(1)
    del small["lm_head.weight"]
    save_weights(fleet.folder / "small", small)
    another = Broadcast(host="127.0.0.1", port=1, group="another", replicas=(0,), backend="gloo")
    manifest = build_manifest(fleet.folder / "small", content=False)
    report = fleet.plane.sync_weights(None, another, manifest=manifest, timeout=30).wait()
    assert failed(report.phases[0]).error is ErrorKind.SOURCE_REFUSED


# --- generation and memory --------------------------------------------------------------------------------------------


def test_flush_is_repeated_until_requests_have_ended(fleet: SGLangFleet) -> None:
    fleet.slow_down(0.05)
    request = fleet.request(600).grows_to(1)
    refused = failed(fleet.plane.flush(replicas=[0], timeout=12).wait())
    assert refused.error is ErrorKind.REFUSED and "400" in refused.message
    assert not request.ended
    fleet.slow_down(0)
    acted(fleet.plane.flush(replicas=[0], timeout=60).wait())
    assert len(request.all()) == 600


def test_memory_is_released_and_restored_by_tags(fleet: SGLangFleet) -> None:
    before = fleet.tokens()
    assert acted(fleet.plane.sleep(["kv_cache"], replicas=[0]).wait()).calls == ("pause", "sleep")
    assert acted(fleet.plane.sleep(["weights"], replicas=[0]).wait()).calls == ("sleep",)
    late = fleet.request(4)
    assert acted(fleet.plane.wake(["weights"], replicas=[0]).wait()).calls == ("wake",)
    assert not late.ended
    assert acted(fleet.plane.wake(replicas=[0]).wait()).calls == ("wake", "resume")
    assert len(late.all()) == 4
    assert fleet.tokens() == before


# --- an engine that is busy with a trace ------------------------------------------------------------------------------


def test_trace_that_blocks_the_scheduler_is_reported_by_the_deadline_and_stops_no_other_replica(
    fleet: SGLangFleet, blocks_it: None
) -> None:
    """Stacks of an idle scheduler, which spins: some seconds of it take SGLang a minute to write."""
    acted(fleet.plane.start_profile(90, ProfilePlan(with_stack=True), replicas=[0]).wait())
    until = time.monotonic() + RECORDED_S
    while time.monotonic() < until:
        fleet.tokens(60)
    late = failed(fleet.plane.stop_profile(90, replicas=[0], timeout=6).wait())
    assert late.error is ErrorKind.ENGINE_TIMEOUT
    flushed = fleet.plane.flush(timeout=5).wait()
    assert failed(flushed).error is ErrorKind.ENGINE_BUSY
    assert isinstance(conclusions(flushed)["1.0"], Acted)
    assert not any(isinstance(conclusion, Missing) for conclusion in conclusions(flushed).values())


def test_the_whole_run_broke_no_invariant_and_replays(fleet: SGLangFleet, blocks_it: None) -> None:
    assert list(verify(RunLog.read(fleet.folder / "run.db"))) == []
    assert replay_log(RunLog.read(fleet.folder / "run.db")).compared > 100
