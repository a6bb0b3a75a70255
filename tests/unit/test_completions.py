"""Rollouts from vLLM's completions route: which server is asked, and what happens when one does not answer."""

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from controlplane import ControlPlane
from controlplane.trainers import completions
from controlplane.trainers.completions import CompletionsClient, again_and_again, split
from schemas.config import BusConfig
from schemas.errors import AgentsMissing, BusFaulted, ConfigError, EngineError
from schemas.reports import AdapterStatus
from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from tests.unit.small_bus import PRIMARY, Engine
from tests.unit.test_bus_faults import held_up, locked
from tests.unit.test_plane import ADDRESS, agents
from tests.waiting import wait_until

PROMPTS = [[1], [1], [2], [2], [3], [3]]


class Server(HttpServer):
    """Continues each prompt with its own token, repeated; `reply` takes the place of the next answers."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.models: list[str] = []
        self.cut_off = 0
        super().__init__(self.reply)

    def reply(self, request: HttpRequest) -> Reply:
        if request.path == "/v1/models":
            return 200, {"data": [{"id": "base"}]}
        if self.replies:
            return self.replies.pop(0)
        body = msgspec.json.decode(request.body)
        self.models.append(body["model"])
        assert (body["logprobs"], body["return_token_ids"]) == (0, True)
        self.cut_off, cut_off = 0, self.cut_off
        return 200, {"choices": [self._choice(prompt, cut_off > at) for at, prompt in enumerate(body["prompt"])]}

    def _choice(self, prompt: list[int], cut_off: bool) -> dict[str, Any]:
        made = [*prompt] if cut_off else prompt * 3
        logprobs = {"token_logprobs": [-0.5] * len(made)}
        return {"token_ids": made, "logprobs": logprobs, "finish_reason": "abort" if cut_off else "length"}

    @property
    def asked(self) -> list[list[list[int]]]:
        """The prompts of each request."""
        bodies = [msgspec.json.decode(request.body) for request in self.requests if request.verb == "POST"]
        return [body["prompt"] for body in bodies]


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    with Server() as first, Server() as second:
        yield first, second


def client(
    servers: Sequence[HttpServer], serving: dict[int, int] | None = None, timeout: float = 30
) -> CompletionsClient:
    urls = {replica: server.url for replica, server in enumerate(servers)}
    return CompletionsClient(lambda: serving if serving is not None else {0: 7, 1: 7}, urls, timeout=timeout)


def test_equal_prompts_stay_together_and_shares_are_even() -> None:
    assert split(PROMPTS, range(6), 2) == [[0, 1, 4, 5], [2, 3]]
    assert split(PROMPTS, range(6), 5) == [[0, 1], [2, 3], [4, 5]]
    assert split(PROMPTS, [1, 3], 2) == [[1], [3]]


def test_replicas_share_the_prompts_and_answers_come_in_their_order(servers: tuple[Server, Server]) -> None:
    rollouts = client(servers).generate(PROMPTS, {"max_tokens": 3})
    assert [rollout.token_ids for rollout in rollouts] == [prompt * 3 for prompt in PROMPTS]
    assert [rollout.replica for rollout in rollouts] == [0, 0, 1, 1, 0, 0]
    assert rollouts[0].logprobs == [-0.5, -0.5, -0.5]
    assert (servers[0].asked, servers[1].asked) == ([[[1], [1], [3], [3]]], [[[2], [2]]])
    assert servers[0].models == servers[1].models == ["base"]


@pytest.mark.parametrize("serving", [{0: 6, 1: 7}, {1: 7}])
def test_only_those_that_serve_the_newest_weights_are_asked(
    servers: tuple[Server, Server], serving: dict[int, int]
) -> None:
    rollouts = client(servers, serving).generate(PROMPTS, {})
    assert {rollout.replica for rollout in rollouts} == {1} and servers[0].asked == []


@pytest.mark.parametrize("reply", [None, (503, {"error": "dead"})], ids=["hangs up", "503"])
def test_the_prompts_of_a_dead_replica_are_asked_of_others(servers: tuple[Server, Server], reply: Reply) -> None:
    servers[1].replies = [reply]
    rollouts = client(servers).generate(PROMPTS, {})
    assert [rollout.token_ids for rollout in rollouts] == [prompt * 3 for prompt in PROMPTS]
    assert {rollout.replica for rollout in rollouts} == {0} and servers[0].asked[1] == [[2], [2]]


def test_what_a_frozen_replica_owes_is_asked_of_others_once_it_no_longer_serves(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stay open. The plane drops it long before the request has its time-out."""
    monkeypatch.setattr(completions, "GIVEN_UP_S", 0.3)
    serving, thaw, posts = {0: 7, 1: 7}, threading.Event(), threading.Semaphore(0)

    def freeze(request: HttpRequest) -> Reply:
        if request.verb == "POST":
            serving.clear()  # a sync: no replica serves, and none is given up
            posts.release()
            thaw.wait(60)
        return servers[0].reply(request)

    def sync() -> None:
        assert posts.acquire(timeout=30)
        serving.update({0: 8})  # the other one has dropped out

    with HttpServer(freeze) as frozen:
        thread = threading.Thread(target=sync)
        thread.start()
        rollouts = client([servers[0], frozen], serving, timeout=600).generate(PROMPTS, {})
        thread.join()
        thaw.set()
    assert [rollout.token_ids for rollout in rollouts] == [prompt * 3 for prompt in PROMPTS]
    assert {rollout.replica for rollout in rollouts} == {0}


def test_a_server_that_is_frozen_before_it_was_ever_asked_holds_nothing_up(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MEET_S", 0.3)
    thaw = threading.Event()

    def freeze(request: HttpRequest) -> Reply:
        thaw.wait(60)
        return servers[0].reply(request)

    with HttpServer(freeze) as frozen:
        with pytest.raises(ConfigError, match="replica 1 does not answer as vLLM's server does: ReadTimeout"):
            client([servers[0], frozen], timeout=600).generate(PROMPTS, {})
        thaw.set()


def test_a_replica_that_is_paused_by_a_sync_keeps_its_request(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "GIVEN_UP_S", 0.0)
    monkeypatch.setattr(completions, "LOOK_AGAIN_S", 0.01)
    looks = iter([{0: 7, 1: 7}, {0: 7, 1: 7}, *([{}] * 20), {0: 8, 1: 8}])
    waited = threading.Event()

    def serving() -> dict[int, int]:
        found = next(looks, None)
        if found is None or found == {0: 8, 1: 8}:
            waited.set()
        return {0: 8, 1: 8} if found is None else found

    def slow(request: HttpRequest) -> Reply:
        if request.verb == "POST":
            assert waited.wait(30)
        return servers[1].reply(request)

    with HttpServer(slow) as paused:
        asked = CompletionsClient(serving, {0: servers[0].url, 1: paused.url}, timeout=600)
        assert {rollout.replica for rollout in asked.generate(PROMPTS, {})} == {0, 1}
    assert len(servers[0].asked) == 1


def test_a_replica_that_failed_is_asked_again_if_it_is_the_only_one(servers: tuple[Server, Server]) -> None:
    servers[0].replies = [None, None]
    assert len(client(servers[:1], {0: 1}).generate(PROMPTS, {})) == 6
    assert len(servers[0].asked) == 3


PAUSED = {"message": "Generation is paused", "type": "ServiceUnavailableError", "param": None, "code": 503}
"""A refusal of vLLM 0.33 while it is paused by `abort` or `wait`: its `RetryableRequestError` as an answer."""


def test_a_server_that_refuses_requests_while_it_is_paused_is_asked_again_until_it_resumes(
    servers: tuple[Server, Server], caplog: pytest.LogCaptureFixture
) -> None:
    """A sync that pauses by `abort`: all servers refuse, and the plane has not heard of the pause yet. Said once."""
    for server in servers:
        server.replies = [(503, {"error": PAUSED})] * 3
    rollouts = client(servers).generate(PROMPTS, {"max_tokens": 3})
    assert [rollout.token_ids for rollout in rollouts] == [prompt * 3 for prompt in PROMPTS]
    assert [len(server.asked) for server in servers] == [4, 4]
    assert sorted(message[:25] for message in caplog.messages) == [
        "replica 0 did not answer;",
        "replica 1 did not answer;",
    ]


def test_the_time_to_wait_for_a_replica_begins_anew_with_each_answer(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that takes as long as the timeout, and then a sync: what the sync cut off is still waited for."""
    clock = [0.0]
    monkeypatch.setattr(completions, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slowly(request: HttpRequest) -> Reply:
        answer = servers[0].reply(request)
        if request.verb == "POST" and not clock[0]:
            clock[0] = 60.0
            servers[0].replies = [(503, {"error": PAUSED})]
        return answer

    servers[0].cut_off = 1
    with HttpServer(slowly) as slow:
        rollouts = client([slow], {0: 7}, timeout=30).generate(PROMPTS, {})
    assert [rollout.token_ids for rollout in rollouts] == [prompt * 3 for prompt in PROMPTS]


def test_what_an_abort_cut_off_is_asked_again(servers: tuple[Server, Server]) -> None:
    servers[0].cut_off = 1
    rollouts = client(servers[:1], {0: 1}).generate(PROMPTS, {})
    assert [rollout.token_ids for rollout in rollouts] == [prompt * 3 for prompt in PROMPTS]
    assert servers[0].asked[1:] == [[[1]]]


def test_a_request_that_a_server_refuses_is_not_asked_of_others(servers: tuple[Server, Server]) -> None:
    servers[0].replies = [(400, {"error": "max_tokens is too large"})]
    with pytest.raises(EngineError, match="replica 0 refused the rollout with 400: .*max_tokens is too large"):
        client(servers).generate(PROMPTS, {})


def test_a_replica_without_an_url_is_named_at_the_start(servers: tuple[Server, Server]) -> None:
    with pytest.raises(ConfigError, match="urls: replicas? 2 has no URL; there are {0: 'http://127.0.0.1"):
        client(servers, {0: 1, 2: 1}).generate(PROMPTS, {})
    with pytest.raises(ConfigError, match="urls is empty"):
        client([])


def test_an_url_without_a_vllm_is_named_at_the_start(servers: tuple[Server, Server]) -> None:
    wrong = r"urls: {} of replica 1 does not answer as vLLM's server does: {}"
    with HttpServer(lambda _: (404, {})) as other, pytest.raises(ConfigError, match=wrong.format(other.url, ".*404")):
        client([servers[0], other]).generate(PROMPTS, {})
    with pytest.raises(ConfigError, match=wrong.format(other.url, "ConnectError")):
        client([servers[0], other]).generate(PROMPTS, {})


def test_having_no_server_to_ask_ends_at_the_timeout(servers: tuple[Server, Server]) -> None:
    with pytest.raises(AgentsMissing, match=r"no replica has answered for 0\.1 s: none serves the newest weights"):
        client(servers, {}, timeout=0.1).generate(PROMPTS, {})


def test_rows_are_read_again_and_again_and_a_dataset_that_is_used_up_is_named() -> None:
    assert list(itertools.islice(again_and_again([1, 2]), 5)) == [1, 2, 1, 2, 1]
    datasets: list[Iterable[int]] = [iter([1, 2]), [], iter(())]
    for used_up in datasets:
        with pytest.raises(ConfigError, match="no rows, or none left"):
            list(again_and_again(used_up))


# --- adapters ---------------------------------------------------------------------------------------------------------


def adapter(version: int, *replicas: int) -> AdapterStatus:
    return AdapterStatus(
        name="policy", version=version, model=f"policy-v{version}", path="a", replicas=replicas, oldest=1
    )


def test_requests_name_the_committed_version_of_an_adapter_where_it_is_held(servers: tuple[Server, Server]) -> None:
    """The other one serves on, its base weights and other adapters."""
    rollouts = client(servers).generate(PROMPTS, {}, lambda: adapter(3, 1))
    assert {rollout.replica for rollout in rollouts} == {1} and servers[0].asked == []
    assert servers[1].models == ["policy-v3"]


def test_a_version_that_was_dropped_meanwhile_is_asked_for_by_its_successor(servers: tuple[Server, Server]) -> None:
    newest = iter([adapter(1, 0)])
    servers[0].replies = [(404, {"error": "The model `policy-v1` does not exist."})]
    rollouts = client(servers).generate(PROMPTS, {}, lambda: next(newest, adapter(3, 0, 1)))
    assert [rollout.token_ids for rollout in rollouts] == [prompt * 3 for prompt in PROMPTS]
    assert servers[0].asked[0] == PROMPTS and servers[1].models == ["policy-v3"]


@pytest.mark.parametrize(("held", "says"), [(None, "none serves the newest adapter"), (adapter(3), "none serves")])
def test_while_no_replica_holds_the_adapter_none_is_asked(
    servers: tuple[Server, Server], held: AdapterStatus | None, says: str
) -> None:
    """The base would answer too, and it is not what is trained."""
    with pytest.raises(AgentsMissing, match=says):
        client(servers, timeout=0.3).generate(PROMPTS, {}, lambda: held)
    assert servers[0].asked == servers[1].asked == []


def test_rollouts_wait_for_a_log_that_takes_no_record_for_a_while(
    tmp_path: Path, servers: tuple[Server, Server]
) -> None:
    config, looks = BusConfig(head_interval_ms=50, heartbeat_ms=40, agent_timeout_ms=1_000), itertools.count(1)
    with (
        ControlPlane(ADDRESS, log=tmp_path / "run.db", config=config) as plane,
        agents(plane.address, tmp_path, {PRIMARY: Engine()}),
        ThreadPoolExecutor() as pool,
    ):
        plane.wait_for_agents(1, timeout=20).wait()

        def serving() -> dict[int, int]:
            seen.append(next(looks))
            return plane.serving()

        def policy() -> AdapterStatus:
            seen.append(next(looks))
            return plane.adapters().get("policy") or adapter(3, 0)

        def nothing_is_known() -> bool:
            try:
                plane.serving()
            except BusFaulted:
                return True
            return False

        seen: list[int] = []
        asking = CompletionsClient(serving, {0: servers[0].url})
        with locked(tmp_path / "run.db"):
            held_up(plane, timeout=60)
            wait_until(nothing_is_known)
            asked = [pool.submit(asking.generate, PROMPTS, {}, named) for named in (None, policy)]
            wait_until(lambda: len(seen) > 8 or all(one.done() for one in asked))
        for one in asked:
            assert [rollout.token_ids for rollout in one.result(60)] == [prompt * 3 for prompt in PROMPTS]
