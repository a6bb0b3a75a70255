"""One replica of a real engine with LoRA adapters, under a real agent that launched it, and the trainer's end."""

import json
import threading
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
from tests.engines.servers import AgentProcess, command, environment, free_port, wait_for
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

    def begin(self, name: str, tokens: int, prompt: str | list[int] = "hello") -> "InFlight":
        """Have tokens made by an adapter, and return once there are some."""
        path, body = self._request(name, tokens, prompt)
        request = InFlight(self.kind, self.url + path, body)
        wait_for("the first token of a request", lambda: request.tokens or not request.is_alive(), 60)
        return request

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
        if self.kind == "sglang":
            sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
            return "/generate", {**given, "sampling_params": sampling, "return_logprob": True, "lora_path": name}
        body = {"model": name or self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True, "logprobs": 1}


def near(found: Scored, expected: Scored) -> bool:
    """Whether the same weights made both."""
    tokens = [token for token, _ in found] == [token for token, _ in expected]
    return tokens and all(abs(a - b) < NEAR for (_, a), (_, b) in zip(found, expected, strict=True))


class InFlight(threading.Thread):
    """A streamed request, and its tokens so far."""

    def __init__(self, kind: Kind, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._kind, self._url, self._body = kind, url, body | {"stream": True}
        self.tokens: list[int] = []
        self._limit: int | None = None
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if self._kind == "sglang":
                        self.tokens = chunk["output_ids"]  # all of them so far
                    else:
                        self.tokens += chunk["choices"][0]["token_ids"] or []
                if self._limit is not None and len(self.tokens) >= self._limit:
                    break  # closes its connection, and the engine aborts it

    def cut_at(self, tokens: int) -> list[int]:
        """Wait until it has that many tokens, close it, and return them."""
        self._limit = tokens
        made = self.all()
        assert len(made) >= tokens, f"it ended with {len(made)} tokens"
        return made[:tokens]

    def all(self) -> list[int]:
        """Wait for its end, and return its tokens."""
        self.join(400)
        assert not self.is_alive()
        return self.tokens


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
