"""Which engines get requests: whether an agent is registered with a router, state by state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from schemas.commands import Checkpoint, ProfilePlan
from schemas.desired import Committed, Desired, ProfileSession, Syncing
from schemas.errors import ConfigError
from schemas.events import Load, Resume, StopProfile
from tests.unit import machines
from workers.engines.api_key import api_key
from workers.machine.state import Activity, AgentState, Progress, Suppressed
from workers.router import KEY_VARIABLE, RouterRegistration, may_register, routable, should_be_registered

SOURCE = Checkpoint("v1")
ONE = Committed(1, SOURCE, None)
LOADING = Desired(sync=Syncing(1, SOURCE, None, in_flight="keep", phase="load"))
PREPARING = Desired(sync=Syncing(1, SOURCE, None, in_flight="keep", phase="prepare"))
SESSION = ProfileSession(3, ProfilePlan())


def engine(**changes: Any) -> Callable[[AgentState], AgentState]:
    return lambda state: replace(state, engine=replace(state.engine, **changes))


def agent_state(**changes: Any) -> Callable[[AgentState], AgentState]:
    return lambda state: replace(state, **changes)


def under_way(call: Load | Resume | StopProfile, overdue: bool = False) -> Callable[[AgentState], AgentState]:
    activity = Activity(trigger=None, calls=(call,), call_id=1, deadline_ms=1, overdue=overdue)
    return lambda state: replace(state, activity=activity)


IN, KEPT, OUT = (True, True), (True, False), (False, False)
"""Whether it may stay registered, and whether it may register."""

RULE: dict[str, tuple[tuple[bool, bool], tuple[Callable[[AgentState], AgentState], ...]]] = {
    "as launched, nothing committed": (IN, ()),
    "it holds the committed weights": (
        IN,
        (agent_state(desired=Desired(committed=ONE)), engine(version=1, loaded=ONE)),
    ),
    "a profiling session is open": (IN, (agent_state(desired=Desired(profile=SESSION)), engine(session=SESSION))),
    "no snapshot yet": (OUT, (agent_state(snapshot_epoch=0),)),
    "the bus is lost for longer than the lease": (OUT, (agent_state(bus_lost=True),)),
    "the trainer was restarted, and has not sent its snapshot yet": (KEPT, (agent_state(epoch=2),)),
    "wedged": (OUT, (engine(progress=Progress(generated=1, since_ms=0, stalled=True, wedged=True)),)),
    "engine launching": (OUT, (engine(tokenizer="unknown"),)),
    "no engine": (OUT, (engine(tokenizer="absent"),)),
    "torn": (OUT, (engine(torn=True),)),
    "asleep": (OUT, (agent_state(desired=Desired(asleep=frozenset({"kv_cache"}))), engine(asleep={"kv_cache"}))),
    "about to sleep": (OUT, (agent_state(desired=Desired(asleep=frozenset({"kv_cache"}))),)),
    "waking": (OUT, (engine(asleep=frozenset({"kv_cache"})),)),
    "quarantined by the trainer": (OUT, (agent_state(desired=Desired(quarantined=1)),)),
    "quarantined by itself": (OUT, (agent_state(suppressed=Suppressed(quarantined=1)),)),
    "behind the committed weights": (OUT, (agent_state(desired=Desired(committed=ONE)),)),
    "other weights of the same version": (
        OUT,
        (
            agent_state(desired=Desired(committed=ONE)),
            engine(version=1, loaded=Committed(1, Checkpoint("other"), None)),
        ),
    ),
    "weights that no sync committed": (OUT, (engine(version=1),)),
    "paused by a command": (KEPT, (agent_state(desired=Desired(generation="paused")), engine(generating=False))),
    "paused, about to resume": (KEPT, (engine(generating=False), under_way(Resume()))),
    "sync is prepared, not paused yet": (KEPT, (agent_state(desired=PREPARING),)),
    "sync is prepared": (KEPT, (agent_state(desired=PREPARING), engine(generating=False))),
    "sync loads": (KEPT, (agent_state(desired=LOADING), engine(generating=False), under_way(Load(1, SOURCE, None)))),
    "sync is loaded": (KEPT, (agent_state(desired=LOADING), engine(generating=False, version=1, loaded=ONE))),
    "sync is loaded, and it generates": (OUT, (agent_state(desired=LOADING), engine(version=1, loaded=ONE))),
    "sync was suppressed, and old weights are held": (
        IN,
        (agent_state(desired=PREPARING, suppressed=Suppressed(sync=1)),),
    ),
    "sync was aborted, and new weights are held": (OUT, (engine(generating=False, version=1, loaded=ONE),)),
    "a trace is being written": (KEPT, (under_way(StopProfile(SESSION, "traces")),)),
    "a trace is written, too slowly": (KEPT, (under_way(StopProfile(SESSION, "traces"), overdue=True),)),
    "it did not resume": (OUT, (engine(generating=False), agent_state(reconcile_blocked=True))),
    "resuming hangs": (OUT, (engine(generating=False), under_way(Resume(), overdue=True))),
}


@pytest.mark.parametrize("case", RULE)
def test_an_agent_is_registered_while_its_engine_serves_or_soon_will(case: str) -> None:
    expected, changes = RULE[case]
    state = machines.agent()
    for change in changes:
        state = change(state)
    assert (routable(state), may_register(state)) == expected
    assert (should_be_registered(state, registered=True), should_be_registered(state, registered=False)) == expected
    second = replace(state, identity=machines.SECOND)
    assert not routable(second) and not may_register(second)


def test_an_agent_whose_bus_is_out_of_reach_removes_its_worker_once_and_leaves_what_its_successor_adds() -> None:
    router = RouterRegistration("http://router:1", "http://worker:1")
    serving = machines.agent()
    lost = replace(serving, bus_lost=True)
    assert router.wants(serving, True)
    assert not router.wants(lost, True), "it removes its worker"
    assert not router.wants(lost, False)
    assert router.wants(lost, True), "another agent has added it"
    assert not router.wants(lost, False), "and removed it"
    assert router.wants(serving, False), "its own bus is back"
    assert not router.wants(lost, True)


def test_urls_and_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router URL 'router:1': give http://HOST:PORT"):
        RouterRegistration("router:1", "http://engine:1")
    with pytest.raises(ConfigError, match=f"router URL for router must not contain credentials.*{KEY_VARIABLE}"):
        RouterRegistration("http://me:secret@router:1", "http://engine:1")
    with pytest.raises(ConfigError, match="engine URL"):
        RouterRegistration("http://router:1", "engine:1")
    assert api_key(None, KEY_VARIABLE) is None
    monkeypatch.setenv(KEY_VARIABLE, "one")
    assert api_key(None, KEY_VARIABLE) == "one" and api_key() is None
    (tmp_path / "key").write_text("two\n")
    monkeypatch.setenv(f"{KEY_VARIABLE}_FILE", str(tmp_path / "key"))
    assert api_key(None, KEY_VARIABLE) == "two"
