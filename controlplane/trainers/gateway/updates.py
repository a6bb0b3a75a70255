"""The gateway's decisions: which posts belong together, which command they become, and who is answered what. Pure.

A trainer posts one request to each replica, and the bus has one command for all of them. So the posts are gathered:

Rule 1  The first update opens a set. The sync begins when every replica was asked, or when a moment has passed: it is
        one command to the whole fleet in any case, since a part of it must never move alone.
Rule 2  Every post for the same weights waits for the same report, whether it came before the sync or during it.
Rule 3  Posts for other weights meanwhile are refused. If the sync has not begun, so is the whole set.
Rule 4  A post that repeats one whose answer never arrived (its sender had gone) gets the answer of that sync. One whose
        answer did arrive is a new request.
Rule 5  A pause is acknowledged and not performed: the sync pauses by itself, for as long as it takes. So a trainer
        that ends after its pause leaves no engine paused. Its mode becomes the `in_flight` of the sync.
Rule 6  A resume or a flush that belongs to an update is acknowledged, too. Alone, each is a command to that replica.
"""

from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from controlplane.trainers.gateway import routes
from schemas.commands import EngineCommand, ProfileCommand
from schemas.identity import InFlight

Actions: TypeAlias = "list[Reply | Remind | BeginSync | CommandReplica]"


class UpdateSet(Struct, frozen=True, kw_only=True):
    """Posts that wait for the same sync.

    Attributes:
        number: Counts the sets of this gateway.
        posts: Number of each post that waits, and its replica.
        begun: The sync has begun.
    """

    number: int
    path: str
    label: str
    posts: tuple[tuple[int, int], ...]
    begun: bool = False


class EndedSet(Struct, frozen=True, kw_only=True):
    """The newest set that has its report.

    Attributes:
        posts: Posts that were answered, and of which nobody knows yet whether the answer arrived.
        delivered: Replicas whose answer arrived.
    """

    path: str
    label: str
    status: int
    message: str
    posts: tuple[tuple[int, int], ...]
    delivered: frozenset[int] = frozenset()


class GatewayState(Struct, frozen=True, kw_only=True):
    """What the gateway remembers of its trainer.

    Attributes:
        replicas: How many there are.
        number: Of the newest set.
        paused: Replicas that the trainer paused since the last sync, and how.
        synced: Replicas that were in a sync since the trainer last paused them.
        local: SkyRL's local checkpoint; empty as long as it is not known.
        label: Of the weights committed last.
        step: Of the newest profiling session; `started` has the replicas that were asked for it.
        steps: Newest session of each replica.
    """

    replicas: int
    number: int = 0
    current: UpdateSet | None = None
    ended: EndedSet | None = None
    paused: dict[int, InFlight] = {}
    synced: frozenset[int] = frozenset()
    local: str = ""
    label: str = ""
    step: int = 0
    started: frozenset[int] = frozenset()
    steps: dict[int, int] = {}


# --- events -----------------------------------------------------------------------------------------------------------


class PostArrived(Struct, frozen=True, kw_only=True):
    """A request that is answered here.

    Attributes:
        post: Its number.
        seq: Position of the newest command in the run, from which a profiling session without a step gets one.
        unchanged: No delta has changed a weight yet, and nothing was committed: what was launched is what is wanted.
    """

    post: int
    replica: int
    meaning: routes.Meaning
    seq: int = 0
    unchanged: bool = False


class MomentPassed(Struct, frozen=True):
    """Time is up for the posts of a set."""

    number: int


class SyncEnded(Struct, frozen=True, kw_only=True):
    """The sync of a set has its report, or could not begin."""

    number: int
    status: int
    message: str


class AnswerSent(Struct, frozen=True):
    """An answer was sent; `delivered` says that its reader had not gone before."""

    post: int
    delivered: bool


Event = PostArrived | MomentPassed | SyncEnded | AnswerSent


# --- actions ----------------------------------------------------------------------------------------------------------


class Reply(Struct, frozen=True):
    """Answer posts."""

    posts: tuple[int, ...]
    status: int
    message: str


class Remind(Struct, frozen=True):
    """Give MomentPassed after a moment."""

    number: int


class BeginSync(Struct, frozen=True, kw_only=True):
    """Bring the whole fleet to a checkpoint, and give SyncEnded."""

    number: int
    path: str
    label: str
    in_flight: InFlight


class CommandReplica(Struct, frozen=True):
    """CommandReplica a command to one replica, and answer with its report."""

    post: int
    replica: int
    command: EngineCommand | ProfileCommand


# --- decisions --------------------------------------------------------------------------------------------------------


def decide(state: GatewayState, event: Event) -> tuple[GatewayState, Actions]:
    """Return the next state, and what to do."""
    match event:
        case PostArrived():
            return _on_post(state, event)
        case MomentPassed(number):
            current = state.current
            if current is None or current.number != number or current.begun:
                return state, []
            return _begin(state, current)
        case SyncEnded():
            return _on_ended(state, event)
        case AnswerSent(post, delivered):
            return _on_sent(state, post, delivered), []


def _on_post(state: GatewayState, event: PostArrived) -> tuple[GatewayState, Actions]:
    post, replica = event.post, event.replica
    match event.meaning:
        case routes.PausePost(mode):
            paused = {**state.paused, replica: mode}
            return replace(state, paused=paused, synced=state.synced - {replica}), [_done(post, "the next sync pauses")]
        case routes.ResumePost():
            return _on_resume(state, post, replica)
        case routes.FlushPost():
            if state.current is not None or replica in state.paused:
                return state, [_done(post, "the next sync flushes")]
            return state, [CommandReplica(post, replica, EngineCommand(operation="flush"))]
        case routes.UpdatePost(path, label):
            return _on_update(state, post, replica, path, label)
        case routes.DeltaPost(label):
            return _on_delta(state, event, label)
        case routes.TransferPost(path):
            return replace(state, local=path), []  # the engine answers it
        case routes.PartPost():
            return state, [_done(post, "a sync does this by itself")]
        case routes.StartProfilePost(plan):
            return _on_start_profile(state, event, ProfileCommand(action="start", step=0, plan=plan))
        case routes.StopProfilePost():
            step = state.steps.get(replica)
            if step is None:
                return state, [Reply((post,), 400, f"no session was started on replica {replica} here")]
            return state, [CommandReplica(post, replica, ProfileCommand(action="stop", step=step))]
        case _:
            raise TypeError(f"{event.meaning} is no business of this machine")


def _done(post: int, message: str) -> Reply:
    return Reply((post,), 200, message)


def _on_resume(state: GatewayState, post: int, replica: int) -> tuple[GatewayState, Actions]:
    paused = {other: mode for other, mode in state.paused.items() if other != replica}
    state = replace(state, paused=paused)
    if state.current is not None or replica in state.synced:
        return state, [_done(post, "the end of a sync resumes")]
    return state, [CommandReplica(post, replica, EngineCommand(operation="resume"))]


def _on_start_profile(state: GatewayState, event: PostArrived, command: ProfileCommand) -> tuple[GatewayState, Actions]:
    """Replicas that are asked one after the other share a step. One that is asked again begins the next."""
    replica, step, started = event.replica, state.step, state.started
    if step == 0 or replica in started:
        step, started = max(step, event.seq) + 1, frozenset()  # seq: no step of an earlier gateway of this run
    steps = {**state.steps, replica: step}
    state = replace(state, step=step, started=started | {replica}, steps=steps)
    return state, [CommandReplica(event.post, replica, replace(command, step=step))]


# --- updates ----------------------------------------------------------------------------------------------------------


def _on_delta(state: GatewayState, event: PostArrived, label: str) -> tuple[GatewayState, Actions]:
    if event.unchanged:
        synced = frozenset(range(state.replicas))
        message = "no weight has changed since the engines were launched"
        return replace(state, synced=synced, paused={}, label=label), [_done(event.post, message)]
    if not state.local:
        message = (
            "this gateway has not seen /init_weight_transfer_engine, which names the local checkpoint: it was started "
            "after the trainer. Start the trainer again"
        )
        return state, [Reply((event.post,), 409, message)]
    return _on_update(state, event.post, event.replica, state.local, label)


def _on_update(state: GatewayState, post: int, replica: int, path: str, label: str) -> tuple[GatewayState, Actions]:
    current, ended = state.current, state.ended
    if current is None:
        if ended is not None and (ended.path, ended.label) == (path, label) and replica not in ended.delivered:
            ended = replace(ended, posts=(*ended.posts, (post, replica)))
            return replace(state, ended=ended), [Reply((post,), ended.status, ended.message)]
        number = state.number + 1
        current = UpdateSet(number=number, path=path, label=label, posts=((post, replica),))
        return _gathered(replace(state, number=number, current=current), current, first=True)
    if (current.path, current.label) != (path, label):
        return _on_conflict(state, current, post, replica, path)
    current = replace(current, posts=(*current.posts, (post, replica)))
    return _gathered(replace(state, current=current), current, first=False)


def _gathered(state: GatewayState, current: UpdateSet, *, first: bool) -> tuple[GatewayState, Actions]:
    asked = {replica for _, replica in current.posts}
    if not current.begun and len(asked) == state.replicas:
        return _begin(state, current)
    return state, [Remind(current.number)] if first else []


def _begin(state: GatewayState, current: UpdateSet) -> tuple[GatewayState, Actions]:
    modes = list(state.paused.values())
    begin = BeginSync(
        number=current.number,
        path=current.path,
        label=current.label,
        in_flight=modes[-1] if modes else "abort",
    )
    return replace(state, current=replace(current, begun=True), ended=None), [begin]


def _on_conflict(
    state: GatewayState, current: UpdateSet, post: int, replica: int, path: str
) -> tuple[GatewayState, Actions]:
    asked = sorted({other for _, other in current.posts})
    message = (
        f"replica {replica} is asked to load {path}, and replicas {asked} are asked to load {current.path}. The fleet "
        "moves together"
    )
    if current.begun:
        return state, [Reply((post,), 409, f"{message}: that sync goes on, ask again when it has ended")]
    posts = (*(number for number, _ in current.posts), post)
    return replace(state, current=None), [Reply(posts, 409, f"{message}: nothing was loaded")]


def _on_ended(state: GatewayState, event: SyncEnded) -> tuple[GatewayState, Actions]:
    current = state.current
    if current is None or current.number != event.number:
        return state, []
    ended = EndedSet(
        path=current.path, label=current.label, status=event.status, message=event.message, posts=current.posts
    )
    state = replace(
        state,
        current=None,
        ended=ended,
        paused={},
        synced=frozenset(range(state.replicas)),
        label=current.label if event.status == 200 else state.label,
    )
    return state, [Reply(tuple(post for post, _ in current.posts), event.status, event.message)]


def _on_sent(state: GatewayState, post: int, delivered: bool) -> GatewayState:
    ended = state.ended
    replica = dict(ended.posts).get(post) if ended is not None else None
    if ended is None or replica is None:
        return state
    posts = tuple(entry for entry in ended.posts if entry[0] != post)
    known = ended.delivered | {replica} if delivered else ended.delivered
    return replace(state, ended=replace(ended, posts=posts, delivered=known))
