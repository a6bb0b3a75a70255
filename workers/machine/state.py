"""Everything that one agent knows, as its machine holds it between two events."""

from msgspec import Struct

from schemas.desired import Desired
from schemas.events import Answer, Call, CommandReceived, FinishProfile, Returned, Settings
from schemas.identity import Count, Identity, Positive
from workers.machine.reconcile import EngineState
from workers.machine.suppressed import NOTHING_SUPPRESSED, Suppressed

NOTHING_REPORTED = Returned()


class Activity(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine calls under way: for a command, or (cause None) on the machine's own account.

    calls: still to be made; the first is in flight.   made: names of those that returned well.   told: by them, of a
    profiling session.
    overdue: the deadline passed and the command was answered; the call in flight is still awaited.
    """

    cause: CommandReceived | None
    calls: tuple[Call, ...]
    call_id: Positive
    deadline_ms: int
    made: tuple[str, ...] = ()
    reported: Returned = NOTHING_REPORTED
    overdue: bool = False


class AgentState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything an agent knows. Nothing that can be derived is stored.

    epoch, seq: newest bus epoch seen; last command applied in order.
    suppressed: what failed, and is not tried again unasked.
    joined: a snapshot was applied in this incarnation.   astray: the lease ran out or histories diverged; only a
    snapshot helps.   queue: in order, not decided yet.   held: after a hole.   needs: first seq asked for, 0 if none.
    reconcile_blocked: settling failed and waits for something new before it is tried again.
    deferred_finish: what a finish asked for while the engine was still writing a trace.
    interrupted: what was under way when the last incarnation ended; settled once the engine has been read.
    """

    identity: Identity = Identity(replica=0, node_rank=0)
    incarnation: str = ""
    settings: Settings = Settings()
    epoch: Count = 0
    seq: Count = 0
    desired: Desired = Desired()
    suppressed: Suppressed = NOTHING_SUPPRESSED
    engine: EngineState = EngineState()
    joined: bool = False
    diverged: bool = False
    queue: tuple[CommandReceived, ...] = ()
    reorder_buffer: tuple[CommandReceived, ...] = ()
    resend_from: Count = 0
    activity: Activity | None = None
    calls_made: Count = 0
    answers: tuple[Answer, ...] = ()
    reconcile_blocked: bool = False
    deferred_finish: FinishProfile | None = None
    interrupted: Activity | None = None
