"""What an engine counts about itself, read from the text of its `/metrics` (Prometheus). Pure."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class CounterNames(NamedTuple):
    """Metrics of one kind of engine.

    Attributes:
        running: Requests that are being generated.
        generated: Counts that grow while it generates.
    """

    running: str
    generated: tuple[str, ...]


class Counters(NamedTuple):
    """Requests that are running, and a count that grows while they are generated; None for what is not there."""

    running: int | None = None
    generated: int | None = None


def read_counters(text: str, names: CounterNames) -> Counters:
    """Return the counters, each summed over its labels: over ranks and models."""
    running, generated = _sum(text, (names.running,)), _sum(text, names.generated)
    return Counters(running, generated) if running is not None and generated is not None else Counters()


def _sum(text: str, names: Iterable[str]) -> int | None:
    samples = [
        float(value)
        for name in names
        for value in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? ([0-9.e+]+)$", text, re.MULTILINE)
    ]
    return int(sum(samples)) if samples else None
