"""`rolloutctl profile explain`: what a configuration will do."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from controlplane.cli.__main__ import cli
from controlplane.cli.explain import notes
from schemas.commands import ProfilePlan
from schemas.profiler.config import ProfilerConfig, read_verl_config
from tests.running import python, typed

CONFIGS = Path(__file__).parents[1] / "configs"
OFF = ProfilePlan(enabled=False)


def explain(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["profile", "explain", *map(str, arguments)], catch_exceptions=False)


def notes_of(plan: ProfilePlan, **config: object) -> list[str]:
    """Return the notes on rollouts that are profiled in step 1, without the line on sessions."""
    return list(notes(ProfilerConfig(plan=plan, steps=(1,), **config)))[1:]  # type: ignore[arg-type]


def test_a_file_of_ours() -> None:
    shown = explain(CONFIGS / "profiler.yaml")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert ProfilerConfig.from_yaml(shown.stdout) == ProfilerConfig.from_yaml(CONFIGS / "profiler.yaml")
    assert shown.stdout.startswith("plan:\n  ranks: [0, 8]\n  window: {start: 0, end: 4}\n")
    assert [line for line in shown.stdout.splitlines() if line.startswith("#")] == [
        "# sessions: 5, at steps 1, 5, 6, 7, 8",
        "# rollout: traces in /data/profile/global_step_<N>/replica_<R>/",
        "# actor: traces in /data/profile/global_step_<N>/actor_rank_<R>/",
        "# critic: traces in /data/profile/global_step_<N>/critic_rank_<R>/",
    ]


def test_a_file_of_verl_is_printed_as_our_own_yaml_that_means_the_same() -> None:
    shown = explain(CONFIGS / "verl_all_on.yaml", "--verl")
    assert ProfilerConfig.from_yaml(shown.stdout) == read_verl_config(CONFIGS / "verl_all_on.yaml").config
    assert [line.partition(":")[0] for line in shown.stderr.splitlines()] == ["warning"]


def test_a_file_of_verl_with_ranks_as_it_had_them_then() -> None:
    shown = explain(CONFIGS / "verl_pull_5025.yaml", "--verl", "--ranks", "replica", "--layout", "verl_step")
    assert "\n  replicas: [0, 1, 2]\n" in shown.stdout
    assert shown.stdout.endswith("traces in ./outputs/profile/rollout_step_<N>/agent_loop_replica_<R>/\n")


def test_a_wrong_value_ends_with_2_and_one_line(tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text("plan: {window: {start: 4, end: 4}}")
    shown = typed("profile", "explain", file)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == (
        "rolloutctl: plan.window is {'start': 4, 'end': 4}: window [4, 4) is empty: end must be larger than start\n"
    )


@pytest.mark.parametrize("options", [("--ranks", "replica"), ("--layout", "verl")])
def test_options_for_verls_files_need_verl(options: tuple[str, ...]) -> None:
    shown = explain(CONFIGS / "profiler.yaml", *options)
    assert shown.exit_code == 2
    assert "--ranks and --layout need --verl; our own YAML has keys for both." in shown.stderr


# --- notes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (ProfilerConfig(), "sessions: none"),
        (ProfilerConfig(steps=(1, 3), plan=OFF), "sessions: none"),
        (ProfilerConfig(steps=(1, 2, 3, 7)), "sessions: 4, at steps 1, 2, 3, 7"),
        (ProfilerConfig(steps=(1, 2, 3, 7), continuous=True), "sessions: 2, at steps 1, 7"),
    ],
)
def test_sessions(config: ProfilerConfig, line: str) -> None:
    assert next(notes(config)) == line


def test_what_is_not_recorded() -> None:
    assert notes_of(ProfilePlan(tool="nsys"), roles={"actor": ProfilePlan(tool="nsys"), "ref": OFF}) == [
        "rollout: not recorded, since no engine runs nsys: agents answer skipped(tool_unsupported)",
        "actor: nsys writes its own report, which is not moved",
    ]


@pytest.mark.parametrize(
    ("layout", "rollout", "rank"),
    [
        ("step", "/t/global_step_<N>/replica_<R>/", "/t/global_step_<N>/actor_rank_<R>/"),
        ("verl_step", "/t/rollout_step_<N>/agent_loop_replica_<R>/", "/t/"),
        ("verl", "/t/agent_loop_rollout_replica_<R>/", "/t/"),
    ],
)
def test_directories(layout: str, rollout: str, rank: str) -> None:
    plan = ProfilePlan(layout=layout)  # type: ignore[arg-type]
    traces = [f"rollout: traces in {rollout}", f"actor: traces in {rank}"]
    assert notes_of(plan, roles={"actor": plan}, save_path="/t/") == traces


def test_without_a_root_each_agent_has_its_own() -> None:
    directory = "the traces' root of each agent/global_step_<N>/replica_<R>/"
    assert notes_of(ProfilePlan()) == [f"rollout: traces in {directory}"]


def test_the_contract_loads_neither_yaml_nor_omegaconf() -> None:
    code = "import schemas, sys; print(sorted({'yaml', 'omegaconf', 'zmq', 'anyio', 'click'} & set(sys.modules)))"
    shown = python("-c", code)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == "[]\n"
