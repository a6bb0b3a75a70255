"""Syncs of LoRA adapters on the coordinator: which versions there are, where they are held, and whose files may go."""

from msgspec import Raw
from msgspec.structs import replace

from controlplane.analysis.invariants import verify
from controlplane.machine.adapters import oldest_adapter
from controlplane.machine.fleet_view import FleetView
from controlplane.machine.versions import VERSION_MAX
from schemas.agent_status import AgentStatus
from schemas.commands import (
    AdapterDrop,
    AdapterSync,
    AdapterVersion,
    Drain,
    EngineCommand,
    Manifest,
    Target,
    WeightSync,
)
from schemas.outcomes import Acted, Reason, Skipped
from schemas.wire import MAX_BYTES, Snapshot, encode
from tests.unit.fleets import DONE, NO, Coordinator
from tests.unit.test_report import Recorded

ALREADY = Skipped(Reason.ALREADY)


def version(number: int, name: str = "policy", path: str = "") -> AdapterVersion:
    return AdapterVersion(name=name, version=number, path=path or f"{name}/{number}")


def serving(bus: Coordinator, missing: tuple[str, ...] = (), left: tuple[str, ...] = (), queued: int = 0) -> None:
    """Both replicas report that they serve, as of the newest command."""
    for name in ("0.0", "1.0"):
        report(bus, name, missing, left, queued)


def report(
    bus: Coordinator, name: str, missing: tuple[str, ...] = (), left: tuple[str, ...] = (), queued: int = 0
) -> None:
    status = AgentStatus(
        ready=True,
        tokenizer="present",
        engine="tiny 1",
        generating=True,
        queued=queued,
        adapters_missing=missing,
        adapters_left=left,
    )
    bus.status(name, status, seq=bus.state.seq)


def fleet() -> Recorded:
    bus = Recorded("0.0", "1.0")
    serving(bus)
    return bus


def sync(bus: Coordinator, number: int | None, keep: int = 2, name: str = "policy", through: str = "commit") -> None:
    """Sync a version; every replica acts in each phase up to this one."""
    bus.sync(number, adapter=name, keep=keep, path=f"{name}/{number}")
    for phase in ("prepare", "load", "commit"):
        bus.answer(a0_0=DONE, a1_0=DONE)
        if phase == through:
            return


def where(bus: Coordinator, name: str = "policy") -> tuple[str, tuple[int, ...]] | None:
    status = FleetView(bus.state).adapters.get(name)
    return (status.model, status.replicas) if status is not None else None


def oldest(bus: Coordinator) -> int:
    return oldest_adapter(bus.state, "policy")


def test_a_commit_flips_the_name_at_once_where_the_version_was_loaded() -> None:
    bus = fleet()
    sync(bus, 1)
    bus.sync(2, adapter="policy", path="policy/2", keep=1, quorum=1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.answer(a0_0=DONE, a1_0=NO)
    assert isinstance(bus.published[0], AdapterSync) and bus.published[0].phase == "commit"
    assert where(bus) == ("policy-v2", (0,)), "replica 0 may have unloaded the old version already"
    bus.answer(a0_0=DONE, a1_0=NO)
    assert where(bus) == ("policy-v2", (0,))


def test_a_status_proves_a_version_once_all_that_asked_for_it_is_decided() -> None:
    bus = fleet()
    sync(bus, 1)
    serving(bus)
    assert where(bus) == ("policy-v1", (0, 1))
    report(bus, "1.0", missing=("policy-v1",))
    assert where(bus) == ("policy-v1", (0,))
    report(bus, "1.0", queued=3)
    assert where(bus) == ("policy-v1", (0,))


def test_what_was_discarded_is_proven_again_only_by_a_newer_status() -> None:
    bus = fleet()
    sync(bus, 1)
    bus.issue(EngineCommand(operation="sleep", discard=True))
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.issue(EngineCommand(operation="wake"))
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert where(bus) == ("policy-v1", ())
    report(bus, "0.0")
    assert where(bus) == ("policy-v1", (0,))


def test_what_was_loaded_before_a_late_sleep_discarded_it_is_proven_again_only_by_a_status_after_the_wake() -> None:
    bus = fleet()
    bus.issue(EngineCommand(operation="sleep", discard=True))
    bus.answer(a0_0=NO, a1_0=NO)
    sync(bus, 1)
    report(bus, "1.0")
    bus.issue(EngineCommand(operation="wake"))
    woken = Acted(calls=("check_source", "wake", "load", "resume"))
    bus.answer(a0_0=woken, a1_0=woken)
    assert where(bus) == ("policy-v1", ()), "the engines may have slept since they loaded it, and lost it"
    serving(bus, queued=1)
    assert where(bus) == ("policy-v1", ())
    serving(bus)
    assert where(bus) == ("policy-v1", (0, 1))


def test_a_wake_after_a_sleep_that_kept_the_weights_takes_no_adapter_away() -> None:
    bus = fleet()
    sync(bus, 1)
    for operation in ("sleep", "wake"):
        bus.issue(EngineCommand(operation=operation))
        bus.answer(a0_0=DONE, a1_0=DONE)
    report(bus, "0.0")
    bus.issue(EngineCommand(operation="wake"))
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert where(bus) == ("policy-v1", (0, 1))


def test_a_commit_whose_bus_is_gone_is_a_commit() -> None:
    bus = fleet()
    sync(bus, 1, through="load")
    bus.open()
    for name in ("0.0", "1.0"):
        bus.arrive(name)
    assert bus.state.default_desired.adapters["policy"].versions == (version(1),)
    serving(bus)
    assert where(bus) == ("policy-v1", (0, 1)) and oldest(bus) == 1


def test_a_load_whose_bus_is_gone_is_dropped() -> None:
    bus = fleet()
    sync(bus, 1, through="prepare")
    bus.open()
    for name in ("0.0", "1.0"):
        bus.arrive(name)
    serving(bus, left=("policy-v1",))
    assert where(bus) is None and oldest(bus) == 1
    serving(bus)
    assert oldest(bus) == 0


def test_files_go_once_no_replica_can_read_them_any_more() -> None:
    bus = fleet()
    sync(bus, 1)
    sync(bus, 2, keep=1)
    assert oldest(bus) == 1
    serving(bus, left=("policy-v1",))
    assert oldest(bus) == 1
    serving(bus, queued=1)
    assert oldest(bus) == 1, "the commit may be what it has not decided"
    serving(bus)
    assert oldest(bus) == 2
    bus.lose("1.0")
    sync(bus, 3, keep=1)
    report(bus, "0.0")
    assert oldest(bus) == 2, "a replica that is away may still have it"


def test_a_version_that_one_replica_still_wants_is_not_dropped() -> None:
    bus = fleet()
    sync(bus, 1)
    bus.sync(2, adapter="policy", path="policy/2", keep=1, target=Target(replicas=frozenset({0})))
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=Skipped(Reason.NOT_TARGETED))
    serving(bus)
    assert where(bus) == ("policy-v2", (0,)) and oldest(bus) == 1
    bus.issue(AdapterDrop(name="policy"), target=Target(replicas=frozenset({1})))
    serving(bus)
    assert oldest(bus) == 1, "a replica that is new would get it"


def test_a_drop_names_no_replica_and_lets_all_files_go() -> None:
    bus = fleet()
    sync(bus, 1)
    bus.issue(AdapterDrop(name="policy"))
    assert where(bus) is None and oldest(bus) == 1
    serving(bus)
    assert oldest(bus) == 0


def test_a_version_that_was_dropped_may_come_back_and_counts_once_it_is_committed_again() -> None:
    bus = fleet()
    sync(bus, 1)
    bus.issue(AdapterDrop(name="policy"))
    serving(bus)
    sync(bus, 1, through="prepare")
    assert where(bus) is None and oldest(bus) == 1
    bus.open()
    for name in ("0.0", "1.0"):
        bus.arrive(name)
    serving(bus)
    assert where(bus) is None and oldest(bus) == 0
    sync(bus, 1)
    assert where(bus) == ("policy-v1", (0, 1))


def test_a_version_that_came_back_in_vain_was_committed_all_the_same_and_none_below_it_follows() -> None:
    bus = fleet()
    sync(bus, 6)
    bus.issue(AdapterDrop(name="policy"))
    serving(bus)
    sync(bus, 6, through="prepare")
    for _ in ("load", "abort"):
        bus.answer(a0_0=NO, a1_0=NO)
    bus.sync(3, adapter="policy", path="policy/3")
    assert "v6 is committed, which is newer" in bus.refused[0][2]


def test_a_replica_that_leaves_may_still_read_files_until_it_is_retired() -> None:
    bus = fleet()
    sync(bus, 1)
    bus.issue(AdapterDrop(name="policy"))
    bus.issue(Drain(grace_ms=0), target=Target(replicas=frozenset({1})), timeout_ms=15_000)
    report(bus, "0.0")
    assert oldest(bus) == 1
    bus.answer(a0_0=Skipped(Reason.NOT_TARGETED), a1_0=DONE)
    assert "1.0" in bus.state.retired and oldest(bus) == 0


def test_no_version_is_used_for_another_path_nor_a_path_for_another_version() -> None:
    bus = fleet()
    sync(bus, 1)
    bus.sync(1, adapter="policy", path="elsewhere")
    assert "was used before" in bus.refused[0][2]
    bus.sync(1, adapter="judge", path="policy/1")
    assert "directory of its own" in bus.refused[0][2]


def test_a_hundred_adapters_of_four_versions_reach_a_replica_that_joins_and_more_than_a_message_are_refused() -> None:
    bus = Coordinator("0.0")
    whole = Manifest(tensors=400, nbytes=10**8, layout="a" * 64, content="b" * 64)
    refused = 0
    for number in range(1, 7):
        for tenant in range(100):
            path = f"{'runs/' * 20}{tenant}/{number}"
            bus.sync(number, adapter=f"tenant-{tenant}", path=path, manifest=whole, keep=9)
            refused += bool(bus.refused)
            for _ in range(0 if bus.refused else 3):
                bus.answer(a0_0=DONE)
        assert not refused or number > 4
    assert refused and "drop an adapter" in bus.refused[0][2]
    assert len(encode(Snapshot(desired=bus.state.default_desired))) < MAX_BYTES - 1024


def test_two_syncs_at_once_do_not_share_a_path() -> None:
    bus = fleet()
    bus.sync(1, adapter="policy", path="same")
    bus.sync(1, adapter="judge", path="same")
    assert "in progress" in bus.refused[0][2]


def test_an_adapter_syncs_beside_base_weights_and_belongs_to_them_if_it_says_so() -> None:
    bus = fleet()
    sync(bus, None)
    bus.sync(1, adapter="judge", base=1)
    assert "belongs to base v1" in bus.refused[0][2]
    bus.sync(1)
    bus.sync(2, adapter="policy", path="policy/2")
    assert [type(command.command) for command in bus.state.open] == [WeightSync, AdapterSync]


def test_a_bus_that_closes_aborts_every_sync_and_its_log_is_in_order() -> None:
    bus = fleet()
    bus.sync(1)
    bus.sync(1, adapter="policy", path="policy/1")
    bus.close()
    assert [command.phase for command in bus.published if isinstance(command, WeightSync | AdapterSync)] == [
        "abort"
    ] * 2
    bus.open()
    assert [str(found) for found in verify(bus.entries)] == []


def test_a_path_comes_again_after_64_versions_and_a_log_in_which_it_comes_sooner_is_not_in_order() -> None:
    bus = fleet()
    for number in range(1, 66):
        sync(bus, number, keep=1)
        serving(bus)
    bus.sync(66, adapter="policy", path="policy/2")
    assert "engines may have loaded policy/2 as policy v2" in bus.refused[0][2]
    bus.sync(66, adapter="policy", path="policy/1")
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert isinstance(bus.published[0], AdapterSync) and bus.published[0].phase == "load"
    log = bus.entries
    assert [str(found) for found in verify(log)] == []
    sooner = [replace(line, effects=Raw(bytes(line.effects).replace(b"policy/65", b"policy/64"))) for line in log]
    assert {found.invariant for found in verify(sooner)} == {"I14"}


def test_a_run_can_still_count_on_from_the_largest_version_of_an_adapter_that_may_be_asked_for() -> None:
    bus = fleet()
    bus.sync(VERSION_MAX + 1, adapter="policy", path="beyond")
    assert [refused[1] for refused in bus.refused] == ["command"] and "beyond the largest" in bus.refused[0][2]
    sync(bus, VERSION_MAX)
    assert where(bus) == (f"policy-v{VERSION_MAX}", (0, 1))
    bus.sync(None, adapter="policy", path="next")
    assert bus.state.syncs["policy"].version == VERSION_MAX + 1
