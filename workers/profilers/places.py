"""Where a session of a training rank writes, and what its files are called."""

import os
import re
from datetime import datetime
from pathlib import Path
from typing import Final

from msgspec import Struct

from schemas.identity import Identity
from schemas.outcomes import Trace
from workers.traces.node import describe_trace

WHOLE: Final = "e2e"
"""In the place of a stage: a trace from start to stop."""
LONGEST: Final = 100
"""Letters of a stage in a name; a name has 255 at most."""
_NAMEABLE: Final = re.compile(r"[^0-9A-Za-z.=+_-]+")


class Place(Struct, frozen=True, kw_only=True):
    """root: of the traces.   directory: of this session, below it.   verl: files are named as verl names them."""

    root: Path
    directory: Path
    identity: Identity
    world_size: int
    step: int
    verl: bool

    @property
    def rank(self) -> int:
        return self.identity.replica

    def reserve(self, scope: str, mini_batches: tuple[int, int] | None = None) -> Path:
        """A file that was not there before, made empty, so that nobody else takes its name. Raises OSError.

        scope: the stage, or `WHOLE`.   mini_batches: first and last that it holds.
        """
        scope = _NAMEABLE.sub("-", scope).strip("-.")[:LONGEST] or "stage"
        again = 1
        while True:
            file = self.directory / (self._verl if self.verl else self._ours)(scope, mini_batches, again)
            try:
                file.open("xb").close()
            except FileExistsError:
                again += 1
                continue
            return file

    def apart(self) -> Path:
        """A directory of this session alone, for tools that name their files themselves. Raises OSError.

        In verl's layouts all ranks and steps write to the root.
        """
        if not self.verl:
            return self.directory
        name = f"{self.identity.role}_step{self.step}_rank{self.rank}-of-{self.world_size}_pid{os.getpid()}"
        again = 1
        while True:
            folder = self.directory / (f"{name}-{again}" if again > 1 else name)
            try:
                folder.mkdir()
            except FileExistsError:
                again += 1
                continue
            return folder

    def describe(self, files: list[Path]) -> tuple[Trace, ...]:
        """As outcomes tell them, by name. Raises OSError."""
        return tuple(describe_trace(one, self.root, self.rank) for one in sorted(files))

    def _ours(self, scope: str, mini_batches: tuple[int, int] | None, again: int) -> str:
        window = f".mb{mini_batches[0]}-{mini_batches[1]}" if mini_batches is not None else ""
        repeated = f".{again}" if again > 1 else ""
        return f"{scope}{repeated}.rank{self.rank}{window}.pt.trace.json.gz"

    def _verl(self, scope: str, mini_batches: tuple[int, int] | None, again: int) -> str:
        window = ""
        if mini_batches is not None:
            first, last = mini_batches
            window = f"_mb{first}" if first == last else f"_mb{first}-{last}"
        now = datetime.now().astimezone().strftime("%Y%m%d%H%M%S%f")[:-3]
        repeated = f"-{again}" if again > 1 else ""
        where = f"rank{self.rank}-of-{self.world_size}_pid{os.getpid()}"
        return f"{self.identity.role}_{scope}_step{self.step}_{where}_{now}{repeated}{window}.json.gz"
