"""The judge of profiling sessions: one that the trainer wants open stays open.

It is closed by its own stop, a newer start, a new epoch, the lease, or because it failed at this agent; by nothing
else. A session whose stop was cut off is not the one that a later start of its step asks for: nobody knows whether it
is open, so it is closed before that one is opened. Judged by the log and by what the agent answered, not by what either
machine holds for desired.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.commands import Drain, EpochStart, ProfileCommand
from schemas.outcomes import Acted, Outcome, Reason, Skipped
from schemas.selection import profile_skip_reason
from tests.simulation import serving

if TYPE_CHECKING:
    from schemas.identity import Identity
    from tests.simulation.agent import Process
    from tests.simulation.promises import Promises, Published


def closing(promises: Promises, process: Process) -> str:
    """Return what is wrong with the stop that this agent is about to make; '' if it may close its session."""
    engine, state = process.slot.engine, process.state
    ledger = process.slot.ledger
    if engine is None or engine.session_step is None or serving.misled(process):
        return ""
    if engine.session_step == engine.forgotten:
        return ""
    if ledger.lease_over or ledger.lost_epoch or ledger.late_start == engine.session_step:
        return ""
    if engine.stop_doubtful:
        return ""
    trigger = state.activity.trigger if state.activity is not None else None
    seq = trigger.seq if trigger is not None else state.seq
    start = _wanted_by(promises.log, process.slot.identity, engine.session_step, seq)
    begun_anew = promises.begun_anew.get(process.slot.identity.unit, 0)  # its place was taken up again, from nothing
    if start is None or start <= max(ledger.begun_at, begun_anew):
        return ""
    given = ledger.answered.get((promises.log[start].origin, start), [])
    if any(_gave_up(outcome) for outcome in given):
        return ""
    return f"{process.peer} closes the session of step {engine.session_step}, which seq {start} asked for"


def _wanted_by(log: dict[int, Published], place: Identity, step: int, seq: int) -> int | None:
    """The newest start that wants this session open as of a seq; None if it is not wanted."""
    for at in range(seq, 0, -1):
        published = log.get(at)
        if published is None or isinstance(published.command, EpochStart):
            return None
        if isinstance(published.command, Drain) and published.target.includes(place):
            return None
        command = published.command
        if not isinstance(command, ProfileCommand) or not published.target.includes(place):
            continue
        if command.action == "stop" and command.step == step:
            return None
        plan = command.plan_for(place.role)
        if command.action == "start" and plan is not None and profile_skip_reason(plan, command.step, place) is None:
            return at if command.step == step and at != seq else None  # a start may replace one with another plan
    return None


def _gave_up(outcome: Outcome) -> bool:
    return not isinstance(outcome, Acted) and outcome != Skipped(Reason.ALREADY_PROFILING)
