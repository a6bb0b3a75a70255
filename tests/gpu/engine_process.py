"""A tiny engine on the GPU and its agent, as a process of their own, and the trainer's end of it.

`python -m tests.gpu.engine_process BUS FOLDER DEVICE HIDDEN` is replica 0. Besides what the bus tells its agent, it
does what a trainer's data plane asks over a socket of its own: it takes tensors by their CUDA IPC handles, and says
what it holds.
"""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection
from pathlib import Path
from threading import Thread
from typing import Any, Final

import anyio
import torch
import torch.multiprocessing  # registers how tensors are handed to other processes
from torch import Tensor

from schemas import events
from schemas.commands import Broadcast
from schemas.config import AgentConfig
from schemas.errors import EngineError
from schemas.identity import Identity
from tests.engines.groups import broadcast
from tests.engines.servers import Process
from tests.engines.tiny_fleet import push
from tests.running import environment
from tests.waiting import wait_until
from workers.agent import Agent
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, digest, weights
from workers.engines.tiny.server import TinyClient
from workers.traces.node import NodeTraces

PLACE: Final = Identity(replica=0, node_rank=0)


def config_of(hidden: int) -> TinyConfig:
    """Return a model of that width: 4 layers, so 200 MB for 1024."""
    return TinyConfig(hidden=hidden, layers=4)


class ReceivingEngine(TinyEngine):
    """A tiny engine that also takes broadcasts straight into the memory of its device."""

    def _perform(self, call: events.EngineCall) -> events.Returned:
        if not isinstance(call, events.CheckSource | events.Load) or not isinstance(call.source, Broadcast):
            return super()._perform(call)
        if isinstance(call, events.CheckSource):
            return events.Returned()
        scheduler = self._require_scheduler()
        tensors = {name: torch.empty_like(held) for name, held in weights(scheduler.model).items()}
        try:
            replicas = call.source.replicas
            broadcast(call.source, 1 + replicas.index(PLACE.replica), 1 + len(replicas), tensors)
        except Exception as error:
            raise EngineError(f"the broadcast was not received: {type(error).__name__}: {error}") from error
        received = digest(tensors)
        scheduler.run(scheduler.load, call.version, tensors, call.label, received)
        return events.Returned(digest=received)


# --- the process ------------------------------------------------------------------------------------------------------


async def serve(bus: str, folder: Path, device: str, hidden: int) -> None:
    engine = ReceivingEngine(
        PLACE,
        checkpoints=folder,
        traces=folder / "traces",
        serve=front(folder),
        seed=100,
        config=config_of(hidden),
        device=device,
    )
    agent = Agent(
        bus=bus,
        identity=PLACE,
        engine=engine,
        state_dir=folder / "state",
        traces=NodeTraces(folder / "traces", PLACE),
        config=AgentConfig(hello_retry_ms=20, observe_ms=20),
    )
    async with agent:
        Thread(target=_answer_all, args=(folder, engine), daemon=True).start()
        await agent.run()


def _answer_all(folder: Path, engine: ReceivingEngine) -> None:
    with connection.Listener(str(folder / "handles"), authkey=b"tests") as listener:
        while True:
            with listener.accept() as trainer:
                trainer.send(_done(engine, *trainer.recv()))  # and keep none of the tensors


def _done(engine: ReceivingEngine, what: str, *arguments: Any) -> object:
    scheduler = engine._require_scheduler()
    match what:
        case "push":
            try:
                push(engine, *arguments)
            except EngineError as error:
                return EngineError(str(error))  # without its traceback, which holds the tensors
        case "digest":  # computed now, from what it generates with
            return scheduler.run(scheduler.digest)
        case "bytes":  # of its own, in its caching allocator
            return torch.cuda.memory_reserved()
    return None


def front(folder: Path) -> str:
    return f"ipc://{folder}/front"


# --- the trainer's end ------------------------------------------------------------------------------------------------


def used() -> int:
    """Return the bytes in use on the GPU by any process, but for what this one keeps in reserve."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


class EngineProcess(Process):
    """The process, and what a trainer's data plane says to it."""

    def __init__(self, bus: str, folder: Path, device: str, hidden: int) -> None:
        self.folder = folder
        self.client = TinyClient(front(folder), timeout_s=60)
        words = [bus, str(folder), device, str(hidden)]
        command = [sys.executable, "-m", "tests.gpu.engine_process", *words]
        super().__init__(command, folder / "engine.log", environment())

    def ask(self, *words: object) -> Any:
        """Tensors among the words are handed over, not copied."""
        with connection.Client(str(self.folder / "handles"), authkey=b"tests") as engine:
            engine.send(words)
            answer = engine.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def push(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        self.ask("push", label, dict(tensors))

    def generate(self, tokens: int = 8) -> list[int]:
        return self.client.generate([[3, 4]], tokens, temperature=0)[0].tokens


@contextmanager
def started(bus: str, folder: Path, device: str, hidden: int = 48) -> Iterator[EngineProcess]:
    """Start the process, and wait until its front end is there."""
    with EngineProcess(bus, folder, device, hidden) as engine:
        place = folder / "handles"
        wait_until(lambda: place.exists() or engine.process.poll() is not None)
        assert engine.process.poll() is None, engine.output
        yield engine


if __name__ == "__main__":
    BUS, FOLDER, DEVICE, HIDDEN = sys.argv[1:]
    anyio.run(partial(serve, BUS, Path(FOLDER), DEVICE, int(HIDDEN)))
