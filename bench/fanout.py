"""One command to N agents and N outcomes back: ours beside bare pyzmq, HTTP and Ray, in one run.

    python -m bench.fanout [--agents 1,8,32,64,256] [--rounds 200] [--systems ...] [--out FILE]

Ours publishes, records, decides on every agent, journals, answers, concludes and reports. In `rolloutctl` the engines
act on every command; in `rolloutctl-skip` the agents decide to skip it (node rank 1 and up); `rolloutctl-keys` is
`rolloutctl` with CURVE on both sockets, and its ratio to `rolloutctl` is the cost of keys. The peers only exchange.
Agents of all systems but Ray live in two processes. Compare ratios, not microseconds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import anyio

from bench import peers
from bench.processes import Worker, spawn
from schemas.commands import EngineCommand
from schemas.events import Call, Observation, Returned
from schemas.identity import Identity, Operation

RAY_MAX = 32
"""Each Ray actor is a process; with more of them, the machine's memory is what is measured."""


class NullEngine:
    """An engine that has every operation and does nothing, so that only the way to it and back is measured."""

    def __init__(self, tokenizer: bool) -> None:
        self._observation = Observation(
            engine="null",
            tokenizer="present" if tokenizer else "absent",
            operations=frozenset(Operation),
            generating=True,
            asleep=frozenset(),
            profiling=False,
            version=0,
        )

    async def open(self) -> None:
        """Nothing to attach to."""

    async def observe(self) -> Observation:
        """Always the same."""
        return self._observation

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        """Done."""
        return Returned()

    async def close(self) -> None:
        """Nothing to close."""


def our_agents(first: int, count: int, bus: str, nodes: str, key: str) -> None:
    """Run `count` agents in this process, on one event loop. `key` is their key file; empty without keys."""
    from workers.agent import Agent

    async def run_agent(number: int, state: Path) -> None:
        rank = 0 if nodes == "1" else 1
        identity = Identity(replica=number, node_rank=rank, nnodes=int(nodes))
        engine = NullEngine(rank == 0)
        async with Agent(bus=bus, identity=identity, engine=engine, state_dir=state, keys=key or None) as agent:
            await agent.run()

    async def main() -> None:
        with tempfile.TemporaryDirectory() as state:
            async with anyio.create_task_group() as group:
                for number in range(first, first + count):
                    group.start_soon(run_agent, number, Path(state) / str(number))

    anyio.run(main, backend_options={"use_uvloop": True})


def ours(nodes: int, *, with_keys: bool = False) -> Callable[[int], AbstractContextManager[Worker]]:
    """Our exchange, with every agent on node rank 0 (replicas of one node) or on node rank 1 (replicas of two)."""

    @contextmanager
    def exchange_with(agents: int) -> Iterator[Worker]:
        from controlplane import ControlPlane

        with tempfile.TemporaryDirectory() as folder:
            log = str(Path(folder) / "run.db")
            keys, key = (Path(folder) / "keys", fleet_key(Path(folder) / "keys")) if with_keys else (None, "")
            with ControlPlane("tcp://127.0.0.1:0", log=log, keys=keys) as plane:
                command = EngineCommand(operation="flush")

                def exchange() -> None:
                    report = plane.publish(command).wait()
                    assert len(report.acted) + len(report.skipped) == agents, report

                with spawn("rolloutctl", agents, plane.address, str(nodes), key):
                    plane.wait_for_agents(agents, timeout=120).wait()
                    yield exchange

    return exchange_with


def fleet_key(folder: Path) -> str:
    """Make the keys of a bus and one for its fleet; return the fleet's key file."""
    from controlplane.bus.key_folder import KeyFolder

    keys = KeyFolder(folder)
    keys.make_server()
    return str(keys.add("fleet", "agent", ()))


SYSTEMS: dict[str, Callable[[int], AbstractContextManager[Worker]]] = {
    "rolloutctl": ours(1),
    "rolloutctl-skip": ours(2),
    "rolloutctl-keys": ours(1, with_keys=True),
    "pyzmq": peers.pyzmq_exchange,
    "http": peers.http_exchange,
    "ray": peers.ray_exchange,
}


def measure(system: str, agents: int, rounds: int) -> dict[str, object]:
    """Return one row: the median and the 99th percentile of `rounds` exchanges, in µs."""
    with SYSTEMS[system](agents) as exchange:
        for _ in range(max(5, rounds // 10)):
            exchange()
        took = []
        for _ in range(rounds):
            start = time.perf_counter_ns()
            exchange()
            took.append((time.perf_counter_ns() - start) / 1000)
    cuts = statistics.quantiles(took, n=100)
    return {"system": system, "agents": agents, "p50_us": round(cuts[49], 1), "p99_us": round(cuts[98], 1)}


def _ratio(row: dict[str, object], medians: dict[object, object]) -> str:
    median = medians.get(row["agents"])
    return f"{float(str(row['p50_us'])) / float(str(median)):.2f}" if median else "-"


def table(rows: list[dict[str, object]]) -> str:
    """Return the rows as text, with each system's median as a multiple of bare pyzmq's, and of ours without keys."""
    bare = {row["agents"]: row["p50_us"] for row in rows if row["system"] == "pyzmq"}
    plain = {row["agents"]: row["p50_us"] for row in rows if row["system"] == "rolloutctl"}
    lines = [f"{'agents':>6}  {'system':<16} {'p50 µs':>10} {'p99 µs':>10}  {'x pyzmq':>8}  {'x rolloutctl':>12}"]
    for row in rows:
        ratio, of_ours = (_ratio(row, medians) for medians in (bare, plain))
        median, tail = row["p50_us"], row["p99_us"]
        lines.append(f"{row['agents']:>6}  {row['system']:<16} {median:>10} {tail:>10}  {ratio:>8}  {of_ours:>12}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, write JSON."""
    if len(sys.argv) > 2 and sys.argv[1] == "--serve":
        serve: dict[str, Callable[..., None]] = {
            "rolloutctl": our_agents,
            "pyzmq": peers.pyzmq_agents,
            "http": peers.http_agents,
        }
        serve[sys.argv[2]](int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="1,8,32,64,256")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for agents in (int(count) for count in options.agents.split(",")):
        for system in options.systems.split(","):
            if system == "ray" and agents > RAY_MAX:
                continue
            rounds = options.rounds if agents <= 64 else max(20, options.rounds // 4)
            rows.append(measure(system, agents, rounds))
            print(table(rows[-1:]).splitlines()[1], flush=True)  # noqa: T201
    print("\n" + table(rows))  # noqa: T201
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
