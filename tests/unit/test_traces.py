"""The traces that a session left on a node's disk: which are listed, where they are, and how the profiling ends."""

import gzip
import json
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest

from schemas.commands import Finish, ProfilePlan
from schemas.desired import ProfileSession
from schemas.errors import EngineError
from schemas.events import CollectTraces, FinishProfile, Returned
from schemas.identity import Identity
from schemas.outcomes import Trace
from schemas.selection import trace_directory
from tests.running import files_of_at_most
from tests.waiting import wait_until
from workers.driver import checked_result
from workers.traces import node as traces
from workers.traces.node import MAX_LISTED, WAIT_S, NodeTraces, collect_traces, move_trace, relocate_traces

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

# Replica 4 of two nodes with two GPUs each: global ranks 16 to 19.
FIRST = Identity(replica=4, node_rank=0, nnodes=2, gpus_per_node=2)
SECOND = Identity(replica=4, node_rank=1, nnodes=2, gpus_per_node=2)


def written(root: Path, plan: ProfilePlan, step: int = 1, ranks: range = range(4)) -> str:
    """Write what SGLang writes to a disk that its nodes share: one trace for each rank of the tensor-parallel group."""
    directory = trace_directory(step, plan, FIRST)
    (root / directory).mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        trace = {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 4}, "traceEvents": []}
        with gzip.open(root / directory / f"{step}-TP-{rank}.trace.json.gz", "wt") as file:
            json.dump(trace, file)
    return directory


def names(root: Path, pattern: str) -> list[str]:
    return [file.name for file in root.glob(pattern)]


def ranks_of(found: Returned) -> list[int | None]:
    return [trace.rank for trace in found.traces]


@pytest.mark.parametrize(
    ("ranks", "replicas", "first", "second"),
    [
        (None, None, [16, 17], [18, 19]),
        ({16, 19}, None, [16], [19]),
        ({17}, None, [17], []),
        (None, {4}, [16, 17], [18, 19]),
        ({16}, {4}, [16, 17], [18, 19]),
        ({3}, {5}, [], []),
    ],
)
def test_only_selected_ranks_are_listed_each_by_its_own_node(
    tmp_path: Path, ranks: set[int] | None, replicas: set[int] | None, first: list[int], second: list[int]
) -> None:
    plan = ProfilePlan(
        ranks=frozenset(ranks) if ranks is not None else None,
        replicas=frozenset(replicas) if replicas is not None else None,
    )
    directory = written(tmp_path, plan)
    collected = [collect_traces(tmp_path, directory, plan, node) for node in (FIRST, SECOND)]
    assert [ranks_of(found) for found in collected] == [first, second]
    assert [found.ranks_without_trace for found in collected] == [(), ()]
    assert len(list((tmp_path / directory).iterdir())) == 4, "the rest stays where it is"


def test_selected_ranks_without_a_trace_are_named(tmp_path: Path) -> None:
    plan = ProfilePlan(ranks=frozenset({16, 17, 18}))
    directory = written(tmp_path, plan, ranks=range(1))
    found = collect_traces(tmp_path, directory, plan, FIRST)
    assert (ranks_of(found), found.ranks_without_trace) == ([16], (17,))
    assert collect_traces(tmp_path, "global_step_9/replica_4", plan, SECOND) == Returned(ranks_without_trace=(18,))


def test_a_trace_that_is_cut_off_is_an_error_if_its_rank_is_selected(tmp_path: Path) -> None:
    plan = ProfilePlan(ranks=frozenset({16}))
    directory = written(tmp_path, plan)
    cut = tmp_path / directory / "1-TP-1.trace.json.gz"
    cut.write_bytes(cut.read_bytes()[:-6])
    assert ranks_of(collect_traces(tmp_path, directory, plan, FIRST)) == [16]
    with pytest.raises(EngineError, match="cut off"):
        collect_traces(tmp_path, directory, ProfilePlan(), FIRST)


def test_an_empty_trace_is_cut_off_though_its_archive_is_complete(tmp_path: Path) -> None:
    """torch leaves such a file on a full disk."""
    plan = ProfilePlan()
    directory = written(tmp_path, plan, ranks=range(1))
    (tmp_path / directory / "2-TP-0.trace.json.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(EngineError, match="cut off.*disk full"):
        collect_traces(tmp_path, directory, plan, FIRST)


def test_files_without_a_rank_inside_have_the_rank_of_their_name_and_a_front_end_has_none(tmp_path: Path) -> None:
    directory = written(tmp_path, ProfilePlan(), ranks=range(1))
    for name in (
        *("p-17.5-TP-1-memory.pickle", "p_dp0_pp0_tp1_dcp0_ep1_rank1.profiler_out.txt"),
        "p_host_17.async_llm.18.pt.trace.json",
    ):
        (tmp_path / directory / name).write_text("{}")
    found = collect_traces(tmp_path, directory, ProfilePlan(ranks=frozenset({17, 18})), FIRST)
    assert {trace.path.rpartition("/")[2]: trace.rank for trace in found.traces} == {
        "p-17.5-TP-1-memory.pickle": 17,
        "p_dp0_pp0_tp1_dcp0_ep1_rank1.profiler_out.txt": 17,
        "p_host_17.async_llm.18.pt.trace.json": None,
    }
    other = collect_traces(tmp_path, directory, ProfilePlan(ranks=frozenset({18})), SECOND)
    assert (other.traces, other.ranks_without_trace) == ((), (18,)), "a front end runs beside the first rank alone"
    assert collect_traces(tmp_path, directory, ProfilePlan(ranks=frozenset({18})), FIRST).traces == ()
    relocated = [relocate_traces(tmp_path, (directory,), ProfilePlan(), node) for node in (SECOND, FIRST)]
    assert [len(traces) for traces in relocated] == [0, 4]


def test_verls_layout_has_the_traces_of_all_steps_in_one_directory(tmp_path: Path) -> None:
    plan = ProfilePlan(layout="verl")
    for step in (1, 2):
        directory = written(tmp_path, plan, step)
        collected = [collect_traces(tmp_path, directory, plan, node) for node in (FIRST, SECOND)]
        assert [trace.path for found in collected for trace in found.traces] == [
            f"agent_loop_rollout_replica_4/{step}-TP-{rank}.trace.json.gz" for rank in range(4)
        ]
    assert len(list((tmp_path / "agent_loop_rollout_replica_4").iterdir())) == 8


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    plan = ProfilePlan(layout="verl")
    collect_traces(tmp_path, written(tmp_path, plan), plan, FIRST)
    again = written(tmp_path, plan)
    with pytest.raises(EngineError, match="exists already"):
        collect_traces(tmp_path, again, plan, FIRST)
    assert (tmp_path / again / "1-TP-0.trace.json.gz").exists()


# --- after the last session -------------------------------------------------------------------------------------------


def finish(plan: ProfilePlan, *steps: int, place: Identity = FIRST) -> FinishProfile:
    return FinishProfile(plan, tuple(trace_directory(step, plan, place) for step in steps), steps)


async def test_traces_of_selected_ranks_are_relocated_under_verls_names(tmp_path: Path) -> None:
    plan = ProfilePlan(ranks=frozenset({16, 18}), finish=Finish(relocate=True))
    for step in (1, 2):
        written(tmp_path, plan, step)
    found = await NodeTraces(tmp_path, FIRST).perform(finish(plan, 1, 2, 3))
    assert [(trace.path, trace.rank) for trace in found.traces] == [
        ("rollout-replica4-globalrank16_1-TP-0.trace.json.gz", 16),
        ("rollout-replica4-globalrank16_2-TP-0.trace.json.gz", 16),
    ]
    await NodeTraces(tmp_path, SECOND).perform(finish(plan, 1, 2, place=SECOND))
    assert len(names(tmp_path, "rollout-replica4-globalrank18_*")) == 2
    assert len(names(tmp_path, "global_step_1/replica_4/*")) == 2, "ranks 17 and 19 stay"


async def test_a_relocated_trace_of_a_single_rank_has_no_global_rank_in_its_name(tmp_path: Path) -> None:
    plan, place = ProfilePlan(finish=Finish(relocate=True)), Identity(replica=2, node_rank=0)
    directory = tmp_path / trace_directory(1, plan, place)
    directory.mkdir(parents=True)
    (directory / "x.trace.json").write_text(json.dumps({"distributedInfo": {"rank": 0}}))
    found = await NodeTraces(tmp_path, place).perform(finish(plan, 1, place=place))
    assert [trace.path for trace in found.traces] == ["rollout-replica2_x.trace.json"]
    assert not directory.exists()


@pytest.mark.parametrize(
    ("layout", "moves"), [("step", ["actor-rank3_step_1_x.trace.json"]), ("verl_step", []), ("verl", [])]
)
def test_a_training_rank_relocates_only_what_is_in_its_own_directory(
    tmp_path: Path, layout: Literal["step", "verl_step", "verl"], moves: list[str]
) -> None:
    root, plan = tmp_path / "traces", ProfilePlan(layout=layout, finish=Finish(relocate=True))
    actor = Identity(replica=3, node_rank=0, role="actor")
    directory = trace_directory(1, plan, actor)
    written(root, plan)
    for place in (tmp_path, root, root / directory):  # in verl's layouts it writes to the root
        place.mkdir(parents=True, exist_ok=True)
        trace = {"distributedInfo": {"rank": 3}}  # a training rank writes its global rank
        (place / "x.trace.json").write_text(json.dumps(trace))
    before = set(tmp_path.rglob("*.trace.*"))
    relocated = relocate_traces(root, (directory,), plan, actor)
    assert [trace.path for trace in relocated] == moves
    assert len(set(tmp_path.rglob("*.trace.*")) - before) == len(moves)


def test_a_training_rank_relocates_traces_of_the_same_name_from_several_sessions(tmp_path: Path) -> None:
    plan, actor = ProfilePlan(finish=Finish(relocate=True)), Identity(replica=3, node_rank=0, role="actor")
    directories = tuple(trace_directory(step, plan, actor) for step in (2, 10))
    for directory in directories:
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "e2e.rank3.pt.trace.json.gz").write_bytes(directory.encode())
    relocated = relocate_traces(tmp_path, directories, plan, actor)
    paths = [f"actor-rank3_step_{step}_e2e.rank3.pt.trace.json.gz" for step in (2, 10)]
    assert [trace.path for trace in relocated] == paths
    assert [(tmp_path / path).read_text() for path in paths] == list(directories)


async def test_an_outcome_with_many_relocated_traces_fits_into_a_message(tmp_path: Path) -> None:
    plan, steps = ProfilePlan(finish=Finish(relocate=True)), range(MAX_LISTED + 1)
    for step in steps:
        written(tmp_path, plan, step, ranks=range(1))
    found = await NodeTraces(tmp_path, FIRST).perform(finish(plan, *steps))
    assert len(names(tmp_path, "rollout-*")) == len(steps)
    assert len(found.traces) == MAX_LISTED and checked_result(found) is found


def test_a_disk_that_fills_up_during_a_move_keeps_no_part_of_the_trace(tmp_path: Path) -> None:
    with TemporaryDirectory(dir="/dev/shm") as another:  # a disk of its own, as that of an engine may be
        file = Path(another, "1-TP-0.trace.json")
        file.write_bytes(b"{" + b" " * 10_000 + b"}")
        with files_of_at_most(5_000), pytest.raises(EngineError, match="was not moved to .*: File too large"):
            move_trace(file, tmp_path)
        assert list(tmp_path.iterdir()) == [] and file.stat().st_size == 10_002
        assert move_trace(file, tmp_path).stat().st_size == 10_002 and not file.exists()


def test_two_nodes_relocate_from_a_shared_disk_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, look, others = ProfilePlan(finish=Finish(relocate=True)), traces._head, list[Trace]()
    directories = tuple(written(tmp_path, plan, step) for step in (1, 2))

    def looked_too_late(file: Path) -> bytes:
        monkeypatch.setattr(traces, "_head", look)
        others.extend(relocate_traces(tmp_path, directories, plan, SECOND))
        return look(file)

    monkeypatch.setattr(traces, "_head", looked_too_late)
    own = relocate_traces(tmp_path, directories, plan, FIRST)
    assert ([trace.rank for trace in own], [trace.rank for trace in others]) == ([16, 17, 16, 17], [18, 19, 18, 19])
    assert len(names(tmp_path, "*")) == 8, "and the directories that are empty now are gone"


async def test_the_hook_runs_once_with_verls_variables_and_ours(tmp_path: Path) -> None:
    root = tmp_path / "traces"
    plan = ProfilePlan(tool="nsys", finish=Finish(hook=True))
    hook = "env | grep -E '^(VERL|ROLLOUTCTL)_PROFILE' | sort >> ../variables"
    found = await NodeTraces(root, SECOND, f"cd {root}; {hook}").perform(finish(plan, 1, 2))
    assert found == Returned()
    variables = dict(line.split("=", 1) for line in (tmp_path / "variables").read_text().splitlines())
    assert variables.pop("VERL_PROFILE_PID").isdecimal()
    assert variables == {
        "VERL_PROFILE_SAVE_PATH": str(root),
        "VERL_PROFILE_TOOL": "nsys",
        "VERL_PROFILE_RANK": "18",
        "VERL_PROFILE_ROLE": "rollout",
        "VERL_PROFILE_RAY_NSIGHT_DIR": "/tmp/ray/session_latest/logs/nsight",
        "ROLLOUTCTL_PROFILE_ROOT": str(root),
        "ROLLOUTCTL_PROFILE_TOOL": "nsys",
        "ROLLOUTCTL_PROFILE_ROLE": "rollout",
        "ROLLOUTCTL_PROFILE_AGENT": "4.1",
        "ROLLOUTCTL_PROFILE_RANKS": "18,19",
        "ROLLOUTCTL_PROFILE_STEPS": "1,2",
    }


async def test_a_failing_hook_is_reported_with_its_output_and_loses_nothing(tmp_path: Path) -> None:
    plan = ProfilePlan(finish=Finish(relocate=True, hook=True))
    written(tmp_path, plan)
    with pytest.raises(EngineError, match=r"exit code 3: no such bucket.*still in"):
        await NodeTraces(tmp_path, FIRST, "echo no such bucket >&2; exit 3").perform(finish(plan, 1))
    assert len(names(tmp_path, "rollout-replica4-*")) == 2


async def test_a_failing_hook_is_reported_though_it_removed_its_log(tmp_path: Path) -> None:
    root, plan = tmp_path / "traces", ProfilePlan(finish=Finish(hook=True))
    with pytest.raises(EngineError, match="exit code 3: it printed nothing"):
        await NodeTraces(root, FIRST, f"rm -r {root}; exit 3").perform(finish(plan, 1))


@pytest.mark.parametrize("fails", [False, True])
async def test_a_long_relocation_continues_in_the_background_and_the_hook_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Waiting for it would keep the agent from the next command."""
    root, gate, describe = tmp_path / "traces", threading.Event(), traces.describe_trace

    def slow(file: Path, root: Path, rank: int | None = None) -> Trace:
        gate.wait(60)
        if fails:
            raise OSError(5, "Input/output error", str(file))
        return describe(file, root, rank)

    monkeypatch.setattr("workers.traces.node.WAIT_S", 0.05)
    monkeypatch.setattr(traces, "describe_trace", slow)
    plan = ProfilePlan(finish=Finish(relocate=True, hook=True))
    written(root, plan)
    hook = f"ls {root} > {tmp_path}/listed; mv {tmp_path}/listed {tmp_path}/moved"
    found = await NodeTraces(root, FIRST, hook).perform(finish(plan, 1))
    assert found == Returned(still_running=True)
    gate.set()
    if fails:
        wait_until(lambda: "profiling was not finished: the traces in" in caplog.text)
    else:
        wait_until((tmp_path / "moved").exists)
        assert (tmp_path / "moved").read_text().count("rollout-replica4-globalrank1") == 2


async def test_a_slow_hook_continues_without_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WAIT_S >= 5
    monkeypatch.setattr("workers.traces.node.WAIT_S", 0.05)
    (tmp_path / "go").touch()
    plan = ProfilePlan(finish=Finish(hook=True))
    hook = "while [ -e go ]; do sleep 0.02; done; touch ended"
    found = await NodeTraces(tmp_path, FIRST, f"cd {tmp_path}; {hook}").perform(finish(plan, 1))
    assert found.still_running and not (tmp_path / "ended").exists()
    (tmp_path / "go").unlink()


@pytest.mark.parametrize(
    ("ends", "runs"),
    [
        (Finish(), False),
        (Finish(hook=True), True),
        (Finish(hook=True, hook_ranks=frozenset({19})), False),
        (Finish(hook=True, hook_ranks=frozenset({17})), True),
        (Finish(hook=True, hook_all_ranks=True), True),
    ],
)
async def test_who_runs_the_hook(tmp_path: Path, ends: Finish, runs: bool) -> None:
    plan = ProfilePlan(ranks=frozenset({16}), finish=ends)
    await NodeTraces(tmp_path, FIRST, f"touch {tmp_path}/ran").perform(finish(plan, 1))
    assert (tmp_path / "ran").exists() == runs


async def test_an_agent_without_a_hook_says_so(tmp_path: Path) -> None:
    plan = ProfilePlan(finish=Finish(hook=True))
    with pytest.raises(EngineError, match="--finish-hook"):
        await NodeTraces(tmp_path, FIRST).perform(finish(plan, 1))


async def test_each_node_collects_by_itself_and_calls_no_engine(tmp_path: Path) -> None:
    directory = written(tmp_path, ProfilePlan())
    found = await NodeTraces(tmp_path, SECOND).perform(CollectTraces(ProfileSession(1, ProfilePlan()), directory))
    assert ranks_of(found) == [18, 19]
