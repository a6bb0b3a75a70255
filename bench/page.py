"""Writes the tables of all benchmarks into docs/performance.md and README.md, and prints the aims.

    python -m bench.page [--results FOLDER] [--pages FOLDER]

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`; the text around it is written by hand. A
benchmark that has left no result changes nothing.
"""

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import adapters, agents, checkpoints, fanout, join, logs, machines, speakers, trainer, weights
from bench.tables import Row, markdown, pivot

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = ("docs/performance.md", "README.md")
_TABLE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


class Results(dict[str, list[Row]]):
    """The rows of each benchmark that has run, by its name."""

    def row(self, bench: str, **keys: object) -> Row:
        """Return the row with these fields. Raises LookupError if it was not measured."""
        for row in self[bench]:
            if all(row.get(name) == value for name, value in keys.items()):
                return row
        raise LookupError(f"{bench} has no row with {keys}")


# --- aims -------------------------------------------------------------------------------------------------------------


class Aim(NamedTuple):
    """What should be reached: `text` is how figures are written, `figure` finds the one that was measured."""

    what: str
    text: str
    limit: float
    figure: Callable[[Results], float]
    at_least: bool = False

    def cells(self, results: Results) -> list[str]:
        """Return what, the aim, what was measured, and whether it is reached."""
        wanted = ("at least " if self.at_least else "at most ") + self.text.format(self.limit)
        with suppress(LookupError):
            figure = self.figure(results)
            reached = figure >= self.limit if self.at_least else figure <= self.limit
            return [self.what, wanted, self.text.format(figure), "yes" if reached else "**no**"]
        return [self.what, wanted, "", "not measured"]


def field(name: str, factor: float, bench: str, **keys: object) -> Callable[[Results], float]:
    """A figure of one row, times a factor."""
    return lambda results: float(results.row(bench, **keys)[name]) * factor


def exchange_aims() -> Iterator[Aim]:
    """One command and its outcomes, beside peers."""
    for kind, system, limits in (
        ("engines called", "rolloutctl", {1: 5, 8: 5, 64: 5, 256: 5}),
        ("agents skip", "rolloutctl-skip", {1: 3.5, 8: 3, 64: 2, 256: 2}),
    ):
        for count, times in limits.items():
            figure = field("x_pyzmq", 1, "fanout", system=system, agents=count)
            yield Aim(f"{kind}, {count} agents, against bare pyzmq", "{:.2f} times", times, figure)
    for peer, name, counts, far in (("http", "HTTP", (1, 8, 32, 64, 256), 5), ("ray", "Ray", (1, 8, 32), 8)):
        for count in counts:
            yield Aim(
                f"engines called, {count} agents, faster than {name}",
                "{:.2f} times",
                far if count >= 32 else 1,
                lambda results, peer=peer, count=count: (  # type: ignore[misc]
                    1 / results.row("fanout", system="rolloutctl", agents=count)[f"x_{peer}"]
                ),
                at_least=True,
            )


def bus_aims() -> Iterator[Aim]:
    """The bus alone, and fleets of real agents."""
    bus = "the bus alone, CPU an answer"
    for count in (1, 64, 256, 1024, 4096):
        figure = field("x_bare", 1, "speakers", agents=count)
        yield Aim(f"{bus}, {count:,} speakers, against bare pyzmq", "{:.2f} times", 5 if count == 1 else 2, figure)
    yield Aim(
        f"{bus}, 1,024 against 64 speakers",
        "{:.2f} times",
        1.25,
        lambda results: (
            speakers.cpu_us(results.row("speakers", agents=1024)) / speakers.cpu_us(results.row("speakers", agents=64))
        ),
    )
    for count in (64, 4096):
        what = f"the bus alone, answers a second of CPU in a burst, {count:,} speakers"
        yield Aim(what, "{:,.0f}", 40_000, field("burst_cpu", 1, "speakers", agents=count), at_least=True)
    idle, report = (
        field(name, x, "speakers", agents=4096) for name, x in (("idle_share", 100), ("bus_median_us", 1e-6))
    )
    yield Aim("the bus's thread, 4,096 idle speakers", "{:.1f} % of a core", 3, idle)
    yield Aim("a command to 4,096 speakers", "{:.2f} s", 0.3, report)
    yield Aim(
        "longest turn of the bus, 4,096 speakers",
        "{:.1f} ms of CPU",
        30,
        lambda results: speakers.longest_turn_ms(results.row("speakers", agents=4096)),
    )
    for what, name, limit in (
        ("a command to 1,024 real agents on this machine", "answered_s", 1.0),
        ("1,024 real agents have joined", "joined_s", 10.0),
        ("1,024 real agents are together again after a killed bus", "again_s", 10.0),
    ):
        yield Aim(what, "{:.2f} s", limit, field(name, 1, "join", agents=1024))


def process_aims() -> Iterator[Aim]:
    """What a trainer and an agent feel."""
    what = "`publish` in the trainer's thread, 64 real agents, median"
    yield Aim(what, "{:.0f} µs", 50, field("p50_us", 1, "trainer", what="publish"))
    what = "a command to 64 agents beside a loop in python, switch interval 0.5 ms, median"
    latency = {"what": "latency", "loop": "python", "agents": 64, "switch_ms": 0.5}
    yield Aim(what, "{:.1f} ms", 20, field("p50_us", 1e-3, "trainer", **latency))
    for loop in ("python", "torch"):
        for beside, words in (("idle", "1,024 idle agents"), ("commands", "them and a command a second")):
            figure = field("waited_percent", 1, "trainer", loop=loop, beside=beside)
            yield Aim(f"a training loop in {loop} beside {words} waits for the GIL", "{:.2f} %", 1, figure)
    yield Aim(
        "CPU of an agent for a command that acts",
        "{:.0f} µs",
        100,
        field("cpu_us", 1, "agents", what="command, acting"),
    )
    yield Aim("an idle agent", "{:.2f} % of a core", 0.2, field("core_percent", 1, "agents", what="idle, alone"))
    yield Aim("memory of an agent", "{:.0f} MB", 30, field("memory_mb", 1, "agents", what="idle, alone"))
    yield Aim("`import controlplane, schemas, workers`", "{:.3f} s", 0.1, field("s", 1, "agents", what="import"))


def part_aims() -> Iterator[Aim]:
    """Machines, log, syncs and checkpoints."""
    for name, limit in (("agent acting", 600_000), ("agent skipping", 1_000_000), ("replay", 150_000)):
        what = f"{'records' if name == 'replay' else 'decisions'} a second, {name}"
        yield Aim(what, "{:,.0f}", limit, field("per_second", 1, "machines", what=name), at_least=True)
    commit: Callable[[Results], float] = lambda results: results.row("logs")["commit_us"]["p99.9"] / 1000  # noqa: E731
    yield Aim("a commit of the log, p99.9", "{:.2f} ms", 2, commit)
    yield Aim("opening a log", "{:.2f} s", 2, field("opened_s", 1, "logs"))
    for what, name in (
        ("a sync of 64 engines adds to the slowest load", "added_fan_outs"),
        ("from all loaded to all serving, 64 engines", "to_serving_fan_outs"),
    ):
        yield Aim(what, "{:.2f} fan-outs", 3, field(name, 1, "weights", agents=64))
    for megabytes in (1, 64):
        what = f"an adapter of {megabytes} MB to 64 engines"
        stopped, added = (
            field(name, x, "adapters", agents=64, megabytes=megabytes)
            for name, x in (("adapter_stopped_us", 1e-3), ("commit_fan_outs", 1))
        )
        yield Aim(f"{what}, generation stopped", "{:.1f} ms", 0, stopped)
        yield Aim(f"{what}, from all loaded to all serving", "{:.2f} fan-outs", 2, added)
    for megabytes in (64, 2039):
        for place, words in (("tmpfs", "memory"), ("tmpfs, huge pages", "memory in huge pages")):
            keys = {"file_system": place, "megabytes": megabytes, "replicas": 1, "digest": False}
            what = f"a checkpoint of {megabytes:,} MB through {words}, against copying it twice"
            figure = field("copies_of_total", 100, "checkpoints", **keys)
            yield Aim(what, "{:.0f} % of the speed", 70, figure, at_least=True)


AIMS: Final = (exchange_aims, bus_aims, process_aims, part_aims)


def verdicts(results: Results) -> str:
    """What should be reached, and what was."""
    return markdown(["what", "aim", "measured", "reached"], [aim.cells(results) for make in AIMS for aim in make()])


# --- pages ------------------------------------------------------------------------------------------------------------


def machine(_: Results) -> str:
    """Where the figures come from."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = cpu[1] if cpu else platform.machine()
    return f"Measured on {os.cpu_count()} cores ({name}), {platform.system()}, Python {platform.python_version()}."


def readme(results: Results) -> str:
    """The table in README.md."""
    shown = [row for row in results["fanout"] if row["system"] != "rolloutctl-keys"]
    return pivot(fanout.in_order(shown), "{agents}", fanout.name, fanout.cell, "agents")


def readme_agent(results: Results) -> str:
    """The sentences below it."""
    idle = results.row("agents", what="idle, alone")
    skipping, acting, replay = (
        results.row("machines", what=what)["per_second"] for what in ("agent skipping", "agent acting", "replay")
    )
    sentences = (
        f"An idle agent takes {idle['core_percent']:.2f} % of a core and {idle['memory_mb']:.0f} MB, without torch.",
        f"One agent's machine makes {skipping / 1e6:.2f} million decisions a second when it skips and",
        f"{acting / 1e6:.2f} million when it acts. A log replays at about {round(replay, -3):,.0f} records a second.",
    )
    return "\n".join(sentences)


TABLES: Final[dict[str, Callable[[Results], str]]] = {
    "verdicts": verdicts,
    "machine": machine,
    "fanout": lambda results: fanout.table(results["fanout"]),
    "speakers": lambda results: speakers.table(results["speakers"]),
    "uploads": lambda results: speakers.table(results["uploads"]),
    "join": lambda results: join.table(results["join"]),
    "trainer": lambda results: trainer.table(results["trainer"]),
    "agents": lambda results: agents.table(results["agents"]),
    "machines": lambda results: machines.table(results["machines"]),
    "growth": lambda results: machines.growth_table(results["machines"]),
    "logs": lambda results: logs.table(results["logs"]),
    "weights": lambda results: weights.table(results["weights"]),
    "adapters": lambda results: adapters.table(results["adapters"]),
    "checkpoints": lambda results: checkpoints.table(results["checkpoints"]),
    "readme": readme,
    "readme_agent": readme_agent,
}


def filled(page: str, results: Results) -> str:
    """Return a page with those tables written anew whose benchmark ran. Raises KeyError for an unknown table."""

    def write(match: re.Match[str]) -> str:
        make = TABLES[match[2]]
        with suppress(LookupError):
            return f"{match[1]}{make(results)}\n{match[3]}" if results else match[0]
        return match[0]

    return _TABLE.sub(write, page)


def read_results(folder: Path) -> Results:
    """Return what benchmarks wrote into a folder."""
    return Results({path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))})


def main() -> None:
    """Write the pages, and print the aims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench")
    parser.add_argument("--pages", type=Path, default=ROOT)
    options: Any = parser.parse_args()
    results = read_results(options.results)
    for page in PAGES:
        path = options.pages / page
        path.write_text(filled(path.read_text(), results))
    print(verdicts(results))  # noqa: T201


if __name__ == "__main__":
    main()
