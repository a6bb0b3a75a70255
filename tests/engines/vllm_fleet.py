"""Two replicas of a real vLLM on the CPU under real agents, for all tests that command one.

Replica 0 is a server that is started here, with an agent beside it. The agent of replica 1 launched its server. A
trainer's bus commands both.

Replica 0 stays on vLLM's default executor, whose worker is a process of its own. Replica 1 takes `uni`, which needs
none. Readers of the default's queues spin for a second after each message (`shm_broadcast.py`, `busy_loop_s`); two
such servers leave nothing of two cores to anything else. So each operation is seen on both executors.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from controlplane import ControlPlane
from schemas.agent_status import AgentStatus
from schemas.commands import Checkpoint
from schemas.reports import SyncReport
from tests.engines.models import save_model, save_weights, weights
from tests.engines.reports import BUS
from tests.engines.servers import AgentProcess, EngineServer, Proxy, command, complete, environment, free_port

PLAIN: Final = {"torch_profiler_with_stack": False, "ignore_frontend": True}
DETAILED: Final = {
    **{"torch_profiler_with_stack": True, "torch_profiler_record_shapes": True, "torch_profiler_with_memory": True},
    "ignore_frontend": True,
}
"""What the profilers of replica 0 and of replica 1 are launched to record; vLLM can't be told later."""


UNI: Final = ("--distributed-executor-backend", "uni")
UNI_ENVIRONMENT: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Without it `uni` is turned into the default on a CPU (`vllm/platforms/cpu.py`)."""


class VLLMFleet:
    """Two replicas of vLLM, four processes that serve them, and the trainer's end."""

    def __init__(self, folder: Path, open_: ExitStack) -> None:
        self.folder = folder
        save_model(folder / "a", 1)
        save_weights(folder / "b", weights(2))
        save_weights(folder / "c", weights(3))
        self.version = 0
        self.first = open_.enter_context(
            EngineServer("vllm", folder / "a", folder, *profiler_options(folder / "raw-0", PLAIN))
        )
        self.proxy = open_.enter_context(Proxy(self.first.port))
        self.plane: ControlPlane = open_.enter_context(
            ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=BUS, checkpoints=folder)
        )
        bus, port = self.plane.address, free_port()
        self.second_url = f"http://127.0.0.1:{port}"
        launched = command("vllm", folder / "a", port, *profiler_options(folder / "raw-1", DETAILED), *UNI)
        variables = environment("vllm") | UNI_ENVIRONMENT
        launch = ["env", *(f"{name}={value}" for name, value in variables.items()), *launched]
        kind = ("--engine", "vllm")
        self.agents = [
            open_.enter_context(AgentProcess(bus, folder, "0.0", 1, *kind, "--url", self.proxy.url)),
            open_.enter_context(
                AgentProcess(bus, folder, "1.0", 1, *kind, "--url", self.second_url, "--launch", "--", *launch)
            ),
        ]
        self.plane.wait_for_agents(2, timeout=300).wait()

    def sync(self, path: str, *, content: bool = False, quorum: int | None = None, timeout: float = 30) -> SyncReport:
        """Bring the fleet to the weights in a folder."""
        self.version += 1
        return self.plane.sync_weights(
            self.version, Checkpoint(path), content=content, quorum=quorum, timeout=timeout
        ).wait()

    def tokens(self) -> tuple[list[int], list[int]]:
        """Greedy tokens of both replicas."""
        return self.first.complete(), complete("vllm", self.second_url, "hello", 8, str(self.folder / "a"))

    def status(self, agent: str) -> AgentStatus:
        """What an agent last said of itself."""
        (line,) = (entry for entry in self.plane.status().agents if entry.agent == agent)
        assert line.status is not None
        return line.status

    def wait_ready(self) -> None:
        """Until all agents can be commanded."""
        self.plane.wait_for_agents(2, timeout=300).wait()

    def rest(self) -> None:
        """A test that fails half way must not leave the next one an engine that is paused, asleep or frozen."""
        self.first.thaw()
        self.plane.wake().wait()
        self.plane.resume().wait()


def profiler_options(folder: Path, records: dict[str, bool]) -> list[str]:
    """The options of a server that is to be profiled; makes the folder."""
    folder.mkdir()
    return ["--profiler-config", json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder), **records})]
