"""Whether an engine that runs requests makes progress, by its own counters. Pure.

An engine may answer every control route and generate nothing: its scheduler or a GPU hangs. It is `stalled` once two
observations in a row show running requests and the same number of generated tokens, and `wedged` when that has lasted
for as long as the settings say. The next token ends both.

Counters that move are no news, so `is_news` keeps them out of the journal: an engine that is well has no
event for its tokens.
"""

from typing import Final

from msgspec.structs import replace

from schemas.events import Observation
from workers.machine.state import EngineState, Progress

_UNCOUNTED: Final = dict.fromkeys(("running", "waiting", "generated"))


def with_progress(engine: EngineState, observation: Observation, at_ms: int) -> EngineState:
    """Return `engine` with the progress that an observation shows."""
    before, generated = engine.progress, observation.generated
    progress: Progress | None
    if generated is None or not observation.running or not engine.generating:
        progress = None
    elif before is None or before.generated != generated:
        progress = Progress(generated=generated, since_ms=at_ms)
    else:
        progress = before if before.stalled else replace(before, stalled=True)
    return engine if progress is before else replace(engine, progress=progress)


def wedged_at(engine: EngineState, wedged_after_ms: int) -> int | None:
    """Return when the engine counts as wedged unless it makes progress; None if it does, or is wedged already."""
    progress = engine.progress
    return progress.since_ms + wedged_after_ms if progress is not None and progress.stalled != progress.wedged else None


def apply_time(engine: EngineState, wedged_after_ms: int, now_ms: int) -> EngineState:
    """Return `engine`, wedged if it has been stalled for too long."""
    due_ms = wedged_at(engine, wedged_after_ms)
    if engine.progress is None or due_ms is None or now_ms < due_ms:
        return engine
    return replace(engine, progress=replace(engine.progress, wedged=True))


def stalls_after(stalls: int, before: Observation | None, observation: Observation) -> int:
    """Return the number of observations in a row, up to this one, in which running requests made no progress."""
    stalled = before is not None and observation.running and observation.generated == before.generated
    return stalls + 1 if stalled else 0


def is_news(fed: Observation | None, observation: Observation, before_stalls: int, stalls: int) -> bool:
    """Whether the machine needs this observation: it differs from the last one that it had by more than its counters,
    or shows that progress stopped (which takes two) or began again.
    """
    if fed is None or replace(fed, **_UNCOUNTED) != replace(observation, **_UNCOUNTED):
        return True
    return stalls in (1, 2) or (stalls == 0 and before_stalls > 0)
