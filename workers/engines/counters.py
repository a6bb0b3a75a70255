"""What an engine counts about itself, read from the text of its `/metrics` (Prometheus). Pure."""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

_LORA_REQUESTS: Final = "vllm:lora_requests_info"
_LORA_NAMES: Final = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')
_UNDER_WAY: Final = ("sglang:num_running_reqs", "sglang:num_queue_reqs")


class CounterNames(NamedTuple):
    """Metrics of one kind of engine."""

    running: str
    waiting: str
    generated: tuple[str, ...]


class Counters(NamedTuple):
    """Requests that run and that wait, and a count that grows while they are generated; None for what is not there."""

    running: int | None = None
    waiting: int | None = None
    generated: int | None = None


def read_counters(text: str, names: CounterNames) -> Counters:
    """Return the counters, each summed over its labels: over ranks and models."""
    running, generated = _sum(text, (names.running,)), _sum(text, names.generated)
    known = running is not None and generated is not None
    return Counters(running, _sum(text, (names.waiting,)), generated) if known else Counters()


def adapters_in_use(text: str) -> frozenset[str] | None:
    """Return the adapters that requests of a vLLM engine run on or wait for; None if it does not count them.

    It writes one sample for each set of names that it has ever seen, with the time at which it last saw that set.
    """
    if f"# TYPE {_LORA_REQUESTS} " not in text:
        return None
    newest = max(_samples(text, _LORA_REQUESTS), key=lambda sample: sample[1], default=("", 0.0))
    return frozenset(name for names in _LORA_NAMES.findall(newest[0]) for name in names.split(",") if name)


def requests_under_way(text: str) -> int | None:
    """Return the requests of an SGLang engine, whatever they run on; None if it does not count them.

    Its scheduler counts a request once a part of it was computed, and its server until the answer begins.
    """
    scheduled = _sum(text, _UNDER_WAY)
    served = [value for labels, value in _samples(text, "sglang:http_requests_active") if 'method="POST"' in labels]
    return None if scheduled is None else scheduled + int(sum(served))


def _sum(text: str, names: Iterable[str]) -> int | None:
    samples = [value for name in names for _, value in _samples(text, name)]
    return int(sum(samples)) if samples else None


def _samples(text: str, name: str) -> list[tuple[str, float]]:
    """The labels and the value of each sample of a metric."""
    found = re.findall(rf"^{re.escape(name)}(\{{.*\}})? ([0-9.e+]+)$", text, re.MULTILINE)
    return [(labels, float(value)) for labels, value in found]
