"""One replica over two nodes, each a process that embeds SGLang, with its agent on the engine's own loop.

`python -m tests.engines.embedded_nodes FOLDER NODE_RANK BUS MEET` in the environment that has SGLang. BUS is the
bus's address, MEET is HOST:PORT where the engine's nodes find each other. Node rank 0 also holds the bus, sends the
requests and writes FOLDER/report.json; node rank 1 has no tokenizer manager, and serves until the test ends it.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import anyio

from controlplane.bus.bus import Bus
from controlplane.record.log import RunLog
from schemas.commands import Command, EngineCommand, ProfileCommand, ProfilePlan
from schemas.config import AgentConfig, BusConfig
from schemas.identity import Identity
from schemas.outcomes import Acted, Skipped
from tests.engines.embedded import SGLang, Trainer
from workers.agent import Agent
from workers.traces.node import NodeTraces

NODES = 2


def as_json(outcome: object) -> list[object]:
    """Return a conclusion as JSON: its kind, and its details."""
    match outcome:
        case Acted():
            return ["acted", list(outcome.calls), [trace.path for trace in outcome.traces]]
        case Skipped():
            return ["skipped", outcome.reason]
    return [str(outcome)]


async def everybody_is_there(bus: Bus) -> None:
    """Wait until both agents have reported their engines."""

    def there(_: object) -> bool:
        seen = [agent.status.tokenizer for agent in bus.status().agents if agent.status is not None]
        return sorted(seen) == ["absent", "present"]

    with anyio.fail_after(120):
        await bus.wait_until(there)


async def tried(trainer: Trainer) -> dict[str, Any]:
    """Commands to both nodes; what each agent did, and what the replica generates."""
    rollout = trainer.rollout
    tokens, outcomes = [(await rollout.generate()).tokens], {}
    for version, seed in ((1, 2), (2, 1)):
        await trainer.sync(version, seed)
        tokens.append((await rollout.generate()).tokens)
    plan = ProfilePlan()
    commands: dict[str, Command] = {
        "pause": EngineCommand(operation="pause"),
        "resume": EngineCommand(operation="resume"),
        "flush": EngineCommand(operation="flush"),
        "start": ProfileCommand(action="start", step=3, plan=plan),
        "stop": ProfileCommand(action="stop", step=3, plan=plan),
        "collect": ProfileCommand(action="collect", step=3, plan=plan),
    }
    for name, command in commands.items():
        conclusions = await trainer.conclusions(command)
        outcomes[name] = {agent: as_json(outcome) for agent, outcome in conclusions.items()}
        if name == "start":
            await rollout.generate()
    return {"tokens": tokens, "outcomes": outcomes}


async def serve(folder: Path, node_rank: int, address: str, meet: str) -> None:
    """One node. Its engine is up when all nodes' are."""
    place = Identity(replica=0, node_rank=node_rank, nnodes=NODES)
    rollout = SGLang(folder, place, meet)
    config = AgentConfig(hello_retry_ms=20, observe_ms=50)
    traces = NodeTraces(folder / "traces", place)
    engine, state = rollout.backend, folder / "state"
    agent = Agent(bus=address, identity=place, engine=engine, state_dir=state, traces=traces, config=config)
    async with agent:
        if node_rank > 0:
            await agent.run()
        quick = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=500)
        async with Bus(address, RunLog.open(folder / "run.db"), quick) as bus, anyio.create_task_group() as tasks:
            tasks.start_soon(agent.run)
            await everybody_is_there(bus)
            report = await tried(Trainer(folder, bus, rollout))
            (folder / "report.json").write_text(json.dumps(report, indent=1))
            tasks.cancel_scope.cancel()


if __name__ == "__main__":
    try:
        asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]))
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # the engine's own processes are ended by the test
