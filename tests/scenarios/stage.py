"""Scenarios: small texts that say what happens to a fleet, and the stage on which a controller has to live through it.

    attacks I1                         the invariant that a controller of today breaks here; `preconditions` where it
                                       asks an engine for what an engine dies of
    seen ...                           where the trouble comes from, in words
    fleet 2x1                          replicas x nodes of each
    1000 trainer syncs 2               at this ms: what is asked, what goes wrong
    1000 engine 1 fails load           every load of replica 1's engine fails from now on
    6000 expect engine 0 serves 2      what must be seen then; `expect` is for our controller alone

Whatever a controller does, it does to the same engines, which die of what real ones die of.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from schemas.events import Call, Fault, Returned
from tests.simulation.engine import Attempt, Engine

FOREVER_MS = 10**9
"""How long a call takes that does not come back."""

TRAINER = (
    r"trainer (?:syncs \d+|(?:starts|stops) profile \d+|pauses|resumes|flushes|sleeps|wakes(?: kv_cache)?"
    r"|dies|returns|asks status)"
)
ENGINE = r"engine \d+ (?:fails|hangs|fakes|heals)(?: \w+)?|engine \d+ is relaunched|replica \d+ starts"
NETWORK = r"network (?:repeats|is calm)|agent \d+\.\d+ dies"
EXPECT = (
    r"expect (?:engine \d+ (?:serves \d+|is paused|profiles|does not profile)"
    r"|report \d+ (?:committed|aborted|stale)(?: without \d+)?|status told|all ended|\d+\.\d+ said \w+)"
)
LINE = re.compile(rf"(\d+) ({TRAINER}|{ENGINE}|{NETWORK}|{EXPECT})")


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
    """attacks: name of the invariant.   replicas, nodes: of the fleet.   steps: in order."""

    name: str
    attacks: str
    seen: str
    replicas: int
    nodes: int
    steps: tuple[Step, ...]


def read(path: Path) -> Scenario:
    """Raises ScenarioError."""
    return parse(path.stem, path.read_text("utf-8"), str(path.name))


def parse(name: str, text: str, where: str) -> Scenario:
    """Raises ScenarioError for a line that is none, a head that is missing, and steps that go back in time."""
    head: dict[str, str] = {}
    steps: list[Step] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        word, _, rest = line.partition(" ")
        if word in ("attacks", "seen", "fleet") and not steps:
            head[word] = f"{head[word]} {rest}" if word in head else rest
            continue
        found = LINE.fullmatch(line)
        if found is None:
            raise ScenarioError(f"{where}, line {number}: {line!r} is no step. Steps are: {LINE.pattern}")
        step = Step(int(found[1]), found[2])
        if steps and step.at_ms < steps[-1].at_ms:
            raise ScenarioError(f"{where}, line {number}: {step.at_ms} ms comes after {steps[-1].at_ms} ms")
        steps.append(step)
    if missing := {"attacks", "seen", "fleet"} - head.keys():
        raise ScenarioError(f"{where}: its head lacks {', '.join(sorted(missing))}")
    size = re.fullmatch(r"(\d)x(\d)", head["fleet"])
    if size is None:
        raise ScenarioError(f"{where}: fleet {head['fleet']!r} is not of the form 2x1, replicas x nodes")
    return Scenario(name, head["attacks"], head["seen"], int(size[1]), int(size[2]), tuple(steps))


class StageEngine(Engine):
    """An engine that misbehaves on cue. cues: by call, `fails`, `hangs` or `fakes` (says yes, and does nothing)."""

    cues: dict[str, str]

    def cue(self, how: str, word: str | None) -> None:
        """From now on; `heals` ends all."""
        if how == "heals":
            self.cues = {}
        else:
            self.cues = {**self.cues, word or "all": how}

    def begin(self, call: Call, call_id: int) -> tuple[Attempt, int]:
        attempt, _ = super().begin(call, call_id)
        word = str(call.__struct_config__.tag)
        how = self.cues.get(word) or self.cues.get("all")
        if how == "fails":
            attempt.result = Fault("engine_error", "it went wrong on cue.")
        elif how == "fakes":
            attempt.applied = True
            attempt.result = Returned()
        return attempt, FOREVER_MS if how == "hangs" else 20

    def _tear(self) -> None:
        """A load that fails on cue leaves what was there: the engine refused it."""


def version_of(weights: str) -> int:
    """The number of the weights that an engine really holds; 0 for those it was launched with."""
    found = re.fullmatch(r"v(\d+)", weights)
    return int(found[1]) if found else 0


def torn(engines: list[StageEngine]) -> bool:
    """Do two replicas generate on different weights?"""
    return len({one.weights for one in engines if one.ready and one.generating}) > 1
