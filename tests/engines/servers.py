"""Real engine servers and real agents as processes, and a proxy between the two that a test can watch.

Everything here waits for a condition, with a limit after which the test fails and shows the output.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx
import psutil

from tests.environments import STANDINS, python
from tests.running import rolloutctl

UP_S: Final = 300.0
VLLM_TOKENS: Final = 32_768
"""Of a request to vLLM at most. Some machines make thousands in the seconds in which a client waits for its turn."""
T = TypeVar("T")


def free_port() -> int:
    """Return a port of the loopback that is free now, and that no outgoing connection takes until it is bound."""
    while True:
        port = random.randrange(20_000, 32_000)  # below what Linux gives out by itself
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(what: str, holds: Callable[[], T | None], limit_s: float = 60.0) -> T:
    """Wait until `holds` returns something true, and return that."""
    until = time.monotonic() + limit_s
    while not (found := holds()):
        if time.monotonic() > until:
            raise AssertionError(f"not within {limit_s:.0f} s: {what}")
        threading.Event().wait(0.05)
    return found


class Process:
    """A process with everything that it starts; its output goes to a log file."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.command, self.log, self.environment, self.cwd = list(command), log, dict(environment or {}), cwd
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | self.environment,
                cwd=self.cwd,
                process_group=0,  # no session: Linux gives each its own share of the processors, whatever `nice` says
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """The process and everything below it that is alive."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def kill(self) -> None:
        """Send SIGKILL to all of them, and to what is left of the group of one that has ended."""
        family = self.family()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        psutil.wait_procs(family, timeout=30)

    def freeze(self) -> None:
        for process in self.family():
            process.suspend()

    def thaw(self) -> None:
        for process in self.family():
            process.resume()


class EngineServer(Process):
    """vLLM or SGLang with a tiny model, on this machine's loopback."""

    def __init__(
        self,
        kind: str,
        model: Path,
        folder: Path,
        *options: str,
        port: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.port = kind, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = str(model)
        super().__init__(
            command(kind, model, self.port, *options),
            folder / f"server-{self.port}.log",
            environment(kind) | dict(variables or {}),
        )

    def wait_up(self, path: str = "/health") -> None:
        def up() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.output[-3000:]}")
            return answers(self.url + path)

        wait_for(f"{self.kind} answers {path}", up, UP_S)

    def complete(self, prompt: str = "hello", tokens: int = 8) -> list[int]:
        """Greedy tokens."""
        return complete(self.kind, self.url, prompt, tokens, self.model)


def answers(url: str) -> bool:
    """Whether a GET is answered 200 now."""
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=10).status_code == 200
    return False


def complete(kind: str, url: str, prompt: str, tokens: int, model: str, limit_s: float = 60.0) -> list[int]:
    """Greedy tokens of one request, as many as asked for unless it is aborted."""
    path, body = request_of(kind, prompt, tokens, model)
    answer = httpx.post(url + path, json=body, timeout=limit_s)
    answer.raise_for_status()
    body = answer.json()
    return list(body["choices"][0]["token_ids"] or [] if kind == "vllm" else body["output_ids"])


def generate(kind: str, url: str, prompt: list[int], tokens: int, model: str) -> None:
    """Have a prompt of token ids continued greedily."""
    path, body = request_of(kind, prompt, tokens, model)
    httpx.post(url + path, json=body, timeout=300).raise_for_status()  # an engine may write a trace first


def begin(kind: str, url: str, prompt: str | Sequence[int], tokens: int, model: str | None) -> "Request":
    """Have a prompt continued greedily, streamed."""
    path, body = request_of(kind, prompt, tokens, model)
    return Request(kind, url + path, body)


class Request(threading.Thread):
    """One streamed request in flight; `tokens` grows, and `came` has the time of each answer with some."""

    def __init__(self, kind: str, url: str, body: Mapping[str, Any]) -> None:
        super().__init__(daemon=True)
        self._kind, self._url, self._body = kind, url, {**body, "stream": True}
        self.tokens: list[int] = []
        self.came: list[float] = []
        self._closed = False
        self._error: Exception | None = None
        self.start()

    def __repr__(self) -> str:
        return f"<request, {len(self.tokens)} tokens, {'ended' if self.ended else 'runs'}, {self._error!r}>"

    @property
    def ended(self) -> bool:
        return not self.is_alive()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
                    if self._closed:
                        break  # closes its connection, and the engine aborts it
        except Exception as error:
            self._error = error

    def grows_to(self, tokens: int) -> Self:
        """Wait until it has that many tokens."""
        wait_for(f"{tokens} tokens", lambda: len(self.tokens) >= tokens or self.ended)
        assert len(self.tokens) >= tokens, self
        return self

    def close(self) -> None:
        """Close its connection at the next token."""
        self._closed = True

    def end(self) -> None:
        """The same, and wait for it."""
        self.close()
        self.join(60)
        assert self.ended, self

    def all(self) -> list[int]:
        """Wait until it has ended by itself, and return its tokens."""
        self.join(400)
        assert self.ended and self._error is None, self
        return self.tokens

    def _take(self, chunk: Mapping[str, Any]) -> None:
        self.came.append(time.monotonic())
        if self._kind == "sglang":
            self.tokens = chunk["output_ids"]  # all of them so far
        elif chunk["choices"]:
            self.tokens += chunk["choices"][0]["token_ids"] or []


def request_of(
    kind: str, prompt: str | Sequence[int], tokens: int, model: str | None, adapter: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Route and body of a greedy request; None for the model that vLLM serves."""
    if kind == "vllm":
        body = {"model": adapter or model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True}
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    return "/generate", {**given, "sampling_params": sampling, "lora_path": adapter}


def command(kind: str, model: Path, port: int, *options: str) -> list[str]:
    """The server's command, for a machine without a GPU."""
    place = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    if kind == "vllm":
        start = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--max-model-len", str(VLLM_TOKENS)]
        start += ["--hf-overrides", json.dumps({"max_position_embeddings": VLLM_TOKENS})]
        return [str(python(kind)), *start, *place, "--enforce-eager", "--max-num-seqs", "8", *options]
    start = ["-m", "sglang.launch_server", "--model-path", str(model), "--context-length", "4096"]
    cpu = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    small = ["--max-total-tokens", "8192", "--max-running-requests", "8", "--skip-server-warmup"]
    plain = ["--disable-cuda-graph", "--disable-overlap-schedule"]
    return [str(python(kind)), *start, *place, *cpu, *small, *plain, *options]


def environment(kind: str) -> dict[str, str]:
    """The server's environment variables, for a machine without a GPU."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    if kind == "vllm":
        # Its engine core spins while a worker computes, and on two cores starves the thread that hands out tokens.
        # One that was frozen for a while must read the request that came meanwhile, not close its connection.
        offline |= {"VLLM_USE_SPINLOOP_EXT": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300"}
        return offline | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return offline | {"SGLANG_USE_CPU_ENGINE": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(STANDINS)}


class AgentProcess(Process):
    """`rolloutctl agent` on one node, as a process: of this checkout, or of another one."""

    def __init__(
        self, bus: str, folder: Path, place: str, nnodes: int, *options: str, checkout: Path | None = None
    ) -> None:
        replica, node_rank = place.split(".")
        self.place = place
        where = ["--replica", replica, "--node-rank", node_rank, "--nnodes", str(nnodes)]
        folders = {"--checkpoints": folder, "--traces": folder / "traces", "--state-dir": folder / "state"}
        roots = [str(word) for option in folders.items() for word in option]
        call = [sys.executable, "-m", "controlplane.cli", "agent", "--bus", bus, *where, *roots, *options]
        super().__init__(call, folder / f"agent-{place}.log", cwd=checkout)

    def end(self) -> int:
        """Send SIGTERM and wait. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)


def probed(url: str) -> tuple[int, dict[str, Any]]:
    """Return exit code and output of `rolloutctl engine probe URL --json`."""
    done = rolloutctl("engine", "probe", url, "--json")
    return done.returncode, json.loads(done.stdout)


class Proxy:
    """A TCP proxy in front of a server. `on[path]` is called once, before a request for that path is passed on."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.on: dict[str, Callable[[], None]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port), timeout=10)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                threading.Thread(target=self._pass_on, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, watched: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                request = re.match(rb"[A-Z]+ (/[^ ?]*)", data) if watched else None
                if request and (act := self.on.pop(request[1].decode(), None)) is not None:
                    act()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
