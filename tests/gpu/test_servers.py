"""vLLM and SGLang, built for CUDA: ROLLOUTCTL_TEST_VLLM_CUDA and _SGLANG_CUDA name an interpreter that has one.

What is asked of them is what a CPU can't answer: that sleep releases the GPU's memory (the kit measures it), and that
kernels are in the traces that an agent announces.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane import ControlPlane
from controlplane.timeline.torch_traces import is_torch_trace
from schemas.commands import ProfilePlan
from schemas.config import BusConfig
from schemas.outcomes import Acted
from tests.engines.models import save_model, save_weights, weights
from tests.engines.servers import VLLM_TOKENS, AgentProcess, Process, answers, complete, free_port, wait_for
from tests.engines.test_conformance_servers import judged
from tests.engines.vllm_fleet import PLAIN, profiler_options
from tests.unit.rank_sessions import read

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

UP_S = 300.0
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=100, retransmit_ms=500)
BOTH = ProfilePlan(activities=frozenset({"cpu", "cuda"}))


class CudaServer(Process):
    """A server with the small model, as its manual starts it, on the GPU."""

    def __init__(self, kind: str, folder: Path) -> None:
        variable = f"ROLLOUTCTL_TEST_{kind.upper()}_CUDA"
        interpreter = os.environ.get(variable)
        if not interpreter:
            pytest.skip(f"{variable} names no interpreter with a {kind} that was built for CUDA")
        self.kind, self.port, self.model = kind, free_port(), str(folder / "a")
        self.url = f"http://127.0.0.1:{self.port}"
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        words = {
            "vllm": [
                *("-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--enforce-eager"),
                *("--enable-sleep-mode", "--gpu-memory-utilization", "0.2", "--max-num-seqs", "8"),
                *("--max-model-len", str(VLLM_TOKENS)),
                *("--hf-overrides", json.dumps({"max_position_embeddings": VLLM_TOKENS})),
                *profiler_options(folder / "raw", PLAIN),
            ],
            "sglang": [
                *("-m", "sglang.launch_server", "--model-path", self.model, "--mem-fraction-static", "0.2"),
                *("--enable-memory-saver", "--enable-weights-cpu-backup", "--disable-cuda-graph"),
            ],
        }[kind]
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        super().__init__([interpreter, *words, *place], folder / "server.log", offline)

    def wait_up(self) -> None:
        def up() -> bool:
            assert self.process.poll() is None, self.output[-3000:]
            return answers(f"{self.url}/health")

        wait_for(f"{self.kind} answers", up, UP_S)


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CudaServer]:
    save_model(tmp_path / "a", 1)
    save_weights(tmp_path / "b", weights(2))
    with CudaServer(request.param, tmp_path) as server:
        server.wait_up()
        yield server


def test_a_server_conforms_and_its_sleep_releases_memory_of_the_gpu(server: CudaServer, tmp_path: Path) -> None:
    _, rows = judged(server.kind, server.url, tmp_path)
    assert re.search(r" passed .* memory [\d,]+ to [\d,]+ bytes", rows["sleep"]), rows["sleep"]
    assert [row for name, row in rows.items() if name != "wake" and " passed " not in row] == []


def test_kernels_of_a_server_are_in_the_traces_that_its_agent_announces(server: CudaServer, tmp_path: Path) -> None:
    options = ("--engine", server.kind, "--url", server.url)
    with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path) as plane,
        AgentProcess(plane.address, tmp_path, "0.0", 1, *options),
    ):
        plane.wait_for_agents(1, timeout=60).wait()
        plane.start_profile(3, BOTH).wait().raise_for_failures()
        complete(server.kind, server.url, "hello", 8, server.model)
        report = plane.stop_profile(3, timeout=120).wait()
    report.raise_for_failures()
    (outcome,) = report.outcomes
    assert isinstance(outcome.conclusion, Acted) and outcome.conclusion.traces
    paths = [trace.path for trace in outcome.conclusion.traces if is_torch_trace(trace.path)]  # vLLM adds a table
    traces = [read(tmp_path / "traces" / path) for path in paths]
    assert any(event.get("cat") == "kernel" for trace in traces for event in trace["traceEvents"])
