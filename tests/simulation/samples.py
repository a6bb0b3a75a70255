"""Samples in the simulation: what engines say of the weights that made them, what really did, and the trainer's gate.

An engine names a label for each stretch of tokens, as the real ones do: a request that `keep` froze has several. Labels
move with the weights, but for an engine that was launched again with a label of one's choice. Answers come late.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

from controlplane.machine.fleet_view import FleetView
from controlplane.machine.provenance import Provenance, TokenSpan, accepts
from controlplane.machine.versions import label_of
from controlplane.simulate.modelled_engine import LAUNCH_LABEL
from tests.simulation.engine import LAUNCHED, weights_of

if TYPE_CHECKING:
    from tests.simulation.agent import Process
    from tests.simulation.bus import Bus
    from tests.simulation.cluster import World
    from tests.simulation.engine import Engine
    from tests.simulation.slot import Slot

PUSH: Final = "push"
"""How the labels of pushed weights begin."""
LATE_MS: Final = (1, 1, 300, 3000, 15_000)
"""How late an answer may be."""


@dataclass
class Rollout:
    """A request that runs, or has ended.

    Attributes:
        made: Its tokens: for each stretch the label that the engine had, the weights that it held, and how many.
    """

    made: list[tuple[str, str, int]] = field(default_factory=list)
    left: int = 3

    def goes_on(self, label: str, weights: str) -> None:
        """Make a token."""
        self.left -= 1
        if self.made and self.made[-1][:2] == (label, weights):
            self.made[-1] = label, weights, self.made[-1][2] + 1
        else:
            self.made.append((label, weights, 1))

    def answer(self) -> dict[str, object]:
        """What the engine says of it: it has no way to tell weights with one label apart."""
        spans, end = list[dict[str, object]](), 0
        for label, _, count in self.made:
            begin, end = end, end + count
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = end
            else:
                spans.append({"version": label, "start": begin, "end": end})
        return {"meta_info": {"weight_versions": spans}}

    def weights_in(self, span: TokenSpan) -> set[str]:
        """Which weights really made these tokens."""
        found, end = set[str](), 0
        for _, weights, count in self.made:
            begin, end = end, end + count
            if begin < span.end and end > span.begin:
                found.add(weights)
        return found


class Sampler:
    """The part of the trainer that samples: it asks engines, and judges what they answer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = Random(f"samples {world.seed}")
        self.accepted = self.refused = self.mixed = 0
        self.told: dict[Bus, set[tuple[int, str]]] = {}  # under which labels engines were launched

    def begin(self) -> None:
        """Begin to sample."""
        self.world.at(300, self.work)

    def work(self) -> None:
        """Send requests, let those that run go on, and take what has ended."""
        self.world.at(200, self.work)
        bus = self.world.bus
        if bus is not None:
            self.launched_under(bus)
        serving = FleetView(bus.state).serving if bus is not None and bus.alive else {}
        for slot in self.world.slots:
            engine = slot.engine if slot.identity.syncs else None
            if engine is None or not engine.ready or len(engine.rollouts) == 3 or self.rng.random() < 0.5:
                continue
            if slot.identity.replica in serving or engine.instance > 1:  # others than the plane's doors ask that one
                engine.rollouts.append(Rollout(left=self.rng.randrange(1, 20)))
        for slot in self.world.slots:
            if slot.engine is not None:
                slot.engine.make_tokens()
                self.take(slot, slot.engine)

    def launch_label(self, slot: Slot) -> str:
        """Return the label of a version of the run in some launches, else nothing. SGLang has it of an option, and vLLM
        of what set it before it was seen. Not while none is committed: then its agent would keep it paused, and the
        other judges take it for as launched.
        """
        bus, engine = self.world.bus, slot.engine
        if engine is None or engine.label is None or engine.instance == 1 or bus is None:
            return ""
        if bus.state.desired.get(slot.identity.replica, bus.state.default_desired).committed is None:
            return ""
        unseen = slot.process is not None and slot.process.state.engine.instance is None
        labels = [label_of(known.weights) for known in bus.state.loaded]
        label = self.rng.choice(labels) if labels and self.rng.random() < 0.5 else ""
        return "" if unseen and label.startswith(PUSH) else label

    def begun(self, process: Process) -> None:
        """Give the launch that an agent meets first no label of a push: without a record of an earlier one, that label
        is all that shows what was pushed.
        """
        engine = process.slot.engine
        if engine is None or process.state.engine.instance is not None or engine.label is None:
            return
        if engine.weights == LAUNCHED and engine.label.startswith(PUSH):
            engine.label = LAUNCH_LABEL

    def take(self, slot: Slot, engine: Engine) -> None:
        """Answer requests that have ended; a lost connection loses some."""
        ended, engine.rollouts = (
            [rollout for rollout in engine.rollouts if rollout.left <= 0],
            [rollout for rollout in engine.rollouts if rollout.left > 0],
        )
        for rollout in ended:
            if rollout.made and self.rng.random() < 0.9:
                self.world.at(self.rng.choice(LATE_MS), self.judge, slot, rollout)

    def judge(self, slot: Slot, rollout: Rollout) -> None:
        """Ask the gate for a sample, and judge what it says."""
        bus = self.world.bus
        if bus is None or not bus.alive or self.is_untold(bus, slot, rollout):
            return
        (sample,) = FleetView(bus.state).provenance(rollout.answer(), replica=slot.identity.replica)
        self.mixed += sample.mixed
        if accepts(sample):
            self.accepted += 1
            self.world.promises.judge("I15 proven samples", wrong(bus, slot, rollout, sample))
        else:
            self.refused += 1

    def is_untold(self, bus: Bus, slot: Slot, rollout: Rollout) -> bool:
        """Whether no agent has told this bus yet that the engine was launched under the label of these tokens, which
        the replica has had from a sync too: until then, nothing tells them apart.
        """
        of_launch = {label for label, weights, _ in rollout.made if weights == LAUNCHED}
        replica = slot.identity.replica
        held = {label_of(known.weights) for known in bus.state.loaded if replica in known.holders}
        told = self.launched_under(bus)
        return any((replica, label) not in told for label in of_launch & held)

    def launched_under(self, bus: Bus) -> set[tuple[int, str]]:
        """Replicas of which this bus was told that their engines were launched under a label of their own, with it."""
        told = self.told.setdefault(bus, set())
        statuses = ((member.hello.identity.replica, member.status) for member in bus.state.members.values())
        told |= {
            (replica, status.launch_label)
            for replica, status in statuses
            if status is not None and status.launch_label is not None
        }
        return told


def wrong(bus: Bus, slot: Slot, rollout: Rollout, sample: Provenance) -> str:
    """I15: what the trainer takes was made by weights that were committed under the version that it is told, or by
    those of the launch while no others are committed.
    """
    commits = bus.world.promises.commits(lost=True)
    for span in sample.spans:
        weights = {weights_of(commit.source) for commit in commits if commit.version == span.version and commit.source}
        if span.version == 0 and not bus.state.default_desired.version:
            weights = {LAUNCHED}
        made_by = rollout.weights_in(span)
        if not made_by <= weights:
            told = f"v{span.version} ({span.proof}), which is {sorted(weights)}"
            return f"the trainer takes tokens of {slot.name} as of {told}, and {sorted(made_by)} made them"
    return ""
