"""Families of metrics from a table, and a port that serves them to Prometheus. Needs the extra `metrics`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.errors import ConfigError

Table = Mapping[str, tuple[str, tuple[str, ...]]]
"""By name: help and labels. A counter ends in `_total`, all others are gauges."""
Sample = tuple[str, tuple[str, ...], float]
"""Name, values of the labels, value."""
LOOPBACK: Final = "127.0.0.1"


def families_of(table: Table) -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    """Return an empty family for each name of a table."""
    return {name: _family(name, text, labels) for name, (text, labels) in table.items()}


def _family(name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily | CounterMetricFamily:
    if name.endswith("_total"):
        return CounterMetricFamily(name, text, labels=labels)
    return GaugeMetricFamily(name, text, labels=labels)


def filled(table: Table, samples: Iterable[Sample]) -> Iterable[Metric]:
    """Return the families of a table with these samples."""
    families = families_of(table)
    for name, labels, value in samples:
        families[name].add_metric(labels, float(value))
    return families.values()


def without_created(families: Iterable[Metric]) -> Iterator[Metric]:
    """Pass families on without `_created`, which would double the series and tells Prometheus nothing that it uses."""
    for family in families:
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        yield family


def serve_metrics(collector: Collector, address: str) -> tuple[str, Callable[[], object]]:
    """Serve a collector over HTTP, in a thread that ends with the process.

    Args:
        address: `PORT`, for this machine alone, or `HOST:PORT`. Port 0 lets the system choose.

    Returns:
        Where it is served, and what ends it.

    Raises:
        ConfigError: It is not an address, or can't be bound.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or LOOPBACK
    if not (port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"metrics at {address!r}: expected PORT or HOST:PORT, such as 9401 or 0.0.0.0:9401.")
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, _ = start_http_server(int(port), host, registry)
    except OSError as error:
        raise ConfigError(f"metrics can't be served at {host}:{port}: {error.strerror or error}.") from None

    def end() -> None:
        server.shutdown()
        server.server_close()

    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{server.server_port}/metrics", end
