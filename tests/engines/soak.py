"""Asynchronous training for as long as one likes: a real engine under constant requests, and a `keep` sync every 10 s.

    python -m tests.engines.soak vllm --minutes 60          # or: make test-soak MINUTES=60, which runs both engines

After each sync a new request with a cached prompt of 300 tokens must be answered by the new weights alone, and a
request that was frozen must go on as the new weights would. Prints what was committed, the slowest sync, and the memory
of agent and bus (and this tool with it) at both ends; once a minute what was found so far. The exit code is 1 if a sync
was not committed, an answer was wrong or did not come, a request broke off, or a process ended. Then the folder with
the logs is kept.

`test_keep.py` uses the same fleet for a few syncs.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import httpx
import psutil

from controlplane import ControlPlane
from schemas.commands import Checkpoint
from schemas.config import BusConfig
from schemas.identity import InFlight
from schemas.reports import SyncReport
from tests.engines.models import save_model, save_weights, weights
from tests.engines.reports import BUS
from tests.engines.servers import VLLM_TOKENS, AgentProcess, EngineServer, Process, Request, begin, wait_for

EVERY_S: Final = 10.0
PROBE: Final = [7 * place % 251 + 1 for place in range(300)]
"""A prompt of which engines cache most."""
ANSWER: Final = 8
FROZEN: Final = {"vllm": VLLM_TOKENS - 100, "sglang": 3000}
"""Tokens of a request that outlasts a sync, on a fast machine too."""
ALWAYS: Final = 2
"""Requests that always run."""


class Whole(NamedTuple):
    """One answer: as the engine gave it, its tokens, and the logprobs of the prompt's tokens and of its own."""

    said: dict[str, Any]
    tokens: list[int]
    of_prompt: list[float]
    of_tokens: list[float]

    @classmethod
    def of_vllm(cls, said: dict[str, Any], prompt: Sequence[int]) -> Self:
        (choice,) = said["choices"]
        asked = zip(prompt[1:], (said["prompt_logprobs"] or ())[1:], strict=False)  # nothing predicts the first
        of_prompt = [place[str(token)]["logprob"] for token, place in asked]
        return cls(said, choice["token_ids"], of_prompt, [at["logprob"] for at in choice["logprobs"]["content"]])

    @classmethod
    def of_sglang(cls, said: dict[str, Any]) -> Self:
        of_prompt, of_tokens = (said["meta_info"][f"{side}_token_logprobs"] for side in ("input", "output"))
        return cls(said, said["output_ids"], [at[0] for at in of_prompt[1:]], [at[0] for at in of_tokens])


class KeepFleet:
    """One server with an agent, a bus, and two requests that always run, in a process of their own."""

    def __init__(self, kind: str, folder: Path, open_: ExitStack, config: BusConfig = BUS) -> None:
        self.kind, self.version, self.held = kind, 0, "a"
        self.model = model = save_model(folder / "a", 1)
        save_weights(folder / "b", weights(2))
        options, variables = ((*UNI, SPANS), UNI_VARIABLES) if kind == "vllm" else ((), {})
        self.server = open_.enter_context(EngineServer(kind, model, folder, *options, variables=variables))
        self.server.wait_up("/health" if kind == "vllm" else "/server_info")
        self.plane: ControlPlane = open_.enter_context(
            ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=config, checkpoints=folder)
        )
        self.agent = open_.enter_context(
            AgentProcess(self.plane.address, folder, "0.0", 1, "--engine", kind, "--url", self.server.url)
        )
        self.plane.wait_for_agents(1, timeout=120).wait()
        self.expected: dict[str, list[int]] = {}
        for name in ("b", "a"):  # nothing else runs yet
            self.sync(name).raise_unless_committed()
            self.expected[name] = self.answer(PROBE)
        assert self.expected["a"] != self.expected["b"]
        load = [sys.executable, "-m", "tests.engines.soak", kind, "--load", self.server.url]
        self.load = open_.enter_context(Process(load, folder / "load.log", cwd=Path(__file__).parents[2]))
        wait_for("requests always run", lambda: "begun" in self.load.output, 180)

    def sync(self, name: str, timeout: float = 60.0, in_flight: InFlight = "keep") -> SyncReport:
        """Sync to the weights of that name, under whatever runs."""
        self.version += 1
        ticket = self.plane.sync_weights(self.version, Checkpoint(name), in_flight=in_flight, timeout=timeout)
        report = ticket.wait()
        if report.status == "committed":
            self.held = name
        return report

    def answer(self, prompt: Sequence[int], asked: int = ANSWER) -> list[int]:
        """What a new request gets."""
        return begin(self.kind, self.server.url, prompt, asked, None).grows_to(asked).tokens

    def whole(self, prompt: Sequence[int], asked: int, sent: threading.Event | None = None) -> Whole:
        """What one request gets on the route whose answers name versions. Waits until it has ended. The logprobs of its
        prompt are told if one token is asked for. `sent` is set once the server has all of it: one that is sent later
        is younger.
        """

        def note(step: str, _: object) -> None:
            if sent is not None and step == "http11.send_request_body.complete":
                sent.set()

        sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        if self.kind == "vllm":
            sampling |= {"max_tokens": asked, "logprobs": 0, "prompt_logprobs": 0 if asked == 1 else None}
            body: dict[str, Any] = {"model": str(self.model), "token_ids": list(prompt), "sampling_params": sampling}
        else:
            sampling |= {"max_new_tokens": asked}
            body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
            body |= {"logprob_start_len": 0 if asked == 1 else -1}
        path = "/inference/v1/generate" if self.kind == "vllm" else "/generate"
        with httpx.Client(timeout=400) as client:
            asking = client.post(self.server.url + path, json=body, extensions={"trace": note})
        answer = asking.raise_for_status().json()
        return Whole.of_vllm(answer, prompt) if self.kind == "vllm" else Whole.of_sglang(answer)

    def stream(self, prompt: Sequence[int]) -> Request:
        """Begin a request that outlasts a sync."""
        return begin(self.kind, self.server.url, prompt, FROZEN[self.kind], None)


UNI: Final = ("--distributed-executor-backend", "uni")
SPANS: Final = "--enable-scale-out"
"""Opens `/inference/v1/generate`, the route of vLLM 0.32 whose answers say which version made which tokens."""
UNI_VARIABLES: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""See `vllm_fleet.py`: no process that spins, since the soak wants the engine's time and not the machine's."""


def wrong_answers(fleet: KeepFleet, frozen: Request) -> list[str]:
    """What is wrong after a sync: with a new request of a cached prompt, and with one that was frozen."""
    wrong = []
    if (found := fleet.answer(PROBE)) != (wanted := fleet.expected[fleet.held]):
        wrong.append(f"a cached prompt was answered {found}, by {fleet.held} alone it is {wanted}")
    made = len(frozen.tokens)  # all of these were made before now, and what follows by the new weights
    frozen.grows_to(made + ANSWER)
    frozen.close()  # or such requests fill a slow engine, one more with each sync
    if (found := frozen.tokens[made : made + ANSWER]) != (
        wanted := fleet.answer([*FROZEN_PROMPT, *frozen.tokens[:made]])
    ):
        wrong.append(f"a frozen request went on {found}, by {fleet.held} alone it is {wanted}")
    return wrong


FROZEN_PROMPT: Final = [5 * place % 239 + 1 for place in range(16)]


class Found:
    """What a soak has found so far."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.slowest = 0.0
        self.wrong = 0

    def sync(self, fleet: KeepFleet) -> None:
        """Sync once, with a request that is frozen meanwhile, and note what came of it."""
        frozen = fleet.stream(FROZEN_PROMPT)
        try:
            frozen.grows_to(2)
            began = time.monotonic()
            report = fleet.sync("a" if fleet.held == "b" else "b")
            self.slowest = max(self.slowest, time.monotonic() - began)
            alone = report.quarantined + report.unproven
            whole = report.status != "committed" or not alone
            self.statuses[report.status if whole else "committed without the replica"] += 1
            if report.status != "committed" or alone:
                _say(f"sync {fleet.version} is {report.status}: {report}", f"its agent: {fleet.agent.output[-2000:]}")
            else:
                self._note(fleet, *wrong_answers(fleet, frozen))
        except AssertionError as error:  # an answer did not come
            self._note(fleet, str(error))
        finally:
            frozen.close()

    def _note(self, fleet: KeepFleet, *lines: str) -> None:
        self.wrong += len(lines)
        _say(*(f"after sync {fleet.version}: {line}" for line in lines))

    def __str__(self) -> str:
        syncs = f"{self.statuses.total()} syncs: {dict(self.statuses)}, the slowest {self.slowest:.2f} s"
        return f"{syncs}; wrong answers: {self.wrong}"

    @property
    def good(self) -> bool:
        return self.statuses.total() == self.statuses["committed"] > 0 and not self.wrong


def soak(kind: str, minutes: float, folder: Path) -> int:
    """Sync until the time is up. Returns the exit code."""
    with ExitStack() as open_:
        fleet = KeepFleet(kind, folder, open_, BusConfig())
        processes = {"agent": fleet.agent, "server": fleet.server, "requests": fleet.load}
        found = Found()
        began = told = time.monotonic()
        before: dict[str, float] = {}
        ended: list[str] = []
        while not ended and time.monotonic() < began + 60 * minutes:
            synced = time.monotonic()
            found.sync(fleet)
            ended = [name for name, process in processes.items() if process.process.poll() is not None]
            before = before or _memory(fleet)
            if time.monotonic() > told + 60:
                told = time.monotonic()
                _say(f"{kind}, {(told - began) / 60:.0f} minutes: {found}")
            threading.Event().wait(max(0.0, synced + EVERY_S - time.monotonic()))
        _say(f"{kind}, {(time.monotonic() - began) / 60:.1f} minutes: {found}")
        after = _memory(fleet)
        _say(*(f"memory of the {name}: {before[name]:.1f} MB at first, {after[name]:.1f} MB now" for name in after))
        _say(*(f"the {name} ended: {processes[name].output[-2000:]}" for name in ended))
    return 0 if found.good and not ended else 1


def always(kind: str, url: str) -> None:
    """Keep requests running, each with a prompt of its own, until killed."""

    def ask(first: int) -> None:
        for number in range(1_000_000_000):
            prompt = [first, *(number // 200**place % 200 + 1 for place in range(4))]
            begin(kind, url, prompt, 400, None).join()

    for first in range(ALWAYS):
        threading.Thread(target=ask, args=(first + 1,), daemon=True).start()
    wait_for("a request runs", lambda: _running(kind, url))
    _say("begun")
    threading.Event().wait()


def _running(kind: str, url: str) -> bool:
    stream = begin(kind, url, [3], 2, None)
    stream.join()
    return len(stream.tokens) == 2 and httpx.get(url + "/health", timeout=30).is_success


def _memory(fleet: KeepFleet) -> dict[str, float]:
    """Megabytes of each process that is there."""
    found: dict[str, float] = {}
    for name, process in (("agent", fleet.agent.process.pid), ("bus", os.getpid())):
        with suppress(psutil.NoSuchProcess):
            found[name] = psutil.Process(process).memory_info().rss / 2**20
    return found


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=["vllm", "sglang"])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--load", metavar="URL", help="only keep requests running at this server")
    options = parser.parse_args()
    if options.load:
        always(options.kind, options.load)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that everything that it started ends with it
    folder = Path(tempfile.mkdtemp(prefix="rolloutctl-soak-"))
    code = soak(options.kind, options.minutes, folder)
    if code == 0:
        shutil.rmtree(folder)
    else:
        _say(f"the logs are in {folder}")
    return code


if __name__ == "__main__":
    sys.exit(main())
