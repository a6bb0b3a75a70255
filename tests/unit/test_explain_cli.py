"""`rolloutctl profile explain`: what a configuration will do."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from controlplane.cli.__main__ import cli
from controlplane.cli.explain import explanation
from schemas.commands import Finish, Npu, PrecisionDebugger, ProfilePlan, Schedule
from schemas.profiler.config import ProfilerConfig, read_verl_config
from tests.running import python, rolloutctl

CONFIGS = Path(__file__).parents[1] / "configs"


def explain(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["profile", "explain", *map(str, arguments)], catch_exceptions=False)


def lines_of(plan: ProfilePlan, *, gpus: int | None = None, **config: object) -> list[str]:
    """Return the explanation of rollouts that are profiled in step 1."""
    return list(explanation(ProfilerConfig(plan=plan, steps=(1,), **config), gpus))  # type: ignore[arg-type]


def test_a_file_of_ours() -> None:
    shown = explain(CONFIGS / "profiler.yaml", "--gpus-per-replica", "2")
    assert (shown.exit_code, shown.stderr) == (0, "")
    hook = "  hook     upload $VERL_PROFILE_SAVE_PATH: once, after the last step, by all agents"
    assert shown.stdout.splitlines() == [
        "global steps 1, 5-8: 5 sessions, one for each step",
        "rollouts: replicas 0, 4, for global ranks 0, 8 with 2 GPUs a replica",
        "  tool     torch: cpu, cuda, stack, shapes",
        "  records  forward steps [0, 4) of each session, counted from its start: 4 forward steps",
        "  traces   /data/profile/global_step_<N>/replica_<R>/",
        "  finish   the traces of the selected ranks are moved to the root",
        hook,
        "actor: rank 0",
        "  tool     torch: cpu, cuda",
        (
            "  records  each annotated stage, in a trace of its own; of mini-batches: skip 0, then until the "
            "stop wait 0, warm up 1, record 2"
        ),
        "  traces   /data/profile/global_step_<N>/actor_rank_<r>/",
        "  finish   the traces of the selected ranks are moved to the root",
        hook,
        "critic: all ranks",
        "  tool     torch_memory: max_entries 100000, context all, stacks all, snapshot_steps 2",
        "  records  the whole session, whatever the stages",
        "           the last session ends before a snapshot is due: nothing is written",
        "  traces   /data/profile/global_step_<N>/critic_rank_<r>/",
        hook,
    ]


def test_a_file_of_verl_s_with_ranks_as_it_had_them_then() -> None:
    shown = explain(CONFIGS / "verl_pull_5025.yaml", "--verl", "--ranks", "replica", "--layout", "verl_step")
    assert shown.stdout.splitlines() == [
        "global steps 1, 2: 2 sessions, one for each step",
        "rollouts: replicas 0-2",
        "  tool     torch: cpu, cuda, stack, shapes",
        "  records  forward steps [0, 1) of each session, counted from its start: one forward step",
        "  stages   prefill and decode each have their own trace",
        "  merge    the engine merges the traces of its ranks",
        "  traces   ./outputs/profile/rollout_step_<N>/agent_loop_replica_<R>/",
    ]


def test_warnings_and_a_note_on_what_verl_itself_would_do(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(
        "global_profiler: {tool: torch, step: [1]}\nactor_rollout_ref: {rollout: {profiler: {enable: true}}}\n"
    )
    shown = explain(file, "--verl")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[0] == "no step is profiled: no steps are given"
    assert shown.stdout.splitlines()[-1] == (
        "note: verl itself profiles rollouts only if their tool is discrete; here they are profiled"
    )
    assert shown.stderr.splitlines() == [
        "warning: global_profiler.step is unknown and has no effect; did you mean steps?",
        "warning: global_profiler.steps is null: no step is profiled",
    ]


def test_a_file_of_verl_is_printed_as_our_own_yaml_that_means_the_same() -> None:
    shown = explain(CONFIGS / "verl_all_on.yaml", "--verl", "--yaml")
    assert ProfilerConfig.from_yaml(shown.stdout) == read_verl_config(CONFIGS / "verl_all_on.yaml").config
    assert len(shown.stderr.splitlines()) == 3


def test_a_wrong_value_ends_with_2_and_one_line(tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text("rollout: {window: [4, 4]}")
    shown = rolloutctl("profile", "explain", file)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == (
        "rolloutctl: rollout.window is [4, 4]: allowed is two whole numbers [start, end), the end larger than the "
        "start, such as [0, 4]; or [4, null]\n"
    )


@pytest.mark.parametrize("options", [("--ranks", "replica"), ("--layout", "verl")])
def test_options_for_verl_s_files_need_verl(options: tuple[str, ...]) -> None:
    shown = explain(CONFIGS / "profiler.yaml", *options)
    assert shown.exit_code == 2
    assert "--ranks and --layout need --verl; our own YAML has keys for both." in shown.stderr


# --- the sentences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (ProfilerConfig(), "no step is profiled: no steps are given"),
        (ProfilerConfig(steps=(2,)), "global step 2: 1 session, one for each step"),
        (
            ProfilerConfig(steps=(1, 2, 3, 7), continuous=True),
            "global steps 1-3, 7: 2 sessions, one for each run of consecutive steps",
        ),
        (
            ProfilerConfig(steps=(1, 3), plan=ProfilePlan(enabled=False)),
            "no step is profiled: steps 1, 3 are given, and everything is switched off",
        ),
    ],
)
def test_steps(config: ProfilerConfig, line: str) -> None:
    assert next(iter(explanation(config))) == line


@pytest.mark.parametrize(
    ("plan", "gpus", "who"),
    [
        (ProfilePlan(), None, "all replicas"),
        (ProfilePlan(replicas=frozenset({3})), None, "replica 3"),
        (ProfilePlan(replicas=frozenset()), None, "no replica"),
        (ProfilePlan(ranks=frozenset()), None, "none: the list of ranks is empty"),
        (
            ProfilePlan(ranks=frozenset({0, 8})),
            None,
            "the replicas that own global ranks 0, 8 (--gpus-per-replica names them)",
        ),
        (ProfilePlan(ranks=frozenset({0, 1})), 8, "replica 0, for global ranks 0, 1 with 8 GPUs a replica"),
        (ProfilePlan(ranks=frozenset({5})), 1, "replica 5, for global rank 5 with one GPU a replica"),
        (
            ProfilePlan(ranks=frozenset({8}), replicas=frozenset({0})),
            4,
            "replica 0, and replica 2, for global rank 8 with 4 GPUs a replica",
        ),
    ],
)
def test_which_replicas(plan: ProfilePlan, gpus: int | None, who: str) -> None:
    assert lines_of(plan, gpus=gpus)[1] == f"rollouts: {who}"


def test_a_tool_that_no_engine_runs_is_skipped() -> None:
    assert lines_of(ProfilePlan(tool="nsys"))[1:] == [
        "rollouts: all replicas",
        "  tool     nsys",
        "           no inference engine runs nsys: every agent answers skipped(tool_unsupported)",
    ]


def test_tools_and_their_options() -> None:
    npu = ProfilePlan(tool="npu", activities=frozenset({"npu", "memory"}), options=Npu(analysis=True))
    assert lines_of(npu)[2] == "  tool     npu: memory, npu, level level0, analysis true"
    assert lines_of(ProfilePlan(activities=frozenset()))[2] == "  tool     torch: nothing"
    for stages, shown in ((None, ": strict false"), (frozenset({"b", "a"}), ": stages [a, b], strict false")):
        rank = ProfilePlan(tool="precision_debugger", ranks=frozenset(), options=PrecisionDebugger(stages=stages))
        lines = lines_of(ProfilePlan(enabled=False), roles={"actor": rank})
        assert lines[1:4] == [
            "rollouts: not profiled",
            "actor: none: the list of ranks is empty",
            f"  tool     precision_debugger{shown}",
        ]


def test_cycles_of_a_schedule() -> None:
    for repeat, times in ((0, "until the stop"), (1, "once"), (3, "3 times")):
        rank = ProfilePlan(schedule=Schedule(active=2, repeat=repeat))
        lines = lines_of(ProfilePlan(enabled=False), roles={"actor": rank})
        assert f"of mini-batches: skip 0, then {times} wait 0, warm up 0, record 2" in lines[4]


@pytest.mark.parametrize(
    ("plan", "records"),
    [
        (ProfilePlan(), "the whole session, in one trace"),
        (ProfilePlan(discrete=True), "each annotated stage, in a trace of its own"),
        (ProfilePlan(tool="npu"), "each annotated stage, in a trace of its own"),
        (ProfilePlan(tool="torch_memory"), "the whole session, whatever the stages"),
        (ProfilePlan(tool="precision_debugger"), "each annotated stage that is watched, in a directory of its own"),
        (ProfilePlan(tool="nsys"), "the whole session, from its first annotated stage on"),
        (ProfilePlan(tool="nsys", discrete=True), "each annotated stage"),
    ],
)
def test_what_each_tool_records_of_a_training_rank(plan: ProfilePlan, records: str) -> None:
    lines = lines_of(ProfilePlan(enabled=False), roles={"actor": plan}, save_path="/t")
    assert f"  records  {records}" in lines
    assert lines[-1] == (
        "  traces   none from rolloutctl: the nsys that the rank runs under writes its own report"
        if plan.tool == "nsys"
        else "  traces   /t/global_step_<N>/actor_rank_<r>/"
    )


def test_reports_of_nsys_are_not_moved() -> None:
    plan = ProfilePlan(tool="nsys", finish=Finish(relocate=True))
    lines = lines_of(ProfilePlan(enabled=False), roles={"actor": plan})
    assert lines[-1] == "  finish   nothing is moved: nsys's reports stay where nsys writes them"


def test_a_training_rank_always_records_the_cpu() -> None:
    plan = ProfilePlan(activities=frozenset({"cuda"}))
    tools = [line for line in lines_of(plan, roles={"actor": plan}) if line.startswith("  tool")]
    assert tools == ["  tool     torch: cuda", "  tool     torch: cpu, cuda"]


def test_steps_of_one_plan() -> None:
    assert "  steps    of these, 1" in lines_of(ProfilePlan(steps=frozenset({1, 4})))
    assert "  steps    of these, none" in lines_of(ProfilePlan(steps=frozenset({4})))


@pytest.mark.parametrize(
    ("layout", "rollout", "rank"),
    [
        ("step", "/t/global_step_<N>/replica_<R>/", "/t/global_step_<N>/actor_rank_<r>/"),
        ("verl_step", "/t/rollout_step_<N>/agent_loop_replica_<R>/", "/t/"),
        ("verl", "/t/agent_loop_rollout_replica_<R>/", "/t/"),
    ],
)
def test_directories(layout: str, rollout: str, rank: str) -> None:
    plan = ProfilePlan(layout=layout)  # type: ignore[arg-type]
    lines = lines_of(plan, roles={"actor": plan}, save_path="/t/")
    assert [line for line in lines if line.startswith("  traces")] == [f"  traces   {rollout}", f"  traces   {rank}"]


def test_without_a_root_each_agent_has_its_own() -> None:
    assert lines_of(ProfilePlan())[-1] == "  traces   the traces' root of each agent/global_step_<N>/replica_<R>/"


@pytest.mark.parametrize(
    ("finish", "agents"),
    [
        (Finish(hook=True), "by the agents of profiled ranks"),
        (Finish(hook=True, hook_all_ranks=True), "by all agents"),
        (Finish(hook=True, hook_ranks=frozenset({8})), "by the agents of global rank 8"),
        (Finish(hook=True, hook_ranks=frozenset({0, 8})), "by the agents of global ranks 0, 8"),
    ],
)
def test_who_runs_the_hook(finish: Finish, agents: str) -> None:
    assert lines_of(ProfilePlan(finish=finish), finish_hook_cmd="send")[-1] == (
        f"  hook     send: once, after the last step, {agents}"
    )
    assert lines_of(ProfilePlan(finish=finish))[-1].startswith(
        "  hook     the command that each agent was started with: once"
    )


def test_the_contract_loads_neither_yaml_nor_omegaconf() -> None:
    code = "import schemas, sys; print(sorted({'yaml', 'omegaconf', 'zmq', 'anyio', 'click'} & set(sys.modules)))"
    shown = python("-c", code)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == "[]\n"
