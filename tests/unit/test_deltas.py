"""Syncs that name a delta: which replicas load it, what is checked of it, and what is said and remembered."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from controlplane.machine.fleet_view import FleetView
from schemas.commands import Broadcast, Checkpoint, EngineCommand, WeightSync
from schemas.desired import Committed, Desired
from schemas.errors import CheckpointError
from schemas.events import CheckSource, EngineReturned, Load, Observation, Returned, SnapshotReceived
from schemas.outcomes import BY_DELTA, Acted, Outcome
from schemas.safetensors.format import TensorSpec, find_tensors
from schemas.safetensors.manifest import build_manifest, find_delta
from tests.unit.fleets import Coordinator
from tests.unit.machines import PRESENT, agent, answers, carry_out, command, fold, observed, performed, sync
from workers.engines.checkpoint import SourceChecker, Taken, missing_beside
from workers.engines.sglang.engine import path_to_load
from workers.engines.sglang.launch import read_launch
from workers.machine.state import AgentState

V2 = Checkpoint("v2", delta="v2-delta", base=1)
WHOLE = Checkpoint("v2")
PREPARE = WeightSync(phase="prepare", version=2, source=V2)
COMMIT = WeightSync(phase="commit", version=2, source=WHOLE)
LABELLED = replace(PRESENT, label="default")


# --- an agent ---------------------------------------------------------------------------------------------------------


def at_base(seen: Observation = PRESENT) -> tuple[AgentState, Observation]:
    """An agent whose engine has loaded version 1, which was committed."""
    state = agent(seen=seen)
    for seq, phase in enumerate((sync("prepare"), sync("load"), sync("commit")), 1):
        state, effects = fold(state, command(phase, seq))
        state, _, seen = carry_out(state, effects, seen)
    return state, seen


def sources(state: AgentState, seen: Observation) -> tuple[list[object], AgentState]:
    """What the agent checks and loads in a sync by delta."""
    taken: list[object] = []
    for seq, phase in enumerate((PREPARE, sync("load", 2), COMMIT), state.seq + 1):
        state, effects = fold(state, command(phase, seq))
        state, calls, seen = carry_out(state, effects, seen)
        taken += [(type(call), call.source) for call in calls if isinstance(call, CheckSource | Load)]
    return taken, state


def test_a_replica_that_serves_the_base_checks_the_delta_before_the_pause_and_loads_it() -> None:
    taken, state = sources(*at_base())
    assert taken == [(CheckSource, V2), (Load, V2)]
    assert state.engine.loaded == state.desired.committed == Committed(2, WHOLE, None)
    assert state.engine.generating is True


def torn(state: AgentState) -> AgentState:
    return replace(state, engine=replace(state.engine, torn=True))


def relabelled(state: AgentState) -> AgentState:
    return replace(state, engine=replace(state.engine, label="of others"))


def pushed_to(state: AgentState) -> AgentState:
    return replace(state, engine=replace(state.engine, maybe_pushed=True))


def without_a_load(state: AgentState) -> AgentState:
    return replace(state, engine=replace(state.engine, loaded=None))


def of_another_source(state: AgentState) -> AgentState:
    return replace(state, engine=replace(state.engine, loaded=Committed(1, Checkpoint("other"), None)))


def quarantined(state: AgentState) -> AgentState:
    return replace(state, desired=replace(state.desired, quarantined=1))


def with_another_committed(state: AgentState) -> AgentState:
    return replace(state, desired=Desired(committed=Committed(7, Checkpoint("v7"), None)))


@pytest.mark.parametrize(
    "changed",
    [torn, relabelled, pushed_to, without_a_load, of_another_source, quarantined, with_another_committed],
)
def test_a_replica_that_is_not_known_to_serve_the_base_loads_all(changed: Callable[[AgentState], AgentState]) -> None:
    state, seen = at_base()
    version = 8 if changed is with_another_committed else 2
    state, effects = fold(changed(state), command(replace(PREPARE, version=version), 4))
    state, calls, seen = carry_out(state, effects, seen)
    state, effects = fold(state, command(sync("load", version), 5))
    loaded = [call.source for call in (*calls, *performed(effects)) if isinstance(call, CheckSource | Load)]
    assert loaded and set(map(repr, loaded)) == {repr(WHOLE)}


def test_an_engine_that_is_launched_again_between_the_check_and_the_load_loads_all() -> None:
    state, seen = at_base()
    state, effects = fold(state, command(PREPARE, 4))
    state, calls, seen = carry_out(state, effects, seen)
    assert CheckSource(V2, None, 2) in calls
    relaunched = replace(seen, instance="two", version=0, generating=True)
    state, effects = fold(state, observed(relaunched))
    state, checked, relaunched = carry_out(state, effects, relaunched)
    state, effects = fold(state, command(sync("load", 2), 5))
    _, calls, _ = carry_out(state, effects, relaunched)
    assert [call.source for call in (*checked, *calls) if isinstance(call, CheckSource | Load)] == [WHOLE, WHOLE]


@pytest.mark.parametrize("seen_after", [True, False], ids=["seen", "seen later"])
def test_a_delta_that_another_launch_may_have_taken_is_not_trusted(seen_after: bool) -> None:
    """It was launched again right before the call: it has the label of the version now, and other weights."""
    state, seen = at_base()
    state, effects = fold(state, command(PREPARE, 4))
    state, _, seen = carry_out(state, effects, seen)
    state, effects = fold(state, command(sync("load", 2), 5))
    assert [call.source for call in performed(effects) if isinstance(call, Load)] == [V2]
    relaunched = replace(seen, instance="two", version=2, label="2")
    assert state.activity is not None
    done = EngineReturned(
        at_ms=1,
        call_id=state.activity.call_id,
        result=Returned(took="delta"),
        observation=relaunched if seen_after else None,
    )
    state, effects = fold(state, done, observed(relaunched))
    assert state.engine.torn
    state, by_itself, relaunched = carry_out(state, effects, relaunched)
    state, effects = fold(state, command(COMMIT, 6))
    _, calls, _ = carry_out(state, effects, relaunched)
    assert [call.source for call in (*by_itself, *calls) if isinstance(call, Load)] == [WHOLE]


def test_an_engine_that_does_not_tell_its_launches_apart_loads_all() -> None:
    taken, _ = sources(*at_base(replace(PRESENT, instance=None)))
    assert taken == [(CheckSource, WHOLE), (Load, WHOLE)]


def test_an_agent_that_joins_during_the_load_loads_all() -> None:
    state, seen = at_base()
    prepared, effects = fold(state, command(PREPARE, 4))
    prepared, _, paused = carry_out(prepared, effects, seen)
    loading, _ = fold(prepared, command(sync("load", 2), 5))
    late, effects = fold(state, SnapshotReceived(at_ms=0, epoch=1, seq=9, desired=loading.desired))
    _, calls, _ = carry_out(late, effects, paused)
    assert [call.source for call in calls if isinstance(call, CheckSource | Load)] == [WHOLE, WHOLE]


def test_weights_that_came_by_a_delta_and_were_discarded_are_loaded_from_the_whole() -> None:
    state, seen = at_base()
    for seq, phase in enumerate((PREPARE, sync("load", 2), COMMIT), 4):
        state, effects = fold(state, command(phase, seq))
        state, _, seen = carry_out(state, effects, seen)
    state, effects = fold(state, command(EngineCommand(operation="sleep", discard=True), 7))
    state, _, seen = carry_out(state, effects, seen)
    state, effects = fold(state, command(EngineCommand(operation="wake"), 8))
    _, calls, _ = carry_out(state, effects, seen)
    assert [call.source for call in calls if isinstance(call, CheckSource | Load)] == [WHOLE, WHOLE]


@pytest.mark.parametrize("reported", ["delta", "whole: it fuses them", ""])
def test_the_answer_says_what_was_taken(reported: str) -> None:
    state, seen = at_base()
    state, effects = fold(state, command(PREPARE, 4))
    state, _, seen = carry_out(state, effects, seen)
    if not reported:
        state = torn(state)
    state, effects = fold(state, command(sync("load", 2), 5))
    while (activity := state.activity) is not None:
        loads = isinstance(activity.calls[0], Load)
        seen = replace(seen, version=2 if loads else seen.version)
        result = Returned(took=reported if loads else "")
        done = EngineReturned(at_ms=1, call_id=activity.call_id, result=result, observation=seen)
        state, effects = fold(state, done)
    (answer,) = answers(effects)
    assert isinstance(answer.outcome, Acted)
    assert answer.outcome.took == (reported or "whole: it takes no delta, or was not known to hold version 1")


def test_a_delta_needs_a_base_and_a_base_a_delta() -> None:
    for delta, base in (("d", 0), ("", 1)):
        with pytest.raises(ValueError, match="a delta needs its base"):
            Checkpoint("v2", delta, base)


# --- the coordinator --------------------------------------------------------------------------------------------------


def test_the_delta_is_named_until_the_commit_and_its_files_are_needed_as_long() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=Acted(calls=()), a1_0=Acted(calls=()))
    bus.sync(2, source=V2)
    seen = list(bus.published)
    load: dict[str, Outcome] = {"a0_0": Acted(calls=(), took=BY_DELTA), "a1_0": Acted(calls=(), took="whole: no")}
    for outcomes in ({"a0_0": Acted(calls=()), "a1_0": Acted(calls=())}, load):
        assert FleetView(bus.state).needed_checkpoints == {"v1", "v2", "v2-delta"}
        bus.answer(**outcomes)
        seen += bus.published
    assert seen == [replace(PREPARE, in_flight="wait"), WeightSync(phase="load", version=2), COMMIT]
    bus.answer(a0_0=Acted(calls=()), a1_0=Acted(calls=()))
    assert FleetView(bus.state).needed_checkpoints == {"v2"}
    (report,) = bus.synced
    assert (report.loaded, report.by_delta) == ((0, 1), (0,))
    assert report.headline == "weights v2 committed on replicas 0, 1, by a delta on replica 0"


def test_a_version_stands_for_the_same_weights_with_another_delta_or_none() -> None:
    bus = Coordinator("0.0")
    bus.sync(2, source=V2)
    bus.answer(a0_0=Acted(calls=()))
    bus.answer(a0_0=Acted(calls=(), took=BY_DELTA))
    bus.answer(a0_0=Acted(calls=()))
    for source in (WHOLE, Checkpoint("v2", delta="smaller", base=1)):
        bus.sync(2, source=source)
        assert bus.refused == []
        bus.answer(a0_0=Acted(calls=()))
        bus.answer(a0_0=Acted(calls=()))
        bus.answer(a0_0=Acted(calls=()))


# --- the files --------------------------------------------------------------------------------------------------------

BASE = {"a": torch.zeros(2, 3), "b": torch.ones(4), "c": torch.ones(4)}
NEW = BASE | {"b": torch.full((4,), 2.0)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With the whole of version 2, and its delta. Both were written some time ago."""
    save(tmp_path / "v2", NEW)
    save(tmp_path / "v2-delta", {"b": NEW["b"]})
    return tmp_path


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", ns=(0, 0))


@pytest.mark.parametrize("content", [False, True])
def test_a_part_of_the_whole_is_taken(root: Path, content: bool) -> None:
    manifest, checker = build_manifest(root / "v2", content), SourceChecker(root)
    place = root.resolve()
    for _ in range(2):
        assert checker.checked_directory(V2, manifest, None) == Taken(place / "v2", place / "v2-delta", BY_DELTA)
    assert checker.checked_directory(WHOLE, manifest, None) == Taken(place / "v2")
    found = checker.checked_directory(V2, manifest, None, lambda changed, whole: f"{[*changed]} of {len(whole)}")
    assert found == Taken(place / "v2", None, "whole: ['b'] of 3")


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        ({"b": NEW["b"], "d": torch.ones(4)}, r"holds 'd' \(F32 \[4\]\), which the whole checkpoint has not at all"),
        ({"b": torch.ones(5)}, r"holds 'b' \(F32 \[5\]\), which the whole checkpoint has as F32 \[4\]"),
        ({"b": NEW["b"].half()}, r"holds 'b' \(F16 \[4\]\), which the whole checkpoint has as F32 \[4\]"),
        ({"b": BASE["b"]}, "has the right tensors with other values"),
        ({}, "holds no tensor"),
    ],
    ids=["another name", "another shape", "another dtype", "other bytes", "nothing"],
)
def test_what_is_no_part_of_the_whole_is_refused(root: Path, delta: dict[str, torch.Tensor], message: str) -> None:
    manifest = build_manifest(root / "v2", content=True)
    save(root / "v2-delta", delta)
    with pytest.raises(CheckpointError, match=message):
        SourceChecker(root).checked_directory(V2, manifest, None)


def test_a_delta_that_is_cut_off_or_outside_is_refused(root: Path) -> None:
    manifest, file = build_manifest(root / "v2", content=False), root / "v2-delta" / "model.safetensors"
    checker = SourceChecker(root)
    checker.checked_directory(V2, manifest, None)
    os.truncate(file, 20)
    with pytest.raises(CheckpointError, match="cut off"):
        checker.checked_directory(V2, manifest, None)
    with pytest.raises(CheckpointError, match="holds `..`"):
        checker.checked_directory(Checkpoint("v2", "../v2-delta", 1), manifest, None)


def test_the_whole_is_read_if_an_engine_takes_no_delta_so_its_bytes_are_digested(root: Path) -> None:
    manifest = build_manifest(root / "v2", content=True)
    save(root / "v2", BASE)
    assert SourceChecker(root).checked_directory(V2, manifest, None).delta is not None
    with pytest.raises(CheckpointError, match="other values"):
        SourceChecker(root).checked_directory(V2, manifest, None, lambda *_: "it takes none")


def test_places_are_those_of_the_delta(root: Path) -> None:
    whole = find_tensors(root / "v2")
    assert [*find_delta(root / "v2-delta", whole)] == ["b"]


# --- what engines can load alone --------------------------------------------------------------------------------------

FLOAT, EIGHT = TensorSpec("BF16", (2, 2)), TensorSpec("F8_E4M3", (2, 2))
AT = "model.layers.0."
DENSE = dict.fromkeys(
    (
        *(f"{AT}self_attn.{name}_proj.{part}" for name in "qkv" for part in ("weight", "bias")),
        *(f"{AT}self_attn.{name}.weight" for name in ("o_proj", "q_norm", "k_norm")),
        *(f"{AT}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"{AT}input_layernorm.weight", f"{AT}conv.x.weight", f"{AT}conv.y.weight", "lm_head.weight"),
        *("model.embed_tokens.weight", "model.norm.weight"),
    ),
    FLOAT,
)


def lacks(*names: str, whole: dict[str, TensorSpec] = DENSE, precision: str = "torch.bfloat16 None") -> str:
    changed = {name: whole[name] for name in names}
    fusing = missing_beside(changed, whole, precision=precision, fuses=True)
    if fusing.startswith("the engine fuses"):
        assert missing_beside(changed, whole, precision=precision, fuses=False) == ""
        return fusing.rpartition(" ")[2].strip("'")
    assert missing_beside(changed, whole, precision=precision, fuses=False) == fusing
    return fusing


@pytest.mark.parametrize(
    "names",
    [
        [name for name in DENSE if "_proj" in name and name[-9] in "qkv" or ".q_proj" in name or ".k_proj" in name],
        [f"{AT}mlp.gate_proj.weight", f"{AT}mlp.up_proj.weight"],
        *([f"{AT}self_attn.o_proj.weight"], [f"{AT}mlp.down_proj.weight"], [f"{AT}self_attn.q_norm.weight"]),
        *([f"{AT}input_layernorm.weight"], ["lm_head.weight", "model.norm.weight"], ["model.embed_tokens.weight"]),
        [f"{AT}conv.x.weight", f"{AT}conv.y.weight"],
        [*DENSE],
    ],
)
def test_whole_modules_can_be_loaded_alone(names: list[str]) -> None:
    names = (
        [*{*names, f"{AT}self_attn.v_proj.weight", f"{AT}self_attn.v_proj.bias"}] if "q_proj" in str(names) else names
    )
    assert lacks(*names) == ""


@pytest.mark.parametrize(
    ("names", "lacking"),
    [
        ([f"{AT}self_attn.q_proj.weight", f"{AT}self_attn.q_proj.bias"], f"{AT}self_attn.k_proj.weight"),
        ([f"{AT}self_attn.{name}_proj.weight" for name in "qkv"], f"{AT}self_attn.q_proj.bias"),
        ([f"{AT}mlp.gate_proj.weight"], f"{AT}mlp.up_proj.weight"),
        ([f"{AT}conv.x.weight"], f"{AT}conv.y.weight"),
    ],
    ids=["q alone", "without biases", "gate alone", "of modules that are not known"],
)
def test_parts_of_fused_modules_can_not(names: list[str], lacking: str) -> None:
    assert lacks(*names) == lacking


def test_experts_and_quantized_weights_can_not() -> None:
    experts = DENSE | {f"{AT}mlp.experts.0.down_proj.weight": FLOAT}
    for case in (
        lacks("lm_head.weight", whole=experts),
        lacks("lm_head.weight", whole=DENSE | {"x": EIGHT}),
        lacks("lm_head.weight", precision="torch.bfloat16 fp8"),
    ):
        assert case == "no delta of experts or of quantized weights was seen to be right"


def test_sglang_reports_the_whole_checkpoint_after_a_delta(root: Path) -> None:
    whole, delta = (root / name for name in ("v2", "v2-delta"))
    path = path_to_load(Taken(whole, delta, BY_DELTA))
    assert Path(path).resolve() == delta.resolve() and (Path(path) / "model.safetensors").is_file()
    assert read_launch({"model_path": path}, {}).model == str(whole)
    assert path_to_load(Taken(whole)) == str(whole) == read_launch({"model_path": str(whole)}, {}).model
    assert read_launch({}, {}).model is None


def test_other_sources_are_as_they_were() -> None:
    cast = Broadcast(host="h", port=1, group="g", replicas=(0,))
    state, _ = fold(agent(), command(WeightSync(phase="prepare", version=2, source=cast)))
    assert state.desired.sync is not None and state.desired.sync.source == cast
