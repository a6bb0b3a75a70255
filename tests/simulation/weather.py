"""How rough a run is, and what its misfortune is aimed at.

Noise alone seldom reaches the states in which a guard matters. So most runs have an aim as well: one moment at which
things go wrong, again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from controlplane.simulate.modelled_engine import KINDS

ENGINES: Final = KINDS
"""Kinds of engines that are drawn."""
LOSES: Final = (0.0, 0.0, 0.05, 0.3)
"""Shares of the calls whose answers are lost, of which one is drawn."""

PHASES: Final = ("prepare", "load", "commit", "abort")
CALLS: Final = ("pause", "resume", "sleep", "wake", "load", "start_profile", "stop_profile", "flush")
AIMS: Final = (
    *((f"trainer dies at {phase}", 1) for phase in PHASES),
    *((f"agent dies at {phase}", 1) for phase in PHASES),
    *((f"engine dies at {phase}", 1) for phase in PHASES),
    *((f"agent dies in {call}", 1) for call in CALLS),
    ("failing loads", 4),
    ("failing pauses", 2),
    ("lost tails", 4),
    ("quiet", 3),
    ("retries", 4),
    ("reshaped", 3),
    ("none", 10),
)
"""What misfortune is aimed at, each with its weight."""


@dataclass
class Weather:
    """How rough a run is. Chances are per message, per effect or per second; all are 0 once it is calm.

    Attributes:
        aim: What misfortune is aimed at.
        pushes: Share of syncs whose weights the trainer pushes.
        broadcasts: Share of syncs whose weights the trainer broadcasts.
        syncs: Share of syncs among what the trainer asks for.
        hasty: Chance that an agent says hello a second time, before the first was answered.
        one_port: The publish port is the same in each life of the bus, so a subscription outlives it.
        hangs: Chance that a disk takes seconds for a commit, the log's or an agent's.
        rotations: Chance that an agent is given a new key.
        doubles: Chance that a second process claims a place.
        reshapes: Chance that a replica is deployed again with another mode or size.
        blind: Chance that an observation fails, by an exception, a time-out or a stray cancellation.
        deaf: Chance that the publish port is out of an agent's reach for longer than its lease, and the control port
            is not.
        forgets: A journal may be lost with a session, after a load that was cut off, and beside an engine that is
            paused with a cache of other weights, or that does not say whether it is paused.
        idles: Chance that an engine carries out nothing of what it is asked for by a command, and reports success.
        successors: Chance that an agent is cut off for good and lives on, while another takes over its engine.
        places: How many adapters an engine holds at most; None for no limit.
        drains: Chance that a replica leaves the fleet in good order. Its agents may take up their places again.
        assigned: How many agents come that are given no index.
    """

    drops: float = 0.0
    repeats: float = 0.0
    late_ms: int = 5
    agent_dies: float = 0.0
    trainer_dies: float = 0.0
    cuts: float = 0.0
    partitions: float = 0.0
    half_open: float = 0.0
    engine_dies: float = 0.0
    exiles: float = 0.0
    tails: float = 0.0
    absences: float = 0.0
    journals: float = 0.0
    retires: float = 0.0
    releases: float = 0.0
    pushes: float = 0.0
    broadcasts: float = 0.0
    syncs: float = 0.2
    hasty: float = 0.0
    one_port: bool = False
    hangs: float = 0.0
    rotations: float = 0.0
    blind: float = 0.0
    doubles: float = 0.0
    reshapes: float = 0.0
    deaf: float = 0.0
    forgets: bool = False
    successors: float = 0.0
    places: int | None = None
    drains: float = 0.0
    idles: float = 0.0
    assigned: int = 0
    aim: str = "none"

    @classmethod
    def of(cls, seed: int) -> Weather:
        """Return the weather of a world."""
        weather, full = cls.draw(Random(f"weather {seed}")), Random(f"full {seed}")
        if seed >= 120 and full.random() < 0.3:  # most ablations are noticed in earlier worlds
            weather.fill(full)
        elif seed >= 120 and full.random() < 0.3:
            others = weather.doubles or weather.reshapes or weather.successors or weather.tails
            weather.assigned = 0 if others else full.choice((1, 3, 4))
        return weather

    @classmethod
    def draw(cls, rng: Random) -> Weather:
        """Draw the noise, and the aim."""
        aims, weights = zip(*AIMS, strict=True)
        aim = rng.choices(aims, weights)[0]
        weather = cls(
            drops=rng.choice((0.0, 0.1, 0.4)),
            repeats=rng.choice((0.0, 0.2)),
            late_ms=rng.choice((5, 50, 1500)),
            agent_dies=rng.choice((0.0, 0.0, 0.005, 0.03)),
            trainer_dies=rng.choice((0.0, 0.0, 0.003, 0.02)),
            cuts=rng.choice((0.0, 0.0, 0.1)),
            partitions=rng.choice((0.0, 0.0, 0.05)),
            half_open=rng.choice((0.0, 0.0, 0.05)),
            engine_dies=rng.choice((0.0, 0.0, 0.0, 0.02)),
            exiles=rng.choice((0.0, 0.0, 0.0, 0.02)),
            tails=rng.choice((0.0, 0.0, 0.1)),
            absences=rng.choice((0.0, 0.0, 0.1)),
            journals=rng.choice((0.0, 0.0, 1.0)),
            retires=rng.choice((0.0, 0.0, 0.15)),
            releases=rng.choice((0.0, 0.0, 0.0, 0.3)),
            pushes=rng.choice((0.0, 0.0, 0.5)),
            syncs=rng.choice((0.2, 0.2, 0.6)),
            hasty=rng.choice((0.0, 0.3)),
            one_port=rng.random() < 0.5,
            hangs=rng.choice((0.0, 0.0, 0.0, 0.02)),
            aim=aim,
            rotations=rng.choice((0.0, 0.0, 0.0, 0.1)),
            blind=rng.choice((0.0, 0.0, 0.0, 0.1)),
            doubles=rng.choice((0.0, 0.0, 0.0, 0.03)),
            reshapes=rng.choice((0.0, 0.0, 0.0, 0.04)),
        )
        weather = weather if rng.random() < 0.5 else weather.aimed()
        weather.deaf = rng.choice((0.0, 0.0, 0.0, 0.04))
        weather.forgets = rng.random() < 0.5
        weather.successors = rng.choice((0.0, 0.0, 0.0, 0.0, 0.06))
        weather.broadcasts = rng.choice((0.0, 0.0, 0.0, 0.0, 0.7))
        weather.drains = Random(f"drains {rng.random()}").choice((0.0, 0.0, 0.0, 0.0, 0.1))
        if weather.broadcasts and rng.random() < 0.7:
            weather.syncs = 0.6
            weather.hush()
        weather.idles = rng.choice((0.0, 0.0, 0.0, 0.05))
        return weather

    def aimed(self) -> Weather:
        """Leave out most of the noise, so that a run gets as far as its aim, and often."""
        if self.aim != "none":
            self.hush()
        if self.aim.endswith(PHASES) or self.aim in ("failing loads", "failing pauses", "retries"):
            self.syncs = 0.6
        if self.aim == "lost tails":
            self.tails = 0.2
        if self.aim == "quiet":
            self.exiles = 0.1
        return self

    def fill(self, rng: Random) -> None:
        """Give engines few places for adapters; mostly leave out the noise, so that they are full."""
        self.places = rng.choice((3, 4))
        if rng.random() < 0.7:
            self.hush()

    def hush(self) -> None:
        """Leave out most of the noise."""
        for noise in ("drops", "agent_dies", "trainer_dies", "partitions", "half_open", "engine_dies", "absences"):
            setattr(self, noise, 0.0)

    def hits(self, whom: str, what: str) -> bool:
        """Whether this is the moment that misfortune is aimed at."""
        return self.aim != "none" and self.aim == f"{whom} dies {what}"
