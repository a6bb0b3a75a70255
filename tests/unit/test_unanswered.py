"""A call whose answer is lost, in a living agent or by a restart, on engines that report as much as each real one does.

The engine here is as unforgiving as the real ones: what kills one of its kind fails the test.
"""

from itertools import product

import pytest
from msgspec.structs import replace

from schemas import events
from schemas.commands import Broadcast, Checkpoint, Command, EngineCommand, WeightSync
from schemas.desired import ALL_TAGS, Committed, Desired
from schemas.identity import Operation, Tag
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped
from tests.unit.machines import PRESENT, PRIMARY, START, STOP, after, agent, answers, command, fold, manifest, sync
from workers.machine.readiness import in_sync, is_ready, trouble
from workers.machine.state import AgentState, call_name
from workers.machine.suppressed import still_desired

PAUSE, RESUME, FLUSH, SLEEP, WAKE = (
    EngineCommand(operation=name) for name in ("pause", "resume", "flush", "sleep", "wake")
)
DISCARD = EngineCommand(operation="sleep", discard=True)
PAUSES = frozenset({Operation.PAUSE, Operation.RESUME})
SLEEPS = frozenset({Operation.SLEEP, Operation.WAKE})
LIVES = {"tiny": frozenset[Operation](), "vllm": PAUSES | SLEEPS, "sglang": PAUSES, "verl": PAUSES}
"""What each kind of engine survives twice, and declares."""
CALLS: dict[str, tuple[Command, ...]] = {
    "pause": (PAUSE,),
    "resume": (PAUSE, RESUME),
    "sleep": (PAUSE, SLEEP),
    "sleep the cache": (PAUSE, EngineCommand(operation="sleep", tags=frozenset({"kv_cache"}))),
    "sleep and discard": (PAUSE, DISCARD),
    "wake": (PAUSE, SLEEP, WAKE),
    "wake the weights": (PAUSE, SLEEP, EngineCommand(operation="wake", tags=frozenset({"weights"}))),
    "flush": (FLUSH,),
    "abort": (EngineCommand(operation="abort"),),
    "start_profile": (START,),
    "stop_profile": (START, STOP),
    "check_source": (sync("prepare"),),
    "pause of a sync": (sync("prepare"),),
    "load": (sync("prepare"), sync("load")),
    "resume of a commit": (sync("prepare"), sync("load"), sync("commit")),
    "sleep of two calls": (SLEEP,),
}
"""Commands, the last of which leads to the call that is not answered: its last one, if it has several."""
AFTERWARDS: dict[str, tuple[Command, ...]] = {
    "nothing": (),
    "serve": (WAKE, RESUME, STOP),
    "sleep": (PAUSE, SLEEP),
    "sync": (sync("abort"), WAKE, sync("prepare", 2), sync("load", 2), sync("commit", 2), RESUME),
}


class Model:
    """An engine of one kind: what it really is, what it reports of that, and what would have killed it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_now = replace(PRESENT, remedies=events.Remedies(idempotent=LIVES[kind]))
        self.made: list[str] = []

    def observe(self) -> events.Observation:
        """Return what an engine of this kind reports."""
        now = self.is_now
        if self.kind == "tiny":
            return now
        if self.kind == "vllm":  # a paused one says that it sleeps, whether it does or not
            return replace(now, profiling=None, asleep=frozenset() if now.generating else None)
        running = now.generating if self.kind == "sglang" else None
        return replace(now, generating=running, profiling=None, asleep=None)

    def make(self, call: events.Call) -> None:
        """Carry out a call that does not kill it."""
        now, asleep = self.is_now, self.is_now.asleep or frozenset[Tag]()
        name, once = call_name(call), LIVES[self.kind]
        self.made.append(name)
        match call:
            case events.Sleep():
                assert not now.generating, "memory was released while requests run"
                assert Operation.SLEEP in once or not call.tags & asleep, f"released twice: {call.tags & asleep}"
            case events.Wake():
                assert Operation.WAKE in once or call.tags <= asleep, f"woken while awake: {call.tags - asleep}"
            case events.Resume() | events.Flush():
                assert not asleep, f"{name} while asleep"
            case events.Load() | events.Restore():
                assert not now.generating and "weights" not in asleep, "load into a running or sleeping engine"
            case events.StartProfile():
                assert not now.profiling, "a second start destroys the first session"
            case _:
                pass
        self.is_now = after(now, call)

    def relaunch(self) -> None:
        """Be launched again."""
        self.is_now = replace(PRESENT, remedies=self.is_now.remedies, instance="two")


def returned(state: AgentState, result: events.Returned | events.Fault, seen: events.Observation) -> events.Event:
    assert state.activity is not None
    return events.EngineReturned(at_ms=1, call_id=state.activity.call_id, result=result, observation=seen)


LOST = events.Fault("unanswered", "the connection broke.")


def run(state: AgentState, model: Model, effects: list[events.Effect]) -> tuple[AgentState, list[events.Effect]]:
    """Make all calls, with their answers. Returns all effects."""
    todo = [effect for effect in effects if isinstance(effect, events.Perform)]
    done = list(effects)
    for _ in range(100):
        if not todo:
            return state, done
        perform = todo.pop(0)
        model.make(perform.call)
        state, more = fold(state, returned(state, events.Returned(), model.observe()))
        done += more
        todo += [effect for effect in more if isinstance(effect, events.Perform)]
    raise AssertionError(f"it never ends: {model.made[-10:]}")


def joined(model: Model, desired: Desired | None = None) -> AgentState:
    """Return an agent that has joined, and has told its engine what it does not report."""
    state = agent(seen=model.observe(), desired=desired)
    effects: list[events.Effect] = []
    if state.activity is not None:
        effects.append(events.Perform(call_id=state.activity.call_id, call=state.activity.calls[0]))
    return run(state, model, effects)[0]


def do(state: AgentState, model: Model, body: Command) -> tuple[AgentState, Outcome]:
    """Carry out one command."""
    state, effects = fold(state, command(body, state.seq + 1))
    state, effects = run(state, model, effects)
    return state, answers(effects)[0].outcome


def unanswered(
    state: AgentState, model: Model, body: Command, took_effect: bool, restarts: bool
) -> tuple[AgentState, Outcome]:
    """Carry out one command whose last call is not answered."""
    state, effects = fold(state, command(body, state.seq + 1))
    while state.activity is not None and len(state.activity.calls) > 1:
        model.make(state.activity.calls[0])
        state, more = fold(state, returned(state, events.Returned(), model.observe()))
        effects += more
    assert state.activity is not None
    if took_effect:
        model.make(state.activity.calls[0])
    if restarts:
        again = events.Started(at_ms=1, identity=PRIMARY, incarnation="b")
        joined = events.SnapshotReceived(at_ms=1, epoch=1, seq=state.seq, desired=state.desired)
        state, more = fold(state, again, events.EngineObserved(at_ms=1, observation=model.observe()), joined)
    else:
        state, more = fold(state, returned(state, LOST, model.observe()))
    effects += more
    state, _ = run(state, model, more)
    return state, answers(effects)[0].outcome


@pytest.mark.parametrize("restarts", [True, False], ids=["restarts", "lives"])
@pytest.mark.parametrize("took_effect", [True, False], ids=["done", "not done"])
@pytest.mark.parametrize("kind", LIVES)
@pytest.mark.parametrize("call", CALLS)
def test_a_lost_answer_kills_no_engine_and_ends_in_sync_or_out_of_service(
    call: str, kind: str, took_effect: bool, restarts: bool
) -> None:
    for afterwards in AFTERWARDS.values():
        lose_an_answer(call, kind, took_effect, restarts, afterwards)


def lose_an_answer(call: str, kind: str, took_effect: bool, restarts: bool, afterwards: tuple[Command, ...]) -> None:
    """Lose the answer of a call, carry out more commands, and judge what the engine and the agent are then."""
    model, state = Model(kind), joined(Model(kind))
    *before, last = CALLS[call]
    for body in before:
        state, _ = do(state, model, body)
    state, outcome = unanswered(state, model, last, took_effect, restarts)
    if isinstance(outcome, Failed):
        assert outcome.error is ErrorKind.UNKNOWN
    for body in afterwards:
        state, _ = do(state, model, body)
    wanted, now = state.desired, model.is_now
    if in_sync(state):
        wanted = still_desired(wanted, state.suppressed)
        if took_effect or call != "start_profile":  # one that took no effect is believed open until its stop
            assert now.profiling is (wanted.profile is not None)
        assert now.generating is (wanted.serving and not state.engine.torn)
        assert now.asleep == wanted.asleep
        assert not is_ready(state) or now.version == wanted.version
    if not is_ready(state) and wanted.serving:
        assert trouble(state)
    model.relaunch()
    state, effects = fold(state, events.EngineObserved(at_ms=2, observation=model.observe()))
    if not state.suppressed.quarantined:
        state, _ = run(state, model, effects)
        assert in_sync(state) or state.reconcile_blocked, "a relaunch brings it back"


@pytest.mark.parametrize("took_effect", [True, False])
@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize(("call", "kind"), [*product(("sleep", "wake"), ("sglang", "verl"))])
def test_an_engine_that_may_sleep_and_dies_of_a_second_call_is_out_of_service_until_its_relaunch(
    call: str, kind: str, took_effect: bool, restarts: bool
) -> None:
    model, state = Model(kind), joined(Model(kind))
    *before, last = CALLS[call]
    for body in before:
        state, _ = do(state, model, body)
    state, outcome = unanswered(state, model, last, took_effect, restarts)
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.UNKNOWN
    made = len(model.made)
    for body in (PAUSE, WAKE, SLEEP, RESUME, FLUSH, START, sync("prepare"), sync("load"), sync("commit")):
        state, outcome = do(state, model, body)
        assert isinstance(outcome, Failed) and outcome.error is ErrorKind.UNKNOWN, body
        assert "launch it again" in outcome.message
    assert len(model.made) == made and not is_ready(state) and "waits for its relaunch" in trouble(state)
    assert isinstance(do(state, model, EngineCommand(operation="abort"))[1], Acted)


@pytest.mark.parametrize("took_effect", [True, False])
@pytest.mark.parametrize("kind", LIVES)
def test_a_profile_start_without_an_answer_is_stopped_by_the_stop_of_its_step(kind: str, took_effect: bool) -> None:
    model, state = Model(kind), joined(Model(kind))
    state, outcome = unanswered(state, model, START, took_effect, restarts=False)
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.UNKNOWN
    state, outcome = do(state, model, STOP)
    assert not model.is_now.profiling and in_sync(state)
    assert isinstance(outcome, Acted) or (kind == "tiny" and not took_effect)  # which says that none is open


@pytest.mark.parametrize("took_effect", [True, False])
@pytest.mark.parametrize("kind", LIVES)
def test_a_profile_stop_without_an_answer_is_made_again(kind: str, took_effect: bool) -> None:
    model, state = Model(kind), joined(Model(kind))
    state, _ = do(state, model, START)
    state, _ = unanswered(state, model, STOP, took_effect, restarts=False)
    assert not model.is_now.profiling and in_sync(state)


@pytest.mark.parametrize("kind", LIVES)
def test_a_broadcast_without_an_answer_is_never_received_again(kind: str) -> None:
    model, state = Model(kind), joined(Model(kind))
    source = Broadcast(host="h", port=1, group="g", replicas=(0,), backend="gloo")
    body = WeightSync(phase="prepare", version=1, source=source, manifest=manifest(1))
    state, _ = do(state, model, body)
    state, outcome = unanswered(state, model, WeightSync(phase="load", version=1), True, restarts=False)
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.UNKNOWN
    state, _ = do(state, model, sync("abort"))
    state, _ = do(state, model, RESUME)
    assert model.made.count("load") == 1 and not is_ready(state)


# --- what was refused, and what was observed --------------------------------------------------------------------------


REFUSALS = ("refused", "unsupported", "source_refused")


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize("call", CALLS)
def test_a_refusal_leaves_what_is_believed_as_it_was(call: str, kind: str) -> None:
    model, state = Model("sglang"), joined(Model("sglang"))
    *before, last = CALLS[call]
    for body in before:
        state, _ = do(state, model, body)
    state, _ = fold(state, command(last, state.seq + 1))
    believed, refused = state.engine, events.Fault(kind, "Nothing was touched.")  # type: ignore[arg-type]
    state, effects = fold(state, returned(state, refused, model.observe()))
    assert state.engine == believed
    (answer,) = answers(effects)
    assert isinstance(answer.outcome, Failed) and answer.outcome.error == kind


def test_a_refused_discard_leaves_the_weights_whole() -> None:
    model, state = Model("vllm"), joined(Model("vllm"))
    state, _ = do(state, model, PAUSE)
    state, _ = fold(state, command(DISCARD, 2))
    state, effects = fold(state, returned(state, events.Fault("refused", "It can't."), model.observe()))
    state, _ = run(state, model, effects)
    state, _ = do(state, model, RESUME)
    assert not state.engine.torn and is_ready(state) and "load" not in model.made


def test_an_observation_that_fails_too_settles_nothing_until_the_next() -> None:
    state = agent()
    state, _ = fold(state, command(PAUSE))
    state, effects = fold(state, events.EngineReturned(at_ms=1, call_id=1, result=LOST, observation=None))
    (answer,) = answers(effects)
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.UNKNOWN
    assert state.engine.generating is None and not is_ready(state)
    state, _ = fold(state, events.EngineObserved(at_ms=2, observation=PRESENT))
    assert state.engine.generating is True and is_ready(state)


def test_a_command_goes_on_after_a_call_whose_answer_was_lost_and_whose_effect_is_seen() -> None:
    state, _ = fold(agent(), command(SLEEP))
    _, effects = fold(state, returned(state, LOST, replace(PRESENT, generating=False)))
    (perform,) = effects
    assert isinstance(perform, events.Perform) and perform.call == events.Sleep(ALL_TAGS)


def test_a_failed_stop_does_not_end_a_session_that_the_engine_reports() -> None:
    model, state = Model("tiny"), joined(Model("tiny"))
    state, _ = do(state, model, START)
    state, _ = fold(state, command(STOP, 2))
    failed = events.Fault("engine_error", "No.")
    state, effects = fold(state, returned(state, failed, model.observe()))
    state, _ = run(state, model, effects)
    assert not model.is_now.profiling and model.made.count("stop_profile") == 1


def test_a_stop_that_was_answered_and_not_made_leaves_the_session_to_be_stopped() -> None:
    model, state = Model("tiny"), joined(Model("tiny"))
    state, _ = do(state, model, START)
    state, _ = fold(state, command(STOP, 2))
    state, effects = fold(state, returned(state, events.Returned(), model.observe()))
    state, _ = run(state, model, effects)
    assert not model.is_now.profiling and in_sync(state)


@pytest.mark.parametrize("kind", LIVES)
def test_torn_weights_are_loaded_again_after_a_load_without_an_answer(kind: str) -> None:
    v1 = Committed(1, Checkpoint("v1"), manifest(1))
    model = Model(kind)
    model.is_now = replace(model.is_now, version=1)
    state = joined(model, Desired(committed=v1))
    state, _ = do(state, model, sync("prepare", 2))
    state, _ = unanswered(state, model, sync("load", 2), False, restarts=False)
    state, _ = do(state, model, sync("abort", 2))
    assert (
        is_ready(state) and model.is_now.version == 1 and model.made[-4:] == ["check_source", "load", "flush", "resume"]
    )


@pytest.mark.parametrize("took_effect", [True, False])
@pytest.mark.parametrize("kind", LIVES)
def test_a_step_that_is_profiled_again_after_a_stop_without_an_answer_is_stopped_first(
    kind: str, took_effect: bool
) -> None:
    model, state = Model(kind), joined(Model(kind))
    state, _ = do(state, model, START)
    state, _ = fold(state, command(STOP, 2))
    if took_effect:
        assert state.activity is not None
        model.make(state.activity.calls[0])
    state, _ = fold(state, returned(state, LOST, model.observe()))
    if state.activity is not None:  # its second stop gets no answer either
        state, _ = fold(state, returned(state, LOST, model.observe()))
    state, outcome = do(state, model, START)
    if kind == "tiny" and not took_effect:  # it says that it is still open
        assert outcome == Skipped(Reason.ALREADY_PROFILING)
    else:
        assert isinstance(outcome, Acted) and outcome.calls[-1] == "start_profile"
    assert model.is_now.profiling and in_sync(state)


@pytest.mark.parametrize("meanwhile", ["nothing", "restart", "snapshot"])
@pytest.mark.parametrize("kind", ["vllm", "sglang", "verl"])
def test_a_start_that_follows_a_stop_without_an_answer_and_without_an_observation_stops_first(
    kind: str, meanwhile: str
) -> None:
    model, state = Model(kind), joined(Model(kind))
    state, _ = do(state, model, START)
    state, _ = fold(state, command(STOP, 2))
    snapshot = events.SnapshotReceived(at_ms=1, epoch=1, seq=2, desired=state.desired)
    if meanwhile == "restart":
        again = events.Started(at_ms=1, identity=PRIMARY, incarnation="b")
        state, effects = fold(state, again, snapshot, command(START, 3))
        state, more = fold(state, events.EngineObserved(at_ms=1, observation=model.observe()))
        effects += more
    else:
        assert state.activity is not None
        lost = events.EngineReturned(at_ms=1, call_id=state.activity.call_id, result=LOST, observation=None)
        middle = () if meanwhile == "nothing" else (snapshot,)
        state, effects = fold(state, *middle, lost, command(START, 3))
    state, effects = run(state, model, effects)
    outcome = answers(effects)[-1].outcome
    assert isinstance(outcome, Acted) and outcome.calls[-1] == "start_profile" and in_sync(state)
    assert model.made[-2:] == ["stop_profile", "start_profile"]


@pytest.mark.parametrize("restarts", [True, False], ids=["restarts", "lives"])
@pytest.mark.parametrize("took_effect", [True, False], ids=["done", "not done"])
@pytest.mark.parametrize("kind", LIVES)
def test_a_step_that_is_profiled_again_after_a_start_without_an_answer_is_settled_first(
    kind: str, took_effect: bool, restarts: bool
) -> None:
    model, state = Model(kind), joined(Model(kind))
    state, outcome = unanswered(state, model, START, took_effect, restarts)
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.UNKNOWN
    state, outcome = do(state, model, START)
    if kind == "tiny":  # it says whether one is open; after a restart the agent has opened the desired one
        is_open = took_effect or restarts
        assert outcome == (Skipped(Reason.ALREADY_PROFILING) if is_open else Acted(calls=("start_profile",)))
    else:
        assert outcome == Acted(calls=("stop_profile", "start_profile"))
    assert model.is_now.profiling and in_sync(state)
    state, outcome = do(state, model, START)
    assert outcome == Skipped(Reason.ALREADY_PROFILING)


def test_a_start_and_the_stop_that_settles_it_without_an_answer_are_unknown_and_still_stopped() -> None:
    model, state = Model("sglang"), joined(Model("sglang"))
    state, _ = unanswered(state, model, START, took_effect=True, restarts=False)
    state, _ = fold(state, command(START, 2))
    state, effects = fold(state, returned(state, LOST, model.observe()))
    (answer,) = answers(effects)
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.UNKNOWN
    state, _ = run(state, model, effects)
    state, _ = do(state, model, STOP)
    assert not model.is_now.profiling and in_sync(state)
