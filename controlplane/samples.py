"""Counts what a trainer has seen of the versions of its samples, until the bus records it."""

import threading
from typing import Final

from controlplane.machine.events import Proof, SampleCount
from controlplane.machine.provenance import Provenance, TokenSpan

KINDS_MAX: Final = 256
"""Kinds of samples in one record. Of others the versions are not told apart; beyond twice as many, nor how stale."""
_Kind = tuple[str, int | None, int | None, Proof, bool]


class SampleCounts:
    """Sequences and tokens by version. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[_Kind, tuple[int, int]] = {}

    def add(self, provenance: Provenance, *, accepted: bool) -> None:
        """Count a sequence, as one of the version that made its first token."""
        with self._lock:
            for number, span in enumerate(provenance.spans):
                kind = self._kind(provenance.adapter, span, accepted)
                sequences, tokens = self._counts.get(kind, (0, 0))
                self._counts[kind] = (sequences + (number == 0), tokens + span.end - span.begin)

    def _kind(self, adapter: str, span: TokenSpan, accepted: bool) -> _Kind:
        kind: _Kind = (adapter, span.version, span.staleness, span.proof, accepted)
        for room, other in ((KINDS_MAX, ("", None, *kind[2:])), (2 * KINDS_MAX, ("", None, None, *kind[3:]))):
            kind = kind if kind in self._counts or len(self._counts) < room else other
        return kind

    def take(self) -> tuple[SampleCount, ...]:
        """Return the counts, and begin from nothing again."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return tuple(
            SampleCount(
                adapter=adapter,
                version=version,
                staleness=staleness,
                proof=proof,
                accepted=accepted,
                sequences=sequences,
                tokens=tokens,
            )
            for (adapter, version, staleness, proof, accepted), (sequences, tokens) in counts.items()
        )
