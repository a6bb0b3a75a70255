"""A trainer that embeds its engine, as a program: `python -m tests.engines.embedded vllm|sglang FOLDER`.

It runs in the environment that has the engine. One process and one event loop hold the bus, the agent, the engine's
front end and the requests. Everything is done by commands on the bus, and observed in what the engine generates. The
observations go to FOLDER/report.json, where the test that started this program checks them.
"""

import asyncio
import json
import os
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import anyio.to_thread

from controlplane.bus.bus import Bus
from controlplane.machine.events import SyncRequested
from controlplane.record.log import RunLog
from schemas.commands import (
    Broadcast,
    Checkpoint,
    Command,
    EngineCommand,
    ProfileCommand,
    ProfilePlan,
    Source,
    Target,
    Window,
)
from schemas.config import AgentConfig, BusConfig
from schemas.errors import EngineError
from schemas.identity import Identity
from schemas.outcomes import Acted, Conclusion
from schemas.safetensors.manifest import build_manifest
from tests.engines.groups import sender
from tests.engines.models import save_model, save_weights, weights
from workers.agent import Agent
from workers.engines.client import EngineClient
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.in_process import TokenizerManagerClient
from workers.engines.vllm.engine import VLLMEngine
from workers.engines.vllm.in_process import AsyncLLMClient, lora_request

PLACE: Final = Identity(replica=0, node_rank=0)
PROMPT: Final = [(7 * i) % 251 for i in range(140)]
"""Longer than a block of vLLM's cache on a CPU, so that a second request with it finds a prefix."""
SHORT, LONG = 8, 100
STEPS: Final = 3
"""Forward steps of a profile's window."""
TURNS: Final = 8
"""Round trips after which an engine that generates has sent more tokens: it works between two of them."""


class Answer(NamedTuple):
    """The answer to a request. `cached` is the number of prompt tokens that were not computed again."""

    tokens: list[int]
    finish: str
    cached: int


class Request:
    """One that runs: `tokens` grows while it does."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.answer: Answer | None = None
        self.first, self.done = anyio.Event(), anyio.Event()


class Rollout(ABC):
    """An engine as a trainer uses it, without the agent."""

    front: EngineClient
    backend: VLLMEngine | SGLangEngine
    ways: tuple[str, ...]
    """How it takes weights on a CPU: from a `checkpoint`, by `broadcast`."""

    @abstractmethod
    def stream(self, count: int, adapter: str = "") -> AsyncIterator[Answer]:
        """Greedy tokens, as they come: all so far each time."""

    @abstractmethod
    async def round_trip(self) -> None:
        """Go to the scheduler and back, behind everything that was sent before."""

    async def generate(self, count: int = SHORT, adapter: str = "") -> Answer:
        request = Request()
        await self.follow(request, count, adapter)
        assert request.answer is not None
        return request.answer

    async def follow(self, request: Request, count: int = LONG, adapter: str = "") -> None:
        async for answer in self.stream(count, adapter):
            request.tokens, request.answer = answer.tokens, answer
            request.first.set()
        request.done.set()

    async def turns(self) -> None:
        for _ in range(TURNS):
            await self.round_trip()


class VLLM(Rollout):
    """vLLM's AsyncLLM."""

    ways = ("checkpoint",)

    def __init__(self, folder: Path, **options: object) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=str(folder / "checkpoints" / "launched"),
            max_model_len=256,
            max_num_seqs=8,
            enforce_eager=True,
            dtype="float32",
            profiler_config={
                "profiler": "torch",
                "torch_profiler_dir": str(folder / "engine-traces"),
                "ignore_frontend": True,
                "torch_profiler_with_stack": False,  # small traces
            },
            **options,
        )
        self._engine = AsyncLLM.from_engine_args(arguments)
        self._requests = 0
        self.front = AsyncLLMClient(self._engine)
        self.backend = VLLMEngine(PLACE, self.front, checkpoints=folder / "checkpoints", traces=folder / "traces")

    async def stream(self, count: int, adapter: str = "") -> AsyncIterator[Answer]:
        from vllm import SamplingParams

        self._requests += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        named, prompt = f"request-{self._requests}", {"prompt_token_ids": PROMPT}
        lora = lora_request(self._engine, adapter) if adapter else None
        async for reply in self._engine.generate(prompt, sampling, named, lora_request=lora):
            output = reply.outputs[0]
            yield Answer(list(output.token_ids), output.finish_reason or "", reply.num_cached_tokens or 0)

    async def round_trip(self) -> None:
        await self._engine.is_paused()

    def kill(self) -> None:
        """End the process of the engine's core as the kernel would when memory is short."""
        for process in self._engine.engine_core.resources.engine_manager.processes:
            process.kill()


class SGLang(Rollout):
    """SGLang's Engine and its tokenizer manager. The nodes of one engine find each other at `meet`, HOST:PORT."""

    ways = ("checkpoint", "broadcast")

    def __init__(self, folder: Path, place: Identity = PLACE, meet: str | None = None, **options: object) -> None:
        from sglang.srt.entrypoints.engine import Engine

        nodes = {"tp_size": place.nnodes, "nnodes": place.nnodes, "node_rank": place.node_rank, "dist_init_addr": meet}
        self._engine = Engine(
            model_path=str(folder / "checkpoints" / "launched"),
            device="cpu",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            context_length=256,
            max_total_tokens=2048,
            max_running_requests=8,
            dtype="float32",
            **(nodes if place.nnodes > 1 else {}),
            **options,
        )
        self.front = TokenizerManagerClient(self._engine.tokenizer_manager)
        self.backend = SGLangEngine(place, self.front, checkpoints=folder / "checkpoints", traces=folder / "traces")

    async def stream(self, count: int, adapter: str = "") -> AsyncIterator[Answer]:
        sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        chunks = await self._engine.async_generate(
            input_ids=PROMPT, sampling_params=sampling, stream=True, lora_path=adapter or None
        )
        async for chunk in chunks:
            meta = chunk["meta_info"]
            finish = (meta.get("finish_reason") or {}).get("type", "")
            yield Answer(list(chunk["output_ids"]), finish, meta.get("cached_tokens", 0))

    async def round_trip(self) -> None:
        await self._engine.tokenizer_manager.get_internal_state()


def free_port() -> int:
    """Return a port of the loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Trainer:
    """Commands of one bus to the one agent, each of which must succeed."""

    def __init__(self, folder: Path, bus: Bus, rollout: Rollout) -> None:
        self.folder, self.bus, self.rollout = folder, bus, rollout
        self.calls: list[str] = []

    async def command(self, command: Command) -> Acted:
        """Return the outcome of node rank 0, after checking that it acted and no agent failed."""
        outcome = (await self.conclusions(command))["0.0"]
        assert isinstance(outcome, Acted), f"{command}: {outcome}"
        self.calls += outcome.calls
        return outcome

    async def conclusions(self, command: Command) -> dict[str, Conclusion]:
        """Return the outcomes by agent, after checking that none failed."""
        report = await self.bus.publish(command, Target(), 60_000)
        report.raise_for_failures()
        return {outcome.agent: outcome.conclusion for outcome in report.outcomes}

    async def sync(self, version: int, seed: int, way: str = "checkpoint") -> None:
        """Sync new weights to the whole fleet."""
        path, tensors = f"v{version}", weights(seed)
        manifest = build_manifest(save_weights(self.folder / "checkpoints" / path, tensors), content=True)
        source: Source = Checkpoint(path)
        async with anyio.create_task_group() as tasks:
            if way == "broadcast":
                source = Broadcast(
                    host="127.0.0.1", port=free_port(), group=f"g{version}", replicas=(0,), backend="gloo"
                )
                tasks.start_soon(anyio.to_thread.run_sync, sender(source, 1, tensors), (0,))
            report = await self.bus.sync(
                SyncRequested(version=version, source=source, manifest=manifest, timeout_ms=60_000)
            )
            report.raise_for_failures()

    # --- what is tried ------------------------------------------------------------------------------------------------

    async def weights_change(self) -> dict[str, object]:
        """Greedy tokens and the version read back: as launched, then by each way new weights and the old ones again."""
        seen = []
        for version, way in enumerate(("", *(way for way in self.rollout.ways for _ in range(2)))):
            if version:
                await self.sync(version, 1 + version % 2, way)
            observed = await self.rollout.backend.observe()
            answer = await self.rollout.generate()
            seen.append({"tokens": answer.tokens, "version": observed.version, "generating": observed.generating})
        return {"weights": seen}

    async def flush(self) -> dict[str, object]:
        """Tokens of the prompt that were found in the cache: by a second request, and after a flush."""
        await self.rollout.generate()
        before = (await self.rollout.generate()).cached
        await self.command(EngineCommand(operation="flush"))
        return {"cached": [before, (await self.rollout.generate()).cached]}

    async def pause(self) -> dict[str, object]:
        """A request that is frozen, and one that is sent meanwhile: tokens before, after more turns, after a resume."""
        frozen, late = Request(), Request()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.rollout.follow, frozen)
            await frozen.first.wait()
            await self.command(EngineCommand(operation="pause", mode="keep"))
            tasks.start_soon(self.rollout.follow, late)
            await self.rollout.turns()
            counts = [len(frozen.tokens), len(late.tokens)]
            await self.rollout.turns()
            counts += [len(frozen.tokens), len(late.tokens)]
            observed = await self.rollout.backend.observe()
            await self.command(EngineCommand(operation="resume"))
            with anyio.fail_after(30):
                await frozen.done.wait()
                await late.done.wait()
        return {
            "paused": counts,
            "paused_generating": observed.generating,
            "resumed": [len(frozen.tokens), len(late.tokens)],
            "same_tokens": frozen.tokens == late.tokens,
        }

    async def turns_count(self) -> dict[str, object]:
        """The control: turns in which an engine that is not paused sends more tokens."""
        running = Request()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.rollout.follow, running)
            await running.first.wait()
            before = len(running.tokens)
            await self.rollout.turns()
            after = len(running.tokens)
        return {"running": [before, after]}

    async def abort(self) -> dict[str, object]:
        """Return how requests end that are aborted."""
        requests = [Request(), Request()]
        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(self.rollout.follow, request)
                await request.first.wait()
            await self.command(EngineCommand(operation="abort"))
            with anyio.fail_after(30):
                for request in requests:
                    await request.done.wait()
        return {
            "aborted": [
                [request.answer.finish, len(request.tokens)] for request in requests if request.answer is not None
            ]
        }

    async def sleep(self) -> dict[str, object]:
        """A request sent to a sleeping engine: tokens before it is awake, and after; how it was refused, if it was."""
        request, refused = Request(), ""

        async def ask() -> None:
            nonlocal refused
            try:
                await self.rollout.follow(request, SHORT)
            except Exception as error:  # of vLLM's, whose package is not here in each environment
                refused = type(error).__name__

        async with anyio.create_task_group() as tasks:
            await self.command(EngineCommand(operation="sleep"))
            tasks.start_soon(ask)
            await self.rollout.turns()
            asleep = list(request.tokens)
            await self.command(EngineCommand(operation="wake"))
            with anyio.fail_after(30):
                await (self.rollout.follow(request, SHORT) if refused else request.done.wait())
        return {"asleep": asleep, "awake": request.tokens, "refused": refused}

    async def profile(self) -> dict[str, object]:
        """The traces of a session around a request, and of one that ends by itself while a request runs."""
        sessions = []
        for step, plan in ((3, ProfilePlan()), (4, ProfilePlan(window=Window(0, STEPS)))):
            await self.command(ProfileCommand(action="start", step=step, plan=plan))
            await self.rollout.generate()
            outcome = await self.command(ProfileCommand(action="stop", step=step, plan=plan))
            sessions.append({"files": [trace.path for trace in outcome.traces], "ended": outcome.auto_stopped})
        return {"sessions": sessions}


async def seen_from_elsewhere(rollout: Rollout) -> str:
    """Return the error of an agent that runs in another thread, on its own loop."""
    errors: list[str] = []

    def elsewhere() -> None:
        try:
            asyncio.run(rollout.backend.open())
        except EngineError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    return errors[0] if errors else ""


async def seen_when_dead(rollout: VLLM) -> dict[str, object]:
    """Return what the backend and the front end report about an engine whose core was killed."""
    rollout.kill()
    message = ""
    try:
        await rollout.front.call("sleep", level=0)  # vLLM ends it when it finds that nothing will answer
    except EngineError as error:
        message = f"{type(error).__name__}: {error}"
    return {"dead": [(await rollout.backend.observe()).tokenizer, await rollout.front.methods(), message]}


@asynccontextmanager
async def commanded(folder: Path, rollout: Rollout) -> AsyncIterator[Trainer]:
    """The bus and the agent, on this loop."""
    quick = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=500)
    config = AgentConfig(hello_retry_ms=20, observe_ms=50)
    state = folder / "state"
    async with (
        Bus("tcp://127.0.0.1:0", RunLog.open(folder / "run.db"), quick) as bus,
        Agent(bus=bus.address, identity=PLACE, engine=rollout.backend, state_dir=state, config=config) as agent,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(agent.run)
        with anyio.fail_after(30):
            await agent.wait_ready()
        yield Trainer(folder, bus, rollout)
        tasks.cancel_scope.cancel()


async def run(kind: str, folder: Path) -> None:
    """All of it, and the report."""
    save_model(folder / "checkpoints" / "launched", seed=1)
    for place in ("traces", "engine-traces", "state"):
        (folder / place).mkdir()
    rollout: Rollout = VLLM(folder) if kind == "vllm" else SGLang(folder)
    report: dict[str, Any] = {}
    try:
        async with commanded(folder, rollout) as trainer:
            tried = (
                *(trainer.weights_change, trainer.flush, trainer.turns_count, trainer.pause),
                *(trainer.abort, trainer.sleep, trainer.profile),
            )
            for attempt in tried:
                report |= await attempt()
            observed = await rollout.backend.observe()
            report |= {
                "calls": trainer.calls,
                "operations": sorted(observed.operations),
                "tokenizer": observed.tokenizer,
                "engine": observed.engine,
                "after": (await rollout.generate()).tokens,
                "elsewhere": await seen_from_elsewhere(rollout),
            }
        if isinstance(rollout, VLLM):
            report |= await seen_when_dead(rollout)
    finally:
        (folder / "report.json").write_text(json.dumps(report, indent=1))
        os._exit(0 if report.get("after") else 1)  # engines wait long for processes that they lost; the test ends them


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    asyncio.run(run(sys.argv[1], Path(sys.argv[2])))
