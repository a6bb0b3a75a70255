"""Which weights made the tokens of an answer, by what engines say in it and what the run has proven."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.machine.coordinator import CoordinatorState
from controlplane.machine.fleet_view import FleetView
from controlplane.machine.provenance import Provenance, accepts
from schemas.agent_status import AgentStatus
from schemas.commands import Pushed
from schemas.errors import ConfigError
from tests.unit.fleets import DONE, NO, Coordinator
from tests.unit.test_weights import ALL, BUT_2, ONLY_0, run_phases
from tests.unit.test_weights import fleet as fleet_of_three


def answer(*spans: tuple[str, int, int]) -> dict[str, Any]:
    """What SGLang's `/generate` answers, as far as it matters here."""
    named = [{"version": label, "start": begin, "end": end} for label, begin, end in spans]
    return {"text": "…", "meta_info": {"weight_versions": named, "completion_tokens": spans[-1][2] if spans else 0}}


def committed(*versions: int) -> Coordinator:
    bus = fleet_of_three()
    for version in versions:
        bus.sync(version)
        run_phases(bus, ALL, ALL, ALL)
    return bus


def trace(bus: Coordinator, *spans: tuple[str, int, int], replica: int | None = None) -> Provenance:
    (found,) = FleetView(bus.state).provenance(answer(*spans), replica=replica)
    return found


def proofs(found: Provenance) -> list[tuple[int | None, int | None, str]]:
    return [(span.version, span.staleness, span.proof) for span in found.spans]


# --- what is proven ---------------------------------------------------------------------------------------------------


def test_each_token_has_a_version_its_staleness_and_its_proof() -> None:
    found = trace(committed(1, 2, 3), ("1", 0, 33), ("3", 33, 300))
    assert proofs(found) == [(1, 2, "proven"), (3, 0, "proven")]
    assert (found.tokens, found.mixed, found.staleness, found.proof) == (300, True, 2, "proven")


def test_a_version_is_proven_for_the_replicas_that_were_proven_to_hold_it() -> None:
    bus = fleet_of_three()
    bus.sync(1)
    run_phases(bus, BUT_2, BUT_2, BUT_2)
    assert [trace(bus, ("1", 0, 9), replica=replica).proof for replica in (0, 1, 2)] == ["proven", "proven", "unproven"]
    assert trace(bus, ("1", 0, 9)).proof == "proven", "some replica holds it"
    bus.lose("2.0")
    bus.arrive("2.0", incarnation="b")
    status = AgentStatus(ready=True, generating=True, tokenizer="present", engine="tiny", version=1)
    bus.status("2.0", status, seq=bus.state.seq, incarnation="b")
    assert trace(bus, ("1", 0, 9), replica=2).proof == "proven", "it was brought to v1 when it came back"


def test_what_a_replica_was_once_proven_to_hold_stays_proven_for_answers_that_come_late() -> None:
    bus = committed(1, 2)
    bus.lose("1.0")
    assert trace(bus, ("1", 0, 9), replica=1).proof == "proven"


def test_a_label_that_an_engine_was_launched_under_proves_nothing_of_what_its_replica_says_from_then_on() -> None:
    """Its tokens of before may still come, and can't be told from those of the launch."""
    bus = committed(1, 2)
    status = AgentStatus(ready=False, tokenizer="present", engine="sglang", torn=True, launch_label="2")
    bus.status("1.0", status, seq=bus.state.seq)
    serves = AgentStatus(ready=True, generating=True, tokenizer="present", engine="sglang", version=2)
    bus.status("1.0", serves, seq=bus.state.seq)
    proof = {(label, replica): trace(bus, (label, 0, 9), replica=replica).proof for label in "12" for replica in (0, 1)}
    assert proof == {("1", 0): "proven", ("1", 1): "proven", ("2", 0): "proven", ("2", 1): "unproven"}
    for label in ("5", ""):
        bus.status("1.0", replace(status, launch_label=label or None), seq=bus.state.seq)
        bus.status("1.0", serves, seq=bus.state.seq)
        assert trace(bus, ("2", 0, 9), replica=1).proof == "unproven", "it was launched again, under another label"
    bus.status("0.0", replace(status, launch_label="4"), seq=bus.state.seq)
    bus.status("0.0", serves, seq=bus.state.seq)
    for version in (3, 4):
        bus.sync(version)
        run_phases(bus, ALL, ALL, ALL)
    bus.open()
    assert [trace(bus, ("4", 0, 9), replica=replica).proof for replica in (0, 1)] == ["unproven", "proven"]


def test_weights_of_a_sync_that_was_aborted_are_never_accepted() -> None:
    bus = committed(1)
    bus.sync(2)
    run_phases(bus, ALL, ONLY_0, ALL)
    found = trace(bus, ("1", 0, 3), ("2", 3, 9), replica=0)
    assert (found.proof, found.staleness) == ("aborted", 0)
    verdict = accepts(found, unproven=True)
    assert not verdict
    assert verdict.reason == "it has tokens of weights that were not proven: 0-3 '1' (proven), 3-9 '2' (aborted)"


def test_while_a_sync_is_open_its_weights_are_unproven() -> None:
    bus = committed(1)
    bus.sync(2)
    run_phases(bus, ALL)
    assert trace(bus, ("2", 0, 9), replica=0).proof == "unproven"
    run_phases(bus, ALL, ALL)
    assert trace(bus, ("2", 0, 9), replica=0).proof == "proven"


def test_weights_of_the_launch_count_until_others_are_committed() -> None:
    assert proofs(trace(fleet_of_three(), ("default", 0, 9))) == [(0, 0, "launch")]
    assert accepts(trace(fleet_of_three(), ("default", 0, 9)), max_staleness=0)
    assert proofs(trace(committed(1, 2), ("default", 0, 9))) == [(0, 2, "unproven")]


def test_a_label_that_the_run_does_not_know_is_unknown() -> None:
    found = trace(committed(1), ("17", 0, 9), replica=0)
    assert proofs(found) == [(None, None, "unknown")]
    assert not accepts(found)
    assert "its staleness is not known" in accepts(found, unproven=True, max_staleness=3).reason
    assert accepts(found, unproven=True)


def test_a_pushed_label_stands_for_the_version_that_it_was_pushed_as() -> None:
    bus = fleet_of_three()
    bus.sync(4, source=Pushed("step-40"))
    run_phases(bus, ALL, ALL, ALL)
    assert proofs(trace(bus, ("step-40", 0, 9), replica=1)) == [(4, 0, "proven")]


# --- adapters ---------------------------------------------------------------------------------------------------------


def adapted() -> Coordinator:
    """Two replicas hold policy-v1, one of them v2 too."""
    bus = Coordinator("0.0", "1.0")
    status = AgentStatus(ready=True, generating=True, tokenizer="present", engine="tiny")
    for name in ("0.0", "1.0"):
        bus.status(name, status, seq=bus.state.seq)
    for version, second in ((1, DONE), (2, NO)):
        bus.sync(version, adapter="policy", path=f"policy/{version}", quorum=1)
        bus.answer(a0_0=DONE, a1_0=DONE)
        bus.answer(a0_0=DONE, a1_0=second)
        bus.answer(a0_0=DONE, a1_0=second)
    return bus


def test_of_an_adapter_the_name_counts_and_not_the_label_of_the_engine() -> None:
    """The label is the engine's: it moves on while requests of an older version of an adapter run."""
    view = FleetView(adapted().state)
    spans = answer(("20", 0, 32), ("21", 32, 1200))
    (found,) = view.provenance(spans, replica=1, model="policy-v1")
    assert (found.adapter, found.mixed, found.tokens) == ("policy", False, 1200)
    assert proofs(found) == [(1, 1, "proven")]
    completion = {"model": "policy-v2", "choices": [{"text": "…"}], "usage": {"completion_tokens": 7}}
    assert [view.provenance(completion, replica=replica)[0].proof for replica in (0, 1)] == ["proven", "unproven"]


def test_a_replica_that_has_loaded_a_version_is_proven_to_hold_it_from_its_commit_on() -> None:
    """It is listed for the version at once, and may answer before it has heard of the commit."""
    bus = adapted()
    bus.sync(3, adapter="policy", path="policy/3", quorum=1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.answer(a0_0=DONE, a1_0=NO)
    view = FleetView(bus.state)
    assert view.adapters["policy"].replicas == (0,)
    completion = {"model": "policy-v3", "choices": [{"text": "…"}], "usage": {"completion_tokens": 7}}
    assert [view.provenance(completion, replica=replica)[0].proof for replica in (0, 1)] == ["proven", "unproven"]


def test_a_name_that_is_no_adapter_of_the_run_leaves_the_labels_to_count() -> None:
    (found,) = FleetView(committed(1).state).provenance({"model": "qwen", **answer(("1", 0, 5))})
    assert (found.adapter, found.proof) == ("", "proven")


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_a_sequence_is_refused_with_its_reason() -> None:
    bus = committed(1, 2, 3)
    assert accepts(trace(bus, ("1", 0, 9)), max_staleness=2)
    assert accepts(trace(bus, ("1", 0, 9)), max_staleness=1).reason == (
        "it is 2 versions behind, of at most 1: 0-9 '1' (proven)"
    )
    mixed = trace(bus, ("2", 0, 4), ("3", 4, 9))
    assert accepts(mixed)
    assert accepts(mixed, mixed=False).reason == ("more than one version made it: 0-4 '2' (proven), 4-9 '3' (proven)")


def test_a_sequence_without_tokens_is_accepted() -> None:
    (found,) = FleetView(CoordinatorState()).provenance({"choices": [{"token_ids": [], "weight_versions": []}]})
    assert accepts(found, max_staleness=0, mixed=False) and found.staleness is None


# --- what engines answer ----------------------------------------------------------------------------------------------


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Output:
    """A `CompletionOutput` of vLLM, or a `TokenOutput` of verl."""

    token_ids: list[int]
    weight_versions: list[Span] | None = None
    extra_fields: dict[str, int] = field(default_factory=dict)


@dataclass
class RequestOutput:
    outputs: list[Output]


SPANS = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}]
BOTH = [("1", 0, 2), ("2", 2, 3)]


@pytest.mark.parametrize(
    ("said", "labels"),
    [
        ({"meta_info": {"weight_versions": SPANS, "weight_version": "2", "completion_tokens": 3}}, [BOTH]),
        ({"meta_info": {"weight_version": "2", "completion_tokens": 3}}, [[("2", 0, 3)]]),
        (
            {"choices": [{}], "usage": {"completion_tokens": 3}, "metadata": {"weight_versions": SPANS}},
            [BOTH],
        ),
        ({"choices": [{}], "usage": {"completion_tokens": 3}, "metadata": {"weight_version": "1"}}, [[("1", 0, 3)]]),
        ({"choices": [{"token_ids": [5, 6, 7], "weight_versions": SPANS}]}, [BOTH]),
        (RequestOutput([Output([5, 6, 7], [Span("1", 0, 2), Span("2", 2, 3)]), Output([5], [Span("2", 0, 1)])]),
         [BOTH, [("2", 0, 1)]]),
        (Output([5, 6], extra_fields={"global_steps": 1}), [[("1", 0, 2)]]),
        (Output([5, 6], extra_fields={"global_steps": 2, "min_global_steps": 1, "max_global_steps": 2}),
         [[("1", 0, 2), ("2", 2, 2)]]),
        ([answer(("1", 0, 2)), answer(("2", 0, 3))], [[("1", 0, 2)], [("2", 0, 3)]]),
    ],
    ids=[
        *("sglang generate", "sglang before 0.5.20", "sglang completions", "sglang label", "vllm generate"),
        *("vllm in process", "verl", "verl over two steps", "a batch"),
    ],
)  # fmt: skip
def test_the_shapes_of_each_engine_are_read(said: object, labels: list[list[tuple[str, int, int]]]) -> None:
    found = FleetView(committed(1, 2).state).provenance(said)
    assert [[(span.label, span.begin, span.end) for span in one.spans] for one in found] == labels
    assert {one.proof for one in found} == {"proven"}


def test_an_answer_that_says_nothing_of_its_weights_is_an_error_that_says_where_they_are_said() -> None:
    view = FleetView(committed(1).state)
    with pytest.raises(ConfigError, match=r"from 0\.33 on with return_weight_versions"):
        view.provenance({"choices": [{"text": "…"}], "usage": {"completion_tokens": 3}})
    with pytest.raises(ConfigError, match="how many tokens"):
        view.provenance({"choices": [{"text": "…"}, {"text": "…"}], "metadata": {"weight_version": "1"}})
