"""Rules 4 to 9 of the decision table: may this agent act on this command at all? The first rule that holds wins.

Rules 4 and 7 depend on the time: `must_wait` keeps a command in the queue while the engine launches (7), and `expiry`
answers it once it has expired (4, or 7 if the engine is still launching). `refusal` has the others.
"""

from schemas.commands import EngineCommand, ProfileCommand, UnknownCommand, WeightSync
from schemas.events import Answer, CommandReceived
from schemas.identity import OBSERVED, ROLLOUT, Operation
from schemas.outcomes import ErrorKind, Failed, Outcome, Reason, Skipped
from workers.machine.commands import is_disk_command, missing_operation, needs_no_engine
from workers.machine.state import AgentState

# Outcomes that most agents of a fleet give to most commands. They are built once: building one costs a tenth of a
# decision.
_EXPIRED = Skipped(Reason.EXPIRED)
_NOT_TARGETED = Skipped(Reason.NOT_TARGETED)
_NOT_AN_ENGINE = Skipped(Reason.NOT_AN_ENGINE)
_OBSERVING = Skipped(Reason.OBSERVING)
_NOT_PRIMARY = Skipped(Reason.NOT_PRIMARY)
_SUPERSEDED = Skipped(Reason.SUPERSEDED)


def is_targeted(state: AgentState, event: CommandReceived) -> bool:
    """Whether the command's target names this replica or rank."""
    return event.target.replicas is None or event.target.includes(state.identity)


def must_wait(state: AgentState, event: CommandReceived, now_ms: int) -> bool:
    """Rule 7: whether the command waits for an engine that is still launching."""
    return _awaits_launch(state, event) and now_ms < event.at_ms + event.ttl_ms


def expiry(state: AgentState, event: CommandReceived) -> Answer:
    """Rules 4 and 7: the answer to an expired command."""
    if not _awaits_launch(state, event):
        return answer_to(event, _EXPIRED, 4)
    reason = state.engine.trouble or "its engine was still launching"
    message = f"replica {state.identity.replica} could not act before the command expired: {reason}. "
    if isinstance(event.command, ProfileCommand):  # a session that begins late would record another step
        message += "The engine was not called."
    else:
        message += "The engine was not called; it is brought to the desired state as soon as it is up."
    return answer_to(event, Failed(ErrorKind.ENGINE_NOT_READY, message), 7)


def refusal(state: AgentState, event: CommandReceived, targeted: bool) -> Answer | None:
    """Rules 5, 6, 8 and 9: the answer to a command on which this agent must not act; None if it may."""
    identity, command = state.identity, event.command
    if not targeted:
        return answer_to(event, _NOT_TARGETED, 5)
    if identity.mode is OBSERVED:
        return answer_to(event, _OBSERVING, 5)
    if identity.role != ROLLOUT and isinstance(command, WeightSync | EngineCommand):
        return answer_to(event, _NOT_AN_ENGINE, 5)
    if identity.node_rank > 0:
        if not is_disk_command(command):
            return answer_to(event, _NOT_PRIMARY, 6)
    elif state.engine.tokenizer == "absent":
        message = (
            f"replica {identity.replica} has no tokenizer manager on its node rank 0, so its engine can't be "
            "commanded. It was not called: check how it was launched."
        )
        return answer_to(event, Failed(ErrorKind.TOKENIZER_MISSING, message), 8)
    missing = missing_operation(command, state.engine)
    if missing is None or needs_no_engine(command, state.engine, identity):
        return None
    if isinstance(command, UnknownCommand):
        message = (
            f"this agent can't read the command {command.tag!r}, and did nothing: {command.problem}."
            if command.problem
            else f"this agent does not know the command {command.tag!r}: it is older than its bus."
        )
    elif state.settings.memory == "trainer" and missing in (Operation.SLEEP, Operation.WAKE):
        message = (
            f"the trainer's own data plane releases the memory of replica {identity.replica} and takes it back: its "
            f"agent was started with memory=trainer. Nothing was touched: {missing} it there."
        )
    else:
        available = ", ".join(sorted(state.engine.operations)) or "none"
        message = (
            f"{state.engine.name} has no operation {missing}; it has: {available}. For a server, `rolloutctl engine "
            "probe URL` says how to launch it."
        )
    return answer_to(event, Failed(ErrorKind.UNSUPPORTED, message), 9)


def superseded(state: AgentState, event: CommandReceived) -> Answer | None:
    """Rule 10: the answer to a part of a sync behind which a newer sync waits. The bus has ended the older one; an
    engine that was launching meanwhile is brought to the newest weights only.
    """
    command = event.command
    if not isinstance(command, WeightSync):
        return None
    later = (queued.command for queued in state.queue if is_targeted(state, queued))
    begun = (sync.version for sync in later if isinstance(sync, WeightSync) and sync.phase == "prepare")
    return answer_to(event, _SUPERSEDED, 10) if any(version > command.version for version in begun) else None


def answer_to(event: CommandReceived, outcome: Outcome, rule: int = 10) -> Answer:
    """Return the answer to a command."""
    return Answer(epoch=event.origin, seq=event.seq, outcome=outcome, rule=rule)


def _awaits_launch(state: AgentState, event: CommandReceived) -> bool:
    """Whether the command needs an engine that may still be launching."""
    if state.identity.mode is OBSERVED:
        return False
    if state.engine.tokenizer != "unknown" or state.identity.node_rank > 0 or not is_targeted(state, event):
        return False
    return not (is_disk_command(event.command) or needs_no_engine(event.command, state.engine, state.identity))
