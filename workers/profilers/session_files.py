"""Where a session of a training rank writes, and how its files are named."""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

from msgspec import Struct

from schemas.identity import Identity
from schemas.outcomes import Trace
from workers.traces.node import describe_trace

WHOLE: Final = "e2e"
"""Stands for the stage in the name of a trace from start to stop."""
STAGE_CHARS_MAX: Final = 100
"""Of a stage in a file name, which has 255 bytes at most."""
_UNSAFE: Final = re.compile(r"[^0-9A-Za-z.=+_-]+")


class SessionFiles(Struct, frozen=True, kw_only=True):
    """The files of one session.

    Attributes:
        root: Of all traces.
        directory: Of this session, below the root. In verl's layouts all ranks and steps share it.
        identity: The training rank.
        world_size: Of its role.
        step: Global training step.
        verl: Files are named as verl names them.
    """

    root: Path
    directory: Path
    identity: Identity
    world_size: int
    step: int
    verl: bool

    @property
    def rank(self) -> int:
        return self.identity.replica

    def reserve(self, stage: str, mini_batches: tuple[int, int] | None = None) -> Path:
        """Create an empty file under a name that was free, so that nobody else takes the name. Raises OSError.

        Args:
            stage: The stage that the trace holds, or `WHOLE`.
            mini_batches: First and last mini-batch that it holds.
        """
        stage = _UNSAFE.sub("-", stage).strip("-.")[:STAGE_CHARS_MAX] or "stage"
        name = self._verl_name if self.verl else self._name
        return _create_first_free(
            (self.directory / name(stage, mini_batches, attempt) for attempt in itertools.count(1)), _create_file
        )

    def session_dir(self) -> Path:
        """Return a directory of this session alone, for tools that name their files themselves. Raises OSError."""
        if not self.verl:
            return self.directory
        name = f"{self.identity.role}_step{self.step}_rank{self.rank}-of-{self.world_size}_pid{os.getpid()}"
        later = (self.directory / f"{name}-{attempt}" for attempt in itertools.count(2))
        return _create_first_free(itertools.chain([self.directory / name], later), Path.mkdir)

    def describe(self, files: list[Path]) -> tuple[Trace, ...]:
        """Describe files for an outcome, in the order of their names. Raises OSError."""
        return tuple(describe_trace(file, self.root, self.rank) for file in sorted(files))

    def _name(self, stage: str, mini_batches: tuple[int, int] | None, attempt: int) -> str:
        window = f".mb{mini_batches[0]}-{mini_batches[1]}" if mini_batches is not None else ""
        repeated = f".{attempt}" if attempt > 1 else ""
        return f"{stage}{repeated}.rank{self.rank}{window}.pt.trace.json.gz"

    def _verl_name(self, stage: str, mini_batches: tuple[int, int] | None, attempt: int) -> str:
        window = ""
        if mini_batches is not None:
            first, last = mini_batches
            window = f"_mb{first}" if first == last else f"_mb{first}-{last}"
        now = datetime.now().astimezone().strftime("%Y%m%d%H%M%S%f")[:-3]
        repeated = f"-{attempt}" if attempt > 1 else ""
        process = f"rank{self.rank}-of-{self.world_size}_pid{os.getpid()}"
        return f"{self.identity.role}_{stage}_step{self.step}_{process}_{now}{repeated}{window}.json.gz"


def _create_first_free(paths: Iterator[Path], create: Callable[[Path], None]) -> Path:
    while True:
        path = next(paths)
        try:
            create(path)
        except FileExistsError:
            continue
        return path


def _create_file(path: Path) -> None:
    path.open("xb").close()
