"""Where clients reach the servers of replicas: what agents say, and what is made of it."""

import pytest
from msgspec import ValidationError, convert, to_builtins
from msgspec.structs import replace

from controlplane.cli.agent import _endpoint
from controlplane.machine.events import HelloReceived
from controlplane.machine.fleet_view import FleetView
from controlplane.trainers.completions import CompletionsClient
from schemas.commands import Manifest
from schemas.errors import ConfigError
from schemas.outcomes import Acted
from schemas.wire import Hello, PeerFound
from tests.unit.fleets import DONE, Coordinator
from tests.unit.test_completions import PROMPTS, Server
from tests.unit.test_drains import SERVES, drain


def serving_at(bus: Coordinator, agent: str, endpoint: str) -> None:
    """Let the agent of a replica join, say where its server is, and serve."""
    bus.hello(agent)
    said = bus.history[-1]
    assert isinstance(said, HelloReceived)
    bus.feed(replace(said, hello=replace(said.hello, endpoint=endpoint)))
    bus.join(agent)
    bus.status(agent, SERVES, seq=1)


def test_the_endpoints_are_those_of_replicas_that_serve_and_say_where() -> None:
    bus = Coordinator()
    bus.answer(1)
    for replica, endpoint in enumerate(("http://node-0:8000/", "", "http://node-2:8000")):
        serving_at(bus, f"{replica}.0", endpoint)
    view = FleetView(bus.state)
    assert view.serving == {0: 0, 1: 0, 2: 0}
    assert view.endpoints == {0: "http://node-0:8000", 2: "http://node-2:8000"}
    drain(bus, 2)
    view = FleetView(bus.state)
    assert view.endpoints == {0: "http://node-0:8000"} and view.endpoint(2) == "http://node-2:8000"
    assert view.endpoint(7) == ""


@pytest.mark.parametrize("endpoint", ["ftp://node", "http://", "http://node\n", "http://a b", "http://" + 600 * "n"])
def test_an_endpoint_is_an_address_of_http(endpoint: str) -> None:
    bus = Coordinator("0.0")
    hello = replace(bus.state.members["0.0"].hello, endpoint="http://node:8000")
    assert convert(to_builtins(hello), Hello) == hello
    with pytest.raises(ValidationError):
        convert(to_builtins(replace(hello, endpoint=endpoint)), Hello)


@pytest.mark.parametrize(
    ("url", "worker_url", "bus", "said"),
    [
        (None, None, "tcp://trainer:5555", ""),
        ("http://node-0:8000/", None, "tcp://trainer:5555", "http://node-0:8000"),
        ("http://127.0.0.1:8000", None, "tcp://127.0.0.1:5555", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000", None, "ipc:///tmp/bus", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000", None, "tcp://trainer:5555", ""),
        ("https://localhost:8000", None, "tcp://trainer:5555", ""),
        ("http://localhost", None, "tcp://trainer:5555", ""),
        ("http://[::1]/", None, "tcp://trainer:5555", ""),
        ("http://0.0.0.0:8000", None, "tcp://trainer:5555", ""),
        ("http://[::]:8000", None, "tcp://trainer:5555", ""),
        ("http://node-0", None, "tcp://trainer:5555", "http://node-0"),
        ("http://127.0.0.1:8000", None, "/shared/run7/bus", ""),
        ("http://127.0.0.1:8000", "http://node-0:8000", "tcp://trainer:5555", "http://node-0:8000"),
        (None, "http://127.0.0.1:9000", "tcp://trainer:5555", "http://127.0.0.1:9000"),
    ],
)
def test_an_agent_says_its_servers_address_unless_only_its_own_machine_reaches_it(
    url: str | None, worker_url: str | None, bus: str, said: str
) -> None:
    assert _endpoint({"url": url, "worker_url": worker_url, "node_rank": 0}, bus) == said
    assert _endpoint({"url": url, "worker_url": worker_url, "node_rank": 1}, bus) == ""


def test_a_server_is_not_told_with_its_password() -> None:
    with pytest.raises(ConfigError, match="must not contain credentials"):
        _endpoint({"url": "http://me:secret@node:8000", "worker_url": None, "node_rank": 0}, "tcp://trainer:5555")


def test_rollouts_follow_replicas_that_join_move_and_leave_without_a_map_of_their_own() -> None:
    with Server() as first, Server() as second, Server() as moved:
        serving, endpoints = {0: 7}, {0: first.url}
        rollouts = CompletionsClient(lambda: serving, lambda: endpoints)
        sampling = {"max_tokens": 3}
        assert {rollout.replica for rollout in rollouts.generate(PROMPTS, sampling)} == {0}
        serving, endpoints = {0: 7, 1: 7}, {0: first.url, 1: second.url}
        assert {rollout.replica for rollout in rollouts.generate(PROMPTS, sampling)} == {0, 1}
        serving, endpoints = {1: 7}, {1: moved.url}
        assert {rollout.replica for rollout in rollouts.generate(PROMPTS, sampling)} == {1}
        assert moved.asked and len(second.asked) == 1
        endpoints = {}
        assert {rollout.replica for rollout in rollouts.generate(PROMPTS, sampling)} == {1}, "as it was last known"


# --- a server whose weights another one copies ------------------------------------------------------------------------


def test_new_replicas_are_spread_over_those_whose_weights_they_may_copy() -> None:
    bus = Coordinator()
    assert FleetView(bus.state).peer_of(0) == PeerFound(), "there is none yet"
    for replica in range(3):
        serving_at(bus, f"{replica}.0", f"http://node-{replica}:8000")
    view = FleetView(bus.state)
    assert [view.peer_of(replica).url[-6] for replica in (3, 4, 5, 6)] == ["0", "1", "2", "0"]
    assert [view.peer_of(replica).url[-6] for replica in range(3)] == ["1", "2", "0"], "none copies its own"


def test_no_weights_are_copied_during_a_sync_nor_from_a_replica_that_leaves() -> None:
    bus = Coordinator()
    for replica in range(2):
        serving_at(bus, f"{replica}.0", f"http://node-{replica}:8000")
    drain(bus, 1)
    assert FleetView(bus.state).peer_of(2) == PeerFound(url="http://node-0:8000")
    bus.sync(1)
    assert FleetView(bus.state).peer_of(2) == PeerFound()


def test_with_announced_digests_it_is_known_what_a_copy_holds() -> None:
    bus = Coordinator()
    serving_at(bus, "0.0", "http://node-0:8000")
    bus.sync(1, manifest=Manifest(tensors=1, nbytes=4, layout="l", content="c"))
    loaded = Acted(calls=("load",), version=1, digest="sglang:l:d")
    for conclusion in (DONE, loaded, DONE):
        bus.answer(a0_0=conclusion)
    found = PeerFound(url="http://node-0:8000", content="c", digest="sglang:l:d")
    assert FleetView(bus.state).peer_of(1) == found
    bus.status("0.0", replace(SERVES, version=1, digest=None), seq=bus.state.seq)
    assert FleetView(bus.state).peer_of(1) == replace(found, digest="")
