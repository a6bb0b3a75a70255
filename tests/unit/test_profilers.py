"""Profiling a training rank: which stages are recorded, by which thread, and that nothing stops a training step."""

import asyncio
import os
import resource
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch.profiler import record_function
from torch.profiler.profiler import _KinetoProfile

from schemas.commands import ProfilePlan, Schedule
from schemas.desired import ProfileSession
from schemas.errors import ConfigError, EngineError, UnsupportedError
from schemas.events import Pause, Returned, StartProfile
from tests.running import files_of_at_most
from tests.unit.rank_sessions import Commanded, operators, read, stages, work
from workers.profilers import annotate, mini_batch
from workers.profilers import stages as stages_of
from workers.profilers.session import RankProfiler
from workers.profilers.stages import add_listener, remove_listener
from workers.profilers.torch_tool import action
from workers.profilers.trace_writer import MAX_WAITING, write_trace

WHOLE = "e2e.rank3.pt.trace.json.gz"
DISCRETE = ProfilePlan(discrete=True)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Commanded]:
    with Commanded(tmp_path) as commanded:
        yield commanded


@annotate("update_actor", role="actor")
def update_actor() -> None:
    work()


def update_in_mini_batches(count: int) -> None:
    with annotate("update", scheduled=True):
        for index in range(count):
            with record_function(f"mini-batch {index}"):
                work()
            mini_batch()


@contextmanager
def another_thread_in_a_stage(stage: str) -> Iterator[None]:
    inside, leave = threading.Event(), threading.Event()

    def train() -> None:
        with annotate(stage):
            work()
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=train)
    thread.start()
    inside.wait(60)
    try:
        yield
    finally:
        leave.set()
        thread.join()


def named(returned: Returned) -> list[str]:
    return [Path(trace.path).name for trace in returned.traces]


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_each_outermost_stage_of_a_session_is_a_trace(rank: Commanded) -> None:
    update_actor()  # before the session
    rank.start()
    update_actor()
    with annotate("log_prob"):
        work()
        update_actor()
    returned = rank.stop()
    update_actor()
    assert [trace.path for trace in returned.traces] == [
        f"global_step_3/actor_rank_3/{name}" for name in ("e2e.2.rank3.pt.trace.json.gz", WHOLE)
    ]
    traces = rank.traces(returned)
    assert stages(traces[WHOLE]) == ["update_actor"]
    assert stages(traces["e2e.2.rank3.pt.trace.json.gz"]) == ["log_prob", "update_actor"]
    assert traces[WHOLE]["distributedInfo"] == {"backend": "none", "rank": 3, "world_size": 8}
    assert traces[WHOLE]["rolloutctl"] == {"role": "actor", "rank": 3, "step": 3, "scope": "e2e"}


def test_in_a_torch_distributed_group_the_trace_has_what_torch_knows_of_it(rank: Commanded) -> None:
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{rank.root}/store", rank=0, world_size=1)
    try:
        rank.start()
        update_actor()
        trace = rank.traces(rank.stop())[WHOLE]
    finally:
        group.destroy_process_group()
    assert trace["distributedInfo"]["backend"] == "gloo" and trace["distributedInfo"]["pg_count"] == 1
    assert trace["rolloutctl"]["rank"] == 3


def test_discrete_is_one_trace_of_each_stage(rank: Commanded) -> None:
    rank.start(DISCRETE)
    update_actor()
    update_actor()
    with annotate("log prob/ref"):
        update_actor()
    traces = rank.traces(rank.stop())
    assert {name: stages(trace) for name, trace in traces.items()} == {
        "update_actor.rank3.pt.trace.json.gz": ["update_actor"],
        "update_actor.2.rank3.pt.trace.json.gz": ["update_actor"],
        "log-prob-ref.rank3.pt.trace.json.gz": ["log prob/ref", "update_actor"],
    }


def test_only_stages_of_the_role_are_recorded(rank: Commanded) -> None:
    rank.start()
    with annotate("update_critic", role="critic"):
        work()
    update_actor()
    assert stages(rank.traces(rank.stop())[WHOLE]) == ["update_actor"]


def test_a_session_without_a_stage_is_a_rank_without_a_trace(rank: Commanded) -> None:
    rank.start()
    work()
    assert rank.stop() == Returned(ranks_without_trace=(3,))


def test_stacks_shapes_and_memory_are_recorded_when_asked_for(rank: Commanded) -> None:
    rank.start(ProfilePlan(with_stack=True, record_shapes=True, activities=frozenset({"cpu", "memory"})))
    update_actor()
    events = rank.traces(rank.stop())[WHOLE]["traceEvents"]
    kinds = {event.get("cat") for event in events}
    assert "python_function" in kinds
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event.get("name") == "[memory]" for event in events)


def test_the_files_of_verls_layout_are_in_the_root_under_verls_names(rank: Commanded) -> None:
    plan = ProfilePlan(discrete=True, layout="verl", schedule=Schedule(active=1, skip_first=1, repeat=1))
    rank.start(plan, step=7)
    update_in_mini_batches(3)
    update_actor()
    first, second = sorted(trace.path for trace in rank.stop().traces)
    pid = os.getpid()
    assert first.startswith(f"actor_update_actor_step7_rank3-of-8_pid{pid}_20") and first.endswith(".json.gz")
    assert second.startswith(f"actor_update_step7_rank3-of-8_pid{pid}_20") and second.endswith("_mb1.json.gz")


def test_interleaved_coroutines_are_recorded_in_the_trace_of_the_first_stage(rank: Commanded) -> None:
    order: list[str] = []

    async def run() -> None:
        held = asyncio.Event()

        @annotate("first")
        async def first() -> None:
            await held.wait()
            work()
            order.append("first")

        @annotate("second")
        async def second() -> None:
            work()
            held.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            order.append("second")

        await asyncio.gather(first(), second())

    rank.start(DISCRETE)
    asyncio.run(run())
    assert order == ["first", "second"]  # the recorded stage ended inside of the other
    traces = rank.traces(rank.stop())
    assert list(traces) == ["first.rank3.pt.trace.json.gz"]
    assert operators(traces["first.rank3.pt.trace.json.gz"]) > 20


def test_only_the_thread_that_entered_the_stage_is_recorded(rank: Commanded) -> None:
    rank.start(DISCRETE)
    with another_thread_in_a_stage("elsewhere"), annotate("here"):
        work()
    with annotate("after"):
        work()
    traces = rank.traces(rank.stop())
    assert {name.partition(".")[0]: stages(trace) for name, trace in traces.items()} == {
        "elsewhere": ["elsewhere"],
        "after": ["after"],
    }


def test_a_stage_that_another_thread_leaves_is_ended_by_the_thread_that_entered_it(rank: Commanded) -> None:
    rank.start()
    stage, left, seen = annotate("handed over"), threading.Event(), threading.Event()

    def train() -> None:
        stage.__enter__()
        work()
        seen.set()
        left.wait(60)
        update_actor()  # the thread passes here

    thread = threading.Thread(target=train)
    thread.start()
    seen.wait(60)
    stage.__exit__(None, None, None)
    left.set()
    thread.join()
    with pytest.raises(EngineError, match="left by another thread than had entered it. 1 traces were written"):
        rank.stop()


def test_a_torch_that_warns_of_cycles_does_not_cost_the_stage_where_warnings_are_errors(
    rank: Commanded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 warns at each first start that events are cleared at the end of a cycle. Ours has one."""
    prepare = _KinetoProfile.prepare_trace

    def warning(profiler: _KinetoProfile) -> None:
        prepare(profiler)
        if not profiler.acc_events:
            warnings.warn("Profiler clears events at the end of each cycle.", stacklevel=2)

    monkeypatch.setattr(_KinetoProfile, "prepare_trace", warning)
    rank.start()
    update_actor()
    assert stages(rank.traces(rank.stop())[WHOLE]) == ["update_actor"]


# --- mini-batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discrete", [False, True])
def test_a_schedule_records_the_mini_batches_it_selects(rank: Commanded, discrete: bool) -> None:
    rank.start(ProfilePlan(discrete=discrete, schedule=Schedule(active=2, wait=1, warmup=1, skip_first=1)))
    update_in_mini_batches(11)
    traces = rank.traces(rank.stop())
    scope = "update" if discrete else "e2e"
    assert {name: stages(trace) for name, trace in traces.items()} == {
        f"{scope}.rank3.mb3-4.pt.trace.json.gz": ["mini-batch 3", "mini-batch 4"],
        f"{scope}.rank3.mb7-8.pt.trace.json.gz": ["mini-batch 7", "mini-batch 8"],
    }


def test_a_window_that_the_stage_cuts_short_is_saved(rank: Commanded) -> None:
    rank.start(ProfilePlan(discrete=True, schedule=Schedule(active=5, skip_first=1)))
    update_in_mini_batches(3)
    with annotate("short", scheduled=True):
        work()
    traces = rank.traces(rank.stop())
    assert {name: stages(trace) for name, trace in traces.items()} == {
        "update.rank3.mb1-2.pt.trace.json.gz": ["mini-batch 1", "mini-batch 2"]
    }


def test_a_stage_that_is_not_scheduled_is_recorded_in_full(rank: Commanded) -> None:
    rank.start(ProfilePlan(discrete=True, schedule=Schedule(active=1, skip_first=9)))
    update_actor()
    mini_batch()
    assert named(rank.stop()) == ["update_actor.rank3.pt.trace.json.gz"]


def test_a_stage_of_any_name_has_a_trace(rank: Commanded) -> None:
    rank.start(DISCRETE)
    for name in ("../" * 3, "更新", "a/b" * 100, "a/b" * 100):
        with annotate(name):
            work()
    assert len(rank.stop().traces) == 4


def test_mini_batches_are_counted_over_all_stages_of_a_session(rank: Commanded) -> None:
    rank.start(ProfilePlan(schedule=Schedule(active=1, skip_first=3, repeat=1)))
    for _ in range(3):
        update_in_mini_batches(2)
    assert named(rank.stop()) == ["e2e.rank3.mb3-3.pt.trace.json.gz"]


@pytest.mark.parametrize("repeat", [0, 1, 2])
@pytest.mark.parametrize(("wait", "warmup", "active"), [(0, 0, 1), (2, 0, 1), (0, 1, 2), (1, 2, 3)])
@pytest.mark.parametrize("skip_first", [0, 3])
def test_a_schedule_counts_as_torch_does(repeat: int, wait: int, warmup: int, active: int, skip_first: int) -> None:
    wanted = Schedule(active=active, wait=wait, warmup=warmup, repeat=repeat, skip_first=skip_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it advises a warm-up
        torchs = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)
    assert [action(wanted, index) for index in range(30)] == [torchs(index) for index in range(30)]


# --- stops ------------------------------------------------------------------------------------------------------------


def test_a_stop_in_the_middle_of_a_stage_takes_effect_at_the_next_stage(rank: Commanded) -> None:
    rank.start()
    with annotate("update"):
        with record_function("before"):
            work()
        stopping = rank.stopping()
        work()
        assert not stopping.done()
        with annotate("inner"), record_function("after"):
            work()
        traces = rank.traces(stopping.result(60))
    assert stages(traces[WHOLE]) == ["update", "before"]


@pytest.mark.parametrize(
    ("schedule", "name"), [(None, WHOLE), (Schedule(active=1, skip_first=1), "e2e.rank3.mb1-1.pt.trace.json.gz")]
)
def test_a_stop_takes_effect_between_mini_batches_and_includes_the_one_that_ends(
    rank: Commanded, schedule: Schedule | None, name: str
) -> None:
    rank.start(ProfilePlan(schedule=schedule))
    with annotate("update", scheduled=True):
        work()
        mini_batch()
        work()
        stopping = rank.stopping()
        mini_batch()
        assert named(stopping.result(60)) == [name]


def test_closing_the_rank_writes_what_was_recorded_and_waits_for_no_stage(rank: Commanded) -> None:
    rank.start()
    update_actor()
    with another_thread_in_a_stage("never ends"):
        rank.close()
        assert stages(read(rank.root / "global_step_3" / "actor_rank_3" / WHOLE)) == ["update_actor"]


# --- a training step is never hurt ------------------------------------------------------------------------------------


def test_a_stage_that_raises_is_recorded_and_its_error_is_passed_on(rank: Commanded) -> None:
    rank.start(DISCRETE)
    with pytest.raises(ZeroDivisionError), annotate("bad"):
        work()
        raise ZeroDivisionError
    with annotate("good"):
        work()
    assert named(rank.stop()) == ["bad.rank3.pt.trace.json.gz", "good.rank3.pt.trace.json.gz"]


def test_two_ranks_of_one_process_are_not_recorded_at_once(rank: Commanded, tmp_path: Path) -> None:
    critic = Commanded(tmp_path, "critic")
    rank.start()
    critic.start()
    with annotate("update_critic", role="critic"):
        update_actor()
    assert stages(critic.traces(critic.stop())[WHOLE]) == ["update_critic", "update_actor"]
    with pytest.raises(EngineError, match="another rank or engine of this process is being recorded"):
        rank.stop()


def test_ranks_of_one_process_can_be_commanded_at_the_same_time(tmp_path: Path) -> None:
    ranks = [Commanded(tmp_path, role).profiler for role in ("actor", "critic", "ref", "reward")]

    def command(profiler: RankProfiler) -> bool:
        for _ in range(15_000):
            add_listener(profiler)
            added = sum(listener is profiler for listener in stages_of._Listeners.current)
            remove_listener(profiler)
            left = sum(listener is profiler for listener in stages_of._Listeners.current)
            if (added, left) != (1, 0):
                return False
        return True

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor() as pool:
            assert all([*pool.map(command, ranks)])
    finally:
        sys.setswitchinterval(before)
    assert stages_of._Listeners.current == ()


def test_a_full_disk_costs_the_trace_and_nothing_else(rank: Commanded) -> None:
    rank.start()
    with files_of_at_most(1000):
        update_actor()
        with pytest.raises(EngineError, match=r"was not written, and .* is lost\. the trace .* is cut off or damaged"):
            rank.stop()
    assert list((rank.root / "global_step_3" / "actor_rank_3").iterdir()) == []
    rank.start(step=4)
    update_actor()
    assert len(rank.stop().traces) == 1


def test_a_full_disk_of_the_traces_leaves_nothing_half_written(tmp_path: Path) -> None:
    def export(path: str) -> None:
        noise = os.urandom(100_000).hex()
        Path(path).write_text(f'{{"traceEvents": [\n{{"name": "{noise}"}}\n],\n"traceName": "{path}"\n}}')
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    file = tmp_path / "trace.json.gz"
    file.touch()
    refused = pytest.raises(EngineError, match="trace.json.gz was not written, and .*File too large")
    with files_of_at_most(resource.RLIM_INFINITY), refused:
        write_trace(export, file)
    assert list(tmp_path.iterdir()) == []


def test_without_a_temporary_directory_a_trace_is_lost_and_leaves_nothing(
    rank: Commanded, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.start(DISCRETE)
    update_actor()
    monkeypatch.setattr(tempfile, "tempdir", str(rank.root / "nowhere"))
    update_actor()
    with pytest.raises(EngineError, match="was not written, and .*FileNotFoundError: .*nowhere"):
        rank.stop()
    files = (rank.root / "global_step_3" / "actor_rank_3").iterdir()
    assert all(file.stat().st_size for file in files)


class Gate:
    """No trace is written before it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, export = Gate(), _KinetoProfile.export_chrome_trace

    def slow(self: _KinetoProfile, path: str) -> None:
        gate.reached.set()
        gate.opened.wait(60)
        export(self, path)

    monkeypatch.setattr(_KinetoProfile, "export_chrome_trace", slow)
    return gate


def test_a_trace_that_takes_long_to_write_delays_no_step(rank: Commanded, gate: Gate) -> None:
    rank.start(DISCRETE)
    for _ in range(4):
        update_actor()
    stopping = rank.stopping()
    assert not stopping.done()
    gate.opened.set()
    assert len(stopping.result(60).traces) == 4


def test_recordings_that_wait_to_be_written_are_bounded_and_reported(rank: Commanded, gate: Gate) -> None:
    rank.start(DISCRETE)
    update_actor()
    gate.reached.wait(60)  # it is out of the queue
    for _ in range(MAX_WAITING + 2):
        update_actor()
    gate.opened.set()
    with pytest.raises(EngineError, match=rf"recordings wait to be written, .* \(2 times\).* {MAX_WAITING + 1} traces"):
        rank.stop()


def test_nothing_is_ever_overwritten(rank: Commanded) -> None:
    folder = rank.root / "global_step_3" / "actor_rank_3"
    folder.mkdir(parents=True)
    (folder / WHOLE).write_text("of an earlier run")
    with pytest.raises(EngineError, match="holds files already"):
        rank.start()
    assert (folder / WHOLE).read_text() == "of an earlier run"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # newer Pythons: forking with threads
def test_a_child_that_is_forked_inside_of_a_stage_records_nothing(rank: Commanded) -> None:
    """A data loader's worker may live as long as the run; torch would record each operator that it runs."""

    def allocated() -> int:  # what is resident grows by pages of libraries, too
        return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")

    tensor = torch.ones(3)
    rank.start(ProfilePlan(discrete=True, with_stack=True))
    with annotate("parent"):
        child = os.fork()
        if child == 0:
            with annotate("child"):
                before = allocated()
                for _ in range(150_000):
                    tensor + tensor
                os._exit(allocated() - before > 15_000_000)
        assert os.waitpid(child, 0)[1] == 0
        work()
    ((name, trace),) = rank.traces(rank.stop()).items()
    assert name == "parent.rank3.pt.trace.json.gz" and stages(trace) == ["parent"] and operators(trace) > 20


# --- annotations ------------------------------------------------------------------------------------------------------


def test_an_annotated_function_is_the_same_function(rank: Commanded) -> None:
    @annotate("sum")
    def add(first: int, *more: int, key: int = 0) -> int:
        """Adds."""
        return sum(more, first) + key

    assert add(1, 2, key=3) == 6 and add.__name__ == "add" and add.__doc__ == "Adds."
    rank.start()
    assert add(1, 2, key=3) == 6
    assert stages(rank.traces(rank.stop())[WHOLE]) == ["sum"]


def test_a_function_that_was_sent_to_this_process_by_value_is_recorded(rank: Commanded) -> None:
    """Ray sends what a trainer's script defines with copies of the globals that it reads."""
    sent = FunctionType(update_actor.__code__, dict(update_actor.__globals__), closure=update_actor.__closure__)
    rank.start()
    sent()
    assert stages(rank.traces(rank.stop())[WHOLE]) == ["update_actor"]


def test_a_stage_that_is_entered_again_ends_when_the_outer_one_does(rank: Commanded) -> None:
    stage = annotate("again")
    with stage:  # before the session
        rank.start(DISCRETE)
        with stage, stage:
            work()
    assert [stages(trace) for trace in rank.traces(rank.stop()).values()] == [["again", "again"]]


def test_a_generator_is_refused() -> None:
    with pytest.raises(ConfigError, match="annotate the function that consumes it"):

        @annotate("lazy")
        def lazy() -> Iterator[int]:
            yield 1


def test_a_training_rank_is_profiled_and_nothing_else(rank: Commanded) -> None:
    with pytest.raises(UnsupportedError, match="profiled, and nothing else"):
        rank.ask(Pause("abort")).result(60)


def test_no_trace_is_put_outside_of_the_root(rank: Commanded) -> None:
    with pytest.raises(EngineError, match="outside of the traces root"):
        rank.ask(StartProfile(ProfileSession(3, ProfilePlan()), "../elsewhere")).result(60)
