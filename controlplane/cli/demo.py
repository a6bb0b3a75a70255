"""`rolloutctl demo`: a whole run on one machine. One trainer and four agent processes, 2 replicas of 2 nodes each.

The trainer is profiled as well, as a training rank: `actor.0`, in its own process.

Everything in it is real: the model learns from what the engines sample, the engines sample from what the trainer sent,
the profiler runs, the log is written by the bus and replayed at the end. Only the model is small.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

import click
from msgspec.structs import replace
from rich.console import Console

from controlplane.cli import demo_view as view
from controlplane.cli.reducers import replay_log
from controlplane.cli.tables import command_table
from controlplane.machine.events import Conclude
from controlplane.plane import ControlPlane
from controlplane.record.log import RunLog
from schemas.commands import Checkpoint, ProfilePlan
from schemas.config import BusConfig
from schemas.errors import AgentError, ConfigError, EngineError
from schemas.outcomes import Acted
from schemas.profiler.config import ProfilerConfig
from schemas.reports import Report, SyncReport

if TYPE_CHECKING:
    from controlplane.cli.demo_training import PolicyTrainer
    from workers.engines.tiny.server import TinyClient
    from workers.profilers import TrainingRank

REPLICAS: Final = 2
NODES: Final = 2
AGENTS: Final = REPLICAS * NODES + 1
"""And the trainer's own."""
STEPS: Final = 20
ENGINE_SEED: Final = 1000
"""Of the weights that the engines start with: others than the trainer's, or the proof would prove nothing."""
PATIENCE_S: Final = 120.0
"""How long the slowest start of an agent may take."""


@click.command(short_help="Train a small model on four agents, on this machine, and replay the log.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to make.  [default: a new one]")
@click.option("--steps", type=click.IntRange(6, 1000), default=STEPS, show_default=True, help="Training steps.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the trainer.")
@click.option("--fault", type=click.Choice(["kill-agent"]), help="Kill one agent in the middle of the run.")
@click.option(
    "--profiler",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What to profile: a configuration of verl's or of ours.  [default: two steps, engines and trainer]",
)
def demo(out: Path | None, steps: int, seed: int, fault: Literal["kill-agent"] | None, profiler: Path | None) -> None:
    """Train a small language model by policy gradient. Its rollouts come from two engines of two nodes each, and every
    step its new weights reach them over the bus. Two steps are profiled. At the end the log is replayed.
    """
    if find_spec("torch") is None or find_spec("safetensors") is None:
        raise ConfigError("the demo trains a model and needs torch: pip install 'rolloutctl[torch]'")
    out = (out or Path("rolloutctl-demo") / time.strftime("%Y%m%d-%H%M%S")).absolute()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: give --out a folder that is not there yet")
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    profiled = _profiled(profiler, steps, out / "traces")
    plane = ControlPlane(
        "tcp://127.0.0.1:0",
        log=out / "run.db",
        config=BusConfig(heartbeat_ms=500, agent_timeout_ms=3_000),
        profiler=profiled,
        checkpoints=out / "checkpoints",
    )
    with plane, Nodes(plane.address, out) as nodes, _rank(plane.address, profiled, out / "state") as rank:
        rewards = _train(console, plane, nodes, rank, out, steps, seed, steps // 2 if fault is not None else None)
        nodes.end()
    _tell(console, out, rewards)


def _profiled(file: Path | None, steps: int, traces: Path) -> ProfilerConfig:
    """What is profiled. The engines of the first nodes have all of their replicas' model: ranks 0 and 2."""
    if file is None:
        engines, trainer = ProfilePlan(ranks=frozenset({0, 2})), ProfilePlan()
        return ProfilerConfig(
            steps=(steps // 4, steps // 2 + 1), plan=engines, roles={"actor": trainer}, save_path=str(traces)
        )
    from schemas.profiler.files import read

    config, remarks = read(file)
    for remark in remarks:
        click.echo(f"{file}: {remark}", err=True)
    return replace(config, save_path=str(traces))


def _rank(bus: str, profiler: ProfilerConfig, state: Path) -> "TrainingRank":
    from workers.profilers import TrainingRank

    state.mkdir(exist_ok=True)
    return TrainingRank(bus=bus, role="actor", rank=0, world_size=1, state_dir=state, profiler=profiler)


def _train(
    console: Console,
    plane: ControlPlane,
    nodes: "Nodes",
    rank: "TrainingRank",
    out: Path,
    steps: int,
    seed: int,
    kill_at: int | None,
) -> list[float]:
    """The trainer, as anyone would write it; returns each step's mean reward. kill_at: step that an agent dies in."""
    from controlplane.cli.demo_training import PolicyTrainer
    from workers.engines.tiny.model import TinyConfig

    trainer = PolicyTrainer(TinyConfig(), seed)
    rewards: list[float] = []
    with ExitStack() as stack:
        with console.status(f"starting {REPLICAS * NODES} agents"):
            plane.wait_for_agents(AGENTS, timeout=PATIENCE_S).wait()
            engines = [nodes.client(replica) for replica in range(REPLICAS)]
        bar = stack.enter_context(view.progress(console))
        task = bar.add_task("steps", total=steps, reward=0.0, version=0, note="")
        _sync(plane, trainer, 1, out)
        _prove(trainer, engines, 1)
        for step in range(steps):
            version = step + 1
            with plane.step(step), rank.annotate("step"):
                prompts = trainer.prompts()
                with rank.annotate("rollouts"):
                    completions = _rollouts(engines, prompts, version)
                with rank.annotate("learn"):
                    rewards.append(trainer.learn(prompts, completions))
            bar.update(task, reward=rewards[-1], version=version + 1, note="")
            if step == kill_at:
                bar.update(task, note="agent 1.0 killed")
                nodes.kill(1, 0)
            report = _sync(plane, trainer, version + 1, out)
            if step == kill_at:
                bar.console.print(f"agent 1.0 was killed: {view.sync_words(report)}", highlight=False)
                plane.wait_for_agents(AGENTS, timeout=PATIENCE_S).wait()
                bar.console.print("agent 1.0 is back, ready again with the newest weights", highlight=False)
            else:
                report.raise_for_failures()
            _prove(trainer, engines, version + 1)
            bar.advance(task)
    console.print(f"after each of {steps + 1} syncs, both engines held the trainer's weights, byte for byte")
    return rewards


def _sync(plane: ControlPlane, trainer: "PolicyTrainer", version: int, out: Path) -> SyncReport:
    name = f"version_{version}"
    trainer.save(out / "checkpoints" / name)
    # With one replica of two lost, the fleet is to go on with the other.
    return plane.sync_weights(version, Checkpoint(name), content=True, quorum=1, timeout=60).wait()


def _rollouts(engines: "list[TinyClient]", prompts: list[list[int]], version: int) -> list[list[int]]:
    """Sample a completion for each prompt, half from either engine. Raises EngineError for other weights than asked."""
    from controlplane.cli.demo_training import TOKENS

    share = len(prompts) // len(engines)
    shares = [prompts[at : at + share] for at in range(0, len(prompts), share)]
    with ThreadPoolExecutor(len(engines)) as pool:
        parts = pool.map(lambda engine, part: engine.generate(part, TOKENS), engines, shares)
        completions = list(itertools.chain.from_iterable(parts))
    if used := {version for one in completions for version in one.versions} - {version}:
        raise EngineError(f"the rollouts of weights version {version} came from versions {sorted(used)}")
    return [one.tokens for one in completions]


def _prove(trainer: "PolicyTrainer", engines: "list[TinyClient]", version: int) -> None:
    """Raise EngineError unless every engine holds the trainer's weights, by digest of all their bytes."""
    for engine in engines:
        held = engine.weights()
        if (held.version, held.digest) != (version, trainer.digest):
            raise EngineError(
                f"the engine at {engine.address} holds version {held.version} ({held.digest[:16]}), the trainer's is "
                f"version {version} ({trainer.digest[:16]})"
            )


def _tell(console: Console, out: Path, rewards: list[float]) -> None:
    """What happened, from the log alone; then the log's replay."""
    log = out / "run.db"
    effects = itertools.chain.from_iterable(one.typed_effects() for one in RunLog.read(log) if not one.agent)
    reports = [one.report for one in effects if isinstance(one, Conclude) and isinstance(one.report, Report)]
    reports.sort(key=lambda report: report.seq)
    console.print()
    console.print(command_table(reports))
    console.print(f"{len(reports)} commands: {view.summary(reports)}", highlight=False)
    console.print(f"reward: {rewards[0]:.2f} at the first step, {rewards[-1]:.2f} at the last", highlight=False)
    outcomes = (one.conclusion for report in reports for one in report.outcomes)
    traces = {trace.path for outcome in outcomes if isinstance(outcome, Acted) for trace in outcome.traces}
    places = [out / "traces" / trace for trace in sorted(traces)]
    view.places(console, out, [place for place in places if place.exists()])  # some may have been relocated
    replayed = replay_log(RunLog.read(log))
    console.print(f"\n[green]{replayed}[/green]", highlight=False)


class Nodes:
    """The agent processes of the demo, each as `rolloutctl agent` starts it. One that dies is started again."""

    def __init__(self, bus: str, out: Path) -> None:
        self._bus, self._out = bus, out
        self._running: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        self._sockets = tempfile.TemporaryDirectory(prefix="rolloutctl-")  # ipc paths have at most 107 bytes

    def __enter__(self) -> Self:
        (self._out / "logs").mkdir()
        for replica, node_rank in itertools.product(range(REPLICAS), range(NODES)):
            self._start(replica, node_rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        self._sockets.cleanup()

    def kill(self, replica: int, node_rank: int) -> None:
        """End one with SIGKILL, and start it again."""
        process = self._running[replica, node_rank]
        process.kill()
        process.wait()
        self._start(replica, node_rank)

    def end(self) -> None:
        """Ask all to end in good order, so that the log gets their last decisions. Raises AgentError if one did not."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for (replica, node_rank), process in self._running.items():
            code = process.wait(PATIENCE_S)
            if code != 0:
                raise AgentError(f"agent {replica}.{node_rank} ended with code {code}: {self._log(replica, node_rank)}")

    def client(self, replica: int) -> "TinyClient":
        """Return a client of the replica's engine."""
        from workers.engines.tiny.server import TinyClient

        return TinyClient(self._front(replica))

    def _front(self, replica: int) -> str:
        return f"ipc://{self._sockets.name}/engine-{replica}"

    def _log(self, replica: int, node_rank: int) -> Path:
        return self._out / "logs" / f"agent-{replica}.{node_rank}.log"

    def _start(self, replica: int, node_rank: int) -> None:
        place = ["--replica", replica, "--node-rank", node_rank, "--nnodes", NODES]
        engine = ["--engine", "tiny", "--seed", ENGINE_SEED + replica]
        engine += ["--serve", self._front(replica)] if node_rank == 0 else []
        folders = ["--checkpoints", self._out / "checkpoints", "--traces", self._out / "traces"]
        command = ["agent", "--bus", self._bus, *place, *engine, *folders, "--state-dir", self._out / "state"]
        # One thread for each engine: they share this machine's cores with each other and the trainer.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._log(replica, node_rank).open("ab") as log:
            self._running[replica, node_rank] = subprocess.Popen(
                [sys.executable, "-P", "-m", "controlplane.cli", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
