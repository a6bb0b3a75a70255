"""A real vLLM on the CPU under real agents: syncs, discarded weights, and servers that hang or die.

What each call does to requests, memory and files is judged by `rolloutctl conform` (test_conformance_servers.py).
"""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from http.client import HTTPConnection

import httpx
import psutil
import pytest

from controlplane.analysis.invariants import verify
from controlplane.cli.replay_log import replay_log
from controlplane.record.log import RunLog
from schemas.agent_status import RequestCounts
from schemas.errors import ConfigError
from schemas.identity import Operation
from schemas.outcomes import Acted, ErrorKind
from tests.engines.deltas import CLOSED, SPLIT, Deltas, save_changed, took
from tests.engines.reports import acted, conclusions, failed
from tests.engines.servers import probed, request_of, wait_for
from tests.engines.vllm_fleet import VLLMFleet
from tests.environments import VLLM_VERSION
from tests.running import rolloutctl

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(480)]


ENDLESS = 1500
"""Tokens of a request that is ended by its client."""


@pytest.fixture
def fleet(vllm_fleet: VLLMFleet) -> Iterator[VLLMFleet]:
    """At rest before and after."""
    yield vllm_fleet
    vllm_fleet.rest()


def test_probe_says_what_the_server_is(fleet: VLLMFleet) -> None:
    code, found = probed(fleet.first.url)
    assert code == 0 and (found["kind"], found["version"], found["tokenizer"]) == ("vllm", VLLM_VERSION, "present")
    assert set(found["has"]) == set(Operation) - {Operation.ADAPTERS} and found["model"] == fleet.first.model


def test_an_agent_that_was_given_other_numbers_than_its_engine_has_does_not_start(fleet: VLLMFleet) -> None:
    where = ("--bus", fleet.plane.address, "--replica", "7", "--gpus-per-node", "8")
    roots = ("--state-dir", str(fleet.folder / "other"), "--traces", str(fleet.folder / "other"))
    done = rolloutctl("agent", *where, *roots, "--engine", "vllm", "--url", fleet.first.url)
    assert done.returncode == 2, done.stderr
    assert "reports 1 GPUs, and its agent was given 8 (--nnodes 1, --gpus-per-node 8)" in done.stderr


def test_requests_that_run_and_wait_are_counted(fleet: VLLMFleet) -> None:
    def requests() -> RequestCounts | None:
        return next(line.requests for line in fleet.plane.status().agents if line.agent == "0.0")

    with ExitStack() as asked:
        for number in range(10):
            path, body = request_of("vllm", f"{number}", ENDLESS, fleet.first.model)
            client = asked.enter_context(closing(HTTPConnection(fleet.first.url.removeprefix("http://"))))
            # Its answer is not read: ten streams of tokens would leave the bus in this process no time.
            client.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        wait_for("8 run and 2 wait", lambda: requests() == RequestCounts(running=8, waiting=2))
    wait_for("none is left", lambda: requests() == RequestCounts(running=0, waiting=0))


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_change_exactly_when_they_are_synced_and_the_label_follows(fleet: VLLMFleet) -> None:
    launched = fleet.tokens()
    assert launched[0] == launched[1]
    report = fleet.sync("b", content=True)
    assert report.status == "committed" and report.loaded == (0, 1), report
    changed = fleet.tokens()
    assert changed[0] == changed[1] != launched[0]
    for url in (fleet.first.url, fleet.second_url):
        assert httpx.get(f"{url}/weight_info", timeout=60).json() == {"weight_version": str(fleet.version)}
    loads = conclusions(report.phases[1])
    digests = {load.digest for load in loads.values() if isinstance(load, Acted)}
    assert len(digests) == 1 and str(*digests).startswith("vllm:")  # both engines hold the same tensors
    fleet.sync("a").raise_unless_committed()
    assert fleet.tokens() == launched


def test_replica_that_loaded_goes_back_when_too_few_did(fleet: VLLMFleet) -> None:
    before = fleet.tokens()
    fleet.proxy.on["/collective_rpc"] = fleet.first.freeze
    report = fleet.sync("b", quorum=2, timeout=20)
    assert report.status == "aborted"
    assert failed(report.phases[1]).error is ErrorKind.ENGINE_TIMEOUT
    assert isinstance(conclusions(report.phases[1])["1.0"], Acted)  # it had loaded, and went back
    fleet.first.thaw()
    fleet.wait_ready()
    assert fleet.tokens() == before


def test_a_delta_brings_the_weights_that_the_whole_checkpoint_does(fleet: VLLMFleet) -> None:
    deltas, root = Deltas(fleet.plane), fleet.folder
    save_changed(root, "closed", 1, CLOSED)
    save_changed(root, "split", 1, SPLIT)
    base = deltas.sync("a").version
    launched = fleet.tokens()
    report = deltas.same_as_whole("closed", base, fleet.tokens)
    assert report.by_delta == report.loaded == (0, 1) and set(took(report).values()) == {"delta"}
    assert fleet.tokens() != launched
    base = deltas.sync("a").version  # what it lacks of fused modules, vLLM would take from uninitialized memory
    report = deltas.same_as_whole("split", base, fleet.tokens)
    assert report.loaded == (0, 1) and report.by_delta == ()
    assert all(text.startswith("whole: the engine fuses what has changed with") for text in took(report).values())
    report = deltas.same_as_whole("closed", base, fleet.tokens)  # of a version that they no longer hold
    assert report.loaded == (0, 1) and report.by_delta == ()
    fleet.version = deltas.sync("a").version
    assert fleet.tokens() == launched


def test_an_engine_that_was_launched_again_gets_the_whole_checkpoint_and_the_others_the_delta(fleet: VLLMFleet) -> None:
    deltas = Deltas(fleet.plane)
    save_changed(fleet.folder, "again", 1, CLOSED)
    base = deltas.sync("a").version
    fleet.first.kill()
    wait_for("its agent sees that it is gone", lambda: not fleet.status("0.0").ready)
    report = deltas.sync("again", base, quorum=1)
    assert (report.loaded, report.by_delta, report.unproven) == ((1,), (1,), (0,))
    fleet.first.start()
    fleet.first.wait_up()
    fleet.wait_ready()
    assert len(set(map(tuple, fleet.tokens()))) == 1
    fleet.version = deltas.sync("a").version


# --- what is new in 0.33 ----------------------------------------------------------------------------------------------


def test_answers_name_the_versions_of_their_tokens_and_a_paused_server_refuses_from_0_33_on(fleet: VLLMFleet) -> None:
    """Before, a completion names none, and a request that comes in a pause waits for its end."""
    older = VLLM_VERSION == "0.32.0"
    version = fleet.sync("b").version
    path, body = request_of("vllm", "hello", 8, fleet.first.model)
    ask = partial(httpx.post, fleet.first.url + path, json=body | {"return_weight_versions": True}, timeout=60)
    with pytest.raises(ConfigError) if older else nullcontext():
        (made,) = fleet.plane.provenance(ask().json(), replica=0)
        assert [(span.version, span.proof) for span in made.spans] == [(version, "proven")] and made.tokens == 8
    fleet.plane.pause("abort").wait()
    with ThreadPoolExecutor() as asking:
        asked = asking.submit(ask)
        if older:
            fleet.plane.resume().wait()
        assert asked.result().status_code == (200 if older else 503)
    fleet.plane.resume().wait()
    assert ask().status_code == 200


# --- memory -----------------------------------------------------------------------------------------------------------


def test_discarded_weights_are_loaded_again_before_a_request_is_served(fleet: VLLMFleet) -> None:
    fleet.sync("c")
    before = fleet.tokens()
    acted(fleet.plane.sleep(discard=True).wait())
    assert acted(fleet.plane.wake().wait()).calls == ("check_source", "wake", "load", "wake", "flush", "resume")
    assert fleet.tokens() == before


# --- servers that hang and die ----------------------------------------------------------------------------------------


def test_a_hung_server_is_reported_by_the_deadline_and_the_other_continues(fleet: VLLMFleet) -> None:
    fleet.proxy.on["/collective_rpc"] = fleet.first.freeze
    report = fleet.sync("b", quorum=1, timeout=20)
    # Out of service by the commit, or not heard of any more when it was made: that depends on which answers first.
    assert report.status == "committed" and report.quarantined + report.unproven == (0,), report
    assert failed(report.phases[1]).error is ErrorKind.ENGINE_TIMEOUT
    assert failed(fleet.plane.flush(replicas=[0], timeout=5).wait()).error is ErrorKind.ENGINE_BUSY
    served = httpx.get(f"{fleet.second_url}/weight_info", timeout=60).json()
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
    # Out of service by the commit, or not heard of any more when it was made: that depends on which answers first.
    assert report.status == "committed" and report.quarantined + report.unproven == (0,), report
    assert failed(report.phases[1]).error is ErrorKind.UNKNOWN
    fleet.first.start()
    fleet.first.wait_up()
    fleet.wait_ready()
    assert httpx.get(f"{fleet.first.url}/weight_info", timeout=60).json() == {"weight_version": str(fleet.version)}
    assert len(set(map(tuple, fleet.tokens()))) == 1


def test_a_launched_server_is_restarted_and_ends_with_its_agent(fleet: VLLMFleet) -> None:
    fleet.sync("a").raise_unless_committed()
    agent = fleet.agents[1]
    server = next(
        process for process in agent.family() if process.cmdline()[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    )
    before = fleet.tokens()
    server.send_signal(signal.SIGKILL)
    wait_for("its agent sees that it is gone", lambda: not fleet.status("1.0").ready)
    fleet.wait_ready()
    assert httpx.get(f"{fleet.second_url}/weight_info", timeout=60).json() == {"weight_version": str(fleet.version)}
    assert fleet.tokens() == before
    family = agent.family()
    agent.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []


def test_the_whole_run_broke_no_invariant_and_replays(fleet: VLLMFleet) -> None:
    assert list(verify(RunLog.read(fleet.folder / "run.db"))) == []
    assert replay_log(RunLog.read(fleet.folder / "run.db")).compared > 100
