"""`rolloutctl demo`: a whole run on one machine. One trainer and four agent processes, 2 replicas of 2 nodes each.

The trainer's process is profiled too, as training rank `actor.0`.

Everything in it is real: the model learns from what the engines sample, the engines sample from the weights that the
trainer sent, the profiler runs, and the log that the bus wrote is replayed at the end. Only the model is small.
"""

import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, Self

import click
from msgspec.structs import replace

from controlplane.cli.command_line import FILE, FOLDER, Command
from controlplane.cli.replay_log import replay_log
from controlplane.cli.tables import Screen
from controlplane.plane import ControlPlane
from controlplane.record.log import RunLog
from controlplane.replay.recorded_run import RecordedRun
from schemas.commands import ProfilePlan
from schemas.config import BusConfig
from schemas.errors import AgentError, ConfigError, ExtraMissing
from schemas.formatting import count_outcomes, markup, one_line
from schemas.profiler.config import ProfilerConfig, read_config
from schemas.transport.keys import KEY_FILE_VARIABLE, KEY_VARIABLE, KEYS_VARIABLE

REPLICAS: Final = 2
NODES: Final = 2
"""Nodes of each replica."""
STEPS: Final = 20
ENGINE_SEED: Final = 1000
"""Of the engines' first weights. They differ from the trainer's, or the digests would prove nothing."""
EXIT_TIMEOUT_S: Final = 120.0


@click.command(cls=Command, short_help="Train a small model on four agents, on this machine, and replay the log.")
@click.option("--out", type=FOLDER, help="Folder to make.  [default: a new one]")
@click.option("--steps", type=click.IntRange(6, 1000), default=STEPS, help="Training steps.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the trainer.")
@click.option("--fault", type=click.Choice(["kill-agent"]), help="Kill one agent in the middle of the run.")
@click.option(
    "--profiler",
    type=FILE,
    help="What to profile: a configuration, verl's or ours.  [default: two steps, engines and trainer]",
)
def demo(out: Path | None, steps: int, seed: int, fault: Literal["kill-agent"] | None, profiler: Path | None) -> None:
    """Train a small language model by policy gradient. Its rollouts come from two engines of two nodes each, and at
    every step its new weights reach them over the bus. Two steps are profiled. At the end the log is replayed.
    """
    if find_spec("torch") is None or find_spec("safetensors") is None:
        raise ExtraMissing("the demo trains a model and needs torch", "torch")
    out = (out or Path("rolloutctl-demo") / time.strftime("%Y%m%d-%H%M%S")).absolute()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: give --out a folder that does not exist yet")
    screen = Screen()
    fleet = f"{REPLICAS} engines of {NODES} nodes each, {REPLICAS * NODES} agents and one trainer"
    screen.print(f"{fleet}, in {_shown(out)}", soft_wrap=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # of torch's profiler, which writes to the terminal by itself
    from controlplane.cli.demo_training import Training
    from workers.profilers import TrainingRank

    for variable in (KEYS_VARIABLE, KEY_FILE_VARIABLE, KEY_VARIABLE, "ROLLOUTCTL_AGENT_FAULTS"):
        os.environ.pop(variable, None)  # the demo's bus is on loopback and has no keys, and its day is no game day
    state = out / "state"
    state.mkdir(parents=True)
    config = _profiler(profiler, steps, out / "traces")
    plane = ControlPlane(
        "tcp://127.0.0.1:0",
        log=out / "run.db",
        config=BusConfig(heartbeat_ms=500, agent_timeout_ms=10_000),
        profiler=config,
        checkpoints=out / "checkpoints",
    )
    with (
        plane,
        Nodes(plane.address, out) as nodes,
        TrainingRank(bus=plane.address, role="actor", rank=0, world_size=1, state_dir=state, profiler=config) as rank,
    ):
        agents, checkpoints = REPLICAS * NODES + 1, out / "checkpoints"
        training = Training(plane, rank, nodes.engines, agents=agents, checkpoints=checkpoints, seed=seed)
        rewards = training.run(steps, screen, kill=nodes.kill if fault else None)
        nodes.end()
    _summarize(screen, out, rewards)


def _profiler(file: Path | None, steps: int, traces: Path) -> ProfilerConfig:
    """Return what is profiled. Ranks 0 and 2 are the first nodes of both replicas, where the models are."""
    if file is None:
        return ProfilerConfig(
            steps=(steps // 4, steps // 2 + 1),
            plan=ProfilePlan(ranks=frozenset({0, 2})),
            roles={"actor": ProfilePlan()},
            save_path=str(traces),
        )
    config, warnings = read_config(file)
    for warning in warnings:
        click.echo(one_line(f"{file}: {warning}"), err=True)
    return replace(config, save_path=str(traces))


# --- what is shown at the end -----------------------------------------------------------------------------------------


def _summarize(screen: Screen, out: Path, rewards: list[float]) -> None:
    """Show what happened, from the log alone, and where everything is; then replay the log."""
    log, traces = out / "run.db", out / "traces"
    reports = [report for _, report in sorted(RecordedRun(log).reports.items())]
    conclusions = [outcome.conclusion for report in reports for outcome in report.outcomes]
    screen.print()
    for report in reports:
        screen.print(report if report.failed or report.missing else report.headline, soft_wrap=True, markup=False)
    # After `make demo` the program is in a virtual environment, and not on the PATH.
    program = "rolloutctl" if shutil.which("rolloutctl") else _shown(Path(sys.executable).with_name("rolloutctl"))
    for line in (
        f"{len(reports)} commands: {count_outcomes(conclusions)}",
        f"reward: {rewards[0]:.2f} at the first step, {rewards[-1]:.2f} at the last",
        "\n[bold]Left behind[/bold]",
        *(f"  trace  {_shown(trace)}" for trace in sorted(traces.rglob("*.json*"))),
        f"  log    {_shown(log)}",
        "\n[bold]Look into it[/bold]",
        "  [dim]# every decision, as a line of text[/dim]",
        f"  {program} log show {_shown(log)}",
        "  [dim]# one page for a browser[/dim]",
        f"  {program} report {_shown(log)}",
        "  [dim]# one file for https://ui.perfetto.dev[/dim]",
        f"  {program} timeline {_shown(log)}",
        f"\n[green]{replay_log(RunLog.read(log))}[/green]",
    ):
        screen.print(line, soft_wrap=True)


def _shown(path: Path) -> str:
    """A path as a person here would type it."""
    return markup(shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)))


# --- the agents -------------------------------------------------------------------------------------------------------


class Nodes:
    """The agent processes of the demo, each started as `rolloutctl agent` on a command line."""

    def __init__(self, bus: str, out: Path) -> None:
        self._bus, self._out = bus, out
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._sockets = tempfile.TemporaryDirectory(prefix="rolloutctl-")  # a socket's path has at most 107 bytes
        self.engines = [f"ipc://{self._sockets.name}/engine-{replica}" for replica in range(REPLICAS)]

    def __enter__(self) -> Self:
        (self._out / "logs").mkdir()
        for replica, node_rank in itertools.product(range(REPLICAS), range(NODES)):
            self._start(replica, node_rank)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._sockets.cleanup()

    def kill(self) -> None:
        """End agent 1.0 with SIGKILL, and start it again."""
        process = self._processes["1.0"]
        process.kill()
        process.wait()
        self._start(1, 0)

    def end(self) -> None:
        """Have all agents shut down, so that the log gets their last decisions. Raises AgentError if one fails."""
        for process in self._processes.values():
            process.terminate()
        for agent, process in self._processes.items():
            if (code := process.wait(EXIT_TIMEOUT_S)) != 0:
                raise AgentError(f"agent {agent} ended with code {code}: {self._out}/logs/agent-{agent}.log")

    def _start(self, replica: int, node_rank: int) -> None:
        agent = f"{replica}.{node_rank}"
        node = ["--replica", replica, "--node-rank", node_rank, "--nnodes", NODES]
        engine = ["--engine", "tiny", "--seed", ENGINE_SEED + replica]
        engine += ["--serve", self.engines[replica]] if node_rank == 0 else []
        folders = ["--checkpoints", self._out / "checkpoints", "--traces", self._out / "traces"]
        command = ["agent", "--bus", self._bus, *node, *engine, *folders, "--state-dir", self._out / "state"]
        ours = {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUTCTL_AGENT_")}
        with (self._out / "logs" / f"agent-{agent}.log").open("ab") as log:
            self._processes[agent] = subprocess.Popen(
                [sys.executable, "-P", "-m", "controlplane.cli", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**ours, "OMP_NUM_THREADS": "1"},  # the engines share the trainer's cores
            )
