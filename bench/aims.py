"""What the benchmarks should reach, and whether they do. Pure: from the rows that they wrote."""

from collections.abc import Iterator
from typing import Any, NamedTuple

Rows = list[dict[str, Any]]
Results = dict[str, Any]
"""What each benchmark wrote, by its name. One that did not run is missing."""


class Aim(NamedTuple):
    """One aim.

    Attributes:
        what: What is measured.
        wanted: The aim, in words.
        measured: The figure, in words; '' if it was not measured.
        holds: Whether it is reached; None if it was not measured.
    """

    what: str
    wanted: str
    measured: str
    holds: bool | None


class Quantity(NamedTuple):
    """How figures of one kind are written, and which are good."""

    text: str
    limit: float
    at_least: bool = False

    def judge(self, what: str, figure: float | None) -> Aim:
        """Return the aim with its figure."""
        wanted = ("at least " if self.at_least else "at most ") + self.text.format(self.limit)
        if figure is None:
            return Aim(what, wanted, "", None)
        holds = figure >= self.limit if self.at_least else figure <= self.limit
        return Aim(what, wanted, self.text.format(figure), holds)


def pick(rows: Rows, figure: str, **keys: object) -> float | None:
    """Return a figure of the one row with these keys; None if there is none."""
    for row in rows:
        if all(row.get(name) == value for name, value in keys.items()):
            found = row.get(figure)
            return float(found) if isinstance(found, int | float) else None
    return None


def aims(results: Results) -> list[Aim]:
    """Return all aims, in the order of the page."""
    found: list[Aim] = []
    for section in (fan_outs, bus_alone, fleets, trainer, agents, records, weights):
        found += section(results)
    return found


def fan_outs(results: Results) -> Iterator[Aim]:
    """One command and its outcomes, beside peers."""
    rows = results.get("fanout", [])
    for kind, system, limits in (
        ("engines called", "rolloutctl", {1: 4, 8: 4, 64: 3.5, 256: 3.5}),
        ("agents skip", "rolloutctl-skip", {1: 3.5, 8: 3, 64: 2, 256: 2}),
    ):
        for count, limit in limits.items():
            what = f"{kind}, {count} agents, against bare pyzmq"
            yield Quantity("{:.2f} times", limit).judge(what, pick(rows, "x_pyzmq", system=system, agents=count))
    for peer, counts, far in (("http", (1, 8, 32, 64, 256), (32, 5)), ("ray", (1, 8, 32), (32, 8))):
        for count in counts:
            ratio = pick(rows, f"x_{peer}", system="rolloutctl", agents=count)
            wanted = far[1] if count >= far[0] else 1
            what = f"engines called, {count} agents, faster than {'HTTP' if peer == 'http' else 'Ray'}"
            yield Quantity("{:.2f} times", wanted, at_least=True).judge(what, 1 / ratio if ratio else None)


def bus_alone(results: Results) -> Iterator[Aim]:
    """The bus with light speakers."""
    rows = results.get("speakers", [])
    for count in (1, 64, 256, 1024, 4096):
        what = f"the bus alone, CPU an answer, {count:,} speakers, against bare pyzmq"
        yield Quantity("{:.2f} times", 5 if count == 1 else 2).judge(what, pick(rows, "x_bare", agents=count))
    per_answer = {count: cpu_us(rows, count) for count in (64, 4096)}
    growth = per_answer[4096] / per_answer[64] if per_answer[4096] and per_answer[64] else None
    yield Quantity("{:.2f} times", 1.25).judge("the bus alone, CPU an answer, 4,096 against 64 speakers", growth)
    for count in (64, 4096):
        what = f"the bus alone, answers a second of CPU in a burst, {count:,} speakers"
        yield Quantity("{:,.0f}", 40_000, at_least=True).judge(what, pick(rows, "burst_cpu", agents=count))
    large = {"agents": 4096}
    idle, report = pick(rows, "idle_share", **large), pick(rows, "bus_median_us", **large)
    turns = [pick(rows, f"{phase}turn_us", **large) for phase in ("", "join_", "idle_")]
    longest = max((turn for turn in turns if turn is not None), default=None)
    yield Quantity("{:.1f} % of a core", 3).judge("the bus's thread, 4,096 idle speakers", _times(idle, 100))
    yield Quantity("{:.2f} s", 0.3).judge("a command to 4,096 speakers", _times(report, 1e-6))
    yield Quantity("{:.1f} ms of CPU", 5).judge("longest turn of the bus, 4,096 speakers", _times(longest, 1e-3))


def cpu_us(rows: Rows, count: int) -> float | None:
    """CPU of the bus for one answer, with libzmq's."""
    own, zmq = pick(rows, "bus_own_us", agents=count), pick(rows, "bus_zmq_us", agents=count)
    return own + zmq if own is not None and zmq is not None else None


def _times(figure: float | None, factor: float) -> float | None:
    return figure * factor if figure is not None else None


def fleets(results: Results) -> Iterator[Aim]:
    """A thousand real agents."""
    rows = results.get("join", [])
    for what, figure, limit in (
        ("a command to 1,024 real agents on this machine", "answered_s", 1.0),
        ("1,024 real agents have joined", "joined_s", 10.0),
        ("1,024 real agents are together again after a killed bus", "again_s", 10.0),
    ):
        yield Quantity("{:.2f} s", limit).judge(what, pick(rows, figure, agents=1024))


def trainer(results: Results) -> Iterator[Aim]:
    """What the trainer feels."""
    rows = results.get("trainer", [])
    yield Quantity("{:.0f} µs", 50).judge(
        "`publish` in the trainer's thread, 64 real agents, median", pick(rows, "p50_us", what="publish")
    )
    for loop in ("python", "torch"):
        for beside, words in (("idle", "1,024 idle agents"), ("commands", "them and a command a second")):
            figure = pick(rows, "percent", what="slowdown", loop=loop, beside=beside)
            yield Quantity("{:.2f} %", 1).judge(f"slowdown of a training loop in {loop} beside {words}", figure)


def agents(results: Results) -> Iterator[Aim]:
    """What an agent costs its node."""
    rows = results.get("agents", [])
    command = pick(rows, "cpu_us", what="command, acting")
    alone = {name: pick(rows, name, what="idle, alone") for name in ("core_percent", "memory_mb")}
    yield Quantity("{:.0f} µs", 100).judge("CPU of an agent for a command that acts", command)
    yield Quantity("{:.2f} % of a core", 0.2).judge("an idle agent", alone["core_percent"])
    yield Quantity("{:.0f} MB", 30).judge("memory of an agent", alone["memory_mb"])
    yield Quantity("{:.3f} s", 0.1).judge("`import controlplane, schemas, workers`", pick(rows, "s", what="import"))


def records(results: Results) -> Iterator[Aim]:
    """Machines, log and journal."""
    rows, log = results.get("machines", []), results.get("logs", {})
    for name, limit in (("agent acting", 600_000), ("agent skipping", 1_000_000), ("replay", 150_000)):
        what = f"{'records' if name == 'replay' else 'decisions'} a second, {name}"
        yield Quantity("{:,.0f}", limit, at_least=True).judge(what, pick(rows, "per_second", what=name))
    tail = log.get("commit_us", {}).get("p99.9")
    yield Quantity("{:.2f} ms", 2).judge("a commit of the log, p99.9", _times(tail, 1e-3))
    yield Quantity("{:.2f} s", 2).judge("opening a log", log.get("opened_s"))


def weights(results: Results) -> Iterator[Aim]:
    """Weight syncs."""
    rows = results.get("weights", [])
    for what, figure in (
        ("a sync of 64 engines adds to the slowest load", "added_fan_outs"),
        ("from all loaded to all serving, 64 engines", "to_serving_fan_outs"),
    ):
        yield Quantity("{:.2f} fan-outs", 3).judge(what, pick(rows, figure, agents=64))
    checkpoints = results.get("checkpoints", [])
    for megabytes in sorted({row["megabytes"] for row in checkpoints}) or [2048]:
        for place, words in (("tmpfs", "memory"), ("tmpfs, huge pages", "memory in huge pages")):
            share = pick(
                checkpoints, "copies_of_total", file_system=place, megabytes=megabytes, replicas=1, digest=False
            )
            what = f"a checkpoint of {megabytes:,} MB through {words}, against copying it twice"
            yield Quantity("{:.0f} % of the speed", 70, at_least=True).judge(what, _times(share, 100))
