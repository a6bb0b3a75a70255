"""Families of metrics from a table, and a port that serves them to Prometheus. Needs the extra `metrics`."""

import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.errors import ConfigError
from schemas.logs import RateLimit, logger_of
from schemas.transport.forks import listening

logger = logger_of("metrics")
logger.addFilter(RateLimit())

Table = Mapping[str, tuple[str, tuple[str, ...]]]
"""By name: help and labels. A counter ends in `_total`, all others are gauges."""
Sample = tuple[str, tuple[str, ...], float]
"""Name, values of the labels, value."""
LOOPBACK: Final = "127.0.0.1"
CONNECTIONS_MAX: Final = 16
"""Connections of a port at once, each with a thread. A further one takes the place of the oldest."""
CONNECTION_S: Final = 10.0
"""Time for a connection, from its first byte to its last."""


class TableCollector(Collector, ABC):
    """Families that are read at each scrape, and others that were counted before. May be scraped from any thread."""

    def __init__(self, table: Table, counted: Iterable[MetricWrapperBase]) -> None:
        self._table, self._counted = table, tuple(counted)

    @abstractmethod
    def read(self) -> Iterator[Sample]:
        """Yield what is so at this moment."""

    def describe(self) -> Iterable[Metric]:
        """Return all families, without samples."""
        return [*self._families().values(), *(family for metric in self._counted for family in metric.describe())]

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        for name, labels, value in self.read():
            families[name].add_metric(labels, float(value))
        yield from families.values()
        for family in (family for metric in self._counted for family in metric.collect()):
            # `_created` would double the series, and tells Prometheus nothing that it uses.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    def _families(self) -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
        return {
            name: (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, text, labels=labels)
            for name, (text, labels) in self._table.items()
        }


def serve_metrics(
    collector: Collector, address: str, ready: Callable[[], bool] | None = None
) -> tuple[str, Callable[[], object]]:
    """Serve a collector over HTTP, in a thread that ends with the process. Raises ConfigError.

    Args:
        collector: Of the metrics.
        address: `PORT`, for this machine alone, or `HOST:PORT`. Port 0 lets the system choose.
        ready: What `GET /ready` answers, by its status: 200 or 503. Called in another thread; None for no such path.

    Returns:
        Where it is served, and what ends it.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or LOOPBACK
    if not (port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"metrics at {address!r}: expected PORT or HOST:PORT, such as 9401 or 0.0.0.0:9401.")
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server = MetricsServer(host, int(port), registry, ready)
    except OSError as error:
        raise ConfigError(f"metrics can't be served at {host}:{port}: {error.strerror or error}.") from None
    listening.add(server.server_port)
    threading.Thread(target=server.serve_forever, name="rolloutctl-metrics", daemon=True).start()

    def end() -> None:
        server.shutdown()
        server.server_close()
        listening.discard(server.server_port)

    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{server.server_port}/metrics", end


class MetricsServer(ThreadingHTTPServer):
    """Serves a registry; bounded in connections and in their time, since it may be open to other machines."""

    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry, ready: Callable[[], bool] | None) -> None:
        self.ready = ready
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._began_s: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler.factory(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._began_s) >= CONNECTIONS_MAX:
            self._cut_off(next(iter(self._began_s)))
        self._began_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._began_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off what is too slow: called twice a second."""
        before = time.monotonic() - CONNECTION_S
        for request in [request for request, began_s in [*self._began_s.items()] if began_s < before]:
            self._cut_off(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what failed, unless it is the connection."""
        if not isinstance(error := sys.exception(), OSError):
            logger.error("a scrape failed: %r", error)

    def _cut_off(self, request: socket.socket) -> None:
        self._began_s.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Handler(MetricsHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, MetricsServer)
        if self.path != "/ready" or self.server.ready is None:
            super().do_GET()
            return
        self.send_response(200 if self.server.ready() else 503)
        self.end_headers()
