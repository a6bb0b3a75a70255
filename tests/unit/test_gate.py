"""The gate of a trainer: samples that are refused are counted, and others take their place."""

import queue
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane import ControlPlane
from controlplane.trainers.completions import Rollout
from controlplane.trainers.gate import Gate, GatedQueue, GatedRollouts
from schemas.errors import ConfigError, EngineError
from schemas.reports import SampleStatus
from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from tests.unit.small_bus import PRIMARY, Engine
from tests.unit.test_plane import ADDRESS, QUICK, agents, checkpoint

PROMPTS = [[1], [2], [3]]


class Server(HttpServer):
    """Answers as vLLM 0.32 with `--enable-scale-out`. `labels` are those of the next answers to a prompt."""

    def __init__(self, **labels: list[str]) -> None:
        self.labels, self.asked = labels, Counter[str]()
        self.fails = 0
        super().__init__(self.reply)

    def reply(self, request: HttpRequest) -> Reply:
        if request.path == "/v1/models":
            return 200, {"data": [{"id": "base"}]}
        if request.path != "/inference/v1/generate" or not self.labels:
            return 404, {"detail": "Not Found"}
        body = msgspec.json.decode(request.body)
        assert (body["model"], body["sampling_params"]) == ("base", {"logprobs": 0, "max_tokens": 2})
        name = f"p{body['token_ids'][0]}"
        self.asked[name] += 1
        labels = self.labels.get(name, ["1"])
        label = labels.pop(0) if len(labels) > 1 else labels[0]
        if label in ("abort", "500"):
            self.fails += 1
        if label == "500":
            return 500, {"error": "dead"}
        ids = [*body["token_ids"], 9]
        content = [{"token_id": token, "logprob": -0.5} for token in ids]
        versions = [{"version": label, "start": 0, "end": len(ids)}]
        finished = "abort" if label == "abort" else "length"
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": finished}
        return 200, {"choices": [choice | {"weight_versions": versions}]}


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """The plane of one replica that serves v1."""
    opened = ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path)
    with opened as plane, agents(plane.address, tmp_path, {PRIMARY: Engine()}):
        plane.wait_for_agents(1, timeout=20).wait()
        sync(plane, 1)
        yield plane


def sync(plane: ControlPlane, version: int) -> None:
    plane.sync_weights(version, checkpoint(plane.checkpoints / str(version)), timeout=20).wait()


def generate(plane: ControlPlane, server: Server, gate: Gate | None, *, taken: bool = True) -> list[Rollout]:
    return GatedRollouts(plane, {0: server.url}, gate, 20).generate(PROMPTS, {"max_tokens": 2}, None, taken=taken)


def counted(plane: ControlPlane) -> tuple[int, int]:
    """How many samples the log has as accepted, and as refused."""
    plane.step(1)
    plane.flush().wait()  # by then it is decided
    found = plane.status().samples or SampleStatus()
    return found.accepted, found.refused


def test_what_is_refused_is_counted_and_that_prompt_alone_is_sampled_again(plane: ControlPlane) -> None:
    with Server(p2=["17", "1"]) as server:
        rollouts = generate(plane, server, Gate(max_staleness=0))
    assert [rollout.token_ids for rollout in rollouts] == [[1, 9], [2, 9], [3, 9]]
    assert rollouts[0].logprobs == [-0.5, -0.5] and server.asked == {"p1": 1, "p2": 2, "p3": 1}
    assert counted(plane) == (3, 1)


def test_what_is_always_refused_ends_the_training_with_the_reason(plane: ControlPlane) -> None:
    with Server(p2=["17"]) as server, pytest.raises(EngineError) as told:
        generate(plane, server, Gate(attempts=4))
    assert str(told.value).startswith(
        "1 of 3 prompts got no accepted sample in 4 attempts: it has tokens of weights that were not proven: 0-2 '17' "
    )
    assert server.asked["p2"] == 4 and counted(plane) == (2, 4)


def test_answers_that_a_sync_cut_off_or_a_server_refused_to_give_are_asked_for_again_and_not_judged(
    plane: ControlPlane,
) -> None:
    with Server(p1=["abort", "1"], p3=["500", "1"]) as server:
        assert len(generate(plane, server, Gate())) == 3
    assert server.fails == 2 and counted(plane) == (3, 0)


def test_a_server_whose_answers_name_no_versions_is_refused_by_a_line_that_says_what_to_launch(
    plane: ControlPlane,
) -> None:
    with Server() as server, pytest.raises(ConfigError, match=r"Launch vLLM 0\.32 or newer with --enable-scale-out"):
        generate(plane, server, Gate())


def sample(label: str) -> Rollout:
    spans = [{"version": label, "start": 0, "end": 1}]
    return Rollout([5], [-0.5], 0, {"token_ids": [5], "weight_versions": spans})


def gated(plane: ControlPlane, gate: Gate | None, maxsize: int = 2) -> GatedQueue:
    return GatedQueue(GatedRollouts(plane, {0: "http://127.0.0.1:9"}, gate, 20), maxsize, batch=1)


def test_a_sample_is_judged_when_the_trainer_takes_it_and_left_out_if_it_became_stale(plane: ControlPlane) -> None:
    with Server(p1=["1"]) as server:
        early = generate(plane, server, Gate(max_staleness=0), taken=False)
    assert counted(plane) == (0, 0), "nothing was taken yet"
    samples = gated(plane, Gate(max_staleness=0))
    samples.put(("old", early[0]))
    sync(plane, 2)
    samples.put(("new", sample("2")))
    assert samples.get(timeout=5) == "new"
    with pytest.raises(queue.Empty):
        samples.get(timeout=0.01)
    assert counted(plane) == (1, 1)


def test_samples_that_are_refused_one_after_the_other_without_end_end_the_training(plane: ControlPlane) -> None:
    samples = gated(plane, Gate(attempts=2))
    for _ in range(6):
        samples.put(("old", sample("17")))
        with pytest.raises(queue.Empty):
            samples.get(timeout=0.01)
    samples.put(("old", sample("17")))
    with pytest.raises(EngineError, match="refused 7 samples in a row: it has tokens of weights that were not proven"):
        samples.get(timeout=5)
    samples = gated(plane, Gate(attempts=1))
    for label in ("17", "17", "17", "1") * 3:  # one that is accepted begins the count anew
        samples.put((label, sample(label)))
        assert samples.get(timeout=5) if label == "1" else _empty(samples)


def _empty(samples: GatedQueue) -> bool:
    with pytest.raises(queue.Empty):
        samples.get(timeout=0.01)
    return True


def test_without_a_gate_nothing_is_asked_of_versions_and_nothing_counted(plane: ControlPlane) -> None:
    samples = gated(plane, None)
    samples.put(("any", Rollout([5], [-0.5], 0)))
    assert samples.get(timeout=5) == "any" and counted(plane) == (0, 0)


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"max_staleness": -1}])
def test_a_gate_is_checked_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="attempts is at least 1, and max_staleness at least 0"):
        Gate(**wrong)
