"""Writes the figures of all benchmarks into the pages: tables into docs/performance.md and README.md, and the plot.

    python -m bench.page [--results FOLDER] [--pages FOLDER]

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`; the text around it is written by hand. A
benchmark that has left no result changes nothing. The table of aims is printed as well.
"""

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.aims import Results, Rows, aims, pick

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = ("docs/performance.md", "README.md")
PLOT: Final = "docs/performance.svg"
_TABLE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, with numbers to the right."""
    rows = [heads, ["---" if index == 0 else "---:" for index in range(len(heads))], *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def cell(figure: float | None, text: str) -> str:
    """Return a figure in a cell, which is empty if it was not measured."""
    return text.format(figure) if figure is not None else ""


# --- one table each ---------------------------------------------------------------------------------------------------


def verdicts(results: Results) -> str:
    """What should be reached, and what was."""
    words = {True: "yes", False: "**no**", None: "not measured"}
    return table(
        ["what", "aim", "measured", "reached"],
        [[aim.what, aim.wanted, aim.measured, words[aim.holds]] for aim in aims(results)],
    )


SYSTEMS: Final = {
    "rolloutctl-skip": "ours, agents skip",
    "rolloutctl": "ours, engines called",
    "rolloutctl-inline": "ours, engine called inline",
    "rolloutctl-keys": "ours with keys, engines called",
    "floor-skip": "floor, agents skip",
    "floor": "floor, engine called inline",
    "http": "HTTP (aiohttp, FastAPI)",
    "ray": "Ray actors",
}


def fanout(results: Results) -> str:
    """Multiples of bare pyzmq."""
    rows: Rows = results["fanout"]
    counts = sorted({int(row["agents"]) for row in rows})
    measured = {row["system"] for row in rows}
    lines = [
        [words, *(cell(pick(rows, "x_pyzmq", system=system, agents=count), "{:.2f}") for count in counts)]
        for system, words in SYSTEMS.items()
        if system in measured
    ]
    bare = [cell(pick(rows, "p50_us", system="pyzmq", agents=count), "{:,.0f} µs") for count in counts]
    return table(["agents", *map(str, counts)], [*lines, ["bare pyzmq", *bare]])


def ahead(results: Results) -> str:
    """How many times faster than HTTP and Ray."""
    rows: Rows = results["fanout"]
    counts = sorted({int(row["agents"]) for row in rows})
    lines = []
    for system in ("rolloutctl-skip", "rolloutctl"):
        for peer, name in (("http", "HTTP"), ("ray", "Ray")):
            ratios = [pick(rows, f"x_{peer}", system=system, agents=count) for count in counts]
            words = f"{SYSTEMS[system]}, against {name}"
            lines.append([words, *(cell(1 / ratio if ratio else None, "{:.1f}") for ratio in ratios)])
    return table(["agents", *map(str, counts)], lines)


def parts(results: Results) -> str:
    """Where the time goes."""
    rows: Rows = results["parts"]
    columns = list(dict.fromkeys((row["who"], row["agents"]) for row in rows))
    lines = [
        [part, *(cell(pick(rows, "percent", part=part, who=who, agents=count), "{:.0f} %") for who, count in columns)]
        for part in dict.fromkeys(row["part"] for row in rows)
    ]
    return table(["part", *(f"{who}, N={count}" for who, count in columns)], lines)


def speakers(results: Results) -> str:
    """The bus alone."""
    return bus_alone(results["speakers"])


def uploads(results: Results) -> str:
    """The bus alone, with uploads."""
    return bus_alone(results["uploads"])


def model(results: Results) -> str:
    """What 10,000 agents would cost, from the largest fleet that was measured."""
    row = max(results["speakers"], key=lambda row: int(row["agents"]))
    heads = [
        "agents",
        "CPU of the bus for a command, s",
        "to report, s",
        "idle bus, % of a core",
        "libzmq, % of a core",
    ]
    lines = []
    for count, how in ((row["agents"], "measured"), (10_000, "model")):
        factor = count / row["agents"]
        cpu_s = (row["bus_own_us"] + row["bus_zmq_us"]) * count / 1e6
        lines.append(
            [f"{count:,} ({how})", f"{cpu_s:.2f}", f"{row['bus_median_us'] * factor / 1e6:.2f}"]
            + [f"{100 * row[share] * factor:.1f}" for share in ("idle_share", "idle_zmq_share")]
            + [f"{2 * count:,}"]
        )
    return table([*heads, "connections"], lines)


def bus_alone(rows: Rows) -> str:
    """One row for each number of speakers."""
    heads = [
        "speakers",
        "bus's thread, µs",
        "libzmq, µs",
        "bare, µs",
        "times bare",
        "to report, ms",
        "burst, answers/s",
        "a second of CPU",
    ]
    heads += ["longest turn, ms", "idle, % of a core", "libzmq idle, %", "joined, s"]
    lines = []
    for row in rows:
        turn = max(row["turn_us"], row["join_turn_us"], row["idle_turn_us"]) / 1000
        figures = [row["bus_own_us"], row["bus_zmq_us"], row["bare_own_us"] + row["bare_zmq_us"]]
        lines.append(
            [f"{row['agents']:,}", *(f"{figure:.1f}" for figure in figures), f"{row['x_bare']:.2f}"]
            + [f"{row['bus_median_us'] / 1000:.2f}", f"{row['burst']:,}", f"{row['burst_cpu']:,}", f"{turn:.1f}"]
            + [f"{100 * row['idle_share']:.2f}", f"{100 * row['idle_zmq_share']:.2f}", f"{row['joined_s']:.2f}"]
        )
    return table(heads, lines)


def join(results: Results) -> str:
    """Fleets of real agents."""
    heads = ["real agents", "joined, s", "a command, s", "again after a killed bus, s", "CPU of the bus to join, s"]
    figures = ("joined_s", "answered_s", "again_s", "bus_cpu_s")
    return table(heads, [[f"{row['agents']:,}", *(f"{row[name]:.2f}" for name in figures)] for row in results["join"]])


def trainer(results: Results) -> str:
    """What the trainer feels."""
    lines = []
    for row in results["trainer"]:
        if row["what"] == "slowdown":
            beside = f"{row['agents']:,} idle agents"
            beside += " and a command a second" if row["beside"] == "commands" else ""
            found = f"{row['percent']:.2f} % ({row['low_percent']:.2f} to {row['high_percent']:.2f}), waited "
            found += f"{row['waited_percent']:.2f} % of the time; the bus's thread {row['bus_percent']} % of a core"
            lines.append([f"slowdown of a loop in {row['loop']} beside {beside}", found])
        elif row["what"] == "latency":
            what = f"a command to {row['agents']} beside a loop in {row['loop']}, switch interval {row['switch_ms']} ms"
            lines.append([what, f"{row['p50_us'] / 1000:.1f} ms, p99 {row['p99_us'] / 1000:.1f} ms"])
        else:
            lines.append([f"`publish` beside {row['agents']} agents", f"{row['p50_us']} µs, p99 {row['p99_us']} µs"])
    return table(["what", "median"], lines)


def agents(results: Results) -> str:
    """What an agent costs."""
    texts = {"cpu_us": "{} µs of CPU", "core_percent": "{} % of a core", "memory_mb": "{} MB", "s": "{} s"}
    names = {
        "idle, alone": "an idle agent, a process of its own",
        "idle, each": "an idle agent among {} in two processes",
        "idle, bus": "the bus's thread, {} idle agents",
        "command, acting": "an agent, a command on which its engine is called",
        "command, skipping": "an agent, a command that it skips",
        "libraries": "a process that has only imported Python's asyncio, uvloop, pyzmq, msgspec, anyio and click",
        "import": "`import controlplane, schemas, workers`",
    }
    lines = [
        [
            names[row["what"]].format(row.get("agents")),
            ", ".join(texts[key].format(row[key]) for key in texts if key in row),
        ]
        for row in results["agents"]
    ]
    return table(["what", "takes"], lines)


def machines(results: Results) -> str:
    """Decisions a second, and by the size of the fleet."""
    rows: Rows = results["machines"]
    return table(
        ["machine", "a second"], [[row["what"], f"{row['per_second']:,}"] for row in rows if "per_second" in row]
    )


def growth(results: Results) -> str:
    """What one decision of the coordinator costs, by the size of the fleet."""
    rows = [row for row in results["machines"] if "us" in row]
    counts = sorted({row["agents"] for row in rows})
    kinds = dict.fromkeys(row["what"] for row in rows)
    lines = [
        [kind, *(cell(pick(rows, "us", what=kind, agents=count), "{:,.1f}") for count in counts)] for kind in kinds
    ]
    return table(["µs of CPU", *(f"{count:,}" for count in counts)], lines)


def logs(results: Results) -> str:
    """Log and journal."""
    log = results["logs"]
    tails = [
        [words, *(f"{log[name][tail]:,.0f}" for tail in ("p50", "p99", "p99.9", "max"))]
        for words, name in (("a commit of the log", "commit_us"), ("a commit of a journal", "journal_commit_us"))
    ]
    sentences = (
        f"The log of {log['commands']:,} commands to {log['agents']} agents has {log['file_bytes'] / 1e6:,.0f} MB.",
        f"It opens in {log['opened_s']:.2f} s, for which {log['folded']:,} of its {log['replayed']:,} records are",
        f"folded, and replays at {log['replayed_a_second']:,} records a second.",
    )
    return "\n".join([table(["µs by the clock", "p50", "p99", "p99.9", "max"], tails), "", *sentences])


def weights(results: Results) -> str:
    """Weight syncs."""
    heads = ["agents", "one fan-out", "a sync adds to the load", "fan-outs", "its calls in plain commands", "fan-outs"]
    lines = [
        [str(row["agents"]), f"{row['fan_out_us'] / 1000:.1f} ms"]
        + [
            cell
            for part in ("added", "plain", "to_serving")
            for cell in (f"{row[f'{part}_us'] / 1000:.1f} ms", f"{row[f'{part}_fan_outs']:.2f}")
        ]
        for row in results["weights"]
    ]
    return table([*heads, "all loaded to all serving", "fan-outs"], lines)


def checkpoints(results: Results) -> str:
    """Checkpoints, in milliseconds."""
    rows: Rows = results["checkpoints"]
    times = ("save", "manifest", "prepare", "load", "commit", "total", "floor", "two_copies")
    shares = {
        "floor_of_total": "floor / total",
        "copies_of_total": "copies / total",
        "copies_of_floor": "copies / floor",
    }
    lines = [
        [row["file_system"], f"{row['megabytes']:,}", str(row["replicas"]), "on" if row["digest"] else "off"]
        + [f"{1000 * row[f'{name}_s']:,.1f}" for name in times]
        + [f"{100 * row[name]:.0f} %" for name in shares]
        for row in rows
    ]
    return table(
        ["file system", "MB", "replicas", "digest", *(name.replace("_", " ") for name in times), *shares.values()],
        lines,
    )


def machine(results: Results) -> str:
    """Where the figures come from."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = cpu[1] if cpu else platform.machine()
    return f"Measured on {os.cpu_count()} cores ({name}), {platform.system()}, Python {platform.python_version()}."


def readme(results: Results) -> str:
    """The table in README.md."""
    rows: Rows = results["fanout"]
    shown = ("rolloutctl-skip", "rolloutctl", "http", "ray")
    lines = [
        [str(count)]
        + [cell(pick(rows, "x_pyzmq", system=system, agents=count), "{:.1f}") for system in shown]
        + [cell(pick(rows, "p50_us", system="pyzmq", agents=count), "{:,.0f} µs")]
        for count in sorted({row["agents"] for row in rows})
    ]
    return table(["agents", *(SYSTEMS[system] for system in shown), "bare pyzmq"], lines)


def readme_agent(results: Results) -> str:
    """The sentences below it."""
    agents, rows = results["agents"], results["machines"]
    percent, memory = (pick(agents, name, what="idle, alone") or 0 for name in ("core_percent", "memory_mb"))
    per_second = {row["what"]: row["per_second"] / 1e6 for row in rows if "per_second" in row}
    skipping, acting = (f"{per_second[f'agent {kind}']:.2f} million" for kind in ("skipping", "acting"))
    sentences = (
        f"An idle agent takes {percent:.2f} % of a core and {memory:.0f} MB, without torch. One agent's machine makes",
        f"{skipping} decisions a second when it skips and {acting} when it acts. A log replays at about",
        f"{round(1e6 * per_second['replay'], -3):,.0f} records a second.",
    )
    return "\n".join(sentences)


TABLES: Final[dict[str, tuple[Callable[[Results], str], tuple[str, ...]]]] = {
    "verdicts": (verdicts, ()),
    "machine": (machine, ()),
    "fanout": (fanout, ("fanout",)),
    "ahead": (ahead, ("fanout",)),
    "parts": (parts, ("parts",)),
    "speakers": (speakers, ("speakers",)),
    "uploads": (uploads, ("uploads",)),
    "model": (model, ("speakers",)),
    "join": (join, ("join",)),
    "trainer": (trainer, ("trainer",)),
    "agents": (agents, ("agents",)),
    "machines": (machines, ("machines",)),
    "growth": (growth, ("machines",)),
    "logs": (logs, ("logs",)),
    "weights": (weights, ("weights",)),
    "checkpoints": (checkpoints, ("checkpoints",)),
    "readme": (readme, ("fanout",)),
    "readme_agent": (readme_agent, ("agents", "machines")),
}
"""Each table with the benchmarks that it needs."""


# --- pages ------------------------------------------------------------------------------------------------------------


def filled(page: str, results: Results) -> str:
    """Return a page with its tables written anew. Raises KeyError for a table that there is none of."""

    def write(match: re.Match[str]) -> str:
        make, needs = TABLES[match[2]]
        return f"{match[1]}{make(results)}\n{match[3]}" if results.keys() >= set(needs) and results else match[0]

    return _TABLE.sub(write, page)


def draw(rows: Rows, path: Path) -> None:
    """Draw what an answer costs the bus, by the size of the fleet."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rolloutctl"  # the same figures give the same file
    from matplotlib import pyplot

    counts = [row["agents"] for row in rows]
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot(counts, [row["bus_own_us"] + row["bus_zmq_us"] for row in rows], marker="o", label="the bus")
    axes.plot(counts, [row["bare_own_us"] + row["bare_zmq_us"] for row in rows], marker="o", label="bare pyzmq")
    axes.set(xscale="log", yscale="log", xlabel="agents (light speakers)", ylabel="µs of CPU an answer")
    axes.set_xticks(counts, [f"{count:,}" for count in counts], minor=False)
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def read_results(folder: Path) -> Results:
    """Return what benchmarks wrote into a folder."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def main() -> None:
    """Write the pages, and print the aims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench")
    parser.add_argument("--pages", type=Path, default=ROOT)
    options = parser.parse_args()
    results: dict[str, Any] = read_results(options.results)
    for page in PAGES:
        path = options.pages / page
        path.write_text(filled(path.read_text(), results))
    if "speakers" in results:
        draw(results["speakers"], options.pages / PLOT)
    print(verdicts(results))  # noqa: T201
    if missing := sorted({name for _, needs in TABLES.values() for name in needs} - results.keys()):
        print(f"\nWithout a result, so their tables are as they were: {', '.join(missing)}")  # noqa: T201


if __name__ == "__main__":
    main()
