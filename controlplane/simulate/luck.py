"""All that is drawn comes from the seed, in a sequence of its own for each place and kind of call, so that two policies
meet the same engines.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import cycle
from math import exp, log
from random import Random
from typing import Final

from msgspec.structs import asdict

from controlplane.simulate.fleet_model import Chance, Duration, FleetModel, Spread
from schemas import events
from workers.machine.state import call_name

Outcome = tuple[events.Returned | events.Fault, int]
"""How a call ends, and how long it takes (µs)."""
RETURNED: Final = events.Returned()
NO_ANSWER: Final[Outcome] = (events.Fault("engine_error", "the engine does not answer."), 1000)
SECOND: Final = 1_000_000
"""Of the clock, which counts in µs."""
_WAITS: Final = "pause that waits"
P99: Final = 2.3263
"""Of the standard normal distribution."""


class Luck:
    """What is drawn in one run. A place is an agent's name, which begins with its replica; empty is the trainer."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._randoms: dict[tuple[str, str], Random] = {}
        self._values: dict[tuple[str, str], Iterator[float]] = {}

    def of(self, place: str, what: str) -> Random:
        if (place, what) not in self._randoms:
            self._randoms[place, what] = Random(f"{self._seed} {place} {what}")
        return self._randoms[place, what]

    def us(self, duration: Duration, place: str, what: str) -> int:
        """Draw how long something takes, in µs."""
        return round(self._draw(duration, place, what) * SECOND)

    def happens(self, chance: Chance, place: str, what: str) -> bool:
        share = self._draw(chance, place, what)
        return share > 0 and self.of(place, f"{what} happens").random() < share

    def _draw(self, values: Duration, place: str, what: str) -> float:
        if isinstance(values, float | int):
            return values
        if (place, what) not in self._values:
            self._values[place, what] = _drawn(values, self.of(place, what), int(place.partition(".")[0] or 0))
        return next(self._values[place, what])


def _drawn(values: Spread | tuple[float | tuple[float, ...], ...], rng: Random, replica: int) -> Iterator[float]:
    if isinstance(values, Spread):
        sigma = log(values.p99 / values.median) / P99
        while True:
            yield values.median * exp(rng.gauss(0, sigma))
    if series := [each for each in values if isinstance(each, tuple)]:
        yield from cycle(series[replica % len(series)])
    while True:
        yield rng.choice(values)  # type: ignore[misc]


class DrawnCalls:
    """How the calls into one engine end, and how long they take."""

    def __init__(self, model: FleetModel, luck: Luck, place: str) -> None:
        self._requests, self._luck, self._place = model.requests, luck, place
        self._ahead: defaultdict[str, deque[Outcome]] = defaultdict(deque)  # of the next calls of a kind
        self._fixed: dict[str, Outcome] = {}  # of calls of which nothing is drawn
        self._drawn: dict[str, tuple[Duration, Duration, Chance, Chance]] = {}
        times, waits = asdict(model.calls), "pause" if model.policy.in_flight == "wait" else ""
        read, reads = times.pop("read"), "check_source" if model.policy.staging else "load"
        for name, took in times.items():
            chances = getattr(model.failures.refused, name), getattr(model.failures.calls, name)
            more = read if name == reads else 0.0
            self._drawn[name] = took, more, *chances
            numbers = isinstance(took, float | int) and isinstance(more, float | int)
            if numbers and chances == (0, 0) and name != waits:
                self._fixed[name] = RETURNED, round(took * SECOND) + round(more * SECOND)

    def draw(self, call: events.Call) -> Outcome:
        name, luck, place = call_name(call), self._luck, self._place
        if (fixed := self._fixed.get(name)) is not None:
            return fixed
        kind = _kind(call)
        if ahead := self._ahead[kind]:
            return ahead.popleft()
        took, more, refused, fails = self._drawn.get(name, (0.0, 0.0, 0, 0))
        took_us = luck.us(took, place, kind)
        if luck.happens(refused, place, f"{kind} refused"):
            checks = isinstance(call, events.CheckSource | events.CheckAdapter)
            return events.Fault("source_refused" if checks else "refused", "it is refused, as modelled."), took_us
        if luck.happens(fails, place, f"{kind} fails"):
            return events.Fault("engine_error", "it fails, as modelled."), took_us
        if kind == _WAITS:
            took_us += luck.us(self._requests, place, "requests")
        return RETURNED, took_us + luck.us(more, place, "read")

    def put_back(self, call: events.Call, outcome: Outcome) -> None:
        """Have the next call of this kind end as was drawn for it."""
        if call_name(call) not in self._fixed:
            self._ahead[_kind(call)].appendleft(outcome)


def _kind(call: events.Call) -> str:
    """One that waits for requests is another kind of pause."""
    return _WAITS if isinstance(call, events.Pause) and call.mode == "wait" else call_name(call)
