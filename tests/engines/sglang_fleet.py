"""A real SGLang on the CPU under real agents, for all tests that command one.

Replica 0 has two nodes (`--tp 2 --nnodes 2`), and the agent of each launched its server. Replica 1 is a colocated judge
with a tiny engine, which must keep working whatever happens to replica 0. A trainer's bus commands both.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx

from controlplane import ControlPlane
from schemas.profiler.config import ProfilerConfig
from tests.engines.models import save_model, save_weights, weights
from tests.engines.reports import BUS
from tests.engines.servers import AgentProcess, Request, begin, command, complete, environment, free_port

STEPS: Final = ProfilerConfig(steps=(40,), timeout_ms=60_000)


class SGLangFleet:
    """The replica over two nodes, the judge, and the trainer's end."""

    def __init__(self, folder: Path, open_: ExitStack) -> None:
        self.folder = folder
        self.model = str(save_model(folder / "a", 1))
        save_weights(folder / "b", weights(2))
        save_weights(folder / "c", weights(3))
        self.plane: ControlPlane = open_.enter_context(
            ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=BUS, checkpoints=folder, profiler=STEPS)
        )
        meet = f"127.0.0.1:{free_port()}"
        self.urls = []
        for node_rank in (0, 1):
            port = free_port()
            self.urls.append(f"http://127.0.0.1:{port}")
            variables = environment("sglang") | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
            server = ["env", *(f"{name}={value}" for name, value in variables.items())]
            server += command("sglang", folder / "a", port, "--tp", "2")
            options = ("--engine", "sglang", "--url", self.urls[-1], "--launch", "--dist-init", meet, "--", *server)
            open_.enter_context(AgentProcess(self.plane.address, folder, f"0.{node_rank}", 2, *options))
        judge = ("--engine", "tiny", "--mode", "colocated")
        open_.enter_context(AgentProcess(self.plane.address, folder, "1.0", 1, *judge))
        self.plane.wait_for_agents(3, timeout=300).wait()

    def tokens(self, tokens: int = 8) -> list[int]:
        """Greedy tokens of the replica."""
        return complete("sglang", self.urls[0], "hello", tokens, self.model)

    def tokenizers(self) -> dict[str, str]:
        """What each agent last saw."""
        return {agent.agent: agent.status.tokenizer for agent in self.plane.status().agents if agent.status is not None}

    def label(self) -> str:
        """Which weights the engine says that it serves."""
        return str(httpx.get(f"{self.urls[0]}/model_info", timeout=60).json()["weight_version"])

    def request(self, tokens: int) -> Request:
        """One to the replica."""
        return begin("sglang", self.urls[0], "a long one", tokens, None)

    def slow_down(self, seconds: float) -> None:
        """Make each forward last longer."""
        body = {"forward_sleep_time": seconds or None}
        httpx.post(f"{self.urls[0]}/slow_down", json=body, timeout=60).raise_for_status()

    def rest(self) -> None:
        """A test that fails half way must not leave the next one an engine that is paused, asleep or slow."""
        self.slow_down(0)
        self.plane.wake().wait()
        self.plane.resume().wait()
