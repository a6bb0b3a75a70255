"""One replica of a real engine with LoRA adapters, under a real agent that launched it, and the trainer's end."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from controlplane import ControlPlane
from schemas.reports import AdapterStatus, SyncReport
from tests.engines.adapters import save_adapter
from tests.engines.models import HEADS, HIDDEN, KV_HEADS, LAYERS, save_model
from tests.engines.reports import BUS
from tests.engines.servers import AgentProcess, Request, command, environment, free_port, request_of, wait_for
from tests.engines.surfaces import Kind

RANK: Final = 8
KV: Final = HIDDEN // HEADS * KV_HEADS
MODULES: Final = {
    f"model.layers.{layer}.self_attn.{name}_proj": (rows, HIDDEN)
    for layer in range(LAYERS)
    for name, rows in (("q", HIDDEN), ("k", KV), ("v", KV), ("o", HIDDEN))
}
OPTIONS: Final[dict[Kind, tuple[str, ...]]] = {
    "vllm": ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", "--max-cpu-loras", "4"),
    "sglang": (
        *("--enable-lora", "--max-lora-rank", "16", "--max-loras-per-batch", "3", "--max-loaded-loras", "4"),
        *("--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj", "--enable-metrics"),
        *("--lora-backend", "torch_native"),  # the only one for a CPU
    ),
}
VARIABLES: Final[dict[Kind, dict[str, str]]] = {"vllm": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, "sglang": {}}
Scored = list[tuple[int, float]]
"""Tokens with their log probabilities."""
NEAR: Final = 1e-3
"""Two runs of the same weights differ by less, and other weights by tens."""


class LoRAFleet:
    """A replica, its agent and the trainer's end."""

    def __init__(self, kind: Kind, folder: Path, open_: ExitStack) -> None:
        self.kind: Kind = kind
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = str(save_model(folder / "base", 1))
        self.plane: ControlPlane = open_.enter_context(
            ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=BUS, checkpoints=folder)
        )
        variables = environment(kind) | VARIABLES[kind]
        server = ["env", *(f"{name}={value}" for name, value in variables.items())]
        server += command(kind, folder / "base", self.port, *OPTIONS[kind])
        options = ("--engine", kind, "--url", self.url, "--launch", "--", *server)
        self.agent = open_.enter_context(AgentProcess(self.plane.address, folder, "0.0", 1, *options))
        self.plane.wait_for_agents(1, timeout=300).wait()

    def save(self, step: str, seed: int) -> str:
        """Write an adapter. Returns its path as commands have it."""
        save_adapter(self.folder / "adapters" / step, MODULES, RANK, seed)
        return f"adapters/{step}"

    def sync(self, path: str, *, keep: int = 2) -> SyncReport:
        """Bring the replica to the next version."""
        return self.plane.sync_adapter("policy", None, path, keep=keep, timeout=60).wait()

    @property
    def adapter(self) -> AdapterStatus:
        """What a trainer is told to name."""
        return self.plane.adapters()["policy"]

    def served(self) -> AdapterStatus:
        """The same, once a replica holds it."""

        def holds() -> AdapterStatus | None:
            return self.adapter if self.adapter.replicas == (0,) else None

        return wait_for("the replica serves the adapter", holds, 300)

    def listed(self) -> dict[str, str]:
        """What the engine lists: names with paths."""
        cards = httpx.get(f"{self.url}/v1/models", timeout=60).json()["data"]
        return {card["id"]: card["root"] for card in cards if card["parent"]}

    def scores(self, name: str | None, tokens: int = 8, prompt: str | list[int] = "hello") -> Scored:
        """Greedy tokens by an adapter; by the base model for None."""
        path, body = self._request(name, tokens, prompt)
        answer = httpx.post(self.url + path, json=body, timeout=60)
        answer.raise_for_status()
        if self.kind == "sglang":
            return [(token, score) for score, token, *_ in answer.json()["meta_info"]["output_token_logprobs"]]
        (choice,) = answer.json()["choices"]
        return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))

    def begin(self, name: str, tokens: int, prompt: str | list[int] = "hello") -> Request:
        """Have tokens made by an adapter, and return once there are some."""
        path, body = self._request(name, tokens, prompt)
        return Request(self.kind, self.url + path, body).grows_to(1)

    def rest(self) -> dict[str, str]:
        """Wait until the engine lists the wanted versions alone, two at most, and return them: two more have places.

        SGLang keeps the others for 5 s after it was found with a request on any of them.
        """
        return wait_for("two versions are held", lambda: found if len(found := self.listed()) <= 2 else None, 60)

    def calls(self, route: str) -> int:
        """How often the server was asked for a route so far, as it says in its log."""
        log = self.folder / "state" / "server-0.0.log"
        return log.read_text(errors="replace").count(f"{route} HTTP/1.1")

    def kill_server(self) -> None:
        """Kill the server, and nothing else."""
        for process in self.agent.family():
            if process.pid != self.agent.process.pid and f"--port {self.port}" in " ".join(_words(process)):
                process.kill()

    def _request(self, name: str | None, tokens: int, prompt: str | list[int]) -> tuple[str, dict[str, Any]]:
        path, body = request_of(self.kind, prompt, tokens, self.model, name)
        return path, body | ({"return_logprob": True} if self.kind == "sglang" else {"logprobs": 1})


def near(found: Scored, expected: Scored) -> bool:
    """Whether the same weights made both."""
    tokens = [token for token, _ in found] == [token for token, _ in expected]
    return tokens and all(abs(a - b) < NEAR for (_, a), (_, b) in zip(found, expected, strict=True))


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
