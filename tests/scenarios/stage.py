"""Scenarios: small texts that say what happens to a fleet, and the stage on which a controller has to cope with it.

    attacks I1                         the invariant that a controller of today breaks here; `preconditions` where it
                                       asks an engine for what an engine dies of, P7 where it dies and leaves a mess
    also I2, I5                        what breaks there with it, if anything: no more and no less
    seen ...                           where this was seen
    fleet 2x1                          replicas x nodes of each
    1000 trainer syncs 2               at this ms: what is asked, what goes wrong
    1000 engine 1 fails load           every load of replica 1's engine fails from now on
    6000 expect engine 0 serves 2      what must be seen then; `expect` is for our controller alone
    6000 expect engine 1 never generates until 9000

Whatever a controller does, it does to the same engines, which die of what real ones die of.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from schemas.events import Call, Fault, Returned
from schemas.outcomes import ErrorKind, Reason
from tests.simulation.engine import OPERATIONS, Attempt, Engine

FOREVER_MS = 10**9
"""How long a call takes that does not come back."""

TRAINER = (
    r"trainer (?:syncs \d+|(?:starts|stops) profile \d+|pauses|resumes|flushes|sleeps|wakes(?: kv_cache)?"
    r"|dies|returns|asks status)"
)
CALLS = "|".join(OPERATIONS)
ENGINE = rf"engine \d+ (?:heals|is relaunched|(?:fails|hangs|fakes)(?: (?:{CALLS}))?)|replica \d+ starts"
NETWORK = r"network (?:repeats|is calm)|agent \d+\.\d+ dies"
SAID = "|".join(["acted", *Reason, *ErrorKind])
EXPECT = (
    r"expect (?:engine \d+ (?:serves \d+|is paused|profiles|does not profile|never generates until \d+)"
    rf"|report \d+ (?:committed|aborted|stale)(?: without \d+)?|status told|all ended|\d+\.\d+ said (?:{SAID}))"
)
LINE = re.compile(rf"(\d+) ({TRAINER}|{ENGINE}|{NETWORK}|{EXPECT})")
HEAD = {"attacks": r"I[1-8]|I10|P7|preconditions", "also": r"I\d+(?:, I\d+)*", "seen": r".+", "fleet": r"[1-9]x[1-9]"}
"""The words of the head, and what may follow them. I9 is checked after every scenario and attacked by none."""

REPLICA = re.compile(r"(?:engine|replica|without) (\d+)")
AGENT = re.compile(r"\b(\d+)\.(\d+)\b")


class ScenarioError(Exception):
    """A scenario can't be read. The text says which file and line, and what is allowed."""


@dataclass(frozen=True)
class Step:
    """One line: when, and what."""

    at_ms: int
    text: str

    @property
    def words(self) -> list[str]:
        return self.text.split()


@dataclass(frozen=True)
class Scenario:
    """attacks: name of the invariant.   also: those that break with it.   replicas, nodes: of the fleet."""

    name: str
    attacks: str
    also: frozenset[str]
    seen: str
    replicas: int
    nodes: int
    steps: tuple[Step, ...]


def read(path: Path) -> Scenario:
    """Raises ScenarioError."""
    return parse(path.stem, path.read_text("utf-8"), str(path.name))


def parse(name: str, text: str, where: str) -> Scenario:
    """Raises ScenarioError for a bad head, a line that is none, a place outside the fleet, steps that go back."""
    head: dict[str, str] = {}
    steps: list[Step] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        place = f"{where}, line {number}"
        word, _, rest = line.partition(" ")
        if word not in HEAD:
            steps.append(_step(place, line, head.get("fleet", "0x0"), steps[-1].at_ms if steps else 0))
        elif re.fullmatch(HEAD[word], rest) is None:
            raise ScenarioError(f"{place}: {word} {rest!r} is not of the form {HEAD[word]}")
        else:
            head[word] = f"{head[word]} {rest}" if word == "seen" and word in head else rest
    if not steps or not HEAD.keys() - {"also"} <= head.keys():
        raise ScenarioError(f"{where}: a scenario is a head with {', '.join(HEAD)}, and steps below it")
    replicas, nodes = map(int, head["fleet"].split("x"))
    also = frozenset(head["also"].split(", ")) if "also" in head else frozenset[str]()
    return Scenario(name, head["attacks"], also, head["seen"], replicas, nodes, tuple(steps))


def _step(place: str, line: str, fleet: str, since_ms: int) -> Step:
    found = LINE.fullmatch(line)
    if found is None:
        raise ScenarioError(f"{place}: {line!r} is no step. Steps are: {LINE.pattern}")
    step = Step(int(found[1]), found[2])
    if step.at_ms < since_ms:
        raise ScenarioError(f"{place}: {step.at_ms} ms comes after {since_ms} ms")
    replicas, nodes = map(int, fleet.split("x"))
    agents = [(int(replica), int(node)) for replica, node in AGENT.findall(step.text)]
    agents += [(int(replica), 0) for replica in REPLICA.findall(step.text)]
    if any(replica >= replicas or node >= nodes for replica, node in agents):
        raise ScenarioError(f"{place}: {step.text!r} names a place outside of the fleet {fleet}, counted from 0")
    return step


class StageEngine(Engine):
    """An engine that misbehaves on cue: a call `fails`, `hangs` or `fakes` (reports success, and does nothing)."""

    cues: dict[str, str]

    def cue(self, how: str, word: str | None) -> None:
        """From now on; `heals` ends all."""
        if how == "heals":
            self.cues = {}
        else:
            self.cues = {**self.cues, word or "all": how}

    def begin(self, call: Call, call_id: int, known: bool = True) -> tuple[Attempt, int]:
        attempt, _ = super().begin(call, call_id, known)
        word = str(call.__struct_config__.tag)
        how = self.cues.get(word) or self.cues.get("all")
        if how == "fails":
            attempt.result = Fault("engine_error", "it went wrong on cue.")
        elif how == "fakes":
            attempt.applied = True
            attempt.result, self.idled = Returned(), True
        return attempt, FOREVER_MS if how == "hangs" else 20

    def _tear(self) -> None:
        """A load that fails on cue leaves what was there: the engine refused it."""


def version_of(weights: str) -> int:
    """Return the version of the weights that an engine really holds; 0 as launched."""
    found = re.fullmatch(r"v(\d+)", weights)
    return int(found[1]) if found else 0


def torn(engines: list[StageEngine]) -> bool:
    """Whether two replicas generate on different weights."""
    return len({engine.weights for engine in engines if engine.ready and engine.generating}) > 1
