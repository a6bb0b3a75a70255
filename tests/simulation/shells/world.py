"""Worlds that run the real shells of agents and bus, over simulated sockets, engines and disks, on a virtual clock.

The weather, the trainer, the judges and the endings are those of the worlds of `tests.simulation.cluster`, in which the
shells are simulated as well. There a step costs a tenth, and here the shells themselves can be wrong.

    python -m tests.simulation.shells.world 12          # run one seed and print its story
    python -m tests.simulation.shells.world 0 300       # run many, and print those that break a promise
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NoReturn, cast
from unittest.mock import patch

from controlplane.analysis.invariants import Violation, verify
from controlplane.record.log import RunLog
from schemas import events
from schemas.transport.wakeup import callback_context
from schemas.wire import encode
from tests.simulation.adapters import GRACE_MS
from tests.simulation.bus import Bus
from tests.simulation.cluster import World, main
from tests.simulation.promises import Broken, Promises
from tests.simulation.shells import clock
from tests.simulation.shells.agents import RealProcess, RealSlot
from tests.simulation.shells.bus import RealBus, RealTrainer
from tests.simulation.shells.network import Network
from tests.simulation.slot import Slot


@dataclass
class Rough:
    """What backends do that they should not. Chances are per call or observation.

    Attributes:
        slow: An observation takes long.
        stubborn: Then it can't be cancelled.
        stray: A task of the backend is cancelled, or an error comes out of it that is none of ours.
        murder: The backend cancels the task in which it was called.
    """

    slow: float = 0.0
    stubborn: float = 0.0
    stray: float = 0.0
    murder: float = 0.0

    @classmethod
    def draw(cls, rng: Random) -> Rough:
        """Draw what the backends of a world do."""
        return cls(
            slow=rng.choice((0.0, 0.05, 0.1)),
            stubborn=rng.choice((0.0, 0.5)),
            stray=rng.choice((0.0, 0.05, 0.3)),
            murder=rng.choice((0.0, 0.0, 0.0, 0.02)),
        )


class ShellPromises(Promises):
    """All checks of the simulation. A check that fails within a shell ends the world all the same."""

    world: ShellWorld

    def broken(self, promise: str, text: str) -> NoReturn:
        """Note the first broken promise, and raise."""
        try:
            super().broken(promise, text)
        except Broken as broken:
            self.world.fail(broken)
            raise


class ShellWorld(World):
    """A cluster of real shells."""

    new_slot: Callable[..., Slot] = RealSlot
    violations: list[Violation]
    new_bus = cast("Callable[..., Bus]", RealBus)

    def __init__(self, seed: int, loop: clock.VirtualLoop, folder: Path, story: list[str] | None = None) -> None:
        self.loop, self.folder = loop, folder
        self._failure: Exception | None = None
        self._failed = loop.create_future()
        self._tasks: list[asyncio.Task[Any]] = []
        self._log_lives, self._over = 0, False
        self.network = Network(Random(f"network {seed}"), self.say)
        super().__init__(seed, story)
        self.promises = ShellPromises(self)
        self.trainer = RealTrainer(self)
        self.rough = Rough.draw(Random(f"rough {seed}"))
        self.weather.tails = 0.0  # no power cut: a killed process loses nothing that it has written
        self.weather.assigned = 0  # what asks for a place is no shell of these
        if self.weather.aim == "lost tails":
            self.weather.aim = "none"
        self.one_port = self.weather.one_port

    # --- the clock ----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        """The moment, in ms."""
        return self.moment_ms(self.loop.time())

    @now.setter
    def now(self, _: int) -> None:
        """The loop has the clock."""

    def moment_ms(self, at_s: float) -> int:
        """Return the world's time of a moment of the loop."""
        return int((at_s - clock.BEGIN_S) * 1000 + 1e-6)

    def at(self, delay_ms: int, act: Callable[..., None], *args: Any) -> None:
        """Do something later."""
        self.loop.call_later(delay_ms / 1000, self._act, act, *args, context=callback_context())

    def _act(self, act: Callable[..., None], *args: Any) -> None:
        if not self._over:
            self.guarded(act, *args)

    def run(self, until_ms: int) -> None:
        """Let time pass."""
        left_s = (until_ms - self.now) / 1000
        self.loop.run_until_complete(asyncio.wait([self._failed], timeout=max(0.0, left_s)))
        if self._failure is not None:
            raise self._failure

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task of a shell. One that raises breaks the world."""
        self._tasks.append(self.loop.create_task(self._watched(work)))

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.fail(error)

    def guarded(self, act: Callable[..., None], *args: Any) -> None:
        """Do something; what it raises ends the world."""
        try:
            act(*args)
        except Exception as error:
            self.fail(error)

    def inside(self, act: Callable[[], None]) -> None:
        """Do something within the loop, at once."""

        async def do() -> None:
            act()

        if self.loop.is_running():
            act()
        else:
            self.loop.run_until_complete(do())

    def fail(self, error: Exception) -> None:
        """End the world: a promise is broken. The first counts."""
        if self._failure is None:
            self.say(f"broken: {error!r}")
            self._failure = error
            if not self._failed.done():
                self._failed.set_result(None)

    # --- luck ---------------------------------------------------------------------------------------------------------

    def strikes(self, whom: str) -> bool:
        """Processes die between two callbacks of the loop, as `misfortune` wants it."""
        return False

    def hold(self, peer: str) -> None:
        """Note that the bus gave a place to this peer."""
        for slot in self.slots:
            if slot.process is not None and slot.process.incarnation == peer.split("/")[1]:
                self.by_name[slot.name] = slot

    def misfortune(self) -> None:
        """Once a second: what breaks by itself."""
        self.network.late_ms, self.network.drops = self.weather.late_ms, self.weather.drops / 4
        super().misfortune()
        for slot in self.slots:
            if slot.process is not None:
                cast("RealProcess", slot.process).judge_lease()

    def calm(self) -> None:
        """End all faults."""
        super().calm()
        self.rough = Rough()
        self.network.late_ms, self.network.drops = 5, 0.0

    def replace_trainer(self) -> None:
        """The trainer dies or closes, and another takes over."""
        bus, self.bus = self.bus, None
        if bus is not None:
            (bus.close if self.rng.random() < 0.3 else bus.die)()
            self.at(self.rng.choice((100, 1000, 5000, 20_000)), self.open_bus)

    # --- the log ------------------------------------------------------------------------------------------------------

    @property
    def log_path(self) -> Path:
        """File of the run's log, for the next life of the bus."""
        return self.folder / f"log {self._log_lives}" / "run.db"

    def survive(self) -> None:
        """Keep what the bus that was killed had written, where what is left of it can't reach it."""
        before = self.log_path.parent
        self._log_lives += 1
        if before.exists():
            shutil.copytree(before, self.log_path.parent)

    def read_log(self, path: Path) -> list[tuple[bytes, bytes]]:
        """Return the coordinator's decisions."""
        entries = (entry for entry in RunLog.read(path) if not entry.agent)
        return [(encode(entry.typed_event()), encode(entry.typed_effects())) for entry in entries]

    def verified(self) -> list[Violation]:
        """Return what `log verify` finds."""
        return list(verify(RunLog.walk(self.log_path)))

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End all processes, and wait for their tasks."""
        self._over = True
        for slot in list(self.slots):
            if slot.process is not None:
                slot.process.stop()
        for bus in self.buses:
            bus.close()
        _, left = self.loop.run_until_complete(asyncio.wait(self._tasks, timeout=120)) if self._tasks else ((), ())
        if left and self._failure is None:
            self.fail(Broken("S1 no silent end", f"{len(left)} shells do not end: {left}"))
        others = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
        for task in others:
            task.cancel()
        if others:
            self.loop.run_until_complete(asyncio.wait(others, timeout=1))
        if self._failure is not None:
            raise self._failure


class _Errors(logging.Handler):
    """What the shells log: an error breaks the world, since nothing here is one for which a person has to act."""

    def __init__(self, world: ShellWorld) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        self._world.say(f"  {record.levelname} {record.getMessage()}")
        if record.levelno >= logging.ERROR:
            self._world.fail(Broken("S3 nothing swallowed", record.getMessage()))


def simulate(seed: int, story: list[str] | None = None) -> ShellWorld:
    """Play one run. Raises Broken if a promise does not hold."""
    logger = logging.getLogger("rolloutctl")
    with tempfile.TemporaryDirectory() as folder, clock.virtual(seed) as loop:
        world = ShellWorld(seed, loop, Path(folder), story)
        handler, propagates = _Errors(world), logger.propagate
        logger.addHandler(handler)
        logger.propagate = False
        try:
            settings = partial(events.MachineSettings, adapter_grace_ms=GRACE_MS)  # which no option sets
            with world.network.in_place(), patch.object(events, "MachineSettings", settings):
                world.guarded(world.play)
                world.end()
                world.violations = world.verified()
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagates
    return world


if __name__ == "__main__":
    raise SystemExit(main(simulate))
