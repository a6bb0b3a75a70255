"""Real engines that another program launches again under the label of the version that is committed.

They hold the weights of their launch. An SGLang has the label of an option, a vLLM of what set it before the agent
looked; the SGLang's random seed is given, so that only its start differs.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane import ControlPlane
from schemas.commands import Checkpoint
from tests.engines.models import save_model, save_weights, weights
from tests.engines.reports import BUS
from tests.engines.servers import AgentProcess, EngineServer
from tests.engines.soak import SPANS, UNI, UNI_VARIABLES
from tests.waiting import wait_until

PROMPT = [7, 9, 11, 13]
HEALTH = {"vllm": "/health", "sglang": "/server_info"}


class RelaunchedFleet:
    """One server, its agent, and the bus."""

    def __init__(self, kind: str, folder: Path, open_: ExitStack) -> None:
        self.kind, self.folder, self.open_, self.version = kind, folder, open_, 0
        self.model = save_model(folder / "a", 1)
        save_weights(folder / "b", weights(2))
        self.plane: ControlPlane = open_.enter_context(
            ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=BUS, checkpoints=folder)
        )
        self.server = self.launched()
        self.agent = self.joined()

    def launched(self, *labelled: str, port: int | None = None) -> EngineServer:
        """Launch the engine."""
        options, variables = (("--random-seed", "7", *labelled), {})
        if self.kind == "vllm":
            options, variables = (*UNI, SPANS), UNI_VARIABLES
        server = EngineServer(self.kind, self.model, self.folder, *options, port=port, variables=variables)
        self.open_.enter_context(server).wait_up(HEALTH[self.kind])
        if labelled and self.kind == "vllm":
            new = {"new_version": labelled[1]}
            httpx.post(f"{server.url}/update_weight_version", json=new, timeout=60).raise_for_status()
        return server

    def joined(self) -> AgentProcess:
        """Start the agent."""
        where = ("--engine", self.kind, "--url", self.server.url)
        return self.open_.enter_context(AgentProcess(self.plane.address, self.folder, "0.0", 1, *where))

    def sync(self, name: str) -> None:
        """Commit the weights of this name."""
        self.version += 1
        self.plane.sync_weights(self.version, Checkpoint(name), timeout=60).wait().raise_unless_committed()

    def answer(self) -> tuple[list[int], str]:
        """The tokens of a request, and the proof of what made them."""
        sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        if self.kind == "vllm":
            body: dict[str, Any] = {"model": str(self.model), "token_ids": PROMPT}
            path, body["sampling_params"] = "/inference/v1/generate", {**sampling, "max_tokens": 8}
        else:
            path, body = "/generate", {"input_ids": PROMPT, "sampling_params": {**sampling, "max_new_tokens": 8}}
        said = httpx.post(self.server.url + path, json=body, timeout=400).raise_for_status().json()
        (sample,) = self.plane.provenance(said, replica=0)
        assert [span.label for span in sample.spans] == [str(self.version)]
        return said["choices"][0]["token_ids"] if self.kind == "vllm" else said["output_ids"], sample.proof


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("vllm", marks=[pytest.mark.engine_vllm, pytest.mark.timeout(480)]),
        pytest.param("sglang", marks=[pytest.mark.engine_sglang, pytest.mark.timeout(480)]),
    ],
)
def test_an_engine_that_is_launched_again_under_the_committed_label_is_not_taken_for_it(
    kind: str, tmp_path: Path
) -> None:
    with ExitStack() as open_:
        fleet = RelaunchedFleet(kind, tmp_path, open_)
        fleet.plane.wait_for_agents(1, timeout=120).wait()
        fleet.sync("b")
        of_b, proof = fleet.answer()
        assert proof == "proven"
        assert fleet.agent.end() == 0
        fleet.server.kill()
        fleet.server = fleet.launched("--weight-version", "1", port=fleet.server.port)
        of_launch, _ = fleet.answer()
        assert of_launch != of_b, "it calls the weights of its launch version 1"
        fleet.agent = fleet.joined()
        wait_until(lambda: fleet.plane.serving() == {0: 1}, 120)
        of_now, proof = fleet.answer()
        assert of_now == of_b, "the committed weights were loaded again"
        assert proof == "unproven", "nothing tells these tokens from those of the launch"
        fleet.sync("a")
        assert fleet.answer() == (of_launch, "proven")
