"""Rows 5 to 9 of the decision table: may this agent act on this command at all? The first row that holds wins."""

from collections.abc import Callable
from typing import NamedTuple

from schemas.commands import EngineCommand, UnknownCommand, WeightSync
from schemas.events import CommandReceived
from schemas.identity import ROLLOUT
from schemas.outcomes import ErrorKind, Failed, Outcome, Reason, Skipped
from workers.machine.commands import is_disk_command, missing_operation, needs_no_engine
from workers.machine.state import AgentState

# Built once, since building one costs a tenth of deciding.
_NOT_TARGETED = Skipped(Reason.NOT_TARGETED)
_NOT_AN_ENGINE = Skipped(Reason.NOT_AN_ENGINE)
_NOT_PRIMARY = Skipped(Reason.NOT_PRIMARY)


class Rule(NamedTuple):
    """One row of the decision table."""

    number: int
    when: Callable[[AgentState, CommandReceived], bool]
    then: Callable[[AgentState, CommandReceived], Outcome]


def not_targeted(state: AgentState, event: CommandReceived) -> bool:
    """Does the command name others only?"""
    return event.target.replicas is not None and not event.target.includes(state.identity)


def _not_meant(state: AgentState, event: CommandReceived) -> bool:
    if state.identity.role != ROLLOUT and isinstance(event.command, WeightSync | EngineCommand):
        return True
    return not_targeted(state, event)


def _tokenizer_missing(state: AgentState, event: CommandReceived) -> Outcome:
    return Failed(
        ErrorKind.TOKENIZER_MISSING,
        f"replica {state.identity.replica} has no tokenizer manager on its node rank 0, so nobody can command its "
        "engine. The engine was not called: look at its launch.",
    )


def _unsupported(state: AgentState, event: CommandReceived) -> bool:
    lacks = missing_operation(event.command, state.engine) is not None
    return lacks and not needs_no_engine(event.command, state.engine, state.identity)


def _say_unsupported(state: AgentState, event: CommandReceived) -> Outcome:
    if isinstance(event.command, UnknownCommand):
        message = f"this agent knows no command {event.command.tag!r}: it is older than its bus."
        return Failed(ErrorKind.UNSUPPORTED, message)
    has = ", ".join(sorted(state.engine.operations)) or "none"
    lacks = missing_operation(event.command, state.engine)
    return Failed(
        ErrorKind.UNSUPPORTED,
        f"{state.engine.name} has no operation {lacks}; it has: {has}. Of a server, `rolloutctl engine probe URL` says "
        "what to launch it with.",
    )


GATE: tuple[Rule, ...] = (  # row 4, its time is over, is asked when the command's turn comes
    Rule(5, _not_meant, lambda s, e: _NOT_TARGETED if not_targeted(s, e) else _NOT_AN_ENGINE),
    Rule(6, lambda s, e: s.identity.node_rank > 0 and not is_disk_command(e.command), lambda s, e: _NOT_PRIMARY),
    # row 7 (tokenizer unknown: hold) has no outcome of its own: see `_turn`
    Rule(8, lambda s, e: s.identity.node_rank == 0 and s.engine.tokenizer == "absent", _tokenizer_missing),
    Rule(9, _unsupported, _say_unsupported),
)
