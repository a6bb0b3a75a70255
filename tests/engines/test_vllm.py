"""A real vLLM on the CPU under real agents: each operation is checked by its effect, also when a server dies."""

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from controlplane.cli.reducers import replay_log
from controlplane.record.invariants import verify
from controlplane.record.log import RunLog
from schemas.commands import Checkpoint
from schemas.errors import CheckpointError
from schemas.identity import Operation
from schemas.outcomes import Acted, ErrorKind, Reason, Skipped
from schemas.safetensors.manifest import build_manifest
from tests.engines.models import save_weights, weights
from tests.engines.profiles import look, of_rank
from tests.engines.reports import acted, conclusions, failed
from tests.engines.servers import (
    probed,
    wait_for,
)
from tests.engines.vllm_fleet import VLLMFleet

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(480)]


LONG, ENDLESS = 600, 30_000
"""Tokens of a request that ends by itself, and of one that is still running when a command comes: it takes a minute or
more. On two cores the first tokens may come a second late, with a hundred others, since vLLM's core spins."""

BACKLOG = 400
"""More tokens than were made and not handed out when a pause was acknowledged."""


@pytest.fixture
def fleet(vllm_fleet: VLLMFleet) -> Iterator[VLLMFleet]:
    """At rest before and after."""
    yield vllm_fleet
    vllm_fleet.rest()


def test_probe_says_what_the_server_is(fleet: VLLMFleet) -> None:
    code, found = probed(fleet.first.url)
    assert code == 0 and (found["kind"], found["version"], found["tokenizer"]) == ("vllm", "0.32.0", "present")
    assert set(found["has"]) == set(Operation) and found["model"] == fleet.first.model


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_change_exactly_when_they_are_synced_and_the_label_follows(fleet: VLLMFleet) -> None:
    launched = fleet.tokens()
    assert launched[0] == launched[1]
    report = fleet.sync("b", content=True)
    assert report.status == "committed" and report.loaded == (0, 1)
    changed = fleet.tokens()
    assert changed[0] == changed[1] != launched[0]
    for url in (fleet.first.url, fleet.second_url):
        assert httpx.get(f"{url}/weight_info").json() == {"weight_version": str(fleet.version)}
    loads = conclusions(report.phases[1])
    assert loads["0.1"] == Skipped(Reason.NOT_PRIMARY)
    digests = {load.digest for load in loads.values() if isinstance(load, Acted)}
    assert len(digests) == 1 and str(*digests).startswith("vllm:")  # both engines hold the same tensors
    assert fleet.sync("a").status == "committed"
    assert fleet.tokens() == launched


def test_replica_that_loaded_goes_back_when_too_few_did(fleet: VLLMFleet) -> None:
    before = fleet.tokens()
    fleet.proxy.on["/collective_rpc"] = fleet.first.freeze
    report = fleet.sync("b", quorum=2, timeout=6)
    assert report.status == "aborted"
    assert failed(report.phases[1]).error is ErrorKind.ENGINE_TIMEOUT
    assert isinstance(conclusions(report.phases[1])["1.0"], Acted)  # it had loaded, and went back
    fleet.first.thaw()
    fleet.wait_ready()
    assert fleet.tokens() == before


def _broken(folder: Path, how: str) -> None:
    tensors = weights(2)
    match how:
        case "wrong dtype":
            tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        case "wrong shape":
            tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :128].contiguous()
        case "missing tensor":
            del tensors["model.layers.1.mlp.up_proj.weight"]
    save_weights(folder, tensors)
    if how == "cut off":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize("how", ["cut off", "wrong dtype", "wrong shape", "missing tensor", "no directory", "outside"])
def test_bad_checkpoint_never_reaches_the_engine(fleet: VLLMFleet, how: str) -> None:
    before, name = fleet.tokens(), how.replace(" ", "-")
    manifest = build_manifest(fleet.folder / "b", content=False)
    if how == "outside":
        name = "link"
        (fleet.folder / name).symlink_to(fleet.folder.parent)
    elif how != "no directory":
        _broken(fleet.folder / name, how)
    if how.startswith("wrong") or how == "missing tensor":
        manifest = build_manifest(fleet.folder / name, content=False)  # the trainer wrote just this
    fleet.version += 1
    report = fleet.plane.sync_weights(fleet.version, Checkpoint(name), manifest=manifest, timeout=30).wait()
    assert report.status == "aborted"
    for agent in ("0.0", "1.0"):
        assert failed(report.phases[0], agent).error is ErrorKind.SOURCE_REFUSED
    assert fleet.tokens() == before
    if how in ("cut off", "no directory", "outside"):  # the trainer's own look finds these before anything is sent
        with pytest.raises(CheckpointError):
            fleet.sync(name)


# --- generation -------------------------------------------------------------------------------------------------------


def test_paused_engine_starts_no_request(fleet: VLLMFleet) -> None:
    assert set(fleet.plane.pause().wait().acted) == {"0.0", "1.0"}
    assert httpx.get(f"{fleet.first.url}/is_paused").json() == {"is_paused": True}
    request = fleet.request(4)
    assert set(fleet.plane.pause().wait().skipped) == {"0.0", "0.1", "1.0"}  # time enough for it, had it begun
    assert set(fleet.plane.flush().wait().acted) == {"0.0", "1.0"}
    assert not request.ended
    assert set(fleet.plane.resume().wait().acted) == {"0.0", "1.0"}
    assert request.tokens() == 4


def test_pause_aborts_requests_in_flight(fleet: VLLMFleet) -> None:
    request = fleet.request(ENDLESS).running()
    acted(fleet.plane.pause("abort", replicas=[0]).wait())
    assert request.tokens() < ENDLESS
    acted(fleet.plane.resume(replicas=[0]).wait())


def test_pause_keeps_requests_in_flight(fleet: VLLMFleet) -> None:
    request = fleet.request(ENDLESS).running()
    acted(fleet.plane.pause("keep", replicas=[0]).wait())
    assert not request.ended, request
    acted(fleet.plane.resume(replicas=[0]).wait())
    request.grows(BACKLOG)
    acted(fleet.plane.abort_requests(replicas=[0]).wait())
    assert request.tokens() < ENDLESS


def test_pause_waits_for_requests_in_flight(fleet: VLLMFleet) -> None:
    request = fleet.request(LONG).running()
    acted(fleet.plane.pause("wait", replicas=[0], timeout=60).wait())
    assert request.tokens() == LONG
    acted(fleet.plane.resume(replicas=[0]).wait())


def test_abort_ends_what_runs_and_pauses_nothing(fleet: VLLMFleet) -> None:
    request = fleet.request(ENDLESS).running()
    acted(fleet.plane.abort_requests(replicas=[0]).wait())
    assert request.tokens() < ENDLESS
    assert len(fleet.first.complete(tokens=4)) == 4


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_sleeping_engine_serves_nobody_and_continues_when_awake(fleet: VLLMFleet) -> None:
    before = fleet.tokens()
    assert acted(fleet.plane.sleep().wait()).calls == ("pause", "sleep")
    assert httpx.get(f"{fleet.first.url}/is_sleeping").json() == {"is_sleeping": True}
    request = fleet.request(4)
    assert acted(fleet.plane.wake(["weights"]).wait()).calls == ("wake",)
    assert conclusions(fleet.plane.resume().wait())["0.0"] == Skipped(Reason.ALREADY)
    assert not request.ended
    assert acted(fleet.plane.wake().wait()).calls == ("wake", "resume")
    assert request.tokens() == 4
    assert fleet.tokens() == before


def test_discarded_weights_are_loaded_again_before_anybody_is_served(fleet: VLLMFleet) -> None:
    fleet.sync("c")
    before = fleet.tokens()
    acted(fleet.plane.sleep(discard=True).wait())
    assert acted(fleet.plane.wake().wait()).calls == ("check_source", "wake", "load", "wake", "flush", "resume")
    assert fleet.tokens() == before


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_a_session_records_the_workers_and_collects_their_traces(fleet: VLLMFleet) -> None:
    report = fleet.plane.start_profile(1, replicas=[0]).wait()
    assert acted(report).calls == ("start_profile",)
    assert conclusions(report)["0.1"] == Skipped(Reason.NOT_PRIMARY)
    again = fleet.plane.start_profile(1, replicas=[0]).wait()
    assert conclusions(again)["0.0"] == Skipped(Reason.ALREADY_PROFILING)
    fleet.first.complete(tokens=6)
    stopped = acted(fleet.plane.stop_profile(1, replicas=[0], timeout=120).wait())
    assert all(trace.path.startswith("global_step_1/replica_0/") for trace in stopped.traces)
    (worker,) = of_rank(stopped, 0)
    passes = look(fleet.folder / "traces", worker).passes
    assert Counter(name[0] for name in passes) >= Counter(P=1, D=5)
    assert list((fleet.folder / "raw-0").iterdir()) == []  # nothing is left where the engine writes
    assert conclusions(fleet.plane.stop_profile(1, replicas=[0]).wait())["0.0"] == Skipped(Reason.NOT_PROFILING)


# --- servers that hang and die ----------------------------------------------------------------------------------------


def test_a_hung_server_is_reported_by_the_deadline_and_the_other_continues(fleet: VLLMFleet) -> None:
    fleet.proxy.on["/collective_rpc"] = fleet.first.freeze
    report = fleet.sync("b", quorum=1, timeout=6)
    # Out of service by the commit, or not heard of any more when it was made: that depends on who answers first.
    assert report.status == "committed" and report.quarantined + report.unproven == (0,)
    assert failed(report.phases[1]).error is ErrorKind.ENGINE_TIMEOUT
    assert failed(fleet.plane.flush(replicas=[0], timeout=5).wait()).error is ErrorKind.ENGINE_BUSY
    served = httpx.get(f"{fleet.second_url}/weight_info").json()
    assert served == {"weight_version": str(fleet.version)}
    fleet.first.thaw()
    wait_for("the call has ended", lambda: fleet.status("0.0").activity is None)
    assert fleet.sync("c", timeout=60).loaded == (0, 1)
    assert len(set(map(tuple, fleet.tokens()))) == 1


def test_server_killed_during_an_update_is_out_of_service_and_serves_the_committed_version_when_it_is_back(
    fleet: VLLMFleet,
) -> None:
    fleet.proxy.on["/collective_rpc"] = fleet.first.kill
    report = fleet.sync("b", quorum=1, timeout=20)
    # Out of service by the commit, or not heard of any more when it was made: that depends on who answers first.
    assert report.status == "committed" and report.quarantined + report.unproven == (0,)
    assert failed(report.phases[1]).error is ErrorKind.ENGINE_ERROR
    fleet.first.start()
    fleet.first.wait_up()
    fleet.wait_ready()
    assert httpx.get(f"{fleet.first.url}/weight_info").json() == {"weight_version": str(fleet.version)}
    assert len(set(map(tuple, fleet.tokens()))) == 1


def test_a_launched_server_is_restarted_and_ends_with_its_agent(fleet: VLLMFleet) -> None:
    assert fleet.sync("a").status == "committed"
    agent = fleet.agents[2]
    server = next(
        process for process in agent.family() if process.cmdline()[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    )
    before = fleet.tokens()
    server.send_signal(signal.SIGKILL)
    wait_for("its agent sees that it is gone", lambda: not fleet.status("1.0").ready)
    fleet.wait_ready()
    assert httpx.get(f"{fleet.second_url}/weight_info").json() == {"weight_version": str(fleet.version)}
    assert fleet.tokens() == before
    family = agent.family()
    agent.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []


def test_the_whole_run_broke_no_invariant_and_replays(fleet: VLLMFleet) -> None:
    assert list(verify(RunLog.read(fleet.folder / "run.db"))) == []
    assert replay_log(RunLog.read(fleet.folder / "run.db")).compared > 100
