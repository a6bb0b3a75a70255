"""The tools of a training rank: which plans can't be honoured here, and what each tool calls.

No Ascend machine and no Nsight Systems are needed: calls are checked against the signatures of the real functions.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.commands import Npu, ProfilePlan, Schedule, ToolOptions, TorchMemory, Window
from schemas.errors import ConfigError, EngineError, UnsupportedError
from schemas.events import CheckProfile, Returned
from schemas.profiler.config import ProfilerConfig
from tests.unit import ascend_stand_ins
from tests.unit.rank_sessions import Commanded, work
from workers.profilers import TrainingRank, annotate, tools

RANK: dict[str, Any] = {"bus": "tcp://127.0.0.1:5555", "role": "actor", "rank": 3, "world_size": 8}


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Commanded]:
    with Commanded(tmp_path) as commanded:
        yield commanded


def plan(tool: str, options: ToolOptions | None = None, **settings: Any) -> ProfilePlan:
    return ProfilePlan(tool=tool, options=options, **settings)


REFUSED = [
    (plan("torch", window=Window(0, 3)), "`window`: it counts forward steps of an engine; write a schedule"),
    (plan("torch", by_stage=True), "`by_stage`: only an engine makes a trace of each stage; write discrete"),
    (plan("torch", activities=frozenset({"npu"})), "activity npu: tool npu records it"),
    (plan("torch", Npu()), "`options`: these are not options of the tool torch"),
    (plan("nsys", schedule=Schedule(active=1)), "`schedule`: only the tool torch has one"),
    (plan("perf"), "a training rank: the tools for that are npu, nsys, torch, torch_memory"),
    (plan("npu"), "torch_npu is not installed .*pip install torch-npu"),
]
if not torch.cuda.is_available():
    REFUSED += [
        (plan("torch", activities=frozenset({"cuda"})), "torch sees no CUDA device"),
        (plan("torch_memory"), "torch sees no CUDA device"),
        (plan("nsys"), "torch sees no CUDA device"),
    ]


@pytest.mark.parametrize(("refused", "why"), REFUSED)
def test_a_plan_that_cannot_be_honoured_here_is_refused_with_a_reason(
    rank: Commanded, tmp_path: Path, refused: ProfilePlan, why: str
) -> None:
    with pytest.raises(UnsupportedError, match=why):
        rank.ask(CheckProfile(refused)).result(60)
    with pytest.raises(UnsupportedError, match=why):
        rank.start(refused)
    config = ProfilerConfig(roles={"actor": refused}, steps=(500,), save_path=str(tmp_path))
    with pytest.raises(UnsupportedError, match=why):
        TrainingRank(**RANK, state_dir=tmp_path, profiler=config)


def test_plans_of_other_ranks_and_roles_are_not_checked(tmp_path: Path) -> None:
    others = {"critic": plan("perf"), "actor": plan("perf", ranks=frozenset({1}))}
    config = ProfilerConfig(roles=others, steps=(500,), save_path=str(tmp_path))
    TrainingRank(**RANK, state_dir=tmp_path, profiler=config)


def test_a_torch_that_is_too_old_is_named(rank: Commanded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "torch_version", lambda: "2.5.1")
    with pytest.raises(UnsupportedError, match=r"torch is 2\.5\.1, and 2\.6 is the oldest supported"):
        rank.ask(CheckProfile(plan("torch"))).result(60)


def test_a_plan_that_can_be_honoured_passes_the_check(rank: Commanded) -> None:
    assert rank.ask(CheckProfile(plan("torch", discrete=True))).result(60) == Returned()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"role": "rollout"}, "that of the engines"),
        ({"role": "Actor!"}, "Actor!"),
        ({"rank": 8}, "rank 8 is not below world_size 8"),
        ({"traces": None}, "needs a directory"),
        ({"profiler": ProfilerConfig(roles=["actor"])}, "ProfilerConfig: Expected `object`"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_of_a_rank_are_an_error_at_once(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        TrainingRank(**(RANK | {"state_dir": tmp_path, "traces": tmp_path} | settings))


def test_a_fault_plan_that_can_not_be_carried_out_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "faults.toml"
    monkeypatch.setenv("ROLLOUTCTL_AGENT_FAULTS", str(plan))
    with pytest.raises(ConfigError, match=rf"the fault plan {plan} can't be read"):
        TrainingRank(**RANK, state_dir=tmp_path, traces=tmp_path)
    plan.write_text("fault = [{name = 'a', role = 'actor', what = 'kill_engine'}]")
    with pytest.raises(ConfigError, match=rf"{plan}: fault 'a': .* a training rank has no engine"):
        TrainingRank(**RANK, state_dir=tmp_path, traces=tmp_path)


# --- CUDA -------------------------------------------------------------------------------------------------------------


def stand_in(patch: pytest.MonkeyPatch, calls: list[str], owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Replace a function of torch by one with the same signature that notes its calls."""
    signature = inspect.signature(getattr(owner, name))

    def noting(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        arguments = ", ".join(f"{key}={value}" for key, value in given.items() if not str(value).startswith("/"))
        calls.append(f"{name}({arguments})")
        return act(*args)

    patch.setattr(owner, name, noting)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls to CUDA functions of the installed torch, on a machine without a GPU."""
    calls: list[str] = []
    nothing = lambda *_: None  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    for owner, name, act in (
        (torch.cuda, "device", lambda *_: nullcontext()),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda.memory, "_record_memory_history", nothing),
        (torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"a snapshot")),
        (torch.cuda.profiler, "start", nothing),
        (torch.cuda.profiler, "stop", nothing),
        (torch.cuda.nvtx, "range_start", lambda _: 1),
        (torch.cuda.nvtx, "range_end", nothing),
    ):
        stand_in(monkeypatch, calls, owner, name, act)
    return calls


def test_the_history_of_the_allocator_is_dumped_at_the_stop(rank: Commanded, cuda: list[str]) -> None:
    rank.start(plan("torch_memory", TorchMemory(max_entries=7, context="alloc", stacks="python")))
    with annotate("update"):
        work()
    (trace,) = rank.stop().traces
    assert cuda == [
        "_record_memory_history(enabled=all, context=alloc, stacks=python, max_entries=7)",
        "_dump_snapshot()",
        "_record_memory_history(enabled=None)",
    ]
    assert trace.path.startswith("global_step_3/actor_rank_3/memory.rank3.step3.pid") and trace.rank == 3
    assert [file.suffix for file in (rank.root / trace.path).parent.iterdir()] == [".pickle"]


def test_one_snapshot_covers_several_steps(rank: Commanded, cuda: list[str]) -> None:
    outcomes = []
    for step in (3, 4):
        rank.start(plan("torch_memory", TorchMemory(snapshot_steps=2)), step=step)
        outcomes.append(rank.stop())
    assert outcomes[0] == Returned(ranks_without_trace=(3,))
    assert [".step3-4." in trace.path for trace in outcomes[1].traces] == [True]
    assert [call.partition("(")[0] for call in cuda] == [
        *("_record_memory_history", "_dump_snapshot", "_record_memory_history")
    ]


def test_a_snapshot_that_cannot_be_written_is_reported_and_the_history_ends(
    rank: Commanded, cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str) -> None:
        raise OSError(28, "No space left on device")

    stand_in(monkeypatch, cuda, torch.cuda.memory, "_dump_snapshot", full)
    rank.start(plan("torch_memory"))
    with pytest.raises(EngineError, match="memory snapshot .* was not written: .*No space left"):
        rank.stop()
    assert cuda[-1] == "_record_memory_history(enabled=None)"


@pytest.mark.parametrize("discrete", [False, True])
def test_nsys_records_in_ranges_and_stages_are_marked(rank: Commanded, cuda: list[str], discrete: bool) -> None:
    rank.start(plan("nsys", discrete=discrete))
    with pytest.raises(ZeroDivisionError), annotate("first"):
        raise ZeroDivisionError
    with annotate("second"):
        pass
    assert rank.stop() == Returned()
    marks = "range_start(msg={0}) range_end(range_id=1)"
    ranges = ("start()", "device(device=5) synchronize() stop()")
    first, second = (marks.format(stage) for stage in ("first", "second"))
    separate = [ranges[0], first, ranges[1], ranges[0], second, ranges[1]]
    assert " ".join(cuda) == " ".join(separate if discrete else [ranges[0], first, second, ranges[1]])


# --- Ascend, by stand-ins ---------------------------------------------------------------------------------------------


def test_an_npu_stage_is_a_profile_of_its_own(rank: Commanded, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ascend_stand_ins.npu(monkeypatch)
    npu_plan = plan("npu", Npu(level="level1"), activities=frozenset({"cpu", "npu"}), with_stack=True)
    rank.start(npu_plan)
    with pytest.raises(ZeroDivisionError), annotate("update"):
        raise ZeroDivisionError
    with annotate("log_prob"):
        pass
    paths = [trace.path for trace in rank.stop().traces]
    profiled = ("profile", ("cpu", "npu"), True, "1")
    assert calls == [
        *(profiled, ("start",), ("range", "update"), ("end",), ("step",), ("stop",)),
        *(profiled, ("start",), ("range", "log_prob"), ("end",), ("step",), ("stop",)),
    ]
    file = "host_1_ascend_pt/ASCEND_PROFILER_OUTPUT/ascend_pytorch_profiler_0.db"
    assert paths == [f"global_step_3/actor_rank_3/{stage}/{file}" for stage in ("1-update", "2-log_prob")]


@pytest.mark.parametrize("layout", ["step", "verl_step", "verl"])
def test_files_that_a_tool_names_itself_belong_to_one_rank_and_session(
    rank: Commanded, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    ascend_stand_ins.npu(monkeypatch)
    paths: set[str] = set()
    for commanded in (rank, Commanded(rank.root, "critic")):
        for step in (3, 4):
            commanded.start(plan("npu", layout=layout), step=step)
            with annotate("update", role=commanded.identity.role):
                pass
            (trace,) = commanded.stop().traces
            assert commanded.identity.role in trace.path
            paths.add(trace.path)
    assert len(paths) == 4


def test_a_tool_that_wrote_nothing_is_reported(rank: Commanded, monkeypatch: pytest.MonkeyPatch) -> None:
    ascend_stand_ins.npu(monkeypatch)
    monkeypatch.setattr(ascend_stand_ins.NpuProfile, "stop", lambda self: None)  # it swallows its own errors
    rank.start(plan("npu"))
    with annotate("update"):
        pass
    with pytest.raises(EngineError, match="wrote nothing to"):
        rank.stop()
