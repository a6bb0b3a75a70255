"""One command to N agents and N outcomes back: ours beside bare pyzmq, HTTP and Ray, in one run.

    python -m bench.fanout [--agents 1,8,32,64,256] [--rounds 200] [--systems ...] [--out FILE]

Ours publishes, records, decides on every agent, journals, answers, concludes and reports. In `rolloutctl` the engines
act on every command, in a task of their own; in `rolloutctl-skip` the agents decide to skip it (node rank 1 and up);
`rolloutctl-keys` is `rolloutctl` with CURVE on both sockets: its ratio to `rolloutctl` is the cost of keys. The peers
only exchange. Agents of all systems but Ray live in two processes.

All systems but Ray are open at the same time and measured in turn, some rounds each, while the agents of the others are
stopped: whatever else the machine does strikes all. Ray is measured after them. Compare ratios, not microseconds.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from bench import peers, tables
from bench.null_engine import NullEngine
from bench.processes import System, run_agents, spawn
from bench.tables import Row
from controlplane.bus.descriptors import raise_limit
from schemas.commands import EngineCommand
from schemas.config import BusConfig
from schemas.identity import Identity

PATIENT = BusConfig(agent_timeout_ms=3_600_000, lease_ms=3_600_000)
"""Agents that are stopped for a while have not left."""
RAY_MAX = 32
"""Each Ray actor is a process; with more of them, the machine's memory is what is measured."""


def our_agents(first: int, count: int, bus: str, nodes: str, key: str) -> None:
    """Run `count` agents in this process, on one event loop. `key` is their key file; empty without keys."""
    rank = 0 if nodes == "1" else 1

    def make(number: int) -> tuple[Identity, NullEngine]:
        return Identity(replica=number, node_rank=rank, nnodes=int(nodes)), NullEngine(tokenizer=rank == 0)

    run_agents(range(first, first + count), bus, make, key or None)


def ours(nodes: int, *, with_keys: bool = False) -> Callable[[int], AbstractContextManager[System]]:
    """Our exchange, with every agent on node rank 0 (replicas of one node) or on node rank 1 (replicas of two)."""

    @contextmanager
    def exchange_with(agents: int) -> Iterator[System]:
        from controlplane import ControlPlane

        with tempfile.TemporaryDirectory() as folder:
            log = str(Path(folder) / "run.db")
            keys, key = (Path(folder) / "keys", fleet_key(Path(folder) / "keys")) if with_keys else (None, "")
            with ControlPlane("tcp://127.0.0.1:0", log=log, keys=keys, config=PATIENT) as plane:
                command = EngineCommand(operation="flush")

                def exchange() -> None:
                    report = plane.publish(command).wait()
                    assert len(report.acted) + len(report.skipped) == agents, report

                with spawn("rolloutctl", agents, plane.address, str(nodes), key) as fleet:
                    plane.wait_for_agents(agents, timeout=120).wait()
                    yield System(exchange, fleet)

    return exchange_with


def fleet_key(folder: Path) -> str:
    """Make the keys of a bus and one for its fleet; return the fleet's key file."""
    from controlplane.bus.key_folder import KeyFolder

    keys = KeyFolder(folder)
    keys.make_server()
    return str(keys.add("fleet", "agent", ()))


SYSTEMS: dict[str, Callable[[int], AbstractContextManager[System]]] = {
    "rolloutctl": ours(1),
    "rolloutctl-skip": ours(2),
    "rolloutctl-keys": ours(1, with_keys=True),
    "pyzmq": peers.pyzmq_exchange,
    "http": peers.http_exchange,
    "ray": peers.ray_exchange,
}
PEERS = ("pyzmq", "http", "ray")


class Times:
    """One system at one number of agents, and how long its exchanges took."""

    def __init__(self, name: str, agents: int, system: System) -> None:
        self.name, self.agents, self.fleet = name, agents, system.fleet
        self._exchange, self._us = system.exchange, list[float]()

    def take(self, rounds: int) -> None:
        """Measure some rounds, after some that don't count, in which the agents take up their work again."""
        exchange = self._exchange
        self.fleet.go_on()
        for _ in range(max(2, rounds // 4)):
            exchange()
        for _ in range(rounds):
            start = time.perf_counter_ns()
            exchange()
            self._us.append((time.perf_counter_ns() - start) / 1000)
        self.fleet.stop()

    def row(self) -> Row:
        """Return the median and the 99th percentile, in µs."""
        cuts = statistics.quantiles(self._us, n=100)
        return {"system": self.name, "agents": self.agents, "p50_us": round(cuts[49], 1), "p99_us": round(cuts[98], 1)}


def measure(systems: list[str], agents: int, rounds: int) -> list[Row]:
    """Return a row for each system."""
    block = max(2, min(20, 1280 // agents, rounds))
    with ExitStack() as stack:
        times = [Times(name, agents, stack.enter_context(SYSTEMS[name](agents))) for name in systems]
        for one_system in times:  # not before all are there: an agent that was stopped for seconds dials anew
            one_system.fleet.stop()
        for _ in range(max(1, rounds // block)):
            for one_system in times:
                one_system.take(block)
    return [one_system.row() for one_system in times]


def with_ratios(rows: list[Row]) -> list[Row]:
    """Return the rows of one number of agents, each with its median as a multiple of each peer's, and of ours."""
    medians = {row["system"]: row["p50_us"] for row in rows}
    against = [name for name in (*PEERS, "rolloutctl") if name in medians]
    return [row | {f"x_{name}": round(row["p50_us"] / medians[name], 3) for name in against} for row in rows]


NAMES = {
    "rolloutctl-skip": "ours, agents skip",
    "rolloutctl": "ours, engines called",
    "rolloutctl-keys": "ours with keys, engines called",
    "http": "HTTP (aiohttp, FastAPI)",
    "ray": "Ray actors",
    "pyzmq": "bare pyzmq",
}


def name(row: Row) -> str:
    """Return the system of a row, in words."""
    return NAMES[row["system"]]


def cell(row: Row) -> str:
    """Return a median as a multiple of bare pyzmq's, and its own in µs."""
    return f"{row['p50_us']:,.0f} µs" if row["system"] == "pyzmq" else f"{row.get('x_pyzmq', 0):.2f}"


def in_order(rows: list[Row]) -> list[Row]:
    """Return rows by system, in the order of `NAMES`."""
    return sorted(rows, key=lambda row: [*NAMES].index(row["system"]))


def table(rows: list[Row]) -> str:
    """Return a line for each system and a column for each number of agents."""
    return tables.pivot(in_order(rows), name, "{agents}", cell, "agents")


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
    options = tables.read_options(__doc__, agents="1,8,32,64,256", rounds=200, systems=",".join(SYSTEMS))
    rows: list[Row] = []
    systems = options.systems.split(",")
    for agents in (int(count) for count in options.agents.split(",")):
        raise_limit(len(systems) * agents)
        rounds = options.rounds if agents <= 64 else max(4, options.rounds // 4)
        found = measure([system for system in systems if system != "ray"], agents, rounds)
        if "ray" in systems and agents <= RAY_MAX:
            found += measure(["ray"], agents, rounds)
        rows += with_ratios(found)
    tables.publish(table(rows), rows, options.out)


if __name__ == "__main__":
    main()
