"""Each mechanism is earned: take it away, and the simulation finds the promise that breaks without it.

The seeds are those of `test_promises`, under which everything holds with all mechanisms in place. A run with one taken
away may well end well; that some of a few dozen do not is what the mechanism is there for.
"""

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from schemas.events import CommandReceived, Effect, Event, HeadSeen, SnapshotReceived
from tests.simulation.cluster import Laws, simulate
from tests.simulation.promises import Broken
from workers.machine import decide as machine
from workers.machine.decide import AgentState

SEEDS = range(60)

Decided = tuple[AgentState, tuple[Effect, ...]]


def without_hole_check(state: AgentState, event: Event) -> Decided:
    """Takes a command that is newer than the next one as if it were the next one."""
    if isinstance(event, CommandReceived) and state.joined and not state.diverged and event.epoch >= state.epoch:
        free = len(state.queue) < state.settings.max_buffered
        state = replace(state, seq=event.seq - 1) if free and event.seq > state.seq + 1 else state
    return machine.decide(state, event)


def without_fence(state: AgentState, event: Event) -> Decided:
    """Takes what an older epoch sends as if the newest one had sent it."""
    if isinstance(event, CommandReceived | HeadSeen | SnapshotReceived):
        event = replace(event, epoch=max(event.epoch, state.epoch))
    return machine.decide(state, event)


def with_one_epoch(state: AgentState, event: Event) -> Decided:
    """Fences by the epoch in which a record was made, not by that of its sender."""
    return machine.decide(state, replace(event, epoch=event.origin) if isinstance(event, CommandReceived) else event)


class Ablation(NamedTuple):
    """laws: without the mechanism.   breaks: the promise that is found broken."""

    laws: Laws
    breaks: str


ABLATIONS = {
    # A bus with nothing to say can't be told from a dead one, so the lease of a quiet fleet runs out. With a lease that
    # never ends, agents are still left behind: nothing shows that the last command was lost, or that a Need was.
    "head beacon": Ablation(Laws(beacon=False), "convergence"),
    # What was lost is never asked for, and what comes after it is applied without it.
    "hole check": Ablation(Laws(agent=without_hole_check), "P2 no hole"),
    # An agent that starts again has forgotten which calls it made.
    "journal": Ablation(Laws(journal=False), "P5 one effect"),
    # A trainer that was replaced and does not know it is still obeyed.
    "fence": Ablation(Laws(agent=without_fence), "P6 fencing"),
    # The records of earlier lives, replayed by the living bus, are refused as old.
    "split of the epochs": Ablation(Laws(agent=with_one_epoch), "P6 fencing"),
    # A bus that was replaced goes on writing into the log, between the records of its successor.
    "lock of the log": Ablation(Laws(storage_fence=False), "P1 order"),
}


@pytest.mark.parametrize("mechanism", ABLATIONS)
def test_without_it_a_promise_breaks(mechanism: str) -> None:
    ablation = ABLATIONS[mechanism]
    found = set()
    for seed in SEEDS:
        try:
            simulate(seed, ablation.laws)
        except Broken as broken:
            found.add(str(broken).partition(":")[0])
            if ablation.breaks in found:
                return
    pytest.fail(f"without the {mechanism}, {len(SEEDS)} seeds broke {found or 'nothing'}", pytrace=False)
